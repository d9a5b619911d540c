"""Sweeps on this machine: Runs that finish, fail, are interrupted, or are shared with other sweeps; and what is known of each."""

import contextlib
import errno
import io
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import own
import pytest
import starts
from starts import base_and_tuned, lines, runs_file, script, submitted

from dpfl_mpi.results import Result
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Run
from dpfl_mpi.storage.lock import Lock, born
from dpfl_mpi.sweep import here, known, table

SWEEP = (sys.executable, "-m", "dpfl_mpi.sweep")


@pytest.fixture
def mpirun(fakes) -> Path:
    """The folder of an mpirun that computes nothing until it is asked to leave."""
    hear = f'trap "echo $$ >> {fakes}/left; exit 75" USR1; echo "mpirun $*" >> {fakes}/up'
    script(fakes / "mpirun", f"{hear}\nfor i in $(seq 600); do sleep 0.1; done")
    return fakes


# whole Runs --------------------------------------------------------------------------------------------------------------
@pytest.mark.timeout(600)
def test_a_base_comes_first_and_its_models_are_kept(tmp_path, swept):
    """FedAvg and FedAvg+FT: the rounds are computed once, and the tuned Run copies them, seconds included."""
    fields = starts.small(method="fedavg", rounds=2)
    words = [base_and_tuned(tmp_path / "table.py", **fields), "--max_parallel=2", "--no-save_models"]
    done = swept(*words, rounds=2)
    assert done.code == 0 and "2 finished of 2" in done.out
    tuned, base = (Run(**fields, finetune_epochs=e).resolve().path(tmp_path) for e in (1, 0))
    with Result(tuned) as one, Result(base) as two:
        assert "model/best" in two and "model/best" not in one
        assert (one["seconds/train"][: len(two["seconds/train"])] == two["seconds/train"]).all()
        assert [len(result.starts()) for result in (one, two)] == [1, 1]
    assert swept(*words, rounds=2).code == 0  # nothing is computed twice
    assert swept(*words, "--dry_run", rounds=2).out == "nothing to submit; --list says how far the Runs are\n"
    for more, said in (("--mixed", "was computed without --mixed; "), ("--seed=1", "--seeds and --seed are given; ")):
        assert said in swept(*words, more, "--seeds=1" if "seed" in more else "--list", rounds=2).err
    assert len(list(tmp_path.glob("sweeps/*"))) == 1


def test_a_tuned_run_is_not_begun_where_its_base_failed(tmp_path, swept, fakes):
    script(fakes / "mpirun", 'echo "error: client 2 diverged in round 1" >&2; exit 2')
    done = swept(base_and_tuned(tmp_path / "table.py"))
    assert done.code == 1
    assert re.search(r"is not begun: it goes on from \S+, failed\n", done.out)
    assert "1 failed, 1 missing of 2" in done.out
    assert "error: client 2 diverged in round 1\n" in done.out  # of the log


def test_debug_computes_one_after_the_other_and_goes_on_after_a_failure(tmp_path, swept):
    fields = starts.small(rounds=1, method="local")
    file = runs_file(tmp_path / "two.py", fields | {"lr": 1e15}, fields)
    done = swept(file, "--cluster", "debug", rounds=1)
    assert done.code == 1
    assert done.err.count("diverged in round 1") == done.err.count("ended with exit code 2") == 1
    first, second = (m.start() for m in re.finditer("--- image_folder-pathological-local-", done.out))
    own = done.out.rindex("local on image_folder")  # what the Run itself prints at its end
    assert first < second < own < done.out.index("1 failed, 1 finished of 2")
    again = swept(file, "--cluster", "debug", "--list", rounds=1)
    assert again.code == 1 and "---" not in again.out and "1 failed, 1 finished of 2" in again.out


def test_threads_of_the_ranks_and_a_damaged_result(tmp_path, swept, fakes):
    script(fakes / "mpirun", f'echo "$OMP_NUM_THREADS" >> {fakes}/threads')
    file = runs_file(tmp_path / "one.py", fields := starts.small(rounds=1, method="local"))
    (path := Run(**fields).resolve().path(tmp_path)).write_text("not a result")
    done = swept(file, "--list", rounds=1)
    assert done.code == 1 and re.search(rf"{path.stem} is unreadable:\n.*{path} is not a result of dpfl_mpi", done.out)
    path.unlink()
    swept(file, "--cpus", "2", rounds=1)
    assert lines(fakes / "threads") == ["2"]


