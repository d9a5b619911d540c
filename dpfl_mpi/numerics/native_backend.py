"""`NativeBackend`: training and scoring by the CPU kernels (`native`), one client at a time; a client's epochs are one call.

Axes: W row width, k = 1 client of a block, m models scored on one client's images, n images, C classes, F what the head reads.
"""

import math
import platform
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.backend import SGD, Adam, Backend, Gradient, Learn, Predict, Proximal
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import Block, Ensemble, Rows, cross_entropy
from dpfl_mpi.numerics.native import (
    FORMS,
    Chooser,
    Epochs,
    MiniBatch,
    Native,
    Start,
    StepRule,
    load,
)
from dpfl_mpi.settings import Job


class NativeBackend(Backend):
    """A `Backend` whose steps and scores are computed in C."""

    def __init__(self, ensemble: Ensemble, clients: Clients, sgd: SGD, form: str = ""):
        """Compute in the widest form that this processor can run, or in the one that is named; what cannot be had is a `UserError`."""
        super().__init__(ensemble, clients, sgd, at_once=1)
        self.native = Native(ensemble, clients.shape, form)
        self.name = "native"
        self._train = self.native.images(clients.x, clients.y)
        self._scored = self.native.images(clients.score_x, clients.score_y)

    # training ------------------------------------------------------------------------------------------------------------
    def train_epochs(
        self, block: Block, epochs: int, first: np.ndarray, lr: float, gradient: Gradient | None, trained: Tensor | None
    ) -> None:
        if not (gradient is None or isinstance(gradient, Proximal)):  # a method's own gradient: entered once per step
            return super().train_epochs(block, epochs, first, lr, gradient, trained)
        rule = StepRule(self.sgd, lr, trained)
        if isinstance(gradient, Proximal):
            rule = replace(rule, towards=gradient.target(block.rows).view(-1), mu=gradient.mu)
        seen = self._epochs(block.rows, epochs, first, rule)
        block.loss += self.native.train(block.w[0], block.momentum[0], seen)
        block.steps += seen.steps

    def train_mixed(
        self, w: Block, v: Block, alpha_K1: Tensor, epochs: int, first: np.ndarray, lr: float, learn: Learn | None
    ) -> None:
        uneven = isinstance(self.sgd, Adam) and w.momentum[0, -1] != v.momentum[0, -1]  # steps of theirs so far
        if learn or uneven:
            return super().train_mixed(w, v, alpha_K1, epochs, first, lr, learn)
        seen = self._epochs(w.rows, epochs, first, StepRule(self.sgd, lr))
        own, other = ((block.w[0], block.momentum[0]) for block in (v, w))
        losses = self.native.mix(other, own, float(alpha_K1[self._client(w.rows), 0]), seen)
        for block, loss in zip((w, v), losses.tolist(), strict=True):
            block.loss += loss
            block.steps += seen.steps

    def train_ahead(self, block: Block, inner: float, epochs: int, first: np.ndarray, lr: float) -> None:
        seen = self._epochs(block.rows, epochs, first, StepRule(self.sgd, lr))
        block.loss += self.native.ahead(block.w[0], block.momentum[0], inner, seen)
        block.steps += seen.steps // 2

    def batches(self, rows: Rows, epochs: int, first_epoch: np.ndarray) -> Iterator[MiniBatch]:
        seen, step = self._epochs(rows, epochs, first_epoch, StepRule(self.sgd, 0.0)), 0
        for epoch in range(epochs):
            for at in range(0, seen.order.shape[1], seen.batch_size):
                now = slice(at, at + seen.batch_size)
                key = None if seen.keys is None else seen.keys[step : step + 1]
                crop = None if seen.crop is None else seen.crop[:, epoch, now]
                yield MiniBatch(seen.images, seen.order[epoch, now], crop, key, step)
                step += 1

    def gradient(self, block: Block, batch: MiniBatch) -> Tensor:  # type: ignore[override]
        return torch.tensor([self.native.gradient(block.w[0], block.g[0], batch)], dtype=torch.float32)

    def descend(self, block: Block, rate: float, loss: Tensor | None = None) -> None:
        self.native.step(block.w[0], torch.zeros_like(block.w[0]), block.g[0], StepRule(SGD(0, 0, 0, 0), rate))
        self._count(block, loss)

    def descents(  # type: ignore[override]
        self, block: Block, batch: MiniBatch, steps: int, rate: float, towards: Tensor, pull: float
    ) -> None:
        self.native.descents(block.w[0], towards[0], pull, rate, steps, batch, block.loss)
        block.steps += steps

    def step(self, block: Block, loss: Tensor, lr: float, trained: Tensor | None = None) -> None:
        self._count(block, loss)
        self.native.step(block.w[0], block.momentum[0], block.g[0], StepRule(self.sgd, lr, trained))

    # scoring -------------------------------------------------------------------------------------------------------------
    def score(self, rows: slice, w_kW: Tensor, predict: Predict | None = None) -> tuple[np.ndarray, ...]:
        order = self._order(rows.start)
        labels = self.clients.score_y[order[0] : order[-1] + 1].numpy()[None]
        if predict is None:
            scores = self.native.score(w_kW, self._scored, order)
            return scores.losses.astype(np.float64), scores.predicted, labels
        logits = predict(rows, w_kW, order)
        losses = cross_entropy(logits, torch.from_numpy(labels))
        return losses.numpy().astype(np.float64), logits.argmax(2).numpy(), labels

    def outputs(self, w_kW: Tensor, images: np.ndarray, head: str) -> tuple[Tensor, Tensor]:
        self._read_by(head)
        scores = self.native.score(w_kW, self._scored, images, logits=True, features=True)
        return torch.from_numpy(scores.logits), torch.from_numpy(scores.features)

    def memory(self, i: int, w_1W: Tensor, most: int, head: str) -> tuple[Tensor, Tensor]:
        order = np.arange(self.clients.start[i], self.clients.start[i + 1], dtype=np.int32)[:most]
        self._read_by(head)
        scores = self.native.score(w_1W, self._train, order, features=True)
        return torch.from_numpy(scores.features)[0], self.clients.y[order[0] : order[-1] + 1]

    def training_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        order = np.arange(self.clients.start[i], self.clients.start[i + 1], dtype=np.int32)
        losses = self.native.score(w_mW, self._train, order).losses
        return np.array([math.fsum(of_model) / len(order) for of_model in losses])

    def validation_losses(self, rows: slice, w_kmW: Tensor) -> np.ndarray:
        order = self._order(rows.start)[: self.clients.n_search[rows.start]]
        losses = self.native.score(w_kmW[0], self._scored, order).losses
        return np.array([[math.fsum(of_model) / len(order) for of_model in losses]])  # fsum: in no order

    def candidate(
        self, x_kW: Tensor, y_kW: Tensor, w_kW: Tensor, p: np.ndarray, p_x: np.ndarray, p_y: np.ndarray, pair: Tensor
    ) -> tuple[Tensor, Tensor]:
        shares = float(p[0]), float(p_x[0]), float(p_y[0])
        x, y = self.native.candidate(x_kW[0], y_kW[0], w_kW[0], *shares, pair[0])
        return x[None], y[None]

    def chooser(self, i: int, start: Start, cases: np.ndarray) -> Chooser:
        return Chooser(self.native, self._scored, self._order(i)[: self.clients.n_search[i]], start, cases)

    # -----------------------------------------------------------------------------------------------------------------------
    def _client(self, rows: Rows) -> int:
        return int(rows.start if isinstance(rows, slice) else rows[0])

    def _epochs(self, rows: Rows, epochs: int, first_epoch: np.ndarray, rule: StepRule) -> Epochs:
        """Return what a client's next epochs see, counted from its `first_epoch` `[K]` on."""
        clients, size, keys = self.clients, self.sgd.batch_size, None
        i = self._client(rows)
        order, crop = clients.schedule(i, epochs, int(first_epoch[i]))
        if self.ensemble.draws.layers:
            keys = clients.keys(np.array([i]), epochs, first_epoch, size)[0].numpy()
        return Epochs(self._train, order, crop if clients.augment else None, size, rule, keys)

    def _read_by(self, head: str) -> None:
        weight = self.ensemble.layers(self.ensemble.zeros(1)).get(f"{head}.weight")
        self.native.read_by(-1 if weight is None else weight.storage_offset())  # -1: refused

    def _order(self, i: int) -> np.ndarray:  # validation images, then test images
        return np.arange(self.clients.scored[i], self.clients.scored[i + 1], dtype=np.int32)


