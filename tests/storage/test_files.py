"""Files that are there whole or not at all; and the lock of a results file."""

import contextlib
import errno
import json
import os
import resource
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import starts
from launch import refused

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result, recorder
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Run
from dpfl_mpi.storage import files, lock
from dpfl_mpi.storage.lock import Lock, myself


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file"
    with files.replacing(path) as part:
        part.write_text("one")
        assert not path.exists() and part.suffix == ".part"
    assert path.read_text() == "one"
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as part:
        part.write_text("tw")
        raise KeyboardInterrupt
    assert path.read_text() == "one" and [p.name for p in path.parent.iterdir()] == ["file"]
    assert files.reason(RuntimeError("very\nodd")) == "very odd"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_syncs_no_folders_is_written_to(tmp_path, monkeypatch, number):
    """As some shared ones answer for a folder; what they answer for a file counts."""
    sync, refused_kinds = os.fsync, [stat.S_ISDIR]

    def fsync(fd: int) -> None:
        if refused_kinds[-1](os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError) if number == errno.EIO else contextlib.nullcontext():
        files.write(tmp_path / "file", b"one")
    refused_kinds.append(stat.S_ISREG)
    with pytest.raises(OSError):
        files.write(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"one"


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    path, nobody = tmp_path / "file", 2**22 + 7  # above the largest number of a process
    (tmp_path / "folder").mkdir()

    def left(pid: int) -> Path:
        return path.with_name(files.temporary(path).name.replace(f".{os.getpid()}.", f".{pid}."))

    mine, dead, linked = left(os.getpid()), left(nobody), left(nobody)
    other = dead.with_name(f".x{dead.name[1:]}")
    for part in (mine, dead, other):
        part.touch()
    linked.symlink_to(tmp_path / "folder")
    files.remove_leftovers(path)
    assert {p.name for p in tmp_path.iterdir()} == {mine.name, other.name, "folder"}
    files.remove_leftovers(tmp_path / "nowhere" / "file")
    path, victim = tmp_path / "r.h5", tmp_path / "victim"
    victim.write_text("kept")
    assert files.temporary(path) != files.temporary(path)
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0" * 2 * n)  # if it could
    files.temporary(path).symlink_to(victim)
    with pytest.raises(OSError), files.replacing(path) as part:
        part.write_text("written")
    assert victim.read_text() == "kept" and not path.exists()


def begin(path) -> Recorder:
    run = Run(clients=30, rounds=40).resolve()
    return Recorder(path, run, {"data_sha256": "d"}, {"time": "now"})


def record(recorder: Recorder, t: int) -> None:
    rng = np.random.default_rng(t)
    recorder.append({"round/number": t, "round/epochs": 5 * t})
    names = ("train_loss", "val_loss", "val_acc", "test_acc")
    recorder.append({f"round/{name}": rng.random(30) for name in names})
    recorder.write({"best/test_acc": rng.random(30)})
    recorder.flush(t, 0.5)


def test_a_slow_disk_is_written_to_now_and_then(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])

    def slow(*file):
        now[0] += 1
        files.write(*file)

    monkeypatch.setattr(recorder, "write", slow)
    writing, seen = begin(tmp_path / "run.h5"), []
    for t in range(30):
        now[0] += 8
        record(writing, t)
        if t == 13:
            writing.copy(tmp_path / "copy.h5")
        with Result(tmp_path / "run.h5") as result:
            seen.append(result.last_round)
    written = "-1 -1 2 2 2 5 5 5 8 8 8 11 11 13 13 13 16 16 16 19 19 19 22 22 22 25 25 25 28 28"
    assert " ".join(map(str, seen)) == written
    writing.close("stopped")
    for name, last in (("run.h5", 29), ("copy.h5", 13)):
        assert Result(tmp_path / name).last_round == last


