"""`Ensemble`: many models of one network, each a row of a tensor.

The K models of a rank are one float32 tensor `w_KW`. W is D, the number of parameters, rounded up
to 64 bytes; the padding stays zero. An average is a weighted sum of rows, a message is a row.
Samples are images `[H, W, C]`, vectors `[F]` or tokens `[L]`; the comments speak of images.

Axes: k rows of a block, W row width, S images of a mini-batch or scored at once, H W C an image,
m models scored on one client's images.
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

# attention as matrix products, which vmap knows; the fused forms have other bits, some at each call
torch.backends.mha.set_fastpath_enabled(False)
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
X86 = platform.machine() in ("x86_64", "AMD64")
# without AVX-512, oneDNN of torch 2.13 writes beyond the end of convolutions of few channels
if X86 and torch.backends.cpu.get_cpu_capability() != "AVX512":
    torch.backends.mkldnn.set_flags(_enabled=False)
    torch.backends.nnpack.set_flags(_enabled=False)  # next in line, and inexact on whole numbers

Layers = dict[str, Tensor]  # by name, each [*shape] or of k rows [k, *shape]
Rows = slice | np.ndarray  # which of this rank's rows: consecutive ones, or by number
FIXED_POINT = 2.0**50  # scale of exact sums: |p_i w_i| < 2^12 keeps every partial sum below 2^62
LARGEST = 2.0**12  # a client with a weight that large has diverged
NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
DENSE = (nn.Linear, nn.modules.conv._ConvNd)  # what Kaiming's rule initialises


class Block:
    """k rows in training; `loss` and `steps` `[k]` add up what their steps did."""

    def __init__(
        self, ensemble: Ensemble, w_kW: Tensor, m_kW: Any = None, rows: Rows = slice(None)
    ):
        """Take rows and, where they are trained, their momentum rows; `rows` are their numbers."""
        self.ensemble, self.w, self.momentum, self.rows = ensemble, w_kW, m_kW, rows
        self.loss, self.steps = w_kW.new_zeros(len(w_kW)), np.zeros(len(w_kW), np.int64)

    # made when first asked for: the native kernels train a client's epochs without them
    @functools.cached_property
    def g(self) -> Tensor:
        return torch.zeros_like(self.w)

    @functools.cached_property
    def layers(self) -> Layers:
        return self.ensemble.layers(self.w)

    def first(self, k: int) -> Block:
        """Return the block of the first k rows.

        Rows are sorted by descending sample count, so those still training are always the first.
        """
        if k == len(self.w):
            return self
        if isinstance(self.rows, slice):
            rows: Rows = slice(self.rows.start, self.rows.start + k)
        else:
            rows = self.rows[:k]
        momentum = None if self.momentum is None else self.momentum[:k]
        block = Block(self.ensemble, self.w[:k], momentum, rows)
        block.loss, block.steps = self.loss[:k], self.steps[:k]
        return block


def first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter by every name that it has.

    PyTorch's own search (2.13) leaves parameters in a layer that is used twice.
    """
    first, names = dict[Tensor, str](), dict[str, str]()
    for prefix, part in module.named_modules():  # each once
        for name, p in part.named_parameters(prefix, recurse=False):
            names[name] = first.setdefault(p, name)
    return names


def call(module: nn.Module, names: dict[str, str], layers: Layers, x: Tensor) -> Tensor:
    """Return a module's output for x with `layers` as its parameters; `names` are `first_names`."""
    parameters = {name: layers[first] for name, first in names.items()}
    return functional_call(module, parameters, (x,), tie_weights=False)


