"""What a run writes and shows: at its start, after each round, after tuning, at its end. Gathered from all ranks by name, written by root."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.federation import Parts
from dpfl_mpi.federation.attack import backdoor_success
from dpfl_mpi.federation.greedy import REPAIR
from dpfl_mpi.federation.log import SCORES
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import State
from dpfl_mpi.plan.needs import GATHERED, duration, saves_models
from dpfl_mpi.plugins import short
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.results.result import mean
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings import Job
from dpfl_mpi.transport.speeds import NS

COLUMNS = "   val %  test %  best %  received  seconds    left"  # best: of each client's best model by validation; received: models
COUNTS = ("cases", "evaluations", "models_received")  # notes of a round that are whole numbers
# what clients have come to: names in `Parts.state` -> datasets; beside them stand the confusion matrices
BEST = {"best_round": "best/round", "best_val": "best/val_acc", "best_test": "best/test_acc"}
BEST |= {"last_test": "last/test_acc", "epochs": "client/epochs"}


def open_recorder(
    path: Path, parts: Parts, start: dict[str, Any], snapshot: Path | None, still_ours: Callable[[], object]
) -> Recorder | None:
    """Return the Recorder on root, None elsewhere; arguments and errors are its own, the errors on every rank. Collective."""
    opened: list[Recorder] = []
    known = {} if snapshot else of_clients(parts)

    def create() -> None:
        opened.append(Recorder(path, parts.run, parts.about, start, snapshot, still_ours))
        opened[0].write(known)

    parts.world.decide(create)
    return opened[0] if opened else None


def of_clients(parts: Parts) -> dict[str, np.ndarray]:
    """Return what is known of the clients before the first round, by name in the file."""
    run, limits, dealt, reach = parts.run, parts.members.limits, parts.partition, parts.members.reach
    out = {
        "client/p": parts.members.p,
        "client/budget": parts.members.most_senders + run.budget_counts_self,
        "client/flipped": limits.flipped,
        "client/class_counts": dealt.class_counts,
        **{f"client/n_{part}": dealt.sizes(part) for part in PARTS},
    }
    if dealt.of_data is not None:
        out["client/of_data"] = dealt.of_data
    if run.attack:
        out["client/liars"] = limits.liars
    if run.newcomers:
        out["client/newcomers"] = limits.newcomers
    if run.drift:
        out |= {"client/drifted": parts.drift.drifted, "client/drift_classes": parts.drift.classes}
    if clock := parts.mail.wire.clock:
        out |= {f"network/{name}": values for name, values in vars(clock.speeds).items()}
    if reach is not None:
        out |= {"graph/reach/indptr": reach.indptr, "graph/reach/senders": reach.senders}
    return out


def gather(parts: Parts, mine: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return on root, else {}, all clients' arrays `[N, ...]` by the names of this rank's `[K, ...]`; as float64, exact up to 2^53. Collective."""
    widths = [int(np.prod(values.shape[1:], dtype=np.int64)) for values in mine.values()]
    columns = [values.reshape(len(parts.ids), width) for values, width in zip(mine.values(), widths, strict=True)]
    table = parts.members.to_root(np.concatenate(columns, 1, dtype=np.float64))
    if table is None:
        return {}
    pieces = np.split(table, np.cumsum(widths)[:-1], 1)
    return {
        name: piece.reshape(parts.n, *values.shape[1:]).astype(values.dtype)
        for (name, values), piece in zip(mine.items(), pieces, strict=True)
    }


def on_root(recorder: Recorder | None, parts: Parts, write: Callable[[Recorder], None]) -> None:
    """Let root write; where it cannot, every rank has the error. Collective."""

    def with_recorder() -> None:
        assert recorder is not None
        with recorder.explained():
            write(recorder)

    parts.world.decide(with_recorder)


def best_so_far(parts: Parts) -> dict[str, np.ndarray]:
    """Return this rank's best and last scores and epochs, `[K]` each, by their names in the file."""
    mine, _ = parts.state()
    return {stored: mine[name] for name, stored in BEST.items()}


