"""A folder of PFLlib's `dataset/generate_*.py`: `{train,test}/K.npz` of every client K."""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from dpfl_mpi.data.own import arrays_of, fixed_fifth
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import check_one, entries, first_five, warn_of_unread
from dpfl_mpi.datasets._pickles import read_npy
from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.storage.foreign import refused_as

PAPER = {"partition": "natural", "min_samples": 3}
OWN_DATA = True
SOURCE = "PFLlib's folder of a data set, or an archive of it, with {train,test}/K.npz"
NO_DOWNLOAD = (
    "run PFLlib's dataset/generate_MNIST.py, say, and name dataset/MNIST with --source PATH"
)


def read(source: Path) -> Arrays:
    """Return the samples of all clients; client K is named "K"."""
    found: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
    folders, unread = set(), Counter[str]()
    for path, get in entries(source):
        if name := re.fullmatch(r"(?:.*/)?((train|test)/(\d+)\.npz)", str(path)):
            folders.add(path.parents[1])
            found[name[2], int(name[3])] = read_client(f"{source}: {name[1]}", get())
        elif path.suffix == ".npz":
            unread[str(path.parent)] += 1
    warn_of_unread(source, unread, "train/K.npz, test/K.npz")
    check_one(source, folders)
    train, test = ({k for part, k in found if part == name} for name in ("train", "test"))
    if not train:
        raise UserError(f"{source} is not a folder of PFLlib's: there is no train/K.npz")
    warn_of_gaps(source, train, test)
    found = {place: data for place, data in found.items() if place[1] in train}
    places = sorted(found, key=lambda place: (place[0] == "test", place[1]))
    kinds = {place: f"{x.dtype} {x.shape[1:]}" for place, (x, _) in found.items()}
    for (part, k), kind in kinds.items():
        if kind != kinds[places[0]]:
            other = f"{places[0][0]}/{places[0][1]}.npz of {kinds[places[0]]}"
            raise UserError(f"{source}: {part}/{k}.npz has samples of {kind}, {other}")
    samples, labels = zip(*(found[place] for place in places), strict=True)
    sizes = [len(y) for y in labels]
    client = np.repeat([k for _, k in places], sizes)
    is_test = np.repeat([part == "test" for part, _ in places], sizes)
    note = f"PFLlib's {source.name}, {len(train)} clients"
    x, y = np.concatenate(samples), np.concatenate(labels)
    is_test |= fixed_fifth(y, client) & np.isin(client, sorted(train - test))
    return arrays_of(x, y, client, is_test, str(source), note)


def warn_of_gaps(source: Path, train: set[int], test: set[int]) -> None:
    """Warn of clients whose number changes, or of which a file is missing."""
    lacks = {
        "they are left out": ("train", test - train),
        "a fifth of their samples is their test part": ("test", train - test),
    }
    for so, (part, clients) in lacks.items():
        if clients:
            names = first_five(list(map(str, sorted(clients))))
            complain(f"warning: {source}: no {part}/K.npz of the clients {names}: {so}")
    if gaps := sorted({*range(max(train, default=0))} - train):
        names = first_five(list(map(str, gaps)))
        renumbered = f"the {len(train)} clients are numbered from 0, and named by their files"
        complain(f"warning: {source}: no client {names}: {renumbered}")


def read_client(where: str, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and labels of one file of `np.savez(data=...)`; images with channels last."""
    members = {path.name: get() for path, get in entries(Path(where), data)}
    if set(members) != {"data.npy"}:
        names = ", ".join(members) or "nothing"
        raise UserError(f"{where} holds {names}; PFLlib's files hold one array named data")
    content = read_npy(where, members["data.npy"], objects=True)
    if isinstance(content, np.ndarray) and content.size == 1:
        content = content.item()
    if not (isinstance(content, dict) and {"x", "y"} <= set(content)):
        raise UserError(f"{where} holds no dictionary with x and y")
    with refused_as(f"{where} holds samples or labels that are not arrays of numbers"):
        x, y = np.asarray(content["x"]), np.asarray(content["y"])
        if x.dtype.kind not in "iufb" or x.ndim == 0:
            raise ValueError
    if len(x) != y.size or y.ndim != 1:
        raise UserError(f"{where} holds {len(x)} samples and labels of {y.shape}")
    return np.moveaxis(x, 1, -1) if x.ndim == 4 else x, y
