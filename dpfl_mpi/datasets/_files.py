"""Reading what a publisher ships, a folder or an archive, without unpacking anything.

Nothing is written to disk, nothing in a pickle is executed, and every size is bounded before it is read.
"""

import functools
import lzma
import math
import os
import pickle
import pickletools
import re
import tarfile
import tokenize
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self

import numpy as np

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.storage.foreign import UNREADABLE, memory, open_regular, read_bytes, refused_as

LARGEST = 16 * 2**20  # bytes of one image
MEMBERS = 4_000_000  # files in one archive; NIST's special database 19 has 1.7 million
TOTAL = 64 * 2**30  # bytes in one archive, unpacked
HEADER = 2**20  # bytes of a header of a tar
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # of others Pillow starts programs
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
PIXELS = 2**26  # of one image
DTYPE = re.compile(r"[biuf][1248]|[US][1-9]\d{0,5}|O8?")  # plain numbers, texts, and lists of objects
ONLY = "of pickles only numbers, texts, lists, dicts and NumPy arrays are read (nothing was executed)"
BROKEN = (*UNREADABLE, tarfile.TarError, zipfile.BadZipFile, zipfile.LargeZipFile, lzma.LZMAError)

Entry = tuple[PurePosixPath, Callable[[], bytes]]  # path inside the source, and what reads it
Member = tuple[str, int, Callable[[], bytes] | None]  # name in an archive, bytes, and what reads it: None of a folder
Names = tuple[str, ...]
Images = dict[str, tuple[np.ndarray, np.ndarray]]  # uint8 [M, H, W, C] and labels [M] of each split


