"""The results file: its layout, how it reads while it is written, what damages it, its scores."""

import contextlib
import csv
import functools
import io
import json
import shutil
import warnings

import h5py
import numpy as np
import pytest
import tiny_result
import torch
from launch import refused, run_here
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from dpfl_mpi import export, prepare, show
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.engine import record
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CASES, CollaborationGraph
from dpfl_mpi.results import Result, schema
from dpfl_mpi.results import recorder as recorders
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.results.result import METRICS, auc, score
from dpfl_mpi.settings import Run
from dpfl_mpi.storage import files
from dpfl_mpi.storage.lock import Lock

N, C, T = 6, 10, 3
FIELDS = {"dataset": "image_folder", "model": "mlp", "augment": False, "clients": N, "rounds": T}
FIELDS |= {"tau_init": 1, "tau_train": 2, "budget": 3, "seed": 9, "batch_size": 8}
D = 64 * 64 + 64 + 640 + 10
SIZES = {"T+1": T + 1, "N": N, "N+1": N + 1, "C": C, "D": D, "starts": 1, "3": 3, "4": 4}
# what a Run without controls and fine-tuning does not write
CONTROLS = ["of_data", "name", "group", "attackers", "newcomers", "drifted"]
CONTROLS += ["drift_classes", "stopped_round"]
ABSENT = {f"client/{name}" for name in CONTROLS}
ABSENT |= {"traffic/bytes_sent", "round/there", "graph/repair_models", "graph/repair_evaluations"}
GROUPS = ("finetune", "newcomers", "attack", "graph/reach", "network")


@pytest.fixture(scope="module")
def path(tmp_path_factory, digits_file):
    fields, out = FIELDS | {"data": str(digits_file)}, tmp_path_factory.mktemp("results") / "run.h5"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "GATHERED", 4 * 4 * D)  # of six models four come to root at a time
        return run_here(out, fields, save_models=True, mixed=True)


@pytest.fixture
def result(path):
    with Result(path) as result:
        yield result


