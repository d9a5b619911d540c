"""`Scoring`: every client's row on its validation and test images, its best row by validation, and the rewards of the greedy search."""

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.federation.members import Members
from dpfl_mpi.numerics.backend import Backend, Predict
from dpfl_mpi.settings import Resolved
from dpfl_mpi.transport.log import Log


class Scoring:
    """What is known of the models of this rank's clients: the best one by validation, and the last."""

    # attributes that a checkpoint holds
    KEPT = ("best", "best_round", "best_val", "best_test", "best_confusion", "last_test")

    def __init__(self, members: Members, log: Log, backend: Backend, run: Resolved, classes: int, mixed: bool):
        self.members, self.log, self.backend, self.classes, self.mixed = members, log, backend, classes, mixed
        self.keep_latest = run.tie == "latest"  # of equally good rounds, or the earliest
        self.metric_batch = run.batch_size if run.metric == "batch" else 0  # images whose mean is one value of a score
        k = len(members.ids)
        self.best = backend.ensemble.zeros(k)  # the row with the best validation accuracy
        self.best_round = np.full(k, -1, np.int32)
        self.best_val, self.best_test = np.full(k, np.nan), np.full(k, np.nan)
        self.best_confusion = np.zeros((k, classes, classes), np.int64)
        self.last_test = np.full(k, np.nan)
        self.stale = np.zeros(k, np.int64)  # rounds since the validation accuracy last rose
        self._scored_round = np.full(k, -1)

    def evaluate(self, w_KW: Tensor, series: str = "", predict: Predict | None = None) -> None:
        """Score every client's row on its validation and test set, note it, and keep the client's best by validation. Collective.

        Called where the algorithm's reported model exists. With `series="mixed"` (the row after mixing) the scores are only noted, where
        `--mixed` asks for them. `predict(rows, w_kW, images)` replaces the logits `[k, S, C]` where more than the row decides. Absent
        clients are not scored. A client whose row is not finite is excluded, or ends the run.
        """
        if series == "mixed" and not self.mixed:
            return
        self.members.exclude_diverged(w_KW)  # here too: a method without an exchange diverges as well
        active = self.members.awake[self.members.ids]
        with self.log.clock("evaluate"), torch.no_grad():
            for b in self.backend.blocks:
                if not active[b].any():
                    continue
                scored = self.backend.score(b, w_KW[b], predict)
                for i, losses, predicted, labels in zip(range(b.start, b.stop), *scored, strict=True):
                    if active[i]:
                        self._note(i, w_KW[i], losses, predicted, labels, series)

    def _note(
        self, i: int, row_W: Tensor, losses: np.ndarray, predicted: np.ndarray, labels: np.ndarray, series: str
    ) -> None:
        clients, right, notes = self.backend.clients, predicted == labels, self.log.notes
        n = int(clients.n_val[i])
        val, test = slice(int(clients.val_start[i]), n), slice(n, n + int(clients.n_test[i]))
        val_acc, test_acc = self.mean(right[val]), self.mean(right[test])
        if series:  # no client needs these
            notes["mixed_val_acc"][i], notes["mixed_test_acc"][i] = val_acc, test_acc
            return
        self.log.images[i] += n
        notes["val_loss"][i], notes["val_acc"][i] = self.mean(losses[val]), val_acc
        notes["test_loss"][i], notes["test_acc"][i] = self.mean(losses[test]), test_acc
        self.last_test[i] = test_acc
        self.stale[i] += self._scored_round[i] != self.members.round  # a method may score twice in a round
        self._scored_round[i] = self.members.round
        best = self.best_val[i]
        if better := np.isnan(best) or val_acc > best:
            self.stale[i] = 0
        if better or (val_acc == best and self.keep_latest):
            self.best[i] = row_W
            self.best_round[i], self.best_val[i], self.best_test[i] = self.members.round, val_acc, test_acc
            pairs = labels[test] * self.classes + predicted[test]
            self.best_confusion[i] = np.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)

    def forget_best(self, who: np.ndarray) -> None:
        """Let the next score of clients, bool `[N]`, be their best."""
        mine = who[self.members.ids]
        self.best_val[mine], self.best_test[mine] = np.nan, np.nan
        self.best_round[mine], self.best_confusion[mine] = -1, 0

    def losses(self, row_W: Tensor, counted: np.ndarray) -> np.ndarray:
        """Return a model's loss on the validation images that the search sees, float64 `[K]`: nan but for clients that bool `counted` `[K]` marks."""
        self.count(slice(None), counted)
        out = np.full(len(counted), np.nan)
        for b in self.backend.blocks:
            if counted[b].any():
                out[b] = self._search_losses(b, row_W.repeat(b.stop - b.start, 1)[:, None])[:, 0]
        out[~counted] = np.nan
        return out

    def training_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        """Return the mean loss of m models on local client i's training images, float64 `[m]`; they count as evaluations."""
        self.log.notes["evaluations"][i] += len(w_mW)
        self.log.images[i] += len(w_mW) * self.backend.clients.n_train[i]
        return self.backend.training_losses(i, w_mW)

    def reward(self, rows: slice, w_kmW: Tensor, counted: np.ndarray) -> np.ndarray:
        """Return R = -validation loss of m models per client of a block, float64 `[k, m]` (equation 6); `counted` `[k]` says whose count."""
        self.count(rows, w_kmW.shape[1] * counted)
        return -self._search_losses(rows, w_kmW)

    def count(self, rows: slice, models: int | np.ndarray) -> None:
        """Count so many models, one number or `[k]`, scored on the images that the search sees."""
        self.log.notes["evaluations"][rows] += models
        self.log.images[rows] += models * self.backend.clients.n_search[rows]

    def _search_losses(self, rows: slice, w_kmW: Tensor) -> np.ndarray:
        """Return the loss of m models per client of a block on the validation images that the search sees, float64 `[k, m]`."""
        if not self.metric_batch:
            return self.backend.validation_losses(rows, w_kmW)
        scored = [self.backend.score(rows, w_kmW[:, model].contiguous())[0] for model in range(w_kmW.shape[1])]
        seen = self.backend.clients.n_search[rows]
        return np.array([[self.mean(one[i][:n]) for one in scored] for i, n in enumerate(seen)])

    def mean(self, values: np.ndarray) -> float:
        """Return the mean of a score over its images; with `metric_batch`, as in the authors' code, that of its mini-batches, the last as any."""
        if not (size := self.metric_batch):
            return float(values.mean())
        return float(np.mean([values[i : i + size].mean() for i in range(0, len(values), size)]))
