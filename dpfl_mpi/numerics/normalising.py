"""Samples as data files hold them, and the normalisation that a network's input needs."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dpfl_mpi.errors import UserError


def scaling(mean: Sequence[float], std: Sequence[float], dtype: str) -> tuple[Tensor, Tensor]:
    """Return the factor and the summand that normalise samples of a dtype, float32 `[C]`.

    `mean` and `std` are those of the samples, for uint8 as fractions of 255.
    """
    unit = 255 if dtype == "uint8" else 1
    scale = [1 / (unit * s) for s in std]
    shift = [-m / s for m, s in zip(mean, std, strict=True)]
    return torch.tensor(scale, dtype=torch.float32), torch.tensor(shift, dtype=torch.float32)


class NormalisingModel(nn.Module):
    """A network that takes samples as data files hold them, and returns logits `[S, classes]`.

    Samples are images `[S, H, W, C]`, vectors `[S, F]` or tokens `[S, L]`.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, network: nn.Module, mean: Sequence[float], std: Sequence[float], dtype: str = "uint8"
    ):
        super().__init__()
        self.tokens, self.bytes = dtype == "int32", dtype == "uint8"
        self.network = network
        scale, shift = scaling(mean, std, dtype)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, samples: Tensor | np.ndarray) -> Tensor:
        """Return the network's logits; `UserError`: floats in place of bytes, or another shape."""
        samples = torch.as_tensor(samples)
        if self.tokens:
            return self.network(samples.long())
        channels = len(self.scale)
        right = samples.dim() in ((4,) if self.bytes else (2, 4)) and samples.shape[-1] == channels
        if not right or (self.bytes and samples.is_floating_point()):
            given = f"{str(samples.dtype).removeprefix('torch.')} {list(samples.shape)}"
            floats = f"numbers [S, {channels}] or"
            numbers = "whole numbers from 0 to 255," if self.bytes else floats
            takes = f"it takes samples as the data hold them: {numbers} [S, H, W, {channels}]"
            raise UserError(f"the model was given {given}; {takes}")
        x = torch.addcmul(self.shift, samples.float(), self.scale)
        return self.network(x.movedim(-1, 1) if x.dim() == 4 else x)
