"""A folder that PFLlib's `dataset/generate_*.py` made: `train/K.npz` and `test/K.npz` of every client K, each with its `x` and `y`.

The files hold pickled dictionaries, which are read without executing anything. Images come channels first, as PyTorch has them; a text is a pair of
its tokens and their number. `--partition natural`, the default, deals them as PFLlib dealt them.
"""

from __future__ import annotations

import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets import SMALL
from dpfl_mpi.datasets._files import BROKEN, TOTAL, broken, check, entries
from dpfl_mpi.datasets._pickled import unpickled
from dpfl_mpi.errors import UserError

PAPER = SMALL | {"partition": "natural", "min_samples": 3}
DATA = "data/pfllib.h5"
OWN_DATA = True
SOURCE = "PFLlib's folder of a data set, such as dataset/MNIST, or an archive of it, with {train,test}/K.npz"
NO_DOWNLOAD = (
    "PFLlib makes these files: run its dataset/generate_MNIST.py, say, and name dataset/MNIST with --source PATH"
)
A_FILE = 4 * 2**30  # bytes of one client


def read(source: Path) -> Arrays:
    """Return the samples of all clients, client K with the name "K".

    Raises:
        UserError: a file is damaged or holds anything but data, or the clients' samples do not fit together.
    """
    found: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {"train": {}, "test": {}}
    for path, get in entries(source, A_FILE):
        name = re.fullmatch(r"(\d+)\.npz", path.name)
        if name and len(path.parts) > 1 and path.parts[-2] in found:
            where = f"{source}: {'/'.join(path.parts[-2:])}"
            found[path.parts[-2]][int(name[1])] = client(where, get())
    if not found["train"] or found["train"].keys() != found["test"].keys():
        odd = sorted(found["train"].keys() ^ found["test"].keys())
        what = f"client {odd[0]} has no file in one of train and test" if odd else "there is no train/0.npz"
        raise UserError(f"{source} is no folder of PFLlib's: {what}")
    parts = [(k, part, *found[part][k]) for part in found for k in sorted(found[part])]
    longest = max(x.shape[1] if x.ndim == 2 else 0 for _, _, x, _ in parts)
    for k, part, x, _ in parts:
        if x.ndim != parts[0][2].ndim or x.shape[2:] != parts[0][2].shape[2:] or x.dtype != parts[0][2].dtype:
            raise UserError(
                f"{source}: {part}/{k}.npz has samples of {x.dtype} {x.shape[1:]}, {parts[0][0]}.npz of {parts[0][2].shape[1:]}"
            )
    return arrays_of(
        np.concatenate([filled(x, longest) for _, _, x, _ in parts]),
        np.concatenate([y for _, _, _, y in parts]),
        np.concatenate([np.full(len(y), k) for k, _, _, y in parts]),
        np.concatenate([np.full(len(y), part == "test") for _, part, _, y in parts]),
        str(source), f"PFLlib's {source.name}, {len(found['train'])} clients",
    )  # fmt: skip


def filled(x: np.ndarray, longest: int) -> np.ndarray:
    """Return texts filled up with token 0 to the longest one of all clients; anything else as it is."""
    return np.pad(x, ((0, 0), (0, longest - x.shape[1]))) if x.dtype.kind in "iu" and x.ndim == 2 else x


def client(where: str, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and labels of one file; images `[M, H, W, C]`."""
    held = dictionary(where, data)
    if not (isinstance(held, dict) and {"x", "y"} <= set(held)):
        raise UserError(f"{where} holds no dictionary with x and y")
    x, y = samples(where, held["x"]), np.asarray(held["y"])
    if len(x) != len(y) or y.ndim != 1:
        raise UserError(f"{where} holds {len(x)} samples and labels of {y.shape}")
    return np.moveaxis(x, 1, -1) if x.ndim == 4 else x, y


def dictionary(where: str, data: bytes) -> Any:
    """Return what `np.savez(data=...)` wrote: the pickle inside data.npy, behind its header."""
    try:
        total = count = 0
        with zipfile.ZipFile(BytesIO(data)) as archive:
            for info in archive.infolist():
                count, total = check(Path(where), info.filename, info.file_size, count, total)
            if archive.namelist() != ["data.npy"]:
                raise UserError(f"{where} holds {', '.join(archive.namelist()) or 'nothing'}; PFLlib's files hold data")
            with archive.open("data.npy") as file:
                content = BytesIO(file.read(min(total, TOTAL)))
        version = np.lib.format.read_magic(content)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(content)
    except (*BROKEN, ValueError):
        raise broken(Path(where)) from None
    if shape != () or dtype.kind != "O":
        raise UserError(f"{where} holds an array of {dtype} {shape}; PFLlib's files hold a pickled dictionary")
    value = unpickled(content, where)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def samples(where: str, x: Any) -> np.ndarray:
    """Return samples as an array; of texts, pairs of tokens and their number, the tokens `[M, L]`, filled up with 0."""
    if isinstance(x, list) and x and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in x):
        texts = [np.asarray(tokens) for tokens, _ in x]
        if all(t.ndim == 1 and t.dtype.kind in "iu" for t in texts):
            return np.stack([np.pad(t, (0, max(map(len, texts)) - len(t))) for t in texts])
    try:
        out = np.asarray(x)
    except ValueError:
        out = np.empty(0, object)
    if out.dtype.kind not in "iufb" or out.ndim < 2:
        raise UserError(f"{where} holds samples that are neither numbers of one shape nor texts of tokens")
    return out
