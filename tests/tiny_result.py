"""A result of four clients, three classes and two rounds, with numbers chosen by hand."""

import contextlib
import importlib
import json

import h5py
import numpy as np

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.results import Result, schema
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Run

GRAPHS = (  # senders of receiver 0, 1, 2, 3
    [[1, 2], [0], [0, 3], []],  # Omega: 5 edges, one of them (3 to 2) without its reverse
    [[2], [], [0], []],  # round 1: 2 edges, both ways
    [[1, 2], [], [0], []],  # round 2: 3 edges, one (1 to 0) without its reverse
)
CASES = ((3, 6, 2, 1), (2, 2, 1, 0), (2, 1, 2, 0))  # of all clients, per round
BEST = {  # test accuracy of the best models, by method and seed
    ("dpfl", 42): (0.8, 0.6, 1.0, 0.4),
    ("dpfl", 52): (0.9, 0.7, 0.9, 0.5),
    ("local", 42): (0.6, 0.6, 0.8, 0.6),
    ("local", 52): (0.6, 0.6, 0.8, 0.6),
}
COUNTS = np.array([[6, 0, 0], [0, 5, 0], [4, 1, 0], [0, 0, 8]])
START = {"time": "2025-05-03T12:00:00+0000", "ranks": 2, "hosts": ["a"]}
START |= {"device": "cpu", "cpu": "c", "commit": "", "versions": {}}


def make(path, method="dpfl", seed=42, clients=4, best=None, graphs=None, **more):
    """Write the result and return its path.

    Args:
        more: fields of the Run, and `flipped`, `finished`, `sha` of the data, `named`: clients'
            name and group.
    """
    named = {what: np.array(texts) for what, texts in more.pop("named", {}).items()}
    flipped, finished = more.pop("flipped", None), more.pop("finished", True)
    meta = {"data_sha256": more.pop("sha", "d"), "parameters": 10}
    meta["class_names"] = json.dumps(more.pop("classes", []))
    fields = {"dataset": "digits", "classes_per_client": 3, "rounds": 2}
    fields |= {"method": method, "clients": clients, "seed": seed}
    run = Run(**fields | ({} if method == "local" else {"budget": 3}) | more).resolve()
    meta["partition_sha256"] = f"p{run.partition_seed}"
    lists = graphs or ([[[]] * clients] * 3 if method == "local" else GRAPHS)
    graphs = [CollaborationGraph.from_lists(senders) for senders in lists]
    best = np.array(best if best is not None else BEST[method, seed][:clients])
    recorder = Recorder(path, run, meta, START)
    full, ones, omega = np.ones(clients), np.ones(clients, int), graphs[0]
    of_clients = {"p": full / clients, "budget": 3 * ones, "class_counts": COUNTS[:clients]}
    of_clients |= {"n_train": 10 * ones, "n_val": 2 * ones, "n_test": 5 * ones}
    of_clients |= named
    if flipped is not None:
        of_clients["flipped"] = np.array(flipped)
    recorder.write({f"client/{name}": values for name, values in of_clients.items()})
    recorder.write({"graph/omega/indptr": omega.indptr})
    recorder.write({"graph/omega/senders": omega.senders.astype(np.int32)})
    for t, graph in enumerate(graphs):
        row = {"number": t, "epochs": 10 + 5 * t, "gradient_steps": 100 * t}
        row |= dict.fromkeys(("train_loss", "val_loss", "test_loss"), full * (0.5 - 0.1 * t))
        row |= dict.fromkeys(("val_acc", "test_acc", "best_test_acc"), best - 0.1 * (2 - t))
        recorder.append({f"round/{name}": values for name, values in row.items()})
        recorder.append_graph(graph)
        cases = np.zeros((clients, 4), np.int32)
        cases[0] = CASES[t] if method == "dpfl" else 0
        recorder.append({"graph/cases": cases, "graph/evaluations": 2 * cases.sum(1)})
        received = (graph.degrees() * (2 if t == 0 else 1)).astype(np.int32)
        traffic = {"models_received": received, "bytes_rma": np.int64(2**20 * (t + 1))}
        traffic["bytes_collective"] = np.int64(2**19)
        if run.network:
            network = dict.fromkeys(("train", "choose", "send", "wait"), full)
            network |= {"end": 4 * full * (t + 1), "waited_for": np.roll(np.arange(clients), 1)}
            recorder.append({f"network/{name}": values for name, values in network.items()})
            traffic["bytes_sent"] = 1000 * ones
        recorder.append({f"traffic/{name}": values for name, values in traffic.items()})
        for i, phase in enumerate(("train", "exchange", "wait", "graph", "evaluate", "write")):
            recorder.append({f"seconds/{phase}": np.array([0.5, 0.75, 1.0]) * (i + 1)})
        counts = np.isfinite(best) & ~np.array(
            flipped if flipped is not None else [False] * clients
        )
        recorder.flush(t, float(best[counts].mean()) if counts.any() else np.nan)
    recorder.write({name: best for name in ("best/val_acc", "best/test_acc", "last/test_acc")})
    recorder.write({"best/round": 2 * full.astype(np.int32), "client/diverged_round": -ones})
    recorder.close("finished" if finished else "running")
    return path


# groups of clients 0 and 2, and of 1 and 3: two of Omega's five edges are inside one, both edges of
# round 1, and two of the three of round 2
NAMED = {"name": ["site-1", "home", "site-2", "é"], "group": ["north", "east", "north", "east"]}


def tiny(folder, name="a", *args, **fields):
    """Return such a result, open."""
    return Result(make(folder / f"{name}.h5", *args, **fields))


def empty(path, run):
    meta = {"data_sha256": "d", "partition_sha256": "p"}
    Recorder(path, run, meta, {"time": "now"}).close("finished")


@contextlib.contextmanager
def changing(path):
    """Open a result for a change of its attributes, whose checksums are then made anew."""
    with h5py.File(path, "a") as file:
        yield file
        file.attrs["checksum"] = schema.checksum(file, file["meta/starts"].asstr()[:].tolist())


def module(name):
    return importlib.import_module(f"dpfl_mpi.figures.{name}")


def draw(name, results, *options, **more):
    return module(name).draw(module("frames").of_results(results), *options, **more)
