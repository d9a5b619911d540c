"""Corners of survival: a lock that is lost, data prepared anew, --fresh, states of odd sizes, versions of the numbers."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import starts
import torch
from launch import federation
from starts import cut_after

from dpfl_mpi import prepare
from dpfl_mpi.data.source import Arrays
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.settings import run as config
from dpfl_mpi.storage import files, foreign
from dpfl_mpi.survival import lock, signals
from dpfl_mpi.survival.checkpoint import Checkpoints
from dpfl_mpi.survival.lock import Lock, myself


class World:
    """A world of one, without MPI."""

    root, rank, size = True, 0, 1
    decide = staticmethod(lambda choose: choose())
    abort = staticmethod(lambda code: None)


OTHER = {"host": "elsewhere", "pid": 5, "slurm_job": "17"}


# a lock that is lost -----------------------------------------------------------------------------------------------------
@pytest.fixture
def held(tmp_path, monkeypatch):
    """(a lock that is held and touched 50 times a second, the sentences with which it was lost)."""
    monkeypatch.setattr(lock, "BEAT", 0.02)
    told: list[str] = []
    mine = Lock(tmp_path / "run.h5", told.append)
    mine.acquire()
    yield mine, told
    mine.release()


def test_a_lock_that_cannot_be_read_for_a_moment_is_touched_afterwards(held, monkeypatch):
    mine, told = held
    with monkeypatch.context() as patch:
        reads: list[Path] = []
        patch.setattr(lock, "content", lambda path: reads.append(path) or "")  # an error of a network's file system
        starts.wait_for(lambda: len(reads) > 3, timeout=10)
        os.utime(mine.path, (1, 1))
    starts.wait_for(lambda: mine.path.stat().st_mtime > 1, timeout=10)
    assert told == []


def test_a_run_is_told_once_that_another_has_its_lock(held):
    mine, told = held
    assert mine.check() and told == []
    for text in ("", "no owner", "{}"):  # being made, or damaged: nobody else's yet
        mine.path.write_text(text)
        assert mine.check()
    mine.path.unlink()
    assert mine.check() and told == []
    starts.owned_by(mine.path.with_suffix(""), **OTHER)
    starts.wait_for(lambda: told, timeout=10)
    time.sleep(0.2)
    (sentence,) = told
    assert sentence == (
        f"{mine.path.with_suffix('')} is being written by another run (process 5 on elsewhere, Slurm job 17), which took {mine.path} while "
        "this one was silent; this one ends and changes nothing more"
    )
    assert not mine.check() and len(told) == 2
    mine.release()
    assert mine.path.exists() and mine.check()  # what is not held cannot be lost


WAITING = """
import sys, time
from dpfl_mpi import __main__
from dpfl_mpi.methods import dpfl
from dpfl_mpi.survival import lock
whole, lock.BEAT = dpfl.round, {beat}
def round(fed, state, t):
    while t == 3 and ({beat} < 1 or fed._parts.world.root and str(lock.os.getpid()) in open({path!r}).read()):
        time.sleep(0.02)
    return whole(fed, state, t)
