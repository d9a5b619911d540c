"""Arrays whose bits every device must give: gradients, training, scores, searches, a short run.

`arrays_of` names them NETWORK/CASE/ARRAY. Axes: k clients, W row width.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _samples import PAPER_SGD, S, clients_of
from local_training import SUBJECTS, Subject, scales

from dpfl_mpi.models import cnn, resnet, text
from dpfl_mpi.numerics.backend import Backend, LocalEpochs, Proximal
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.native_backend import NativeBackend
from dpfl_mpi.numerics.optimiser import SGD, Adam
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import EXEMPT

TRAIN, VAL = (37, 9), (20, 33)  # samples of the two clients: last mini-batches are not full
LR, MU = 0.05, 0.1
ADAM = Adam(S, 0.0, 1e-3, 20.0, decoupled=True)
SMALL = (16, 16, 3)
NETWORKS = {name: SUBJECTS[name] for name in ("mlp", "cnn", "separable")} | {
    "small": Subject(lambda: cnn.build(SMALL, 10), SMALL, "uint8", 10),
    "resnet": Subject(lambda: resnet.build(SMALL, 10, "8,16", 1, 4), SMALL, "uint8", 10),
    "text": Subject(lambda: text.build((12,), 4, 50, 16, 2, 0, 0.2), (12,), "int32", 4, 50),
}
FULLY = ("mlp", "cnn")  # networks that are trained in every way
RUN = ("--clients=8", "--rounds=3", "--tau_init=2", "--tau_train=2", "--budget=4")


def backend_of(
    subject: Subject,
    optimiser: SGD,
    device: torch.device,
    train: Sequence[int] = TRAIN,
    val: Sequence[int] = VAL,
) -> Backend:
    """Return what computes clients of random samples on a device."""
    torch.manual_seed(0)
    ensemble = Ensemble(subject.build(), *scales(subject), device, dtype=subject.dtype)
    rng, sizes = np.random.default_rng(1), [*train, *val]
    n, dtype = sum(sizes), subject.dtype
    if dtype == "float32":
        samples = rng.normal(size=(n, *subject.shape)).astype(dtype)
    else:
        samples = rng.integers(0, subject.below, (n, *subject.shape), dtype)
    labels = np.resize(rng.permutation(subject.classes), n)
    parts = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    both = parts[: len(train)], parts[len(train) :]
    clients = clients_of(ensemble, samples, labels, *both, augment=dtype == "uint8")
    return NativeBackend(ensemble, clients, optimiser)


def rows_of(backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two clients' rows, which differ, and their momentum."""
    ensemble, rng, k = backend.ensemble, np.random.default_rng(2), len(TRAIN)
    rows = torch.stack([ensemble.initial_row("kaiming", rng).cpu() for _ in range(k)])
    noise = rng.uniform(-0.05, 0.05, (k, ensemble.size)).astype(np.float32)
    rows[:, : ensemble.size] += torch.from_numpy(noise)  # no layer is 0
    return rows.to(ensemble.device), backend.zero_momentum(k)


def verbs_of(network: str) -> list[str]:
    """Return in which ways a network is trained."""
    more = ["frozen", "proximal", "mix", "ahead", "descents"] if network in FULLY else []
    return ["gradient", "train", *more]


