"""Show a run before it is trained: the partition, the plan, and whether it can run. `python -m dpfl_mpi.describe` takes a run's own flags.

Runs in one process, without mpirun: `--ranks 8 --nodes 2` says what for. `--save PATH` writes the partition as JSON, which
`--partition file:PATH` and any other framework can read; `--plot FILE` draws it.

Axes: N clients in all, K on a rank, D parameters, C classes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_mpi.config import Job, Run
from dpfl_mpi.data.partition import PARTS, Partition
from dpfl_mpi.data.partition_file import save
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import Source, open_source
from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.placement import node_memory, place
from dpfl_mpi.plugins import find

if TYPE_CHECKING:
    pass

ROW = 64  # bytes that a row is padded to
KEPT = (
    5 * 4 + 4 * 8
)  # bytes a parameter and client: w, momentum, best, staging, average in float32; four running sums in 64 bits
PYTHON = (
    390 * 2**20
)  # bytes of a rank before it holds anything: interpreter, torch and MPI, their shared libraries included (measured)
PAD = 4  # pixels around a training image that is cropped


@dataclass(frozen=True)
class Cost:
    """What a short measurement found on this machine, one core; seconds."""

    step: float  # one gradient step on a mini-batch
    image: float  # one image scored
    byte: float  # one byte copied


@dataclass(frozen=True)
class Plan:
    """What a run will need: arrays have one value a rank."""

    owner: np.ndarray  # rank of every client [N]
    clients: np.ndarray
    node: np.ndarray
    data: np.ndarray  # bytes
    models: np.ndarray  # bytes
    scratch: np.ndarray  # bytes while one client is scored
    window: np.ndarray  # bytes
    passes: int  # in which the widest graph is exchanged
    parameters: int
    row: int  # bytes of a message
    received: tuple[int, int]  # most models that clients receive: in preprocessing, in a round
    wire: tuple[int, int]  # most bytes that MPI moves: in preprocessing, in a round
    evaluations: tuple[int, int]  # most models scored by all clients while they choose: in preprocessing, in a round
    steps: np.ndarray  # gradient steps
    scored: np.ndarray  # images scored by evaluate
    judged: np.ndarray  # images scored while choosing, at most

    @property
    def memory(self) -> np.ndarray:
        """Bytes a rank needs in all."""
        return PYTHON + self.data + self.models + self.scratch + self.window


def parser() -> argparse.ArgumentParser:
    """Return the flags that only `describe` has."""
    out = argparse.ArgumentParser(
        prog="python -m dpfl_mpi.describe",
        add_help=False,
        allow_abbrev=False,
        usage="%(prog)s [flags of a run] [flags below]",
    )
    out.add_argument("--ranks", type=int, default=1, help="ranks that mpirun or srun will start")
    out.add_argument("--nodes", type=int, default=1, help="nodes they are spread over")
    out.add_argument("--rows", type=int, default=20, help="clients shown in the table")
    out.add_argument("--save", type=Path, help="write the partition: client -> train, val and test indices, as JSON")
    out.add_argument("--plot", type=Path, help="draw the partition (png, pdf or svg)")
    out.add_argument("--no-measure", dest="measure", action="store_false", help="no time estimate")
    return out


def main(arguments: list[str] | None = None) -> int:
    """Print partition and plan of a command line; return the exit code, 2 for a run that cannot run."""
    from dpfl_mpi.__main__ import parse

    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        assert __doc__ is not None
        print(
            __doc__.split("\n\nAxes")[0]
            + "\n\n"
            + parser().format_help()
            + "\nFlags of a run: python -m dpfl_mpi --help"
        )
        return 0
    own, rest = parser().parse_known_args(arguments)
    run, job = parse(rest)
    try:
        for name in ("ranks", "nodes"):
            if getattr(own, name) < 1:
                raise UserError(f"--{name} is {getattr(own, name)}; allowed is a whole number of at least 1")
        source = open_source(run)
        start = time.perf_counter()
        partition = deal(run, source)
        print(about(run, source, partition, time.perf_counter() - start))
        if own.save:
            save(partition, own.save, run, source)
            print(f"saved to {own.save}: run on it with --partition file:{own.save}")
        ensemble = build(run, source)
        plan = make_plan(run, job, source, partition, ensemble, own.ranks, own.nodes)
        print("\n" + table(source, partition, plan.owner, own.rows))
        print("\n" + plan_text(run, plan))
        if own.plot:
            draw(run, source, partition, own.plot)
            print(f"drawn to {own.plot}")
        refuse(job, plan)
        if own.measure:
            print(estimate(run, plan, measure(run, source, ensemble)))
    except UserError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def about(run: Run, source: Source, partition: Partition, seconds: float) -> str:
    """Return what the data and the partition are."""
    n = partition.n
    h, w, c = source.shape
    how = {
        "dirichlet": f"Dir({run.dirichlet_alpha:g}), at least {run.min_samples} samples" if run.dirichlet_alpha else "",
        "pathological": f"Patho({run.classes_per_client}), Dir({run.dirichlet_alpha}) over a class's holders, at least {run.min_per_class} of each",
        "natural": f"the data's own clients of at least {run.min_samples} samples, {run.missing_classes} classes missing",
        "fedrep": f"fedrep's users of {run.classes_per_client} classes, {'overlapping' if run.overlap else 'not overlapping'}",
    }.get(run.partition, run.partition)
    train, test = (len(source.labels[part]) for part in ("train", "test"))
    size = f"one pool of {train} images" if partition.pooled else f"{train} training and {test} test images"
    lines = [
        f"data       {run.dataset}: {size} of {h}x{w}x{c}, {source.classes} classes, sha256 {source.sha256[:12]}",
        f"partition  {how}; {n} clients, seed {run.partition_seed}, sha256 {partition.sha256()[:12]} ({seconds:.1f} s)",
    ]
    lines += [f"note       {text}" for text in (source.note, partition.note()) if text]
    for part in PARTS:
        sizes = partition.sizes(part)
        lines.append(
            f"{part:<10} {sizes.sum()} samples; a client has {sizes.min()} to {sizes.max()}, median {np.median(sizes):g}, mean {sizes.mean():.1f}"
        )
    held = (partition.class_counts > 0).sum(1)
    share = partition.class_counts.max(1) / partition.class_counts.sum(1)
    lines.append(
        f"classes    a client holds {held.min()} to {held.max()}, mean {held.mean():.1f}; its largest is {100 * share.mean():.0f} % of its samples"
    )
    lines.append(f"p_k        {partition.p.min():.2g} to {partition.p.max():.2g} (1/N = {1 / n:.2g})")
    return "\n".join(lines)


def table(source: Source, partition: Partition, owner: np.ndarray, rows: int) -> str:
    """Return clients by classes: a column a class where there are few, else the largest classes by name."""
    names, few = source.class_names, source.classes <= 12
    sizes = {part: partition.sizes(part) for part in PARTS}
    width = [max(5, len(name)) for name in names] if few else []
    heads = " ".join(f"{name:>{w}}" for name, w in zip(names, width, strict=False)) if few else "largest classes"
    lines = [f"client rank train   val  test    p_k  {heads}"]
    for k in range(min(rows, partition.n)):
        counts = partition.class_counts[k]
        if few:
            text = " ".join(f"{c or '.':>{w}}" for c, w in zip(counts, width, strict=True))
        else:
            top = [c for c in np.argsort(-counts, kind="stable")[:6] if counts[c]]
            text = " ".join(f"{names[c]}:{counts[c]}" for c in top)
        lines.append(
            f"{k:>6} {owner[k]:>4} {sizes['train'][k]:>5} {sizes['val'][k]:>5} {sizes['test'][k]:>5} {partition.p[k]:>6.4f}  {text}"
        )
    if partition.n > rows:
        lines.append(f"... and {partition.n - rows} more (--rows {partition.n})")
    return "\n".join(lines)


def build(run: Run, source: Source) -> Any:
    """Return the model's numerics on this machine's CPU."""
    import importlib

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from dpfl_mpi.numerics.ensemble import Ensemble

    torch.set_num_threads(1)  # as each rank of a run
    find("model", run.model)
    module = importlib.import_module(f"dpfl_mpi.models.{run.model}").build(source.shape, source.classes)
    return Ensemble(module, source.mean, source.std, torch.device("cpu"))


def make_plan(run: Run, job: Job, source: Source, partition: Partition, ensemble: Any, ranks: int, nodes: int) -> Plan:
    """Return what each of `ranks` ranks will hold and do: arithmetic alone."""
    n = partition.n
    train, val, test = (partition.sizes(part) for part in PARTS)
    owner = place(train, ranks)
    h, w, c = source.shape
    pad = 2 * PAD if run.augment else 0
    row = -(-ensemble.size * 4 // ROW) * ROW
    k_r = np.bincount(owner, minlength=ranks)

    def a_rank(values: np.ndarray) -> np.ndarray:
        return np.bincount(owner, values, ranks).astype(np.int64)

    slots = np.minimum(k_r * run.others, n - k_r)
    capacity = int(job.window_gb * 2**30 // row)
    busy = k_r > 0
    passes = 1
    if (slots > capacity).any():
        width = int((capacity // k_r[busy]).min())
        passes = -(-run.others // width) if width else 0
    graph = run.others > 0
    rounds, ggc = run.rounds, run.rounds // max(run.ggc_period, 1)
    tau = run.tau_init + rounds * run.tau_train
    server = not graph and run.method != "local"  # its budget is fixed to 1: models go down from a server and up again
    every = n * (n - 1)
    received = (2 * every if graph else 0, n * run.others if graph else 2 * n if server else 0)
    first = 2 * (n - 1) + 2 if graph else 0  # R of two models a candidate, and of the two that the search starts from
    later = 2 * run.others + 2 if graph else 0
    repeats = run.ggc_repeats
    phases = (
        -(-(n - 1) // run.others) if graph else 0
    )  # a row may come to a rank again in another phase, for another client
    asked = int(np.minimum(k_r * (n - 1), phases * slots).sum()) * repeats
    return Plan(
        owner=owner,
        clients=k_r,
        node=np.arange(ranks) // -(-ranks // nodes),
        data=a_rank(train * ((h + pad) * (w + pad) * c + 8) + (val + test) * (h * w * c + 8)),
        models=k_r * ensemble.size * KEPT,
        scratch=np.array([int(val[owner == r].max(initial=0)) for r in range(ranks)]) * image_bytes(source, ensemble),
        window=np.minimum(slots, capacity) * row,
        passes=passes,
        parameters=ensemble.size,
        row=row,
        received=received,
        wire=(asked * row, int(slots.sum()) * row if graph else 2 * ranks * 2 * row if server else 0),
        evaluations=(n * first * repeats, n * later * repeats),
        steps=a_rank(-(-train // run.batch_size) * tau),
        scored=a_rank((val + test) * (rounds + 1)),
        judged=a_rank(val * (first + later * ggc) * repeats),
    )


def image_bytes(source: Source, ensemble: Any) -> int:
    """Return the bytes that one image takes once it is prepared for scoring."""
    import torch

    prepared = ensemble.prepare(torch.zeros(1, 1, *source.shape))
    tensors = prepared if isinstance(prepared, tuple) else (prepared,)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def plan_text(run: Run, plan: Plan) -> str:
    """Return the plan: which clients where, memory, models, bytes, evaluations."""
    ranks = len(plan.clients)
    work = plan.steps / max(plan.steps.mean(), 1)
    lines = [
        f"plan       {ranks} ranks on {plan.node.max() + 1} node(s), {run.method}, {run.rounds} rounds, {plan.parameters} parameters a model, "
        f"B_c = {run.budget}"
    ]
    shown = range(ranks) if ranks <= 16 else [*range(8), *range(ranks - 4, ranks)]
    for r in shown:
        ids = np.flatnonzero(plan.owner == r)
        names = " ".join(map(str, ids[:12])) + (f" ... {ids[-1]}" if len(ids) > 12 else "")
        lines.append(
            f"  rank {r:<4} {len(ids):>4} clients, work {work[r]:.2f}, {megabytes(plan.memory[r])} (data {megabytes(plan.data[r])}, "
            f"models {megabytes(plan.models[r])}, window {megabytes(plan.window[r])}): {names or 'none, it only joins in'}"
        )
    if ranks > 16:
        lines.append(f"  ... and {ranks - 12} more ranks, at most {megabytes(plan.memory.max())} each")
    for node in range(int(plan.node.max()) + 1):
        mine = plan.node == node
        lines.append(
            f"memory     node {node}: {megabytes(plan.memory[mine].sum())} for {mine.sum()} ranks, of which {megabytes(plan.window[mine].sum())} "
            "are windows in shared memory"
        )
        if node == 3 and plan.node.max() > 3:
            lines.append("           ... the other nodes alike")
            break
    (total, what), (shared, where) = node_memory(shared=False), node_memory()
    lines.append(
        f"           this machine can give {megabytes(total)} ({what}), to windows {megabytes(shared)} ({where})"
    )
    lines.append(
        f"models     at most {plan.received[0]} received in preprocessing and {plan.received[1]} a round, of {4 * plan.parameters} bytes: "
        f"{megabytes(plan.received[0] * 4 * plan.parameters)} and {megabytes(plan.received[1] * 4 * plan.parameters)}"
    )
    lines.append(
        f"bytes      MPI moves at most {megabytes(plan.wire[0])} in preprocessing and {megabytes(plan.wire[1])} a round"
        + (f", in {plan.passes} passes of the window" if plan.passes > 1 else "")
    )
    lines.append(
        f"choosing   at most {plan.evaluations[0]} evaluations in preprocessing and {plan.evaluations[1]} in a round that chooses"
    )
    return "\n".join(lines)


def megabytes(size: float) -> str:
    """Return bytes in words."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def refuse(job: Job, plan: Plan) -> None:
    """Raise `UserError` for a run that this machine cannot hold (it counts as each of the nodes)."""
    if plan.passes == 0:
        raise UserError(
            f"--window_gb is {job.window_gb:g}; a pass needs one row of {plan.row} bytes a client, "
            f"{plan.clients.max() * plan.row / 2**30:.3g} GiB a rank"
        )
    for need_r, shared, what in (
        (plan.window, True, "the RMA windows need"),
        (plan.memory, False, "data, models and windows need"),
    ):
        need = np.bincount(plan.node, need_r).max()
        limit, name = node_memory(shared)
        if need > limit:
            advice = "set a smaller --window_gb" if shared else "use more --nodes or a smaller --window_gb"
            raise UserError(
                f"{what} {megabytes(need)} on a node; this machine can give {megabytes(limit)} ({name}): {advice}"
            )


