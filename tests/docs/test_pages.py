"""The pages: the files that they show run, and mistakes say what their tables say."""

import ast
import dataclasses
import inspect
import os
import re
import sys
import traceback
import warnings
from types import SimpleNamespace

import numpy as np
import own
import pytest
import torch
from launch import ROOT, ended, mpirun, refused, run_here, run_many, script, text_file

from dpfl_mpi import Result, plugins
from dpfl_mpi.datasets._pickles import unpickle
from dpfl_mpi.federation import Federation
from dpfl_mpi.methods import Method
from dpfl_mpi.numerics.cpu import LIBRARY
from dpfl_mpi.results.summary import summary
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import to_flags

METHODS_PAGE = ROOT / "docs" / "extend-methods.md"
FIELDS = {"clients": 5, "rounds": 2, "tau_train": 1, "budget": 3}
SCORED = "tau_train)\n    fed.evaluate(w)\n"
RETURN = '    return {"client": {"w": w}, "shared": {"chosen": chosen}}\n'
COLLECT = "senders = [fed"
OPTION = 'option(0.5, "share of its own model that a client keeps", low=0, high=1)'
START = "    w = fed.common_row()\n"
NOISE = "    import torch\n\n    w = w + 0.1 * torch.randn_like(w)\n"
ON_SOME = "    if 0 in fed.ids:\n        fed.mean(w)\n"
# of each file: a part of the mistake's text, and what is replaced by what, or the fields given
GOSSIP = {
    "no such file": {"method": "nowhere/gossip.py"},
    "without its colon": ("def round(fed, state, t):", "def round(fed, state, t)"),
    "opinion": ("import option", "import opinion"),
    "called `step`": ("def round", "def step"),
    "`def round(fed, state)`": ("state, t)", "state)"),
    "star": ('topology="graph"', 'topology="star"'),
    "without `option`": (OPTION, "0.5"),
    "kept": {"options": {"kept": 0.7}},
    "keep 2": {"options": {"keep": 2}},
    "`init` without `fed.evaluate`": (f"{START}    fed.evaluate(w)\n", START),
    "without `return`": (RETURN, ""),
    "`round` without `fed.evaluate`": (SCORED, "tau_train)\n"),
    "round` returns": (RETURN, RETURN.replace('"w": w', "")),
    "most_senders": ("[: fed.most_senders[k]]", ""),
    "tau_train / 2": ("epochs=fed.run.tau_train", "epochs=fed.run.tau_train / 2"),
    ".T.contiguous().T": (RETURN, RETURN.replace('"w": w', '"w": w.T.contiguous().T')),
    "double": (RETURN, RETURN.replace('"w": w', '"w": w.double()')),
    "weights=fed.p": ("fed.average(w, chosen)", "fed.average(w, chosen, weights=fed.p)"),
    "0 to 5": ("fed.reachable(k), 0)[: fed.most_senders[k]]", "fed.reachable(k), 0)[:1] * 0 + 5"),
    "its own sender": ("[: fed.most_senders[k]] for", "[:1] * 0 + k for"),
    "a list in place": ("fed.collect(senders)", "senders"),
    "randn_like": ("    mean = ", f"{NOISE}    mean = "),
    "w[0]": (RETURN, RETURN.replace('"w": w', '"w": w[0]')),
    "names": (RETURN, RETURN.replace('"chosen": chosen', '"names": ["a"]')),
    "0 in fed.ids": (SCORED, SCORED.replace("    fed", f"{ON_SOME}    fed")),
    "fed.ids[0]": (RETURN, RETURN.replace('"chosen": chosen', '"mine": int(fed.ids[0])')),
}
UNTOLD = {  # mistakes that are not on the page, and their sentences
    "a set": (COLLECT, "senders = [{1, 2} if k == 3 else fed",
              "given a set for client 3; it takes for each of this"),
    "half a client": (COLLECT, "senders = [[0.5] if k == 3 else fed",
                      "given a list for client 3; it takes for each"),
    "too few": ("for k in fed.ids", "for k in fed.ids[1:]",
                "given senders for 4 clients; this rank has 5"),
    "not a number": (RETURN, RETURN.replace("w}", 'w * float("nan")}'),
                     "or mend what gossip computes beside the verbs"),
}  # fmt: skip
BUILD = """def build(shape, classes, layers, dropout):
    return Net(shape[2], classes, layers, dropout)"""
