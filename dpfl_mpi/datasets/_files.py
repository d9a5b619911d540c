"""Reading what a publisher ships, a folder or an archive, without unpacking anything.

Nothing is written to disk, nothing is ever unpickled, and every size is bounded before it is read. An archive that names a place
outside itself is refused as a whole: it was not made by the publisher.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import lzma
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import UNREADABLE, memory, open_regular, read_bytes

LARGEST = 16 * 2**20  # bytes of one image
MEMBERS = 4_000_000  # files in one archive; NIST's special database 19 has 1.7 million
TOTAL = 64 * 2**30  # bytes in one archive, unpacked
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
PIECE = 2**20  # bytes read at once; a tar's headers are smaller
ROOM = 2**28  # bytes for the first images
PIXELS = 2**26  # of one image
BROKEN = (*UNREADABLE, tarfile.TarError, zipfile.BadZipFile, zipfile.LargeZipFile, lzma.LZMAError)

Entry = tuple[PurePosixPath, Callable[[], bytes]]  # path inside the source, and what reads it


def entries(source: Path, largest: int = LARGEST) -> Iterator[Entry]:
    """Yield every regular file of a folder, tar (gz, bz2, xz) or zip archive; a tar's must be read before the next one is asked for.

    Raises:
        UserError: the archive is truncated, no archive, names a path outside itself, or holds more than the bounds allow.
    """
    if source.is_dir():
        for file in sorted(p for p in source.rglob("*") if p.is_file()):
            yield PurePosixPath(file.relative_to(source).as_posix()), functools.partial(file_bytes, file, largest)
        return
    open_regular(source).close()  # a pipe or a device has no end
    try:
        for path, read in in_zip(source, largest) if zipfile.is_zipfile(source) else in_tar(source, largest):
            yield path, functools.partial(unbroken, source, read)
    except BROKEN:
        raise broken(source) from None


def unbroken(source: Path, read: Callable[[], bytes]) -> bytes:
    """Return what `read` returns; an archive that ends too early is one sentence."""
    try:
        return read()
    except BROKEN:
        raise broken(source) from None


def broken(source: Path) -> UserError:
    """Return the error for an archive that cannot be read to its end."""
    return UserError(f"{source} is truncated or not a tar or zip archive; download it again")


class Pieces:
    """An unpacked tar as `tarfile` reads it, which refuses to read much at once: a header can claim gigabytes, and is read as a whole."""

    def __init__(self, file: Any):
        self.file, self.tell, self.seek, self.close = file, file.tell, file.seek, file.close

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        if not 0 <= size <= 2 * PIECE:
            raise tarfile.ReadError("a header of more than a megabyte")
        return bytes(self.file.read(size))


def unpacked(source: Path) -> Any:
    """Return a file open for reading that unpacks what its first bytes say is packed."""
    with source.open("rb") as file:
        first = file.read(6)
    known: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
    return next((opens(source) for magic, opens in known.items() if first.startswith(magic)), None) or source.open("rb")


def in_tar(source: Path, largest: int) -> Iterator[Entry]:
    """Yield the files of a tar archive in its own order, in one pass."""
    count = total = 0
    with unpacked(source) as file, tarfile.open(fileobj=cast(Any, Pieces(file)), mode="r:") as archive:
        for member in archive:
            count, total = check(source, member.name, member.size if member.isfile() else 0, count, total)
            if member.isfile():

                def read(member: tarfile.TarInfo = member) -> bytes:
                    bound(source, member.name, member.size, largest)
                    opened = archive.extractfile(member)
                    return b"".join(iter(functools.partial(opened.read, PIECE), b"")) if opened else b""

                yield PurePosixPath(member.name), read
            archive.members = []  # type: ignore[attr-defined]  # or a million headers stay in memory
    whole_tar(source)


def whole_tar(source: Path) -> None:
    """Raise `UserError` for a plain tar cut between two files, which `tarfile` takes for a whole one: its end is two empty blocks."""
    with source.open("rb") as file:
        file.seek(257)
        plain = file.read(5) == b"ustar"
        file.seek(max(0, source.stat().st_size - 512))
        if plain and any(file.read(512)):
            raise broken(source)


def in_zip(source: Path, largest: int) -> Iterator[Entry]:
    """Yield the files of a zip archive in its own order."""
    count = total = 0
    with zipfile.ZipFile(source) as archive:
        for info in archive.infolist():
            count, total = check(source, info.filename, info.file_size, count, total)
            if not info.is_dir():

                def read(info: zipfile.ZipInfo = info) -> bytes:
                    if info.flag_bits & 1:
                        raise UserError(f"{source}: {info.filename} is encrypted; pack it without a password")
                    bound(source, info.filename, info.file_size, largest)
                    with archive.open(info) as opened:
                        return opened.read(info.file_size + 1)[: info.file_size]

                yield PurePosixPath(info.filename), read


def check(source: Path, name: str, size: int, count: int, total: int) -> tuple[int, int]:
    """Return the number and bytes of an archive's files so far; refuse a path outside it, or too much of either."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or (path.parts and path.parts[0].endswith(":")):
        raise UserError(f"{source} holds the path {name!r}, which leads out of the archive; nothing was read from it")
    count, total = count + 1, total + size
    if count > MEMBERS or total > TOTAL or size < 0:
        raise UserError(
            f"{source} holds more than {MEMBERS} files or {TOTAL >> 30} GiB; that is no data set known here"
        )
    return count, total


