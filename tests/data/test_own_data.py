"""Anyone's own samples, PFLlib's folders, and what follows for a Run."""

import io
import itertools
import os
import pickle
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from launch import refused, run_here, text_file
from making import folder, stored, tar
from test_prepare import stage, unstaged

from dpfl_mpi import describe
from dpfl_mpi.data.own import arrays_of, numbered
from dpfl_mpi.data.source import ARRAYS, NAMES, check, in_file, in_memory, made_by, open_source
from dpfl_mpi.datasets import SMALL, pfllib
from dpfl_mpi.datasets._pickles import unpickle
from dpfl_mpi.numerics.clients import bordered
from dpfl_mpi.plugins import admit, find
from dpfl_mpi.prepare import write
from dpfl_mpi.settings import Run


def own_file(path, paper=None, body="", load="load()"):
    """Write a data set of one's own, of which `body` is the function, and return its path."""
    imports = "import numpy as np\nfrom dpfl_mpi.data.own import arrays_of\n"
    return text_file(path, f"{imports}PAPER = {paper or {}}\ndef {load}:\n    {body or 'pass'}\n")


def test_what_own_samples_are_and_are_not():
    y = np.arange(40) % 4
    levels = np.arange(40 * 30).reshape(40, 6, 5) % 256
    for x in (levels.astype(np.uint8), levels):
        out = arrays_of(x, y)
        assert out.train_images.dtype == np.uint8 and out.train_images.shape == (32, 6, 5, 1)
        both = np.r_[out.train_images, out.test_images].ravel()
        assert np.array_equal(np.sort(both), np.sort(levels.ravel()))
    vectors = np.stack([np.linspace(-2.6, 241.9, 40), np.full(40, 0.1)], 1)
    out = arrays_of(vectors, np.array(["cat", "ant"])[y % 2])
    first, names = out.train_images[:, 0], out.class_names
    assert (first.dtype, names, out.train_labels.max()) == (np.float32, ("ant", "cat"), 1)
    assert out.std[1] == 1.0 and out.std[0] == pytest.approx(first.std(), rel=1e-5)
    assert np.float32(-2.6) in {float(first.min()), float(out.test_images[:, 0].min())}
    tokens = arrays_of(np.full((40, 3), 2**31 - 1), y - 7.0)
    assert (tokens.vocabulary, tokens.mean) == (2**31, ())
    assert tokens.class_names == ("-7", "-6", "-5", "-4")
    assert tokens.train_images.dtype == np.int32 and int(tokens.train_images[0, 0]) == 2**31 - 1
    alone = arrays_of(vectors, np.r_[np.zeros(38), 1, 1], client=np.r_[np.zeros(35), np.ones(5)])
    assert 1 in alone.train_labels  # a class is never in the test part alone
    levels, y = np.random.default_rng(0).integers(0, 256, (60, 9, 8, 2)), np.arange(60) % 3
    scaled = [levels * unit for unit in (1.0, 1 / 255, 3.9e-6 / 255, 1e30)]
    for x in scaled + [x.astype(np.float32) for x in scaled]:
        out = arrays_of(x, y, test=np.arange(60) > 44)
        stored = np.concatenate([out.train_images, out.test_images])
        assert stored.dtype == np.float32 and np.array_equal(stored, x.astype(np.float32))
        train = x[:45].astype(np.float64)
        assert out.mean == pytest.approx(train.mean((0, 1, 2)), rel=1e-6)
        assert out.std == pytest.approx(train.std((0, 1, 2)), rel=1e-6)
    # One white pixel of a million has the deviation sqrt(p (1 - p)), a constant channel 1.
    x = np.zeros((500, 50, 50, 3), np.uint8)
    x[0, 0, 0, 0], x[..., 1], x[7, 7, 7, 2] = 255, 77, 1
    out = arrays_of(x, np.arange(500) % 2, test=np.arange(500) > 399)
    p = 1e-6
    assert out.mean == pytest.approx((p, 77 / 255, p / 255))
    assert out.std == pytest.approx((np.sqrt(p * (1 - p)), 1, np.sqrt(p * (1 - p)) / 255))
    seconds, y = 1.7e9 + np.arange(300) % 3, np.arange(300) % 3  # since 1970
    tiny = np.random.default_rng(0).normal(size=(300, 2)) * 1e-50
    beside_zeros, repeated = np.c_[np.zeros(300), seconds], np.repeat(seconds, 8)
    for x, column in ((beside_zeros, 1), (repeated.reshape(300, 2, 4), 0), (tiny, 0)):
        text = f"x has numbers in column (or channel) {column} too far from 0 for the 7 digits"
        refused(text, arrays_of, x, y)
    days, centred = np.linspace(19675, 20040, 300), seconds - seconds.mean()
    out = arrays_of(np.stack([days, np.full(300, 1.7e9 + 1), centred], 1), y)
    assert out.train_images.dtype == np.float32 and out.std[1] == 1
    assert len(np.unique(out.train_images[:, 2])) == 3
    arrays_of(np.stack([1.7e9 + np.arange(300)] * 2, 1).astype(np.float32), y)


