"""--codec: what a client sends in place of its model. What it leaves out stays in the difference that is encoded next: the error is fed back.

All that hold client j's last encoded row x add to it what arrives, as j does itself: x becomes x + C(w - x), and x is what they choose and average
with (CHOCO-SGD: Koloskova, Stich and Jaggi, ICML 2019, where gamma = 1). At first x is the common initial row. Who does not hold it gets x whole.
"""

import torch
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.values import nearest

LEVELS = 127  # of int8, on either side of 0


class Encoder:
    def __init__(self, run: Resolved, ensemble: Ensemble, start_W: Tensor, columns_W: Tensor | None):
        """Take the common initial row, and which columns are sent; None: all."""
        self.kind, self.share, self.rank = run.codec.kind, run.codec.share, run.codec.rank
        self.ensemble, self.start, self.seed = ensemble, start_W, run.seed
        sent = ensemble.zeros(1) + 1 if columns_W is None else columns_W[None]
        layers = ensemble.layers(sent[:, : ensemble.size])
        self.layers = [name for name, part in layers.items() if bool(part.any())]
        self.sizes = [layers[name].numel() for name in self.layers]
        self.columns = torch.nonzero(sent[0, : ensemble.size])[:, 0]  # those that are sent
        self.kept = max(1, nearest(self.share, len(self.columns))) if self.kind == "topk" else 0

    @property
    def bytes(self) -> int:
        """Bytes of an encoded row."""
        count = sum(self.sizes)
        if self.kind == "int8":
            return count + 4 * len(self.sizes)  # and a step per layer
        if self.kind == "topk":  # values, and which: numbers or a bit for each
            return 4 * self.kept + (min(4 * self.kept, -(-count // 8)) if self.kept < count else 0)
        return 4 * sum(self._factors(name) or size for name, size in zip(self.layers, self.sizes, strict=True))

    def encode(self, w_W: Tensor, x_W: Tensor) -> None:
        """Move x in place by what is sent of w - x."""
        if self.kind == "topk":
            size = (w_W - x_W)[self.columns].abs()
            which = self.columns[torch.sort(size, descending=True, stable=True).indices[: self.kept]]
            x_W[which] = w_W[which]
            return
        w, x = self.ensemble.layers(w_W[None]), self.ensemble.layers(x_W[None])  # views
        for name in self.layers:
            difference = w[name][0] - x[name][0]
            if self.kind == "int8":
                step = difference.abs().max() / LEVELS
                if step > 0:
                    x[name][0] += torch.round(difference / step) * step
            elif self._factors(name):
                x[name][0] += self._low_rank(name, difference)
            else:
                x[name][0] = w[name][0]

    def _factors(self, name: str) -> int:
        """Return how many numbers the two factors of a layer have; 0 where they save nothing, as of a bias."""
        shape = self.ensemble.shapes[name]
        count = self.ensemble.layers(self.start[None])[name].numel()
        factors = self.rank * (shape[0] + count // shape[0]) if len(shape) > 1 else count
        return factors if factors < count else 0

    def _low_rank(self, name: str, difference: Tensor) -> Tensor:
        """Return the product of two factors: one step of subspace iteration (PowerSGD: Vogels, Karimireddy and Jaggi, NeurIPS 2019, Algorithm 1)."""
        matrix = difference.reshape(len(difference), -1).double()
        draws = streams.stream(self.seed, streams.CODEC, 0, 0).standard_normal((matrix.shape[1], self.rank))
        left = torch.linalg.qr(matrix @ torch.from_numpy(draws).to(matrix.device)).Q.float().double()
        right = (matrix.T @ left).float().double()  # both are sent as float32
        return (left @ right.T).float().reshape(difference.shape)