@pytest.mark.parametrize("cluster", ["local", "debug"])
def test_a_run_whose_time_is_up_has_stopped_and_not_failed(tmp_path, swept, mpirun, monkeypatch, cluster):
    """A tuned Run is then not begun: it would compute the rounds of its base again."""
    monkeypatch.setattr(here, "minutes", lambda _: 0.02)
    done = swept(base_and_tuned(tmp_path / "table.py"), "--cluster", cluster, "--time", "1")
    assert "2 missing of 2" in done.out and "fail" not in done.out + done.err  # it left no file
    assert re.search(r"is not begun: it goes on from \S+, missing\n", done.out) and len(lines(mpirun / "up")) == 1


def test_ctrl_c_lets_running_runs_keep_a_checkpoint(tmp_path, swept):
    """One line, a checkpoint, and the same command goes on. Round 3 waits for the signal, as long as there is a file `hold`."""
    hold = str(tmp_path / "hold")
    condition = f"os.path.exists({hold!r}) and not Heard.at and not open({hold + '.reached'!r}, 'w').close()"
    own.write(tmp_path, held=own.WAITING.format(condition=condition))
    (tmp_path / "hold").touch()
    words = {"method": str(tmp_path / "held.py"), "clients": 4, "budget": 1}
    process = starts.begin([*SWEEP, "--seeds=1,2", "--max_parallel=1", *starts.of_sweep(tmp_path, **words)])
    starts.wait_for((tmp_path / "hold.reached").exists, process)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends
    said = "the Runs keep a checkpoint each; the same command goes on, with --list it says how far they are"
    assert starts.finish(process, 130) == f"interrupted: {said}\n"
    (out,) = tmp_path.glob("*.h5")  # the second was not begun
    assert starts.checkpoint_rounds(out) == [3] and not out.with_name(f"{out.name}.lock").exists()
    with Result(out) as result:
        assert result.state == "stopped after round 3"
    listed = swept("--seeds", "1,2", "--list", **words)
    assert listed.code == 0 and "1 missing, 1 stopped of 2" in listed.out
    (tmp_path / "hold").unlink()
    done = swept("--seeds", "1,2", **words)
    assert done.code == 0 and "2 finished of 2" in done.out, done.err
    assert starts.times_started(out) == 2


def test_two_sweeps_at_once_share_the_runs(tmp_path):
    words = ["--seeds", "1,2", "--max_parallel", "1", *starts.of_sweep(tmp_path, rounds=3)]
    for process in [starts.begin([*SWEEP, *words]) for _ in range(2)]:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
        assert "failed" not in out and err == ""
    paths = sorted(tmp_path.glob("*.h5"))
    assert len(paths) == 2
    for path in paths:
        with Result(path) as result:
            assert result.finished and len(result.starts()) == 1


