"""--attack KIND:SHARE: a share of the clients lies. What a lie is (docs/controls.md), and how far a backdoor opens.

Liars train, choose and average as all others do; only what leaves them is false, the same lie along every edge and into every exact sum. Their
own average has the true model. w is a liar's model, and u how far w has moved since it began to train in this round.
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
from dpfl_mpi.settings import Resolved

SCALE = 10.0  # of the update that `scale` sends


class Attack:
    def __init__(self, run: Resolved, members: Members, ensemble: Ensemble):
        self.kind, self.seed = run.attack.kind if run.attack else "", run.seed
        self.members, self.ensemble = members, ensemble
        falsifies = bool(run.attack and run.attack.falsifies)
        self.mine = np.flatnonzero(members.limits.liars[members.ids] & falsifies)
        self.began: dict[str, Tensor] = {}  # the liars' rows before this round's training, by name of their momentum
        k = len(members.ids) if self.kind == "stale" else 0
        self.first = ensemble.zeros(k)  # the rows that were sent first
        self.first_round = np.full(k, -1)

    def begin(self) -> None:
        self.began.clear()

    def note_start(self, rows_KW: dict[str, Tensor]) -> None:
        """Note the liars' rows, by the names of their momentum, before they are trained."""
        if len(self.mine):
            for name, rows in rows_KW.items():
                if name not in self.began:
                    self.began[name] = rows[self.mine].clone()

    def sent(self, w_KW: Tensor) -> Tensor:
        """Return what leaves this rank's clients, `[K, W]`: their rows, and in place of a liar's row its lie."""
        if not len(self.mine):
            return w_KW
        out, true = w_KW.clone(), w_KW[self.mine]
        began = self.began.get("w", next(iter(self.began.values()), true))  # of two models it is "w" that is sent
        if self.kind == "sign_flip":
            lies = 2 * began - true  # w - 2 u
        elif self.kind == "scale":
            lies = began + SCALE * (true - began)  # w + 9 u: model replacement (Bagdasaryan et al., AISTATS 2020)
        elif self.kind == "noise":
            ids = self.members.ids[self.mine].tolist()
            lies = torch.stack([row + self._noise(k, row) for k, row in zip(ids, true, strict=True)])
        else:
            lies = self._first(true)
        out[self.mine] = lies.clamp(-LARGEST / 2, LARGEST / 2)  # a larger one, beyond exact sums, would end the run
        return out

    def _noise(self, k: int, row_W: Tensor) -> Tensor:
        size = self.ensemble.size
        weights = row_W[:size].double().cpu().numpy()
        rms = math.sqrt(math.fsum(weights**2) / size)  # fsum: the same bits on every processor
        out = np.zeros(len(row_W), np.float32)
        out[:size] = rms * streams.stream(self.seed, streams.NOISE, k, self.members.round).standard_normal(size)
        return torch.from_numpy(out).to(row_W.device)

    def _first(self, true: Tensor) -> Tensor:
        new = self.mine[(self.first_round[self.mine] < 0) & self.members.active[self.members.ids[self.mine]]]
        self.first[new] = true[np.isin(self.mine, new)]
        self.first_round[new] = self.members.round
        unsent = torch.from_numpy(self.first_round[self.mine] < 0).to(true.device)
        return torch.where(unsent[:, None], true, self.first[self.mine])


def backdoor_success(scoring: Scoring) -> np.ndarray:
    """Return how often each client's best model takes a marked test image of another class for class 0, float64 `[K]`; nan where it has none."""
    backend, clients = scoring.backend, scoring.backend.clients
    held = clients.score_x.clone()
    mark(clients.score_x)
    out = np.full(len(clients), np.nan)
    with torch.no_grad():
        for b in backend.blocks:
            _, predicted, labels = backend.score(b, scoring.best[b])
            for i, guess, label in zip(range(b.start, b.stop), predicted, labels, strict=True):
                test = slice(int(clients.n_val[i]), int(clients.n_val[i] + clients.n_test[i]))
                other = label[test] != TARGET
                if other.any():
                    out[i] = (guess[test][other] == TARGET).mean()
    clients.score_x.copy_(held)
    return out
