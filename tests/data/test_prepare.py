"""Staging: every form of a source is read; a malformed one is one sentence."""

import functools
import hashlib
import http.server
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from launch import refused, text_file
from making import folder, images, leaf, real, records, stored, tar, zipped

from dpfl_mpi.data.source import in_file, open_source, read_rows
from dpfl_mpi.datasets import arrays as own
from dpfl_mpi.datasets import (
    cifar10,
    cifar100,
    cinic10,
    femnist,
    image_folder,
    text_folder,
)
from dpfl_mpi.datasets._images import decode
from dpfl_mpi.plugins import find
from dpfl_mpi.prepare import default_out, main, prepare
from dpfl_mpi.settings import Run

NAMES = cifar10.CLASSES


def stage(dataset, source, out, **options):
    """Return the sentence of `prepare` with the data set's default options."""
    defaults = {"femnist": {"classes": "all"}}
    defaults["text_folder"] = {"vocabulary": 9, "length": 9}
    return prepare(dataset, source, out, defaults.get(dataset, {}) | options)


def unstaged(tmp_path, dataset, source, text, **options):
    """Check that a source, or a folder of these files, is refused and nothing is left."""
    if isinstance(source, dict):
        source = folder(Path(tempfile.mkdtemp(dir=tmp_path)), source)
    out = tmp_path / "out" / "x.h5"
    refused(text, stage, dataset, source, out, **options)
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_folder_tar_and_zip_are_the_same_data(tmp_path):
    files = images(("train", "valid", "test"), NAMES)
    hidden = {"train/cat/._0.png": b"no image", ".DS_Store": b"", "README": b"text"}
    found = set()
    for source in (
        folder(tmp_path / "folder", files | hidden),
        tar(tmp_path / "a.tar.gz", {f"./CINIC-10/{k}": v for k, v in reversed(files.items())}),
        tar(tmp_path / "a.tar", files | hidden, "w"),
        zipped(tmp_path / "a.zip", files | hidden),
    ):
        sentence = stage("cinic10", source, out := tmp_path / f"{source.name}.h5")
        assert "60 training and 30 test images of 32x32x3, 10 classes" in sentence
        found.add(in_file(out).sha256)
    assert len(found) == 1
    files = images(("train", "valid", "test"), NAMES, each=2)
    # some of CINIC-10's images are grey
    files["valid/cat/9.png"] = stored(np.full((32, 32), 7, np.uint8))
    out = cinic10.read(folder(tmp_path / "c", files))
    assert len(out.train_labels) == 41 and len(out.test_labels) == 20
    assert np.bincount(out.train_labels).tolist() == [4, 4, 4, 5, 4, 4, 4, 4, 4, 4]
    assert (out.train_images == 7).all((1, 2, 3)).sum() == 1
    assert out.mean == pytest.approx((0.4789, 0.4723, 0.4305), abs=1e-4)


def test_cifar10_binary(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "IMAGES", 20)
    at, numbered = "cifar-10-batches-bin", enumerate((*cifar10.TRAIN, *cifar10.TEST))
    files = {f"{at}/{name}": records(20, np.arange(20) % 10, i) for i, name in numbered}
    one = cifar10.read(tar(tmp_path / "c.tar.gz", files))
    two = cifar10.read(folder(tmp_path / "c", files))
    assert one.train_images.shape == (100, 32, 32, 3)
    assert one.test_labels.tolist() == [*range(10), *range(10)]
    assert np.array_equal(one.train_images, two.train_images)
    row = np.frombuffer(files[f"{at}/data_batch_1.bin"], np.uint8)[1:3073].reshape(3, 32, 32)
    assert np.array_equal(one.train_images[0], row.transpose(1, 2, 0))
    test = f"{at}/test_batch.bin"
    whole = files.pop(test)
    for changed, text in (
        (files | {test: whole[:-5]}, "test_batch.bin has 61455 bytes, not 61460"),
        (files, "has no test_batch.bin"),
        (files | {test: records(20, np.full(20, 11))}, "holds the label 11; allowed are 0 to 9"),
        ({"cifar-10-batches-py/data_batch_1": b"\x80\x04."}, "whose pickles are not read"),
    ):
        unstaged(tmp_path, "cifar10", tar(tmp_path / "changed.tar.gz", changed), text)


def test_cifar100_binary(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar100, "IMAGES", {"train.bin": 200, "test.bin": 100})
    both = np.stack([np.arange(200) % 20, np.arange(200) % 100], 1)
    files = {"train.bin": records(200, both, header=2)}
    files["test.bin"] = records(100, both[:100], header=2)
    files["fine_label_names.txt"] = "\n".join(f"n{i}" for i in range(100)).encode()
    out = cifar100.read(tar(tmp_path / "c.tar.gz", files))
    assert out.train_labels.max() == 99
    assert len(out.class_names) == 100 and out.class_names[3] == "n3"
    assert out.train_images.shape == (200, 32, 32, 3)
    options = {"classes": "digits"}
    assert default_out(find("dataset", "femnist"), options).name == "femnist-digits.h5"


