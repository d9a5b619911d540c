"""Which split, client and class a file belongs to, by the folders that it lies in.

`layout` finds out for all files of a source, of which only the paths are looked at. A split is
train, test or val. A source has folders SPLIT/CLASS, CLIENT/CLASS or CLASS alone.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from dpfl_mpi.datasets._archives import check_one, first_five, warn_of_unread
from dpfl_mpi.errors import UserError

SPLIT = re.compile(r"(?:.*[-_])?(train|test|val|valid|validation)", re.IGNORECASE)
LISTS = "_annotations.txt"  # how Tiny-ImageNet names its lists of files and their classes
LAYOUTS = "{train,test}/CLASS/* or CLIENT/CLASS/*"


@dataclass(frozen=True)
class Layout:
    """M files in the order of client, class and name, and what they are."""

    files: list[PurePosixPath]
    label: np.ndarray  # names of classes [M]
    test: np.ndarray | None  # whether it is of the test part, bool [M]; None: no folder says so
    folder: np.ndarray | None  # names of the folders CLIENT [M]; None: there are none

    def dealt(self, clients: int) -> dict[str, np.ndarray]:
        """Return the client of each file, `[M]`, if each folder's files are dealt to so many.

        With several clients per folder, the folder is their group. Both have the names of the
        arguments of `arrays_of`.
        """
        if self.folder is None:
            if clients > 1:
                allowed = "allowed is 1 without folders CLIENT/CLASS"
                raise UserError(f"--clients_per_folder is {clients}; {allowed}")
            return {}
        if clients == 1:
            return {"client": self.folder}
        number, rng = np.empty(len(self.folder), np.int64), np.random.default_rng(0)
        for name in np.unique(self.folder):
            (of_folder,) = np.nonzero(self.folder == name)
            number[rng.permutation(of_folder)] = np.arange(len(of_folder)) % clients
        digits = len(str(clients - 1))
        names = [f"{f}-{k:0{digits}}" for f, k in zip(self.folder, number, strict=True)]
        return {"client": np.array(names), "group": self.folder}


def layout(
    source: Path,
    files: Collection[PurePosixPath],
    listed: Mapping[PurePosixPath, str],
    others: Sequence[PurePosixPath] = (),
    what: str = "image",
    needed: Sequence[str] = (),
) -> Layout:
    """Return what files are, by where they lie: SPLIT/CLASS/FILE, CLIENT/CLASS/FILE or CLASS/FILE.

    Between a class and its files may be a folder `images`. Files `listed` with their class lie in
    SPLIT/images/. The split val is the test part if no split is called test. `needed` are splits
    that must be there; all of them but test are for training. A warning counts the files that are
    left out, and those of `others` that lie in folders of classes. `what` is a file, in words.
    """
    # of each file: the folder SPLIT or CLIENT or "", the class, and the folder around them
    places = {}
    for path in files:
        folders = list(path.parts[:-1])
        if folders[-1:] == ["images"] and len(folders) > 1:
            folders.pop()
            if split_of(folders[-1]):
                if path not in listed:
                    continue
                folders.append(listed[path])
        if folders:
            root = PurePosixPath(*folders[:-2])
            places[path] = (folders[-2] if len(folders) > 1 else "", folders[-1], root)
    # the splits, if there are any, and which one is the test part
    splits = {path: split_of(place[0]) for path, place in places.items()}
    has_splits = any(splits.values())
    test_split = "val" if "val" in splits.values() and "test" not in splits.values() else "test"
    if has_splits:
        used = {"train", test_split, *map(split_of, needed)}
        places = {path: place for path, place in places.items() if splits[path] in used}
        check_splits(source, {place[0] for place in places.values()})
    elif len({not place[0] for place in places.values()}) > 1:
        one, other = (min(p for p, place in places.items() if bool(place[0]) == b) for b in (0, 1))
        both = f"{one} (CLASS/*) beside {other} (CLIENT/CLASS/*)"
        raise UserError(f"{source} holds {both}; expected one of the two")
    order = sorted(places, key=lambda path: (*places[path][:2], path.name))
    label = np.array([places[path][1] for path in order], str)
    folder = np.array([places[path][0] for path in order], str)
    test = np.array([splits[path] == test_split for path in order], bool)
    # every split must have all classes of the training part, and no others
    if has_splits or needed:
        classes = tuple(sorted({*label[~test]}))
        in_splits = [(split, folder == split) for split in needed]
        for split, in_split in in_splits or [("train", ~test), (test_split, test)]:
            check_classes(source, split, {*label[in_split]}, classes, what)
    elif not order:
        raise UserError(f"{source} holds no {what}; expected {LAYOUTS}")
    check_one(source, {places[path][2] for path in order})
    parents = {path.parent for path in order}
    left_out = [path for path in files if path not in places]
    left_out += [path for path in others if path.parent in parents]
    unread = Counter(str(path.parent) for path in left_out)
    warn_of_unread(source, unread, f"{what}s in {LAYOUTS}")
    if has_splits:
        return Layout(order, label, test, None)
    return Layout(order, label, None, folder if len({*folder}) > 1 else None)


def check_splits(source: Path, folders: set[str]) -> None:
    """Raise `UserError` if several folders are named after one split, or none after train."""
    by_split: dict[str, list[str]] = {}
    for folder in sorted(folders):
        by_split.setdefault(split_of(folder), []).append(folder)
    for split, names in by_split.items():
        if len(names) > 1:
            raise UserError(
                f"{source} holds {', '.join(names)}, all named after {split}; leave one"
            )
    if "train" not in by_split:
        named = f"{', '.join(sorted(folders))}, named after a part of data"
        mend = "add train/CLASS/*, or rename what is a client"
        raise UserError(f"{source} holds {named}, and no train; {mend}")


def check_classes(
    source: Path, split: str, found: set[str], classes: tuple[str, ...], what: str = "image"
) -> None:
    """Raise `UserError` if a split has not all classes, or others."""
    missing, others = sorted({*classes} - found), sorted(found - {*classes})
    if classes and not missing and not others:
        return
    if missing:
        holds = f"no {what} of the class {missing[0]}"
    else:
        holds = f"other classes ({first_five(others)})" if others else f"no {what}"
    every = f"every class of {', '.join(classes)}" if 0 < len(classes) <= 20 else "every class"
    raise UserError(f"{source}: {split} holds {holds}; expected {split}/CLASS/* for {every}")


def split_of(name: str) -> str:
    """Return the split that a folder is named after, as "20news-bydate-test" is; "" for none."""
    found = SPLIT.fullmatch(name)
    part = found[1].lower() if found else ""
    return "val" if part.startswith("val") else part


def class_list(data: bytes, path: PurePosixPath) -> dict[PurePosixPath, str]:
    """Return the class of each file that a list of Tiny-ImageNet names."""
    # the files lie in `images` beside the list, whose path and content are given
    rows = (line.split("\t") for line in data.decode("utf-8", "replace").splitlines())
    return {path.parent / "images" / row[0]: row[1] for row in rows if len(row) > 1}