def measure(run: Run, source: Source, ensemble: Any) -> Cost:
    """Return what a step, a scored image and a copied byte cost here: the quickest of several tries, one thread, about a second."""
    import torch

    from dpfl_mpi.numerics.ensemble import Block, cross_entropy, sgd_step

    s = run.batch_size
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (1, 64, *source.shape), np.uint8))
    y = torch.from_numpy(rng.integers(0, source.classes, (1, 64)))
    weight = torch.full((1, s), 1 / s)
    row = ensemble.initial_row(run.init, rng)[None].clone()
    momentum, block = torch.zeros_like(row), Block(ensemble, row)
    pair = row.repeat(2, 1)
    index = torch.from_numpy(rng.integers(0, 64, s))

    def step() -> None:
        batch = ensemble.normalise(x[:, index])
        ensemble.gradient(block, batch, y[:, index], weight)
        sgd_step(block.w, block.g, momentum, 1e-4, run.momentum, 1e-3, run.clip_norm)

    prepared = ensemble.prepare(ensemble.normalise(x[:, :32]))

    def score() -> None:
        logits = ensemble.logits(ensemble.ready(pair), prepared)
        cross_entropy(logits, y[:, :32].expand(2, -1)).sum()

    source_row, target = np.ones(2**24, np.uint8), np.empty(2**24, np.uint8)
    with torch.no_grad():
        return Cost(
            quickest(step, 0.4), quickest(score, 0.3) / 64, quickest(lambda: np.copyto(target, source_row), 0.1) / 2**24
        )