def entries(source: Path, largest: int = LARGEST, inside: bytes | None = None) -> Iterator[Entry]:
    """Yield every regular file of a folder, tar (gz, bz2, xz) or zip archive; a tar's must be read before the next one is asked for.

    `largest` are the most bytes of one of them; `inside` is the archive itself, where it lies in another one, and `source` its name. `UserError` where
    the archive is truncated, none, names a path outside itself, or holds more than the bounds allow.
    """
    if source.is_dir():
        for found in sorted(source.rglob("*")):
            if found.is_file():  # the most by far: asked nothing else
                yield PurePosixPath(found.relative_to(source).as_posix()), functools.partial(read_bytes, found, largest)
            elif found.is_symlink():
                link = f"{found.name}, a link to {'a folder' if found.is_dir() else 'nothing'}, which is not followed"
                raise UserError(f"{source} holds {link}; copy it there")
            elif found.is_dir() and not os.access(found, os.R_OK | os.X_OK):
                raise UserError(f"{source} holds {found.name}, a folder that may not be read; allow it")
        return
    total = 0
    with whole(source), open_regular(source) if inside is None else BytesIO(inside) as file:  # a pipe has no end
        members = in_zip if zipfile.is_zipfile(file) else in_tar
        file.seek(0)
        for count, (name, size, read) in enumerate(members(source, file), 1):
            path = PurePosixPath(name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")):
                raise UserError(f"{source} holds {name!r}, which leads out of the archive: nothing was read")
            total += size
            if count > MEMBERS or total > TOTAL or size < 0:
                raise UserError(f"{source} holds more than {MEMBERS} files or {TOTAL >> 30} GiB; allowed are fewer")
            if read:
                yield PurePosixPath(name), functools.partial(bounded, source, name, size, largest, read)


def bounded(source: Path, name: str, size: int, largest: int, read: Callable[[], bytes]) -> bytes:
    """Return what `read` returns, unless it is larger than any file of its kind."""
    if size > largest:
        raise UserError(f"{source}: {name} has {size} bytes; allowed are {largest}")
    with whole(source):
        return read()


def whole(source: Path) -> AbstractContextManager[None]:
    """Raise `UserError` where an archive that is read inside ends too early, or is none."""
    return refused_as(f"{source} is truncated or not a tar or zip archive; download or make it again", BROKEN)


class Sparse(Exception):
    """A file in a tar that is mostly holes: a kilobyte of it can claim gigabytes."""


class Header(tarfile.TarInfo):
    """A header of a tar, of which the long ones are refused: they can claim gigabytes, and are read as a whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        out = super().frombuf(buf, encoding, errors)
        if out.size > HEADER and not out.isfile():
            raise tarfile.ReadError("a header of more than a megabyte")
        if out.type == tarfile.GNUTYPE_SPARSE:
            raise Sparse
        return out

    def _proc_gnusparse_10(self, *_: object) -> None:  # where `tarfile` reads any list of holes
        raise Sparse


def in_tar(source: Path, file: BinaryIO) -> Iterator[Member]:
    """Yield the files of a tar archive in its own order, in one pass."""
    sparse = refused_as(f"{source} holds a sparse file; pack it with tar without --sparse", (Sparse,))
    with sparse, tarfile.open(fileobj=file, mode="r:*", tarinfo=Header) as archive:
        while member := archive.next():
            if member.issparse():
                raise Sparse
            if member.islnk() or member.issym():
                how = "pack it with tar --dereference --hard-dereference"
                raise UserError(f"{source} holds {member.name}, a link, which is not followed; {how}")
            opened = archive.extractfile(member) if member.isfile() else None
            yield member.name, member.size if opened else 0, opened.read if opened else None
            archive.members = []  # type: ignore[attr-defined]  # or a million headers stay in memory
        # `tarfile` takes an archive that was cut between two files for a whole one; its end is an empty block
        end: Any = archive.fileobj
        end.seek(archive.offset)
        if end.read(512) != bytes(512):
            raise tarfile.ReadError


def in_zip(source: Path, file: BinaryIO) -> Iterator[Member]:
    """Yield the files of a zip archive in its own order."""
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.flag_bits & 1:
                raise UserError(f"{source}: {info.filename} is encrypted; pack it without a password")
            yield info.filename, info.file_size, None if info.is_dir() else functools.partial(archive.read, info)


def npy(where: str, data: bytes, objects: bool = False) -> Any:
    """Return the array of an npy file; with `objects` also what `np.save` pickled, without executing anything."""
    file = BytesIO(data)
    with refused_as(f"{where} is truncated, or no array of NumPy's", (*UNREADABLE, SyntaxError, tokenize.TokenError)):
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        pickled = header(file)[2].hasobject
        if not pickled:
            file.seek(0)
            return np.lib.format.read_array(file, allow_pickle=False)
    if not objects:
        raise UserError(f"{where} holds pickled objects, which are never read; save plain numbers and strings")
    return unpickled(file.read(), where)


# pickles: numbers, texts, lists, dicts and NumPy arrays; nothing that one names is called but the six names below -----------
class Refused(Exception):
    """Something in a pickle that is not data."""


class Type:
    """A NumPy type as a pickle describes it. NumPy's own believes what it is told of sizes and fields."""

    def __init__(self, code: str, *_: object):
        if not DTYPE.fullmatch(code):
            raise Refused(f"an array of the type {code}")
        self.real = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.real = self.real.newbyteorder(state[1])


class Array(np.ndarray):
    """An array as a pickle describes it. NumPy's own reads as many objects as the shape says, however many there are."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns, data = state
        if min(shape, default=0) < 0 or (kind.real.hasobject and len(data) != math.prod(shape)):
            raise ValueError
        super().__setstate__((1, shape, kind.real, columns, data))  # type: ignore[misc]


KNOWN = {
    "_reconstruct": lambda *_: Array(0),  # its state follows
    "_frombuffer": lambda data, kind, shape, order: np.frombuffer(data, kind.real).reshape(shape, order=order),
    "scalar": lambda kind, data: np.frombuffer(data, kind.real).reshape(())[()],
    "dtype": Type,
    "ndarray": None,
}


class Plain(pickle.Unpickler):
    """Python's reader of pickles, to which all names but those of NumPy's arrays are unknown."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # bytes, in protocols before 3
            return str.encode
        if name in KNOWN and re.fullmatch(r"numpy(\._?core\.(multiarray|numeric))?", module):
            return KNOWN[name]
        raise Refused(f"the name {module}.{name}")


def unpickled(data: bytes, where: str) -> Any:
    """Return what a pickle holds; `UserError` where it is damaged, or holds anything but data: nothing of it was executed."""
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(data):  # sizes fit, and no row of a table is beyond the file
            if opcode.name in ("PUT", "LONG_BINPUT") and int(argument) > len(data):
                raise ValueError
        value = Plain(BytesIO(data)).load()
        if callable(value) or isinstance(value, Type):
            raise Refused("a name that is no data")
    except Refused as refused:
        raise UserError(f"{where} holds a pickle with {refused}; {ONLY}") from None
    except (*UNREADABLE, pickle.UnpicklingError):
        raise UserError(f"{where} holds a damaged pickle (nothing of it was executed)") from None
    return value


# images -----------------------------------------------------------------------------------------------------------------
def hidden(path: PurePosixPath) -> bool:
    """Return whether a file is none of the publisher's: .DS_Store, ._image.png and their like."""
    return any(part.startswith((".", "__MACOSX")) for part in path.parts if part != ".")


def image_splits(
    source: Path, splits: Sequence[str], names: Names | None = None, shape: tuple[int, ...] | None = None
) -> tuple[Images, Names]:
    """Return the images of SPLIT/CLASS/* of a folder or archive by split, and the names of the classes.

    They are in the order of class and file name, whatever the order of the archive: a folder and its archive are the same data.

    Args:
        names: the classes; those of the first split in alphabetical order where none are given.
        shape: height, width and channels; otherwise those of the first image, with three channels where one of them has colour.
    """
    from tqdm import tqdm

    found: dict[str, list[tuple[str, str, np.ndarray]]] = {split: [] for split in splits}  # class, file name, pixels
    unread = Counter[str]()  # images of other folders, and other files of these
    sized, held, channels, seen = shape, 0, 1, set[PurePosixPath]()
    with tqdm(desc=f"reading {source.name}", unit="image", disable=None) as bar:
        for path, read in entries(source):
            placed = len(path.parts) > 2 and path.parts[-3] in found and not hidden(path.parent)
            named = path.suffix.lower() in SUFFIXES and not hidden(path)
            data = b"" if named else image_in(read)
            if not placed or not (named or data):
                unread[str(path.parent)] += bool(named or data or (placed and not hidden(path)))
                continue
            split, name, file = path.parts[-3:]
            if path in seen:
                raise UserError(f"{source} holds {path} twice; pack it anew")
            seen.add(path)
            if names is not None and name not in names:
                raise UserError(f"{source}: {split} holds the class {name}; allowed are {', '.join(names)}")
            pixels = decode(data or read(), f"{source}: {path}", None if shape is None else shape[2] == 3)
            sized = sized or pixels.shape
            if pixels.shape[:2] != sized[:2]:
                height, width = sized[:2]
                wanted = f"; allowed is {height}x{width}" if shape else f", the first image {height}x{width}"
                raise UserError(f"{source}: {path} is {pixels.shape[0]}x{pixels.shape[1]}{wanted}")
            held, channels = held + pixels.nbytes, max(channels, pixels.shape[2])
            if 2 * held > memory():
                raise UserError(f"{source} holds more images than this machine's memory; use a larger one")
            found[split].append((name, file, pixels))
            bar.update()
    warn_of_unread(source, unread, f"{', '.join(FORMATS)} in {', '.join(f'{split}/CLASS' for split in splits)}")
    classes = names or tuple(sorted({name for name, _, _ in found[splits[0]]}))
    out = {}
    check_one(source, (path.parents[2] for path in seen))
    for split, rows in found.items():
        check_classes(source, split, {name for name, _, _ in rows}, classes)
        rows.sort(key=lambda row: row[:2])
        images = np.empty((len(rows), *rows[0][2].shape[:2], channels), np.uint8)
        for image, (_, _, pixels) in zip(images, rows, strict=True):
            image[:] = pixels  # a grey one thrice where others have colour
        out[split] = images, np.array([classes.index(name) for name, _, _ in rows], np.int64)
    return out, classes


def warn_of_unread(source: Path, unread: Counter[str], read_are: str) -> None:
    """Say how many files of which folders of a source are left out."""
    if folders := few([f"{folder} ({count})" for folder, count in sorted(unread.items()) if count]):
        complain(f"warning: {source}: files of {folders} are not read; read are {read_are}")


def image_in(read: Callable[[], bytes]) -> bytes:
    """Return the bytes of a file that is an image by its content, b"" of any other and of too large ones."""
    from PIL import Image

    with suppress(UserError, *UNREADABLE, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        data = read()
        Image.open(BytesIO(data), formats=FORMATS).close()
        return data
    return b""


def check_classes(source: Path, split: str, held: set[str], classes: tuple[str, ...]) -> None:
    """Raise `UserError` where a split lacks a class, or has others."""
    missing, others = sorted({*classes} - held), sorted(held - {*classes})
    if missing or others or not classes:
        what = f"no image of the class {missing[0]}" if missing else f"other classes ({few(others)})"
        listed = f"every class of {', '.join(classes)}" if 0 < len(classes) <= 20 else "every class"
        wanted = f"expected {split}/CLASS/*.png for {listed}"
        raise UserError(f"{source}: {split} holds {what if classes else 'no image'}; {wanted}")


def check_one(source: Path, folders: Iterable[PurePosixPath]) -> None:
    """Raise `UserError` where what is read lies in more than one of these folders: they are data sets of their own."""
    if len(them := sorted(map(str, set(folders)))) > 1:
        raise UserError(f"{source} holds several data sets, in {few(them)}; name one of them")


def few(names: Sequence[str]) -> str:
    """Return the first five names, and how many there are more."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def decode(data: bytes, where: str, colour: bool | None) -> np.ndarray:
    """Return an image's pixels, uint8 `[H, W, C]`; grey where `colour` is None and the image is grey."""
    from PIL import Image

    bad = (*UNREADABLE, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning)
    with refused_as(f"{where} is not a readable image", bad), Image.open(BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > PIXELS:
            raise UserError(f"{where} has {image.width}x{image.height} pixels; allowed are {PIXELS}")
        if getattr(image, "is_animated", False):
            raise UserError(f"{where} has {getattr(image, 'n_frames', 'several')} frames; a sample is one image")
        image = exact(image, where)
        grey = image.mode in ("1", "L") if colour is None else not colour
        pixels = np.asarray(image.convert("L" if grey else "RGB"))
    return pixels.reshape(*pixels.shape[:2], -1)


def exact(image: Any, where: str) -> Any:
    """Return an image of Pillow's as "1", "L" (grey) or "RGB", of the same 8-bit values.

    Refused are more than 8 bits, transparent pixels, and colours without a fixed meaning in RGB.
    """
    tiles = getattr(image, "tile", [])  # in [3] how the file has it; BGR;16 has 5 bits
    stored = " ".join(str(tile[3]) for tile in tiles).replace("BGR;16", "")
    deep = ";16" in stored or any(tile[0].startswith("ppm") for tile in tiles)  # netpbm with another maximum than 255
    if image.mode[0] in "IF" or (deep and image.mode not in ("1", "P")):
        raise UserError(f"{where} is of more than 8 bits per channel; scale it to 8 bits yourself")
    if image.mode in ("1", "L", "RGB") and "transparency" not in image.info:
        return image
    if image.mode in ("1", "L", "P", "LA", "PA", "RGB", "RGBA"):
        whole = image.convert("RGBA")
        if whole.getextrema()[3][0] < 255:
            raise UserError(f"{where} has transparent pixels; put it on a background yourself")
        return image.convert("L") if image.mode in ("1", "L", "LA") else whole.convert("RGB")
    raise UserError(f"{where} is {image.mode}; allowed are grey, RGB and palettes, whose colours are fixed")
