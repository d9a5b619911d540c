"""A small residual network (He et al., CVPR 2016) with GroupNorm (Wu and He, ECCV 2018).

Without options it is ResNet-14 of 175,000 parameters: a 3x3 convolution, then three stages of two
blocks with 16, 32 and 64 channels. Each stage but the first halves the image. A block is two 3x3
convolutions; where its size changes, the shortcut is a 1x1 convolution.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import option
from dpfl_mpi.settings.values import whole

HEAD = "head"


@dataclass(frozen=True)
class Options:
    widths: str = option("16,32,64", "channels of each stage")
    blocks: int = option(2, "residual blocks of a stage", low=1, high=100)
    groups: int = option(8, "most groups of a GroupNorm", low=1)


class Block(nn.Module):
    """x + f(x), where f is twice: normalise, ReLU, convolve (He et al., ECCV 2016)."""

    def __init__(self, before: int, channels: int, stride: int, groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(math.gcd(before, groups), before)
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.norm2 = nn.GroupNorm(math.gcd(channels, groups), channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.shortcut = None
        if before != channels or stride > 1:
            self.shortcut = nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x).relu()
        direct = x if self.shortcut is None else self.shortcut(normed)
        return direct + self.conv2(self.norm2(self.conv1(normed)).relu())


class ResNet(nn.Module):
    def __init__(self, channels: int, classes: int, widths: list[int], blocks: int, groups: int):
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        stages, before = [], widths[0]
        for stage, width in enumerate(widths):
            for i in range(blocks):
                stages.append(Block(before, width, 2 if i == 0 and stage else 1, groups))
                before = width
        self.stages = nn.Sequential(*stages)
        self.norm = nn.GroupNorm(math.gcd(widths[-1], groups), widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(self.stem(x))).relu().mean((2, 3)))


def build(shape: tuple[int, ...], classes: int, widths: str, blocks: int, groups: int) -> nn.Module:
    """Return the network for images of `shape` = (H, W, C) of any size."""
    if len(shape) != 3:
        raise UserError("--model resnet needs images; use --model mlp for vectors")
    sizes = [int(width) if whole(width.strip()) else 0 for width in str(widths).split(",")]
    if min(sizes) < 1:
        allowed = "whole numbers from 1 with commas: 16,32,64"
        raise UserError(f"--model_options.widths is {widths}; allowed are {allowed}")
    return ResNet(shape[2], classes, sizes, blocks, groups)
