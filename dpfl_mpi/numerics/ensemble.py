"""Stacked-parameter numerics: a model is a row.

The K models of a rank are one float32 tensor `w_KW`. W is D, the number of parameters, rounded up to 64 bytes; the padding is zero and
every row operation keeps it zero. Averaging is a weighted sum of rows, SGD an in-place update of rows, a message one row.

Samples are images `[H, W, C]`, vectors `[F]` or tokens `[L]`; of all three the comments speak as of images.

Axes: k rows of a block, W row width, S mini-batch or images scored, H W C image, m models scored on one client's images.
"""

from __future__ import annotations

import copy
import functools
import math
import platform
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.dropout import Draws, keyed
from dpfl_mpi.numerics.normalising import scaling

# attention in one form, matrix products: vmap knows them, and the fused forms have other bits while scoring, or from call to call
torch.backends.mha.set_fastpath_enabled(False)
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
# without AVX-512, oneDNN of torch 2.13 writes beyond the end of convolutions of few channels and ends the process; PyTorch has others
if platform.machine() in ("x86_64", "AMD64") and torch.backends.cpu.get_cpu_capability() != "AVX512":
    torch.backends.mkldnn.set_flags(_enabled=False)
    torch.backends.nnpack.set_flags(_enabled=False)  # which came next, and rounds even sums of whole numbers

Rows = slice | np.ndarray  # which of this rank's rows: consecutive ones, or by number
FIXED_POINT = 2.0**50  # scale of the exact sums: |p_i w_i| < 2^12 keeps every partial sum below 2^62
LARGEST = 2.0**12  # a client with a weight that large has diverged
NORMALISATION = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
DENSE = (nn.Linear, nn.modules.conv._ConvNd)  # the layers whose weight and bias Kaiming's rule speaks of


class Block:
    """k rows in training, their gradient and momentum, split into layers once: views. `loss` and `steps` `[k]` add up what the steps did."""

    def __init__(self, ensemble: Ensemble, w_kW: Tensor, m_kW: Tensor | None = None, rows: Rows = slice(None)):
        self.ensemble, self.w, self.rows = ensemble, w_kW, rows
        self.momentum: Any = m_kW  # None where the rows are not trained
        self.loss, self.steps = w_kW.new_zeros(len(w_kW)), np.zeros(len(w_kW), np.int64)

    # made when they are first asked for: the native kernels train a client's epochs without them
    @functools.cached_property
    def g(self) -> Tensor:
        return torch.zeros_like(self.w)

    @functools.cached_property
    def layers(self) -> dict[str, Tensor]:
        return self.ensemble.layers(self.w)

    def first(self, k: int) -> Block:
        """Return the block of the first k rows (clients are sorted by size: those that have finished are at the end)."""
        if k == len(self.w):
            return self
        rows = slice(self.rows.start, self.rows.start + k) if isinstance(self.rows, slice) else self.rows[:k]
        block = Block(self.ensemble, self.w[:k], None if self.momentum is None else self.momentum[:k], rows)
        block.loss, block.steps = self.loss[:k], self.steps[:k]
        return block


def first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter by every name that it has.

    PyTorch's own search for further names (2.13) leaves them in a layer that has two, such as a PReLU that is used twice.
    """
    first, each = dict[Tensor, str](), dict[str, str]()
    for of, part in module.named_modules():  # each once
        for name, p in part.named_parameters(of, recurse=False):
            each[name] = first.setdefault(p, name)
    return each


def called(module: nn.Module, first: dict[str, str], layers: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return what a module makes of x with these in place of its parameters, by their `first_names`."""
    return functional_call(module, {name: layers[of] for name, of in first.items()}, (x,), tie_weights=False)


def safe(module: nn.Module) -> nn.Module:
    """Have the GroupNorm layers of a module copy an input that takes no gradient, in place, and return it; called by keyword they do not.

    PyTorch (2.13) is ended by a segmentation fault in the gradient of a GroupNorm on a CPU that reads images as they come here, channels last in memory.
    """
    for part in module.modules():
        if isinstance(part, nn.GroupNorm):
            part.register_forward_pre_hook(copied)
    return module


