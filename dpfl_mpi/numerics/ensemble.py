"""`Ensemble`: many models of one network, each a row of a tensor.

The K models of a rank are one float32 tensor `w_KW`. Its width W is the number of parameters,
rounded up to 64 bytes; the padding stays zero. An average is a weighted sum of rows, a message is a
row. Here PyTorch computes a row's logits and gradient; `Backend` trains and scores with them.
Samples are images `[H, W, C]`, vectors `[F]` or tokens `[L]`; the comments speak of images.

Axes: k rows of a block, W row width, S images of a mini-batch or scored at once, H W C an image,
m models scored on one client's images, C classes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import platform
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.dropout import Draws, keyed
from dpfl_mpi.numerics.normalising import scaling

# attention as matrix products: PyTorch's fused forms give different bits, some at every call
torch.backends.mha.set_fastpath_enabled(False)
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
X86 = platform.machine() in ("x86_64", "AMD64")
# without AVX-512, oneDNN of torch 2.13 writes beyond the end of convolutions of few channels
if X86 and torch.backends.cpu.get_cpu_capability() != "AVX512":
    torch.backends.mkldnn.set_flags(_enabled=False)
    torch.backends.nnpack.set_flags(_enabled=False)  # would replace it; inexact on whole numbers

Layers = dict[str, Tensor]  # by name, each [*shape] or of k rows [k, *shape]
Rows = slice | np.ndarray  # which of this rank's rows: consecutive ones, or by number
FIXED_POINT = 2.0**50  # scale of exact sums: sum p_i = 1, |w_i| < 2^12 keep them below 2^62
LARGEST = 2.0**12  # a client with a weight that large has diverged
NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)
DENSE = (nn.Linear, nn.modules.conv._ConvNd)  # what Kaiming's rule initialises


class Block:
    """k rows in training, by their numbers `rows`; `loss` and `steps` `[k]` add up over steps."""

    def __init__(
        self, ensemble: Ensemble, w_kW: Tensor, m_kW: Any = None, rows: Rows = slice(None)
    ):
        self.ensemble, self.w, self.momentum, self.rows = ensemble, w_kW, m_kW, rows
        self.loss, self.steps = w_kW.new_zeros(len(w_kW)), np.zeros(len(w_kW), np.int64)

    @functools.cached_property
    def g(self) -> Tensor:
        """The rows' gradients, made when first asked for: the kernels train epochs without them."""
        return torch.zeros_like(self.w)

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
    """Return, for every name of a parameter, that parameter's first name: layers may share one.

    PyTorch's own search for such ties (2.13) misses parameters of a layer that is used twice.
    """
    first, names = dict[Tensor, str](), dict[str, str]()
    for prefix, part in module.named_modules():  # a layer that is used twice comes once
        of_part = part.named_parameters(prefix, recurse=False, remove_duplicate=False)
        for name, p in of_part:
            names[name] = first.setdefault(p, name)
    return names


def call(module: nn.Module, names: dict[str, str], layers: Layers, x: Tensor) -> Tensor:
    """Return a module's output for x with `layers` as its parameters; `names` are `first_names`."""
    parameters = {name: layers[first] for name, first in names.items()}
    return functional_call(module, parameters, (x,), tie_weights=False)


def with_safe_norms(module: nn.Module) -> nn.Module:
    """Let the GroupNorm layers of a module copy an input that has no gradient; return the module.

    In their gradient PyTorch (2.13) crashes on a CPU where images lie channels last in memory.
    """

    def copy_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not inputs or inputs[0].requires_grad or not torch.is_grad_enabled():
            return inputs
        return (inputs[0].clone(memory_format=torch.contiguous_format),)

    for part in module.modules():
        if isinstance(part, nn.GroupNorm):
            part.register_forward_pre_hook(copy_input)
    return module


@contextlib.contextmanager
def inputs_of(module: nn.Module, layer: str) -> Iterator[list[Tensor]]:
    """Yield a list that gets what a layer, by name, reads in each call of the module."""
    inputs = list[Tensor]()

    def note(_: nn.Module, values: tuple[Tensor, ...]) -> None:
        inputs.append(values[0])

    with module.get_submodule(layer).register_forward_pre_hook(note):
        yield inputs