def test_defaults_of_own_data_follow_from_the_file(tmp_path):
    owner = np.repeat(np.arange(7), [10, 10, 10, 10, 10, 10, 2])
    x, y = np.arange(62 * 4).reshape(62, 4), np.arange(62) % 2
    small, large = np.zeros((62, 8, 8)), np.zeros((62, 16, 16))
    runs = []
    for i, samples in enumerate((x, x + 0.5, small, large)):
        path = tmp_path / f"{i}.h5"
        write(arrays_of(samples, y, None if i else owner), "arrays", path, own=True)
        runs.append(Run(dataset="arrays", data=str(path)))
    resolved = [run.resolve() for run in runs]
    assert [run.model for run in resolved] == ["text", "mlp", "mlp", "cnn"]
    assert {(run.rounds, run.augment, run.batch_size) for run in resolved} == {(20, False, 16)}
    found = [(str(run.partition), run.clients, run.budget.number) for run in resolved]
    assert found[0] == ("natural", 6, 2)  # 0.25 x 6, halves up
    assert found[1] == ("pathological", 20, 5)
    least, other = replace(runs[0], min_samples=2), replace(runs[0], partition="dirichlet")
    assert least.resolve().clients == 6  # of two samples none is left to test
    assert other.resolve().clients == 20