def copied(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not inputs or inputs[0].requires_grad or not torch.is_grad_enabled():
        return inputs
    return (inputs[0].clone(memory_format=torch.contiguous_format),)


class Ensemble:
    def __init__(
        self,
        module: nn.Module,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
        precision: str = "float32",
        dtype: str = "uint8",
    ):
        """Take the layers of a module that passed `model_check.check_module`; precision "bf16" rounds the factors of its matrix products. `scaling` says what mean, std and dtype are."""
        self.module = safe(module).to(device).eval()  # scores
        self.device, self.draws = device, Draws()
        shared = {id(held): held for held in module.buffers()}  # a frozen backbone may be large
        self.learner = keyed(copy.deepcopy(self.module, shared).train(), self.draws)  # the same layers, as they train
        self.first = first_names(module)
        self.names = [name for name, _ in module.named_parameters()]
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.size = sum(p.numel() for p in module.parameters())
        self.width = -(-self.size // 16) * 16  # D rounded up to 64 bytes
        self.dtype = dtype
        self.scale, self.shift = (values.to(device) for values in scaling(mean, std, dtype))
        self.bf16 = precision == "bf16"
        own = "stacked" in vars(type(module))  # a class that inherits them may compute something else
        self.kernels: Any = module.stacked(self.bf16) if own else None  # type: ignore[operator]

    def zeros(self, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(k, self.width, dtype=dtype, device=self.device)

    def layers(self, w_kW: Tensor) -> dict[str, Tensor]:
        """Return the named layers `[k, *shape]` of rows, as views."""
        out, start = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            out[name] = w_kW[:, start : start + size].view(len(w_kW), *shape)
            start += size
        return out

    def put(self, values: np.ndarray) -> Tensor:
        """Return an array on the device; a GPU takes it from page-locked memory, so that nobody waits until it has come to this copy."""
        held = torch.from_numpy(np.ascontiguousarray(values))
        return held.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else held

    def column(self, values: np.ndarray) -> Tensor:
        """Return float64 values `[k]` as a column `[k, 1]` on the device."""
        return self.put(np.asarray(values, np.float64))[:, None]

    def columns(self, layers: str, head: str, flag: str = "--options.head") -> Tensor:
        """Return which columns of a row hold these layers, bool `[W]`: "head" (the one named `head`), "none", "all", "normalisation", or names."""
        if layers == "normalisation":
            norm = [n for n, part in self.module.named_modules() if isinstance(part, NORMALISATION)]
            weighed = [n for n in norm if any(name.startswith(f"{n}.") for name in self.names)]  # not all have weights
            layers = ",".join(weighed) or "none"
        wanted = [] if layers == "none" else [head if name == "head" else name for name in layers.split(",")]
        row = self.zeros(1)
        named = self.layers(row)
        for name in wanted:
            inside = [n for n in named if name == "all" or n == name or n.startswith(f"{name}.")]
            if not inside:
                has = ", ".join(dict.fromkeys(n.rpartition(".")[0] for n in named))
                raise UserError(f"{flag} is {layers}; allowed are head, none, all, or of the layers {has}")
            for n in inside:
                named[n].fill_(1)
        return row[0] > 0

    def initial_row(self, init: str, rng: np.random.Generator) -> Tensor:
        """Return one common initial row `[W]`: dense and convolutional weights from U(+-sqrt(6/fan_in)), biases 0; "torch": both U(+-1/sqrt(fan_in))."""
        row, built = self.zeros(1), dict(self.module.named_parameters())
        for name, layer in self.layers(row).items():
            of, _, kind = name.rpartition(".")
            part: Any = self.module.get_submodule(of)
            if init == "own" or kind not in ("weight", "bias") or not isinstance(part, DENSE):
                layer[0] = built[name].detach()  # norms, embeddings, parameters of a module's own: as they were built
            elif kind == "weight" or init == "torch":  # a bias follows its weight
                scale, fan_in = 6 if init == "kaiming" else 1, part.weight[0].numel()
                bound = math.sqrt(scale / fan_in) if kind == "weight" else 1 / math.sqrt(fan_in)
                layer[0] = torch.from_numpy(rng.uniform(-bound, bound, layer.shape[1:]).astype(np.float32))
        return row[0]

    def normalise(self, x: Tensor) -> Tensor:
        """Return float32 images, channels normalised by the data set's mean and deviation, any leading axes, channels last; tokens as int64."""
        return x.long() if self.dtype == "int32" else torch.addcmul(self.shift, x.float(), self.scale)

    def module_input(self, x_kSHWC: Tensor) -> Tensor:
        """Return normalised samples as a module takes them: images with their channels first, as a view; vectors and tokens as they are."""
        return x_kSHWC.movedim(-1, 2) if x_kSHWC.dim() == 5 else x_kSHWC

    def prepare(self, x_kSHWC: Tensor) -> Any:
        """Return what `logits` needs of normalised images: work shared by all models scored on them."""
        return self.kernels.prepare(x_kSHWC) if self.kernels else self.module_input(x_kSHWC)

    def ready(self, w_rW: Tensor) -> Any:
        """Return what `logits` needs of rows: work shared by all images that they are scored on."""
        layers = self.layers(w_rW)
        return self.kernels.ready(layers) if self.kernels else layers

    def logits(self, ready: Any, prepared: Any) -> Tensor:
        """Return `[r, S, classes]`; r = k * m rows, client-major: m consecutive rows are scored on one client's images."""
        if self.kernels:
            return self.kernels.logits(ready, prepared)
        models = len(ready[self.names[0]]) // len(prepared)
        if len(prepared) == 1:
            return torch.stack([self._module({n: v[i] for n, v in ready.items()}, prepared[0]) for i in range(models)])
        return vmap(self._module)(ready, prepared.repeat_interleave(models, 0))

    def features(self, w_kW: Tensor, x_kSHWC: Tensor, head: str) -> Tensor:
        """Return what the layer named `head` would read, `[k, S, F]`: the representation of each row's images."""
        x, layers, held = self.module_input(x_kSHWC), self.layers(w_kW), list[Tensor]()

        def read(p: dict[str, Tensor], images: Tensor) -> Tensor:
            called(self.module, self.first, p, images)
            return held.pop()

        with self.module.get_submodule(head).register_forward_pre_hook(lambda _, inputs: held.append(inputs[0])):
            if len(x) == 1:
                return read({n: v[0] for n, v in layers.items()}, x[0])[None]
            return vmap(read)(layers, x)

    def gradient(
        self, block: Block, x_kSHWC: Tensor, y_kS: Tensor, weight_kS: Tensor, key_k: Tensor | None = None
    ) -> Tensor:
        """Set `block.g` to the gradient of `sum_s weight_s * cross_entropy_s` of each row; return the losses `[k]`. Dropout draws from `key_k`."""
        block.g, losses = self.gradient_of(block.layers, x_kSHWC, y_kS, weight_kS, key_k)
        return losses

    def gradient_of(
        self, layers: dict[str, Tensor], x_kSHWC: Tensor, y_kS: Tensor, weight_kS: Tensor, key_k: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return rows of gradients `[k, W]`, and the losses `[k]`."""
        if self.kernels:
            grads, losses = self.kernels.gradient(layers, x_kSHWC, y_kS, weight_kS)
        else:
            x = self.module_input(x_kSHWC)
            batch = (x, y_kS, weight_kS) if key_k is None else (x, y_kS, weight_kS, key_k)
            if len(x) == 1:
                leaves = {name: v[0].detach().requires_grad_() for name, v in layers.items()}
                with torch.enable_grad():
                    loss = self._loss(leaves, *(part[0] for part in batch))
                    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
                losses = loss.detach()[None]
            else:
                grads, losses = vmap(grad_and_value(self._loss))(layers, *batch)
        parts = [grads[name].reshape(len(y_kS), -1) for name in self.names]
        return torch.cat([*parts, parts[0].new_zeros(len(y_kS), self.width - self.size)], 1), losses

    def _module(self, layers: dict[str, Tensor], x: Tensor, training: bool = False) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = called(self.learner if training else self.module, self.first, layers, x)
            return logits.float() if self.bf16 else logits

    def _loss(self, layers: Any, x: Tensor, y: Tensor, weight: Tensor, key: Tensor | None = None) -> Tensor:
        """Return one model's weighted sum of losses over a mini-batch, without axes; dropout draws from `key`."""
        self.draws.begin(key)
        logits = self._module(layers, x, training=True)
        self.draws.begin(None)  # torch.compile lets no key of a vmap outlive it
        return (nn.functional.cross_entropy(logits, y, reduction="none") * weight).sum()


def cross_entropy(logits_kSC: Tensor, y_kS: Tensor) -> Tensor:
    """Return the loss of each image, `[k, S]`; PyTorch's own over a third axis is not deterministic on a GPU."""
    return -logits_kSC.log_softmax(2).gather(2, y_kS[:, :, None])[:, :, 0]


def fixed_point(w_kW: Tensor, p_k: Tensor) -> Tensor:
    """Return round(p_i w_i 2^50) as int64 `[k, W]`: sums of these are exact, whatever their order and grouping."""
    return (w_kW.double() * (p_k[:, None] * FIXED_POINT)).round_().to(torch.int64)


def largest(w_kW: Tensor) -> np.ndarray:
    """Return the largest absolute weight of each row, float32 `[k]`, NaN where one is: no copy of the rows."""
    if w_kW.device.type != "cpu":
        return torch.linalg.vector_norm(w_kW, math.inf, dim=1).cpu().numpy()
    rows = w_kW.detach().numpy()
    return np.maximum(rows.max(1), -rows.min(1))  # in a tenth of PyTorch's time


def check_fixed_point(w_kW: Tensor) -> None:
    """Raise `UserError` where weights are too large for the exact sums (2^12); rows must be finite."""
    if len(w_kW) and float(largest(w_kW).max()) >= LARGEST:
        raise UserError("a weight has grown beyond 4096, which exact sums cannot hold; lower --lr or set --clip_norm")


def from_fixed_point(total: Tensor) -> Tensor:
    """Return the float64 value of a sum of `fixed_point` rows."""
    return total.double() / FIXED_POINT
