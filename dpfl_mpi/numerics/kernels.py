"""`Kernels`: the kernels of one network in `lanes/`, for many clients, on a CPU or a GPU.

A task is a structure of lanes/net.h: `Training`, `Scoring` or `Search`. It describes what a call
does for one client, by numbers and by addresses of memory. `NativeBackend` fills an array of tasks,
field by field, and one call computes all of them, so many small models train at once. A verb names
what a call does: train, mix, ahead, gradient, step, descents, score, search, candidate.

Axes: W row width, k clients of a call, m models scored on one client's samples, S samples of the
client that has most, M all samples, C classes, F what the head reads.
"""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.backend import Starts
from dpfl_mpi.numerics.draws import Schedules
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.lanes import joins, layers  # noqa: F401  they register handlers
from dpfl_mpi.numerics.lanes.declared import STRUCTURES
from dpfl_mpi.numerics.lanes.plan import Plan, plan
from dpfl_mpi.numerics.lanes.trace import Unsupported, trace

TRAINING, SCORING, SEARCH = (np.dtype(STRUCTURES[n]) for n in ("Training", "Scoring", "Search"))


class Tasks:
    """The tasks of one call, `[k]`, and the arrays whose addresses are in them."""

    def __init__(self, structs: np.ndarray, width: int, kept_alive: Iterable[Any] = ()):
        """Take structures and the row width W; arrays in `kept_alive` are not freed before."""
        self.structs, self.width, self.kept_alive = structs, width, list(kept_alive)
        self._numbers = np.arange(len(structs))

    def first(self, k: int) -> "Tasks":
        """Return copies of the first k tasks."""
        structs = self.structs[:k].view(np.uint8).copy()  # as bytes: four times as fast
        return Tasks(structs.view(self.structs.dtype), self.width, self.kept_alive)

    def row_addresses(
        self, rows: Tensor, dtype: torch.dtype = torch.float32, width: int | None = None
    ) -> np.ndarray:
        """Return the address of each task's row of `[k, ..., width]`, by default W, int64 `[k]`.

        `ValueError`: the rows have another type, shape or gaps.
        """
        k, now, gaps = len(self.structs), rows.shape, rows.numel() and rows.stride(-1) != 1
        width = self.width if width is None else width
        if rows.dtype is not dtype or now[0] != k or now[-1] != width or gaps:
            was = f"{rows.dtype} {tuple(now)} with strides {rows.stride()}"
            raise ValueError(f"rows that are {was}, not {k} of {width} {dtype} without gaps")
        return self.addresses(rows, rows.stride(0) * self._numbers)

    def addresses(self, array: Tensor, starts: np.ndarray) -> np.ndarray:
        """Return the addresses of these numbers `[k]` of an array, int64 `[k]`; keep it alive."""
        self.kept_alive.append(array)
        return array.data_ptr() + array.element_size() * starts

    def set_sums(self, x: Tensor, y: Tensor, averages: Tensor, p_x: Any, p_y: Any) -> None:
        """Set the fields of `Search` that `Starts` describes."""
        structs, pairs = self.structs, averages.view(len(self.structs), -1)
        structs["x"] = self.row_addresses(x, torch.float64)
        structs["y"] = self.row_addresses(y, torch.float64)
        structs["pair"] = self.row_addresses(pairs, width=2 * self.width)
        structs["p_x"], structs["p_y"] = p_x, p_y


class Images(NamedTuple):
    """The samples of clients, as they are stored."""

    structs: np.ndarray  # [K] `Images` in lanes/net.h: a client's, in the order in which they lie
    n: np.ndarray  # samples of each client [K]
    border: int  # pixels around an image, on both sides together, for crops
    arrays: tuple[Tensor, ...]  # samples, labels and the numbers of that order


