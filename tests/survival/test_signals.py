"""Signals, the end of an allocation, the grace time, hangs and locks: how a run leaves, and with which exit code."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import starts

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job
from dpfl_mpi.survival import lock, signals
from dpfl_mpi.survival.lock import Lock

SLOW = """
import sys, time
from dpfl_mpi import __main__
from dpfl_mpi.methods import dpfl
whole, slow = dpfl.round, {slow}
def round(fed, state, t):
    if t == 3 and fed._parts.world.rank in slow:
        time.sleep(600)
    return whole(fed, state, t)
dpfl.round = round
__main__.main(sys.argv[1:])
"""


class World:
    """A world of one, without MPI."""

    root, rank, size = True, 0, 1
    decide = staticmethod(lambda choose: choose())


def hanging(out: Path, ranks: tuple[int, ...], **job: object) -> list[str]:
    """Return the command line of a run whose round 3 never ends on these ranks."""
    return [sys.executable, "-c", SLOW.format(slow=ranks), *starts.command(out, checkpoint_every=1, **job)[3:]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return starts.here(tmp_path_factory.mktemp("undisturbed") / "run.h5")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_run_after_its_round_with_75(tmp_path, number):
    out, fields = tmp_path / "run.h5", starts.small(rounds=500)
    process = starts.start(2, starts.command(out, fields, checkpoint_every="5min"))
    starts.wait_for(out.exists, process)
    starts.tell(process, number)
    process.send_signal(signal.SIGCONT)  # Slurm does: the flag stays up
    message = starts.finish(process, signals.REQUEUE)
    assert f"({number.name}); the same command goes on from there" in message
    assert len(starts.checkpoint_rounds(out)) == 1
    assert not out.with_name("run.h5.lock").exists()
    with Result(out) as result:
        assert result.state == f"stopped after round {starts.checkpoint_rounds(out)[0]}"


def test_ctrl_c_in_a_terminal_keeps_a_checkpoint(tmp_path):
    if starts.open_mpi():
        pytest.skip("Open MPI's mpirun ends its ranks within a second of Ctrl-C, whatever they do: as after kill -9")
    out, fields = tmp_path / "run.h5", starts.small(rounds=40)
    process, user = starts.start_in_terminal(2, starts.command(out, fields, checkpoint_every="5min", quiet=True))
    starts.wait_for(lambda: starts.recorded(out) >= 2, process)
    os.write(user, b"\x03")  # the terminal sends INT to its whole foreground group, mpirun included
    assert process.wait(timeout=280) == signals.REQUEUE
    (t,) = starts.checkpoint_rounds(out)
    assert f"stopped after round {t} of 40 (SIGINT); the same command goes on from there" in starts.shown(user)
    starts.here(out, fields)
    with Result(out) as result:
        assert len(result.starts()) == 2
    assert starts.same(out, starts.here(tmp_path / "whole.h5", fields))


def test_a_round_that_would_outlast_the_grace_is_replayed(tmp_path, undisturbed):
    out = tmp_path / "run.h5"
    process = starts.start(2, hanging(out, (0, 1), grace=1))
    starts.wait_for(lambda: 2 in starts.checkpoint_rounds(out), process)
    process.send_signal(signal.SIGUSR1)
    message = starts.finish(process, signals.REQUEUE)
    assert "round 3 would outlast --grace 1, stopped at once; the same command replays it" in message
    assert not Path(f"{out}.lock").exists()  # it may go on elsewhere at once
    starts.here(out)
    assert starts.same(out, undisturbed)


def begun(out: Path) -> int:
    """Return how often this run was started, as its results file says."""
    if not out.exists():
        return 0
    with Result(out) as result:
        return len(result.starts())


def test_two_starts_without_progress_are_not_requeued(tmp_path):
    out = tmp_path / "run.h5"
    for number, code in enumerate((signals.REQUEUE, signals.REQUEUE, signals.STALLED), 1):  # the first keeps round 2
        process = starts.start(1, hanging(out, (0,), grace=1))
        starts.wait_for(lambda n=number: begun(out) == n and 2 in starts.checkpoint_rounds(out), process)
        process.send_signal(signal.SIGUSR1)
        message = starts.finish(process, code)
    assert "two starts in a row kept no new checkpoint" in message


def test_the_end_of_the_allocation_counts_as_a_signal(tmp_path, undisturbed):
    out = tmp_path / "run.h5"
    end = str(int(time.time()) + 60)
    process = starts.start(1, hanging(out, (0,), grace=45), {"SLURM_JOB_END_TIME": end})
    message = starts.finish(process, signals.REQUEUE)
    assert message.startswith("end of the allocation: round 3 would outlast")
    assert time.time() < int(end) + 1
    starts.here(out)
    assert starts.same(out, undisturbed)


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ("58", 58),
        ("12:34", 754),
        ("3:02:01", 10921),
        ("2-03:00:10", 183610),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_squeue_says_when_a_job_ends_where_slurm_does_not(tmp_path, monkeypatch, answer, left):
    """Slurm before 23.02 has no SLURM_JOB_END_TIME. A job shorter than --grace leaves half-way."""
    (tmp_path / "squeue").write_text(f'#!/bin/sh\ntest "$3" = 17 && echo "{answer}"; echo asked >> {tmp_path}/asked\n')
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert signals.seconds_left() is None
    assert not (tmp_path / "asked").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert signals.seconds_left() == left
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")  # of an array the last task has the number of all
    assert signals.seconds_left() is None and signals.slurm_job() == "17_3"
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    watch = signals.Watch(Job(grace=100), World)
    usable = left - min(5, left / 10) if left else float("inf")  # what is left is the script's
    assert watch.ends - watch.started == pytest.approx(usable)
    assert watch.grace == min(100, usable / 2)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 5))
    assert 0 < signals.seconds_left() <= 5
    assert (tmp_path / "asked").read_text() == "asked\n" * 3


def test_no_round_is_begun_that_could_not_end(monkeypatch):
    monkeypatch.setattr(signals.Heard, "at", 0.0)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    watch = signals.Watch(Job(), World)
    watch.begin(1)
    watch.started = time.monotonic() - 300
    assert not watch.stop(more=True, spare=5)
    watch.started = time.monotonic() - 1100
    assert not watch.stop(more=False, spare=5)  # nothing follows: finish
    assert watch.stop(more=True, spare=5)
    assert signals.Heard.name == "end of the allocation"


def test_the_watchdog_prints_every_stack_and_ends(tmp_path):
    out = tmp_path / "run.h5"
    process = starts.start(3, hanging(out, (1,), watchdog=10))
    message = starts.finish(process, 1)
    for rank in range(3):
        assert f"rank {rank} of 3 has not finished round 3 in 10 s" in message
    assert "time.sleep" in message or "in round" in message
    assert starts.checkpoint_rounds(out) == [1, 2]


# the lock ------------------------------------------------------------------------------------------------------------------
def test_what_came_before_the_first_round_tells_nothing_about_its_length(monkeypatch):
    for first in (0, 1, 8):  # a new run, one without preprocessing, one that goes on
        watch = signals.Watch(Job(), World)
        watch.started = time.monotonic() - 40  # reading data
        watch.begin(first)
        assert watch.last == 0
        watch.started -= 3
        watch.begin(first + 1)
        assert watch.last == (pytest.approx(3, abs=0.5) if first else 0)


def test_a_second_run_is_refused_while_the_first_lives(tmp_path):
    first, out = Lock(tmp_path / "run.h5"), tmp_path / "run.h5"
    first.acquire()
    with pytest.raises(
        UserError, match=rf"run.h5 is being written by another run \(process {os.getpid()} on .*\); wait"
    ):
        Lock(out).acquire(patience=0.2)
    first.release()
    Lock(out).acquire()


def test_who_may_take_a_lock_over(tmp_path, monkeypatch):
    out = tmp_path / "run.h5"
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    other = {"host": "elsewhere", "pid": 1}
    taken = functools.partial(starts.taken, out)
    assert taken(pid=gone.pid, born="1")  # a dead process on this host
    assert taken(pid=os.getpid(), born="1")  # its number is used again
    assert not taken(**other)
    assert not taken(pid=gone.pid, born="1", space="pid:[1]")  # a container of this host's name, with pids of its own
    monkeypatch.setattr(lock, "born", lambda pid: "")  # /proc shows nothing of others
    monkeypatch.setattr(os, "kill", raises(PermissionError))
    assert not taken(pid=1, born="1")
    monkeypatch.setattr(os, "kill", raises(ProcessLookupError))
    assert taken(pid=1, born="1")
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert taken(**other, slurm_job="7", restarts=1)  # this job, before it was requeued
    assert not taken(**other, slurm_job="7", restarts=2)  # another step of this very job
    assert not taken(**other, slurm_job="8", restarts=1)
    assert taken(3600, **other)  # long untouched


def test_a_live_process_of_this_host_keeps_its_lock_however_old_it_is(tmp_path):
    """A laptop that slept, a stopped process: nobody touched the lock for an hour, and its owner goes on to write."""
    out = tmp_path / "run.h5"
    starts.owned_by(out, 3600)
    with pytest.raises(UserError, match="is being written by another run"):
        Lock(out).acquire(patience=0.2)
    assert starts.taken(out, 3600, born="1")  # another process has the number now


def raises(error: type[Exception]) -> Callable[..., None]:
    """Return a function that raises."""

    def raising(*_: object) -> None:
        raise error

    return raising


def test_a_lock_taken_over_is_not_ours_to_remove(tmp_path):
    mine = Lock(tmp_path / "run.h5")
    mine.acquire()
    starts.owned_by(tmp_path / "run.h5", host="elsewhere", pid=1)  # while we slept
    mine.release()
    assert (tmp_path / "run.h5.lock").exists()


def test_a_lock_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"file, the folder for the result \(--results, --out\), cannot be made: File exists"
    ):
        Lock(tmp_path / "file" / "run.h5").acquire()
    with pytest.raises(UserError, match=r"the lock file .* cannot be written: File name too long"):
        Lock(tmp_path / f"{'x' * 251}.h5").acquire()
    (tmp_path / "run.h5.lock" / "in the way").mkdir(parents=True)
    with pytest.raises(UserError, match=r"run.h5 is being written by another run"):
        Lock(tmp_path / "run.h5").acquire(patience=0)
