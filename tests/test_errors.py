"""A mistake is one sentence on stderr, printed once, with exit code 2, and all ranks end."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import time
import unicodedata

import numpy as np
import pytest
import starts
import tiny_result
from launch import ROOT, differences, ended, mpirun, run_here

from dpfl_mpi import prepare
from dpfl_mpi.__main__ import main
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.errors import NO_READER, printable
from dpfl_mpi.mpi.start import parse, set_environment
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import to_flags
from dpfl_mpi.sweep.entries import Submission

SMALL = {"dataset": "image_folder", "model": "mlp", "augment": False}
SMALL |= {"clients": 6, "rounds": 2, "tau_init": 1, "tau_train": 1}


def refused(capfd, *arguments):
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    out, err = capfd.readouterr()
    assert (end.value.code, out) == (2, "")
    return one_sentence(err)


def one_sentence(err):
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert "Traceback" not in err and len(err) < 400
    return err


BUDGET = (
    "a whole number of at least 1, a share of the clients such as 0.1N, or inf; "
    "for a budget per client uniform:LOW:HIGH, or a file"
)
REACH = (
    "geometric:R with R above 0, sites:S with S from 1 to 9, groups of clients 0 to 8 "
    "such as groups:0,1;2,3, or a file of lines 'receiver sender'"
)
DRIFT = "SHARE:ROUND such as 0.5:10, a share from 0 to 1 and a round from 1 to "
ATTACK = (
    "KIND:SHARE such as sign_flip:0.2, KIND one of label_flip, sign_flip, noise, scale, stale, "
    "backdoor, a share from 0 to 1"
)
# what is allowed: the last flag of each line has another value
ALLOWED = {
    "a whole number of at least 0": "rounds -1, tau_init -1, min_per_class -1, "
    "patience -1, finetune_epochs -1",
    "a whole number of at least 1": "clients 0, clients many, clients 2.5, tau_train 0, "
    "ggc_period 0, classes_per_client 0, "
    "method knnper --options.k 2.5",
    "a whole number of at least 2": "partition dirichlet --min_samples 1",
    "a whole number from 1 to 64": "threads_per_client 0, threads_per_client 65",
    "a whole number from 1 to 1048576": "batch_size 0, batch_size 999999999999",
    "a whole number from 0 to 4294967295": "seed -1, partition_seed 4294967296",
    "a number of at least 0": "weight_decay -1.0, clip_norm -1.0, "
    "method fedprox --options.mu -1.0, method fedprox --options.mu much",
    "a number of at least 0 and below 1": "momentum 1.0",
    "a number above 0": "lr 0.0, lr nan, lr fast, dirichlet_alpha 0.0, window_gb 0.0",
    "a number above 0 and at most 1": "lr_decay 1.5",
    "a number from 0 to 1": "method apfl --options.alpha 1.5",
    "a share from 0 to 1": "flip_share -0.1",
    "a share above 0 and at most 1": "participation 0.0, participation 1.5, search_share 0.0",
    "a share of at least 0 and below 1": "newcomers 1.0",
    "true or false": "method apfl --options.adaptive 1",
    BUDGET: "budget 0, budget -3, budget -0.1N, budget 0N, budget nan, budget half, budget 2.5, "
    "budget nowhere, budget uniform:5:2, budget uniform:0:2",
    REACH: "clients 9 --reach sites:10, clients 9 --reach groups:0,9",
    "geometric:R with R above 0, sites:S with S from 1 to ": "reach geometric:0, reach nowhere",
    "a whole number of rounds of at least 1, or inf": "omega_period 0, omega_period 2.5",
    "a whole number of clients of at least 1, or inf": "candidates 0, candidates 2.5, "
    "candidates few",
    DRIFT: "drift 0.5, drift 1.5:2",
    DRIFT + "2": "rounds 2 --drift 0.5:5",
    ATTACK: "attack bribe:0.2, attack noise",
    "arrays, cifar10, cifar100, cinic10, digits, femnist, ": "dataset cifar11",
    "apfl, cfl, cobo, dac, ": "method dpfk",
    "cnn, mlp, resnet, text, or your own NAME.py or MODULE:OBJECT": "model resnet50",
    "pathological, dirichlet, natural, fedrep, motivation or file:PATH": "partition iid",
    "paper, authors_code": "preset mine",
    "kaiming, torch, own": "init zeros",
    "keep, reset": "momentum_state drop",
    "reuse, skip": "ggc_off_rounds no",
    "latest, earliest": "tie random",
    "stop, exclude": "on_divergence ignore",
    "auto, cpu, cuda": "device tpu",
    "float32, tf32, bf16": "precision fp8",
    "sgd, adam, adamw": "optimizer lion",
    "constant, cosine": "lr_schedule linear",
    "none, int8, or topk:SHARE": "codec int4, codec topk:0, codec topk:2",
    "all, layers=body": "send body",
    "phones, hospitals, campus, or a file": "network lan",
    "LEAVE:JOIN": "churn 0:0.5, churn 0.5, churn 2:1",
}


@pytest.mark.parametrize("allowed", ALLOWED)
def test_a_value_that_is_not_allowed(capfd, allowed):
    for flags in ALLOWED[allowed].split(", "):
        *before, name, value = f"--{flags}".split()
        sentence = refused(capfd, *before, f"{name}={value}").replace(f"'{value}'", value)
        words = rf"error: {name} is {value}; allowed (is|are) {re.escape(allowed)}"
        assert re.match(words, sentence), sentence


@pytest.mark.parametrize(("arguments", "words"), [
    ("--batch-size 4", "unrecognized arguments: --batch-size 4; did you mean --batch_size?"),
    ("--methd=local --rounds 1", "unrecognized arguments: --methd=local; did you mean --method?"),
    ("--no-agument", "unrecognized arguments: --no-agument; did you mean --augment?"),
    ("--learning-rate 1", "unrecognized arguments: --learning-rate 1; did you mean --lr?"),
    ("--zzz 1", "unrecognized arguments: --zzz 1; --help lists all flags"),
    ("--clints 8", "unrecognized arguments: --clints 8"),
    ("--client 8", "unrecognized arguments: --client 8"),  # no abbreviations
    ("digits", "unrecognized arguments: digits"),
    ("--options.depth 3", "--options.depth: the method dpfl has no such option; its options: none"),
    ("--method fedprox --options.lambda 1",
     "--options.lambda: the method fedprox has no such option; its options: mu"),
    ("--method fedavg --options.finetune_prox False",
     "--options.finetune_prox: the method fedavg has no such option; its options: none"),
    # of the others the sentence goes on after "--FLAG is VALUE" of the first
    ("--precision tf32", "; only a GPU"),
    ("--results=", "--results is empty; leave it out, or give it a value"),
    ("--data nowhere.h5 --dataset cifar10",
     "; there is no such file: make it with `python -m dpfl_mpi.prepare cifar10 --out nowhere.h5`"),
    ("--config /nowhere/run.yaml", ": /nowhere/run.yaml cannot be read: No such file"),
    *((words, "; there is no such file") for words in (
        "--budget /nowhere", "--reach ./nowhere", "--available /nowhere",
        "--graphs /nowhere.h5 --method random_graph")),
    ("--data /etc/passwd", "; the data set digits makes its data itself, and reads no file"),
    ("--finetune_epochs 2 --method knnper", "; knnper is scored by more than its model"),
    ("--attack noise:0.2 --flip_share 0.1", " and --flip_share is 0.1; both draw the same clients"),
    ("--optimizer adam --method pfedme", "; pfedme takes steps of its own, allowed is sgd"),
    ("--clients 5 --partition motivation", "; --partition motivation has three: allowed is 3"),
    ("--preset authors_code", ", which digits does not have: allowed is paper"),
    ("--staleness 1", " and --network is not given"),
    ("--staleness 1 --network phones --method fedavg",
     "; fedavg has a server that waits for all: allowed is 0"),
    ("--codec int8 --method fedavg", "; fedavg sends nothing along a graph: allowed is none"),
    ("--graphs ring", "; dpfl takes no given graph: leave it out, or choose dpsgd"),
    ("--send layers=body --method pairwise", "; pairwise scores models as they come"),
    ("--candidates 5 --method random_graph",
     "; random_graph asks for no models to choose: allowed is inf"),
])  # fmt: skip
def test_a_bad_command_line(capfd, arguments, words):
    if words[0] in ",:; ":
        words = " is ".join(arguments.split()[:2]) + words
    assert refused(capfd, *arguments.split()).startswith(f"error: {words}")


def test_what_the_data_or_the_machine_do_not_allow(capfd, tmp_path, digits_file):
    for words, text in (
        (f"{digits_file} --dataset cifar10", "holds image_folder, not cifar10"),
        (f"{digits_file} --device cuda",
         "--device is cuda; PyTorch sees no GPU here (allowed: auto, cpu"),
    ):  # fmt: skip
        if "cuda" not in words or not os.path.exists("/dev/nvidia0"):
            flags = [*to_flags(SMALL), "--quiet", "--results", tmp_path, "--data", *words.split()]
            assert text in refused(capfd, *flags)


def test_a_finished_result_without_what_is_asked_for_is_no_answer(capfd, tmp_path):
    fields = {"clients": 4, "rounds": 1, "tau_init": 1, "tau_train": 1, "method": "local"}
    path = run_here(tmp_path / "run.h5", fields, save_models=False)
    common = [*to_flags(fields), "--quiet", "--out", path]
    sentence = refused(capfd, *common, "--save_models", "--mixed")
    words = "is finished and was computed without --save_models and --mixed; --fresh computes it"
    assert words in sentence
    assert "model/best" in Result(run_here(path, fields, fresh=True, save_models=True))
    assert "without --mixed;" in refused(capfd, *common, "--save_models", "--mixed")
    assert run_here(path, fields, save_models=True) == path  # there it is


def test_a_refused_run_leaves_nothing(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(capfd, "--partition", "motivation", "--out", str(tmp_path / "run.h5"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["dpfl", "local"])
def test_divergence_stops(capfd, tmp_path, digits_file, method):
    flags = to_flags(SMALL | {"method": method, "data": digits_file, "lr": 1e6})
    sentence = refused(capfd, *flags, "--quiet", "--out", tmp_path / "a.h5")
    first = 0 if method == "dpfl" else 1
    pattern = rf"client \d diverged in round {first}.*--lr.*--on_divergence exclude"
    assert re.search(pattern, sentence), sentence
    assert Result(tmp_path / "a.h5").state.startswith("stopped")


# with several ranks: all are gone in time (starting Python on a busy machine is most of it) -------
IN_TIME = 60  # seconds


def test_ranks_print_once(tmp_path, digits_file):
    for name in ("budgets", "mine.py"):
        (tmp_path / name).write_text("1 2\n")
    small, data = to_flags(SMALL), f"--data={digits_file}"
    for words, arguments in (
        ("must hold 6 numbers", [*small, f"--budget={tmp_path}/budgets"]),
        ("which does not compile", [*small, data, f"--callback={tmp_path}/mine.py"]),
        ("diverged in round 0", [*small, data, "--lr=1e6"]),
    ):
        command = ["-m", "dpfl_mpi", "--quiet", "--results", tmp_path, *arguments]
        done = mpirun(2, *command, timeout=IN_TIME)
        assert words in one_sentence(done.stderr) and done.stdout == "" and done.returncode != 0


INJECT = """
import sys
from dpfl_mpi import __main__ as entry
from dpfl_mpi.mpi import start
if {where!r} == "parse":  # rank 0 alone, before MPI starts; the others wait in MPI_Init
    start.parse = lambda arguments: {error}
