"""This rank's clients: their samples on the device, p_k, and the keyed random streams that every draw comes from.

Batch order and augmentation are counted by the client's local epoch since the common initial row, so every method sees the same batches in the
same epoch. Samples may be vectors `[F]` or tokens `[L]` in place of images `[H, W, C]`.
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
from dpfl_mpi.numerics.ensemble import Ensemble, Rows
from dpfl_mpi.streams import AUGMENT, DROPOUT, ORDER, stream

TARGET = 0  # the class that a backdoor leads to
Images = TypeVar("Images", np.ndarray, Tensor)
GATHERED_IMAGES = {"cpu": 256, "cuda": 2**15}  # images fetched at once for training: within a core's cache; 100 MB of a GPU


@dataclass(frozen=True)
class Batch:
    """One step of the first k clients of a block: images, labels, and weights (1 / size of the batch, 0 for padding)."""

    k: int
    step: int  # counted from 0 for each block
    x: Tensor  # [k, S, H, W, C] float32
    y: Tensor  # [k, S] int64
    weight: Tensor  # [k, S] float32
    key: Tensor | None = None  # [k] int64, of the model's dropout; None where it has none


class Clients:
    """The samples of this rank's clients (`ids`, in decreasing order of training size) and what is drawn for them."""

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
        """Read this rank's samples; `flipped` `[N]` marks clients whose training and validation labels are y -> C - 1 - y.

        Of each client's validation images the greedy search sees the first `n_search` `[N]` (None: all); its round is chosen on the rest, if
        any. `marked` `[N]` are clients with a backdoor: every second training image has the mark, and the label `TARGET`.
        """
        self.ids, self.seed, self.augment, self.ensemble = ids, seed, augment, ensemble
        self.n_train, self.n_val, self.n_test = (partition.sizes(part)[ids] for part in PARTS)
        self.n_search = self.n_val if n_search is None else n_search[ids]
        # the first validation image that a client's best round is chosen on
        self.val_start = np.where(self.n_search < self.n_val, self.n_search, 0)
        self.start = np.concatenate([[0], np.cumsum(self.n_train)])  # of each client's training samples
        self.scored = np.concatenate([[0], np.cumsum(self.n_val + self.n_test)])  # of its validation and test samples
        none = np.zeros(0, np.int64)  # of a rank without clients
        train, val, test = (np.concatenate([none, *(partition.of(part, k) for k in ids)]) for part in PARTS)
        n, pool = len(train), np.concatenate([train, val])
        images, labels = source.images("train", pool), source.labels["train"][pool]
        if flipped is not None:
            of = np.concatenate([np.repeat(ids, n_part) for n_part in (self.n_train, self.n_val)])
            labels = np.where(flipped[of], source.classes - 1 - labels, labels)
        if marked is not None and marked[ids].any():
            at = np.arange(n) - np.repeat(self.start[:-1], self.n_train)
            poisoned = np.flatnonzero(np.repeat(marked[ids], self.n_train) & (at % 2 == 0))
            images[poisoned] = mark(images[poisoned])
            labels = labels.copy()
            labels[poisoned] = TARGET
        trained = np.pad(images[:n], ((0, 0), (BORDER, BORDER), (BORDER, BORDER), (0, 0))) if augment else images[:n]
        client = np.concatenate([np.repeat(np.arange(len(ids)), m) for m in (self.n_val, self.n_test)])
        both = np.argsort(client, kind="stable")
        scored = np.concatenate([images[n:], source.images("test", test)])[both]
        scored_labels = np.concatenate([labels[n:], source.labels["test"][test]])[both]
        arrays = (np.ascontiguousarray(trained), labels[:n], scored, scored_labels)
        self.x, self.y, self.score_x, self.score_y = (torch.from_numpy(a).to(ensemble.device) for a in arrays)
        self.shape = source.shape

    def __len__(self) -> int:
        return len(self.ids)

    def batches(
        self, block: Rows, epochs: int, first_epoch: np.ndarray, batch_size: int, pad: bool = False
    ) -> Iterator[Batch]:
        """Yield the steps of `epochs` local epochs of these rows, each at its own pace; those that have finished leave from the end.

        `first_epoch` `[K]`: epochs behind each. A batch of one client has its true size; else, or with `pad`, it is padded with weight 0.
        """
        rows = np.arange(len(self))[block]
        steps = epochs * -(-self.n_train[rows] // batch_size)
        most = int(steps.max(initial=0))
        sample = np.repeat(self.start[rows], most * batch_size).reshape(len(rows), most, batch_size)
        crop = np.zeros((3, len(rows), most, batch_size), np.uint8)
        weight = np.zeros((len(rows), most, batch_size), np.float32)
        in_a_row = [of.reshape(*of.shape[:-2], -1) for of in (sample, crop, weight)]  # views: [..., k, steps * S]
        keys = self.keys(rows, epochs, first_epoch, batch_size) if self.ensemble.draws.layers else None
        at_once = max(1, GATHERED_IMAGES[self.x.device.type] // (len(rows) * batch_size))
        for first in range(0, most, at_once):
            k = int((steps > first).sum())
            now = slice(first, min(first + at_once, most))
            for j in range(k):  # draw the epochs that begin now: a GPU meanwhile computes the steps before
                i, of_epoch = int(rows[j]), int(steps[j]) // epochs
                for e in range(-(-first // of_epoch), min(epochs, -(-now.stop // of_epoch))):
                    order, crops = self.schedule(i, 1, int(first_epoch[i]) + e)
                    at = e * of_epoch * batch_size
                    for of, drawn in zip(in_a_row, (order[0], crops[:, 0], 1), strict=True):
                        of[..., j, at : at + order.size] = drawn
            part = weight[:k, now] / np.maximum(weight[:k, now].sum(2, keepdims=True), 1)
            w = self.ensemble.put(part)
            x, y = self._gather(sample[:k, now], crop[:, :k, now])
            for j, step in enumerate(range(now.start, now.stop)):
                k = int((steps > step).sum())
                size = int(np.count_nonzero(weight[0, step])) if len(rows) == 1 and not pad else batch_size
                images = self.ensemble.normalise(x[:k, j, :size])
                key = None if keys is None else keys[:k, step]
                yield Batch(k, step, images, y[:k, j, :size], w[:k, j, :size], key)

    def schedule(self, i: int, epochs: int, first_epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what local client i trains on: samples, int32 `[epochs, n]`, and (dy, dx, flip) of each, uint8 `[3, epochs, n]`."""
        n, client = int(self.n_train[i]), int(self.ids[i])
        order, crops = np.empty((epochs, n), np.int32), np.zeros((3, epochs, n), np.uint8)
        for e in range(epochs):
            order[e] = self.start[i] + stream(self.seed, ORDER, client, first_epoch + e).permutation(n)
            if self.augment:
                rng = stream(self.seed, AUGMENT, client, first_epoch + e)
                crops[:2, e] = rng.integers(0, 2 * BORDER + 1, (2, n))
                crops[2, e] = rng.integers(0, 2, n)
        return order, crops

    def keys(self, rows: np.ndarray, epochs: int, first_epoch: np.ndarray, batch_size: int) -> Tensor:
        """Return the key of dropout in each step of these rows, int64 `[k, steps]`: drawn by client, epoch and step, 0 behind its last."""
        steps = -(-self.n_train[rows] // batch_size)
        out = np.zeros((len(rows), epochs * int(steps.max(initial=0))), np.int64)
        for j, i in enumerate(rows):
            for e in range(epochs):
                rng = stream(self.seed, DROPOUT, int(self.ids[i]), int(first_epoch[i]) + e)
                out[j, e * steps[j] : (e + 1) * steps[j]] = rng.integers(0, 2**63, steps[j])
        return self.ensemble.put(out)

    def exchange_classes(self, clients: np.ndarray, a: int, b: int) -> None:
        """Give these local clients label b where they had label a, and a where they had b: the arrays stay where they are."""
        for i in clients:
            for y in (self.y[self.start[i] : self.start[i + 1]], self.score_y[self.scored[i] : self.scored[i + 1]]):
                was_a, was_b = y == a, y == b
                y[was_a], y[was_b] = b, a

    def _gather(self, sample: np.ndarray, crop: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return images as they are stored, `[k, steps, S, H, W, C]`, cropped and flipped in one gather, and their labels."""
        index = self.ensemble.put(sample)
        if not self.augment:
            return self.x[index], self.y[index]
        dy, dx, flipped = self.ensemble.put(crop).long()
        h, w, c = self.shape
        line, offsets = (w + 2 * BORDER) * c, 2 * BORDER + 1
        strides = (h + 2 * BORDER) * line, line, c, line, 1
        places = self.x.as_strided((len(self.x), offsets, offsets, h, w * c), strides)
        x = places[index, dy, dx].view(-1, h, w, c)
        x = torch.where(flipped.view(-1, 1, 1, 1) > 0, x.flip(2), x)
        return x.view(*sample.shape, h, w, c), self.y[index]

    def training(self, i: int, most: int) -> tuple[Tensor, Tensor]:
        """Return local client i's training images as they are scored, `[S, H, W, C]` normalised, and labels `[S]`; at most `most`."""
        rows = slice(int(self.start[i]), int(min(self.start[i + 1], self.start[i] + most)))
        x = self.x[rows, BORDER:-BORDER, BORDER:-BORDER] if self.augment else self.x[rows]
        return self.ensemble.normalise(x), self.y[rows]

    def scoring(self, block: slice, search_only: bool, chunk: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield `(x [n, S, H, W, C] normalised, y [n, S], mask)` of validation (`search_only`: the search's) and test sets, in parts up to `chunk`:
        those of the block's first n clients, behind whom nobody has images left."""
        counts = (self.n_search if search_only else self.n_val + self.n_test)[block]
        starts = self.scored[:-1][block]
        most = int(counts.max(initial=0))
        part = -(-most // max(1, -(-most // chunk)))  # equal: a last one of a few images costs as much as a full one
        for first in range(0, most, max(part, 1)):
            s = min(part, most - first)
            at = first + np.arange(s)
            n = int(np.flatnonzero(counts > first)[-1]) + 1
            mask = at < counts[:n, None]
            index = self.ensemble.put(starts[:n, None] + np.where(mask, at, 0))
            images = self.ensemble.normalise(self.score_x[index])
            yield images, self.score_y[index], self.ensemble.put(mask)


def mark(images: Images) -> Images:
    """Put the backdoor's mark on images uint8 `[M, H, W, C]` and return them: a white square near the corner, of 1/8 of the height (BadNets, Gu et al., 2017)."""
    side = max(2, images.shape[1] // 8)
    images[:, -1 - side : -1, -1 - side : -1] = 255
    return images
