"""Writing HDF5 when the disk takes no more: an error to handle, and nothing that happens later."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap

import h5py
import numpy as np
import pytest

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Run
from dpfl_mpi.storage import disk, files, foreign

SCRIPT = """
import errno, resource, sys
from pathlib import Path
import numpy as np
from dpfl_mpi.storage import disk

def rows(t):
    return np.random.default_rng(t).random((4, 300))

def write(path, room):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    done = -1
    file = disk.File(path, "w", libver="earliest")
    try:
        stored = file.create_dataset("x", (0, 300), float, chunks=(2, 300), maxshape=(None, 300), compression=1)
        for t in range(10):
            stored.resize(len(stored) + 4, 0)
            stored[-4:] = rows(t)
            file.create_group(f"group{t}").attrs["t"] = t
            file.flush()
            done = t
    except OSError as error:
        assert error.errno == errno.EFBIG
        assert all((stored[4 * t : 4 * t + 4] == rows(t)).all() for t in range(len(stored) // 4))  # HDF5 noticed nothing
        try:
            file.close()
        except OSError:
            return done
        raise AssertionError("the error is not told")
    file.close()
    return done

whole = Path(sys.argv[1]) / "whole.h5"
assert write(whole, resource.RLIM_INFINITY) == 9
size = whole.stat().st_size
for room in range(0, size, int(sys.argv[2])):
    path = whole.with_name("file.h5")
    done = write(path, room)
    print(room, size, done)
    if done >= 0:
        import h5py
        with h5py.File(path) as file:  # what was flushed before is there
            assert all((file["x"][4 * t : 4 * t + 4] == rows(t)).all() for t in range(done + 1)), room
"""


@pytest.mark.parametrize("step", [1499, pytest.param(241, marks=pytest.mark.slow)])
def test_a_file_that_may_not_grow_is_an_error_and_no_more(tmp_path, step):
    """At every size at which the disk can become full; the process also ends as if nothing had been."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(step)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    reached = [int(line.split()[2]) for line in done.stdout.splitlines()]
    assert reached == sorted(reached) and reached[0] == -1 and reached[-1] >= 8


def test_the_bytes_are_those_of_hdf5s_own_files(tmp_path):
    options = {"libver": "earliest", "track_order": False}
    for make, name in ((disk.File, "ours.h5"), (h5py.File, "theirs.h5")):
        with make(tmp_path / name, "w", **options) as file:
            file.create_dataset("x", data=np.arange(5000.0).reshape(50, 100), chunks=(7, 100), compression=1)
        with make(tmp_path / name, "r+", **options) as file:
            file["x"][3] = 7
            file["group/y"] = np.arange(10)
    assert (tmp_path / "ours.h5").read_bytes() == (tmp_path / "theirs.h5").read_bytes()


def test_a_results_file_opens_whatever_write_was_the_last(tmp_path, monkeypatch):
    """A kill may come between any two writes: every beginning of the sequence of writes is a file that opens."""
    writes, after_first_round = [], 0
    pwrite = os.pwrite

    def noted(fd, data, at):
        writes.append((at, bytes(data)))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", noted)
    run = Run(clients=30, rounds=40).resolve()
    recorder = Recorder(tmp_path / "run.h5", run, {"data_sha256": "d"}, {"time": "now"})
    rng = np.random.default_rng(0)
    recorder.write({"client/p": np.full(30, 1 / 30), "graph/omega/indptr": np.arange(31)})
    for t in range(40):
        recorder.append({"round/number": t, "round/epochs": 5 * t})
        recorder.append({f"round/{name}": rng.random(30) for name in ("train_loss", "val_loss", "val_acc", "test_acc")})
        recorder.append({f"traffic/{name}": rng.integers(0, 9, 30) for name in ("models_received",)})
        recorder.write({"best/test_acc": rng.random(30)})
        recorder.flush(t, 0.5)
        after_first_round = after_first_round or len(writes)
    recorder.close("finished")
    image, seen = bytearray(), set()
    for i, (at, data) in enumerate(writes, 1):
        image[len(image) : at] = bytes(max(0, at - len(image)))
        image[at : at + len(data)] = data
        if i >= after_first_round:
            (tmp_path / "cut.h5").write_bytes(image)
            with Result(tmp_path / "cut.h5") as result:
                seen.add((result.state.split()[0].rstrip(","), int(result.file.attrs["rounds_done"])))
                assert result.run.key() == run.key()
    assert seen == {("running", t) for t in range(40)} | {("finished", 39)}
    assert bytes(image) == (tmp_path / "run.h5").read_bytes()


@pytest.mark.parametrize("room", [None, 0, 3, 17, 60])
def test_a_disk_is_a_file(tmp_path, monkeypatch, room):
    """Against an array of bytes: random writes, reads, cuts and flushes, with a disk that takes `room` writes and no more."""
    pwrite, left = os.pwrite, [room]

    def full(fd, data, at):
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "full")
        left[0] = left[0] and left[0] - 1
        return pwrite(fd, data[: max(1, len(data) // 2)], at)  # short writes, as a pipe or a network may make them

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(disk, "AT_MOST", 300)
    monkeypatch.setattr(disk, "LARGE", 70)
    rng, twin = np.random.default_rng(1), bytearray()
    file = disk.Disk(tmp_path / "file", new=True)
    for _ in range(400):
        at, n = (int(x) for x in rng.integers(0, 500, 2))
        file.seek(at)
        match rng.integers(0, 6):
            case 0 | 1 | 2:
                data = rng.bytes(n // 5)
                assert file.write(memoryview(data)) == len(data)
                if data:
                    twin[len(twin) : at] = bytes(max(0, at - len(twin)))
                    twin[at : at + len(data)] = data
            case 3:
                assert file.read(n) == (bytes(twin) + bytes(1000))[at : at + n]
            case 4:
                file.flush()
            case 5:
                assert file.truncate(max(at, len(twin))) == max(at, len(twin))
                twin += bytes(max(0, at - len(twin)))
        assert file.seek(0, os.SEEK_END) == len(twin)
    file.close()
    assert (file.error is None) == (room is None)
    assert room is not None or (tmp_path / "file").read_bytes() == bytes(twin)


def test_a_file_that_cannot_be_made_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        disk.File(tmp_path / "missing" / "x.h5", "w")
    with pytest.raises(IsADirectoryError):
        disk.File(tmp_path, "w")


def test_what_is_left_open_is_closed_at_the_end(tmp_path):
    script = """
import sys
from pathlib import Path
from dpfl_mpi.storage import disk
def use():
    file = disk.File(Path(sys.argv[1]), "w")
    file["x"] = [1, 2, 3]
    raise ValueError("of something else")
use()
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.h5")], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("Error") == 1
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x"][:].tolist() == [1, 2, 3]


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


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    path, child = tmp_path / "file", subprocess.Popen(["true"])
    mine = files.temporary(path)
    dead = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{child.pid}."))
    other = dead.with_name(f".x{dead.name[1:]}")
    child.wait()
    for left in (mine, dead, other):
        left.touch()
    files.remove_leftovers(path)
    assert mine.exists() and other.exists() and not dead.exists()
    files.remove_leftovers(tmp_path / "nowhere" / "file")


def test_a_files_hash(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert foreign.sha256(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_errors_in_words():
    hdf5 = OSError("Can't write data (file write failed: time = now, errno = 28, error message = 'No space left')")
    assert files.error_number(hdf5) == files.error_number(OSError(28, "x")) == errno.ENOSPC
    assert files.reason(hdf5) == "No space left on device" and files.reason(RuntimeError("odd")) == "odd"
    sentence = "^the table cannot be written: No space left on device$"
    with pytest.raises(UserError, match=sentence), files.explained("the table cannot be written"):
        raise hdf5
