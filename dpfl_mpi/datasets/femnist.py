"""FEMNIST (LEAF; Caldas et al. 2018): handwritten characters, 28x28, grey; a writer is a client."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import entries, is_hidden, warn_of_unread
from dpfl_mpi.datasets._images import decode
from dpfl_mpi.datasets.cifar10 import DECAY
from dpfl_mpi.datasets.cifar10 import PAPER as CIFAR10
from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import option
from dpfl_mpi.storage.foreign import refused_as

TITLE = "FEMNIST"
PAPER = CIFAR10 | {
    **{"partition": "natural", "min_samples": 50, "rounds": 48, "tau_init": 4, "tau_train": 2},
    **{"lr": 0.001, "batch_size": 10, "augment": False},
}
AUTHORS_CODE = {"partition": "fedrep", "tau_init": 6, "rounds": 47, **DECAY}
WEIGHTS = "train"
SOURCE = "LEAF's data/femnist/data, or an archive of it, or NIST's by_class"
NO_DOWNLOAD = (
    "FEMNIST has no single archive: in a checkout of LEAF (TalwalkarLab/leaf) run "
    "data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, then pass the "
    "folder data/femnist/data with --source"
)
SYMBOLS = (
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # LEAF's 62 labels in order
)
CHOICES = {"digits": range(10), "letters": range(10, 62), "all": range(62), "a-j": range(36, 46)}
# what preprocess.sh leaves beside train and test
BESIDE = ("all_data", "sampled_data", "rem_user_data", "intermediate")
SHARD_BYTES = 2**29  # most of one json file; LEAF's, of 100 writers, have 0.2 GB
PER_CLASS = 4000  # images of a class that are taken from NIST, for --partition fedrep
# of a writer: name, whether of the test part, images uint8 [n, 28, 28, 1] and labels int64 [n]
Samples = tuple[str, bool, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Options:
    classes: Literal["all", "digits", "letters", "a-j"] = option(
        "all", "all 62, the 10 digits, the 52 letters, or a-j"
    )
    min_samples: int = option(0, "leave out writers with fewer images")


def read(source: Path, classes: str = "all", min_samples: int = 0) -> Arrays:
    """Return FEMNIST from LEAF's json shards, with its own test split, or from NIST's by_class.

    LEAF lists an image of nearly every writer twice; the second one is dropped.
    """
    from tqdm import tqdm

    writers: list[Samples] = []
    unread = Counter[str]()
    with tqdm(desc=f"reading {source.name}", unit="writer", disable=None) as bar:
        for path, get in entries(source, SHARD_BYTES):
            if nist_class(path):
                return from_nist(source, classes, min_samples)
            part = path.parent.name
            is_json, split = path.suffix == ".json", part in ("train", "test")
            if is_hidden(path):
                continue
            if is_json and split:
                found = read_shard(f"{source}: {path}", part == "test", get())
                writers += found
                bar.update(len(found))
            elif part not in BESIDE and (is_json or split):
                unread[str(path.parent)] += 1
    warn_of_unread(source, unread, "train/*.json, test/*.json")
    for part in ("train", "test"):
        if not any(test == (part == "test") for _, test, _, _ in writers):
            raise UserError(f"{source} holds no {part}/*.json. {NO_DOWNLOAD}")
    return collect(source, writers, classes, min_samples)


def read_shard(where: str, test: bool, text: bytes) -> list[Samples]:
    out = []
    fields = "users, num_samples and user_data"
    with refused_as(f"{where} is truncated, or no LEAF shard whose {fields} fit together"):
        data = json.loads(text)
        left = data["user_data"]
        for user, count in zip(data["users"], data["num_samples"], strict=True):
            writer = f"{where}, writer {user}"
            images, labels = read_writer(writer, left.pop(user))  # floats take gigabytes
            if len(labels) != count:
                raise UserError(f"{writer} has {len(labels)} images, num_samples says {count}")
            out.append((user, test, images, labels))
        if left:
            raise ValueError
    return out


def read_writer(where: str, data: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a writer's images and labels; LEAF's floats are images / 255."""
    lists = "lists x of images of 784 numbers (28x28) and y of as many labels"
    with refused_as(f"{where} has no {lists}"):
        labels = np.array(data["y"], np.float64).reshape(len(data["x"]))
        pixels = np.array(data["x"], np.float32).reshape(len(labels), 28, 28, 1)
    known = np.isin(labels, range(62))
    if not known.all():
        raise UserError(f"{where} has the label {labels[~known][0]:g}; allowed are 0 to 61")
    levels = np.rint(np.clip(pixels, 0, 1) * 255)
    # 0, or three digits of n / 255
    exact = np.abs(pixels * 255 - levels) <= 0.15 * np.minimum(levels, 1)
    if not exact.all():
        raise UserError(f"{where} has the pixel {pixels[~exact][0]:g}; allowed are n / 255")
    return levels.astype(np.uint8), labels.astype(np.int64)


