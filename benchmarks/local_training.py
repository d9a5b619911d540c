"""Training one client on one thread, against PyTorch's loops over one `nn.Module`.

    OMP_NUM_THREADS=1 python benchmarks/local_training.py [--model cnn] [--repeats 9] [--augment]

The paper's CNN or another of `SUBJECTS`, mini-batches of 16 random samples, SGD with momentum 0.9,
weight decay 1e-3, clipping at norm 20. All are timed in turn, `repeats` times, in CPU seconds of
this process; medians and ratios are of this one run.

- plain: NCHW, ReLU then pool, `torch.optim.SGD`.
- tuned: channels last, fused SGD; of the CNN, pool then ReLU (the same function, fewer ReLUs).
- torch: this package by `--kernels torch`; avx512, avx2: the native kernels in these forms.

Without --augment the baselines' images are floats, normalised in advance; ours are uint8 and
normalised per batch. With --augment all crop and flip: the baselines image by image, as
torchvision's transforms do, ours in one gather.
"""

import argparse
import copy
import functools
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from _samples import CIFAR, PAPER_SGD, S, clients_of
from torch import nn

from dpfl_mpi.data.source import BORDER
from dpfl_mpi.datasets.cifar10 import MEAN, STD
from dpfl_mpi.models import cnn, mlp, resnet, text
from dpfl_mpi.numerics.backend import Backend, LocalEpochs
from dpfl_mpi.numerics.cpu import Cpu, forms
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.native_backend import NativeBackend

SAMPLES = 400
MFLOP = 51.3  # of useful arithmetic in a step of the colour CNN


class Pooled(nn.Module):
    """Layers, the mean over the image, and a head that reads so many channels."""

    def __init__(self, layers: list[nn.Module], channels: int) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*layers), nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def normed(convolution: nn.Conv2d) -> list[nn.Module]:
    return [convolution, nn.GroupNorm(4, convolution.out_channels), nn.ReLU()]


def net() -> nn.Module:
    """Return the network of docs/extend-methods.md."""
    layers = [nn.Sequential(*normed(nn.Conv2d(a, b, 3, padding=1))) for a, b in ((3, 16), (16, 32))]
    return Pooled(layers, 32)


def separable() -> nn.Module:
    """Return MobileNet's blocks: depthwise convolutions of 3x3, each with one of 1x1 after it."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU()]
    for a, b, stride in ((16, 32, 1), (32, 64, 2), (64, 64, 2)):
        layers += normed(nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False))
        layers += normed(nn.Conv2d(a, b, 1, bias=False))
    return Pooled(layers, 64)


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


class Subject(NamedTuple):
    """A network and its samples."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: str
    classes: int
    below: int = 256  # tokens


COLOUR, GREY = (CIFAR, "uint8", 10), (28, 28, 1)
SUBJECTS = {
    "cnn": Subject(lambda: cnn.build(CIFAR, 10), *COLOUR),
    "cnn-bytes": Subject(lambda: cnn.build(GREY, 10), GREY, "uint8", 10),
    "cnn-floats": Subject(lambda: cnn.build(GREY, 10), GREY, "float32", 10),
    "net": Subject(net, *COLOUR),
    "resnet": Subject(lambda: resnet.build(CIFAR, 10, "16,32,64", 2, 8), *COLOUR),
    "text": Subject(lambda: text.build((32,), 4, 2000, 32, 4, 0, 0.0), (32,), "int32", 4, 2000),
    "mlp": Subject(lambda: mlp.build((42,), 10), (42,), "float32", 10),
    "sensors": Subject(Sensors, (1, 128, 9), "float32", 6),
    "separable": Subject(separable, *COLOUR),
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
    if subject.shape == CIFAR:
        return MEAN, STD
    mean, deviation = (0.5, 0.25) if subject.dtype == "uint8" else (0.0, 1.0)
    axes = subject.shape[-1]
    return (mean,) * axes, (deviation,) * axes


def ensemble_of(subject: Subject, module: nn.Module) -> Ensemble:
    return Ensemble(module, *scales(subject), torch.device("cpu"), dtype=subject.dtype)


def samples_of(subject: Subject, rng: np.random.Generator) -> np.ndarray:
    """Return random samples."""
    size = (SAMPLES, *subject.shape)
    if subject.dtype == "float32":
        return rng.normal(size=size).astype(np.float32)
    return rng.integers(0, subject.below, size).astype(subject.dtype)


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Return colour images `[S, H, W, 3]` of bytes as a float tensor `[S, 3, H, W]`."""
    x = (images.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return x.permute(0, 3, 1, 2)


def augmented(padded: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Return a mini-batch `[S, 3, 32, 32]`, cropped, flipped and normalised image by image."""
    out = []
    for i in rows:
        dy, dx = rng.integers(0, 2 * BORDER + 1, 2)
        image = padded[i, dy : dy + 32, dx : dx + 32]
        out.append(image[:, ::-1] if rng.integers(2) else image)
    return normalised(torch.from_numpy(np.stack(out)))


class Task(NamedTuple):
    """What every contender trains on, and how often."""

    subject: Subject
    images: np.ndarray
    labels: np.ndarray
    steps: int
    augment: bool


def baseline(task: Task, model: nn.Module, fused: bool = False) -> float:
    """Return the milliseconds of a step of the usual loop."""
    subject, images, labels, steps, augment = task
    planes = len(subject.shape) == 3 and min(subject.shape[:2]) > 1
    layout = torch.channels_last if fused and planes else torch.contiguous_format
    model = model.to(memory_format=layout)
    how = {"momentum": PAPER_SGD.momentum, "weight_decay": PAPER_SGD.weight_decay}
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, **how, fused=fused)
    rng, y = np.random.default_rng(0), torch.from_numpy(labels)
    border = (BORDER, BORDER)
    padded = np.pad(images, ((0, 0), border, border, (0, 0))) if augment else images
    ensemble = ensemble_of(subject, copy.deepcopy(model))
    x = ensemble.module_input(ensemble.normalise(torch.from_numpy(images)))
    x = x.contiguous(memory_format=layout)
    start = time.process_time()
    for step in range(steps):
        first = step * S % (len(y) - S + 1)
        batch = x[first : first + S]
        if augment:
            batch = augmented(padded, np.arange(first, first + S), rng)
            batch = batch.contiguous(memory_format=layout)
        sgd.zero_grad()
        nn.functional.cross_entropy(model(batch), y[first : first + S]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), PAPER_SGD.clip_norm)
        sgd.step()
    return (time.process_time() - start) / steps * 1e3


