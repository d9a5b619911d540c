"""A log and a callback change no number and have each round once; a failure is their own."""

import json
import os
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_result
from launch import ROOT, run_many, text_file
from mpi4py import MPI

from dpfl_mpi.__main__ import main
from dpfl_mpi.engine import follow
from dpfl_mpi.mpi.world import World
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job
from dpfl_mpi.settings.fields import to_flags
from dpfl_mpi.settings.job import LOGS

FIELDS = {"clients": 5, "rounds": 4, "tau_init": 1, "tau_train": 1, "budget": 3}
CALLBACK = """
from pathlib import Path
def on_round(result, t):
    import numpy, random, torch  # what a run must not feel
    random.seed(t), numpy.random.seed(t), torch.manual_seed(t)
    torch.set_default_dtype(torch.float64)
    with Path(__file__).with_suffix(".txt").open("a") as file:
        print(t, float(result.mean("round/test_acc")[t]), file=file)
"""


def lines_of(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def followers(path, **job):
    return follow.Followers(path, Job(**job), World(MPI.COMM_SELF))


def test_a_callback_and_a_log_change_no_number_and_have_each_round(tmp_path):
    callback = text_file(tmp_path / "mine.py", CALLBACK)
    log = tmp_path / "new" / "log.jsonl"
    run_many(2, tmp_path, dict.fromkeys("ab", FIELDS), b={"callback": callback, "log": str(log)})
    with Result(tmp_path / "a.h5") as plain, Result(tmp_path / "b.h5") as result:
        assert Result.differences(plain, result) == []
        means = result.mean("round/test_acc")
    called = [line.split() for line in (tmp_path / "mine.txt").read_text().splitlines()]
    assert [(int(t), float(mean)) for t, mean in called] == list(enumerate(means))
    logged = [(line["round"], line["test_acc"], line["run"]) for line in lines_of(log)]
    assert logged == [(t, mean, "b") for t, mean in enumerate(means)]


def test_a_log_goes_on_where_it_ends(tmp_path):
    path, log = tiny_result.make(tmp_path / "a.h5"), tmp_path / "log.jsonl"
    last, add = follow.json_lines(log, Result(path), 0)
    assert last == -1
    means = {"by_round": lambda: {"test_acc": [float("nan")]}, "mean": lambda name: [0.5]}
    add(SimpleNamespace(**means), range(1))
    callback = text_file(tmp_path / "mine.py", CALLBACK)
    followers(path, log=str(log), callback=callback).tell(2)
    assert [line["round"] for line in lines_of(log)] == [0, 1, 2]
    assert lines_of(log)[0]["test_acc"] is None
    assert (tmp_path / "mine.txt").read_text().startswith("2 ")
    np.testing.assert_allclose([line["edges"] for line in lines_of(log)[1:]], [2, 3])
    other = tiny_result.make(tmp_path / "b.h5")
    with followers(other, log=str(log)):
        pass
    added = [(line["run"], line["round"]) for line in lines_of(log)[3:]]
    assert added == [("b", 0), ("b", 1), ("b", 2)]
    whole = log.read_text()
    log.write_text(whole[:-20])  # as a kill may leave it
    followers(other, log=str(log)).tell(2)
    assert log.read_text() == whole


def test_a_file_that_is_no_log_is_left_alone(tmp_path, capfd, said):
    (log := tmp_path / "log.jsonl").write_text("notes")
    followers(tiny_result.make(tmp_path / "a.h5"), log=str(log)).tell(0)
    wrong = f"--log is {log}, which holds other lines than those of a log; name another file"
    assert capfd.readouterr().err == f"warning: {wrong}; the run goes on without it\n"
    assert log.read_text() == "notes"
    os.mkfifo(pipe := tmp_path / "pipe.jsonl")
    (device := tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for log in (pipe, device):
        flags = [*to_flags(FIELDS), f"--log={log}", f"--out={tmp_path / 'a.h5'}"]
        assert said(main, *flags, code=2) == f"error: --log is '{log}'; allowed is {LOGS}\n"


def test_tensorboard_has_each_round_once(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed",
    )
    path = tiny_result.make(tmp_path / "a.h5")
    for _ in range(2):
        followers(path, log="tensorboard").tell(2)
    [folder] = (tmp_path / "tensorboard").iterdir()
    events = accumulator.EventAccumulator(str(folder)).Reload().Scalars("edges")
    assert [(event.step, event.value) for event in events] == [(0, 5), (1, 2), (2, 3)]


@pytest.mark.parametrize("library", ["wandb", "mlflow"])
def test_the_examples_for_other_logs(library, tmp_path, monkeypatch):
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    store = {"MLFLOW_TRACKING_URI": f"file:{tmp_path / 'ml'}", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for name, value in (store | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}).items():
        monkeypatch.setenv(name, value)
    on_round = runpy.run_path(str(ROOT / "examples" / f"to_{library}.py"))["on_round"]
    with Result(tiny_result.make(tmp_path / "a.h5")) as result:
        for t in range(3):
            on_round(result, t)
            if library == "mlflow":  # the next round is one of a run that goes on
                module.end_run()
    if library == "mlflow":
        [run] = module.search_runs(experiment_names=["dpfl_mpi"], output_format="list")
        events = module.MlflowClient().get_metric_history(run.info.run_id, "edges")
        assert [(event.step, event.value) for event in events] == [(0, 5), (1, 2), (2, 3)]
    else:
        module.finish()
        assert len([*tmp_path.glob("wandb/offline-run-*/*.wandb")]) == 1


NOT_PLAIN = "--callback is {}, which has no function on_round(result, t), without async or yield"


@pytest.mark.parametrize(("code", "more", "sentence"), [
    ("x = 1", [], NOT_PLAIN),
    ("async def on_round(result, t): pass", [], NOT_PLAIN),
    ("def on_round(result, t): yield t", [], NOT_PLAIN),
    ("def on_round(", [],
     "--callback is {}, which does not compile: '(' was never closed ({}, line 1)"),
    (None, [], "--callback is {}; there is no such file"),
    ("def on_round(result, t): pass", ["--log=x"], f"--log is 'x'; allowed is {LOGS}"),
])  # fmt: skip
def test_a_mistake_is_a_sentence_before_the_run(code, more, sentence, tmp_path, said):
    callback = tmp_path / "mine.py"
    if code:
        callback.write_text(code)
    flags = [*to_flags(FIELDS), f"--callback={callback}", *more, f"--out={tmp_path / 'a.h5'}"]
    assert said(main, *flags, code=2) == f"error: {sentence}\n".replace("{}", str(callback))
    assert not (tmp_path / "a.h5").exists()


FAILS = "on_round of {} fails: "


@pytest.mark.parametrize(("body", "why"), [
    ("return 1 / (1 - t)", FAILS + "ZeroDivisionError: division by zero ({}, line 3)"),
    ("raise ValueError('x' * 100_000)", FAILS + f"ValueError: {'x' * 1000} ({{}}, line 3)"),
    ("sys.exit(3)", FAILS + "SystemExit: 3 ({}, line 3)"),
    ("raise KeyboardInterrupt", "--callback={}: KeyboardInterrupt: "),
    ("time.sleep(100)", "--callback={} took more than 0.2 s"),
    ("try: time.sleep(100)\n    except Exception: pass", "--callback={} took more than 0.2 s"),
])  # fmt: skip
def test_a_callback_that_fails_is_switched_off(body, why, tmp_path, result_of, capfd, monkeypatch):
    monkeypatch.setattr(follow, "CALL_S", 0.2 if "sleep" in body else 60.0)
    code = f"import sys, time\ndef on_round(result, t):\n    {body}\n"
    callback = text_file(tmp_path / "mine.py", code)
    assert result_of(FIELDS, callback=callback).finished
    why = why.replace("{}", callback)
    assert capfd.readouterr().err == f"warning: {why}; the run goes on without it\n"


def test_a_run_that_is_stopped_waits_less_long(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(follow, "LEAVING_S", 0.2)
    code = "import time\ndef on_round(result, t):\n    time.sleep(100)\n"
    callback = text_file(tmp_path / "mine.py", code)
    leaving = followers(tiny_result.make(tmp_path / "a.h5"), callback=callback)
    ((flag, begin),) = leaving.begins.items()
    leaving.begins[flag] = lambda result, _: begin(result, 2)  # still to be told
    with pytest.raises(RuntimeError), leaving:
        raise RuntimeError
    assert "took more than 0.2 s; the run goes on without it" in capsys.readouterr().err
    assert sys.exc_info()[0] is None
