"""FEMNIST (LEAF; Caldas et al. 2018): handwritten characters, 28x28, grey; a writer is a client."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import entries, warn_of_unread
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
SOURCE = "LEAF's data/femnist/data, or an archive of it"
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
# of a writer: name, whether of the test part, images uint8 [n, 28, 28, 1] and labels int64 [n]
Samples = tuple[str, bool, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Options:
    classes: Literal["all", "digits", "letters", "a-j"] = option(
        "all", "all 62, the 10 digits, the 52 letters, or a-j"
    )


def read(source: Path, classes: str = "all") -> Arrays:
    """Return FEMNIST from LEAF's json shards, with its own test split."""
    # LEAF lists an image of nearly every writer twice; the second one is dropped
    from tqdm import tqdm

    writers: list[Samples] = []
    unread = Counter[str]()
    with tqdm(desc=f"reading {source.name}", unit="writer", disable=None) as bar:
        for path, read_bytes in entries(source):
            part = path.parent.name
            is_json, in_split = path.suffix == ".json", part in ("train", "test")
            if is_json and in_split:
                of_shard = read_shard(f"{source}: {path}", part == "test", read_bytes())
                writers += of_shard
                bar.update(len(of_shard))
            elif part not in BESIDE and (is_json or in_split):
                unread[str(path.parent)] += 1
    warn_of_unread(source, unread, "train/*.json, test/*.json")
    for part in ("train", "test"):
        if not any(test == (part == "test") for _, test, _, _ in writers):
            raise UserError(f"{source} holds no {part}/*.json. {NO_DOWNLOAD}")
    return collect(source, writers, classes)


def read_shard(where: str, test: bool, text: bytes) -> list[Samples]:
    """Return the writers of a shard, one of LEAF's JSON files; `where` begins an error."""
    out = []
    fields = "users, num_samples and user_data"
    with refused_as(f"{where} is truncated, or no LEAF shard whose {fields} fit together"):
        data = json.loads(text)
        unread = data["user_data"]
        for user, count in zip(data["users"], data["num_samples"], strict=True):
            writer = f"{where}, writer {user}"
            images, labels = read_writer(writer, unread.pop(user))  # frees the floats
            if len(labels) != count:
                raise UserError(f"{writer} has {len(labels)} images, num_samples says {count}")
            out.append((user, test, images, labels))
        if unread:
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
    if not ((pixels >= 0) & (pixels <= 1)).all():
        raise UserError(f"{where} has a pixel beyond 0 to 1; allowed are n / 255")
    return np.rint(pixels * 255).astype(np.uint8), labels.astype(np.int64)


def collect(source: Path, writers: list[Samples], classes: str) -> Arrays:
    """Return the writers' samples as a data set, without second copies and other classes."""
    chosen = CHOICES[classes]
    writers = sorted(writers, key=lambda writer: writer[:2])
    # all images, and of each its writer's number and whether it is of the test part
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
    # writers without an image are left out, and the others numbered anew
    has_images = np.bincount(owner[keep], minlength=len(number)) > 0
    owner = (np.cumsum(has_images) - 1)[owner]
    train, test = keep & ~test, keep & test
    if not (train.any() and test.any()):
        raise UserError(f"{source}: train or test holds no image of the classes {classes}")
    labels -= chosen[0]
    names = tuple(user for user, k in number.items() if has_images[k])
    used = f"{len(names)} of {len(number)} writers"
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
        note=f"LEAF's FEMNIST, {used}, classes {classes}, {dropped}",
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
