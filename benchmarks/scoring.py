"""An evaluation of the greedy search, R of two models on one client's images: the native kernels, PyTorch, and what the core can do at most.

    OMP_NUM_THREADS=1 python benchmarks/scoring.py [--model cnn] [--images 100] [--seconds 20]

The paper's CNN and random 32x32 colour images, or `--model mlp`, 4,810 weights, and 8x8 grey ones; one thread. All are called in turn, five times each;
the least seconds of this process on the core count, so that what other programs do meanwhile is hardly a part of them.

- torch, avx512, avx2: `Backend.validation_losses`, with the images brought into lanes, and the losses' mean.
- averages: `Backend.candidate`, which forms the two models from the search's sums, in float64.
- search: one call that decides 99 models at hand, beyond as many evaluations in C as it makes.
- the ceiling: the multiply-adds of the two models, counted for whole vectors, at the rate of a loop of independent multiply-adds in
  registers (compiled here by `cc`; without one there is no ceiling).
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dpfl_mpi.data.partition import Partition
from dpfl_mpi.data.source import Source
from dpfl_mpi.datasets.cifar10 import MEAN, STD
from dpfl_mpi.models import cnn, mlp
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.native import FORMS, Start, forms
from dpfl_mpi.numerics.native_backend import NativeBackend

MODELS = {"cnn": (cnn.build, (32, 32, 3)), "mlp": (mlp.build, (8, 8, 1))}
LOOP = """
typedef float F __attribute__((vector_size(BYTES)));
F run(long n) {
  F sum[12], a = (F){0} + 0.999f, b = (F){0} + 0.001f;
  for (int j = 0; j < 12; j++) sum[j] = (F){0} + (float)j; /* sums that differ, or the compiler would keep one */
  for (long i = 0; i < n; i++) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) sum[j] = sum[j] * a + b;
  }
  for (int j = 1; j < 12; j++) sum[0] += sum[j];
  return sum[0];
}
void spend(long n, float *out) { F sum = run(n); *out = sum[0]; }
"""


def one_client(model: str, n: int) -> tuple[Ensemble, Clients]:
    """Return a model, and a client with n validation images."""
    build, shape = MODELS[model]
    mean, std = MEAN[: shape[2]], STD[: shape[2]]
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (n, *shape), dtype=np.uint8), rng.integers(0, 10, n)
    indptr = {"train": np.array([0, 1]), "val": np.array([0, n]), "test": np.array([0, 1])}
    indices = {"train": np.zeros(1, np.int64), "val": np.arange(n), "test": np.zeros(1, np.int64)}
    partition = Partition(indptr, indices, np.bincount(labels, minlength=10)[None], np.ones(1))
    source = Source(shape, 10, mean, std, {"train": labels, "test": labels}, "", lambda part, rows: images[rows])
    ensemble = Ensemble(build(shape, 10), mean, std, torch.device("cpu"))
    return ensemble, Clients(source, partition, np.array([0]), 0, False, ensemble)


def searching(backend: NativeBackend, models: int = 99) -> dict[str, Callable[[], object]]:
    """Return calls by name: a client's search over so many models, the evaluations that it makes, and as many calls of nothing."""
    native, rng = backend.native, np.random.default_rng(1)
    w = backend.ensemble.initial_row("kaiming", rng) * (1 + 0.1 * torch.randn(models + 1, native.width))
    places = (w.data_ptr() + 4 * native.width * np.arange(1, models + 1)).astype(np.uint64)
    p, coins, pair, total = np.full(models, 1 / (models + 1)), rng.random(models), w[:2].clone(), w.double().sum(0)
    images, losses = (
        native._chosen(backend._scored, backend._order(0)),
        np.empty((2, backend.clients.n_search[0]), np.float32),
    )
    where = native._net, pair.data_ptr(), native.width, 2, images

    def search() -> None:
        start = Start(w[0].double() * p[0], total * p[0], pair, float(p[0]), 1.0)
        backend.chooser(0, start, np.zeros(4)).decide(places, p, coins, models)

    def evaluate(n: int) -> None:
        for _ in range(models + 1):
            native._call.score(*where, n, losses.ctypes.data, None, None, None, None, native._work)

    return {"search": search, "evaluations": lambda: evaluate(losses.shape[1]), "calls": lambda: evaluate(0)}