# how a sweep ends early --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_an_interrupt_that_a_destructor_drops_is_raised_later(monkeypatch, number):
    """Python ignores what is raised in `__del__`, KeyboardInterrupt too; the next look at the Runs raises it."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: dropped.append(lost.exc_type))

    class Caught:
        def __del__(self):
            # no real one: runs of this process would hear it, too
            signal.getsignal(number)(number, None)

    with pytest.raises(KeyboardInterrupt), table.ended_as_by_ctrl_c():
        assert not table._arrived  # a second sweep of the process starts without the first one's signal
        Caught()
        assert dropped == [KeyboardInterrupt]
        table.follow([], table.Live(sys.stdout), known.Queue([]), 0.0, lambda: True)


def test_an_interrupted_sweep_names_a_command_that_goes_on(swept, monkeypatch):
    monkeypatch.setattr(here, "Computing", Mock(side_effect=KeyboardInterrupt))
    done = swept("--seeds", "1")
    assert done.code == 130 and "checkpoint each; the same command goes on, with --list" in done.err
    done = swept("--seeds", "1", "--fresh")
    assert done.code == 2 and "--fresh is for one Run" in done.err


def test_on_a_full_disk_the_runs_are_asked_to_leave(swept, mpirun, monkeypatch):
    """The second Run is begun, and cannot be noted any more: neither goes on unattended, and one sentence says why."""
    real, notes = known.replacing, []

    def replacing(path: Path) -> Any:
        notes.append(path)
        if len(notes) > 1:
            starts.wait_for(lambda: len(lines(mpirun / "up")) == 2, timeout=30)
            raise OSError(errno.ENOSPC, "full", str(path))
        return real(path)

    monkeypatch.setattr(known, "replacing", replacing)
    done = swept("--seeds", "1,2", "--max_parallel", "2", "--ranks", "3")
    assert done.code == 2 and len(set(lines(mpirun / "left"))) == 2
    # Open MPI would put one or two ranks of every mpirun on the same core
    assert lines(mpirun / "up")[0].startswith(f"mpirun --bind-to none -n 3 {sys.executable} -m dpfl_mpi ")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert done.err.endswith("jobs.json, the list of jobs of this sweep, cannot be written: No space left on device\n")


def test_mpirun_may_be_beside_python_and_without_one_that_is_said(swept, fakes, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # of an environment that was not activated
    monkeypatch.setattr(sys, "executable", str(fakes / "python"))
    done = swept("--seeds", "1")
    assert (done.code, done.err) == (2, "error: mpirun cannot be started: No such file or directory\n")
    script(fakes / "mpirun", f'echo "$SLURM_OVERLAP $*" > {fakes}/up; exit 2')
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # or one Run of a job would wait for the cores of the other
    assert swept("--seeds", "1").code == 1 and lines(fakes / "up")[0].startswith("1 --bind-to none -n 1 ")


# beside jobs on Slurm ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cluster", ["local", "debug"])
@pytest.mark.usefixtures("no_blind_time")
def test_a_base_that_fails_on_slurm_meanwhile_is_not_waited_for(tmp_path, swept, mpirun, pauses, cluster):
    submitted(tmp_path, starts.small(method="fedavg"), "39")
    (mpirun / "queue").write_text("39 39_N/A\n")

    def sleep(_: float) -> None:
        assert sum(slept) < 5 * known.ASK_S, "it waits for ever"
        (mpirun / "queue").write_text("")

    slept = pauses(sleep)
    done = swept(base_and_tuned(tmp_path / "t.py", **starts.small()), "--cluster", cluster)
    assert done.code == 1 and "is not begun: it goes on from " in done.out and ", failed\n" in done.out
    assert "1 failed, 1 missing of 2" in done.out
    assert sum(slept) == known.ASK_S and not (mpirun / "up").exists()


# what is known of a Run --------------------------------------------------------------------------------------------------
def test_a_stopped_run_is_taken_up_again_and_a_failed_one_is_not(tmp_path, swept):
    """What a sweep ended itself, or a killed run of nobody left behind, waits for the same command; a failure for --retry."""
    words = ["--seeds", "1,2,3"]
    runs = [Run(**starts.small(seed=seed)).resolve() for seed in (1, 2, 3)]
    paths = [run.path(tmp_path) for run in runs]
    for run, path in zip(runs[:2], paths, strict=False):
        Recorder(path, run, {}, {"time": "now"}).abandon()
    Recorder(paths[2], runs[2], {}, {"time": "now"}).file.close()  # of no sweep: killed, so still called running
    begun = {path.name: "999999999" for path in paths[:2]}
    known.Submission("local", begun, dict.fromkeys(begun, "1"), [paths[0].name]).remember(tmp_path / "sweeps" / "1")

    def states() -> list[str]:
        return [line.split()[1] for line in swept(*words, "--list").out.splitlines()[1:4]]

    assert states() == ["stopped", "failed", "stopped"]
    planned = swept(*words, "--dry_run").out
    assert [str(path) in planned for path in paths] == [True, False, True]
    mine = Lock(paths[1])  # another sweep, or somebody's mpirun, computes it now
    mine.acquire()
    assert states() == ["stopped", "running", "stopped"]
    assert str(paths[1]) not in swept(*words, "--retry", "--dry_run").out
    mine.release()


def test_a_process_with_a_used_number_is_not_the_job(tmp_path):
    """Alive is the process that began when the job did; on another host what the lock says. The newest submission counts."""
    path, pid = tmp_path / "a.h5", os.getpid()
    one, times = known.Known(Run().resolve(), path), iter(range(1, 9))

    def recalled(folder: str, job: str, since: str, **more: object) -> known.Known:
        made = known.Submission("local", {"a.h5": job}, {"a.h5": since}, submitted=next(times), **more)
        made.remember(tmp_path / folder)
        known.recall([one], tmp_path)
        assert one.job_id == job
        return one

    assert recalled("b", str(pid), born(pid)).alive(set())
    assert not recalled("a", str(pid), "1").alive(set())
    assert not recalled("b", str(pid), born(pid), host="elsewhere").alive(set())
    mine = Lock(path)
    mine.acquire()
    assert recalled("a", "2", "1").look(set()).state == "running"
    mine.release()


def test_a_result_is_read_again_where_it_was_replaced(tmp_path, monkeypatch):
    """Also within one tick of the file system's clock, by a file of the same size."""
    run = Run(**starts.small()).resolve()
    path, reads = tmp_path / "a.h5", []

    def result(path: Path) -> Any:
        reads.append(path.read_text())
        return contextlib.nullcontext(SimpleNamespace(state=reads[-1].strip(), last_round=3, test_acc=0.5))

    monkeypatch.setattr(known, "result_of", lambda run, path: result(path))
    one = known.Known(run, path)
    for text, state in (("running ", "stopped"), ("finished", "finished")):
        with known.replacing(path) as part:
            part.write_text(text)
            os.utime(part, (1, 1))
        assert [one.look(set()).state for _ in range(3)] == [state] * 3  # it says running, and nobody holds the lock
    assert reads == ["running ", "finished"]
    path.unlink()
    assert one.look(set()).state == "missing"


