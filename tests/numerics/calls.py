"""The calls of the kernels for one client, whose samples, order and crops a test gives."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.numerics.backend import LocalEpochs, Proximal
from dpfl_mpi.numerics.draws import Schedules
from dpfl_mpi.numerics.ensemble import Block
from dpfl_mpi.numerics.kernels import SEARCH, Searches
from dpfl_mpi.numerics.native_backend import NativeBackend
from dpfl_mpi.numerics.optimiser import SGD

ONE, FIRST = slice(0, 1), np.zeros(1, np.int64)


class Rule(NamedTuple):
    """How a step follows from a gradient g: by the optimiser, along g + mu (w - towards)."""

    optimiser: SGD
    lr: float
    trained: Tensor | None = None
    towards: Tensor | None = None
    mu: float = 0.0


class Seen(NamedTuple):
    """What a client sees of its samples."""

    order: np.ndarray  # int32 [epochs, n]
    crop: np.ndarray | None = None  # uint8 [3, epochs, n]; None: none is moved
    keys: np.ndarray | None = None  # int64 [steps], of dropout


class Samples:
    """One client's samples, as of `Clients`."""

    def __init__(self, shape, x, y):
        self.shape, self.x, self.y = shape, torch.from_numpy(x), torch.from_numpy(y)
        self.score_x, self.score_y = self.x, self.y
        self.start = self.score_start = np.array([0, len(y)])
        self.n_train = self.n_search = np.array([len(y)])
        self.border = x.shape[1] - shape[0] if len(shape) == 3 else 0

    def __len__(self):
        return 1

    def see(self, seen):
        """Let its next epochs be these."""
        order, crop, keys = seen
        if crop is None:
            crop = np.zeros((3, *order.shape), np.uint8)
            crop[:2] = self.border // 2
        self.n_train = np.array([order.shape[1]])
        self.drawn = Schedules(
            order.reshape(-1), crop.reshape(-1), np.array([0, order.shape[1]]), len(order)
        )
        self.keys = np.zeros(order.size, np.int64) if keys is None else keys

    def schedules(self, rows, epochs, first):
        return self.drawn

    def dropout_keys(self, *_):
        return torch.from_numpy(self.keys)[None]


class OneClient:
    """A `NativeBackend` of one client; rows `[W]` are trained in place."""

    def __init__(self, ensemble, shape, x, y, make=None):
        self.ensemble, self.samples = ensemble, Samples(shape, x, y)
        self.backend = NativeBackend(ensemble, self.samples, SGD(1, 0, 0, 0), make)
        self.kernels = self.backend.kernels

    def train(self, w, m, seen, rule):
        block, epochs = self._block(w, m), self._epochs(seen, rule)
        pull = None if rule.towards is None else Proximal(self.backend, rule.towards, rule.mu)
        self.backend.train_epochs(block, epochs, pull, rule.trained)
        return float(block.loss)

    def mix(self, w, v, share, seen, rule):
        """Train two rows, each with its momentum; return their losses."""
        blocks, shares = [self._block(*w), self._block(*v)], torch.tensor([[share]]).double()
        self.backend.train_mixed(*blocks, shares, self._epochs(seen, rule), None)
        return [float(block.loss) for block in blocks]

    def ahead(self, w, m, inner, seen, rule):
        block = self._block(w, m)
        self.backend.train_ahead(block, inner, self._epochs(seen, rule))
        return float(block.loss)

    def gradient(self, w, g, order, crop=None, key=None):
        """Write the gradient of a mini-batch `order` `[n]` into g; return its loss."""
        block = self._block(w)
        block.g = g[None]
        return float(self.backend.gradient(block, self._batch(order, crop, key)))

    def descents(self, w, towards, pull, rate, steps, order, key=None):
        block = self._block(w)
        given = self._batch(order, None, key), steps, rate, towards[None], pull
        self.backend.descents(block, *given)
        return float(block.loss)

    def step(self, w, m, g, rule):
        block, self.backend.optimiser = self._block(w, m), rule.optimiser
        block.g = g[None]
        self.backend.step(block, torch.zeros(1), rule.lr, rule.trained)

    def score(self, rows, order, head=False, **asked):
        """Return what `Kernels.score` does of rows `[m, W]` on samples `[n]`, as `[m, n, ...]`.

        With `head`, also the features that the last dense layer reads.
        """
        read = self.kernels.read_by(max(self.kernels.plan.features)) if head else None
        scores = self.kernels.score(rows[None], self._chosen(order), ONE, read=read, **asked)
        return {name: of[0].unflatten(0, (len(rows), -1)).numpy() for name, of in scores.items()}

    def candidate(self, x, y, w, p, p_x, p_y, pair):
        given, shares = (of[None] for of in (x, y, w)), [np.array([of]) for of in (p, p_x, p_y)]
        return [of[0] for of in self.backend.candidate(*given, shares, pair[None])]

    def chooser(self, order, x, y, pair, p_x, p_y, cases):
        start = x[None], y[None], pair[None], np.array([p_x]), np.array([p_y])
        tasks = self.kernels.tasks(SEARCH, self._chosen(order), ONE)
        return Searches(self.kernels, tasks, start, cases[None])

    def _block(self, w, m=None):
        return Block(self.ensemble, w[None], None if m is None else m[None], ONE)

    def _epochs(self, seen, rule):
        self.samples.see(seen)
        self.backend.optimiser = rule.optimiser
        return LocalEpochs(len(seen.order), FIRST, rule.lr)

    def _batch(self, order, crop, key):
        moved = None if crop is None else crop[:, None]
        self._epochs(Seen(order[None], moved, key), Rule(SGD(len(order), 0, 0, 0), 0.0))
        return next(self.backend.batches(ONE, 1, FIRST))

    def _chosen(self, order):
        """Return the samples of these numbers."""
        x, y = (of[torch.from_numpy(order).long()] for of in (self.samples.x, self.samples.y))
        return self.kernels.images(x, y, FIRST, np.array([len(order)]))
