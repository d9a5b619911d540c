"""`GpuBackend`: training, scores and searches of all clients by the kernels of `lanes/` on a GPU.

A team of threads computes a client, and one call all clients of a block, with the numbers of
`NativeBackend` to the last bit. What a call is to do for a client is a structure of lanes/net.h; an
array of them is filled field by field.

Axes: W row width, k clients of a block, m models scored on one client's images, S images of the
client that has most, C classes, F what the head reads.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.backend import Backend, Learn, LocalEpochs, Predict, Proximal, Starts
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import Block, Ensemble, Rows, cross_entropy
from dpfl_mpi.numerics.gpu import Gpu, plan_header
from dpfl_mpi.numerics.lanes.declared import STRUCTURES
from dpfl_mpi.numerics.native import check_samples, describe
from dpfl_mpi.numerics.native_backend import check_against_pytorch
from dpfl_mpi.numerics.optimiser import SGD, Adam

USUAL = "team_bytes", "gradient", "score", "train", "search"  # kernels that most runs need
LONG = "train", "mix", "ahead", "search", "score"  # what a client's size makes long
STEP_TIMES = {1: 1.0, 2: 0.8, 4: 0.5}  # of a team of so many blocks, measured on an H200
TRAINING, SCORING, SEARCH = (np.dtype(STRUCTURES[n]) for n in ("Training", "Scoring", "Search"))


class Tasks:
    """The structures of one call, `[k]`, and what they point to on the device."""

    def __init__(self, each: np.ndarray, held: tuple[Tensor, ...] = ()):
        self.each, self.held = each, list(held)

    def rows(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> np.ndarray:
        """Return where each of the rows `[k, ...]` lies, uint64 `[k]`; they are held."""
        if rows.dtype is not dtype or rows.stride(-1) != 1 or len(rows) != len(self.each):
            was = f"{rows.dtype} {tuple(rows.shape)} with strides {rows.stride()}"
            raise ValueError(f"rows that are {was}, not {len(self.each)} of {dtype} without gaps")
        return self.parts(rows, rows.stride(0) * np.arange(len(rows)))

    def parts(self, array: Tensor, starts: np.ndarray) -> np.ndarray:
        """Return where these numbers `[k]` of an array lie, uint64 `[k]`; it is held."""
        self.held.append(array)
        return (array.data_ptr() + array.element_size() * starts).astype(np.uint64)


class Batch(NamedTuple):
    """One mini-batch of each of the first k clients of a block."""

    k: int
    step: int
    tasks: Tasks


class Images(NamedTuple):
    """The samples of all clients, as they are stored."""

    fields: dict[str, Any]  # of `Images` in lanes/net.h
    pixels: Tensor
    labels: Tensor
    numbers: Tensor  # 0, 1, ...: the order in which they lie


class Kernels:
    """The kernels of one network, on tensors of a device."""

    def __init__(
        self,
        ensemble: Ensemble,
        shape: tuple[int, ...],
        most: int,
        make: Callable[..., Any] = Gpu,
        cluster: int = 1,
    ):
        """Compile the network for samples of `shape`, and at most so many teams at once.

        A team is a `cluster` of so many blocks, where a client takes long.
        `make(header, device)` returns what `Gpu` is; `UserError`: there is no such program here.
        """
        self.plan, self.classes = describe(ensemble.module, shape, ensemble.dtype)
        self.ensemble, self.shape, self.dtype = ensemble, shape, ensemble.dtype
        self.width, self.vocabulary = ensemble.width, self.plan.vocabulary
        header = plan_header(self.plan, ensemble.width, ensemble.scale, ensemble.shift)
        self.gpu, self.most = make(header, ensemble.device), most
        self.gpu.clusters |= dict.fromkeys(LONG, cluster)
        self.gpu.load(USUAL)
        space = torch.zeros(1, dtype=torch.int64, device=ensemble.device)
        self.gpu.launch("team_bytes", 1, space)
        self.team_bytes = int(space)
        self.memory = torch.zeros(0, self.team_bytes, dtype=torch.uint8, device=ensemble.device)

    def run(self, verb: str, tasks: Tasks) -> Tensor:
        """Call a kernel, the first tasks first; return them, uint8 `[k, bytes]` on the device."""
        count, device = len(tasks.each), self.ensemble.device
        here = self.ensemble.put(tasks.each.view(np.uint8).reshape(count, -1))
        if count == 0:
            return here
        if len(self.memory) == 0:  # zeros: what lies around padded values stays so
            most = min(self.most, self.gpu.teams("step"), self.gpu.room(self.team_bytes))
            shape = most, self.team_bytes
            self.memory = torch.zeros(shape, dtype=torch.uint8, device=device)
        following = torch.zeros(1, dtype=torch.int32, device=device)
        teams = min(count, len(self.memory), self.gpu.teams(verb))
        self.gpu.launch(verb, teams, here, count, following, self.memory, self.team_bytes)
        return here

    def read_by(self, column: int) -> int:
        """Return the number of the value that a dense layer reads, whose weight starts there."""
        if column not in self.plan.features:
            mend = "--kernels torch does"
            raise UserError(f"the kernels do not show what the model's head reads; {mend}")
        return int(self.plan.features[column])

    def images(self, pixels: Tensor, labels: Tensor) -> Images:
        """Return samples and labels for calls; `ValueError`: they are not what kernels read."""
        check_samples(self, pixels, labels)
        wide = self.plan.net.wide
        rows, columns = pixels.shape[1:3] if len(self.shape) == 3 else (1, wide)
        fields = {"pixels": pixels.data_ptr(), "labels": labels.data_ptr(), "rows": rows}
        fields |= {"columns": columns, "corner": (rows - self.plan.net.height) // 2}
        numbers = torch.arange(len(pixels), dtype=torch.int32, device=pixels.device)
        return Images(fields, pixels, labels, numbers)

    def tasks(self, kind: np.dtype, samples: Images, n: np.ndarray, starts: Any = None) -> Tasks:
        """Return structures of clients that see n `[k]` images, from the numbers `starts` on."""
        tasks = Tasks(np.zeros(len(n), kind), samples[1:])
        seen = tasks.each["images"]
        for name, value in samples.fields.items():
            seen[name] = value
        tasks.each["n"] = n
        if starts is not None:
            seen["order"] = tasks.parts(samples.numbers, starts)
        return tasks

    def gradient(self, tasks: Tasks, w: Tensor, g: Tensor) -> Tensor:
        """Write the gradients at rows w of mini-batches' mean losses into g; return the losses."""
        tasks.each["w"], tasks.each["g"] = tasks.rows(w), tasks.rows(g)
        return field(self.run("gradient", tasks), TRAINING, "loss")[:, 0].float()

    def sample(
        self, row: Tensor, x: np.ndarray, y: np.ndarray, key: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Do `Native.sample`."""
        put, g, n, start = self.ensemble.put, row[None].clone(), np.array([len(y)]), np.array([0])
        samples = self.images(put(x), put(y))
        tasks = self.tasks(TRAINING, samples, n, start)
        tasks.each["images"]["keys"] = tasks.parts(put(key), start)
        self.gradient(tasks, row[None], g)
        logits = self.score(row[None, None], samples, start, n, logits=True)[2]
        return g[0], logits[0]

    def score(
        self,
        w_kmW: Tensor,
        samples: Images,
        starts: np.ndarray,
        n: np.ndarray,
        logits: bool = False,
        read: int = -1,
    ) -> list[Tensor]:
        """Score m models of each client on n `[k]` images, from the numbers `starts` on.

        Return losses and predicted classes, `[k, m S]`, logits `[k, m S, C]` where asked for, and
        the value number `read`, `[k, m S, F]`. A client's are the first m n, model after model.
        """
        k, m, _ = w_kmW.shape
        units = self.plan.values[read].units if read >= 0 else 0
        kinds = {"losses": torch.float32, "predicted": torch.int64}
        kinds |= {"logits": torch.float32, "features": torch.float32}
        behind = (), (), (self.classes if logits else 0,), (units,)
        tasks = self.tasks(SCORING, samples, n, starts)
        each = tasks.each
        each["rows"], each["stride"], each["r"] = tasks.rows(w_kmW), w_kmW.stride(1), m
        each["read"], out = max(read, 0), []
        for (name, dtype), shape in zip(kinds.items(), behind, strict=True):
            shape = k, m * int(n.max(initial=0)), *shape
            out.append(torch.zeros(shape, dtype=dtype, device=w_kmW.device))
            if out[-1].numel():
                each[name] = tasks.rows(out[-1], dtype)
        order = np.argsort(-each["n"], kind="stable")  # the largest first
        self.run("score", Tasks(each[order], tuple(tasks.held)))
        return out


def field(tasks: Tensor, kind: np.dtype, name: str) -> Tensor:
    """Return a field of structures that lie on the device as bytes, as numbers `[k, ...]`."""
    of, start = kind.fields[name][:2]  # type: ignore[index]
    dtype = {"f4": torch.float32, "f8": torch.float64}[of.base.str[1:]]
    return tasks.view(dtype)[:, start // dtype.itemsize :][:, : of.itemsize // dtype.itemsize]


class Searches:
    """X and Y of the greedy searches of a block's clients (`Search` in lanes/net.h).

    The sums of its `start` are changed in place.
    """

    def __init__(self, kernels: Kernels, tasks: Tasks, start: Starts, cases: np.ndarray):
        """Score on the images of `tasks`.

        `cases`, float64 `[k, 4]`, counts candidates by which of their two gains is above 0.
        """
        x, y, averages, p_x, p_y = start
        self.kernels, self.tasks, self.start, self.cases = kernels, tasks, start, cases
        each = tasks.each
        each["x"], each["y"] = tasks.rows(x, torch.float64), tasks.rows(y, torch.float64)
        each["pair"], each["p_x"], each["p_y"] = tasks.rows(averages), p_x, p_y
        losses = torch.zeros(len(each), 2 * int(each["n"].max(initial=0)), device=x.device)
        each["losses"], each["cases"] = tasks.rows(losses), cases

    @property
    def rewards(self) -> np.ndarray:
        """R(X), float64 `[k]`."""
        return self.tasks.each["r_x"].copy()

    def decide(
        self,
        models: np.ndarray,
        p: np.ndarray,
        coins: np.ndarray,
        counts: np.ndarray,
        most: np.ndarray,
    ) -> list[np.ndarray]:
        """Decide candidates in their order until a client has added its `most`.

        Args:
            models: where each one's row of float32 `[W]` lies, uint64 `[c]`, client after client.
            p: their weights, float64 `[c]`.
            coins: in [0, 1), float64 `[c]`.
            counts: how many of them are a client's, int64 `[k]`.
            most: how many it may add, int64 `[k]`.

        Returns:
            Of each client's candidates that were decided, which were added, bool.
        """
        put, now = self.kernels.ensemble.put, Tasks(self.tasks.each, tuple(self.tasks.held))
        added = put(np.zeros(len(p), bool))
        first = np.cumsum(counts) - counts
        given = {"models": put(models.view(np.int64)), "p": put(p), "coins": put(coins)}
        for name, array in (given | {"added": added}).items():
            now.each[name] = now.parts(array, first)
        now.each["count"], now.each["most"], now.each["decided"] = counts, most, 0
        order = np.argsort(-counts * now.each["n"], kind="stable")  # the largest first
        here = self.kernels.run("search", Tasks(now.each[order], tuple(now.held)))
        self.tasks.each[order] = here.cpu().numpy().view(SEARCH)[:, 0]
        self.cases[:] = self.tasks.each["cases"]
        ends = first + self.tasks.each["decided"]
        which = added.cpu().numpy()
        return [which[a:b] for a, b in zip(first, ends, strict=True)]


def cluster_of(sizes: np.ndarray, multiprocessors: int) -> int:
    """Return of how many blocks a team should be for clients of these training sizes, `[k]`.

    The last client is done when the largest one is, or when all are, whichever takes longer.
    """
    if not len(sizes):
        return 1
    seconds = {
        blocks: step * max(sizes.max(), sizes.sum() / max(1, multiprocessors // blocks))
        for blocks, step in STEP_TIMES.items()
    }
    return min(seconds, key=lambda blocks: seconds[blocks])


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class GpuBackend(Backend):
    name = "native"

    def __init__(
        self,
        ensemble: Ensemble,
        clients: Clients,
        optimiser: SGD,
        make: Callable[..., Any] = Gpu,
        cluster: int = 0,
    ):
        """Compute all clients at once; `make` is that of `Kernels`.

        A team that trains has `cluster` blocks; 0: what these clients' sizes ask for.

        `UserError`: the kernels cannot compute here.
        """
        super().__init__(ensemble, clients, optimiser, max(len(clients), 1))
        cluster = cluster or cluster_of(clients.n_train, multiprocessors(ensemble.device))
        self.kernels = Kernels(ensemble, clients.shape, len(clients), make, cluster)
        self._train = self.kernels.images(clients.x, clients.y)
        self._scored = self.kernels.images(clients.score_x, clients.score_y)

    # training -----------------------------------------------------------------------------------
    def train_epochs(
        self, block: Block, epochs: LocalEpochs, gradient: Any = None, trained: Any = None
    ) -> None:
        if gradient and not isinstance(gradient, Proximal):  # a method's own: step by step
            return super().train_epochs(block, epochs, gradient, trained)
        tasks, steps = self._epochs(block.rows, epochs)
        self._follow(tasks, block, steps, epochs.lr, trained)
        if gradient:
            towards = gradient.target(block.rows)
            tasks.each["sgd"]["towards"] = tasks.rows(towards.expand_as(block.w))
            tasks.each["sgd"]["mu"] = gradient.mu
        self._train_by("train", tasks, block, "loss", steps)

    def train_mixed(
        self, w: Block, v: Block, alpha_K1: Tensor, epochs: LocalEpochs, learn: Learn | None
    ) -> None:
        # the kernels take one number of steps so far, Adam's, for both
        last = w.momentum[:, -1], v.momentum[:, -1]
        uneven = isinstance(self.optimiser, Adam) and not torch.equal(*last)
        if learn or uneven:
            return super().train_mixed(w, v, alpha_K1, epochs, learn)
        tasks, steps = self._epochs(w.rows, epochs)
        self._follow(tasks, w, steps, epochs.lr)
        tasks.each["v"], tasks.each["m_v"] = tasks.rows(v.w), tasks.rows(v.momentum)
        tasks.each["row"] = tasks.rows(torch.zeros_like(w.w))
        tasks.each["share"] = alpha_K1[w.rows][:, 0].cpu().numpy()
        here = self.kernels.run("mix", tasks)
        for i, block in enumerate((w, v)):
            block.loss += field(here, TRAINING, "losses")[:, i]
            block.steps += steps

    def train_ahead(self, block: Block, inner: float, epochs: LocalEpochs) -> None:
        tasks, steps = self._epochs(block.rows, epochs)
        self._follow(tasks, block, np.maximum(steps // 2, 1), epochs.lr)
        tasks.each["row"], tasks.each["share"] = tasks.rows(torch.zeros_like(block.w)), inner
        self._train_by("ahead", tasks, block, "losses", steps // 2)

    def batches(self, rows: Rows, epochs: int, first_epoch: np.ndarray) -> Iterator[Batch]:
        tasks, steps = self._epochs(rows, LocalEpochs(epochs, first_epoch, 0.0))
        each, size = tasks.each, self.optimiser.batch_size
        n = each["n"].copy()
        for step in range(int(steps.max(initial=0))):
            k = int((steps > step).sum())
            epoch, at = np.divmod(step, steps[:k] // epochs)
            now = Tasks(each[:k].copy(), tuple(tasks.held))
            now.each["n"] = np.minimum(size, n[:k] - at * size)
            seen, first = now.each["images"], (epoch * n[:k] + at * size).astype(np.uint64)
            seen["order"] += 4 * first
            seen["crop"] += first * (seen["crop"] > 0)
            seen["keys"] += np.uint64(8 * step) * (seen["keys"] > 0)
            yield Batch(k, step, now)

    def gradient(self, block: Block, batch: Batch) -> Tensor:  # type: ignore[override]
        tasks = Tasks(batch.tasks.each.copy(), tuple(batch.tasks.held))
        return self.kernels.gradient(tasks, block.w, block.g)

    def descend(self, block: Block, rate: float, loss: Tensor | None = None) -> None:
        plain = SGD(0, 0, 0, 0)
        self._step(block, torch.zeros_like(block.w), plain, rate)
        self._count(block, loss)

    def descents(  # type: ignore[override]
        self, block: Block, batch: Batch, steps: int, rate: float, towards: Tensor, pull: float
    ) -> None:
        tasks = Tasks(batch.tasks.each.copy(), tuple(batch.tasks.held))
        each = tasks.each
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
        tasks = Tasks(np.zeros(len(block.w), TRAINING))
        row = Block(self.ensemble, block.w, momentum)
        self._follow(tasks, row, np.ones(len(block.w), np.int64), lr, trained, by)
        tasks.each["g"] = tasks.rows(block.g)
        self.kernels.run("step", tasks)

    def _train_by(
        self, verb: str, tasks: Tasks, block: Block, losses: str, steps: np.ndarray
    ) -> None:
        here = self.kernels.run(verb, tasks)
        block.loss += field(here, TRAINING, losses)[:, 0].float()
        block.steps += steps

    def _epochs(self, rows: Rows, epochs: LocalEpochs) -> tuple[Tasks, np.ndarray]:
        """Return structures with what clients see in their local epochs, and their steps `[k]`."""
        clients, put, size = self.clients, self.ensemble.put, self.optimiser.batch_size
        which = np.arange(len(clients))[rows]
        n, e = clients.n_train[which], epochs.number
        tasks = self.kernels.tasks(TRAINING, self._train, n)
        tasks.each["epochs"], tasks.each["batch"] = e, size
        drawn = clients.schedules(rows, e, epochs.first)
        first, seen = e * drawn.before[:-1], tasks.each["images"]
        seen["order"] = tasks.parts(put(drawn.order), first)
        if clients.augment:
            seen["crop"], seen["stride"] = tasks.parts(put(drawn.crops), 3 * first), e * n
        if self.ensemble.draws.layers:
            keys = clients.dropout_keys(which, e, epochs.first, size)
            seen["keys"] = tasks.rows(keys, torch.int64)
        return tasks, e * -(-n // size)

    def _follow(
        self,
        tasks: Tasks,
        block: Block,
        steps: np.ndarray,
        lr: float,
        trained: Tensor | None = None,
        by: SGD | None = None,
    ) -> None:
        """Write into structures which rows are trained, how, and in how many steps `[k]`."""
        by, each, sgd = by or self.optimiser, tasks.each, tasks.each["sgd"]
        each["w"], each["m"] = tasks.rows(block.w), tasks.rows(block.momentum)
        sgd["lr"], sgd["momentum"], sgd["decay"] = lr, by.momentum, by.weight_decay
        sgd["clip"] = by.clip_norm
        if trained is not None:
            sgd["trained"] = tasks.rows(trained.expand_as(block.w), torch.bool)
        if isinstance(by, Adam):
            (first, second), done = by.betas, block.momentum[:, -1].cpu().numpy()
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
        starts, n = self._all(rows)
        most = int(n.max(initial=0))
        at = np.arange(most)
        number = starts[:, None] + np.where(at < n[:, None], at, 0)
        labels = self.clients.score_y[self.ensemble.put(number)].cpu()
        if predict is None:
            losses, predicted, *_ = self.kernels.score(w_kW[:, None], self._scored, starts, n)
        else:  # a loss has other bits by PyTorch on a GPU
            logits = predict(rows, w_kW, rows).cpu()
            losses, predicted = cross_entropy(logits, labels), logits.argmax(2)
        found = losses.cpu().numpy().astype(np.float64), predicted.cpu().numpy()
        return *found, labels.numpy()

    def outputs(self, w_kW: Tensor, images: slice, head: str) -> tuple[Tensor, Tensor]:
        where, read = self._all(images), self._read_by(head)
        scores = self.kernels.score(w_kW[:, None], self._scored, *where, logits=True, read=read)
        return scores[2], scores[3]

    def training_features(
        self, i: int, w_1W: Tensor, most: int, head: str
    ) -> tuple[Tensor, Tensor]:
        start, n = (part[i : i + 1] for part in (self.clients.start, self.clients.n_train))
        n = np.minimum(n, most)
        read = self._read_by(head)
        features = self.kernels.score(w_1W[:, None], self._train, start, n, read=read)[3]
        return features[0], self.clients.y[start[0] : start[0] + n[0]]

    def training_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        start, n = (part[i : i + 1] for part in (self.clients.start, self.clients.n_train))
        return self._mean_losses(w_mW[None], self._train, start, n)[0]

    def validation_losses(self, rows: slice, w_kmW: Tensor) -> np.ndarray:
        starts, n = self.clients.scored[:-1][rows], self.clients.n_search[rows]
        return self._mean_losses(w_kmW, self._scored, starts, n)

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
        tasks, x, y = Tasks(np.zeros(len(p), SEARCH)), x_kW.clone(), y_kW.clone()
        each = tasks.each
        each["x"], each["y"] = tasks.rows(x, torch.float64), tasks.rows(y, torch.float64)
        each["p_x"], each["p_y"], each["pair"] = p_x, p_y, tasks.rows(pair)
        models = self.ensemble.put(tasks.rows(w_kW).view(np.int64))
        each["models"] = tasks.rows(models, torch.int64)
        each["p"] = tasks.rows(self.ensemble.put(p), torch.float64)
        self.kernels.run("candidate", tasks)
        return x, y

    def chooser(self, rows: slice, start: Starts, cases: np.ndarray) -> Searches:
        starts, n = self.clients.scored[:-1][rows], self.clients.n_search[rows]
        tasks = self.kernels.tasks(SEARCH, self._scored, n, starts)
        return Searches(self.kernels, tasks, start, cases)

    def _mean_losses(
        self, w_kmW: Tensor, samples: Images, starts: np.ndarray, n: np.ndarray
    ) -> np.ndarray:
        losses = self.kernels.score(w_kmW, samples, starts, n)[0].cpu().numpy()
        m = w_kmW.shape[1]
        each = (of[: m * images].reshape(m, -1) for of, images in zip(losses, n, strict=True))
        return np.array([[math.fsum(of_model) / len(of_model) for of_model in of] for of in each])

    def _all(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return where the scored images of these clients start, and how many they are."""
        starts = self.clients.scored[:-1][rows]
        return starts, self.clients.scored[1:][rows] - starts

    def _read_by(self, head: str) -> int:
        """Return the number of the value that a dense layer reads."""
        weight = self.ensemble.layers(self.ensemble.zeros(1)).get(f"{head}.weight")
        column = -1 if weight is None else weight.storage_offset()
        return self.kernels.read_by(int(column))


def try_gpu(ensemble: Ensemble, clients: Clients, optimiser: SGD) -> tuple[GpuBackend | None, str]:
    """Return the kernels on a GPU; else None, and why they cannot compute here."""
    try:
        backend = GpuBackend(ensemble, clients, optimiser)
        torch.use_deterministic_algorithms(False)  # PyTorch lacks them for layers it compares here
        check_against_pytorch(backend.kernels, ensemble)
        return backend, ""
    except UserError as error:
        return None, str(error)
    finally:
        torch.use_deterministic_algorithms(True)
