"""A mistake is one sentence on stderr, printed once, with an exit code that is not 0, and no rank is left behind."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny_result
from launch import ROOT, mpirun, run_here

from dpfl_mpi.__main__ import main
from dpfl_mpi.errors import NO_READER, UserError
from dpfl_mpi.results import Result
from dpfl_mpi.settings.fields import to_flags

SMALL = {
    "dataset": "image_folder",
    "model": "mlp",
    "augment": False,
    "clients": 6,
    "rounds": 2,
    "tau_init": 1,
    "tau_train": 1,
}


def refused(capfd, *arguments):
    """Run the command line in this process and return its one sentence."""
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    out, err = capfd.readouterr()
    assert end.value.code == 2
    assert out == ""
    return one_sentence(err)


def one_sentence(err):
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert "Traceback" not in err and len(err) < 400
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--batch-size 4", ["unrecognized arguments: --batch-size 4", "did you mean --batch_size?"]),
        ("--methd=local --rounds 1", ["--methd=local", "did you mean --method?"]),
        ("--no-agument", ["--no-agument", "did you mean --augment?"]),
        ("--zzz 1", ["--zzz", "--help lists all flags"]),
        ("--budget 0", ["--budget is 0", "at least 1", "0.1N", "inf"]),
        ("--budget -3", ["--budget is -3", "at least 1"]),
        ("--budget=-0.1N", ["--budget is -0.1N"]),
        ("--budget half", ["--budget is half"]),
        ("--budget 2.5", ["--budget is 2.5"]),
        ("--clients 0", ["--clients is 0", "at least 1"]),
        ("--clients many", ["clients", "many"]),
        ("--clients 2.5", ["clients", "2.5"]),
        ("--rounds -1", ["--rounds is -1", "at least 0"]),
        ("--tau_init -1", ["--tau_init is -1", "at least 0"]),
        ("--tau_train 0", ["--tau_train is 0", "at least 1"]),
        ("--ggc_period 0", ["--ggc_period is 0", "at least 1"]),
        ("--ggc_repeats 0", ["--ggc_repeats is 0", "from 1 to 999"]),
        ("--batch_size 0", ["--batch_size is 0", "from 1 to 1048576"]),
        ("--batch_size 999999999999", ["--batch_size is 999999999999", "from 1 to 1048576"]),
        ("--classes_per_client 0", ["--classes_per_client is 0", "at least 1"]),
        ("--min_per_class -1", ["--min_per_class is -1", "at least 0"]),
        ("--partition dirichlet --min_samples 1", ["--min_samples is 1", "at least 2"]),
        ("--lr 0", ["--lr is 0", "above 0"]),
        ("--lr nan", ["--lr is nan", "a number"]),
        ("--lr fast", ["lr", "fast"]),
        ("--lr_decay 1.5", ["--lr_decay is 1.5", "at most 1"]),
        ("--dirichlet_alpha 0", ["--dirichlet_alpha is 0", "above 0"]),
        ("--momentum 1", ["--momentum is 1", "below 1"]),
        ("--weight_decay -1", ["--weight_decay is -1", "at least 0"]),
        ("--clip_norm -1", ["--clip_norm is -1", "at least 0"]),
        ("--seed -1", ["--seed is -1", "0 to 4294967295"]),
        ("--partition_seed 4294967296", ["--partition_seed is 4294967296", "0 to 4294967295"]),
        ("--dataset cifar11", ["--dataset is cifar11", "allowed are", "cifar10", "digits"]),
        ("--method dpfk", ["--method is dpfk", "allowed are", "dpfl", "local"]),
        ("--model resnet50", ["--model is resnet50", "allowed are", "cnn", "mlp"]),
        ("--partition iid", ["partition", "iid", "pathological", "dirichlet"]),
        ("--preset mine", ["preset", "mine", "paper", "authors_code"]),
        ("--init zeros", ["init", "zeros", "kaiming", "torch"]),
        ("--momentum_state drop", ["momentum_state", "drop", "keep", "reset"]),
        ("--ggc_off_rounds no", ["ggc_off_rounds", "reuse", "skip"]),
        ("--tie random", ["tie", "random", "latest", "earliest"]),
        ("--on_divergence ignore", ["on_divergence", "ignore", "stop", "exclude"]),
        ("--device tpu", ["device", "tpu", "auto", "cpu", "cuda"]),
        ("--block -1", ["--block is -1", "at least 0"]),
        ("--precision tf32", ["--precision is tf32", "only a GPU"]),
        ("--precision fp8", ["precision", "fp8", "float32", "tf32", "bf16"]),
        ("--window_gb 0", ["--window_gb is 0", "above 0"]),
        ("--options.depth 3", ["depth"]),
        ("--clints 8", ["clints"]),
        ("--client 8", ["--client"]),  # no abbreviations
        ("digits", ["digits"]),
        ("--config /nowhere/run.yaml", ["--config is /nowhere/run.yaml", "No such file"]),
    ],
)
def test_a_bad_field(capfd, arguments, words):
    sentence = refused(capfd, *arguments.split())
    for word in words:
        assert word in sentence, sentence


def test_a_bad_config_file(capfd, tmp_path):
    for text, words in (
        ("clients: 8\nclints: 9\n", ["clints"]),
        ("clients: [1\n", []),
        ("budget: 0\n", ["--budget is 0"]),
        ("rounds: ten\n", ["rounds", "ten"]),
    ):
        (tmp_path / "run.yaml").write_text(text)
        sentence = refused(capfd, "--config", tmp_path / "run.yaml")
        assert all(word in sentence for word in words), sentence


def test_a_missing_foreign_or_truncated_data_file(capfd, tmp_path, digits_file):
    import h5py

    def data(path, *more):
        return refused(capfd, *to_flags(SMALL), "--quiet", "--results", tmp_path, "--data", path, *more)

    missing = data(tmp_path / "no.h5")
    assert "--data is" in missing and "no such file" in missing and "dpfl_mpi.prepare" in missing
    (tmp_path / "text.h5").write_text("not HDF5")
    assert "text.h5" in data(tmp_path / "text.h5")
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["train/images"] = np.zeros(3)
    assert "not made by dpfl_mpi" in data(tmp_path / "foreign.h5")
    whole = digits_file.read_bytes()
    for part in (2 / 3, 1 / 100):
        (tmp_path / "truncated.h5").write_bytes(whole[: int(len(whole) * part)])
        assert "truncated.h5" in data(tmp_path / "truncated.h5")
    other = data(digits_file, "--dataset", "cifar10")
    assert "holds image_folder; --dataset says cifar10" in other


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--clients 800", ["--clients is 800", "1437 training samples allow at most 718"]),
        ("--clients 300", ["--min_per_class is 2", "class"]),
        ("--classes_per_client 11", ["--classes_per_client is 11", "10 classes"]),
        ("--model cnn", ["--model cnn needs images of at least 16x16, these are 8x8", "mlp"]),
        ("--partition natural", ["natural", "pathological, dirichlet"]),
        ("--device cuda", ["--device is cuda", "cpu"]),
        ("--out /proc/no/result.h5", ["/proc/no, ", "--out", "cannot be made"]),
    ],
)
def test_what_the_data_do_not_allow(capfd, tmp_path, digits_file, more, words):
    if "cuda" in more and os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has a GPU")
    common = [*to_flags(SMALL), "--quiet", "--results", tmp_path, "--data", digits_file]
    sentence = refused(capfd, *common, *more.split())
    for word in words:
        assert word in sentence, sentence


def test_another_runs_file_is_not_overwritten(capfd, tmp_path, digits_file):
    fields = SMALL | {"data": str(digits_file), "rounds": 0}
    run_here(tmp_path / "a.h5", fields)
    sentence = refused(capfd, *to_flags(fields), "--quiet", "--out", tmp_path / "a.h5", "--seed", "1", "--lr", "0.5")
    assert "another Run (different: lr, partition_seed, seed)" in sentence and "--fresh" in sentence
    (tmp_path / "b.h5").write_text("something of the user's")
    assert "not a result" in refused(capfd, *to_flags(fields), "--quiet", "--out", tmp_path / "b.h5")
    assert (tmp_path / "b.h5").read_text() == "something of the user's"


def test_a_finished_result_without_what_is_asked_for_is_no_answer(capfd, tmp_path):
    """Models and scores after mixing cannot be had from a result that was computed without them."""
    fields = {"clients": 4, "rounds": 1, "tau_init": 1, "tau_train": 1, "budget": 2, "method": "local"}
    path = run_here(tmp_path / "run.h5", fields)
    common = [*to_flags(fields), "--quiet", "--out", path]
    sentence = refused(capfd, *common, "--save_models", "--mixed")
    assert "is finished and was computed without --save_models and --mixed; --fresh computes it anew" in sentence
    with Result(run_here(path, fields, fresh=True, save_models=True)) as result:
        assert "model/best" in result
    assert "without --mixed;" in refused(capfd, *common, "--save_models", "--mixed")
    assert run_here(path, fields, save_models=True) == path  # there it is


def test_a_refused_run_leaves_nothing(capfd, tmp_path, monkeypatch):
    """A mistake that only the data show: no checkpoint folder, no lock, no result."""
    monkeypatch.chdir(tmp_path)
    refused(capfd, "--partition", "motivation", "--out", str(tmp_path / "run.h5"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["dpfl", "local"])
def test_divergence_stops(capfd, tmp_path, digits_file, method):
    """The first client that diverged and its round are named; with one rank, in this process."""
    common = [*to_flags(SMALL | {"method": method}), "--quiet", "--results", tmp_path, "--data", digits_file]
    sentence = refused(capfd, *common, "--lr", "1e6")
    assert "client " in sentence and f"diverged in round {0 if method == 'dpfl' else 1}" in sentence
    assert "--lr" in sentence and "--on_divergence exclude" in sentence
    (path,) = tmp_path.glob("*.h5")
    with Result(path) as result:
        assert result.state.startswith("stopped")


def test_divergence_excludes(tmp_path, digits_file, monkeypatch):
    """One client's model is broken in round 1: it is named, scored with its last finite best, and no one averages with it."""
    from dpfl_mpi.federation import Federation

    train = Federation.local_opt

    def breaks(self, w, epochs, *rest, **named):
        w = train(self, w, epochs, *rest, **named)
        if self.round == 1:
            w[list(self.ids).index(2), 5] = float("nan")
        if self.round == 2:
            w[list(self.ids).index(4), 7] = 5000.0  # finite, but beyond what exact sums hold
        return w

    monkeypatch.setattr(Federation, "local_opt", breaks)
    fields = SMALL | {
        "data": str(digits_file),
        "rounds": 3,
        "on_divergence": "exclude",
        "budget": "inf",
        "augment": True,
    }
    with Result(run_here(tmp_path / "a.h5", fields, save_models=True)) as result:
        assert result.finished
        assert result["client/diverged_round"].tolist() == [-1, -1, 1, -1, 2, -1]
        assert result.graph(0)[:, 2].any() and result.graph(0)[:, 4].any()  # they had been chosen
        for t in (1, 2, 3):
            assert not result.graph(t)[2].any() and not result.graph(t)[:, 2].any()
        for t in (2, 3):
            assert not result.graph(t)[4].any() and not result.graph(t)[:, 4].any()
        assert result.graph(3).any()
        assert result["best/round"][2] == 0 and result["best/round"][4] <= 1
        assert result["best/test_acc"][2] == result["round/test_acc"][0, 2]
        assert np.isnan(result["round/val_acc"][1:, 2]).all() and np.isnan(result["round/val_acc"][2:, 4]).all()
        healthy = np.delete(result["round/val_loss"], [2, 4], 1)
        assert np.isfinite(healthy).all()
        assert np.isfinite(result["model/best"]).all() and np.isfinite(result["best/test_acc"]).all()


