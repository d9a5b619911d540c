"""Which Runs a command line wants: of a grid, of a file, of tried values; what it refuses."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import starts
import tiny_result
from launch import refused, text_file
from starts import runs_file

from dpfl_mpi.__main__ import main
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.sweep import __main__ as sweep
from dpfl_mpi.sweep import wanted
from dpfl_mpi.sweep.entries import Entry


@pytest.mark.parametrize(("words", "sentence"), [
    ("--ranks 0", "--ranks is 0; allowed is a whole number of at least 1"),
    ("--max_parallel -1", "--max_parallel is -1; allowed is a whole number of at least 0"),
    ("--results FILE", "nothing can be written there: Not a directory"),
    ("--clints 3", "clints"),
    ("--cluster slurm --sbatch time=1", "--sbatch is time=1; use --time"),
    ("--cluster slurm --sbatch array=1-3", "--sbatch is array=1-3; allowed is NAME=VALUE of"),
    ("--cluster slurm --sbatch =5", "--sbatch is =5; allowed is NAME=VALUE"),
    ("--rounds ten", "--rounds is"),
    ("--seeds 1,x", "--seed is x; allowed is a whole number from 0 to 4294967295"),
    ("--methods ,", "--methods: ',' holds none; allowed are values, separated by commas"),
    ("a.py b.py", "b.py"),
    ("--cluster", "--cluster"),
    ("--seed 1,2", "allowed is a whole number from 0 to 4294967295; several are --seeds"),
    ("--time 0", "--time is 0; allowed is a whole number of at least 1"),
    ("--partition gpu --list", "or file:PATH; Slurm's partition is --sbatch partition=NAME"),
])  # fmt: skip
def test_what_cannot_be_is_one_sentence(tmp_path, said, words, sentence):
    (tmp_path / "FILE").touch()
    mine = words.replace("FILE", str(tmp_path / "FILE")).split()
    err = said(sweep.main, "--methods=local", *starts.of_sweep(tmp_path), *mine, code=2)
    assert err.startswith("error: ") and err.count("\n") == 1 and sentence in err, err


def test_flags_of_runs_beside_a_grid(listed, tmp_path, said):
    words = ["--partition", "dirichlet", "--rounds", "30", "--seeds", "1"]
    assert listed("--no-augment", "--mixed", *words) == ["digits-dirichlet-dpfl-B8-s1"]
    config = text_file(tmp_path / "run.yaml", said(main, "--partition=dirichlet", "--print_config"))
    assert listed("--config", config, "--seeds", "3") == ["digits-dirichlet-dpfl-B8-s3"]
    (name,) = listed("--methods", "ditto", "--options.lam", "0.3", *words)  # DPFL has no lam
    assert name.startswith("digits-dirichlet-ditto-")


@pytest.fixture
def listed(tmp_path, said):
    """A function that returns the names of a sweep's Runs, without their hash, or its error."""

    def names(*words, code=0) -> list[str] | str:
        text = said(sweep.main, *words, "--list", f"--results={tmp_path}", code=code)
        if code:
            return text
        return sorted(line.split()[0].rsplit("-", 1)[0] for line in text.splitlines()[1:-1])

    return names


def test_a_file_of_analysis_names_its_runs(tmp_path, listed):
    file = tmp_path / "figure.py"
    file.write_text("from neighbour import RUNS\n")
    runs_file(tmp_path / "neighbour.py", {"seed": 1}, {"seed": 2})
    assert listed("--rounds", "30", file) == [f"digits-pathological-dpfl-B8-s{s}" for s in (1, 2)]
    assert "there is no such file" in listed(tmp_path / "none.py", code=2)
    for text, sentence in (
        ("", "has no list RUNS of Run(...)"),
        ("RUNS = ['local']", "has no list RUNS of Run(...)"),
        ("import nowhere", "figure.py, which fails: ModuleNotFoundError: No module named"),
    ):
        file.write_text(text)
        assert sentence in listed(file, code=2)
    points = itertools.product(("dpfl", "local"), (0, 2), ("0.25N", 4))
    fields = [dict(zip(("method", "seed", "budget"), point, strict=True)) for point in points]
    file = runs_file(tmp_path / "figure.py", *fields)
    name = "digits-pathological-{}-B{}-s{}".format
    local = "digits-pathological-local-s{}".format
    assert len(listed(file)) == 6
    assert listed(file, "--seeds", "2") == [name("dpfl", 4, 2), name("dpfl", 8, 2), local(2)]
    assert listed(file, "--seeds", "0,2", "--methods", "local") == [local(0), local(2)]
    assert listed(file, "--budgets", "8", "--seeds", "0") == [name("dpfl", 8, 0), local(0)]
    sentence = listed(file, "--method", "dpfl", "--seed", "42")  # the defaults
    assert sentence == [name("dpfl", 4, 42), name("dpfl", 8, 42)]
    refusal = f"--seeds has 3; the Runs of {file} have 0, 2\n"
    assert refusal in listed(file, "--seeds", "2,3", code=2)
    assert "have dpfl, local" in listed(file, "--methods", "ditto", code=2)
    left = f"--budgets has 3; the Runs of {file} that the other flags leave have 8, 4\n"
    assert left in listed(file, "--methods", "dpfl", "--budgets", "3", code=2)
    assert "have digits" in listed(file, "--datasets", "cifar10", code=2)


