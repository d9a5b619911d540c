"""Small files in the publishers' own forms, and where the real ones lie."""

import dataclasses
import io
import itertools
import json
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def real(name):
    """Return a real data file, or skip: the project ships none."""
    path = Path(os.environ.get("DPFL_SHARED", Path(__file__).parents[2] / "shared")) / "data" / name
    if not path.exists():
        pytest.skip(f"needs the real data file {path} (DPFL_SHARED names its folder)")
    return path


def stored(image, kind="PNG", **how):
    """Return the bytes of a file of an image of Pillow's, or of these pixels."""
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(out := io.BytesIO(), kind, **how)
    return out.getvalue()


def images(splits, classes, each=3, size=(32, 32), channels=3, seed=0):
    """Return {SPLIT/CLASS/0.png: bytes}."""
    rng, shape = np.random.default_rng(seed), (*size, 3) if channels == 3 else size
    places = itertools.product(splits, classes, range(each))
    draw = lambda: stored(rng.integers(0, 256, shape, np.uint8))  # noqa: E731
    return {f"{split}/{name}/{i}.png": draw() for split, name, i in places}


def labelled(path, sizes, shape, noise):
    """Write a prepared file of images `[H, W, C]` in four classes that a model can learn."""
    from dpfl_mpi import prepare
    from dpfl_mpi.data.source import Arrays

    rng, channels = np.random.default_rng(0), shape[-1]
    patterns = rng.integers(40, 215, (4, *shape))
    parts = []
    for m in sizes:
        labels = np.arange(m) % 4
        x = np.clip(patterns[labels] + rng.normal(0, noise, (m, *shape)), 0, 255)
        parts += [x.astype(np.uint8), labels]
    arrays = Arrays(*parts, tuple("abcd"), (0.5,) * channels, (0.25,) * channels)
    prepare.write(arrays, "image_folder", path)
    return path


WILD = 2  # the client of `wild` whose model diverges


def wild(path, clients):
    """Write a prepared file of 8x8 samples of clients; those of `WILD` are far too large."""
    from dpfl_mpi import prepare
    from dpfl_mpi.data.own import arrays_of

    rng, y, owner = np.random.default_rng(0), np.arange(480) % 4, np.arange(480) // 4 % clients
    x = rng.integers(40, 215, (4, 8, 8, 1))[y] + rng.normal(0, 60, (480, 8, 8, 1))
    x = np.clip(x, 0, 255)
    x[owner == WILD] *= 1e25
    arrays = arrays_of(x.astype("float32"), y, owner)
    arrays = dataclasses.replace(arrays, mean=(128.0,), std=(64.0,))
    prepare.write(arrays, "image_folder", path)
    return path


def folder(path, files):
    """Write {name: bytes} below a folder and return it."""
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def flip(path, at=0, share=0.0):
    """Change a bit of the byte `at`, or at this share of the file; return the path."""
    data = bytearray(path.read_bytes())
    data[at + int(share * (len(data) - 1))] ^= 8
    path.write_bytes(data)
    return path


def tar(path, files, mode="w:gz"):
    """Write {name: bytes} as a tar archive and return it."""
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def zipped(path, files):
    """Write {name: bytes} as a zip archive and return it."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def leaf(writers=6, each=20, labels=62, seed=0):
    """Return LEAF's shards by name: writers f00... with a second copy of one image each."""
    rng = np.random.default_rng(seed)
    shards = {"train/a.json": {}, "train/b.json": {}, "test/a.json": {}}
    for k in range(writers):
        x = (rng.integers(0, 256, (each, 784)) / 255).round(6).tolist()
        y = rng.integers(0, labels, each).tolist()
        cut = each - each // 5
        train = {"x": [*x[:cut], x[0]], "y": [*y[:cut], y[0]]}  # LEAF lists an image twice
        shards["train/a.json" if k % 2 else "train/b.json"][f"f{k:02}"] = train
        shards["test/a.json"][f"f{k:02}"] = {"x": x[cut:], "y": y[cut:]}
    out = {}
    for name, data in shards.items():
        counts = [len(of_writer["y"]) for of_writer in data.values()]
        shard = {"users": list(data), "num_samples": counts, "user_data": data}
        out[name] = json.dumps(shard).encode()
    return out


def records(count, label, seed=0, header=1):
    """Return CIFAR's binary records: `header` bytes of label(s), then 3072 of pixels."""
    rows = np.random.default_rng(seed).integers(0, 256, (count, header + 3072), np.uint8)
    rows[:, :header] = np.asarray(label).reshape(count, -1)
    return rows.tobytes()
