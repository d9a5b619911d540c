"""Reads images of a folder or archive, as uint8 of one size, with their split, client and class.

`placed` is for the user's own images, `published` for the data sets of 32x32 that this package has.
"""

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dpfl_mpi.data.source import Arrays
from dpfl_mpi.datasets._archives import entries
from dpfl_mpi.datasets._folders import LISTS, Layout, check_classes, class_list, layout
from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import UNREADABLE, memory, refused_as

# image formats that Pillow reads itself: for some others it starts programs
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
SUFFIXES = {
    *(".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".webp"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
}
PIXELS = 2**26  # most of one image
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")  # Pillow's modes of at most 8 bits per channel
Numbers = tuple[float, ...]


def placed(
    source: Path, shape: tuple[int, ...] | None = None, side: int = 0, needed: Sequence[str] = ()
) -> tuple[np.ndarray, Layout]:
    """Return the images of a folder or archive, `[M, H, W, C]`, and what they are.

    They are in colour if `shape`, or else any image, has colour. All have the size of `shape`, or
    that of the first image, or are scaled to `side` x `side`. `needed` are the splits that must be
    there.
    """
    from tqdm import tqdm

    images: dict[PurePosixPath, np.ndarray] = {}
    listed: dict[PurePosixPath, str] = {}
    others = []
    size, total, channels = shape, 0, 1  # total: bytes
    with tqdm(desc=f"reading {source.name}", unit="image", disable=None) as bar:
        for path, read in entries(source):
            if path.name.endswith(LISTS):
                listed |= class_list(read(), path)
                continue
            if path.suffix.lower() not in SUFFIXES:
                others.append(path)
                continue
            if path in images:
                raise UserError(f"{source} holds {path} twice; pack it anew")
            colour = None if shape is None else shape[2] == 3
            pixels = decode(read(), f"{source}: {path}", colour, side)
            size = size or pixels.shape
            if pixels.shape[:2] != size[:2]:
                wanted = f"{size[0]}x{size[1]}"
                mend = f", the first image {wanted}; --size {min(size[:2])} scales all"
                mend = f"; allowed is {wanted}" if shape else mend
                raise UserError(f"{source}: {path} is {pixels.shape[0]}x{pixels.shape[1]}{mend}")
            images[path] = pixels
            total += pixels.nbytes
            # where one has colour, grey ones get as many channels
            channels = max(channels, pixels.shape[2])
            if total + len(images) * math.prod(size[:2]) * channels > memory():
                raise UserError(f"{source} exceeds this machine's memory; use a larger machine")
            bar.update()
    found = layout(source, images, listed, others, needed=needed)
    # where one has colour, a grey one gets equal channels
    of_all = np.broadcast_shapes(*(images[path].shape for path in found.files))
    return np.stack([np.broadcast_to(images[path], of_all) for path in found.files]), found


def published(
    source: Path, classes: tuple[str, ...], mean: Numbers, std: Numbers, *needed: str
) -> Arrays:
    """Return a published data set of 32x32 images in colour; all `needed` splits must be there."""
    # without `classes` its classes are those of the training part, in alphabetical order
    x, found = placed(source, (32, 32, 3), needed=needed)
    names, y = np.unique(found.label, return_inverse=True)
    if classes:
        check_classes(source, "train", {*names}, classes)
    assert found.test is not None, "all splits are there"
    parts = ~found.test, found.test
    train, test = ((x[part], y[part].astype(np.int64)) for part in parts)
    return Arrays(*train, *test, tuple(names.tolist()), mean, std)


def has_16_bits(image: Any) -> bool:
    """Return whether an image in colour has more than 8 bits, which Pillow cuts off."""
    return any(
        ";16" in str(arguments) or (codec.startswith("ppm") and arguments[1] > 255)
        for codec, _, _, arguments in image.tile
    )


def decode(data: bytes, where: str, colour: bool | None, side: int = 0) -> np.ndarray:
    """Return an image's pixels, uint8 `[H, W, C]`, with `colour` or grey; None: as the image is."""
    # With a `side` it is scaled to a square. `where` begins the sentence of an error.
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
        if image.mode not in MODES:
            raise UserError(f"{where} is {image.mode}; allowed are grey, RGB and palettes")
        if has_16_bits(image):
            raise UserError(f"{where} has 16 bits per channel; allowed are 8")
        grey = image.mode in ("1", "L", "LA") if colour is None else not colour
        eight_bits = image.convert("L" if grey else "RGB")
        if side:
            eight_bits = eight_bits.resize((side, side), Image.Resampling.BILINEAR)
        pixels = np.asarray(eight_bits)
    return pixels.reshape(*pixels.shape[:2], -1)
