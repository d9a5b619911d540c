"""`NativeBackend`: training and scoring by the CPU kernels, one client after the other.

A client's epochs are one call. Axes: W row width, k = 1 client of a block, m models scored on one
client's images, n images, C classes, F what the head reads.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.backend import Backend, Learn, LocalEpochs, Predict, Proximal, Starts
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import X86, Block, Ensemble, Rows, cross_entropy
from dpfl_mpi.numerics.native import (
    FORMS,
    Chooser,
    Epochs,
    Images,
    MiniBatch,
    Native,
    StepRule,
    load,
)
from dpfl_mpi.numerics.optimiser import SGD, Adam


class NativeBackend(Backend):
    name = "native"

    def __init__(
        self,
        ensemble: Ensemble,
        clients: Clients,
        optimiser: SGD,
        form: str = "",
        threads: int = 1,
    ):
        """Compute in the form that is named, or in the fastest; `UserError`: it cannot be used.

        So many `threads` compute a client together.
        """
        super().__init__(ensemble, clients, optimiser)
        self.native = Native(ensemble, clients.shape, form, members=threads)
        self._train = self.native.images(clients.x, clients.y)
        self._scored = self.native.images(clients.score_x, clients.score_y)

    # training -----------------------------------------------------------------------------------
    def train_epochs(
        self, block: Block, epochs: LocalEpochs, gradient: Any = None, trained: Any = None
    ) -> None:
        rule = StepRule(self.optimiser, epochs.lr, trained)
        if isinstance(gradient, Proximal):
            towards = gradient.target(block.rows).view(-1)
            rule = replace(rule, towards=towards, mu=gradient.mu)
        elif gradient:  # a method's own: Python computes each step
            return super().train_epochs(block, epochs, gradient, trained)
        seen = self._epochs(block.rows, epochs, rule)
        block.loss += self.native.train(block.w[0], block.momentum[0], seen)
        block.steps += seen.steps

    def train_mixed(
        self, w: Block, v: Block, alpha_K1: Tensor, epochs: LocalEpochs, learn: Learn | None
    ) -> None:
        # the kernels take one number of steps so far, Adam's, for both
        uneven = isinstance(self.optimiser, Adam) and w.momentum[0, -1] != v.momentum[0, -1]
        if learn or uneven:
            return super().train_mixed(w, v, alpha_K1, epochs, learn)
        seen = self._epochs(w.rows, epochs, StepRule(self.optimiser, epochs.lr))
        pairs = [(block.w[0], block.momentum[0]) for block in (w, v)]
        losses = self.native.mix(*pairs, float(alpha_K1[self._client(w.rows), 0]), seen)
        for block, loss in zip((w, v), losses.tolist(), strict=True):
            block.loss += loss
            block.steps += seen.steps

    def train_ahead(self, block: Block, inner: float, epochs: LocalEpochs) -> None:
        seen = self._epochs(block.rows, epochs, StepRule(self.optimiser, epochs.lr))
        block.loss += self.native.ahead(block.w[0], block.momentum[0], inner, seen)
        block.steps += seen.steps // 2

    def batches(self, rows: Rows, epochs: int, first_epoch: np.ndarray) -> Iterator[MiniBatch]:
        local = LocalEpochs(epochs, first_epoch, 0.0)
        seen, step = self._epochs(rows, local, StepRule(self.optimiser, 0.0)), 0
        for epoch in range(epochs):
            for start in range(0, seen.order.shape[1], seen.batch_size):
                now = slice(start, start + seen.batch_size)
                key = None if seen.keys is None else seen.keys[step : step + 1]
                crop = None if seen.crop is None else seen.crop[:, epoch, now]
                yield MiniBatch(seen.images, seen.order[epoch, now], crop, key, step)
                step += 1

    def gradient(self, block: Block, batch: MiniBatch) -> Tensor:  # type: ignore[override]
        return torch.tensor([self.native.gradient(block.w[0], block.g[0], batch)])

    def descend(self, block: Block, rate: float, loss: Tensor | None = None) -> None:
        w, plain = block.w[0], SGD(0, 0, 0, 0)
        self.native.step(w, torch.zeros_like(w), block.g[0], StepRule(plain, rate))
        self._count(block, loss)

    def descents(  # type: ignore[override]
        self, block: Block, batch: MiniBatch, steps: int, rate: float, towards: Tensor, pull: float
    ) -> None:
        how = pull, rate, steps, batch, block.loss
        self.native.descents(block.w[0], towards[0], *how)
        block.steps += steps

    def step(self, block: Block, loss: Tensor, lr: float, trained: Tensor | None = None) -> None:
        self._count(block, loss)
        rule = StepRule(self.optimiser, lr, trained)
        self.native.step(block.w[0], block.momentum[0], block.g[0], rule)

    # scores -------------------------------------------------------------------------------------
    def score(
        self, rows: slice, w_kW: Tensor, predict: Predict | None = None
    ) -> tuple[np.ndarray, ...]:
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

    def training_features(
        self, i: int, w_1W: Tensor, most: int, head: str
    ) -> tuple[Tensor, Tensor]:
        order = self._training_order(i)[:most]
        self._read_by(head)
        scores = self.native.score(w_1W, self._train, order, features=True)
        return torch.from_numpy(scores.features)[0], self.clients.y[order[0] : order[-1] + 1]

    def training_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        return self._mean_losses(w_mW, self._train, self._training_order(i))

    def validation_losses(self, rows: slice, w_kmW: Tensor) -> np.ndarray:
        return self._mean_losses(w_kmW[0], self._scored, self._search_order(rows.start))[None]

    def candidate(
        self,
        x_kW: Tensor,
        y_kW: Tensor,
        w_kW: Tensor,
        p: np.ndarray,
        p_x: np.ndarray,
        p_y: np.ndarray,
        pair: Tensor,
    ) -> tuple[Tensor, Tensor]:
        shares = float(p[0]), float(p_x[0]), float(p_y[0])
        x, y = self.native.candidate(x_kW[0], y_kW[0], w_kW[0], *shares, pair[0])
        return x[None], y[None]

    def chooser(self, rows: slice, start: Starts, cases: np.ndarray) -> Chooser:
        x, y, averages, p_x, p_y = start
        first = x[0], y[0], averages[0], float(p_x[0]), float(p_y[0])
        order = self._search_order(rows.start)
        return Chooser(self.native, self._scored, order, first, cases[0])

    # --------------------------------------------------------------------------------------------
    def _client(self, rows: Rows) -> int:
        return int(rows.start if isinstance(rows, slice) else rows[0])

    def _epochs(self, rows: Rows, epochs: LocalEpochs, rule: StepRule) -> Epochs:
        """Return what a client's local epochs see."""
        clients, size, keys, i = self.clients, self.optimiser.batch_size, None, self._client(rows)
        order, crop = clients.schedule(i, epochs.number, int(epochs.first[i]))
        if self.ensemble.draws.layers:
            row = np.array([i])
            keys = clients.dropout_keys(row, epochs.number, epochs.first, size)[0].numpy()
        return Epochs(self._train, order, crop if clients.augment else None, size, rule, keys)

    def _mean_losses(self, w_mW: Tensor, images: Images, order: np.ndarray) -> np.ndarray:
        losses = self.native.score(w_mW, images, order).losses
        return np.array([math.fsum(of_model) / len(order) for of_model in losses])  # in any order

    def _read_by(self, head: str) -> None:
        weight = self.ensemble.layers(self.ensemble.zeros(1)).get(f"{head}.weight")
        self.native.read_by(-1 if weight is None else weight.storage_offset())  # -1: refused

    def _training_order(self, i: int) -> np.ndarray:
        return np.arange(self.clients.start[i], self.clients.start[i + 1], dtype=np.int32)

    def _order(self, i: int) -> np.ndarray:
        """Return the numbers of a client's validation images, then test images."""
        return np.arange(self.clients.scored[i], self.clients.scored[i + 1], dtype=np.int32)

    def _search_order(self, i: int) -> np.ndarray:
        return self._order(i)[: self.clients.n_search[i]]


