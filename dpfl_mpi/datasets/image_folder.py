"""Images of one's own: `{train,test}/CLASS/*`, all of one size, in a folder or an archive."""

from pathlib import Path

from dpfl_mpi.data.own import moments
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._images import image_splits

OWN_DATA = True
SOURCE = "a folder {train,test}/CLASS/*.png, or a tar or zip archive of one"
NO_DOWNLOAD = "these are your own images: name them with --source PATH"


def read(source: Path) -> Arrays:
    """Return the images, classes in alphabetical order, normalised by their own moments."""
    splits, names = image_splits(source, ("train", "test"))
    mean, std = moments(splits["train"][0])
    return Arrays(*splits["train"], *splits["test"], names, mean, std)
