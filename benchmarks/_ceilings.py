"""Two bounds on how fast a GPU can train a Run, from counts: launching kernels and moving bytes.

A recorded step (`numerics/recorded.py`) advances all clients that still train in lock-step, and
launches the same kernels however many these are. So the launch ceiling is lock-steps x kernels x
time per kernel. The bytes of a step grow with its rows, so the bytes ceiling is row-steps x bytes
of a row's step / memory bandwidth. Neither needs a GPU: the steps come from the clients' training
sets, kernels and bytes from PyTorch's own calls, watched on a CPU.

Axes: k clients, S mini-batch, H W C image.
"""

from collections.abc import Sequence
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
from dpfl_mpi.numerics.clients import Batch
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.recorded import RecordedSteps, block_sizes
from dpfl_mpi.plugins import find
from dpfl_mpi.settings import Run

# memory bandwidth, TB/s, by its maker's data sheet
GPUS = {
    "b200": (8.0, "NVIDIA DGX B200 data sheet: 64 TB/s for eight"),
    "h200": (4.8, "NVIDIA H200 data sheet"),
    "h100-nvl": (3.9, "NVIDIA H100 data sheet"),
    "h100": (3.35, "NVIDIA H100 data sheet, SXM"),
    "a100-80": (2.039, "NVIDIA A100 data sheet, SXM 80 GB"),
    "a100-40": (1.555, "NVIDIA A100 data sheet, 40 GB"),
    "v100": (0.9, "NVIDIA V100 data sheet, SXM2"),
    "l40s": (0.864, "NVIDIA L40S data sheet"),
    "l4": (0.3, "NVIDIA L4 data sheet"),
}
# from one small kernel of a CUDA graph to the next: an assumption, not measured here
LAUNCH_US = (1.3, 2.0)
OVERWRITE = ("aten::copy_", "aten::fill_", "aten::zero_")  # do not read their first argument
# calls beside views that launch no kernel
NO_KERNEL = ("aten::_unsafe_view", "aten::empty", "aten::empty_like", "aten::new_empty")


@dataclass(frozen=True)
class Steps:
    """What it takes to train all clients of a Run on one GPU in one block.

    A client-step is one mini-batch of one client. A lock-step advances all clients that have
    mini-batches left. A row-step is one row of a lock-step, with the rows that fill up the recorded
    block size.
    """

    client_steps: int
    lock_steps: int
    row_steps: int


