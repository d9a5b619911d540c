"""CINIC-10 (Darlow et al. 2018): CIFAR-10's classes from CIFAR-10 and ImageNet.

90,000 images of 32x32 each to train, validate and test.
"""

from pathlib import Path

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._images import published
from dpfl_mpi.datasets.cifar10 import AUTHORS_CODE as CIFAR10_CODE
from dpfl_mpi.datasets.cifar10 import CLASSES
from dpfl_mpi.datasets.cifar10 import PAPER as CIFAR10

TITLE = "CINIC-10"
PAPER = CIFAR10 | {"clients": 200, "rounds": 48}
AUTHORS_CODE = CIFAR10_CODE | {"rounds": 47, "batch_size": 16}
SOURCE = "CINIC-10.tar.gz, or a folder {train,valid,test}/CLASS/*.png"
URL = "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz"
DOWNLOAD = (URL, "md5:6ee4d0c996905fe93221de577967a372", 687_544_992)
# its publisher's
MEAN, STD = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)


def read(source: Path) -> Arrays:
    """Return CINIC-10, train and valid joined to 180,000 images (the paper, section E.4)."""
    return published(source, CLASSES, MEAN, STD, "train", "valid", "test")