dpfl.round = round
__main__.main(sys.argv[1:])
"""


@pytest.mark.parametrize("beat", [0.2, 600], ids=["by the thread", "before a checkpoint"])
def test_a_run_that_has_lost_its_lock_ends_and_leaves_the_others_files(tmp_path, beat):
    """Under two ranks, in round 3 (which never ends where the thread is to notice), when the checkpoints are those of rounds 1 and 2."""
    out = tmp_path / "run.h5"
    program = WAITING.format(beat=beat, path=f"{out}.lock")
    process = starts.start(2, [sys.executable, "-c", program, *starts.command(out, checkpoint_every=1)[3:]])
    starts.wait_for(lambda: starts.checkpoint_rounds(out) == [1, 2], process)
    theirs = Path(f"{out}.checkpoint") / "000003.0123456789ab.00000.shard.h5"
    theirs.write_text("of the other run")
    before = starts.owned_by(out, **OTHER).read_text()
    message = starts.finish(process, 1)
    assert message.count("error: ") == 1
    assert f"error: {out} is being written by another run (process 5 on elsewhere, Slurm job 17), which took" in message
    assert theirs.exists() and starts.checkpoint_rounds(out) == [1, 2]
    assert out.with_name("run.h5.lock").read_text() == before
    with Result(out) as result:
        assert not result.finished


def test_a_checkpoint_has_the_results_of_its_own_run(tmp_path):
    run, path = Run(**starts.small()).resolve(), tmp_path / "run.h5"
    recorder = Recorder(path, run, {"parameters": 1}, {"time": "now"})
    recorder.append({"round/number": np.int64(0)})
    other = Recorder(path, run, {"parameters": 2}, {"time": "later"})  # another run has made the file anew
    recorder.copy(tmp_path / "copy.h5")
    for each in (recorder, other):
        each.abandon()
    with h5py.File(tmp_path / "copy.h5", "r") as copy, h5py.File(path, "r") as theirs:
        assert (copy["meta"].attrs["parameters"], theirs["meta"].attrs["parameters"]) == (1, 2)
        assert copy["round/number"][:].tolist() == [0] and "round" not in theirs


@contextlib.contextmanager
def begun(out: Path, still_ours=lambda: None, **job: object):
    """Give (the Federation of the small run after round 0, its state, its Recorder, its Checkpoints)."""
    fed = federation(starts.small(), out=str(out))
    recorder = Recorder(out, fed.run, fed.about, {"time": "now"})
    fed.begin_round(0)
    state = find("method", fed.run.method).init(fed)
    try:
        yield fed, state, recorder, Checkpoints(out, fed.run, Job(out=str(out), **job), fed.world, still_ours)
    finally:
        recorder.abandon()
        fed.close()


def test_nothing_is_replaced_or_deleted_once_the_lock_is_lost(tmp_path):
    lost: list[bool] = []

    def check() -> None:
        if lost:
            raise KeyboardInterrupt  # in place of the end of all ranks

    out = tmp_path / "run.h5"
    with begun(out, check) as (fed, state, recorder, store):
        store.save(fed, state, recorder)
        theirs = store.folder / "000001.0123456789ab.results.h5"
        theirs.touch()
        lost.append(True)
        with pytest.raises(KeyboardInterrupt):
            store.save(fed, state, recorder)
        with pytest.raises(KeyboardInterrupt):
            store.clear()
        assert theirs.exists() and starts.checkpoint_rounds(out) == [0]


# machines of one name ----------------------------------------------------------------------------------------------------
def test_a_machine_of_the_same_name_is_another_one(tmp_path, monkeypatch):
    """Every Linux has the same first namespace of processes; what tells two machines apart is when they were started."""
    out = tmp_path / "run.h5"
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()

    def taken(age: float, pid: int, since: str, space: str) -> bool:
        return starts.taken(out, age, pid=pid, born=since, space=space)

    me, old = myself(), os.readlink("/proc/self/ns/pid")  # earlier versions wrote the second alone
    assert me["space"] == f"{old} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    gone, here = (dead.pid, "1"), (me["pid"], me["born"])
    assert taken(0, *gone, me["space"]) and not taken(3600, *here, me["space"])
    another = f"{old} 01234567-89ab-cdef-0123-456789abcdef"  # or this one, before it was started again
    assert not taken(0, *gone, another) and not taken(500, *gone, another) and taken(700, *gone, another)
    assert not taken(0, *gone, old) and taken(700, *gone, old) and not taken(3600, *here, old)
    monkeypatch.setattr(lock, "boot", lambda: "")  # a system that does not say
    monkeypatch.setattr(lock, "pid_space", lambda: "")
    assert not taken(0, *gone, "") and taken(700, *gone, "") and not taken(3600, *here, "")
    monkeypatch.setattr(lock, "born", lambda pid: "")  # nor shows any process
    assert not taken(3600, me["pid"], "", "")


def test_a_lock_that_cannot_be_read_is_not_taken_at_once(tmp_path):
    """Of a file system that gives an error now, or of a user who lets nobody read: it is touched, so somebody lives."""
    path = tmp_path / "run.h5.lock"
    for age, text, taken in ((60, b"\xff", False), (700, b"\xff", True), (60, b"", True)):
        path.write_bytes(text)
        os.utime(path, (time.time() - age,) * 2)
        mine = Lock(tmp_path / "run.h5")
        with contextlib.nullcontext() if taken else pytest.raises(UserError, match=r"another run \(process \? on \?\)"):
            mine.acquire(patience=0.15)
        mine.release()


def test_temporary_files_of_a_machine_of_the_same_name_are_left(tmp_path):
    path = tmp_path / "data.h5"
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    mine = files.temporary(path).name.replace(f".{os.getpid()}.", f".{dead.pid}.")
    elsewhere = mine.replace(files.place(), "01234567")
    earlier = mine.replace(f"{files.place()}.", "")  # as versions before wrote them
    assert len({mine, elsewhere, earlier}) == 3
    for age, left in ((0, {elsewhere, earlier}), (2 * 3600, {elsewhere, earlier}), (2 * 86400, set())):
        for name in (mine, elsewhere, earlier):
            (tmp_path / name).touch()
            os.utime(tmp_path / name, (time.time() - age,) * 2)
        files.remove_leftovers(path)
        assert {p.name for p in tmp_path.iterdir()} == left


# data that were prepared anew --------------------------------------------------------------------------------------------
SHIPPED = {"dataset": "cifar10", "partition": "pathological", "classes_per_client": 2}


def stage(seed: int, labels: int = 0) -> None:
    """Prepare CIFAR-10's file in its usual place from small pictures; `seed` draws them, `labels` turns their classes."""
    from dpfl_mpi.datasets.cifar10 import CLASSES, MEAN, STD

    rng = np.random.default_rng(seed)
    parts = []
    for m in (480, 160):
        parts += [rng.integers(0, 255, (m, 8, 8, 3)).astype(np.uint8), (np.arange(m) // (1 + labels)) % 10]
    Path("data").mkdir(exist_ok=True)
    prepare.write(Arrays(*parts, CLASSES, MEAN, STD), "cifar10", Path("data/cifar10.h5"))


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """The small run on a shipped data set, in a folder with its data: the key of the Run does not have their content."""
    monkeypatch.chdir(tmp_path)
    stage(1)
    fields = {n: v for n, v in starts.small(**SHIPPED).items() if n != "data"}
    assert "data" not in Run(**fields).resolve().key()
    return fields


def test_a_checkpoint_is_not_mixed_with_data_made_anew(shipped, monkeypatch):
    whole, out = starts.here(Path("whole.h5"), shipped), Path("run.h5")
    cut_after(monkeypatch, 3, out, shipped)
    for again, different in (((2, 0), "content of the data"), ((1, 1), "content of the data, partition")):
        stage(*again)
        with pytest.raises(UserError) as error:
            starts.here(out, shipped)
        assert str(error.value) == (
            f"run.h5.checkpoint holds a checkpoint of a run on other data (different: {different}); bring back the data that it began with, "
            "choose another --out, or start over with --fresh"
        )
    stage(1)
    starts.here(out, shipped)
    assert starts.same(out, whole)


def test_a_finished_result_of_other_data_is_not_found(shipped, capsys):
    out = starts.here(Path("run.h5"), shipped)
    before, then = out.read_bytes(), stated_sha256()
    stage(2)
    now = stated_sha256()
    with pytest.raises(UserError) as error:
        starts.here(out, shipped)
    assert str(error.value) == (
        f"run.h5 is finished and was computed from other data: data/cifar10.h5 has the sha256 {now[:12]} now, and had {then[:12]} then; "
        "bring back those data, choose another --out, or compute it anew with --fresh"
    )
    assert then != now and out.read_bytes() == before
    Path("data/cifar10.h5").unlink()
    starts.here(out, shipped, quiet=False)  # a result stands without its data
    assert "found, not computed" in capsys.readouterr().out and out.read_bytes() == before
    stage(2)
    starts.here(out, shipped, fresh=True)
    with Result(out) as result:
        assert result.fact("data_sha256") == now and len(result.starts()) == 1
    starts.here(out, shipped, quiet=False)
    assert "found, not computed" in capsys.readouterr().out


def stated_sha256() -> str:
    """Return the SHA-256 that the prepared file says it has."""
    with h5py.File("data/cifar10.h5", "r") as file:
        return str(file.attrs["sha256"])


def test_tuning_does_not_start_from_models_of_other_data(shipped, capfd):
    """The labels are the same, and so is the partition."""
    fields = shipped | {"method": "local", "rounds": 2}
    base = starts.here(Run(**fields).path("results"), fields, save_models=True)
    stage(2)
    tuned = starts.here(Path("tuned.h5"), fields | {"finetune_epochs": 1}, results="results")
    assert (
        "is not finished, or of other data or another partition: its rounds are computed here" in capfd.readouterr().err
    )
    base.unlink()
    alone = starts.here(Path("alone.h5"), fields | {"finetune_epochs": 1}, results="results")
    assert starts.same(tuned, alone)


# versions of the numbers -------------------------------------------------------------------------------------------------
def test_a_finished_result_of_an_older_version_of_the_numbers_is_not_found(tmp_path, monkeypatch):
    out = starts.here(tmp_path / "x.h5")
    before, version = out.read_bytes(), config.NUMERICS
    monkeypatch.setattr(config, "NUMERICS", version + 1)
    with pytest.raises(UserError) as error:
        starts.here(out)
    assert str(error.value) == (
        f"{out} is finished and was computed under version {version} of the numbers; that of this Run is {version + 1} now (see "
        "CHANGELOG.md): choose another --out, or compute it anew with --fresh"
    )
    assert out.read_bytes() == before
    starts.here(out, fresh=True)
    with Result(out) as result:
        assert result.finished and result.fact("numerics") == str(version + 1)


# --fresh -----------------------------------------------------------------------------------------------------------------
def test_what_goes_on_after_fresh_is_the_command_without_it(tmp_path, monkeypatch):
    whole, out = starts.here(tmp_path / "whole.h5"), tmp_path / "run.h5"
    with monkeypatch.context() as patch, pytest.raises(signals.Leave) as leave:
        patch.setattr(signals.Heard, "at", time.monotonic())
        patch.setattr(signals.Heard, "name", "SIGINT")
        starts.here(out, fresh=True)
    assert str(leave.value) == (
        "stopped after round 0 of 4 (SIGINT); the same command without --fresh goes on from there"
    )
    starts.here(out)
    assert starts.same(out, whole)
    with Result(out) as result:
        assert len(result.starts()) == 2


@pytest.mark.parametrize(
    ("fresh", "command"), [(True, "the same command without --fresh"), (False, "the same command")]
)
def test_a_round_that_is_cut_says_so_too(tmp_path, monkeypatch, capsys, fresh, command):
    ended: list[int] = []
    monkeypatch.setattr(World, "abort", staticmethod(ended.append))
    monkeypatch.setattr(signals.Heard, "name", "SIGTERM")
    watch = signals.Watch(Job(fresh=fresh), World)
    watch.round = 3
    watch._cut()
    assert ended == [signals.REQUEUE]
    assert capsys.readouterr().err == (
        f"SIGTERM: round 3 would outlast --grace 25, stopped at once; {command} replays it from the last checkpoint\n"
    )
    with begun(tmp_path / "run.h5", fresh=fresh) as (fed, state, recorder, store):
        store.save(fed, state, recorder)
        monkeypatch.setattr(recorder, "copy", full)
        with pytest.raises(UserError) as error:
            store.save(fed, state, recorder)
    assert str(error.value) == (
        f"the checkpoint in {store.folder} cannot be written: No space left on device; the one of round 0 is whole, and {command} goes on "
        "from there"
    )


def full(_: Path) -> None:
    """Fail as a disk without room does."""
    raise OSError(errno.ENOSPC, "no room")


# what a state may hold ---------------------------------------------------------------------------------------------------
def test_a_number_of_a_method_comes_back(tmp_path):
    """A tensor and an array without axes."""
    with begun(tmp_path / "run.h5") as (fed, state, recorder, store):
        state["shared"] |= {"beta": torch.tensor(0.5, dtype=torch.float64), "count": np.array(7), "none": np.zeros(0)}
        store.save(fed, state, recorder)
        back = Checkpoints(tmp_path / "run.h5", fed.run, store.job, fed.world).restore(fed)
    assert back is not None
    beta, count = back["shared"]["beta"], back["shared"]["count"]
    assert isinstance(beta, torch.Tensor) and (beta.shape, beta.dtype, float(beta)) == ((), torch.float64, 0.5)
    assert isinstance(count, np.ndarray) and (count.shape, count.dtype, int(count)) == ((), np.int64, 7)


def test_a_bug_is_no_error_of_the_disk(tmp_path):
    with begun(tmp_path / "run.h5") as (fed, state, recorder, store):
        state["shared"]["odd"] = {1}
        with pytest.raises(TypeError, match="a checkpoint cannot hold state/odd: it is a set"):
            store.save(fed, state, recorder)


def test_a_manifest_may_be_larger_than_a_text(tmp_path, monkeypatch, capsys):
    """It holds what a server's method shares; what is read of a text by default is made tiny in place of a model of 256 MiB."""
    with begun(tmp_path / "run.h5") as (fed, state, recorder, store):
        state["shared"]["model"] = torch.arange(5000.0)
        store.save(fed, state, recorder)
        monkeypatch.setattr(foreign.read_bytes, "__defaults__", (10_000, True))
        back = Checkpoints(tmp_path / "run.h5", fed.run, store.job, fed.world).restore(fed)
    assert back is not None and torch.equal(back["shared"]["model"], torch.arange(5000.0))
    assert isinstance(back["shared"]["omega"], CollaborationGraph) and capsys.readouterr().err == ""


# the length of a round ---------------------------------------------------------------------------------------------------
def test_preprocessing_is_no_round_that_could_not_end(monkeypatch):
    """Five hours of preprocessing, four left: round 1 is begun. A round of five hours is the last one."""
    monkeypatch.setattr(signals.Heard, "at", 0.0)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 4 * 3600))
    watch = signals.Watch(Job(), World)
    watch.begin(0)
    watch.started -= 5 * 3600
    assert not watch.stop(more=True, spare=5) and not signals.Heard.at
    watch.begin(1)
    assert not watch.stop(more=True, spare=5)
    watch.started -= 5 * 3600
    assert watch.stop(more=True, spare=5) and signals.Heard.name == "end of the allocation"
