"""Files of others: that lie, that never end, that stand in the place of ours, that are links."""

import os
import shutil
import struct
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import starts
import tiny_result
from launch import federation, refused
from making import flip, folder, images, stored, zipped
from PIL import Image

from dpfl_mpi import describe, export, prepare
from dpfl_mpi.data.source import open_source
from dpfl_mpi.datasets import _images, arrays, image_folder
from dpfl_mpi.datasets._images import decode
from dpfl_mpi.errors import in_a_sentence
from dpfl_mpi.mpi import start
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.storage import foreign
from dpfl_mpi.sweep.entries import Entry, Submission, load_submissions


@pytest.mark.parametrize("kind", ["text", "link", "device", "folder"])
def test_fresh_replaces_only_a_result(tmp_path, kind):
    out = tmp_path / "notes.h5"
    if kind == "text":
        out.write_text("mine")
    elif kind == "link":
        out.symlink_to(tiny_result.make(tmp_path / "result.h5"))
    elif kind == "device":
        out.symlink_to("/dev/null") if os.getuid() else os.mknod(out, 0o20666, os.makedev(1, 3))
    else:
        out.mkdir()
    before = os.lstat(out)[:7]  # without the times
    refused("notes.h5", starts.here, out)
    words = "allowed is the name of a file" if kind == "folder" else "--fresh replaces nothing else"
    refused(words, starts.here, out, fresh=True)
    assert os.lstat(out)[:7] == before[:7]


def test_nothing_is_written_through_a_link(tmp_path):
    folder(tmp_path / "others", {"000001.h5": b"kept"})
    (tmp_path / "s.h5.checkpoint").symlink_to(tmp_path / "others")
    refused("is a link, or no folder", starts.here, tmp_path / "s.h5")
    assert (tmp_path / "others" / "000001.h5").read_bytes() == b"kept"
    result, victim = tiny_result.make(tmp_path / "r.h5"), tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "r.csv").symlink_to(victim)
    assert export.main([str(result)]) == 2 and victim.read_text() == "kept"


GREY = np.array([[0, 17], [128, 255]], np.uint8)
PALETTE = Image.fromarray(GREY).convert("P")


@pytest.mark.parametrize("name, data, pixels", [
    ("1 bit", stored(GREY > 100), np.array([[[0], [0]], [[255], [255]]])),
    ("palette", stored(PALETTE), np.repeat(GREY[..., None], 3, 2)),
    ("alpha", stored(Image.fromarray(GREY).convert("RGBA")), np.repeat(GREY[..., None], 3, 2)),
    ("grey and alpha", stored(Image.fromarray(GREY).convert("LA")), GREY[..., None]),
])  # fmt: skip
def test_images_that_are_exact_in_8_bits(name, data, pixels):
    assert np.array_equal(decode(data, name, None), pixels)


@pytest.mark.parametrize("data, words", [
    (stored(GREY.astype(np.uint16) * 257), "is I;16; allowed are grey, RGB and palettes"),
    (stored(GREY.astype(np.float32) / 255, "TIFF"), "is F; allowed are grey, RGB and palettes"),
    (stored(Image.fromarray(GREY).convert("CMYK"), "JPEG"), "is CMYK; allowed are grey, RGB"),
    (stored(GREY, "GIF", save_all=True, append_images=[Image.fromarray(255 - GREY)]),
     "has 2 frames"),
])  # fmt: skip
def test_images_that_8_bits_do_not_hold(data, words):
    refused(words, decode, data, "train/a/0.png", None)


@pytest.mark.parametrize("dataset", ["image_folder", "arrays", "cifar10", "femnist"])
def test_a_source_without_an_end(tmp_path, dataset, said):
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", "/dev/zero"):
        error = said(prepare.main, dataset, "--source", source, "--out", tmp_path / "x.h5", code=2)
        assert error.endswith("is not a regular file, but a folder, a pipe or a device\n")