WITHOUT_OPTIONS = "def build(shape, classes):\n    return Net(shape[2], classes, 2, 0.2)"
LAST = "        self.head = nn.Linear(widths[-1], classes)\n"
NET = {
    "called `make`": ("def build(", "def make("),
    "beside `Options`": (BUILD, WITHOUT_OPTIONS),
    "without `return`": ("    return Net(", "    Net("),
    'HEAD = "last"': ('HEAD = "head"', 'HEAD = "last"'),
    "no `HEAD`": ('HEAD = "head"', 'TAIL = "head"'),
    "BatchNorm2d": ("nn.GroupNorm(4, b)", "nn.BatchNorm2d(b)"),
    "AlphaDropout": ("nn.Dropout(dropout)", "nn.AlphaDropout(dropout)"),
    "x.mean(0)": ("self.body(x).mean", "self.body(x - x.mean(0)).mean"),
    "nn.Linear(9": ("nn.Linear(widths[-1], classes)", "nn.Linear(9, classes)"),
    "classes + 1": ("nn.Linear(widths[-1], classes)", "nn.Linear(widths[-1], classes + 1)"),
    "requires_grad_": (LAST, f"{LAST}        self.head.bias.requires_grad_(False)\n"),
    "does not use": (LAST, f"{LAST}        self.aux = nn.Linear(3, 3)\n"),
    "detach": ("self.body(x).mean", "self.body(x).detach().mean"),
    "self.scale": (LAST, f"{LAST}        self.scale = 2 * self.head.weight\n"),
    "depth": {"model_options": {"depth": 3}},
}
TOPICS = {
    "neither": ("def load", "def lode"),
    "def load(path)": ("def load()", "def load(path)"),
    '"client": 6': ('"clients": 6', '"client": 6'),
    '"clients": "6"': ('"clients": 6', '"clients": "6"'),
    "inside `load()`": ("in TOPICS]", "in TOPIX]"),
    "without `return`": ("    return arrays_of", "    arrays_of"),
    "`y` is shorter": ("np.array(y)", "np.array(y)[:10]"),
    "a NaN in `x`": ("np.array(x)", "np.array(x) * np.nan"),
    "since 1970": ("np.array(x)", "np.array(x) * 0 + 1.7e9 + np.arange(len(x))[:, None] % 3"),
    "below 0": ("np.array(x)", "np.array(x) * 0 - 1"),
    "a NaN in `y`": ("np.array(y)", "np.arange(len(y)) * np.nan"),
    "0.5, 1.7": ("np.array(y)", "np.arange(len(y)) / 2"),
    "--model mlp": {"model": "mlp"},
    "--attack": {"attack": "backdoor:0.2"},
    "--augment": {"augment": True},
    "`client` holds": ("np.array(client)", "np.array(client) * np.nan"),
    "--data FILE": {"data": "FILE"},
}
MISTAKES = {"gossip": GOSSIP, "net": NET, "topics": TOPICS}
# where the sentences of each file's mistakes stand: page, heading
TABLES = {
    "gossip": ("extend-methods.md", "in a method"),
    "net": ("extend-methods.md", "in a model"),
    "topics": ("extend-data.md", "in a data file"),
}
EACH = [(file, mistake) for file, mistakes in MISTAKES.items() for mistake in mistakes]
EACH += [("gossip", mistake) for mistake in UNTOLD]


def table(file):
    """Return (mistake, sentence) of the rows of the table of mistakes in a file of the pages."""
    page, heading = TABLES[file]
    text = (ROOT / "docs" / page).read_text().partition(f"## What a mistake says {heading}\n")[2]
    text = text.partition("\n## ")[0]
    return re.findall(r"^\| (?!mistake)([^|-].*?) \| `(.*)` \|$", text, re.M)


