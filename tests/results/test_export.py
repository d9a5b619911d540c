"""Results in other tools' formats, in the terminal, and their models scored."""

import csv
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import tiny_result
from launch import ROOT, run_here

from dpfl_mpi import evaluate, export, show
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.results.summary import epochs, outcome, summary
from dpfl_mpi.studies import optimality


def whole(text):
    """Return a text whose lines are not folded."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    return {m: tiny_result.make(folder / f"{m}.h5", m) for m in ("dpfl", "local")}


def test_csv_is_long_and_exact(made, tmp_path, capsys):
    out = tmp_path / "new" / "run.csv"
    assert export.main([str(made["dpfl"]), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert list(rows[0]) == ["client_id", "round", "set", "loss", "accuracy"]
    assert len(rows) == 3 * 3 * 4  # rounds, sets, clients
    picked = next(r for r in rows if (r["client_id"], r["round"], r["set"]) == ("1", "2", "test"))
    assert float(picked["accuracy"]) == 0.6 and float(picked["loss"]) == 0.5 - 0.1 * 2
    assert {r["accuracy"] for r in rows if r["set"] == "train"} == {""}  # training accuracy is not recorded


def test_several_runs_in_one_csv_are_named(made, tmp_path):
    out = tmp_path / "both.csv"
    assert export.main([str(made["dpfl"]), str(made["local"]), "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {r["run"] for r in rows} == {"dpfl", "local"} and len(rows) == 72


@pytest.mark.parametrize("form", ["csv", "clients"])
def test_results_of_one_name_are_named_by_their_paths(made, tmp_path, form):
    for folder in ("ea", "eb"):
        (tmp_path / folder).mkdir()
    same = [str(tiny_result.make(tmp_path / f"e{x}" / "out.h5", seed=s)) for x, s in (("a", 42), ("b", 52))]
    out = tmp_path / "all.csv"
    assert export.main([*same, str(made["local"]), "--format", form, "--out", str(out)]) == 0
    assert {r["run"] for r in csv.DictReader(out.read_text().splitlines())} == {*same, "local"}


def test_pfllib_layout_is_weighted_by_samples(tmp_path):
    path = tiny_result.make(tmp_path / "run.h5")
    with h5py.File(path, "a") as file:
        file["client/n_test"][...] = [10, 0, 30, 0]
        file["round/train_loss"][2, 0] = np.nan  # a client that left: the mean is over the others
    assert export.main([str(path), "--format", "pfllib"]) == 0
    with h5py.File(tmp_path / "pfllib" / "run.h5") as file:
        assert set(file) == {"rs_test_acc", "rs_test_auc", "rs_train_loss"}
        assert file["rs_test_acc"][:] == pytest.approx(
            [0.75, 0.85, 0.95]
        )  # .8 a quarter, 1.0 three quarters, less .1 per round
        assert file["rs_train_loss"][:] == pytest.approx([0.5, 0.4, 0.3])


def test_pfllib_files_are_not_among_the_results(tmp_path):
    path = tiny_result.make(tmp_path / "results" / "run.h5")
    assert export.main([str(path), "--format", "pfllib"]) == 0
    assert list(path.parent.glob("*.h5")) == [path] and (path.parent / "pfllib" / "run.h5").is_file()


def test_several_results_in_pfllibs_layout(made, tmp_path):
    assert export.main([*map(str, made.values()), "--format", "pfllib", "--out", str(tmp_path / "out")]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["dpfl.h5", "local.h5"]


def test_several_results_do_not_go_under_the_name_of_one(tmp_path, capsys):
    one, two = (tiny_result.make(tmp_path / f"{s}.h5", seed=s) for s in (42, 52))
    assert export.main([str(one)]) == export.main([str(one), str(two)]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "42.csv"), str(tmp_path / "runs.csv")]
    assert "run" not in (tmp_path / "42.csv").read_text().splitlines()[0].split(",")


def test_export_says_what_it_replaces(tmp_path, capsys):
    """Another set of results goes to the same runs.csv."""
    paths = [str(tiny_result.make(tmp_path / f"{s}.h5", best=(0.5,) * 4, seed=s)) for s in (1, 2, 3)]
    out = tmp_path / "runs.csv"
    for some, said in ((paths[:2], ""), (paths[1:], f"{out} was there before; it is replaced\n")):
        assert export.main(some) == 0
        assert capsys.readouterr() == (f"{out}\n", said)
    assert {row["run"] for row in csv.DictReader(out.read_text().splitlines())} == {"2", "3"}


def test_export_never_overwrites_a_result(made, capsys):
    before = made["dpfl"].read_bytes()
    assert export.main([str(made["dpfl"]), "--out", str(made["dpfl"])]) == 2
    assert "which is one of the results" in capsys.readouterr().err
    assert made["dpfl"].read_bytes() == before


@pytest.mark.parametrize("command", [evaluate.main, optimality.main])
def test_what_is_read_is_never_overwritten(command, made, tmp_path, capsys):
    before, data = made["dpfl"].read_bytes(), tmp_path / "data.h5"
    data.write_bytes(b"samples")
    for out in (made["dpfl"], data):
        assert command([str(made["dpfl"]), "--data", str(data), "--out", str(out)]) == 2
        assert f"--out is {out}, which is read here and would be lost; name another file" in capsys.readouterr().err
    assert made["dpfl"].read_bytes() == before and data.read_bytes() == b"samples"


@pytest.mark.parametrize("command", [export.main, evaluate.main, show.main])
def test_a_missing_file_is_one_sentence(command, capsys):
    assert command(["nothing.h5"]) == 2
    assert capsys.readouterr().err == "error: nothing.h5: there is no such result file\n"


def test_show_prints_the_run(made, capsys):
    assert show.main([str(made["dpfl"]), "--clients", "1", "--last", "2"]) == 0
    out = capsys.readouterr().out
    assert "dpfl on digits, finished, 2 rounds\n" in out
    assert (
        "\n  test accuracy 70.00 % (mean over 4 clients of their best model by validation),"
        "\n  std over clients 22.36, lowest 40.0 %\n"
    ) in out
    lines = [line.split() for line in out.splitlines()]
    assert ["1", "15", "0.4000", "60.00", "60.00", "2", "0.5", "21.00"] in lines
    assert ["2", "20", "0.3000", "70.00", "70.00", "3", "0.8", "21.00"] in lines and not any(
        w[:2] == ["0", "10"] for w in lines
    )
    best, worst = (next(w for w in lines if w[:2] == c) for c in (["2", "100.0"], ["3", "40.0"]))
    assert best[-2:] == ["0(4)", "1(1)"] and worst[-1] == "2(8)"
    assert ["Omega", "5", "43.8", "0", "/", "1.2", "/", "2", "20.0", "16.7"] in lines
    assert ["round", "2", "3", "56.2", "0", "/", "0.8", "/", "2", "33.3", "16.7"] in lines


def test_show_fits_a_terminal(made, capsys):
    """Prose and lists have lines of 80 columns, in which a setting stays beside its value; tables are as wide as they are."""
    paths = [str(made[m]) for m in ("dpfl", "local")]
    assert show.main([*paths, "--compare", *paths]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    first = lines.index("settings") + 1
    end = lines.index("", first)
    assert max(map(len, lines[:end])) <= 80 and max(map(len, lines[-5:])) <= 80
    assert lines[first].startswith("  data       dataset digits, partition pathological,")
    assert lines[first + 1].startswith(" " * 13 + "dirichlet_alpha 0.5, ")
    i = lines.index("client by client (same partition), B - A: -5.00 points; B is better for 1, equal")
    assert lines[i + 1] == "  for 1, worse for 2" and lines[i + 2].startswith("arrays that differ: best/test_acc, ")
    assert all(line.startswith("  ") for line in lines[i + 3 :])


def test_show_of_a_run_without_a_graph_and_of_a_running_one(made, tmp_path, capsys):
    assert show.main([str(made["local"])]) == 0
    assert "no edges: no client chooses whose models it receives" in capsys.readouterr().out
    assert show.main([str(tiny_result.make(tmp_path / "r.h5", finished=False))]) == 0
    assert "running, round 2 of 2" in capsys.readouterr().out


def test_show_of_a_method_that_chooses_in_each_round_alone(tmp_path, capsys):
    """Its graph is not in Omega, which is that of preprocessing."""
    graphs = ([[]] * 4, [[2], [], [0], []], [[1, 2], [], [0], []])
    path = tiny_result.make(tmp_path / "p.h5", "pfedgraph", best=(0.5,) * 4, graphs=graphs, budget=1)
    assert show.main([str(path)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["round", "2", "3", "56.2", "0", "/", "0.8", "/", "2", "33.3", "16.7"] in lines
    assert "no edges" not in out and not any(words[:1] == ["Omega"] for words in lines)


def test_the_summary_draws_only_what_there_is(made, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    odd = tmp_path / "my results" / "run.h5"
    shutil.copytree(made["dpfl"].parent, odd.parent)
    shutil.copy(made["dpfl"], odd)
    said = summary(odd)
    assert said.endswith(f"  draw the graph       python analysis/graph_evolution.py '{odd}'")
    assert "edges                5 in Omega, 2.5 kept per round" in said
    monkeypatch.chdir(tmp_path)
    assert f"python {ROOT}/analysis/graph_evolution.py '{odd}'" in summary(odd)
    said = summary(made["local"])
    assert "edges" not in said and "draw the graph" not in said and "B_c" not in said
    assert max(map(len, said.splitlines()[:-1])) <= 80 and "\n                       evaluate " in said


NOBODY = {
    "diverged": {"rounds": 1, "lr": 1000.0, "clip_norm": 0.0, "on_divergence": "exclude"},
    "flipped": {"rounds": 0, "tau_init": 1, "flip_share": 1.0},
    "late": {"rounds": 1, "newcomers": 0.99},  # two of three: the third diverges
}
NOBODY["late"] |= NOBODY["diverged"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("why", NOBODY)
def test_a_run_in_which_nobody_was_scored_says_so(why, tmp_path, capsys):
    """Wherever accuracies are summed up, without a traceback and without `nan`."""
    path = run_here(tmp_path / "r.h5", {"clients": 3} | NOBODY[why], save_models=True)
    with Result(path) as result:
        assert not len(result.scored())
    said = summary(path).splitlines()
    assert said[1].startswith("  test accuracy        no client was scored (flipped labels, ")
    assert not any("nan" in line or "spread over clients" in line for line in said)
    assert show.main([str(path)]) == 0
    assert "\n  no client was scored\n" in capsys.readouterr().out
    assert show.main(["--compare", str(path), str(path)]) == 0
    out = capsys.readouterr().out
    assert ["test", "accuracy,", "%", "-", "-"] in [line.split() for line in out.splitlines()]
    assert "B - A: no client was scored in both; B is better for 0" in whole(out)
    assert evaluate.main([str(path)]) == 0
    none = why == "flipped"
    assert ("no client is scored on their own test samples" in capsys.readouterr().out) == none


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_no_newcomers_are_no_line(tmp_path):
    """0.1 of five clients is none of them; of two in five there is a line."""
    few = {"clients": 5, "method": "fedavg", "rounds": 1}
    for share, lines in ((0.1, 0), (0.4, 1)):
        said = summary(run_here(tmp_path / f"{share}.h5", few | {"newcomers": share}))
        assert said.count("\n  newcomers  ") == lines and "nan" not in said


def test_compare_says_what_differs(made, capsys):
    assert show.main(["--compare", str(made["local"]), str(made["dpfl"])]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["method", "local", "dpfl"] in lines and ["budget", "1", "3"] in lines
    assert ["test", "accuracy,", "%", "65.00", "70.00"] in lines
    assert "B - A: +5.00 points; B is better for 2, equal for 1, worse for 1" in whole(out)
    assert show.main(["--compare", str(made["dpfl"]), str(made["dpfl"])]) == 0
    out = capsys.readouterr().out
    assert "the settings are the same" in out and "all recorded numbers are the same to the last bit" in out


def test_cite_prints_the_bibtex_of_the_methods(made, capsys):
    assert show.main(["--cite", *map(str, made.values())]) == 0
    out = capsys.readouterr().out
    assert out.startswith("@inproceedings{kharrat2025dpfl,") and out.count("arXiv:2406.06520") == 1
    assert find("method", "local").citation == ""


@pytest.mark.parametrize("arguments", [[], ["x", "--last", "0"]])
def test_show_without_sense_says_how(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        show.main(arguments)
    assert end.value.code == 2 and "usage" in capsys.readouterr().err


def test_show_and_export_need_neither_torch_nor_mpi(made, tmp_path):
    code = (
        "import sys; sys.modules.update(torch=None, mpi4py=None)\n"
        "from dpfl_mpi import export, show\n"
        f"sys.exit(show.main([{str(made['dpfl'])!r}]) or export.main([{str(made['dpfl'])!r}, '--out', {str(tmp_path / 'o.csv')!r}]))"
    )
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=60).returncode == 0


def test_state_dict_by_layer(tmp_path):
    path = tiny_result.make(tmp_path / "run.h5")
    with pytest.raises(Exception, match="holds no models; run with --save_models"):
        Result(path).state_dict(0)
    tiny_result.save_models(path, np.arange(20).reshape(4, 5))
    layers = Result(path).state_dict(1)
    assert layers["w"].tolist() == [[5, 6], [7, 8]] and layers["b"].tolist() == [9]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run of four clients and one round with its models."""
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("trained") / "run.h5"
    command = "--clients 4 --rounds 1 --tau_init 1 --tau_train 1 --budget 2 --save_models --quiet --out"
    subprocess.run([sys.executable, "-m", "dpfl_mpi", *command.split(), str(path)], check=True, timeout=120)
    return path


