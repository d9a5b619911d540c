"""`Backend`: what computes a rank's clients, here in PyTorch: training steps, scores and rewards, a block of clients at a time; its optimisers.

A subclass computes them in another way: `native_backend.NativeBackend` (C, on a CPU) and `recorded.RecordedBackend` (CUDA graphs).
Axes: K clients on this rank, k in a block, W row width, S images, H W C image, C classes, m models scored on one client's images.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dpfl_mpi.numerics.clients import Batch, Clients
from dpfl_mpi.numerics.ensemble import Block, Ensemble, Rows, cross_entropy
from dpfl_mpi.settings import Run

PREPARED_NUMBERS = 2**25  # numbers of images that one call prepares: 128 MiB, more than 10,000 images of CIFAR-10
SCORED_IMAGES = 50  # images of a client scored at once on a CPU: the widest layer stays in a core's cache
Gradient = Callable[[Block, Batch], Tensor]  # writes `block.g` and returns the losses [k]; methods vary it
Learn = Callable[[Block, Block, Block], None]  # of the rows w, v, and their mixture with its gradient
# (which rows of this rank, these rows [k, W], images for `Backend.outputs`) -> logits [k, S, C]
Predict = Callable[[slice, Tensor, Any], Tensor]


@dataclass(frozen=True)
class SGD:
    """Settings of local training that do not change from round to round, and its step: each row steps as if it were alone."""

    batch_size: int
    momentum: float
    weight_decay: float
    clip_norm: float

    def state_size(self, width: int) -> int:
        """Return how many numbers are remembered of a row of this width."""
        return width

    def step(self, w: Tensor, g: Tensor, m: Tensor, lr: float | Tensor, trained: Tensor | None = None) -> None:
        """Step rows `[k, W]` in place as `torch.optim.SGD` after `clip_grad_norm_`, each by itself; not `trained` (bool `[W]` or `[k, 1]`) is frozen."""
        self._clip(g, trained)
        g.add_(w, alpha=self.weight_decay)
        if trained is None:
            m.mul_(self.momentum).add_(g)
        else:  # the same operations on every trained column, so that a mask of ones changes no bit
            torch.where(trained, (m * self.momentum).add_(g), m, out=m)
        if isinstance(lr, Tensor):
            w.sub_(m * (lr if trained is None else lr * trained))
        else:
            w.add_(m if trained is None else m * trained, alpha=-lr)

    def _clip(self, g: Tensor, trained: Tensor | None) -> None:
        """Set frozen columns to 0, and scale each row to a norm of at most `clip_norm`; 0: leave it."""
        if trained is not None and trained.dim() == 1:  # a frozen row is in no other row's norm
            g.mul_(trained)
        if self.clip_norm:
            norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
            g.mul_((self.clip_norm / (norm + 1e-6)).clamp_(max=1.0))


@dataclass(frozen=True)
class Adam(SGD):
    """The same by Adam, which reads no momentum; with `decoupled` decay it is AdamW."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = False

    def state_size(self, width: int) -> int:
        return 2 * width + 1

    def corrections(self, done: int, steps: int) -> np.ndarray:
        """Return what undoes that the means start from 0, of the steps after `done`, float32 `[steps, 2]`: 1 - beta^t, of the second the root."""
        t, out = np.arange(done + 1, done + steps + 1), np.ones((steps, 2))
        for power, beta in zip(out.T, self.betas, strict=True):
            factor = beta
            for bit in range(32):  # by squares: the same bits on every processor, which pow does not promise
                np.multiply(power, factor, out=power, where=(t >> bit & 1).astype(bool))
                factor *= factor
        out = 1 - out
        out[:, 1] = np.sqrt(out[:, 1])
        return out.astype(np.float32)

    def step(self, w: Tensor, g: Tensor, m: Tensor, lr: float | Tensor, trained: Tensor | None = None) -> None:
        """Step as `torch.optim.Adam` or `AdamW`. `m` `[k, 2 W + 1]`: mean gradient, mean squared gradient, steps (float32: exact up to 2^24)."""
        width, betas = w.shape[1], self.betas
        mean, square, steps = m[:, :width], m[:, width : 2 * width], m[:, 2 * width :]
        decayed = w if trained is None else w * trained
        self._clip(g, trained)
        if not self.decoupled:
            g.add_(decayed, alpha=self.weight_decay)
        steps += 1
        if trained is None:
            mean.lerp_(g, 1 - betas[0])
            square.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        else:
            torch.where(trained, mean.lerp(g, 1 - betas[0]), mean, out=mean)
            torch.where(trained, (square * betas[1]).addcmul_(g, g, value=1 - betas[1]), square, out=square)
        first, second = (1 - beta ** steps.double() for beta in betas)  # the means start from 0: undo that
        step = mean / (square.sqrt().div_(second.sqrt().float()).add_(self.eps)).mul_(first.float())
        if self.decoupled:
            step.add_(decayed, alpha=self.weight_decay)
        if trained is not None:
            step.mul_(trained)
        w.add_(step, alpha=-float(lr))