def collect(source: Path, writers: list[Samples], classes: str, min_samples: int) -> Arrays:
    """Return the writers' samples, without second copies, other classes and small writers."""
    chosen, least = CHOICES[classes], max(1, min_samples)
    writers = sorted(writers, key=lambda writer: writer[:2])
    users, tests, image_lists, label_lists = zip(*writers, strict=True)
    number = {user: k for k, user in enumerate(dict.fromkeys(users))}
    sizes = list(map(len, label_lists))
    owner = np.repeat([number[user] for user in users], sizes)
    test = np.repeat(tests, sizes)
    images, labels = np.concatenate(image_lists), np.concatenate(label_lists)
    keep = np.isin(labels, chosen)
    copies = second_copies(owner, images, labels)
    dropped = f"{(keep & copies).sum()} second copies left out"
    keep &= ~copies
    large = np.bincount(owner[keep], minlength=len(number)) >= least
    if not large.any():
        raise UserError(f"{source}: no writer has {least} images of {classes}; lower --min_samples")
    keep &= large[owner]
    owner = (np.cumsum(large) - 1)[owner]
    train, test = keep & ~test, keep & test
    if not (train.any() and test.any()):
        raise UserError(f"{source}: train or test holds no image of the classes {classes}")
    labels -= chosen[0]
    names = tuple(user for user, k in number.items() if large[k])
    writers_of = f"{len(names)} of {len(number)} writers"
    return Arrays(
        images[train],
        labels[train],
        images[test],
        labels[test],
        class_names=tuple(SYMBOLS[c] for c in chosen),
        mean=(0.0,),
        std=(1.0,),
        train_clients=owner[train],
        test_clients=owner[test],
        client_names=names,
        note=f"LEAF's FEMNIST, {writers_of}, classes {classes}, {dropped}",
    )


def second_copies(owner: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return which samples, sorted by owner, repeat an image and label of the same owner."""
    out = np.zeros(len(owner), bool)
    last, seen = -1, set[tuple[bytes, int]]()
    for i, (k, label) in enumerate(zip(owner.tolist(), labels.tolist(), strict=True)):
        if k != last:
            last, seen = k, set()
        sample = images[i].tobytes(), label
        out[i] = sample in seen
        seen.add(sample)
    return out


def nist_class(path: PurePosixPath) -> int | None:
    """Return the character of an image in by_class/61/train_61/*.png, else None."""
    found = re.fullmatch(r"train_([0-9a-f]{2})", path.parts[-2]) if len(path.parts) > 1 else None
    image = path.suffix == ".png" and not is_hidden(path)
    return int(found.group(1), 16) if found and image else None


def from_nist(source: Path, classes: str, min_samples: int) -> Arrays:
    """Return at most `PER_CLASS` images of each class of NIST special database 19, by_class.

    They are grey, 28x28, without writers and test part: --partition fedrep makes its own.
    """
    from PIL import Image
    from tqdm import tqdm

    if min_samples:
        must = "NIST's by_class does not name the writers, so it must be 0"
        raise UserError(f"--min_samples is {min_samples}; {must}")
    label_of = {ord(SYMBOLS[c]): label for label, c in enumerate(CHOICES[classes])}
    lists: dict[int, list[str]] = {code: [] for code in label_of}
    for path, _ in entries(source):
        if (code := nist_class(path)) in lists:
            lists[code].append(str(path))
    rng = np.random.default_rng(0)
    chosen: dict[str, int] = {}
    for code, names in sorted(lists.items()):
        if not names:
            raise UserError(f"{source} holds no by_class/{code:x}/train_{code:x}/*.png")
        some = rng.permutation(len(names))[:PER_CLASS]
        names_of_class = np.array(sorted(names), object)[some].tolist()
        chosen |= dict.fromkeys(names_of_class, label_of[code])
    order = {name: i for i, name in enumerate(chosen)}
    images = np.empty((len(chosen), 28, 28, 1), np.uint8)
    with tqdm(total=len(chosen), desc=f"reading {source.name}", unit="image", disable=None) as bar:
        for path, get in entries(source):
            if str(path) not in order:
                continue
            large = decode(get(), f"{source}: {path}", colour=False)[..., 0]
            height, width = large.shape
            if height != width or height < 28:
                raise UserError(f"{source}: {path} is {height}x{width}; NIST's images are 128x128")
            small = Image.fromarray(large).resize((28, 28), Image.Resampling.BICUBIC)
            images[order[str(path)], ..., 0] = np.asarray(small)
            bar.update()
    of_class = f"at most {PER_CLASS} images per class"
    return Arrays(
        images,
        np.array(list(chosen.values()), np.int64),
        np.empty((0, 28, 28, 1), np.uint8),
        np.empty(0, np.int64),
        class_names=tuple(SYMBOLS[c] for c in CHOICES[classes]),
        mean=(0.0,),
        std=(1.0,),
        note=f"NIST special database 19, by_class, classes {classes}, {of_class}",
    )