def test_evaluate_finds_the_recorded_scores(trained, tmp_path, capsys):
    out = tmp_path / "scores.csv"
    assert evaluate.main([str(trained), "--out", str(out), "--device", "cpu"]) == 0
    assert "the same for 4 of 4 clients" in capsys.readouterr().out
    rows = list(csv.DictReader(out.read_text().splitlines()))
    with Result(trained) as result:
        assert [float(r["accuracy"]) for r in rows] == pytest.approx(result["best/test_acc"].tolist())
        assert [int(r["samples"]) for r in rows] == result["client/n_test"].tolist()
    assert evaluate.main([str(trained), "--set", "val", "--device", "cpu"]) == 0
    assert "the same for 4 of 4 clients" in capsys.readouterr().out


def test_evaluate_on_other_data(trained, digits_file, colour_file, capsys):
    assert evaluate.main([str(trained), "--data", str(digits_file), "--on", "all"]) == 0
    everyone = capsys.readouterr().out
    assert evaluate.main([str(trained), "--on", "all"]) == 0  # the embedded digits are the same images
    assert capsys.readouterr().out == everyone and everyone.startswith("4 models on the whole test set: mean")
    assert evaluate.main([str(trained), "--data", str(colour_file), "--on", "all"]) == 2
    assert "the saved models do not fit these data (samples of 17x18x3, 4 classes)" in capsys.readouterr().err
    assert evaluate.main([str(trained), "--data", str(colour_file)]) == 2
    assert "these are not the data of the run" in capsys.readouterr().err