def test_a_flipped_byte_is_an_error(tmp_path):
    path = tiny_result.make(tmp_path / "r.h5")
    names = {*Result(path).arrays()} - {"meta/starts"}
    with h5py.File(path) as file:
        filled = {name for name in names if file[name].size}
        assert all(file[name].chunks and file[name].fletcher32 for name in filled)
        places = {name: file[name].id.get_chunk_info(0) for name in filled}
    raw = path.read_bytes()

    def flipped(at: int) -> Path:
        return flip(Path(shutil.copy(path, tmp_path / "flipped.h5")), at)

    for name, place in places.items():
        for at in {0, place.size // 2, place.size - 1}:
            with Result(flipped(place.byte_offset + at)) as result:
                refused(f"is damaged: {name} cannot be read", result.__getitem__, name)
    with h5py.File(path) as file:
        accuracy = struct.pack("<d", file.attrs["test_acc"])
    texts = raw.index(b'"preset": "paper"') + 14, raw.index(b'"device": "cpu"') + 12
    for at in (*texts, raw.index(accuracy)):
        refused("is not a result of dpfl_mpi, or it is damaged", Result, flipped(at))
    path = Path(shutil.copy(starts.data(), tmp_path / "d.h5"))
    run = Run(**starts.small(data=str(path))).resolve()
    open_source(run)
    with h5py.File(path) as file:
        at = file["test/images"].id.get_offset()
    flip(path, at)
    refused("which is damaged: its content has the sha256", open_source, run)
    refused("which is damaged", federation, starts.small(data=str(path)))  # as a run starts
    assert describe.main(["--dataset", "image_folder", "--data", str(path), "--model", "mlp"]) == 2


def test_no_link_to_another_place_is_followed(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    other = tiny_result.make(tmp_path / "other.h5")
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(str(other), "best/test_acc", (6,))[:3]
    for link in (h5py.ExternalLink(str(tmp_path / "pipe"), "/x"), h5py.SoftLink("/meta")):
        path = Path(shutil.copy(other, tmp_path / "linked.h5"))
        with h5py.File(path, "r+") as file:
            file["odd"] = link
        refused("is damaged: odd leads to another place", Result, path)
    path = Path(shutil.copy(other, tmp_path / "virtual.h5"))
    with h5py.File(path, "r+") as file:
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("raw", (3,), "f8", external=[("/dev/zero", 0, h5py.h5f.UNLIMITED)])
    with foreign.Hdf5(path, "a result") as file:
        for name in ("virtual", "raw", "nothing"):
            refused(f"{name} is missing, or no array of this file", file.array, name, "f")


@pytest.mark.parametrize("text", [
    b"", b"{", b"[]", b"\xff", b'{"jobs": 3}', b"[" * 9000,
    b'{"cluster": "local", "submitted": 1, "jobs": {"r.h5": "../x"}, "host": "h", "born": {}}',
])  # fmt: skip
def test_one_damaged_submission_of_a_sweep(tmp_path, capsys, text):
    folder(tmp_path / "a", {"jobs.json": text})
    Submission("local", {"r.h5": "123"}).save(folder(tmp_path / "b", {}))
    entry = Entry(Run().resolve(), tmp_path / "r.h5")
    load_submissions([entry], tmp_path)
    load_submissions([entry], tmp_path)  # it warns once
    assert entry.job == "123"
    assert capsys.readouterr().err.count("the jobs of that submission are not known") == 1


NAMES = ["/", ".", "..", "a/..", "", "x" * 247 + ".h5", "a\0b", "a\udcff.h5"]


@pytest.mark.parametrize("out", NAMES)
def test_names_that_no_result_can_have(tmp_path, monkeypatch, said, out):
    monkeypatch.chdir(tmp_path)
    assert said(in_a_sentence(start.parse), f"--out={out}", code=2).startswith("error: --out is ")
    said(prepare.main, "image_folder", "--source", tmp_path, f"--out={out}", code=2)


@pytest.mark.parametrize("field, value", [
    ("rounds", 10**400), ("lr", 10**400), ("lr", 1e400), ("clients", 2**63), ("seed",
     -1), ("budget", "9" * 400), ("budget", "9" * 400 + "N"),
    ("budget", "uniform:1:" + "9" * 400), ("reach", "geometric:" + "9" * 400), ("reach",
     "sites:" + "9" * 400), ("available", "a\0b"), ("data", "a\udcff"),
    ("available", np.ones((20, 32))), ("network", np.ones((32, 5))), ("tie",
     np.array(["latest", "x"])), ("options", np.arange(2)),
])  # fmt: skip
def test_settings_beyond_all_bounds(field, value):
    refused(f"--{field} is ", Run(**{field: value}).resolve)
    groups = "groups:" + ";".join(",".join(map(str, range(k, k + 10))) for k in range(0, 100, 10))
    # a long setting is not tried as a path
    assert len(groups) > 255 and str(Run(dataset="cifar10", reach=groups).resolve().reach) == groups


def test_odd_archives(tmp_path):
    path = zipped(tmp_path / "a.zip", images(("train", "test"), ("a",), 1))
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 4), np.uint8), y=np.arange(9) % 2)
    for file, read in ((path, image_folder.read), (tmp_path / "a.npz", arrays.read)):
        raw = bytearray(file.read_bytes())
        for mark, flag in {b"PK\x03\x04": 6, b"PK\x01\x02": 8}.items():  # of encryption
            for at in [i for i in range(len(raw)) if raw[i : i + 4] == mark]:
                raw[at + flag] |= 1
        file.write_bytes(raw)
        refused("is encrypted", read, file)
    texts = zipped(tmp_path / "b.npz", {"x": b"text", "y": b"text"})
    refused("x is truncated, or no array of NumPy's", arrays.read, texts)
    source = folder(tmp_path / "i", images(("train", "test"), ("a", "b"), 2))
    for part in ("train", "test"):
        os.rename(os.fsencode(source / part / "a"), os.fsencode(source / part) + b"/\xff")
    refused("which is not UTF-8", prepare.prepare, "image_folder", source, tmp_path / "x.h5", {})


def test_ctrl_c_while_preparing(tmp_path, monkeypatch, said):
    monkeypatch.setattr(image_folder, "read", Mock(side_effect=KeyboardInterrupt))
    (tmp_path / "i").mkdir()
    words = ["image_folder", "--source", tmp_path / "i", "--out", tmp_path / "x.h5"]
    error = said(prepare.main, *words, code=130)
    assert error == f"interrupted: {tmp_path / 'x.h5'} is as it was\n"
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


def test_what_memory_does_not_hold(tmp_path, monkeypatch):
    source = folder(tmp_path / "i", images(("train", "test"), ("a",), 20))
    monkeypatch.setattr(_images, "memory", lambda: 70_000)
    refused("exceeds this machine's memory", image_folder.read, source)
