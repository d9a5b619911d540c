"""A perceptron with one hidden layer of 64."""

import math

from torch import Tensor, nn

HEAD = "head"


class MLP(nn.Module):
    def __init__(self, inputs: int, classes: int, hidden: int = 64):
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc1(x.flatten(1)).relu())


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the perceptron for images of `shape` = (H, W, C) or vectors of `shape` = (F,)."""
    return MLP(math.prod(shape), classes)
