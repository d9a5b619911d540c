"""`Backend`: what trains and scores a rank's clients, and computes the sums of their searches.

Here PyTorch does, one client after the other, on any device; `NativeBackend` does the same by the
kernels in C, a block of clients in a call. The verbs of `Federation` call these functions.

Axes: K clients on this rank, k of them in a block, m models scored on one client's images, S
images, W row width, H W C an image, C classes, F what the last layer reads, M training samples.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.numerics.clients import Batch, Clients
from dpfl_mpi.numerics.ensemble import Block, Ensemble, Rows, cross_entropy, inputs_of
from dpfl_mpi.numerics.optimiser import SGD

PREPARED_NUMBERS = 2**25  # of images that one call prepares: 128 MiB
SCORED_IMAGES = 50  # of a client at once on a CPU: the widest layer stays in a core's cache
Gradient = Callable[[Block, Batch], Tensor]  # writes `block.g` and returns the losses [k]
# (local number of the client, logits [S, C], what the head reads [S, F], labels [S]) -> mean loss
Loss = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# called with the rows w, v and their mixture, after the gradient at the mixture
Learn = Callable[[Block, Block, Block], None]
# the start of a block's greedy searches: the sums of p_i w_i over the sets X and Y, float64 [k, W],
# memory for both averages [k, 2, W], and the sums of p_i over X and Y, float64 [k]
Starts = tuple[Tensor, Tensor, Tensor, np.ndarray, np.ndarray]
# (which rows of this rank, these rows [k, W], images for `Backend.outputs`) -> logits [k, S, C]
Predict = Callable[[slice, Tensor, Any], Tensor]


class LocalEpochs(NamedTuple):
    """Which local epochs are trained, and their learning rate."""

    number: int
    first: np.ndarray  # each client's first one [K]
    lr: float


class Backend:
    name = "torch"
    warning = ""  # why PyTorch computes in place of the kernels
    native: Any = None  # the kernels of a CPU (`Cpu`), where they compute

    def __init__(self, ensemble: Ensemble, clients: Clients, optimiser: SGD, block_size: int = 1):
        """Compute `block_size` clients in one call."""
        self.ensemble, self.clients, self.optimiser = ensemble, clients, optimiser
        starts = range(0, len(clients), block_size)
        self.blocks = [slice(i, min(i + block_size, len(clients))) for i in starts]

    def groups(self, chosen: np.ndarray) -> Iterator[Rows]:
        """Yield the rows of the chosen clients, bool `[K]`, that are computed together."""
        for block in self.blocks:
            rows = block.start + np.flatnonzero(chosen[block])
            if len(rows) == block.stop - block.start:
                yield block
            elif len(rows):
                yield rows

    # training -----------------------------------------------------------------------------------
    def train_epochs(
        self, block: Block, epochs: LocalEpochs, gradient: Any = None, trained: Any = None
    ) -> None:
        """Train the block's rows in place.

        A `Gradient` may replace that of the loss. Columns not `trained` (bool `[W]`) are frozen.
        """
        for batch in self.batches(block.rows, epochs.number, epochs.first):
            block = block.first(batch.k)  # clients with fewer samples are done earlier
            self.step(block, (gradient or self.gradient)(block, batch), epochs.lr, trained)

    def train_mixed(
        self, w: Block, v: Block, alpha_K1: Tensor, epochs: LocalEpochs, learn: Learn | None
    ) -> None:
        """Train w as `train_epochs` does, and v by alpha times the gradient at their mixture.

        The mixture is alpha v + (1 - alpha) w. Each mini-batch moves w before v. Then
        `learn(w, v, mixture)` may change alpha `[K, 1]` for the next one.
        """
        for batch in self.batches(w.rows, epochs.number, epochs.first):
            w, v = w.first(batch.k), v.first(batch.k)
            alpha = alpha_K1[w.rows].float()
            self.step(w, self.gradient(w, batch), epochs.lr)
            mixture = Block(self.ensemble, alpha * v.w + (1 - alpha) * w.w, None, v.rows)
            loss = self.gradient(mixture, batch)
            v.g = alpha * mixture.g
            if learn:
                learn(w, v, mixture)
            self.step(v, loss, epochs.lr)

    def train_ahead(self, block: Block, inner: float, epochs: LocalEpochs) -> None:
        """Train by pairs of mini-batches.

        The first one's gradient leads to a row ahead, w - inner * gradient. The step from w follows
        the second one's gradient at that row.
        """
        for batch in self.batches(block.rows, epochs.number, epochs.first):
            block = block.first(batch.k)
            if batch.step % 2 == 0:
                self.gradient(block, batch)
                ahead = Block(self.ensemble, block.w - inner * block.g, None, block.rows)
            else:
                ahead = ahead.first(batch.k)
                loss = self.gradient(ahead, batch)
                block.g = ahead.g
                self.step(block, loss, epochs.lr)

    def batches(self, rows: Rows, epochs: int, first_epoch: np.ndarray) -> Iterator[Any]:
        """Yield the mini-batches of `epochs` local epochs of these rows, for `gradient`.

        In each, only the first `k` rows still train.
        """
        i = client_of(rows)
        return self.clients.batches(i, epochs, int(first_epoch[i]), self.optimiser.batch_size)

    def gradient(self, block: Block, batch: Batch) -> Tensor:
        """Write the gradient of a mini-batch's mean loss into `block.g`; return the losses."""
        g, loss = self.ensemble.gradient(block.w[0], batch.x, batch.y, batch.key)
        block.g = g[None]
        return loss[None]

    def zero_momentum(self, k: int) -> Tensor:
        """Return the momentum rows of k clients before their first step."""
        width = self.optimiser.state_size(self.ensemble.width)
        return torch.zeros(k, width, device=self.ensemble.device)

    def step(self, block: Block, loss: Tensor, lr: float, trained: Tensor | None = None) -> None:
        """Step the optimiser along `block.g`; columns not `trained` (bool `[W]`) are frozen."""
        self._count(block, loss)
        self.optimiser.step(block.w, block.g, block.momentum, lr, trained)

    def descend(self, block: Block, rate: float, loss: Tensor | None = None) -> None:
        """Step along `block.g` without momentum, decay or clipping.

        With the `loss` of its mini-batch it counts as a step of training.
        """
        block.w.add_(block.g, alpha=-rate)
        self._count(block, loss)

    def descents(
        self, block: Block, batch: Any, steps: int, rate: float, towards: Tensor, pull: float
    ) -> None:
        """Take `steps` of `descend` on one mini-batch, each along gradient + pull (w - towards)."""
        for _ in range(steps):
            loss = self.gradient(block, batch)
            block.g.add_(pull * (block.w - towards))
            self.descend(block, rate, loss)

    def _count(self, block: Block, loss: Tensor | None) -> None:
        if loss is not None:
            block.loss += loss
            block.steps += 1

    # scores -------------------------------------------------------------------------------------
    def scores(
        self, w_KW: Tensor, chosen: np.ndarray, predict: Predict | None = None
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield each chosen client's local number, and its part `[S]` of what `score` returns."""
        for block in self.blocks:
            if chosen[block].any():
                scores = self.score(block, w_KW[block], predict)
                numbers = range(block.start, block.stop)
                for i, losses, predicted, labels in zip(numbers, *scores, strict=True):
                    if chosen[i]:
                        yield i, losses, predicted, labels

    def score(
        self, rows: slice, w_kW: Tensor, predict: Predict | None = None
    ) -> tuple[np.ndarray, ...]:
        """Return the loss, predicted class and label of each scored image, each `[k, S]`.

        A client's validation images come first, then its test images, then padding.
        """
        out = []
        for x, y in self.clients.scored_samples(client_of(rows), False, SCORED_IMAGES):
            logits = predict(rows, w_kW, x) if predict else self.ensemble.logits(w_kW, x)
            out.append((cross_entropy(logits, y[None]), logits.argmax(2), y[None]))
        losses, predicted, labels = (
            torch.cat(part, 1).cpu().numpy() for part in zip(*out, strict=True)
        )
        return losses.astype(np.float64), predicted, labels

    def logits(self, w_kW: Tensor, images: Any) -> Tensor:
        """Return the logits `[k, S, C]` of a `Predict`'s images."""
        return self.ensemble.logits(w_kW, images)

    def outputs(self, w_kW: Tensor, images: Any, head: str) -> tuple[Tensor, Tensor]:
        """Return logits `[k, S, C]` of a `Predict`'s images, and what `head` reads `[k, S, F]`."""
        features = self.ensemble.features(w_kW[0], images, head)
        return self.logits(w_kW, images), features[None]

    def training_features(
        self, i: int, w_1W: Tensor, most: int, head: str
    ) -> tuple[Tensor, Tensor]:
        """Return what `head` reads of client i's first `most` training samples, and the labels."""
        x, y = self.clients.training_samples(i, most)
        parts = x.split(max(1, PREPARED_NUMBERS // max(1, x[0].numel())))
        return torch.cat([self.ensemble.features(w_1W[0], part, head) for part in parts]), y

    def validation_outputs(self, i: int, w_1W: Tensor, head: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, what `head` reads, and labels of client i's search images, `[S, ...]`."""
        outputs = []
        for x, y in self.clients.scored_samples(i, True, SCORED_IMAGES):
            logits, features = self.outputs(w_1W, x, head)
            outputs.append((logits[0], features[0], y))
        logits, features, labels = (torch.cat(part) for part in zip(*outputs, strict=True))
        return logits, features, labels

    def training_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        """Return the mean loss of m models on local client i's training samples, float64 `[m]`."""
        x, y = self.clients.training_samples(i)
        parts = x.split(SCORED_IMAGES), y.split(SCORED_IMAGES)
        return mean_losses(self.ensemble, w_mW, zip(*parts, strict=True))

    def validation_losses(self, rows: slice, w_kmW: Tensor) -> np.ndarray:
        """Return the mean validation loss of m models per client `[k, m, W]`, float64 `[k, m]`.

        Each is scored on those of its client's validation images that the greedy search sees.
        """
        parts = self.clients.scored_samples(client_of(rows), True, SCORED_IMAGES)
        return mean_losses(self.ensemble, w_kmW[0], parts)[None]

    # the greedy search --------------------------------------------------------------------------
    def candidate(
        self, x_kW: Tensor, y_kW: Tensor, w_kW: Tensor, shares: Any, averages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of a candidate w in X, x + p w, or out of Y, y - p w, float64 `[k, W]`.

        `shares` are p `[k]`, and the sums of p over these X and Y. Both averages are written into
        `averages` `[k, 2, W]`.
        """
        p, p_x, p_y = map(self.ensemble.column, shares)
        x, y = x_kW.addcmul(w_kW.double(), p), y_kW.addcmul(w_kW.double(), p, value=-1)
        torch.div(x, p_x, out=averages[:, 0])
        torch.div(y, p_y, out=averages[:, 1])
        return x, y

    def chooser(self, rows: slice, start: Starts, cases: np.ndarray) -> Any:
        """Return what decides many candidates of these clients in one call, as `Searches` does.

        None: nothing does, so each candidate is decided by `candidate` and `validation_losses`.
        """
        return None


def client_of(rows: Rows) -> int:
    """Return the local number of a block's only client."""
    return int(rows.start if isinstance(rows, slice) else rows[0])


def mean_losses(
    ensemble: Ensemble, w_mW: Tensor, parts: Iterable[tuple[Tensor, Tensor]]
) -> np.ndarray:
    """Return the mean loss of m models on parts of images and labels, float64 `[m]`."""
    total, count = torch.zeros(len(w_mW), dtype=torch.float64, device=w_mW.device), 0
    with torch.no_grad():
        for x, y in parts:
            losses = cross_entropy(ensemble.logits(w_mW, x), y.expand(len(w_mW), -1))
            total += losses.double().sum(1)
            count += len(y)
    return total.cpu().numpy() / count


@dataclass(frozen=True)
class Proximal:
    """The `Gradient` of f_i(w_i) + (mu / 2) ||w_i - towards||^2; `towards` is `[W]` or `[K, W]`."""

    backend: Backend
    towards: Tensor
    mu: float

    def __call__(self, block: Block, batch: Any) -> Tensor:
        loss = self.backend.gradient(block, batch)
        block.g.add_(block.w - self.target(block.rows), alpha=self.mu)
        return loss

    def target(self, rows: Rows) -> Tensor:
        """Return the `towards` of these rows, `[W]` or `[k, W]`."""
        return self.towards if self.towards.dim() == 1 else self.towards[rows]


@dataclass(frozen=True)
class LossGradient:
    """The `Gradient` of a loss of one's own, by PyTorch; `head` is the name of the last layer."""

    backend: Backend
    loss: Loss
    head: str

    def __call__(self, block: Block, batch: Batch) -> Tensor:
        ensemble, i = self.backend.ensemble, client_of(block.rows)
        with inputs_of(ensemble.learner, self.head) as inputs:

            def loss_of(logits_SC: Tensor, y_S: Tensor) -> Tensor:
                return self.loss(i, logits_SC, inputs.pop(), y_S)

            g, loss = ensemble.gradient(block.w[0], batch.x, batch.y, batch.key, loss_of)
        block.g = g[None]
        return loss[None]

    def train_epochs(self, block: Block, epochs: LocalEpochs, trained: Any = None) -> None:
        """Train the block's rows one after the other, in place, as `Backend.train_epochs` does."""
        numbers = np.arange(len(self.backend.clients))[block.rows]
        for row, i in enumerate(numbers):
            part, one = slice(row, row + 1), np.array([i])
            momentum = None if block.momentum is None else block.momentum[part]
            client = Block(block.ensemble, block.w[part], momentum, one)
            for batch in Backend.batches(self.backend, one, epochs.number, epochs.first):
                self.backend.step(client, self(client, batch), epochs.lr, trained)
            block.loss[part] += client.loss
            block.steps[part] += client.steps
