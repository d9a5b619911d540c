"""What tells others of each round can change no number, tells each round once, goes on where a log ends, and leaves the run alone where it fails."""

import json
import os
import sys

import numpy as np
import pytest
import tiny_result
from launch import ended, run_many, text_file

from dpfl_mpi.__main__ import main
from dpfl_mpi.engine import beside
from dpfl_mpi.follow import __main__ as follow
from dpfl_mpi.results import Result
from dpfl_mpi.settings.fields import to_flags
from dpfl_mpi.settings.job import LOGS
from dpfl_mpi.survival.signals import Watch

FIELDS = {"clients": 5, "rounds": 4, "tau_init": 1, "tau_train": 1, "budget": 3}
CALLBACK = """
from pathlib import Path
def on_round(result, t):
    import numpy, random, torch  # what a run must not feel
    random.seed(t), numpy.random.seed(t), torch.manual_seed(t), torch.set_default_dtype(torch.float64)
    with Path(__file__).with_suffix(".txt").open("a") as file:
        print(t, float(result.mean("round/test_acc")[t]), file=file)
"""


def told(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_callback_and_a_log_change_no_number_and_have_each_round(tmp_path):
    callback, log = text_file(tmp_path / "mine.py", CALLBACK), tmp_path / "new" / "log.jsonl"
    run_many(2, tmp_path, dict.fromkeys("ab", FIELDS), b={"callback": callback, "log": str(log)})
    with Result(tmp_path / "a.h5") as plain, Result(tmp_path / "b.h5") as result:
        assert Result.differences(plain, result) == []
        means = result.mean("round/test_acc")
        called = [line.split() for line in (tmp_path / "mine.txt").read_text().splitlines()]
        assert [(int(t), float(mean)) for t, mean in called] == list(enumerate(means))
        logged = [(line["round"], line["test_acc"], line["run"]) for line in told(log)]
        assert logged == [(t, mean, "b") for t, mean in enumerate(means)]


def test_a_log_goes_on_where_it_ends(tmp_path):
    """Another start of the same run adds what is missing; another run, and one that began anew, have lines of their own."""
    path, log = tiny_result.make(tmp_path / "a.h5"), tmp_path / "log.jsonl"
    with Result(path) as result:
        last, add = follow.opened(str(log), result)
        assert last == -1
        add(0, {"test_acc": float("nan")})
    seen = []
    follow.follow(path, str(log), lambda result, t: seen.append(t), iter([2, sys.maxsize]))
    assert [line["round"] for line in told(log)] == [0, 1, 2] and told(log)[0]["test_acc"] is None
    assert seen == [2]  # this start has computed round 2 alone
    np.testing.assert_allclose([line["edges"] for line in told(log)[1:]], [2, 3])
    follow.follow(tiny_result.make(tmp_path / "b.h5"), str(log), None, iter([0]))
    assert [(line["run"], line["round"]) for line in told(log)[3:]] == [("b", 0), ("b", 1), ("b", 2)]
    whole = log.read_text()
    log.write_text(whole[:-20])  # as a kill may leave it
    assert follow.main([str(tmp_path / "b.h5"), f"--log={log}"]) == 0 and log.read_text() == whole
    log.write_text("notes")
    assert follow.main([str(path), f"--log={log}"]) == follow.main([str(path)]) == 2 and log.read_text() == "notes"


@pytest.mark.parametrize("log", ["tensorboard", "wandb", "mlflow"])
def test_a_library_logs_each_round_once(log, tmp_path, monkeypatch):
    pytest.importorskip(log, reason=f"{log} is not installed")
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'ml'}")
    words = [sys.executable, "-m", "dpfl_mpi.follow", tiny_result.make(tmp_path / "a.h5"), f"--log={log}"]
    for _ in range(1 if log == "wandb" else 2):  # offline it cannot be read back: the second log would hold all again
        done = ended(*words)
        assert done.returncode == 0, done.stderr
    if log == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        [folder] = (tmp_path / "tensorboard").iterdir()
        assert [e.step for e in EventAccumulator(str(folder)).Reload().Scalars("edges")] == [0, 1, 2]
    elif log == "mlflow":
        import mlflow

        [run] = mlflow.search_runs(experiment_names=["dpfl_mpi"], output_format="list")
        held = mlflow.MlflowClient().get_metric_history(run.info.run_id, "edges")
        assert [(one.step, one.value) for one in held] == [(0, 5), (1, 2), (2, 3)]
    else:
        [folder] = (tmp_path / "wandb").glob("offline-run-*")
        assert [*folder.glob("*.wandb")]


NOT_PLAIN = "--callback is {}, which has no function on_round(result, t), without async or yield"


