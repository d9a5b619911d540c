"""Sweeps where something fails: a full disk, a silent Slurm, sbatch's refusals, warnings that come too early. Slurm and mpirun are faked."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import starts
import tiny_result

from dpfl_mpi import __main__
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.survival import signals
from dpfl_mpi.survival.lock import born
from dpfl_mpi.sweep import __main__ as sweep
from dpfl_mpi.sweep import here, jobs, known, wanted

REFUSAL = "sbatch: error: invalid partition specified: typo\nsbatch: error: Batch job submission failed: Invalid name"


def script(path: Path, text: str) -> None:
    """Write a shell script that can be started."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


@pytest.fixture
def bin_folder(tmp_path, monkeypatch) -> Path:
    """The first folder of the path: a Slurm that takes a job as number 41, and an mpirun that computes until it is asked to leave."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script(folder / "sbatch", 'echo "Submitted batch job 41"')
    script(folder / "srun", "exit 1")
    script(folder / "squeue", f"test ! -e {folder}/broken && cat {folder}/queue")
    script(folder / "scontrol", f'echo "$@" >> {folder}/asked')
    script(
        folder / "mpirun",
        f'trap "echo $$ >> {folder}/left; exit 75" USR1; echo "mpirun $*" >> {folder}/up\n'
        f"for i in $(seq 600); do [ ! -e {folder}/end ] || exit 0; sleep 0.1; done",
    )
    (folder / "queue").write_text("")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def lines(path: Path) -> list[str]:
    """Return the lines of a file, none where it is not there."""
    return path.read_text().splitlines() if path.exists() else []


def words(results: Path, *more: str, **changes: object) -> list[str]:
    """Return the command line of a sweep over small Runs."""
    return [*more, *starts.command(results, starts.small(**changes))[4:], f"--results={results}"]


def table(file: Path, **changes: object) -> Path:
    """Write a file whose RUNS are a base and the Run that is tuned from it."""
    flags = starts.small(method="fedavg", **changes)
    file.write_text(f"from dpfl_mpi.settings import Run\nRUNS = [Run(**{flags}, finetune_epochs=e) for e in (0, 1)]\n")
    return file


def submitted(results: Path, run: Run, job: str) -> None:
    """Note that a Run was submitted to Slurm, long ago."""
    folder = results / "sweeps" / "1"
    folder.mkdir(parents=True)
    known.Submission("slurm", {run.resolve().path(results).name: job}).remember(folder)


# a sweep of this machine that an error ends ------------------------------------------------------------------------------


def test_on_a_full_disk_the_runs_are_asked_to_leave(tmp_path, bin_folder, monkeypatch, capsys):
    """The second Run is begun, and cannot be noted any more: neither goes on unattended, and one sentence says why."""
    real, notes = known.replacing, []

    @contextlib.contextmanager
    def replacing(path: Path) -> Iterator[Path]:
        notes.append(path)
        if len(notes) > 1:
            starts.wait_for(lambda: len(lines(bin_folder / "up")) == 2, timeout=30)
            raise OSError(errno.ENOSPC, "full", str(path))
        with real(path) as part:
            yield part

    monkeypatch.setattr(known, "replacing", replacing)
    assert sweep.main(words(tmp_path, "--seeds", "1,2", "--max_parallel", "2")) == 2
    assert len(set(lines(bin_folder / "left"))) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert err.endswith("jobs.json, the list of jobs of this sweep, cannot be written: No space left on device\n")


def test_a_log_that_cannot_be_opened_leaves_no_run_behind(tmp_path, bin_folder, monkeypatch, capsys):
    make = here.new_folder
    second = Run(**starts.small(seed=2)).resolve().path(tmp_path).stem

    def blocked(job: Any) -> Path:
        folder = make(job)
        (folder / f"{second}.log").mkdir()
        return folder

    def flags_of(k: known.Known, *more: Any) -> list[str]:
        if k.path.stem == second:  # the first one is up, and hears
            starts.wait_for(lambda: lines(bin_folder / "up"), timeout=30)
        return jobs.flags_of(k, *more)

    monkeypatch.setattr(here, "new_folder", blocked)
    monkeypatch.setattr(here, "flags_of", flags_of)
    assert sweep.main(words(tmp_path, "--seeds", "1,2", "--max_parallel", "2")) == 2
    assert capsys.readouterr().err == "error: mpirun cannot be started: Is a directory\n"
    (pid,) = lines(bin_folder / "left")
    assert not born(int(pid))
    (file,) = tmp_path.glob("sweeps/*/jobs.json")
    assert len(json.loads(file.read_text())["stopped"]) == 1  # so that the same command goes on


def test_a_silent_slurm_does_not_end_a_sweep_of_this_machine(tmp_path, bin_folder, capsys):
    """One Run of the list waits on Slurm; squeue fails while the other is computed here, and to the end."""
    submitted(tmp_path, Run(**starts.small(seed=1)), "39")
    entry = tmp_path / "sweeps/1/jobs.json"
    entry.write_text(json.dumps(json.loads(entry.read_text()) | {"submitted": 1.0}))
    (bin_folder / "queue").write_text("39 39_N/A\n")
    script(bin_folder / "mpirun", f"touch {bin_folder}/broken; sleep 1")
    assert sweep.main(words(tmp_path, "--seeds", "1,2")) == 1
    seen = capsys.readouterr()
    assert "1 failed, 1 waiting of 2" in seen.out and seen.err == ""


@pytest.mark.parametrize("cluster", ["local", "debug"])
def test_a_base_that_fails_on_slurm_meanwhile_is_not_waited_for(tmp_path, bin_folder, monkeypatch, capsys, cluster):
    submitted(tmp_path, Run(**starts.small(method="fedavg")), "39")
    monkeypatch.setattr(known, "BLIND_S", 0)
    (bin_folder / "queue").write_text("39 39_N/A\n")
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        assert sum(pauses) < 5 * known.ASK_S, "it waits for ever"
        (bin_folder / "queue").write_text("")

    monkeypatch.setattr(known, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    monkeypatch.setattr(here, "time", known.time)
    assert sweep.main([str(table(tmp_path / "t.py")), "--cluster", cluster, f"--results={tmp_path}"]) == 1
    out = capsys.readouterr().out
    assert "is not begun: " in out and "which it goes on from, failed\n" in out and "1 failed, 1 missing of 2" in out
    assert sum(pauses) == known.ASK_S and not (bin_folder / "up").exists()


def test_runs_of_this_machine_are_not_bound_to_the_first_cores(tmp_path, bin_folder):
    """Open MPI would put one or two ranks of every mpirun on the same core."""
    (bin_folder / "end").touch()
    sweep.main(words(tmp_path, "--seeds", "1", "--ranks", "2"))
    (line,) = lines(bin_folder / "up")
    assert line.startswith(f"mpirun --bind-to none -n 2 {sys.executable} -m dpfl_mpi ")


@pytest.mark.parametrize(
    ("more", "command"), [((), "the same command"), (("--fresh",), "the same command without --fresh")]
)
def test_an_interrupted_sweep_names_a_command_that_goes_on(tmp_path, monkeypatch, capsys, more, command):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(here, "compute", interrupted)
    assert sweep.main(words(tmp_path, "--seeds", "1", *more)) == 130
    said = "interrupted: the Runs keep a checkpoint each; {} goes on, with --list it says how far they are\n"
    assert capsys.readouterr().err == said.format(command)


def test_tuning_says_a_tie(tmp_path):
    """All values that look alike in the table are named; the best is taken, of equal ones the first."""

    def chosen(**best: float) -> str:
        values, folder = {}, tmp_path / str(best)
        for i, (value, score) in enumerate(best.items()):
            run = Run(dataset="digits", classes_per_client=3, method="local", clients=4, rounds=2, seed=i)
            tiny_result.make(run.path(folder), "local", i, best=(score,) * 4)
            values[value] = [run]
        return wanted.choose(values, Job(results=str(folder)), "ditto.lam=a,b,c").splitlines()[-1]

    assert chosen(a=0.5, b=0.75, c=0.75) == (
        "best by validation: ditto.lam=b (a tie to two digits with c; of equal accuracies the first is taken)"
    )
    assert chosen(a=0.75, b=0.750001, c=0.25).startswith("best by validation: ditto.lam=b (a tie to two digits with a;")
    assert chosen(a=0.5, b=0.75, c=0.25) == "best by validation: ditto.lam=b"


# what is read of a result ------------------------------------------------------------------------------------------------
def test_a_last_write_that_changes_neither_time_nor_size_is_seen(tmp_path, monkeypatch):
    """A file system with coarse times: the table read the file just before its state was set in place."""
    run = Run(**starts.small()).resolve()
    path, now, states = tmp_path / "a.h5", [100.0], ["running", "finished"]
    path.write_text("a result")
    reads: list[str] = []

    @contextlib.contextmanager
    def result(_: Path) -> Iterator[Any]:
        reads.append(states[0])
        yield SimpleNamespace(state=states[0], last_round=3, test_acc=0.5)

    monkeypatch.setattr(known, "Result", result)
    monkeypatch.setattr(known, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]}))
    one = known.Known(run, path)
    assert one.look(set()).state == "stopped"  # it says running, and nobody holds the lock
    states.pop(0)
    now[0] += 0.5
    assert one.look(set()).state == "finished"
    one.look(set())
    assert reads == ["running", "finished"]  # a finished one is read no more
    other = known.Known(run, path)
    states[0] = "running"
    for later in (0.0, 1.9, 0.2, 1.0, 1.0):
        now[0] += later
        other.look(set())
    assert reads[2:] == ["running"] * 3  # nor one that was not written to for two seconds
    os.utime(path, (1, 1))
    other.look(set())
    assert len(reads) == 6


def test_a_result_that_was_damaged_since_says_so_and_not_that_it_finished(tmp_path, bin_folder, monkeypatch, capsys):
    run = Run(**starts.small(seed=1))
    submitted(tmp_path, run, "39")
    monkeypatch.setattr(known, "BLIND_S", 0)
    (tmp_path / "sweeps/1/39_0_log.out").write_text("  test accuracy        97.30 %\n")
    path = run.resolve().path(tmp_path)
    path.touch()
    assert sweep.main(words(tmp_path, "--seeds", "1", "--list")) == 1
    out = capsys.readouterr().out
    assert f"error: {path} is not a result of dpfl_mpi, or it is damaged" in out
    assert out.endswith("; move it away first\n") and "97.30" not in out


# Slurm -------------------------------------------------------------------------------------------------------------------
def test_a_refusal_of_sbatch_is_one_sentence(tmp_path, bin_folder, capfd):
    script(bin_folder / "sbatch", f"echo {shlex.quote(REFUSAL)} >&2; exit 1")
    for seeds in ("1", "1,2"):  # a job, an array
        assert sweep.main(words(tmp_path, "--seeds", seeds, "--cluster", "slurm")) == 2
        said = "error: Slurm refuses the jobs: Batch job submission failed: Invalid name\n"
        assert capfd.readouterr().err == said
    for text, said in (("exit 1", "sbatch does not say why"), ("echo what", "manually if needed)")):
        script(bin_folder / "sbatch", text)
        assert sweep.main(words(tmp_path, "--seeds", "1", "--cluster", "slurm")) == 2
        err = capfd.readouterr().err
        assert err.count("\n") == 1 and err.endswith(f"{said}\n")
    assert not list(tmp_path.glob("sweeps/*/jobs.json"))


def test_a_refusal_of_a_later_job_says_what_was_submitted(tmp_path, bin_folder, capsys):
    refuse = f"[ -e {bin_folder}/once ] && echo {shlex.quote(REFUSAL)} >&2 && exit 1; touch {bin_folder}/once"
    script(bin_folder / "sbatch", f'{refuse}; echo "Submitted batch job 41"')
    assert sweep.main([str(table(tmp_path / "t.py")), "--cluster", "slurm", f"--results={tmp_path}"]) == 2
    assert capsys.readouterr().err.endswith("submission failed: Invalid name; the 1 before stay submitted\n")
    (file,) = tmp_path.glob("sweeps/*/jobs.json")
    assert list(json.loads(file.read_text())["jobs"].values()) == ["41"]


def test_a_blank_in_the_path_of_the_site_file(tmp_path, bin_folder, monkeypatch, capsys):
    folder = tmp_path / "my dir"
    (folder / "slurm").mkdir(parents=True)
    (folder / "slurm" / "site.sh").write_text("SITE=mine\n")
    monkeypatch.chdir(folder)
    assert sweep.main(["--seeds", "1", "--cluster", "slurm", "--dry_run", f"--results={tmp_path}"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "site.sh" in line]
    shell = subprocess.run(["sh", "-c", f"{line}\necho $SITE"], cwd=tmp_path, capture_output=True, text=True)
    assert shell.stdout == "mine\n", shell.stderr


@pytest.mark.parametrize(("more", "grace"), [((), "100.0"), (("--grace", "7"), "7.0")])
def test_a_job_has_most_of_its_warning_to_end_the_round(tmp_path, bin_folder, more, grace):
    from submitit.core.utils import DelayedSubmission

    assert sweep.main(words(tmp_path, "--seeds", "1", "--cluster", "slurm", *more)) == 0
    (pickled,) = tmp_path.glob("sweeps/*/41_submitted.pkl")
    (flags,) = DelayedSubmission.load(pickled).args
    assert [flag for flag in flags if flag.startswith("--grace")] == [f"--grace={grace}"]


def test_a_dry_run_needs_no_slurm(tmp_path, monkeypatch, capsys):
    """On a laptop: the text for sbatch. To submit it is refused as before."""
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = words(tmp_path, "--seeds", "1,2", "--cluster", "slurm")
    assert sweep.main([*asked, "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --array=0-1" in out and out.count("# task: python -m dpfl_mpi ") == 2
    assert sweep.main(asked) == 2
    assert 'error: --cluster is slurm: Could not detect "srun"' in capsys.readouterr().err


def test_a_requeued_jobs_run_is_a_step_of_another_number(tmp_path, bin_folder, capsys):
    """MPICH's shared memory has the name of job and step, and stays where a start was killed."""
    script(bin_folder / "srun", f'echo "$@" >> {bin_folder}/steps')
    assert sweep.main(words(tmp_path, "--seeds", "1", "--cluster", "slurm", "--dry_run")) == 0
    out = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(out) if line.startswith("export OMP_NUM_THREADS="))
    (end,) = (i for i, line in enumerate(out) if "submitit.core._submit" in line)
    for restarts, empty in (("", 0), ("1", 1), ("2", 2), ("13", 3)):
        (bin_folder / "steps").unlink(missing_ok=True)
        env = starts.environment(SLURM_RESTART_COUNT=restarts)
        subprocess.run(["bash", "-e", "-c", "\n".join(out[begin : end + 1])], env=env, check=True, timeout=60)
        steps = [step.split()[-1] for step in lines(bin_folder / "steps")]
        assert steps[:-1] == ["true"] * empty and steps[-1] != "true"


