"""`Record`: what a run writes into its results file and prints, gathered from all ranks.

The loop in `engine.train` calls it after each round. `Parts` is this rank's share of the run: its
`members` know who takes part, its `scoring` the best models, and its `log` has the notes and the
seconds of the current round. Rank 0, called root, alone has a `Recorder`, which writes the file.
Axes: N clients in all, K on this rank. Names such as "round/val_acc" are those of
`results.schema.LAYOUT`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.engine.machine import describe_start, warn_of_change
from dpfl_mpi.errors import complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.federation.attack import backdoor_success
from dpfl_mpi.federation.neighbours import COSTS
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import State
from dpfl_mpi.plan.needs import GATHERED, duration, saved_bytes
from dpfl_mpi.plugins import short
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.results.result import changed_code, mean
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings import Job
from dpfl_mpi.survival.checkpoint import Checkpoints
from dpfl_mpi.transport.clock import NS
from dpfl_mpi.transport.log import SCORES

# heads of the lines printed: "best" is the test accuracy of each client's best model by validation,
# "received" how many models a client received
COLUMNS = "   val %  test %  best %  received  seconds    left"
COUNTS = ("cases", "evaluations", "models_received")  # notes that are whole numbers
# attributes of `Parts.scoring` and `Parts.training`, and the arrays of the file that have them
BEST = {"best_round": "best/round", "best_val": "best/val_acc", "best_test": "best/test_acc"}
BEST |= {"last_test": "last/test_acc", "epochs": "client/epochs"}


class Record:
    """What a run writes and prints. Every rank calls each method; an error is raised on all."""

    def __init__(self, parts: Parts, quiet: bool):
        run = parts.run
        self.parts = parts
        self.recorder: Any = None  # a Recorder on root, set by `begin_record`; None elsewhere
        self.prints = parts.world.root and not quiet
        self.total = run.rounds + run.finetune_epochs
        self.start = 0.0  # when the round began that is printed next
        self.seconds = list[float]()  # that each round took so far

    def write(self, on_root: Callable[[Recorder], None]) -> None:
        """Call `on_root` with the Recorder, on root alone."""
        self.parts.world.decide(lambda: on_root(self.recorder))

    def round(self, state: State) -> None:
        """Write a row of each array over rounds: what happened in the round that `parts` is in."""
        # the ledger counts bytes sent, and its clock simulates time with --network, else it is None
        parts, ledger = self.parts, self.parts.mail.ledger
        with parts.log.clock("write"):
            # one call gathers all notes of all clients: arrays [N] or [N, ...] by name
            clients = parts.members.gather(parts.log.notes | best_of(parts))
            clock = ledger.settle()
            moved = parts.mail.mailroom.bytes_put, parts.world.bytes_collective
            counts = np.array([parts.training.steps.sum(), *moved])
            steps, bytes_rma, bytes_collective = parts.world.sum_int64(counts)
        seconds = parts.world.spread(np.array([parts.log.seconds[name] for name in PHASES]))

        def on_root(recorder: Recorder) -> None:
            start = time.perf_counter()
            empty = CollaborationGraph.empty(parts.n)
            omega: CollaborationGraph = state["shared"].get("omega", empty)
            chosen = parts.members.among_active(state["shared"].get("chosen", omega))
            if parts.round == 0:  # Omega, which later rounds may replace
                senders = omega.senders.astype(np.int32)
                recorder.write({"graph/omega/indptr": omega.indptr, "graph/omega/senders": senders})
            recorder.append_graph(chosen)
            mixed = ("val_acc", "test_acc") if parts.scoring.mixed else ()
            # the rows of this round, by array
            row = {
                "round/number": np.int64(parts.round),
                "round/epochs": clients["client/epochs"].max(),
                "round/gradient_steps": steps,
                **{f"round/{name}": clients[name] for name in SCORES},
                "round/best_test_acc": clients["best/test_acc"],
                **{f"mixed/{name}": clients[f"mixed_{name}"] for name in mixed},
                "graph/cases": clients["cases"].astype(np.int32),
                "graph/evaluations": clients["evaluations"].astype(np.int32),
                "traffic/models_received": clients["models_received"].astype(np.int32),
                "traffic/bytes_rma": bytes_rma,
                "traffic/bytes_collective": bytes_collective,
            }
            if parts.run.churn:
                row["round/there"] = parts.members.joined
                row |= {f"graph/{name}": clients[name].astype(np.int32) for name in COSTS}
            if clock:
                times = clock.spent | {"end": clock.now}
                row |= {f"network/{name}": values / NS for name, values in times.items()}
                row["network/waited_for"] = clock.waited_for.astype(np.int32)
                row["network/age"] = ledger.age.astype(np.int32)
            if ledger.counts:
                row["traffic/bytes_sent"] = ledger.bytes
            recorder.append(row)
            # all ranks wait for root meanwhile
            seconds[PHASES.index("write")] += time.perf_counter() - start
            for phase, of_phase in zip(PHASES, seconds, strict=True):
                recorder.append({f"seconds/{phase}": of_phase})
            self._write_best(recorder, clients)

        self.write(on_root)

    def series(
        self, group: str, epochs: np.ndarray, notes: Sequence[Mapping[str, np.ndarray]], **more: Any
    ) -> None:
        """Write what was noted while clients trained on after the last round, into a `group`.

        There are notes after `epochs` `[R]`: R times arrays `[K]` by name, which become arrays
        `[R, N]`. `more` arrays have R rows, too.
        """
        stacked = {name: np.stack([note[name] for note in notes], 1) for name in notes[0]}
        arrays = {f"{group}/{name}": values for name, values in {"epochs": epochs, **more}.items()}
        for name, of_clients in self.parts.members.gather(stacked).items():  # [N, R]
            dtype = np.int32 if name in COUNTS else of_clients.dtype
            arrays[f"{group}/{name}"] = of_clients.T.astype(dtype)
        self.write(lambda recorder: recorder.write(arrays))

    def tuned(self) -> None:
        """Write the best models' scores after fine-tuning."""
        clients = self.parts.members.gather(best_of(self.parts))
        self.write(lambda recorder: self._write_best(recorder, clients))

    def _write_best(self, recorder: Recorder, clients: Mapping[str, np.ndarray]) -> None:
        """Write each client's best scores so far, and when it diverged or stopped. On root."""
        members = self.parts.members
        recorder.write({name: clients[name] for name in BEST.values()})
        recorder.write({"client/diverged_round": members.diverged_round})
        if self.parts.run.patience:
            recorder.write({"client/stopped_round": members.stopped_round})
        best = float(mean(clients["best/test_acc"][members.benign]))  # nan where there is none
        recorder.flush(members.round, best)

    def rows(self, name: str, rows_K: np.ndarray) -> None:
        """Write all ranks' `[K, ...]` as one array `[N, ...]`, a few rows at a time."""
        # so root needs memory for `GATHERED` bytes only
        n, row_shape = self.parts.n, rows_K.shape[1:]
        row_bytes = rows_K.itemsize * int(np.prod(row_shape, dtype=np.int64))
        step = max(1, GATHERED // max(1, row_bytes))
        for first in range(0, n, step):
            block = slice(first, min(first + step, n))
            values: Any = self.parts.members.to_root(rows_K, block)  # None but on root
            self.write(partial(Recorder.write_rows, name=name, values=values, n=n, first=first))

    def print_heads(self) -> None:
        """Print what is computed and the heads of columns; the first round begins now."""
        run, ranks = self.parts.run, self.parts.world.size
        self.start = time.perf_counter()
        if self.prints:
            method = f"{short(run.method)} on {short(run.dataset)}, {run.clients} clients"
            print(f"{method}, {ranks} rank{'s' * (ranks > 1)}, means over clients")
            print(f"{'round':>11}{COLUMNS}{'  simulated' if run.network else ''}", flush=True)

    def print_round(self) -> None:
        """Print the line of the round that `parts` is in, with the time left."""
        t, members, notes = self.parts.round, self.parts.members, self.parts.log.notes
        best, clock = self.parts.scoring.best_test, self.parts.mail.ledger.clock
        scores = {"val": notes["val_acc"], "test": notes["test_acc"], "best": best}
        clients = members.gather(scores | {"received": notes["models_received"]})
        if not self.prints:
            return
        now = time.perf_counter()
        seconds, self.start = now - self.start, now
        left = ""
        if t:  # preprocessing tells nothing about a round
            self.seconds.append(seconds)
            left = duration((self.total - t) * float(np.mean(self.seconds)))
        means = (100 * mean(clients[name][members.benign]) for name in scores)
        percents = "".join(f"{value:8.2f}" for value in means).replace("nan", "  -")
        received = mean(clients["received"][members.benign])
        # no time is simulated where the rounds were copied
        simulated = f"{duration(clock.now.max() / NS):>11}" if clock and clock.now.any() else ""
        progress = f"{t}/{self.total}"
        cost = f"{received:10.1f}{seconds:9.2f}{left:>8}{simulated}"
        print(f"{progress:>11}{percents}{cost}", flush=True)

    def finish(self, job: Job) -> None:
        """Write what is known at the end only, and the models if asked or small; close the file."""
        parts, ensemble = self.parts, self.parts.backend.ensemble
        self.rows("best/confusion", parts.scoring.best_confusion.astype(np.int32))
        save = saved_bytes(job, parts.n, ensemble.size) > 0
        if save:
            self.rows("model/best", parts.scoring.best[:, : ensemble.size].cpu().numpy())
        aucs = success = None
        if parts.run.found("method").finetunes:  # it predicts by the model alone: there is an AUC
            aucs = parts.members.to_root(parts.scoring.aucs())
        if parts.run.attack and parts.run.attack.kind == "backdoor":
            success = parts.members.to_root(backdoor_success(parts.scoring))

        def on_root(recorder: Recorder) -> None:
            if parts.run.patience:  # a client may have stopped after the last record
                recorder.write({"client/stopped_round": parts.members.stopped_round})
            if aucs is not None:
                recorder.write({"best/test_auc": aucs})
            if success is not None:
                recorder.write({"attack/success": success})
            if save:
                names = json.dumps(ensemble.names)
                shapes = json.dumps([list(ensemble.shapes[name]) for name in ensemble.names])
                recorder.file["model"].attrs.update(names=names, shapes=shapes)
            recorder.close("finished")

        self.write(on_root)


def begin_record(
    path: Path, parts: Parts, job: Job, checkpoints: Checkpoints
) -> tuple[State | None, Record]:
    """Return the method's state at the last checkpoint, or None, and the Record. Collective."""
    # root creates the results file, or opens the copy of it that the checkpoint has
    start, clients = describe_start(parts), facts_of_clients(parts)
    record = Record(parts, job.quiet)
    state = checkpoints.restore(parts)
    if record.prints and state:
        print(f"goes on after round {parts.round}", flush=True)
    elif record.prints and path.exists() and not job.fresh:
        why = f"no checkpoint was kept (--checkpoint_every {job.checkpoint_every})"
        print(f"starts over: {why}", flush=True)

    def create() -> None:
        meta, snapshot = parts.provenance, checkpoints.results
        recorder = Recorder(path, parts.run, meta, start, snapshot, checkpoints.still_ours)
        record.recorder = recorder
        if not snapshot:
            recorder.write(clients)
            if record.prints and (text := changed_code(parts.run, path)):
                complain(f"note: {text}")
        else:  # this start may have other hosts or versions than the last one
            warn_of_change(recorder.starts[-1], start)

    parts.world.decide(create)
    return state, record


def facts_of_clients(parts: Parts) -> dict[str, np.ndarray]:
    """Return the arrays of the file that are known before the first round, by name."""
    run, members, partition = parts.run, parts.members, parts.partition
    limits, reach, clock = members.limits, members.reach, parts.mail.ledger.clock
    out = {
        "client/p": members.p,
        "client/budget": members.most_senders + run.budget_counts_self,
        "client/flipped": limits.flipped,
        "client/class_counts": partition.class_counts,
        **{f"client/n_{part}": partition.sizes(part) for part in PARTS},
    }
    if partition.of_data is not None:
        out["client/of_data"] = partition.of_data
    out |= {f"client/{what}": np.array(texts) for what, texts in parts.named.items()}
    if run.attack:
        out["client/attackers"] = limits.attackers
    if run.newcomers:
        out["client/newcomers"] = limits.newcomers
    if run.drift:
        out["client/drifted"] = limits.drifted
        out["client/drift_classes"] = parts.drift_classes
    if clock:
        out |= {f"network/{name}": values for name, values in vars(clock.speeds).items()}
    if reach is not None:
        out |= {"graph/reach/indptr": reach.indptr, "graph/reach/senders": reach.senders}
    return out


def best_of(parts: Parts) -> dict[str, np.ndarray]:
    """Return best and last scores and epochs of this rank's clients, `[K]`, by name in the file."""
    attributes = vars(parts.scoring) | vars(parts.training)
    return {array: attributes[name] for name, array in BEST.items()}
