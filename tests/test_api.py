"""The program in Python: numbers as on the command line, mistakes, tables, and models of images."""

import contextlib
import functools
import io
import os
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import starts
import tiny_result
import torch
from launch import ROOT, refused, run_here, text_file
from sklearn.metrics import confusion_matrix, roc_auc_score
from torch import nn

import dpfl_mpi
from dpfl_mpi import api
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.datasets import digits
from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi import launcher
from dpfl_mpi.objects import ARRAYS
from dpfl_mpi.storage.lock import born

FIELDS = {"clients": 6, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": 3, "seed": 4}
pytestmark = pytest.mark.usefixtures("terminal")


@pytest.fixture(scope="module")
def computed(tmp_path_factory, terminal):
    """The result of a call with two ranks, and what it printed."""
    folder = tmp_path_factory.mktemp("api")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = dpfl_mpi.run(ranks=2, results=folder, save_models=True, **FIELDS)
    return result, printed.getvalue()


def test_a_call_computes_what_the_command_computes(computed, tmp_path, capfd, monkeypatch):
    result, printed = computed
    assert result.finished and result.starts()[0]["ranks"] == 2
    assert printed.count("/2 ") == 3
    assert f"test accuracy        {100 * result.test_acc:.2f} %" in printed
    assert starts.same(result.path, run_here(tmp_path / "run.h5", FIELDS, save_models=True))
    result, _ = computed
    before = os.stat(result.path).st_mtime_ns
    fields = FIELDS | {"clients": np.int64(6), "results": result.path.parent}
    monkeypatch.setattr(api.subprocess, "Popen", None)  # a finished one starts no ranks
    again = dpfl_mpi.run(ranks=1, quiet=True, **fields)
    assert again.path == result.path and os.stat(again.path).st_mtime_ns == before
    assert capfd.readouterr() == ("", "")
    result, _ = computed
    axes, _ = api.plot(result).axes
    last = 100 * result.mean("round/test_acc")[-1]
    assert axes.get_lines()[0].get_ydata()[-1] == pytest.approx(last)
    assert len(api.plot(result, "graph_evolution", rounds=[0, 2]).axes) == 2
    refused("plot takes a result, not 'a.h5'", api.plot, "a.h5")
    refused("there is no figure curve", api.plot, result, "curve")
    refused("accuracy_table is a table", api.plot, result, "accuracy_table")


X, Y = np.zeros((40, 4)), np.arange(40) % 2
RANKS = "; allowed is a whole number of at least 1"
ARRAYS = f"; allowed are {ARRAYS}"


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"metod": "dpfl"}, "there is no setting metod; did you mean method?"),
    ({"config": "a.yaml"}, "there is no setting config; `python -m dpfl_mpi --help` lists all"),
    ({"xyzzy": 1}, "there is no setting xyzzy"),
    ({"lr": float("inf")}, "--lr is inf; allowed is a number above 0"),
    ({"clients": True}, "--clients is True; allowed is a whole number of at least 1"),
    ({"overlap": 1}, "--overlap is 1; allowed is true or false"),
    ({"tie": None}, "--tie is None; allowed are latest, earliest"),
    ({"ranks": 0}, "ranks is 0" + RANKS),
    ({"ranks": "8"}, "ranks is '8'" + RANKS),
    ({"data": (X,)}, "data is a tuple" + ARRAYS),
    ({"data": (X, Y, Y, Y, Y)}, "data is a tuple" + ARRAYS),
    ({"data": (X, [[1], [1, 2]] * 20)}, "data is a tuple" + ARRAYS),
    ({"data": [X, Y]}, "data is a list" + ARRAYS),
    ({"data": (X, Y[:-1])}, "the data: y is int64 of (39,); one number or name per sample is "),
    ({"model": dict}, "model is dict, whose source is not known; write a file"),
    ({"data": (X, Y), "results": 5}, "--results is 5; allowed is a text"),
])  # fmt: skip
def test_a_mistake_starts_and_writes_nothing(tmp_path, monkeypatch, settings, sentence):
    monkeypatch.setattr(api.subprocess, "Popen", None)
    error = refused("", dpfl_mpi.run, **{"results": tmp_path, **settings})
    assert error.startswith(sentence) and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda result: dpfl_mpi.run(clients=0), "--clients is 0; allowed is a whole number "),
    (lambda result: api.sweep(clients=[0]), "--clients is 0; allowed is a whole number "),
    (lambda result: dpfl_mpi.Result(5), "5 is no path of a result"),
    (lambda result: result.model("1"), "client '1' is not in"),
    (lambda result: result.state_dict(1.0), "client 1.0 is not in"),
    (lambda result: result.graph("1"), "round '1' is not in"),
    (lambda result: result.graph(1.0), "round 1.0 is not in"),
    (lambda result: api.plot(result, "omega", draws=2.5), "--draws: invalid int value"),
    (lambda result: api.plot(result, "graph_evolution", rounds="all"), "--rounds: 'all'; allowed"),
    (lambda result: api.plot(result, "graph_evolution", round=[0]), "unrecognized arguments: --ro"),
    (lambda result: result[5], "has no 5; it has best/"),
    (lambda result: result.score("f1"), "there is no score f1; allowed are accuracy, "),
    (lambda result: api.table(["nowhere.h5"]), "nowhere.h5: there is no such result file"),
])  # fmt: skip
def test_a_mistake_shows_one_frame_of_the_package(computed, call, sentence):
    with pytest.raises(UserError) as error:
        call(computed[0])
    assert sentence in str(error.value)
    paths = {frame.name: str(frame.path).removeprefix(str(ROOT)) for frame in error.traceback}
    assert [name for name, path in paths.items() if "dpfl_mpi/" in path] == ["wrapper"]
    assert error.value.__suppress_context__


