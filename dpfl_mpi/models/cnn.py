"""The paper's CNN (sections E.2, E.3): two convolutions and three fully connected layers.

# Paper: it says "three convolutional and two fully connected layers"; its own list of layers and
# the authors' code have two and three.
Colour images: 6 and 16 channels, 120 and 84 units (62,006 parameters at 32x32). Grey images
(FEMNIST): 4 and 12 channels, 120 and 100 units. Convolutions are 5x5, with a 2x2 max-pool.
"""

from torch import Tensor, nn

from dpfl_mpi.errors import UserError

HEAD = "head"


class CNN(nn.Module):
    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        channels: tuple[int, int],
        units: tuple[int, int],
    ):
        super().__init__()
        h, w, c = shape
        pooled = [((n - 4) // 2 - 4) // 2 for n in (h, w)]
        self.conv1 = nn.Conv2d(c, channels[0], 5)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5)
        self.fc1 = nn.Linear(channels[1] * pooled[0] * pooled[1], units[0])
        self.fc2 = nn.Linear(units[0], units[1])
        self.head = nn.Linear(units[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        x = self.fc1(x.flatten(1)).relu()
        x = self.fc2(x).relu()
        return self.head(x)


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the CNN for images of `shape` = (H, W, C), at least 16x16."""
    use, needs = "use --model mlp", "--model cnn needs images"
    if len(shape) != 3:
        raise UserError(f"{needs}, these are vectors of {shape[0]} numbers; {use}")
    if min(shape[:2]) < 16:
        raise UserError(f"{needs} of at least 16x16, these are {shape[0]}x{shape[1]}; {use}")
    grey = shape[2] == 1
    return CNN(shape, classes, (4, 12) if grey else (6, 16), (120, 100) if grey else (120, 84))
