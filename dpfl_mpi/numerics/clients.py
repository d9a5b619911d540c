"""This rank's clients: their samples on the device, and the keyed random draws of their training.

The order and augmentation of mini-batches are keyed by the client's local epoch, so every method
sees the same mini-batches in the same epoch. Samples are images `[H, W, C]`, vectors `[F]` or
tokens `[L]`; the comments speak of images.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.data.partition import PARTS, Partition
from dpfl_mpi.data.source import Source
from dpfl_mpi.numerics import BORDER
from dpfl_mpi.numerics.draws import Schedules, dropout_keys, schedules
from dpfl_mpi.numerics.ensemble import Ensemble, Rows

TARGET = 0  # the class that a backdoor leads to
Images = TypeVar("Images", np.ndarray, Tensor)
# fetched at once for training: what fits a core's cache, or 100 MB of a GPU
GATHERED_IMAGES = {"cpu": 256, "cuda": 2**15}


@dataclass(frozen=True)
class Batch:
    """One training step of the first k clients of a block."""

    k: int
    step: int  # counted from 0 for each block
    x: Tensor  # [k, S, H, W, C] float32
    y: Tensor  # [k, S] int64
    weight: Tensor  # [k, S] float32: 1 / size of the mini-batch, 0 for padding
    key: Tensor | None = None  # [k] int64, of the model's dropout, if it has any


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
            flipped: clients, bool `[N]`, whose training and validation labels are C - 1 - y.
            n_search: how many of its validation images a client's greedy search sees, `[N]`; its
                best round is chosen on the others, if any. None: all.
            marked: clients, bool `[N]`, with a backdoor: every second training image has the mark
                and the label `TARGET`.
        """
        self.ids, self.seed, self.augment, self.ensemble = ids, seed, augment, ensemble
        self.n_train, self.n_val, self.n_test = (partition.sizes(part)[ids] for part in PARTS)
        self.n_search = self.n_val if n_search is None else n_search[ids]
        # the first validation image that a client's best round is chosen on
        self.val_start = np.where(self.n_search < self.n_val, self.n_search, 0)
        self.start = np.concatenate([[0], np.cumsum(self.n_train)])  # of training samples
        self.scored = np.concatenate([[0], np.cumsum(self.n_val + self.n_test)])  # of the others
        none = np.zeros(0, np.int64)  # of a rank without clients
        train, val, test = (
            np.concatenate([none, *(partition.of(part, k) for k in ids)]) for part in PARTS
        )
        n, pool = len(train), np.concatenate([train, val])
        images, labels = source.images("train", pool), source.labels["train"][pool]
        if flipped is not None:
            client = np.concatenate([np.repeat(ids, sizes) for sizes in (self.n_train, self.n_val)])
            labels = np.where(flipped[client], source.classes - 1 - labels, labels)
        if marked is not None and marked[ids].any():
            place = np.arange(n) - np.repeat(self.start[:-1], self.n_train)
            poisoned = np.flatnonzero(np.repeat(marked[ids], self.n_train) & (place % 2 == 0))
            images[poisoned] = mark(images[poisoned])
            labels = labels.copy()
            labels[poisoned] = TARGET
        border = (BORDER, BORDER)
        x = np.pad(images[:n], ((0, 0), border, border, (0, 0))) if augment else images[:n]
        client = np.concatenate(
            [np.repeat(np.arange(len(ids)), m) for m in (self.n_val, self.n_test)]
        )
        by_client = np.argsort(client, kind="stable")
        score_x = np.concatenate([images[n:], source.images("test", test)])[by_client]
        score_y = np.concatenate([labels[n:], source.labels["test"][test]])[by_client]
        arrays = (np.ascontiguousarray(x), labels[:n], score_x, score_y)
        self.x, self.y, self.score_x, self.score_y = (
            torch.from_numpy(array).to(ensemble.device) for array in arrays
        )
        self.shape = source.shape

    def __len__(self) -> int:
        return len(self.ids)

    def batches(
        self,
        block: Rows,
        epochs: int,
        first_epoch: np.ndarray,
        batch_size: int,
        padded: bool = False,
    ) -> Iterator[Batch]:
        """Yield the steps of `epochs` local epochs of these rows, from `first_epoch` `[K]` on.

        Clients that have finished leave from the end. A mini-batch of one client has its true size;
        those of several, or `padded` ones, are filled up with weight 0.
        """
        rows = np.arange(len(self))[block]
        steps = epochs * -(-self.n_train[rows] // batch_size)
        most = int(steps.max(initial=0))
        shape = (len(rows), most, batch_size)
        sample = np.repeat(self.start[rows], most * batch_size).reshape(shape)
        crop, weight = np.zeros((3, *shape), np.uint8), np.zeros(shape, np.float32)
        # views [..., k, steps * S]
        flat = [part.reshape(*part.shape[:-2], -1) for part in (sample, crop, weight)]
        keys = None
        if self.ensemble.draws.layers:
            keys = self.dropout_keys(rows, epochs, first_epoch, batch_size)
        stride = max(1, GATHERED_IMAGES[self.x.device.type] // (len(rows) * batch_size))
        for first in range(0, most, stride):
            k, end = int((steps > first).sum()), min(first + stride, most)
            for j in range(k):  # draw the epochs that begin now, while a GPU computes earlier steps
                i, of_epoch = int(rows[j]), int(steps[j]) // epochs
                for e in range(-(-first // of_epoch), min(epochs, -(-end // of_epoch))):
                    order, crops = self.schedule(i, 1, int(first_epoch[i]) + e)
                    at = e * of_epoch * batch_size
                    for part, drawn in zip(flat, (order[0], crops[:, 0], 1), strict=True):
                        part[..., j, at : at + order.size] = drawn
            of_steps = weight[:k, first:end]
            mean = self.ensemble.put(of_steps / np.maximum(of_steps.sum(2, keepdims=True), 1))
            x, y = self._gather(sample[:k, first:end], crop[:, :k, first:end])
            for j, step in enumerate(range(first, end)):
                k, size = int((steps > step).sum()), batch_size
                if len(rows) == 1 and not padded:
                    size = int(np.count_nonzero(weight[0, step]))
                images = self.ensemble.normalise(x[:k, j, :size])
                key = None if keys is None else keys[:k, step]
                yield Batch(k, step, images, y[:k, j, :size], mean[:k, j, :size], key)

    def schedule(self, i: int, epochs: int, first_epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what local client i trains on: samples, int32 `[epochs, n]`, and their crops.

        The crops are (dy, dx, flip), uint8 `[3, epochs, n]`.
        """
        return self._schedules(np.array([i]), epochs, np.array([first_epoch])).of(0)

    def schedules(self, rows: Rows, epochs: int, first_epoch: np.ndarray) -> Schedules:
        """Return what these rows train on, from `first_epoch` `[K]` on, drawn in one call."""
        rows = np.arange(len(self))[rows]
        return self._schedules(rows, epochs, first_epoch[rows])

    def _schedules(self, rows: np.ndarray, epochs: int, first: np.ndarray) -> Schedules:
        places = self.start[rows], self.n_train[rows]
        return schedules(self.seed, self.ids[rows], first, *places, epochs, self.augment)

    def dropout_keys(
        self, rows: np.ndarray, epochs: int, first_epoch: np.ndarray, batch_size: int
    ) -> Tensor:
        """Return a key per client and step, int64 `[k, steps]`, 0 after a client's last step."""
        steps = -(-self.n_train[rows] // batch_size)
        drawn = dropout_keys(self.seed, self.ids[rows], first_epoch[rows], steps, epochs)
        return self.ensemble.put(drawn)

    def exchange_classes(self, clients: np.ndarray, a: int, b: int) -> None:
        """Exchange the labels a and b of these local clients, in place."""
        for i in clients:
            trained = self.y[self.start[i] : self.start[i + 1]]
            scored = self.score_y[self.scored[i] : self.scored[i + 1]]
            for y in (trained, scored):
                was_a, was_b = y == a, y == b
                y[was_a], y[was_b] = b, a

    def _gather(self, sample: np.ndarray, crop: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return stored images `[k, steps, S, H, W, C]`, cropped and flipped, and their labels."""
        index = self.ensemble.put(sample)
        if not self.augment:
            return self.x[index], self.y[index]
        dy, dx, flipped = self.ensemble.put(crop).long()
        h, w, c = self.shape
        line, offsets = (w + 2 * BORDER) * c, 2 * BORDER + 1
        strides = (h + 2 * BORDER) * line, line, c, line, 1
        windows = self.x.as_strided((len(self.x), offsets, offsets, h, w * c), strides)
        x = windows[index, dy, dx].view(-1, h, w, c)
        x = torch.where(flipped.view(-1, 1, 1, 1) > 0, x.flip(2), x)
        return x.view(*sample.shape, h, w, c), self.y[index]

    def training_samples(self, i: int, most: int | None = None) -> tuple[Tensor, Tensor]:
        """Return local client i's first `most` training images as scored, and their labels.

        The images are normalised and not cropped, `[M, H, W, C]`.
        """
        rows = slice(int(self.start[i]), int(self.start[i + 1]))
        x, y = self.x[rows][:most], self.y[rows][:most]
        inner = slice(BORDER, -BORDER)
        return self.ensemble.normalise(x[:, inner, inner] if self.augment else x), y

    def scored_samples(
        self, block: slice, search_only: bool, most: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield normalised images `[n, S, H, W, C]`, labels and a mask of padding, both `[n, S]`.

        These are the block's validation and test images, or with `search_only` those that the
        search sees, in parts of at most `most`. They are of the block's first n clients; those
        behind have no images left.
        """
        counts = (self.n_search if search_only else self.n_val + self.n_test)[block]
        starts = self.scored[:-1][block]
        total = int(counts.max(initial=0))
        size = -(-total // max(1, -(-total // most)))  # equal parts: a small one costs no less
        for first in range(0, total, max(size, 1)):
            at = np.arange(first, min(first + size, total))
            n = int(np.flatnonzero(counts > first)[-1]) + 1
            mask = at < counts[:n, None]
            index = self.ensemble.put(starts[:n, None] + np.where(mask, at, 0))
            images = self.ensemble.normalise(self.score_x[index])
            yield images, self.score_y[index], self.ensemble.put(mask)


def mark(images: Images) -> Images:
    """Put the backdoor's mark on images uint8 `[M, H, W, C]`, in place, and return them.

    It is a white square near the corner, of 1/8 of the height (BadNets, Gu et al., 2017).
    """
    side = max(2, images.shape[1] // 8)
    images[:, -1 - side : -1, -1 - side : -1] = 255
    return images
