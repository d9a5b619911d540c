"""An evaluation of the greedy search against PyTorch.

    OMP_NUM_THREADS=1 python benchmarks/scoring.py [--model cnn] [--images 100] [--seconds 20]

An evaluation is R of two models on one client's images: the paper's CNN on random 32x32 colour
images, or with `--model mlp` 4,810 weights on 8x8 grey ones. All are called in turn, five times
each; the least seconds of this process on the core count, so other programs hardly matter.

- torch, avx512, avx2: `Backend.validation_losses`, which brings images into lanes and means losses.
- averages: `Backend.candidate`, which forms the two models from the search's sums in float64.
- search: one call that decides 99 models, beyond as many evaluations in C as it makes.
"""

import argparse
import functools
import time
from collections.abc import Callable

import numpy as np
import torch
from _samples import CIFAR, PAPER_SGD, clients_of

from dpfl_mpi.datasets.cifar10 import MEAN, STD
from dpfl_mpi.models import cnn, mlp
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.cpu import Cpu, forms
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.kernels import SCORING
from dpfl_mpi.numerics.native_backend import NativeBackend

Calls = dict[str, Callable[[], object]]
MODELS = {"cnn": (cnn.build, CIFAR), "mlp": (mlp.build, (8, 8, 1))}
CANDIDATES = 99


def one_client(model: str, n: int) -> tuple[Ensemble, Clients]:
    """Return a model, and a client with n validation images."""
    build, shape = MODELS[model]
    rng, channels = np.random.default_rng(0), shape[2]
    images, labels = rng.integers(0, 256, (n, *shape), dtype=np.uint8), rng.integers(0, 10, n)
    cpu = torch.device("cpu")
    ensemble = Ensemble(build(shape, 10), MEAN[:channels], STD[:channels], cpu)
    return ensemble, clients_of(ensemble, images, labels, [np.arange(1)], [np.arange(n)])


def searching(backend: NativeBackend) -> Calls:
    """Return by name: a search over 99 models, its evaluations, and as many empty calls."""
    kernels, rng, models = backend.kernels, np.random.default_rng(1), CANDIDATES
    row = backend.ensemble.initial_row("kaiming", rng)
    w = row * (1 + 0.1 * torch.randn(models + 1, kernels.width))
    addresses = w.data_ptr() + 4 * kernels.width * np.arange(1, models + 1)
    candidates = addresses.astype(np.uint64), np.full(models, 1 / (models + 1)), rng.random(models)
    share = 1 / (models + 1)
    pair, total = w[:2].clone(), w.double().sum(0)
    n = backend.clients.n_search
    tasks = kernels.tasks(SCORING, backend._scored_images, slice(0, 1), n)
    losses, structs = torch.empty(1, 2 * n[0]), tasks.structs
    structs["rows"] = tasks.row_addresses(pair[None])
    structs["stride"], structs["r"] = kernels.width, len(pair)
    structs["losses"] = tasks.row_addresses(losses, width=losses.shape[1])

    def search() -> None:
        shares = np.array([share]), np.array([1.0])
        start = w[:1].double() * share, total[None] * share, pair[None], *shares
        count = np.array([models])
        backend.chooser(slice(0, 1), start, np.zeros((1, 4))).decide(*candidates, count, count)

    def evaluate(images: int) -> None:
        structs["n"] = images
        for _ in range(models + 1):
            kernels.run("score", tasks)

    evaluations = lambda: evaluate(n[0])  # noqa: E731
    return {"search": search, "evaluations": evaluations, "calls": lambda: evaluate(0)}


def least(calls: Calls, seconds: float) -> dict[str, float]:
    """Return the least seconds of each call, made in turn for `seconds` in all.

    Each is made five times in a row, as a search does.
    """
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in (pair for pair in calls.items() for _ in range(5)):
            start = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="cnn", choices=MODELS)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ensemble, clients = one_client(args.model, args.images)
    rng = np.random.default_rng(0)
    pair = torch.stack([ensemble.initial_row("kaiming", rng) for _ in range(2)])[None]
    backends: dict[str, Backend] = {"torch": Backend(ensemble, clients, PAPER_SGD)}
    for form in forms():
        if form != "portable":
            backends[form] = NativeBackend(
                ensemble, clients, PAPER_SGD, functools.partial(Cpu, form=form)
            )
    sums, out = pair.double(), pair.clone()
    shares = np.array([0.01]), np.array([0.3]), np.array([0.7])
    candidate = sums[:, 0], sums[:, 1], pair[:, 0], shares, out
    calls: Calls = {}
    for name, b in backends.items():
        calls[name] = lambda b=b: b.validation_losses(slice(0, 1), pair)  # type: ignore[misc]
        calls[f"{name}, averages"] = lambda b=b: b.candidate(*candidate)  # type: ignore[misc]
        if isinstance(b, NativeBackend):
            calls |= {f"{name}, {what}": call for what, call in searching(b).items()}
    with torch.no_grad():
        best = least(calls, args.seconds)
    print(f"one thread, torch {torch.__version__}, R of two models on {args.images} images, "
          f"least of {args.seconds:.0f} s")  # fmt: skip
    for name in backends:
        ms, averages = 1e3 * best[name], 1e3 * best[f"{name}, averages"]
        ratio = 1e3 * best["torch"] / ms
        line = f"{name:6s} {ms:.2f} ms ({ratio:.2f}x torch), averages {averages:.3f} ms"
        if name != "torch":
            alone = best[f"{name}, evaluations"] - best[f"{name}, calls"]
            more = 100 * (best[f"{name}, search"] / alone - 1)
            line += f"; search {more:.1f} % beyond its evaluations"
        print(line)


if __name__ == "__main__":
    main()
