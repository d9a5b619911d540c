"""FEMNIST (LEAF; Caldas et al. 2018): handwritten characters of 28x28, grey; each writer is a client."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._files import decode, entries, hidden, warn_of_unread
from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import option
from dpfl_mpi.storage.foreign import refused_as

TITLE = "FEMNIST"
PAPER = {
    "partition": "natural", "classes_per_client": 3, "dirichlet_alpha": 0.5, "min_per_class": 10, "min_samples": 50, "clients": 100,
    "model": "cnn", "rounds": 48, "tau_init": 4, "tau_train": 2, "budget": "0.1N",
    "lr": 0.001, "weight_decay": 1e-3, "lr_decay": 1.0, "batch_size": 10, "augment": False,
}  # fmt: skip
AUTHORS_CODE = {"partition": "fedrep", "tau_init": 6, "rounds": 47, "weight_decay": 1e-4, "lr_decay": 0.998}
WEIGHTS = "train"
SOURCE = "LEAF's folder data/femnist/data, or an archive of it, with {train,test}/*.json; or NIST's by_class, folder or archive"
NO_DOWNLOAD = (
    "FEMNIST has no single archive: in a checkout of LEAF (TalwalkarLab/leaf) run data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, "
    "then name its folder data/femnist/data with --source PATH"
)
SYMBOLS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # LEAF's 62 labels in order
CHOICES = {"digits": range(10), "letters": range(10, 62), "all": range(62), "a-j": range(36, 46)}
BESIDE = ("all_data", "sampled_data", "rem_user_data", "intermediate")  # what preprocess.sh leaves there
SHARD = 2**29  # bytes of one json file; LEAF's, of 100 writers, have 0.2 GB
A_CLASS = 4000  # images of a class that the fedrep construction takes from NIST
# of a writer: the name, whether they are of the test part, images uint8 [n, 28, 28, 1] and labels int64 [n]
Samples = tuple[str, bool, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Options:
    classes: Literal["all", "digits", "letters", "a-j"] = option("all", "all 62, the 10 digits, the 52 letters, or a-j")
    min_samples: int = option(0, "leave out writers with fewer images")


def read(source: Path, classes: str = "all", min_samples: int = 0) -> Arrays:
    """Return FEMNIST from LEAF's json shards (each writer is a client; LEAF's own train and test split) or from NIST's by_class.

    LEAF lists an image of nearly each writer twice; the second one is dropped.
    """
    from tqdm import tqdm

    held: list[Samples] = []
    unread = Counter[str]()
    with tqdm(desc=f"reading {source.name}", unit="writer", disable=None) as bar:
        for path, get in entries(source, SHARD):
            if by_class(path):
                return from_nist(source, classes, min_samples)
            part = path.parts[-2] if len(path.parts) > 1 else ""
            if path.suffix == ".json" and not hidden(path) and part in ("train", "test"):
                found = shard(f"{source}: {path}", part == "test", get())
                held += found
                bar.update(len(found))
            elif not hidden(path) and part not in BESIDE and (path.suffix == ".json" or part in ("train", "test")):
                unread[str(path.parent)] += 1
    warn_of_unread(source, unread, "train/*.json, test/*.json")
    for part in ("train", "test"):
        if not any(test == (part == "test") for _, test, _, _ in held):
            raise UserError(f"{source} holds no {part}/*.json. {NO_DOWNLOAD}")
    return collect(source, held, classes, min_samples)


def shard(where: str, test: bool, text: bytes) -> list[Samples]:
    out = []
    with refused_as(f"{where} is truncated, or no LEAF shard whose users, num_samples and user_data fit together"):
        if text.count(b"[") + text.count(b"{") > 1000 + len(text) // 100:  # an empty list takes 60 bytes
            raise ValueError
        data = json.loads(text)
        left = data["user_data"]
        for user, count in zip(data["users"], data["num_samples"], strict=True):
            images, labels = samples(f"{where}, writer {user}", left.pop(user))  # a shard's floats take gigabytes
            if len(labels) != count:
                raise UserError(f"{where}, writer {user} has {len(labels)} images, num_samples says {count}")
            out.append((user, test, images, labels))
        if left:
            raise ValueError
    return out


def samples(where: str, data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a writer's images and labels; LEAF's floats are images / 255."""
    with refused_as(f"{where} has no lists x of images of 784 numbers (28x28) and y of as many labels"):
        labels = np.array(data["y"], np.float64).reshape(len(data["x"]))
        pixels = np.array(data["x"], np.float32).reshape(len(labels), 28, 28, 1)
    known = np.isin(labels, range(62))
    if not known.all():
        raise UserError(f"{where} has the label {labels[~known][0]:g}; allowed are 0 to 61")
    levels = np.rint(np.clip(pixels, 0, 1) * 255)
    right = np.abs(pixels * 255 - levels) <= 0.15 * np.minimum(levels, 1)  # 0, or three digits of n / 255
    if not right.all():
        raise UserError(f"{where} has the pixel {pixels[~right][0]:g}; allowed are n / 255, n from 0 to 255")
    return levels.astype(np.uint8), labels.astype(np.int64)


