"""Files that are there whole or not at all: written in memory, replaced at once, whatever the disk and the processes do meanwhile."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from launch import refused

from dpfl_mpi.results import Result, recorder
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Run
from dpfl_mpi.storage import files, spill


# one atomic replacement -------------------------------------------------------------------------------------------------
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


def test_a_temporary_name_cannot_be_waited_for(tmp_path, monkeypatch):
    path, victim = tmp_path / "r.h5", tmp_path / "victim"
    victim.write_text("kept")
    assert files.temporary(path) != files.temporary(path)
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0" * 2 * n)  # if it could
    files.temporary(path).symlink_to(victim)
    with pytest.raises(OSError), files.replacing(path) as part:
        part.write_text("written")
    assert victim.read_text() == "kept" and not path.exists()


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
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


def test_errors_in_words():
    assert files.reason(RuntimeError("very\nodd")) == "very odd"


def test_what_is_spilled_has_room_and_no_name(tmp_path, at_most):
    held = spill.mapped(str(tmp_path), (3, 5), "int64")
    assert held.dtype == np.int64 and not held.any() and held.ctypes.data % 64 == 0
    held += 7
    assert held.sum() == 105 and not list(tmp_path.iterdir()) and spill.mapped("nowhere", (0, 5)).shape == (0, 5)
    at_most(resource.RLIMIT_FSIZE, 2**20)
    said = f"--spill is {tmp_path}; 2.0 MiB of models cannot be kept there: File too"
    refused(said, spill.mapped, str(tmp_path), (2**19,))


# HDF5 in memory ---------------------------------------------------------------------------------------------------------
def begin(path) -> Recorder:
    return Recorder(path, Run(clients=30, rounds=40).resolve(), {"data_sha256": "d"}, {"time": "now"})


def record(recorder: Recorder, t: int) -> None:
    rng = np.random.default_rng(t)
    recorder.append({"round/number": t, "round/epochs": 5 * t})
    recorder.append({f"round/{name}": rng.random(30) for name in ("train_loss", "val_loss", "val_acc", "test_acc")})
    recorder.write({"best/test_acc": rng.random(30)})
    recorder.flush(t, 0.5)


def test_a_slow_disk_is_written_to_now_and_then(tmp_path, monkeypatch):
    """At most a twentieth of the time goes into it; a checkpoint and the end always write."""
    now = [100.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])

    def slow(path):
        now[0] += 1
        return files.replacing(path)

    monkeypatch.setattr(recorder, "replacing", slow)
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
        with Result(tmp_path / name) as result:
            assert result.last_round == last


def test_a_full_disk_is_an_error_and_no_more(tmp_path, monkeypatch, at_most):
    """Full where the next round is written: one sentence, and the file of the round before."""
    monkeypatch.setattr(recorder, "CHEAP", 60)
    path = tmp_path / "run.h5"
    writing = begin(path)
    record(writing, 0)
    at_most(resource.RLIMIT_FSIZE, path.stat().st_size)
    refused(f"the results file {path} cannot be written: File too large", record, writing, 1)
    for _ in range(2):  # the run ends for this reason, whatever else fails
        writing.abandon()
    with Result(path) as result:
        assert result.last_round == 0
    assert [p.name for p in tmp_path.iterdir()] == ["run.h5"]
