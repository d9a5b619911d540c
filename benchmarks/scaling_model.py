"""A cost model of a DPFL round, for sizes that nobody has run.

    python benchmarks/scaling_model.py [--points 50,100,200] [--ranks_list 1,2]

Its constants are measured here, and its predictions compared with small runs here. A round of N
clients on R ranks takes, on the slowest rank, with K = ceil(N / R) clients and M = B_c:

    arithmetic   K (steps * step + score)             training, and scoring the trained model
    choosing     K 2 M * evaluation                   Algorithm 2: R of two models per candidate
    mixing       K (M - 1 + chosen) * add             sums of rows: the search's start, the average
    RMA          arriving * (row / bandwidth + latency)    a row that a rank wants arrives once
    collectives  COLLECTIVES ceil(log2 R) * latency + bytes / bandwidth
    graph        edges * edge                         every rank builds the whole graph
    files        bytes recorded / rate                root writes, the others wait

Printed: predicted and measured seconds of small runs; then N = 10^5 to 10^7 clients of the paper's
CIFAR-10 (500 images to train and validate on, 62,006 parameters) on 10 to 1,000 nodes, with a
node's memory and the dominant terms, and the figure scaling_model.{pdf,png,csv}.
"""

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
import torch
from _samples import CIFAR
from _scale import Line, draw, flags_for, launch, make_data, numbers, options, run
from mpi4py import MPI

from dpfl_mpi.data.source import Source
from dpfl_mpi.datasets.cifar10 import MEAN, STD
from dpfl_mpi.engine.build import build
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.models import cnn
from dpfl_mpi.mpi.window import Inbox, Route, route
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.plan.needs import LABEL, fastest, one_client, rows_of, step_seconds
from dpfl_mpi.results import Result
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Job, Run

POOL, TEST = 25, 10  # samples of a client of the small runs
OTHERS = 9  # B_c - 1
COLLECTIVES = 18  # of a round: flags, Fences, the graph's two gathers, records, sums, votes
RECORD = 26 * 8  # bytes of a client that root gathers per round
NUMBERS = 30  # of 8 bytes, of each client on every rank: sizes, class counts, weights, places
WRITTEN = 72 + 44  # bytes of a client that root writes per round: series, and what is overwritten
MODEL = 4 * 62_016  # bytes of a row of the paper's CNN
SAMPLES = 600  # of a client of the paper's CIFAR-10, all three sets, 3072 bytes each
LATENCY_S = 2e-6  # of a message of the cluster

