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
from dpfl_mpi.mpi.node import node_memory
from dpfl_mpi.plan import needs
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
    needs.refuse(job, plan)
    if own.measure:
        samples = int(partition.sizes("train").mean())
        print(fit(time_text(plan, needs.step_seconds(run, job, source, ensemble, samples))))
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
    """Return the plan: which clients on which rank, memory and window."""
    ranks, nodes = len(plan.clients), int(plan.node.max()) + 1
    (total, what), (shared, where) = node_memory(shared=False), node_memory()
    method = short(run.method)
    if run.found("method").topology == "graph":
        method += f", B_c = {run.said_budget}"
    size = f"{run.rounds} rounds, {plan.parameters} parameters per model"
    shown = [r for r in range(ranks) if ranks <= 16 or r < 8 or r >= ranks - 4]
    hidden = f"  ... and {ranks - 12} more ranks, at most {megabytes(plan.memory.max())} each"
    lines = [
        f"plan       {ranks} ranks on {nodes} node(s), {method}, {size}",
        *(rank_text(plan, r) for r in shown),
        hidden if ranks > 16 else "",
        *(node_text(plan, node) for node in range(min(nodes, 4))),
        "           ... the other nodes alike" if nodes > 4 else "",
        f"           this machine can give {megabytes(total)} ({what}), "
        f"to windows {megabytes(shared)} ({where})",
        rows_text(plan),
        f"           a round takes up to {plan.passes} passes of the window" if plan.passes > 1 else "",
    ]
    return "\n".join(filter(None, lines))


def rank_text(plan: Needs, r: int) -> str:
    """Return what a rank has: clients, share of the work, memory."""
    ids, work = np.flatnonzero(plan.owner == r), plan.steps[r] / max(plan.steps.mean(), 1)
    names = " ".join(map(str, ids[:12])) + (f" ... {ids[-1]}" if len(ids) > 12 else "")
    sizes = {"data": plan.data, "models": plan.models, "results": plan.results, "window": plan.window}
    of = ", ".join(f"{name} {megabytes(size[r])}" for name, size in sizes.items())
    memory = f"{megabytes(plan.memory[r])} ({of})"
    clients = f"{len(ids):>4} clients, work {work:.2f}, {memory}"
    return f"  rank {r:<4} {clients}: {names or 'none, it only joins in'}"


def rows_text(plan: Needs) -> str:
    """Return what holds the models of the fullest rank, in models per client."""
    r = int(plan.clients.argmax())
    rows = plan.rows | {"window": plan.window / plan.row}
    counts = {name: of[r] / max(1, plan.clients[r]) for name, of in rows.items()}
    texts = ", ".join(f"{name} {count:.3g}" for name, count in counts.items() if count)
    return f"           in models per client of rank {r}: {texts}"


def node_text(plan: Needs, node: int) -> str:
    on_node = plan.node == node
    memory, window = (megabytes(size[on_node].sum()) for size in (plan.memory, plan.window))
    windows = f"of which {window} are windows in shared memory"
    return f"memory     node {node}: {memory} for {on_node.sum()} ranks, {windows}"


def time_text(plan: Needs, step: float) -> str:
    """Return how long the slowest rank will train, at so many seconds per gradient step."""
    crowd = needs.ranks_per_core(plan)
    steps, crowded = int(plan.steps.max()), f", {crowd:.1f} ranks per core" if crowd > 1 else ""
    training = f"training takes about {duration(crowd * steps * step)} on the slowest rank"
    return (
        f"time       {training}: {steps} steps of {1e3 * step:.2g} ms{crowded}\n"
        "           measured here on one core, no GPU; scoring, choosing and messages are not in it.\n"
        "           A run shows the time left from its first round on"
    )


if __name__ == "__main__":
    exit_with(main)
