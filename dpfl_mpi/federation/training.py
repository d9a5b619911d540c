"""`Training`: local epochs on this rank's clients, and what they carry from round to round: momentum (Adam: its means), epochs, steps."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.attack import Attack
from dpfl_mpi.federation.members import Members
from dpfl_mpi.numerics.backend import Backend, Gradient, Learn, LocalEpochs
from dpfl_mpi.numerics.ensemble import Block
from dpfl_mpi.settings import Resolved
from dpfl_mpi.transport.log import Log


def learning_rate(run: Resolved, t: int) -> float:
    """Return eta of round t: the schedule over rounds 1 to T, else at its start (t = 0, tuning), times lr_decay every 10 rounds or epochs of tuning."""
    eta = run.lr * run.lr_decay ** (t // 10)
    done = t - 1 if 1 <= t <= run.rounds else 0  # rounds behind it
    if run.lr_schedule == "step":
        eta *= run.lr_gamma ** (done // run.lr_step)
    if run.lr_schedule == "cosine":  # Loshchilov and Hutter, SGDR, ICLR 2017, equation 5, without restarts
        eta *= run.lr_final + (1 - run.lr_final) * (1 + math.cos(math.pi * done / max(run.rounds, 1))) / 2
    return eta


class Training:
    def __init__(self, members: Members, log: Log, backend: Backend, attack: Attack, run: Resolved):
        self.members, self.log, self.backend, self.attack, self.run = members, log, backend, attack, run
        self.momentum: dict[str, Tensor] = {}  # what the optimiser remembers of each client [K, ...], by name
        self.epochs = np.zeros(len(members.ids), np.int64)  # local epochs since the common initial row
        self.steps = np.zeros(len(members.ids), np.int64)

    def begin(self) -> None:
        self.attack.begin()
        if self.members.round and self.run.momentum_state == "reset":
            for rows in self.momentum.values():
                rows.zero_()

    @property
    def lr(self) -> float:
        return learning_rate(self.run, self.members.round)

    def local_opt(
        self,
        w_KW: Tensor,
        epochs: int,
        gradient: Gradient | None = None,
        momentum: str = "w",
        trained: Tensor | None = None,
        advance: bool = True,
    ) -> Tensor:
        """Train every client's row in place for `epochs` local epochs and return it (LocalOpt of Algorithm 1).

        `gradient` replaces that of the loss. `momentum` names the momentum rows: those of a second model have another name. Columns where
        `trained` (bool `[W]`) is false are frozen. With `advance=False` the next call sees the same batches: for a second model.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, int | np.integer) or epochs < 0:
            raise UserError(f"fed.local_opt was given epochs={epochs!r}; allowed is a whole number of at least 0")
        for (block,) in self._blocks({momentum: w_KW}, epochs if advance else 0, self.members.in_rounds):
            local = LocalEpochs(epochs, self.epochs, self.lr)
            self.backend.train_epochs(block, local, gradient, trained)
        return w_KW

    def batches(
        self, epochs: int, rows_KW: dict[str, Tensor], advance: bool = True, most: int | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Yield each step of `epochs` local epochs as a mini-batch and one `Block` per set of rows: LocalOpt's loop, for methods that write the step.

        Each set is named after its momentum rows and trained in place; /round/train_loss is that of the last one. Absent clients take no
        step. With `advance=False` the epochs do not count: the next call sees the same batches. `most` limits the steps of a client.
        """
        backend = self.backend
        for rows in rows_KW.values():
            self.members.check_rows(rows, backend.ensemble.width, "fed.batches")
        for now in self._blocks(rows_KW, epochs if advance else 0, advance):
            for batch in backend.batches(now[0].rows, epochs, self.epochs):
                if batch.step == most:
                    break
                now = [block.first(batch.k) for block in now]
                yield batch, *now

    def mixed_opt(
        self, w_KW: Tensor, v_KW: Tensor, alpha_K1: Tensor, epochs: int, learn: Learn | None = None
    ) -> tuple[Tensor, Tensor]:
        """Train w by its gradient and v by alpha times that at the mixture alpha v + (1 - alpha) w, in place, and return both.

        Each mini-batch moves w, then v; their momentum rows are "w" and "v". `learn(w, v, mixed)`, called with these `Block`s before v's step,
        may change `alpha_K1` for the next one.
        """
        for w, v in self._blocks({"w": w_KW, "v": v_KW}, epochs):
            local = LocalEpochs(epochs, self.epochs, self.lr)
            self.backend.train_mixed(w, v, alpha_K1, local, learn)
        return w_KW, v_KW

    def ahead_opt(self, w_KW: Tensor, epochs: int, inner: float) -> Tensor:
        """Train every client's row in place by pairs of mini-batches, and return it: w moves along the gradient of the second at w - inner (gradient
        of the first); a last one without a second is not used."""
        for (w,) in self._blocks({"w": w_KW}, epochs):
            self.backend.train_ahead(w, inner, LocalEpochs(epochs, self.epochs, self.lr))
        return w_KW

    def step(self, block: Block, loss: Tensor, trained: Tensor | None = None) -> None:
        """Take one step from `block.g`: the Run's optimiser, clipping, decay and momentum; columns not `trained` are frozen."""
        self.backend.step(block, loss, self.lr, trained)

    def _blocks(self, rows_KW: dict[str, Tensor], epochs: int, moves: bool = True) -> Iterator[list[Block]]:
        """Yield for the clients of each block that take part one `Block` per set of rows; take over what was done to them, then count so many epochs."""
        backend, active = self.backend, self.members.awake[self.members.ids]
        if moves:  # not a probe, whose rows are thrown away
            self.attack.note_start(rows_KW)
        for name in rows_KW:
            if name not in self.momentum:
                self.momentum[name] = backend.zero_momentum(len(active))
        with self.log.clock("train"), torch.no_grad():
            for b in backend.blocks:
                here = b.start + np.flatnonzero(active[b])
                if len(here) == 0:
                    continue
                rows = b if len(here) == b.stop - b.start else here  # a part of a block is copied out, and back below
                held = [(w, self.momentum[name]) for name, w in rows_KW.items()]
                blocks = [Block(backend.ensemble, w[rows], m[rows], rows) for w, m in held]
                yield blocks
                for (w, m), block in zip(held, blocks, strict=True):
                    if rows is here:
                        w[rows], m[rows] = block.w, block.momentum
                    self.steps[rows] += block.steps
                    self.log.steps[rows] += block.steps
                    noted = self.log.notes["train_loss"]
                    loss = block.loss.double().cpu().numpy() / np.maximum(block.steps, 1)
                    noted[rows] = np.where(block.steps > 0, loss, noted[rows])
        self.epochs[self.members.awake[self.members.ids]] += epochs