elif {where!r} == "decide":  # what root sent is wrong for one rank
    whole = start.share_settings
    def broken(world, read):
        whole(world, read)
        return 1 / 0 if world.rank in {ranks} else whole(world, read)
    start.share_settings = broken
else:
    from mpi4py import MPI
    from dpfl_mpi import errors
    from dpfl_mpi.federation import Federation
    from dpfl_mpi.results.recorder import Recorder
    def broken(self, *args, **named):
        if MPI.COMM_WORLD.rank in {ranks}:
            raise {error}
        return whole(self, *args, **named)
    if {where!r} == "flush":
        Recorder.flush = Recorder.close = broken  # closing the file fails for the same reason
    else:
        whole = getattr(Federation, {where!r})
        setattr(Federation, {where!r}, broken)
entry.main(sys.argv[1:])
"""


@pytest.mark.parametrize(("size", "where", "ranks", "error", "expected"), [
    (2, "local_opt", (1,), "errors.UserError('rank 1 alone')", "error: rank 1 alone"),
    (2, "local_opt", (1,), "__import__('torch').OutOfMemoryError('CUDA out of memory. Tried')",
     "error: the GPU's memory is full (CUDA out of memory)"),
    (3, "average", (1, 2), "ZeroDivisionError('a bug')", "rank 1 of 3:\n"),
    (2, "average", (0, 1), "ZeroDivisionError('a bug')", "rank 0 of 2:\n"),
    (2, "flush", (0,), "ZeroDivisionError('a bug')", "ZeroDivisionError: a bug"),
    (2, "parse", (), "1 / 0", "ZeroDivisionError: division by zero"),
    (2, "parse", (), "bytearray(2**62)", "error: the memory does not suffice ("),
    (2, "decide", (1,), None, "ZeroDivisionError: division by zero"),
], ids=["mistake", "GPU", "two", "all", "root", "early", "memory", "sent"])  # fmt: skip
def test_an_error_on_some_ranks_ends_all(
    tmp_path, digits_file, size, where, ranks, error, expected
):
    (tmp_path / "inject.py").write_text(INJECT.format(where=where, ranks=ranks, error=error))
    flags = [*to_flags(SMALL), "--quiet", f"--data={digits_file}", "--results", tmp_path]
    done = mpirun(size, tmp_path / "inject.py", *flags, timeout=IN_TIME)
    assert done.stderr.count(expected) == 1 and done.returncode != 0, done.stderr
    assert expected.startswith("error") or done.stderr.count("Traceback") == 1
    assert "RootFailed" not in done.stderr


# what the mpirun of another MPI sets, by whether that of this environment is Open MPI's
OF_ANOTHER = {
    False: {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "a job"},
    True: {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"},
}


@pytest.mark.parametrize("by", ["srun", "mpirun"])
def test_singletons_stop(tmp_path, by):
    """The launcher says two tasks and MPI sees one: each would overwrite the other's result."""
    words = ["-m", "dpfl_mpi", "--results", tmp_path]
    if by == "srun":
        done = mpirun(1, *words, SLURM_STEP_NUM_TASKS="2")
    else:
        done = ended(sys.executable, *words, **OF_ANOTHER[starts.open_mpi()])
    assert done.returncode == 3
    assert "the launcher started 2 tasks, but MPI sees one" in one_sentence(done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_cannot_start_lets_root_speak_first(tmp_path):
    """Some launchers end all ranks with the first: the second waits, and root says why."""
    begun = time.monotonic()
    second = dict(OF_ANOTHER[starts.open_mpi()])
    second |= {name: "1" for name in second if name.endswith("RANK")}
    done = ended(sys.executable, "-m", "dpfl_mpi", "--results", tmp_path, **second)
    assert (done.returncode, done.stderr) == (3, "") and time.monotonic() - begun > 5


def test_settings_without_effect_are_named(capfd):
    for words, named in (
        ("fedavg --reach sites:2 --budget 3 --lr 0.1", "--budget, --reach"),
        ("dpsgd --budget 2 --optimizer adam --momentum 0.5", "--budget, --momentum"),
        ("dpfl --candidates 3 --codec none --send all", "--candidates"),
        ("local --flip_share 0.1 --drift 0.2:1 --rounds 1",
         "--flip_share (of 4 clients none), --drift (of 4 clients none)"),
        ("fedavg --attack scale:0.24 --newcomers 0.25", "--attack (of 4 clients none)"),
        ("local --budget 1 --tau_init 0 --momentum 0.9", ""),  # as a sweep writes them
    ):  # fmt: skip
        sentence = f"warning: without effect in this Run: {named}\n" if named else ""
        for quiet in ([], ["--quiet"]):
            parse(["--clients", "4", "--method", *words.split(), *quiet])
            assert capfd.readouterr().err == ("" if quiet else sentence)


def test_threads_are_a_number_whatever_the_site_sets(monkeypatch):
    for given, used in {"": "1", "4": "4", "4,2": "4", "0": "1", "many": "1", None: "1"}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", given or "")
        if given is None:
            monkeypatch.delenv("OMP_NUM_THREADS")
        set_environment()
        assert os.environ["OMP_NUM_THREADS"] == used


def test_a_damaged_result_that_is_found_is_one_sentence(tmp_path, said):
    path = run_here(tmp_path / "a.h5", {"clients": 4, "rounds": 1})
    held = Result(path)["round/test_acc"][-1].tobytes()
    path.write_bytes(path.read_bytes().replace(held, bytes(len(held)), 1))
    err = one_sentence(said(main, f"--out={path}", "--clients=4", "--rounds=1", code=2))
    assert err.startswith(f"error: {path} is damaged: ")


def test_what_the_disk_refuses_is_one_sentence(tmp_path):
    words = [sys.executable, "-m", "dpfl_mpi.show", tiny_result.make(tmp_path / "a.h5")]
    with open("/dev/full", "w") as out:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, env=env, stdout=out, stderr=-1, text=True)
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")
    done = ended(sys.executable, "-m", "dpfl_mpi.sweep", "x" * 300)
    sentence = f"error: [Errno 36] File name too long: '{'x' * 300}'\n"
    assert (done.returncode, done.stderr) == (2, sentence)


