"""A folder that PFLlib's `dataset/generate_*.py` made: `train/K.npz` and `test/K.npz` of every client K, each with its `x` and `y`."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._files import TOTAL, check_one, entries, npy, warn_of_unread
from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import refused_as

PAPER = {"partition": "natural", "min_samples": 3}
OWN_DATA = True
SOURCE = "PFLlib's folder of a data set, such as dataset/MNIST, or an archive of it, with {train,test}/K.npz"
NO_DOWNLOAD = "PFLlib makes these: run its dataset/generate_MNIST.py, say, and name dataset/MNIST with --source PATH"
A_FILE = 4 * 2**30  # bytes of one client


def read(source: Path) -> Arrays:
    """Return the samples of all clients, client K with the name "K"."""
    found: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
    folders, unread = set(), Counter[str]()
    for path, get in entries(source, A_FILE):
        if name := re.fullmatch(r"(?:.*/)?((train|test)/(\d+)\.npz)", str(path)):
            folders.add(path.parents[1])
            found[name[2], int(name[3])] = client(f"{source}: {name[1]}", get())
        elif path.suffix == ".npz":
            unread[str(path.parent)] += 1
    warn_of_unread(source, unread, "train/K.npz, test/K.npz")
    check_one(source, folders)
    clients = {part: {k for p, k in found if p == part} for part in ("train", "test")}
    odd = sorted(clients["train"] ^ clients["test"])
    if odd or not found:
        what = f"client {odd[0]} has no file in one of train and test" if odd else "there is no train/0.npz"
        raise UserError(f"{source} is no folder of PFLlib's: {what}")
    parts = sorted(found, key=lambda place: (place[0] == "test", place[1]))
    first = found[parts[0]][0]
    texts = first.ndim == 2 and first.dtype.kind in "iu"  # padded to the longest
    for (part, k), (x, _) in found.items():
        if (x.ndim, x.dtype) != (first.ndim, first.dtype) or (x.shape[1:] != first.shape[1:] and not texts):
            other, shape = parts[0][1], first.shape[1:]
            raise UserError(f"{source}: {part}/{k}.npz has samples of {x.dtype} {x.shape[1:]}, {other}.npz of {shape}")
    longest = max(x.shape[1] for x, _ in found.values())
    sizes = [len(found[place][1]) for place in parts]
    return arrays_of(
        np.concatenate([padded(found[place][0], longest) if texts else found[place][0] for place in parts]),
        np.concatenate([found[place][1] for place in parts]),
        np.repeat([k for _, k in parts], sizes),
        np.repeat([part == "test" for part, _ in parts], sizes),
        str(source), f"PFLlib's {source.name}, {len(clients['train'])} clients",
    )  # fmt: skip


def client(where: str, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and labels of one file, which `np.savez(data=...)` wrote, channels first; images `[M, H, W, C]`."""
    members = {path.name: get() for path, get in entries(Path(where), TOTAL, data)}
    if set(members) != {"data.npy"}:
        raise UserError(f"{where} holds {', '.join(members) or 'nothing'}; PFLlib's files hold data")
    held = npy(where, members["data.npy"], objects=True)
    held = held.item() if isinstance(held, np.ndarray) and held.size == 1 else held
    if not (isinstance(held, dict) and {"x", "y"} <= set(held)):
        raise UserError(f"{where} holds no dictionary with x and y")
    x = samples(where, held["x"])
    with refused_as(f"{where} holds labels that are no list of numbers"):
        y = np.asarray(held["y"])
    if len(x) != y.size or y.ndim != 1:
        raise UserError(f"{where} holds {len(x)} samples and labels of {y.shape}")
    return np.moveaxis(x, 1, -1) if x.ndim == 4 else x, y


def samples(where: str, x: Any) -> np.ndarray:
    """Return samples as an array; of texts, pairs of tokens and their number, the tokens `[M, L]`, filled up with 0."""
    with refused_as(f"{where} holds samples that are neither numbers of one shape nor texts of tokens"):
        x = x.tolist() if isinstance(x, np.ndarray) and x.dtype.hasobject else x
        if isinstance(x, list) and x and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in x):
            texts = [np.asarray(tokens) for tokens, _ in x]
            if all(t.ndim == 1 and t.dtype.kind in "iu" for t in texts):
                return np.concatenate([padded(t[None], max(map(len, texts))) for t in texts])
        out = np.asarray(x)
        if out.dtype.kind not in "iufb" or out.ndim < 2:
            raise ValueError
        return out


def padded(x: np.ndarray, longest: int) -> np.ndarray:
    """Return texts `[M, L]` filled up with token 0."""
    return np.pad(x, ((0, 0), (0, longest - x.shape[1])))
