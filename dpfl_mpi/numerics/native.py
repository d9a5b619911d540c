"""The CPU kernels of `lanes/lanes.c`: training and scores in C, with the mini-batch as the vector.

A `Native` describes one network to the library and calls it on rows of float32, in place, and on
samples as they are stored. A call computes what `Ensemble` and `SGD.step` do, and enters Python
only after a client's last step.

Axes: W row width, r rows, M images, H W C an image, n images of a call, F what the head reads.
"""

import copy
import ctypes
import functools
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.lanes.declared import FUNCTIONS, SOURCES, STRUCTURES
from dpfl_mpi.numerics.lanes.joins import KNOWN
from dpfl_mpi.numerics.lanes.plan import Plan, plan
from dpfl_mpi.numerics.lanes.trace import Unknown, trace
from dpfl_mpi.numerics.optimiser import SGD, Adam

LIBRARY = SOURCES / "_lanes.so"
FORMS = {"avx512": 512, "avx2": 256, "portable": 128}  # bits of a vector; all give the same results
Array = Tensor | np.ndarray
# of a search: the sums of p_i w_i over X and over Y, float64 [W], where their averages are scored
# next [2, W], and their sums of p_i
Start = tuple[Tensor, Tensor, Tensor, float, float]
_Images, _Sgd, _Training, _Scoring, _Search = (
    STRUCTURES[name] for name in ("Images", "Sgd", "Training", "Scoring", "Search")
)


