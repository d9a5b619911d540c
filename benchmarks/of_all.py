"""What every rank holds of all N clients, and what it does with the whole graph.

    mpirun -n 2 python benchmarks/of_all.py [--clients 10001]      # bytes per client, by name
    python benchmarks/of_all.py --points 10000,100000,1000000      # seconds, and most bytes

Bytes are those of rank 1 after a round. An array counts as one of all clients where its first axis
has N or N + 1 places (N odd: no rank has as many clients), or where it holds a graph's edges.
Seconds are of the core, for one rank of 1,000 nodes of 64.
"""

import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from _scale import MB, flags_for, make_data, numbers, options
from mpi4py import MPI

from dpfl_mpi.engine.record import Record
from dpfl_mpi.engine.train import train
from dpfl_mpi.federation.members import Members
from dpfl_mpi.mpi.window import route
from dpfl_mpi.mpi.world import World
from dpfl_mpi.settings import Job, Run

OTHERS = 9  # B_c - 1
RANKS = 64_000


def arrays(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every array that a value reaches by attributes, dicts and lists, once, and its name."""
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
        for key, part in value.items():
            yield from arrays(part, f"{name}.{key}", seen)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from arrays(part, name, seen)
    elif type(value).__module__.startswith("dpfl_mpi") and hasattr(value, "__dict__"):
        yield from arrays(vars(value), name, seen)


def bytes_held(clients: int) -> None:
    """Print the bytes per client that rank 1 of a run holds of all clients after a round."""
    world, folder = World(MPI.COMM_WORLD), ""
    if world.root:
        folder = tempfile.mkdtemp()
        make_data(Path(folder, "data.h5"), clients, 30, 5, 8)
    path, record_round = Path(world.first(folder)), Record.round

    def look(record: Record, state: Any) -> None:
        record_round(record, state)
        parts = record.parts
        if parts.round == 0 or world.rank == 0:
            return
        sizes = dict[str, int]()
        for name, array in arrays({"parts": parts, "state": state}, "", set()):
            edges = array.ndim == 1 and name.endswith("senders")
            if array.shape[:1] in ((clients,), (clients + 1,)) or edges:
                sizes[name] = sizes.get(name, 0) + array.nbytes
        for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
            print(f"{size / clients:8.1f} {name}", flush=True)
        print(f"{sum(sizes.values()) / clients:8.1f} in all, bytes per client", flush=True)

    Record.round = look  # type: ignore[method-assign]
    data, model = path / "data.h5", {"model": "mlp", "budget": OTHERS + 1}
    run = Run(**flags_for(data, **model, clients=clients, rounds=1))
    train(run, Job(quiet=True, out=str(path / "run.h5")), world)


def graph_work(clients: int) -> None:
    """Print what the graph of so many clients costs one of many ranks."""
    rng, apart = np.random.default_rng(0), (clients - 1) // OTHERS
    jitter = rng.integers(0, apart, (clients, OTHERS))
    senders = np.arange(clients)[:, None] + 1 + apart * np.arange(OTHERS) + jitter
    senders %= clients
    degrees, flags = np.full(clients, OTHERS), np.ones(clients, bool)

    def gather(rows: np.ndarray, owner: np.ndarray, everywhere: bool) -> np.ndarray:
        if len(owner) == clients:
            return degrees if rows.itemsize == 8 else flags
        return senders[members.rank_by_rank].reshape(-1)

    ranks, sizes = min(RANKS, clients), rng.integers(20, 30, clients)
    world = SimpleNamespace(size=ranks, rank=0, gather=gather)
    p = np.full(clients, 1 / clients)
    partition = SimpleNamespace(n=clients, p=p, sizes=lambda part: sizes)
    everyone = lambda *_: flags  # noqa: E731
    limits = SimpleNamespace(most_senders=degrees, reach=None, joined=everyone, present=everyone)
    rules = {"stopped_serve": True, "advice": ""}
    make = lambda: Members(world, partition, limits, **rules)  # type: ignore # noqa: E731
    members: Any = make()
    local = list(senders[members.ids])
    graph = members.collect(local)
    actions: dict[str, Callable[[], object]] = {
        "who is where, at the start": make,
        "fed.collect": lambda: members.collect(local),
        "check of a graph": lambda: members.check_budget(graph, ""),
        "a flag of each client": lambda: members.of_all(np.ones(len(members.ids), bool)),
        "route": lambda: route(graph, members.owner, members.row_of, 0, ranks),
    }
    size = (graph.senders.nbytes + graph.indptr.nbytes) / MB
    print(f"N = {clients}, {ranks} ranks, {size:.1f} MB a graph")
    for name, action in actions.items():
        start = time.process_time()
        action()
        seconds = time.process_time() - start
        tracemalloc.start()
        action()
        most = tracemalloc.get_traced_memory()[1] / MB
        tracemalloc.stop()
        print(f"  {name:28} {seconds:8.3f} s {most:9.1f} MB", flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=10_001, help="of the run, odd")
    parser.add_argument("--points", type=numbers, default=[], help="time graphs of these clients")
    args = parser.parse_args()
    for n in args.points:
        graph_work(n)
    if not args.points:
        bytes_held(args.clients)


if __name__ == "__main__":
    main()
