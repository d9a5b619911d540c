"""A cost model of a DPFL round: its constants are measured here, its small points checked here, and then it is asked for what nobody has run.

    python benchmarks/scaling_model.py [--points 50,100,200] [--ranks_list 1,2] [--bandwidth_gbit 100] [--latency_us 2] [--step_us US]

A round of N clients on R ranks takes, on the slowest rank with K = ceil(N / R) clients and M - 1 = B_c - 1 models received per client,

    arithmetic   K (steps * step + score)                            training, and scoring the trained model
    choosing     K 2 M * evaluation                                  Algorithm 2: R of two models per candidate, and of the first two
    mixing       K (M - 1 + kept) * add                              sums of rows: the start of the search, the average
    RMA          rows arriving * row / bandwidth + latency per row   a sender that several clients of a rank want arrives once
    collectives  COLLECTIVES ceil(log2 R) * latency + bytes / bandwidth
    graph        edges * edge                                        every rank builds the whole graph: this does not shrink with R
    files        bytes recorded / rate                               root writes, the others wait

Printed: predicted beside measured seconds of a round for small runs; then N = 10^5, 10^6, 10^7 clients of the paper's CIFAR-10 (500 images to
train and validate on, 62,006 parameters) on 10 to 1,000 nodes, with the memory of a node and the term that dominates, and a figure of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _scale import launch, make_data, numbers, run

from dpfl_mpi.plan.needs import LABEL, rows_of
from dpfl_mpi.settings import Run

POOL, TEST = 25, 10  # samples of a client of the small runs
COLLECTIVES = 18  # a round's: flags, Fences, the graph's two gathers, records, sums, votes
RECORD = 26 * 8  # bytes of a client that root gathers per round
NUMBERS = 30  # of 8 bytes, of each client of the run on every rank: sizes, class counts, weights, places
WRITTEN = 72 + 44  # bytes of a client that root writes per round: series, and what is overwritten


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds: of one client's step, scoring, evaluation of R, row added; of an edge in every rank's graph. Bytes per second, seconds per message."""

    step: float
    score: float
    evaluation: float
    add: float
    edge: float
    bandwidth: float  # of a rank
    latency: float
    disk: float