def test_clients_are_counted_by_number(tmp_path):
    y = np.arange(36) % 2
    for numbers in (np.arange(36) // 3, np.arange(36) // 3 * 1.0):
        out = arrays_of(np.zeros((36, 3)), y, client=numbers)
        assert out.client_names == tuple(map(str, range(12)))
        assert np.array_equal(np.bincount(out.train_clients), np.full(12, 2))
        assert np.array_equal(out.train_clients, np.sort(out.train_clients))
    named = arrays_of(np.zeros((36, 3)), y, client=np.array(["é", "b", "a"])[np.arange(36) % 3])
    assert named.client_names == ("a", "b", "é") and named.client_groups == ()
    client, group = np.array(["é", "b", "a"])[np.arange(36) % 3], np.arange(36) % 3 // 2
    grouped = arrays_of(np.zeros((36, 3)), y, client, group=group)
    assert grouped.client_groups == ("1", "0", "0")
    hashes = [in_memory(arrays).sha256 for arrays in (named, grouped)]
    assert hashes[0] != hashes[1]  # the oracle chooses by groups
    of = "group of the client é is False and True; give one"
    refused(of, arrays_of, np.zeros((36, 3)), y, client, group=np.arange(36) > 2)
    refused("has group but no client", arrays_of, np.zeros((36, 3)), y, group=group)
    few = replace(named, client_groups=("a",))
    refused("client_groups has 1 texts; allowed are 3", check, few, "it")
    in_bytes = np.array([b"a", "é".encode()])[y]  # as HDF5 and npz may have them
    assert arrays_of(np.zeros((36, 3)), y, client=in_bytes).client_names == ("a", "é")
    which, names = numbered("f", "client", np.array([1e19, 2e19, 3, 3]), 4)
    assert which.tolist() == [1, 2, 0, 0] and names == ("3.0", "1e+19", "2e+19")
    assert numbered("f", "client", np.array(["b", "a"], ">U1"), 2)[1] == ("a", "b")


def test_what_the_file_says_of_a_run_holds(tmp_path):
    (tmp_path / "source").touch()
    dealt, found = {"partition": "pathological", "clients": 3, "model": "resnet"}, []
    for i, paper in enumerate(({}, dealt, {"partition": "dirichlet"})):
        body = "y = np.arange(60); return arrays_of(np.zeros((60, 16, 16)), y % 3, client=y % 5)"
        path = own_file(tmp_path / f"mine{i}.py", paper, body, "read(source)")
        admit("dataset", path)
        stage(path, tmp_path / "source", tmp_path / f"{i}.h5")
        run = Run(dataset=path, data=str(tmp_path / f"{i}.h5")).resolve()
        found.append((str(run.partition), run.clients, run.model))
    assert found == [("natural", 5, "cnn"), ("pathological", 3, "resnet"), ("dirichlet", 20, "cnn")]
    # the paper's Dir(0.1) is for data that say no alpha, and for the shipped ones
    mine = own_file(tmp_path / "mine.py", {"partition": "dirichlet", "dirichlet_alpha": 5.0})
    runs = [Run(dataset=name, partition="dirichlet") for name in (mine, path, "digits")]
    assert [run.resolve().dirichlet_alpha for run in runs] == [5.0, 0.1, 0.1]


@pytest.mark.parametrize("paper, warned", [
    ({"clients": 3}, True),
    ({"clients": 5, "partition": "natural"}, False),
    ({"clients": 3, "partition": "pathological"}, False),
])  # fmt: skip
def test_clients_that_a_run_does_not_read_are_named(tmp_path, said, capfd, paper, warned):
    """A `load` is called too late for its clients to be the default."""
    body = "y = np.arange(120) % 3; return arrays_of(np.eye(3)[y], y, client=np.arange(120) % 5)"
    path = own_file(tmp_path / "sites.py", paper, body)
    unread = "the data name each sample's client, which --partition pathological does not read"
    sentence = f"{unread}; --partition natural does"
    text = said(describe.main, "--dataset", path, "--no-measure")
    assert (sentence in " ".join(text.split())) == warned
    run_here(tmp_path / "a.h5", {"dataset": path, "rounds": 0}, quiet=False)
    assert (f"warning: {sentence}" in capfd.readouterr().err) == warned


def test_clients_that_cannot_take_part_are_counted(tmp_path, said, capfd):
    """Of nine, 4 has no test sample, 5 none and 6 one to train, 7 and 8 four samples in all."""
    owner = np.repeat(np.arange(9), 10)
    nth = np.tile(np.arange(10), 9)
    test = np.select([owner == 4, owner == 5, owner == 6], [False, True, nth > 0], nth > 7)
    few = (owner < 7) | (nth > 5)
    x, y = np.random.default_rng(0).normal(size=(90, 3)), np.arange(90) % 2
    named = np.array(list("abcdefghi"))[owner[few]]
    write(arrays_of(x[few], y[few], named, test[few]), "arrays", tmp_path / "a.h5", own=True)
    fields = {"dataset": "arrays", "data": str(tmp_path / "a.h5"), "rounds": 0}
    needs = "each needs 5 samples (--min_samples), 2 to train and 1 to test"
    sentence = f"5 of the 9 clients in the data do not take part: {needs}"
    words = ["--dataset", "arrays", "--data", tmp_path / "a.h5", "--no-measure"]
    assert sentence in " ".join(said(describe.main, *words).split())
    enough = {"min_samples": 4, "clients": 4}
    for more, warned in (({}, True), ({"clients": 3}, False), (enough, False)):
        run_here(tmp_path / f"{more}.h5", fields | more, quiet=False)
        assert (f"warning: {sentence}" in capfd.readouterr().err) == warned
    diverged = "client 0 (a) diverged in round 0: "
    refused(diverged, run_here, tmp_path / "b.h5", fields | {"lr": 1e9, "clip_norm": 0.0})


@pytest.mark.parametrize("paper, sentence", [
    ({"clients": 5.0}, "has clients 5.0; allowed is a whole number of at least 1"),
    ({"lr": 0}, "has lr 0; allowed is a number above 0"),
    ({"augment": 1}, "has augment 1; allowed is true or false"),
    ({"partition": None}, "has partition None; allowed is a text"),
    (["clients"], "is a list; it must be a dict of settings"),
])  # fmt: skip
def test_a_value_of_paper_that_no_run_takes_is_named(tmp_path, paper, sentence):
    run = Run(dataset=own_file(tmp_path / "mine.py", paper))
    assert refused(sentence, run.resolve) == f"PAPER of the data set mine {sentence}"


def test_a_file_may_repeat_a_default(tmp_path):
    """A complete PAPER, made of another's, is what the file says, where it equals a default too."""
    path = own_file(tmp_path / "mine.py", SMALL, load="read(source)")
    y = np.arange(480) % 4
    names = [f"c{i % 40:02d}" for i in range(480)]
    prepared = tmp_path / "mine.h5"
    x = np.zeros((480, 28, 28, 1), np.uint8) + y[:, None, None, None].astype(np.uint8)
    write(arrays_of(x, y, client=names), "mine", prepared)
    for _ in range(2):  # loaded, and taken from memory
        run = Run(dataset=path, data=str(prepared)).resolve()
        assert (run.partition.text, run.clients, run.model) == ("pathological", 20, "mlp")


def test_an_unknown_weighting_is_named(tmp_path):
    run = Run(dataset=own_file(tmp_path / "mine.py", body="pass\nWEIGHTS = 'Train'"))
    refused("WEIGHTS of the data set mine is 'Train'; allowed are", run.resolve)


def test_an_error_of_own_code_names_its_line(tmp_path):
    """The innermost line of own code is named, also in a helper, of `load` and of `read`."""
    helper, path, name = tmp_path / "helper.py", tmp_path / "mine.py", str(tmp_path / "mine.py")
    (tmp_path / "__init__.py").touch()
    errors = {"return {}['x']": "KeyError: 'x'", "raise SystemExit(3)": "SystemExit: 3"}
    places = (("load", []), ("read", [tmp_path]))
    for (line, error), (function, arguments) in itertools.product(errors.items(), places):
        helper.write_text(f"import numpy as np; make = lambda: arrays()\ndef arrays(): {line}\n")
        path.write_text(f"from . import helper\ndef {function}(*source): return helper.make()\n")
        admit("dataset", name)
        sentence = refused("", made_by, name, find("dataset", name), function, *arguments)
        assert sentence == f"{function} of the data set mine fails: {error} ({helper}, line 2)"
    refused("read of the data set mine fails: ", stage, name, tmp_path, tmp_path / "a.h5")
    helper.write_text("def make(): raise MemoryError\n")
    admit("dataset", name)
    with pytest.raises(MemoryError):
        made_by(name, find("dataset", name), "read", tmp_path)


def test_where_there_is_no_prepared_file_the_advice_makes_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def read(source):\n    pass\n")
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 3)), y=np.arange(20) % 2)

    def advised(ask, name, data=None):
        sentence = refused("", lambda: ask(Run(dataset=name, data=data).resolve()))
        return sentence.rpartition("`python -m dpfl_mpi.prepare ")[2].removesuffix("`")

    for name in ("arrays", "image_folder", "pfllib", "femnist"):
        assert advised(open_source, name) == f"{name} --source PATH --out data/{name}.h5"
        assert advised(Run.key, name, "no.h5") == f"{name} --source PATH --out no.h5"
    assert advised(open_source, "cinic10") == "cinic10 --out data/cinic10.h5"
    assert advised(open_source, "mine.py", "no.h5") == "mine.py --source PATH --out no.h5"
    assert advised(open_source, "arrays", "a.npz") == "DATASET --source PATH"
    assert advised(open_source, "cinic10", "a.npz") == "cinic10"


