"""A result of four clients, three classes and two rounds, with numbers chosen by hand."""

import contextlib
import importlib

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
START = {
    "time": "2025-05-03T12:00:00+0000",
    "ranks": 2,
    "hosts": ["a"],
    "device": "cpu",
    "cpu": "c",
}
START |= {"commit": "", "versions": {}}


def make(
    path,
    method="dpfl",
    seed=42,
    clients=4,
    flipped=None,
    best=None,
    graphs=None,
    finished=True,
    sha="d",
    **fields,
):
    """Write the result and return its path."""
    fields = {
        "dataset": "digits",
        "classes_per_client": 3,
        "method": method,
        "clients": clients,
        "seed": seed,
    } | fields
    run = Run(rounds=2, **({} if method == "local" else {"budget": 3}) | fields).resolve()
    lists = graphs or ([[[]] * clients] * 3 if method == "local" else GRAPHS)
    graphs = [CollaborationGraph.from_lists(senders) for senders in lists]
    best = np.array(best if best is not None else BEST[method, seed][:clients])
    meta = {
        "data_sha256": sha,
        "partition_sha256": f"p{run.partition_seed}",
        "parameters": 10,
        "class_names": "[]",
    }
    recorder = Recorder(path, run, meta, START)
    full, ones = np.ones(clients), np.ones(clients, int)
    recorder.write(
        {
            "client/p": full / clients,
            "client/budget": 3 * ones,
            "client/class_counts": COUNTS[:clients],
        }
    )
    recorder.write(
        {f"client/n_{part}": n * ones for part, n in (("train", 10), ("val", 2), ("test", 5))}
    )
    if flipped is not None:
        recorder.write({"client/flipped": np.array(flipped)})
    omega = graphs[0]
    recorder.write(
        {"graph/omega/indptr": omega.indptr, "graph/omega/senders": omega.senders.astype(np.int32)}
    )
    for t, graph in enumerate(graphs):
        recorder.append(
            {"round/number": t, "round/epochs": 10 + 5 * t, "round/gradient_steps": 100 * t}
        )
        recorder.append(
            {f"round/{n}": full * (0.5 - 0.1 * t) for n in ("train_loss", "val_loss", "test_loss")}
        )
        recorder.append(
            {f"round/{n}": best - 0.1 * (2 - t) for n in ("val_acc", "test_acc", "best_test_acc")}
        )
        recorder.append_graph(graph)
        cases = np.zeros((clients, 4), np.int32)
        cases[0] = CASES[t] if method == "dpfl" else 0
        recorder.append({"graph/cases": cases, "graph/evaluations": 2 * cases.sum(1)})
        recorder.append(
            {"traffic/models_received": (graph.degrees() * (2 if t == 0 else 1)).astype(np.int32)}
        )
        recorder.append(
            {
                "traffic/bytes_rma": np.int64(2**20 * (t + 1)),
                "traffic/bytes_collective": np.int64(2**19),
            }
        )
        if run.network:
            recorder.append({f"network/{n}": full for n in ("train", "choose", "send", "wait")})
            recorder.append(
                {
                    "network/end": 4 * full * (t + 1),
                    "network/waited_for": np.roll(np.arange(clients), 1),
                }
            )
            recorder.append({"traffic/bytes_sent": 1000 * ones})
        for i, phase in enumerate(("train", "exchange", "wait", "graph", "evaluate", "write")):
            recorder.append({f"seconds/{phase}": np.array([0.5, 0.75, 1.0]) * (i + 1)})
        recorder.flush(t, float(best.mean()))
    recorder.write({name: best for name in ("best/val_acc", "best/test_acc", "last/test_acc")})
    recorder.write({"best/round": 2 * full.astype(np.int32), "client/diverged_round": -ones})
    recorder.close("finished" if finished else "running")
    return path


def tiny(folder, name="a", *args, **fields):
    """Return such a result, open."""
    return Result(make(folder / f"{name}.h5", *args, **fields))


def empty(path, run):
    Recorder(path, run, {"data_sha256": "d", "partition_sha256": "p"}, {"time": "now"}).close(
        "finished"
    )


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
