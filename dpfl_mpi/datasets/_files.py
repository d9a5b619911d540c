"""Reading what a publisher ships, a folder or an archive, without unpacking anything.

Nothing is written to disk, nothing is ever unpickled, and every size is bounded before it is read. An archive that names a place
outside itself is refused as a whole: it was not made by the publisher.
"""

from __future__ import annotations

import functools
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.files import explained

LARGEST = 16 * 2**20  # bytes of one image
MEMBERS = 4_000_000  # files in one archive; NIST's special database 19 has 1.7 million
TOTAL = 64 * 2**30  # bytes in one archive, unpacked
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
BROKEN = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError, NotImplementedError)

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
    return UserError(f"{source} is truncated or no tar or zip archive; download it again")


def in_tar(source: Path, largest: int) -> Iterator[Entry]:
    """Yield the files of a tar archive in its own order, in one pass."""
    count = total = 0
    with tarfile.open(source) as archive:
        for member in archive:
            count, total = check(source, member.name, member.size if member.isfile() else 0, count, total)
            if member.isfile():

                def read(member: tarfile.TarInfo = member) -> bytes:
                    bound(source, member.name, member.size, largest)
                    opened = archive.extractfile(member)
                    return opened.read() if opened else b""

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
    if count > MEMBERS or total > TOTAL:
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
    bound(path.parent, path.name, path.stat().st_size, largest)
    with explained(f"{path} cannot be read"):
        return path.read_bytes()


def hidden(path: PurePosixPath) -> bool:
    """Return whether a file is none of the publisher's: .DS_Store, ._image.png and their like."""
    return any(part.startswith((".", "__MACOSX")) for part in path.parts if part != ".")


def image_splits(
    source: Path, splits: Iterable[str], names: tuple[str, ...] | None = None, colour: bool | None = None
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
    """Return images and labels of SPLIT/CLASS/* for each split of a folder or archive, and the names of the classes.

    Images are uint8 `[M, H, W, C]` in the order of class and file name, whatever the order of the archive: a folder and its archive
    are the same data. Without `colour` they are grey where the first one is.

    Raises:
        UserError: a class folder is missing or empty, a file is no image, or of another size than the first.
    """
    from tqdm import tqdm

    splits = tuple(splits)
    found: dict[str, list[tuple[str, str, int]]] = {split: [] for split in splits}
    stack, count = np.empty((0, 0, 0, 0), np.uint8), 0
    with tqdm(desc=f"reading {source.name}", unit="image", disable=None) as bar:
        for path, read in entries(source):
            if (
                len(path.parts) < 3
                or path.parts[-3] not in found
                or hidden(path)
                or path.suffix.lower() not in SUFFIXES
            ):
                continue
            split, name, file = path.parts[-3:]
            if names is not None and name not in names:
                raise UserError(f"{source}: {split} holds the class {name}; allowed are {', '.join(names)}")
            pixels = decode(read(), f"{source}: {path}", colour)
            if count == 0:
                colour = pixels.shape[-1] == 3
                stack = np.empty((1024, *pixels.shape), np.uint8)
            if pixels.shape != stack.shape[1:]:
                raise UserError(
                    f"{source}: {path} is {size(pixels)}, the first image {size(stack[0])}; all must be of one size"
                )
            if count == len(stack):
                stack = np.concatenate([stack, np.empty_like(stack)])  # doubled: few copies for 270,000 images
            stack[count] = pixels
            found[split].append((name, file, count))
            count += 1
            bar.update()
    classes = names or tuple(sorted({name for name, _, _ in found[splits[0]]}))
    for split in splits:
        missing = sorted(set(classes) ^ {name for name, _, _ in found[split]})
        if missing or not classes:
            what = f"no image of the class {missing[0]}" if missing and missing[0] in classes else "other classes"
            raise UserError(
                f"{source}: {split} holds {what if classes else 'no image'}; expected {split}/CLASS/*.png for every class"
                + (f" of {', '.join(classes)}" if 0 < len(classes) <= 20 else "")
            )
    out = {}
    for split in splits:
        rows = sorted(found[split])
        labels = np.array([classes.index(name) for name, _, _ in rows], np.int64)
        out[split] = stack[[i for _, _, i in rows]], labels
    return out, classes


def size(pixels: np.ndarray) -> str:
    """Return an image's size in words."""
    return f"{pixels.shape[0]}x{pixels.shape[1]}"


def decode(data: bytes, where: str, colour: bool | None) -> np.ndarray:
    """Return an image's pixels, uint8 `[H, W, C]`; grey where `colour` is None and the image is grey."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(data)) as image:
            grey = image.mode in ("1", "L", "I;16") if colour is None else not colour
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        raise UserError(f"{where} is not a readable image") from None
    return pixels.reshape(*pixels.shape[:2], -1)


def moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation a channel of uint8 images, in pixels scaled to 0..1."""
    channels = range(images.shape[-1])
    counts = [np.bincount(images[..., c].reshape(-1), minlength=256) for c in channels]  # exact, and no float copy
    values = np.arange(256) / 255
    mean = [float(n @ values / n.sum()) for n in counts]
    std = [float(np.sqrt(n @ (values - m) ** 2 / n.sum())) for n, m in zip(counts, mean, strict=True)]
    return tuple(mean), tuple(max(s, 1e-3) for s in std)