def with_safe_norms(module: nn.Module) -> nn.Module:
    """Have the GroupNorm layers of a module copy an input without gradient; return the module.

    PyTorch (2.13) crashes in their gradient on a CPU where images lie channels last in memory.
    """

    def copy_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not inputs or inputs[0].requires_grad or not torch.is_grad_enabled():
            return inputs
        return (inputs[0].clone(memory_format=torch.contiguous_format),)

    for part in module.modules():
        if isinstance(part, nn.GroupNorm):
            part.register_forward_pre_hook(copy_input)
    return module


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
        """Take the layers of a module that passed `model_check.check_module`.

        `scaling` says what mean, std and dtype are. With the precision "bf16" the factors of matrix
        products are rounded to bfloat16.
        """
        self.module = with_safe_norms(module).to(device).eval()  # scores
        self.device, self.dtype, self.draws = device, dtype, Draws()
        shared = {id(buffer): buffer for buffer in module.buffers()}  # a backbone may be large
        self.learner = keyed(copy.deepcopy(self.module, shared).train(), self.draws)  # trains
        self.first_names = first_names(module)
        self.names = [name for name, _ in module.named_parameters()]
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.size = sum(p.numel() for p in module.parameters())
        self.width = -(-self.size // 16) * 16
        self.scale, self.shift = (values.to(device) for values in scaling(mean, std, dtype))
        self.bfloat16_products = precision == "bf16"
        own = "stacked" in vars(type(module))  # a subclass may compute something else
        self.kernels: Any = None  # of many models at once
        if own:
            self.kernels = module.stacked(self.bfloat16_products)  # type: ignore[operator]

    def zeros(self, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return k rows of zeros."""
        return torch.zeros(k, self.width, dtype=dtype, device=self.device)

    def layers(self, w_kW: Tensor) -> Layers:
        """Return the layers `[k, *shape]` of rows by name, as views."""
        out, start = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            out[name] = w_kW[:, start : start + size].view(len(w_kW), *shape)
            start += size
        return out

    def put(self, values: np.ndarray) -> Tensor:
        """Return an array on the device; copies to a GPU do not wait for it."""
        array = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type != "cuda":
            return array
        return array.pin_memory().to(self.device, non_blocking=True)

    def column(self, values: np.ndarray) -> Tensor:
        """Return float64 values `[k]` as a column `[k, 1]` on the device."""
        return self.put(np.asarray(values, np.float64))[:, None]

    def quotient(self, total: Tensor, by: float) -> Tensor:
        """Return float64 total / by: PyTorch on a GPU multiplies by 1 / by where it is a number."""
        return total / self.column(np.array([by]))[0]

    def columns(self, layers: str, head: str, flag: str = "--options.head") -> Tensor:
        """Return which columns of a row hold these layers, bool `[W]`.

        Args:
            layers: "head" (the layer named `head`), "none", "all", "normalisation", or names.
            flag: the setting that gave `layers`, for the sentence of a `UserError`.
        """
        if layers == "normalisation":
            norms = [name for name, part in self.module.named_modules() if isinstance(part, NORMS)]
            weighted = [norm for norm in norms if any(n.startswith(f"{norm}.") for n in self.names)]
            layers = ",".join(weighted) or "none"
        row = self.zeros(1)
        views = self.layers(row)
        for name in [] if layers == "none" else layers.split(","):
            layer = head if name == "head" else name
            inside = [n for n in views if name == "all" or n == layer or n.startswith(f"{layer}.")]
            if not inside:
                known = ", ".join(dict.fromkeys(n.rpartition(".")[0] for n in views))
                allowed = f"head, none, all, or of the layers {known}"
                raise UserError(f"{flag} is {layers}; allowed are {allowed}")
            for n in inside:
                views[n].fill_(1)
        return row[0] > 0

    def initial_row(self, init: str, rng: np.random.Generator) -> Tensor:
        """Return an initial row `[W]`.

        Weights of dense and convolutional layers are U(+-sqrt(6 / fan_in)) and biases 0; with
        "torch" both are U(+-1 / sqrt(fan_in)). Everything else is as built; with "own" all is.
        """
        row, built = self.zeros(1), dict(self.module.named_parameters())
        for name, layer in self.layers(row).items():
            parent, _, kind = name.rpartition(".")
            part: Any = self.module.get_submodule(parent)
            if init == "own" or kind not in ("weight", "bias") or not isinstance(part, DENSE):
                layer[0] = built[name].detach()
            elif kind == "weight" or init == "torch":
                scale, fan_in = 6 if init == "kaiming" else 1, part.weight[0].numel()
                bound = math.sqrt(scale / fan_in) if kind == "weight" else 1 / math.sqrt(fan_in)
                values = rng.uniform(-bound, bound, layer.shape[1:])
                layer[0] = torch.from_numpy(values.astype(np.float32))
        return row[0]

    def normalise(self, x: Tensor) -> Tensor:
        """Return float32 images with normalised channels, the last axis; tokens as int64."""
        if self.dtype == "int32":
            return x.long()
        return torch.addcmul(self.shift, x.float(), self.scale)

    def module_input(self, x_kSHWC: Tensor) -> Tensor:
        """Return normalised samples as a module takes them: images with channels first, a view."""
        return x_kSHWC.movedim(-1, 2) if x_kSHWC.dim() == 5 else x_kSHWC

    def logits(self, w_rW: Tensor, x_kSHWC: Tensor) -> Tensor:
        """Return `logits_of` rows and normalised images that are used once."""
        return self.logits_of(self.prepare_rows(w_rW), self.prepare_images(x_kSHWC))

    def prepare_rows(self, w_rW: Tensor) -> Any:
        """Return rows as `logits_of` takes them: work that all their images share."""
        layers = self.layers(w_rW)
        return self.kernels.prepare_rows(layers) if self.kernels else layers

    def prepare_images(self, x_kSHWC: Tensor) -> Any:
        """Return normalised images as `logits_of` takes them: work that all models share."""
        return self.kernels.prepare_images(x_kSHWC) if self.kernels else self.module_input(x_kSHWC)

    def logits_of(self, rows: Any, images: Any) -> Tensor:
        """Return logits `[r, S, classes]` of r = k m rows: m consecutive ones per client."""
        if self.kernels:
            return self.kernels.logits(rows, images)
        models = len(rows[self.names[0]]) // len(images)
        if len(images) == 1:
            each = ({name: layer[i] for name, layer in rows.items()} for i in range(models))
            return torch.stack([self._call(self.module, row, images[0]) for row in each])
        scorer = functools.partial(self._call, self.module)
        return vmap(scorer)(rows, images.repeat_interleave(models, 0))

    def features(self, w_kW: Tensor, x_kSHWC: Tensor, head: str) -> Tensor:
        """Return what the layer named `head` reads of each row's images, `[k, S, F]`."""
        x, layers, inputs = self.module_input(x_kSHWC), self.layers(w_kW), list[Tensor]()

        def read(row: Layers, images: Tensor) -> Tensor:
            call(self.module, self.first_names, row, images)
            return inputs.pop()

        layer = self.module.get_submodule(head)
        with layer.register_forward_pre_hook(lambda _, values: inputs.append(values[0])):
            if len(x) == 1:
                return read({name: layer[0] for name, layer in layers.items()}, x[0])[None]
            return vmap(read)(layers, x)

    def gradient(
        self, block: Block, x_kSHWC: Tensor, y_kS: Tensor, weight_kS: Tensor, key_k: Any = None
    ) -> Tensor:
        """Write the gradient of each row's weighted sum of losses into `block.g`; return the sums.

        The sums are `[k]`. Dropout draws from `key_k`.
        """
        block.g, losses = self.gradient_of(block.layers, x_kSHWC, y_kS, weight_kS, key_k)
        return losses

    def gradient_of(
        self, layers: Layers, x_kSHWC: Tensor, y_kS: Tensor, weight_kS: Tensor, key_k: Any
    ) -> tuple[Tensor, Tensor]:
        """Return rows of gradients `[k, W]`, and the weighted sums of losses `[k]`."""
        if self.kernels:
            grads, losses = self.kernels.gradient(layers, x_kSHWC, y_kS, weight_kS)
        else:
            batch = [self.module_input(x_kSHWC), y_kS, weight_kS]
            if key_k is not None:
                batch.append(key_k)
            if len(x_kSHWC) == 1:
                leaves = {name: v[0].detach().requires_grad_() for name, v in layers.items()}
                with torch.enable_grad():
                    loss = self._loss(leaves, *(part[0] for part in batch))
                    gradients = torch.autograd.grad(loss, list(leaves.values()))
                grads, losses = dict(zip(leaves, gradients, strict=True)), loss.detach()[None]
            else:
                grads, losses = vmap(grad_and_value(self._loss))(layers, *batch)
        k = len(y_kS)
        parts = [grads[name].reshape(k, -1) for name in self.names]
        return torch.cat([*parts, parts[0].new_zeros(k, self.width - self.size)], 1), losses

    def _call(self, module: nn.Module, layers: Layers, x: Tensor) -> Tensor:
        """Return one model's logits."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16_products):
            logits = call(module, self.first_names, layers, x)
            return logits.float() if self.bfloat16_products else logits

    def _loss(
        self, layers: Any, x: Tensor, y: Tensor, weight: Tensor, key: Tensor | None = None
    ) -> Tensor:
        """Return one model's weighted sum of losses over a mini-batch."""
        self.draws.begin(key)
        logits = self._call(self.learner, layers, x)
        self.draws.begin(None)  # torch.compile lets no key of a vmap outlive it
        return (nn.functional.cross_entropy(logits, y, reduction="none") * weight).sum()


def cross_entropy(logits_kSC: Tensor, y_kS: Tensor) -> Tensor:
    """Return each image's loss, `[k, S]`; PyTorch's own differs from call to call on a GPU."""
    return -logits_kSC.log_softmax(2).gather(2, y_kS[:, :, None])[:, :, 0]


def fixed_point(w_kW: Tensor, p_k: Tensor) -> Tensor:
    """Return round(p_i w_i 2^50), int64 `[k, W]`: in any order and grouping their sum is exact."""
    return (w_kW.double() * (p_k[:, None] * FIXED_POINT)).round_().to(torch.int64)


def from_fixed_point(total: Tensor) -> Tensor:
    """Return the float64 value of a sum of `fixed_point` rows."""
    return total.double() / FIXED_POINT


def largest(w_kW: Tensor) -> np.ndarray:
    """Return the largest absolute weight of each row, float32 `[k]`; NaN where one is."""
    if w_kW.device.type != "cpu":
        return torch.linalg.vector_norm(w_kW, math.inf, dim=1).cpu().numpy()
    rows = w_kW.detach().numpy()
    return np.maximum(rows.max(1), -rows.min(1))  # in a tenth of PyTorch's time


def check_fixed_point(w_kW: Tensor) -> None:
    """Raise `UserError` where finite rows have weights too large for exact sums."""
    if len(w_kW) and float(largest(w_kW).max()) >= LARGEST:
        mend = "lower --lr or set --clip_norm"
        raise UserError(f"a weight has grown beyond 4096, which exact sums cannot hold; {mend}")
