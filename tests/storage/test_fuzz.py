"""Every reader of files against damaged ones: it works, or one sentence says what is wrong.

`pytest` tries 32 cases per reader, or DPFL_FUZZ_CASES. A case's number seeds its draws. Cases run
in a forked process, so that a crash or an endless loop in a library is one, too.
"""

import contextlib
import json
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import starts
from launch import federation, run_here, text_file
from making import folder as files_in
from making import images, leaf, tar, zipped
from starts import small

from dpfl_mpi import describe, export, prepare, show
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import open_source
from dpfl_mpi.datasets import arrays, femnist
from dpfl_mpi.datasets import image_folder as pictures
from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.results.summary import summary
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.storage.lock import Lock
from dpfl_mpi.survival.checkpoint import Checkpoints
from dpfl_mpi.sweep.entries import Entry, load_submissions

CASES = int(os.environ.get("DPFL_FUZZ_CASES", "32"))  # per reader
SECONDS = 20  # that a case may take
MEMORY = 2**31  # address space of a case, beyond that of the process when it starts
TEXTS = (
    "", "\0", "../" * 9 + "etc/passwd", "\udc80", "9" * 400, "-1", "nan", "null", "{}", "[]",
    "[" * 3000, '{"a":' * 3000, "file:" + "y" * 250, "\n\n",
)  # fmt: skip
# a kind of file: its bytes by name, what reads it in a folder
Reader = tuple[dict[str, bytes], Callable[[Path], object]]


def damage(files: dict[str, bytes], folder: Path, rng: np.random.Generator) -> None:
    path, how = folder / sorted(files)[rng.integers(len(files))], rng.integers(10)
    if how < 4 and h5py.is_hdf5(path):
        errors = contextlib.suppress(KeyError, ValueError, OSError, TypeError)
        with errors, h5py.File(path, "r+") as file:
            in_hdf5(file, rng)
    else:
        path.write_bytes(in_bytes(path.read_bytes(), rng))