def mean_cross_entropy(logits_SC: Tensor, y_S: Tensor) -> Tensor:
    """Return the mean loss, a number. Each one is multiplied by 1 / S, as the kernels do."""
    losses = nn.functional.cross_entropy(logits_SC, y_S, reduction="none")
    return (losses * (1 / len(y_S))).sum()


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

        `scaling` normalises samples by mean, std and dtype. With the precision "bf16" the factors
        of matrix products are rounded to bfloat16.
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

    def on_cpu(self) -> Ensemble:
        """Return this ensemble, or its copy, on a CPU."""
        cpu = torch.device("cpu")
        if self.device == cpu:
            return self
        copied = copy.deepcopy(self)
        copied.device, copied.scale, copied.shift = cpu, self.scale.cpu(), self.shift.cpu()
        copied.module.cpu(), copied.learner.cpu()
        return copied

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

    def row_layers(self, w_W: Tensor) -> Layers:
        """Return the layers of one row."""
        return {name: layer[0] for name, layer in self.layers(w_W[None]).items()}

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
        """Return float64 total / by; by a plain number PyTorch on a GPU multiplies by 1 / by."""
        return total / self.column(np.array([by]))[0]

    def columns(
        self, layers: str, head: str, flag: str = "--options.head", words: str = "head, none, all"
    ) -> Tensor:
        """Return which columns of a row hold these layers, bool `[W]`.

        Args:
            layers: "head" (the layer named `head`), "none", "all", "normalisation", or names.
            flag: the setting that gave `layers`, for the sentence of a `UserError`.
            words: what it may be, beside names of layers, for the same.
        """
        if layers == "normalisation":
            norms = [name for name, part in self.module.named_modules() if isinstance(part, NORMS)]
            weighted = [norm for norm in norms if any(n.startswith(f"{norm}.") for n in self.names)]
            layers = ",".join(weighted) or "none"
        mask = self.zeros(1)
        views = self.layers(mask)  # of the mask, by the parameters' names
        for name in [] if layers == "none" else layers.split(","):
            layer = head if name == "head" else name
            inside = [n for n in views if name == "all" or n == layer or n.startswith(f"{layer}.")]
            if not inside:
                known = ", ".join(dict.fromkeys(n.rpartition(".")[0] for n in views))
                allowed = f"{words}, or of the layers {known}"
                raise UserError(f"{flag} is {layers}; allowed are {allowed}")
            for n in inside:
                views[n].fill_(1)
        return mask[0] > 0

    def initial_row(self, init: str, rng: np.random.Generator) -> Tensor:
        """Return an initial row `[W]`, drawn as --init says.

        By "kaiming" the weights of dense and convolutional layers are U(+-sqrt(6 / fan_in)), their
        biases 0; by "torch" both are U(+-1 / sqrt(fan_in)). All else, by "own" all, is as built.
        """
        row, built = self.zeros(1), dict(self.module.named_parameters())
        for name, values in self.layers(row).items():
            parent, _, kind = name.rpartition(".")
            layer: Any = self.module.get_submodule(parent)
            if init == "own" or kind not in ("weight", "bias") or not isinstance(layer, DENSE):
                values[0] = built[name].detach()
            elif kind == "weight" or init == "torch":
                scale, fan_in = 6 if init == "kaiming" else 1, layer.weight[0].numel()
                bound = math.sqrt(scale / fan_in) if kind == "weight" else 1 / math.sqrt(fan_in)
                drawn = rng.uniform(-bound, bound, values.shape[1:])
                values[0] = torch.from_numpy(drawn.astype(np.float32))
        return row[0]

    def normalise(self, x: Tensor) -> Tensor:
        """Return float32 images with normalised channels, the last axis; tokens as int64."""
        if self.dtype == "int32":
            return x.long()
        return torch.addcmul(self.shift, x.float(), self.scale)

    def module_input(self, x_SHWC: Tensor) -> Tensor:
        """Return normalised samples as a module takes them: images with channels first, a view."""
        return x_SHWC.movedim(-1, 1) if x_SHWC.dim() == 4 else x_SHWC

    def logits(self, w_mW: Tensor, x_SHWC: Tensor) -> Tensor:
        """Return logits `[m, S, C]` of each row's model for the same normalised images."""
        images = self.module_input(x_SHWC)
        return torch.stack([self._call(self.module, self.row_layers(w), images) for w in w_mW])

    def features(self, w_W: Tensor, x_SHWC: Tensor, head: str) -> Tensor:
        """Return the input of the layer named `head` under a row's model, `[S, F]`."""
        with inputs_of(self.module, head) as inputs:
            images = self.module_input(x_SHWC)
            call(self.module, self.first_names, self.row_layers(w_W), images)
        return inputs.pop()

    def gradient(
        self,
        w_W: Tensor,
        x_SHWC: Tensor,
        y_S: Tensor,
        key: Tensor | None = None,
        loss_of: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient `[W]` of a mini-batch's mean loss, and that loss.

        It is `loss_of(logits [S, C], y [S])`. Dropout draws its masks from the `key`, int64.
        """
        layers = self.row_layers(w_W)
        leaves = {name: layer.detach().requires_grad_() for name, layer in layers.items()}
        self.draws.begin(key)
        with torch.enable_grad():
            logits = self._call(self.learner, leaves, self.module_input(x_SHWC))
            loss = loss_of(logits, y_S)
            # a forward that chooses by what it reads may not use every parameter
            gradients = torch.autograd.grad(
                loss, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        padding = w_W.new_zeros(self.width - self.size)
        return torch.cat([*(g.reshape(-1) for g in gradients), padding]), loss.detach()

    def _call(self, module: nn.Module, layers: Layers, x: Tensor) -> Tensor:
        """Return one model's logits."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16_products):
            logits = call(module, self.first_names, layers, x)
            return logits.float() if self.bfloat16_products else logits


def cross_entropy(logits_kSC: Tensor, y_kS: Tensor) -> Tensor:
    """Return each image's loss, `[k, S]`; PyTorch's own differs from call to call on a GPU."""
    return -logits_kSC.log_softmax(2).gather(2, y_kS[:, :, None])[:, :, 0]


def fixed_point(w_kW: Tensor, p_k: Tensor) -> Tensor:
    """Return round(p_i w_i 2^50), int64 `[k, W]`: their sum is exact in any order."""
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