def fields_of(tmp_path, file, change):
    """Write a file of the pages, with a text replaced or not; return the fields of its Run."""
    path, text = tmp_path / f"{file}.py", own.example(file)
    given = change if isinstance(change, dict) else {}
    assert given or change[0] in text
    path.write_text(text if given else text.replace(*change))
    few = {"method": "local", "rounds": 0}
    kinds = {"gossip": FIELDS | {"method": str(path)}, "net": FIELDS | few | {"model": str(path)}}
    return kinds.get(file, few | {"dataset": str(path)}) | given


AVERAGE = "    mean = fed.average(w, chosen)\n"
EVERY = "    for _ in fed.every_row(w):\n        if 1 in fed.ids:\n            break\n"
OF_RANKS = {mistake: change for mistake, change in GOSSIP.items() if "fed.ids" in mistake}
OF_RANKS |= {"left out": (AVERAGE, "    mean = fed.average(w, chosen) if 0 in fed.ids else w\n")}
OF_RANKS |= {"broken off": (AVERAGE, EVERY + AVERAGE)}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """What two ranks say of each mistake that several alone can make."""
    folder = tmp_path_factory.mktemp("ranks")
    places = {mistake: own.write(folder / mistake, gossip="") for mistake in OF_RANKS}
    runs = {name: fields_of(places[name], "gossip", change) for name, change in OF_RANKS.items()}
    return run_many(2, folder, runs, sentences=True)


@pytest.mark.parametrize(("file", "mistake"), EACH, ids=[mistake for _, mistake in EACH])
def test_a_mistake_says_what_the_page_says(tmp_path, on_ranks, file, mistake):
    *change, sentence = UNTOLD.get(mistake) or [s for text, s in table(file) if mistake in text]
    fields = fields_of(tmp_path, file, change or MISTAKES[file][mistake])
    if mistake == "no `HEAD`":
        fields |= {"method": "fedrep", "rounds": 1}
    error = on_ranks.get(mistake) or refused("", run_here, tmp_path / "a.h5", fields)
    assert sentence in error.replace("nowhere/", "").replace(f"{tmp_path}/", "")


def test_every_mistake_of_the_pages_is_made_here(on_ranks):
    assert [len(table(file)) for file in MISTAKES] == [len(GOSSIP), len(NET), len(TOPICS) + 1]
    *_, (mistake, sentence) = table("topics")
    refused(sentence, unpickle, b"cposix\nsystem\n(S'true'\ntR.", "partition.pkl")
    assert mistake.startswith("a pickle")
    pattern = r"rank 0 is at (.*), rank 1 at (.*): every rank must"
    others = {"left out": "the end of round", "broken off": "the next pass of fed.every_row"}
    for mistake, other in others.items():
        assert {*re.search(pattern, on_ranks[mistake]).groups()} == {"fed.average", other}


def test_the_method_of_the_page_runs(tmp_path, result_of):
    """Its graph has B_c - 1 senders per client, and with keep = 1 every client is alone."""
    method = FIELDS | {"method": text_file(tmp_path / "gossip.py", own.example("gossip"))}
    gossip, alone = result_of(method), result_of(method | {"options": {"keep": 1}})
    local = result_of(FIELDS | {"method": "local", "budget": None})
    assert gossip.graph(1).sum(1).tolist() == gossip.graph(2).sum(1).tolist() == [2] * 5
    assert gossip["traffic/models_received"].tolist() == [[0] * 5, [2] * 5, [2] * 5]
    assert (alone["round/test_acc"] == local["round/test_acc"]).all()
    losses, of_alone = gossip["round/test_loss"], alone["round/test_loss"]
    assert (losses[1] == of_alone[1]).all()  # scored before it mixes
    assert (losses[2] != of_alone[2]).any()
    text, declared = own.example("gossip"), "searches=False,"
    texts = text, text.replace(declared, f"{declared} preprocesses=True,")
    paths = [text_file(tmp_path / f"{i}.py", text) for i, text in enumerate(texts)]
    plain, before = (Run(method=path, tau_init=3).resolve() for path in paths)
    assert (plain.tau_init, before.tau_init) == (0, 3) and plain.rounds == 22
    assert plain.key() == Run(method=plain.method).resolve().key()
    assert Run(method=before.method).resolve().rounds == 20


