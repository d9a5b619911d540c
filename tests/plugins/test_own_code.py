"""Code of one's own: what belongs to it, who executes it, and that an edit is another Run."""

import json
import os
import py_compile
import sys

import numpy as np
import own
import pytest
from launch import ROOT, mpirun, refused, run_here

import dpfl_mpi
from dpfl_mpi import evaluate, plugins, prepare, show
from dpfl_mpi.figures import accuracy_table, learning_curves
from dpfl_mpi.figures import names as figure_names
from dpfl_mpi.figures.frames import of_results
from dpfl_mpi.mpi.start import parse
from dpfl_mpi.plugins import admit, find
from dpfl_mpi.plugins.code import code_in_file, parts_of
from dpfl_mpi.results import Result
from dpfl_mpi.results.result import changed_code
from dpfl_mpi.settings import Run
from dpfl_mpi.sweep import wanted

MARK = "from pathlib import Path\nPath({!r}).touch()\n"


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(plugins, "ADMITTED", {})
    monkeypatch.setattr(plugins, "LOADED", {})


def run_of(folder, **more):
    """Return the Run of the folder's method, on digits and the MLP."""
    return Run(method=str(folder / "mine.py"), **own.SMALL | more).resolve()


def admitted(path):
    admit("method", str(path))
    return find("method", str(path))


FILES = {
    "__init__": "",
    "start": "from . import b\nfrom .pack import part, y\ndef later():\n    from . import d\n",
    "pack/__init__": "from .inside import y\n",
    "pack/inside": "y = 1\n",
    "pack/part": "from .. import b\n",
    **dict.fromkeys(("b", "d", "bare/deep"), ""),
}


def hash_of(path):
    return code_in_file("--method", path).sha256


def test_a_file_alone_is_its_code(tmp_path):
    own.write(tmp_path, start="import os, json\n", other="", json="")
    first = hash_of(tmp_path / "start.py")
    (tmp_path / "start.py").rename(tmp_path / "renamed.py")
    own.write(tmp_path, other="x = 1\n")
    assert hash_of(tmp_path / "renamed.py") == first
    for line in ("import other", "from other import x", "from . import other", "import other.x"):
        own.write(tmp_path, start=f"\ndef init(fed):\n    {line}\n")
        sentence = f"beside it ({tmp_path}/start.py, line 3); put both into a folder with an `__in"
        refused(sentence, code_in_file, "--method", tmp_path / "start.py")


def test_a_package_is_the_code_of_each_of_its_files(tmp_path):
    one = own.write(tmp_path / "one", **FILES)
    first = hash_of(one / "start.py")
    assert hash_of(own.write(tmp_path / "two", **FILES) / "start.py") == first
    assert hash_of(one / "b.py") != first != hash_of(one / "d.py")
    inside = code_in_file("--method", one / "pack" / "part.py")
    assert (inside.module, inside.root) == ("one.pack.part", one)
    for name in FILES:
        own.write(one, **{name: FILES[name] + "x = 0\n"})
        assert hash_of(one / "start.py") != first, name
        own.write(one, **{name: FILES[name]})
    (one / "notes.txt").touch()
    assert hash_of(one / "start.py") == first


BARE = "N = 2\ndef load(a, b=1):\n    return [a + b, '1', N]\n"
SAME = """# what it is
'''Docstring.'''
N = (2)  # two


def load(a, b = 1):
    "Return it."
    return [
        a + b, "1", N]
"""
OTHERS = ["N = 2\ndef load(a, b=1):\n    return [a + b, 1, N]\n", BARE.replace("2", "2.0")]
OTHERS += [f"{BARE}N = 2\n", "def load(a, b=1):\n    return [a + b, '1', N]\nN = 2\n"]


def test_code_counts_without_its_comments_or_by_its_version(tmp_path):
    hashes = [hash_of(own.write(tmp_path, data=text) / "data.py") for text in (BARE, SAME)]
    assert hashes[0] == hashes[1]
    hashes += [hash_of(own.write(tmp_path, data=text) / "data.py") for text in OTHERS]
    assert len({*hashes}) == 1 + len(OTHERS)
    versions = [f"{text}VERSION = {value}\n" for value in (1, 2, "N") for text in (BARE, OTHERS[0])]
    hashes = [hash_of(own.write(tmp_path, data=text) / "data.py") for text in versions]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3] != hashes[4] != hashes[5]
    (tmp_path / "a.pt").write_text("1")
    parts = parts_of(
        code_in_file("", own.write(tmp_path, data=f"{BARE}FILES = ['a.pt']\n") / "data.py")
    )
    assert [*parts] == ["data.py: N", "data.py: load()", "data.py: FILES", "a.pt"]