def test_an_error_and_a_crash_of_the_ranks(tmp_path, capfd, monkeypatch):
    error = refused("", dpfl_mpi.run, ranks=2, model="cnn", results=tmp_path, **FIELDS)
    assert error.startswith("--model cnn needs images of at least 16x16, these are 8x8")
    assert capfd.readouterr().err == ""
    broken = "import dpfl_mpi.methods.dpfl as m\nm.init = lambda fed: 1 / 0\n"
    (tmp_path / "sitecustomize.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    why = "the run ended with exit code 1; it printed why"
    refused(why, dpfl_mpi.run, ranks=1, results=tmp_path, **FIELDS)
    assert "ZeroDivisionError: division by zero" in capfd.readouterr().err


def test_mpirun_is_found_beside_the_interpreter(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # as the kernel of a notebook may start
    assert launcher.candidates() == [[os.path.join(os.path.dirname(sys.executable), "mpirun")]]
    for name, value in (("PMI_RANK", "0"), ("OMPI_COMM_WORLD_RANK", "0"), ("PMI_SIZE", "2")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            refused("dpfl_mpi.run starts the ranks itself; start this script without", dpfl_mpi.run)


SCRIPT = """
import sys, dpfl_mpi
dpfl_mpi.run(ranks=2, out=sys.argv[1], **eval(sys.argv[2]))
"""


def test_ctrl_c_ends_the_ranks_and_the_call_goes_on_later(tmp_path):
    out, fields = tmp_path / "run.h5", starts.small(rounds=300, checkpoint_every="1")
    process = starts.begin([sys.executable, "-c", SCRIPT, str(out), repr(fields)])
    starts.wait_for(lambda: starts.checkpoint_rounds(out), process)
    below = starts.children(process.pid)
    assert len(below) >= 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    *_, t = starts.checkpoint_rounds(out)
    stopped = f"stopped after round {t} of 300 (SIGUSR1)"
    assert f"{stopped}; the same command goes on from there" in errors
    starts.wait_for(lambda: not any(map(born, below)), timeout=10)


@pytest.fixture
def tiny(tmp_path):
    return dpfl_mpi.Result(tiny_result.make(tmp_path / "tiny.h5"))


def test_one_row_per_client_and_per_round(tiny, tmp_path, monkeypatch):
    frame = tiny.to_pandas()
    assert frame.index.tolist() == [0, 1, 2, 3] and frame.index.name == "client"
    for name in ("best_test_acc", "last_test_acc"):
        assert frame[name].tolist() == [0.8, 0.6, 1.0, 0.4]
    assert frame["n_train"].tolist() == [10] * 4 and frame["p"].tolist() == [0.25] * 4
    assert frame["collaborators"].tolist() == [2, 0, 1, 0]  # in round 2
    assert frame["models_received"].tolist() == [2 * 2 + 1 + 2, 2 * 1, 2 * 2 + 1 + 1, 0]
    # these are more than a number per client
    assert "class_counts" not in frame and "confusion" not in " ".join(frame.columns)
    path = tiny_result.make(tmp_path / "drift.h5", drift="0.5:1")
    with h5py.File(path, "r+") as file:
        file["client/drift_classes"] = np.array([0, 2])
        file["client/drifted"] = np.array([True, False, True, False])
    frame = dpfl_mpi.Result(path).to_pandas()
    assert frame["drifted"].tolist() == [True, False, True, False] and "drift_classes" not in frame
    frame = tiny.curves()
    assert frame.index.tolist() == [0, 1, 2] and frame.index.name == "round"
    assert frame["test_acc"].tolist() == pytest.approx([0.5, 0.6, 0.7])
    assert frame["epochs"].tolist() == [10, 15, 20] and frame["edges"].tolist() == [5, 2, 3]
    assert frame["models_received"].tolist() == [2.5, 0.5, 0.75]
    # of a mean rank: three quarters of 1 + 2 + ... + 6
    assert frame["seconds"].tolist() == [15.75] * 3
    tiny_result.empty(tmp_path / "run.h5", dpfl_mpi.settings.run.Run().resolve())
    result = dpfl_mpi.Result(tmp_path / "run.h5")
    assert len(result.curves()) == len(result.to_pandas()) == 0
    assert "finished, test accuracy not known yet" in repr(result)
    monkeypatch.setitem(sys.modules, "pandas", None)
    refused("a table needs pandas: pip install pandas", result.curves)


@pytest.mark.parametrize("small, saved", [(1e8, True), (1e3, False)])
def test_small_models_are_saved_unasked(small, saved, result_of, monkeypatch):
    monkeypatch.setattr("dpfl_mpi.plan.needs.SMALL_MODEL", small)
    fields = {"clients": 4, "rounds": 0, "tau_init": 1, "method": "local"}
    a, b = result_of(fields), result_of(fields, save_models=False)
    assert ("model/best" in a) == saved and "model/best" not in b and a.key == b.key
    assert {*dpfl_mpi.Result.differences(a, b)} <= {"model/best"}


def test_models_of_a_result(computed, tiny, tmp_path):
    refused("holds no models; a run with --save_models ends with them", tiny.model, 0)
    for client in (-1, 6):
        sentence = f"client {client} is not in ...; allowed are 0 to 5"
        refused(sentence, computed[0].model, client)
    run = "dpfl on digits, pathological, 4 clients, B_c = 3, 2 rounds, seed 42"
    assert repr(tiny) == f"<{run}: finished, test accuracy 70.00 %, {tmp_path}/tiny.h5>"
    tiny.file.close()
    arrays = lambda: tiny["best/test_acc"], lambda: tiny.listed("mean")
    for read in (tiny.arrays, tiny.omega, tiny.starts, tiny.to_pandas, *arrays):
        refused("tiny.h5 is closed, so nothing is read from it", read)
    result, _ = computed
    arrays, partition = digits.load(), deal(result.run, result.source)
    biases = set()
    for k in range(FIELDS["clients"]):
        rows = partition.of("test", k)
        images, labels = arrays.test_images[rows], arrays.test_labels[rows]
        assert images.dtype == np.uint8 and images.shape[1:] == (8, 8, 1)
        model = result.model(k)
        assert isinstance(model, torch.nn.Module) and not model.training
        with torch.no_grad():
            logits = model(torch.from_numpy(images))
            predicted = logits.argmax(1).numpy()
        p, there = logits.double().softmax(1).numpy(), np.unique(labels)
        areas = [roc_auc_score(labels == c, p[:, c]) for c in there]
        assert result["best/test_auc"][k] == pytest.approx(np.mean(areas), abs=1e-3)
        assert (predicted == labels).mean() == result["best/test_acc"][k]
        confusion = confusion_matrix(labels, predicted, labels=range(10))
        assert np.array_equal(confusion, result["best/confusion"][k])
        biases.add(tuple(model.network.head.bias.tolist()))
    assert len(biases) == 6  # each client has its own
    # Floats from 0 to 1 would be almost black; channels first would be rows.
    model = computed[0].model(0)
    images = torch.zeros(3, 8, 8, 1, dtype=torch.uint8)
    assert model(images).shape == model(images.long().numpy()).shape == (3, 10)
    takes = "it takes samples as the data hold them: whole numbers from 0 to 255, [S, H, W, 1]"
    for odd in (images / 255, images.movedim(-1, 1), images[0]):
        kind = f"{str(odd.dtype).removeprefix('torch.')} {list(odd.shape)}"
        assert refused(kind, model, odd) == f"the model was given {kind}; {takes}"


WEIGHTS = np.ones(2)


def quarter(fed, state, t):
    w = fed.local_opt(state["client"]["w"], epochs=fed.run.tau_train)
    fed.evaluate(w)
    return {"client": {"w": w.lerp(fed.mean(w), 0.25)}, "shared": {}}


def still(fed, state, t):
    return state


BY_HAND = """
from dpfl_mpi.methods.local import init

def round(fed, state, t):
    w = fed.local_opt(state["client"]["w"], epochs=1)
    fed.evaluate(w)
    return {"client": {"w": w + (fed.mean(w) - w) * 0.25}, "shared": {}}
"""
LINEAR = "nn.Sequential(nn.Flatten(), nn.Linear(16, classes))"
NET = f"from torch import nn\n\ndef build(shape, classes):\n    return {LINEAR}\n"


def weighted(fed, state, t):
    return state if WEIGHTS.any() else {}


def around(part=None):
    def inner(fed, state, t):
        return part

    return inner


class Small(nn.Module):
    HEAD = "head"

    def __init__(self, shape, classes):
        super().__init__()
        self.head = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x):
        return self.head(x.flatten(1))


def test_functions_classes_and_arrays_are_files(tmp_path, monkeypatch, result_of):
    y = np.arange(240) % 4
    noise = np.random.default_rng(0).integers(0, 60, (240, 4, 4), np.uint8)
    data = noise + 40 * y[:, None, None].astype(np.uint8), y, np.arange(240) % 3
    few = {"rounds": 2, "tau_train": 1, "results": str(tmp_path)}
    given = {"method": quarter, "model": Small, "data": data} | few
    fields = api.as_files(given)
    assert api.as_files(given) == fields and len([*tmp_path.rglob("*.*")]) == 3
    by_hand = text_file(tmp_path / "by_hand.py", BY_HAND)
    net = text_file(tmp_path / "net.py", NET)
    del few["results"], fields["results"]
    a = result_of(api.plain(fields))
    b = result_of(api.plain(fields | {"method": by_hand, "model": net}))
    assert a.run.clients == 3 and str(a.run.partition) == "natural"
    np.testing.assert_allclose(a["round/test_loss"], b["round/test_loss"], rtol=1e-5)
    assert a["round/test_loss"][2].std() > 0 and a.key["method"] != b.key["method"]
    assert api.as_files(given | {"method": still})["method"] != fields["method"]
    assert api.as_files({"method": starts})["method"] == starts.__file__  # a module


def test_a_file_that_was_changed_is_not_executed(tmp_path):
    given = {"method": quarter, "results": tmp_path}
    path = Path(api.as_files(given)["method"])
    path.write_text("import os\n")
    assert refused("", dpfl_mpi.run, ranks=1, **given) == f"{path} was changed; remove it"


def test_the_data_of_a_model_are_those_of_its_run(tmp_path):
    """Here pixels were changed in the file, but not their hash."""
    x, i = np.random.default_rng(0).integers(0, 256, (80, 4), np.uint8), np.arange(80)
    few = {"rounds": 1, "tau_init": 1, "tau_train": 1, "ranks": 1, "quiet": True}
    result = dpfl_mpi.run(data=(x, i % 2, i // 2 % 4), results=tmp_path, **few)
    with h5py.File(result.run.data, "r+") as file:
        file["train/images"][:] = 0
    refused("its content has the sha256 ", result.model, 0)


@pytest.mark.parametrize(("method", "sentence"), [
    (weighted, "method is weighted, which uses WEIGHTS from outside; define or import it inside"),
    (around(), "method is inner, which uses part from outside; define or import it inside"),
    (lambda fed, state, t: state, "method is a lambda; write it as a function by def"),
    (functools.partial(quarter), "method is an object of partial; give a function of fed, "),
])  # fmt: skip
def test_what_no_file_can_say_is_refused(tmp_path, method, sentence):
    assert refused(sentence, dpfl_mpi.run, method=method, results=tmp_path).startswith(sentence)
    assert [*tmp_path.iterdir()] == []


def test_a_sweep_is_every_combination(monkeypatch):
    monkeypatch.delattr(dpfl_mpi, "api")  # as before anything of it was used
    monkeypatch.setattr(dpfl_mpi.api, "run", lambda **settings: tuple(settings.values()))
    results = api.sweep(method=["local", "apfl"], clients=3, seed=range(1, 3))
    assert results == [(m, 3, s) for m in ("local", "apfl") for s in (1, 2)]
    monkeypatch.setattr(dpfl_mpi.api, "run", Mock(side_effect=AssertionError))
    refused("--seed is 'x'; allowed", api.sweep, seed=[1, "x"], ranks=1)
    refused("out is for one Run; of a sweep, name", api.sweep, seed=[1, 2], out="a.h5")
