"""Images of one's own: `{train,test}/CLASS/*` or `CLIENT/CLASS/*`, in a folder or an archive."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import is_hidden
from dpfl_mpi.datasets._folders import LAYOUTS, LISTS, class_list, layout
from dpfl_mpi.datasets._images import SUFFIXES, decoded, stacked
from dpfl_mpi.settings import option

OWN_DATA = True
SOURCE = f"a folder {LAYOUTS}, as Tiny-ImageNet or PACS, or a tar or zip archive of one"
NO_DOWNLOAD = "these are your own images: name them with --source PATH"


@dataclass(frozen=True)
class Options:
    size: int = option(0, "scale images to SIZE x SIZE pixels; 0: all are of one size", low=0)
    clients_per_folder: int = option(
        1, "clients that the images of each folder CLIENT are dealt to", low=1
    )


def read(source: Path, size: int = 0, clients_per_folder: int = 1) -> Arrays:
    """Return the images, classes in alphabetical order, normalised by their own moments."""
    listed: dict[PurePosixPath, str] = {}
    others = []

    def is_read(path: PurePosixPath, read: Callable[[], bytes]) -> bool:
        if is_hidden(path):
            return False
        if path.suffix.lower() in SUFFIXES:
            return True
        if path.name.endswith(LISTS):
            listed.update(class_list(read(), path))
        else:
            others.append(path)
        return False

    images = decoded(source, is_read, side=size)
    found = layout(source, images, listed, others)
    columns = found.dealt(clients_per_folder)
    channels = max(images[path].shape[2] for path in found.files)
    x = stacked([images.pop(path) for path in found.files], channels)
    return arrays_of(x, found.label, test=found.test, where=str(source), **columns)  # type: ignore[arg-type]