def test_a_full_disk_is_an_error_and_no_more(tmp_path, monkeypatch, at_most):
    monkeypatch.setattr(recorder, "APART_S", 0)
    monkeypatch.setattr(recorder, "SHARE", np.inf)
    path = tmp_path / "run.h5"
    writing = begin(path)
    record(writing, 0)
    at_most(resource.RLIMIT_FSIZE, path.stat().st_size)
    refused(f"the results file {path} cannot be written: File too large", record, writing, 1)
    writing.write({"best/val_acc": np.zeros(10**5)})  # the memory of the file can still grow
    for _ in range(2):  # the run ends for this reason, whatever else fails
        writing.abandon()
    assert Result(path).last_round == 0
    assert [p.name for p in tmp_path.iterdir()] == ["run.h5"]


OTHER = {"host": "elsewhere", "place": "", "pid": 5, "job": "17"}
THE_OTHER = "by another run (process 5 on elsewhere, job 17)"
DEAD = 2**22 + 7  # above the largest number of a process


def owned_by(out: Path, age: float = 0.0, **changes: object) -> Path:
    """Write a lock, last touched `age` seconds ago: this process's, but for `changes`."""
    path = out.with_name(f"{out.name}.lock")
    path.write_text(json.dumps(myself() | changes))
    os.utime(path, (time.time() - age,) * 2)
    return path


def taken(out: Path, age: float = 0.0, **changes: object) -> bool:
    """Return whether a new run takes over a lock that is `owned_by` another."""
    owned_by(out, age, **changes)
    mine = Lock(out)
    try:
        mine.acquire(patience=0.1)
    except UserError:
        return False
    mine.release()
    return True


def test_who_may_take_a_lock_over(tmp_path, monkeypatch):
    """A process of this host is looked up: it may have slept. Another host touches its lock."""
    out, here, other = tmp_path / "run.h5", os.getpid(), {"place": "elsewhere", "pid": 1}
    assert not taken(out, 3600)  # this process: it lives
    lives = f"run.h5 is being written by another run (process {here} on ...); wait"
    refused(lives, Lock(out).acquire, patience=0.1)
    assert taken(out, pid=DEAD, born="1")
    assert taken(out, pid=here, born="1")  # its number is used again
    assert not taken(out, 500, **other) and taken(out, 700, **other)
    for number, lives in ((PermissionError, True), (ProcessLookupError, False)):
        with monkeypatch.context() as patch:
            patch.setattr(lock, "born", lambda pid: "")  # /proc shows nothing of others
            patch.setattr(os, "kill", Mock(side_effect=number))
            assert taken(out, pid=1, born="1") != lives
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert taken(out, **other, job="7", restarts=1)  # this job, before it was requeued
    assert not taken(out, **other, job="7", restarts=2)  # another step of this very job
    assert not taken(out, **other, job="8", restarts=1)


@pytest.mark.parametrize("ahead", [900, -900], ids=["behind", "ahead"])
def test_ages_are_by_the_clock_of_the_file_system(tmp_path, monkeypatch, ahead):
    out, now = tmp_path / "run.h5", time.time
    path = owned_by(out, **OTHER)
    for text, old in ((path.read_text(), 700), ("", 60)):
        path.write_text(text)
        for age in (1, old):
            os.utime(path, (now() - age,) * 2)
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda: now() + ahead)
                assert Lock(out).taken() == (age == 1)
        assert [p.name for p in tmp_path.iterdir()] == ["run.h5.lock"]
    # another host's
    part = out.with_name(files.temporary(out).name.replace(files.place(), "0" * 8))
    for age, left in ((86400 - 100, True), (86400 + 100, False)):
        part.touch()
        os.utime(part, (now() - age,) * 2)
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now() + ahead)
            files.remove_leftovers(out)
        assert part.exists() == left


def test_a_lock_that_cannot_be_read_is_not_taken_at_once(tmp_path, monkeypatch):
    """The file system fails now, or its user lets nobody read: it is touched, so it lives."""
    path = tmp_path / "run.h5.lock"
    for age, text, free in ((60, b"\xff", False), (700, b"\xff", True), (60, b"", True)):
        path.write_bytes(text)
        os.utime(path, (time.time() - age,) * 2)
        mine = Lock(tmp_path / "run.h5")
        if free:
            mine.acquire(patience=0.1)
        else:
            refused("another run (process ? on ?)", mine.acquire, patience=0.1)
        mine.release()
    # another machine or container, which may have this one's host name
    out, gone = tmp_path / "run.h5", {"pid": DEAD, "born": "1", "place": "0" * 8}
    assert not taken(out, **gone) and taken(out, 700, **gone)


