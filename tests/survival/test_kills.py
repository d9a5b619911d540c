"""How a run ends: by kills, full disks, divergence; by signals, the end of an allocation, hangs."""

import contextlib
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import starts
from launch import ended
from mpi4py import MPI

from dpfl_mpi import batch, errors
from dpfl_mpi.federation import Federation
from dpfl_mpi.mpi.node import ABANDONED_S, mapped, remove_left
from dpfl_mpi.mpi.world import World
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.storage.lock import born
from dpfl_mpi.survival import signals
from dpfl_mpi.survival.checkpoint import Checkpoints

# what is killed, and while it does what
KILLS = ("rank", "start"), ("root", "writing"), ("mpirun", "round"), ("rank", "writing")
SLOW = """
from dpfl_mpi.survival import checkpoint
def write(path, data):  # in two halves, so that it can be seen
    with checkpoint.replacing(path) as part:
        part.write_bytes(data[: len(data) // 2])
        time.sleep(0.05)
        part.write_bytes(data)
checkpoint.write = write
"""


def kill_once(
    out: Path, fields: dict, target: str, moment: str, rng: random.Random, segments: set[str]
) -> bool:
    """Start or continue the run and kill at random; return whether that was before its end."""
    job = {"fields": fields, "checkpoint_every": 1, "quiet": True}
    process = starts.start(2, starts.held("False", out, -1, SLOW, **job))
    running = lambda: process.poll() is None  # noqa: E731
    last = lambda: max(starts.checkpoint_rounds(out), default=-1)  # noqa: E731
    starts.wait_for(lambda: not running() or len(starts.ranks_of(process.pid)) == 2)
    ranks = starts.ranks_of(process.pid)
    goal = last() + rng.randint(1, 6)
    while moment != "start" and running() and last() < goal:
        time.sleep(0.002)
    folder = Path(f"{out}.checkpoint")
    while moment == "writing" and running() and not list(folder.glob(".*.part")):
        time.sleep(0.002)
    time.sleep(rng.random() * {"start": 2, "round": 0.3, "writing": 0.05}[moment])
    for rank in ranks:
        segments.update(mapped(str(rank)))
    if running():
        with contextlib.suppress(ProcessLookupError, IndexError):
            victims = {"rank": ranks[-1:], "root": ranks[:1], "mpirun": [process.pid]}
            os.kill(victims[target][0], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    # ranks follow a killed mpirun by themselves
    starts.wait_for(lambda: not any(map(born, ranks)), timeout=60)
    assert process.returncode != 2, err
    return process.returncode != 0


@pytest.mark.timeout(900)
def test_kills_at_random_moments_change_nothing(tmp_path):
    fields, rng, segments = starts.small(rounds=25), random.Random(6), set()
    out = tmp_path / "run.h5"
    whole = starts.here(tmp_path / "whole.h5", fields)
    for target, moment in KILLS:
        while not kill_once(out, fields, target, moment, rng, segments):
            assert starts.same(out, whole)
            out.unlink()
        if out.exists():
            assert Result(out).state.startswith(("running", "stopped", "finished"))
    for name in filter(os.path.exists, segments):
        os.utime(name, (1, 1))  # what was killed counts as abandoned only by its age
    starts.finish(starts.start(2, starts.command(out, fields, quiet=True)))
    assert starts.same(out, whole)
    assert segments and not [*filter(os.path.exists, segments)]  # nothing of ours in /dev/shm
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.h5", "whole.h5"]


def test_only_what_nobody_uses_is_removed(tmp_path):
    names = [Path(f"/dev/shm/mpich_shm_test_{os.getpid()}_{i}") for i in range(4)]
    victim, odd = tmp_path / "victim", Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    try:
        for path in (*names[:3], victim, odd):
            path.write_bytes(bytes(4096))
        names[3].symlink_to(victim)
        for path in (*names[:2], names[3], victim):
            os.utime(path, (time.time() - 2 * ABANDONED_S,) * 2, follow_symlinks=False)
        with contextlib.ExitStack() as stack:
            for path in (names[1], odd):  # the second another program's, not in UTF-8
                file = stack.enter_context(path.open("rb"))
                stack.enter_context(mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ))
            remove_left()
        assert [path.exists() for path in (*names, victim)] == [False, True, True, True, True]
    finally:
        for path in names:
            path.unlink(missing_ok=True)