def left(parts: Parts) -> dict[str, np.ndarray]:
    """Return in which rounds clients diverged or stopped, `[N]`, by their names in the file."""
    stopped = {"client/stopped_round": parts.members.stopped_round} if parts.run.patience else {}
    return {"client/diverged_round": parts.members.diverged_round} | stopped


def best_mean(parts: Parts, everyone: Mapping[str, np.ndarray]) -> float:
    """Return the benign clients' mean best test accuracy, NaN where there is none. On root."""
    return float(mean(everyone["best/test_acc"][parts.members.benign]))


def write_round(recorder: Recorder | None, parts: Parts, state: State) -> None:
    """Write the records of the round that `parts` is in. Collective; one gather of 18 numbers per client."""
    with parts.log.clock("write"):
        best = best_so_far(parts)
        everyone = gather(parts, parts.log.notes | best)
        moved = parts.mail.bytes_put, parts.world.bytes_collective
        wire, clock = parts.mail.wire, parts.mail.wire.settle()
        totals = parts.world.sum_int64(np.array([parts.training.steps.sum(), *moved]))
    seconds = parts.world.spread(np.array([parts.log.seconds[name] for name in PHASES]))

    def write(to: Recorder) -> None:
        start = time.perf_counter()
        ended, mean_best = left(parts), best_mean(parts, everyone)
        omega: CollaborationGraph = state["shared"].get("omega", CollaborationGraph.empty(parts.n))
        if parts.round == 0:
            to.write({"graph/omega/indptr": omega.indptr, "graph/omega/senders": omega.senders.astype(np.int32)})
        to.append_graph(parts.members.among_active(state["shared"].get("chosen", omega)))
        cases, evaluations, received = (everyone[name].astype(np.int32) for name in COUNTS)
        mixed = ("val_acc", "test_acc") if parts.scoring.mixed else ()
        row = {
            "round/number": np.int64(parts.round),
            "round/epochs": everyone["client/epochs"].max(),
            "round/gradient_steps": totals[0],
            **{f"round/{name}": everyone[name] for name in SCORES},
            "round/best_test_acc": everyone["best/test_acc"],
            **{f"mixed/{name}": everyone[f"mixed_{name}"] for name in mixed},
            "graph/cases": cases,
            "graph/evaluations": evaluations,
            "traffic/models_received": received,
            "traffic/bytes_rma": totals[1],
            "traffic/bytes_collective": totals[2],
        }
        if parts.run.churn:
            row["round/there"] = parts.members.there
            row |= {f"graph/{name}": everyone[name].astype(np.int32) for name in REPAIR}
        if clock:
            row |= {f"network/{name}": values / NS for name, values in (clock.spent | {"end": clock.now}).items()}
            row["network/waited_for"] = clock.waited_for.astype(np.int32)
            row["network/age"] = wire.age.astype(np.int32)
        if wire.counts:
            row["traffic/bytes_sent"] = wire.bytes
        to.append(row)
        seconds[PHASES.index("write"), 1:] += time.perf_counter() - start  # root writes while the others go on
        to.append({f"seconds/{name}": row for name, row in zip(PHASES, seconds, strict=True)})
        to.write({name: everyone[name] for name in best} | ended)
        to.flush(parts.round, mean_best)

    on_root(recorder, parts, write)


def write_series(
    recorder: Recorder | None, parts: Parts, group: str, epochs: np.ndarray, notes: Sequence[Mapping[str, np.ndarray]]
) -> None:
    """Write what came after the rounds, in a group of the file: `notes` `[K]` by name after each of so many local `epochs`. Collective."""
    everyone = gather(parts, {name: np.stack([note[name] for note in notes], 1) for name in notes[0]})
    kept = {f"{group}/{name}": (v.astype(np.int32) if name in COUNTS else v).T for name, v in everyone.items()}
    on_root(recorder, parts, lambda to: to.write({f"{group}/epochs": epochs} | kept))


