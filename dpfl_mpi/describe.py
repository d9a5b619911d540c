"""Show a run before it is trained: the partition, the plan, and whether it can
run. `python -m dpfl_mpi.describe` takes a run's own flags.

Runs in one process, without mpirun: `--ranks 8 --nodes 2` says which job is
planned. `--save PATH` writes the partition as JSON, which `--partition
file:PATH` and any other framework can read.
"""

import argparse
import sys
import time
from pathlib import Path
from textwrap import shorten

import numpy as np

from dpfl_mpi.data.partition import PARTS, Partition, save
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import Source, open_source, verify
from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.mpi.placement import node_memory
from dpfl_mpi.numerics.sketches import ENTRIES
from dpfl_mpi.plan import needs
from dpfl_mpi.plan.clock import simulated
from dpfl_mpi.plan.needs import Needs, duration, megabytes
from dpfl_mpi.plugins import short
from dpfl_mpi.results.summary import WIDTH, fitted
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.settings.files import FILES
from dpfl_mpi.storage.files import check_apart


def parser() -> argparse.ArgumentParser:
    out = Parser(prog="python -m dpfl_mpi.describe", usage="%(prog)s [flags of a run] [flags below]", add_help=False)
    out.add_argument("--ranks", type=int, default=1, help="ranks that mpirun or srun will start")
    out.add_argument("--nodes", type=int, default=1, help="nodes they are spread over")
    out.add_argument("--rows", type=int, default=20, help="clients shown in the table")
    out.add_argument("--save", type=Path, help="write the partition: client -> train, val and test indices, as JSON")
    out.add_argument("--wide", action="store_true", help="lines and the table as wide as they are, not of 80 columns")
    out.add_argument("--no-measure", dest="measure", action="store_false", help="no time estimate")
    return out


@in_a_sentence
def main(arguments: list[str] | None = None) -> int:
    """Print partition and plan of a command line; return the exit code, 2 for a run that cannot run."""
    from dpfl_mpi.mpi.start import parse

    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{parser().format_help()}\nFlags of a run: python -m dpfl_mpi --help")
        return 0
    own, rest = parser().parse_known_args(arguments)
    run, job = parse(rest)
    for name, least in (("ranks", 1), ("nodes", 1), ("rows", 0)):
        if getattr(own, name) < least:
            raise UserError(f"--{name} is {getattr(own, name)}; allowed is a whole number of at least {least}")
    read = [getattr(value, "path", value) for value in map(vars(run).get, FILES)]
    check_apart(own.save, *read, flag="--save")
    source = open_source(run)
    verify(source)
    start = time.perf_counter()
    partition = deal(run, source)
    fit = str if own.wide else fitted
    print(fit(about(run, source, partition, time.perf_counter() - start)))
    if own.save:
        save(partition, own.save, run, source.sha256)
        print(f"saved to {own.save}: run on it with --partition file:{own.save}")
    ensemble = needs.ensemble_of(run, source)
    plan = needs.needs_of(run, job, source, partition, ensemble, own.ranks, own.nodes)
    print("\n" + table(source, partition, plan.owner, own.rows, own.wide))
    print("\n" + fit(plan_text(run, plan)))
    if run.network:
        first, whole = simulated(run, partition, plan.message)
        bound = ", where who chooses scores all that it may" if plan.evaluations[0] else ""
        took = f"about {duration(first)} before round 1, {duration(whole)} in all"
        print(fit(f"simulated  {took} (--network {run.network}){bound}"))
    needs.refuse(job, plan)
    if own.measure:
        print(fit(estimate(run, plan, needs.measure(run, job, source, ensemble, sizes=plan.sizes))))
    return 0