def multiply_adds(module: nn.Module, shape: tuple[int, int, int]) -> int:
    """Return the multiply-adds of a model's forward half on one image: convolutions where the pool looks, and dense layers."""
    (h, w, _), total = shape, 0
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            h, w = (h - 4) // 2, (w - 4) // 2
            total += 4 * h * w * layer.weight.numel()
        elif isinstance(layer, nn.Linear):
            total += layer.weight.numel()
    return total


def rate(form: str, seconds: float = 1.0) -> float | None:
    """Return how many vectors of this form the core multiplies and adds in a second, the most of several tries; None without a compiler."""
    compiler, bits = shutil.which("cc"), FORMS[form]
    if not compiler:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(LOOP)
        flags = ["-O2", "-ffp-contract=fast", "-shared", "-fPIC", f"-DBYTES={bits // 8}", "-Wno-psabi"]
        machine = {512: ["-mavx512f"], 256: ["-mavx2", "-mfma"]}[bits]
        subprocess.run([compiler, *flags, *machine, str(source), "-o", str(library)], check=True)
        spend = ctypes.CDLL(str(library)).spend
        spend.argtypes, n, result = [ctypes.c_long, ctypes.c_void_p], 100_000, np.zeros(1, np.float32)
        return 12 * n / least({"": lambda: spend(n, result.ctypes.data)}, seconds)[""]


def least(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the least seconds of this core's time that each call took, made in turn for `seconds` in all, five times in a row: a search does so, too."""
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in (pair for pair in calls.items() for _ in range(5)):
            start = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - start)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="cnn", choices=MODELS)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ensemble, clients = one_client(args.model, args.images)
    rng, sgd = np.random.default_rng(0), SGD(16, 0.9, 1e-3, 20.0)
    pair = torch.stack([ensemble.initial_row("kaiming", rng) for _ in range(2)])[None]
    backends: dict[str, Backend] = {"torch": Backend(ensemble, clients, sgd, 1)}
    backends |= {form: NativeBackend(ensemble, clients, sgd, form) for form in forms() if form != "portable"}
    sums, out, shares = pair.double(), pair.clone(), (np.array([0.01]), np.array([0.3]), np.array([0.7]))
    calls: dict[str, Callable[[], object]] = {}
    for name, b in backends.items():
        calls[name] = lambda b=b: b.validation_losses(slice(0, 1), pair)  # type: ignore[misc]
        calls[f"{name}, averages"] = lambda b=b: b.candidate(sums[:, 0], sums[:, 1], pair[:, 0], *shares, out)  # type: ignore[misc]
        if isinstance(b, NativeBackend):
            calls |= {f"{name}, {what}": call for what, call in searching(b).items()}
    with torch.no_grad():
        best = least(calls, args.seconds)
    print(
        f"one thread, torch {torch.__version__}, R of two models on {args.images} images, least of {args.seconds:.0f} s"
    )
    count = 2 * multiply_adds(ensemble.module, MODELS[args.model][1])
    for name in backends:
        ms, averages = 1e3 * best[name], 1e3 * best[f"{name}, averages"]
        line = f"{name:6s} {ms:.2f} ms ({1e3 * best['torch'] / ms:.2f}x torch), averages {averages:.3f} ms"
        if name != "torch" and (speed := rate(name)):
            vectors = -(-args.images // (FORMS[name] // 32))
            ceiling = 1e3 * count * vectors / speed
            line += f"; ceiling {ceiling:.2f} ms: {count} multiply-adds of {vectors} vectors at {1e-9 * speed:.2f} a ns"
        if name != "torch":
            alone = best[f"{name}, evaluations"] - best[f"{name}, calls"]
            line += f"; search {100 * (best[f'{name}, search'] / alone - 1):.1f} % beyond its evaluations"
        print(line)


if __name__ == "__main__":
    main()
