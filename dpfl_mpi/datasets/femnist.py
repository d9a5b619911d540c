"""FEMNIST (LEAF; Caldas et al. 2018): handwritten characters of 28x28, grey; each writer is a client.

`prepare` reads LEAF's json shards, or NIST's own folders `by_class`. Two partitions are the paper's, see `partition.natural` (its text:
each writer is a client) and `partition.fedrep` (where its numbers most likely come from; wants ten classes: `prepare femnist --classes a-j`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._files import decode, entries, hidden
from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import option

PAPER = {
    "partition": "natural", "classes_per_client": 3, "dirichlet_alpha": 0.5, "min_per_class": 10, "min_samples": 50, "clients": 100,
    "model": "cnn", "rounds": 48, "tau_init": 4, "tau_train": 2, "budget": "0.1N",
    "lr": 0.001, "weight_decay": 1e-3, "lr_decay": 1.0, "batch_size": 10, "augment": False,
}  # fmt: skip
AUTHORS_CODE = {"partition": "fedrep", "tau_init": 6, "rounds": 47, "weight_decay": 1e-4, "lr_decay": 0.998}
DATA = "data/femnist.h5"
WEIGHTS = "train"
SOURCE = "LEAF's folder data/femnist/data, or an archive of it, with {train,test}/*.json; or NIST's by_class, folder or archive"
NO_DOWNLOAD = (
    "FEMNIST has no single archive: in a checkout of LEAF (TalwalkarLab/leaf) run data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, "
    "then name its folder data/femnist/data with --source PATH"
)
SYMBOLS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # LEAF's 62 labels in order
CHOICES = {"digits": range(10), "letters": range(10, 62), "all": range(62), "a-j": range(36, 46)}
SHARD = 4 * 2**30  # bytes of one json file; LEAF's, of 100 writers, have 0.2 GB
A_CLASS = 4000  # images of a class that the fedrep construction takes from NIST


@dataclass(frozen=True)
class Options:
    """What `prepare` may be asked for."""

    classes: Literal["all", "digits", "letters", "a-j"] = option(
        "all", "62 classes, 10 digits, 52 letters, or a-j in lower case"
    )
    min_samples: int = option(0, "leave out writers with fewer images")


def read(source: Path, classes: str = "all", min_samples: int = 0) -> Arrays:
    """Return FEMNIST from LEAF's json shards (each writer is a client; LEAF's own train and test split) or from NIST's by_class.

    LEAF lists an image of nearly each writer twice; the second one is dropped.

    Raises:
        UserError: a shard is damaged, a writer's data are missing, an image or label is out of range; the sentence names the writer.
    """
    from tqdm import tqdm

    writers: dict[str, dict[str, list[tuple[np.ndarray, np.ndarray]]]] = {}
    seen = set()
    with tqdm(desc=f"reading {source.name}", unit="writer", disable=None) as bar:
        for path, get in entries(source, SHARD):
            if by_class(path):
                return from_nist(source, classes, min_samples)
            if path.suffix != ".json" or hidden(path) or len(path.parts) < 2 or path.parts[-2] not in ("train", "test"):
                continue
            part = path.parts[-2]
            seen.add(part)
            for user, images, labels in shard(f"{source}: {path}", get()):
                writers.setdefault(user, {"train": [], "test": []})[part].append((images, labels))
                bar.update()
    for part in ("train", "test"):
        if part not in seen:
            raise UserError(f"{source} holds no {part}/*.json. {NO_DOWNLOAD}")
    return collect(source, writers, classes, min_samples)


def shard(where: str, text: bytes) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return (writer, images uint8 [n, 28, 28, 1], labels int64 [n]) for each writer of one json file."""
    try:
        data = json.loads(text)
        users, counts, user_data = data["users"], data["num_samples"], data["user_data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{where} is truncated or not a LEAF shard (users, num_samples, user_data)") from None
    if not (isinstance(users, list) and isinstance(counts, list) and isinstance(user_data, dict)):
        raise UserError(f"{where} is not a LEAF shard: users and num_samples must be lists, user_data an object")
    if len(users) != len(counts) or set(map(str, users)) != set(user_data):
        odd = sorted(set(map(str, users)) ^ set(user_data))
        what = f"{odd[0]} is in one of users and user_data only" if odd else "users and num_samples differ in length"
        raise UserError(f"{where} does not fit together: {what}")
    out = []
    for user, count in zip(users, counts, strict=True):
        # popped: a shard's floats take gigabytes
        images, labels = samples(f"{where}, writer {user}", user_data.pop(str(user)))
        if len(labels) != count:
            raise UserError(f"{where}, writer {user} has {len(labels)} images, num_samples says {count}")
        out.append((str(user), images, labels))
    return out