def optimiser(run: Run) -> SGD:
    sgd = SGD(run.batch_size, run.momentum, run.weight_decay, run.clip_norm)
    if run.optimizer == "sgd":
        return sgd
    return Adam(**vars(sgd), betas=(run.beta1, run.beta2), eps=run.adam_eps, decoupled=run.optimizer == "adamw")


class Backend:
    def __init__(self, ensemble: Ensemble, clients: Clients, sgd: SGD, at_once: int):
        """Compute `at_once` clients as one tensor program; 0: one on a CPU, all on a GPU."""
        self.ensemble, self.clients, self.sgd = ensemble, clients, sgd
        self.name = "torch"
        self.native: Any = None  # the CPU kernels, where they compute
        k = len(clients)
        at_once = at_once or (1 if ensemble.device.type == "cpu" else max(k, 1))
        self.blocks = [slice(i, min(i + at_once, k)) for i in range(0, k, at_once)]
        self._validation: dict[tuple[int, int], list[tuple[Any, Tensor, Tensor]]] = {}

    def train_epochs(
        self, block: Block, epochs: int, first: np.ndarray, lr: float, gradient: Gradient | None, trained: Tensor | None
    ) -> None:
        """Train the block's rows in place by `epochs` local epochs from each client's `first` `[K]` on; columns not `trained` are frozen."""
        for batch in self.batches(block.rows, epochs, first):
            block = block.first(batch.k)
            self.step(block, (gradient or self.gradient)(block, batch), lr, trained)

    def train_mixed(
        self, w: Block, v: Block, alpha_K1: Tensor, epochs: int, first: np.ndarray, lr: float, learn: Learn | None
    ) -> None:
        """Train w as `train_epochs`, and v along alpha times the gradient at alpha v + (1 - alpha) w, each step of w before that of v.

        `alpha_K1` has all rows of this rank; `learn(w, v, mixed)`, called with the gradient at the mixture, may change it.
        """
        for batch in self.batches(w.rows, epochs, first):
            w, v = w.first(batch.k), v.first(batch.k)
            alpha = alpha_K1[w.rows].float()
            self.step(w, self.gradient(w, batch), lr)
            mixed = Block(self.ensemble, alpha * v.w + (1 - alpha) * w.w, None, v.rows)
            loss = self.gradient(mixed, batch)
            v.g = alpha * mixed.g
            if learn:
                learn(w, v, mixed)
            self.step(v, loss, lr)

    def train_ahead(self, block: Block, inner: float, epochs: int, first: np.ndarray, lr: float) -> None:
        """Train as `train_epochs`, by pairs of mini-batches: along the gradient of the second at w - inner times that of the first."""
        for batch in self.batches(block.rows, epochs, first):
            block = block.first(batch.k)
            if batch.step % 2 == 0:
                self.gradient(block, batch)
                ahead = Block(self.ensemble, block.w - inner * block.g, None, block.rows)
            else:
                ahead = ahead.first(batch.k)
                loss = self.gradient(ahead, batch)
                block.g = ahead.g
                self.step(block, loss, lr)

    def batches(self, rows: Rows, epochs: int, first_epoch: np.ndarray) -> Iterator[Any]:
        """Yield each step of `epochs` local epochs of these rows, for `gradient`: `k` of them still train, in their `step`-th step."""
        return self.clients.batches(rows, epochs, first_epoch, self.sgd.batch_size)

    def gradient(self, block: Block, batch: Batch) -> Tensor:
        """Write the gradient of a mini-batch's mean loss into `block.g` and return the losses `[k]`."""
        return self.ensemble.gradient(block, batch.x, batch.y, batch.weight, batch.key)

    def zero_momentum(self, k: int) -> Tensor:
        """Return what the optimiser remembers of k clients before their first step, zeros."""
        return torch.zeros(k, self.sgd.state_size(self.ensemble.width), device=self.ensemble.device)

    def step(self, block: Block, loss: Tensor, lr: float, trained: Tensor | None = None) -> None:
        """Take one step of the optimiser from `block.g`; columns where `trained` (bool `[W]`) is false are frozen."""
        self._count(block, loss)
        self.sgd.step(block.w, block.g, block.momentum, lr, trained)

    def descend(self, block: Block, rate: float, loss: Tensor | None = None) -> None:
        """Take a step of plain gradient descent from `block.g`: no momentum, decay or clipping. With its `loss` it counts as a step of training."""
        block.w.add_(block.g, alpha=-rate)
        self._count(block, loss)

    def descents(self, block: Block, batch: Any, steps: int, rate: float, towards: Tensor, pull: float) -> None:
        """Take so many steps of plain descent on one mini-batch, along its gradient + pull (w - towards); rows `towards` `[k, W]`."""
        for _ in range(steps):
            loss = self.gradient(block, batch)
            block.g.add_(pull * (block.w - towards))
            self.descend(block, rate, loss)

    def _count(self, block: Block, loss: Tensor | None) -> None:
        if loss is not None:
            block.loss += loss
            block.steps += 1

    def score(self, rows: slice, w_kW: Tensor, predict: Predict | None = None) -> tuple[np.ndarray, ...]:
        """Return loss, predicted class and label of each scored image, `[k, S]` (validation first, then test, then padding)."""
        out = []
        for x, y, _ in self.clients.scoring(rows, False, SCORED_IMAGES):
            w = w_kW[: len(y)]
            if predict:
                logits = predict(slice(rows.start, rows.start + len(y)), w, x)
            else:
                logits = self.ensemble.logits(self.ensemble.ready(w), self.ensemble.prepare(x))
            behind = (0, 0, 0, len(w_kW) - len(y))  # rows of clients without images left
            out.append([pad(part, behind) for part in (cross_entropy(logits, y), logits.argmax(2), y)])
        losses, predicted, labels = (torch.cat(part, 1).cpu().numpy() for part in zip(*out, strict=True))
        return losses.astype(np.float64), predicted, labels

    def exchange_classes(self, clients: np.ndarray, a: int, b: int) -> None:
        """Give these clients of this rank class b where they had class a, and class a where they had b."""
        self.clients.exchange_classes(clients, a, b)
        self._validation.clear()

    def outputs(self, w_kW: Tensor, images: Any, head: str) -> tuple[Tensor, Tensor]:
        """Return the logits `[k, S, C]` of the images that a `Predict` was given, and what the layer named `head` read, `[k, S, F]`."""
        logits = self.ensemble.logits(self.ensemble.ready(w_kW), self.ensemble.prepare(images))
        return logits, self.ensemble.features(w_kW, images, head)

    def memory(self, i: int, w_1W: Tensor, most: int, head: str) -> tuple[Tensor, Tensor]:
        """Return what the head reads of local client i's training images, at most `most` of them, `[M, F]`, and their labels `[M]`."""
        x, y = self.clients.training(i, most)
        at_once = max(1, PREPARED_NUMBERS // max(1, x[0].numel()))
        return torch.cat([self.ensemble.features(w_1W, part[None], head)[0] for part in x.split(at_once)]), y

    def training_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        """Return the mean loss of m models on local client i's training images, as they are stored, float64 `[m]`."""
        x, y = self.clients.training(i, int(self.clients.n_train[i]))
        total = np.zeros(len(w_mW))
        with torch.no_grad():
            ready = self.ensemble.ready(w_mW)
            for images, labels in zip(x.split(SCORED_IMAGES), y.split(SCORED_IMAGES), strict=True):
                logits = self.ensemble.logits(ready, self.ensemble.prepare(images[None]))
                total += cross_entropy(logits, labels.expand(len(w_mW), -1)).double().sum(1).cpu().numpy()
        return total / len(y)

    def validation_losses(self, rows: slice, w_kmW: Tensor) -> np.ndarray:
        """Return the mean validation loss of m models per client `[k, m, W]`, each on its client's images for the search, float64 `[k, m]`."""
        k, m, _ = w_kmW.shape
        if (rows.start, m) not in self._validation:  # the images are prepared once while one block is searched
            if len(self.blocks) > 1 and k == 1:
                self._validation.clear()  # a CPU goes through its clients one by one
            self._validation[rows.start, m] = [
                (self.ensemble.prepare(x), y.repeat_interleave(m, 0), mask.repeat_interleave(m, 0))
                for x, y, mask in self.clients.scoring(rows, True, SCORED_IMAGES)
            ]
        w, total = w_kmW.view(k * m, -1), torch.zeros(k * m, dtype=torch.float64, device=self.ensemble.device)
        with torch.no_grad():
            for prepared, y, mask in self._validation[rows.start, m]:
                logits = self.ensemble.logits(self.ensemble.ready(w[: len(y)]), prepared)
                total[: len(y)] += torch.where(mask, cross_entropy(logits, y), 0).double().sum(1)
        return total.cpu().numpy().reshape(k, m) / self.clients.n_search[rows, None]

    def candidate(
        self, x_kW: Tensor, y_kW: Tensor, w_kW: Tensor, p: np.ndarray, p_x: np.ndarray, p_y: np.ndarray, pair: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sums x + p w and y - p w, float64 `[k, W]`; write their averages, over p_x and p_y `[k]`, into `pair` `[k, 2, W]`."""
        column = self.ensemble.column
        w, share = w_kW.double(), column(p)
        x, y = x_kW.addcmul(w, share), y_kW.addcmul(w, share, value=-1)
        torch.div(x, column(p_x), out=pair[:, 0])
        torch.div(y, column(p_y), out=pair[:, 1])
        return x, y

    def chooser(self, i: int, start: Any, cases: np.ndarray) -> Any:
        """Return what decides all models at hand of local client i in one call, a `native.Chooser`; None: here nothing does."""
        return None


@dataclass(frozen=True)
class Proximal:
    """A `Gradient`: that of f_i(w_i) + (mu / 2) ||w_i - towards||^2; `towards` is one row `[W]`, or one per client `[K, W]`."""

    backend: Backend
    towards: Tensor
    mu: float

    def __call__(self, block: Block, batch: Any) -> Tensor:
        loss = self.backend.gradient(block, batch)
        block.g.add_(block.w - self.target(block.rows), alpha=self.mu)
        return loss

    def target(self, rows: Rows) -> Tensor:
        """Return what these rows are pulled to, `[W]` or `[k, W]`."""
        return self.towards if self.towards.dim() == 1 else self.towards[rows]
