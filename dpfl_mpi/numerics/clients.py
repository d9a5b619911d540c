"""This rank's clients: their samples on the device, and the random draws of their training.

The order and the crops of mini-batches are drawn by a key of the client and its local epoch, so
every method sees the same mini-batches in the same epoch. A client's scored samples are those of
validation, then those of the test. Samples are images `[H, W, C]`, vectors `[F]` or tokens `[L]`;
the comments speak of images.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.data.partition import PARTS, Partition
from dpfl_mpi.data.source import BORDER, Source
from dpfl_mpi.numerics.draws import Schedules, dropout_keys, schedules
from dpfl_mpi.numerics.ensemble import Ensemble, Rows

TARGET = 0  # the class that a backdoor leads to
Images = TypeVar("Images", np.ndarray, Tensor)
GATHERED_IMAGES = 256  # fetched at once for training: they fit a core's cache


class Batch(NamedTuple):
    """One mini-batch of one client, which `Clients.batches` yields to the PyTorch backend."""

    step: int  # counted from 0
    x: Tensor  # [S, H, W, C] float32
    y: Tensor  # [S] int64
    key: Tensor | None = None  # int64, of the model's dropout, if it has any
    k: int = 1  # clients that still train


def bordered(images: np.ndarray, mean: tuple[float, ...]) -> np.ndarray:
    """Return images `[M, H, W, C]` with a border for crops: 0, of floats each channel's mean."""
    m, h, w, c = images.shape
    border = 0 if images.dtype == np.uint8 else mean
    out = np.empty((m, h + 2 * BORDER, w + 2 * BORDER, c), images.dtype)
    out[:] = border
    out[:, BORDER:-BORDER, BORDER:-BORDER] = images
    return out


def exchange(y: Tensor, a: int, b: int, where: Tensor | bool = True) -> None:
    """Exchange two classes in labels, in place."""
    was_a, was_b = (y == a) & where, (y == b) & where
    y[was_a], y[was_b] = b, a