def samples(where: str, data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a writer's images uint8 `[n, 28, 28, 1]` (LEAF's floats are images / 255) and labels `[n]`."""
    try:
        x, y = data["x"], data["y"]
        labels = np.array(y, np.float64).reshape(len(y))
        odd = next((len(image) for image in x if len(image) != 28 * 28), None)
        if odd is not None:
            raise UserError(f"{where} has an image of {odd} values; allowed are 784 (28x28)")
        pixels = np.array(x, np.float32).reshape(-1, 28, 28, 1)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where} has no lists of numbers x and y") from None
    if len(pixels) != len(labels):
        raise UserError(f"{where} has {len(pixels)} images but {len(labels)} labels")
    if len(labels) and not (np.isin(labels, range(62)).all()):
        raise UserError(f"{where} has the label {labels[~np.isin(labels, range(62))][0]:g}; allowed are 0 to 61")
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise UserError(f"{where} has a pixel outside 0 to 1")
    return np.rint(pixels * 255).astype(np.uint8), labels.astype(np.int64)


def collect(source: Path, writers: dict[str, dict[str, Any]], classes: str, min_samples: int) -> Arrays:
    """Return the writers' samples one after the other: second copies, other classes and small writers left out."""
    chosen = CHOICES[classes]
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, int]]] = {"train": [], "test": []}
    names: list[str] = []
    for user in sorted(writers):
        copies: set[tuple[bytes, int]] = set()
        kept = {}
        for part in ("train", "test"):
            pairs = writers[user][part]
            images = np.concatenate([np.empty((0, 28, 28, 1), np.uint8), *(p[0] for p in pairs)])
            labels = np.concatenate([np.empty(0, np.int64), *(p[1] for p in pairs)])
            first = np.zeros(len(labels), np.bool_)
            for i, key in enumerate(zip(map(np.ndarray.tobytes, images), labels.tolist(), strict=True)):
                first[i] = key not in copies
                copies.add(key)
            mine = first & np.isin(labels, chosen)
            kept[part] = images[mine], labels[mine] - chosen[0]
        if sum(len(labels) for _, labels in kept.values()) >= max(1, min_samples):
            for part, (images, labels) in kept.items():
                parts[part].append((images, labels, len(names)))
            names.append(user)
    if not names:
        raise UserError(
            f"{source}: no writer has {max(1, min_samples)} images of the classes {classes}; a smaller --min_samples?"
        )
    out = {
        part: [
            np.concatenate([p[0] for p in pieces]),
            np.concatenate([p[1] for p in pieces]),
            np.repeat([p[2] for p in pieces], [len(p[1]) for p in pieces]),
        ]
        for part, pieces in parts.items()
    }
    for part, (_, labels, _) in out.items():
        if len(labels) == 0:
            raise UserError(f"{source}: {part} holds no image of the classes {classes}")
    train, test = out["train"], out["test"]
    return Arrays(
        train[0], train[1], test[0], test[1], tuple(SYMBOLS[c] for c in chosen), (0.0,), (1.0,),
        train[2], test[2], tuple(names), f"LEAF's FEMNIST, {len(names)} writers, classes {classes}",
    )  # fmt: skip


def by_class(path: PurePosixPath) -> int | None:
    """Return the character of an image in NIST's by_class/61/train_61/*.png (its hexadecimal code), None for any other file."""
    found = re.fullmatch(r"train_([0-9a-f]{2})", path.parts[-2]) if len(path.parts) > 1 else None
    return int(found.group(1), 16) if found and path.suffix == ".png" and not hidden(path) else None


def from_nist(source: Path, classes: str, min_samples: int) -> Arrays:
    """Return at most 4000 images of each class out of NIST special database 19, by_class: grey, 28x28, no writers.

    The pool of the fedrep construction, which deals its own test sets: there is no test part.
    """

    from PIL import Image
    from tqdm import tqdm

    if min_samples:
        raise UserError(f"--min_samples is {min_samples}; NIST's by_class does not name the writers, so it must be 0")
    wanted = {ord(SYMBOLS[c]): label for label, c in enumerate(CHOICES[classes])}
    lists: dict[int, list[str]] = {code: [] for code in wanted}
    for path, _ in entries(source):
        code = by_class(path)
        if code in lists:
            lists[code].append(str(path))
    rng = np.random.default_rng(0)
    take: dict[str, int] = {}
    for code, names in sorted(lists.items()):
        if not names:
            raise UserError(f"{source} holds no by_class/{code:x}/train_{code:x}/*.png, the images of {chr(code)}")
        some = rng.permutation(len(names))[:A_CLASS]
        take |= dict.fromkeys(np.array(sorted(names), object)[some].tolist(), wanted[code])
    order = {name: i for i, name in enumerate(take)}
    images = np.empty((len(take), 28, 28, 1), np.uint8)
    with tqdm(total=len(take), desc=f"reading {source.name}", unit="image", disable=None) as bar:
        for path, get in entries(source):
            if str(path) not in order:
                continue
            large = decode(get(), f"{source}: {path}", colour=False)[..., 0]
            if large.shape[0] != large.shape[1] or large.shape[0] < 28:
                raise UserError(
                    f"{source}: {path} is {large.shape[0]}x{large.shape[1]}; NIST's images are square, of 128x128"
                )
            images[order[str(path)], ..., 0] = np.asarray(
                Image.fromarray(large).resize((28, 28), Image.Resampling.BICUBIC)
            )
            bar.update()
    return Arrays(
        images, np.array(list(take.values()), np.int64), np.empty((0, 28, 28, 1), np.uint8), np.empty(0, np.int64),
        tuple(SYMBOLS[c] for c in CHOICES[classes]), (0.0,), (1.0,),
        note=f"NIST special database 19, by_class, classes {classes}, at most {A_CLASS} images per class",
    )  # fmt: skip