def in_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Return the bytes cut, with flipped bits, or with a hostile text inside."""
    out, how = bytearray(data), rng.integers(4)
    at = int(rng.integers(len(out))) if out else 0
    if how == 0 or not out:
        return bytes(out[:at])
    if how == 1:
        for i in rng.integers(len(out), size=rng.integers(1, 9)):
            out[i] ^= 1 << rng.integers(8)
    else:
        text = TEXTS[rng.integers(len(TEXTS))].encode("utf-8", "surrogatepass")
        if how == 3 and (words := [i for i in range(len(out)) if chr(out[i]) in '0123456789:,"']):
            at = words[rng.integers(len(words))]
        out[at : at + int(rng.integers(3))] = text
    return bytes(out)


def in_hdf5(file: h5py.File, rng: np.random.Generator) -> None:
    """Change one attribute, array or group of an HDF5 file that stays one."""
    names: list[str] = [""]
    file.visit(names.append)
    name = names[rng.integers(len(names))]
    item = file[name or "/"]
    if item.attrs and (not name or rng.random() < 0.6):
        nan = float("nan")
        values = b"\xff\xfe", "x", "", "[" * 3000, "9" * 400, "{}", 10**18, -1, nan, [1, 2]
        attribute = sorted(item.attrs)[rng.integers(len(item.attrs))]
        item.attrs[attribute] = values[rng.integers(len(values))]
        return
    shape = getattr(item, "shape", None) or (1,)
    if not name:
        return
    del file[name]
    links = h5py.SoftLink("/" + name), h5py.ExternalLink("/etc/passwd", "/x")
    arrays = [np.zeros(shape, kind) for kind in ("i1", "f4", "S5", "c8")]
    values = *links, *arrays, np.full(shape, -1), np.zeros(tuple(rng.integers(0, 9, 3)))
    if how := rng.integers(len(values) + 1):
        file[name] = values[how - 1]
    else:
        huge = (10**6, *shape[1:]) if len(shape) > 2 else (10**5,) * len(shape)
        file.create_dataset(name, huge, "i8", chunks=True)


def result(folder: Path) -> Reader:
    path = run_here(folder / "r.h5", small(reach="geometric:2"), save_models=True, mixed=True)

    def read(where: Path) -> None:
        with Result(where / "r.h5") as it:
            kinds = {"state": str, "finished": bool, "test_acc": float, "last_round": int}
            assert all(isinstance(getattr(it, name), kind) for name, kind in kinds.items())
            assert it.benign.dtype == bool
            assert all(isinstance(it[name], np.ndarray) for name in it.arrays())
            it.mean("round/test_acc"), it.omega(), it.graph(0), it.chosen(it.last_round)
            it.starts(), it.state_dict(1)
        summary(where / "r.h5")
        for command in (show.main, export.main):
            if code := command([str(where / "r.h5")]):
                raise SystemExit(code)
        show.main(["--compare", str(where / "r.h5"), str(path)])
        Entry(it.run, where / "r.h5").status(set())

    return {"r.h5": path.read_bytes()}, read


def data(folder: Path) -> Reader:
    prepare.write(femnist.read(files_in(folder / "leaf", leaf(4, 10))), "femnist", folder / "d.h5")

    def read(where: Path) -> None:
        fields = {"dataset": "femnist", "data": str(where / "d.h5"), "partition": "dirichlet"}
        run = Run(**small(**fields, min_samples=2, clients=3)).resolve()
        source = open_source(run)
        deal(run, source)
        for part, labels in source.labels.items():
            source.images(part, np.arange(len(labels)))
        prepare.prepare("femnist", where, where / "d.h5", {})

    return {"d.h5": (folder / "d.h5").read_bytes()}, read


def partition(folder: Path) -> Reader:
    path = folder / "p.json"
    words = f"--dataset image_folder --data {starts.data()} --clients 3 --min_per_class 1"
    with contextlib.redirect_stdout(None):
        describe.main([*words.split(), "--save", str(path)])

    def read(where: Path) -> None:
        run = Run(**small(partition=f"file:{where / 'p.json'}", clients=None)).resolve()
        deal(run, open_source(run))

    return {"p.json": path.read_bytes()}, read


def checkpoint(folder: Path) -> Reader:
    starts.cut_after(2, folder / "r.h5")
    job = Job(out=str(folder / "r.h5"), quiet=True)
    fed = federation(small(), out=job.out)
    text_file(folder / "r.h5.checkpoint" / "begun_from", "3\n")
    paths = (folder / "r.h5.checkpoint").iterdir()
    saved = {f"r.h5.checkpoint/{path.name}": path.read_bytes() for path in paths}

    def read(where: Path) -> None:
        mine = Checkpoints(where / "r.h5", fed.run.key(), job, fed.world)
        mine.restore(fed)
        mine.note_start()
        mine._delete_older("")

    return saved, read


def lock(folder: Path) -> Reader:
    Lock(folder / "r.h5").acquire()

    def read(where: Path) -> None:
        mine = Lock(where / "r.h5")
        mine.taken()
        mine.acquire(patience=0)
        mine.release()

    return {"r.h5.lock": (folder / "r.h5.lock").read_bytes()}, read


def jobs(folder: Path) -> Reader:
    numbers = {"jobs": {"r.h5": "123"}, "born": {"r.h5": "1"}}
    text = json.dumps({"cluster": "local", "submitted": 3.0, "host": "h"} | numbers).encode()
    run = Run(**small()).resolve()

    def read(where: Path) -> None:
        entry = Entry(run, where / "r.h5")
        load_submissions([entry], where / "sweeps")
        entry.status(set())
        entry.log()

    return {"sweeps/a/jobs.json": text, "sweeps/b/jobs.json": text}, read


def archive(folder: Path) -> Reader:
    files = images(("train", "test"), ("a", "b"), 1, (5, 5))
    archives = {"a.zip": zipped(folder / "zip", files).read_bytes()}
    for kind, mode in (("tar", "w"), ("tgz", "w:gz"), ("txz", "w:xz")):
        archives[f"a.{kind}"] = tar(folder / kind, files, mode).read_bytes()

    def read(where: Path) -> None:
        for name in archives:
            with contextlib.suppress(UserError):
                pictures.read(where / name)

    return archives, read


def npz(folder: Path) -> Reader:
    clients = np.array(["a", "b"] * 10)
    np.savez(folder / "a.npz", x=np.zeros((20, 4), np.uint8), y=np.arange(20) % 2, client=clients)
    return {"a.npz": (folder / "a.npz").read_bytes()}, lambda where: arrays.read(where / "a.npz")


READERS: dict[str, Callable[[Path], Reader]] = {
    make.__name__: make for make in (result, data, partition, checkpoint, lock, jobs, archive, npz)
}


def outcome(name: str, reader, folder: Path, number: int) -> str:
    """Return "" if a damaged file was read or refused in one sentence, else what happened."""
    files, read = reader
    damage(files, files_in(folder, files), np.random.default_rng((number, *name.encode())))
    try:
        read(folder)
    except SystemExit as end:
        return "" if end.code == 2 else "exit code"
    except UserError as error:
        return "several lines" if "\n" in str(error) or not str(error) else ""
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        mine = [f for f in where if "dpfl_mpi" in f.filename and "tests" not in f.filename] or where
        return f"{type(error).__name__} in {Path(mine[-1].filename).name}:{mine[-1].name}"
    return ""


def process(name: str, reader, folder: Path, numbers: range) -> None:
    """Run the cases; write each number before, and "number what" after one that went wrong."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    quiet = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(quiet, fd)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with (folder / "outcomes").open("w", buffering=1) as outcomes:
        for number in numbers:
            print(number, file=outcomes)
            with tempfile.TemporaryDirectory(dir=folder) as place:
                signal.setitimer(signal.ITIMER_REAL, SECONDS)
                what = outcome(name, reader, Path(place), number)
                signal.setitimer(signal.ITIMER_REAL, 0)
            if what:
                print(number, what, file=outcomes)


def fuzz(name: str, folder: Path, numbers: range) -> dict[int, str]:
    """Return what went wrong by the number of the case; a hang is "SIGALRM" and the last one."""
    reader = READERS[name](folder)
    pid = os.fork()
    if pid == 0:
        try:
            process(name, reader, folder, numbers)
            os._exit(0)
        finally:
            os.abort()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    lines = [line.partition(" ") for line in (folder / "outcomes").read_text().splitlines()]
    wrong = {int(number): what for number, _, what in lines if what}
    return wrong | ({int(lines[-1][0]): signal.Signals(-code).name} if code else {})


@pytest.mark.parametrize("name", READERS)
def test_no_damaged_file_is_a_traceback(name, tmp_path):
    assert fuzz(name, tmp_path, range(CASES)) == {}