def test_evaluate_advises_nothing_that_would_replace_a_file(trained, tmp_path, capsys):
    np.savez(tmp_path / "wine.npz", x=np.zeros((20, 3)), y=np.arange(20) % 2)
    for name, advice in (
        ("wine.npz", "prepare one with `python -m dpfl_mpi.prepare DATASET --source PATH`"),
        ("none.h5", f"make it with `python -m dpfl_mpi.prepare DATASET --source PATH --out {tmp_path / 'none.h5'}`"),
    ):
        assert evaluate.main([str(trained), "--data", str(tmp_path / name), "--on", "all"]) == 2
        assert capsys.readouterr().err.endswith(f": {advice}\n")


def test_evaluate_reads_other_data_as_the_run_did(trained, tmp_path, capsys):
    """Labels must name the same classes; images are normalised as those that were trained on, whatever their own moments are."""
    import dataclasses

    from dpfl_mpi import prepare
    from dpfl_mpi.datasets import digits

    arrays = digits.load()
    assert evaluate.main([str(trained), "--on", "all"]) == 0
    expected = capsys.readouterr().out
    fewer = dataclasses.replace(arrays, train_images=arrays.train_images[:-1], train_labels=arrays.train_labels[:-1])
    prepare.write(dataclasses.replace(fewer, mean=(0.9,), std=(2.0,)), "image_folder", tmp_path / "moments.h5")
    assert evaluate.main([str(trained), "--on", "all", "--data", str(tmp_path / "moments.h5")]) == 0
    assert capsys.readouterr().out == expected
    names = (*arrays.class_names[:9], "ten")
    prepare.write(dataclasses.replace(fewer, class_names=names), "image_folder", tmp_path / "names.h5")
    assert evaluate.main([str(trained), "--on", "all", "--data", str(tmp_path / "names.h5")]) == 2
    assert "class 9 is ten, and 9 in the run; both must have the same classes" in capsys.readouterr().err