def test_the_hash_of_own_data_is_over_names_and_normalisation(tmp_path):
    x = np.random.default_rng(0).normal(size=(900, 9000)).astype(np.float32)
    wide = arrays_of(x, np.arange(900) % 300)
    other = replace(wide, std=tuple(2 * s for s in wide.std))
    renamed = replace(wide, class_names=tuple(f"class {name}" for name in wide.class_names))
    three = enumerate((wide, other, renamed))
    assert len({write(x, "mine", tmp_path / f"{i}.h5", own=True) for i, x in three}) == 3
    source = in_file(tmp_path / "2.h5")
    assert (source.class_names, source.std) == (renamed.class_names, wide.std)
    assert source.labels["train"].max() == 299
    assert np.array_equal(source.images("train", np.arange(4)), wide.train_images[:4])
    with h5py.File(tmp_path / "2.h5", "r+") as file:
        file["std"][0] *= 2
    refused("which is damaged: its content has the sha256", in_file, tmp_path / "2.h5")


DAMAGED = *ARRAYS, *NAMES, "mean", "std"
MANY, LEADS = 2**40, h5py.ExternalLink("/tmp/other.h5", "x")
NUMBERS = MANY, -1, np.full(48, MANY), np.full(48, -1), np.zeros((2, 2)), np.full(3, np.nan)
ODD = *NUMBERS, b"text", LEADS, "rows", None


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("value", ODD, ids=str)
def test_a_damaged_prepared_file_is_one_sentence(tmp_path, name, value):
    path, y = tmp_path / "a.h5", np.arange(60)
    x, groups = np.arange(180.0).reshape(60, 3), np.array(list("ABABA"))[y % 5]
    write(arrays_of(x, y % 3, y % 5, group=groups), "arrays", path, own=True)
    with h5py.File(path, "r+") as file:
        del file[name]
        if isinstance(value, str):
            file.create_dataset(name, (MANY,), "i4", chunks=(2**20,), compression="gzip")
        elif value is not None:
            file[name] = value
    refused(str(path), lambda: open_source(Run(dataset="arrays", data=str(path)).resolve()))