def about(run: Resolved, source: Source, partition: Partition, seconds: float) -> str:
    alpha, counts, p = run.dirichlet_alpha, partition.class_counts, partition.p
    how = {
        "dirichlet": f"Dir({alpha or 0:g}), at least {run.min_samples} samples",
        "pathological": f"Patho({run.classes_per_client}), Dir({alpha}) over a class's holders, at least {run.min_per_class} of each",
        "natural": f"the data's own clients of at least {run.min_samples} samples, {run.missing_classes} classes missing",
        "fedrep": f"fedrep's users of {run.classes_per_client} classes, {'overlapping' if run.overlap else 'not overlapping'}",
    }.get(run.partition.kind, str(run.partition))
    train, test = (len(source.labels[part]) for part in ("train", "test"))
    what, numbers = ("images", source.size) if len(source.shape) == 3 else ("samples", f"{source.size} {source.kind}")
    size = f"one pool of {train} {what}" if partition.pooled else f"{train} training and {test} test {what}"
    held, share = (counts > 0).sum(1), counts.max(1) / counts.sum(1)
    notes = (source.note, partition.note(), source.unread)
    of_part = "{:<10} {} samples; a client has {} to {}, median {:g}, mean {:.1f}"
    sizes = [(part, partition.sizes(part)) for part in PARTS]
    lines = [
        f"data       {short(run.dataset)}: {size} of {numbers}, {source.classes} classes, sha256 {source.sha256[:12]}",
        f"partition  {how}; {partition.n} clients, seed {run.partition_seed}, sha256 {partition.sha256()[:12]} ({seconds:.1f} s)",
        *(f"note       {text}" for text in notes if text),
        *(of_part.format(part, k.sum(), k.min(), k.max(), np.median(k), k.mean()) for part, k in sizes),
        f"classes    a client holds {held.min()} to {held.max()}, mean {held.mean():.1f}; its largest is {100 * share.mean():.0f} % of its samples",
        f"p_k        {p.min():.2g} to {p.max():.2g} (1/N = {1 / partition.n:.2g})",
    ]
    return "\n".join(lines)


def table(source: Source, partition: Partition, owner: np.ndarray, rows: int, wide: bool) -> str:
    """Return clients by classes: one column per class where they fit, else the largest classes by name."""
    names, most = source.class_names, partition.class_counts.max(0)
    width = [max(3, len(name), len(str(n))) for name, n in zip(names, most, strict=True)]
    room = WIDTH - len("client rank train   val  test    p_k  ")
    few = source.classes <= 12 if wide else sum(width) + len(width) - 1 <= room
    heads = " ".join(f"{name:>{w}}" for name, w in zip(names, width, strict=True)) if few else "largest classes"
    lines = [f"client rank train   val  test    p_k  {heads}"]
    for k in range(min(rows, partition.n)):
        counts = partition.class_counts[k]
        if few:
            text = " ".join(f"{c or '.':>{w}}" for c, w in zip(counts, width, strict=True))
        else:
            text = " ".join(f"{names[c]}:{counts[c]}" for c in np.argsort(-counts, kind="stable")[:6] if counts[c])
            text = text if wide else shorten(text, room, placeholder=" ...")
        sizes = " ".join(f"{partition.sizes(part)[k]:>5}" for part in PARTS)
        lines.append(f"{k:>6} {owner[k]:>4} {sizes} {partition.p[k]:>6.4f}  {text}")
    if partition.n > rows:
        lines.append(f"... and {partition.n - rows} more (--rows {partition.n})")
    return "\n".join(lines)