def test_relative_imports_find_the_files_of_the_package(tmp_path):
    start = (
        "import os, json as j\nfrom . import helper\nfrom .pack import part as q, y\n"
        "from .helper import *\nfrom .bare import deep\n"
        "def init(fed):\n    from .pack import late\n"
        "    return os.sep, j.loads('1'), helper.x, q.__name__[-9:], y, x, deep.d, late.x\n"
        "def round(fed, state, t): pass\n"
    )
    more = {"pack/__init__": "y = 2\n", "pack/late": "from ..helper import x\n"}
    more |= {"pack/part": "", "bare/deep": "d = 4\n", "json": ""}
    own.write(tmp_path, __init__="", start=start, helper="x = 3\n", **more)
    assert admitted(tmp_path / "start.py").init(None) == ("/", 1, 3, "pack.part", 2, 3, 4, 3)


def test_what_was_hashed_is_what_runs(tmp_path):
    text = own.METHOD.replace('title="Mine", ', "")
    own.folder(tmp_path, mine_a=text, mine_b=text)
    runs = [Run(method=str(tmp_path / f"mine_{name}.py"), **own.SMALL).resolve() for name in "ab"]
    assert [find("method", run.method).title for run in runs] == ["mine_a", "mine_b"]
    method = own.folder(tmp_path) / "mine.py"
    before = admit("method", str(method))
    method.write_text("x = 1\n")
    refused("mine.py, which was edited while it was read; start again", find, "method", str(method))
    for title in ("Mine", "Ours"):  # files of the same length and time
        method.write_text(own.METHOD.replace('"Mine"', f'"{title}"'))
        os.utime(method, (1, 1))
        assert admitted(method).title == title
        py_compile.compile(str(method))
    assert admit("method", str(method)) != before


def test_two_folders_may_have_helpers_of_one_name(tmp_path):
    later = "def init(fed):\n    from .helper import SCALE\n    return SCALE\n\n"
    later += "def round(fed, state, t): pass\n"
    folders = [own.folder(tmp_path / f"v{i}", mine=later, helper=f"SCALE = {i}\n") for i in (1, 2)]
    found = [admitted(folder / "mine.py") for folder in folders]
    assert [method.init(None) for method in found] == [1, 2]
    assert "helper" not in sys.modules and str(tmp_path / "v1") not in sys.path


def test_code_of_an_installed_package(tmp_path, monkeypatch):
    """Its modules are found by name; resolving a Run executes the method alone."""
    site = tmp_path / "site"
    mark = MARK.format(str(tmp_path / "executed"))
    texts = {"gossip": own.METHOD, "nets": mark + own.MODEL, "trees": own.DATA}
    texts |= {"helper": "SCALE = 1.0\n", "parts": own.PARTS}
    wood = "class Wood:\n    TITLE, load = 'Wood', staticmethod(trees.load)\n"
    texts["forest"] = f"from . import trees\n\n\n{wood}"
    own.write(site / "lab", __init__="", **texts)
    monkeypatch.syspath_prepend(site)
    fields = {"method": "lab.gossip", "dataset": "lab.trees", "model": "lab.nets:build"}
    run = Run(**fields | own.SMALL).resolve()
    assert not (tmp_path / "executed").exists()
    assert set(run.contents) == {"method", "dataset", "model"}
    net = find("model", "lab.nets:build")
    assert net.HEAD == "head" and net.build((3, 3, 1), 4).head.out_features == 4
    admit("dataset", "lab.forest:Wood")  # a class takes no further attributes as a module does
    assert find("dataset", "lab.forest:Wood").TITLE == "Wood"
    (site / "lab" / "helper.py").write_text("SCALE = 2.0\n")
    assert Run(**fields | own.SMALL).resolve().slug() != run.slug()
    named = "lab.nets:build_it"
    admit("model", named)
    refused(f"--model is {named}; the module lab.nets has no build_it", find, "model", named)


