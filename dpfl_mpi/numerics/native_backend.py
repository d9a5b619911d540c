"""`NativeBackend`: a `Backend` that trains, scores and searches by the kernels in C of `lanes/`.

Each method describes what a call does for each of its k clients in a structure of lanes/net.h; the
array of these structures is `tasks.structs`, and setting a field of it sets that field for all
clients. `kernels.run` then computes all tasks in one call, on a CPU or a GPU, with the same bits.
`try_native` makes and checks the backend.

Axes: W row width, k clients of a call, m models scored on one client's images, S images of the
client that has most, C classes, F what the head reads.
"""

import math
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.backend import (
    Backend,
    Learn,
    LocalEpochs,
    LossGradient,
    Predict,
    Proximal,
    Starts,
)
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.cpu import FORMS, Cpu, load
from dpfl_mpi.numerics.ensemble import X86, Block, Ensemble, Rows, cross_entropy
from dpfl_mpi.numerics.gpu import Gpu, clusters_of
from dpfl_mpi.numerics.kernels import SEARCH, TRAINING, Images, Kernels, Searches, Tasks, field
from dpfl_mpi.numerics.optimiser import SGD, Adam

BLOCK_BYTES = 2**18  # of rows that a team of a CPU computes in one call
TURNS = 4  # fewest clients of a team in a call: teams that are done wait for the last one


class Batch(NamedTuple):
    """One mini-batch of each of the first k clients of a block; `step` counts them from 0."""

    k: int
    step: int
    tasks: Tasks