def steps_of(n_train: np.ndarray, batch_size: int, epochs: int) -> Steps:
    """Return the steps of local epochs of clients with these training sets, `[k]` samples."""
    steps = np.sort(-(-np.asarray(n_train) // batch_size))[::-1]
    # clients in each lock-step of an epoch
    clients = (steps[:, None] > np.arange(steps.max(initial=0))).sum(0)
    sizes = np.array(block_sizes(steps))
    rows = sizes[np.searchsorted(sizes, clients)].sum()
    return Steps(epochs * int(steps.sum()), epochs * len(clients), epochs * int(rows))


class Watch(TorchDispatchMode):
    """Counts calls that launch a kernel, and their bytes, all arguments and results in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = call(*args, **kwargs)
        schema = call._schema
        aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
        view = any(not alias.is_write for alias in aliases)
        if not view and schema.name not in NO_KERNEL:
            self.kernels += 1
            if schema.name in OVERWRITE:
                read: Any = args[1:]
            else:
                read = args, {n: v for n, v in kwargs.items() if n != "out"}
            tensors = [t for t in tree_leaves((read, out)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return out


def launched(ensemble: Ensemble, shape: tuple[int, int, int], sgd: SGD) -> tuple[int, float]:
    """Return the kernels that one lock-step launches, and the bytes of one row in it.

    Images are normalised in it. They are gathered, cropped and flipped for many lock-steps at once,
    which is not counted.
    """
    k, s = 2, sgd.batch_size  # one row alone takes another path without stacked kernels
    recorded = RecordedSteps(ensemble, np.full(k, 1), shape, sgd)
    images = torch.zeros(k, s, *shape, dtype=torch.uint8)
    y, weight = torch.zeros(k, s, dtype=torch.int64), torch.full((k, s), 1 / s)
    with torch.no_grad(), Watch() as watch:
        recorded.step(Batch(k, 0, ensemble.normalise(images), y, weight))
    return watch.kernels, watch.bytes / k


class StepWork(NamedTuple):
    operations: float
    bytes: float


def work_of_a_step(ensemble: Ensemble, shape: tuple[int, int, int], batch_size: int) -> StepWork:
    """Return the work of one client-step of the CNN, where each array moves once a use.

    Products go forward, by weights and by inputs. The bytes are those of a program whose
    elementwise operations are joined to the products; `launched` counts today's.
    """
    layers = {n: v[0] for n, v in ensemble.layers(ensemble.zeros(1)).items()}
    x = torch.zeros(1, batch_size, *shape, device=ensemble.device)
    pooled = (shape[0] - 4) // 2, (shape[1] - 4) // 2
    a1 = x.new_zeros(1, batch_size, *pooled, len(layers["conv1.bias"]))
    operations = bytes_moved = 0.0
    for inputs, name, passes in ((x, "conv1", 2), (a1, "conv2", 3)):  # images need no gradient
        columns, filters = windows(inputs), phases(layers[f"{name}.weight"][None])
        outputs = filters.shape[1] * columns.shape[1]
        operations += passes * 2 * outputs * columns.shape[2]
        # windows, products, pool and its way back
        bytes_moved += 4 * (2 * passes * columns.numel() + 6 * outputs)
    for name in ("fc1", "fc2", "head"):
        operations += 3 * 2 * batch_size * layers[f"{name}.weight"].numel()
    # weights three times, gradient, clipping, decay, momentum, update
    bytes_moved += 4 * 10 * ensemble.width
    return StepWork(operations, bytes_moved)


class Ceilings(NamedTuple):
    """Least seconds of training: by launches (for each time per kernel), and by bytes."""

    launches: tuple[float, ...]
    bytes: float


def ceilings(
    steps: Steps, kernels: int, row_bytes: float, gpu: str, launch_us: Sequence[float]
) -> Ceilings:
    """Return both bounds for the kernels of a lock-step and the bytes of a row-step."""
    launches = tuple(steps.lock_steps * kernels * us * 1e-6 for us in launch_us)
    return Ceilings(launches, steps.row_steps * row_bytes / (GPUS[gpu][0] * 1e12))


def ceilings_of_run(run: Run, gpu: str, launch_us: Sequence[float] = LAUNCH_US) -> str:
    """Return both ceilings of a Run's training on one GPU as text, with their counts.

    Every client trains in every round, as DPFL's do; searching the graph and scoring are not
    counted.

    Raises:
        UserError: the data cannot be read.
    """
    run = run.resolve()
    source = open_source(run)
    n_train = deal(run, source).sizes("train")
    module = find("model", str(run.model)).build(source.shape, source.classes)
    ensemble = Ensemble(module, source.mean, source.std, torch.device("cpu"))
    epochs = run.tau_init + run.rounds * run.tau_train
    steps = steps_of(n_train, run.batch_size, epochs)
    sgd = SGD(run.batch_size, run.momentum, run.weight_decay, run.clip_norm)
    kernels, row_bytes = launched(ensemble, source.shape, sgd)
    bound = ceilings(steps, kernels, row_bytes, gpu, launch_us)
    largest, mean = steps.lock_steps / epochs, steps.client_steps / epochs / len(n_train)
    bandwidth, sheet = GPUS[gpu]
    lines = [
        f"{run.slug()}: {len(n_train)} clients, {epochs} local epochs ({run.rounds} rounds), "
        f"mini-batch {run.batch_size}",
        f"{steps.client_steps:,} client-steps in {steps.lock_steps:,} lock-steps: the largest "
        f"client takes {largest:.0f} an epoch, the mean one {mean:.1f}; {steps.row_steps:,} rows "
        "with those of the recorded block sizes",
        f"launch ceiling  {kernels} kernels per lock-step at {as_text(launch_us)} us: "
        f"{as_text(bound.launches)} s",
        f"bytes ceiling   {row_bytes / 1e6:.1f} MB per row as launched, {gpu} {bandwidth:g} TB/s "
        f"({sheet}): {bound.bytes:.3g} s",
    ]
    if ensemble.kernels:
        joined = work_of_a_step(ensemble, source.shape, run.batch_size).bytes
        least = ceilings(steps, kernels, joined, gpu, launch_us).bytes
        lines.append(f"                {joined / 1e6:.1f} MB if each array moved once a use: "
                     f"{least:.3g} s")  # fmt: skip
    return "\n".join(lines)


def as_text(values: Sequence[float]) -> str:
    """Return numbers as text: "1.3 to 2"."""
    return " to ".join(f"{value:.3g}" for value in values)