def test_evaluate_where_test_samples_come_from_the_training_pool(digits_file, tmp_path, capsys):
    pytest.importorskip("torch")
    path = tmp_path / "run.h5"
    command = "--partition fedrep --clients 4 --method local --rounds 1 --tau_train 1 --save_models --quiet --out"
    subprocess.run([sys.executable, "-m", "dpfl_mpi", *command.split(), str(path)], check=True, timeout=120)
    for data in ([], ["--data", str(digits_file)]):
        assert evaluate.main([str(path), *data, "--device", "cpu"]) == 0
        assert "the same for 4 of 4 clients" in capsys.readouterr().out
        assert evaluate.main([str(path), *data, "--on", "all"]) == 2
        assert "takes training and test samples from one pool" in capsys.readouterr().err


def test_means_are_over_clients_with_true_labels(tmp_path, capsys):
    flip = tiny_result.make(tmp_path / "flip.h5", flipped=[False, True, False, True])  # best .8 .6 1.0 .4
    local = tiny_result.make(tmp_path / "local.h5", "local", flipped=[False, True, False, True])  # .6 .6 .8 .6
    with Result(flip) as a, Result(local) as b:
        assert "B - A: -20.00 points; B is better for 0, equal for 0, worse for 2" in whole(show.compare(a, b))
        assert "(mean over 2 clients" in show.show(a, 1, 1)
        said = evaluate.report(a, np.array([0.8, 0.1, 1.0, 0.1]), "own", "test")
    assert said.startswith("2 models on their own test samples: mean 90.00 %") and "the same for 2 of 2 clients" in said
    out = tmp_path / "flip.pfllib"
    assert export.main([str(flip), "--format", "pfllib", "--out", str(out)]) == 0
    with h5py.File(out) as file:
        assert file["rs_test_acc"][:].tolist() == pytest.approx([0.7, 0.8, 0.9])