def test_prepare_sees_that_the_code_was_edited(tmp_path):
    (source := tmp_path / "source").touch()
    body = "return arrays_of(np.zeros((60, 3)), np.arange(60) % 3)"
    path, out = own_file(tmp_path / "mine.py", {}, body, "read(source)"), tmp_path / "a.h5"
    admit("dataset", path)
    stage(path, source, out)
    assert "is there already" in stage(path, source, out)
    own_file(tmp_path / "mine.py", {}, body.replace("% 3", "% 4"), "read(source)")
    admit("dataset", path)
    sentence = "which was made with other code (...); choose another --out, or overwrite it"
    refused(sentence, stage, path, source, out)
    warning = open_source(Run(dataset=path, data=str(out)).resolve()).warning
    assert warning == f"{out} was made before {path} was changed; prepare it again"


def test_crops_reach_beyond_an_image_of_floats_into_its_mean():
    x = np.arange(2 * 5 * 6 * 2, dtype=np.float32).reshape(2, 5, 6, 2) + 100
    out = bordered(x, (150.0, 160.0))
    assert np.array_equal(out[:, 4:-4, 4:-4], x) and out.shape == (2, 13, 14, 2)
    assert (out[:, :4] == (150, 160)).all() and (out[:, :, -4:] == (150, 160)).all()
    black = np.pad(x.astype(np.uint8), ((0, 0), (4, 4), (4, 4), (0, 0)))
    assert np.array_equal(bordered(x.astype(np.uint8), (0.5, 0.5)), black)


def test_images_that_crops_could_leave_are_refused(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(60, 4, 9, 1)), np.arange(60) % 3
    write(arrays_of(x, y), "arrays", tmp_path / "a.h5", own=True)
    run = Run(dataset="arrays", data=str(tmp_path / "a.h5"), augment=True).resolve()
    refused("--augment moves images by up to 4 pixels; these of 4x9x1 could", open_source, run)


@pytest.mark.parametrize("first", [0, 1])
def test_one_image_in_colour_keeps_the_colour(tmp_path, first):
    """Grey images have their value in all three channels, whichever image is read first."""
    three = [stored(np.full((8, 8), 70 + i, np.uint8)) for i in range(3)]
    three[first] = stored(np.full((8, 8, 3), (200, 10, 60), np.uint8))
    places = ("train/a", "train/b", "test/a", "test/b")
    files = {f"{place}/{i}.png": three[i] for place in places for i in range(3)}
    stage("image_folder", folder(tmp_path / "images", files), tmp_path / "a.h5")
    source = in_file(tmp_path / "a.h5", "image_folder")
    assert source.shape == (8, 8, 3)
    pixels = source.images("train", np.arange(6))[:, 0, 0].tolist()
    assert pixels == 2 * [[200, 10, 60] if i == first else 3 * [70 + i] for i in range(3)]