@pytest.mark.parametrize("method, text, sentence", [
    ("mine.py", "from . import helper\nhelper.none\n", "--method is {0}, which fails: "
     "AttributeError: module 'helper' has no attribute 'none' ({0}, line 2)"),
    ("mine.py", "import nowhere\n",
     "--method is {0}, which fails: ModuleNotFoundError: No module named 'nowhere' ({0}, line 1)"),
    ("mine.py", "from . import nowhere\n",
     "which fails: ImportError: cannot import name 'nowhere' from ''"),
    ("mine.py", "raise SystemExit(3)\n",
     "--method is {0}, which fails: SystemExit: 3 ({0}, line 1)"),
    ("mine.py", "x = 1\n",
     "the method mine has no function init; it must define init(fed) and round(fed, state, t)"),
    ("mine.py", 'FILES = ["none.pt"]\n',
     "--method is {0}, whose FILES name none.pt; there is no such file"),
    ("mine.py", "FILES: list = sorted([])\n",
     '--method is {0}; FILES must be a list of names as it stands, such as ["base.pt"]'),
    ("mine.py", 'if True:\n    FILES = ["none.pt"]\n',
     "--method is {0}; FILES must be a list of names as it stands"),
    ("mine.py", 'FILES: list = "base.pt"\n',
     "--method is {0}; FILES must be a list of names as it stands"),
    ("nope", "", "--method is nope; allowed are apfl, "),
    ("no.such.module:x", "", "--method is no.such.module:x; Python finds no module no.such.module"),
    (f"{ROOT}/dpfl_mpi/methods/fedavg.py", "",
     "a file of dpfl_mpi itself; call it by its name, --method fedavg"),
])  # fmt: skip
def test_what_cannot_be_a_method_is_one_sentence(tmp_path, method, text, sentence):
    folder = own.folder(tmp_path, mine=text)
    name = str(folder / method) if method.endswith(".py") else method
    refused(sentence.format(name), Run(method=name).resolve)


def test_an_edit_is_another_run_and_the_same_code_elsewhere_is_not(tmp_path):
    texts = {"mine": own.METHOD, "nets/net": own.MODEL, "trees": own.DATA}
    files = {n: f'{text}FILES = ["{n.rpartition("/")[2]}.pt"]\n' for n, text in texts.items()}
    a, b = (own.folder(tmp_path / place, **files) for place in "ab")
    for at in (a, b):
        for name in texts:
            (at / f"{name}.pt").write_text("1")

    def run(at):
        return run_of(at, dataset=str(at / "trees.py"), model=str(at / "nets" / "net.py"))

    first = run(a)
    assert first.slug().startswith("trees-pathological-mine-s42-") and run(b).slug() == first.slug()
    assert first.key()["method"] == admit("method", str(a / "mine.py")) != str(a / "mine.py")
    slugs = [first.slug()]
    own_files = [f"{name}.{end}" for name in texts for end in ("py", "pt")]
    for name in ("helper.py", "nets/parts.py", *own_files):
        with (a / name).open("a") as file:
            file.write("edited = 1\n")
        slugs.append(run(a).slug())
    assert len(set(slugs)) == 9


def test_a_run_of_a_sweep_that_began_before_an_edit_keeps_its_name_clean(tmp_path):
    """Its job has the old name in --out, and reads the file as it is now."""
    at = own.folder(tmp_path)
    old = run_of(at)
    (at / "helper.py").write_text("SCALE = 2.0\n")
    fields = {"method": str(at / "mine.py")} | own.SMALL
    sentence = f"the name of another Run; this is {run_of(at).slug()}"
    refused(sentence, run_here, old.path(tmp_path), fields)
    assert not old.path(tmp_path).exists()
    run_here(tmp_path / "mine-s42-20261126.h5", fields)  # a date is no other Run
    done = run_here(run_of(at).path(tmp_path), fields)
    (at / "helper.py").write_text("SCALE = 3.0\n")
    again = run_of(at), run_of(at).path(tmp_path)
    note = f"helper.py: SCALE differs from the stored one ({done}): this is another Run"
    assert changed_code(*again) == note
    assert changed_code(run_of(at, seed=9), again[1]) == ""
    for name, units in (("a", 4), ("b", 5)):  # two models, neither of them edited
        net = f"nn.Sequential(nn.Flatten(), nn.Linear(64, {units}), nn.Linear({units}, classes))"
        text = f"from torch import nn\n\ndef build(shape, classes):\n    return {net}\n"
        (tmp_path / f"{name}.py").write_text(text)
    a, b = (Run(**own.SMALL | {"model": str(tmp_path / f"{n}.py")}).resolve() for n in "ab")
    run_here(a.path(tmp_path), own.SMALL | {"model": str(tmp_path / "a.py")})
    assert changed_code(b, b.path(tmp_path)) == ""


