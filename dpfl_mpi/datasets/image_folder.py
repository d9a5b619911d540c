"""Anyone's own images: `{train,test}/CLASS/*.{png,jpg,...}`, all of one size, in a folder or an archive."""

from pathlib import Path

from dpfl_mpi.data.own import moments
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._files import image_splits

OWN_DATA = True
SOURCE = "a folder {train,test}/CLASS/*.png, or a tar or zip archive of one"
NO_DOWNLOAD = "these are your own images: name them with --source PATH"


def read(source: Path) -> Arrays:
    """Return the images of a folder or archive, classes in alphabetical order, normalised by their own mean and deviation per channel."""
    splits, names = image_splits(source, ("train", "test"))
    return Arrays(*splits["train"], *splits["test"], names, *moments(splits["train"][0]))