def of_training(backend: Backend, verbs: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield rows and losses after each way to train, and the gradient of each layer."""
    ensemble, first = backend.ensemble, np.zeros(len(TRAIN), np.int64)
    how, goal = LocalEpochs(2, first, LR), 0.5 * rows_of(backend)[0]
    frozen = torch.arange(goal.shape[1], device=goal.device) % 3 > 0
    share = torch.full((len(goal), 1), 0.25, device=goal.device)
    for verb in verbs:
        (w, m), (v, m_v) = rows_of(backend), rows_of(backend)
        v.mul_(0.5)
        loss, g = torch.zeros(len(w)), torch.zeros_like(w)
        for rows in backend.blocks:
            block, other = (
                Block(ensemble, *(a[rows] for a in ab), rows) for ab in ((w, m), (v, m_v))
            )
            batch = next(iter(backend.batches(rows, 1, first)))
            if verb == "gradient":
                block.loss = backend.gradient(block, batch)
                g[rows] = block.g
            elif verb == "mix":
                backend.train_mixed(block, other, share, how, None)
            elif verb == "ahead":
                backend.train_ahead(block, 0.01, how)
            elif verb == "descents":
                backend.descents(block, batch, 3, LR, goal[rows], MU)
            else:
                gradient = Proximal(backend, goal, MU) if verb == "proximal" else None
                backend.train_epochs(block, how, gradient, frozen if verb == "frozen" else None)
            loss[rows] = block.loss.cpu()
        parts = ensemble.layers(g) if verb == "gradient" else {"w": w}
        parts |= {"v": v} if verb == "mix" else {}
        yield from ((f"{verb}/{name}", part) for name, part in (parts | {"loss": loss}).items())


def of_scoring(backend: Backend) -> Iterator[tuple[str, Any]]:
    """Yield what scores and a greedy search among four models give."""
    w, _ = rows_of(backend)
    n, device = backend.clients.n_val + backend.clients.n_test, w.device
    for i, losses, predicted, _ in backend.scores(w, np.ones(len(w), bool)):
        yield f"score/losses {i}", losses[: n[i]]
        yield f"score/predicted {i}", predicted[: n[i]]
    on_cpu = torch.cat([w, w.flip(0) * 0.9]).cpu()
    p, coins = np.array([0.1, 0.2, 0.15, 0.25]), np.array([0.3, 0.9, 0.6, 0.1])
    # summed on a CPU: PyTorch on a GPU has another order
    total = (on_cpu.double() * torch.from_numpy(p)[:, None]).sum(0).to(device)
    others = on_cpu.to(device)
    models = others.data_ptr() + 4 * others.stride(0) * np.arange(len(p), dtype=np.uint64)
    for rows in backend.blocks:
        k = rows.stop - rows.start
        losses = backend.validation_losses(rows, others.expand(k, -1, -1))
        yield from ((f"validation {i}", of) for i, of in enumerate(losses, rows.start))
        x, p_x, many = 0.3 * w[rows].double(), np.full(k, 0.3), np.full(k, len(p))
        sums = x, x + total, torch.zeros(k, 2, w.shape[1], device=device), p_x, p_x + p.sum()
        chooser = backend.chooser(rows, sums, np.zeros((k, 4)))
        added = chooser.decide(*(np.tile(part, k) for part in (models, p, coins)), many, many)
        for i, found in enumerate(zip(added, x, chooser.rewards, strict=True), rows.start):
            for name, part in zip(("added", "x", "reward"), found, strict=True):
                yield f"search/{name} {i}", part


def arrays_of(device: torch.device, folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every array by its name; the run's file is written into a folder."""
    for name, subject in NETWORKS.items():
        backend = backend_of(subject, PAPER_SGD, device)
        cases = [*of_training(backend, verbs_of(name)), *of_scoring(backend)]
        if name in FULLY:
            adam = of_training(backend_of(subject, ADAM, device), ["train", "mix"])
            cases += [(f"adam {case}", array) for case, array in adam]
        for case, array in cases:
            yield f"{name}/{case}", torch.as_tensor(array).cpu().numpy()
    out = folder / f"run-{device.type}.h5"
    where = f"--device={device.type}", "--kernels=native", "--quiet", "--fresh", f"--out={out}"
    subprocess.run([sys.executable, "-m", "dpfl_mpi", *RUN, *where], check=True)
    with Result(out) as result:
        names = [name for name in sorted(result.arrays()) if not name.startswith(EXEMPT)]
        yield from ((f"run/{name}", result[name]) for name in names)


def difference(got: np.ndarray, wanted: np.ndarray) -> str:
    """Return how an array differs from the one of the same name; "" where no bit does."""
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return f"is {got.dtype} {got.shape}, the reference {wanted.dtype} {wanted.shape}"
    if got.tobytes() == wanted.tobytes():
        return ""
    a, b = (np.frombuffer(array.tobytes(), array.dtype) for array in (got, wanted))
    off = np.flatnonzero((a != b) | (np.signbit(a) != np.signbit(b)))
    if not len(off):
        return "has another not-a-number"
    most, at = np.abs(a.astype(float) - b)[off].max(), off[0]
    place = [int(i) for i in np.unravel_index(at, got.shape)]
    return (
        f"{len(off)} of {got.size} differ by up to {most:.3g}, first {place}: {a[at]} for {b[at]}"
    )