@pytest.fixture
def small_disk(tmp_path):
    """A folder with 3 MB of room."""
    (folder := tmp_path / "disk").mkdir()
    done = ended("mount", "-t", "tmpfs", "-o", "size=3m", "none", folder)
    if done.returncode:
        pytest.skip(f"no small disk here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_a_clear_error_and_the_last_checkpoint_is_whole(small_disk, undisturbed):
    out, filler = small_disk / "run.h5", small_disk / "filler"
    how = {"before": f"os.chdir({str(small_disk)!r})", "checkpoint_every": 1}
    process = starts.start(2, starts.held("not os.path.exists('full')", out, **how))
    starts.wait_for(lambda: 2 in starts.checkpoint_rounds(out), process)
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    (small_disk / "full").touch()
    message = starts.finish(process, 2)
    assert "cannot be written: No space left on device" in message and message.count("\n") == 1
    assert 2 in starts.checkpoint_rounds(out)
    assert Result(out).last_round >= 2
    filler.unlink()
    assert starts.same(starts.here(out), undisturbed)


def poisoned(monkeypatch: pytest.MonkeyPatch, *places: tuple[int, int, float]) -> None:
    """Change a number of clients' models after their training: (round, client, number)."""
    train = Federation.local_opt

    def local_opt(fed, w_KW, *args, **kwargs):
        w_KW = train(fed, w_KW, *args, **kwargs)
        for t, client, number in places:
            if fed.round == t:
                w_KW[np.flatnonzero(fed.ids == client), 5] = number
        return w_KW

    monkeypatch.setattr(Federation, "local_opt", local_opt)


def test_a_diverged_client_keeps_its_scores_where_the_others_are_tuned(tmp_path, monkeypatch):
    poisoned(monkeypatch, (1, 2, np.nan))
    fields = starts.small(on_divergence="exclude", method="local")
    base = starts.here(Run(**fields).resolve().path(tmp_path), fields, save_models=True)
    tuned = fields | {"finetune_epochs": 2}
    from_file = starts.here(tmp_path / "file.h5", tuned, results=str(tmp_path))
    alone = starts.here(tmp_path / "again.h5", tuned, results=str(tmp_path / "elsewhere"))
    assert starts.same(from_file, alone)
    with Result(from_file) as result, Result(base) as before:
        assert np.isfinite(result["best/test_acc"]).all()
        assert result["best/test_acc"][2] == before["best/test_acc"][2]
        assert result["client/diverged_round"].tolist() == [-1, -1, 1, -1, -1, -1]


def test_a_diverged_client_can_be_excluded_also_after_going_on(tmp_path, monkeypatch, digits_file):
    # the second is finite, but beyond what exact sums hold
    poisoned(monkeypatch, (1, 2, np.nan), (2, 4, 5000.0))
    more = {"data": str(digits_file), "min_per_class": None, "budget": "inf", "augment": True}
    fields = starts.small(on_divergence="exclude", **more)
    whole, out = starts.here(tmp_path / "whole.h5", fields), tmp_path / "run.h5"
    starts.cut_after(3, out, fields, checkpoint_every="2")
    assert starts.same(starts.here(out, fields), whole)
    with Result(out) as result:
        assert result["client/diverged_round"].tolist() == [-1, -1, 1, -1, 2, -1]
        assert result.graph(0)[:, 2].any() and result.graph(0)[:, 4].any()  # they had been chosen
        for t, gone in ((1, [2]), (2, [2, 4]), (3, [2, 4]), (4, [2, 4])):
            assert not result.graph(t)[gone].any() and not result.graph(t)[:, gone].any()
        assert result.graph(4).any()
        assert result["best/round"][2] == 0 and result["best/round"][4] <= 1
        assert result["best/test_acc"][2] == result["round/test_acc"][0, 2]
        assert np.isnan(result["round/val_acc"][1:, 2]).all()
        assert np.isnan(result["round/val_acc"][2:, 4]).all()
        assert np.isfinite(np.delete(result["round/val_loss"], [2, 4], 1)).all()
        for name in ("model/best", "best/test_acc"):
            assert np.isfinite(result[name]).all()


ALONE = World(MPI.COMM_SELF)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_ends_the_run_after_its_round_with_75(tmp_path, number):
    out = tmp_path / "run.h5"
    process = starts.start(2, starts.held(starts.UNHEARD, out, checkpoint_every="5min"))
    starts.wait_for(Path(f"{out}.held").exists, process)
    starts.tell(process, number)
    process.send_signal(signal.SIGCONT)  # Slurm does: the flag stays up
    message = starts.finish(process, signals.REQUEUE)
    again = "the same command goes on from there"
    assert f"stopped after round 3 of 4 ({number.name}); {again}" in message
    assert starts.checkpoint_rounds(out) == [3] and not out.with_name("run.h5.lock").exists()
    assert Result(out).state == "stopped after round 3"


def test_ctrl_c_in_a_terminal_keeps_a_checkpoint(tmp_path, undisturbed):
    if starts.open_mpi():
        pytest.skip("Open MPI's mpirun ends its ranks within a second of Ctrl-C, as kill -9 does")
    out = tmp_path / "run.h5"
    words = starts.held(starts.UNHEARD, out, checkpoint_every="5min", quiet=True)
    process = starts.start_in_terminal(2, words)
    starts.wait_for(Path(f"{out}.held").exists, process)
    # the terminal sends INT to its whole foreground group, mpirun included
    shown, _ = process.communicate("\x03", timeout=280)
    assert process.returncode == signals.REQUEUE, shown
    assert starts.checkpoint_rounds(out) == [3]
    assert "stopped after round 3 of 4 (SIGINT); the same command goes on from there" in shown
    assert starts.same(starts.here(out), undisturbed) and starts.times_started(out) == 2


EARLY = """
import os, runpy, sys
class Early:
    find_spec = lambda self, name, *_: os.kill(os.getpid(), 2) if name == "numpy" else None
sys.meta_path.insert(0, Early())
runpy.run_module("dpfl_mpi", {}, "__main__", True)
"""


def test_ctrl_c_while_the_program_is_imported_waits_for_round_0(tmp_path):
    flags = ["--method=local", "--clients=3", "--rounds=2", "--grace=200", "--quiet"]
    done = ended(sys.executable, "-c", EARLY, *flags, f"--out={tmp_path / 'run.h5'}", cwd=tmp_path)
    text = "stopped after round 0 of 2 (SIGINT); the same command goes on from there\n"
    assert (done.returncode, done.stdout, done.stderr) == (signals.REQUEUE, "", text)


def test_a_round_that_would_outlast_the_grace_is_replayed_but_not_for_ever(tmp_path, undisturbed):
    out, messages = tmp_path / "run.h5", []
    starts.cut_after(3, out)
    for number, code in ((2, signals.REQUEUE), (3, signals.STALLED)):
        process = starts.start(2, starts.held("True", out, checkpoint_every=1, grace=1))
        starts.wait_for(lambda n=number: starts.times_started(out) == n, process)
        process.send_signal(signal.SIGUSR1)
        messages.append(starts.finish(process, code))
        assert not Path(f"{out}.lock").exists()  # it may go on elsewhere at once
    late = "round 3 would outlast --grace 1, stopped at once"
    assert f"{late}; the same command replays it" in messages[0]
    assert "two starts in a row kept no new checkpoint" in messages[1]
    assert starts.same(starts.here(out), undisturbed)


def test_the_end_of_the_allocation_counts_as_a_signal(monkeypatch):
    monkeypatch.setattr(signals.Heard, "at", 0.0)  # no signal has reached this process
    end, ended = int(time.time()) + 4, []  # (exit code of all ranks, why)
    monkeypatch.setattr(ALONE, "abort", lambda *arguments: ended.append(arguments))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end))
    with signals.Watch(Job(grace=1, fresh=True), ALONE) as watch:
        watch.begin(3)
        starts.wait_for(lambda: ended, timeout=10)
    ((code, text, _),) = ended
    assert code == signals.REQUEUE and time.time() < end + 1
    late = "round 3 would outlast --grace 1, stopped at once"
    again = "the same command without --fresh replays it"
    assert text.startswith(f"end of the allocation: {late}; {again}")


