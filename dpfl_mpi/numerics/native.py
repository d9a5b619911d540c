"""The CPU kernels: training and scores of models in C, the mini-batch as the vector (lanes/lanes.c, which see).

A `Native` describes one architecture to the library and calls it on rows of float32, whose memory it reads and writes in place, and on
samples as they are stored. Each call computes what `Ensemble` and `SGD.step` do, without entering Python between the steps of a client.

Axes: W row width, r rows, M images, H W C image, n images of a call, F what the head reads.
"""

import ctypes
import functools
import hashlib
import math
from ctypes import c_char_p
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.backend import SGD, Adam
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.lanes.declared import FUNCTIONS, SOURCES, STRUCTURES
from dpfl_mpi.numerics.lanes.joins import KNOWN
from dpfl_mpi.numerics.lanes.plan import Plan, plan
from dpfl_mpi.numerics.lanes.trace import Unknown, trace

LIBRARY = SOURCES / "_lanes.so"
FORMS = {"avx512": 512, "avx2": 256, "portable": 128}  # bits of a vector; all give the same bits of results
Array = Tensor | np.ndarray
# of a search: the sums of p_i w_i over X and Y, float64 [W], where their averages are scored next [2, W], and their sums of p_i
Start = tuple[Tensor, Tensor, Tensor, float, float]
_Images, _Sgd, _Search = (STRUCTURES[name] for name in ("Images", "Sgd", "Search"))


