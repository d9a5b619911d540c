"""`--spill`: memory in files without a name, which the system writes out and reads back where a node has too little."""

import math
import os
import re
import tempfile
from pathlib import Path

import numpy as np

from dpfl_mpi.storage.files import explained


def mapped(folder: str, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Return zeros in a file of this folder; the file has no name there, and goes with the array, or with the process.

    Its room is taken now: where it lacks this is a `UserError`, while a page that the disk cannot take later would end the process (SIGBUS).
    """
    if (size := math.prod(shape) * np.dtype(dtype).itemsize) == 0:  # nothing can be mapped
        return np.zeros(shape, dtype)
    room = f"{size / 2**20:.1f} MiB of models cannot be kept there"
    with explained(f"--spill is {folder}; {room}"), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return np.asarray(np.memmap(file, dtype, "r+", shape=shape))


def no_disk(folder: str) -> bool:
    """Return whether the files of a folder lie in memory, as the system tells of its mounts: then nothing is gained."""
    try:
        device, mounts = os.stat(folder).st_dev, Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return re.search(rf"^\d+ \d+ {number} .* - (tmpfs|ramfs) ", mounts, re.MULTILINE) is not None
