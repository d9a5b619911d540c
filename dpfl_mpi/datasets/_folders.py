"""Which part, client and class a file belongs to, by the folders that it lies in."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from dpfl_mpi.datasets._archives import check_one, first_five, warn_of_unread
from dpfl_mpi.errors import UserError

SPLIT = re.compile(r"(?:.*[-_])?(train|test|val|valid|validation)", re.IGNORECASE)
LISTS = "_annotations.txt"  # ends the name of a list of Tiny-ImageNet's: file, class, box
LAYOUTS = "{train,test}/CLASS/* or CLIENT/CLASS/*"


@dataclass(frozen=True)
class Layout:
    """Files in the order of client, class and name, and what they are, `[M]` each."""

    files: list[PurePosixPath]
    label: np.ndarray
    test: np.ndarray | None  # bool; None: no folder says so
    folder: np.ndarray | None  # names; None: there is one folder of classes

    def dealt(self, clients: int) -> dict[str, np.ndarray]:
        """Return `client`, and `group` where the samples of a folder are dealt to several."""
        if self.folder is None:
            if clients > 1:
                raise UserError(
                    f"--clients_per_folder is {clients}; allowed is 1 without folders CLIENT/CLASS"
                )
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
    """Return where files lie: SPLIT/CLASS/FILE, CLIENT/CLASS/FILE or CLASS/FILE.

    Between a class and its files may be a folder `images`. Files `listed` with their class lie in
    SPLIT/images/. The split val is the test part where none is called test. `needed` are splits
    that must be there; all of them but test are for training. A warning counts what is left out,
    also `others` that lie in folders of classes.
    """
    places = {}  # split or client, class, and the folder of all
    for path in files:
        above = list(path.parts[:-1])
        if above[-1:] == ["images"] and len(above) > 1:
            above.pop()
            if split_of(above[-1]):
                if path not in listed:
                    continue
                above.append(listed[path])
        if above:
            root = PurePosixPath(*above[:-2])
            places[path] = (above[-2] if len(above) > 1 else "", above[-1], root)
    splits = {path: split_of(place[0]) for path, place in places.items()}
    known, part = {*splits.values()} - {""}, "test" if "test" in splits.values() else "val"
    if known:
        kept = {"train", part, *map(split_of, needed)}
        places = {path: place for path, place in places.items() if splits[path] in kept}
    order = sorted(places, key=lambda path: (*places[path][:2], path.name))
    label = np.array([places[path][1] for path in order], str)
    folder = np.array([places[path][0] for path in order], str)
    test = np.array([splits[path] == part for path in order], bool)
    if known or needed:
        names = tuple(sorted({*label[~test]}))
        whole = [("train", ~test), (part, test)]
        for name, own in [(name, folder == name) for name in needed] or whole:
            check_classes(source, name, {*label[own]}, names, what)
    elif not order:
        raise UserError(f"{source} holds no {what}; expected {LAYOUTS}")
    check_one(source, {places[path][2] for path in order})
    parents = {path.parent for path in order}
    left = [path for path in files if path not in places]
    left += [path for path in others if path.parent in parents]
    unread = Counter(str(path.parent) for path in left)
    warn_of_unread(source, unread, f"{what}s in {LAYOUTS}")
    if known:
        return Layout(order, label, test, None)
    return Layout(order, label, None, folder if len({*folder}) > 1 else None)


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
    """Return train, test or val for the name of such a folder, as 20news-bydate-test, else ""."""
    found = SPLIT.fullmatch(name)
    part = found[1].lower() if found else ""
    return "val" if part.startswith("val") else part


def class_list(data: bytes, path: PurePosixPath) -> dict[PurePosixPath, str]:
    """Return the class of each file that a list of Tiny-ImageNet's names, beside it in `images`."""
    rows = (line.split("\t") for line in data.decode("utf-8", "replace").splitlines())
    return {path.parent / "images" / row[0]: row[1] for row in rows if len(row) > 1}
