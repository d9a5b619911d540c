"""The results file: its layout is its docstring, it reads finished and running, and its models give its scores."""

import json
import shutil

import h5py
import numpy as np
import pytest
import tiny_result
import torch
from launch import run_here

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CASES, CollaborationGraph
from dpfl_mpi.results import Result, schema
from dpfl_mpi.results import recorder as recorders
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Run

N, C, T = 6, 10, 3
FIELDS = {
    "dataset": "image_folder", "model": "mlp", "augment": False, "clients": N, "rounds": T, "tau_init": 1, "tau_train": 2,
    "budget": 3, "seed": 9, "batch_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory, digits_file):
    fields = FIELDS | {"data": str(digits_file)}
    return run_here(tmp_path_factory.mktemp("results") / "run.h5", fields, save_models=True, mixed=True)


@pytest.fixture
def result(path):
    with Result(path) as result:
        yield result


SHAPES = {
    "meta/starts": (1,), "round/number": (T + 1,), "round/epochs": (T + 1,), "round/gradient_steps": (T + 1,),
    **{f"round/{n}": (T + 1, N) for n in ("train_loss", "val_loss", "val_acc", "test_loss", "test_acc")},
    "mixed/val_acc": (T + 1, N), "mixed/test_acc": (T + 1, N),
    "best/round": (N,), "best/val_acc": (N,), "best/test_acc": (N,), "best/confusion": (N, C, C), "last/test_acc": (N,),
    **{f"client/{n}": (N,) for n in ("p", "budget", "diverged_round", "n_train", "n_val", "n_test")},
    "client/class_counts": (N, C), "graph/omega/indptr": (N + 1,), "graph/chosen/indptr": (T + 1, N + 1),
    "graph/cases": (T + 1, N, 4), "graph/evaluations": (T + 1, N), "traffic/models_received": (T + 1, N),
    "traffic/bytes_rma": (T + 1,), "traffic/bytes_collective": (T + 1,),
    **{f"seconds/{n}": (T + 1, 3) for n in ("train", "exchange", "wait", "graph", "evaluate", "write")},
    "model/best": (N, 64 * 64 + 64 + 640 + 10),
}  # fmt: skip


def test_every_array_has_the_shape_of_the_layout(result):
    for name, shape in SHAPES.items():
        assert result[name].shape == shape, name
    assert result["graph/omega/senders"].shape == (result["graph/omega/indptr"][-1],)
    assert result["graph/chosen/senders"].shape == (result["graph/chosen/indptr"][-1, -1],)


def test_a_file_holds_what_the_table_says(result):
    """Its arrays, and the attributes of the file, of /meta and of /model."""
    named = {line.split()[0] for line in schema.LAYOUT.splitlines() if "/" in line.split(" ")[0]}
    assert set(SHAPES) <= set(result.names()) <= set(schema.ARRAYS) <= named
    held = {f"{group}/{name}" for group in ("", "meta", "model") for name in result.file[group or "/"].attrs}
    assert held == named - set(schema.ARRAYS)


def test_the_numbers_belong_together(result):
    """Counts and best rounds worked out again from the series."""
    assert result["round/number"].tolist() == [0, 1, 2, 3]
    assert result["round/epochs"].tolist() == [1, 3, 5, 7]
    steps = sum(-(-int(n) // 8) for n in result["client/n_train"])
    assert result["round/gradient_steps"].tolist() == [steps, 3 * steps, 5 * steps, 7 * steps]
    assert np.array_equal(result["client/n_train"] + result["client/n_val"], result["client/class_counts"].sum(1))
    val, test = result["round/val_acc"], result["round/test_acc"]
    for k in range(N):
        latest = max(t for t in range(T + 1) if val[t, k] == val[:, k].max())
        assert result["best/round"][k] == latest
        assert result["best/val_acc"][k] == val[latest, k] and result["best/test_acc"][k] == test[latest, k]
        confusion = result["best/confusion"][k]
        assert confusion.sum() == result["client/n_test"][k]
        assert confusion.trace() / confusion.sum() == pytest.approx(test[latest, k], abs=1e-15)
    assert np.array_equal(result["last/test_acc"], test[-1])
    assert (result["client/budget"] == 3).all()
    assert (result["client/diverged_round"] == -1).all()
    degrees = np.diff(result["graph/chosen/indptr"], axis=1)
    received = result["traffic/models_received"]
    for t in range(1, T + 1):
        assert np.array_equal(received[t], degrees[0])  # every round asks all of Omega
    cases, evaluations = result["graph/cases"].sum(2), result["graph/evaluations"]
    assert len(CASES) == 4 and np.array_equal(evaluations, np.where(cases > 0, 2 * cases + 2, 0))
    assert np.array_equal(
        received[0], N - 1 + np.minimum(-(-cases[0] // 2) * 2, N - 1) + degrees[0]
    )  # sum, phases of 2, average
    seconds = result["seconds/train"]
    assert (seconds[:, 0] <= seconds[:, 1]).all() and (seconds[:, 1] <= seconds[:, 2]).all()


def test_it_carries_its_origin(result, digits_file):
    (start,) = result.starts()
    assert start["ranks"] == 1 and start["versions"]["torch"] == torch.__version__ and start["cpu"] and start["time"]
    with h5py.File(digits_file) as data:
        assert result.file["meta"].attrs["data_sha256"] == data.attrs["sha256"]
    assert result.run == Run(**FIELDS, data=str(digits_file)).resolve()


def test_models_give_the_scores(result, digits_file):
    """`state_dict` loads into the plain module, which reproduces best/test_acc and the confusion matrix on the file's images."""
    from dpfl_mpi.data.recipes import make
    from dpfl_mpi.data.source import open_source
    from dpfl_mpi.models import mlp

    source = open_source(result.run)
    dealt = make(result.run, source.labels, source.classes)
    for k in range(N):
        module = mlp.build((8, 8, 1), C)
        module.load_state_dict({name: torch.from_numpy(v) for name, v in result.state_dict(k).items()})
        with h5py.File(digits_file) as file:
            rows = dealt.of("test", k)
            x, y = file["test/images"][:][rows], file["test/labels"][:][rows]
        x = ((torch.from_numpy(x).float() / 255 - 0.305) / 0.376).permute(0, 3, 1, 2)
        with torch.no_grad():
            predicted = module(x).argmax(1).numpy()
        assert (predicted == y).mean() == result["best/test_acc"][k]
        confusion = np.zeros((C, C), int)
        for true, guess in zip(y, predicted, strict=True):
            confusion[true, guess] += 1
        assert np.array_equal(confusion, result["best/confusion"][k])


def test_one_flipped_bit_is_noticed(path, tmp_path):
    """In any array but provenance; and provenance may differ."""
    with Result(path) as a:
        names = a.names()
        for name in names:
            shutil.copy(path, tmp_path / "copy.h5")
            with h5py.File(tmp_path / "copy.h5", "r+") as file:
                if name == "meta/starts":
                    file[name][0] = json.dumps({"hosts": ["another"]})
                else:
                    values = file[name][()]
                    if not values.size:
                        continue
                    if name == "client/diverged_round":
                        values[0] = 1  # it is -1, and -2 would be refused
                    else:
                        values.reshape(-1).view(np.uint8)[0] ^= 1
                    file[name][()] = values
            with Result(tmp_path / "copy.h5") as b:
                exempt = name.startswith(("meta", "seconds", "traffic/bytes"))
                assert Result.same_numbers(a, b) == exempt, name
                assert Result.differences(a, b) == ([] if exempt else [name])


def test_a_lost_array_or_another_run_is_noticed(path, tmp_path):
    shutil.copy(path, tmp_path / "copy.h5")
    with h5py.File(tmp_path / "copy.h5", "r+") as file:
        del file["best/round"]
    with Result(path) as a, Result(tmp_path / "copy.h5") as b:
        assert Result.differences(a, b) == ["best/round"]
    shutil.copy(path, tmp_path / "copy.h5")
    with tiny_result.changing(tmp_path / "copy.h5") as file:
        file.attrs["key"] = json.dumps(json.loads(file.attrs["key"]) | {"lr": 0.5})
    with Result(path) as a, Result(tmp_path / "copy.h5") as b:
        assert Result.differences(a, b) == [] and not Result.same_numbers(a, b)


def test_a_running_file(tmp_path, monkeypatch):
    """What another process sees after each flush: a readable file, its state, the rounds so far; at the end it is finished."""
    monkeypatch.setattr(recorders, "CHEAP", 60.0)  # so that a slow disk is written to each round, too
    run = Run(clients=3, rounds=2).resolve()
    recorder = Recorder(tmp_path / "a" / "run.h5", run, {"parameters": 5}, {"ranks": 2})
    graphs = [CollaborationGraph.from_lists(x) for x in ([[1, 2], [], [0]], [[], [], []], [[2], [0], []])]
    for t, graph in enumerate(graphs):
        recorder.append({"round/number": np.int64(t), "round/val_acc": np.full(3, t / 4)})
        recorder.append_graph(graph)
        recorder.flush(t, t / 10)
        shutil.copy(tmp_path / "a" / "run.h5", tmp_path / "seen.h5")  # the bytes on disk now
        with Result(tmp_path / "seen.h5") as seen:
            assert seen.state == f"running, round {t}" and not seen.finished
            assert seen["round/val_acc"].tolist() == [[s / 4] * 3 for s in range(t + 1)]
            for s in range(t + 1):
                assert np.array_equal(seen.graph(s), graphs[s].matrix())
            with pytest.raises(UserError, match=f"round {t + 1} is not in .*; allowed are 0 to {t}"):
                seen.graph(t + 1)
    recorder.close("finished")
    with Result(tmp_path / "a" / "run.h5") as done:
        assert done.state == "finished" and done.finished and done.run == run


def test_a_stopped_file(tmp_path):
    recorder = Recorder(tmp_path / "run.h5", Run().resolve(), {}, {})
    recorder.flush(4, 0.5)
    recorder.close("stopped")
    with Result(tmp_path / "run.h5") as result:
        assert result.state == "stopped after round 4" and not result.finished
        with pytest.raises(UserError, match="no models; run with --save_models"):
            result.state_dict(0)
        with pytest.raises(UserError, match="has no round/nothing; it has meta/starts"):
            result["round/nothing"]


def test_a_later_schema_is_refused(path, tmp_path):
    shutil.copy(path, tmp_path / "copy.h5")
    with h5py.File(tmp_path / "copy.h5", "r+") as file:
        file.attrs["schema"] = schema.SCHEMA + 1
    with pytest.raises(
        UserError, match=f"has schema {schema.SCHEMA + 1}; this version of dpfl_mpi reads up to {schema.SCHEMA}"
    ):
        Result(tmp_path / "copy.h5")
