"""Show a run before it is trained: the partition, the memory, and whether it can
run. `python -m dpfl_mpi.describe` takes the flags of a run.

It needs no mpirun: `--ranks 8 --nodes 2` says which job is planned. `--save
PATH` writes the partition as JSON, which `--partition file:PATH` and other
frameworks can read.
"""

import argparse
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from dpfl_mpi.data.partition import PARTS, Partition, save
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import Source, open_source
from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.mpi.node import node_memory
from dpfl_mpi.mpi.start import threads_of_rank
from dpfl_mpi.plan import needs
from dpfl_mpi.plan.needs import Needs, duration, megabytes
from dpfl_mpi.plugins import short
from dpfl_mpi.results.result import limit_text
from dpfl_mpi.results.summary import MOST_GROUPS, WIDTH, fitted, listed, name_columns
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.settings.files import FILES, partition_file
from dpfl_mpi.storage.files import check_apart
from dpfl_mpi.storage.foreign import refused_as


def parser() -> argparse.ArgumentParser:
    out = Parser(
        prog="python -m dpfl_mpi.describe",
        usage="%(prog)s [flags of a run] [flags below]",
        add_help=False,
    )
    add = out.add_argument
    add("--ranks", type=int, default=1, help="ranks that mpirun or srun will start")
    add("--nodes", type=int, default=1, help="nodes they are spread over")
    add("--rows", type=int, default=20, help="clients shown in the table")
    add("--save", type=Path, help="JSON file for the partition: each client's samples")
    add("--no-measure", dest="measure", action="store_false", help="no time estimate")
    return out


