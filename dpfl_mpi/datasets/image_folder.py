"""Images of one's own: `{train,test}/CLASS/*` or `CLIENT/CLASS/*`, in a folder or an archive."""

from dataclasses import dataclass
from pathlib import Path

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._folders import LAYOUTS
from dpfl_mpi.datasets._images import placed
from dpfl_mpi.settings import option

OWN_DATA = True
SOURCE = f"a folder {LAYOUTS}, as Tiny-ImageNet or PACS, or a tar or zip archive of one"
NO_DOWNLOAD = "these are your own images: name them with --source PATH"


@dataclass(frozen=True)
class Options:
    size: int = option(
        0, "scale images to SIZE x SIZE pixels; 0: all are of one size", low=0, high=8192
    )
    clients_per_folder: int = option(
        1, "clients that the images of each folder CLIENT are dealt to", low=1
    )


def read(source: Path, size: int = 0, clients_per_folder: int = 1) -> Arrays:
    """Return the images, classes in alphabetical order, normalised by their own moments."""
    x, found = placed(source, side=size)
    columns = found.dealt(clients_per_folder)
    return arrays_of(x, found.label, test=found.test, where=str(source), **columns)  # type: ignore[arg-type]
