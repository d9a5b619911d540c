"""Stacked-parameter numerics: a model is a row.

The K models of a rank are one float32 tensor `w_KW`. W is D, the number of parameters, rounded up to 64 bytes; the padding is zero and
every row operation keeps it zero. Averaging is a weighted sum of rows, SGD an in-place update of rows, a message one row.

Axes: k rows of a block, W row width, S mini-batch or images scored, H W C image, m models scored on one client's images.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from dpfl_mpi.errors import UserError

Rows = slice | np.ndarray  # which of this rank's rows: consecutive ones, or by number
FIXED_POINT = 2.0**50  # scale of the exact sums: |p_i w_i| < 2^12 keeps every partial sum below 2^62
LARGEST = 2.0**12  # a client with a weight that large has diverged


class Block:
    """k rows in training, their gradient and momentum, split into layers once: views, no copies.

    `rows` says which rows of this rank they are; `loss` and `steps` `[k]` add up what the training steps did.
    """

    def __init__(self, ensemble: Ensemble, w_kW: Tensor, m_kW: Tensor | None = None, rows: Rows = slice(None)):
        self.w, self.g, self.rows = w_kW, torch.zeros_like(w_kW), rows
        self.momentum: Any = m_kW  # None where the rows are not trained
        self.layers, self.grads = ensemble.layers(self.w), ensemble.layers(self.g)
        self.leaves = (
            {name: v[0].detach().requires_grad_() for name, v in self.layers.items()} if len(w_kW) == 1 else {}
        )
        self.loss, self.steps = w_kW.new_zeros(len(w_kW)), np.zeros(len(w_kW), np.int64)
        self._scratch: Block | None = None

    def first(self, ensemble: Ensemble, k: int) -> Block:
        """Return the block of the first k rows (clients are sorted by size: those that have finished are at the end)."""
        if k == len(self.w):
            return self
        rows = slice(self.rows.start, self.rows.start + k) if isinstance(self.rows, slice) else self.rows[:k]
        block = Block(ensemble, self.w[:k], None if self.momentum is None else self.momentum[:k], rows)
        block.loss, block.steps = self.loss[:k], self.steps[:k]
        block._scratch = None if self._scratch is None else self._scratch.first(ensemble, k)
        return block

    def scratch(self, ensemble: Ensemble) -> Block:
        """Return a second block of the same shape, for rows at which a method needs a gradient but that it does not train."""
        if self._scratch is None:
            self._scratch = Block(ensemble, torch.zeros_like(self.w), None, self.rows)
        return self._scratch


class Ensemble:
    """The numerics of one architecture on one device."""

    def __init__(
        self,
        module: nn.Module,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
        precision: str = "float32",
    ):
        """Take the layers of a module; with precision "bf16" the factors of its matrix products are rounded to bfloat16."""
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._NormBase) or list(part.buffers(recurse=False)):
                raise UserError(
                    f"--model: layer {name} ({type(part).__name__}) keeps batch statistics, which rows cannot hold; use GroupNorm or none"
                )
        self.module = module.to(device)
        self.device = device
        self.names = [name for name, _ in module.named_parameters()]
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.size = sum(p.numel() for p in module.parameters())
        self.width = -(-self.size // 16) * 16  # D rounded up to 64 bytes
        self.scale = torch.tensor([1 / (255 * s) for s in std], dtype=torch.float32, device=device)
        self.shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float32, device=device)
        self._trunks: dict[str, nn.Module] = {}
        self.bf16 = precision == "bf16"
        own = "stacked" in vars(type(module))  # a class that inherits them may compute something else
        self.kernels: Any = module.stacked(self.bf16) if own else None  # type: ignore[operator]

    # rows -------------------------------------------------------------------------------------------------------------
    def zeros(self, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return k rows of zeros, `[k, W]`."""
        return torch.zeros(k, self.width, dtype=dtype, device=self.device)

    def layers(self, w_kW: Tensor) -> dict[str, Tensor]:
        """Return the named layers `[k, *shape]` of rows, as views."""
        out, start = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            out[name] = w_kW[:, start : start + size].view(len(w_kW), *shape)
            start += size
        return out

    def column(self, values: np.ndarray) -> Tensor:
        """Return float64 values `[k]` as a column `[k, 1]` on the device."""
        return torch.from_numpy(np.asarray(values, np.float64)).to(self.device)[:, None]

    def columns(self, layers: str, head: str) -> Tensor:
        """Return which columns of a row hold these layers, bool `[W]`: "head" (the one named `head`), "none", "all", or names with commas.

        Raises:
            UserError: the model has no such layer.
        """
        wanted = [] if layers == "none" else [head if name == "head" else name for name in layers.split(",")]
        row = self.zeros(1)
        named = self.layers(row)
        for name in wanted:
            inside = [n for n in named if name == "all" or n == name or n.startswith(f"{name}.")]
            if not inside:
                known = ", ".join(dict.fromkeys(n.rpartition(".")[0] for n in named))
                raise UserError(f"--options.head is {layers}; allowed are head, none, all, or of the layers {known}")
            for n in inside:
                named[n].fill_(1)
        return row[0] > 0

    def initial_row(self, init: str, rng: np.random.Generator) -> Tensor:
        """Return one common initial row `[W]`: "kaiming" U(+-sqrt(6/fan_in)), biases 0; "torch" U(+-1/sqrt(fan_in)) for both."""
        row = self.zeros(1)
        fan_in = 1
        for layer in self.layers(row).values():
            shape = layer.shape[1:]
            if len(shape) > 1:
                fan_in = math.prod(shape[1:])
                bound = math.sqrt((6 if init == "kaiming" else 1) / fan_in)
            elif init == "kaiming":
                continue
            else:
                bound = 1 / math.sqrt(fan_in)  # a bias follows its weight
            layer[0] = torch.from_numpy(rng.uniform(-bound, bound, shape).astype(np.float32))
        return row[0]

    # images -----------------------------------------------------------------------------------------------------------
    def normalise(self, x_u8: Tensor) -> Tensor:
        """Return float32 images, channels normalised by the data set's mean and deviation; any leading axes, channels last."""
        return torch.addcmul(self.shift, x_u8.float(), self.scale)

    def prepare(self, x_kSHWC: Tensor) -> Any:
        """Return what `logits` needs of normalised images: work shared by all models scored on them."""
        if self.kernels:
            return self.kernels.prepare(x_kSHWC)
        return x_kSHWC.permute(0, 1, 4, 2, 3)  # nn.Module's order: channels first

    # models -----------------------------------------------------------------------------------------------------------
    def ready(self, w_rW: Tensor) -> Any:
        """Return what `logits` needs of rows: work shared by all images that they are scored on."""
        layers = self.layers(w_rW)
        return self.kernels.ready(layers) if self.kernels else layers

    def logits(self, ready: Any, prepared: Any) -> Tensor:
        """Return `[r, S, classes]`; r = k * m rows, client-major: m consecutive rows are scored on one client's images."""
        if self.kernels:
            return self.kernels.logits(ready, prepared)
        layers = ready
        models = len(layers[self.names[0]]) // len(prepared)
        if len(prepared) == 1:
            return torch.stack([self._module({n: v[i] for n, v in layers.items()}, prepared[0]) for i in range(models)])
        return vmap(self._module)(layers, prepared.repeat_interleave(models, 0))

    def features(self, w_kW: Tensor, x_kSHWC: Tensor, head: str) -> Tensor:
        """Return what the layer named `head` would read, `[k, S, F]`: the representation of each row's images."""
        if head not in self._trunks:
            trunk = copy.deepcopy(self.module)
            parent, _, name = head.rpartition(".")
            setattr(trunk.get_submodule(parent), name, nn.Identity())
            self._trunks[head] = trunk
        trunk, x = self._trunks[head], x_kSHWC.permute(0, 1, 4, 2, 3)
        layers = {n: v for n, v in self.layers(w_kW).items() if not n.startswith(f"{head}.")}
        if len(x) == 1:
            return functional_call(trunk, {n: v[0] for n, v in layers.items()}, (x[0],))[None]
        return vmap(lambda p, images: functional_call(trunk, p, (images,)))(layers, x)

    def gradient(self, block: Block, x_kSHWC: Tensor, y_kS: Tensor, weight_kS: Tensor) -> Tensor:
        """Write into `block.g` the gradient of `sum_s weight_s * cross_entropy_s` of each row; return the losses `[k]`."""
        if self.kernels:
            return self.kernels.gradient(block.layers, x_kSHWC, y_kS, weight_kS, block.grads)
        x = x_kSHWC.permute(0, 1, 4, 2, 3)
        if len(x) == 1:
            with torch.enable_grad():
                loss = self._loss(block.leaves, x[0], y_kS[0], weight_kS[0])
                grads = dict(zip(self.names, torch.autograd.grad(loss, list(block.leaves.values())), strict=True))
            losses = loss.detach()[None]
        else:
            grads, losses = vmap(grad_and_value(self._loss))(block.layers, x, y_kS, weight_kS)
        for name, g in block.grads.items():
            g.copy_(grads[name])
        return losses

    def _module(self, layers: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return one model's logits `[S, classes]`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = functional_call(self.module, layers, (x,))
            return logits.float() if self.bf16 else logits

    def _loss(self, layers: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        logits = self._module(layers, x)
        return (nn.functional.cross_entropy(logits, y, reduction="none") * weight).sum()


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Return float32 `[..., classes]`: 1 at each label. Unlike a scatter this is deterministic on a GPU."""
    return (y[..., None] == torch.arange(classes, device=y.device)).float()


def cross_entropy(logits_kSC: Tensor, y_kS: Tensor) -> Tensor:
    """Return the loss of each image, `[k, S]`; PyTorch's own over a third axis is not deterministic on a GPU."""
    return -logits_kSC.log_softmax(2).gather(2, y_kS[:, :, None])[:, :, 0]


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
    if clip_norm:
        norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
        g.mul_((clip_norm / (norm + 1e-6)).clamp_(max=1.0))
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


def fixed_point(w_kW: Tensor, p_k: Tensor) -> Tensor:
    """Return round(p_i w_i 2^50) as int64 `[k, W]`: sums of these are exact, whatever their order and grouping."""
    return (w_kW.double() * (p_k[:, None] * FIXED_POINT)).round_().to(torch.int64)


def check_fixed_point(w_kW: Tensor) -> None:
    """Raise `UserError` where weights are too large for the exact sums (2^12); rows must be finite."""
    if len(w_kW) and float(w_kW.abs().max()) >= LARGEST:
        raise UserError(
            "a model has grown beyond 4096 in a weight, which exact sums cannot hold; lower --lr or set --clip_norm"
        )


def from_fixed_point(total: Tensor) -> Tensor:
    """Return the float64 value of a sum of `fixed_point` rows."""
    return total.double() / FIXED_POINT