@pytest.mark.parametrize(("code", "more", "sentence"), [
    ("x = 1", [], NOT_PLAIN),
    ("async def on_round(result, t): pass", [], NOT_PLAIN),
    ("def on_round(result, t): yield t", [], NOT_PLAIN),
    ("import os\nos._exit(0)", [], "--callback={} ended before the run began"),
    ("def on_round(", [], "--callback is {}, which does not compile: '(' was never closed ({}, line 1)"),
    (None, [], "--callback is {}; there is no such file"),
    ("def on_round(result, t): pass", ["--log=x"], f"--log is 'x'; allowed is {LOGS}"),
])  # fmt: skip
def test_a_mistake_is_told_before_the_run_begins(code, more, sentence, tmp_path, said):
    callback = tmp_path / "mine.py"
    if code:
        callback.write_text(code)
    flags = [*to_flags(FIELDS), f"--callback={callback}", *more, f"--out={tmp_path / 'a.h5'}"]
    assert said(main, *flags, code=2) == f"error: {sentence}\n".replace("{}", str(callback))
    assert not (tmp_path / "a.h5").exists()


def test_a_callback_that_fails_leaves_the_run_alone(tmp_path, result_of, capfd):
    callback = text_file(tmp_path / "mine.py", "def on_round(result, t):\n    return 1 / (1 - t)\n")
    result = result_of(FIELDS, callback=callback)
    assert result.finished
    why = f"on_round of {callback} fails: ZeroDivisionError: division by zero ({callback}, line 2)"
    assert capfd.readouterr().err == f"warning: {why}; the run goes on without it\n{incomplete(callback, result.path)}"
    callback = text_file(tmp_path / "long.py", "def on_round(result, t):\n    raise ValueError('x' * 100_000)\n")
    result = result_of(FIELDS, callback=callback)
    assert result.finished
    why = f"on_round of {callback} fails: ValueError: {'x' * 1000} ({callback}, line 2)"
    assert capfd.readouterr().err == f"warning: {why}; the run goes on without it\n{incomplete(callback, result.path)}"


@pytest.mark.parametrize("code", ["import os; os._exit(0)", "raise KeyboardInterrupt"])
def test_a_callback_that_ends_its_process_is_named(code, tmp_path, result_of, capfd):
    callback = text_file(tmp_path / "mine.py", f"def on_round(result, t):\n    {code}\n")
    result = result_of(FIELDS, callback=callback)
    assert result.finished
    assert capfd.readouterr().err == incomplete(callback, result.path)


def test_a_log_that_is_a_pipe_is_refused(tmp_path, said):
    """Nobody may read its other end; a link to a device has no end at all."""
    os.mkfifo(pipe := tmp_path / "pipe.jsonl")
    (device := tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    result = tiny_result.make(tmp_path / "b.h5")
    for log in (pipe, device):
        allowed = "allowed is tensorboard, wandb, mlflow or FILE.jsonl, a regular file\n"
        flags = [*to_flags(FIELDS), f"--log={log}", f"--out={tmp_path / 'a.h5'}"]
        assert said(main, *flags, code=2) == f"error: --log is '{log}'; {allowed}"
        assert said(follow.main, result, f"--log={log}", code=2) == f"error: --log is {log}; {allowed}"


def test_a_slow_callback_is_waited_for_and_named(tmp_path, result_of, capfd, monkeypatch):
    """And --watchdog no longer looks on: the wait is no round that hangs."""
    monkeypatch.setattr(beside, "LEAVING_S", 0.2)
    monkeypatch.setattr(beside, "MORE_S", 20)
    ends = []
    for kind in (beside.Beside, Watch):
        end = kind.__exit__
        monkeypatch.setattr(kind, "__exit__", lambda *all, end=end: ends.append(type(all[0])) or end(*all))
    callback = text_file(tmp_path / "slow.py", "import time\ndef on_round(result, t):\n    time.sleep(100)\n")
    result = result_of(FIELDS, callback=callback, quiet=False)
    assert result.finished and ends == [Watch, beside.Beside]
    out, err = capfd.readouterr()
    assert out.endswith(f"\nwaiting up to 20 s for --callback={callback}\n") and err == incomplete(
        callback, result.path
    )


def test_a_callback_whose_file_does_not_end_is_refused(tmp_path, said, monkeypatch):
    monkeypatch.setattr(beside, "START_S", 3)
    callback = text_file(tmp_path / "slow.py", "import time\ntime.sleep(100)\n")
    flags = [*to_flags(FIELDS), f"--callback={callback}", f"--out={tmp_path / 'a.h5'}"]
    assert said(main, *flags, code=2) == f"error: --callback={callback} did not start in 3 s\n"


def incomplete(callback, result):
    again = f"python -m dpfl_mpi.follow {result} --callback={callback} does it again"
    return f"warning: --callback={callback} did not get through all rounds; {again}\n"