@functools.cache
def load(path: Path = LIBRARY) -> Any:
    """Return the library.

    `UserError`: it was not built, is for another processor, or is older than its sources.
    """
    mend = "install again where there is a C compiler (pip install -e .)"
    if not path.exists():
        raise UserError(f"the CPU kernels were not built: {path} is not there; {mend}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(f"the CPU kernels cannot be loaded ({error}); {mend}") from error
    library.source.restype = ctypes.c_char_p
    # in the order of setup.py
    files = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.c")], key=lambda file: file.name)
    sources = b"".join(file.read_bytes() for file in files)
    if hashlib.sha256(sources).hexdigest() != library.source().decode():
        raise UserError(f"the CPU kernels are of another version of their sources; {mend}")
    return library


def forms(path: Path = LIBRARY) -> list[str]:
    """Return the forms that this processor can run and the library has, the fastest first."""
    library, known = load(path), FORMS.items()
    fit = [(name, bits) for name, bits in known if bits <= library.widest()]
    return [name for name, bits in fit if hasattr(library, f"train_{bits}")]


class Images(NamedTuple):
    """Samples and labels as they are stored; made and checked by `Native.images`."""

    # uint8 or float32 [M, H + 2 b, W + 2 b, C], b: a border for crops; float32 [M, F]; int32 [M, L]
    pixels: Array
    labels: Array  # int64 [M]


@dataclass(frozen=True)
class StepRule:
    """How a step follows from a gradient g: by the optimiser, along g + mu (w - towards).

    `trained`, bool `[W]`, is false for frozen columns.
    """

    optimiser: SGD
    lr: float
    trained: Tensor | None = None
    towards: Tensor | None = None
    mu: float = 0.0


class Epochs(NamedTuple):
    """What a client trains on, and how."""

    images: Images
    order: np.ndarray  # int32 [epochs, n]: the images that each epoch sees, one after the other
    crop: np.ndarray | None  # uint8 [3, epochs, n]: where each window starts in y, x; mirrored?
    batch_size: int
    rule: StepRule
    keys: np.ndarray | None = None  # int64 [steps], of dropout; None: nothing is dropped

    @property
    def steps(self) -> int:
        return len(self.order) * -(-self.order.shape[1] // self.batch_size)


class MiniBatch(NamedTuple):
    """One mini-batch of one client, as numbers of its images."""

    images: Images
    order: np.ndarray  # int32 [n]
    crop: np.ndarray | None = None  # uint8 [3, n], as in `Epochs`
    keys: np.ndarray | None = None  # int64 [1], of dropout
    step: int = 0  # as of a `clients.Batch`
    k: int = 1


class Scores(NamedTuple):
    losses: np.ndarray  # [r, n]
    predicted: np.ndarray  # [r, n]
    logits: np.ndarray | None  # [r, n, classes], where asked for
    features: np.ndarray | None  # [r, n, F], where asked for


class Native:
    """The kernels of one network in one form, with the work space of one client."""

    def __init__(
        self,
        ensemble: Ensemble,
        shape: tuple[int, ...],
        form: str = "",
        path: Path = LIBRARY,
        members: int = 1,
    ):
        """Describe the network to the library, for samples of `shape`; "" is the fastest form.

        So many `members`, threads, compute a client together; their number changes no bit.
        `UserError`: the library cannot be used, has no such form here, or no such network.
        """
        available = forms(path)
        self.form = form or available[0]
        if self.form not in available:
            found = ", ".join(available)
            raise UserError(f"--kernels is {form}; this processor and library have {found}")
        self._plan, self.classes = describe(ensemble.module, shape, ensemble.dtype)
        library, bits = load(path), FORMS[self.form]
        self._call = SimpleNamespace()
        for name, (result, arguments) in FUNCTIONS.items():
            call = getattr(library, f"{name}_{bits}")
            call.restype, call.argtypes = result, arguments
            setattr(self._call, name, call)
        self.shape, self.dtype, self.width = shape, ensemble.dtype, ensemble.width
        self.vocabulary, self._net = self._plan.vocabulary, self._plan.net
        self._constants = ensemble.scale, ensemble.shift  # the library knows their addresses
        if self.dtype != "int32":
            addresses = (_address(t, "float32", (shape[-1],)) for t in self._constants)
            self._net.scale, self._net.shift = addresses
        self._net.width = self.width
        self._read = self._net.logits
        if self._plan.features:
            self.read_by(max(self._plan.features))
        self.members = members
        # of activations, their gradients and a row's
        self.bytes = self._call.space(self._net, members) + 64
        self._memory = np.zeros(self.bytes, np.uint8)
        self._work = -(-self._memory.ctypes.data // 64) * 64

    def read_by(self, column: int) -> None:
        """Let `features` be what the dense layer reads whose weight starts at this column."""
        if column not in self._plan.features:
            mend = "--kernels torch does"
            raise UserError(f"the CPU kernels do not show what the model's head reads; {mend}")
        self._read = self._plan.features[column]

    def images(self, pixels: Array, labels: Array) -> Images:
        """Return samples `[M, *shape]`, images with or without a border, and labels for calls.

        `ValueError`: they are not what the library would read.
        """
        check_samples(self, pixels, labels)
        return Images(pixels, labels)

    def train(self, w: Tensor, m: Tensor, epochs: Epochs) -> float:
        """Train row w with momentum m in place; return the sum of the mini-batches' mean losses."""
        task = self._training((w, m), epochs, epochs.steps)
        return float(self._run("train", task).loss)

    def mix(
        self, w: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor], share: float, epochs: Epochs
    ) -> np.ndarray:
        """Train row w, and row v by share times the gradient at share v + (1 - share) w.

        Both come with their momentum, after as many steps. Return the sums of the losses at w and
        at the mixture, float32 `[2]`.
        """
        task, mixture = self._training(w, epochs, epochs.steps), torch.zeros_like(w[0])
        task.v, task.m_v = self._pair(v, epochs.rule)
        task.row, task.share = self._row(mixture), share
        return np.array(self._run("mix", task).losses, np.float32)

    def ahead(self, w: Tensor, m: Tensor, inner: float, epochs: Epochs) -> float:
        """Train row w by each second mini-batch's gradient at w - inner (gradient of the first).

        Return the sum of the losses of the second ones, added up in float32.
        """
        task, row = self._training((w, m), epochs, max(epochs.steps // 2, 1)), torch.zeros_like(w)
        task.row, task.share = self._row(row), inner
        return float(self._run("ahead", task).losses[0])

    def gradient(self, w: Tensor, g: Tensor, batch: MiniBatch) -> float:
        """Write the gradient at row w of a mini-batch's mean loss into g; return the loss."""
        task = _Training(w=self._row(w), g=self._row(g), n=len(batch.order))
        task.images = self._chosen(*batch[:4])
        return float(self._run("gradient", task).loss)

    def descents(
        self,
        w: Tensor,
        towards: Tensor,
        pull: float,
        rate: float,
        steps: int,
        batch: MiniBatch,
        loss: Tensor,
    ) -> None:
        """Take steps w -= rate (gradient + pull (w - towards)) on one mini-batch.

        Their losses are added to `loss`, float32 `[1]`.
        """
        task = _Training(w=self._row(w), n=len(batch.order), epochs=steps)
        task.images = self._chosen(*batch[:4])
        task.sgd = _Sgd(lr=rate, mu=pull, towards=self._row(towards))
        task.losses[0] = float(loss)
        loss.fill_(self._run("descents", task).losses[0])

    def step(self, w: Tensor, m: Tensor, g: Tensor, rule: StepRule) -> None:
        """Step row w with momentum m along g, which is changed in place."""
        rows = self._pair((w, m), rule)
        self._run("step", _Training(*rows, g=self._row(g), sgd=self._sgd(rule, m, 1)))

    def score(
        self,
        w_rW: Tensor,
        images: Images,
        order: np.ndarray,
        logits: bool = False,
        features: bool = False,
    ) -> Scores:
        """Score rows on the images `order` `[n]`, which are read once for all rows."""
        r, n = len(w_rW), len(order)
        losses, predicted = np.empty((r, n), np.float32), np.empty((r, n), np.int64)
        out = np.empty((r, n, self.classes), np.float32) if logits else None
        units = self._plan.values[self._read].units if features else 0
        read = np.empty((r, n, units), np.float32) if features else None
        places = [None if a is None else a.ctypes.data for a in (losses, predicted, out, read)]
        rows = _address(w_rW, "float32", (r, self.width)), self.width, r
        chosen = self._chosen(images, order)
        self._run("score", _Scoring(*rows, self._read, n, chosen, *places))
        return Scores(losses, predicted, out, read)

    def sample(
        self, row: Tensor, x: np.ndarray, y: np.ndarray, key: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Return a row's gradient `[W]` of the mean loss of samples, and their logits `[n, C]`."""
        images, order, g = self.images(x, y), np.arange(len(y), dtype=np.int32), row.clone()
        self.gradient(row, g, MiniBatch(images, order, keys=key))
        logits = self.score(row[None], images, order, logits=True).logits
        assert logits is not None
        return g, torch.from_numpy(logits[0])

    def candidate(
        self, x: Tensor, y: Tensor, w: Tensor, p: float, p_x: float, p_y: float, pair: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sums x + p w and y - p w, float64 `[W]`.

        Their averages, over p_x and p_y, are written into `pair` `[2, W]`.
        """
        x_j, y_j = x.clone(), y.clone()
        model, weight = np.array([self._row(w)], np.uint64), np.array([p])
        sums = [_address(row, "float64", (self.width,)) for row in (x_j, y_j)]
        task = _Search(*sums, p_x, p_y, pair=_address(pair, "float32", (2, self.width)))
        task.models, task.p = model.ctypes.data, weight.ctypes.data
        self._run("candidate", task)
        return x_j, y_j

    def means(
        self, models: np.ndarray, p: np.ndarray, ends: np.ndarray, whole: np.ndarray, out: Tensor
    ) -> None:
        """Write each row's average, sum p w / whole in float64, into `out` `[k, W]`.

        Args:
            models: where each model's row lies in memory, uint64 `[E]`.
            p: its weight, float64 `[E]`.
            ends: which models are a row's: from one of these to the next, int64 `[k + 1]`.
            whole: float64 `[k]`; a row whose whole is 0 stays.
        """
        k, e = len(whole), int(ends[-1])
        given = (
            (models, "uint64", e),
            (p, "float64", e),
            (ends, "int64", k + 1),
            (whole, "float64", k),
        )
        places = [_address(array, dtype, (size,)) for array, dtype, size in given]
        self._call.means(*places, k, _address(out, "float32", (k, self.width)), self.width)

    def fixed(self, models: np.ndarray, p: np.ndarray, out: Tensor) -> None:
        """Write the sum of `fixed_point` of models into `out`, int64 `[W]`; see `means`."""
        given = (models, "uint64"), (p, "float64")
        places = [_address(array, dtype, (len(p),)) for array, dtype in given]
        self._call.fixed(*places, len(p), _address(out, "int64", (self.width,)), self.width)

    def _run(self, verb: str, task: Any) -> Any:
        """Compute a task of one client in place; return it."""
        getattr(self._call, verb)(self._net, task, 1, 1, self.members, self._work)
        return task

    def _training(self, rows: tuple[Tensor, Tensor], epochs: Epochs, steps: int) -> Any:
        """Return the task of a row and its momentum, which take so many steps in these epochs."""
        task = _Training(*self._pair(rows, epochs.rule), epochs=len(epochs.order))
        task.batch, task.n = epochs.batch_size, epochs.order.shape[1]
        task.images = task.held = self._schedule(epochs)
        task.sgd = task.rule = self._sgd(epochs.rule, rows[1], steps)
        return task

    def _row(self, row: Tensor) -> int:
        return _address(row, "float32", (self.width,))

    def _pair(self, pair: tuple[Tensor, Tensor], rule: StepRule) -> tuple[int, int]:
        """Return where a row and its momentum row are."""
        size = rule.optimiser.state_size(self.width)
        return self._row(pair[0]), _address(pair[1], "float32", (size,))

    def _sgd(self, rule: StepRule, m: Tensor, steps: int) -> Any:
        """Return the rule of so many steps, of which the first follows on momentum m."""
        towards = None if rule.towards is None else self._row(rule.towards)
        trained = None if rule.trained is None else _address(rule.trained, "bool", (self.width,))
        sgd = rule.optimiser
        settings = rule.lr, sgd.momentum, sgd.weight_decay, sgd.clip_norm, rule.mu
        out = _Sgd(*settings, towards, trained)
        if isinstance(sgd, Adam):
            (first, second), corrections = sgd.betas, sgd.corrections(int(m[-1]), steps)
            # held as long as the structure is there
            out.corrections, out.held = corrections.ctypes.data, corrections
            out.take, out.keep, out.add, out.eps = 1 - first, second, 1 - second, sgd.eps
            out.decoupled = sgd.decoupled
        return out

    def _schedule(self, epochs: Epochs) -> Any:
        """Return the images of the epochs."""
        keys = epochs.keys
        if keys is not None and len(keys) < epochs.steps:
            raise ValueError(f"{len(keys)} keys; a mini-batch each needs {epochs.steps}")
        order = epochs.order.reshape(-1)
        crop = None if epochs.crop is None else epochs.crop.reshape(3, -1)
        chosen = self._chosen(epochs.images, order, crop, keys)
        chosen.held = order, crop  # until the call ends; they may be copies
        return chosen

    def _chosen(
        self, images: Images, order: np.ndarray, crop: Any = None, keys: np.ndarray | None = None
    ) -> Any:
        """Return the images of a call; numbers that lead out of the arrays are refused here."""
        m = len(images.pixels)
        rows, columns = images.pixels.shape[1:3] if len(self.shape) == 3 else (1, self._net.wide)
        border = rows - self._net.height
        if order.min(initial=0) < 0 or order.max(initial=0) >= m:
            raise ValueError(f"an image that is not among the {m} there are")
        window = (None, 0)
        if crop is not None:
            shape = (3, len(order))
            if crop.shape != shape or crop.strides[1] != 1 or crop.dtype != np.uint8:
                raise ValueError(f"crop must be uint8 [3, {len(order)}]")
            if crop[:2].max(initial=0) > border:
                raise ValueError(f"a crop beyond the border of {border}")
            window = (crop.ctypes.data, crop.strides[0])
        stored = [a.data_ptr() if isinstance(a, Tensor) else a.ctypes.data for a in images]
        numbers = _address(order, "int32", (len(order),))
        drawn = None if keys is None else _address(keys, "int64", (len(keys),))
        return _Images(*stored, numbers, *window, rows, columns, border // 2, drawn)


class Chooser:
    """X and Y of one client's greedy search, in C (`Search` in lanes/net.h).

    The sums of its `start` are changed in place.
    """

    def __init__(
        self, native: Native, images: Images, order: np.ndarray, start: Start, cases: np.ndarray
    ):
        """Score on the images `order` `[n]`.

        `cases`, float64 `[4]`, counts candidates by which of their two gains is above 0.
        """
        x, y, averages, p_x, p_y = start
        losses = np.empty((2, len(order)), np.float32)
        # the library only knows where they lie
        self._native, self.cases = native, cases
        self.start, self._held = start, (images, order, losses)
        sums = [_address(row, "float64", (native.width,)) for row in (x, y)]
        pair = _address(averages, "float32", (2, native.width))
        self._search = _Search(*sums, p_x, p_y, pair=pair, losses=losses.ctypes.data, n=len(order))
        self._search.images = native._chosen(images, order)

    @property
    def rewards(self) -> np.ndarray:
        """R(X), float64 `[1]`."""
        return np.array([self._search.r_x])

    def decide(
        self, models: np.ndarray, p: np.ndarray, coins: np.ndarray, _: Any, most: np.ndarray
    ) -> list[np.ndarray]:
        """Decide candidates in their order until `most` `[1]` are added; return which were, bool.

        Args:
            models: where each one's row of float32 `[W]` lies in memory, uint64 `[c]`.
            p: their weights, float64 `[c]`.
            coins: in [0, 1), float64 `[c]`.
            most: int64 `[1]`.
        """
        search, count = self._search, len(models)
        added = np.zeros(count, bool)
        given = {"models": (models, "uint64"), "p": (p, "float64"), "coins": (coins, "float64")}
        for name, (array, dtype) in [*given.items(), ("added", (added, "bool"))]:
            setattr(search, name, _address(array, dtype, (count,)))
        search.count, search.most, search.cases = count, int(most[0]), (0, 0, 0, 0)
        self._native._run("search", search)
        self.cases += np.array(search.cases)
        return [added[: search.decided]]


def check_samples(kernels: Any, pixels: Array, labels: Array) -> None:
    """Raise `ValueError` where samples are not what kernels of a shape, dtype and classes read."""
    m, border, stored = pixels.shape[0], 0, kernels.shape
    if len(kernels.shape) == 3:
        border = pixels.shape[1] - kernels.shape[0]
        stored = (kernels.shape[0] + border, kernels.shape[1] + border, kernels.shape[2])
    _address(pixels, kernels.dtype, (m, *stored))
    _address(labels, "int64", (m,))
    if border < 0:
        raise ValueError(f"images of {stored[0]} rows; the model reads {kernels.shape[0]}")
    if m and (int(labels.min()) < 0 or int(labels.max()) >= kernels.classes):
        raise ValueError(f"a label that is not among the {kernels.classes} classes")
    most = kernels.vocabulary or 2**31
    if m and kernels.dtype == "int32" and (int(pixels.min()) < 0 or int(pixels.max()) >= most):
        raise ValueError(f"a token that is not below {most}")


def describe(module: nn.Module, shape: tuple[int, ...], dtype: str) -> tuple[Plan, int]:
    """Return the plan of a network for samples of a shape and dtype, and its classes.

    `UserError`: the library cannot compute it.
    """
    module = copy.deepcopy(module).cpu()  # what it does there is followed
    try:
        ops, logits, sample = trace(module, shape, dtype, KNOWN, True)
        scores, *_ = trace(module, shape, dtype, KNOWN, False)
        if [op.kind for op in ops if op.kind != "drop"] != [op.kind for op in scores]:
            raise Unknown("a forward that does other things in training than in scoring")
        classes = math.prod(logits.shape)
        return plan(ops, logits, sample, shape, dtype, classes), classes
    except Unknown as error:
        raise UserError(f"the CPU kernels have no layer for {error}") from error
    except Exception as error:  # whatever it is, PyTorch computes the model
        why = f"{type(error).__name__}: {error}"
        model = type(module).__name__
        raise UserError(f"the CPU kernels cannot plan {model} ({why})") from error


def _address(array: Array, dtype: str, shape: tuple[int, ...]) -> int:
    """Return where an array's memory starts; one of another type, shape or order is refused."""
    if isinstance(array, Tensor):
        same, contiguous = array.dtype is getattr(torch, dtype), array.is_contiguous()
        where = array.data_ptr()
    else:  # `array.ctypes.data`, in a fifth of the time
        same, contiguous = array.dtype == dtype, array.flags.c_contiguous
        where = array.__array_interface__["data"][0]
    if not same or tuple(array.shape) != shape or not contiguous:
        is_now = f"{array.dtype} {tuple(array.shape)}"
        raise ValueError(f"an array {is_now}, not {dtype} {shape} without gaps")
    return where
