"""iWildCam, animals photographed by camera traps, a client per camera: a data set of one's own.

    python -m dpfl_mpi.prepare reproduction/iwildcam.py --source iWildCam --out data/iwildcam.h5

iWildCam is `dataset/iWildCam` of github.com/TsingZ0/HtFL-OnDevice, in PFLlib's layout, images of
64x64 pixels, which become 32x32. Cameras of which a file is missing are left out (118 of the 194
have both below 4 MB), and test images of classes that no camera has to train on.
"""

from pathlib import Path

import numpy as np

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets.pfllib import read_client
from dpfl_mpi.errors import UserError

PAPER = {"partition": "natural", "min_samples": 3}
OWN_DATA = True
SOURCE = "PFLlib's folder iWildCam, with {train,test}/K.npz"


def read(source: Path) -> Arrays:
    """Return the images of all cameras; camera K is named "K"."""
    parts, cameras = ("train", "test"), []
    for file in source.glob("train/*.npz"):
        if (source / "test" / file.name).is_file():
            cameras.append(int(file.stem))
    if not cameras:
        raise UserError(f"{source} has no train/K.npz with a test/K.npz; it must be {SOURCE}")
    x, y, camera, test = [], [], [], []
    for part in parts:
        for k in sorted(cameras):
            file = source / part / f"{k}.npz"
            images, labels = read_client(str(file), file.read_bytes())
            x.append(halved(images))
            y.append(labels)
            camera.append(np.full(len(labels), k))
            test.append(np.full(len(labels), part == "test"))
    columns = [np.concatenate(arrays) for arrays in (x, y, camera, test)]
    known = np.isin(columns[1], columns[1][~columns[3]])
    return arrays_of(*(c[known] for c in columns), str(source), f"{len(cameras)} cameras")


def halved(images: np.ndarray) -> np.ndarray:
    """Return images of numbers from 0 to 1 at half their width and height, uint8 `[..., 3]`."""
    n, height, width, colours = images.shape
    squares = images.reshape(n, height // 2, 2, width // 2, 2, colours)
    return np.rint(255 * squares.mean((2, 4))).astype(np.uint8)