def quickest(action: Any, seconds: float = 0.3) -> float:
    """Return the least seconds an action took over a short while, the first two aside: what other programs do here is no part of it."""
    action(), action()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def estimate(run: Run, plan: Plan, cost: Cost) -> str:
    """Return the time that the slowest rank will take, from the measurement; choosing is an upper bound."""
    rounds = run.rounds
    cores = len(os.sched_getaffinity(0))
    crowd = max(1.0, np.bincount(plan.node).max() / cores)  # ranks of a node that share its cores
    train = crowd * plan.steps.max() * cost.step
    score = crowd * plan.scored.max() * cost.image
    judge = crowd * plan.judged.max() * cost.image
    move = 2 * (plan.wire[0] + plan.wire[1] * rounds) * cost.byte / max(1, len(plan.clients)) * crowd
    low, high = train + score + move, train + score + move + judge
    note = f", {crowd:.1f} ranks a core" if crowd > 1 else ""
    return (
        f"time       {duration(low)} without choosing, at most {duration(high)} with it: train {duration(train)}, evaluate {duration(score)}, "
        f"choose up to {duration(judge)}, exchange {duration(move)} (slowest rank)\n"
        f"           measured here on one core: {1e3 * cost.step:.2f} ms a step, {1e6 * cost.image:.0f} us an image scored, "
        f"{1e-9 / cost.byte:.1f} GB/s copied{note}; one model a client, no GPU"
    )


