"""`Federation`: the verbs a method may use. local_opt, evaluate, exchange, average, mean, reward, and what the greedy search needs.

A method sees the rows of this rank's clients, `w_KW`, and never MPI, files or devices. Clients of a rank are in decreasing order of
training size; `ids` are their global numbers.

Axes: N clients in all, K on this rank, k in a block, W row width, S images, T rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.config import Job, Run
from dpfl_mpi.data.partition import Partition
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import open_source
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import greedy
from dpfl_mpi.federation import limits as reach
from dpfl_mpi.federation.mail import Received
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.mpi.placement import ids_of, models_per_pass, place, rows_of, too_narrow, window_rows, window_slots
from dpfl_mpi.mpi.window import Inbox, Plan, plan
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.clients import Batch, Clients
from dpfl_mpi.numerics.device import pick_device
from dpfl_mpi.numerics.ensemble import (
    LARGEST,
    Block,
    Ensemble,
    Gradient,
    check_fixed_point,
    cross_entropy,
    fixed_point,
    from_fixed_point,
    one_hot,
    sgd_step,
)
from dpfl_mpi.numerics.recorded import RecordedSteps
from dpfl_mpi.plugins import find
from dpfl_mpi.results import PHASES

Predict = Callable[[slice, Tensor, Tensor], Tensor]  # (block, rows [k, W], images [k, S, H, W, C]) -> logits [k, S, C]
SCORE_CHUNK = 50  # images of a client scored at once on a CPU: the widest layer stays in a core's cache


class Federation:
    """This rank's share of a run, between `Clients`, `Ensemble` and `Inbox`."""

    # what a checkpoint keeps beside the method's state and the momentum: arrays [K, ...], and what is the same on every rank
    CLIENT_STATE = ("best", "best_round", "best_val", "best_test", "best_confusion", "last_test", "epochs", "steps")
    SHARED_STATE = ("alive", "budget", "diverged_round")

    def __init__(self, run: Run, job: Job, world: World):
        self.run, self.job, self.world = run, job, world
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._inside = 0.0  # seconds that phases inside the running one have counted
        self.round = 0
        self.device = pick_device(run, job, world)
        source = open_source(run)
        self.classes = source.classes
        self.partition = Partition.from_arrays(world.share(lambda: deal(run, source).arrays()))
        self.data_sha256, self.data_note = source.sha256, source.note
        self.n = run.clients
        self.p = self.partition.p
        work = self.partition.sizes("train")
        self.owner = place(work, world.size)
        self.gathered, self.row_of = rows_of(self.owner, work)
        self.ids = ids_of(self.owner, work, world.rank)
        self.k = len(self.ids)
        module = find_model(run.model, source.shape, source.classes)
        self.head = find_head(run.model)
        self.options: dict[str, Any] = run.options
        self.ensemble = Ensemble(module, source.mean, source.std, self.device, run.precision)
        self.flipped = reach.flipped(run)
        self.clients = Clients(
            source, self.partition, self.ids, run.seed, bool(run.augment), self.ensemble, self.flipped
        )
        at_once = job.block or (1 if self.device.type == "cpu" else max(self.k, 1))
        self.blocks = [slice(i, min(i + at_once, self.k)) for i in range(0, self.k, at_once)]
        limits = world.share(lambda: {"budget": reach.budgets(run), "available": reach.availability(run)})
        self.budget, self.available = limits["budget"], limits["available"]
        edges = world.share(
            lambda: {} if (g := reach.reach(run)) is None else {"indptr": g.indptr, "senders": g.senders}
        )
        self.reach = CollaborationGraph(**edges) if edges else None  # whom each client can receive from; None: everyone
        self.epochs = np.zeros(self.k, np.int64)  # local epochs since the common initial row
        self.steps = np.zeros(self.k, np.int64)
        self.alive = np.ones(self.n, bool)
        self.diverged_round = np.full(self.n, -1)
        self.momentum: dict[str, Tensor] = {}
        self.best = self.ensemble.zeros(self.k)
        self.best_round = np.full(self.k, -1)
        self.best_val, self.best_test = np.full(self.k, np.nan), np.full(self.k, np.nan)
        self.best_confusion = np.zeros((self.k, self.classes, self.classes), np.int64)
        self.last_test = np.full(self.k, np.nan)
        staging = torch.zeros(self.k, self.ensemble.width, pin_memory=self.device.type == "cuda")
        self.staging = staging
        self.on_window: Callable[[], None] = lambda: None  # called after a window was made
        self.inbox: Inbox | None = None
        # recorded training steps by the first row of their block; None: steps are launched kernel by kernel
        self.recorded: dict[int, RecordedSteps] | None = {} if job.cuda_graphs and self.device.type == "cuda" else None
        self._plans: list[tuple[CollaborationGraph, tuple[Plan | None, int]]] = []
        self._reward_sets: dict[int, list[tuple[Any, Tensor, Tensor]]] = {}
        self.begin_round(0)

    # a round's bookkeeping ---------------------------------------------------------------------------------------------
    def begin_round(self, number: int) -> None:
        """Start the records of a round: what the verbs note until `train` writes them."""
        self.round = number
        self.present = reach.present(self.run, self.available, number)
        nan = np.full(self.k, np.nan)
        self.notes: dict[str, np.ndarray] = {
            name: nan.copy()
            for name in (
                "train_loss",
                "val_loss",
                "val_acc",
                "test_loss",
                "test_acc",
                "mixed_val_acc",
                "mixed_test_acc",
            )
        }
        self.notes |= {
            "cases": np.zeros((self.k, 4)),
            "evaluations": np.zeros(self.k),
            "models_received": np.zeros(self.k),
        }
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.world.bytes_collective = 0
        if self.inbox:
            self.inbox.bytes_put = 0
        if number and self.run.momentum_state == "reset":
            for rows in self.momentum.values():
                rows.zero_()

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase of the round, less what phases inside it have counted."""
        start, outer, self._inside = time.perf_counter(), self._inside, 0.0
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        spent = time.perf_counter() - start
        self.seconds[phase] += spent - self._inside
        self._inside = outer + spent

    @property
    def lr(self) -> float:
        """The learning rate of this round: times `lr_decay` every 10 rounds."""
        return self.run.lr * self.run.lr_decay ** (self.round // 10)

    @property
    def active(self) -> np.ndarray:
        """Who takes part in this round and has a finite model, bool `[N]`."""
        return self.alive & self.present

    # training ----------------------------------------------------------------------------------------------------------
    def initial_row(self) -> Tensor:
        """Return the initial model that all clients have in common, `[W]`."""
        return self.ensemble.initial_row(self.run.init, streams.stream(self.run.seed, streams.INIT, 0, 0))

    def common_row(self) -> Tensor:
        """Return one common initial row for every client, `[K, W]`."""
        return self.copies(self.initial_row())

    def copies(self, w_W: Tensor) -> Tensor:
        """Return a row of the server's for each of this rank's clients, `[K, W]`."""
        return w_W.repeat(self.k, 1)

    def local_opt(
        self,
        w_KW: Tensor,
        epochs: int,
        gradient: Gradient | None = None,
        momentum: str = "w",
        trained: Tensor | None = None,
        advance: bool = True,
    ) -> Tensor:
        """Train every client's row in place for `epochs` local epochs of SGD and return it (LocalOpt of Algorithm 1).

        `gradient` replaces the plain gradient of the loss. `momentum` names the momentum rows: a method with a second model gives it a
        name of its own. Columns where `trained` (bool `[W]`) is false are frozen. With `advance=False` the next call sees the same
        batches again: for the second model.
        """
        if gradient is None and trained is None and self.recorded is not None:
            return self._replay(w_KW, epochs, momentum, advance)
        gradient = gradient or self.ensemble.gradient
        for batch, w in self.batches(epochs, {momentum: w_KW}, advance=advance):
            self.step(w, gradient(w, batch.x, batch.y, batch.weight), trained)
        return w_KW

    def _replay(self, w_KW: Tensor, epochs: int, momentum: str, advance: bool) -> Tensor:
        """Do what `local_opt` does without options, by recorded steps."""
        run, size = self.run, self.run.batch_size
        m_KW = self.momentum.setdefault(momentum, self.ensemble.zeros(self.k))
        with self.clock("train"), torch.no_grad():
            for b in self.blocks:
                here = b.start + np.flatnonzero(self.active[self.ids[b]])
                if len(here) == 0:
                    continue
                assert self.recorded is not None
                if b.start not in self.recorded:
                    self.recorded[b.start] = RecordedSteps(
                        self.ensemble,
                        -(-self.clients.n_train[b] // size),
                        size,
                        self.clients.shape,
                        run.momentum,
                        run.weight_decay,
                        run.clip_norm,
                    )
                rec = self.recorded[b.start]
                rec.load(w_KW[here], m_KW[here], self.lr)
                steps = np.zeros(len(here), np.int64)
                for batch in self.clients.batches(here, epochs, self.epochs, size, pad=True):
                    rec.step(batch)
                    steps[: batch.k] += 1
                w_KW[here], m_KW[here] = rec.block.w[: len(here)], rec.block.momentum[: len(here)]
                self.steps[here] += steps
                if steps.any():
                    loss = rec.loss[: len(here)].double().cpu().numpy()
                    self.notes["train_loss"][here] = loss / np.maximum(steps, 1)
        if advance:
            self.epochs[self.active[self.ids]] += epochs
        return w_KW

    def batches(
        self, epochs: int, rows_KW: dict[str, Tensor], advance: bool = True, most: int | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Yield each step of `epochs` local epochs as a mini-batch and one `Block` a set of rows: LocalOpt's loop, for methods that write the step.

        Each set is named after its momentum rows and trained in place; /round/train_loss is that of the last one. Absent clients take no
        step. With `advance=False` the epochs do not count: the next call sees the same batches. `most` limits the steps of a client.
        """
        for name in rows_KW:
            self.momentum.setdefault(name, self.ensemble.zeros(self.k))
        with self.clock("train"), torch.no_grad():
            for b in self.blocks:
                here = b.start + np.flatnonzero(self.active[self.ids[b]])
                if len(here) == 0:
                    continue
                rows = b if len(here) == b.stop - b.start else here  # a part of a block is copied out, and back below
                held = [(w, self.momentum[name]) for name, w in rows_KW.items()]
                whole = [Block(self.ensemble, w[rows], m[rows], rows) for w, m in held]
                blocks = whole
                for batch in self.clients.batches(rows, epochs, self.epochs, self.run.batch_size):
                    if batch.step == most:
                        break
                    if batch.k < len(blocks[0].w):
                        blocks = [block.first(self.ensemble, batch.k) for block in blocks]
                    yield batch, *blocks
                for (w, m), block in zip(held, whole, strict=True):
                    if rows is here:
                        w[rows] = block.w
                        m[rows] = block.momentum
                    self.steps[rows] += block.steps
                    if block.steps.any():
                        self.notes["train_loss"][rows] = block.loss.double().cpu().numpy() / np.maximum(block.steps, 1)
        if advance:
            self.epochs[self.active[self.ids]] += epochs

    def columns(self, layers: str) -> Tensor:
        """Return which columns of a row hold these layers, bool `[W]`: "head" (the model's last), "none", "all", or names with commas.

        Raises:
            UserError: the model has no such layer.
        """
        wanted = [] if layers == "none" else [self.head if name == "head" else name for name in layers.split(",")]
        row = self.ensemble.zeros(1)
        named = self.ensemble.layers(row)
        for name in wanted:
            inside = [n for n in named if name == "all" or n == name or n.startswith(f"{name}.")]
            if not inside:
                known = ", ".join(dict.fromkeys(n.rpartition(".")[0] for n in named))
                raise UserError(f"--options.head is {layers}; allowed are head, none, all, or of the layers {known}")
            for n in inside:
                named[n].fill_(1)
        return row[0] > 0

    def features(self, w_kW: Tensor, x_kSHWC: Tensor) -> Tensor:
        """Return the representation `[k, S, F]` of images: what the model's head reads."""
        return self.ensemble.features(w_kW, x_kSHWC, self.head)

    def one_hot(self, y: Tensor) -> Tensor:
        """Return float32 `[..., C]`: 1 at each label."""
        return one_hot(y, self.classes)

    def memory(self, i: int, w_1W: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the representations `[M, F]` and labels `[M]` of local client i's training images, at most `most` of them."""
        x, y = self.clients.training(i, most)
        return self.features(w_1W, x[None])[0], y

    def gradient(self, block: Block, batch: Batch) -> Tensor:
        """Write the gradient of a mini-batch's mean loss into `block.g` and return the losses `[k]`."""
        return self.ensemble.gradient(block, batch.x, batch.y, batch.weight)

    def step(self, block: Block, loss: Tensor, trained: Tensor | None = None) -> None:
        """Take one step of SGD from `block.g`: clipping, decay and momentum of the Run; columns not `trained` are frozen."""
        run = self.run
        block.loss += loss
        block.steps += 1
        decay = run.weight_decay
        sgd_step(block.w, block.g, block.momentum, self.lr, run.momentum, decay, run.clip_norm, trained)

    # scoring -----------------------------------------------------------------------------------------------------------
    def evaluate(self, w_KW: Tensor, series: str = "", predict: Predict | None = None) -> None:
        """Score every client's row on its validation and test set, record it, and keep the client's best by validation.

        Called where the algorithm's reported model exists. With `series="mixed"` (the row after mixing) the scores are only recorded,
        and only where `--mixed` asks for them. `predict(block, w_kW, x_kSHWC)` replaces the model's logits `[k, S, C]` where more than
        the row decides. Clients that are absent in a round are not scored.
        """
        if series == "mixed" and not self.job.mixed:
            return
        self.check_finite(w_KW)  # here too: a method without an exchange diverges as well
        with self.clock("evaluate"), torch.no_grad():
            for b in self.blocks:
                if not self.active[self.ids[b]].any():
                    continue
                losses, predicted, labels = self._score(b, w_KW[b], predict)
                for i in range(b.start, b.stop):
                    self._note_scores(
                        i, w_KW[i], losses[i - b.start], predicted[i - b.start], labels[i - b.start], series
                    )

    def _note_scores(
        self, i: int, row: Tensor, losses: np.ndarray, predicted: np.ndarray, labels: np.ndarray, series: str
    ) -> None:
        n, m = int(self.clients.n_val[i]), int(self.clients.n_test[i])
        if not self.active[self.ids[i]]:
            return
        right = predicted == labels
        val, test = slice(0, n), slice(n, n + m)
        if series:
            self.notes["mixed_val_acc"][i], self.notes["mixed_test_acc"][i] = right[val].mean(), right[test].mean()
            return
        scores = {
            "val_loss": losses[val].mean(),
            "val_acc": right[val].mean(),
            "test_loss": losses[test].mean(),
            "test_acc": right[test].mean(),
        }
        for name, value in scores.items():
            self.notes[name][i] = value
        self.last_test[i] = scores["test_acc"]
        best = self.best_val[i]
        if np.isnan(best) or scores["val_acc"] > best or (scores["val_acc"] == best and self.run.tie == "latest"):
            self.best[i] = row
            self.best_round[i], self.best_val[i], self.best_test[i] = self.round, scores["val_acc"], scores["test_acc"]
            pairs = labels[test] * self.classes + predicted[test]
            self.best_confusion[i] = np.bincount(pairs, minlength=self.classes**2).reshape(self.classes, self.classes)

    def _score(
        self, b: slice, w_kW: Tensor, predict: Predict | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return loss, predicted class and label of each scored image, `[k, S]` (validation first, then test, then padding)."""
        out = []
        ready = None if predict else self.ensemble.ready(w_kW)
        for _, x, y, _ in self.clients.scoring(b, False, SCORE_CHUNK):
            logits = predict(b, w_kW, x) if predict else self.ensemble.logits(ready, self.ensemble.prepare(x))
            out.append((cross_entropy(logits, y), logits.argmax(2), y))
        losses, predicted, labels = (torch.cat(part, 1).cpu().numpy() for part in zip(*out, strict=True))
        return losses.astype(np.float64), predicted, labels

    def reward(self, b: slice, pair_k2W: Tensor, active: list[bool]) -> np.ndarray:
        """Return R = -validation loss of two models a client, float64 `[k, 2]` (equation 6), in one evaluation.

        The images are prepared once while one block is searched; on a CPU the next client's take their place.
        """
        models = pair_k2W.view(-1, pair_k2W.shape[-1])
        if b.start not in self._reward_sets:
            if len(self.blocks) > 1 and b.stop - b.start == 1:
                self._reward_sets.clear()  # a CPU goes through its clients one by one
            self._reward_sets[b.start] = [
                (self.ensemble.prepare(x), y.repeat_interleave(2, 0), mask.repeat_interleave(2, 0))
                for _, x, y, mask in self.clients.scoring(b, True, SCORE_CHUNK)
            ]
        total = torch.zeros(len(models), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            ready = self.ensemble.ready(models)
            for prepared, y, mask in self._reward_sets[b.start]:
                logits = self.ensemble.logits(ready, prepared)
                total += torch.where(mask, cross_entropy(logits, y), 0).double().sum(1)
        self.notes["evaluations"][b] += 2 * np.array(active)
        return -total.cpu().numpy().reshape(-1, 2) / self.clients.n_val[b, None]

    # models along the graph --------------------------------------------------------------------------------------------
    def exchange(self, w_KW: Tensor, graph: CollaborationGraph) -> Received:
        """Send every row along the graph, into the receivers' inboxes, and return what arrived (Algorithm 1, line 9)."""
        self.check_finite(w_KW)
        graph = self.among_active(graph)
        if self.reach is not None and not graph.within(self.reach):
            raise ValueError("an edge outside the reach of its receiver")
        self.notes["models_received"] += graph.degrees()[self.ids]
        return Received(self, w_KW, graph)

    def among_active(self, graph: CollaborationGraph) -> CollaborationGraph:
        """Return the edges of a graph between clients that take part in this round."""
        if self.active.all():
            return graph
        return graph.only(self.active[graph.receivers()] & self.active[graph.senders])

    def check_finite(self, w_KW: Tensor) -> None:
        """Find clients whose row is not finite, or too large to sum, before any sum or reward: end the run, or exclude them.

        All ranks find out together: a rank that stopped alone would leave the others waiting for it.
        """
        largest = torch.linalg.vector_norm(w_KW, math.inf, dim=1)  # no copy of the rows; NaN where a weight is
        everyone = self.gather_flags((largest < LARGEST).cpu().tolist())  # false for NaN as well
        for k in np.flatnonzero(~everyone & self.alive):
            if self.run.on_divergence == "stop":
                raise UserError(
                    f"client {k} diverged in round {self.round}: its model is not finite or has a weight beyond {LARGEST:g}; "
                    "lower --lr, set --clip_norm, or --on_divergence exclude"
                )
            self.diverged_round[k] = self.round
        self.alive &= everyone
        self.budget[~self.alive] = 0

    def average(self, w_KW: Tensor, graph: CollaborationGraph, received: Received | None = None) -> Tensor:
        """Return sum p_i w_i / sum p_i over each client and its senders (equation 4); a client without senders keeps its row.

        `received` saves the exchange where the models are already here; all clients average the rows of one snapshot.
        """
        if received is None:
            received = self.exchange(w_KW, graph)
        out = w_KW.clone()
        graph = self.among_active(graph)
        if (graph.degrees() > self.budget).any():
            raise ValueError("more models for a client than its budget")
        local = [graph.of(k) for k in self.ids]
        total = self.ensemble.zeros(self.k, torch.float64)
        with self.clock("exchange"), torch.no_grad():
            for b in self.blocks:
                total[b] = w_KW[b].double() * self.column(self.p[self.ids[b]])
            for held, now in received.in_order(local):  # ascending: the order of the sum does not depend on passes
                for b in self.blocks:
                    for rows, p_k in held.one_by_one(b, now[b]):
                        total[b] += rows.double() * p_k[:, None]
            for i, senders in enumerate(local):
                if len(senders):
                    out[i] = total[i] / float(self.p[self.ids[i]] + self.p[senders].sum())
        return out

    def mean(self, w_KW: Tensor) -> Tensor:
        """Return the exact p-weighted mean over all clients that take part, `[W]`: the same bits for any number of ranks.

        Each of them sent its row up and gets the mean back: two models a client.
        """
        self.check_finite(w_KW)
        if not self.active.any():
            raise UserError(f"round {self.round} has no client with a finite model left; lower --lr or set --clip_norm")
        with self.clock("exchange"):
            self.notes["models_received"] += 2 * self.active[self.ids]
            return (from_fixed_point(self._total(w_KW)) / float(self.p[self.active].sum())).float()

    def term(self, k: int, row_W: Tensor) -> Tensor:
        """Return client k's term p_k w_k of an exact sum, fixed-point int64 `[W]`."""
        return fixed_point(row_W[None], self.column(self.p[k : k + 1])[:, 0])[0]

    def _total(self, w_KW: Tensor) -> Tensor:
        """Return the fixed-point sum of p_i w_i over all clients that take part, int64 `[W]` (design: order does not matter)."""
        total = torch.zeros(self.ensemble.width, dtype=torch.int64, device=self.device)
        mine = np.flatnonzero(self.active[self.ids])
        check_fixed_point(w_KW[mine])
        for i in mine:
            total += self.term(self.ids[i], w_KW[i])
        return torch.from_numpy(self.world.sum_int64(total.cpu().numpy())).to(self.device)

    def sum_of_all(self, w_KW: Tensor) -> tuple[Tensor, np.ndarray]:
        """Return w^Y over each client and all it can reach, float64 `[K, W]`, and its sum of p `[K]` (Algorithm 3, lines 1-7)."""
        self.check_finite(w_KW)
        wants = self.budget[self.ids] > 0
        if self.reach is None:  # everyone reaches everyone: one exact sum serves all
            with self.clock("exchange"):
                self.notes["models_received"] += np.where(wants, int(self.active.sum()) - 1, 0)
                # fsum: the same bits as in `start_sums`, whatever the order
                total = from_fixed_point(self._total(w_KW))
                return total.expand(self.k, -1), np.full(self.k, math.fsum(self.p[self.active]))
        sets = [
            np.union1d(self.reachable(k), [k]) if want else np.array([k])
            for k, want in zip(self.ids, wants, strict=True)
        ]
        self.notes["models_received"] += np.array([len(s) - 1 for s in sets], np.int64)
        total = torch.zeros(self.k, self.ensemble.width, dtype=torch.int64, device=self.device)

        def add(j: int, row_W: Tensor) -> None:
            term = self.term(j, row_W)
            for i, members in enumerate(sets):
                if j in members:
                    total[i] += term

        check_fixed_point(w_KW[np.flatnonzero(self.active[self.ids])])
        self.sweep(w_KW, add)
        return from_fixed_point(total), np.array([math.fsum(self.p[s]) for s in sets])

    def sweep(self, w_KW: Tensor, visit: Callable[[int, Tensor], None]) -> None:
        """Call `visit(j, row [W])` on every rank with clients, for the row of every client that takes part, in client order.

        The rows pass through the window, as many at a time as it has slots; each is sent to a rank once. Collective.
        """
        self.check_finite(w_KW)
        clients = np.bincount(self.owner, minlength=self.world.size)
        limit = self._capacity() if self.budget.any() else np.full(self.world.size, self._window_limit())
        width = max(1, int(np.minimum(limit, self.n)[clients > 0].min()))
        ranks, first_of = np.unique(self.owner, return_index=True)  # one client of each rank receives for all
        everyone = np.flatnonzero(self.active)
        for start in range(0, len(everyone), width):
            now = everyone[start : start + width]
            to, of = np.nonzero(self.owner[now] != ranks[:, None])
            graph = CollaborationGraph.from_edges(self.n, first_of[to], now[of])
            held = Received(self, w_KW, graph, plan(graph, self.owner, self.row_of, self.world.rank, self.world.size))
            if self.k:
                with self.clock("exchange"):
                    for j in now:
                        visit(int(j), held.rows([j])[0])

    # choosing whose models to average ----------------------------------------------------------------------------------
    def bggc(self, w_KW: Tensor) -> CollaborationGraph:
        """Return Omega, chosen by every client among all it can reach (Algorithm 3)."""
        return greedy.bggc(self, w_KW)

    def ggc(self, w_KW: Tensor, received: Received) -> CollaborationGraph:
        """Return C, chosen by every client among the models it received (Algorithm 2)."""
        return greedy.ggc(self, w_KW, received)

    # what the greedy search needs --------------------------------------------------------------------------------------
    def reachable(self, k: int) -> np.ndarray:
        """Return the candidates of client k, ascending: all other clients it can reach that take part."""
        if not self.active[k]:
            return np.zeros(0, np.int64)
        others = np.flatnonzero(self.active) if self.reach is None else self.reach.of(k)
        return others[(others != k) & self.active[others]]

    def shuffle(self, k: int, candidates: np.ndarray, repeat: int) -> np.ndarray:
        """Return the candidates in client k's order of this round (and repeat)."""
        rng = streams.stream(self.run.seed, streams.CANDIDATES, int(k), self.round * 1000 + repeat)
        return rng.permutation(candidates)

    def coins(self, b: slice, repeat: int) -> list[np.random.Generator]:
        """Return for each client of a block where its coins in [0, 1) of this round (and repeat) come from, one a candidate."""
        return [streams.stream(self.run.seed, streams.COIN, int(k), self.round * 1000 + repeat) for k in self.ids[b]]

    def count_case(self, i: int, gains: bool, loses: bool) -> None:
        """Count which of the four (a, b) cases local client i met (`graph.CASES`)."""
        self.notes["cases"][
            i, {(True, False): 0, (False, True): 1, (False, False): 2, (True, True): 3}[gains, loses]
        ] += 1

    def column(self, values: np.ndarray) -> Tensor:
        """Return float64 values `[k]` as a column `[k, 1]` on the device."""
        return torch.from_numpy(np.asarray(values, np.float64)).to(self.device)[:, None]

    def keep(self, which: np.ndarray, new: Tensor, old: Tensor) -> Tensor:
        """Return `new` in the rows where `which` is true, `old` elsewhere."""
        if len(which) == 1:
            return new if which[0] else old
        return torch.where(torch.from_numpy(which).to(self.device)[:, None], new, old)

    def gather_flags(self, mine: Sequence[bool]) -> np.ndarray:
        """Return a flag of every client on every rank, bool `[N]`."""
        gathered = self.world.gather(np.array(mine, np.uint8), self.owner, everywhere=True)
        assert gathered is not None
        return self._by_client(gathered).astype(bool)

    def collect(self, mine: Sequence[Senders]) -> CollaborationGraph:
        """Return on every rank the graph whose edges each rank knows for its own receivers."""
        lengths = self.world.gather(np.array([len(s) for s in mine], np.int64), self.owner, everywhere=True)
        assert lengths is not None
        receivers = np.repeat(self.gathered, lengths)
        a_rank = np.bincount(self.owner[receivers], minlength=self.world.size)
        senders = self.world.gather_ragged(np.concatenate([np.zeros(0, np.int64), *map(np.asarray, mine)]), a_rank)
        return CollaborationGraph.from_edges(self.n, receivers, senders)

    def to_clients(self, rows: np.ndarray) -> np.ndarray | None:
        """Return on root `[N, ...]` in client order from every rank's `[K, ...]`; elsewhere None."""
        gathered = self.world.gather(rows, self.owner)
        return None if gathered is None else self._by_client(gathered)

    def _by_client(self, gathered: np.ndarray) -> np.ndarray:
        """Return gathered rows `[N, ...]`, which come rank by rank, in the order of the clients."""
        out = np.empty_like(gathered)
        out[self.gathered] = gathered
        return out

    # the window --------------------------------------------------------------------------------------------------------
    def passes(self, graph: CollaborationGraph) -> tuple[Plan | None, int]:
        """Return the graph's plan where all of it fits the window, as usual; else None and how many models a client receives a pass."""
        for known, made in self._plans:
            if known is graph:
                return made
        capacity = self._capacity()
        world = self.world
        whole = plan(graph, self.owner, self.row_of, world.rank, world.size)
        result: tuple[Plan | None, int] = whole, 0
        clients = np.bincount(self.owner, minlength=world.size)
        width = models_per_pass(whole.need, capacity, clients)
        if width is not None:
            if width < 1:
                raise too_narrow(self.job.window_gb, 4 * self.ensemble.width, clients)
            result = None, width
        self._plans = [(graph, result), *self._plans[:1]]
        return result

    def _capacity(self) -> np.ndarray:
        """Return the slots of every rank's window: B_c - 1 a client, no more than there are other clients, within --window_gb."""
        clients = np.bincount(self.owner, minlength=self.world.size)
        wanted = np.bincount(self.owner, self.budget, minlength=self.world.size).astype(np.int64)
        return np.minimum(window_slots(wanted, clients, self.n), self._window_limit())

    def _window_limit(self) -> int:
        """Return how many rows --window_gb allows."""
        return window_rows(self.job.window_gb, 4 * self.ensemble.width)

    def narrow(self, graph: CollaborationGraph) -> None:
        """Give the window just the slots that a graph needs; the old one is freed first."""
        whole, _ = self.passes(graph)
        self.open_window(int((self._capacity() if whole is None else whole.need)[self.world.rank]))

    def open_window(self, slots: int) -> Inbox:
        """Return the window, made anew with this many slots on this rank."""
        bytes_put = self.inbox.bytes_put if self.inbox else 0
        self.close()
        self.inbox = Inbox(self.world, self.staging.numpy(), slots)
        self.on_window()
        self.inbox.bytes_put = bytes_put
        return self.inbox

    def put(self, w_KW: Tensor, step: Any) -> Inbox:
        """Stage the rows and put them along one pass's plan."""
        need = int(step.need[self.world.rank])
        inbox = self.inbox
        if self.world.agree(inbox is None or need > inbox.slots):
            inbox = self.open_window(max(need, int(self._capacity()[self.world.rank])))
        assert inbox is not None
        with self.clock("exchange"):
            if step.puts:
                self.staging.copy_(w_KW)  # on a GPU: one host copy of the rank's rows, 25 MB for 100 CNNs
            ready = time.perf_counter()

            def all_here() -> None:  # after the opening Fence: until now this rank waited for the slowest
                waited = time.perf_counter() - ready
                self.seconds["wait"] += waited
                self._inside += waited

            inbox.exchange(step, all_here)
        return inbox

    def close(self) -> None:
        """Free the window on all ranks."""
        if self.inbox:
            self.inbox.close()
            self.inbox = None


def find_head(name: str) -> str:
    """Return the name of a model's last layer."""
    import importlib

    find("model", name)
    return str(importlib.import_module(f"dpfl_mpi.models.{name}").HEAD)


def find_model(name: str, shape: tuple[int, int, int], classes: int) -> torch.nn.Module:
    """Return a new model by its name."""
    import importlib

    find("model", name)
    return importlib.import_module(f"dpfl_mpi.models.{name}").build(shape, classes)
