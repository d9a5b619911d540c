"""Sweeps on this machine: Runs that finish, fail, are interrupted or shared; and their states."""

import contextlib
import errno
import math
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

from dpfl_mpi.errors import REQUEUE
from dpfl_mpi.results import Result
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Run
from dpfl_mpi.storage.lock import Lock, born
from dpfl_mpi.sweep import __main__ as sweep
from dpfl_mpi.sweep import entries, table
from dpfl_mpi.sweep.entries import Entry, Status, Submission, load_submissions

SWEEP = (sys.executable, "-m", "dpfl_mpi.sweep")

LEAVES = """
import os, signal, sys, time
def say(file, words):
    with open(os.path.join(os.path.dirname(__file__), file), "a") as out:
        out.write(words + "\\n")
def leave(*_):
    say("left", str(os.getpid()))
    sys.exit(75)
signal.signal(signal.SIGUSR1, leave)
say("up", " ".join(["mpirun", *sys.argv[1:]]))
time.sleep(60)
"""


@pytest.fixture
def mpirun(fakes) -> Path:
    """The folder of an mpirun that computes nothing until it is told to leave."""
    # a shell may lose a signal that comes while it starts a program
    program = fakes / "leaves.py"
    program.write_text(LEAVES)
    script(fakes / "mpirun", f'exec {sys.executable} -S {program} "$@"')
    return fakes


@pytest.mark.timeout(600)
def test_a_base_comes_first_and_its_models_are_kept(tmp_path, swept):
    fields = starts.small(method="fedavg", rounds=2)
    file = base_and_tuned(tmp_path / "table.py", **fields)
    words = [file, "--max_parallel=2", "--no-save_models"]
    done = swept(*words, rounds=2)
    assert done.code == 0 and "2 finished of 2" in done.out
    tuned, base = (Run(**fields, finetune_epochs=e).resolve().path(tmp_path) for e in (1, 0))
    with Result(tuned) as one, Result(base) as two:
        assert "model/best" in two and "model/best" not in one
        seconds = two["seconds/train"]
        assert (one["seconds/train"][: len(seconds)] == seconds).all()
        assert [len(result.starts()) for result in (one, two)] == [1, 1]
    assert swept(*words, rounds=2).code == 0  # nothing is computed twice
    nothing = "nothing to submit; --list shows the progress of the Runs\n"
    assert swept(*words, "--dry_run", rounds=2).out == nothing
    assert "was computed without --mixed; " in swept(*words, "--mixed", "--list", rounds=2).err
    assert "--seeds and --seed are given; " in swept(*words, "--seed=1", "--seeds=1", rounds=2).err
    assert len(list(tmp_path.glob("sweeps/*"))) == 1


def test_a_tuned_run_is_not_begun_where_its_base_failed(tmp_path, swept, fakes):
    script(fakes / "mpirun", 'echo "error: client 2 diverged in round 1" >&2; exit 2')
    done = swept(base_and_tuned(tmp_path / "table.py"))
    assert done.code == 1 and "1 failed, 1 missing of 2" in done.out
    assert re.search(r"is not begun: it goes on from \S+, failed\n", done.out)
    assert "error: client 2 diverged in round 1\n" in done.out  # of the log


def test_a_sweep_goes_on_after_a_failure(tmp_path, swept):
    fields = starts.small(rounds=1, method="local")
    file = runs_file(tmp_path / "two.py", fields | {"lr": 1e15}, fields)
    done = swept(file, "--max_parallel", "1", rounds=1)
    assert done.code == 1 and "1 failed, 1 finished of 2" in done.out
    assert "diverged in round 1" in done.out  # of the log