def duration(seconds: float) -> str:
    """Return seconds in words."""
    return (
        f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def draw(run: Run, source: Source, partition: Partition, path: Path) -> None:
    """Draw clients by classes (area: samples), and the sizes of their three sets."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'dpfl_mpi[analysis]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n, classes = partition.n, source.classes
    counts = partition.class_counts
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(min(20, max(6, 0.09 * n + 2)), 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    image = top.imshow(
        np.where(counts == 0, np.nan, counts).T, aspect="auto", cmap="viridis_r", interpolation="nearest"
    )
    figure.colorbar(image, ax=top, label="samples to train and validate")
    top.set(ylabel="class", title=f"{run.dataset}, {run.partition}, {n} clients, seed {run.partition_seed}")
    if classes <= 20:
        top.set_yticks(range(classes), source.class_names)
    below = np.zeros(n)
    for part, colour in zip(
        PARTS, ("#0072b2", "#e69f00", "#999999"), strict=True
    ):  # apart for colour-blind readers too
        bottom.bar(np.arange(n), partition.sizes(part), 1.0, below, color=colour, label=part)
        below = below + partition.sizes(part)
    bottom.set(xlabel="client", ylabel="samples", xlim=(-0.5, n - 0.5))
    bottom.legend(ncols=3, loc="upper right")
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plt.savefig(temporary, dpi=150)
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot is {path}; it cannot be written: {error}") from None
    finally:
        plt.close(figure)
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