LEFT = {"58": 58, "12:34": 754, "3:02:01": 10921, "2-03:00:10": 183610}
LEFT |= dict.fromkeys(("UNLIMITED", "INVALID", ""))


@pytest.mark.parametrize(("answer", "left"), LEFT.items())
def test_squeue_says_when_a_job_ends(tmp_path, terminal, monkeypatch, answer, left):
    """Slurm before 23.02 has no SLURM_JOB_END_TIME. A job shorter than --grace leaves half-way."""
    squeue = f'test "$3" = 17 && echo "{answer}"; echo asked >> {tmp_path}/asked'
    starts.script(tmp_path / "squeue", squeue)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert batch.seconds_left() is None
    assert not (tmp_path / "asked").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert batch.seconds_left() == left
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    # of an array the last task has the number of all
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert batch.seconds_left() is None and batch.number() == "17_3"
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    watch = signals.Watch(Job(grace=100), ALONE)
    usable = left - min(5, left / 10) if left else float("inf")  # the rest is the script's
    assert watch.ends - watch.started == pytest.approx(usable)
    assert watch.grace == min(100, usable / 2)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 5))
    assert 0 < batch.seconds_left() <= 5
    assert (tmp_path / "asked").read_text() == "asked\n" * 3


QSTAT = """Job Id: 17.pbs
    job_state = R
    resources_used.walltime = 00:10:00
    Resource_List.select = 1:ncpus=8:mpiprocs=8
    Resource_List.walltime = 12:00:30
    stime = {start}
    run_count = 1
"""


