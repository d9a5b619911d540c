"""Signals, the end of an allocation, the grace time and hangs: how a run leaves, and with which exit code."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import starts
from launch import ended
from mpi4py import MPI

from dpfl_mpi.mpi.world import World
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job
from dpfl_mpi.survival import signals

ALONE = World(MPI.COMM_SELF)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_run_after_its_round_with_75(tmp_path, number):
    out = tmp_path / "run.h5"
    process = starts.start(2, starts.held(starts.UNHEARD, out, checkpoint_every="5min"))
    starts.wait_for(Path(f"{out}.held").exists, process)
    starts.tell(process, number)
    process.send_signal(signal.SIGCONT)  # Slurm does: the flag stays up
    message = starts.finish(process, signals.REQUEUE)
    assert f"stopped after round 3 of 4 ({number.name}); the same command goes on from there" in message
    assert starts.checkpoint_rounds(out) == [3] and not out.with_name("run.h5.lock").exists()
    with Result(out) as result:
        assert result.state == "stopped after round 3"


def test_ctrl_c_in_a_terminal_keeps_a_checkpoint(tmp_path, undisturbed):
    if starts.open_mpi():
        pytest.skip("Open MPI's mpirun ends its ranks within a second of Ctrl-C, whatever they do: as after kill -9")
    out = tmp_path / "run.h5"
    process = starts.start_in_terminal(2, starts.held(starts.UNHEARD, out, checkpoint_every="5min", quiet=True))
    starts.wait_for(Path(f"{out}.held").exists, process)
    # the terminal sends INT to its whole foreground group, mpirun included
    shown, _ = process.communicate("\x03", timeout=280)
    assert process.returncode == signals.REQUEUE, shown
    assert starts.checkpoint_rounds(out) == [3]
    assert "stopped after round 3 of 4 (SIGINT); the same command goes on from there" in shown
    assert starts.same(starts.here(out), undisturbed) and starts.times_started(out) == 2


def test_ctrl_c_while_the_program_is_imported_waits_for_round_0(tmp_path):
    early = "class Early:\n    find_spec = lambda self, name, *_: os.kill(os.getpid(), 2) if name == 'numpy' else None"
    code = f"import os, runpy, sys\n{early}\nsys.meta_path.insert(0, Early())\nrunpy.run_module('dpfl_mpi', {{}}, '__main__', True)"
    flags = ["--method=local", "--clients=3", "--rounds=2", f"--out={tmp_path / 'run.h5'}", "--grace=200", "--quiet"]
    done = ended(sys.executable, "-c", code, *flags, cwd=tmp_path)
    said = "stopped after round 0 of 2 (SIGINT); the same command goes on from there\n"
    assert (done.returncode, done.stdout, done.stderr) == (signals.REQUEUE, "", said)


def test_a_round_that_would_outlast_the_grace_is_replayed_but_not_for_ever(tmp_path, undisturbed):
    """Round 2 is kept; after two starts from there that keep nothing the same command would do no better."""
    out, messages = tmp_path / "run.h5", []
    starts.cut_after(3, out)
    for number, code in ((2, signals.REQUEUE), (3, signals.STALLED)):
        process = starts.start(2, starts.held("True", out, checkpoint_every=1, grace=1))
        starts.wait_for(lambda n=number: starts.times_started(out) == n, process)
        process.send_signal(signal.SIGUSR1)
        messages.append(starts.finish(process, code))
        assert not Path(f"{out}.lock").exists()  # it may go on elsewhere at once
    assert "round 3 would outlast --grace 1, stopped at once; the same command replays it" in messages[0]
    assert "two starts in a row kept no new checkpoint" in messages[1]
    assert starts.same(starts.here(out), undisturbed)


def test_the_end_of_the_allocation_counts_as_a_signal(monkeypatch):
    monkeypatch.setattr(signals.Heard, "at", 0.0)  # no signal has reached this process
    end, ended = int(time.time()) + 4, []  # (exit code of all ranks, why)
    monkeypatch.setattr(ALONE, "abort", lambda *said: ended.append(said))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end))
    with signals.Watch(Job(grace=1, fresh=True), ALONE) as watch:
        watch.begin(3)
        starts.wait_for(lambda: ended, timeout=10)
    ((code, said),) = ended
    assert code == signals.REQUEUE and time.time() < end + 1
    why = "round 3 would outlast --grace 1, stopped at once; the same command without --fresh replays it"
    assert said.startswith(f"end of the allocation: {why}")


LEFT = {"58": 58, "12:34": 754, "3:02:01": 10921, "2-03:00:10": 183610, "UNLIMITED": None, "INVALID": None, "": None}


@pytest.mark.parametrize(("answer", "left"), LEFT.items())
def test_squeue_says_when_a_job_ends_where_slurm_does_not(tmp_path, terminal, monkeypatch, answer, left):
    """Slurm before 23.02 has no SLURM_JOB_END_TIME. A job shorter than --grace leaves half-way."""
    starts.script(tmp_path / "squeue", f'test "$3" = 17 && echo "{answer}"; echo asked >> {tmp_path}/asked')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert signals.seconds_left() is None
    assert not (tmp_path / "asked").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert signals.seconds_left() == left
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")  # of an array the last task has the number of all
    assert signals.seconds_left() is None and signals.slurm_job() == "17_3"
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    watch = signals.Watch(Job(grace=100), ALONE)
    usable = left - min(5, left / 10) if left else float("inf")  # what is left is the script's
    assert watch.ends - watch.started == pytest.approx(usable)
    assert watch.grace == min(100, usable / 2)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 5))
    assert 0 < signals.seconds_left() <= 5
    assert (tmp_path / "asked").read_text() == "asked\n" * 3


def test_the_watchdog_prints_every_stack_and_ends(tmp_path):
    out = tmp_path / "run.h5"
    hanging = starts.held("fed._parts.world.rank == 1", out, checkpoint_every=1, watchdog=6)
    message = starts.finish(starts.start(2, hanging), 1)
    for rank in range(2):
        assert f"rank {rank} of 2 has not finished round 3 in 6 s" in message
    assert "time.sleep" in message or "in round" in message
    assert starts.checkpoint_rounds(out) == [1, 2]


@pytest.mark.parametrize("rounds", [(0, 1), (1,), (8,)], ids=["a new run", "without preprocessing", "one that goes on"])
def test_what_comes_before_the_first_round_is_no_round_that_could_not_end(monkeypatch, rounds):
    """Five hours of reading data, and of preprocessing as round 0, four left: the next is begun. A round of five hours is the last one."""
    monkeypatch.setattr(signals.Heard, "at", 0.0)  # no signal has reached this process
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 4 * 3600))
    watch = signals.Watch(Job(), ALONE)
    for t in rounds:
        watch.started -= 5 * 3600
        assert not watch.stop(more=True, spare=5) and not signals.Heard.at
        watch.begin(t)
        assert watch.last == 0
    assert not watch.stop(more=True, spare=5)
    watch.started -= 5 * 3600
    assert not watch.stop(more=False, spare=5)  # nothing follows: finish
    assert watch.stop(more=True, spare=5) and signals.Heard.name == signals.ALLOCATION
    watch.begin(9)
    assert watch.last == pytest.approx(5 * 3600, abs=5)


def test_what_goes_on_after_fresh_is_the_command_without_it(tmp_path, monkeypatch, undisturbed):
    out = tmp_path / "run.h5"
    with monkeypatch.context() as patch, pytest.raises(signals.Leave) as leave:
        patch.setattr(signals.Heard, "at", time.monotonic())
        patch.setattr(signals.Heard, "name", "SIGINT")
        starts.here(out, fresh=True)
    said = "stopped after round 0 of 4 (SIGINT); the same command without --fresh goes on from there"
    assert str(leave.value) == said
    assert starts.same(starts.here(out), undisturbed) and starts.times_started(out) == 2
