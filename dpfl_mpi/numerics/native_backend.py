"""`NativeBackend`: training, scores and searches of clients by the kernels of `lanes/`.

A call takes a block of clients, on a CPU or a GPU, with the same bits.

Axes: W row width, k clients of a block, m models scored on one client's images, S images of the
client that has most, C classes, F what the head reads.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.backend import Backend, Learn, LocalEpochs, Predict, Proximal, Starts
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.cpu import FORMS, Cpu, load
from dpfl_mpi.numerics.ensemble import X86, Block, Ensemble, Rows, cross_entropy
from dpfl_mpi.numerics.gpu import Gpu, clusters_of
from dpfl_mpi.numerics.kernels import (
    SEARCH,
    TRAINING,
    Images,
    Kernels,
    Searches,
    Tasks,
    field,
)
from dpfl_mpi.numerics.optimiser import SGD, Adam

BLOCK_BYTES = 2**18  # of rows that a CPU computes in one call


class Batch(NamedTuple):
    """One mini-batch of each of the first k clients of a block."""

    k: int
    step: int
    tasks: Tasks


class NativeBackend(Backend):
    name = "native"

    def __init__(
        self,
        ensemble: Ensemble,
        clients: Clients,
        optimiser: SGD,
        make: Callable[..., Any] | None = None,
    ):
        """Compute by what `make` makes, as of `Kernels`; None: by the fastest form, or the GPU.

        `UserError`: the kernels cannot compute here.
        """
        on_cpu, k = ensemble.device.type == "cpu", len(clients)
        if make is None:
            make = Cpu
            if not on_cpu:
                clusters = clusters_of(clients.n_train, ensemble.device)
                make = partial(Gpu, most=k, clusters=clusters)
        size = max(1, BLOCK_BYTES // (4 * ensemble.width)) if on_cpu else max(k, 1)
        super().__init__(ensemble, clients, optimiser, size)
        self.kernels = Kernels(ensemble, clients.shape, make)
        if isinstance(self.kernels.machine, Cpu):
            self.native = self.kernels.machine
        each = clients.start[:-1], clients.n_train
        self._train = self.kernels.images(clients.x, clients.y, *each)
        starts = clients.scored[:-1]
        each = starts, clients.scored[1:] - starts
        self._scored = self.kernels.images(clients.score_x, clients.score_y, *each)

    # training -----------------------------------------------------------------------------------
    def train_epochs(
        self, block: Block, epochs: LocalEpochs, gradient: Any = None, trained: Any = None
    ) -> None:
        if gradient and not isinstance(gradient, Proximal):  # a method's own: step by step
            return super().train_epochs(block, epochs, gradient, trained)
        tasks, steps = self._epochs(block.rows, epochs)
        self._follow(tasks, block.w, block.momentum, steps, epochs.lr, trained)
        if gradient:
            towards = gradient.target(block.rows)
            tasks.each["sgd"]["towards"] = tasks.rows(towards.expand_as(block.w))
            tasks.each["sgd"]["mu"] = gradient.mu
        block.loss += field(self.kernels.run("train", tasks), TRAINING, "loss").float()
        block.steps += steps

    def train_mixed(
        self, w: Block, v: Block, alpha_K1: Tensor, epochs: LocalEpochs, learn: Learn | None
    ) -> None:
        # the kernels take one number of steps so far, Adam's, for both
        last = w.momentum[:, -1], v.momentum[:, -1]
        uneven = isinstance(self.optimiser, Adam) and not torch.equal(*last)
        if learn or uneven:
            return super().train_mixed(w, v, alpha_K1, epochs, learn)
        tasks, steps = self._epochs(w.rows, epochs)
        self._follow(tasks, w.w, w.momentum, steps, epochs.lr)
        state = self.optimiser.state_size(tasks.width)
        tasks.each["v"], tasks.each["m_v"] = tasks.rows(v.w), tasks.rows(v.momentum, width=state)
        tasks.each["row"] = tasks.rows(torch.zeros_like(w.w))
        tasks.each["share"] = alpha_K1[w.rows][:, 0].cpu().numpy()
        here = self.kernels.run("mix", tasks)
        for i, block in enumerate((w, v)):
            block.loss += field(here, TRAINING, "losses")[:, i]
            block.steps += steps

    def train_ahead(self, block: Block, inner: float, epochs: LocalEpochs) -> None:
        tasks, steps = self._epochs(block.rows, epochs)
        self._follow(tasks, block.w, block.momentum, np.maximum(steps // 2, 1), epochs.lr)
        tasks.each["row"], tasks.each["share"] = tasks.rows(torch.zeros_like(block.w)), inner
        block.loss += field(self.kernels.run("ahead", tasks), TRAINING, "losses")[:, 0]
        block.steps += steps // 2

    def batches(self, rows: Rows, epochs: int, first_epoch: np.ndarray) -> Iterator[Batch]:
        tasks, steps = self._epochs(rows, LocalEpochs(epochs, first_epoch, 0.0))
        each, size, of_epoch = tasks.each, self.optimiser.batch_size, steps // max(epochs, 1)
        order, crop, keys = (each["images"][name].astype(int) for name in ("order", "crop", "keys"))
        for step in range(int(steps.max(initial=0))):
            k = int(np.count_nonzero(steps > step))
            now, n = tasks.first(k), each["n"][:k]
            epoch, at = np.divmod(step, of_epoch[:k])
            first = epoch * n + at * size
            now.each["n"], seen = np.minimum(size, n - at * size), now.each["images"]
            seen["order"] = order[:k] + 4 * first
            if crop[0]:
                seen["crop"] = crop[:k] + first
            if keys[0]:
                seen["keys"] = keys[:k] + 8 * step
            yield Batch(k, step, now)

    def gradient(self, block: Block, batch: Batch) -> Tensor:  # type: ignore[override]
        return self.kernels.gradient(batch.tasks, block.w, block.g)

    def descend(self, block: Block, rate: float, loss: Tensor | None = None) -> None:
        plain = SGD(0, 0, 0, 0)
        self._step(block, torch.zeros_like(block.w), plain, rate)
        self._count(block, loss)

    def descents(  # type: ignore[override]
        self, block: Block, batch: Batch, steps: int, rate: float, towards: Tensor, pull: float
    ) -> None:
        tasks, each = batch.tasks, batch.tasks.each
        each["w"], each["epochs"] = tasks.rows(block.w), steps
        each["sgd"]["lr"], each["sgd"]["mu"] = rate, pull
        each["sgd"]["towards"] = tasks.rows(towards.expand_as(block.w))
        each["losses"][:, 0] = block.loss.cpu().numpy()
        block.loss.copy_(field(self.kernels.run("descents", tasks), TRAINING, "losses")[:, 0])
        block.steps += steps

    def step(self, block: Block, loss: Tensor, lr: float, trained: Tensor | None = None) -> None:
        self._count(block, loss)
        self._step(block, block.momentum, self.optimiser, lr, trained)

    def _step(
        self, block: Block, momentum: Tensor, by: SGD, lr: float, trained: Tensor | None = None
    ) -> None:
        tasks = Tasks(np.zeros(len(block.w), TRAINING), self.ensemble.width)
        self._follow(tasks, block.w, momentum, np.ones(len(block.w), np.int64), lr, trained, by)
        tasks.each["g"] = tasks.rows(block.g)
        self.kernels.run("step", tasks)

    def _epochs(self, rows: Rows, epochs: LocalEpochs) -> tuple[Tasks, np.ndarray]:
        """Return structures with what clients see in their local epochs, and their steps `[k]`."""
        clients, size = self.clients, self.optimiser.batch_size
        which = np.arange(len(clients))[rows]
        n, e, keys = clients.n_train[which], epochs.number, None
        if self.ensemble.draws.layers:
            keys = clients.dropout_keys(which, e, epochs.first, size)
        drawn = clients.schedules(rows, e, epochs.first)
        return self.kernels.schedule(self._train, drawn, size, keys), e * -(-n // size)

    def _follow(
        self,
        tasks: Tasks,
        w: Tensor,
        m: Tensor,
        steps: np.ndarray,
        lr: float,
        trained: Tensor | None = None,
        by: SGD | None = None,
    ) -> None:
        """Write into structures which rows are trained, how, and in how many steps `[k]`."""
        by, each, sgd = by or self.optimiser, tasks.each, tasks.each["sgd"]
        each["w"], each["m"] = tasks.rows(w), tasks.rows(m, width=by.state_size(tasks.width))
        sgd["lr"], sgd["momentum"], sgd["decay"] = lr, by.momentum, by.weight_decay
        sgd["clip"] = by.clip_norm
        if trained is not None:
            sgd["trained"] = tasks.rows(trained.expand_as(w), torch.bool)
        if isinstance(by, Adam):
            (first, second), done = by.betas, m[:, -1].cpu().numpy()
            for taken in np.unique(done):  # a table for all who have taken as many
                alike = done == taken
                table = self.ensemble.put(by.corrections(int(taken), int(steps[alike].max())))
                sgd["corrections"][alike] = tasks.parts(table, np.zeros(1, np.int64))
            sgd["take"], sgd["keep"], sgd["add"] = 1 - first, second, 1 - second
            sgd["eps"], sgd["decoupled"] = by.eps, by.decoupled

    # scores -------------------------------------------------------------------------------------
    def score(
        self, rows: slice, w_kW: Tensor, predict: Predict | None = None
    ) -> tuple[np.ndarray, ...]:
        if predict is None:
            scores = self.kernels.score(w_kW, self._scored, rows)
            losses, predicted = scores["losses"].cpu(), scores["predicted"].cpu()
        else:
            logits = predict(rows, w_kW, rows).cpu()
            predicted = logits.argmax(2)
        labels, y = torch.zeros_like(predicted).numpy(), self.clients.score_y.cpu().numpy()
        first, n = self.clients.scored[rows].tolist(), self._scored.n[rows].tolist()
        for i in range(len(n)):
            labels[i, : n[i]] = y[first[i] : first[i] + n[i]]
        if predict:  # on a CPU: on a GPU PyTorch rounds a loss differently
            losses = cross_entropy(logits, torch.from_numpy(labels))
        return losses.numpy().astype(np.float64), predicted.numpy(), labels

    def logits(self, w_kW: Tensor, images: slice) -> Tensor:
        return self.kernels.score(w_kW, self._scored, images, logits=True)["logits"]

    def outputs(self, w_kW: Tensor, images: slice, head: str) -> tuple[Tensor, Tensor]:
        read = self._read_by(head)
        scores = self.kernels.score(w_kW, self._scored, images, logits=True, read=read)
        return scores["logits"], scores["features"]

    def training_features(
        self, i: int, w_1W: Tensor, most: int, head: str
    ) -> tuple[Tensor, Tensor]:
        one, first, read = slice(i, i + 1), int(self.clients.start[i]), self._read_by(head)
        scores = self.kernels.score(w_1W, self._train, one, np.array([most]), read=read)
        features = scores["features"][0]
        return features, self.clients.y[first : first + len(features)]

    def training_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        one = slice(i, i + 1)
        return self._mean_losses(w_mW[None], self._train, one, self._train.n[one])[0]

    def validation_losses(self, rows: slice, w_kmW: Tensor) -> np.ndarray:
        return self._mean_losses(w_kmW, self._scored, rows, self.clients.n_search[rows])

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
        tasks = Tasks(np.zeros(len(p), SEARCH), self.ensemble.width)
        each, put, x, y = tasks.each, self.ensemble.put, x_kW.clone(), y_kW.clone()
        each["x"], each["y"] = tasks.rows(x, torch.float64), tasks.rows(y, torch.float64)
        each["p_x"], each["p_y"] = p_x, p_y
        each["pair"] = tasks.rows(pair.view(len(p), -1), width=2 * tasks.width)
        models = put(tasks.rows(w_kW).view(np.int64))
        each["models"] = tasks.parts(models, np.arange(len(p)))
        each["p"] = tasks.parts(self.ensemble.column(p), np.arange(len(p)))
        self.kernels.run("candidate", tasks)
        return x, y

    def chooser(self, rows: slice, start: Starts, cases: np.ndarray) -> Searches:
        tasks = self.kernels.tasks(SEARCH, self._scored, rows, self.clients.n_search[rows])
        return Searches(self.kernels, tasks, start, cases)

    def _mean_losses(
        self, w_kmW: Tensor, samples: Images, rows: slice, most: np.ndarray
    ) -> np.ndarray:
        losses = self.kernels.score(w_kmW, samples, rows, most)["losses"].cpu().numpy()
        m = w_kmW.shape[1]
        each = (of[: m * n].reshape(m, -1) for of, n in zip(losses, most, strict=True))
        return np.array([[math.fsum(of_model) / len(of_model) for of_model in of] for of in each])

    def _read_by(self, head: str) -> int:
        """Return the number of the value that a dense layer reads."""
        weight = self.ensemble.layers(self.ensemble.zeros(1)).get(f"{head}.weight")
        column = -1 if weight is None else weight.storage_offset()
        return self.kernels.read_by(int(column))


def try_native(
    kernels: str, ensemble: Ensemble, clients: Clients, optimiser: SGD, threads: int = 1
) -> tuple[NativeBackend | None, str]:
    """Return the native kernels by --kernels; else None, and why they cannot compute here.

    So many `threads` of a CPU compute a client together.
    """
    try:
        make = None
        if ensemble.device.type == "cpu":
            if kernels == "auto" and X86 and load().widest() == FORMS["portable"]:  # slow products
                raise UserError("this processor has no fused multiply-add")
            make = partial(Cpu, form=kernels if kernels in FORMS else "", members=threads)
        backend = NativeBackend(ensemble, clients, optimiser, make)
        check_against_pytorch(backend.kernels, ensemble.on_cpu())
        return backend, ""
    except UserError as error:
        return None, str(error)


def check_against_pytorch(kernels: Kernels, ensemble: Ensemble) -> None:
    """Compare gradient and scores of two samples of noise with PyTorch's, near the built weights.

    The ensemble is on a CPU: on a GPU PyTorch loads libraries for seconds.
    `UserError`: a parameter's gradient differs by more than a thousandth of it and 1e-5 of the
    whole in each of five draws; in one, a ReLU may be at its kink.
    """
    rng, y, key = np.random.default_rng(0), np.arange(2) % kernels.classes, np.zeros(1, np.int64)
    start = parameters_to_vector(ensemble.module.parameters()).detach()
    levels = {"uint8": 256, "int32": kernels.plan.vocabulary or 2**16}.get(ensemble.dtype)
    shape, put = (2, *kernels.shape), torch.from_numpy
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
        there = kernels.sample(row.to(kernels.ensemble.device), x, y, key)
        found, logits = (of.cpu() for of in there)
        off = scores - logits
        gradients = g, g - found
        right, gap = (torch.stack([part.norm() for part in g.split(sizes)]) for g in gradients)
        close = (gap <= 1e-3 * right + 1e-5 * right.norm()).all()
        if g.isfinite().all() and close and off.norm() <= 1e-3 * scores.norm():
            return
    differs = "gradient or score of this model is not PyTorch's"
    raise UserError(f"the kernels' {differs}; please report the model")