def test_the_numbers_of_a_file_belong_together(result, digits_file):
    found = set(result.arrays())
    absent = {name for name in schema.ARRAYS if name.startswith(GROUPS)}
    assert found == set(schema.ARRAYS) - ABSENT - absent
    for name in found - {"graph/omega/senders", "graph/chosen/senders"}:
        axes = schema.ARRAYS[name].axes.split()
        assert result[name].shape == tuple(SIZES[axis] for axis in axes), name
    assert result["graph/omega/senders"].shape == (result["graph/omega/indptr"][-1],)
    assert result["graph/chosen/senders"].shape == (result["graph/chosen/indptr"][-1, -1],)
    named = {line.split()[0] for line in schema.LAYOUT.splitlines() if "/" in line.split(" ")[0]}
    groups = {group: result.file[group or "/"].attrs for group in ("", "meta", "model")}
    attributes = {f"{group}/{name}" for group, names in groups.items() for name in names}
    assert attributes == named - set(schema.ARRAYS)
    assert result["round/number"].tolist() == [0, 1, 2, 3]
    assert result["round/epochs"].tolist() == [1, 3, 5, 7]
    steps = sum(-(-int(n) // 8) for n in result["client/n_train"])
    assert result["round/gradient_steps"].tolist() == [steps, 3 * steps, 5 * steps, 7 * steps]
    n = result["client/n_train"] + result["client/n_val"]
    assert np.array_equal(n, result["client/class_counts"].sum(1))
    val, test, confusion = (
        result[n] for n in ("round/val_acc", "round/test_acc", "best/confusion")
    )
    for k in range(N):
        latest = max(t for t in range(T + 1) if val[t, k] == val[:, k].max())
        assert result["best/round"][k] == latest
        assert result["best/val_acc"][k] == val[latest, k]
        assert result["best/test_acc"][k] == test[latest, k]
        right = confusion[k].trace() / confusion[k].sum()
        assert right == pytest.approx(test[latest, k], abs=1e-15)
    assert np.array_equal(confusion.sum((1, 2)), result["client/n_test"])
    assert np.array_equal(result["last/test_acc"], test[-1])
    assert (result["client/budget"] == 3).all() and (result["client/diverged_round"] == -1).all()
    degrees = np.diff(result["graph/chosen/indptr"], axis=1)
    received = result["traffic/models_received"]
    assert (received[1:] == degrees[0]).all()  # every round asks all of Omega
    cases, evaluations = result["graph/cases"].sum(2), result["graph/evaluations"]
    assert len(CASES) == 4 and np.array_equal(evaluations, np.where(cases > 0, 2 * cases + 2, 0))
    phases = np.minimum(-(-cases[0] // 2) * 2, N - 1)  # of 2, between the sum and the average
    assert np.array_equal(received[0], N - 1 + phases + degrees[0])
    assert (np.diff(result["seconds/train"]) >= 0).all()
    (start,) = result.starts()
    assert start["ranks"] == 1 and start["versions"]["torch"] == torch.__version__
    assert start["cpu"] and start["time"]
    with h5py.File(digits_file) as data:
        assert result.file["meta"].attrs["data_sha256"] == data.attrs["sha256"]
    assert result.run == Run(**FIELDS, data=str(digits_file)).resolve()


def test_any_difference_is_noticed(path, tmp_path, monkeypatch):
    # a flipped bit would make -2 of -1, which is refused
    others = {"meta/starts": json.dumps({"hosts": ["another"]}), "client/diverged_round": 1}
    with Result(path) as a:
        for name in (name for name in a.arrays() if a.hdf5.dataset(name, "iufbOS").size):
            copy = shutil.copy(path, tmp_path / "copy.h5")
            with tiny_result.changing(copy) as file:
                values = file[name][()]
                if name in others:
                    values[0] = others[name]
                else:
                    values.reshape(-1).view(np.uint8)[0] ^= 1
                file[name][()] = values
            with Result(copy) as b:
                exempt = name.startswith(("meta", "seconds", "traffic/bytes"))
                assert Result.same_numbers(a, b) == exempt, name
                assert Result.differences(a, b) == ([] if exempt else [name])
    copy = shutil.copy(path, tmp_path / "copy.h5")
    with tiny_result.changing(copy) as file:
        file.attrs["key"] = json.dumps(json.loads(file.attrs["key"]) | {"lr": 0.5})
    with Result(path) as a, Result(copy) as b:
        assert Result.differences(a, b) == [] and not Result.same_numbers(a, b)
    with h5py.File(copy, "r+") as file:
        del file["best/round"]
    with Result(path) as a, Result(copy) as b:
        assert Result.differences(a, b) == ["best/round"]
    # Else a log, which is written as rounds end, would differ from the finished result.
    rounds, values = 9, np.full((9, 40), 2.0**-53)
    values[:, 0] = 1  # the others change this sum only if they are added up before
    monkeypatch.setattr(Result, "last_round", property(lambda self: rounds - 1))
    monkeypatch.setattr(Result, "benign", np.ones(40, bool))
    monkeypatch.setattr(Result, "__getitem__", lambda self, name: values[:rounds])
    with Result(path) as result:
        finished = result.mean("round/test_acc")
        for rounds in range(1, 9):
            assert list(result.mean("round/test_acc")) == list(finished[:rounds])


def test_a_file_that_h5py_has_open_reads_well(tmp_path):
    path = tiny_result.make(tmp_path / "p.h5", "local", best=(0.5,) * 4)
    with h5py.File(path) as file, Result(path) as result:
        assert np.array_equal(result["best/test_acc"], file["best/test_acc"][()])


def test_a_file_reads_well_while_it_is_written(tmp_path, monkeypatch):
    seen, path = [], tmp_path / "run.h5"

    class Slow(io.FileIO):
        def write(self, data):
            for part in (data[:0], data[: len(data) // 2], data[len(data) // 2 :]):
                super().write(part)
                if path.exists():
                    with Result(path) as found:
                        seen.append((found.state, found.last_round))

    open_slowly = lambda name, mode: (Slow if mode == "wb" else open)(name, mode)  # noqa: E731
    monkeypatch.setattr(recorders, "APART_S", 0)  # each round is put on disk
    monkeypatch.setattr(recorders, "SHARE", np.inf)
    monkeypatch.setattr(files, "open", open_slowly, raising=False)
    fields = {"method": "local", "clients": 3, "rounds": 2}
    run_here(path, fields)
    states = [("running, round -1", -1), *((f"running, round {t}", t) for t in range(3))]
    assert sorted(set(seen)) == sorted(states) and len(seen) >= 9
    more = run_here(tmp_path / "b.h5", fields, save_models=True, mixed=True)
    with Result(path) as a, Result(more) as b:
        assert "model/best" in b and Result.same_numbers(a, b) and Result.differences(a, b) == []


def test_rounds_that_are_not_put_on_disk_call_hdf5_once(tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "APART_S", np.inf)
    calls, resize = [], h5py.Dataset.resize
    monkeypatch.setattr(h5py.Dataset, "resize", lambda *a: (calls.append(a[0].name), resize(*a)))
    run = Run(clients=3, rounds=99).resolve()
    recorder = Recorder(tmp_path / "run.h5", run, {"parameters": 5}, {"ranks": 2})
    del calls[:]
    for t in range(100):
        recorder.append({"round/number": np.int64(t), "round/val_acc": np.full(3, t / 100)})
        recorder.append_graph(CollaborationGraph.from_lists([[1, 2], [], [0] * (t % 2)]))
        recorder.write({"best/round": np.full(3, t)})
        recorder.flush(t, 0.5)
    assert calls == []
    recorder.close("finished")
    assert len(calls) == 4
    with Result(tmp_path / "run.h5") as done:
        assert done["round/val_acc"].tolist() == [[t / 100] * 3 for t in range(100)]
        assert done["best/round"].tolist() == [99] * 3 and done.last_round == 99
        assert [len(done.chosen(t).senders) for t in range(100)] == [2, 3] * 50


def test_a_running_file(tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "APART_S", 0)  # each round is put on disk
    monkeypatch.setattr(recorders, "SHARE", np.inf)
    run = Run(clients=3, rounds=2).resolve()
    recorder = Recorder(tmp_path / "a" / "run.h5", run, {"parameters": 5}, {"ranks": 2})
    lock, early = Lock(tmp_path / "seen.h5"), None
    lists = [[1, 2], [], [0]], [[], [], []], [[2], [0], []]
    graphs = [CollaborationGraph.from_lists(each) for each in lists]
    for t, graph in enumerate(graphs):
        recorder.append({"round/number": np.int64(t), "round/val_acc": np.full(3, t / 4)})
        recorder.append_graph(graph)
        recorder.flush(t, t / 10)
        shutil.copy(tmp_path / "a" / "run.h5", tmp_path / "seen.h5")  # the bytes on disk now
        early = early or Result(tmp_path / "a" / "run.h5")
        with Result(tmp_path / "seen.h5") as seen:
            # without the lock
            assert seen.state == f"stopped after round {t}" and not seen.finished
            lock.acquire()
            untouched = tmp_path.stat().st_mtime_ns
            assert seen.state == f"running, round {t}" and len(seen["round/val_acc"]) == t + 1
            assert tmp_path.stat().st_mtime_ns == untouched  # no file was made to read
            lock.release()
            assert seen["round/val_acc"].tolist() == [[s / 4] * 3 for s in range(t + 1)]
            for s in range(t + 1):
                assert np.array_equal(seen.graph(s), graphs[s].matrix())
            refused(f"round {t + 1} is not in ...; allowed are 0 to {t}", seen.graph, t + 1)
    recorder.close("finished")
    with Result(tmp_path / "a" / "run.h5") as done:
        assert done.state == "finished" and done.finished and done.run == run
        refused("no models; a run with --save_models ends with them", done.state_dict, 0)
        has = "has no round/nothing; it has graph/chosen/indptr"
        refused(has, done.__getitem__, "round/nothing")
    # an old file that is still open reads as it was then
    assert early.last_round == 0 and early["round/val_acc"].shape == (1, 3)
    Recorder(tmp_path / "run.h5", run, {}, {}).close("stopped")
    with Result(tmp_path / "run.h5") as result:
        assert result.state == "stopped after round -1" and not result.finished


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """The file of a run with every array, after each round, and stopped before its very end."""
    folder, paths = tmp_path_factory.mktemp("unfinished"), []
    y, owner = np.arange(240) % 4, np.arange(240) // 4 % 6
    x = np.random.default_rng(0).integers(0, 60, (240, 4, 4)) + 40 * y[:, None, None]
    group, owner = np.array(["é", "f"])[owner % 2], np.array(list("uvwxyz"))[owner]
    arrays = arrays_of(x.astype(np.uint8), y, owner, group=group)
    prepare.write(arrays, "arrays", folder / "data.h5", own=True)
    fields = {"dataset": "arrays", "data": str(folder / "data.h5"), "rounds": T, "budget": 3}
    fields |= {"tau_init": 1, "tau_train": 1, "finetune_epochs": 1, "patience": 3}
    fields |= {"churn": "0.2:0.6", "network": "phones", "staleness": 1, "codec": "topk:0.3"}
    fields |= {"attack": "backdoor:0.2", "drift": "0.5:2", "newcomers": 0.2, "reach": "geometric:3"}
    flush, close = Recorder.flush, Recorder.close

    def flush_and_copy(recorder, *record):
        flush(recorder, *record)
        paths.append(folder / f"{len(paths)}.h5")
        recorder.copy(paths[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "flush", flush_and_copy)
        patch.setattr(Recorder, "close", lambda recorder, state: close(recorder, "stopped"))
        last = run_here(folder / "run.h5", fields, save_models=True, mixed=True)
    return [*paths, last]


def test_every_array_is_read_of_a_run_that_is_not_finished(unfinished, tmp_path, said):
    for t, path in enumerate(unfinished):
        with Result(path) as result:
            assert result.state.startswith("stopped") and result.last_round == min(t, T)
            arrays = [result[name] for name in {*schema.OVER_ROUNDS} & {*result.arrays()}]
            assert {len(array) for array in arrays} == {min(t, T) + 1}
            assert len(result.by_round()["edges"]) == min(t, T) + 1
    with Result(unfinished[-1]) as result:
        assert {name for name in result.arrays() if len(result[name].shape)} == set(schema.ARRAYS)
        assert result["round/there"].dtype == bool and not result["round/there"].all()
        assert result.names.tolist() == list("uvwxyz") and result.groups.tolist() == list("éféféf")
    assert "stopped after round" in said(show.main, unfinished[2])
    for form, lines in (("csv", 1 + 3 * 3 * N), ("clients", 1 + N)):
        said(export.main, unfinished[2], "--format", form, "--out", tmp_path / form)
        assert len((tmp_path / form).read_text().splitlines()) == lines
    others = Result.by_round, lambda it: it.chosen(1), lambda it: it.state_dict(0)
    shutil.copy(unfinished[-1], path := tmp_path / "wrong.h5")
    for name in schema.ARRAYS:
        with h5py.File(path, "r+") as file:
            values = file[name][()]
        is_text = schema.ARRAYS[name].kinds == schema.KINDS["text"]
        texts = np.zeros(values.shape) if is_text else np.full(values.shape, b"x")
        for wrong in (values[None], texts, values.flat[0], values):
            with h5py.File(path, "r+") as file:
                del file[name]
                file[name] = wrong
            if wrong is values:
                with Result(path) as closed:
                    pass
                assert repr(closed) == f"<closed result {path}>"
                continue
            if name == "meta/starts":
                refused(f"{path} is ", Result, path)
                continue
            with Result(path) as result:
                refused(f"{path} is damaged: {name} ", result.__getitem__, name)
                if name in schema.OVER_ROUNDS:
                    refused(f"{path} is damaged: {name} ", lambda it: it.last_round, result)
                for read in others if np.shape(wrong) == () else ():
                    with contextlib.suppress(UserError):
                        read(result)


def test_where_a_user_meets_the_scores(result, path, tmp_path, said):
    allowed = "allowed are accuracy, balanced_accuracy, macro_f1, auc"
    refused(f"there is no score f1; {allowed}", result.score, "f1")
    by_class = list(METRICS)[1:]
    balanced, f1, area = (100 * np.nanmean(result.score(m)) for m in by_class)
    line = f"balanced accuracy {balanced:.2f} %, macro F1 {f1:.2f} %, AUC {area:.2f} %"
    assert line in said(show.main, path).replace("\n" + " " * 23, " ")
    said(export.main, path, "--format", "clients", "--out", tmp_path / "c.csv")
    rows = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    for metric, column in zip(by_class, (*by_class[:2], "best_test_auc"), strict=True):
        assert [row[column] for row in rows] == [export.text(x) for x in result.score(metric)]
    rng = np.random.default_rng(0)
    truth = [rng.choice(rng.choice(5, rng.integers(1, 6), replace=False), 30) for _ in range(20)]
    taken = [np.where(rng.random(30) < 0.6, y, rng.integers(0, 5, 30)) for y in truth]
    both = list(zip(truth, taken, strict=True))
    confusion = np.array([np.bincount(5 * y + p, minlength=25).reshape(5, 5) for y, p in both])
    assert (confusion.sum(2) == 0).any(), "clients without some class"
    macro_f1 = functools.partial(f1_score, average="macro")
    theirs = {"balanced_accuracy": balanced_accuracy_score, "macro_f1": macro_f1}
    assert ["accuracy", *theirs, "auc"] == list(METRICS)
    for metric, function in theirs.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that are predicted and not there
            expected = [function(y, p) for y, p in both]
        np.testing.assert_allclose(score(confusion, metric), expected, rtol=1e-12)
        assert np.isnan(score(np.zeros((3, 3)), metric))
    for y in truth:
        logits = rng.integers(0, 3, (len(y), 5)).astype(np.float32) + (y[:, None] == np.arange(5))
        p = np.exp(logits.astype(float) - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)  # as there, so that ties are ties
        classes = np.unique(y)
        areas = [roc_auc_score(y == c, p[:, c]) for c in classes if len(classes) > 1]
        assert auc(logits, y) == pytest.approx(np.mean(areas or np.nan), nan_ok=True, rel=1e-9)