# a terminal would change its title, clear its screen, and write bold over this line
COMMANDS = "\x1b]0;title\x07\x1b[2J\x9b1mX\rY"
SHOWN = "\\x1b]0;title\\x07\\x1b[2J\\x9b1mX\\x0dY"


def test_no_text_of_a_file_commands_a_terminal(tmp_path):
    path = tiny_result.make(tmp_path / "a.h5")
    data, results = tmp_path / "data.h5", tmp_path / "results"
    with tiny_result.changing(path) as file:
        declared = json.loads(file.attrs["declared"])
        declared["method"]["title"] = f"Mine {COMMANDS}"
        declared["method"]["citation"] = f"@misc{{mine,\n\ttitle = {{{COMMANDS}}}}}"
        file.attrs["declared"] = json.dumps(declared)
        file["meta/starts"][:] = [json.dumps(tiny_result.START | {"cpu": COMMANDS})]
    arrays = arrays_of(np.arange(960).reshape(240, 4) % 251, np.arange(240) % 3)
    arrays = dataclasses.replace(arrays, class_names=(COMMANDS, "b", "c"))
    prepare.write(arrays, "arrays", data, own=True)
    run, folder = Run(**starts.small(seed=1)).resolve().path(results), results / "sweeps" / "1"
    Submission("local", {run.name: "39"}).save(folder)
    (folder / f"{run.stem}.log").write_text(f"error: {COMMANDS}\n")
    deal = "--dataset=arrays --partition=pathological --clients=3 --classes_per_client=2"
    for words, code in (
        (["-m", "dpfl_mpi.show", path], 0),
        (["-m", "dpfl_mpi.show", "--cite", path], 0),
        (["-m", "dpfl_mpi.show", tmp_path / COMMANDS], 2),
        ([ROOT / "analysis" / "accuracy_table.py", path, "--wide", f"--out={tmp_path}"], 0),
        (["-m", "dpfl_mpi.describe", *deal.split(), "--data", data], 0),
        (["-m", "dpfl_mpi.sweep", "--list", "--seeds=1", *starts.of_sweep(results)], 1),
    ):
        done = ended(sys.executable, *words)
        text = done.stdout + done.stderr
        assert done.returncode == code and SHOWN.partition("X")[0] in text, done
        assert {c for c in text if unicodedata.category(c) == "Cc"} <= {"\n", "\t"}
    assert printable(COMMANDS) == SHOWN and printable("a\tb\n") == "a\tb\n"


