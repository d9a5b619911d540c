"""`Training`: the verbs of `fed` that train the rows (models) of this rank's clients.

`local_opt` trains one set of rows, `mixed_opt` two at once; `batches` and `step` let a method write
its own loop. They train block by block: a `Block` is the rows, gradients and momentum of clients
that one call of the backend (C kernels or PyTorch) trains together. Only learners, clients that
take part and have not stopped, are trained. Momentum goes on from round to round.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.attack import Attack
from dpfl_mpi.numerics.backend import Backend, Gradient, Learn, LocalEpochs
from dpfl_mpi.numerics.ensemble import Block
from dpfl_mpi.settings import Resolved
from dpfl_mpi.transport.log import Log


def learning_rate(run: Resolved, t: int) -> float:
    """Return the learning rate of round t: lr, times lr_decay every 10 rounds, times a schedule.

    The schedule runs over rounds 1 to T; before (t = 0) and after them its factor is 1, while
    lr_decay goes on.
    """
    eta = run.lr * run.lr_decay ** (t // 10)
    done = t - 1 if 1 <= t <= run.rounds else 0
    if run.lr_schedule == "cosine":  # SGDR (Loshchilov and Hutter, ICLR 2017), equation 5
        cosine = math.cos(math.pi * done / max(run.rounds, 1))
        eta *= (1 + cosine) / 2
    return eta


class Training:
    def __init__(
        self, log: Log, backend: Backend, attack: Attack, rate: Callable[[int], float], reset: bool
    ):
        """`rate(t)` is the learning rate of round t; `reset` zeroes momentum before each round."""
        members = attack.members
        self.members, self.log, self.backend, self.attack = members, log, backend, attack
        self.rate, self.reset_momentum = rate, reset
        # momentum, or Adam's means, of each client [K, ...], by the name of the rows it trains
        self.momentum: dict[str, Tensor] = {}
        # each client's epochs and gradient steps since the start; epochs key the order of batches
        self.epochs = np.zeros(len(members.ids), np.int64)
        self.steps = np.zeros(len(members.ids), np.int64)

    def begin(self) -> None:
        """Begin a round."""
        self.attack.before.clear()
        if self.members.round and self.reset_momentum:
            for rows in self.momentum.values():
                rows.zero_()

    @property
    def lr(self) -> float:
        return self.rate(self.members.round)

    def local_opt(
        self,
        w_KW: Tensor,
        epochs: int,
        gradient: Gradient | None = None,
        momentum: str = "w",
        trained: Tensor | None = None,
        advance: bool = True,
    ) -> Tensor:
        """Train every client's row in place for local epochs; return it (LocalOpt, Algorithm 1).

        `gradient` replaces that of the loss. Momentum is kept under the name `momentum`; a second
        set of rows needs its own. Only the columns `trained`, bool `[W]`, change; None: all. Unless
        the epochs `advance`, the next call sees the same batches.
        """
        whole = isinstance(epochs, int | np.integer) and not isinstance(epochs, bool)
        if not whole or epochs < 0:
            allowed = "allowed is a whole number of at least 0"
            raise UserError(f"fed.local_opt was given epochs={epochs!r}; {allowed}")
        if gradient is not None and not callable(gradient):
            given = f"fed.local_opt was given a {type(gradient).__name__} as its gradient"
            raise UserError(f"{given}; it takes a function, as fed.gradient_of returns")
        rows, count = {momentum: w_KW}, epochs if advance else 0
        for (block,) in self._blocks(rows, count, self.members.in_rounds):
            local = LocalEpochs(epochs, self.epochs, self.lr)
            self.backend.train_epochs(block, local, gradient, trained)
        return w_KW

    def batches(
        self, epochs: int, rows_KW: dict[str, Tensor], advance: bool = True, most: int | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Yield each step of local epochs as a mini-batch and one `Block` per set of rows.

        This is the loop of LocalOpt, for methods that write the step: at most `most` steps of a
        client, none of an absent one. The name of a set is that of its momentum; the loss of the
        last set is recorded.
        Without `advance` these epochs do not count: the next call sees the same batches, and
        --attack does not take these rows for the start of the round's training.
        """
        backend = self.backend
        for rows in rows_KW.values():
            self.members.check_rows(rows, backend.ensemble.width, "fed.batches")
        for blocks in self._blocks(rows_KW, epochs if advance else 0, advance):
            for batch in backend.batches(blocks[0].rows, epochs, self.epochs):
                if batch.step == most:
                    break
                blocks = [block.first(batch.k) for block in blocks]
                yield batch, *blocks

    def mixed_opt(
        self, w_KW: Tensor, v_KW: Tensor, alpha_K1: Tensor, epochs: int, learn: Learn | None = None
    ) -> tuple[Tensor, Tensor]:
        """Train w, and v so that the mixture alpha v + (1 - alpha) w improves; return both.

        In place: each mini-batch moves w by its gradient, then v by alpha times the mixture's.
        Before v's step `learn(w, v, mixed)` is given the three `Block`s, and may change `alpha_K1`.
        """
        for w, v in self._blocks({"w": w_KW, "v": v_KW}, epochs):
            local = LocalEpochs(epochs, self.epochs, self.lr)
            self.backend.train_mixed(w, v, alpha_K1, local, learn)
        return w_KW, v_KW

    def ahead_opt(self, w_KW: Tensor, epochs: int, inner: float) -> Tensor:
        """Train every client's row in place by pairs of mini-batches, and return it.

        w moves by the gradient of the second batch, taken where a step of rate `inner` by the first
        would lead. A last batch without a second is not used.
        """
        for (w,) in self._blocks({"w": w_KW}, epochs):
            self.backend.train_ahead(w, inner, LocalEpochs(epochs, self.epochs, self.lr))
        return w_KW

    def step(self, block: Block, loss: Tensor, trained: Tensor | None = None) -> None:
        """Take one step of the optimiser from `block.g`; columns not `trained` are frozen."""
        self.backend.step(block, loss, self.lr, trained)

    def _blocks(
        self, rows_KW: dict[str, Tensor], epochs: int, sent: bool = True
    ) -> Iterator[list[Block]]:
        """Yield a `Block` per set of rows for each group of clients that train together.

        When the caller has trained them, write them back and note steps and losses; at the end
        add `epochs` to what the learners have trained. Where others may receive the rows (`sent`),
        note the attackers' start.
        """
        backend, learners = self.backend, self.members.learners[self.members.ids]
        if sent:
            self.attack.note_start(rows_KW)
        for name in rows_KW:
            if name not in self.momentum:
                self.momentum[name] = backend.zero_momentum(len(learners))
        noted = self.log.notes["train_loss"]
        with self.log.clock("train"), torch.no_grad():
            for rows in backend.groups(learners):
                pairs = [(w, self.momentum[name]) for name, w in rows_KW.items()]
                blocks = [Block(backend.ensemble, w[rows], m[rows], rows) for w, m in pairs]
                yield blocks
                for (w, m), block in zip(pairs, blocks, strict=True):
                    if not isinstance(rows, slice):  # else the block is a view
                        w[rows], m[rows] = block.w, block.momentum
                    self.steps[rows] += block.steps
                    self.log.steps[rows] += block.steps
                    loss = block.loss.double().cpu().numpy() / np.maximum(block.steps, 1)
                    noted[rows] = np.where(block.steps > 0, loss, noted[rows])
        self.epochs[self.members.learners[self.members.ids]] += epochs
