"""Every reader of files against damaged ones: it works, or one sentence says what is wrong.

`pytest` tries 32 cases per reader, or DPFL_FUZZ_CASES. A case's number seeds its draws. Cases run
in a forked process, so that a crash or an endless loop in a library is one, too.
"""

import contextlib
import dataclasses
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
from making import images, leaf, stored, tar, zipped
from mpi4py import MPI
from starts import small

from dpfl_mpi import describe, export, prepare, show
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import open_source
from dpfl_mpi.datasets import arrays, femnist
from dpfl_mpi.datasets import image_folder as pictures
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import limits
from dpfl_mpi.mpi import start
from dpfl_mpi.mpi.world import World
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
    "", "\0", "../" * 9 + "etc/passwd", "/dev/zero", "\udc80", "é\u202e", "9" * 400, "-1", "1e400",
    "nan", "inf", "null", "true", "{}", "[]", "[" * 3000, '{"a":' * 3000, "&a [" + "*a," * 30 + "]",
    "- " * 3000, "x" * 300, "groups:" + "0,1;" * 80, "file:" + "y" * 250, "0.5N", "1:2:3",
    "uniform:1:" + "9" * 400, "geometric:" + "9" * 400, "%s", "\n\n", " ", "0 0", "1 1 1",
    "1\n2\n3\n4", "sites:0", "1_0", "٣",
)  # fmt: skip
# a kind of file: its bytes by name, what reads it in a folder
Reader = tuple[dict[str, bytes], Callable[[Path], object]]


def damage(files: dict[str, bytes], folder: Path, rng: np.random.Generator) -> None:
    if not files:
        (folder / "seed").write_text(str(rng.integers(2**31)))
        return
    path, how = folder / sorted(files)[rng.integers(len(files))], rng.integers(10)
    if how < 4 and h5py.is_hdf5(path):
        errors = contextlib.suppress(KeyError, ValueError, OSError, TypeError)
        with errors, h5py.File(path, "r+") as file:
            in_hdf5(file, rng)
    elif how < 5:
        replace(path, rng)
    else:
        path.write_bytes(in_bytes(path.read_bytes(), rng))


