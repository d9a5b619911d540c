"""The steps of SGD and Adam, for many models at once: a model is a row, and each row steps as if it were alone.

Axes: k rows, W row width.
"""

import torch
from torch import Tensor


def sgd_step(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
    clip_norm: float,
    trained: Tensor | None = None,
) -> None:
    """One step of SGD on rows `[k, W]`, in place, as `torch.optim.SGD` after `clip_grad_norm_` for each row by itself.

    Where `trained` (bool, `[W]` or `[k, 1]`) is false, columns or rows are frozen: weights, momentum, decay and their part of the
    clipped norm. `lr` as a tensor may change in a recorded step.
    """
    if trained is not None:
        g.mul_(trained)
    clip(g, clip_norm)
    if trained is None:
        g.add_(w, alpha=weight_decay)
        m.mul_(momentum).add_(g)
        step = m
    else:  # the same operations on every trained column, so that a mask of ones changes no bit
        g.add_(w * trained, alpha=weight_decay)
        torch.where(trained, (m * momentum).add_(g), m, out=m)
        step = m * trained
    if isinstance(lr, Tensor):
        w.sub_(step * lr)
    else:
        w.add_(step, alpha=-lr)


def adam_step(
    w: Tensor,
    g: Tensor,
    memory: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    clip_norm: float,
    trained: Tensor | None = None,
) -> None:
    """One step of Adam on rows `[k, W]`, in place, as `torch.optim.Adam` (`decoupled`: AdamW) after `clip_grad_norm_` for each row by itself.

    `memory` `[k, 2 W + 1]` holds the mean gradient, the mean squared gradient and the number of steps (float32: exact up to 2^24).
    Columns that are not `trained` (bool `[W]`) are frozen, as in `sgd_step`; the steps count for all columns.
    """
    width = w.shape[1]
    mean, square, steps = memory[:, :width], memory[:, width : 2 * width], memory[:, 2 * width :]
    decayed = w if trained is None else w * trained
    if trained is not None:
        g.mul_(trained)
    clip(g, clip_norm)
    if not decoupled:
        g.add_(decayed, alpha=weight_decay)
    steps += 1
    if trained is None:
        mean.lerp_(g, 1 - betas[0])
        square.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    else:
        torch.where(trained, mean.lerp(g, 1 - betas[0]), mean, out=mean)
        torch.where(trained, (square * betas[1]).addcmul_(g, g, value=1 - betas[1]), square, out=square)
    first, second = (1 - beta ** steps.double() for beta in betas)  # the means start from 0: undo that
    step = mean / (square.sqrt().div_(second.sqrt().float()).add_(eps)).mul_(first.float())
    if decoupled:
        step.add_(decayed, alpha=weight_decay)
    if trained is not None:
        step.mul_(trained)
    w.add_(step, alpha=-lr)


def clip(g: Tensor, clip_norm: float) -> None:
    """Scale each row of a gradient `[k, W]` in place to a norm of at most `clip_norm`, as `clip_grad_norm_`; 0: leave it."""
    if clip_norm:
        norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
        g.mul_((clip_norm / (norm + 1e-6)).clamp_(max=1.0))
