"""Your own texts: `{train,test}/CLASS/*`, `CLIENT/CLASS/*`, or `{train,test}.csv`.

A line of a CSV file is a class and a text, in one or several columns, as in AG News; val.csv is the
test part where test.csv is missing. A text becomes the numbers of its first words. The number of a
word is its rank by frequency in the training part, from 2 on; 0 fills up short texts, and 1 is any
word outside the vocabulary.
"""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from dpfl_mpi.data.own import arrays_of, fixed_fifth
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import check_one, entries, first_five, warn_of_unread
from dpfl_mpi.datasets._folders import LAYOUTS, layout, split_of
from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.settings import option
from dpfl_mpi.storage.foreign import memory, refused_as

OWN_DATA = True
SOURCE = f"a folder {LAYOUTS} of texts, as 20 Newsgroups, or {{train,test}}.csv, as AG News, "
SOURCE += "or a tar or zip archive of one"
NO_DOWNLOAD = "these are your own texts: name them with --source PATH"
FIRST = 2  # the number of the most frequent word
CLASS = {"class", "label", "target", "category"}  # names of a column of classes


@dataclass(frozen=True)
class Options:
    vocabulary: int = option(10_000, "words of the vocabulary, the most frequent ones", low=1)
    length: int = option(128, "words of a text that are kept, the first ones", low=1)
    clients_per_folder: int = option(
        1, "clients that the texts of each folder CLIENT are dealt to", low=1
    )


def read(source: Path, vocabulary: int, length: int, clients_per_folder: int = 1) -> Arrays:
    """Return the first words of each text, as numbers in the vocabulary of the training part."""
    files, total = {}, 0
    for path, read_bytes in entries(source):
        files[path] = read_bytes()
        total += len(files[path])
        if 4 * total > memory():
            raise UserError(f"{source} exceeds this machine's memory; use a larger machine")
    # the texts, their classes, and which are the test part, from CSV files or from folders
    columns: dict[str, np.ndarray] = {}
    if tables := tables_of(source, files):
        texts, y, test = of_tables(source, tables)
        lists = [text_of(files[p], f"{source}: {p}") for p in files if p.name == "classes.txt"]
        y = named(y, lists[0].split("\n") if lists else [])
    else:
        found = layout(source, files, {}, what="text")
        columns = found.dealt(clients_per_folder)
        texts = [text_of(files.pop(path), f"{source}: {path}") for path in found.files]
        y, test = found.label, found.test
    if test is None:
        test = fixed_fifth(y, columns.get("client", y))
    # the vocabulary: the most frequent words of the training part
    words_of_texts = [re.findall(r"\w+", text.lower())[:length] for text in texts]
    counts = Counter[str]()
    for of_text, in_test in zip(words_of_texts, test, strict=True):
        if not in_test:
            counts.update(of_text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[:vocabulary]
    number = {word: FIRST + i for i, word in enumerate(ranked)}
    x = np.zeros((len(texts), max(map(len, words_of_texts), default=0)), np.int32)
    for row, of_text in zip(x, words_of_texts, strict=True):
        row[: len(of_text)] = [number.get(word, 1) for word in of_text]
    note = f"{len(ranked)} of {len(counts)} words of the training part, {x.shape[1]} per text"
    return arrays_of(x, y, test=test, where=str(source), note=note, **columns)


def tables_of(source: Path, files: Mapping[PurePosixPath, bytes]) -> dict[PurePosixPath, bytes]:
    """Return the training table and the test table by their paths, {} if there is no table."""
    found = {path: split_of(path.stem) for path in files if path.suffix.lower() == ".csv"}
    if "train" not in found.values():
        return {}
    used = "train", "test" if "test" in found.values() else "val"
    tables = sorted(path for path in found if found[path] in used)
    tables.sort(key=lambda path: found[path] != "train")
    if len({found[path] for path in tables}) < len(tables):
        names = first_five(list(map(str, tables)))
        raise UserError(f"{source} holds several tables of one part: {names}; leave one of each")
    check_one(source, (path.parent for path in tables))
    unread = Counter(str(path) for path in found if path not in tables)
    warn_of_unread(source, unread, "tables train.csv and test.csv")
    return {path: files[path] for path in tables}


def of_tables(
    source: Path, tables: dict[PurePosixPath, bytes]
) -> tuple[list[str], np.ndarray, np.ndarray | None]:
    """Return the texts, their classes and which are the test part, None if there is one table."""
    texts: list[str] = []
    y: list[str] = []
    sizes, heads = [], None  # lines of each table, and the names of its columns
    csv.field_size_limit(2**31 - 1)  # a text may be longer than Python's 131,072 characters
    for path in tables:
        no_table = f"{source}: {path} is no table of a class and a text, with closed quotes"
        with refused_as(no_table, (csv.Error,)):
            text = io.StringIO(text_of(tables[path], f"{source}: {path}"))
            rows = [row for row in csv.reader(text, strict=True) if row]
        # the first line has names of columns if its first word is no class of other lines
        if heads is None and rows and not rows[0][0].isdigit():
            heads = rows[0] if rows[0][0] not in {row[0] for row in rows[1:]} else []
            check_heads(f"{source}: {path}", heads)
        if rows and rows[0] == heads:
            del rows[0]
        if not rows or min(map(len, rows)) < 2:
            needs = 'lines of a class and a text: "3","Title","Text"'
            raise UserError(f"{source}: {path} needs {needs}")
        y += [row[0] for row in rows]
        texts += [" ".join(row[1:]) for row in rows]
        sizes.append(len(rows))
    test = np.repeat([False, True], sizes) if len(sizes) == 2 else None
    return texts, np.array(y), test


def check_heads(where: str, heads: Sequence[str]) -> None:
    """Say that a line is taken for names of columns; `UserError` if the class is not the first."""
    if not heads:
        return
    line = ",".join(heads)
    if not heads[0].strip() or CLASS & {name.strip().lower() for name in heads[1:]}:
        mend = "the first must be the class, the others text (no row numbers)"
        raise UserError(f"{where} has the columns {line}; {mend}")
    complain(f"{where}: the line {line[:60]!r} is taken for the names of columns")


def named(y: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return the classes by name if they are the numbers 1, 2, ... of these `names`, else as is."""
    names = [name.strip() for name in names if name.strip()]
    if {*y} != {str(1 + i) for i in range(len(names))}:
        return y
    return np.array(names)[y.astype(int) - 1]


def text_of(data: bytes, path: str) -> str:
    """Return a text in UTF-8, UTF-16, or else in Latin-1, as 20 Newsgroups has some.

    `UserError` of the file `path` if it is no text, as it holds the character NUL.
    """
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as Excel writes some
    try:
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    if "\0" in text:
        raise UserError(f"{path} is no text (it holds the character NUL); leave out such files")
    return text