def ours(
    task: Task, form: str, threads: int = 1, clock: Callable[[], float] = time.process_time
) -> float:
    """Return the milliseconds of a step of this package, in PyTorch or a form of the kernels."""
    subject, images, labels, steps, augment = task
    n, ensemble = len(labels), ensemble_of(subject, subject.build())
    clients = clients_of(ensemble, images, labels, [np.arange(n)], [np.arange(1)], augment)
    w = ensemble.initial_row("kaiming", np.random.default_rng(0))[None].clone()
    block = Block(ensemble, w, torch.zeros_like(w), slice(0, 1))
    local = LocalEpochs(steps * S // n, np.zeros(1, np.int64), 0.01)
    if form == "torch":
        backend = Backend(ensemble, clients, PAPER_SGD)
    else:
        make = functools.partial(Cpu, form=form, members=threads)
        backend = NativeBackend(ensemble, clients, PAPER_SGD, make)
    start = clock()
    with torch.no_grad():
        backend.train_epochs(block, local)
    return (clock() - start) / (local.number * n // S) * 1e3


def by_threads(task: Task, threads: int, repeats: int) -> str:
    """Return how much faster so many threads are, on the clock of the wall; the cores are idle."""
    clock, form = time.perf_counter, forms()[0]
    times = [[ours(task, form, t, clock) for t in (1, threads)] for _ in range(repeats + 1)][1:]
    one, several = (median(of) for of in zip(*times, strict=True))
    faster = sorted(one / several for one, several in times)
    line = f"{form}: {one:.3f} ms per step by one thread, {several:.3f} by {threads}: "
    return line + f"{median(faster):.2f}x (lowest {faster[0]:.2f}, highest {faster[-1]:.2f})"


def sgemm_gflops() -> float:
    """Return the rate of products of 1024 x 1024 matrices."""
    a = torch.randn(1024, 1024)
    torch.mm(a, a)
    start = time.process_time()
    for _ in range(10):
        torch.mm(a, a)
    return 10 * 2 * 1024**3 / (time.process_time() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=SUBJECTS, default="cnn")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="of a repeat, rounded up to 25s")
    parser.add_argument("--augment", action="store_true", help="crop and flip on all sides")
    parser.add_argument("--threads", type=int, default=1, help="compare so many with one, alone")
    args = parser.parse_args()
    if args.augment and SUBJECTS[args.model].shape != CIFAR:
        parser.error("--augment crops colour images of 32x32")
    steps = args.steps + -args.steps % 25
    torch.set_num_threads(1)
    rng, subject = np.random.default_rng(0), SUBJECTS[args.model]
    images, labels = samples_of(subject, rng), rng.integers(0, subject.classes, SAMPLES)
    task = Task(subject, images, labels, steps, args.augment)
    if args.threads > 1:
        return print(by_threads(task, args.threads, args.repeats))
    tuned = Tuned if args.model.startswith("cnn") else (lambda model: model)
    contenders = {
        "plain": lambda: baseline(task, subject.build()),
        "tuned": lambda: baseline(task, tuned(subject.build()), fused=True),
    }
    own = ["torch", *(form for form in forms() if form != "portable")]
    contenders |= {form: functools.partial(ours, task, form) for form in own}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(args.repeats + 1):  # the first round warms up
        for name, run in contenders.items():
            ms = run()
            if repeat:
                times[name].append(ms)
    gflops = sgemm_gflops()
    print(f"{args.model}, one thread, torch {torch.__version__}, batch {S}, "
          f"{args.repeats} repeats of {steps} steps, augment {args.augment}\n"
          f"sgemm 1024: {gflops:.0f} GFLOP/s")  # fmt: skip
    for name, values in times.items():
        print(f"{name:6s} median {median(values):.3f} ms per step "
              f"(lowest {min(values):.3f}, highest {max(values):.3f})")  # fmt: skip
    for name in own:
        share = MFLOP / median(times[name]) / gflops
        ratios = [
            f"{other} {median(b / o for b, o in zip(values, times[name], strict=True)):.2f}x"
            for other, values in times.items()
            if other not in own
        ]
        of_sgemm = f"{share:.2f} of sgemm; " if args.model == "cnn" else ""
        print(f"{name:6s} {of_sgemm}{', '.join(ratios)}")


if __name__ == "__main__":
    main()
