"""Two bounds on how fast a GPU can train a Run, from counts: what launching its kernels takes, and what moving its bytes takes.

A recorded step (`numerics/recorded.py`) advances all clients that still train in lock-step, and launches the same kernels however many
these are. So the launch ceiling is lock-steps x kernels x time per kernel. The bytes of a step grow with its rows. So the bytes ceiling is
row-steps x bytes of one row's step / memory bandwidth. Neither needs a GPU: the steps come from the clients' training sets, kernels and
bytes from PyTorch's own calls, watched on a CPU.

Axes: k clients, S mini-batch, H W C image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import open_source
from dpfl_mpi.models._cnn_stacked import phases, windows
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.clients import Batch
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.recorded import RecordedSteps, block_sizes
from dpfl_mpi.plugins import find
from dpfl_mpi.settings import Run


class GPU(NamedTuple):
    """Memory bandwidth as its maker states it, TB/s."""

    bandwidth: float
    source: str


GPUS = {
    "b200": GPU(8.0, "NVIDIA DGX B200 data sheet: 64 TB/s for eight"),
    "h200": GPU(4.8, "NVIDIA H200 data sheet"),
    "h100-nvl": GPU(3.9, "NVIDIA H100 data sheet"),
    "h100": GPU(3.35, "NVIDIA H100 data sheet, SXM"),
    "a100-80": GPU(2.039, "NVIDIA A100 data sheet, SXM 80 GB"),
    "a100-40": GPU(1.555, "NVIDIA A100 data sheet, 40 GB"),
    "v100": GPU(0.9, "NVIDIA V100 data sheet, SXM2"),
    "l40s": GPU(0.864, "NVIDIA L40S data sheet"),
    "l4": GPU(0.3, "NVIDIA L4 data sheet"),
}
# microseconds from one small kernel of a CUDA graph to the next: an assumption, not measured here
LAUNCH_US = (1.3, 2.0)
COPIED_IN = ("aten::copy_", "aten::fill_", "aten::zero_")  # overwrite their first argument without reading it
NO_KERNEL = ("aten::_unsafe_view", "aten::empty", "aten::empty_like", "aten::new_empty")  # beside views


@dataclass(frozen=True)
class Steps:
    """What training a Run takes, all clients of it on one GPU in one block.

    A client-step is one mini-batch of one client. A lock-step advances all clients that have mini-batches left. A row-step is one row of
    a lock-step, counted up to the recorded block size that holds its clients.
    """

    client_steps: int
    lock_steps: int
    row_steps: int


def steps_of(n_train: np.ndarray, batch_size: int, epochs: int) -> Steps:
    """Return the steps of `epochs` local epochs of clients with these training sets, `[k]` samples."""
    steps = np.sort(-(-np.asarray(n_train) // batch_size))[::-1]
    left = (steps[:, None] > np.arange(steps.max(initial=0))).sum(0)  # clients in each lock-step of an epoch
    sizes = np.array(block_sizes(steps))
    rows = sizes[np.searchsorted(sizes, left)].sum()
    return Steps(epochs * int(steps.sum()), epochs * len(left), epochs * int(rows))


class Watch(TorchDispatchMode):
    """Counts the calls that launch a kernel each, and their bytes as if every argument came from memory and every result went there."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = call(*args, **kwargs)
        schema = call._schema
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not view and schema.name not in NO_KERNEL:
            self.kernels += 1
            read = (
                (args[1:], {}) if schema.name in COPIED_IN else (args, {n: v for n, v in kwargs.items() if n != "out"})
            )
            tensors = [t for t in tree_leaves((read, out)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return out


def launched(ensemble: Ensemble, shape: tuple[int, int, int], sgd: SGD) -> tuple[int, float]:
    """Return the kernels that one lock-step launches, and the bytes of one row in it.

    Images are normalised in it. They are gathered, cropped and flipped for many lock-steps at once, which is not counted.
    """
    k, s = 2, sgd.batch_size  # rows: one alone takes another path where a model has no stacked kernels
    recorded = RecordedSteps(ensemble, np.full(k, 1), shape, sgd)
    images = torch.zeros(k, s, *shape, dtype=torch.uint8)
    y, weight = torch.zeros(k, s, dtype=torch.int64), torch.full((k, s), 1 / s)
    with torch.no_grad(), Watch() as watch:
        recorded.step(Batch(k, 0, ensemble.normalise(images), y, weight))
    return watch.kernels, watch.bytes / k


def work_of_a_step(ensemble: Ensemble, shape: tuple[int, int, int], batch_size: int) -> tuple[float, float]:
    """Return operations and bytes of one client-step of the CNN: products forward, by weights and by inputs; each array moves once a use.

    These are the bytes of a program whose elementwise operations are joined to the products; `launched` counts those of today's.
    """
    named = {n: v[0] for n, v in ensemble.layers(ensemble.zeros(1)).items()}
    x = torch.zeros(1, batch_size, *shape, device=ensemble.device)
    cols1 = windows(x)
    a1 = x.new_zeros(1, batch_size, (shape[0] - 4) // 2, (shape[1] - 4) // 2, len(named["conv1.bias"]))
    cols2 = windows(a1)
    operations = bytes_moved = 0.0
    for cols, name, passes in ((cols1, "conv1", 2), (cols2, "conv2", 3)):  # images need no gradient
        filters = phases(named[f"{name}.weight"][None])
        outputs = filters.shape[1] * cols.shape[1]
        operations += passes * 2 * outputs * cols.shape[2]
        bytes_moved += 4 * (2 * passes * cols.numel() + 6 * outputs)  # windows, products, pool and its way back
    for name in ("fc1", "fc2", "head"):
        operations += 3 * 2 * batch_size * named[f"{name}.weight"].numel()
    bytes_moved += 4 * 10 * ensemble.width  # weights three times, gradient, clipping, decay, momentum, update
    return operations, bytes_moved


@dataclass(frozen=True)
class Ceilings:
    """Least seconds of training: by launches (for each of the times per kernel), and by bytes."""

    launches: tuple[float, ...]
    bytes: float


def ceilings(
    steps: Steps, kernels: int, row_bytes: float, gpu: GPU, launch_us: tuple[float, ...] = LAUNCH_US
) -> Ceilings:
    """Return both bounds for a number of kernels per lock-step and of bytes per row-step."""
    launches = tuple(steps.lock_steps * kernels * us * 1e-6 for us in launch_us)
    return Ceilings(launches, steps.row_steps * row_bytes / (gpu.bandwidth * 1e12))


def of_run(run: Run, gpu: str, launch_us: tuple[float, ...] = LAUNCH_US) -> str:
    """Return both ceilings of a Run's training on one GPU as text, with the counts that they come from.

    Every client trains in every round, as DPFL's do; searching the graph and scoring are not counted.

    Raises:
        UserError: the data cannot be read.
    """
    run, maker = run.resolve(), GPUS[gpu]
    source = open_source(run)
    n_train = deal(run, source).sizes("train")
    module = find("model", str(run.model)).build(source.shape, source.classes)
    ensemble = Ensemble(module, source.mean, source.std, torch.device("cpu"))
    epochs = run.tau_init + run.rounds * run.tau_train
    steps = steps_of(n_train, run.batch_size, epochs)
    kernels, row_bytes = launched(
        ensemble, source.shape, SGD(run.batch_size, run.momentum, run.weight_decay, run.clip_norm)
    )
    bound = ceilings(steps, kernels, row_bytes, maker, launch_us)
    largest, mean = steps.lock_steps / epochs, steps.client_steps / epochs / len(n_train)
    lines = [
        f"{run.slug()}: {len(n_train)} clients, {epochs} local epochs ({run.rounds} rounds), mini-batch {run.batch_size}",
        f"{steps.client_steps:,} client-steps in {steps.lock_steps:,} lock-steps: the largest client takes {largest:.0f} an epoch, the mean one "
        f"{mean:.1f}; {steps.row_steps:,} rows with those of the recorded block sizes",
        f"launch ceiling  {kernels} kernels per lock-step at {us(launch_us)} us: {seconds(bound.launches)}",
        f"bytes ceiling   {row_bytes / 1e6:.1f} MB per row as launched, {gpu} {maker.bandwidth:g} TB/s ({maker.source}): {seconds((bound.bytes,))}",
    ]
    if ensemble.kernels:
        _, fused = work_of_a_step(ensemble, source.shape, run.batch_size)
        least = ceilings(steps, kernels, fused, maker).bytes
        lines.append(f"                {fused / 1e6:.1f} MB if each array moved once a use: {seconds((least,))}")
    return "\n".join(lines)


def us(times: tuple[float, ...]) -> str:
    """Return times as text: "1.3 to 2"."""
    return " to ".join(f"{t:g}" for t in times)


def seconds(times: tuple[float, ...]) -> str:
    """Return seconds as text: "6.41 to 9.86 s"."""
    return " to ".join(f"{t:.3g}" for t in times) + " s"
