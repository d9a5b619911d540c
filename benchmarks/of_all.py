"""What every rank keeps of all N clients: bytes per client by name, from a run on two ranks; and what a rank does with the whole graph, in seconds of the core.

    mpirun -n 2 python benchmarks/of_all.py [--clients 10001]      # bytes, after a round
    python benchmarks/of_all.py --points 10000,100000,1000000      # seconds and most bytes, as one rank of 64 per node would take

An array counts as one of all clients where its first axis has N or N + 1 places (N odd: no rank has as many clients), or is a graph's edges.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from _scale import make_data, numbers
from mpi4py import MPI

from dpfl_mpi.engine.record import Record
from dpfl_mpi.engine.train import train
from dpfl_mpi.federation.members import Members
from dpfl_mpi.mpi.window import route
from dpfl_mpi.mpi.world import World
from dpfl_mpi.settings import Job, Run

OTHERS, RANKS = 9, 64_000  # B_c - 1; of 1,000 nodes
RUN = {"dataset": "arrays", "partition": "natural", "min_samples": 3, "model": "mlp", "budget": OTHERS + 1, "rounds": 1}


def arrays(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every array that can be reached from a value through attributes, dicts and sequences, once, by the way to it."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        if id(value) not in seen or value.base is None:
            seen.add(id(value))
            yield name, value
    elif isinstance(value, dict):
        for key, held in value.items():
            yield from arrays(held, f"{name}.{key}", seen)
    elif isinstance(value, list | tuple):
        for held in value:
            yield from arrays(held, name, seen)
    elif type(value).__module__.startswith("dpfl_mpi"):
        yield from arrays(vars(value), name, seen)


def kept(clients: int) -> None:
    """Print what rank 1 of a run keeps of all clients after a round."""
    world, folder = World(MPI.COMM_WORLD), ""
    if world.root:
        folder = tempfile.mkdtemp()
        make_data(Path(folder, "data.h5"), clients, 30, 5, 8)
    path, write = Path(world.first(folder)), Record.round

    def look(record: Record, state: Any) -> None:
        write(record, state)
        parts = record.parts
        if parts.round == 0 or world.rank == 0:
            return
        found = dict[str, int]()
        for name, array in arrays({"parts": parts, "state": state}, "", set()):
            edges = array.ndim == 1 and name.endswith("senders")
            if array.shape[:1] in ((clients,), (clients + 1,)) or edges:
                found[name] = found.get(name, 0) + array.nbytes
        for name, size in sorted(found.items(), key=lambda item: -item[1]):
            print(f"{size / clients:8.1f} {name}", flush=True)
        print(f"{sum(found.values()) / clients:8.1f} in all, bytes per client of the run", flush=True)

    Record.round = look  # type: ignore[method-assign]
    run = Run(**RUN, data=str(path / "data.h5"), clients=clients, tau_init=1, tau_train=1)
    train(run, Job(quiet=True, out=str(path / "run.h5")), world)


def graph_work(clients: int) -> None:
    """Print what the graph of so many clients costs one of many ranks: seconds, and most bytes meanwhile."""
    rng, apart = np.random.default_rng(0), (clients - 1) // OTHERS
    to = np.arange(clients)
    senders = to[:, None] + 1 + apart * np.arange(OTHERS) + rng.integers(0, apart, (clients, OTHERS))
    senders %= clients
    ranks = min(RANKS, clients)
    every = {8: np.full(clients, OTHERS), 1: np.ones(clients, bool)}

    def gather(rows: np.ndarray, owner: np.ndarray, everywhere: bool) -> np.ndarray:
        return every[rows.itemsize] if len(owner) == clients else senders[members.rank_by_rank].reshape(-1)

    world = SimpleNamespace(size=ranks, rank=0, gather=gather)
    size, n_train, there = dict.fromkeys(("n",), clients), rng.integers(20, 30, clients), np.ones(clients, bool)
    partition = SimpleNamespace(**size, p=np.full(clients, 1 / clients), sizes=lambda part: n_train)
    limits = SimpleNamespace(most_senders=every[8], reach=None, joined=lambda *_: there, present=lambda *_: there)
    how: dict[str, Any] = {"stopped_serve": True, "advice": "lower --lr"}
    members: Any = Members(world, partition, limits, **how)  # type: ignore[arg-type]
    mine = list(senders[members.ids])
    graph = members.collect(mine)
    does: dict[str, Callable[[], object]] = {
        "who is where, at the start": lambda: Members(world, partition, limits, **how),  # type: ignore[arg-type]
        "fed.collect": lambda: members.collect(mine),
        "check of a graph": lambda: members.check_budget(graph, ""),
        "a flag of each client": lambda: members.of_all(np.ones(len(members.ids), bool)),
        "route": lambda: route(graph, members.owner, members.row_of, 0, ranks),
    }
    held = f"{(graph.senders.nbytes + graph.indptr.nbytes) / 1e6:.1f} MB a graph"
    print(f"N = {clients}, {ranks} ranks, {held}")
    for name, do in does.items():
        start = time.process_time()
        do()
        seconds = time.process_time() - start
        tracemalloc.start()
        do()
        print(f"  {name:28} {seconds:8.3f} s {tracemalloc.get_traced_memory()[1] / 1e6:9.1f} MB", flush=True)
        tracemalloc.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_001, help="of the run of which bytes are counted, odd")
    parser.add_argument("--points", type=numbers, default=[], help="clients whose graph is timed; then nothing is run")
    args = parser.parse_args()
    for n in args.points:
        graph_work(n)
    if not args.points:
        kept(args.clients)