def try_native(
    kernels: str, ensemble: Ensemble, clients: Clients, optimiser: SGD, threads: int = 1
) -> tuple[NativeBackend | None, str]:
    """Return the native kernels by --kernels; else None, and why they cannot compute here.

    So many `threads` compute a client together.
    """
    try:
        if kernels == "auto" and X86 and load().widest() == FORMS["portable"]:  # slow products
            raise UserError("this processor has no fused multiply-add")
        form = kernels if kernels in FORMS else ""
        backend = NativeBackend(ensemble, clients, optimiser, form, threads)
        check_against_pytorch(backend.native, ensemble)
        return backend, ""
    except UserError as error:
        return None, str(error)


def check_against_pytorch(kernels: Any, ensemble: Ensemble) -> None:
    """Compare gradient and scores of two samples of noise with PyTorch's, near the built weights.

    `kernels` are a `Native` or a GPU's `Kernels`. `UserError`: a parameter's gradient differs by
    more than a thousandth of it and 1e-5 of the whole in each of five draws; in one, a ReLU may be
    at its kink.
    """
    rng, y, key = np.random.default_rng(0), np.arange(2) % kernels.classes, np.zeros(1, np.int64)
    start = parameters_to_vector(ensemble.module.parameters()).detach()
    levels = {"uint8": 256, "int32": kernels.vocabulary or 2**16}.get(ensemble.dtype)
    shape, put = (2, *kernels.shape), ensemble.put
    padding = ensemble.width - ensemble.size
    sizes = [math.prod(shape) for shape in ensemble.shapes.values()] + [padding]
    labels, keys = put(y), put(key)
    for _ in range(5):
        x = rng.integers(levels, size=shape) if levels else rng.normal(size=shape)
        x = x.astype(ensemble.dtype)
        noise = put(rng.normal(size=len(start)).astype(np.float32))
        row = nn.functional.pad(start + 0.05 * noise, (0, padding))  # no layer is 0
        normalised = ensemble.normalise(put(x))
        with torch.no_grad():
            g, _ = ensemble.gradient(row, normalised, labels, keys[0])
            scores = ensemble.logits(row[None], normalised)[0]
        found, logits = kernels.sample(row, x, y, key)
        off = scores - logits
        gradients = g, g - found
        right, gap = (torch.stack([part.norm() for part in g.split(sizes)]) for g in gradients)
        close = (gap <= 1e-3 * right + 1e-5 * right.norm()).all()
        if g.isfinite().all() and close and off.norm() <= 1e-3 * scores.norm():
            return
    differs = "gradient or score of this model is not PyTorch's"
    raise UserError(f"the kernels' {differs}; please report the model")
