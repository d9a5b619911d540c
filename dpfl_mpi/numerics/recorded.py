"""Training steps of a block of clients on a GPU, recorded as CUDA graphs and replayed.

A recording has fixed shapes and addresses. So rows and mini-batches pass through buffers that stay,
and a step of k clients runs in the smallest recorded size that holds them; the other rows are
masked. On a CPU nothing is recorded and the same calls are made.

Blocks of several clients need this file, `models/_cnn_stacked.py`, `Backend.blocks`, and elsewhere:
`kernels` and vmap in `Ensemble`, padding in `Clients.batches`, row masks and lr tensors in `SGD`.
"""

import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.backend import Backend, LocalEpochs
from dpfl_mpi.numerics.clients import Batch, Clients
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.model_check import in_one_line
from dpfl_mpi.numerics.optimiser import SGD, Adam

SIZES = 8  # most block sizes recorded: each takes memory of its own
COMPILED_SIZES = 3  # where PyTorch's vmap computes: each size is compiled by itself
WARM_UP = 3  # steps before a recording: libraries choose kernels and allocate in them


def block_sizes(steps: np.ndarray, most: int = SIZES) -> list[int]:
    """Return the at most `most` block sizes, ascending, with the fewest row-steps.

    A step with n clients left costs the smallest size >= n. `steps` `[k]` are the clients' steps.
    """
    k = len(steps)
    ending = steps - np.append(steps[1:], 0)  # steps with exactly n = 1..k clients left
    sizes = [n for n in range(1, k + 1) if ending[n - 1] or n == k]
    before = np.concatenate([[0], np.cumsum(ending)])  # [n]: steps with at most n clients left
    cost = {n: n * float(before[n]) for n in sizes}  # of the sizes up to n, one recording
    chosen = {n: [n] for n in sizes}
    for _ in range(min(most, len(sizes)) - 1):
        new_cost, new_chosen = {}, {}
        for n in sizes:
            smaller = [m for m in sizes if m < n]
            options = [(cost[m] + n * float(before[n] - before[m]), m) for m in smaller]
            least, m = min(options, default=(cost[n], n))
            better = least < cost[n]
            new_cost[n] = least if better else cost[n]
            new_chosen[n] = [*chosen[m], n] if better else chosen[n]
        cost, chosen = new_cost, new_chosen
    return chosen[k]


class RecordedSteps:
    """Buffers for a block of up to k clients, and the recorded step of each size."""

    def __init__(
        self,
        ensemble: Ensemble,
        steps: np.ndarray,
        shape: tuple[int, ...],
        optimiser: SGD,
        compiled: bool = False,
    ):
        """Record every size, on rows of zeros, with or without torch.compile.

        `steps` `[k]` is what each client of the block takes in an epoch, descending.
        """
        k, device, batch_size = len(steps), ensemble.device, optimiser.batch_size
        self.ensemble, self.optimiser = ensemble, optimiser
        self.lr = torch.zeros((), device=device)
        self.w, self.momentum = ensemble.zeros(k), ensemble.zeros(k)
        self.loss = torch.zeros(k, device=device)
        kind = torch.int64 if ensemble.dtype == "int32" else torch.float32
        self.x = torch.zeros(k, batch_size, *shape, dtype=kind, device=device)
        self.y = torch.zeros(k, batch_size, dtype=torch.int64, device=device)
        self.weight = torch.zeros(k, batch_size, device=device)
        self.mask = torch.zeros(k, 1, dtype=torch.bool, device=device)
        self.key = None
        if ensemble.draws.layers:
            self.key = torch.zeros(k, dtype=torch.int64, device=device)
        by_vmap = not ensemble.kernels
        self.sizes = block_sizes(steps, COMPILED_SIZES if compiled and by_vmap else SIZES)
        self.compiled: Any = None
        if compiled:
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # proposes tf32
            torch._dynamo.config.cache_size_limit = 1000  # a program per size and block, not 8
            self.compiled = torch.compile(self._advance, fullgraph=True)
        self.graphs: dict[int, Any] = {n: self._record(n) for n in self.sizes}

    def _advance(
        self,
        w: Tensor,
        momentum: Tensor,
        loss: Tensor,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        mask: Tensor,
        key: Tensor | None = None,
    ) -> None:
        g, losses = self.ensemble.gradient_of(self.ensemble.layers(w), x, y, weight, key)
        loss += losses
        self.optimiser.step(w, g, momentum, self.lr, mask)

    def _record(self, n: int) -> Any:
        buffers = (self.w, self.momentum, self.loss, self.x, self.y, self.weight, self.mask)
        rows = [t[:n] for t in (*buffers, self.key) if t is not None]
        for t in rows if self.compiled else ():
            torch._dynamo.maybe_mark_dynamic(t, 0)  # one program for all sizes
        # one row takes another path through PyTorch
        step = partial(self.compiled if self.compiled and n > 1 else self._advance, *rows)
        if self.ensemble.device.type != "cuda":
            return step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if isinstance(error.__context__, torch.OutOfMemoryError):  # which ended the recording
                raise error.__context__ from None
            why = str(error).splitlines()[0]
            mend = "use --kernels torch"
            raise UserError(f"a step of this model cannot be recorded ({why}); {mend}") from error
        return graph.replay

    def load(self, w_kW: Tensor, momentum_kW: Tensor, lr: float) -> None:
        """Take over the rows of the clients that train now: the first ones of the block."""
        self.w[: len(w_kW)].copy_(w_kW)
        self.momentum[: len(w_kW)].copy_(momentum_kW)
        self.loss.zero_()
        self.lr.fill_(lr)

    def step(self, batch: Batch) -> None:
        """Train the first `batch.k` rows on a mini-batch; the others keep every bit."""
        n = next(size for size in self.sizes if size >= batch.k)
        buffers = self.x, self.y, self.weight, self.key
        values = batch.x, batch.y, batch.weight, batch.key
        for buffer, value in zip(buffers, values, strict=True):
            if buffer is not None and value is not None:
                buffer[: batch.k].copy_(value)
        self.weight[batch.k : n].zero_()
        self.mask[: batch.k].fill_(True)
        self.mask[batch.k : n].fill_(False)
        self.graphs[n]()


