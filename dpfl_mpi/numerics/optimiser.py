"""The optimisers of local training: SGD and Adam on rows, each as if it were alone.

What an optimiser remembers of a row lies in its momentum row: `[W]` for SGD, `[2 W + 1]` for Adam.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.settings import Resolved


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD` after `clip_grad_norm_`, with the settings that no round changes."""

    batch_size: int
    momentum: float
    weight_decay: float
    clip_norm: float  # 0: no clipping

    def state_size(self, width: int) -> int:
        """Return the width of the momentum row of a row of this width."""
        return width

    def step(
        self, w: Tensor, g: Tensor, m: Tensor, lr: float, trained: Tensor | None = None
    ) -> None:
        """Step rows `[k, W]` in place; columns not `trained` (bool `[W]`) are frozen."""
        trained = self._clip(g, trained)
        g.add_(w, alpha=self.weight_decay)
        torch.where(trained, (m * self.momentum).add_(g), m, out=m)
        w.add_(m * trained, alpha=-lr)

    def _clip(self, g: Tensor, trained: Tensor | None) -> Tensor:
        """Set frozen columns to 0, scale rows to a norm of at most `clip_norm`; return the mask."""
        trained = g.new_ones(g.shape[1], dtype=torch.bool) if trained is None else trained
        g.mul_(trained)
        if self.clip_norm:
            norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
            g.mul_((self.clip_norm / (norm + 1e-6)).clamp_(max=1.0))
        return trained


@dataclass(frozen=True)
class Adam(SGD):
    """`torch.optim.Adam`, which does not read `momentum`; `AdamW` with `decoupled` decay."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = False

    def state_size(self, width: int) -> int:
        return 2 * width + 1

    def corrections(self, done: int, steps: int) -> np.ndarray:
        """Return 1 - beta1^t, and the root of 1 - beta2^t, of the steps t after `done`, float32."""
        t, out = np.arange(done + 1, done + steps + 1), np.ones((steps, 2))
        for power, beta in zip(out.T, self.betas, strict=True):
            factor = beta
            for bit in range(32):  # by squares: unlike pow, the same bits on every processor
                np.multiply(power, factor, out=power, where=(t >> bit & 1).astype(bool))
                factor *= factor
        out = 1 - out
        out[:, 1] = np.sqrt(out[:, 1])
        return out.astype(np.float32)

    def step(
        self, w: Tensor, g: Tensor, m: Tensor, lr: float, trained: Tensor | None = None
    ) -> None:
        """Step rows in place; columns that are not `trained` keep their weight and moments.

        `m` holds the mean gradient, the mean square and the number of steps, float32, exact up to
        2^24.
        """
        width, betas = w.shape[1], self.betas
        mean, square, steps = m[:, :width], m[:, width : 2 * width], m[:, 2 * width :]
        trained = self._clip(g, trained)
        if not self.decoupled:
            g.add_(w * trained, alpha=self.weight_decay)
        steps += 1
        new_square = (square * betas[1]).addcmul_(g, g, value=1 - betas[1])
        torch.where(trained, mean.lerp(g, 1 - betas[0]), mean, out=mean)
        torch.where(trained, new_square, square, out=square)
        correction_1, correction_2 = (1 - beta ** steps.double() for beta in betas)
        root = square.sqrt().div_(correction_2.sqrt().float()).add_(self.eps)
        change = mean / root.mul_(correction_1.float())
        if self.decoupled:
            change.add_(w, alpha=self.weight_decay)
        w.add_(change.mul_(trained), alpha=-lr)


def optimiser_of(run: Resolved) -> SGD:
    """Return the optimiser of a Run."""
    sgd = SGD(run.batch_size, run.momentum, run.weight_decay, run.clip_norm)
    if run.optimizer == "sgd":
        return sgd
    return Adam(**vars(sgd), eps=run.adam_eps, decoupled=run.optimizer == "adamw")
