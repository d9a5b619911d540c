"""Read images by split and class, as uint8 of one size."""

from collections import Counter
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dpfl_mpi.datasets._archives import check_one, entries, is_hidden, warn_of_unread
from dpfl_mpi.datasets._folders import check_classes
from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import UNREADABLE, memory, refused_as

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # of others Pillow starts programs
SUFFIXES = {
    *(".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".webp"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
}
PIXELS = 2**26  # most of one image
# images uint8 [M, H, W, C] and labels int64 [M] of each split
Images = dict[str, tuple[np.ndarray, np.ndarray]]


def image_splits(
    source: Path,
    splits: Sequence[str],
    classes: tuple[str, ...] | None = None,
    shape: tuple[int, ...] | None = None,
) -> tuple[Images, tuple[str, ...]]:
    """Return the images of SPLIT/CLASS/* of a folder or archive, and the names of the classes.

    They are in the order of class and file name, so a folder and its archive are the same data.

    Args:
        classes: by default those of the first split, in alphabetical order.
        shape: height, width and channels; by default those of the first image, in colour if any
            image has colour.
    """
    found: dict[str, list[tuple[str, str, np.ndarray]]] = {split: [] for split in splits}
    unread = Counter[str]()  # images elsewhere, and other files here

    def is_read(path: PurePosixPath, _: Any) -> bool:
        placed = len(path.parts) > 2 and path.parts[-3] in found
        image = path.suffix.lower() in SUFFIXES
        if is_hidden(path) or not (placed or image):
            return False
        if not (placed and image):
            unread[str(path.parent)] += 1
            return False
        split, name = path.parts[-3:-1]
        if classes is not None and name not in classes:
            raise UserError(f"{source}: {split} holds {name}; allowed are {', '.join(classes)}")
        return True

    images = decoded(source, is_read, shape)
    for path, pixels in images.items():
        split, name, file = path.parts[-3:]
        found[split].append((name, file, pixels))
    places = ", ".join(f"{split}/CLASS" for split in splits)
    warn_of_unread(source, unread, f"{', '.join(sorted(SUFFIXES))} in {places}")
    check_one(source, (path.parents[2] for path in images))
    names = classes or tuple(sorted({name for name, _, _ in found[splits[0]]}))
    channels = max((pixels.shape[2] for pixels in images.values()), default=1)
    out = {}
    for split, rows in found.items():
        check_classes(source, split, {name for name, _, _ in rows}, names)
        rows.sort(key=lambda row: row[:2])
        labels = np.array([names.index(name) for name, _, _ in rows], np.int64)
        out[split] = stacked([pixels for _, _, pixels in rows], channels), labels
    return out, names


def decoded(
    source: Path,
    is_read: Callable[[PurePosixPath, Callable[[], bytes]], bool],
    shape: tuple[int, ...] | None = None,
    side: int = 0,
) -> dict[PurePosixPath, np.ndarray]:
    """Return the images of a folder or archive for which `is_read(path, what reads it)`.

    They are of one size: `shape`, that of the first one, or scaled to `side` x `side`.
    """
    from tqdm import tqdm

    found: dict[PurePosixPath, np.ndarray] = {}
    size, total = shape, 0
    with tqdm(desc=f"reading {source.name}", unit="image", disable=None) as bar:
        for path, read in entries(source):
            if not is_read(path, read):
                continue
            if path in found:
                raise UserError(f"{source} holds {path} twice; pack it anew")
            colour = None if shape is None else shape[2] == 3
            pixels = decode(read(), f"{source}: {path}", colour, side)
            size = size or pixels.shape
            if pixels.shape[:2] != size[:2]:
                wanted = f"{size[0]}x{size[1]}"
                mend = f", the first image {wanted}; --size {min(size[:2])} scales all"
                mend = f"; allowed is {wanted}" if shape else mend
                raise UserError(f"{source}: {path} is {pixels.shape[0]}x{pixels.shape[1]}{mend}")
            found[path] = pixels
            total += pixels.nbytes
            if 2 * total > memory():
                raise UserError(f"{source} exceeds this machine's memory; use a larger machine")
            bar.update()
    return found


def stacked(pixels: Sequence[np.ndarray], channels: int) -> np.ndarray:
    """Return images `[M, H, W, channels]`; a grey one is repeated where others have colour."""
    out = np.empty((len(pixels), *pixels[0].shape[:2], channels), np.uint8)
    for image, one in zip(out, pixels, strict=True):
        image[:] = one
    return out


def decode(data: bytes, where: str, colour: bool | None, side: int = 0) -> np.ndarray:
    """Return an image's pixels, uint8 `[H, W, C]`; without `colour`, grey if the image is grey.

    With a `side` it is scaled to a square.
    """
    from PIL import Image

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    errors = (*UNREADABLE, SyntaxError, *bombs)
    unreadable = refused_as(f"{where} is not a readable image", errors)
    with unreadable, Image.open(BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > PIXELS:
            raise UserError(f"{where} has too many pixels; allowed are {PIXELS}")
        if getattr(image, "is_animated", False):
            frames = getattr(image, "n_frames", "several")
            raise UserError(f"{where} has {frames} frames; a sample is one image")
        eight_bits = to_eight_bits(image, where)
        grey = eight_bits.mode in ("1", "L") if colour is None else not colour
        eight_bits = eight_bits.convert("L" if grey else "RGB")
        if side:
            eight_bits = eight_bits.resize((side, side), Image.Resampling.BILINEAR)
        pixels = np.asarray(eight_bits)
    return pixels.reshape(*pixels.shape[:2], -1)


def to_eight_bits(image: Any, where: str) -> Any:
    """Return an image of Pillow's as "1", "L" (grey) or "RGB", of the same 8-bit values.

    Refused are more than 8 bits, transparent pixels, and colours without a fixed meaning in RGB.
    """
    tiles = getattr(image, "tile", [])  # in [3] the file's own mode; BGR;16 has 5 bits
    stored = " ".join(str(tile[3]) for tile in tiles).replace("BGR;16", "")
    # netpbm with another maximum than 255
    deep = ";16" in stored or any(tile[0].startswith("ppm") for tile in tiles)
    if image.mode[0] in "IF" or (deep and image.mode not in ("1", "P")):
        raise UserError(f"{where} is of more than 8 bits per channel; scale it to 8 bits yourself")
    if image.mode in ("1", "L", "RGB") and "transparency" not in image.info:
        return image
    if image.mode in ("1", "L", "P", "LA", "PA", "RGB", "RGBA"):
        opaque = image.convert("RGBA")
        if opaque.getextrema()[3][0] < 255:
            raise UserError(f"{where} has transparent pixels; put it on a background yourself")
        return image.convert("L") if image.mode in ("1", "L", "LA") else opaque.convert("RGB")
    raise UserError(f"{where} is {image.mode}; allowed are grey, RGB and palettes")
