"""`Attack`: the false rows that attackers send (--attack KIND:SHARE), and `backdoor_success`.

A row is one model. Attackers train, choose and average as all others do, and use their true row in
their own average. Everyone else gets the same false row of an attacker. In formulas w is the
attacker's true row, and u is how far w has moved since it began to train in this round. `Mail`
(mail.py) asks for the rows to send, `Training` notes rows before they are trained.
"""

import math

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.numerics.clients import TARGET, mark
from dpfl_mpi.numerics.ensemble import LARGEST, Ensemble

SCALE = 10.0  # the attack `scale` multiplies u by this


class Attack:
    def __init__(self, members: Members, ensemble: Ensemble, kind: str, seed: int):
        """`kind` of attack; "" where all rows that are sent are true."""
        self.members, self.ensemble, self.kind, self.seed = members, ensemble, kind, seed
        self.attackers = np.flatnonzero(
            members.limits.attackers[members.ids] & bool(kind)
        )  # local numbers
        # the attackers' rows before this round's training, by name: a method may train several sets
        self.before: dict[str, Tensor] = {}
        # the attack `stale` always sends the first row; -1: nothing was sent
        k = len(members.ids) if kind == "stale" else 0
        self.first_sent = ensemble.zeros(k)
        self.first_round = np.full(k, -1)

    def note_start(self, rows_KW: dict[str, Tensor]) -> None:
        """Copy the attackers' rows, by name, before they are first trained in this round."""
        if len(self.attackers):
            for name, rows in rows_KW.items():
                if name not in self.before:
                    self.before[name] = rows[self.attackers].clone()

    def sent(self, w_KW: Tensor) -> Tensor:
        """Return the rows that this rank's clients send, those of attackers false, `[K, W]`."""
        if not len(self.attackers):
            return w_KW
        out, true = w_KW.clone(), w_KW[self.attackers]
        # where a method trains two sets of rows, "w" is the one that is sent
        before = self.before.get("w", next(iter(self.before.values()), true))
        if self.kind == "sign_flip":
            lies = 2 * before - true  # w - 2 u
        elif self.kind == "scale":
            # w + 9 u: model replacement (Bagdasaryan et al., AISTATS 2020)
            lies = before + SCALE * (true - before)
        elif self.kind == "noise":
            ids = self.members.ids[self.attackers].tolist()
            noisy = [row + self._noise(k, row) for k, row in zip(ids, true, strict=True)]
            lies = torch.stack(noisy)
        else:
            lies = self._first(true)
        out[self.attackers] = lies.clamp(-LARGEST / 2, LARGEST / 2)  # larger ones would end the run
        return out

    def _noise(self, k: int, row_W: Tensor) -> Tensor:
        """Return normal noise `[W]` of the same root mean square as client k's row."""
        size = self.ensemble.size
        weights = row_W[:size].double().cpu().numpy()
        # fsum: the same bits on every processor
        rms = math.sqrt(math.fsum(weights**2) / size)
        rng = streams.stream(self.seed, streams.NOISE, k, self.members.round)
        out = np.zeros(len(row_W), np.float32)
        out[:size] = rms * rng.standard_normal(size)
        return torch.from_numpy(out).to(row_W.device)

    def _first(self, true: Tensor) -> Tensor:
        """Return the row that each attacker sent first, or its true row before."""
        active = self.members.active[self.members.ids[self.attackers]]
        starts = (self.first_round[self.attackers] < 0) & active
        self.first_sent[self.attackers[starts]] = true[starts]
        self.first_round[self.attackers[starts]] = self.members.round
        unsent = torch.from_numpy(self.first_round[self.attackers] < 0).to(true.device)
        return torch.where(unsent[:, None], true, self.first_sent[self.attackers])


def backdoor_success(scoring: Scoring) -> np.ndarray:
    """Return how often a mark turns predictions of each best model to class 0, float64 `[K]`.

    It is NaN where a client was never scored, or has no test images of other classes.
    """
    backend, clients, scored = scoring.backend, scoring.backend.clients, scoring.best_round >= 0
    unmarked = clients.score_x.clone()
    mark(clients.score_x)
    out = np.full(len(clients), np.nan)
    with torch.no_grad():
        for i, _, predicted, labels in backend.scores(scoring.best, scored):
            test = slice(int(clients.n_val[i]), int(clients.n_val[i] + clients.n_test[i]))
            other = labels[test] != TARGET
            if other.any():
                out[i] = (predicted[test][other] == TARGET).mean()
    clients.score_x.copy_(unmarked)
    return out