def plan_text(run: Resolved, plan: Needs) -> str:
    """Return the plan: which clients where, memory, models, evaluations."""
    n, ranks, nodes = run.clients, len(plan.clients), int(plan.node.max()) + 1
    (total, what), (shared, where) = node_memory(shared=False), node_memory()
    received, size, evaluations = plan.received, plan.message, plan.evaluations
    choosing = f"no greedy search; models that {short(run.method)} scores by itself to choose are not counted"
    if evaluations[0]:
        choosing = f"at most {evaluations[0]} evaluations in preprocessing and {evaluations[1]} in a round that chooses"
    passes = f", in {plan.passes} passes of the window" if plan.passes > 1 else ""
    budget = f", B_c = {run.said_budget}" if run.found("method").topology == "graph" else ""
    lines = [
        f"plan       {ranks} ranks on {nodes} node(s), {short(run.method)}{budget}, {run.rounds} rounds, {plan.parameters} parameters per model",
        *(of_rank(plan, r) for r in range(ranks) if ranks <= 16 or r < 8 or r >= ranks - 4),
        f"  ... and {ranks - 12} more ranks, at most {megabytes(plan.memory.max())} each" if ranks > 16 else "",
        *(of_node(plan, node) for node in range(min(nodes, 4))),
        "           ... the other nodes alike" if nodes > 4 else "",
        f"           this machine can give {megabytes(total)} ({what}), to windows {megabytes(shared)} ({where})",
        held_by(plan),
        f"models     at most {received[0]} received in preprocessing and {received[1]} per round, of {size} bytes: "
        f"{megabytes(received[0] * size)} and {megabytes(received[1] * size)}",
        f"sketches   {ENTRIES} bytes from each client to all in reach, {megabytes(n * (n - 1) * ENTRIES)}; each asks for the {run.asked} nearest models"
        if run.asked < n - 1
        else "",
        f"bytes      MPI moves at most {megabytes(plan.wire[0])} in preprocessing and {megabytes(plan.wire[1])} per round{passes}",
        f"choosing   {choosing}",
        f"           {plan.anew} rounds search Omega anew; each does as much as preprocessing" if plan.anew else "",
    ]
    return "\n".join(filter(None, lines))


def of_rank(plan: Needs, r: int) -> str:
    """Return what a rank has: clients, share of the work, memory."""
    ids, work = np.flatnonzero(plan.owner == r), plan.steps[r] / max(plan.steps.mean(), 1)
    names = " ".join(map(str, ids[:12])) + (f" ... {ids[-1]}" if len(ids) > 12 else "")
    memory, data, models, window = (megabytes(of[r]) for of in (plan.memory, plan.data, plan.models, plan.window))
    held = f"{len(ids):>4} clients, work {work:.2f}, {memory} (data {data}, models {models}, window {window})"
    return f"  rank {r:<4} {held}: {names or 'none, it only joins in'}"


def held_by(plan: Needs) -> str:
    """Return what holds the models of the fullest rank, in models per client."""
    r = int(plan.clients.argmax())
    held = plan.rows | {"window": plan.window / plan.row}
    each = (
        f"{name} {rows[r] / max(1, plan.clients[r]):.3g}"
        for name, rows in held.items()
        if rows[r]
    )
    return f"           in models per client of rank {r}: {', '.join(each)}"


def of_node(plan: Needs, node: int) -> str:
    mine = plan.node == node
    memory, window = (megabytes(size[mine].sum()) for size in (plan.memory, plan.window))
    windows = f"of which {window} are windows in shared memory"
    return f"memory     node {node}: {memory} for {mine.sum()} ranks, {windows}"


def estimate(run: Resolved, plan: Needs, cost: needs.Cost) -> str:
    """Return the time that the slowest rank will take, from the measurement; choosing is an upper bound."""
    took = {name: duration(value) for name, value in needs.seconds_of(run, plan, cost).items()}
    crowd = needs.crowding(plan)
    note = f", {crowd:.1f} ranks per core" if crowd > 1 else ""
    return (
        f"time       {needs.length_of(run, plan, cost)}: "
        f"train {took['train']}, evaluate {took['evaluate']}, choose up to {took['choose']}, exchange {took['exchange']} (slowest rank)\n"
        f"           measured here on one core: {1e3 * cost.step:.2f} ms per step, {1e6 * cost.image:.0f} us per image scored, "
        f"{1e-9 / cost.byte:.1f} GB/s copied{note}; one model per client, no GPU"
    )


if __name__ == "__main__":
    exit_with(main)
