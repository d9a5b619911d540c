"""Results as CSV and in the terminal, and their models scored."""

import csv
import dataclasses
import os
import shutil

import h5py
import numpy as np
import pytest
import tiny_result
from launch import ROOT, refused, run_here, text_file

import dpfl_mpi
from dpfl_mpi import describe, evaluate, export, prepare, show
from dpfl_mpi.__main__ import main
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.datasets import digits
from dpfl_mpi.figures.command import fitted_page
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import LAYOUT
from dpfl_mpi.results.summary import summary
from dpfl_mpi.settings import Run
from dpfl_mpi.storage.lock import Lock

EVEN = (0.5,) * 4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    return {m: tiny_result.make(folder / f"{m}.h5", m) for m in ("dpfl", "local")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    fields = {"clients": 4, "rounds": 1, "tau_init": 1, "tau_train": 1, "budget": 2}
    return run_here(tmp_path_factory.mktemp("trained") / "run.h5", fields, save_models=True)


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A folder with Runs of several budgets and methods, and two files that are no results."""
    at = tmp_path_factory.mktemp("several")
    for i, fields in enumerate(({"budget": "0.75N"}, {"budget": 2, "lr": 0.5}, {})):
        more = fields | {"best": (0.8, 0.6, 1, 0.4), "seed": 9 - i}
        tiny_result.make(at / f"{i}.h5", "dpfl" if fields else "local", **more)
    tiny_result.empty(at / "begun.h5", Run().resolve())
    text_file(at / "other.h5", "no result")
    return at


def test_the_table_shows_what_is_off_in_some_runs(tmp_path):
    more = ({}, {"codec": "int8", "reach": "sites:2"})
    paths = [tiny_result.make(tmp_path / f"{i}.h5", **m) for i, m in enumerate(more)]
    frame = dpfl_mpi.table(paths)
    for name, value in more[1].items():
        assert frame[name].isna().tolist() == [True, False] and frame[name][1] == value
    paths.append(tiny_result.make(tmp_path / "local.h5", "local"))
    frame = dpfl_mpi.table(paths[1:])
    assert "reach" not in frame  # Local does not read it, so there is nothing to compare


def test_one_table_of_runs(several, said):
    out = several / "runs.csv"
    assert said(export.main, several, "--format=runs", "--out", out) == f"{out}\n"
    rows = rows_of(out)
    shown = ("method", "budget", "budget_models", "seed", "lr")
    assert [[row[name] for name in shown] for row in rows] == [
        ["dpfl", "0.75N", "3", "9", "0.01"],
        ["dpfl", "2", "2", "8", "0.5"],
        ["local", "", "", "7", "0.01"],
    ]
    best = np.array([0.8, 0.6, 1, 0.4])
    assert [float(row["accuracy"]) for row in rows] == pytest.approx([best.mean()] * 3)
    assert float(rows[0]["std"]) == pytest.approx(best.std()) and rows[0]["lowest"] == "0.4"
    assert float(rows[0]["models_received"]) == 3.75 and rows[0]["hours"] == ""
    frame = dpfl_mpi.table(several)
    assert frame.sort_values("budget_models")["seed"].tolist() == [8, 9, 7]
    assert frame.equals(dpfl_mpi.table([dpfl_mpi.Result(path) for path in frame["path"]]))
    lines = words_of(said(show.main, several, "--wide"))
    assert [line[0] for line in lines[1:]] == ["method", "dpfl", "dpfl", "local"]
    assert lines[0][:3] == [f"{several}:", "3", "Runs,"] and "70.00" in lines[2]
    assert [line[-1] for line in lines[2:]] == ["1.h5", "0.h5", "2.h5"]
    assert "has no results with a round in it" in said(show.main, several.parent, code=2)


def floats(path, name):
    return [float(row[name]) for row in rows_of(path)]


def words_of(text):
    return [line.split() for line in text.splitlines()]


def test_csv_is_long_and_exact(made, tmp_path, said, capfd):
    out = tmp_path / "new" / "run.csv"
    assert said(export.main, made["dpfl"], "--out", out) == f"{out}\n"
    rows = rows_of(out)
    assert list(rows[0]) == ["client_id", "round", "set", "loss", "accuracy"]
    assert len(rows) == 3 * 3 * 4  # rounds, sets, clients
    picked = next(r for r in rows if (r["client_id"], r["round"], r["set"]) == ("1", "2", "test"))
    assert float(picked["accuracy"]) == 0.6 and float(picked["loss"]) == 0.5 - 0.1 * 2
    # training accuracy is not recorded
    assert {r["accuracy"] for r in rows if r["set"] == "train"} == {""}
    paths = [str(tiny_result.make(tmp_path / f"{s}.h5", best=EVEN, seed=s)) for s in (1, 2, 3)]
    one, both = tmp_path / "1.csv", tmp_path / "runs.csv"
    replaced = f"{both} existed; it was replaced\n"
    calls = (paths[:1], one, ""), (paths[:2], both, ""), (paths[1:], both, replaced)
    for some, out, errors in calls:
        assert (export.main(some), *capfd.readouterr()) == (0, f"{out}\n", errors)
    assert "run" not in rows_of(one)[0] and {row["run"] for row in rows_of(both)} == {"2", "3"}


@pytest.mark.parametrize("form", ["csv", "clients"])
def test_results_are_named_and_those_of_one_name_by_their_paths(made, tmp_path, said, form):
    same = [str(tiny_result.make(tmp_path / str(s) / "out.h5", seed=s)) for s in (42, 52)]
    out = tmp_path / "all.csv"
    said(export.main, *same, made["local"], "--format", form, "--out", out)
    assert {r["run"] for r in rows_of(out)} == {*same, "local"}
    assert len(rows_of(out)) == 3 * 4 * (9 if form == "csv" else 1)


@pytest.mark.parametrize("command", [export.main, evaluate.main])
def test_what_is_read_is_never_overwritten(command, digits_file, tmp_path, said):
    (tmp_path / "data.h5").symlink_to(digits_file)
    result = tiny_result.make(tmp_path / "run.h5", dataset="image_folder", data=str(digits_file))
    before = result.read_bytes(), digits_file.read_bytes()
    for out in [result] if command is export.main else [result, tmp_path / "data.h5"]:
        why = f"--out is {out}, which is read here and would be lost; name another file"
        for more in ([],) if command is export.main else ([], ["--data", digits_file]):
            assert why in said(command, result, *more, "--out", out, code=2)
    assert (result.read_bytes(), digits_file.read_bytes()) == before


def test_what_a_run_reads_is_never_overwritten(made, tmp_path, said):
    budget, graphs = text_file(tmp_path / "budget.txt", "2 2 2 2"), made["dpfl"]
    lost = "which is read here and would be lost"
    error = said(describe.main, "--clients=4", f"--budget={budget}", "--save", budget, code=2)
    assert f"--save is {budget}, {lost}" in error
    mine = text_file(tmp_path / "mine.py", "x = 1\n")
    error = said(describe.main, "--clients=4", "--save", mine, code=2)
    assert "which is no partition and would be lost; name another file" in error
    assert (tmp_path / "mine.py").read_text() == "x = 1\n"
    replay = "--method=replay", "--clients=4", "--rounds=2", f"--graphs={graphs}"
    error = said(main, *replay, f"--out={graphs}", "--fresh", code=2)
    assert f"--out is {graphs}, {lost}" in error


@pytest.mark.parametrize("command", [export.main, evaluate.main, show.main])
def test_a_missing_file_is_one_sentence(command, said):
    error = said(command, "nothing.h5", code=2)
    assert error == "error: nothing.h5: there is no such result file\n"


def test_show_prints_the_run(made, said, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(show, "ROUNDS", 2)
        patch.setattr(show, "CLIENTS", 1)
        out = said(show.main, made["dpfl"], "--wide")
    assert "dpfl on digits, finished, 2 rounds\n" in out
    assert "\n  test accuracy        70.00 %, best by validation (50.00 % in round 0)\n" in out
    spread = "22.36 points (lowest 40.0 %, highest 100.0 %)"
    assert f"\n  spread over clients  {spread}\n" in out
    lines = words_of(out)
    assert ["1", "15", "0.4000", "60.00", "60.00", "2", "0.5", "15.75"] in lines
    assert ["2", "20", "0.3000", "70.00", "70.00", "3", "0.8", "15.75"] in lines
    assert not any(words[:2] == ["0", "10"] for words in lines)
    (best,) = [words for words in lines if words[:2] == ["2", "100.0"]]
    (worst,) = [words for words in lines if words[:2] == ["3", "40.0"]]
    assert best[-2:] == ["0(4)", "1(1)"] and worst[-1] == "2(8)"
    assert ["Omega", "5", "43.8", "0", "/", "1.2", "/", "2", "20.0", "16.7"] in lines
    assert ["round", "2", "3", "56.2", "0", "/", "0.8", "/", "2", "33.3", "16.7"] in lines
    paths = [made[m] for m in ("dpfl", "local")]
    _, *lines = said(show.main, *paths, "--compare", *paths).splitlines()
    first = lines.index("settings") + 1
    assert max(len(line) for line in lines if str(ROOT) not in line and ".h5" not in line) <= 80
    of_client_3 = [words[-1] for words in map(str.split, lines) if words[:1] == ["3"]]
    assert of_client_3[:2] == ["0", "2(8)"]  # in two tables
    assert lines[first].startswith("  data       dataset digits, partition pathological,")
    assert lines[first + 1].startswith(" " * 13 + "dirichlet_alpha 0.5, ")
    i = next(i for i, line in enumerate(lines) if line.startswith("client by client "))
    assert lines[i + 2].startswith("arrays that differ: best/test_acc, ")
    assert all(line.startswith("  ") for line in [lines[i + 1], *lines[i + 3 :]])
    # A line goes on below its text; each part of a wide table has the columns that name a row.
    folded = "time       " + "x " * 34 + "x\n" + " " * 11 + "x\nnote"
    assert fitted_page("time       " + "x " * 36 + "\nnote") == folded
    named, line = f"| {'a' * 20} | {'b' * 20} | ", "| one | two | 3 | 4 |".replace(" ", " " * 5)
    one, two = fitted_page("\n".join([f"{named}{'1' * 30} | {'2' * 30} |", line, line])).split(
        "\n\n"
    )
    assert one.splitlines()[0] == f"{named}{'1' * 30} |" and "4" not in one
    assert two.splitlines()[0] == f"{named}{'2' * 30} |"
    assert two.splitlines()[2].split("|")[3].strip() == "4"
    assert fitted_page(one) == one


def test_clients_have_names_and_groups(tmp_path, said, monkeypatch):
    """Of four clients 0 and 2 are in one group, with 80 and 100 %; 1 and 3 have 60 and 40 %."""
    classes = ["maple tree", "birch", "a very long name of a class, of which a part fits nowhere"]
    path = tiny_result.make(tmp_path / "a.h5", named=tiny_result.NAMED, classes=classes)
    out = said(show.main, path)
    assert "\n  accuracy by group    east 50.0 %, north 90.0 %\n" in out
    assert "\n  inside a group       66.7 % of the edges at the end (of all pairs 33.3 %)\n" in out
    lines = words_of(out)
    assert ["2", "site-2", "north", "100.0"] in [words[:4] for words in lines]
    assert ["2", "site-2", "1", "maple", "tree(4)", "birch(1)"] in lines
    assert ["3", "é", "0", "..."] in lines  # no number is cut
    assert max(map(len, out.splitlines()[1:])) <= 80
    monkeypatch.setattr("dpfl_mpi.results.summary.MOST_GROUPS", 1)
    out = said(show.main, path)
    assert "of 2 groups: lowest and highest east 50.0 %," in out
    said(export.main, path, "--format", "clients")
    rows = rows_of(tmp_path / "a.clients.csv")
    for what, texts in tiny_result.NAMED.items():
        assert [row[what] for row in rows] == texts
        assert list(Result(path).to_pandas()[what]) == texts
    said(export.main, path)
    assert [row["name"] for row in rows_of(tmp_path / "a.csv")[:4]] == tiny_result.NAMED["name"]


def test_show_of_graphs_of_a_running_run_and_of_two(made, tmp_path, said):
    assert "no edges: no client chooses whose models it receives" in said(show.main, made["local"])
    running = tiny_result.make(tmp_path / "r.h5", finished=False)
    stopped = "stopped after round 2 of 2\n  it is not being computed; the same command "
    assert f"{stopped}starts over: there is no checkpoint\n" in said(show.main, running)
    (tmp_path / "r.h5.checkpoint" / "000002.a.b.manifest.h5").mkdir(parents=True)
    assert f"{stopped}goes on\n" in said(show.main, running)
    lock = Lock(running)
    lock.acquire()
    assert "running, round 2 of 2\n  test accuracy" in said(show.main, running)
    lock.release()
    # a method that chooses anew in each round has no Omega
    fields = {"graphs": ([[]] * 4, [[2], [], [0], []], [[1, 2], [], [0], []]), "budget": 1}
    out = said(show.main, tiny_result.make(tmp_path / "p.h5", "pfedgraph", best=EVEN, **fields))
    assert ["round", "2", "3", "56.2", "0", "/", "0.8", "/", "2", "33.3", "16.7"] in words_of(out)
    assert "no edges" not in out and "Omega" not in out.split()
    out = said(show.main, "--compare", made["local"], made["dpfl"])
    assert ["method", "local", "dpfl"] in words_of(out) and ["budget", "-", "3"] in words_of(out)
    assert ["test", "accuracy,", "%", "65.00", "70.00"] in words_of(out)
    by_client = "B - A: +5.00 points; B is better for 2, equal for 1, worse for 1"
    assert by_client in " ".join(out.split())
    out = said(show.main, "--compare", made["dpfl"], made["dpfl"])
    assert "the settings are the same" in out and "all recorded numbers are equal to the bit" in out
    out = said(show.main, "--cite", *made.values())
    assert out.startswith("@inproceedings{kharrat2025dpfl,") and out.count("arXiv:2406.06520") == 1
    assert find("method", "local").citation == ""
    assert said(show.main, "--layout") == LAYOUT
    assert "name a RESULT, or two with --compare" in said(show.main, code=2)


def test_the_summary_draws_only_what_there_is(made, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    odd = shutil.copytree(made["dpfl"].parent, tmp_path / "my results") / "dpfl.h5"
    text = summary(odd)
    assert text.endswith(f"  draw the graph       python analysis/graph_evolution.py '{odd}'")
    assert "edges                5 in Omega, 2.5 kept per round" in text
    monkeypatch.chdir(tmp_path)
    assert f"python {os.path.relpath(ROOT)}/analysis/graph_evolution.py '{odd}'" in summary(odd)
    text = summary(made["local"])
    assert "edges" not in text and "draw the graph" not in text and "B_c" not in text
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert "\n                       evaluate " in text


DIVERGED = {"rounds": 1, "lr": 1000.0, "clip_norm": 0.0, "on_divergence": "exclude"}
NOBODY = {"diverged": DIVERGED, "flipped": {"rounds": 0, "tau_init": 1, "flip_share": 1.0}}
NOBODY |= {"late": DIVERGED | {"newcomers": 0.99}}  # two of three: the third diverges


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("why", NOBODY)
def test_a_run_in_which_nobody_was_scored_says_so(why, result_of, said):
    result = result_of({"clients": 3} | NOBODY[why], save_models=True)
    path, lines = result.path, summary(result.path).splitlines()
    assert not len(result.benign_percentages())
    assert lines[1].startswith("  test accuracy        no client was scored (flipped labels, ")
    assert not any("nan" in line or "spread over clients" in line for line in lines)
    assert "\n".join(lines[1:3]) in said(show.main, path)
    out = said(show.main, "--compare", path, path)
    assert ["test", "accuracy,", "%", "-", "-"] in words_of(out)
    assert "B - A: no client was scored in both; B is better for 0" in " ".join(out.split())
    nobody = "no client is scored on their own test samples" in said(evaluate.main, path)
    assert nobody == (why == "flipped")


def test_who_does_not_count_is_told(tmp_path, said):
    path = tiny_result.make(tmp_path / "a.h5", flipped=[False, True, False, True])
    out = " ".join(said(show.main, path).split())
    assert "in round 0), of 2 of 4 clients, 2 with flipped labels" in out
    assert "models received 1.25 per client and round, 4.0 to build Omega" in out  # of 0 and 2
    no = [line.split() for line in said(show.main, path).splitlines() if " no " in line]
    assert [line[0] for line in no] == ["1", "3"]
    # without the array that says who is flipped, the mean would be over all
    with h5py.File(path, "a") as file:
        del file["client/flipped"]
    why = "is damaged: best/test_acc has another mean than the one stored"
    assert why in said(show.main, path, code=2)


def test_a_client_that_stopped_keeps_its_last_round(tmp_path, said):
    # three rows, of rounds 0 to 2, before all have stopped
    path = tiny_result.make(tmp_path / "a.h5", rounds=5, patience=1)
    with h5py.File(path, "a") as file:
        file["client/stopped_round"] = np.array([1, 2, 2, 2])
        file["round/test_acc"][2, 0] = np.nan
    result = Result(path)  # round 1: 0.7, 0.5, 0.9, 0.3; round 2: the others have 0.1 more
    assert result.mean("round/test_acc")[2] == pytest.approx((0.7 + 0.6 + 1.0 + 0.4) / 4)
    assert f"{path}: dpfl on digits, finished, 2 of 5 rounds" in said(show.main, path)
    assert ", 2 of 5 rounds, seed 42" in summary(path)


def test_what_is_left_out_of_a_folder_is_named(tmp_path, capfd):
    tiny_result.make(tmp_path / "a.h5")
    (tmp_path / "b.h5").write_bytes((tmp_path / "a.h5").read_bytes()[:3000])
    show.main([str(tmp_path)])
    out, err = capfd.readouterr()
    assert "1 Run" in out and err.startswith(
        f"left out: {tmp_path / 'b.h5'} is not a result of dpfl_mpi"
    )


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_no_newcomers_are_no_line(tmp_path):
    few = {"clients": 5, "method": "fedavg", "rounds": 1}
    for share, lines in ((0.1, 0), (0.4, 1)):
        text = summary(run_here(tmp_path / f"{share}.h5", few | {"newcomers": share}))
        assert text.count("\n  newcomers  ") == lines and "nan" not in text


def test_means_are_over_clients_that_are_scored(tmp_path, said):
    flipped = [False, True, False, True]
    flip = tiny_result.tiny(tmp_path, "flip", flipped=flipped)  # best .8 .6 1.0 .4
    local = tiny_result.tiny(tmp_path, "local", "local", flipped=flipped)  # .6 .6 .8 .6
    compared = " ".join(show.compare(flip, local).split())
    assert "B - A: -20.00 points; B is better for 0, equal for 0, worse for 2" in compared
    assert "test accuracy        90.00 %, best by validation" in show.show(flip)
    text = evaluate.report(flip, np.array([0.8, 0.1, 1.0, 0.1]), "own")
    assert text.startswith("2 models on their own test samples: mean 90.00 %")
    assert "the same for 2 of 2 clients" in text
    out = said(show.main, tiny_result.make(tmp_path / "a.h5", best=[0.5, np.nan, np.nan, np.nan]))
    of = "50.00 %, best by validation (30.00 % in round 0), of 1 of 4 clients, 3 took no part"
    assert of in " ".join(out.split())


def test_tuning_that_was_not_done_is_no_epoch(tmp_path):
    result = tiny_result.tiny(tmp_path, finetune_epochs=4, finished=False)
    assert result["round/epochs"][-1] == result.all_epochs()


def test_evaluate_finds_the_recorded_scores(trained, tmp_path, said):
    out = tmp_path / "scores.csv"
    text = said(evaluate.main, trained, "--device", "cpu", "--out", out)
    assert "the same for 4 of 4 clients" in text
    with Result(trained) as result:
        assert floats(out, "accuracy") == pytest.approx(result["best/test_acc"].tolist())
        assert floats(out, "samples") == result["client/n_test"].tolist()
    other = said(evaluate.main, trained, "--dataset", "image_folder", code=2)
    assert other == "error: --dataset is image_folder; the run has the shipped digits\n"
    # As sums class by class; if every client is its own group, they are its own samples.
    out = tmp_path / "scores.csv"
    text = said(evaluate.main, trained, "--on", "classes", "--out", out, "--device", "cpu")
    assert text.startswith("4 models on all test samples of their classes: mean")
    scores, samples = (floats(out, name) for name in ("accuracy", "samples"))
    with dpfl_mpi.Result(trained) as result:
        source, labels = result.source, result.source.labels["test"]
        images = source.images("test", np.arange(len(labels)))
        own = result["best/confusion"].sum(2)  # test samples by class
        for k in range(4):
            right = result.model(k)(images).argmax(1).numpy() == labels
            shares = own[k] / own[k].sum()
            by_hand = sum(n * right[labels == c].mean() for c, n in enumerate(shares))
            assert scores[k] == pytest.approx(by_hand)
            assert samples[k] == np.isin(labels, np.flatnonzero(own[k])).sum()
        assert min(samples) > own.sum(1).max()
        rows, weights = evaluate.of_classes(result, source, np.arange(4))
        alone = evaluate.accuracies(result, source, rows, "cpu", weights)
        assert alone == pytest.approx(result["best/test_acc"])


def test_who_was_never_there_has_no_model(tmp_path, said):
    fields = {"clients": 6, "rounds": 1, "tau_init": 1, "tau_train": 1, "method": "local"}
    fields["churn"] = text_file(tmp_path / "churn.csv", "90 0 join\n")
    path = run_here(tmp_path / "a.h5", fields)
    for on in ("own", "all", "classes"):
        out = tmp_path / f"{on}.csv"
        text = said(evaluate.main, path, "--on", on, "--out", out, "--device", "cpu")
        assert text.startswith("1 of 6 clients have no model: they were never scored\n5 models on ")
        scores = floats(out, "accuracy")
        assert np.isnan(scores).tolist() == [True] + [False] * 5
        assert f"mean {100 * np.mean(scores[1:]):.2f} %" in text
        assert on != "own" or "the same for 5 of 5" in text
    with dpfl_mpi.Result(path) as result:
        refused("client 0 of ... has no model: it was never scored", result.model, 0)


def test_evaluate_on_other_data(trained, digits_file, colour_file, tmp_path, said):
    everyone = said(evaluate.main, trained, "--on", "all")
    assert everyone.startswith("4 models on the whole test set: mean")
    a, moments, names = digits.load(), tmp_path / "moments.h5", tmp_path / "names.h5"
    fewer = {"train_images": a.train_images[:-1], "train_labels": a.train_labels[:-1]}
    for path, change in (
        (moments, {"mean": (0.9,), "std": (2.0,)}),
        (names, {"class_names": (*a.class_names[:9], "ten")}),
    ):
        prepare.write(dataclasses.replace(a, **fewer, **change), "image_folder", path)
    for same in (digits_file, moments):
        assert said(evaluate.main, trained, "--on", "all", "--data", same) == everyone
    np.savez(tmp_path / "wine.npz", x=np.zeros((20, 3)), y=np.arange(20) % 2)
    no_file = "`python -m dpfl_mpi.prepare DATASET --source PATH"
    no_fit = "the saved models do not fit these data (samples of 17x18x3, 4 classes)"
    for data, on, sentence in (
        (colour_file, "all", no_fit),
        (colour_file, "own", "these are not the data of the run"),
        (names, "all", "class 9 is ten, and 9 in the run; both must have the same classes"),
        # what is advised replaces no file
        (tmp_path / "wine.npz", "all", f": prepare one with {no_file}`\n"),
        (tmp_path / "none.h5", "all", f": make it with {no_file} --out {tmp_path / 'none.h5'}`\n"),
    ):
        assert sentence in said(evaluate.main, trained, "--data", data, "--on", on, code=2)
    a, files = digits.load(), {}
    x = np.concatenate([a.train_images, a.test_images])
    y = np.concatenate([a.train_labels, a.test_labels])
    test = np.arange(len(y)) >= len(a.train_labels)
    for name, first in (("run", 0), ("wider", -4)):
        floats = (x / 64 - 1).astype(np.float32)
        floats[0, 0, 0] = first
        files[name] = tmp_path / f"{name}.h5"
        prepare.write(arrays_of(floats, y, None, test), "arrays", files[name], own=True)
    fields = {"clients": 4, "rounds": 1, "tau_init": 2, "dataset": "arrays"}
    fields["data"] = str(files["run"])
    run = run_here(tmp_path / "own.h5", fields, save_models=True)
    texts = [said(evaluate.main, run, "--on", "all", "--data", data) for data in files.values()]
    assert texts[0].startswith("4 models on the whole") and texts[0] == texts[1]
    error = said(evaluate.main, trained, "--on", "all", "--data", files["run"], code=2)
    assert "its samples are float32, those of the run uint8; prepare both alike" in error


def test_evaluate_refuses_classes_where_clients_differ_in_more(
    tmp_path, result_of, said, digits_file
):
    labels = np.arange(80) % 2
    arrays = arrays_of(np.zeros((80, 3)), labels, np.arange(80) % 5)
    prepare.write(arrays, "arrays", tmp_path / "people.h5")
    fields = {"dataset": "arrays", "data": str(tmp_path / "people.h5")}
    fields |= {"method": "local", "rounds": 0, "tau_init": 1}
    path = result_of(fields, save_models=True).path
    sentence = "--on is classes; clients of --partition natural differ in more than their classes"
    assert sentence in said(evaluate.main, path, "--on", "classes", code=2)
    fields = {"clients": 4, "rounds": 1, "metric": "batch", "batch_size": 8}
    result = result_of(fields, save_models=True)
    why = "the run took means over mini-batches (--metric batch); these are over images"
    assert why in said(evaluate.main, result.path)
    fields = {"partition": "fedrep", "clients": 4, "method": "local", "rounds": 1, "tau_train": 1}
    path = result_of(fields, save_models=True).path
    for data in ([], ["--data", digits_file]):
        assert "the same for 4 of 4 clients" in said(evaluate.main, path, *data, "--device", "cpu")
        one_pool = "takes training and test samples from one pool"
        assert one_pool in said(evaluate.main, path, *data, "--on", "all", code=2)
        answer = said(evaluate.main, path, *data, "--on", "classes", code=2)
        assert one_pool in answer and "--data" not in answer


def test_show_tells_of_the_network_of_attackers_and_of_who_stopped(tmp_path, said):
    path = tiny_result.make(tmp_path / "n.h5", network="phones", staleness=1)
    with tiny_result.changing(path) as file:
        file["network/age"] = np.array([[0] * 4, [1, 0, 1, 0], [1, 0, 1, 0]])
    out = " ".join(said(show.main, path).split())
    assert "sent 1 kB per client and round, 1 kB before" in out
    # 12 s in all; four of five models received were one round old
    age = "models were 0.80 rounds old (--staleness 1)"
    assert f"simulated time 0.2 min (--network phones); {age}" in out
    curves = Result(path).curves()
    assert (3600 * curves["hours"]).tolist() == pytest.approx([4, 8, 12])
    assert curves["bytes_sent"].tolist() == [1000] * 3
    path = tiny_result.make(tmp_path / "a.h5", patience=1)
    with tiny_result.changing(path) as file:
        file.attrs["test_acc"] = 0.6  # of those who do not lie
        file["client/attackers"] = np.array([False, False, True, False])
        file["attack/success"] = np.array([0.5, 0.25, 1, np.nan])
        file["client/stopped_round"] = np.array([1, -1, 2, -1])
    out = " ".join(said(show.main, path).split())
    assert "attackers 1 of 4 clients; 66.7 % of benign clients' choices" in out
    assert "backdoor opens on 37.5 % of marked images" in out
    assert "stopped early 2 of 4 clients" in out
