"""--codec: what a client sends in place of its model. What it leaves out stays in the difference that is encoded next: the error is fed back.

All that hold client j's last encoded row x add to it what arrives, as j does itself: x becomes x + C(w - x), and x is what they choose and average
with (CHOCO-SGD: Koloskova, Stich and Jaggi, ICML 2019, where gamma = 1). At first x is the common initial row. Who does not hold it gets x whole.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.values import nearest

LEVELS = 127  # of int8, on either side of 0


class Encoder:
    def __init__(self, run: Resolved, ensemble: Ensemble, start_W: Tensor, columns_W: Tensor | None):
        """Take the common initial row, and which columns are sent; None: all."""
        self.kind, self.share = run.codec.kind, run.codec.density
        self.ensemble, self.start = ensemble, start_W
        sent = ensemble.zeros(1) + 1 if columns_W is None else columns_W[None]
        self.layers = [name for name, part in ensemble.layers(sent[:, : ensemble.size]).items() if bool(part.any())]
        self.columns = torch.nonzero(sent[0, : ensemble.size])[:, 0]  # those that are sent
        self.kept = max(1, nearest(self.share, len(self.columns))) if self.kind == "topk" else 0
        self.bytes = len(self.encode(start_W, start_W.clone()))  # of every encoded row

    def _which(self) -> int:
        """Return the bytes that say which numbers topk sends: a number or a bit for each, nothing where all are sent."""
        count = len(self.columns)
        return min(4 * self.kept, -(-count // 8)) if self.kept < count else 0

    def encode(self, w_W: Tensor, x_W: Tensor) -> np.ndarray:
        """Return what is sent of w - x, uint8 `[bytes]`, and move x in place by it, as each receiver does by `decode`."""
        if self.kind == "topk":
            size = (w_W - x_W)[self.columns].abs()
            which = torch.sort(torch.sort(size, descending=True, stable=True).indices[: self.kept]).values
            chosen, marks = which.cpu().numpy(), np.zeros(len(self.columns), bool)
            marks[chosen] = True
            said = chosen.astype(np.int32) if self._which() == 4 * self.kept else np.packbits(marks)
            parts = [w_W[self.columns[which]].cpu().numpy(), said[: self._which()]]
        else:
            w, x = self.ensemble.layers(w_W[None]), self.ensemble.layers(x_W[None])  # views
            parts = [part for name in self.layers for part in encoded(w[name][0] - x[name][0])]
        out = np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])
        self.decode(out, x_W)
        return out

    def decode(self, message: np.ndarray, x_W: Tensor) -> None:
        """Move x in place by what was sent."""
        if self.kind == "topk":
            values, said = message[: 4 * self.kept].view(np.float32), message[4 * self.kept :]
            if len(said) == 4 * self.kept:
                which = said.view(np.int32).astype(np.int64)
            else:
                bits = np.unpackbits(said, count=len(self.columns)) if len(said) else np.ones(len(self.columns))
                which = np.flatnonzero(bits)
            x_W[self.columns[torch.from_numpy(which).to(x_W.device)]] = torch.from_numpy(values.copy()).to(x_W.device)
            return
        layers, at = self.ensemble.layers(x_W[None]), 0

        def read(count: int, kind: Any = np.float32) -> Tensor:
            nonlocal at
            at += count * np.dtype(kind).itemsize
            part = message[at - count * np.dtype(kind).itemsize : at].copy()
            return torch.from_numpy(part.view(kind)).to(x_W.device)

        for name in self.layers:
            layer, size = layers[name][0], layers[name].numel()
            step = read(1)
            layer += (read(size, np.int8).float() * step).view(layer.shape)


def encoded(difference: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return a layer's difference as int8 sends it: its step, and how many steps each number is."""
    step = difference.abs().max() / LEVELS
    steps = torch.round(difference / step if step > 0 else difference).to(torch.int8)
    return step.cpu().numpy(), steps.cpu().numpy()


def columns_of(run: Resolved, ensemble: Ensemble, head: str) -> Tensor | None:
    """Return which columns leave a client, bool `[W]`, None where all do (--send, or as the method says): "body" is all but the head."""
    if not (layers := run.send.names if run.send else run.found("method").sends):
        return None
    if not head and {"head", "body"} & set(layers.split(",")):
        what = f"--send is {run.send}" if run.send else f"--method {short(run.method)} sends its {layers}"
        mend = "name its layers" if run.send else 'let its file say HEAD = "NAME"'
        raise UserError(f"{what}; --model {short(run.model)} names no last layer: {mend}")
    said = "--send layers" if run.send else f"sends of the method {short(run.method)}"
    columns = ~ensemble.columns("head", head, said) if layers == "body" else ensemble.columns(layers, head, said)
    if not columns[: ensemble.size].any():
        raise UserError(f"{said} is {layers}; the model {short(run.model)} has no such weights: allowed is all")
    return columns