# with several ranks ---------------------------------------------------------------------------------------------------------
def stops(done, seconds, began):
    """All ranks gone, an exit code that is not 0, in time (starting Python on a busy machine is most of it)."""
    assert done.returncode != 0
    assert time.monotonic() - began < seconds


def test_ranks_print_once(tmp_path, digits_file):
    """A mistake in the command line, one in the data, and a divergence: three ranks, one sentence each."""
    common = ["-m", "dpfl_mpi", "--quiet", "--results", tmp_path]
    for words, arguments in (
        ("--budget is 0", ["--budget=0"]),
        ("no such file", [*to_flags(SMALL), f"--data={tmp_path}/no.h5"]),
        ("diverged in round 0", [*to_flags(SMALL), f"--data={digits_file}", "--lr=1e6"]),
    ):
        began = time.monotonic()
        done = mpirun(3, *common, *arguments)
        stops(done, 60, began)
        assert words in one_sentence(done.stderr)
        assert done.stdout == ""


def test_ranks_show_the_help_once_and_end_without_an_error():
    done = mpirun(3, "-m", "dpfl_mpi", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("--dataset") == 1


INJECT = """
import sys
from mpi4py import MPI
from dpfl_mpi import errors, federation
from dpfl_mpi.__main__ import main
train = federation.Federation.local_opt
def broken(self, *args, **named):
    if MPI.COMM_WORLD.rank == 1:
        raise {error}
    return train(self, *args, **named)
federation.Federation.local_opt = broken
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("ZeroDivisionError('a bug')", "ZeroDivisionError: a bug"),
        ("errors.UserError('rank 1 alone')", "error: rank 1 alone"),
    ],
    ids=["bug", "mistake"],
)
def test_an_exception_on_one_rank_ends_all(tmp_path, digits_file, error, expected):
    """Rank 0 waits in a collective; it must not wait for ever."""
    (tmp_path / "inject.py").write_text(INJECT.format(error=error))
    began = time.monotonic()
    done = mpirun(
        2, tmp_path / "inject.py", *to_flags(SMALL), "--quiet", f"--data={digits_file}", "--results", tmp_path
    )
    stops(done, 60, began)
    assert done.stderr.count(expected) == 1


ON_SOME = """
import sys
from mpi4py import MPI
from dpfl_mpi.__main__ import main
from dpfl_mpi.federation import Federation
whole = Federation.average
def broken(self, *args, **named):
    if MPI.COMM_WORLD.rank in {ranks}:
        raise ZeroDivisionError('a bug')
    return whole(self, *args, **named)
Federation.average = broken
main(sys.argv[1:])
"""


@pytest.mark.parametrize("ranks", [(1, 2), (0, 1, 2)], ids=str)
def test_a_bug_on_several_ranks_is_told_once(tmp_path, digits_file, ranks):
    """In the middle of a round: rank 0 waits in a collective, or fails as well. One traceback, of the lowest rank."""
    (tmp_path / "inject.py").write_text(ON_SOME.format(ranks=ranks))
    began = time.monotonic()
    flags = [*to_flags(SMALL), "--quiet", f"--data={digits_file}", "--results", tmp_path]
    done = mpirun(3, tmp_path / "inject.py", *flags)
    stops(done, 60, began)
    assert done.stderr.count("Traceback") == 1 and f"rank {min(ranks)} of 3:\n" in done.stderr, done.stderr


UNLIKE = """
import dataclasses, os, sys
from mpi4py import MPI
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.engine.train import train
from dpfl_mpi.errors import NO_READER, UserError
from dpfl_mpi.mpi.world import World
world = World(MPI.COMM_WORLD)
last = world.rank == world.size - 1
run, job = Run(clients=6, rounds=0, tau_init=0), Job(quiet=True, results=sys.argv[1])
for other in (
    (Run(clients=6, rounds=0, tau_init=0, seed=1, lr=0.5), job),
    (run, Job(quiet=True, results=sys.argv[1], block=1)),
    (run, Job(quiet=True, results=sys.argv[1], block=-1)),
    (Run(clients=0), job),
    (dataclasses.replace(run.resolve(), rounds=-3), job),
):
    try:
        train(*(other if last else (run, job)), world)
    except UserError as error:
        os.write(1, f"{error}\\n".encode())
assert train(run, job, world).is_file()
"""


def test_ranks_with_other_settings_are_refused(tmp_path):
    """The last of three ranks has another Run, another Job, an unchecked one: every rank raises the same sentence, and goes on."""
    (tmp_path / "unlike.py").write_text(UNLIKE)
    done = mpirun(3, tmp_path / "unlike.py", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(3 * list(dict.fromkeys(lines)))
    expected = (
        "the ranks were given different settings (--partition_seed, --lr, --seed); every rank",
        "the ranks were given different settings (--block); every rank",
        "--block is -1; allowed is a whole number of at least 0",
        "--clients is 0; allowed",
        "--rounds is -3; allowed",
    )
    for line, words in zip(dict.fromkeys(lines), expected, strict=True):
        assert line.startswith(words)


ON_ROOT = """
import sys
from dpfl_mpi.__main__ import main
from dpfl_mpi.results.recorder import Recorder
def broken(self, *arguments):
    raise ZeroDivisionError('a bug')
Recorder.flush = Recorder.close = broken  # closing the file fails for the same reason
main(sys.argv[1:])
"""


def test_a_bug_where_root_writes_is_told_once_and_ends_all(tmp_path, digits_file):
    (tmp_path / "inject.py").write_text(ON_ROOT)
    began = time.monotonic()
    done = mpirun(
        3, tmp_path / "inject.py", *to_flags(SMALL), "--quiet", f"--data={digits_file}", "--results", tmp_path
    )
    stops(done, 60, began)
    assert done.stderr.count("Traceback") == done.stderr.count("ZeroDivisionError: a bug") == 1
    assert "RootFailed" not in done.stderr


IN_ARGUMENTS = """
import sys
import dpfl_mpi.__main__ as entry
def broken(arguments):
    raise SyntaxError('in the file of a method')
entry.parse = broken
entry.main(sys.argv[1:])
"""


def test_a_bug_before_mpi_starts_ends_all(tmp_path):
    """Rank 0 alone reads the arguments; the others wait for it in MPI_Init."""
    (tmp_path / "inject.py").write_text(IN_ARGUMENTS)
    began = time.monotonic()
    done = mpirun(2, tmp_path / "inject.py")
    assert done.returncode and time.monotonic() - began < 60
    assert done.stderr.count("Traceback") == done.stderr.count("SyntaxError: in the file of a method") == 1


def test_singletons_under_srun_stop(tmp_path):
    """srun says two tasks and MPI sees one rank: each task would train alone and overwrite the other's result."""
    done = mpirun(1, "-m", "dpfl_mpi", "--results", tmp_path, env={"SLURM_STEP_NUM_TASKS": "2"})
    assert done.returncode == 3
    assert "srun started 2 tasks, but MPI sees one" in one_sentence(done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_prepare_refuses_in_one_sentence(tmp_path, capfd):
    from dpfl_mpi import prepare

    (tmp_path / "a.tar.gz").write_bytes(b"no archive")
    (tmp_path / "empty").mkdir()
    for source, words in (
        (tmp_path / "no", "no such file"),
        (tmp_path / "a.tar.gz", "truncated or not a tar or zip archive"),
        (tmp_path / "empty", "train holds no image"),
    ):
        assert prepare.main(["cifar10", "--source", str(source), "--out", str(tmp_path / "x.h5")]) == 2
        assert words in one_sentence(capfd.readouterr().err)
    assert not (tmp_path / "x.h5").exists()


def test_results_that_are_none(tmp_path):
    (tmp_path / "text.h5").write_text("no")
    for path, words in (
        (tmp_path / "no.h5", "no such result file"),
        (tmp_path / "text.h5", "not a result of dpfl_mpi"),
    ):
        with pytest.raises(UserError, match=words):
            Result(path)


@pytest.mark.parametrize("given, used", [(None, "1"), ("", "1"), ("4", "4"), ("4,2", "4"), ("0", "1"), ("many", "1")])
def test_threads_are_a_number_whatever_the_site_sets(monkeypatch, given, used):
    from dpfl_mpi.__main__ import before_mpi

    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    before_mpi()
    assert os.environ["OMP_NUM_THREADS"] == used


@pytest.mark.parametrize("command", ["dpfl_mpi --help", "dpfl_mpi.sweep --list --seeds 1,2", "dpfl_mpi.show RESULT"])
def test_a_reader_that_has_left_ends_a_command_without_a_word(command, tmp_path):
    command = command.replace("RESULT", str(tiny_result.make(tmp_path / "a.h5")))
    read, write = os.pipe()
    os.close(read)  # `| head`, once it has its lines
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=tmp_path, env=env, stdout=write, stderr=-1)
    os.close(write)
    assert done.stderr == b"" and done.returncode in (0, NO_READER)  # argparse itself passes over it


def test_a_run_whose_reader_has_left_says_so_and_ends(tmp_path):
    read, write = os.pipe()
    os.close(read)
    flags = to_flags({"clients": 4, "rounds": 1, "tau_init": 1, "tau_train": 1, "out": tmp_path / "a.h5"})
    command = [sys.executable, "-m", "dpfl_mpi", *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode != 0
    assert "error: nobody reads the output of this run any more" in done.stderr and "Traceback" not in done.stderr