def test_a_lock_that_cannot_be_made_or_removed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "run.h5.lock" / "in the way").mkdir(parents=True)
    folder = "file, the folder for the result (--results, --out), cannot be made: File exists"
    for name, sentence in {
        "file/run.h5": folder,
        f"{'x' * 251}.h5": "the lock file ... cannot be written: File name too long",
        "run.h5": "run.h5 is being written by another run",
    }.items():
        refused(sentence, Lock(tmp_path / name).acquire, patience=0)
    owned_by(out := tmp_path / "abandoned.h5", pid=DEAD, born="1")
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(os, "rename", denied)
    why = "abandoned.h5.lock cannot be written: Permission denied"
    refused(why, Lock(out).acquire, patience=0.1)
    monkeypatch.setattr(Path, "touch", denied)
    assert files.time_at(tmp_path / "file") == pytest.approx(time.time(), abs=5)


@pytest.fixture
def held(tmp_path, monkeypatch) -> Iterator[tuple[Lock, list[str]]]:
    """(a lock that is held and touched 50 times a second, the sentences with which it was lost)."""
    monkeypatch.setattr(lock, "BEAT", 0.02)
    sentences: list[str] = []
    mine = Lock(tmp_path / "run.h5", sentences.append)
    mine.acquire()
    yield mine, sentences
    mine.release()


def test_a_run_is_told_once_that_another_has_its_lock(held, monkeypatch):
    mine, sentences = held
    with monkeypatch.context() as patch:
        reads: list[Path] = []
        # an error of a network's file system
        patch.setattr(lock, "content", lambda path: reads.append(path) or "")
        starts.wait_for(lambda: len(reads) > 3, timeout=10)
        os.utime(mine.path, (1, 1))
    starts.wait_for(lambda: mine.path.stat().st_mtime > 1, timeout=10)  # touched afterwards
    assert mine.check() and sentences == []
    for text in ("", "no owner", "{}"):  # being made, or damaged: nobody else's yet
        mine.path.write_text(text)
        assert mine.check()
    mine.path.unlink()
    assert mine.check() and sentences == []
    owned_by(mine.path.with_suffix(""), **OTHER)
    starts.wait_for(lambda: sentences, timeout=10)
    time.sleep(0.2)
    (sentence,) = sentences
    assert f"{THE_OTHER}, which took {mine.path} while" in sentence
    assert not mine.check() and len(sentences) == 2
    mine.release()
    # another's is not ours to remove, and what is not held cannot be lost
    assert mine.path.exists() and mine.check()


@pytest.mark.parametrize("beat", [0.2, 600], ids=["by the thread", "before a checkpoint"])
def test_a_run_that_has_lost_its_lock_ends_and_leaves_the_others_files(tmp_path, beat):
    out = tmp_path / "run.h5"
    mine = f"fed._parts.world.root and str(os.getpid()) in open({str(out)!r} + '.lock').read()"
    when = "True" if beat < 1 else mine
    words = starts.held(when, out, before=f"lock.BEAT = {beat}", checkpoint_every=1)
    process = starts.start(2, words)
    starts.wait_for(lambda: starts.checkpoint_rounds(out) == [1, 2], process)
    theirs = Path(f"{out}.checkpoint") / "000003.0123456789ab.00000.shard.h5"
    theirs.write_text("of the other run")
    before = owned_by(out, **OTHER).read_text()
    message = starts.finish(process, 1)
    assert message.count("error: ") == 1
    assert f"error: {out} is being written {THE_OTHER}, which took" in message
    assert theirs.exists() and starts.checkpoint_rounds(out) == [1, 2]
    assert out.with_name("run.h5.lock").read_text() == before
    assert not Result(out).finished