@pytest.mark.parametrize("edit, text", [
    ({"train_images": np.zeros((4, 3))}, "train_images are float64 [4, 3]; allowed are uint8"),
    ({"test_images": np.zeros((2, 5), np.float32)}, "of one shape in both parts"),
    ({"train_labels": np.array([0, 1, 2, 0])}, "from 0 to 1: class_names has 2 names"),
    ({"test_labels": None}, "test_labels must be int64 [2], from 0 to 1"),
    ({"train_clients": np.zeros(4, np.int64)}, "must both be there or neither"),
    ({"std": (1.0, 0.0, 1.0)}, "mean and std must have 3 numbers each, std from 1.2e-38 to"),
    ({"std": (1.0, 1e-39, 1.0)}, "std from 1.2e-38 to 8.5e+37"),  # float32 has no 1 / std
])  # fmt: skip
def test_what_a_file_returns_is_checked(edit, text):
    good = arrays_of(np.arange(18.0).reshape(6, 3), np.arange(6) % 2, test=np.arange(6) > 3)
    check(good, "load of mine")
    refused(f"load of mine: ...{text}", check, replace(good, **edit), "load of mine")
    wrong = SimpleNamespace(load=lambda: (1, 2))
    refused("mine returned a tuple; it must return Arrays", made_by, "mine", wrong, "load")
    lists = {"mean": np.zeros(3, np.float32), "class_names": (0, 1)}
    made = made_by("mine", SimpleNamespace(load=lambda: replace(good, **lists)), "load")
    assert made.mean == (0.0, 0.0, 0.0) and made.class_names == ("0", "1")
    for odd in ({"note": None}, {"mean": 0.5}, {"train_images": [1]}):
        wrong = SimpleNamespace(load=lambda odd=odd: replace(good, **odd))
        refused("returned Arrays with a field of another type", made_by, "mine", wrong, "load")


DATA = {
    "x": np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32),
    "y": np.arange(5),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big": np.arange(3, dtype=">i4"),
    "names": np.array(["a", "bc"]),
    "list": [1, -2, 2**40, 1.5, True, None, "text", b"bytes", (1, (2, 3, 4, 5)), {}],
    "dict": {"k": np.float32(2.5)},
}


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    kinds = [np.asarray(x).dtype.newbyteorder("=") for x in (a, b)]
    return np.array_equal(a, b) and kinds[0] == kinds[1]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_data_in_a_pickle_is_read_as_pickle_reads_it(protocol):
    data = pickle.dumps(DATA | {"again": DATA["list"], "x again": DATA["x"]}, protocol)
    assert same(unpickle(data, "file"), pickle.loads(data))


class Hostile:
    """Runs a command when Python's own pickle reads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def hostile(path):
    """Return pickles that would write a file, or that name what is no data."""
    return {
        "os.system": pickle.dumps({"x": Hostile(path)}, 4),
        "protocol 0": pickle.dumps(Hostile(path), 0),
        "a class": pickle.dumps(np.random.default_rng, 4),
        "eval": b'cbuiltins\neval\n(S\'open("%s", "w")\'\ntR.' % str(path).encode(),
        "instance": b"(S'touch %s'\nios\nsystem\n." % str(path).encode(),
        "object": b"(cos\nsystem\nS'touch %s'\no." % str(path).encode(),
        "new object": b"\x80\x02cos\nsystem\n(S'x'\nt\x81.",
        "persistent": b"Pid\n.",
        "extension": b"\x82\x01.",
        "numpy's own loader": b"cnumpy\nload\n(S'x'\ntR.",
        "a name alone": b"cnumpy\ndtype\n.",
        "state of a dict": b"\x80\x02}X\x01\x00\x00\x00ab.",
    }


def test_a_hostile_or_damaged_pickle_is_refused_and_not_run(tmp_path):
    path = tmp_path / "touched"
    for data in hostile(path).values():
        words = "file holds a ...pickle...(nothing ...was executed)"
        sentence = refused(words, unpickle, data, "file")
        assert sentence.startswith("file holds") and sentence.endswith("was executed)")
    assert not path.exists()
    pickle.loads(hostile(path)["os.system"])  # the file is what it is said to be
    assert path.exists()
    # Nested lists that double do not grow.
    laughs = [1]
    for _ in range(60):
        laughs = [laughs, laughs]
    assert isinstance(unpickle(pickle.dumps(laughs, 4), "file"), list)


def npz(value):
    """Return the bytes that `np.savez_compressed(file, data=value)` writes."""
    np.savez_compressed(out := io.BytesIO(), data=value)
    return out.getvalue()


def pfllib_files(make):
    """Return {train/K.npz: bytes, test/K.npz: bytes} of four clients' 9 and 3 samples."""
    files = {f"{part}/{k}.npz": (k, m) for k in range(4) for part, m in (("train", 9), ("test", 3))}
    return {name: npz({"x": make(k, m), "y": np.arange(m) % 3}) for name, (k, m) in files.items()}