@pytest.mark.parametrize(("job", "command", "answer", "left"), [
    ("PBS_JOBID", "qstat -f 17.pbs", QSTAT, 11 * 3600 + 30),  # after an hour
    ("LSB_JOBID", "bjobs -noheader -o time_left 17.pbs", "1:30 L\n", 5400),
    ("LSB_JOBID", "bjobs -noheader -o time_left 17.pbs", "1:30 E\n", None),  # is estimated
    ("FLUX_URI", "flux job timeleft", "59\n", 59),
])  # fmt: skip
def test_other_batch_systems_say_when_a_job_ends(tmp_path, monkeypatch, job, command, answer, left):
    """By their manuals."""
    answer = answer.format(start=time.asctime(time.localtime(time.time() - 3600)))
    (tmp_path / "answer").write_text(answer)
    name, words = command.split(" ", 1)
    starts.script(tmp_path / name, f'test "$*" = "{words}" && cat {tmp_path}/answer')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(job, "17.pbs")
    assert batch.seconds_left() == (left if left is None else pytest.approx(left, abs=3))


def test_hangs_are_counted_once_for_each_start_of_a_job(tmp_path, monkeypatch):
    checkpoints = Checkpoints.__new__(Checkpoints)
    checkpoints.folder = tmp_path
    starts_of = (("17", "0", 1), ("17", "0", 1), ("17", "1", 2), ("17", "2", 3), ("1", "2", 1))
    for job, checkpoints.restarts, count in starts_of:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        assert checkpoints.count_hang() == count
    monkeypatch.delenv("SLURM_JOB_ID")
    assert checkpoints.count_hang() == checkpoints.count_hang() == 1


def test_the_watchdog_prints_every_stack_and_ends(tmp_path):
    out = tmp_path / "run.h5"
    hanging = starts.held("fed._parts.world.rank == 1", out, checkpoint_every=1, watchdog=6)
    message = starts.finish(starts.start(2, hanging), 75)
    for rank in range(2):
        assert f"rank {rank} of 2 has not finished round 3 in 6 s" in message
    assert "time.sleep" in message or "in round" in message
    assert starts.checkpoint_rounds(out) == [1, 2]


ROUNDS = {"a new run": (0, 1), "without preprocessing": (1,), "one that goes on": (8,)}


@pytest.mark.parametrize("rounds", ROUNDS.values(), ids=ROUNDS)
def test_what_comes_before_the_first_round_is_no_round_that_could_not_end(monkeypatch, rounds):
    """Four hours are left; of five hours were what was before, or a round, which is the last."""
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
    with monkeypatch.context() as patch, pytest.raises(errors.Leave) as leave:
        patch.setattr(signals.Heard, "at", time.monotonic())
        patch.setattr(signals.Heard, "name", "SIGINT")
        starts.here(out, fresh=True)
    again = "the same command without --fresh goes on from there"
    assert str(leave.value) == f"stopped after round 0 of 4 (SIGINT); {again}"
    assert starts.same(starts.here(out), undisturbed) and starts.times_started(out) == 2