def test_options_are_declared_as_the_shipped_ones(tmp_path):
    mine = own.folder(tmp_path) / "mine.py"
    assert parse([f"--method={mine}", "--options.scale=2"])[0].options == {"scale": 2.0}
    tried = wanted.trials([Run(method=str(mine))], "options.scale=0.5,1")
    runs = [run.resolve() for runs in tried.values() for run in runs]
    assert [run.options for run in runs] == [{"scale": 0.5}, {"scale": 1}]
    assert runs[0].slug() != runs[1].slug()


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder with a method, a model and a data set, and the result of two ranks of them."""
    at = own.folder(tmp_path_factory.mktemp("outside"))
    words = "--method=mine.py --model=nets/net.py --dataset=trees.py --options.scale=0.5"
    words = [*words.split(), "--save_models", *(f"--{n}={v}" for n, v in own.SMALL.items())]
    done = mpirun(2, "-m", "dpfl_mpi", *words, cwd=at)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "mine on trees, pathological, 4 clients" in done.stdout
    (path,) = (at / "results").glob("*.h5")
    return at, path, done.stdout


@pytest.fixture
def alone(outside, tmp_path, monkeypatch):
    """The result, in the working directory, beside other files that leave a mark if executed."""
    _, path, _ = outside
    mark = MARK.format(str(tmp_path / "executed"))
    names = ("mine", "nets/net", "nets/parts", "trees", "helper")
    own.folder(tmp_path, **dict.fromkeys(names, mark))
    (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    yield tmp_path / path.name
    assert not (tmp_path / "executed").exists()


def test_a_run_from_outside_on_two_ranks_is_that_of_one(outside, result_of, monkeypatch, capsys):
    at, path, _ = outside
    monkeypatch.chdir(at)
    fields = {"method": "mine.py", "model": "nets/net.py", "dataset": "trees.py"}
    fields |= {"options": {"scale": 0.5}} | own.SMALL
    with Result(path) as two:
        one = result_of(fields)
        assert Result.same_numbers(one, two) and Result.differences(one, two) == []
        since = two.starts()[0]["time"][:16].replace("T", " ")
    capsys.readouterr()
    run_here(path, fields, quiet=False)
    assert capsys.readouterr().out == f"already finished (started {since}); --fresh recomputes\n"


def test_a_result_is_read_and_drawn_where_its_files_are_not(alone, said, outside):
    with Result(alone) as result:
        method = result.method
        assert (method.title, method.topology, method.finetunes) == ("Mine", "none", True)
        assert method.citation == "@misc{mine, title = {Mine}}" and method.models == 2
        assert result.local_epochs().tolist() == (2 * result["round/epochs"]).tolist()
        assert result.class_names == ["ash", "birch", "cedar", "elm"]
        assert figure_names.row_name(result.run) == "Mine"
        (row,) = accuracy_table.measure(of_results([result])).to_dict("records")
        assert (row["method"], row["setting"]) == ("Mine", "Trees Patho(2)")
        mean = 100 * result.test_acc
        assert row["mean"] == pytest.approx(mean, rel=1e-14)  # summed in another order
        assert set(learning_curves.draw(of_results([result])).data["method"]) == {"Mine"}
    assert "mine on trees, finished" in said(show.main, alone)
    assert said(show.main, "--cite", alone).endswith("\n\n@misc{mine, title = {Mine}}\n")
    why = "executed only where a command line or a Run names it"
    refused(why, find, "method", result.run.method)
    model = f"--model={outside[0]}/nets/net.py"
    both = "name them with --model (nets/net.py) and --dataset (trees.py)"
    for words, sentence in (
        ([], f"model and data set are code of their own; {both}"),
        (["--model=nets/net.py"], "--model is nets/net.py; other code than the run's"),
        ([model], "the run's data set is code of its own; name it with --dataset (trees.py)"),
    ):
        assert sentence in said(evaluate.main, alone, *words, code=2)
    codes = {"model": f"{outside[0]}/nets/net.py", "dataset": f"{outside[0]}/trees.py"}
    named = "name it with --dataset (trees.py), in Python Result(path, dataset=...)"
    with dpfl_mpi.Result(alone, model=codes["model"]) as half:
        refused(named, half.model, 0)
    with dpfl_mpi.Result(alone, **codes) as whole:
        assert whole.model(1)(whole.source.images("test", np.arange(5))).shape == (5, 4)
    text = said(evaluate.main, alone, model, f"--dataset={outside[0]}/trees.py")
    assert "the same for 4 of 4 clients" in text


def test_two_versions_in_one_table(outside, alone, tmp_path, result_of):
    at, path, _ = outside
    trees = own.DATA.replace("SEED, NAMES = 0", "SEED, NAMES = 1")
    edited = own.folder(tmp_path / "edited", helper="SCALE = 0.5\n", trees=trees)
    fields = {"model": str(at / "nets/net.py"), "options": {"scale": 0.5}} | own.SMALL
    other = {"method": str(edited / "mine.py"), "dataset": str(at / "trees.py")}
    third = {"method": str(at / "mine.py"), "dataset": str(edited / "trees.py")}
    with Result(path) as first:
        results = [first, result_of(fields | other), result_of(fields | third)]
        rows = accuracy_table.measure(of_results(results))
    assert len(rows) == 3 and list(rows["n"]) == [1, 1, 1]
    assert rows["setting"].nunique() == 2
    assert len(set(zip(rows["setting"], rows["method"], strict=True))) == 3
    assert sum(name.startswith("Mine, method mine [") for name in rows["method"]) == 2


SCRIPT = """
import os, sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
os.chdir(sys.argv[1] if rank == 0 else sys.argv[2])
from dpfl_mpi.__main__ import main
try:
    main(sys.argv[3:])