def in_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Return the bytes with flipped bits, overwritten, cut, or with a hostile text inside."""
    out, how = bytearray(data), rng.integers(6)
    at = int(rng.integers(len(out))) if out else 0
    if how == 0 or not out:
        return bytes(out[:at])
    if how <= 2:
        for i in rng.integers(len(out), size=rng.integers(1, 9)):
            out[i] ^= 1 << rng.integers(8)
    elif how == 3:
        length = int(rng.choice([1, 4, 8, 64, 500]))
        out[at : at + length] = rng.choice([b"\0", b"\xff", rng.bytes(1)]) * length
    else:
        text = hostile(rng)
        if how == 5 and (words := [i for i in range(len(out)) if chr(out[i]) in '0123456789:,"']):
            at = words[rng.integers(len(words))]
        out[at : at + int(rng.integers(3))] = text
    return bytes(out)


def hostile(rng: np.random.Generator) -> bytes:
    return TEXTS[rng.integers(len(TEXTS))].encode("utf-8", "surrogatepass")


def replace(path: Path, rng: np.random.Generator) -> None:
    """Put something else in its place: nothing, a folder, a link, a pipe, a device, a text."""
    path.unlink()
    how = rng.integers(7)
    if how < 2:
        path.symlink_to((path.name, "/dev/zero")[how])
    elif how < 4:
        (path.mkdir, lambda: os.mkfifo(path))[how - 2]()
    elif how < 6:
        path.write_bytes((b"", hostile(rng))[how - 4])


def in_hdf5(file: h5py.File, rng: np.random.Generator) -> None:
    """Remove or change one array, group or attribute of an HDF5 file that stays one."""
    names: list[str] = [""]
    file.visit(names.append)
    name = names[rng.integers(len(names))]
    item = file[name or "/"]
    values = (b"\xff\xfe", "x", "", "[" * 3000, "9" * 400, "{}", "null", 10**18, -1, float("nan"))
    values += ([1, 2], np.zeros((2, 2)), np.bool_(True))
    if item.attrs and rng.random() < (0.6 if name else 1):
        attribute = sorted(item.attrs)[rng.integers(len(item.attrs))]
        if rng.random() < 0.2:
            del item.attrs[attribute]
        elif rng.random() < 0.4 and isinstance(item.attrs[attribute], str):
            text = in_bytes(item.attrs[attribute].encode(), rng)
            item.attrs[attribute] = text.decode("utf-8", "surrogateescape")
        else:
            item.attrs[attribute] = values[rng.integers(len(values))]
        return
    shape, how = getattr(item, "shape", (3,)), rng.integers(9)
    if not name:
        return
    if how == 0 and isinstance(item, h5py.Dataset) and item.size:  # one value out of its range
        data = item[()]
        if data.dtype.kind in "iuf":
            data.reshape(-1)[rng.integers(data.size)] = rng.choice([-1, 127, 0])
            item[()] = data
        return
    del file[name]
    if how == 1:
        file[name] = np.zeros(shape, rng.choice(["i1", "f4", "f8", "S5", "c8", "u8"]))
    elif how == 2:
        file[name] = np.zeros(tuple(rng.integers(0, 9, rng.integers(4))))
    elif how == 3:
        huge = (10**6, *shape[1:]) if len(shape) > 2 else (10**5,) * max(1, len(shape))
        file.create_dataset(name, huge, "i8", chunks=True)
    elif how == 4:
        file.create_group(name)
    elif how == 5:
        links = h5py.SoftLink("/" + name), h5py.ExternalLink("/etc/passwd", "/x")
        file[name] = links[rng.random() < 0.5]
    elif how == 6:
        file.create_dataset(name, shape or (1,), h5py.vlen_dtype(np.int32))
    elif how == 7:
        raw = [("/dev/zero", 0, h5py.h5f.UNLIMITED)]
        file.create_dataset(name, shape or (1,), "f8", external=raw)


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


def image(folder: Path) -> Reader:
    files = images(("train", "test"), ("a",), 1, (6, 6))
    kinds = {"gif": "GIF", "jpg": "JPEG", "tif": "TIFF", "bmp": "BMP", "webp": "WEBP", "ppm": "PPM"}
    for i, (suffix, kind) in enumerate(kinds.items()):
        files[f"train/a/{i}.{suffix}"] = stored(np.full((6, 6, 3), 9 * i, np.uint8), kind)
    files["train/a/16.png"] = stored(np.full((6, 6), 60000, np.uint16))
    return files, pictures.read


def npz(folder: Path) -> Reader:
    clients = np.array(["a", "b"] * 10)
    np.savez(folder / "a.npz", x=np.zeros((20, 4), np.uint8), y=np.arange(20) % 2, client=clients)
    return {"a.npz": (folder / "a.npz").read_bytes()}, lambda where: arrays.read(where / "a.npz")


def limit(folder: Path) -> Reader:
    there = b"1 1 0 1\n1 1 1 1\n0 1 1 1\n1 1 1 1\n"
    texts = {"budget": b"1 2 inf 2\n", "reach": b"0 1\n1 2\n3 2\n", "available": there}

    def read(where: Path) -> None:
        fields = small(clients=4, rounds=3) | {name: str(where / name) for name in texts}
        limits.limits_of(Run(**fields).resolve(), World(MPI.COMM_SELF))

    return texts, read


def config(folder: Path) -> Reader:
    fields = small(clients=4, rounds=3, method="fedprox")
    fields |= {"quiet": True, "out": "x.h5", "options": {"mu": 0.1}}
    text = "".join(f"{k}: {json.dumps(v)}\n" for k, v in fields.items() if v is not None)
    return {"c.yaml": text.encode()}, lambda where: start.parse(["--config", str(where / "c.yaml")])


def settings(folder: Path) -> Reader:
    """No file: a hostile value of a field, on the command line and in Python."""

    def read(where: Path) -> None:
        rng = np.random.default_rng(int((where / "seed").read_text()))
        names = [f.name for f in (*dataclasses.fields(Run), *dataclasses.fields(Job))]
        name, text = names[rng.integers(len(names))], TEXTS[rng.integers(len(TEXTS))]
        values = [text, 10**400, -(10**30), 1e308, float("nan"), [text], {text: text}, b"x"]
        if rng.random() < 0.5:
            start.parse([f"--{name}={text}"])
        elif name in {f.name for f in dataclasses.fields(Run)}:
            run = Run(**small() | {name: values[rng.integers(8)]}).resolve()
            run.path(), limits.limits_of(run, World(MPI.COMM_SELF))
            deal(run, open_source(run))

    return {}, read


def shards(folder: Path) -> Reader:
    return leaf(2, 4), femnist.read


OURS = (result, data, partition, checkpoint, lock, jobs, limit, config, settings)
SOURCES = (archive, image, npz, shards)
READERS: dict[str, Callable[[Path], Reader]] = {make.__name__: make for make in (*OURS, *SOURCES)}


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