def test_verbs_and_switches_of_the_page_are_all_that_there_are():
    page = METHODS_PAGE.read_text().partition("## The verbs")[2].partition("\n## ")[0]
    listed, collective = set(), set()
    for cell, tick in re.findall(r"^\| (`.*?`) \| (✓?)", page, re.M):
        for name, parameters in re.findall(r"`(\w+)\((.*?)\)`", cell):
            verb = inspect.signature(getattr(Federation, name))
            known = {f"{p.name}={p.default!r}" for p in verb.parameters.values()}
            texts = re.findall(r"\w+=[^,]+", parameters.replace('"', "'"))
            assert {*texts} - {"weights=a"} <= known
            listed.add(name)
            collective |= {name} if tick else set()
    public = {name: held for name, held in vars(Federation).items() if not name.startswith("_")}
    verbs = {name for name, held in public.items() if callable(held)}
    of_all = {name for name in verbs if "Collective." in (public[name].__doc__ or "")}
    assert (listed, collective) == (verbs, of_all)
    assert [name for name in public if f"`{name}`" not in page and name not in verbs] == []
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| ", METHODS_PAGE.read_text(), re.M)
    others = {"init", "round", "finetune_gradient", "newcomer", "options", "title", "citation"}
    switches = {f.name: f.default for f in dataclasses.fields(Method) if f.name not in others}
    assert {name: ast.literal_eval(default) for name, default in rows} == switches


@pytest.mark.parametrize(("text", "instead", "error"), [
    (AVERAGE, "    fed.gather(w)\n",
     "AttributeError: 'Federation' object has no attribute 'gather'"),
    (AVERAGE, "    fed.average(w, graf=chosen)\n",
     "TypeError: Sums.average() got an unexpected keyword"),
    ('1 - fed.options["keep"]', '1 - fed.options["scal"]', "KeyError: 'scal'"),
    ("    mean = ", "    1 / (4 not in fed.ids)\n    mean = ", "ZeroDivisionError"),
], ids=["verb", "keyword", "option", "on one rank"])  # fmt: skip
def test_a_mistake_of_pythons_ends_in_the_line_of_the_file(tmp_path, text, instead, error):
    fields = fields_of(tmp_path, "gossip", (text, instead))
    if "fed.ids" in instead:
        done = mpirun(2, "-m", "dpfl_mpi", *to_flags(fields), cwd=tmp_path)
        text = done.stderr
        assert (done.returncode, text.count("Traceback")) == (1, 1), text
    else:
        with pytest.raises(Exception) as failed:
            run_here(tmp_path / "a.h5", fields)
        text = "".join(traceback.format_exception(failed.value))
    end = text.partition("gossip.py")[2]
    assert instead.strip().splitlines()[0] in end.splitlines()[1] and f"\n{error}" in end


@pytest.mark.parametrize("counted", [False, True])
def test_rows_that_nobody_counts_are_told(tmp_path, result_of, capsys, counted):
    instead = "    mean = sum(row for _, row in fed.every_row(w)) / fed.n\n"
    instead += "    fed.note_received(4)\n" * counted
    result = result_of(fields_of(tmp_path, "gossip", (AVERAGE, instead)))
    assert result["traffic/models_received"][1].tolist() == [4 * counted] * 5
    warning = "warning: round of the method gossip calls fed.every_row and counts no models"
    assert (f"{warning} received" in capsys.readouterr().err) is not counted