def test_runs_whose_file_is_not_there_are_left_out_and_named(tmp_path, capfd, listed):
    gone = [{"dataset": "cifar10", "data": f"{tmp_path}/none.h5", "seed": s} for s in (1, 2)]
    file = runs_file(tmp_path / "some.py", starts.small(seed=1), *gone)
    assert sweep.main([str(file), "--list", f"--results={tmp_path}"]) == 1
    out, err = capfd.readouterr()
    sentence = f"left out 2 of 3 Runs: --data is {tmp_path}/none.h5; "
    assert sentence in err and sentence in out and "1 missing of 1" in out
    runs_file(file, *gone)
    assert listed(file, code=2).startswith(f"error: --data is {tmp_path}/none.h5; ")


def test_a_run_that_is_asked_for_twice_is_tuned_once(tmp_path):
    fields = starts.small(rounds=1, method="local")
    runs = [Run(**fields | {"seed": 1}), Run(**fields | {"seed": 4})]
    means = {}
    for lr in ("0.01", "0.05"):
        of_lr = []
        for run in runs:
            changed = fields | {"lr": float(lr), "seed": run.seed}
            with Result(starts.here(Run(**changed).resolve().path(tmp_path), changed)) as result:
                of_lr.append(100 * result["best/val_acc"].mean())
        means[lr] = np.mean(of_lr)
    values = wanted.trials([*runs, runs[0]], "lr=0.01,0.05,0.01")
    assert list(values) == ["0.01", "0.05"]
    text = wanted.tuning_report(values, Job(results=str(tmp_path)), "lr=0.01,0.05")
    assert "mean over 2 runs" in text
    for lr, accuracy in means.items():
        assert f"  {lr:>10s}  {accuracy:.2f} %" in text
    # a value that is not finished, as its Runs diverge, hides no other
    values = wanted.trials(runs, "lr=0.05,1000")
    text = wanted.tuning_report(values, Job(results=str(tmp_path)), "lr=0.05,1000")
    assert f"      0.05  {means['0.05']:.2f} %\n        1000  not finished\n" in text
    assert "best" not in text and "or leave out a value that fails" in text


def test_tuning_reads_validation_only(tmp_path, monkeypatch):
    fields = starts.small(rounds=1)
    values = wanted.trials([Run(**fields)], "lr=0.001,0.05")
    job = Job(results=str(tmp_path))
    assert "not finished" in wanted.tuning_report(values, job, "lr=0.001,0.05")
    scores = {}
    for value, (run,) in values.items():
        with Result(starts.here(run.path(tmp_path), fields | {"lr": float(value)})) as result:
            scores[value] = result["best/val_acc"].mean()
    read = []
    whole = Result.__getitem__

    def noted(self, name):
        read.append(name)
        return whole(self, name)

    monkeypatch.setattr(Result, "__getitem__", noted)
    best = max(scores, key=scores.get)
    assert f"best by validation: lr={best}" in wanted.tuning_report(values, job, "lr=0.001,0.05")
    assert "best/val_acc" in read and not any("test" in name for name in read)
    trials = list(tmp_path.glob("*.h5"))
    assert len(trials) == 2  # every trial is kept
    # each under the name of the other: the choice would be the worse one
    trials[0].rename(tmp_path / "other")
    trials[1].rename(trials[0])
    (tmp_path / "other").rename(trials[1])
    refused("holds another Run (different: lr)", wanted.tuning_report, values, job, "lr=0.001,0.05")
    for path in trials:
        run = next(run for [run] in values.values() if run.path(tmp_path) == path)
        entry = Entry(run.resolve(), path)
        assert entry.status(set()).state == "unreadable"
        assert entry.log() == f"error: {path} holds another Run (different: lr); move it away first"