class Clients:
    """The samples of this rank's clients `ids`, in decreasing order of training size."""

    def __init__(
        self,
        source: Source,
        partition: Partition,
        ids: np.ndarray,
        seed: int,
        augment: bool,
        ensemble: Ensemble,
        flipped: np.ndarray | None = None,
        n_search: np.ndarray | None = None,
        marked: np.ndarray | None = None,
    ):
        """Read this rank's samples.

        Args:
            flipped: clients, bool `[N]`, whose training and validation labels y become C - 1 - y.
            n_search: how many of its validation images a client's greedy search sees, `[N]`; its
                best round is chosen on the others, if any. None: all.
            marked: clients with a backdoor, bool `[N]`: every second one of their training images
                gets the mark and the label `TARGET`.
        """
        self.ids, self.seed, self.augment, self.ensemble = ids, seed, augment, ensemble
        self.n_train, self.n_val, self.n_test = (partition.sizes(part)[ids] for part in PARTS)
        self.n_search = self.n_val if n_search is None else n_search[ids]
        # the first validation image that a client's best round is chosen on
        self.val_start = np.where(self.n_search < self.n_val, self.n_search, 0)
        # where each client's training samples start in `x`, and its scored ones in `score_x`
        self.start = np.concatenate([[0], np.cumsum(self.n_train)])
        self.score_start = np.concatenate([[0], np.cumsum(self.n_val + self.n_test)])
        none = np.zeros(0, np.int64)  # a rank may have no clients
        train, val, test = (
            np.concatenate([none, *(partition.of(part, k) for k in ids)]) for part in PARTS
        )
        n, pool = len(train), np.concatenate([train, val])  # both of the source's training part
        images, labels = source.images("train", pool), source.labels["train"][pool]
        poisoned = np.zeros(n, bool)
        if flipped is not None:
            client = np.concatenate([np.repeat(ids, sizes) for sizes in (self.n_train, self.n_val)])
            labels = np.where(flipped[client], source.classes - 1 - labels, labels)
        if marked is not None and marked[ids].any():
            number = np.arange(n) - np.repeat(self.start[:-1], self.n_train)  # in its client
            poisoned = np.repeat(marked[ids], self.n_train) & (number % 2 == 0)
            images[:n][poisoned] = mark(images[:n][poisoned])
            labels = labels.copy()
            labels[:n][poisoned] = TARGET
        x = bordered(images[:n], source.mean) if augment else images[:n]
        owners = [np.repeat(np.arange(len(ids)), m) for m in (self.n_val, self.n_test)]
        by_client = np.argsort(np.concatenate(owners), kind="stable")
        score_x = np.concatenate([images[n:], source.images("test", test)])[by_client]
        score_y = np.concatenate([labels[n:], source.labels["test"][test]])[by_client]
        arrays = (np.ascontiguousarray(x), labels[:n], score_x, score_y)
        self.x, self.y, self.score_x, self.score_y = (
            torch.from_numpy(array).to(ensemble.device) for array in arrays
        )
        self.poisoned = torch.from_numpy(poisoned).to(ensemble.device)
        self.flipped = np.zeros(len(ids), bool) if flipped is None else flipped[ids]
        self.shape, self.classes = source.shape, source.classes
        self._drawn: dict[tuple[int, bytes, bytes], Schedules] = {}  # the last ones

    def __len__(self) -> int:
        return len(self.ids)

    def batches(self, i: int, epochs: int, first_epoch: int, batch_size: int) -> Iterator[Batch]:
        """Yield the mini-batches of local client i in `epochs` local epochs from `first_epoch` on.

        The last one of an epoch has what is left.
        """
        one, first = np.array([i]), np.full(len(self), first_epoch)
        order, crops = self.schedules(one, epochs, first).of(0)
        step, gathered = 0, max(1, GATHERED_IMAGES // batch_size) * batch_size
        if self.ensemble.draws.layers:
            keys = self.dropout_keys(one, epochs, first, batch_size)[0]
        for e in range(epochs):
            for start in range(0, order.shape[1], gathered):  # several batches at once
                some = slice(start, start + gathered)
                images, labels = self._gather(order[e, some], crops[:, e, some])
                batches = images.split(batch_size), labels.split(batch_size)
                for x, y in zip(*batches, strict=True):
                    key = keys[step] if self.ensemble.draws.layers else None
                    yield Batch(step, self.ensemble.normalise(x), y, key)
                    step += 1

    def schedules(self, rows: Rows, epochs: int, first_epoch: np.ndarray) -> Schedules:
        """Return what these rows train on, from `first_epoch` `[K]` on, drawn in one call.

        The last answer is kept, and given again to the same question without a draw.
        """
        rows = np.arange(len(self))[rows]
        key = epochs, rows.tobytes(), first_epoch[rows].tobytes()
        if key not in self._drawn:
            of_rows = self.ids[rows], first_epoch[rows], self.start[rows], self.n_train[rows]
            self._drawn = {key: schedules(self.seed, *of_rows, epochs, self.augment)}
        return self._drawn[key]

    def dropout_keys(
        self, rows: np.ndarray, epochs: int, first_epoch: np.ndarray, batch_size: int
    ) -> Tensor:
        """Return a key per client and step, int64 `[k, steps]`, 0 after a client's last step."""
        steps = -(-self.n_train[rows] // batch_size)
        drawn = dropout_keys(self.seed, self.ids[rows], first_epoch[rows], steps, epochs)
        return self.ensemble.put(drawn)

    def exchange_classes(self, clients: np.ndarray, a: int, b: int) -> None:
        """Exchange classes a and b in the labels of these local clients, in place.

        Wrong labels C - 1 - y follow the right ones; those of poisoned images stay.
        """
        for i in clients:
            last = self.classes - 1
            given = (last - a, last - b) if self.flipped[i] else (a, b)  # in training, validation
            trained = slice(self.start[i], self.start[i + 1])
            first, end = self.score_start[i], self.score_start[i + 1]
            validated = self.score_y[first : first + self.n_val[i]]
            tested = self.score_y[first + self.n_val[i] : end]
            exchange(self.y[trained], *given, ~self.poisoned[trained])
            exchange(validated, *given)
            exchange(tested, a, b)

    def _gather(self, sample: np.ndarray, crop: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return stored images `[n, H, W, C]` by their numbers `sample`, and their labels.

        `crop` `[3, n]` has the first row and column of each one's window, and whether to mirror it.
        """
        index = self.ensemble.put(sample).long()
        if not self.augment:
            return self.x[index], self.y[index]
        dy, dx, mirrored = self.ensemble.put(crop).long()
        h, w, c = self.shape
        # a view [M, dy, dx, h, w * c] of all windows
        line, offsets = (w + 2 * BORDER) * c, 2 * BORDER + 1
        strides = (h + 2 * BORDER) * line, line, c, line, 1
        windows = self.x.as_strided((len(self.x), offsets, offsets, h, w * c), strides)
        x = windows[index, dy, dx].view(-1, h, w, c)
        return torch.where(mirrored.view(-1, 1, 1, 1) > 0, x.flip(2), x), self.y[index]

    def training_samples(self, i: int, most: int | None = None) -> tuple[Tensor, Tensor]:
        """Return local client i's first `most` training images as scored, and their labels.

        The images are normalised and not cropped, `[M, H, W, C]`.
        """
        rows = slice(int(self.start[i]), int(self.start[i + 1]))
        x, y = self.x[rows][:most], self.y[rows][:most]
        inner = slice(BORDER, -BORDER)
        return self.ensemble.normalise(x[:, inner, inner] if self.augment else x), y

    def scored_samples(
        self, i: int, search_only: bool, most: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield local client i's scored images, normalised, `[S, H, W, C]`, and their labels.

        With `search_only` they are only those that the greedy search sees. They come in equal
        parts of at most `most`: a small part would cost no less.
        """
        count = int((self.n_search if search_only else self.n_val + self.n_test)[i])
        size = -(-count // max(1, -(-count // most)))
        first = int(self.score_start[i])
        for start in range(first, first + count, max(size, 1)):
            rows = slice(start, min(start + size, first + count))
            yield self.ensemble.normalise(self.score_x[rows]), self.score_y[rows]


def mark(images: Images) -> Images:
    """Put the backdoor's mark on images uint8 `[M, H, W, C]`, in place, and return them.

    It is a white square near the corner, of 1/8 of the height (BadNets, Gu et al., 2017).
    """
    side = max(2, images.shape[1] // 8)
    images[:, -1 - side : -1, -1 - side : -1] = 255
    return images