def test_threads_of_the_ranks_and_a_damaged_result(tmp_path, swept, fakes):
    script(fakes / "mpirun", f'echo "$OMP_NUM_THREADS" >> {fakes}/threads')
    file = runs_file(tmp_path / "one.py", fields := starts.small(rounds=1, method="local"))
    (path := Run(**fields).resolve().path(tmp_path)).write_text("not a result")
    done = swept(file, "--list", rounds=1)
    wrong = rf"{path.stem} is unreadable:\n.*{path} is not a result of dpfl_mpi"
    assert done.code == 1 and re.search(wrong, done.out)
    path.unlink()
    swept(file, "--cpus", "2", rounds=1)
    assert lines(fakes / "threads") == ["2"]


def test_ctrl_c_lets_running_runs_keep_a_checkpoint(tmp_path, swept):
    hold = str(tmp_path / "hold")
    reached = f"open({hold + '.reached'!r}, 'w').close()"
    condition = f"os.path.exists({hold!r}) and not Heard.at and not {reached}"
    own.write(tmp_path, held=own.WAITING.format(condition=condition))
    (tmp_path / "hold").touch()
    fields = {"method": str(tmp_path / "held.py"), "clients": 4, "budget": 1}
    words = ["--seeds=1,2", "--max_parallel=1", *starts.of_sweep(tmp_path, **fields)]
    process = starts.begin([*SWEEP, *words])
    starts.wait_for((tmp_path / "hold.reached").exists, process)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends
    again = "run the same command again to go on, or with --list to see the progress"
    assert starts.finish(process, 130) == f"interrupted: the Runs keep a checkpoint; {again}\n"
    (out,) = tmp_path.glob("*.h5")  # the second was not begun
    assert starts.checkpoint_rounds(out) == [3]
    assert not out.with_name(f"{out.name}.lock").exists()
    assert Result(out).state == "stopped after round 3"
    listed = swept("--seeds", "1,2", "--list", **fields)
    assert listed.code == 0 and "1 missing, 1 stopped of 2" in listed.out
    (tmp_path / "hold").unlink()
    done = swept("--seeds", "1,2", **fields)
    assert done.code == 0 and "2 finished of 2" in done.out, done.err
    assert starts.times_started(out) == 2


def test_two_sweeps_at_once_share_the_runs(tmp_path):
    words = ["--seeds", "1,2", "--max_parallel", "1", *starts.of_sweep(tmp_path, rounds=3)]
    codes = set()
    for process in [starts.begin([*SWEEP, *words]) for _ in range(2)]:
        out, err = process.communicate(timeout=240)
        codes.add(process.returncode)
        assert "failed" not in out and err == ""
        assert (process.returncode == REQUEUE) == ("1 running" in out)  # by the other one
    assert codes <= {0, REQUEUE} and 0 in codes
    paths = sorted(tmp_path.glob("*.h5"))
    assert len(paths) == 2
    for path in paths:
        with Result(path) as result:
            assert result.finished and len(result.starts()) == 1


SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_an_interrupt_that_a_destructor_drops_is_raised_later(monkeypatch, number):
    """Python ignores what is raised in `__del__`; the next look at the Runs raises it."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: dropped.append(lost.exc_type))

    class Interrupted:
        def __del__(self):
            # no real one: runs of this process would hear it, too
            signal.getsignal(number)(number, None)

    with pytest.raises(KeyboardInterrupt), table.interrupts():
        assert not table._received  # a second sweep starts without the first one's signal
        Interrupted()
        assert dropped == [KeyboardInterrupt]
        table.Monitor([]).watch(0.0, lambda: True)


def test_an_interrupted_sweep_names_a_command_that_goes_on(swept, monkeypatch):
    monkeypatch.setattr(sweep, "Local", Mock(side_effect=KeyboardInterrupt))
    done = swept("--seeds", "1")
    assert done.code == 130 and "a checkpoint; run the same command again to go on" in done.err
    done = swept("--seeds", "1", "--fresh")
    assert done.code == 2 and "--fresh is for one Run" in done.err
    for flag, value in (("--nodes", "2"), ("--time", "60"), ("--sbatch", "partition=gpu")):
        done = swept("--seeds", "1", flag, value)
        assert done.code == 2
        assert f"{flag} is for Slurm; allowed only with --cluster slurm" in done.err


def test_on_a_full_disk_the_runs_are_told_to_leave(swept, mpirun, monkeypatch):
    real, notes = entries.replacing, []

    def replacing(path: Path) -> Any:
        notes.append(path)
        if len(notes) > 1:
            starts.wait_for(lambda: len(lines(mpirun / "up")) == 2, timeout=30)
            raise OSError(errno.ENOSPC, "full", str(path))
        return real(path)

    monkeypatch.setattr(entries, "replacing", replacing)
    done = swept("--seeds", "1,2", "--max_parallel", "2", "--ranks", "3")
    assert done.code == 2 and len(set(lines(mpirun / "left"))) == 2
    # Open MPI would put one or two ranks of every mpirun on the same core
    command = f"mpirun --bind-to none -n 3 {sys.executable} -m dpfl_mpi "
    assert lines(mpirun / "up")[0].startswith(command)
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    why = "the list of jobs of this sweep, cannot be written: No space left on device\n"
    assert done.err.endswith(f"jobs.json, {why}")


def test_mpirun_may_be_beside_python_and_without_one_that_is_said(swept, fakes, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # of an environment that was not activated
    monkeypatch.setattr(sys, "executable", str(fakes / "python"))
    done = swept("--seeds", "1")
    why = "error: mpirun cannot be started: No such file or directory\n"
    assert (done.code, done.err) == (2, why)
    script(fakes / "mpirun", f'echo "$SLURM_OVERLAP $*" > {fakes}/up; exit 2')
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # or one Run of a job waits for the other's cores
    assert swept("--seeds", "1").code == 1
    assert lines(fakes / "up")[0].startswith("1 --bind-to none -n 1 ")


@pytest.mark.usefixtures("no_blind_time")
def test_a_base_that_fails_on_slurm_meanwhile_is_not_waited_for(tmp_path, swept, mpirun, pauses):
    submitted(tmp_path, starts.small(method="fedavg"), "39")
    (mpirun / "queue").write_text("39 39_N/A\n")

    def sleep(_: float) -> None:
        assert sum(slept) < 5 * entries.ASK_S, "it waits for ever"
        (mpirun / "queue").write_text("")

    slept = pauses(sleep)
    done = swept(base_and_tuned(tmp_path / "t.py", **starts.small()))
    assert done.code == 1 and "is not begun: it goes on from " in done.out
    assert ", failed\n" in done.out and "1 failed, 1 missing of 2" in done.out
    assert sum(slept) == entries.ASK_S and not (mpirun / "up").exists()


def test_a_stopped_run_is_taken_up_again_and_a_failed_one_is_not(tmp_path, swept):
    words = ["--seeds", "1,2,3"]
    runs = [Run(**starts.small(seed=seed)).resolve() for seed in (1, 2, 3)]
    paths = [run.path(tmp_path) for run in runs]
    for run, path in zip(runs[:2], paths, strict=False):
        Recorder(path, run, {}, {"time": "now"}).abandon()
    Recorder(paths[2], runs[2], {}, {"time": "now"}).file.close()  # killed: it still says running
    begun = {path.name: "999999999" for path in paths[:2]}
    submission = Submission("local", begun, dict.fromkeys(begun, "1"), [paths[0].name])
    submission.save(tmp_path / "sweeps" / "1")

    def states() -> list[str]:
        return [line.split()[1] for line in swept(*words, "--list").out.splitlines()[1:4]]

    assert states() == ["stopped", "failed", "stopped"]
    planned = swept(*words, "--dry_run").out
    assert [str(path) in planned for path in paths] == [True, False, True]
    lock = Lock(paths[1])  # another sweep, or somebody's mpirun, computes it now
    lock.acquire()
    assert states() == ["stopped", "running", "stopped"]
    assert str(paths[1]) not in swept(*words, "--retry", "--dry_run").out
    lock.release()


def test_a_process_with_a_used_number_is_not_the_job(tmp_path, monkeypatch):
    path, pid = tmp_path / "a.h5", os.getpid()
    entry, times = Entry(Run().resolve(), path), iter(range(1, 9))

    def loaded(folder: str, job: str, since: str, **more: object) -> Entry:
        jobs, begun = {"a.h5": job}, {"a.h5": since}
        Submission("local", jobs, begun, submitted=next(times), **more).save(tmp_path / folder)
        load_submissions([entry], tmp_path)
        assert entry.job == job  # the newest counts
        return entry

    assert loaded("b", str(pid), born(pid)).alive(set())
    assert not loaded("a", str(pid), "1").alive(set())
    assert not loaded("b", str(pid), born(pid), host="elsewhere").alive(set())
    lock = Lock(path)
    lock.acquire()
    assert loaded("a", "2", "1").status(set()).state == "running"
    lock.release()
    # Also within one tick of the file system's clock, by a file of the same size.
    run = Run(**starts.small()).resolve()
    path, reads = tmp_path / "a.h5", []

    def result(path: Path) -> Any:
        reads.append(path.read_text())
        known = {"last_round": 3, "test_acc": 0.5, "warning": ""}
        found = SimpleNamespace(state=reads[-1].strip(), **known)
        return contextlib.nullcontext(found)

    monkeypatch.setattr(entries, "result_of", lambda run, path: result(path))
    entry = Entry(run, path)
    # it says running, and nobody holds the lock
    for text, state in (("running ", "stopped"), ("finished", "finished")):
        with entries.replacing(path) as part:
            part.write_text(text)
            os.utime(part, (1, 1))
        assert [entry.status(set()).state for _ in range(3)] == [state] * 3
    assert reads == ["running ", "finished"]
    path.unlink()
    assert entry.status(set()).state == "missing"


NAMES = [f"digits-pathological-dpfl-B8-{end}" for end in ("s1-0aa53c1e", "s2-93be07f2", "s3-5d7f")]
STATUSES = [
    Status(NAMES[0], "finished", 20, 20, 0.973, "PyTorch computes"),
    Status(NAMES[1], "running", 7, 20, 0.9012),
    Status(NAMES[2], "waiting", -1, 20, math.nan),
]


def test_the_table_word_for_word(capsys):
    assert table.table(STATUSES).splitlines() == [
        "run                                      state     round  test %",
        "digits-pathological-dpfl-B8-s1-0aa53c1e  finished  20/20   97.30",
        "digits-pathological-dpfl-B8-s2-93be07f2  running    7/20   90.12",
        "digits-pathological-dpfl-B8-s3-5d7f      waiting       -       -",
        "1 finished, 1 running, 1 waiting of 3",
        "warning: PyTorch computes (1 of 3)",
    ]
    changes = table.Monitor([])
    changes.show(STATUSES)
    changes.show([STATUSES[0], Status(NAMES[1], "running", 8, 20, 0.91), STATUSES[2]])
    assert capsys.readouterr().out == ""
    ended = Status(NAMES[1], "finished", 20, 20, 0.95)
    changes.show([STATUSES[0], ended, Status(NAMES[2], "running", -1, 20, math.nan)])
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == [
        f"{NAMES[1]}  finished  round 20/20  test 95.00 %",
        f"{NAMES[2]}  running",
    ]


@pytest.mark.parametrize(("words", "at_once"), [
    ("", 8), ("--ranks 3", 2), ("--ranks 2 --cpus 2", 2), ("--threads_per_client 4", 2),
    ("--ranks 99", 1), ("--ranks 3 --max_parallel 5", 5),
])  # fmt: skip
def test_as_many_runs_at_once_as_there_are_cores(words, at_once, swept, monkeypatch):
    made = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    monkeypatch.setattr(sweep.Local, "run", lambda runs: made.append(runs.at_once))
    swept("--seeds", "1", "--device", "cpu", *words.split())
    assert made == [at_once]
