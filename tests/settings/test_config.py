"""Run and Job: defaults, budgets, the name of a result, the command line and YAML."""

import dataclasses
import functools
import hashlib
import json
import os
import re

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from launch import refused

from dpfl_mpi import describe, plugins
from dpfl_mpi.__main__ import main
from dpfl_mpi.errors import UserError, in_a_sentence
from dpfl_mpi.mpi.start import parse
from dpfl_mpi.plugins import find, shipped
from dpfl_mpi.settings import Job, Resolved, Run
from dpfl_mpi.settings import command_line as command
from dpfl_mpi.settings import run as config
from dpfl_mpi.settings.fields import as_dict
from dpfl_mpi.settings.values import parse as value_of
from dpfl_mpi.settings.values import written
from dpfl_mpi.sweep import __main__ as sweep


def budget_name(budget, clients, counts_self):
    return written(value_of("budget", budget).resolved(clients, counts_self))


@pytest.mark.parametrize(("name", "clients", "budgets"), [
    (10, 100, [10, "10", "0.1N"]), (20, 100, [".2N", "0.20N"]), (99, 100, [99]), (1, 1, [1]),
    (4, 35, ["0.1N"]), (3, 25, ["0.1N"]), (1, 100, [1, "0.001N"]),  # halves go up; at least 1
    # .inf as YAML writes it; 100: k itself and all 99 others
    ("inf", 100, ["1N", "inf", ".inf", 1000, 100]),
])  # fmt: skip
def test_budget_name(name, clients, budgets):
    assert {budget_name(budget, clients, counts_self=True) for budget in budgets} == {name}


def test_budget_that_does_not_count_the_client_itself():
    assert budget_name(99, 100, counts_self=False) == "inf"
    assert budget_name(98, 100, counts_self=False) == 98
    runs = [Run(clients=20, budget=5, budget_counts_self=c).resolve() for c in (True, False)]
    assert [r.most_senders for r in runs] == [4, 5]
    assert Run(clients=20, budget="inf").resolve().most_senders == 19
    assert Run(clients=20, budget=1).resolve().most_senders == 0


def test_a_number_that_is_written_otherwise_is_the_same_setting():
    alike = {"reach": ("geometric:0.5", "geometric:0.50"), "attack": ("scale:0.1", "scale:.1")}
    for name, (one, other) in alike.items():
        assert Run(**{name: one}).slug() == Run(**{name: other}).slug() != Run().slug()


def test_only_what_is_written_as_a_path_names_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bare = {"budget": "inf", "reach": "sites:4", "partition": "dirichlet"}
    before = Run(**bare).resolve().key()
    for name in (*bare.values(), "2.txt"):
        (tmp_path / name).write_text("2 " * 32)
    assert Run(**bare).resolve().key() == before
    texts = ("file:inf", "./inf", "2.txt", str(tmp_path / "2.txt"))
    named = [Run(budget=text).resolve() for text in texts]
    assert {run.key()["budget"] for run in named} == {hashlib.sha256(b"2 " * 32).hexdigest()}
    assert [str(run.budget) for run in named[:3]] == ["file:inf", "./inf", "2.txt"]


