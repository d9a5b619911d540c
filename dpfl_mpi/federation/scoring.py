"""`Scoring`: the accuracies of every client's row, its best row, and the rewards of the search.

A row is one model. `evaluate`, a verb of `fed`, scores each client's row on its validation and test
images in every round, and keeps the row with the best validation accuracy, which results report.
The search for collaborators (search.py) asks for the losses of m other models on the validation
images, or on those that --search_share leaves to it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.federation.members import Members
from dpfl_mpi.numerics.backend import Backend, Predict
from dpfl_mpi.results.result import auc
from dpfl_mpi.transport.log import Log


class Scoring:
    """The scores of this rank's clients: of the best row by validation, and of the last one."""

    IN_CHECKPOINT = ("best", "best_round", "best_val", "best_test", "best_confusion", "last_test")

    def __init__(
        self,
        members: Members,
        log: Log,
        backend: Backend,
        *,
        classes: int,
        mixed: bool,
        keep_latest: bool,
        metric_batch: int,
    ):
        self.members, self.log, self.backend, self.classes = members, log, backend, classes
        self.mixed = mixed  # averages of the end of a round are scored as well (--mixed)
        self.keep_latest = keep_latest  # the latest of equally good rounds, else the earliest
        self.metric_batch = metric_batch  # a score is the mean of means of so many images; 0: all
        k = len(members.ids)
        self.best = backend.ensemble.zeros(k)  # the row with the best validation accuracy
        self.best_round = np.full(k, -1, np.int32)
        self.best_val, self.best_test = np.full(k, np.nan), np.full(k, np.nan)
        self.best_confusion = np.zeros((k, classes, classes), np.int64)
        self.last_test = np.full(k, np.nan)
        self.stale = np.zeros(k, np.int64)  # rounds since the validation accuracy last rose
        self._scored_round = np.full(k, -1)

    def evaluate(self, w_KW: Tensor, series: str = "", predict: Predict | None = None) -> None:
        """Score every learner's row on its validation and test set; keep the best. Collective.

        A row that is not finite excludes the client, or ends the run. Averaged rows are the
        `series` "mixed", for --mixed alone. `predict(rows, w_kW, images)` may return other logits
        `[k, S, C]`.
        """
        if series == "mixed" and not self.mixed:
            return
        self.members.exclude_diverged(w_KW)  # here too: a method may never exchange rows
        wanted = self.members.learners[self.members.ids]
        with self.log.clock("evaluate"), torch.no_grad():
            for i, *scores in self.backend.scores(w_KW, wanted, predict):
                self._note(i, w_KW[i], scores, series)

    def _note(self, i: int, row_W: Tensor, scores: Sequence[np.ndarray], series: str) -> None:
        """Note the scores of local client i's row, and keep the row if it is the best so far."""
        losses, predicted, labels = scores  # of its validation images, then its test images
        clients, notes = self.backend.clients, self.log.notes
        n_val, n_test = int(clients.n_val[i]), int(clients.n_test[i])
        val, test = slice(int(clients.val_start[i]), n_val), slice(n_val, n_val + n_test)
        right = predicted == labels
        val_acc, test_acc = self.mean(right[val]), self.mean(right[test])
        if series:
            notes["mixed_val_acc"][i], notes["mixed_test_acc"][i] = val_acc, test_acc
            return
        self.log.images[i] += n_val  # a client needs no test images
        notes["val_loss"][i], notes["val_acc"][i] = self.mean(losses[val]), val_acc
        notes["test_loss"][i], notes["test_acc"][i] = self.mean(losses[test]), test_acc
        self.last_test[i] = test_acc
        self.stale[i] += self._scored_round[i] != self.members.round  # a method may score twice
        self._scored_round[i] = self.members.round
        best = self.best_val[i]
        better = np.isnan(best) or val_acc > best
        if better:
            self.stale[i] = 0
        if better or (val_acc == best and self.keep_latest):
            self.best[i], self.best_round[i] = row_W, self.members.round
            self.best_val[i], self.best_test[i] = val_acc, test_acc
            pairs = labels[test] * self.classes + predicted[test]
            counts = np.bincount(pairs, minlength=self.classes**2)
            self.best_confusion[i] = counts.reshape(self.classes, self.classes)

    def aucs(self) -> np.ndarray:
        """Return the AUC of each local client's best row on its test images, float64 `[K]`."""
        clients, out = self.backend.clients, np.full(len(self.best), np.nan)
        for b in self.backend.blocks:
            parts: list[Tensor] = []

            # `score` returns no logits: keep those that it asks for, part by part
            def predict(rows: slice, w_kW: Tensor, images: Any, parts: list[Tensor] = parts) -> Any:
                parts.append(self.backend.logits(w_kW, images))
                return parts[-1]

            with torch.no_grad():
                *_, labels = self.backend.score(b, self.best[b], predict)
            logits = torch.cat(parts, 1).cpu().numpy()
            for i in np.flatnonzero(self.best_round[b] >= 0):
                n_val, n_test = (n[b.start + i] for n in (clients.n_val, clients.n_test))
                test = slice(n_val, n_val + n_test)
                out[b.start + i] = auc(logits[i, test], labels[i, test])
        return out

    def forget_best(self, clients: np.ndarray) -> None:
        """Forget the best scores of these clients, bool `[N]`: their next one is the best."""
        local = clients[self.members.ids]
        self.best_val[local], self.best_test[local] = np.nan, np.nan
        self.best_round[local], self.best_confusion[local] = -1, 0

    def losses(self, row_W: Tensor, counted: np.ndarray) -> np.ndarray:
        """Return a model's loss on search images of local clients `counted`, else NaN, `[K]`."""
        self.count(slice(None), counted)
        out = np.full(len(counted), np.nan)
        for b in self.backend.blocks:
            if counted[b].any():
                rows = row_W.repeat(b.stop - b.start, 1)[:, None]
                out[b] = self._search_losses(b, rows)[:, 0]
        out[~counted] = np.nan
        return out

    def training_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        """Count and return mean losses of m models on client i's training images, float64 `[m]`."""
        self.log.notes["evaluations"][i] += len(w_mW)
        self.log.images[i] += len(w_mW) * self.backend.clients.n_train[i]
        return self.backend.training_losses(i, w_mW)

    def validation_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        """Count and return losses of m models on client i's search images, float64 `[m]`."""
        self.count(slice(i, i + 1), len(w_mW))
        return self._search_losses(slice(i, i + 1), w_mW[None])[0]

    def count(self, rows: slice, models: int | np.ndarray) -> None:
        """Count so many evaluations, one number or `[k]`, of these local clients."""
        self.log.notes["evaluations"][rows] += models
        self.log.images[rows] += models * self.backend.clients.n_search[rows]

    def _search_losses(self, rows: slice, w_kmW: Tensor) -> np.ndarray:
        """Return the losses of m models on the search images of each of k clients, `[k, m]`."""
        if not self.metric_batch:
            return self.backend.validation_losses(rows, w_kmW)
        means = np.empty(w_kmW.shape[:2])
        for m in range(w_kmW.shape[1]):
            losses = self.backend.score(rows, w_kmW[:, m].contiguous())[0]
            for i, n in enumerate(self.backend.clients.n_search[rows]):
                means[i, m] = self.mean(losses[i][:n])
        return means

    def mean(self, values: np.ndarray) -> float:
        """Return the mean over images, or of the means of batches; the last may be smaller."""
        size = self.metric_batch
        if not size:
            return float(values.mean())
        batches = [values[i : i + size] for i in range(0, len(values), size)]
        return float(np.mean([batch.mean() for batch in batches]))
