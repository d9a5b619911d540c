"""What a run writes and prints, gathered from all ranks by name."""

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

# "best" is the test accuracy of each client's best model by validation; "received" counts models
COLUMNS = "   val %  test %  best %  received  seconds    left"
COUNTS = ("cases", "evaluations", "models_received")  # notes of a round that are whole numbers
# datasets of the clients' best and last scores, by their names in `Parts.state` and its parts
BEST = {
    "best_round": "best/round",
    "best_val": "best/val_acc",
    "best_test": "best/test_acc",
    "last_test": "last/test_acc",
    "epochs": "client/epochs",
}


class Record:
    """What a run writes into its results file and prints, on root. Every method is collective.

    An error of writing is raised on every rank. Elsewhere `recorder` is None.
    """

    def __init__(self, parts: Parts, quiet: bool):
        run = parts.run
        self.parts = parts
        self.recorder: Any = None  # a Recorder on root
        self.prints = parts.world.root and not quiet
        self.total = run.rounds + run.finetune_epochs
        self.start = 0.0  # of the round that is printed next
        self.seconds = list[float]()  # of each round so far

    def write(self, on_root: Callable[[Recorder], None]) -> None:
        """Call `on_root` with the Recorder on root."""
        self.parts.world.decide(lambda: on_root(self.recorder))

    def round(self, state: State) -> None:
        """Write the round that `parts` is in: one gather of 18 numbers per client."""
        parts, ledger = self.parts, self.parts.mail.ledger
        with parts.log.clock("write"):
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
            if parts.round == 0:
                senders = omega.senders.astype(np.int32)
                recorder.write({"graph/omega/indptr": omega.indptr, "graph/omega/senders": senders})
            recorder.append_graph(chosen)
            mixed = ("val_acc", "test_acc") if parts.scoring.mixed else ()
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
            # root writes while the others go on
            seconds[PHASES.index("write"), 1:] += time.perf_counter() - start
            of_phases = zip(PHASES, seconds, strict=True)
            recorder.append({f"seconds/{name}": values for name, values in of_phases})
            self._write_best(recorder, clients)

        self.write(on_root)

    def series(
        self, group: str, epochs: np.ndarray, notes: Sequence[Mapping[str, np.ndarray]], **more: Any
    ) -> None:
        """Write `more` arrays and the notes `[K]` after each of these local epochs, in a group."""
        stacked = {name: np.stack([note[name] for note in notes], 1) for name in notes[0]}
        arrays = {f"{group}/{name}": values for name, values in {"epochs": epochs, **more}.items()}
        for name, values in self.parts.members.gather(stacked).items():
            dtype = np.int32 if name in COUNTS else values.dtype
            arrays[f"{group}/{name}"] = values.T.astype(dtype)
        self.write(lambda recorder: recorder.write(arrays))

    def tuned(self) -> None:
        """Write the best models' scores after tuning."""
        clients = self.parts.members.gather(best_of(self.parts))
        self.write(lambda recorder: self._write_best(recorder, clients))

    def _write_best(self, recorder: Recorder, clients: Mapping[str, np.ndarray]) -> None:
        """Write the clients' best so far, and in which rounds they diverged or stopped. On root."""
        members = self.parts.members
        recorder.write({name: clients[name] for name in BEST.values()})
        recorder.write({"client/diverged_round": members.diverged_round})
        if self.parts.run.patience:
            recorder.write({"client/stopped_round": members.stopped_round})
        best = float(mean(clients["best/test_acc"][members.benign]))  # NaN where there is none
        recorder.flush(members.round, best)

    def rows(self, name: str, rows_K: np.ndarray) -> None:
        """Write all ranks' `[K, ...]` as one array `[N, ...]`, a few rows at a time."""
        n, size = self.parts.n, rows_K.itemsize * int(np.prod(rows_K.shape[1:], dtype=np.int64))
        step = max(1, GATHERED // max(1, size))
        for first in range(0, n, step):
            now = slice(first, min(first + step, n))
            values: Any = self.parts.members.to_root(rows_K, now)  # None but on root
            self.write(partial(Recorder.write_rows, name=name, values=values, n=n, first=first))

    def print_heads(self) -> None:
        """Print what is computed and the heads of columns; the first round begins."""
        run, ranks = self.parts.run, self.parts.world.size
        self.start = time.perf_counter()
        if self.prints:
            method = f"{short(run.method)} on {short(run.dataset)}, {run.clients} clients"
            print(f"{method}, {ranks} rank{'s' * (ranks > 1)}, means over clients")
            print(f"{'round':>11}{COLUMNS}{'  simulated' if run.network else ''}", flush=True)

    def print_round(self) -> None:
        """Print the round that `parts` is in, and the time left."""
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
        received = clients["received"].mean()
        simulated = f"{duration(clock.now.max() / NS):>11}" if clock else ""
        place = f"{t}/{self.total}"
        cost = f"{received:10.1f}{seconds:9.2f}{left:>8}{simulated}"
        print(f"{place:>11}{percents}{cost}", flush=True)

    def finish(self, job: Job) -> None:
        """Write what is known at the end, save the models where asked or small, close the file."""
        parts, ensemble = self.parts, self.parts.backend.ensemble
        self.rows("best/confusion", parts.scoring.best_confusion.astype(np.int32))
        save = saved_bytes(job, parts.n, ensemble.size) > 0
        if save:
            self.rows("model/best", parts.scoring.best[:, : ensemble.size].cpu().numpy())
        aucs = success = None
        if parts.run.found("method").finetunes:  # by the row alone
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
    """Return the state that this start goes on from, else None, and the Record. Collective."""
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
        else:
            warn_of_change(recorder.starts[-1], start)

    parts.world.decide(create)
    return state, record


def facts_of_clients(parts: Parts) -> dict[str, np.ndarray]:
    """Return what is known of the clients before the first round, by name in the file."""
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
        out["client/liars"] = limits.liars
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
    """Return this rank's best and last scores and epochs, `[K]` each, by name in the file."""
    arrays = vars(parts.scoring) | vars(parts.training)
    return {dataset: arrays[name] for name, dataset in BEST.items()}