@dataclasses.dataclass(frozen=True)
class Work:
    """One size of problem: N clients on R ranks of some nodes, and what a client holds and does in a round."""

    clients: int
    ranks: int
    nodes: int
    row: int  # bytes of a model
    steps: int  # per client and round
    others: int  # B_c - 1
    kept: float  # collaborators chosen, per client
    samples: int  # of a client, all three sets
    image: int  # bytes of a sample

    @property
    def k(self) -> int:
        """Clients of the fullest rank."""
        return -(-self.clients // self.ranks)


def arriving(n: int, k: int, others: int) -> float:
    """Return how many different rows of other ranks a rank of k of n clients expects, each client choosing `others` senders at random.

    A row of another rank is missing from a client's choice with probability 1 - others / (n - 1), and from all k of them independently.
    """
    return 0.0 if n <= k else (n - k) * (1 - (1 - others / (n - 1)) ** k)


def round_seconds(work: Work, costs: Costs) -> dict[str, float]:
    """Return the seconds of a round on the slowest rank by term; their sum is the round."""
    n, k = work.clients, work.k
    rows = arriving(n, k, work.others)
    depth = math.ceil(math.log2(work.ranks)) if work.ranks > 1 else 0
    edges = n * work.kept
    gathered = n * (2 + 8) + 8 * edges + n * RECORD if work.ranks > 1 else 0
    return {
        "arithmetic": k * (work.steps * costs.step + costs.score),
        "choosing": k * 2 * (work.others + 1) * costs.evaluation,
        "mixing": k * (work.others + work.kept) * costs.add,
        "RMA": rows * (work.row / costs.bandwidth + costs.latency),
        "collectives": COLLECTIVES * depth * costs.latency + gathered / costs.bandwidth,
        "graph": edges * costs.edge,
        "files": (n * WRITTEN + 4 * edges) / costs.disk,
    }


def node_bytes(work: Work) -> dict[str, float]:
    """Return the bytes of a node's ranks by what they hold; "shared" is what every rank has of all clients."""
    ranks = -(-work.ranks // work.nodes)
    clients = min(ranks * work.k, work.clients)
    slots = int(min(work.k * work.others, work.clients - work.k))
    held = rows_of(Run(budget=work.others + 1, clients=work.others + 2).resolve(), np.array([work.k]))
    everyone = 8 * work.clients * (3 * work.others + NUMBERS)  # graphs, numbers of a client
    return {
        "rows": float(clients / work.k * sum(held.values())[0] * work.row),
        "window": float(ranks * slots * work.row),
        "data": float(clients * work.samples * (work.image + LABEL)),
        "shared": float(ranks * everyone),
    }


# -- measuring ----------------------------------------------------------------------------------------------------------------------------


def network() -> None:
    """Measure, on two ranks, seconds of a row and of a byte put into a window, and of an Allreduce; root prints JSON."""
    from mpi4py import MPI

    from dpfl_mpi.mpi.window import Inbox, Route
    from dpfl_mpi.mpi.world import World

    world = World(MPI.COMM_WORLD)
    rows, width, repeats = 256, 16_000, 10
    staging = np.ones((rows, width), np.float32)
    seconds = dict.fromkeys((1, rows), math.inf)
    inbox = Inbox(world, staging, rows)
    for count in seconds:
        route = Route([(i, 1 - world.rank, i) for i in range(count)], np.zeros(0, np.int64), np.full(2, count))
        for _ in range(repeats):  # as often on both ranks: an exchange needs both
            start = time.perf_counter()
            inbox.exchange(route)
            seconds[count] = min(seconds[count], time.perf_counter() - start)
    inbox.close()
    values = np.zeros(1, np.int64)
    start = time.perf_counter()
    for _ in range(200):
        world.sum_int64(values)
    if world.root:
        per_row = (seconds[rows] - seconds[1]) / (rows - 1)
        print(json.dumps({"bandwidth": 4 * width / max(per_row, 1e-9), "latency": (time.perf_counter() - start) / 200}))


def constants(folder: Path, data: Path, model: str, k: int) -> Costs:
    """Return what is measured here: one rank with k clients, whose models lie in no cache, for the arithmetic, two for the messages."""
    from mpi4py import MPI

    from dpfl_mpi.engine.build import build
    from dpfl_mpi.graph import CollaborationGraph
    from dpfl_mpi.mpi.window import route
    from dpfl_mpi.mpi.world import World
    from dpfl_mpi.plan import needs
    from dpfl_mpi.results.recorder import Recorder
    from dpfl_mpi.settings import Job

    quickest = functools.partial(needs.fastest, seconds=0.5)
    made = Run(dataset="arrays", data=str(data), partition="natural", clients=k, model=model, budget=10).resolve()
    parts = build(made, Job(), World(MPI.COMM_SELF))
    fed = parts.fed
    w, rng = fed.common_row(), np.random.default_rng(0)
    graph = CollaborationGraph.from_lists(
        rng.choice([j for j in range(k) if j != i], 9, replace=False) for i in range(k)
    )
    fed.local_opt(w, 1)
    before = int(parts.training.steps.sum())
    fed.local_opt(w, 1)
    steps = int(parts.training.steps.sum()) - before
    step = quickest(lambda: fed.local_opt(w, 1)) / steps
    score = quickest(lambda: fed.evaluate(w)) / k
    received = fed.exchange(w, graph)
    add = quickest(lambda: fed.average(w, graph, received)) / len(graph.senders)
    starts = quickest(lambda: list(parts.sums.over_received(received, parts.backend.blocks))) / len(graph.senders)
    parts.begin_round(1)
    fed.ggc(w, received)
    evaluations = fed.notes["evaluations"].sum()
    evaluation = (quickest(lambda: fed.ggc(w, received)) - starts * len(graph.senders)) / evaluations
    parts.close()
    n, ranks = 5000, 8
    lists = [rng.integers(0, n, 9) for _ in range(n)]
    receivers, senders = np.repeat(np.arange(n), 9), np.concatenate(lists)
    owner = np.arange(n) % ranks
    edge = quickest(lambda: CollaborationGraph.from_edges(n, receivers, senders)) / (9 * n)
    big = CollaborationGraph.from_edges(n, receivers, senders)
    edge += quickest(lambda: route(big, owner, np.arange(n) // ranks, 0, ranks)) / (9 * n)
    recorder = Recorder(folder / "rate.h5", made, {}, {})
    values = rng.random(20_000)
    start = time.perf_counter()
    for _ in range(20):
        recorder.append({"round/val_acc": values})
        recorder.flush(0, 0.0)
    disk = 20 * values.nbytes / (time.perf_counter() - start)
    recorder.abandon()
    message = json.loads(launch(2, [sys.executable, __file__, "--network"], stdout=subprocess.PIPE).communicate()[0])
    return Costs(step, score, evaluation, (add + starts) / 2, edge, message["bandwidth"], message["latency"], disk)


def paper_costs(measured: Costs) -> Costs:
    """Return the constants of the paper's CNN on 400 + 100 + 100 CIFAR-10 images, measured on random ones; the rest as measured."""
    import torch

    from dpfl_mpi.data.source import Source
    from dpfl_mpi.datasets.cifar10 import MEAN, STD
    from dpfl_mpi.models.cnn import build
    from dpfl_mpi.numerics.ensemble import Ensemble
    from dpfl_mpi.plan.needs import fastest, one_client, step_seconds
    from dpfl_mpi.settings import Job

    shape = (32, 32, 3)
    source = Source(shape, 10, MEAN, STD, labels={}, sha256="", images=lambda part, rows: rows)
    run = Run(batch_size=16, weight_decay=1e-3)
    ensemble = Ensemble(build(shape, 10), MEAN, STD, torch.device("cpu"))
    backend, _ = one_client(run, Job(), source, ensemble, 1, scored=100)
    pair = ensemble.zeros(2)[None]
    scoring = fastest(lambda: backend.validation_losses(slice(0, 1), pair), 0.5) / 2  # of 100 images
    return dataclasses.replace(
        measured,
        step=step_seconds(run, Job(), source, ensemble, 64),
        score=2 * scoring,
        evaluation=scoring,
        add=measured.add * 62_016 / 16_000,
    )


def small_points(folder: Path, data: Path, costs: Costs, args: argparse.Namespace) -> str:
    """Return predicted beside measured seconds per round of real runs here."""
    from dpfl_mpi.results import Result

    lines = ["    N ranks  measured  predicted   error | predicted: largest terms"]
    steps = -(-(POOL - -(-POOL // 5)) // 16)
    flags = {"dataset": "arrays", "data": data, "partition": "natural", "model": args.model, "budget": 10, "rounds": 4}
    flags |= {"tau_init": 1, "tau_train": 1, "checkpoint_every": "never"}
    for n in args.points:
        for ranks in args.ranks_list:
            watched = run(folder, ranks, f"{n}-{ranks}", flags | {"clients": n})
            with Result(watched.path) as result:
                kept = float(np.mean([len(result.chosen(t).senders) / n for t in range(1, 5)]))
                row = 4 * int(result.file["meta"].attrs["parameters"])
            terms = round_seconds(Work(n, ranks, 1, row, steps, 9, kept, POOL + TEST, args.side**2), costs)
            measured, predicted = sum(watched.seconds(2).values()), sum(terms.values())
            largest = sorted(terms, key=lambda name: -terms[name])[:3]
            lines.append(
                f"{n:5d} {ranks:5d} {measured:9.3f}  {predicted:9.3f} {100 * (predicted / measured - 1):+6.0f} % | "
                + ", ".join(f"{name} {terms[name]:.3f}" for name in largest)
            )
    return "\n".join(lines)


def cluster(costs: Costs, ranks_per_node: int, bandwidth: float, latency: float, out: Path) -> str:
    """Return a round and a node's memory for 10^5 to 10^7 clients on 10 to 1,000 nodes whose network has these bytes per second and seconds.

    Draws both over the nodes as scaling_model.{pdf,png,csv} in the folder `out`.
    """
    lines = [
        f"{ranks_per_node} ranks per node, {8e-9 * bandwidth:.0f} Gb/s per node, {1e6 * latency:.1f} us; {1e3 * costs.step:.2f} ms per step, "
        f"{1e3 * costs.evaluation:.2f} ms per evaluation, 125 steps per client and round, B_c = 10, 5 collaborators kept",
        "clients nodes | s per round dominated by       next | GB of a node:   rows window   data shared    all; of root's file in 100 rounds",
    ]
    # a node's link is shared by its ranks
    link = dataclasses.replace(costs, bandwidth=bandwidth / ranks_per_node, latency=latency)
    points = {}
    for n in (10**5, 10**6, 10**7):
        for nodes in (10, 30, 100, 300, 1000):
            work = Work(n, min(nodes * ranks_per_node, n), nodes, 4 * 62_016, 125, 9, 5.0, 600, 3072)
            terms, held = points[n, nodes] = round_seconds(work, link), node_bytes(work)
            first, second = sorted(terms, key=lambda name: -terms[name])[:2]
            lines.append(
                f"{n:8d} {nodes:4d} | {sum(terms.values()):10.2f}  {first:>10s} {terms[first]:8.2f}, {second} {terms[second]:.2f} | "
                + " ".join(f"{name} {held[name] / 1e9:.2f}" for name in ("rows", "window", "data", "shared"))
                + f" all {sum(held.values()) / 1e9:.1f}; {100 * n * (WRITTEN + 4 * work.kept) / 1e9:.0f}"
            )
    return "\n".join(lines + [str(path) for path in draw(points, out)])


def draw(points: dict[tuple[int, int], tuple[dict[str, float], dict[str, float]]], out: Path) -> list[Path]:
    """Draw seconds of a round and GB of a node over the nodes, a line per number of clients; dotted is what more nodes do not divide."""
    import matplotlib.pyplot as plt
    import pandas as pd

    from dpfl_mpi.figures.command import Drawing, save
    from dpfl_mpi.figures.style import COLOURS, STYLE, TEXT

    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.4))
        for n, colour in zip(dict.fromkeys(n for n, _ in points), COLOURS, strict=False):
            nodes = [m for k, m in points if k == n]
            label = f"$N = 10^{round(math.log10(n))}$"
            for axes, part, fixed, unit in ((left, 0, ("graph", "files"), 1.0), (right, 1, ("shared",), 1e9)):
                of = [points[n, m][part] for m in nodes]
                axes.plot(nodes, [sum(terms.values()) / unit for terms in of], "o-", color=colour, label=label)
                axes.plot(nodes, [sum(terms[name] for name in fixed) / unit for terms in of], ":", color=colour)
        for axes, title in ((left, "seconds of a round"), (right, "GB of a node")):
            axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel=title)
        left.legend(title="dotted: graph and files")
        right.legend(title="dotted: kept of all clients")
        lines = [{"clients": n, "nodes": m, **terms, **held} for (n, m), (terms, held) in points.items()]
        return save(Drawing(pd.DataFrame(lines), figure), "scaling_model", out)


def main() -> None:
    """Measure, check, and ask the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=numbers, default="50,100,200", help="clients of the small runs")
    parser.add_argument("--ranks_list", type=numbers, default="1,2", help="ranks of the small runs")
    parser.add_argument("--model", default="cnn", help="of the small runs: cnn or mlp")
    parser.add_argument("--side", type=int, default=16, help="of their images: 8 or 16")
    parser.add_argument("--measured", type=int, default=200, help="clients on which the constants are measured")
    parser.add_argument("--ranks_per_node", type=int, default=64, help="of the cluster: one per core, or one per GPU")
    parser.add_argument("--bandwidth_gbit", type=float, default=100.0, help="of a node of the cluster")
    parser.add_argument("--latency_us", type=float, default=2.0, help="of a message of the cluster")
    parser.add_argument(
        "--step_us", type=float, help="microseconds of a step of one client on a GPU (default: a core here)"
    )
    parser.add_argument("--evaluation_us", type=float, help="the same of R of one model on 100 images")
    parser.add_argument(
        "--disk_mb", type=float, help="MB per second that root writes (default: measured here, compression included)"
    )
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    parser.add_argument("--network", action="store_true", help=argparse.SUPPRESS)  # two ranks of the measurement
    args = parser.parse_args()
    if args.network:
        return network()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "digits.h5"
        make_data(data, max(*args.points, args.measured), POOL, TEST, args.side)
        costs = constants(folder, data, args.model, args.measured)
        print(
            f"measured here: step {1e3 * costs.step:.2f} ms, scoring {1e3 * costs.score:.2f} ms per client, evaluation {1e3 * costs.evaluation:.2f} ms, "
            f"row added {1e6 * costs.add:.0f} us, edge {1e9 * costs.edge:.0f} ns, window {1e-9 * costs.bandwidth:.2f} GB/s, "
            f"Allreduce {1e6 * costs.latency:.0f} us, recording {1e-6 * costs.disk:.0f} MB/s"
        )
        print(small_points(folder, data, costs, args))
    paper = paper_costs(costs)
    given = {"step": args.step_us, "evaluation": args.evaluation_us}
    paper = dataclasses.replace(paper, **{field: 1e-6 * value for field, value in given.items() if value is not None})
    if args.disk_mb is not None:
        paper = dataclasses.replace(paper, disk=1e6 * args.disk_mb)
    print(cluster(paper, args.ranks_per_node, args.bandwidth_gbit * 1e9 / 8, 1e-6 * args.latency_us, args.out))


if __name__ == "__main__":
    main()