def collect(source: Path, held: list[Samples], classes: str, min_samples: int) -> Arrays:
    """Return the writers' samples one after the other: second copies, other classes and small writers left out."""
    chosen, least = CHOICES[classes], max(1, min_samples)
    users, tests, image_lists, label_lists = zip(*sorted(held, key=lambda one: one[:2]), strict=True)
    everyone = {user: k for k, user in enumerate(dict.fromkeys(users))}
    sizes = list(map(len, label_lists))
    owner, test = np.repeat([everyone[user] for user in users], sizes), np.repeat(tests, sizes)
    images, labels = np.concatenate(image_lists), np.concatenate(label_lists)
    keep = np.isin(labels, chosen)
    last, copies, all_of_classes = -1, set[tuple[bytes, int]](), keep.sum()
    for i, (k, label) in enumerate(zip(owner.tolist(), labels.tolist(), strict=True)):
        if k != last:
            last, copies = k, set()
        key = images[i].tobytes(), label
        keep[i] &= key not in copies
        copies.add(key)
    dropped = f"{all_of_classes - keep.sum()} second copies left out"
    large = np.bincount(owner[keep], minlength=len(everyone)) >= least
    if not large.any():
        raise UserError(f"{source}: no writer has {least} images of the classes {classes}; a smaller --min_samples?")
    keep &= large[owner]
    owner = (np.cumsum(large) - 1)[owner]
    train, test = keep & ~test, keep & test
    for part, mine in (("train", train), ("test", test)):
        if not mine.any():
            raise UserError(f"{source}: {part} holds no image of the classes {classes}")
    labels -= chosen[0]
    names = tuple(user for user, k in everyone.items() if large[k])
    return Arrays(
        images[train], labels[train], images[test], labels[test], tuple(SYMBOLS[c] for c in chosen), (0.0,), (1.0,),
        owner[train], owner[test], names,
        f"LEAF's FEMNIST, {len(names)} of {len(everyone)} writers, classes {classes}, {dropped}",
    )  # fmt: skip


def by_class(path: PurePosixPath) -> int | None:
    """Return the character of an image in NIST's by_class/61/train_61/*.png (its hexadecimal code), None for any other file."""
    found = re.fullmatch(r"train_([0-9a-f]{2})", path.parts[-2]) if len(path.parts) > 1 else None
    return int(found.group(1), 16) if found and path.suffix == ".png" and not hidden(path) else None


def from_nist(source: Path, classes: str, min_samples: int) -> Arrays:
    """Return at most 4000 images of each class out of NIST special database 19, by_class: grey, 28x28, no writers, no test part (fedrep deals its own)."""
    from PIL import Image
    from tqdm import tqdm

    if min_samples:
        raise UserError(f"--min_samples is {min_samples}; NIST's by_class does not name the writers, so it must be 0")
    wanted = {ord(SYMBOLS[c]): label for label, c in enumerate(CHOICES[classes])}
    lists: dict[int, list[str]] = {code: [] for code in wanted}
    for path, _ in entries(source):
        if (code := by_class(path)) in lists:
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
                raise UserError(f"{source}: {path} is {large.shape[0]}x{large.shape[1]}; NIST's images are 128x128")
            small = Image.fromarray(large).resize((28, 28), Image.Resampling.BICUBIC)
            images[order[str(path)], ..., 0] = np.asarray(small)
            bar.update()
    return Arrays(
        images, np.array(list(take.values()), np.int64), np.empty((0, 28, 28, 1), np.uint8), np.empty(0, np.int64),
        tuple(SYMBOLS[c] for c in CHOICES[classes]), (0.0,), (1.0,),
        note=f"NIST special database 19, by_class, classes {classes}, at most {A_CLASS} images per class",
    )  # fmt: skip