def try_native(job: Job, ensemble: Ensemble, clients: Clients, sgd: SGD) -> tuple[NativeBackend | None, str]:
    """Return the native kernels, in the form that --kernels may name; None and why, where they do not compute the model here."""
    try:
        x86 = platform.machine() in ("x86_64", "AMD64")
        if job.kernels == "auto" and x86 and load().widest() == FORMS["portable"]:  # products by the C library are slow
            raise UserError("this processor has no fused multiply-add")
        native = NativeBackend(ensemble, clients, sgd, job.kernels if job.kernels in FORMS else "")
        check_against_pytorch(native.native, ensemble)
        return native, ""
    except UserError as error:
        return None, str(error)


def check_against_pytorch(native: Native, ensemble: Ensemble) -> None:
    """Compare the kernels' gradient of two samples of noise with PyTorch's, near the module's own start: any network may be recorded.

    Raises:
        UserError: a parameter's differ by more than a thousandth, and 1e-5 of the whole, in each of five draws; in one, a ReLU may be at its kink.
    """
    rng, y, key = np.random.default_rng(0), np.arange(2) % native.classes, np.zeros(1, np.int64)
    start = parameters_to_vector(ensemble.module.parameters()).detach()
    most, shape = {"uint8": 256, "int32": native.vocabulary or 2**16}.get(ensemble.dtype), (2, *native.shape)
    half = torch.full((1, 2), 0.5)
    each = [math.prod(size) for size in ensemble.shapes.values()] + [ensemble.width - ensemble.size]
    for _ in range(5):
        x = (rng.integers(most, size=shape) if most else rng.normal(size=shape)).astype(ensemble.dtype)
        row = start + 0.05 * torch.from_numpy(rng.normal(size=len(start)).astype(np.float32))  # no layer is 0
        row = nn.functional.pad(row, (0, ensemble.width - ensemble.size))
        block, found = Block(ensemble, row[None]), torch.zeros_like(row)
        seen = ensemble.normalise(torch.from_numpy(x))[None], torch.from_numpy(y)[None], half, torch.from_numpy(key)
        with torch.no_grad():
            ensemble.gradient(block, *seen)
            scores = ensemble.logits(ensemble.ready(row[None]), ensemble.prepare(seen[0]))[0]
        images, order = native.images(x, y), np.arange(2, dtype=np.int32)
        native.gradient(row, found, MiniBatch(images, order, keys=key))
        off = scores - torch.tensor(native.score(row[None], images, order, logits=True).logits)[0]
        expected = block.g[0]
        right, gap = (torch.stack([part.norm() for part in g.split(each)]) for g in (expected, expected - found))
        learns = expected.isfinite().all() and (gap <= 1e-3 * right + 1e-5 * right.norm()).all()
        if learns and off.norm() <= 1e-3 * scores.norm():
            return
    raise UserError("the CPU kernels' gradient or score of this model is not PyTorch's; please report the model")