@given(st.integers(1, 1000), st.integers(1, 100))
@example(150, 69)
def test_a_share_is_the_nearest_whole_number(clients, percent):
    """Against integer arithmetic: floor((percent * N + 50) / 100)."""
    nearest = max(1, (percent * clients + 50) // 100)
    name = "inf" if nearest >= clients and nearest > 1 else nearest
    assert budget_name(f"{percent / 100}N", clients, True) == name


def test_settings_of_the_paper_and_of_the_authors_code():
    """`--dataset cifar10` alone: section E of the paper."""
    run = Run(dataset="cifar10").resolve()
    expected = {
        "partition": "pathological", "classes_per_client": 3, "dirichlet_alpha": 0.5,
        "clients": 100, "min_per_class": 10, "model": "cnn", "rounds": 98,
        "tau_init": 10, "tau_train": 5, "budget": 10, "lr": 0.01, "momentum": 0.9,
        "weight_decay": 1e-3, "lr_decay": 1.0, "batch_size": 16, "clip_norm": 20.0,
        "augment": True, "init": "kaiming", "ggc_period": 1,
        "tie": "latest", "seed": 42, "partition_seed": 42,
        "data": "data/cifar10.h5",
    }  # fmt: skip
    assert {name: as_dict(run)[name] for name in expected} == expected
    # preprocessing costs DPFL two rounds
    assert Run(dataset="cifar10", method="local").resolve().rounds == 100
    cinic10 = ("cinic10", 200, 48, 10, 5, 0.01, 16, True)
    for dataset, *values in (cinic10, ("femnist", 100, 48, 4, 2, 0.001, 10, False)):
        run = Run(dataset=dataset).resolve()
        names = ("clients", "rounds", "tau_init", "tau_train", "lr", "batch_size", "augment")
        assert [getattr(run, name) for name in names] == values and run.weight_decay == 1e-3
        assert Run(dataset=dataset, method="local").resolve().rounds == 50
    paper, code = (Run(dataset="cifar10", preset=p).resolve() for p in ("paper", "authors_code"))
    values = [as_dict(run) for run in (paper, code)]
    differ = {name for name in values[0] if values[0][name] != values[1][name]}
    assert differ == {"preset", "weight_decay", "lr_decay", "tau_init", "rounds", "batch_size"}
    found = (code.weight_decay, code.lr_decay, code.tau_init, code.batch_size)
    assert found == (1e-4, 0.998, 15, 32)
    # as many epochs as the baselines
    for name, epochs in {"cifar10": 500, "cinic10": 250, "femnist": 100}.items():
        runs = [Run(dataset=name, preset="authors_code", method=m) for m in ("dpfl", "local")]
        dpfl, local = (run.resolve() for run in runs)
        assert dpfl.tau_init + dpfl.rounds * dpfl.tau_train == epochs
        assert local.rounds * local.tau_train == epochs
    assert Run(dataset="cifar10", preset="authors_code", batch_size=16).resolve().batch_size == 16
    assert Run(dataset="femnist", preset="authors_code").resolve().partition.kind == "fedrep"


@pytest.mark.parametrize("method", shipped("method"))
@pytest.mark.parametrize("dataset", shipped("dataset"))
def test_resolving_twice_changes_nothing(dataset, method):
    once = Run(dataset=dataset, method=method).resolve()
    assert once.resolve() == once
    assert Resolved.from_json(once.to_json()) == once
    if not hasattr(find("dataset", dataset), "OWN_DATA"):  # else the name needs the file at hand
        assert Run.from_json(once.to_json()).slug() == Run(dataset=dataset, method=method).slug()


SAME = [  # two ways to say the same Run
    ({"dataset": "cifar10", "budget": "0.1N"}, {"dataset": "cifar10", "budget": "10"}),
    ({"dataset": "cifar10", "budget": 100}, {"dataset": "cifar10", "budget": "inf"}),
    ({"momentum": 0, "clip_norm": 5, "dirichlet_alpha": 1},
     {"momentum": 0.0, "clip_norm": 5.0, "dirichlet_alpha": 1.0}),
    ({"method": "perfedavg", "options": {"alpha": 1}},
     {"method": "perfedavg", "options": {"alpha": 1.0}}),
    ({"drift": ".50:2"}, {"drift": "0.5:2"}),
    ({"attack": "scale:.2"}, {"attack": "scale:0.20"}),
    ({"candidates": 31}, {}),  # of 32 clients
    ({"omega_period": "3"}, {"omega_period": 3}),
    ({"dataset": "cifar10", "min_samples": 9, "overlap": False},
     {"dataset": "cifar10"}),  # Patho reads neither
    # what is the default, or is not read
    ({"model_options": {}}, {}),
    ({"flipped_run_ggc": False}, {}),
    ({"method": "fedavg", "reach": "sites:2", "budget": 9, "omega_period": 2},
     {"method": "fedavg"}),
    ({"method": "pens", "omega_period": 5}, {"method": "pens"}),
    ({"adam_eps": 1.0}, {}),
    ({"optimizer": "adam", "momentum": 0.5}, {"optimizer": "adam"}),
    ({"method": "fedprox", "options": {"mu": 0.1}}, {"method": "fedprox"}),
    ({"method": "fedprox", "options": {"finetune_prox": False}}, {"method": "fedprox"}),
    ({"method": "oracle", "options": {"by": "classes"}}, {"method": "oracle"}),
]  # fmt: skip
MU, TUNED = {"method": "fedprox", "options": {"mu": 1}}, {"method": "fedprox", "finetune_epochs": 2}
OTHER = {
    "dataset": "cifar10", "partition": "dirichlet", "classes_per_client": 4, "clients": 16,
    "dirichlet_alpha": 0.7, "min_per_class": 1, "partition_seed": 7, "init": "torch",
    "method": "local", "rounds": 3, "tau_init": 1, "tau_train": 1, "budget": 3, "ggc_period": 2,
    "budget_counts_self": False, "ggc_off_rounds": "skip", "lr": 0.5,
    "momentum": 0.5, "momentum_state": "reset", "weight_decay": 0.5, "lr_decay": 0.5,
    "batch_size": 5, "clip_norm": 5.0, "augment": True, "tie": "earliest", "seed": 5,
    "on_divergence": "exclude", "drift": "0.5:2", "attack": "scale:0.2",
    "omega_period": 3, "candidates": 9, "optimizer": "adam", "lr_schedule": "cosine",
    "model": "cnn",
}  # fmt: skip


@pytest.mark.parametrize(("one", "two"), SAME)
def test_the_same_run_in_other_words(one, two):
    assert Run(**one).slug() == Run(**two).slug()


def test_an_added_option_changes_no_name_of_older_results():
    run = Run(method="oracle").resolve()
    assert run.options == {} and "options" not in run.key()
    assert Run(method="oracle", options={"by": "overlap"}).key()["options"] == {"by": "overlap"}


def test_every_other_value_is_another_run(monkeypatch):
    base = {"dataset": "digits", "model": "mlp"}
    fields = [base | {name: value} for name, value in OTHER.items()]
    fields += [{}, {"optimizer": "adamw"}, {"optimizer": "adam", "adam_eps": 0.8}]
    fields += [MU, TUNED, TUNED | {"options": {"finetune_prox": False}}]
    fields += [{"method": "random_graph"}]
    assert len({Run(**each).slug() for each in fields}) == len(fields)
    field = dataclasses.field(default=0.0, metadata={"group": "graph", "help": ""})
    new = [("sparsity", float, field)]
    later = dataclasses.make_dataclass("Later", new, bases=(Resolved,), frozen=True)
    run = Run(dataset="cifar10", budget=20, weight_decay=0.0).resolve()
    newer = json.dumps(json.loads(run.to_json()) | {"sparsity": 0.5})
    refused("another version of dpfl_mpi: it does not know sparsity", Run.from_json, newer)
    assert later(**vars(run)).slug() == run.slug()
    assert later(**vars(run), sparsity=0.5).slug() != (before := run.slug())
    monkeypatch.setattr(config, "NUMERICS", config.NUMERICS + 1)
    assert dataclasses.replace(run).slug() != before
    bare = Run(dataset="cifar10")
    for name, value in as_dict(bare.resolve()).items():
        assert dataclasses.replace(bare, **{name: value}).slug() == bare.slug(), name


def test_the_name_says_what_it_is(tmp_path):
    run = Run(dataset="cifar10", budget="0.2N", seed=7)
    assert re.fullmatch("cifar10-pathological-dpfl-B20-s7-[0-9a-f]{8}", run.slug())
    assert str(run.path("here")) == f"here/{run.slug()}.h5"
    (tmp_path / "budget.txt").write_text("3 " * 32)
    assert "-Buniform-2-20-" in Run(budget="uniform:2:20").slug()
    assert "-Bfile-" in Run(budget=str(tmp_path / "budget.txt")).slug()
    budgets = (3, "0.25N", ".25N", "0.15N", "inf")
    runs = {budget: Run(clients=20, budget=budget).resolve() for budget in budgets}
    assert [run.typed_budget for run in runs.values()] == ["3", "0.25N", ".25N", "0.15N", "inf"]
    assert runs["0.15N"].slug() == runs[3].slug() and runs["0.15N"] == runs[3]
    assert Run().slug() == "digits-pathological-dpfl-B8-s42-300df09d"
    assert Run(method="local").slug() == "digits-pathological-local-s42-43263022"


def test_flags_become_fields():
    words = """--dataset cifar10 --budget 0.05N --no-augment --no-budget_counts_self --lr 1e-2
        --partition dirichlet --min_samples 30
        --save_models --out x.h5"""
    fields = {"budget": 5, "augment": False, "budget_counts_self": False}
    run = Run("cifar10", **fields, partition="dirichlet", min_samples=30).resolve()
    assert parse(words.split()) == (run, Job(save_models=True, out="x.h5"))


def test_print_config_and_config_are_inverse(said, tmp_path, monkeypatch):
    flags = "--dataset=cifar10 --budget=inf --no-augment --seed=7 --weight_decay=1e-4 --quiet"
    flags = flags.split()
    text = said(parse, *flags, "--print_config")
    (tmp_path / "run.yaml").write_text(text)
    assert parse(["--config", str(tmp_path / "run.yaml")]) == parse(flags)
    assert said(parse, "--config", tmp_path / "run.yaml", "--print_config") == text
    values = yaml.safe_load(text)
    assert list(values) == [f.name for f in dataclasses.fields(Run)] + ["quiet"]
    assert values["rounds"] == 98 and values["budget"] == "inf"  # resolved, not null
    run, _ = parse(["--config", str(tmp_path / "run.yaml"), "--seed", "4"])  # the later wins
    assert (run.dataset, str(run.budget), run.seed) == ("cifar10", "inf", 4)
    (tmp_path / "run.yaml").rename(tmp_path / "options.yaml")
    monkeypatch.chdir(tmp_path)
    assert parse(["--config", "options.yaml"])[0].dataset == "cifar10"
    (tmp_path / "local.yaml").write_text(said(parse, "--method=local", "--print_config"))
    run, _ = parse(["--config", str(tmp_path / "local.yaml"), "--method=dpfl", "--seed=4"])
    # what local does not read, and the partition, are those of the flags
    assert run == Run(rounds=22, seed=4).resolve()
    (tmp_path / "ditto.yaml").write_text("method: ditto\noptions: {lam: 2}")
    run, _ = parse(["--options.lam=1", "--config=ditto.yaml"])
    assert run.options == {"lam": 2}  # the file stands after it
    path = tmp_path / "run.yaml"
    text = "seed: 010\nresults: 010\nrounds: 9\nquiet: true\nmethod: fedprox\n"
    path.write_text(f"{text}options: {{mu: 1e-3}}\n")
    run, job = parse([f"--config={path}"])
    found = (run.seed, job.results, run.rounds, job.quiet, run.options["mu"])
    assert found == (10, "010", 9, True, 0.001)


WORDS = "010 1_0 1:30 0x10 1e1 2024-01-01 yes on 10 +3 .5 '010' ٣"
FIELDS = "seed lr budget omega_period candidates checkpoint_every results attack metric"


@pytest.mark.parametrize("name", [*FIELDS.split(), "options.mu", "options.finetune_prox"])
def test_a_word_in_a_config_is_read_as_after_its_flag(name, tmp_path, monkeypatch):
    """The same settings or the same sentence, whatever YAML 1.1 would have made of the word."""
    monkeypatch.setattr(command, "parser", functools.cache(command.parser))
    path, first, option = tmp_path / "run.yaml", *name.rpartition(".")[::2]

    def outcome(flag):
        try:
            return parse(["--method=fedprox", flag])
        except UserError as error:
            return str(error)

    for word in WORDS.split():
        path.write_text(f"{first}: {{{option}: {word}}}\n" if first else f"{name}: {word}\n")
        want, found = outcome(f"--{name}={word.strip(chr(39))}"), outcome(f"--config={path}")
        if isinstance(want, str):
            want = f"--config is {path}, line 1: {want}"
        assert found == want, word


NUMBERS = {
    "seed": "{}", "lr": "0.{}", "budget": "{}", "candidates": "{}", "omega_period": "{}",
    "drift": "0.{}:1", "churn": "0.{}:0.3", "reach": "sites:{}", "attack": "scale:0.{}",
    "codec": "topk:0.{}", "checkpoint_every": "{}s",
}  # fmt: skip


@pytest.mark.parametrize("digits", ["٣", "३", "1_0", "²"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_in_the_digits_0_to_9(name, digits, said):
    network = ["--network=phones"] * (name == "churn")
    parse([*network, f"--{name}={NUMBERS[name].format(3)}"])
    error = said(in_a_sentence(parse), *network, f"--{name}={NUMBERS[name].format(digits)}", code=2)
    assert error.startswith(f"error: --{name} is ") and "; allowed " in error


@pytest.mark.parametrize(("name", "line", "lines"), [
    ("network", "{} 0 1 1 0", 4), ("budget", "{}", 4), ("reach", "{} 0", 1),
    ("churn", "{} 0 leave", 1), ("churn", "1 {} leave", 1),
])  # fmt: skip
def test_a_number_in_a_file_is_in_the_digits_0_to_9(name, line, lines, tmp_path):
    path = tmp_path / "table.txt"
    more = {"network": "phones"} if name == "churn" else {}
    path.write_text(f"{line.format(1)}\n" * lines)
    Run(clients=4, **more | {name: str(path)}).resolve()
    for digits in ("٣", "1_0"):
        path.write_text(f"{line.format(1)}\n" * (lines - 1) + line.format(digits))
        run = Run(clients=4, **more | {name: str(path)})
        refused(f"--{name} is {path}, which must hold", run.resolve)


@pytest.mark.parametrize(("module", "words"), [
    (describe, ["--ranks={}"]), (sweep, ["--ranks={}", "--list"]),
])  # fmt: skip
def test_a_number_of_another_command_is_in_the_digits_0_to_9(module, words, said):
    flag = words[0].partition("=")[0]
    for digits in ("٣", "1_0"):
        assert f"{flag}: invalid" in said(module.main, *(w.format(digits) for w in words), code=2)


@pytest.mark.parametrize(("text", "words", "sentence"), [
    ("rounds: 3\n\nlearning_rate: 3\n", "",
     ", line 3: there is no setting learning_rate; did you mean lr?\n"),
    ("rounds: 3\nclients: many", "",
     ", line 2: --clients is many; allowed is a whole number of at least 1"),
    ("rounds: 3\nlr: [1, 2]", "", ", line 2: --lr is [1, 2]; allowed is a number above 0"),
    ("rounds: 3\nbudget: half", "", ", line 2: --budget is half; allowed"),
    ("rounds: 3\noptions: {lam: -1}", "--method=ditto", ", line 2: --options.lam is -1.0; allowed"),
    # a flag after the file is a mistake of its own
    ("rounds: 3\nclients: 8", "--clients=0", "--clients is 0; allowed"),
    ("candidates: null", "", ", line 1: --candidates is None; allowed"),
    ("<<: {seed: x}", "", ", line 1: there is no setting <<"),
    ("options: 5", "--options.mu=1", ", line 1: --options is 5; allowed are names and values"),
    ("model_options: 5", "", ", line 1: --model_options is 5; allowed are names and values"),
    ("clients: [1\n", "", ": it is not YAML"),
    ("- " * 3000 + "x", "", ": it is not YAML (maximum recursion depth exceeded"),
    ("\0", "", ": it is not YAML (unacceptable character"),
    ("rounds: !!bool foo", "", ": it is not YAML"),
    ("lr: 1\nrounds: 3\nlr: 2", "", ", line 3: lr stands in line 1 already"),
    ("options: &a {x: *a}", "", ": a value holds itself"),
    ("options:\n  lam: 1\n  lam: 2", "--method=ditto", ", line 3: lam stands in line 2 already"),
    (None, "", ": {} is not a regular file"),
])  # fmt: skip
def test_a_mistake_in_a_config_is_told_with_its_line(text, words, sentence, tmp_path, said):
    path = tmp_path / "run.yaml"
    path.write_text(text) if text else os.mkfifo(path)
    error = said(in_a_sentence(parse), f"--config={path}", *words.split(), code=2)
    place = "" if sentence[0] == "-" else f"--config is {path}"
    assert error.startswith(f"error: {place}{sentence.format(path)}") and error.count("\n") == 1


def test_help(said, monkeypatch):
    text = " ".join(said(parse, "--help", "--method=fedprox", "--model=resnet").split())
    assert "--options.mu X weight of the proximal term (the paper's lambda): a number of" in text
    blocks = "residual blocks of a stage: a whole number from 1 to 100 [2]"
    assert f"--model_options.blocks X {blocks}" in text
    monkeypatch.setenv("COLUMNS", "80")
    text = said(main, "--help")
    assert max(map(len, text.splitlines())) <= 80
    for settings in (Run, Job):
        for f in dataclasses.fields(settings):
            assert f"--{f.name}" in text or f"--[no-]{f.name}" in text, f.name
            known = ", ".join(shipped(f.name)) if f.name in plugins.KINDS else ""
            assert f.metadata["help"].format(names=known) in " ".join(text.split()), f.name
            assert f"{f.metadata['group']}:" in text
    for symbol in ("B_c", "tau_init", "tau_train", "P:", "m:", " N", " T ", "eta"):
        assert symbol in text, symbol


def test_print_config_says_that_the_data_could_change_it(capsys, tmp_path):
    for data, warned in ((tmp_path / "a.h5", True), ("", False)):
        flags = [f"--data={data}", "--dataset=arrays"] if data else []
        with pytest.raises(SystemExit):
            parse([*flags, "--print_config"])
        out, err = capsys.readouterr()
        assert "partition: pathological" in out
        assert (f"warning: there is no {data} yet; the model" in err) == warned


def test_print_config_and_help_are_for_one_rank_and_refuses_what_a_run_would(said, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    assert said(parse, "--print_config") == said(parse, "--help") == ""
    monkeypatch.setenv("PMI_RANK", "0")
    error = said(in_a_sentence(parse), "--print_config", "--budget=0", code=2)
    assert error.startswith("error: --budget is 0; allowed")
    assert yaml.safe_load(said(parse, "--print_config", "--method=local"))["rounds"] == 22
