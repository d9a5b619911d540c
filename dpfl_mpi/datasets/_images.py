"""Read images by split and class, as uint8 of one size."""

from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dpfl_mpi.datasets._archives import check_one, entries, first_five, is_hidden, warn_of_unread
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
    from tqdm import tqdm

    found: dict[str, list[tuple[str, str, np.ndarray]]] = {split: [] for split in splits}
    unread = Counter[str]()  # images elsewhere, and other files here
    seen = set[PurePosixPath]()
    size, channels, total = shape, 1, 0
    with tqdm(desc=f"reading {source.name}", unit="image", disable=None) as bar:
        for path, read in entries(source):
            placed = len(path.parts) > 2 and path.parts[-3] in found
            image = path.suffix.lower() in SUFFIXES
            if is_hidden(path) or not (placed or image):
                continue
            if not (placed and image):
                unread[str(path.parent)] += 1
                continue
            split, name, file = path.parts[-3:]
            if path in seen:
                raise UserError(f"{source} holds {path} twice; pack it anew")
            seen.add(path)
            if classes is not None and name not in classes:
                raise UserError(f"{source}: {split} holds {name}; allowed are {', '.join(classes)}")
            colour = None if shape is None else shape[2] == 3
            pixels = decode(read(), f"{source}: {path}", colour)
            size = size or pixels.shape
            if pixels.shape[:2] != size[:2]:
                wanted = f"{size[0]}x{size[1]}"
                wanted = f"; allowed is {wanted}" if shape else f", the first image {wanted}"
                raise UserError(f"{source}: {path} is {pixels.shape[0]}x{pixels.shape[1]}{wanted}")
            channels = max(channels, pixels.shape[2])
            total += pixels.nbytes
            if 2 * total > memory():
                raise UserError(f"{source} exceeds this machine's memory; use a larger machine")
            found[split].append((name, file, pixels))
            bar.update()
    places = ", ".join(f"{split}/CLASS" for split in splits)
    warn_of_unread(source, unread, f"{', '.join(sorted(SUFFIXES))} in {places}")
    check_one(source, (path.parents[2] for path in seen))
    names = classes or tuple(sorted({name for name, _, _ in found[splits[0]]}))
    out = {}
    for split, rows in found.items():
        check_classes(source, split, {name for name, _, _ in rows}, names)
        rows.sort(key=lambda row: row[:2])
        images = np.empty((len(rows), *rows[0][2].shape[:2], channels), np.uint8)
        for image, (_, _, pixels) in zip(images, rows, strict=True):
            image[:] = pixels  # a grey one three times where others have colour
        out[split] = images, np.array([names.index(name) for name, _, _ in rows], np.int64)
    return out, names


def check_classes(source: Path, split: str, found: set[str], classes: tuple[str, ...]) -> None:
    missing, others = sorted({*classes} - found), sorted(found - {*classes})
    if classes and not missing and not others:
        return
    if missing:
        what = f"no image of the class {missing[0]}"
    else:
        what = f"other classes ({first_five(others)})" if others else "no image"
    every = f"every class of {', '.join(classes)}" if 0 < len(classes) <= 20 else "every class"
    raise UserError(f"{source}: {split} holds {what}; expected {split}/CLASS/*.png for {every}")


def decode(data: bytes, where: str, colour: bool | None) -> np.ndarray:
    """Return an image's pixels, uint8 `[H, W, C]`; without `colour`, grey if the image is grey."""
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
        pixels = np.asarray(eight_bits.convert("L" if grey else "RGB"))
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