RUN = "--clients=4 --rounds=1 --tau_init=1 --tau_train=1 --out=OUT"
READ = ["-m dpfl_mpi --help", "-m dpfl_mpi.sweep --list --seeds 1,2", "-m dpfl_mpi RUN"]
READ += ["HERE/analysis/accuracy_table.py RESULT"]
STREAMS = [
    "HERE/analysis/graph_evolution.py RESULT --out FOLDER",
    "-m dpfl_mpi.show RESULT",
    "-m dpfl_mpi.show NOWHERE",
    "-m dpfl_mpi --print_config",
    "-m dpfl_mpi RUN",
]


def filled(command, tmp_path):
    """Return a command line with the paths of a result, this project and a folder."""
    names = {"HERE": ROOT, "NOWHERE": "/nowhere.h5", "FOLDER": tmp_path, "RUN": RUN}
    names["RESULT"] = tiny_result.make(tmp_path / "a.h5")
    return re.sub(r"[A-Z]{3,}", lambda found: str(names[found[0]]), command)


@pytest.mark.parametrize("command", STREAMS)
def test_a_stream_that_is_closed_or_full_is_no_traceback(command, tmp_path):
    """Closed: the same exit code and file. Full: exit code 2 for stdout, nothing for stderr."""
    words = filled(command, tmp_path)
    right, first = 2 if "NOWHERE" in command else 0, tmp_path / "0.h5"
    for i, how in enumerate(("", ">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full", ">/dev/full")):
        out, full = tmp_path / f"{i}.h5", how == ">/dev/full"
        line = f"{shlex.quote(sys.executable)} {words.replace('OUT', str(out))} {how}"
        done = ended("sh", "-c", line)
        assert "Traceback" not in done.stderr
        assert done.returncode == (2 if full else right), (how, done.stderr)
        if full:
            room = "error: .*(there is no room for the output|No space left)"
            assert re.search("error: /nowhere.h5: there is" if right else room, done.stderr)
        elif "RUN" in command:
            assert differences(first, out) == []


@pytest.mark.parametrize("command", READ)
def test_a_reader_that_has_left_ends_a_command(command, tmp_path):
    words = filled(command, tmp_path).replace("OUT", f"{tmp_path}/b.h5").split()
    read, write = os.pipe()
    os.close(read)  # `| head`, once it has its lines
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    how = {"cwd": tmp_path, "env": env, "stdout": write, "stderr": -1, "text": True}
    done = subprocess.run([sys.executable, *words], **how)
    os.close(write)
    if command == "-m dpfl_mpi RUN":
        assert done.returncode != 0 and "Traceback" not in done.stderr
        assert "error: nobody reads the output of this run any more" in done.stderr
    else:
        assert done.stderr == "" and done.returncode in (0, NO_READER)  # argparse ignores it