def test_a_run_that_gets_no_further_is_named_with_that_sentence(tmp_path, bin_folder, monkeypatch, capsys):
    """What Slurm says of the ranks that it ends comes after it, and is longer than what is shown of a log."""
    submitted(tmp_path, Run(**starts.small(seed=1)), "39")
    monkeypatch.setattr(known, "BLIND_S", 0)
    said = f"SIGUSR2: round 3 would outlast --grace 100, stopped at once; {signals.STALLED_TEXT}"
    (tmp_path / "sweeps/1/39_0_log.err").write_text(said + "\nsrun: error: n1: task 0: Exited\n" * 8)
    assert sweep.main(words(tmp_path, "--seeds", "1", "--list")) == 1
    assert capsys.readouterr().out.endswith(f" failed (job 39, --retry submits it again):\n{said}\n")


WARNED = """
import os, signal
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment
from dpfl_mpi.survival import signals

SlurmJobEnvironment()._handle_signals(JobPaths({folder!r}, "17"), DelayedSubmission(print))
signals.listen()  # as the Run does, which submitit calls after that
os.kill(os.getpid(), getattr(signal, "SIG" + SlurmJobEnvironment.USR_SIG))
print(signals.Heard.name)
"""


def test_the_warning_of_a_sweeps_job_is_heard_by_the_run_not_by_submitit(tmp_path):
    warned = [sys.executable, "-c", WARNED.format(folder=str(tmp_path))]
    env = starts.environment(SLURM_JOB_ID="17")
    done = subprocess.run(warned, cwd=starts.ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("SIGUSR2\n", 0), done.stderr


class World:
    """A world that notes who ended it, and what was asked of Slurm before."""

    def __init__(self, rank: int, asked: Path):
        self.root, self.asked = rank == 0, asked
        self.ends: list[Any] = []

    def abort(self, code: int, text: str = "") -> None:
        self.ends.append((code, text, lines(self.asked)))


@pytest.mark.parametrize(
    ("code", "rank", "state", "asked"),
    [
        (signals.REQUEUE, 0, "RUNNING", ["requeue 41_1"]),
        (signals.REQUEUE, 0, "CANCELLED", []),
        (signals.REQUEUE, 1, "RUNNING", []),  # root does
        (signals.STALLED, 0, "RUNNING", []),
        (1, 0, "RUNNING", []),
    ],
)
def test_a_round_that_is_cut_requeues_its_job_before_the_ranks_end(
    tmp_path, bin_folder, monkeypatch, code, rank, state, asked
):
    """Nothing runs after an abort. The last task of an array has the array's number, by which all of its tasks would be requeued."""
    world, pauses = World(rank, bin_folder / "asked"), []
    monkeypatch.setattr(__main__, "main", lambda _, before: (before(code), world.abort(code, "said")))
    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=pauses.append))
    for name, value in {"PROCID": rank, "JOB_ID": 41, "ARRAY_JOB_ID": 41, "ARRAY_TASK_ID": 1}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    script(bin_folder / "squeue", f'[ "$3" != 41_1 ] || echo {state}')
    assert jobs.compute([]) == 0
    assert world.ends == [(code, "said", asked)]
    assert pauses == ([jobs.ROOT_S] if rank and code == signals.REQUEUE else [])


def test_a_slurm_that_is_silent_at_the_end_does_not_keep_the_ranks(bin_folder, monkeypatch, capsys):
    monkeypatch.setattr(__main__, "main", lambda *_: sys.exit(signals.REQUEUE))
    monkeypatch.setattr(jobs, "SLURM_S", 0.2)
    script(bin_folder / "squeue", "exec sleep 20")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with pytest.raises(SystemExit, match="75"):
        jobs.compute([])
    assert capsys.readouterr().err.startswith("error: job 17 could not be requeued (")
    assert not (bin_folder / "asked").exists()
