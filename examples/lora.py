"""LoRA (Hu et al., 2022): a row holds low-rank changes of a backbone, whose layers are buffers."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dpfl_mpi.settings import option

FILES = ["base.pt"]  # made by backbone.py; its content is part of the Run


@dataclass(frozen=True)
class Options:
    rank: int = option(4, "rank of the change of each layer", low=1)


class Adapted(nn.Module):
    """x W^T + b + x A^T B^T: A `[rank, in]` and B `[out, rank]` are trained; B starts at 0."""

    def __init__(self, weight, bias, rank):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, x):
        return x @ self.weight.T + self.bias + x @ self.a.T @ self.b.T


def build(shape, classes, rank):
    path = Path(__file__).with_name(FILES[0])
    base = torch.load(path, mmap=True)  # all ranks of a node map the same memory
    layers = [nn.Flatten()]
    for name in ("fc1", "head"):
        layers += [Adapted(base[f"{name}.weight"], base[f"{name}.bias"], rank), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