def write_tuned(recorder: Recorder | None, parts: Parts, steps: np.ndarray) -> None:
    """Write all ranks' gradient steps up to each epoch of tuning, and the best that came of it. Collective."""
    everyone = gather(parts, best_so_far(parts))

    def write(to: Recorder) -> None:
        to.write({"finetune/gradient_steps": steps} | everyone | left(parts))
        to.flush(parts.round, best_mean(parts, everyone))

    on_root(recorder, parts, write)


def write_clients(recorder: Recorder | None, parts: Parts, name: str, rows: np.ndarray) -> None:
    """Write all ranks' `[K, ...]` as one array `[N, ...]`, of which root holds, beside the file, no more than `GATHERED` bytes twice. Collective."""
    at_once = max(1, GATHERED // max(1, rows.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))))
    for first in range(0, parts.n, at_once):
        some: Any = parts.members.to_root(rows, slice(first, min(first + at_once, parts.n)))  # None but on root
        on_root(recorder, parts, partial(Recorder.write_rows, name=name, values=some, n=parts.n, first=first))


def finish(recorder: Recorder | None, parts: Parts, job: Job) -> None:
    """Write what is known at the end, confusion matrices and, where asked or small, the best models, and close the file. Collective."""
    write_clients(recorder, parts, "best/confusion", parts.scoring.best_confusion.astype(np.int32))
    best = parts.scoring.best[:, : parts.backend.ensemble.size]
    save = saves_models(job, parts.n, best.shape[1])
    if save:
        write_clients(recorder, parts, "model/best", best.cpu().numpy())
    backdoor = parts.training.attack.kind == "backdoor"
    success = parts.members.to_root(backdoor_success(parts.scoring)) if backdoor else None

    def write(to: Recorder) -> None:
        if parts.run.patience:  # once more: the last may have stopped after the last record
            to.write({"client/stopped_round": parts.members.stopped_round})
        if success is not None:
            to.write({"attack/success": success})
        if save:
            shapes = [list(parts.backend.ensemble.shapes[n]) for n in parts.backend.ensemble.names]
            to.file["model"].attrs.update(names=json.dumps(parts.backend.ensemble.names), shapes=json.dumps(shapes))
        to.close("finished")

    on_root(recorder, parts, write)


class Progress:
    """One line per round, shown by root; all ranks take part in the means."""

    def __init__(self, parts: Parts, quiet: bool):
        self.parts, self.start = parts, time.perf_counter()
        self.shows = parts.world.root and not quiet
        self.total, self.took = parts.run.rounds + parts.run.finetune_epochs, list[float]()
        if self.shows:
            run, ranks = parts.run, f"{parts.world.size} rank{'s' * (parts.world.size > 1)}"
            on = f"{short(run.method)} on {short(run.dataset)}, {run.clients} clients, {ranks}, means over clients"
            simulated = "  simulated" if run.network else ""
            print(f"{on}\n{'round':>11}{COLUMNS}{simulated}", flush=True)

    def line(self, t: int) -> None:
        """Show a round. Collective."""
        notes, benign = self.parts.log.notes, self.parts.members.benign
        mine = {"val": notes["val_acc"], "test": notes["test_acc"], "best": self.parts.scoring.best_test}
        everyone = gather(self.parts, mine | {"received": notes["models_received"]})
        if not self.shows:
            return
        scores = "".join(f"{100 * mean(everyone[name][benign]):8.2f}" for name in mine).replace("nan", "  -")
        seconds, self.start = time.perf_counter() - self.start, time.perf_counter()
        self.took += [seconds] if t else []  # preprocessing tells nothing about a round
        left = duration((self.total - t) * float(np.mean(self.took))) if self.took else ""
        place, received, clock = f"{t}/{self.total}", everyone["received"].mean(), self.parts.mail.wire.clock
        simulated = f"{duration(clock.now.max() / NS):>11}" if clock else ""
        print(f"{place:>11}{scores}{received:10.1f}{seconds:9.2f}{left:>8}{simulated}", flush=True)