@functools.cache
def load(path: Path = LIBRARY) -> Any:
    """Return the library; one that was not built, or is of another processor or version of its source, is a `UserError`."""
    mend = "install again where there is a C compiler (pip install -e .)"
    if not path.exists():
        raise UserError(f"the CPU kernels were not built: {path} is not there; {mend}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(f"the CPU kernels cannot be loaded ({error}); {mend}") from error
    library.source.restype = c_char_p
    files = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.c")], key=lambda file: file.name)  # as in setup.py
    if hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() != library.source().decode():
        raise UserError(f"the CPU kernels are of another version of their sources; {mend}")
    return library


def forms(path: Path = LIBRARY) -> list[str]:
    """Return the forms that this processor can run and the library has, the fastest first."""
    library = load(path)
    return [name for name, bits in FORMS.items() if bits <= library.widest() and hasattr(library, f"train_{bits}")]


class Images(NamedTuple):
    """Samples and labels as they are stored; made and checked by `Native.images`."""

    pixels: Array  # uint8 or float32 [M, H + 2 b, W + 2 b, C], with a border of b >= 0 for crops; float32 [M, F]; int32 [M, L]
    labels: Array  # int64 [M]


@dataclass(frozen=True)
class StepRule:
    """How a step is taken from a gradient: as by the optimiser's `step`, in whose `memory` is the momentum that goes with a row.

    mu (w - towards) is added to the gradient first; `trained`, bool `[W]`, is false for frozen columns.
    """

    optimiser: SGD
    lr: float
    trained: Tensor | None = None
    towards: Tensor | None = None
    mu: float = 0.0


class Epochs(NamedTuple):
    """What a client trains on, and how."""

    images: Images
    order: np.ndarray  # int32 [epochs, n]: which images each epoch sees; its last mini-batch may be smaller
    # uint8 [3, epochs, n]: where each image's window starts in y and x, and whether it is mirrored
    crop: np.ndarray | None
    batch_size: int
    rule: StepRule
    keys: np.ndarray | None = None  # int64 [steps]: of each mini-batch's dropout; without them nothing is dropped

    @property
    def steps(self) -> int:
        return len(self.order) * -(-self.order.shape[1] // self.batch_size)


class MiniBatch(NamedTuple):
    """One mini-batch of one client; the kernels read the images themselves."""

    images: Images
    order: np.ndarray  # int32 [n]
    crop: np.ndarray | None = None  # uint8 [3, n], as in `Epochs`
    keys: np.ndarray | None = None  # int64 [1], of dropout
    step: int = 0  # as of a `clients.Batch`
    k: int = 1


class Scores(NamedTuple):
    """What `Native.score` returns: losses `[r, n]`, predicted classes `[r, n]`; where asked for logits `[r, n, classes]`, features `[r, n, F]`."""

    losses: np.ndarray
    predicted: np.ndarray
    logits: np.ndarray | None
    features: np.ndarray | None


class Native:
    """The kernels of one architecture in one form, with the work space of one thread."""

    def __init__(self, ensemble: Ensemble, shape: tuple[int, ...], form: str = "", path: Path = LIBRARY):
        """Describe a model for samples of `shape`.

        A library that cannot be used, computes no such model, or has no such form here is a `UserError`.
        """
        available = forms(path)
        self.form = form or available[0]
        if self.form not in available:
            raise UserError(f"--kernels is {form}; this processor and library have {', '.join(available)}")
        self._plan, self.classes = describe(ensemble.module, shape, ensemble.dtype)
        library, bits = load(path), FORMS[self.form]
        self._call = SimpleNamespace()
        for name, (result, arguments) in FUNCTIONS.items():
            call = getattr(library, f"{name}_{bits}")
            call.restype, call.argtypes = result, arguments
            setattr(self._call, name, call)
        self.shape, self.dtype, self.width, self._net = shape, ensemble.dtype, ensemble.width, self._plan.net
        self.vocabulary = self._plan.vocabulary
        self._constants = ensemble.scale, ensemble.shift
        if self.dtype != "int32":
            self._net.scale, self._net.shift = (_address(t, "float32", (shape[-1],)) for t in self._constants)
        self._net.width = self.width
        if self._plan.features:
            self.read_by(max(self._plan.features))
        self.bytes = self._call.space(self._net) + 64  # of activations, their gradients and a row's
        self._memory = np.zeros(self.bytes, np.uint8)
        self._work = -(-self._memory.ctypes.data // 64) * 64

    def read_by(self, column: int) -> None:
        """Let `features` of scores be what the dense layer reads whose weight starts at a column of the row."""
        if column not in self._plan.features:
            raise UserError("the CPU kernels do not show what the model's head reads; --kernels torch does")
        self._net.features = self._plan.features[column]

    def images(self, pixels: Array, labels: Array) -> Images:
        """Return samples `[M, *shape]`, images with a border of b >= 0 `[M, H + 2 b, W + 2 b, C]`, and labels, int64 `[M]`, for the calls below."""
        m, border = pixels.shape[0], pixels.shape[1] - self.shape[0] if len(self.shape) == 3 else 0
        height, *others = self.shape
        stored = (height + border, others[0] + border, *others[1:]) if len(self.shape) == 3 else self.shape
        _address(pixels, self.dtype, (m, *stored))
        _address(labels, "int64", (m,))
        if border < 0:
            raise ValueError(f"images of {height + border} rows; the model reads {height}")
        if m and (int(labels.min()) < 0 or int(labels.max()) >= self.classes):
            raise ValueError(f"a label that is not among the {self.classes} classes")
        most = self.vocabulary or 2**31
        if m and self.dtype == "int32" and (int(pixels.min()) < 0 or int(pixels.max()) >= most):
            raise ValueError(f"a token that is not below {most}")
        return Images(pixels, labels)

    def train(self, w: Tensor, m: Tensor, epochs: Epochs) -> float:
        """Train row w with momentum m, `[W]` both, in place, and return the sum of the mini-batches' mean losses."""
        chosen, rows = self._schedule(epochs), self._pair((w, m), epochs.rule)
        how = self._sgd(epochs.rule, m, epochs.steps)
        return float(self._call.train(self._net, *rows, *chosen, how, self._work))

    def mix(self, w: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor], share: float, epochs: Epochs) -> np.ndarray:
        """Train row w, and row v along share times the gradient at share v + (1 - share) w, each with its momentum, of as many steps.

        Return the sums of the losses at w and at the mixture, float32 `[2]`.
        """
        chosen, rule = self._schedule(epochs), epochs.rule
        row, losses, how = torch.zeros_like(w[0]), np.zeros(2, np.float32), self._sgd(rule, w[1], epochs.steps)
        rows = *self._pair(w, rule), *self._pair(v, rule), self._row(row), share
        self._call.mix(self._net, *rows, *chosen, how, losses.ctypes.data, self._work)
        return losses

    def ahead(self, w: Tensor, m: Tensor, inner: float, epochs: Epochs) -> float:
        """Train row w along the gradient that every second mini-batch has at w - inner (gradient of the one before).

        Return the sum of the losses of the second ones, added up in float32.
        """
        chosen, row, loss = self._schedule(epochs), torch.zeros_like(w), np.zeros(1, np.float32)
        rows = *self._pair((w, m), epochs.rule), self._row(row), inner
        how = self._sgd(epochs.rule, m, max(epochs.steps // 2, 1))
        self._call.ahead(self._net, *rows, *chosen, how, loss.ctypes.data, self._work)
        return float(loss[0])

    def gradient(self, w: Tensor, g: Tensor, batch: MiniBatch) -> float:
        """Write into g `[W]` the gradient at row w of a mini-batch's mean loss, and return that loss."""
        chosen, n = self._chosen(*batch[:4]), len(batch.order)
        return float(self._call.gradient(self._net, self._row(w), self._row(g), chosen, n, self._work))

    def descents(
        self, w: Tensor, towards: Tensor, pull: float, rate: float, steps: int, batch: MiniBatch, loss: Tensor
    ) -> None:
        """Take steps w -= rate (gradient + pull (w - towards)) of rows `[W]` on a mini-batch; add their losses to `loss`, float32 `[1]`."""
        chosen, rows = self._chosen(*batch[:4]), (self._row(w), self._row(towards))
        total = _address(loss, "float32", (1,))
        self._call.descents(self._net, *rows, pull, rate, steps, chosen, len(batch.order), total, self._work)

    def step(self, w: Tensor, m: Tensor, g: Tensor, rule: StepRule) -> None:
        """Take one step of row w with momentum m along the gradient g, to which the proximal term and the mask are applied in place."""
        self._call.step(*self._pair((w, m), rule), self._row(g), self.width, self._sgd(rule, m, 1), 0)

    def score(
        self, w_rW: Tensor, images: Images, order: np.ndarray, logits: bool = False, features: bool = False
    ) -> Scores:
        """Score rows on the images `order` `[n]`, which are brought into lanes once for all rows."""
        r, n = len(w_rW), len(order)
        losses, predicted = np.empty((r, n), np.float32), np.empty((r, n), np.int64)
        out = np.empty((r, n, self.classes), np.float32) if logits else None
        read = np.empty((r, n, self._plan.values[self._net.features].units), np.float32) if features else None
        places = (None if a is None else a.ctypes.data for a in (losses, predicted, out, read))
        rows = _address(w_rW, "float32", (r, self.width))
        self._call.score(self._net, rows, self.width, r, self._chosen(images, order), n, *places, None, self._work)
        return Scores(losses, predicted, out, read)

    def candidate(
        self, x: Tensor, y: Tensor, w: Tensor, p: float, p_x: float, p_y: float, pair: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return x + p w and y - p w of float64 sums and a row w, `[W]` each; write their averages, over p_x and p_y, into `pair` `[2, W]`."""
        x_j, y_j = torch.empty_like(x), torch.empty_like(y)
        old, new = ([_address(row, "float64", (self.width,)) for row in rows] for rows in ((x, y), (x_j, y_j)))
        averages = _address(pair, "float32", (2, self.width))
        self._call.candidate(*old, self._row(w), p, p_x, p_y, *new, averages, self.width)
        return x_j, y_j

    def means(self, models: np.ndarray, p: np.ndarray, ends: np.ndarray, whole: np.ndarray, out: Tensor) -> None:
        """Write into rows `out` `[k, W]` the averages of their models: sum p w / whole in float64, in order; one whose whole is 0 stays.

        `models` `[E]`, uint64, says where each model's row lies in memory, `ends`, int64 `[k + 1]`, which of them and of `p` `[E]` are a row's.
        """
        k, e = len(whole), int(ends[-1])
        given = (models, "uint64", e), (p, "float64", e), (ends, "int64", k + 1), (whole, "float64", k)
        where = [_address(array, dtype, (size,)) for array, dtype, size in given]
        self._call.means(*where, k, _address(out, "float32", (k, self.width)), self.width)

    def fixed(self, models: np.ndarray, p: np.ndarray, out: Tensor) -> None:
        """Write into `out`, int64 `[W]`, the sum of `ensemble.fixed_point` of models; arguments as in `means`."""
        where = [_address(array, dtype, (len(p),)) for array, dtype in ((models, "uint64"), (p, "float64"))]
        self._call.fixed(*where, len(p), _address(out, "int64", (self.width,)), self.width)

    def _row(self, row: Tensor) -> int:
        return _address(row, "float32", (self.width,))

    def _pair(self, pair: tuple[Tensor, Tensor], rule: StepRule) -> tuple[int, int]:
        """Return where a row and its momentum are."""
        return self._row(pair[0]), _address(pair[1], "float32", (rule.optimiser.state_size(self.width),))

    def _sgd(self, rule: StepRule, m: Tensor, steps: int) -> Any:
        """Return how so many steps are taken, of which the first follows on what `m` remembers."""
        towards = None if rule.towards is None else self._row(rule.towards)
        trained = None if rule.trained is None else _address(rule.trained, "bool", (self.width,))
        by = rule.optimiser
        out = _Sgd(rule.lr, by.momentum, by.weight_decay, by.clip_norm, rule.mu, towards, trained)
        if isinstance(by, Adam):
            (first, second), held = by.betas, by.corrections(int(m[-1]), steps)
            out.corrections, out.held = held.ctypes.data, held  # as long as the structure is there
            out.take, out.keep, out.add, out.eps = 1 - first, second, 1 - second, by.eps
            out.decoupled = by.decoupled
        return out

    def _schedule(self, epochs: Epochs) -> tuple[Any, int, int, int]:
        """Return the images of the epochs, how many an epoch has, how many epochs they are, and the size of a mini-batch."""
        (count, n), keys = epochs.order.shape, epochs.keys
        if keys is not None and len(keys) < epochs.steps:
            raise ValueError(f"{len(keys)} keys; a mini-batch each needs {epochs.steps}")
        # with gaps they are copied, and the library knows no more than where they lie
        held = epochs.order.reshape(-1), None if epochs.crop is None else epochs.crop.reshape(3, -1)
        chosen = self._chosen(epochs.images, *held, keys)
        chosen.held = held  # until the call ends
        return chosen, n, count, epochs.batch_size

    def _chosen(
        self, images: Images, order: np.ndarray, crop: np.ndarray | None = None, keys: np.ndarray | None = None
    ) -> Any:
        """Return the images of a call; numbers that would lead out of the arrays are refused here."""
        m = len(images.pixels)
        rows, columns = images.pixels.shape[1:3] if len(self.shape) == 3 else (1, self._net.wide)
        border = rows - self._net.height
        if order.min(initial=0) < 0 or order.max(initial=0) >= m:
            raise ValueError(f"an image that is not among the {m} there are")
        if crop is not None and (crop.shape != (3, len(order)) or crop.strides[1] != 1 or crop.dtype != np.uint8):
            raise ValueError(f"crop must be uint8 [3, {len(order)}]")
        if crop is not None and crop[:2].max(initial=0) > border:
            raise ValueError(f"a crop beyond the border of {border}")
        stored = (array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data for array in images)
        drawn = None if keys is None else _address(keys, "int64", (len(keys),))
        window = (None, 0) if crop is None else (crop.ctypes.data, crop.strides[0])
        return _Images(*stored, _address(order, "int32", (len(order),)), *window, rows, columns, border // 2, drawn)


class Chooser:
    """(X, w^X) and (Y, w^Y) of one client's greedy search (`Search` in lanes/net.h); its sums are changed in place."""

    def __init__(self, native: Native, images: Images, order: np.ndarray, start: Start, cases: np.ndarray):
        """Score on the images `order` `[n]`; `cases`, float64 `[4]`, counts candidates by which of their gains is above 0."""
        x, y, averages, p_x, p_y = start
        losses = np.empty((2, len(order)), np.float32)
        self._native, self._images, self._n = native, native._chosen(images, order), len(order)
        self.start, self._held = start, (images, order, losses, cases)  # the library only knows where they lie
        sums = (_address(row, "float64", (native.width,)) for row in (x, y))
        pair, counts = _address(averages, "float32", (2, native.width)), _address(cases, "float64", (4,))
        self._search = _Search(*sums, p_x, p_y, 0.0, 0.0, pair, losses.ctypes.data, counts, 0)

    @property
    def reward(self) -> float:
        """R(X)."""
        return float(self._search.r_x)

    def decide(self, models: np.ndarray, p: np.ndarray, coins: np.ndarray, most: int) -> np.ndarray:
        """Decide candidates in their order until `most` are added, and return of those decided whether they were, bool.

        Args:
            models: where each one's row of float32 `[W]` lies in memory, uint64 `[c]`.
            p: their weights, float64 `[c]`.
            coins: in [0, 1), float64 `[c]`.
        """
        native, count = self._native, len(models)
        added = np.zeros(count, bool)
        given = ((models, "uint64"), (p, "float64"), (coins, "float64"), (added, "bool"))
        *candidates, out = (_address(array, dtype, (count,)) for array, dtype in given)
        where = self._images, self._n, native._work
        return added[: native._call.search(native._net, self._search, *candidates, count, most, out, *where)]


def describe(module: nn.Module, shape: tuple[int, ...], dtype: str) -> tuple[Plan, int]:
    """Return the plan of a model for samples of a shape and dtype, and its classes; one that the library cannot compute is a `UserError`."""
    try:
        (ops, logits, sample), (scores, *_) = (trace(module, shape, dtype, KNOWN, trains) for trains in (True, False))
        if [op.kind for op in ops if op.kind != "drop"] != [op.kind for op in scores]:
            raise Unknown("a forward that does other things in training than in scoring")
        classes = math.prod(logits.shape)
        return plan(ops, logits, sample, shape, dtype, classes), classes
    except Unknown as error:
        raise UserError(f"the CPU kernels have no layer for {error}") from error
    except Exception as error:  # whatever it is, PyTorch computes the model
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"the CPU kernels cannot plan {type(module).__name__} ({why})") from error


def _address(array: Array, dtype: str, shape: tuple[int, ...]) -> int:
    """Return where an array's memory starts; an array that is not exactly this would be read as something else."""
    if isinstance(array, Tensor):
        same, contiguous, where = array.dtype is getattr(torch, dtype), array.is_contiguous(), array.data_ptr()
    else:  # `array.ctypes.data`, in a fifth of the time
        same, contiguous = array.dtype == dtype, array.flags.c_contiguous
        where = array.__array_interface__["data"][0]
    if not same or tuple(array.shape) != shape or not contiguous:
        raise ValueError(f"an array {array.dtype} {tuple(array.shape)}, not {dtype} {shape} without gaps")
    return where