quickest = functools.partial(fastest, seconds=0.5)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of one step, scoring, evaluation, added row, edge and message; bytes per second."""

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
    """One size of problem."""

    clients: int
    ranks: int
    nodes: int
    row: int  # bytes of a model
    steps: int  # per client and round
    chosen: float  # collaborators per client

    @property
    def k(self) -> int:
        """Clients of the fullest rank."""
        return -(-self.clients // self.ranks)

    @property
    def recorded(self) -> float:
        """Bytes that root writes per round."""
        return self.clients * (WRITTEN + 4 * self.chosen)


def arriving(n: int, k: int) -> float:
    """Return how many different rows of other ranks a rank of k of n clients expects.

    Each client chooses at random. It misses a given row with probability 1 - OTHERS / (n - 1), and
    all k miss it independently.
    """
    return 0.0 if n <= k else (n - k) * (1 - (1 - OTHERS / (n - 1)) ** k)


def round_seconds(work: Work, costs: Costs) -> dict[str, float]:
    """Return the seconds of a round on the slowest rank by term; their sum is the round."""
    n, k = work.clients, work.k
    depth = math.ceil(math.log2(work.ranks))
    edges = n * work.chosen
    gathered = n * (2 + 8) + 8 * edges + n * RECORD if work.ranks > 1 else 0
    return {
        "arithmetic": k * (work.steps * costs.step + costs.score),
        "choosing": k * 2 * (OTHERS + 1) * costs.evaluation,
        "mixing": k * (OTHERS + work.chosen) * costs.add,
        "RMA": arriving(n, k) * (work.row / costs.bandwidth + costs.latency),
        "collectives": COLLECTIVES * depth * costs.latency + gathered / costs.bandwidth,
        "graph": edges * costs.edge,
        "files": work.recorded / costs.disk,
    }


def node_bytes(work: Work) -> dict[str, float]:
    """Return the bytes of a node by what they hold; "shared": what each rank has of all clients."""
    ranks = -(-work.ranks // work.nodes)
    clients = min(ranks * work.k, work.clients)
    slots = min(work.k * OTHERS, work.clients - work.k)
    rows = rows_of(Run(budget=OTHERS + 1, clients=OTHERS + 2).resolve(), np.array([work.k]))
    return {
        "rows": float(clients / work.k * sum(rows.values())[0] * work.row),
        "window": float(ranks * slots * work.row),
        "data": float(clients * SAMPLES * (3072 + LABEL)),
        "shared": float(ranks * 8 * work.clients * (3 * OTHERS + NUMBERS)),
    }


# measuring ----------------------------------------------------------------------------------------
def network() -> None:
    """Measure a row put into a window, and an Allreduce, on two ranks; root prints JSON."""
    world, rows, width, repeats = World(MPI.COMM_WORLD), 256, 16_000, 10
    inbox = Inbox(world, np.ones((rows, width), np.float32), rows)
    seconds = dict.fromkeys((1, rows), math.inf)
    for count in seconds:
        puts = [(i, 1 - world.rank, i, i) for i in range(count)]
        path = Route(puts, np.arange(count), np.full(2, count), np.full(count, 1 - world.rank))
        for _ in range(repeats):  # as often on both ranks: an exchange needs both
            start = time.perf_counter()
            inbox.exchange(path)
            seconds[count] = min(seconds[count], time.perf_counter() - start)
    inbox.close()
    per_row = (seconds[rows] - seconds[1]) / (rows - 1)
    values = np.zeros(1, np.int64)
    start = time.perf_counter()
    for _ in range(200):
        world.sum_int64(values)
    latency = (time.perf_counter() - start) / 200
    if world.root:
        print(json.dumps({"bandwidth": 4 * width / max(per_row, 1e-9), "latency": latency}))


def edge_seconds(rng: np.random.Generator, n: int = 5000, ranks: int = 8) -> float:
    """Return the seconds per edge of making a graph and its route."""
    receivers, senders = np.repeat(np.arange(n), OTHERS), rng.integers(0, n, OTHERS * n)
    owner, row = np.arange(n) % ranks, np.arange(n) // ranks
    make = lambda: CollaborationGraph.from_edges(n, receivers, senders)  # noqa: E731
    graph = make()
    return (quickest(make) + quickest(lambda: route(graph, owner, row, 0, ranks))) / len(senders)


def recording_rate(path: Path, made: Run, rng: np.random.Generator) -> float:
    """Return the bytes per second that root records, compression included."""
    recorder, values, times = Recorder(path, made.resolve(), {}, {}), rng.random(20_000), 20
    start = time.perf_counter()
    for _ in range(times):
        recorder.append({"round/val_acc": values})
        recorder.flush(0, 0.0)
    seconds = time.perf_counter() - start
    recorder.abandon()
    return times * values.nbytes / seconds


def measured_costs(folder: Path, data: Path, model: str, k: int) -> Costs:
    """Return the costs here: of one rank whose k models lie in no cache, and of two that send."""
    made, rng = Run(**flags_for(data, clients=k, model=model, budget=10)), np.random.default_rng(0)
    parts = build(made.resolve(), Job(), World(MPI.COMM_SELF))
    fed = parts.fed
    w = fed.common_row()
    others = [[j for j in range(k) if j != i] for i in range(k)]
    graph = CollaborationGraph.from_lists(rng.choice(o, OTHERS, replace=False) for o in others)
    edges = len(graph.senders)
    fed.local_opt(w, 1)
    before = int(parts.training.steps.sum())
    fed.local_opt(w, 1)
    steps = int(parts.training.steps.sum()) - before
    train, score = quickest(lambda: fed.local_opt(w, 1)), quickest(lambda: fed.evaluate(w))
    received = fed.exchange(w, graph)
    average = quickest(lambda: fed.average(w, graph, received))
    starts = quickest(lambda: list(parts.sums.over_received(received)))
    parts.begin_round(1)
    fed.ggc(w, received)
    evaluations = fed.notes["evaluations"].sum()
    search = quickest(lambda: fed.ggc(w, received)) - starts
    parts.close()
    command = [sys.executable, __file__, "--network"]
    return Costs(
        step=train / steps,
        score=score / k,
        evaluation=search / evaluations,
        add=(average + starts) / edges / 2,
        edge=edge_seconds(rng),
        disk=recording_rate(folder / "rate.h5", made, rng),
        **json.loads(launch(2, command, stdout=subprocess.PIPE).communicate()[0]),
    )


def paper_costs(measured: Costs) -> Costs:
    """Return the costs of the paper's CNN on 400 + 100 + 100 images, the rest as measured."""
    read = lambda part, rows: rows  # noqa: E731
    source = Source(CIFAR, 10, MEAN, STD, labels={}, sha256="", images=read)
    made = Run(batch_size=16, weight_decay=1e-3)
    ensemble = Ensemble(cnn.build(CIFAR, 10), MEAN, STD, torch.device("cpu"))
    backend, _ = one_client(made, Job(), source, ensemble, 1, scored=100)
    pair = ensemble.zeros(2)[None]
    scoring = quickest(lambda: backend.validation_losses(slice(0, 1), pair)) / 2  # of 100 images
    return dataclasses.replace(
        measured,
        step=step_seconds(made, *one_client(made, Job(), source, ensemble, 64)),
        score=2 * scoring,
        evaluation=scoring,
        add=measured.add * MODEL / 64_000,
    )