class Kernels:
    """The kernels of one network, on tensors of a device."""

    def __init__(self, ensemble: Ensemble, shape: tuple[int, ...], make: Callable[..., Any]):
        """Plan the network for samples of `shape`; `make(plan, ensemble)` returns a `Cpu` or `Gpu`.

        `UserError`: the network cannot be computed there.
        """
        self.plan, self.classes = describe(ensemble.module, shape, ensemble.dtype)
        self.ensemble, self.shape, self.width = ensemble, shape, ensemble.width
        self.machine = make(self.plan, ensemble)

    def run(self, verb: str, tasks: Tasks, sizes: np.ndarray | None = None) -> Any:
        """Compute tasks, the largest of `sizes` `[k]` first; return them as `field` reads them."""
        return self.machine.run(verb, tasks.structs, sizes)

    def read_by(self, column: int) -> int:
        """Return which value is the input of the dense layer whose weight starts at this column."""
        if column not in self.plan.features:
            mend = "--kernels torch does"
            raise UserError(f"the kernels do not show what the model's head reads; {mend}")
        return int(self.plan.features[column])

    def images(self, pixels: Tensor, labels: Tensor, starts: np.ndarray, n: np.ndarray) -> Images:
        """Return the samples of clients: n `[K]` of each, from the numbers `starts` on.

        `pixels` are `[M, *shape]`, images with or without a border, and `labels` int64 `[M]`.
        `ValueError`: they are not what the kernels would read.
        """
        m, border, stored, dtype = len(pixels), 0, self.shape, self.ensemble.dtype
        if len(self.shape) == 3:
            border = pixels.shape[1] - self.shape[0]
            stored = self.shape[0] + border, self.shape[1] + border, self.shape[2]
        for array, kind, shape in ((pixels, dtype, (m, *stored)), (labels, "int64", (m,))):
            right = array.dtype is getattr(torch, kind) and array.shape == shape
            if not right or not array.is_contiguous():
                is_now = f"{array.dtype} {tuple(array.shape)}"
                raise ValueError(f"an array {is_now}, not {kind} {shape} without gaps")
        if border < 0:
            raise ValueError(f"images of {stored[0]} rows; the model reads {self.shape[0]}")
        if m and (int(labels.min()) < 0 or int(labels.max()) >= self.classes):
            raise ValueError(f"a label that is not among the {self.classes} classes")
        most = self.plan.vocabulary or 2**31
        if m and dtype == "int32" and (int(pixels.min()) < 0 or int(pixels.max()) >= most):
            raise ValueError(f"a token that is not below {most}")
        if (starts < 0).any() or (starts + n > m).any():
            raise ValueError(f"an image that is not among the {m} there are")
        structs = np.zeros(len(n), TRAINING["images"])
        order = torch.arange(m, dtype=torch.int32).to(pixels.device)
        structs["pixels"], structs["labels"] = pixels.data_ptr(), labels.data_ptr()
        rows, columns = pixels.shape[1:3] if len(self.shape) == 3 else (1, self.plan.net.wide)
        structs["rows"], structs["columns"], structs["corner"] = rows, columns, border // 2
        structs["order"] = order.data_ptr() + order.element_size() * starts
        return Images(structs, n, border, (pixels, labels, order))

    def tasks(self, kind: np.dtype, samples: Images, rows: slice, most: Any = None) -> Tasks:
        """Return tasks of clients, which see their first `most` `[k]` samples, or all."""
        n = samples.n[rows] if most is None else np.minimum(samples.n[rows], most)
        tasks = Tasks(np.zeros(len(n), kind), self.width, samples.arrays)
        tasks.structs["images"], tasks.structs["n"] = samples.structs[rows], n
        return tasks

    def schedule(self, samples: Images, drawn: Schedules, batch: int, keys: Any = None) -> Tasks:
        """Return tasks of clients that train on what was `drawn`, in mini-batches of size `batch`.

        `keys` are of dropout, for each mini-batch, int64 `[k, most steps]`. None: nothing is
        dropped. `ValueError`: numbers that lead out of the samples.
        """
        order, crops, before, epochs = drawn
        n, size, m = before[1:] - before[:-1], epochs * int(before[-1]), len(samples.arrays[0])
        for array, dtype, numbers in ((order, np.int32, size), (crops, np.uint8, 3 * size)):
            if array.dtype != dtype or array.shape != (numbers,):
                raise ValueError(f"an order or crops of {array.dtype} {array.shape}")
        if size and order.view(np.uint32).max() >= m:  # below 0 is large
            raise ValueError(f"an image that is not among the {m} there are")
        if crops.max(initial=0) > samples.border:
            raise ValueError(f"a crop beyond the border of {samples.border}")
        tasks = Tasks(np.zeros(len(n), TRAINING), self.width, samples.arrays)
        structs, put, first = tasks.structs, self.ensemble.put, epochs * before[:-1]
        # what clients share (where samples lie, and their size), then the order of each
        structs["images"], structs["n"] = samples.structs[:1], n
        structs["epochs"], structs["batch"] = epochs, batch
        images = structs["images"]
        images["order"] = tasks.addresses(put(order), first)
        if samples.border:
            images["crop"], images["stride"] = tasks.addresses(put(crops), 3 * first), epochs * n
        if keys is not None:
            if keys.shape[1] < (steps := epochs * -(-int(n.max(initial=0)) // batch)):
                raise ValueError(f"{keys.shape[1]} keys; a mini-batch each needs {steps}")
            images["keys"] = tasks.row_addresses(keys, torch.int64, keys.shape[1])
        return tasks

    def gradient(self, tasks: Tasks, w: Tensor, g: Tensor) -> Tensor:
        """Write the gradients at rows w of mini-batches' mean losses into g; return the losses."""
        tasks.structs["w"], tasks.structs["g"] = tasks.row_addresses(w), tasks.row_addresses(g)
        return field(self.run("gradient", tasks), TRAINING, "loss").float()

    def sample(
        self, row: Tensor, x: np.ndarray, y: np.ndarray, key: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Return a row's gradient `[W]` of the mean loss of samples, and their logits `[S, C]`.

        `check_against_pytorch` compares them. `key` is of dropout.
        """
        put, g, n = self.ensemble.put, row[None].clone(), len(y)
        samples = self.images(put(x), put(y), np.zeros(1, np.int64), np.array([n]))
        order, before = np.arange(n, dtype=np.int32), np.array([0, n])
        drawn = Schedules(order, np.zeros(3 * n, np.uint8), before, 1)
        self.gradient(self.schedule(samples, drawn, n, put(key[None])), row[None], g)
        return g[0], self.score(row[None], samples, slice(0, 1), logits=True)["logits"][0]

    def score(
        self,
        w: Tensor,
        samples: Images,
        rows: slice,
        most: np.ndarray | None = None,
        logits: bool = False,
        read: int | None = None,
    ) -> dict[str, Tensor]:
        """Score one model of each client, `[k, W]`, or m, `[k, m, W]`, on samples as of `tasks`.

        Return "losses" and the classes "predicted", `[k, m S]`, with `logits` also those,
        `[k, m S, C]`, and with the number of a value, `read`, that value as "features",
        `[k, m S, F]`. A client with n samples has the first m n of its row, model after model.
        """
        tasks, m = self.tasks(SCORING, samples, rows, most), w.shape[1] if w.dim() == 3 else 1
        structs, n = tasks.structs, tasks.structs["n"]
        structs["rows"], structs["stride"], structs["r"] = tasks.row_addresses(w), w.stride(-2), m
        shape, device = (len(n), m * int(n.max(initial=0))), w.device
        out = {"losses": torch.zeros(shape, device=device)}
        out["predicted"] = torch.zeros(shape, dtype=torch.int64, device=device)
        if logits:
            out["logits"] = torch.zeros(*shape, self.classes, device=device)
        if read is not None:
            structs["read"], units = read, self.plan.values[read].units
            out["features"] = torch.zeros(*shape, units, device=device)
        for name, part in out.items():
            structs[name] = tasks.row_addresses(part, part.dtype, part.shape[-1])
        self.run("score", tasks, n)
        return out


def field(done: Any, kind: np.dtype, name: str) -> Tensor:
    """Return a field of tasks after their call, as numbers on the device, `[k]` or `[k, ...]`."""
    if isinstance(done, np.ndarray):  # on a CPU; on a GPU the tasks are bytes [k, bytes]
        return torch.from_numpy(done[name])
    kind, start = kind.fields[name][:2]  # type: ignore[index]
    dtype = {"f4": torch.float32, "f8": torch.float64}[kind.base.str[1:]]
    first, count = start // dtype.itemsize, kind.itemsize // dtype.itemsize
    numbers = done.view(dtype)[:, first : first + count]
    return numbers if kind.shape else numbers[:, 0]


class Searches:
    """The greedy searches of a block's clients (`Search` in lanes/net.h).

    A client's search has two sets of models: X grows from its own, Y shrinks from all. A candidate
    joins X or leaves Y, by a coin that their gains in validation loss weigh.
    """

    def __init__(self, kernels: Kernels, tasks: Tasks, start: Starts, cases: np.ndarray):
        """Score on the samples of `tasks`; change the sums of `start` in place.

        `cases`, float64 `[k, 4]`, counts candidates by which of their two gains is above 0.
        """
        self.kernels, self.tasks, self.cases = kernels, tasks, cases
        tasks.set_sums(*start)
        structs, n = tasks.structs, int(tasks.structs["n"].max(initial=0))
        losses = torch.zeros(len(structs), max(2 * n, 1), device=start[0].device)
        structs["losses"] = tasks.row_addresses(losses, width=losses.shape[1])
        structs["cases"] = cases

    @property
    def rewards(self) -> np.ndarray:
        """R(X), float64 `[k]`."""
        return self.tasks.structs["r_x"].copy()

    def decide(
        self,
        models: np.ndarray,
        p: np.ndarray,
        coins: np.ndarray,
        counts: np.ndarray,
        most: np.ndarray,
    ) -> list[np.ndarray]:
        """Decide each client's candidates in their order, until it has added its `most`.

        The c candidates lie client after client, `counts` of each, int64 `[k]`: the addresses
        `models` of their rows, float32 `[W]`, are uint64 `[c]`; their weights `p` and `coins`, from
        0 to 1, float64 `[c]`. Return, for each client, which of those decided were added, bool.
        """
        put, structs, total = self.kernels.ensemble.put, self.tasks.structs, int(counts.sum())
        # of this call alone: the arrays of its candidates may be freed after it
        tasks = Tasks(structs, self.tasks.width, self.tasks.kept_alive)
        added, first = put(np.zeros(total, bool)), np.cumsum(counts) - counts
        for name, a, dtype in (("models", models, "u8"), ("p", p, "f8"), ("coins", coins, "f8")):
            if a.dtype != dtype or a.shape != (total,):
                raise ValueError(f"{name} that are {a.dtype} {a.shape}, not {dtype} {(total,)}")
            structs[name] = tasks.addresses(put(a.view("i8")), first)
        structs["added"], structs["count"] = tasks.addresses(added, first), counts
        structs["budget_left"], structs["decided"] = most, 0
        done = self.kernels.run("search", tasks, counts * structs["n"])
        if isinstance(done, Tensor):  # on a CPU they are `structs` itself
            structs[:] = done.cpu().numpy().view(SEARCH)[:, 0]
        self.cases[:] = structs["cases"]
        was_added, ends = added.cpu().numpy(), first + structs["decided"]
        return [was_added[start:end] for start, end in zip(first, ends, strict=True)]


def describe(module: nn.Module, shape: tuple[int, ...], dtype: str) -> tuple[Plan, int]:
    """Return the plan of a network for samples of a shape and dtype, and its classes.

    `UserError`: the kernels cannot compute it.
    """
    module = copy.deepcopy(module).cpu()  # `trace` follows what it does there
    try:
        ops, logits, sample = trace(module, shape, dtype, True)
        scores, *_ = trace(module, shape, dtype, False)
        if [op.kind for op in ops if op.kind != "drop"] != [op.kind for op in scores]:
            raise Unsupported("a forward that does other things in training than in scoring")
        classes = math.prod(logits.shape)
        return plan(ops, logits, sample, shape, dtype, classes), classes
    except Unsupported as error:
        raise UserError(f"the kernels have no layer for {error}") from error
    except Exception as error:  # whatever it is, PyTorch computes the model
        why = f"{type(module).__name__} ({type(error).__name__}: {error})"
        raise UserError(f"the kernels cannot plan {why}") from error