def test_a_state_dict_loads_into_the_module(trained):
    torch = pytest.importorskip("torch")
    from dpfl_mpi.models import mlp

    with Result(trained) as result:
        module = mlp.build((8, 8, 1), 10)
        module.load_state_dict({name: torch.from_numpy(values) for name, values in result.state_dict(2).items()})
        row = torch.cat([p.detach().flatten() for p in module.parameters()]).numpy()
        np.testing.assert_array_equal(np.sort(row), np.sort(result["model/best"][2]))


def test_means_over_batches_are_not_compared_without_a_word(tmp_path, capsys):
    """The run took means over mini-batches of eight, `evaluate` takes them over images: so they differ, and it says why."""
    fields = {"clients": 4, "rounds": 1, "metric": "batch", "batch_size": 8}
    path = run_here(tmp_path / "a.h5", fields, save_models=True)
    assert evaluate.main([str(path)]) == 0
    assert (
        "the run took means over mini-batches (--metric batch): these are means over images" in capsys.readouterr().out
    )


def test_a_mean_says_over_how_many(tmp_path, capsys):
    """Three of four clients diverged before they were scored."""
    best = [0.5, np.nan, np.nan, np.nan]
    assert show.main([str(tiny_result.make(tmp_path / "a.h5", best=best))]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "50.00 % (mean over 1 of 4 clients, the others diverged, of their best model by validation)" in said


def test_tuning_that_was_not_done_is_no_epoch(tmp_path):
    """Two rounds behind ten epochs; of the four of tuning none is recorded."""
    with Result(tiny_result.make(tmp_path / "a.h5", finetune_epochs=4, finished=False)) as result:
        assert epochs(result) == result["round/epochs"][-1] == outcome(result)["local epochs"]