# asking -------------------------------------------------------------------------------------------
def largest(terms: dict[str, float], count: int) -> list[str]:
    return sorted(terms, key=lambda name: -terms[name])[:count]


def small_points(folder: Path, data: Path, costs: Costs, args: argparse.Namespace) -> str:
    """Return predicted and measured seconds per round of runs here."""
    lines = ["    N ranks  measured  predicted   error | predicted: largest terms"]
    steps = -(-(POOL - -(-POOL // 5)) // 16)
    flags = flags_for(data, model=args.model, budget=OTHERS + 1, rounds=4)
    for n in args.points:
        for ranks in args.ranks_list:
            watched = run(folder, ranks, f"{n}-{ranks}", flags | {"clients": n})
            with Result(watched.path) as result:
                edges = [len(result.chosen(t).senders) for t in range(1, 5)]
                row = 4 * int(result.file["meta"].attrs["parameters"])
            chosen = float(np.mean(edges)) / n
            terms = round_seconds(Work(n, ranks, 1, row, steps, chosen), costs)
            measured, predicted = sum(watched.seconds(2).values()), sum(terms.values())
            most = ", ".join(f"{name} {terms[name]:.3f}" for name in largest(terms, 3))
            error = 100 * (predicted / measured - 1)
            lines.append(
                f"{n:5d} {ranks:5d} {measured:9.3f}  {predicted:9.3f} {error:+6.0f} % | {most}"
            )
    return "\n".join(lines)


def cluster(costs: Costs, ranks_per_node: int, gbit: float, out: Path) -> str:
    """Return a round and a node's memory for 10^5 to 10^7 clients, and draw them in `out`.

    `gbit` per second is the bandwidth of a node.
    """
    lines = [
        f"{ranks_per_node} ranks per node, {gbit:.0f} Gb/s per node, {1e6 * LATENCY_S:.1f} us; "
        f"{1e3 * costs.step:.2f} ms per step, {1e3 * costs.evaluation:.2f} ms per evaluation, "
        f"125 steps per client and round, B_c = {OTHERS + 1}, 5 collaborators chosen",
        "clients nodes | s per round dominated by       next | GB of a node:   rows window   "
        "data shared    all; of root's file in 100 rounds",
    ]
    # a node's link is shared by its ranks
    bandwidth = gbit * 1e9 / 8 / ranks_per_node
    costs = dataclasses.replace(costs, bandwidth=bandwidth, latency=LATENCY_S)
    nodes, table = (10, 30, 100, 300, 1000), []
    seconds, memory = list[Line](), list[Line]()
    for colour, n in enumerate((10**5, 10**6, 10**7)):
        points = []
        for m in nodes:
            work = Work(n, min(m * ranks_per_node, n), m, MODEL, 125, 5.0)
            terms, sizes = round_seconds(work, costs), node_bytes(work)
            points.append((terms, sizes))
            table.append({"clients": n, "nodes": m, **terms, **sizes})
            first, second = largest(terms, 2)
            holds = " ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items())
            lines.append(
                f"{n:8d} {m:4d} | {sum(terms.values()):10.2f}  {first:>10s} {terms[first]:8.2f}, "
                f"{second} {terms[second]:.2f} | {holds} all {sum(sizes.values()) / 1e9:.1f}; "
                f"{100 * work.recorded / 1e9:.0f}"
            )
        label = f"$N = 10^{round(math.log10(n))}$"
        seconds.append(Line(nodes, [sum(t.values()) for t, _ in points], colour, label))
        memory.append(Line(nodes, [sum(s.values()) / 1e9 for _, s in points], colour, label))
        undivided = [t["graph"] + t["files"] for t, _ in points]
        seconds.append(Line(nodes, undivided, colour, form=":"))
        memory.append(Line(nodes, [s["shared"] / 1e9 for _, s in points], colour, form=":"))
    panels = {"seconds of a round": seconds, "GB of a node": memory}
    titles = "dotted: graph and files", "dotted: of all clients"
    files = draw("scaling_model", out, table, "nodes", panels, titles)
    return "\n".join([*lines, *map(str, files)])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--points", type=numbers, default="50,100,200", help="clients of the runs")
    parser.add_argument("--ranks_list", type=numbers, default="1,2", help="ranks of the runs")
    parser.add_argument("--model", default="cnn", help="of the runs: cnn or mlp")
    parser.add_argument("--side", type=int, default=16, help="of their images: 8 or 16")
    parser.add_argument("--measured", type=int, default=200, help="clients that costs are of")
    parser.add_argument("--ranks_per_node", type=int, default=64, help="of the cluster")
    parser.add_argument("--bandwidth_gbit", type=float, default=100.0, help="of a node of it")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    parser.add_argument("--network", action="store_true", help=argparse.SUPPRESS)  # on two ranks
    args = parser.parse_args()
    if args.network:
        return network()
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), Path(name, "digits.h5")
        make_data(data, max(*args.points, args.measured), POOL, TEST, args.side)
        costs = measured_costs(folder, data, args.model, args.measured)
        print(f"measured here: step {1e3 * costs.step:.2f} ms, scoring {1e3 * costs.score:.2f} ms "
              f"per client, evaluation {1e3 * costs.evaluation:.2f} ms, "
              f"row added {1e6 * costs.add:.0f} us, edge {1e9 * costs.edge:.0f} ns, "
              f"window {1e-9 * costs.bandwidth:.2f} GB/s, Allreduce {1e6 * costs.latency:.0f} us, "
              f"recording {1e-6 * costs.disk:.0f} MB/s")  # fmt: skip
        print(small_points(folder, data, costs, args))
    print(cluster(paper_costs(costs), args.ranks_per_node, args.bandwidth_gbit, args.out))


if __name__ == "__main__":
    main()
