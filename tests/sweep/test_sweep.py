"""Sweeps: which Runs are wanted and missing, what sbatch gets (with a faked Slurm), and a real one on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import starts

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.settings.fields import changed, to_flags
from dpfl_mpi.survival.lock import Lock, born
from dpfl_mpi.sweep import __main__ as sweep
from dpfl_mpi.sweep import interrupt, jobs, known, wanted
from dpfl_mpi.sweep.flags import parser, split
from dpfl_mpi.sweep.table import Live


def rest(folder: Path, **changes: object) -> list[str]:
    """Return the flags that make every Run of a sweep small."""
    return [*starts.command(folder, starts.small(**changes))[4:], f"--results={folder}"]


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """A Slurm that only writes down what it is given, in the folder returned."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    scripts = {
        "sbatch": f'cp "$1" {folder}/script; echo "Submitted batch job 41"',
        "srun": "exit 1",
        "squeue": f"test ! -e {folder}/broken && cat {folder}/queue",
        "scontrol": "exit 0",
        "sacct": "exit 0",
        "scancel": "exit 0",
    }
    for name, text in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_flags_name_the_same_run():
    from dpfl_mpi.__main__ import parse

    for run in (Run(), Run(method="local", seed=3), Run(**starts.small(budget="0.5N", lr=0.25))):
        run = run.resolve()
        back, job = parse(to_flags(changed(run) | {"mixed": True, "results": "elsewhere"}))
        assert back.key() == run.key() and back.slug() == run.slug()
        assert job.mixed and job.results == "elsewhere"


def test_time_limits():
    assert [jobs.minutes(t) for t in ("90", "1:30:00", "2:00:30", "1-12:00:00")] == [90, 90, 121, 2160]
    for wrong in ("soon", "1-12", "30:00", "1-30:00", "1:2:3:4", ""):  # Slurm reads some of these in its own way
        with pytest.raises(UserError, match=f"--time is {wrong}; allowed"):
            jobs.minutes(wrong)


def test_numbers_and_folders_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").touch()
    few = ["--methods", "local", *starts.command(tmp_path, starts.small())[4:]]
    for words, said in (
        (["--ranks", "0"], "--ranks is 0; allowed is a whole number of at least 1"),
        (["--max_parallel", "-1"], "--max_parallel is -1; allowed is a whole number of at least 0"),
        ([f"--results={tmp_path / 'file'}"], "nothing can be written there: Not a directory"),
    ):
        assert sweep.main([*few, *words]) == 2
        assert said in capsys.readouterr().err


