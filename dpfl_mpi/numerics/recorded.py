"""The training step of a block of clients, recorded for a few block sizes and replayed: a GPU launches it as one CUDA graph.

A recording has fixed shapes and addresses. So rows, momentum and mini-batches pass through buffers that stay, and a step of k clients runs in
the smallest recorded size that holds them; the rows behind are masked. On a CPU nothing is recorded and the same calls are made.
"""

import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.backend import SGD, Adam, Backend, Gradient
from dpfl_mpi.numerics.clients import Batch, Clients
from dpfl_mpi.numerics.ensemble import Block, Ensemble

SIZES = 8  # most block sizes recorded: each takes memory of its own
FEW = 3  # of a compiled step that PyTorch's vmap computes: each is compiled by itself
WARM_UP = 3  # steps before a recording: libraries choose kernels and allocate in their first calls


def block_sizes(steps: np.ndarray, most: int = SIZES) -> list[int]:
    """Return at most `most` block sizes, ascending: with the fewest row-steps, where a step with n clients left costs the smallest size >= n."""
    k = len(steps)
    ending = steps - np.append(steps[1:], 0)  # steps taken with exactly n = 1..k clients left
    sizes = [n for n in range(1, k + 1) if ending[n - 1] or n == k]
    before = np.concatenate([[0], np.cumsum(ending)])  # [n]: steps with at most n clients left
    cost = {n: n * float(before[n]) for n in sizes}  # of the sizes up to n, one recording
    chosen = {n: [n] for n in sizes}
    for _ in range(min(most, len(sizes)) - 1):
        new_cost, new_chosen = {}, {}
        for n in sizes:
            options = [(cost[m] + n * float(before[n] - before[m]), m) for m in sizes if m < n]
            best = min(options, default=(cost[n], n))
            new_cost[n], new_chosen[n] = (best[0], [*chosen[best[1]], n]) if best[0] < cost[n] else (cost[n], chosen[n])
        cost, chosen = new_cost, new_chosen
    return chosen[k]


class RecordedSteps:
    """Buffers for a block of up to k clients, and the recorded step of each size."""

    def __init__(self, ensemble: Ensemble, steps: np.ndarray, shape: tuple[int, ...], sgd: SGD, compiled: bool = False):
        """Record every size, on rows of zeros, first compiled or not. `steps` `[k]` is what each client of the block takes in an epoch, descending."""
        k, device, batch_size = len(steps), ensemble.device, sgd.batch_size
        self.ensemble, self.sgd, self.lr = ensemble, sgd, torch.zeros((), device=device)
        self.w, self.momentum, self.loss = ensemble.zeros(k), ensemble.zeros(k), torch.zeros(k, device=device)
        kind = torch.int64 if ensemble.dtype == "int32" else torch.float32
        self.x = torch.zeros(k, batch_size, *shape, dtype=kind, device=device)
        self.y = torch.zeros(k, batch_size, dtype=torch.int64, device=device)
        self.weight = torch.zeros(k, batch_size, device=device)
        self.mask = torch.zeros(k, 1, dtype=torch.bool, device=device)
        self.key = torch.zeros(k, dtype=torch.int64, device=device) if ensemble.draws.layers else None
        self.sizes = block_sizes(steps, FEW if compiled and not ensemble.kernels else SIZES)
        if compiled:
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # the compiler proposes --precision tf32
            torch._dynamo.config.cache_size_limit = 1000  # a program per size and block, not the usual 8
        self.compiled: Any = torch.compile(self._advance, fullgraph=True) if compiled else None
        self.graphs: dict[int, Any] = {n: self._record(n) for n in self.sizes}

    def _advance(
        self, w: Tensor, momentum: Tensor, loss: Tensor, x: Tensor, y: Tensor, weight: Tensor, mask: Tensor, *key: Any
    ) -> None:
        g, losses = self.ensemble.gradient_of(self.ensemble.layers(w), x, y, weight, *(key or (None,)))
        loss += losses
        self.sgd.step(w, g, momentum, self.lr, mask)

    def _record(self, n: int) -> Any:
        held = (self.w, self.momentum, self.loss, self.x, self.y, self.weight, self.mask, self.key)
        rows = [t[:n] for t in held if t is not None]
        for t in rows if self.compiled else ():
            torch._dynamo.maybe_mark_dynamic(t, 0)  # one program for all sizes, where vmap does not count the rows
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
            raise UserError(f"a step of this model cannot be recorded ({why}); use --kernels torch") from error
        return graph.replay

    def load(self, w_kW: Tensor, momentum_kW: Tensor, lr: float) -> None:
        """Take over the rows of the clients that train now: the first ones of the block."""
        n = len(w_kW)
        self.w[:n].copy_(w_kW)
        self.momentum[:n].copy_(momentum_kW)
        self.loss.zero_()
        self.lr.fill_(lr)

    def step(self, batch: Batch) -> None:
        """Train the first `batch.k` rows on a mini-batch; the others keep every bit."""
        n = next(size for size in self.sizes if size >= batch.k)
        for held, now in ((self.x, batch.x), (self.y, batch.y), (self.weight, batch.weight), (self.key, batch.key)):
            if held is not None and now is not None:
                held[: batch.k].copy_(now)
        self.weight[batch.k : n].zero_()
        self.mask[: batch.k].fill_(True)
        self.mask[batch.k : n].fill_(False)
        self.graphs[n]()


class RecordedBackend(Backend):
    def __init__(self, ensemble: Ensemble, clients: Clients, sgd: SGD, at_once: int, compiled: bool = False):
        super().__init__(ensemble, clients, sgd, at_once)
        self.compiled, self.name = compiled, "compiled" if compiled else self.name
        self.recorded: dict[int, RecordedSteps] = {}  # by the first row of their block

    def train_epochs(
        self, block: Block, epochs: int, first: np.ndarray, lr: float, gradient: Gradient | None, trained: Tensor | None
    ) -> None:
        # only the plain step of SGD is recorded
        if gradient is not None or trained is not None or isinstance(self.sgd, Adam):
            return super().train_epochs(block, epochs, first, lr, gradient, trained)
        rows = np.arange(len(self.clients))[block.rows]
        k, recorded = len(rows), self._recorded(int(rows[0]))
        recorded.load(block.w, block.momentum, lr)
        for batch in self.clients.batches(rows, epochs, first, self.sgd.batch_size, pad=True):
            recorded.step(batch)
            block.steps[: batch.k] += 1
        block.w.copy_(recorded.w[:k])
        block.momentum.copy_(recorded.momentum[:k])
        block.loss.copy_(recorded.loss[:k])

    def _recorded(self, row: int) -> RecordedSteps:
        """Return the recorded steps of the block that holds this row; absent clients have room in them as well."""
        whole = next(b for b in self.blocks if b.start <= row < b.stop)
        if whole.start not in self.recorded:
            steps = -(-self.clients.n_train[whole] // self.sgd.batch_size)
            how = self.clients.shape, self.sgd, self.compiled
            self.recorded[whole.start] = RecordedSteps(self.ensemble, steps, *how)
        return self.recorded[whole.start]
