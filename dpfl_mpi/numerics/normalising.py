"""`NormalisingModel`: a network together with the normalisation that its training images had."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dpfl_mpi.errors import UserError


def scaling(mean: Sequence[float], std: Sequence[float], dtype: str) -> tuple[Tensor, Tensor]:
    """Return the factor and the summand that normalise samples of a dtype, float32 `[C]`; `mean` and `std` are of uint8 scaled to 0..1."""
    unit = 255 if dtype == "uint8" else 1
    shift = [-m / s for m, s in zip(mean, std, strict=True)]
    return torch.tensor([1 / (unit * s) for s in std], dtype=torch.float32), torch.tensor(shift, dtype=torch.float32)


class NormalisingModel(nn.Module):
    """A network that takes samples as data files hold them, images `[S, H, W, C]`, vectors `[S, F]` or tokens `[S, L]`; its logits `[S, classes]`."""

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float], dtype: str = "uint8"):
        super().__init__()
        self.tokens, self.bytes = dtype == "int32", dtype == "uint8"
        self.network = network
        for name, values in zip(("scale", "shift"), scaling(mean, std, dtype), strict=True):
            self.register_buffer(name, values, persistent=False)

    def forward(self, images: Tensor | np.ndarray) -> Tensor:
        """Return the network's output for raw images `[S, H, W, C]`, of PyTorch or NumPy; floats in place of bytes are a `UserError`."""
        images = torch.as_tensor(images)
        if self.tokens:
            return self.network(images.long())
        last, floats = len(self.scale), images.is_floating_point()
        if images.dim() not in ((4,) if self.bytes else (2, 4)) or images.shape[-1] != last or (self.bytes and floats):
            given = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
            numbers = "whole numbers from 0 to 255," if self.bytes else f"numbers [S, {last}] or"
            takes = f"it takes samples as the data hold them: {numbers} [S, H, W, {last}]"
            raise UserError(f"the model was given {given}; {takes}")
        x = torch.addcmul(self.shift, images.float(), self.scale)
        return self.network(x.movedim(-1, 1) if x.dim() == 4 else x)