class RecordedBackend(Backend):
    def __init__(
        self,
        ensemble: Ensemble,
        clients: Clients,
        optimiser: SGD,
        block_size: int,
        compiled: bool = False,
    ):
        super().__init__(ensemble, clients, optimiser, block_size)
        self.compiled, self.name = compiled, "compiled" if compiled else self.name
        self.recorded: dict[int, RecordedSteps] = {}  # by the first row of their block

    def train_epochs(
        self, block: Block, epochs: LocalEpochs, gradient: Any = None, trained: Any = None
    ) -> None:
        # only the plain step of SGD is recorded
        if gradient is not None or trained is not None or isinstance(self.optimiser, Adam):
            return super().train_epochs(block, epochs, gradient, trained)
        rows = np.arange(len(self.clients))[block.rows]
        k, recorded = len(rows), self._recorded(int(rows[0]))
        batch_size = self.optimiser.batch_size
        batches = self.clients.batches(rows, epochs.number, epochs.first, batch_size, padded=True)
        recorded.load(block.w, block.momentum, epochs.lr)
        for batch in batches:
            recorded.step(batch)
            block.steps[: batch.k] += 1
        block.w.copy_(recorded.w[:k])
        block.momentum.copy_(recorded.momentum[:k])
        block.loss.copy_(recorded.loss[:k])

    def _recorded(self, row: int) -> RecordedSteps:
        """Return the recording of the block that contains this row.

        It covers the whole block, even if some clients are absent this round.
        """
        whole = next(b for b in self.blocks if b.start <= row < b.stop)
        if whole.start not in self.recorded:
            steps = -(-self.clients.n_train[whole] // self.optimiser.batch_size)
            how = self.clients.shape, self.optimiser, self.compiled
            self.recorded[whole.start] = RecordedSteps(self.ensemble, steps, *how)
        return self.recorded[whole.start]


def check_several(ensemble: Ensemble, clients: Clients, k: int = 2) -> None:
    """Raise `UserError` where a module does not train and score k clients at once.

    PyTorch's vmap lacks some layers, and takes no `if` on values. On a GPU the gradient of some
    layers, such as `nn.AdaptiveAvgPool2d(7)`, has other bits at each call.
    """
    block, zeros = Block(ensemble, ensemble.zeros(k)), partial(torch.zeros, device=ensemble.device)
    x = ensemble.normalise(zeros(k, 1, *clients.shape))
    y, key = zeros(k, 1, dtype=torch.int64), zeros(k, dtype=torch.int64)
    try:
        with torch.no_grad():
            ensemble.gradient(block, x, y, zeros(k, 1), key)
            ensemble.logits(block.w, x)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        fails = f"forward does not run for several clients at once ({in_one_line(error)})"
        lacks = "torch.func.vmap allows no `if` on values of x, no nn.LSTM and no nn.GRU"
        mend = f"{lacks}; --block 1 does"
        if "deterministic implementation" in str(error):
            name = str(error).split()[0]
            fails = f"{name}, which it needs, has other bits at each call on a GPU"
            mend = "allowed are pools of fixed windows, such as nn.AvgPool2d, or --device cpu"
        raise UserError(f"--model: {fails}; {mend}") from error