def test_femnist_from_shards(tmp_path):
    out = femnist.read(folder(tmp_path / "leaf", leaf()))
    assert out.train_images.shape == (6 * 16, 28, 28, 1)  # the copies are gone
    assert len(out.test_labels) == 6 * 4
    assert out.client_names == tuple(f"f{k:02}" for k in range(6))
    assert np.bincount(out.train_clients).tolist() == [16] * 6
    assert len(out.class_names) == 62 and out.class_names[36:38] == ("a", "b")
    again = femnist.read(tar(tmp_path / "leaf.tar.gz", {f"data/{k}": v for k, v in leaf().items()}))
    assert np.array_equal(out.train_images, again.train_images)


@pytest.mark.parametrize("classes, count, first", [
    ("digits", 10, "0"), ("letters", 52, "A"), ("a-j", 10, "a"),
])  # fmt: skip
def test_femnist_classes(tmp_path, classes, count, first):
    source = folder(tmp_path / "leaf", leaf(each=200))
    out, whole = femnist.read(source, classes), femnist.read(source)
    low = whole.class_names.index(first)
    assert len(out.class_names) == count and out.class_names[0] == first
    chosen = (whole.train_labels >= low) & (whole.train_labels < low + count)
    assert np.array_equal(out.train_labels, whole.train_labels[chosen] - low)
    assert np.array_equal(out.train_images, whole.train_images[chosen])
    assert 0 < len(out.client_names) <= len(whole.client_names)


def test_own_arrays(tmp_path):
    x, y = np.random.default_rng(0).random((50, 6, 5)).astype(np.float32), np.arange(50) % 5
    np.savez(tmp_path / "a.npz", x=x, y=y, client=np.array(["ann", "bob"])[np.arange(50) % 2])
    out = own.read(tmp_path / "a.npz")
    assert out.train_images.shape == (40, 6, 5, 1) and out.client_names == ("ann", "bob")
    assert out.train_images.dtype == np.float32 and np.isin(out.train_images, x).all()
    assert np.bincount(out.test_clients).tolist() == [5, 5]  # a fifth of each client's
    stage("arrays", tmp_path / "a.npz", tmp_path / "a.h5")
    source = open_source(Run(dataset="arrays", data=str(tmp_path / "a.h5")).resolve())
    assert source.clients["train"].tolist() == out.train_clients.tolist()
    test, x = np.arange(50) < 10, np.rint(x * 255).astype(np.uint8)
    np.savez(tmp_path / "b.npz", x=x, y=y, test=test)
    b = own.read(tmp_path / "b.npz")
    assert np.array_equal(b.train_images[..., 0], x[~test])
    assert np.array_equal(b.test_images[..., 0], x[test])
    # 0 and 1 of any type are flags. One row of nine channels is a series, as in PFLlib's HAR.
    x, y = np.arange(20 * 128 * 9).reshape(20, 1, 128, 9) % 256, np.arange(20) % 2
    for kind in (bool, int, np.uint8, float):
        np.savez(tmp_path / "a.npz", x=x, y=y, test=(np.arange(20) > 14).astype(kind))
        sentence = stage("arrays", tmp_path / "a.npz", tmp_path / f"{kind.__name__}.h5")
        assert "15 training and 5 test images of 1x128x9, 2 classes" in sentence
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 32, 24, 3), np.uint8), y=y)
    assert "images of 32x24x3, 2 classes" in stage("arrays", tmp_path / "a.npz", tmp_path / "b.h5")


def test_second_run_is_instant_and_other_content_is_never_replaced(tmp_path):
    source = folder(tmp_path / "i", images(("train", "test"), ("a", "b")))
    stage("image_folder", source, out := tmp_path / "i.h5")
    written_at = out.stat().st_mtime_ns
    assert "is there already" in stage("image_folder", source, out)
    folder(source, {"train/a/more.png": images(("t",), ("c",), 1)["t/c/0.png"]})
    other = "made with other source (...); choose another --out, or overwrite it with --force"
    refused(other, stage, "image_folder", source, out)
    assert out.stat().st_mtime_ns == written_at
    assert "7 training" in prepare("image_folder", source, out, {}, force=True)
    archive = tar(tmp_path / "a.tar", images(("train", "test"), ("a", "b")), "w")
    stage("image_folder", archive, tmp_path / "b.h5")
    os.utime(archive, (1, 1))  # another time, the same bytes
    assert "is there already" in stage("image_folder", archive, tmp_path / "b.h5")
    lost = "which is read here and would be lost; name another file"
    refused(lost, prepare, "image_folder", archive, archive, {}, force=True)
    refused(lost, prepare, "image_folder", source, source / "train/a/more.png", {}, force=True)
    leaves = folder(tmp_path / "leaf", leaf())
    stage("femnist", leaves, tmp_path / "f.h5")
    other = "made with other options"
    refused(other, stage, "femnist", leaves, tmp_path / "f.h5", classes="digits")
    (tmp_path / "notes.h5").write_text("mine")
    refused("not a readable file of dpfl_mpi", stage, "femnist", leaves, tmp_path / "notes.h5")
    assert (tmp_path / "notes.h5").read_text() == "mine"