class NativeBackend(Backend):
    name = "native"

    def __init__(self, ensemble: Ensemble, clients: Clients, optimiser: SGD, make: Any = None):
        """Compute by the `Cpu` or `Gpu` that `make(plan, ensemble)` returns.

        Without `make` that is the fastest form of the CPU, or the ensemble's GPU. `UserError`: the
        kernels cannot compute here.
        """
        on_cpu, k = ensemble.device.type == "cpu", len(clients)
        if make is None and on_cpu:
            make = Cpu
        elif make is None:
            make = partial(Gpu, most=k, clusters=clusters_of(clients.n_train, ensemble.device))
        self.kernels = Kernels(ensemble, clients.shape, make)
        machine = self.kernels.machine
        teams = machine.teams if isinstance(machine, Cpu) else 1
        of_team = max(TURNS if teams > 1 else 1, BLOCK_BYTES // (4 * ensemble.width))
        super().__init__(ensemble, clients, optimiser, teams * of_team if on_cpu else max(k, 1))
        if isinstance(machine, Cpu):
            self.native = machine
        starts, n = clients.start[:-1], clients.n_train
        self._train_images = self.kernels.images(clients.x, clients.y, starts, n)
        starts, n = clients.score_start[:-1], np.diff(clients.score_start)
        self._scored_images = self.kernels.images(clients.score_x, clients.score_y, starts, n)

    # training -----------------------------------------------------------------------------------
    def train_epochs(
        self, block: Block, epochs: LocalEpochs, gradient: Any = None, trained: Any = None
    ) -> None:
        if isinstance(gradient, LossGradient):
            return gradient.train_epochs(block, epochs, trained)
        if gradient and not isinstance(gradient, Proximal):  # a method's own: step by step
            return super().train_epochs(block, epochs, gradient, trained)
        tasks, steps = self._epoch_tasks(block.rows, epochs)
        self._set_update(tasks, block, steps, epochs.lr, trained)
        if gradient:
            towards, sgd = gradient.target(block.rows), tasks.structs["sgd"]
            sgd["towards"] = tasks.row_addresses(towards.expand_as(block.w))
            sgd["mu"] = gradient.mu
        done = self._train("train", tasks, block.rows, epochs)
        block.loss += field(done, TRAINING, "loss").float()
        block.steps += steps

    def train_mixed(
        self, w: Block, v: Block, alpha_K1: Tensor, epochs: LocalEpochs, learn: Learn | None
    ) -> None:
        # Adam's last column counts its steps; the kernels take one count for both rows
        counts = w.momentum[:, -1], v.momentum[:, -1]
        uneven = isinstance(self.optimiser, Adam) and not torch.equal(*counts)
        if learn or uneven:
            return super().train_mixed(w, v, alpha_K1, epochs, learn)
        tasks, steps = self._epoch_tasks(w.rows, epochs)
        self._set_update(tasks, w, steps, epochs.lr)
        structs, state = tasks.structs, self.optimiser.state_size(tasks.width)
        structs["v"] = tasks.row_addresses(v.w)
        structs["m_v"] = tasks.row_addresses(v.momentum, width=state)
        structs["row"] = tasks.row_addresses(torch.zeros_like(w.w))  # for the mixture
        structs["share"] = alpha_K1[w.rows][:, 0].cpu().numpy()
        done = self._train("mix", tasks, w.rows, epochs)
        for i, block in enumerate((w, v)):
            block.loss += field(done, TRAINING, "losses")[:, i]
            block.steps += steps

    def train_ahead(self, block: Block, inner: float, epochs: LocalEpochs) -> None:
        tasks, steps = self._epoch_tasks(block.rows, epochs)
        self._set_update(tasks, block, np.maximum(steps // 2, 1), epochs.lr)
        tasks.structs["row"] = tasks.row_addresses(torch.zeros_like(block.w))  # for the row ahead
        tasks.structs["share"] = inner
        done = self._train("ahead", tasks, block.rows, epochs)
        block.loss += field(done, TRAINING, "losses")[:, 0]
        block.steps += steps // 2

    def batches(self, rows: Rows, epochs: int, first_epoch: np.ndarray) -> Iterator[Batch]:
        tasks, steps = self._epoch_tasks(rows, LocalEpochs(epochs, first_epoch, 0.0))
        size, steps_of_epoch = self.optimiser.batch_size, steps // max(epochs, 1)
        # addresses of the first epoch's order, crops and keys, which each batch moves on
        images = tasks.structs["images"]
        order, crop, keys = (images[name].astype(int) for name in ("order", "crop", "keys"))
        for step in range(int(steps.max(initial=0))):
            k = int(np.count_nonzero(steps > step))
            batch_tasks, n = tasks.first(k), tasks.structs["n"][:k]
            epoch, number = np.divmod(step, steps_of_epoch[:k])
            first = epoch * n + number * size  # the batch's first image, in the order of all epochs
            batch_tasks.structs["n"] = np.minimum(size, n - number * size)
            images = batch_tasks.structs["images"]
            images["order"] = order[:k] + 4 * first  # int32
            if crop[0]:
                images["crop"] = crop[:k] + first
            if keys[0]:
                images["keys"] = keys[:k] + 8 * step
            yield Batch(k, step, batch_tasks)

    def gradient(self, block: Block, batch: Batch) -> Tensor:  # type: ignore[override]
        return self.kernels.gradient(batch.tasks, block.w, block.g)

    def descend(self, block: Block, rate: float, loss: Tensor | None = None) -> None:
        plain = Block(self.ensemble, block.w, torch.zeros_like(block.w))
        plain.g = block.g
        self._step(plain, SGD(0, 0, 0, 0), rate)
        self._count(block, loss)

    def descents(  # type: ignore[override]
        self, block: Block, batch: Batch, steps: int, rate: float, towards: Tensor, pull: float
    ) -> None:
        tasks, structs = batch.tasks, batch.tasks.structs
        structs["w"], structs["epochs"] = tasks.row_addresses(block.w), steps
        structs["sgd"]["lr"], structs["sgd"]["mu"] = rate, pull
        structs["sgd"]["towards"] = tasks.row_addresses(towards.expand_as(block.w))
        structs["losses"][:, 0] = block.loss.cpu().numpy()
        block.loss.copy_(field(self.kernels.run("descents", tasks), TRAINING, "losses")[:, 0])
        block.steps += steps

    def step(self, block: Block, loss: Tensor, lr: float, trained: Tensor | None = None) -> None:
        self._count(block, loss)
        self._step(block, self.optimiser, lr, trained)

    def _step(self, block: Block, by: SGD, lr: float, trained: Tensor | None = None) -> None:
        """Take one step of the optimiser `by` along `block.g`."""
        tasks = Tasks(np.zeros(len(block.w), TRAINING), self.ensemble.width)
        self._set_update(tasks, block, np.ones(len(block.w), np.int64), lr, trained, by)
        tasks.structs["g"] = tasks.row_addresses(block.g)
        self.kernels.run("step", tasks)

    def _epoch_tasks(self, rows: Rows, epochs: LocalEpochs) -> tuple[Tasks, np.ndarray]:
        """Return tasks with the images that clients see in these epochs, and their steps `[k]`."""
        clients, size = self.clients, self.optimiser.batch_size
        which = np.arange(len(clients))[rows]
        n, e, keys = clients.n_train[which], epochs.number, None
        if self.ensemble.draws.layers:
            keys = clients.dropout_keys(which, e, epochs.first, size)
        drawn = clients.schedules(rows, e, epochs.first)
        return self.kernels.schedule(self._train_images, drawn, size, keys), e * -(-n // size)

    def _train(self, verb: str, tasks: Tasks, rows: Rows, epochs: LocalEpochs) -> Any:
        """Compute the tasks of these epochs; return them as `field` reads them."""
        done = self.kernels.run(verb, tasks)
        if self.native is None:  # draw for the next epochs while a GPU computes these
            self.clients.schedules(rows, epochs.number, epochs.first + epochs.number)
        return done

    def _set_update(
        self, tasks: Tasks, block: Block, steps: Any, lr: float, trained: Any = None, by: Any = None
    ) -> None:
        """Set the fields that say which rows are trained, and how, in so many `steps` `[k]`."""
        by, w, m = by or self.optimiser, block.w, block.momentum
        structs, sgd = tasks.structs, tasks.structs["sgd"]
        structs["w"] = tasks.row_addresses(w)
        structs["m"] = tasks.row_addresses(m, width=by.state_size(tasks.width))
        sgd["lr"], sgd["momentum"], sgd["decay"] = lr, by.momentum, by.weight_decay
        sgd["clip"] = by.clip_norm
        if trained is not None:
            sgd["trained"] = tasks.row_addresses(trained.expand_as(w), torch.bool)
        if isinstance(by, Adam):
            (first, second), done = by.betas, m[:, -1].cpu().numpy()
            for taken in np.unique(done):  # a table for all clients that have taken as many steps
                alike = done == taken
                table = self.ensemble.put(by.corrections(int(taken), int(steps[alike].max())))
                sgd["corrections"][alike] = tasks.addresses(table, np.zeros(1, np.int64))
            sgd["one_minus_beta1"], sgd["beta2"] = 1 - first, second
            sgd["one_minus_beta2"] = 1 - second
            sgd["eps"], sgd["decoupled"] = by.eps, by.decoupled

    # scores -------------------------------------------------------------------------------------
    def score(
        self, rows: slice, w_kW: Tensor, predict: Predict | None = None
    ) -> tuple[np.ndarray, ...]:
        if predict is None:
            scores = self.kernels.score(w_kW, self._scored_images, rows)
            losses, predicted = scores["losses"].cpu(), scores["predicted"].cpu()
        else:
            logits = predict(rows, w_kW, rows).cpu()
            predicted = logits.argmax(2)
        # the labels [k, S]: those of all clients lie one after the other in `score_y`
        labels, y = torch.zeros_like(predicted).numpy(), self.clients.score_y.cpu().numpy()
        starts, counts = self.clients.score_start[rows], self._scored_images.n[rows]
        for row, start, n in zip(labels, starts.tolist(), counts.tolist(), strict=True):
            row[:n] = y[start : start + n]
        if predict:  # on a CPU: on a GPU PyTorch rounds a loss differently
            losses = cross_entropy(logits, torch.from_numpy(labels))
        return losses.numpy().astype(np.float64), predicted.numpy(), labels

    def logits(self, w_kW: Tensor, images: slice) -> Tensor:
        return self.kernels.score(w_kW, self._scored_images, images, logits=True)["logits"]

    def outputs(self, w_kW: Tensor, images: slice, head: str) -> tuple[Tensor, Tensor]:
        read = self._read_by(head)
        scores = self.kernels.score(w_kW, self._scored_images, images, logits=True, read=read)
        return scores["logits"], scores["features"]

    def training_features(
        self, i: int, w_1W: Tensor, most: int, head: str
    ) -> tuple[Tensor, Tensor]:
        one, first, read = slice(i, i + 1), int(self.clients.start[i]), self._read_by(head)
        scores = self.kernels.score(w_1W, self._train_images, one, np.array([most]), read=read)
        features = scores["features"][0]
        return features, self.clients.y[first : first + len(features)]

    def validation_outputs(self, i: int, w_1W: Tensor, head: str) -> tuple[Tensor, Tensor, Tensor]:
        logits, features = self.outputs(w_1W, slice(i, i + 1), head)
        n, first = int(self.clients.n_search[i]), int(self.clients.score_start[i])
        return logits[0, :n], features[0, :n], self.clients.score_y[first : first + n]

    def training_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        one = slice(i, i + 1)
        return self._mean_losses(w_mW[None], self._train_images, one, self._train_images.n[one])[0]

    def validation_losses(self, rows: slice, w_kmW: Tensor) -> np.ndarray:
        return self._mean_losses(w_kmW, self._scored_images, rows, self.clients.n_search[rows])

    def candidate(
        self, x_kW: Tensor, y_kW: Tensor, w_kW: Tensor, shares: Any, averages: Tensor
    ) -> tuple[Tensor, Tensor]:
        (p, p_x, p_y), x, y = shares, x_kW.clone(), y_kW.clone()
        tasks = Tasks(np.zeros(len(p), SEARCH), self.ensemble.width)
        tasks.set_sums(x, y, averages, p_x, p_y)
        # each client's list of models, and that of their weights p, has one entry
        starts, models = np.arange(len(p)), tasks.row_addresses(w_kW).view(np.int64)
        tasks.structs["models"] = tasks.addresses(self.ensemble.put(models), starts)
        tasks.structs["p"] = tasks.addresses(self.ensemble.column(p), starts)
        self.kernels.run("candidate", tasks)
        return x, y

    def chooser(self, rows: slice, start: Starts, cases: np.ndarray) -> Searches:
        n_search = self.clients.n_search[rows]
        tasks = self.kernels.tasks(SEARCH, self._scored_images, rows, n_search)
        return Searches(self.kernels, tasks, start, cases)

    def _mean_losses(
        self, w_kmW: Tensor, samples: Images, rows: slice, most: np.ndarray
    ) -> np.ndarray:
        """Return the mean loss `[k, m]` of models on their client's first `most` `[k]` samples."""
        losses = self.kernels.score(w_kmW, samples, rows, most)["losses"].cpu().numpy()
        m = w_kmW.shape[1]
        by_model = (row[: m * n].reshape(m, n) for row, n in zip(losses, most, strict=True))
        # math.fsum is exact: the same in any order
        return np.array([[math.fsum(of) / len(of) for of in of_client] for of_client in by_model])

    def _read_by(self, head: str) -> int:
        """Return the number of the value, in lanes/net.h, that the dense layer `head` reads."""
        weight = self.ensemble.layers(self.ensemble.zeros(1)).get(f"{head}.weight")
        column = -1 if weight is None else weight.storage_offset()
        return self.kernels.read_by(int(column))


def try_native(
    kernels: str, ensemble: Ensemble, clients: Clients, optimiser: SGD, threads: int = 1
) -> tuple[NativeBackend | None, str]:
    """Return the native backend by --kernels, or None and why it cannot compute here.

    So many `threads` of a CPU compute each client together; a rank that has more of them, by
    OMP_NUM_THREADS, computes several clients at the same time.
    """
    try:
        make = None
        if ensemble.device.type == "cpu":
            if kernels == "auto" and X86 and load().widest() == FORMS["portable"]:  # slow products
                raise UserError("this processor has no fused multiply-add")
            cores = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
            form, teams = kernels if kernels in FORMS else "", max(1, cores // threads)
            make = partial(Cpu, form=form, members=threads, teams=teams)
        backend = NativeBackend(ensemble, clients, optimiser, make)
        check_against_pytorch(backend.kernels, ensemble.on_cpu())
        return backend, ""
    except torch.OutOfMemoryError as error:
        return None, f"the GPU's memory is full ({str(error).split('. ')[0]})"
    except UserError as error:
        return None, str(error)


def check_against_pytorch(kernels: Kernels, ensemble: Ensemble) -> None:
    """Raise `UserError` where the kernels' gradient or scores of this model are not PyTorch's.

    Both compute them for two samples of noise, on a row near the built weights. A parameter's
    gradient may differ by a thousandth of itself plus 1e-5 of the whole. It is enough that one of
    five draws agrees: in the others a ReLU may be at its kink. The ensemble is on a CPU, because
    on a GPU PyTorch loads libraries for seconds.
    """
    rng, y, key = np.random.default_rng(0), np.arange(2) % kernels.classes, np.zeros(1, np.int64)
    start = parameters_to_vector(ensemble.module.parameters()).detach()
    levels = {"uint8": 256, "int32": kernels.plan.vocabulary or 2**16}.get(ensemble.dtype)
    shape, put = (2, *kernels.shape), torch.from_numpy
    padding = ensemble.width - ensemble.size
    sizes = [math.prod(shape) for shape in ensemble.shapes.values()] + [padding]
    for _ in range(5):
        x = rng.integers(levels, size=shape) if levels else rng.normal(size=shape)
        x = x.astype(ensemble.dtype)
        noise = put(rng.normal(size=len(start)).astype(np.float32))
        row = nn.functional.pad(start + 0.05 * noise, (0, padding))  # no layer is 0
        normalised = ensemble.normalise(put(x))
        with torch.no_grad():
            right, _ = ensemble.gradient(row, normalised, put(y), put(key)[0])
            right_scores = ensemble.logits(row[None], normalised)[0]
        on_device = kernels.sample(row.to(kernels.ensemble.device), x, y, key)
        found, scores = (tensor.cpu() for tensor in on_device)
        # norms of each parameter's gradient and of its error
        norms = torch.stack([part.norm() for part in right.split(sizes)])
        errors = torch.stack([part.norm() for part in (right - found).split(sizes)])
        close = (errors <= 1e-3 * norms + 1e-5 * norms.norm()).all()
        scores_close = (right_scores - scores).norm() <= 1e-3 * right_scores.norm()
        if right.isfinite().all() and close and scores_close:
            return
    differs = "gradient or score of this model is not PyTorch's"
    raise UserError(f"the kernels' {differs}; please report the model")