# the table -----------------------------------------------------------------------------------------------------------------
NONE = float("nan")
LONG = "image_folder-pathological-random_graph-Buniform:2:20-s{}-300df09d"
ROWS = [
    known.Row("digits-pathological-dpfl-B8-s1-0aa53c1e", "finished", 20, 20, 0.973),
    known.Row("digits-pathological-dpfl-B8-s2-93be07f2", "running", 7, 20, 0.9012),
    known.Row("digits-pathological-dpfl-B8-s3-5d7f11c0", "waiting", -1, 20, NONE),
]


def seen(text: str) -> list[str]:
    """Return the screen that a terminal shows after this text: lines, each cleared before, over those that it went up by, and nothing below them."""
    rows: list[str] = []
    first, *later = re.split(r"\x1b\[(\d+)A\r", text)
    for up, drawn in zip(["0", *later[::2]], [first, *later[1::2]], strict=True):
        *cleared, end = drawn.split("\n")
        assert end == "\x1b[J" and all(line.startswith("\x1b[2K") for line in cleared)
        rows = [*rows[: len(rows) - int(up)], *(line.removeprefix("\x1b[2K") for line in cleared)]
    return rows


def test_the_table_word_for_word():
    assert table.lines(ROWS) == [
        "run                                      state     round  test %",
        "digits-pathological-dpfl-B8-s1-0aa53c1e  finished  20/20   97.30",
        "digits-pathological-dpfl-B8-s2-93be07f2  running    7/20   90.12",
        "digits-pathological-dpfl-B8-s3-5d7f11c0  waiting       -       -",
    ]
    assert table.summary(ROWS) == "1 finished, 1 running, 1 waiting of 3"


def test_nothing_is_wider_than_the_terminal_and_the_ends_of_names_stay():
    rows = [known.Row(LONG.format(s), "unreadable", 1234, 5000, 1.0) for s in (1, 2)]
    shown = table.screen(rows, 80, 24)
    assert max(map(len, shown)) == 79  # a full last column would begin a new line on some terminals
    assert shown[1].startswith("…") and "-s1-300df09d  unreadable  1234/5000  100.00" in shown[1]
    assert max(map(len, table.lines(rows))) > 80  # in a log names are whole


def test_a_low_terminal_shows_what_moves():
    states = ["finished"] * 10 + ["running"] * 2 + ["waiting"] * 18
    shown = table.screen([known.Row(f"run{i:02d}", state, -1, 5, NONE) for i, state in enumerate(states)], 80, 10)
    assert len(shown) == 9
    assert [line.split()[0] for line in shown[1:-2]] == ["run10", "run11", "run12", "run13", "run14", "run15"]
    assert shown[-2:] == ["… and 24 more", "10 finished, 2 running, 18 waiting of 30"]


def test_it_is_refreshed_in_place(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr(out := io.StringIO(), "isatty", lambda: True)
    live = table.Live(out)
    live.show(ROWS)
    once = out.getvalue()
    live.show(ROWS)
    assert out.getvalue() == once  # nothing changed, nothing flickers
    later = [ROWS[0], known.Row(ROWS[1].name, "finished", 20, 20, 0.95), known.Row(ROWS[2].name, "running", 0, 20, 0.5)]
    live.show(later)
    assert seen(out.getvalue()) == [*table.lines(later), "2 finished, 1 running of 3"]
    live.end(later[:2])
    assert seen(out.getvalue()) == [*table.lines(later[:2]), "2 finished of 2"]


def test_a_log_gets_changes_of_state_and_the_table_at_the_end():
    out = io.StringIO()
    live = table.Live(out)
    live.show(ROWS)
    live.show([ROWS[0], known.Row(ROWS[1].name, "running", 8, 20, 0.91), ROWS[2]])
    assert out.getvalue() == ""
    ended, begun = (ROWS[1].name, "finished", 20, 20, 0.95), (ROWS[2].name, "running", -1, 20, NONE)
    live.show(later := [ROWS[0], known.Row(*ended), known.Row(*begun)])
    assert [line[10:] for line in out.getvalue().splitlines()] == [
        "digits-pathological-dpfl-B8-s2-93be07f2  finished  round 20/20  test 95.00 %",
        "digits-pathological-dpfl-B8-s3-5d7f11c0  running",
    ]
    live.end(later)
    assert out.getvalue().splitlines()[2:] == [*table.lines(later), "2 finished, 1 running of 3"]
    assert "\x1b" not in out.getvalue()