SLOW = """
import dpfl_mpi.prepare as p, time, sys, signal
p.in_file = lambda *a: (print('written', flush=True), time.sleep(60))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
p.main(['image_folder', '--source', sys.argv[1], '--out', sys.argv[2]])
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed_run_leaves_nothing_half_done(tmp_path, how):
    source = folder(tmp_path / "i", images(("train", "test"), ("a", "b"), each=2))
    out = tmp_path / "out" / "i.h5"
    words = [sys.executable, "-c", SLOW, source, out]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout.readline() == b"written\n"
        run.send_signal(how)
        run.wait(30)
    assert not out.exists()
    assert len(list(out.parent.iterdir())) == (how == signal.SIGKILL)
    assert "4 training" in stage("image_folder", source, out)
    assert [p.name for p in out.parent.iterdir()] == ["i.h5"]


def test_download_is_checked_and_kept(tmp_path, monkeypatch):
    (web := tmp_path / "web").mkdir()
    archive = tar(web / "c.tar.gz", images(("train", "valid", "test"), NAMES, each=1))
    md5, out = hashlib.md5(archive.read_bytes()).hexdigest(), tmp_path / "data" / "c.h5"
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=web)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/c.tar.gz"
        monkeypatch.setattr(cinic10, "DOWNLOAD", (url, "md5:" + "0" * 32, 1))
        refused("came with another checksum than md5:0000", stage, "cinic10", None, out)
        assert [p.name for p in out.parent.rglob("*")] == ["downloads"]
        monkeypatch.setattr(cinic10, "DOWNLOAD", (url, f"md5:{md5}", 1))
        assert "20 training" in stage("cinic10", None, out)
        server.shutdown()
    assert sorted(p.name for p in out.parent.rglob("*")) == ["c.h5", "c.tar.gz", "downloads"]
    unstaged(tmp_path, "femnist", None, "preprocess.sh -s niid --sf 1.0 -k 0 -t sample")
    unstaged(tmp_path, "arrays", None, "your own arrays")
    assert "is there already" in stage("cinic10", None, out)
    # from the archive that was kept
    assert "20 training" in prepare("cinic10", None, out, {}, force=True)
    monkeypatch.setattr(cinic10, "DOWNLOAD", ("http://127.0.0.1:9/c.tar.gz", f"md5:{'1' * 32}", 1))
    advice = "compute nodes often have no network: prepare on the login node"
    refused(advice, stage, "cinic10", None, tmp_path / "other" / "c.h5")
    assert not any(p.is_file() for p in (tmp_path / "other").rglob("*"))


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2", "w", "zip"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_truncated_archive(tmp_path, mode, share):
    files = images(("train", "valid", "test"), NAMES, each=1)
    path = tmp_path / "whole"
    zipped(path, files) if mode == "zip" else tar(path, files, mode)
    whole = path.read_bytes()
    between = sum(512 + -(-len(data) // 512) * 512 for data in files.values())  # two files
    for end in (int(len(whole) * share), *([between] if mode == "w" else [])):
        path.write_bytes(whole[:end])
        unstaged(tmp_path, "cinic10", path, "truncated or not a tar or zip archive")


def png(bits):
    """Return a PNG of 32x32 pixels in colour, of 8 or 16 bits per channel, which Pillow cuts."""
    chunks = {b"IHDR": struct.pack(">IIBBBBB", 32, 32, bits, 2, 0, 0, 0)}
    chunks |= {b"IDAT": zlib.compress((b"\0" + bytes(32 * 3 * bits // 8)) * 32), b"IEND": b""}
    out = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks.items():
        end = struct.pack(">I", zlib.crc32(kind + data))
        out += struct.pack(">I", len(data)) + kind + data + end
    return out


def test_what_does_not_fit(tmp_path):
    assert decode(png(8), "", None).shape == (32, 32, 3)
    ppm = b"P6 32 32 65535\n" + bytes(32 * 32 * 6)
    three = ("train", "valid", "test")
    files, two = images(three, NAMES, each=1), images(("train", "test"), ("a", "b"))
    one, more = images(("train",), ("a", "b")), images(("test",), "abcdefghi")
    pcx, old = stored(np.zeros((32, 32), np.uint8), "PCX"), {f"old/{k}": v for k, v in two.items()}
    boat = {"test/boat/0.png": files["test/ship/0.png"]}
    lacks = {name: data for name, data in files.items() if not name.startswith("valid/ship")}
    for dataset, source, text in (
        ("cinic10", lacks, "valid holds no image of the class ship"),
        ("cinic10", files | boat, "test holds other classes (boat); expected"),
        ("cinic10", {"x.txt": b""}, "train holds no image; expected train/CLASS/*"),
        ("cinic10", images(three, NAMES, 1, (28, 28)), "is 28x28; allowed is 32x32"),
        ("cifar100", two, "has 2 classes; CIFAR-100 has 100"),
        ("image_folder", {"x.txt": b""}, "holds no image; expected {train,test}/CLASS/* or"),
        ("text_folder", {"train.csv": b"1"}, 'needs lines of a class and a text: "3","Title"'),
        ("image_folder", one | images(("test",), ("a",)), "test holds no image of the class b"),
        ("image_folder", one | more, "test holds other classes (c, d, e, f, g and 2 more)"),
        ("image_folder", two | images(("test",), ("b",), 1, (16, 8)), "is 16x8, the first"),
        ("image_folder", two | {"train/a/1.png": pcx}, "train/a/1.png is not a readable image"),
        ("image_folder", two | old, "holds several data sets, in ., old; name one"),
        ("image_folder", two | {"train/a/1.png": b"no"}, "train/a/1.png is not a readable image"),
        ("image_folder", two | {"train/a/1.png": two["train/a/1.png"][:300]}, "not a readable"),
        ("image_folder", {"a/0.png": pcx, "b/c/0.png": pcx}, "not a readable"),
        ("image_folder", one | {f"old_{k}": v for k, v in one.items()}, "all named after train"),
        ("image_folder", images(("x", "x-val"), ("a", "b")), "holds x-val, named after a part"),
        ("image_folder", one, "test holds no image of the class a; expected test/CLASS/*"),
        ("image_folder", images(("a", "b/c"), ("",)), "beside b/c/0.png (CLIENT/CLASS/*)"),
        ("image_folder", two | {"train/a/1.png": png(16)}, "has 16 bits per channel; allowed"),
        ("image_folder", two | {"train/a/1.ppm": ppm}, "has 16 bits per channel; allowed"),
        ("text_folder", {"train.csv": b'a,x\nb,"y\na,z\nb,y'}, "with closed quotes"),
        ("text_folder", {"train.csv": b",label,text\n0,a,x\n1,b,y"}, "has the columns ,label,text"),
        ("text_folder", {"train.csv": b"text,label\nx,a\ny,b\nz,b"}, "the first must be the class"),
        ("text_folder", {"train.csv": b"a,x", "d/train.csv": b"a,x"}, "several tables of one part"),
    ):  # fmt: skip
        unstaged(tmp_path, dataset, source, text)
    np.save(tmp_path / "x.npy", np.zeros((20, 3)))
    np.savez(tmp_path / "whole.npz", x=np.zeros((20, 3)), y=np.arange(20) % 2)
    for name, end in (("cut.npz", 300), ("short.npz", -40)):
        (tmp_path / name).write_bytes((tmp_path / "whole.npz").read_bytes()[:end])
    for name in ("x.npy", "cut.npz", "short.npz"):
        unstaged(tmp_path, "arrays", tmp_path / name, f"{name} is no whole npz file; np.savez(")


def test_folders_of_clients(tmp_path, capsys):
    """As PACS: a folder per domain; one is of grey images, one of another size."""
    files = images(("photo", "cartoon"), ("dog", "horse"), 10)
    files |= images(("sketch",), ("dog", "horse"), 10, (16, 8))
    source = folder(tmp_path / "pacs", files)
    unstaged(tmp_path, "image_folder", source, "is 16x8, the first image 32x32; --size 32 scales")
    out = image_folder.read(source, size=8)
    assert out.client_names == ("cartoon", "photo", "sketch")
    assert out.class_names == ("dog", "horse")
    assert (out.train_images.shape[1:], out.client_groups) == ((8, 8, 3), ())
    assert np.bincount(out.test_clients).tolist() == [4, 4, 4]
    out = image_folder.read(source, 8, clients_per_folder=2)
    assert out.client_names[:3] == ("cartoon-0", "cartoon-1", "photo-0")
    assert out.client_groups == ("cartoon", "cartoon", "photo", "photo", "sketch", "sketch")
    of_client = np.bincount(np.r_[out.train_clients, out.test_clients])
    assert of_client.tolist() == [10] * 6
    alone = folder(tmp_path / "alone", images(("photo",), ("dog", "horse"), 10))
    assert image_folder.read(alone / "photo").train_clients is None
    refused("--clients_per_folder is 2; allowed is 1", image_folder.read, alone / "photo", 0, 2)
    assert capsys.readouterr().err == ""


def test_tiny_imagenet(tmp_path, capsys):
    image = dict(zip("abcd", images(("s",), ("c",), 4).values(), strict=True))
    files = {f"tiny/train/{c}/images/{c}_{i}.JPEG": image[i] for c in ("n1", "n2") for i in "ab"}
    files |= {"tiny/train/n1/n1_boxes.txt": b"", "tiny/words.txt": b"n1\tgoldfish"}
    files |= {f"tiny/{part}/images/{i}.JPEG": image[i] for part in ("val", "test") for i in "abcd"}
    lines = "a.JPEG\tn2\t0\t1\t2\t3\nb.JPEG\tn1\t0\t1\t2\t3\nc.JPEG\tn2\nd.JPEG\tn1\n"
    files["tiny/val/val_annotations.txt"] = lines.encode()
    out = image_folder.read(tar(tmp_path / "tiny.tar", files))
    assert out.class_names == ("n1", "n2") and out.train_labels.tolist() == [0, 0, 1, 1]
    assert out.test_labels.tolist() == [0, 0, 1, 1]  # b, d, a, c
    assert np.array_equal(out.test_images[2], out.train_images[0])
    left = "files of tiny/test/images (4) are not read"
    assert left in capsys.readouterr().err


def test_tables_of_texts(tmp_path, capsys):
    """Long texts, UTF-16, and the names that people give to their tables; y is 2, x is 3."""
    train, val = b"a,x y\nb,y\na,x\nb,y", b"a,y\nb,x"
    for i, (files, training, test) in enumerate([
        ({"train.csv": train, "val.csv": val}, [[3, 2], [2, 0], [3, 0], [2, 0]], [[2, 0], [3, 0]]),
        ({"my_Train.CSV": train, "Test.csv": val}, None, [[2, 0], [3, 0]]),
        ({"train.csv": train, "test.csv": val, "valid.csv": b"a,z"}, None, [[2, 0], [3, 0]]),
        ({"train.csv": b"kind,words\n" + train, "test.csv": val}, None, [[2, 0], [3, 0]]),
        ({"train.csv": train.decode().encode("utf-16"), "test.csv": val}, None, [[2, 0], [3, 0]]),
    ]):  # fmt: skip
        out = text_folder.read(folder(tmp_path / str(i), files), vocabulary=9, length=2)
        assert out.test_images.tolist() == test
        assert out.train_images.tolist() == training or training is None
    unread, head = capsys.readouterr().err.splitlines()
    assert "files of valid.csv (1) are not read; read are tables train.csv" in unread
    assert head.endswith("train.csv: the line 'kind,words' is taken for the names of columns")
    long = {"train.csv": b"a," + b"x " * 70_000 + b"\nb,y\n" + b"a,x\nb,y\n" * 8}
    assert text_folder.read(folder(tmp_path / "l", long), 9, 3).train_images.max() == 3


def test_texts(tmp_path):
    """Words are numbered by the training part: b 2, a 3, é 4; others are 1."""
    files = {"n-train/x/1": b"b, B a", "n-train/y/2": "\xe9 a b".encode("latin-1")}
    files |= {"n-test/x/3": b"a new b b", "n-test/y/4": b""}
    out = text_folder.read(folder(tmp_path / "n", files), vocabulary=9, length=3)
    assert out.train_images.tolist() == [[2, 2, 3], [4, 3, 2]]
    assert out.test_images.tolist() == [[3, 1, 2], [0, 0, 0]]
    assert (out.class_names, out.vocabulary) == (("x", "y"), 5)
    out = text_folder.read(tmp_path / "n", vocabulary=1, length=9)
    assert out.train_images.tolist() == [[2, 2, 1, 0], [1, 1, 2, 0]]
    head = b"label,title,text\n"
    files = {"train.csv": head + b'2,"a, a",b\n1,b,c\n1,b,c\n2,b,c'}
    files["test.csv"] = head + b"1,d,a\n1,,"
    for lists, names in (({}, ("1", "2")), ({"classes.txt": b"World\nArts\n"}, ("Arts", "World"))):
        members = {f"ag/{name}": data for name, data in (files | lists).items()}
        path = tar(tmp_path / "ag.tar", members)
        out = text_folder.read(path, vocabulary=9, length=3)
        assert out.class_names == names  # b 2, c 3, a 4
        assert out.train_images.tolist() == [[4, 4, 2], [2, 3, 0], [2, 3, 0], [2, 3, 0]]
        assert out.test_images.tolist() == [[1, 4, 0], [0, 0, 0]]
        assert [names[label] for label in out.train_labels[:2]] == (
            ["Arts", "World"] if lists else ["2", "1"]
        )
    alone = {f"{c}/{t}/{i}": b"word" for c in "pq" for t in "st" for i in range(5)}
    out = text_folder.read(folder(tmp_path / "c", alone), 9, 9)
    assert out.client_names == ("p", "q") and np.bincount(out.test_clients).tolist() == [2, 2]
    image = "p/s/3 is no text (it holds the character NUL); leave out such files"
    unstaged(tmp_path, "text_folder", alone | {"p/s/3": b"\xff\xd8\0JFIF"}, image)
    names = ": classes.txt is no text (it holds the character NUL); leave out such files"
    unstaged(tmp_path, "text_folder", files | {"classes.txt": b"World\0"}, names)


def test_links_and_what_is_twice_are_refused(tmp_path, monkeypatch):
    """An image that was left out, or counted twice, would be no word."""
    source = folder(tmp_path / "whole", images(("train", "test"), ("a", "b")))
    refuse = functools.partial(unstaged, tmp_path, "image_folder")
    for target, what in (
        ("..", "a folder above it; remove it"),
        ("none", "nothing; copy it there"),
    ):
        (source / "train" / "c").symlink_to(source / target)
        refuse(source, f"whole holds c, a link to {what}")
        (source / "train" / "c").unlink()
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "train").symlink_to(source / "train")
    (linked / "test").symlink_to(source / "test")
    both = [prepare("image_folder", p, tmp_path / "l.h5", {}, True) for p in (source, linked)]
    assert both[0] == both[1]
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, how: path.name != "b")  # root may read all
        refuse(source, "whole holds b, a folder that may not be read; allow it")
    os.link(source / "train/a/0.png", source / "train/a/9.png")
    with tarfile.open(tmp_path / "linked.tar", "w") as archive:
        archive.add(source, "")
    not_followed = "train/a/9.png, a link, which is not followed; pack it with tar --dereference"
    refuse(tmp_path / "linked.tar", not_followed)
    (source / "train/a/9.png").unlink()
    with zipfile.ZipFile(tmp_path / "linked.zip", "w") as archive:
        archive.writestr(link := zipfile.ZipInfo("train/a/9.png"), "0.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
    refuse(tmp_path / "linked.zip", "train/a/9.png, a link, which is not followed; pack it without")
    for name in ("", "train/a/0.png"):
        with tarfile.open(tmp_path / "twice.tar", "a") as archive:
            archive.add(source / name, name)
    refuse(tmp_path / "twice.tar", "holds train/a/0.png twice; pack it anew")


of_writer = lambda edit: lambda shard: edit(shard["user_data"]["f02"])  # noqa: E731


UNFIT = "train/b.json is truncated, or no LEAF shard whose users"
NO_LISTS = "writer f02 has no lists x of images of 784 numbers"


@pytest.mark.parametrize("edit, text", [
    (lambda d: d["user_data"].pop("f02"), UNFIT),
    (lambda d: d["users"].remove("f02"), UNFIT),
    (lambda d: d.update(users={}), UNFIT),
    (lambda d: d.pop("users"), UNFIT),
    (lambda d: d.update(user_data=3), UNFIT),
    (lambda d: d["num_samples"].pop(), UNFIT),
    (lambda d: d["user_data"].update(f99=d["user_data"]["f02"]), UNFIT),
    (lambda d: (d["users"].append("f02"), d["num_samples"].append(17)), UNFIT),
    (lambda d: d["num_samples"].__setitem__(1, 5), "num_samples says 5"),
    (of_writer(lambda w: w.pop("y")), NO_LISTS),
    (of_writer(lambda w: w["y"].pop()), NO_LISTS),
    (of_writer(lambda w: w["x"][3].pop()), NO_LISTS),
    (of_writer(lambda w: w["x"].pop()), NO_LISTS),
    (of_writer(lambda w: w.update(y="a")), NO_LISTS),
    *((of_writer(lambda w, y=y: w["y"].__setitem__(3, y)), text) for y, text in (
        (62, "writer f02 has the label 62; allowed are 0 to 61"), (-1, "the label -1"),
        (1.5, "the label 1.5"), ("a", NO_LISTS), (10**400, NO_LISTS))),
    *((of_writer(lambda w, x=x: w["x"][3].__setitem__(3, x)), text) for x, text in (
        (2.0, "a pixel beyond 0 to 1"), (-1, "a pixel beyond"), (None, "a pixel beyond"),
        (10**400, NO_LISTS))),
])  # fmt: skip
def test_malformed_shards(tmp_path, edit, text):
    files, name = leaf(), "train/b.json"
    data = json.loads(files[name])
    edit(data)
    unstaged(tmp_path, "femnist", files | {name: json.dumps(data).encode()}, text)


def test_shards_that_are_missing_or_not_read(tmp_path, capsys):
    files = leaf()
    short = files | {"train/a.json": files["train/a.json"][:-50]}
    unstaged(tmp_path, "femnist", short, "truncated, or no LEAF shard")
    del files["test/a.json"]
    unstaged(tmp_path, "femnist", files, "holds no test/*.json")
    files = leaf()
    femnist.read(folder(tmp_path / "whole", files | {"README": b""}))
    assert capsys.readouterr().err == ""
    odd = ("val/a.json", "train/b.json.gz", "train/.c.json", "train/.DS_Store")
    others = dict.fromkeys([*odd, *[f"{name}/a.json" for name in femnist.BESIDE]], b"{}")
    out = femnist.read(folder(tmp_path / "more", files | others))
    unread = "files of train (1), val (1) are not read; read are train/*.json, test/*.json"
    assert capsys.readouterr().err == f"warning: {tmp_path / 'more'}: {unread}\n"
    assert out.note == "LEAF's FEMNIST, 6 of 6 writers, classes all, 6 second copies left out"


def test_rows_are_read_in_any_order_and_with_gaps(tmp_path, monkeypatch):
    x = np.random.default_rng(0).integers(0, 256, (9000, 2, 3, 1), dtype=np.uint8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["train/images"] = x
    shuffled, odd = np.random.default_rng(1).permutation(9000)[:40], [8999, 0, 4096, 4095, 17, 17]
    ranges = np.arange(9000), np.r_[4000:4200, 8000:8100]
    for gap in (0, 5, 10**6):
        monkeypatch.setattr("dpfl_mpi.data.source.GAP_ROWS", gap)
        for rows in (*ranges, shuffled, np.array(odd), np.array([], int)):
            assert np.array_equal(read_rows(tmp_path / "x.h5", "train", rows), x[rows])


@pytest.mark.parametrize("fields, text", [
    ({"y": None}, "x and y are needed"),
    ({"y": np.zeros(10)}, "y has 1 classes; allowed are 2 to 65536"),
    ({"x": np.full((10, 4), 1e39)}, "x holds a missing, infinite or too large number"),
    ({"x": np.zeros(10)}, "allowed are [M, H, W, C]"),
    ({"x": np.full((10, 4), 2**31)}, "goes from 2147483648"),
    ({"x": np.full((10, 4, 4), 256)}, "whole numbers of an image are 0 to 255"),
    ({"x": np.full((10, 4), "a")}, "<U1; allowed are uint8 (images)"),
    ({"y": np.array([{}] * 10, object)}, "pickled objects, which are never read"),
    ({"x": np.zeros((10, 3, 32, 24), np.uint8)}, "channels first; images are [M, H, W, C]"),
    ({"x": np.zeros((10, 1, 28, 28))}, "channels first"),
    ({"test": np.arange(10) % 3}, "test holds 2; allowed are true, false, 1, 0"),
    ({"test": np.where(np.arange(10) > 7, "test", "train")}, "test holds train; allowed are true"),
    ({"test": np.linspace(0, 1, 10)}, "test holds 0.1111111111111111; allowed"),
    ({"test": np.full(10, np.nan)}, "test holds nan; allowed"),
    ({"test": np.zeros(10, int)}, "10 training and 0 test samples"),
    ({"y": np.arange(10) // 9, "test": np.arange(10) > 8}, "test has the label 1, which training"),
    ({"client": np.arange(3)}, "client is int64 of (3,)"),
    ({"clients": np.arange(10)}, "holds clients; allowed are x, y, client, group, test"),
])  # fmt: skip
def test_malformed_arrays(tmp_path, fields, text):
    whole = {"x": np.zeros((10, 4)), "y": np.arange(10) % 2} | fields
    np.savez(tmp_path / "a.npz", **{k: v for k, v in whole.items() if v is not None})
    unstaged(tmp_path, "arrays", tmp_path / "a.npz", text)


def test_files_that_are_not_read_are_named(tmp_path, capsys):
    """Images beside train and test, too deep or too high; in a class also what is no image."""
    files = images(("train", "test"), ("a", "b"))
    one = files["test/b/0.png"]
    no_loss = dict.fromkeys(("notes/a/x.txt", "README", "train/a/.DS_Store", "train/.c/0.png"), one)
    stage("image_folder", folder(tmp_path / "whole", files | no_loss), tmp_path / "a.h5")
    assert capsys.readouterr().err == ""
    more = images(("val",), ("a",), each=2) | {"train/a/x/0.png": one, "b/0.png": one}
    more |= {f"{name}/0.png": one for name in ("e", "f")}
    more |= {"train/b/notes.txt": b"notes", "train/b/film": b"1"}
    stage("image_folder", folder(tmp_path / "i", files | more), tmp_path / "b.h5")
    left_out = "files of b (1), e (1), f (1), train/a/x (1), train/b (2) and 1 more are not read"
    error = capsys.readouterr().err
    read = "images in {train,test}/CLASS/* or CLIENT/CLASS/*"
    assert error == f"warning: {tmp_path / 'i'}: {left_out}; read are {read}\n"
    assert in_file(tmp_path / "a.h5").sha256 == in_file(tmp_path / "b.h5").sha256


@pytest.mark.parametrize("pack", [folder, tar, zipped])
def test_every_format_of_images_is_read(tmp_path, pack, capsys):
    names = ("0.png", "1.jfif", "2.DIB", "3.gif", "4.tiff", "5.webp", "6.pnm")
    kinds = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
    places = [f"{half}/{c}" for half in ("train", "test") for c in "abc"]
    pixels = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 3), np.uint8)
    data = [stored(x, kind) for x, kind in zip(pixels, kinds, strict=True)]
    each = dict(zip(names, data, strict=True))
    files = {f"{place}/{name}": image for place in places for name, image in each.items()}
    sentence = stage("image_folder", pack(tmp_path / "i", files), tmp_path / "i.h5")
    assert "21 training and 21 test images of 8x8x3, 3 classes" in sentence
    assert capsys.readouterr().err == ""
    source = pack(tmp_path / "cut", files | {"train/a/9.png": files["train/a/0.png"][:-60]})
    unstaged(tmp_path, "image_folder", source, "train/a/9.png is not a readable image")


def test_command_line_prints_one_sentence(tmp_path, said):
    words = ["femnist", "--source", folder(tmp_path / "leaf", leaf()), "--out"]
    assert "52 classes, 6 clients" in said(main, *words, tmp_path / "x.h5", "--classes=letters")
    options = (
        "from dataclasses import dataclass, field\n@dataclass\nclass Options:\n    out: str = "
    )
    for name, value in (("odd", "field(default='', metadata={'help': ''})"), ("plain", "''")):
        text_file(tmp_path / f"{name}.py", f"{options}{value}\ndef read(source, out):\n    pass\n")
    for mistake, sentence in {
        f"cinic10 --source {tmp_path}/none": f"--source is {tmp_path}/none; there is no such file",
        "femnist --classes greek": "--classes is 'greek'; allowed are all, digits, letters, a-j",
        "image_folder --size q": "--size is q; allowed is a whole number from 0 to 8192",
        "cifar10 --classes zz": "unrecognized arguments: --classes zz",
        f"{tmp_path}/odd.py": "Options of the data set odd has out, a flag of prepare; rename it",
        f"{tmp_path}/plain.py": "Options of the data set plain must be a dataclass; its fields are",
        "": "the following arguments are required: DATASET",
    }.items():
        answer = said(main, *mistake.split(), code=2)
        assert answer.startswith(f"error: {sentence}") and answer.count("\n") == 1
    (tmp_path / "file").write_text("")
    assert "cannot be written" in said(main, *words, tmp_path / "file" / "x.h5", code=2)


@pytest.mark.data
def test_real_cinic_sample():
    out = cinic10.read(real("cinic10-sample.tar"))
    assert np.bincount(out.train_labels).tolist() == [150] * 10
    assert np.bincount(out.test_labels).tolist() == [50] * 10
    publishers = np.array(out.mean)
    assert np.abs(out.train_images.mean((0, 1, 2)) / 255 - publishers).max() < 0.03


@pytest.mark.data
def test_real_leaf_shards(tmp_path):
    source, tool = real("femnist.npz"), real("../tools/leaf_json.py")
    words = [sys.executable, tool, source, tmp_path / "leaf", "--writers", "40"]
    subprocess.run(words, check=True, capture_output=True)
    start = time.perf_counter()
    out = femnist.read(tmp_path / "leaf")
    assert time.perf_counter() - start < 120 and len(out.client_names) == 40
    with np.load(source) as data:
        chosen = np.isin(data["writers"], out.client_names) & ~data["dup"]
        for number, half in enumerate(("train", "test")):
            rows = np.flatnonzero(chosen & (data["split"] == number))
            rows = rows[np.argsort(data["writers"][rows], kind="stable")]
            assert np.array_equal(getattr(out, f"{half}_images")[..., 0], data["images"][rows])
            assert np.array_equal(getattr(out, f"{half}_labels"), data["labels"][rows])
            writers = [out.client_names[i] for i in getattr(out, f"{half}_clients")]
            assert writers == data["writers"][rows].tolist()