def test_a_file_of_analysis_names_its_runs(tmp_path, capsys):
    file = tmp_path / "figure.py"
    file.write_text(
        "from neighbour import SEEDS\nfrom dpfl_mpi.settings import Run\nRUNS = [Run(seed=s) for s in SEEDS]\n"
    )
    (tmp_path / "neighbour.py").write_text("SEEDS = (1, 2)\n")
    assert sweep.main([str(file), "--list", f"--results={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "-s1-" in out and "-s2-" in out and "2 missing of 2" in out
    assert sweep.main([str(tmp_path / "none.py"), "--list"]) == 2
    for text, said in (
        ("", "has no list RUNS of Run(...)"),
        ("RUNS = ['local']", "has no list RUNS of Run(...)"),
        ("import nowhere", "wrong.py fails: ModuleNotFoundError: No module named 'nowhere'"),
    ):
        (tmp_path / "wrong.py").write_text(text)
        assert sweep.main([str(tmp_path / "wrong.py"), "--list"]) == 2
        assert said in capsys.readouterr().err


def test_runs_whose_file_is_not_there_are_left_out_and_named(tmp_path, capsys):
    """The other Runs of the file go on; a sweep of nothing but such Runs, or a grid, is refused."""
    runs = [Run(**starts.small(seed=1)), *(Run(dataset="cifar10", data=f"{tmp_path}/none.h5", seed=s) for s in (1, 2))]
    file = tmp_path / "some.py"
    file.write_text(f"from dpfl_mpi.settings import Run\nRUNS = [{', '.join(map(repr, runs))}]")
    assert sweep.main([str(file), "--list", f"--results={tmp_path}"]) == 1
    out, err = capsys.readouterr()
    said = f"left out 2 of 3 Runs: --data is {tmp_path}/none.h5; "
    assert said in err and said in out and "1 missing of 1" in out
    file.write_text(file.read_text().replace(repr(runs[0]) + ", ", ""))
    assert sweep.main([str(file), "--list", f"--results={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: --data is {tmp_path}/none.h5; ")


def test_what_sbatch_would_get(tmp_path, slurm, capsys):
    words = ["--seeds", "1,2,3", "--cluster", "slurm", "--dry_run", "--slurm_partition", "long", "--account", "me"]
    words += [
        "--nodes",
        "2",
        "--ranks",
        "4",
        "--cpus",
        "2",
        "--gpus",
        "1",
        "--time",
        "1-00:00:00",
        "--max_parallel",
        "2",
    ]
    assert sweep.main([*words, "--sbatch", "qos=low", "--sbatch", "exclusive", *rest(tmp_path)]) == 0
    out = capsys.readouterr().out
    for line in (
        "--array=0-2%2",
        "--partition=long",
        "--account=me",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=2",
        "--gpus-per-node=1",
        "--time=1440",
        "--qos=low",
        "--exclusive",
        "--requeue",
        "--open-mode=append",
    ):
        assert f"#SBATCH {line}\n" in out, line
    assert "--mpi=pmi2" in out and "OMP_NUM_THREADS=2" in out
    assert out.count("# task: python -m dpfl_mpi") == 3
    assert not (slurm / "script").exists()


def test_an_array_is_submitted_once_and_failures_are_named(tmp_path, slurm, capsys, monkeypatch):
    words = ["--seeds", "1,2", "--cluster", "slurm", *rest(tmp_path)]
    (slurm / "queue").write_text("41 41_0\n42 41_1\n")
    assert sweep.main(words) == 0
    assert "2 waiting of 2" in capsys.readouterr().out
    (slurm / "script").unlink()
    assert sweep.main(words) == 0  # both are in the queue
    assert not (slurm / "script").exists()
    (slurm / "queue").write_text("")
    monkeypatch.setattr(known, "BLIND_S", 0)
    folder = next(tmp_path.glob("sweeps/*"))
    (folder / "41_1_0_log.err").write_text("line\n" * 50 + "error: it broke\n")
    assert sweep.main([*words, "--list"]) == 1
    out = capsys.readouterr().out
    assert "2 failed of 2" in out and "job 41_1, --retry submits it again" in out and "error: it broke" in out
    assert sweep.main(words) == 1
    assert not (slurm / "script").exists()  # only on request
    sweep.main([*words, "--retry"])
    assert (slurm / "script").exists()
    assert len(list(tmp_path.glob("sweeps/*/jobs.json"))) == 2


def test_what_is_pickled_is_a_function_and_strings():
    from submitit.helpers import DelayedSubmission

    same = jobs.again(["--seed", "1"])
    assert isinstance(same, DelayedSubmission)
    assert same.function is jobs.compute and same.args == (["--seed", "1"],)
    assert jobs.compute.checkpoint is jobs.again
    done = subprocess.run(
        [sys.executable, "-c", "import sys, dpfl_mpi.sweep; print('torch' in sys.modules, 'mpi4py' in sys.modules)"],
        cwd=starts.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False False\n", done.stderr


@pytest.mark.timeout(600)
def test_a_sweep_on_this_machine(tmp_path, capsys):
    words = ["--seeds", "1,2", "--cluster", "local", "--ranks", "2", *rest(tmp_path, rounds=2)]
    assert sweep.main(words) == 0
    assert "2 finished of 2" in capsys.readouterr().out
    for path in tmp_path.glob("*.h5"):
        with Result(path) as result:
            assert result.finished and len(result.starts()) == 1
    assert sweep.main(words) == 0  # nothing is computed twice
    assert len(list(tmp_path.glob("sweeps/*"))) == 1


def test_debug_computes_one_after_the_other_in_the_foreground(tmp_path, capfd):
    words = ["--methods", "local,dpfl", "--cluster", "debug", *rest(tmp_path, rounds=1)]
    assert sweep.main(words) == 0
    out = capfd.readouterr().out
    begins = [out.index(f"--- image_folder-pathological-{method}-") for method in ("local", "dpfl")]
    ends = [out.index(f"{method} on image_folder") for method in ("local", "dpfl")]  # what the Run itself prints
    assert begins[0] < ends[0] < begins[1] < ends[1] < out.index("2 finished of 2")
    assert sweep.main(words) == 0
    assert "---" not in capfd.readouterr().out  # nothing is left to do


def test_debug_goes_on_after_a_failure_and_says_it(tmp_path, capfd):
    words = ["--seeds", "1,2", "--cluster", "debug", *rest(tmp_path, rounds=1, lr=1e15)]
    assert sweep.main(words) == 1
    seen = capfd.readouterr()
    assert seen.err.count("diverged in round 0") == seen.err.count("ended with exit code 2") == 2
    assert "2 failed of 2" in seen.out
    assert sweep.main([*words, "--list"]) == 1


def test_a_local_failure_is_named_with_its_log(tmp_path, capsys):
    assert sweep.main(["--seeds", "1", *rest(tmp_path, rounds=1, lr=1e15)]) == 1
    out = capsys.readouterr().out
    assert "1 failed of 1" in out and re.search(r"error: client \d diverged in round 0", out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_ctrl_c_lets_running_runs_keep_a_checkpoint(tmp_path, number):
    """Ctrl-C, or a terminal that goes away: one line, a checkpoint, and the same command goes on to the same numbers."""
    flags = rest(tmp_path, rounds=25)
    words = [sys.executable, "-m", "dpfl_mpi.sweep", "--seeds", "1,2", "--max_parallel", "1", *flags]
    how = {"cwd": starts.ROOT, "env": starts.environment(), "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, start_new_session=True, **how, **pipes)
    starts.wait_for(lambda: [p for p in tmp_path.glob("*.h5") if starts.recorded(p) >= 1], process)
    os.killpg(process.pid, number)  # what a terminal sends
    err = starts.finish(process, 130)
    said = (
        "interrupted: the Runs keep a checkpoint each; the same command goes on, with --list it says how far they are\n"
    )
    assert err == said
    (out,) = tmp_path.glob("*.h5")  # the second was not begun
    (t,) = starts.checkpoint_rounds(out)
    with Result(out) as result:
        assert result.state == f"stopped after round {t}"
    assert not out.with_name(f"{out.name}.lock").exists()
    listed = subprocess.run([*words, "--list"], capture_output=True, **how)
    assert listed.returncode == 0 and "1 missing, 1 stopped of 2" in listed.stdout
    if number == signal.SIGHUP:
        return
    done = subprocess.run(words, capture_output=True, timeout=240, **how)
    assert done.returncode == 0 and "2 finished of 2" in done.stdout, done.stdout + done.stderr
    with Result(out) as result:
        assert len(result.starts()) == 2


def test_an_interrupt_that_a_destructor_drops_is_raised_later(monkeypatch):
    """Python ignores what is raised in `__del__`, KeyboardInterrupt too; the next look at the Runs raises it."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: dropped.append(lost.exc_type))

    class Caught:
        def __del__(self):
            # no real one: runs of this process would hear it, too
            signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)

    for _ in range(2):  # a second sweep of the process starts without the first one's signal
        with pytest.raises(KeyboardInterrupt), interrupt.ended_as_by_ctrl_c():
            interrupt.check()
            Caught()
            assert dropped == [KeyboardInterrupt]
            known.follow([], Live(sys.stdout), known.Queue([]), 0.0, lambda: True)
        dropped.clear()


def test_watching_ends_with_the_last_job(tmp_path, slurm, capsys, monkeypatch):
    words = ["--seeds", "1,2", "--cluster", "slurm", *rest(tmp_path)]
    (slurm / "queue").write_text("41 41_0\n42 41_1\n")
    assert sweep.main(words) == 0
    capsys.readouterr()
    monkeypatch.setattr(known, "BLIND_S", 0)
    runs = [Run(**starts.small(seed=seed)).resolve() for seed in (1, 2)]

    def begin():
        return Recorder(runs[0].path(tmp_path), runs[0], {}, {"time": "now"})

    steps = iter([
        lambda: (slurm / "broken").touch(),  # squeue does not answer: what it said last holds
        lambda: (slurm / "broken").unlink(),
        lambda: begin().abandon(),
        lambda: starts.here(runs[0].path(tmp_path), starts.small(seed=1), fresh=True),
        lambda: (slurm / "queue").write_text(""),
    ])  # fmt: skip
    pauses = []
    clock = vars(time) | {"sleep": lambda seconds: (pauses.append(seconds), next(steps)())}
    monkeypatch.setattr(known, "time", SimpleNamespace(**clock))
    assert sweep.main([*words, "--list", "--watch"]) == 1
    out = capsys.readouterr().out
    changes = [line.split()[1:3] for line in out.splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]
    assert changes == [[runs[0].path(tmp_path).stem, "finished"], [runs[1].path(tmp_path).stem, "failed"]]
    assert "1 failed, 1 finished of 2" in out
    assert set(pauses) == {known.ASK_S}


def test_a_silent_slurm_is_no_failure_of_the_jobs(tmp_path, slurm, capsys):
    words = ["--seeds", "1", "--cluster", "slurm", *rest(tmp_path)]
    (slurm / "queue").write_text("41 41_0\n")
    assert sweep.main(words) == 0
    (slurm / "broken").touch()
    assert sweep.main([*words, "--retry"]) == 2
    assert "error: squeue does not say which of the submitted jobs are alive" in capsys.readouterr().err


def test_tuning_reads_validation_only(tmp_path, capsys, monkeypatch):
    fields = starts.small(rounds=1)
    values = wanted.trials([Run(**fields)], "dpfl.lr=0.001,0.05", sweep.settings)
    job = Job(results=str(tmp_path))
    assert "not finished" in wanted.choose(values, job, "dpfl.lr=0.001,0.05")
    scores = {}
    for value, (run,) in values.items():
        path = starts.here(run.path(tmp_path), fields | {"lr": float(value)})
        with Result(path) as result:
            scores[value] = result["best/val_acc"].mean()
    read = []
    whole = Result.__getitem__
    monkeypatch.setattr(Result, "__getitem__", lambda self, name: read.append(name) or whole(self, name))
    best = max(scores, key=scores.get)
    assert f"best by validation: dpfl.lr={best}" in wanted.choose(values, job, "dpfl.lr=0.001,0.05")
    assert "best/val_acc" in read and not any("test" in name for name in read)
    assert len(list(tmp_path.glob("*.h5"))) == 2  # every trial is kept
    for wrong in ("ditto", "dpfl.nothing=1", "dpfl.lr"):
        with pytest.raises(UserError, match="--tune"):
            wanted.trials([Run()], wrong, sweep.settings)


def test_values_are_read_as_on_the_command_line():
    """YAML 1.1 alone takes 1e-3 for a text and 1:2 for 62."""
    numbers = wanted.trials([Run(seed=7)], "ditto.lam=1e-3,0.5", sweep.settings)
    assert [(v, r.options, r.method, r.seed) for v, [r] in numbers.items()] == [
        ("1e-3", {"lam": 0.001}, "ditto", 7),
        ("0.5", {"lam": 0.5}, "ditto", 7),
    ]
    assert [r.lr for [r] in wanted.trials([Run()], "ditto.lr=1e-3", sweep.settings).values()] == [0.001]
    assert [r.drift for [r] in wanted.trials([Run()], "dpfl.drift=1:2", sweep.settings).values()] == ["1:2"]
    with pytest.raises(UserError, match=r"^--lr is fast; allowed is a number above 0$"):
        wanted.trials([Run()], "dpfl.lr=fast", sweep.settings)


def test_a_process_with_a_used_number_is_not_the_job(tmp_path):
    """Alive is the process that began when the job did; on another host what the lock says."""
    folder = tmp_path / "sweeps" / "1"
    folder.mkdir(parents=True)
    path, pid = tmp_path / "a.h5", os.getpid()
    for since, host, lives in ((born(pid), {}, True), ("1", {}, False), (born(pid), {"host": "elsewhere"}, False)):
        known.Submission("local", {"a.h5": str(pid)}, {"a.h5": since}, **host).remember(folder)
        one = known.Known(Run().resolve(), path)
        known.recall([one], tmp_path / "sweeps")
        assert one.alive(set()) == lives
    mine = Lock(path)
    mine.acquire()
    assert one.alive(set())
    mine.release()


def test_the_newest_submission_counts(tmp_path):
    for folder, when, job in (("b", 1.0, "1"), ("a", 2.0, "2")):
        (tmp_path / folder).mkdir()
        known.Submission("slurm", {"a.h5": job}, submitted=when).remember(tmp_path / folder)
    one = known.Known(Run().resolve(), tmp_path / "a.h5")
    known.recall([one], tmp_path)
    assert one.job_id == "2"


def test_the_record_of_a_sweep_is_readable(tmp_path):
    known.Submission("slurm", {"a.h5": "7"}).remember(tmp_path)
    assert json.loads((tmp_path / "jobs.json").read_text())["jobs"] == {"a.h5": "7"}


# what is a sweep's, and what a Run's ---------------------------------------------------------------------------------------
def test_every_word_goes_to_the_sweep_or_to_the_runs():
    """The value of a Run's flag is no file; a switch takes no value; the two command lines share no flag."""
    words = "--seeds 1,2 --rounds 30 --no-augment figure.py --partition dirichlet --lr=0.1 --mixed --ranks 2 --options.lam 3"
    args, rest = split(words.split(), parser("..."))
    assert (args.seeds, str(args.file), args.ranks) == ("1,2", "figure.py", 2)
    assert rest == [
        "--rounds",
        "30",
        "--no-augment",
        "--partition",
        "dirichlet",
        "--lr=0.1",
        "--mixed",
        "--options.lam",
        "3",
    ]
    from dpfl_mpi.__main__ import parser as one_run

    shared = set(parser("...")._option_string_actions) & set(one_run()._option_string_actions)
    assert shared == {"--help", "-h"}


def test_flags_of_runs_beside_a_grid_and_a_file(tmp_path, capsys):
    """--partition is the Runs'; Slurm's has a name of its own, which the error gives."""
    words = ["--list", f"--results={tmp_path}", "--partition", "dirichlet", "--rounds", "30"]
    assert sweep.main(["--seeds", "1", *words]) == 0
    out = capsys.readouterr().out
    assert "digits-dirichlet-dpfl-" in out and "1 missing of 1" in out
    assert sweep.main(["--seeds", "1", "--partition", "gpu", "--cluster", "slurm", "--list"]) == 2
    assert capsys.readouterr().err.endswith("or file:PATH; Slurm's partition is --slurm_partition\n")
    assert sweep.main(["--seeds", "1", "--methods", "ditto", "--options.lam", "0.3", *words]) == 0  # DPFL has no lam
    assert "dirichlet-ditto-" in capsys.readouterr().out
    for wrong, said in (
        (["--clints", "3"], "clints"),
        (["--rounds", "ten"], "--rounds is"),
        (["a.py", "b.py"], "b.py"),
        (["--cluster"], "--cluster"),
        (["--seeds", "1", "--time", "0", "--cluster", "slurm", "--dry_run"], "at least a minute"),
    ):
        assert sweep.main(wrong) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and said in err, err


def test_a_grid_picks_runs_of_a_file(tmp_path, capsys):
    """One of the values of each flag; a method that reads no budget has every budget, and a share is a number."""
    file = tmp_path / "figure.py"
    file.write_text(
        "from dpfl_mpi.settings import Run\n"
        "RUNS = [Run(method=m, seed=s, budget=b) for m in ('dpfl', 'local') for s in (1, 2) for b in ('0.25N', 4)]\n"
    )

    def listed(*words: str) -> list[str]:
        assert sweep.main([str(file), "--list", f"--results={tmp_path}", *words]) == 0, capsys.readouterr().err
        return sorted(line.split()[0].rsplit("-", 1)[0] for line in capsys.readouterr().out.splitlines()[1:-1])

    name = "digits-pathological-{}-B{}-s{}".format
    assert len(listed()) == 6
    assert listed("--seeds", "2") == [name("dpfl", 4, 2), name("dpfl", 8, 2), name("local", 1, 2)]
    assert listed("--seeds", "1,2", "--methods", "local") == [name("local", 1, 1), name("local", 1, 2)]
    assert listed("--budgets", "8", "--seeds", "1") == [name("dpfl", 8, 1), name("local", 1, 1)]
    for words, said in (
        (["--seeds", "1,3"], "--seeds has 3; "),
        (["--methods", "ditto"], "have dpfl, local"),
        (["--datasets", "cifar10"], "have digits"),
    ):
        assert sweep.main([str(file), "--list", *words]) == 2
        assert said in capsys.readouterr().err


# who computes what -------------------------------------------------------------------------------------------------------
def test_a_stopped_run_is_taken_up_again_and_a_failed_one_is_not(tmp_path, capsys):
    """What a sweep ended itself, or a killed run of nobody left behind, waits for the same command; a failure for --retry."""
    words = ["--seeds", "1,2,3", *rest(tmp_path)]
    runs = [Run(**starts.small(seed=seed)).resolve() for seed in (1, 2, 3)]
    paths = [run.path(tmp_path) for run in runs]
    for run, path in zip(runs[:2], paths, strict=False):
        Recorder(path, run, {}, {"time": "now"}).abandon()
    Recorder(paths[2], runs[2], {}, {"time": "now"}).file.close()  # of no sweep: killed, so still called running
    folder = tmp_path / "sweeps" / "1"
    folder.mkdir(parents=True)
    begun = {path.name: "999999999" for path in paths[:2]}
    known.Submission("local", begun, dict.fromkeys(begun, "1"), [paths[0].name]).remember(folder)

    def states() -> list[str]:
        sweep.main([*words, "--list"])
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:4]]

    assert states() == ["stopped", "failed", "stopped"]
    sweep.main([*words, "--dry_run"])
    planned = capsys.readouterr().out
    assert [str(path) in planned for path in paths] == [True, False, True]
    mine = Lock(paths[1])  # another sweep, or somebody's mpirun, computes it now
    mine.acquire()
    assert states() == ["stopped", "running", "stopped"]
    sweep.main([*words, "--retry", "--dry_run"])
    assert str(paths[1]) not in capsys.readouterr().out
    mine.release()


def test_two_sweeps_at_once_share_the_runs(tmp_path):
    """Started together over the same Runs: each Run is computed once, nothing is called failed, and the tables agree at the end."""
    words = [
        sys.executable,
        "-m",
        "dpfl_mpi.sweep",
        "--seeds",
        "1,2",
        "--max_parallel",
        "1",
        *rest(tmp_path, rounds=3),
    ]
    both = [
        subprocess.Popen(
            words, cwd=starts.ROOT, env=starts.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
        assert "failed" not in out and err == ""
    paths = sorted(tmp_path.glob("*.h5"))
    assert len(paths) == 2
    for path in paths:
        with Result(path) as result:
            assert result.finished and len(result.starts()) == 1


def test_a_base_comes_first_and_its_models_are_kept(tmp_path, capsys):
    """FedAvg and FedAvg+FT in one sweep: the rounds are computed once, and the tuned Run copies them, seconds included."""
    file = tmp_path / "table.py"
    flags = starts.small(rounds=2)
    file.write_text(
        f"from dpfl_mpi.settings import Run\nRUNS = [Run(method='fedavg', finetune_epochs=e, **{flags!r}) for e in (2, 0)]\n"
    )
    tuned, base = (Run(method="fedavg", finetune_epochs=e, **flags).resolve().path(tmp_path) for e in (2, 0))
    assert sweep.main([str(file), f"--results={tmp_path}", "--max_parallel", "2"]) == 0
    assert "2 finished of 2" in capsys.readouterr().out
    with Result(tuned) as one, Result(base) as two:
        assert "model/best" in two and "model/best" not in one
        assert (one["seconds/train"][: len(two["seconds/train"])] == two["seconds/train"]).all()


def test_a_tuned_run_is_not_begun_where_its_base_failed(tmp_path, capsys):
    file = tmp_path / "table.py"
    flags = starts.small(rounds=1, lr=1e15)
    file.write_text(
        f"from dpfl_mpi.settings import Run\nRUNS = [Run(method='fedavg', finetune_epochs=e, **{flags!r}) for e in (1, 0)]\n"
    )
    assert sweep.main([str(file), f"--results={tmp_path}"]) == 1
    out = capsys.readouterr().out
    assert "which it goes on from, failed" in out and "1 failed, 1 missing of 2" in out


def test_on_slurm_a_tuned_run_waits_for_its_base(tmp_path, slurm, capsys):
    file = tmp_path / "table.py"
    file.write_text(
        "from dpfl_mpi.settings import Run\nRUNS = [Run(method='fedavg', finetune_epochs=e, seed=s) for s in (1, 2) for e in (0, 2)]\n"
    )
    (slurm / "sbatch").write_text(
        f'#!/bin/sh\nn=$(ls {slurm} | grep -c script); cp "$1" {slurm}/script$n; echo "Submitted batch job 4$n"\n'
    )
    (slurm / "queue").write_text("")
    assert sweep.main([str(file), "--cluster", "slurm", f"--results={tmp_path}"]) == 0
    assert "submitted 2 jobs as array 40 and 2 that wait for others" in capsys.readouterr().out
    scripts = [path.read_text() for path in sorted(slurm.glob("script*"))]
    waits = [re.findall(r"--(?:dependency|kill-on-invalid-dep)=(\S+)", text) for text in scripts]
    assert waits == [[], ["afterok:40_0", "yes"], ["afterok:40_1", "yes"]]


def test_on_slurm_a_tuned_run_does_not_wait_for_a_job_that_is_gone(tmp_path, slurm, monkeypatch):
    """The base's job failed and its Run was then finished by hand: Slurm would cancel what waits for that job."""
    fields = starts.small(method="fedavg")
    base = Run(**fields).resolve().path(tmp_path)
    known.Submission("slurm", {base.name: "39_0"}).remember(new_sweep(tmp_path))
    starts.here(base, fields)
    monkeypatch.setattr(known, "BLIND_S", 0)
    (slurm / "queue").write_text("41\n")
    file = tmp_path / "table.py"
    file.write_text(f"from dpfl_mpi.settings import Run\nRUNS = [Run(**{fields}, finetune_epochs=e) for e in (0, 1)]\n")
    assert sweep.main([str(file), "--cluster", "slurm", f"--results={tmp_path}"]) == 0
    assert "--dependency" not in (slurm / "script").read_text()


def new_sweep(results: Path) -> Path:
    """Make the folder of a sweep's submission."""
    folder = results / "sweeps" / "1"
    folder.mkdir(parents=True)
    return folder


# Slurm -------------------------------------------------------------------------------------------------------------------
def test_a_percent_sign_in_the_folder_is_refused_on_slurm(tmp_path, slurm, capsys):
    words = ["--seeds", "1", *rest(tmp_path)[:-1], f"--results={tmp_path}/100%j"]
    assert sweep.main([*words, "--cluster", "slurm"]) == 2
    assert "Slurm replaces % in the names of logs" in capsys.readouterr().err
    assert not (slurm / "script").exists() and not list(tmp_path.glob("100*"))
    assert sweep.main([*words, "--list"]) == 0


def test_a_short_job_is_warned_half_way_and_the_site_is_sourced(tmp_path, slurm, capsys, monkeypatch):
    (tmp_path / "slurm" / "site.sh").touch()
    monkeypatch.chdir(tmp_path)
    for time_limit, warning in (("1", 30), ("3", 90), ("4", 120), ("1-00:00:00", 120)):
        words = ["--seeds", "1", "--cluster", "slurm", "--dry_run", "--time", time_limit]
        assert sweep.main([*words, f"--results={tmp_path}"]) == 0
        out = capsys.readouterr().out
        assert f"--signal=USR2@{warning}\n" in out
        assert f"\n. {tmp_path}/slurm/site.sh\nexport OMP_NUM_THREADS=1\n" in out


def test_a_slurm_run_that_left_in_order_is_requeued(slurm, monkeypatch):
    """A rank that ends with 75 before Slurm's warning came; not where the job was cancelled, and by the first rank alone."""
    from dpfl_mpi import __main__

    monkeypatch.setattr(__main__, "main", lambda *_: sys.exit(75))
    (slurm / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {slurm}/asked\n')
    for state, rank in (("CANCELLED", "0"), ("RUNNING", "1"), ("RUNNING", "0")):
        (slurm / "queue").write_text(f"{state}\n")
        monkeypatch.setenv("SLURM_PROCID", rank)
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        with pytest.raises(SystemExit, match="75"):
            jobs.compute([])
        assert (slurm / "asked").exists() == (state == "RUNNING" and rank == "0")
    assert (slurm / "asked").read_text() == "requeue 17\n"