except SystemExit as end:
    code = end.code
assert MPI.COMM_WORLD.allgather(code) == [2, 2]
"""


def test_ranks_that_see_other_files_are_refused(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    a = own.folder(tmp_path / "a")
    b = own.folder(tmp_path / "b", helper="SCALE = 2.0\n")
    words = ["--quiet", *(f"--{n}={v}" for n, v in own.SMALL.items())]
    done = mpirun(2, tmp_path / "script.py", a, b, "--method=mine.py", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("error: rank 1 on ") and done.stderr.count("\n") == 1
    what = "and differs from the version that root read"
    assert f"--method is mine.py, {what}" in done.stderr
    own.folder(a, **{"nets/parts": "raise ValueError('no such layer')\n"})
    done = mpirun(2, tmp_path / "script.py", a, a, "--model=nets/net.py", *words)
    what = f"ValueError: no such layer ({a}/nets/parts.py, line 1)"
    sentence = f"error: --model is nets/net.py, which fails: {what}\n"
    assert (done.returncode, done.stderr) == (0, sentence) and not list(a.glob("results/*"))


def test_prepare_takes_a_file(tmp_path, monkeypatch, said, result_of):
    text = own.DATA.replace("TITLE = None", 'TITLE = "data/trees.h5"')
    text = f'SOURCE, NO_DOWNLOAD = "a file", "none"\n{text}'
    own.folder(tmp_path, trees=text.replace("def load():", "def read(source):"))
    monkeypatch.chdir(tmp_path)
    text = said(prepare.main, "trees.py", "--source=helper.py")
    assert "data/trees.h5: 240 training and 80 test" in text
    assert len(Run(dataset="trees.py", **own.SMALL).resolve().contents["data"]) == 64
    result = result_of({"dataset": "trees.py", "tau_init": 0} | own.SMALL)
    declared = json.loads(str(result.file.attrs["declared"]))["dataset"]
    assert result.finished and declared == {"name": "trees", "title": "Trees"}
    key = Run(dataset="trees.py", **own.SMALL).resolve().key()
    (tmp_path / "trees.py").write_text((tmp_path / "trees.py").read_text() + "later = 1\n")
    assert Run(dataset="trees.py", **own.SMALL).resolve().key() == key
    monkeypatch.setattr(plugins, "ADMITTED", {})
    assert result.source.sha256 == key["data"]  # its code is not needed
    sentence = "error: digits has load() and needs no file: run --dataset digits\n"
    assert said(prepare.main, "digits", code=2) == sentence
    both = "def read(source):\n    return load()\n\n\ndef load():\n    pass\n"
    (tmp_path / "both.py").write_text(both)
    sentence = "error: both.py has load() and needs no file: run --dataset both.py\n"
    assert said(prepare.main, "both.py", "--source=helper.py", code=2) == sentence