def test_the_figure_of_the_page_draws(tmp_path):
    for method in ("local", "fedavg"):
        run_here(tmp_path / f"{method}.h5", FIELDS | {"method": method, "budget": None})
    file = own.write(tmp_path, nine_in_ten=own.example("nine_in_ten")) / "nine_in_ten.py"

    def drawn(*words):
        done = ended(sys.executable, file, *words, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    assert drawn("local.h5", "fedavg.h5")[0] == 0
    rows = (tmp_path / "figures" / "nine_in_ten.csv").read_text().splitlines()
    assert (tmp_path / "figures" / "nine_in_ten.pdf").is_file() and len(rows) == 1 + 2 * 5
    with Result(tmp_path / "local.h5") as local:
        found, samples = 100 * local["best/test_acc"], local["client/n_train"]
    best, (*labels, shown) = sorted(found), rows[1].split(",")
    assert labels == ["Digits Patho(5)", "Local", "42", str(samples[0])]
    assert float(shown) == pytest.approx(found[0])
    lines = [re.split(r" *\| *", line)[1:-1] for line in drawn("local.h5")[1].splitlines()]
    assert lines[0] == ["setting", "row", "nine in ten reach, %"]
    between = 0.6 * best[0] + 0.4 * best[1]  # of the places 0 to 4 of five clients, place 0.4
    assert lines[2][-1] == f"{between:.2f}"
    code, _, error = drawn()
    assert code == 2 and f"all of them at once: python -m dpfl_mpi.sweep {file}" in error
    file.write_text(file.read_text().replace("return Drawing", "Drawing"))
    no_drawing = "error: draw returned a NoneType; it must return a Drawing\n"
    assert drawn("local.h5")[::2] == (2, no_drawing)


def test_the_model_and_the_data_of_the_page_run(tmp_path, result_of):
    path = text_file(tmp_path / "net.py", own.example("net"))
    fields = FIELDS | {"model": path, "classes_per_client": 2, "lr": 0.05, "tau_train": 3}
    result = result_of(fields | {"method": "fedrep"}, save_models=True)
    assert result["best/test_acc"].mean() > 0.75  # each client has two classes
    images = np.full((3, 8, 8, 1), 7, np.uint8)  # NumPy's or PyTorch's
    model = Result(result.path).model(1)  # the process that ran it need not name the file again
    outputs = model(images)
    assert result.run.model == path and outputs.shape == (3, 10)
    assert torch.equal(outputs, model(torch.from_numpy(images)))
    plugins.ADMITTED.clear()
    name_it = "own; name it with --model ..., in Python Result(path, model=...)"
    refused(name_it, Result(result.path).model, 1)
    assert torch.equal(outputs, Result(result.path, model=str(path)).model(1)(images))
    deep = result_of(fields | {"rounds": 0, "tau_init": 0, "model_options": {"layers": 3}})
    parameters = (9 + 1 + 2) * 16 + (16 * 9 + 1 + 2) * 32 + (32 * 9 + 1 + 2) * 64 + 65 * 10
    assert deep.file["meta"].attrs["parameters"] == parameters
    path = text_file(tmp_path / "topics.py", own.example("topics"))
    result = result_of({"dataset": path, "rounds": 0, "tau_init": 1})
    run, counts = result.run, result["client/class_counts"]
    assert (run.clients, str(run.partition), run.model, run.rounds) == (6, "natural", "text", 0)
    assert result["client/of_data"].tolist() == list(range(6))
    assert counts.sum() > 600 and (counts > 0).all()
    assert str(result.file["meta"].attrs["data_note"]) == "passages of Python's help"


def test_the_tables_of_methods_are_those_of_the_files():
    table_script = script(ROOT / "docs" / "methods_table.py")
    assert table_script.page() == table_script.PAGE.read_text(), "run python docs/methods_table.py"


def test_the_first_page_shows_the_default_run(tmp_path):
    graph_evolution = pytest.importorskip("dpfl_mpi.figures.graph_evolution")
    frames, image = pytest.importorskip("dpfl_mpi.figures.frames"), pytest.importorskip("PIL.Image")
    if not LIBRARY.exists():  # PyTorch has other last bits, and so a few other edges
        pytest.skip("the kernels were not built")
    with Result(run_here(tmp_path / "a.h5", {}, kernels="native")) as result:
        drawn = graph_evolution.draw(frames.of_results([result])).text
    with image.open(ROOT / "docs" / "pictures" / "digits-graph.png") as picture:
        assert picture.text["Description"] == drawn
    printed, page = summary(tmp_path / "a.h5").splitlines(), (ROOT / "README.md").read_text()
    assert [line for line in printed[:5] if line not in page] == [] and "97.30 %" in printed[1]


def test_every_picture_of_the_site_is_found_from_its_page(monkeypatch):
    named = {"exceptions": {"PluginError": ValueError}, "structure.files": {"File": None}}
    for name, holds in named.items():  # of MkDocs, which is not installed for the tests
        monkeypatch.setitem(sys.modules, f"mkdocs.{name}", SimpleNamespace(**holds))
    hook = script(ROOT / "docs" / "hook.py")
    pages = hook.PAGES | {page.name: f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    docs = ROOT / "docs"
    of_docs = {str(path.relative_to(docs)) for path in docs.rglob("*.*")}
    pictures = {uri for uri in of_docs if uri.endswith(".png")}
    pictures |= {str(path.relative_to(ROOT)) for path in (ROOT / "reproduction").rglob("*.png")}
    texts = {uri for uri in of_docs if uri.endswith(".md")} | {*hook.PAGES}

    def shown(page, text, uris):
        """Return the pictures that a page shows on a site of these files."""
        of = SimpleNamespace(file=SimpleNamespace(src_uri=page))
        files = [SimpleNamespace(src_uri=uri) for uri in uris]
        targets = re.findall(r"!\[.*?\]\((.*?)\)", hook.on_page_markdown(text, of, None, files))
        return {os.path.relpath((docs / page).parent / target, docs) for target in targets}

    for page, source in pages.items():
        text = (ROOT / source).read_text()
        found = shown(page, text, texts | pictures)
        assert found <= pictures and len(found) == text.count("!["), page
        assert shown(page, text, texts) == set(), page


@pytest.mark.usefixtures("terminal")
def test_the_notebook(tmp_path):
    """It runs to its last cell, and its stored outputs are those of its cells."""
    libraries = ("nbformat", "nbclient", "ipykernel", "matplotlib")
    nbformat, nbclient, *_ = map(pytest.importorskip, libraries)
    stored, notebook = (nbformat.read(ROOT / "docs" / "notebook.ipynb", 4) for _ in range(2))
    for fields in ({"method": "dpfl"}, {"method": "local"}):  # which its first cells find
        path = Run(**fields).resolve().path(tmp_path / "results-notebook")
        run_here(path, fields, save_models=True)
    notebook.cells[1].source = notebook.cells[1].source.replace('"ranks": 2', '"ranks": 1')
    where = {"metadata": {"path": str(tmp_path)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter's own
        nbclient.NotebookClient(notebook, timeout=240, resources=where).execute()

    def texts(book):  # what each code cell shows
        cells = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
        plain = lambda o: o.get("text") or o.get("data", {}).get("text/plain", "")  # noqa: E731
        return [" ".join(map(plain, outputs)) for outputs in cells]

    before, after = texts(stored), texts(notebook)
    results = [re.findall(r"results-notebook/\S+\.h5", " ".join(each)) for each in (before, after)]
    assert results[0] == results[1] and len(results[0]) == 4
    scores = re.search(r"'([\d.]+) of \d+ images, recorded ([\d.]+)'", after[-1])
    assert scores[1] == scores[2] and [*map(bool, before)] == [*map(bool, after)]


def test_the_first_page_says_what_clients_reach_alone(tmp_path):
    if not LIBRARY.exists():  # PyTorch has other last bits
        pytest.skip("the kernels were not built")
    path = run_here(tmp_path / "a.h5", {"method": "local"}, kernels="native")
    accuracy = re.search(r"test accuracy +([\d.]+ %)", summary(path))[1]
    page = " ".join((ROOT / "README.md").read_text().split())
    assert f"Clients that train alone reach {accuracy} (`--method local`)" in page
    assert f"clients that train alone: {accuracy}" in (ROOT / "CONTRIBUTING.md").read_text()
