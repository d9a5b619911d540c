"""Training one client on one thread: this package against a plain and a tuned loop of PyTorch over one `nn.Module`.

    OMP_NUM_THREADS=1 python benchmarks/local_training.py [--repeats 9] [--steps 100] [--augment] [--pfllib FOLDER]

The paper's CNN, batches of 16 random 32x32 colour images, SGD with momentum 0.9, weight decay 1e-3, clipping at norm 20. All are
timed in turn, `repeats` times, in seconds of this process on the core; medians and ratios are of this one run.

- plain: NCHW, ReLU then pool, `torch.optim.SGD`.
- tuned: channels last, pool then ReLU (the same function, a quarter of the ReLUs), fused SGD.
- pfllib: `clientAVG.train` of a checkout of PFLlib (its own loop, data loader and SGD without momentum, decay or clipping).
- torch: this package without its kernels (`--kernels torch`); avx512, avx2: the native kernels in these forms. All by `Backend.train_epochs`.

Without --augment the baselines' images are floats, normalised in advance; ours are uint8 and normalised per batch. With --augment all three crop
and flip: the baselines image by image on a padded uint8 array (what a data set of torchvision transforms amounts to), ours in one gather.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from dpfl_mpi.data.partition import Partition
from dpfl_mpi.data.source import Source
from dpfl_mpi.datasets.cifar10 import MEAN, STD
from dpfl_mpi.models.cnn import build
from dpfl_mpi.numerics import PAD
from dpfl_mpi.numerics.backend import SGD, Backend
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.native import forms
from dpfl_mpi.numerics.native_backend import NativeBackend

S = 16


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


def augmented(padded: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Return a batch `[S, 3, 32, 32]`, cropped, flipped and normalised image by image."""
    out = []
    for i in rows:
        dy, dx = rng.integers(0, 2 * PAD + 1, 2)
        image = padded[i, dy : dy + 32, dx : dx + 32]
        out.append(image[:, ::-1] if rng.integers(2) else image)
    x = torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2).float().div_(255)
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def baseline(model: nn.Module, images: np.ndarray, labels: np.ndarray, steps: int, augment: bool, **fast: bool) -> None:
    """Train `steps` steps of the loop everybody writes; `fast` goes to the optimiser."""
    layout = torch.channels_last if fast else torch.contiguous_format
    model = model.to(memory_format=layout)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3, **fast)
    rng = np.random.default_rng(0)
    y = torch.from_numpy(labels)
    padded = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    x = (torch.from_numpy(images).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    x = x.permute(0, 3, 1, 2).contiguous(memory_format=layout)
    start = time.process_time()
    for step in range(steps):
        first = step * S % (len(y) - S + 1)
        rows = np.arange(first, first + S)
        batch = augmented(padded, rows, rng).contiguous(memory_format=layout) if augment else x[first : first + S]
        sgd.zero_grad()
        nn.functional.cross_entropy(model(batch), y[first : first + S]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 20.0)
        sgd.step()
    times.append((time.process_time() - start) / steps * 1e3)


def pfllib(folder: Path, images: np.ndarray, labels: np.ndarray, steps: int) -> None:
    """Train as many steps with PFLlib's client for FedAvg, on tensors normalised in advance."""
    sys.path.insert(0, str(folder / "system"))
    from flcore.clients.clientavg import clientAVG

    x = ((torch.from_numpy(images).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)
    data = list(zip(x.contiguous(), torch.from_numpy(labels), strict=True))
    known = {
        "model": build((32, 32, 3), 10), "algorithm": "FedAvg", "dataset": "", "device": "cpu", "save_folder_name": "",
        "num_classes": 10, "batch_size": S, "local_learning_rate": 0.01, "local_epochs": steps * S // len(labels),
        "learning_rate_decay": False, "learning_rate_decay_gamma": 1, "few_shot": 0,
    }  # fmt: skip
    client = clientAVG(SimpleNamespace(**known), 0, len(data), 0, train_slow=False, send_slow=False)
    client.load_train_data = lambda: torch.utils.data.DataLoader(data, S, drop_last=True, shuffle=True)
    start = time.process_time()
    client.train()
    times.append((time.process_time() - start) / steps * 1e3)


def ours(images: np.ndarray, labels: np.ndarray, steps: int, augment: bool, form: str) -> None:
    """Train as many steps with the package's own loop: in PyTorch, or in one form of the native kernels."""
    n = len(labels)
    indptr = {"train": np.array([0, n]), "val": np.array([0, 1]), "test": np.array([0, 1])}
    indices = {"train": np.arange(n), "val": np.zeros(1, np.int64), "test": np.zeros(1, np.int64)}
    partition = Partition(indptr, indices, np.bincount(labels, minlength=10)[None], np.ones(1))
    source = Source((32, 32, 3), 10, MEAN, STD, {"train": labels, "test": labels}, "", lambda part, rows: images[rows])
    ensemble = Ensemble(build((32, 32, 3), 10), MEAN, STD, torch.device("cpu"))
    clients = Clients(source, partition, np.array([0]), 0, augment, ensemble)
    w = ensemble.initial_row("kaiming", np.random.default_rng(0))[None].clone()
    momentum = torch.zeros_like(w)
    epochs = steps * S // n
    sgd = SGD(S, 0.9, 1e-3, 20.0)
    backend = Backend(ensemble, clients, sgd, 1) if form == "torch" else NativeBackend(ensemble, clients, sgd, form)
    start = time.process_time()
    with torch.no_grad():
        backend.train_epochs(Block(ensemble, w, momentum, slice(0, 1)), epochs, np.zeros(1, np.int64), 0.01, None, None)
    times.append((time.process_time() - start) / (epochs * n // S) * 1e3)


times: list[float] = []
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="steps a repeat (multiples of 25)")
    parser.add_argument("--augment", action="store_true", help="crop and flip on all sides")
    parser.add_argument("--pfllib", type=Path, help="a checkout of PFLlib")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (400, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 400)
    contenders = {
        "plain": lambda: baseline(build((32, 32, 3), 10), images, labels, args.steps, args.augment),
        "tuned": lambda: baseline(Tuned(build((32, 32, 3), 10)), images, labels, args.steps, args.augment, fused=True),
    }
    if args.pfllib and not args.augment:
        contenders["pfllib"] = lambda: pfllib(args.pfllib, images, labels, args.steps)
    own = ["torch", *(form for form in forms() if form != "portable")]
    for form in own:
        contenders[form] = functools.partial(ours, images, labels, args.steps, args.augment, form)
    result: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(args.repeats + 1):  # the first round warms up
        for name, run in contenders.items():
            run()
            if repeat:
                result[name].append(times[-1])
    a = torch.randn(1024, 1024)
    torch.mm(a, a)
    start = time.process_time()
    for _ in range(10):
        torch.mm(a, a)
    gflops = 10 * 2 * 1024**3 / (time.process_time() - start) / 1e9
    print(
        f"one thread, torch {torch.__version__}, batch {S}, {args.repeats} repeats of {args.steps} steps, augment {args.augment}"
    )
    print(f"sgemm 1024: {gflops:.0f} GFLOP/s")
    for name, values in result.items():
        print(
            f"{name:6s} median {statistics.median(values):.3f} ms per step (lowest {min(values):.3f}, highest {max(values):.3f})"
        )
    megaflop = 51.3  # of useful arithmetic in a step
    for name in own:
        share = megaflop / statistics.median(result[name]) / gflops
        ratios = {
            other: statistics.median([b / o for b, o in zip(values, result[name], strict=True)])
            for other, values in result.items()
            if other not in own
        }
        print(f"{name:6s} {share:.2f} of sgemm; " + ", ".join(f"{other} {r:.2f}x" for other, r in ratios.items()))