def image(k, m):
    return np.random.default_rng([k, m]).normal(size=(m, 3, 4, 5)).astype(np.float32)


def test_pfllib(tmp_path, capsys):
    files = pfllib_files(image) | {"config.json": b"{}", "rawdata/x": b""}
    out = pfllib.read(folder(tmp_path / "MNIST", files))
    assert out.train_images.shape == (36, 4, 5, 3) and out.test_images.shape == (12, 4, 5, 3)
    assert out.client_names == ("0", "1", "2", "3")
    assert np.bincount(out.train_clients).tolist() == [9] * 4
    images = out.train_images[out.train_clients == 2]
    assert np.array_equal(images, image(2, 9).transpose(0, 2, 3, 1))
    assert capsys.readouterr().err == ""
    more = {"val/0.npz": b"", "val/1.npz": b"", "train/x.npz": b""}
    pfllib.read(folder(tmp_path / "more", files | more))
    unread = "files of train (1), val (2) are not read; read are train/K.npz, test/K.npz"
    assert capsys.readouterr().err == f"warning: {tmp_path / 'more'}: {unread}\n"
    inside = {f"dataset/MNIST/{name}": data for name, data in files.items()}
    again = pfllib.read(tar(tmp_path / "m.tar.gz", inside))
    assert np.array_equal(again.train_images, out.train_images)
    sentence = stage("pfllib", tmp_path / "MNIST", tmp_path / "p.h5")
    assert "36 training and 12 test images of 4x5x3, 3 classes, 4 clients" in sentence
    run = Run(dataset="pfllib", data=str(tmp_path / "p.h5")).resolve()
    assert (str(run.partition), run.clients, run.model) == ("natural", 4, "mlp")
    assert open_source(run).dtype == "float32"

    gaps = {name: data for name, data in files.items() if "1.npz" not in name}
    del gaps["test/2.npz"], gaps["train/3.npz"]
    capsys.readouterr()
    out = pfllib.read(folder(tmp_path / "gaps", gaps))
    told = capsys.readouterr().err.replace(str(tmp_path / "gaps"), "gaps").splitlines()
    assert told == [
        f"warning: gaps: no {what}"
        for what in (
            "train/K.npz of the clients 3: they are left out",
            "test/K.npz of the clients 2: a fifth of their samples is their test part",
            "client 1: the 2 clients are numbered from 0, and named by their files",
        )
    ]
    assert out.client_names == ("0", "2")
    assert np.bincount(out.train_clients).tolist() == [9, 8]
    assert np.bincount(out.test_clients).tolist() == [3, 1]
    files, path = pfllib_files(image), tmp_path / "touched"
    x, hostile = image(1, 3), npz(np.array({"x": Hostile(path)}, object))
    for name, data, text in (
        ("train/1.npz", hostile, "holds a pickle with the name posix.system"),
        ("train/1.npz", b"PK", "train/1.npz is truncated"),
        ("train/1.npz", npz({"x": x, "y": np.arange(4)}), "holds 3 samples and labels of (4,)"),
        ("train/1.npz", npz({"x": x[:2], "y": [[0], [0, 1]]}), "not arrays of numbers"),
        ("train/1.npz", npz({"x": 5, "y": [1]}), "not arrays of numbers"),
        ("test/3.npz", npz({"x": x[..., :2], "y": np.arange(3)}), "test/3.npz has samples of"),
        ("test/3.npz", npz({"x": x.astype("f8"), "y": np.arange(3)}), "0.npz of float32 (4, 5, 3)"),
        ("test/3.npz", npz({"x": x[:, :2], "y": np.arange(3)}), "test/3.npz has samples of"),
        ("train/1.npz", npz(np.zeros(3)), "train/1.npz holds no dictionary with x and y"),
    ):
        unstaged(tmp_path, "pfllib", files | {name: data}, text)
    assert not path.exists()
    twice = files | {f"b/{name}": data for name, data in files.items()}
    unstaged(tmp_path, "pfllib", twice, "several data sets, in ., b")
    for lacking in ({"x": b""}, {"test/0.npz": files["test/0.npz"]}):
        unstaged(tmp_path, "pfllib", lacking, "there is no train/K.npz")
