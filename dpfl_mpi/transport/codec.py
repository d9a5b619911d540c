"""--codec: what a client sends in place of its model. What it leaves out is in the next difference.

All that hold client j's last encoded row x add to it what arrives, as j does itself: x becomes x +
C(w - x), and x is what they choose and average with (CHOCO-SGD: Koloskova, Stich and Jaggi, ICML
2019, with gamma = 1). At first x is the common initial row.
"""

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.settings.values import nearest

LEVELS = 127  # of int8, on either side of 0


class Int8:
    """Each layer's difference in whole steps of a 127th of its largest number."""

    def __init__(self, ensemble: Ensemble, columns_W: Tensor | None):
        """Encode the layers that are in these columns, bool `[W]`; None: all."""
        self.ensemble, self.columns_W = ensemble, columns_W
        sent_1W = ensemble.zeros(1) + 1 if columns_W is None else columns_W[None]
        layers = ensemble.layers(sent_1W[:, : ensemble.size])
        self.layers = {name: part.numel() for name, part in layers.items() if bool(part.any())}
        self.bytes = sum(4 + size for size in self.layers.values())  # of every message

    def encode(self, w_W: Tensor, x_W: Tensor) -> np.ndarray:
        """Return the message of w - x, uint8 `[bytes]`, and move x in place as receivers do."""
        w, x = self.ensemble.layers(w_W[None]), self.ensemble.layers(x_W[None])
        parts = []
        for name in self.layers:
            difference = w[name][0] - x[name][0]
            step = difference.abs().max() / LEVELS
            steps = torch.round(difference / step if step > 0 else difference).to(torch.int8)
            parts += [step.cpu().numpy().reshape(1), steps.cpu().numpy().reshape(-1)]
        message = np.concatenate([part.view(np.uint8) for part in parts])
        self.decode(message, x_W)
        return message

    def decode(self, message: np.ndarray, x_W: Tensor) -> None:
        """Move x in place by a message."""
        layers, start = self.ensemble.layers(x_W[None]), 0
        for name, size in self.layers.items():
            end = start + 4 + size
            step = torch.from_numpy(message[start : start + 4].copy().view(np.float32))
            steps = torch.from_numpy(message[start + 4 : end].copy().view(np.int8))
            change = steps.to(x_W.device).float() * step.to(x_W.device)
            layers[name][0] += change.view(layers[name][0].shape)
            start = end


class TopK:
    """The weights that changed most, and which they are."""

    def __init__(self, ensemble: Ensemble, columns_W: Tensor | None, share: float):
        """Send a share of the weights in these columns, bool `[W]`; None: of all."""
        self.ensemble, self.columns_W = ensemble, columns_W
        sent_W = ensemble.zeros(1)[0] + 1 if columns_W is None else columns_W
        self.columns = torch.nonzero(sent_W[: ensemble.size])[:, 0]
        self.count = max(1, nearest(share, len(self.columns)))
        # a number or a bit for each column says which are sent; nothing where all are
        some = self.count < len(self.columns)
        self.which_bytes = min(4 * self.count, -(-len(self.columns) // 8)) if some else 0
        self.bytes = 4 * self.count + self.which_bytes

    def encode(self, w_W: Tensor, x_W: Tensor) -> np.ndarray:
        """Return the message of w - x, uint8 `[bytes]`, and move x in place as receivers do."""
        change = (w_W - x_W)[self.columns].abs()
        largest = torch.sort(change, descending=True, stable=True).indices[: self.count]
        which = torch.sort(largest).values
        values, numbers = w_W[self.columns[which]].cpu().numpy(), which.cpu().numpy()
        if self.which_bytes == 4 * self.count:
            positions = numbers.astype(np.int32).view(np.uint8)
        else:
            marks = np.zeros(len(self.columns), bool)
            marks[numbers] = True
            positions = np.packbits(marks)[: self.which_bytes]
        message = np.concatenate([values.view(np.uint8), positions])
        self.decode(message, x_W)
        return message

    def decode(self, message: np.ndarray, x_W: Tensor) -> None:
        """Move x in place by a message."""
        values, positions = message[: 4 * self.count].copy(), message[4 * self.count :]
        if self.which_bytes == 4 * self.count:
            which = positions.copy().view(np.int32).astype(np.int64)
        elif self.which_bytes:
            which = np.flatnonzero(np.unpackbits(positions, count=len(self.columns)))
        else:
            which = np.arange(len(self.columns))
        columns = self.columns[torch.from_numpy(which).to(x_W.device)]
        x_W[columns] = torch.from_numpy(values.view(np.float32)).to(x_W.device)
