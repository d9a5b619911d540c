"""Training one client on one thread: this package against a plain and a tuned loop of PyTorch over one `nn.Module`.

    OMP_NUM_THREADS=1 python benchmarks/local_training.py [--model cnn] [--repeats 9] [--steps 100] [--augment] [--pfllib FOLDER]

The paper's CNN or another network of `SUBJECTS`, batches of 16 random samples, SGD with momentum 0.9, weight decay 1e-3, clipping at norm 20.
All are timed in turn, `repeats` times, in seconds of this process on the core; medians and ratios are of this one run.

- plain: NCHW, ReLU then pool, `torch.optim.SGD`.
- tuned: channels last, fused SGD; of the CNN, pool then ReLU (the same function, a quarter of the ReLUs).
- pfllib: `clientAVG.train` of a checkout of PFLlib (its own loop, data loader and SGD without momentum, decay or clipping).
- torch: this package without its kernels (`--kernels torch`); avx512, avx2: the native kernels in these forms. All by `Backend.train_epochs`.

Without --augment the baselines' images are floats, normalised in advance; ours are uint8 and normalised per batch. With --augment all three crop
and flip: the baselines image by image on a padded uint8 array (what a data set of torchvision transforms amounts to), ours in one gather.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from dpfl_mpi.data.partition import Partition
from dpfl_mpi.data.source import Source
from dpfl_mpi.datasets.cifar10 import MEAN, STD
from dpfl_mpi.models import cnn, mlp, resnet, text
from dpfl_mpi.numerics import BORDER
from dpfl_mpi.numerics.backend import Backend, LocalEpochs
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.native import forms
from dpfl_mpi.numerics.native_backend import NativeBackend

S = 16


class Net(nn.Module):
    """The network of docs/own-model.md."""

    def __init__(self) -> None:
        super().__init__()
        pairs = ((3, 16), (16, 32))
        parts = (nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU()) for a, b in pairs)
        self.body, self.head = nn.Sequential(*parts), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Sensors(nn.Module):
    """Two convolutions along 128 readings of 9 sensors, as UCI HAR has them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(9, 32, 9), nn.Conv1d(32, 64, 9)
        self.fc, self.head = nn.Linear(64 * 26, 128), nn.Linear(128, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool1d(self.conv1(x.squeeze(2)).relu(), 2)
        x = nn.functional.max_pool1d(self.conv2(x).relu(), 2)
        return self.head(self.fc(x.flatten(1)).relu())


class Separable(nn.Module):
    """Depthwise convolutions of 3x3, each with one of 1x1 after it, and GroupNorm (MobileNet's block)."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU()]
        for a, b, stride in ((16, 32, 1), (32, 64, 2), (64, 64, 2)):
            parts += [nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False), nn.GroupNorm(4, a), nn.ReLU()]
            parts += [nn.Conv2d(a, b, 1, bias=False), nn.GroupNorm(4, b), nn.ReLU()]
        self.body, self.head = nn.Sequential(*parts), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Subject(NamedTuple):
    """A network and its samples."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: str
    classes: int
    below: int = 256  # tokens


COLOUR = (32, 32, 3), "uint8", 10
SUBJECTS = {
    "cnn": Subject(lambda: cnn.build((32, 32, 3), 10), *COLOUR),
    "cnn-bytes": Subject(lambda: cnn.build((28, 28, 1), 10), (28, 28, 1), "uint8", 10),
    "cnn-floats": Subject(lambda: cnn.build((28, 28, 1), 10), (28, 28, 1), "float32", 10),
    "net": Subject(Net, *COLOUR),
    "resnet": Subject(lambda: resnet.build((32, 32, 3), 10, "16,32,64", 2, 8), *COLOUR),
    "text": Subject(lambda: text.build((32,), 4, 2000, 32, 4, 0, 0.0), (32,), "int32", 4, 2000),
    "mlp": Subject(lambda: mlp.build((42,), 10), (42,), "float32", 10),
    "sensors": Subject(Sensors, (1, 128, 9), "float32", 6),
    "separable": Subject(Separable, *COLOUR),
}


class Tuned(nn.Module):
    """The paper's CNN with the pool before the ReLU."""

    def __init__(self, cnn: nn.Module):
        super().__init__()
        self.cnn = cnn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.cnn
        x = nn.functional.max_pool2d(c.conv1(x), 2).relu()
        x = nn.functional.max_pool2d(c.conv2(x), 2).relu().flatten(1)
        return c.head(c.fc2(c.fc1(x).relu()).relu())


def scales(subject: Subject) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and deviation of each number of a sample's last axis."""
    if subject.shape == (32, 32, 3):
        return MEAN, STD
    axes = subject.shape[-1]
    return ((0.5,) * axes, (0.25,) * axes) if subject.dtype == "uint8" else ((0.0,) * axes, (1.0,) * axes)


def drawn(subject: Subject, rng: np.random.Generator) -> np.ndarray:
    """Return 400 random samples."""
    size = (400, *subject.shape)
    if subject.dtype == "float32":
        return rng.normal(size=size).astype(np.float32)
    return rng.integers(0, subject.below, size).astype(subject.dtype)


def augmented(padded: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Return a batch `[S, 3, 32, 32]`, cropped, flipped and normalised image by image."""
    out = []
    for i in rows:
        dy, dx = rng.integers(0, 2 * BORDER + 1, 2)
        image = padded[i, dy : dy + 32, dx : dx + 32]
        out.append(image[:, ::-1] if rng.integers(2) else image)
    x = torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2).float().div_(255)
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def baseline(
    subject: Subject, model: nn.Module, images: np.ndarray, labels: np.ndarray, steps: int, augment: bool, **fast: bool
) -> float:
    """Return the milliseconds of one of `steps` steps of the loop everybody writes; `fast` goes to the optimiser."""
    planes = len(subject.shape) == 3 and min(subject.shape[:2]) > 1
    layout = torch.channels_last if fast and planes else torch.contiguous_format
    model = model.to(memory_format=layout)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3, **fast)
    rng = np.random.default_rng(0)
    y = torch.from_numpy(labels)
    padded = np.pad(images, ((0, 0), (BORDER, BORDER), (BORDER, BORDER), (0, 0))) if augment else images
    ensemble = Ensemble(copy.deepcopy(model), *scales(subject), torch.device("cpu"), dtype=subject.dtype)
    x = ensemble.module_input(ensemble.normalise(torch.from_numpy(images)[None]))[0].contiguous(memory_format=layout)
    start = time.process_time()
    for step in range(steps):
        first = step * S % (len(y) - S + 1)
        rows = np.arange(first, first + S)
        batch = augmented(padded, rows, rng).contiguous(memory_format=layout) if augment else x[first : first + S]
        sgd.zero_grad()
        nn.functional.cross_entropy(model(batch), y[first : first + S]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 20.0)
        sgd.step()
    return (time.process_time() - start) / steps * 1e3


def pfllib(folder: Path, images: np.ndarray, labels: np.ndarray, steps: int) -> float:
    """Return those of PFLlib's client for FedAvg, on tensors normalised in advance."""
    sys.path.insert(0, str(folder / "system"))
    from flcore.clients.clientavg import clientAVG

    x = ((torch.from_numpy(images).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)
    data = list(zip(x.contiguous(), torch.from_numpy(labels), strict=True))
    known = {
        "model": cnn.build((32, 32, 3), 10), "algorithm": "FedAvg", "dataset": "", "device": "cpu", "save_folder_name": "",
        "num_classes": 10, "batch_size": S, "local_learning_rate": 0.01, "local_epochs": steps * S // len(labels),
        "learning_rate_decay": False, "learning_rate_decay_gamma": 1, "few_shot": 0,
    }  # fmt: skip
    client = clientAVG(SimpleNamespace(**known), 0, len(data), 0, train_slow=False, send_slow=False)
    client.load_train_data = lambda: torch.utils.data.DataLoader(data, S, drop_last=True, shuffle=True)
    start = time.process_time()
    client.train()
    return (time.process_time() - start) / steps * 1e3


def ours(subject: Subject, images: np.ndarray, labels: np.ndarray, steps: int, augment: bool, form: str) -> float:
    """Return those of the package's own loop: in PyTorch, or in one form of the native kernels."""
    n = len(labels)
    indptr = {"train": np.array([0, n]), "val": np.array([0, 1]), "test": np.array([0, 1])}
    indices = {"train": np.arange(n), "val": np.zeros(1, np.int64), "test": np.zeros(1, np.int64)}
    partition = Partition(indptr, indices, np.bincount(labels, minlength=subject.classes)[None], np.ones(1))
    both, shape = {"train": labels, "test": labels}, subject.shape
    source = Source(
        shape, subject.classes, *scales(subject), both, "", lambda part, rows: images[rows], dtype=subject.dtype
    )
    ensemble = Ensemble(subject.build(), *scales(subject), torch.device("cpu"), dtype=subject.dtype)
    clients = Clients(source, partition, np.array([0]), 0, augment, ensemble)
    w = ensemble.initial_row("kaiming", np.random.default_rng(0))[None].clone()
    momentum = torch.zeros_like(w)
    epochs = steps * S // n
    sgd = SGD(S, 0.9, 1e-3, 20.0)
    backend = Backend(ensemble, clients, sgd, 1) if form == "torch" else NativeBackend(ensemble, clients, sgd, form)
    start = time.process_time()
    with torch.no_grad():
        local = LocalEpochs(epochs, np.zeros(1, np.int64), 0.01)
        backend.train_epochs(Block(ensemble, w, momentum, slice(0, 1)), local)
    return (time.process_time() - start) / (epochs * n // S) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=SUBJECTS, default="cnn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="steps a repeat, rounded up to 25s")
    parser.add_argument("--augment", action="store_true", help="crop and flip on all sides")
    parser.add_argument("--pfllib", type=Path, help="a checkout of PFLlib")
    args = parser.parse_args()
    args.steps += -args.steps % 25
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    subject = SUBJECTS[args.model]
    images, labels = drawn(subject, rng), rng.integers(0, subject.classes, 400)
    tuned = Tuned if args.model.startswith("cnn") else (lambda model: model)
    loop = functools.partial(baseline, subject)
    contenders = {
        "plain": lambda: loop(subject.build(), images, labels, args.steps, args.augment),
        "tuned": lambda: loop(tuned(subject.build()), images, labels, args.steps, args.augment, fused=True),
    }
    if args.pfllib and args.model == "cnn" and not args.augment:
        contenders["pfllib"] = lambda: pfllib(args.pfllib, images, labels, args.steps)
    own = ["torch", *(form for form in forms() if form != "portable")]
    for form in own:
        contenders[form] = functools.partial(ours, subject, images, labels, args.steps, args.augment, form)
    result: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(args.repeats + 1):  # the first round warms up
        for name, run in contenders.items():
            took = run()
            if repeat:
                result[name].append(took)
    a = torch.randn(1024, 1024)
    torch.mm(a, a)
    start = time.process_time()
    for _ in range(10):
        torch.mm(a, a)
    gflops = 10 * 2 * 1024**3 / (time.process_time() - start) / 1e9
    print(
        f"{args.model}, one thread, torch {torch.__version__}, batch {S}, {args.repeats} repeats of {args.steps} steps, augment {args.augment}"
    )
    print(f"sgemm 1024: {gflops:.0f} GFLOP/s")
    for name, values in result.items():
        print(
            f"{name:6s} median {statistics.median(values):.3f} ms per step (lowest {min(values):.3f}, highest {max(values):.3f})"
        )
    megaflop = 51.3  # of useful arithmetic in a step of the colour CNN
    for name in own:
        share = megaflop / statistics.median(result[name]) / gflops
        ratios = {
            other: statistics.median([b / o for b, o in zip(values, result[name], strict=True)])
            for other, values in result.items()
            if other not in own
        }
        of_sgemm = f"{share:.2f} of sgemm; " if args.model == "cnn" else ""
        print(f"{name:6s} {of_sgemm}" + ", ".join(f"{other} {r:.2f}x" for other, r in ratios.items()))