def test_values_are_read_as_on_the_command_line():
    ditto = Run(method="ditto", model="resnet", seed=7)
    numbers = wanted.trials([ditto], "options.lam=1e-3,0.5")
    found = [(v, r.resolve().options["lam"], r.method, r.seed) for v, [r] in numbers.items()]
    assert found == [("1e-3", 0.001, "ditto", 7), ("0.5", 0.5, "ditto", 7)]
    assert [str(r.drift) for [r] in wanted.trials([Run()], "drift=1:2").values()] == ["1:2"]
    both = wanted.trials([Run(), Run(method="local")], "lr=0.01,1e-3")
    found = {v: [(r.method, r.lr) for r in runs] for v, runs in both.items()}
    assert found == {v: [("dpfl", float(v)), ("local", float(v))] for v in ("0.01", "1e-3")}
    (changed,) = wanted.trials([ditto], "model_options.blocks=3")["3"]
    assert changed.resolve().model_options == {"blocks": 3}
    for wrong in ("ditto", "nothing=1", "lr", "lr=,", "ditto.lam=1", "method=dpfl"):
        refused(f"--tune is {wrong}; allowed is a setting or", wanted.trials, [Run()], wrong)
    (changed,) = wanted.trials([Run()], "options.lr=1")["1"]
    refused("the method dpfl has no such option", changed.resolve)
    sentence = refused("", wanted.trials, [Run()], "lr=fast")
    assert sentence == "--lr is fast; allowed is a number above 0"


def test_tuning_says_a_tie(tmp_path):
    def chosen(**best: float) -> str:
        values, folder = {}, tmp_path / str(best)
        for i, (value, score) in enumerate(best.items()):
            fields = {"dataset": "digits", "classes_per_client": 3, "clients": 4, "rounds": 2}
            run = Run(method="local", seed=i, **fields)
            tiny_result.make(run.path(folder), "local", i, best=(score,) * 4)
            values[value] = [run]
        lines = wanted.tuning_report(
            values, Job(results=str(folder)), "options.lam=a,b,c"
        ).splitlines()
        lacks = "nan %  without 4 clients that were never scored"
        unscored = [math.isnan(score) for score in best.values()]
        assert [lacks in line for line in lines[1:-1]] == unscored
        return lines[-1]

    tie = "(a tie to two digits with c; of equal accuracies the first is taken)"
    assert chosen(a=0.5, b=0.75, c=0.75) == f"best by validation: options.lam=b {tie}"
    near = "best by validation: options.lam=b (a tie to two digits with a;"
    assert chosen(a=0.75, b=0.750001, c=0.25).startswith(near)
    assert chosen(a=0.5, b=0.75, c=0.25) == "best by validation: options.lam=b"
    assert chosen(a=0.5, b=math.nan, c=0.25) == "best by validation: options.lam=a"
    assert chosen(a=math.nan, b=math.nan) == "no value is best: no client was scored"


def test_each_method_is_tuned_by_itself(tmp_path):
    scores = {"local": (0.75, 0.5), "fedavg": (0.25, 1.0)}
    small = Run(classes_per_client=3, clients=4, rounds=2)
    values = wanted.trials([replace(small, method=method) for method in scores], "lr=0.1,0.2")
    for i, runs in enumerate(values.values()):
        for run in runs:
            path, best = run.path(tmp_path), (scores[run.method][i],) * 4
            more = {"lr": run.lr, "budget": 1, "graphs": [[[]] * 4] * 3}
            tiny_result.make(path, run.method, best=best, **more)
    lines = wanted.tuning_report(values, Job(results=str(tmp_path)), "lr=0.1,0.2").splitlines()
    best = [line for line in lines if line.startswith("best")]
    assert best == ["best by validation: local.lr=0.1", "best by validation: fedavg.lr=0.2"]