@in_a_sentence
def main(arguments: list[str] | None = None) -> int:
    """Print partition and plan of a command line; return 2 if the run cannot run."""
    from dpfl_mpi.mpi.start import parse

    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{parser().format_help()}\nFlags of a run: python -m dpfl_mpi --help")
        return 0
    args, rest = parser().parse_known_args(arguments)
    run, job = parse(rest)
    for name, least in (("ranks", 1), ("nodes", 1), ("rows", 0)):
        value = getattr(args, name)
        if value < least:
            allowed = f"allowed is a whole number of at least {least}"
            raise UserError(f"--{name} is {value}; {allowed}")
    read = [getattr(value, "path", value) for value in map(vars(run).get, FILES)]
    check_apart(args.save, *read, flag="--save")  # else it would overwrite what the run reads
    if args.save and args.save.exists():
        lost = f"--save is {args.save}, which is no partition and would be lost; name another file"
        with refused_as(lost, (UserError,)):
            partition_file(str(args.save))
    source = open_source(run)
    partition = deal(run, source)
    print(fitted(data_text(run, source, partition)))
    if args.save:
        save(partition, args.save, run, source.sha256)
        print(f"saved to {args.save}: run on it with --partition file:{args.save}")
    ensemble = needs.ensemble_of(run, source)
    samples = int(partition.sizes("train").mean())
    backend, steps = needs.one_client(run, job, source, ensemble, samples)
    plan = needs.needs_of(run, job, source, partition, ensemble, args.ranks, args.nodes)
    if backend.native:  # each client at a time has a work space
        at_once = max(1, threads_of_rank() // job.threads_per_client)
        plan = replace(plan, kernels=at_once * len(backend.native.memory))
    print("\n" + table(source, partition, plan.owner, args.rows))
    print("\n" + fitted(plan_text(run, plan)))
    needs.refuse(job, plan)
    if backend.warning:
        print(fitted(f"warning    {backend.warning}"))
    if args.measure:
        print(fitted(time_text(plan, needs.step_seconds(run, backend, steps))))
    return 0


def data_text(run: Resolved, source: Source, partition: Partition) -> str:
    """Return lines about the data, and about how they are dealt to clients."""
    train, test = (len(source.labels[part]) for part in ("train", "test"))
    kind = "images" if len(source.shape) == 3 else "samples"
    size = source.size if kind == "images" else f"{source.size} {source.kind}"
    count = f"one pool of {train}" if partition.pooled else f"{train} training and {test} test"
    data = f"{count} {kind} of {size}, {source.classes} classes, sha256 {source.sha256[:12]}"
    dealt = f"seed {run.partition_seed}, sha256 {partition.sha256()[:12]}"
    lines = [
        f"data       {short(run.dataset)}: {data}",
        f"partition  {recipe(run)}; {partition.n} clients, {dealt}",
    ]
    notes = (source.note, partition.note(), source.warning)
    lines += [f"note       {text}" for text in notes if text]
    for part in PARTS:
        sizes = partition.sizes(part)
        of_client = f"{span(sizes)}, median {np.median(sizes):g}, mean {sizes.mean():.1f}"
        lines.append(f"{part:<10} {sizes.sum()} samples; a client has {of_client}")
    if groups := Counter(partition.names_and_groups(source).get("group")):
        counted = [f"{group} {count}" for group, count in sorted(groups.items())]
        more = f" and {len(groups) - MOST_GROUPS} more" if len(groups) > MOST_GROUPS else ""
        lines.append(f"groups     clients by group: {', '.join(counted[:MOST_GROUPS])}{more}")
    counts, p = partition.class_counts, partition.p
    classes = (counts > 0).sum(1)
    largest = 100 * (counts.max(1) / counts.sum(1)).mean()
    share = f"its largest class has {largest:.0f} % of its samples on average"
    lines.append(f"classes    a client has {span(classes)}; {share}")
    lines.append(f"p_k        {p.min():.2g} to {p.max():.2g} (1/N = {1 / partition.n:.2g})")
    return "\n".join(lines)


def span(counts: np.ndarray) -> str:
    low, high = counts.min(), counts.max()
    return str(low) if low == high else f"{low} to {high}"


def recipe(run: Resolved) -> str:
    """Return the partition and its parameters in words."""
    alpha, classes = run.dirichlet_alpha, run.classes_per_client
    match run.partition.kind:
        case "dirichlet":
            return f"Dir({alpha:g}), at least {run.min_samples} samples"
        case "pathological":
            least = f"at least {run.min_per_class} of each"
            return f"Patho({classes}), Dir({alpha}) over the clients of a class, {least}"
        case "natural":
            least = f"at least {run.min_samples} samples"
            return f"the data's own clients of {least}"
        case "fedrep":
            how = "overlapping" if run.overlap else "not overlapping"
            return f"FedRep's clients of {classes} classes, {how}"
    return str(run.partition)


def table(source: Source, partition: Partition, owner: np.ndarray, rows: int) -> str:
    """Return the table of clients: sizes, rank, and samples of each class."""
    # there is a column per class if they fit into a line, else the largest classes in words
    names, counts_NC = source.class_names, partition.class_counts
    widths = [max(3, len(n), len(str(c))) for n, c in zip(names, counts_NC.max(0), strict=True)]
    shown = range(min(rows, partition.n))
    # the columns before the classes: the head, and how the line of each client starts
    head, starts = "client ", [f"{k:>6} " for k in shown]
    for title, texts in name_columns(partition.names_and_groups(source)).items():
        column = texts[: len(shown)]
        width = max(map(len, (title, *column)))
        head += f"{title:<{width}} "
        starts = [f"{start}{text:<{width}} " for start, text in zip(starts, column, strict=True)]
    head += "rank train   val  test    p_k  "
    room = WIDTH - len(head)
    fits = sum(widths) + len(widths) - 1 <= room
    columns = " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [head + (columns if fits else "largest classes")]
    for k in shown:
        counts = counts_NC[k]
        if fits:
            text = " ".join(f"{c or '.':>{w}}" for c, w in zip(counts, widths, strict=True))
        else:
            largest = [c for c in np.argsort(-counts, kind="stable")[:6] if counts[c]]
            text = listed([f"{names[c]}:{counts[c]}" for c in largest], room)
        sizes = " ".join(f"{partition.sizes(part)[k]:>5}" for part in PARTS)
        lines.append(f"{starts[k]}{owner[k]:>4} {sizes} {partition.p[k]:>6.4f}  {text}")
    if partition.n > rows:
        lines.append(f"... and {partition.n - rows} more (--rows {partition.n})")
    return "\n".join(lines)


def plan_text(run: Resolved, plan: Needs) -> str:
    """Return lines about ranks, clients per rank, and memory."""
    ranks, nodes = len(plan.clients), int(plan.node.max()) + 1
    method = ", ".join(filter(None, [short(run.method), limit_text(run)]))
    size = f"{run.rounds} rounds, {plan.parameters} parameters per model"
    # the rank that needs most memory, and the node that does
    largest = int(plan.memory.argmax())
    parts = ("data", "models", "results", "window")
    bytes_of = {name: getattr(plan, name)[largest] for name in parts} | {"kernels": plan.kernels}
    in_parts = ", ".join(f"{name} {megabytes(size)}" for name, size in bytes_of.items())
    work = f"{plan.steps.max() / max(plan.steps.mean(), 1):.2f} of the mean work"
    of_rank = f"at most {work} and {megabytes(plan.memory[largest])} ({in_parts})"
    by_node = np.bincount(plan.node, plan.memory)
    fullest = int(by_node.argmax())
    windows = megabytes(plan.window[plan.node == fullest].sum())
    on_node = f"{(plan.node == fullest).sum()} ranks of a node"
    of_node = f"{megabytes(by_node[fullest])} for the {on_node}, {windows} of it windows"
    # the bytes that this machine can give, and what limits them, such as a limit of the job
    (total, limit), (shared, shared_limit) = node_memory(shared=False), node_memory()
    given = f"{megabytes(total)} ({limit})"
    if shared_limit != limit:
        given += f", windows {megabytes(shared)} of it ({shared_limit})"
    lines = [
        f"plan       {ranks} ranks on {nodes} node(s), {method}, {size}",
        f"clients    {span(plan.clients)} per rank; {of_rank}",
        f"memory     at most {of_node} in shared memory",
        f"           this machine can give {given}",
    ]
    if plan.passes > 1:
        lines.append(f"           a round takes up to {plan.passes} passes of the window")
    return "\n".join(lines)


def time_text(plan: Needs, step: float) -> str:
    """Return how long the slowest rank will train, if a gradient step takes `step` seconds."""
    ranks_per_core = max(1.0, np.bincount(plan.node).max() / len(os.sched_getaffinity(0)))
    steps = int(plan.steps.max())
    total = duration(ranks_per_core * steps * step)
    crowded = f", {ranks_per_core:.1f} ranks per core" if ranks_per_core > 1 else ""
    of_step = f"{1e3 * step:.2g} ms{crowded}"
    return f"""\
time       training takes at least {total} on the slowest rank: {steps} steps of {of_step}
           measured here, for one thread per rank and no GPU; without scoring, choosing, messages.
           A run shows the time left after its first round."""


if __name__ == "__main__":
    exit_with(main)