def bound(source: Path, name: str, size: int, largest: int) -> None:
    """Raise `UserError` for a file larger than any of its kind is."""
    if size > largest:
        raise UserError(f"{source}: {name} has {size} bytes; allowed are {largest}")


def file_bytes(path: Path, largest: int) -> bytes:
    """Return a file's bytes."""
    return read_bytes(path, largest)


def hidden(path: PurePosixPath) -> bool:
    """Return whether a file is none of the publisher's: .DS_Store, ._image.png and their like."""
    return any(part.startswith((".", "__MACOSX")) for part in path.parts if part != ".")


class Stack:
    """Images of one size, uint8 `[M, H, W, C]`, in an array that doubles when it is full: few copies for 270,000 images."""

    def __init__(self, source: Path):
        self.source, self.count = source, 0
        self.images = np.empty((0, 0, 0, 0), np.uint8)

    def add(self, path: PurePosixPath, pixels: np.ndarray) -> int:
        """Add an image `[H, W, C]` and return its number; a grey one thrice where others have colour.

        Raises:
            UserError: it is of another size than the first, or the machine has not the memory.
        """
        if self.count == 0:
            self.images = np.empty((max(1, min(1024, ROOM // max(1, pixels.size))), *pixels.shape), np.uint8)
        if pixels.shape[-1] > self.images.shape[-1]:  # the first one in colour
            fits(self.source, 4 * self.images.nbytes)
            self.images = np.repeat(self.images, 3, axis=3)
        if pixels.shape[:2] != self.images.shape[1:3]:
            raise UserError(
                f"{self.source}: {path} is {size(pixels)}, the first image {size(self.images[0])}; all must be of one size"
            )
        if self.count == len(self.images):
            fits(self.source, 3 * self.images.nbytes)
            self.images = np.concatenate([self.images, np.empty_like(self.images)])
        self.images[self.count] = pixels
        self.count += 1
        return self.count - 1


Found = dict[str, list[tuple[str, str, int]]]  # by split: class, file name and number of each image


def image_splits(
    source: Path, splits: Iterable[str], names: tuple[str, ...] | None = None, colour: bool | None = None
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
    """Return images and labels of SPLIT/CLASS/* for each split of a folder or archive, and the names of the classes.

    Images are uint8 `[M, H, W, C]` in the order of class and file name, whatever the order of the archive: a folder and its archive
    are the same data. Without `colour` they are grey where all of them are.

    Raises:
        UserError: a class folder is missing or empty, a file is no image, or of another size than the first.
    """
    stack, found = read_images(source, tuple(splits), names, colour)
    classes = classes_of(source, found, names)
    out = {}
    for split, images in found.items():
        rows = sorted(images)
        labels = np.array([classes.index(name) for name, _, _ in rows], np.int64)
        out[split] = stack.images[[i for _, _, i in rows]], labels
    return out, classes


def read_images(
    source: Path, splits: tuple[str, ...], names: tuple[str, ...] | None, colour: bool | None
) -> tuple[Stack, Found]:
    """Return all images of SPLIT/CLASS/*, as they come, and where each belongs; arguments and errors as in `image_splits`."""
    from tqdm import tqdm

    found: Found = {split: [] for split in splits}
    unread = Counter[str]()  # images of other folders
    stack = Stack(source)
    with tqdm(desc=f"reading {source.name}", unit="image", disable=None) as bar:
        for path, read in entries(source):
            if hidden(path) or path.suffix.lower() not in SUFFIXES:
                continue
            if len(path.parts) < 3 or path.parts[-3] not in found:
                unread[str(PurePosixPath(*(path.parts[:-2] or path.parts[:-1])))] += 1
                continue
            split, name, file = path.parts[-3:]
            if names is not None and name not in names:
                raise UserError(f"{source}: {split} holds the class {name}; allowed are {', '.join(names)}")
            found[split].append((name, file, stack.add(path, decode(read(), f"{source}: {path}", colour))))
            bar.update()
    if unread:
        print(
            f"warning: {source}: the images of {few(sorted(unread))} are not read ({unread.total()}); read are "
            f"{', '.join(f'{split}/CLASS/*' for split in splits)}",
            file=sys.stderr,
        )
    return stack, found


def few(names: Sequence[str]) -> str:
    """Return the first five names, and how many there are more."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def classes_of(source: Path, found: Found, names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the classes: `names`, or those of the first split in alphabetical order.

    Raises:
        UserError: a split lacks one, or has others.
    """
    classes = names or tuple(sorted({name for name, _, _ in next(iter(found.values()))}))
    for split, images in found.items():
        held = {name for name, _, _ in images}
        missing, others = sorted({*classes} - held), sorted(held - {*classes})
        if missing or others or not classes:
            what = f"no image of the class {missing[0]}" if missing else f"other classes ({few(others)})"
            listed = f" of {', '.join(classes)}" if 0 < len(classes) <= 20 else ""
            raise UserError(
                f"{source}: {split} holds {what if classes else 'no image'}; expected {split}/CLASS/*.png for every class{listed}"
            )
    return classes


def fits(source: Path, needed: int) -> None:
    """Raise `UserError` where images need more bytes than this machine has."""
    if needed > memory():
        raise UserError(f"{source} holds more images than this machine's memory; use a larger one")


def size(pixels: np.ndarray) -> str:
    """Return an image's size in words."""
    return f"{pixels.shape[0]}x{pixels.shape[1]}"


def decode(data: bytes, where: str, colour: bool | None) -> np.ndarray:
    """Return an image's pixels, uint8 `[H, W, C]`; grey where `colour` is None and the image is grey.

    What 8 bits cannot hold exactly is refused by its name, and never rounded: see docs/data.md.
    """
    from PIL import Image

    bad = (*UNREADABLE, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with Image.open(BytesIO(data)) as image:
            if image.width * image.height > PIXELS:
                raise UserError(f"{where} has {image.width}x{image.height} pixels; allowed are {PIXELS}")
            if getattr(image, "is_animated", False):
                raise UserError(f"{where} has {getattr(image, 'n_frames', 'several')} frames; a sample is one image")
            image = exact(image, where)
            grey = image.mode == "L" if colour is None else not colour
            pixels = np.asarray(
                image if image.mode == ("L" if grey else "RGB") else image.convert("L" if grey else "RGB")
            )
    except bad:
        raise UserError(f"{where} is not a readable image") from None
    return pixels.reshape(*pixels.shape[:2], -1)


def exact(image: Any, where: str) -> Any:
    """Return an image of Pillow's as "L" (grey) or "RGB", of the same 8-bit values.

    Raises:
        UserError: it has more than 8 bits that matter, transparent pixels, or colours without a fixed meaning in RGB.
    """
    tiles = getattr(image, "tile", [])
    # Pillow's names of how the file has it; BGR;16 has 5 bits
    stored = " ".join(str(tile[3]) for tile in tiles).replace("BGR;16", "")
    deep = ";16" in stored or any(tile[0].startswith("ppm") for tile in tiles)  # netpbm with another maximum than 255
    if image.mode.startswith("I;16") or (image.mode == "I" and (deep or image.format == "PNG")):
        values = np.asarray(image).astype(np.int64)
        if (values % 257).any():  # 65535 / 255
            raise UserError(
                f"{where} is of 16 bits, and has values that 8 bits do not hold exactly; scale it to 8 bits yourself"
            )
        return fromarray((values // 257).astype(np.uint8))
    if image.mode in ("I", "F") or (deep and image.mode not in ("1", "P")):
        bits = {"I": "32-bit whole numbers", "F": "floats"}.get(image.mode, "more than 8 bits per channel")
        raise UserError(f"{where} is of {bits}, which 8 bits do not hold; scale it to 8 bits yourself")
    if image.mode in ("1", "L", "RGB") and "transparency" not in image.info:
        return image.convert("L") if image.mode == "1" else image
    if image.mode in ("1", "L", "P", "LA", "PA", "RGB", "RGBA"):
        whole = image.convert("RGBA")
        if whole.getextrema()[3][0] < 255:
            raise UserError(f"{where} has transparent pixels; put it on a background yourself")
        return image.convert("L") if image.mode in ("1", "L", "LA") else whole.convert("RGB")
    raise UserError(
        f"{where} is {image.mode}; allowed are grey, RGB and palettes: what colours {image.mode} means, its file does not fix"
    )


def fromarray(pixels: np.ndarray) -> Any:
    """Return a grey image of Pillow's."""
    from PIL import Image

    return Image.fromarray(pixels)
