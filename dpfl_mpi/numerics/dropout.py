"""Dropout with masks keyed by client, epoch, step and layer.

PyTorch's masks come from one generator, which all clients of a rank would share. Here a mask is a
hash of its key and of each element's place: the same bits on any number of ranks, on a CPU and on a
GPU. The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

# as int64 holds them; its products wrap as those of 64 bits without a sign do
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, odd
FACTORS = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)
BITS = 24  # of a draw: a float32 holds them exactly
# how many of the last axes are dropped together
TRAILING: dict[type, int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


def mix(z: Tensor) -> Tensor:
    """Return splitmix64's output function of int64 numbers."""
    for shift, factor in FACTORS:
        z = (z ^ shift_right(z, shift)) * factor
    return z ^ shift_right(z, 31)


def shift_right(z: Tensor, bits: int) -> Tensor:
    """Return z >> bits of numbers without a sign; int64's own shift copies the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


class Draws:
    """What a model's dropout layers share: the key of this step, and the masks drawn with it."""

    def __init__(self) -> None:
        self.layers = 0
        self.key: Tensor | None = None
        self.drawn = 0

    def begin(self, key: Tensor | None) -> None:
        self.key, self.drawn = key, 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Return the next mask's draws, int64 `shape`, uniform in 0 to 2^24 - 1."""
        assert self.key is not None, "a training step of a model with dropout needs a key"
        self.drawn += 1
        skipped = (GOLDEN * self.drawn + 2**63) % 2**64 - 2**63
        start = mix(self.key + skipped)
        place = torch.arange(1, math.prod(shape) + 1, device=self.key.device).view(shape)
        return shift_right(mix(start + place * GOLDEN), 64 - BITS)


class KeyedDropout(nn.Module):
    """`nn.Dropout` with keyed masks, in which the last `trailing` axes share a draw."""

    def __init__(self, p: float, trailing: int, draws: Draws):
        super().__init__()
        self.p, self.trailing, self.draws = p, trailing, draws
        draws.layers += 1

    def shared_axes(self, x: Tensor) -> int:
        """Return how many of x's last axes share a draw: for `nn.Dropout2d` all but [S, C]."""
        return x.dim() - 2 if self.trailing == 2 else self.trailing

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shared = self.shared_axes(x)
        shape = x.shape[: x.dim() - shared] + (1,) * shared
        stays = self.draws.take(shape) >= math.ceil(self.p * 2**BITS)
        return torch.where(stays, x * (1 / (1 - self.p) if self.p < 1 else 0.0), 0.0)


def keyed(module: nn.Module, draws: Draws) -> nn.Module:
    """Replace PyTorch's dropout layers inside a module by keyed ones, in place; return it."""
    # named_children() leaves out a layer's second name
    parts: list[tuple[str, Any]] = [*module._modules.items()]
    for name, part in parts:
        if type(part) in TRAILING:
            setattr(module, name, KeyedDropout(part.p, TRAILING[type(part)], draws))
        elif part is not None:
            keyed(part, draws)
    return module
