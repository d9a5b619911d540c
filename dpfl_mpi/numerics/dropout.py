"""Dropout with masks keyed by client, epoch, step and layer.

PyTorch's masks come from one generator, which all clients of a rank would share. Here a mask is a
hash of a step's key and of each element's place: the same bits on any number of ranks, on a CPU and
on a GPU. The hash is splitmix64 (Steele, Lea and Flood, OOPSLA 2014). `keyed` replaces the dropout
layers of a module; its `Draws` then gets a new key for each step.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# The constants of splitmix64 as int64, whose products wrap as unsigned ones do.
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
    """Return z >> bits of unsigned numbers; int64's own shift copies the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


class Draws:
    """What a model's dropout layers share: the key of this step, and the masks drawn with it."""

    def __init__(self) -> None:
        self.layers = 0  # keyed layers of the model
        self.key: Tensor | None = None
        self.drawn = 0  # masks in this step so far

    def begin(self, key: Tensor | None) -> None:
        self.key, self.drawn = key, 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Return the next mask's draws, int64 `shape`, uniform in 0 to 2^24 - 1."""
        assert self.key is not None, "a training step of a model with dropout needs a key"
        self.drawn += 1
        offset = (GOLDEN * self.drawn + 2**63) % 2**64 - 2**63  # wrapped to int64
        start = mix(self.key + offset)
        number = torch.arange(1, math.prod(shape) + 1, device=self.key.device).view(shape)
        return shift_right(mix(start + number * GOLDEN), 64 - BITS)


class KeyedDropout(nn.Module):
    """`nn.Dropout` with keyed masks, in which the last `trailing` axes share a draw."""

    def __init__(self, p: float, trailing: int, draws: Draws):
        super().__init__()
        self.p, self.trailing, self.draws = p, trailing, draws
        draws.layers += 1

    def shared_axes(self, x: Tensor) -> int:
        """Return how many of x's last axes share a draw: for `nn.Dropout2d` all but [S, C]."""
        # as PyTorch does, whose Dropout3d takes [S, C, L] for one sample of S channels
        return x.dim() - 2 if self.trailing == 2 else min(self.trailing, x.dim() - 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shared = self.shared_axes(x)
        shape = x.shape[: x.dim() - shared] + (1,) * shared
        stays = self.draws.take(shape) >= math.ceil(self.p * 2**BITS)
        return torch.where(stays, x * (1 / (1 - self.p) if self.p < 1 else 0.0), 0.0)


class KeyedAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose weights pass through a keyed layer, without added keys."""

    drop: KeyedDropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what PyTorch's layer does for samples with an axis of their own.

        `is_causal` only says that `attn_mask` is the causal one.
        """
        first = self.batch_first
        inputs = (t if first else t.transpose(0, 1) for t in (query, key, value))
        separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = map(functional.linear, inputs, weights, biases)
        # [samples, heads, words, width of a head]
        q, k, v = (t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in projected)
        scores = (q @ k.transpose(2, 3)) * (1 / math.sqrt(self.head_dim))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask[:, None, None]
        for mask in (attn_mask, key_padding_mask):
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(mask, -math.inf)
            elif mask is not None:
                scores = scores + mask
        shares = self.drop(torch._safe_softmax(scores, 3))  # 0 where all is masked
        joint = (shares @ v).transpose(1, 2).flatten(2)
        y = functional.linear(joint, self.out_proj.weight, self.out_proj.bias)
        returned = (shares.mean(1) if average_attn_weights else shares) if need_weights else None
        return y if first else y.transpose(0, 1), returned


def keyed(module: nn.Module, draws: Draws) -> nn.Module:
    """Replace PyTorch's dropout inside a module by keyed layers, in place; return it."""
    # named_children() leaves out a layer's second name
    parts: list[tuple[str, Any]] = [*module._modules.items()]
    for name, part in parts:
        if type(part) in TRAILING:
            setattr(module, name, KeyedDropout(part.p, TRAILING[type(part)], draws))
        elif type(part) is nn.MultiheadAttention and part.dropout > 0:
            if part.bias_k is None and not part.add_zero_attn:  # else `check_module` refuses it
                part.__class__ = KeyedAttention  # with its parameters, by their names
                part.drop = KeyedDropout(part.dropout, 0, draws)
        elif part is not None:
            keyed(part, draws)
    return module
