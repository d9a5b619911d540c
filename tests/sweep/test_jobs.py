"""Sweeps on Slurm, which is faked: what sbatch gets, what becomes of the jobs, and what a rank does at its end."""

import re
import shlex
import sys
from types import SimpleNamespace

import pytest
import starts
from launch import ended
from starts import base_and_tuned, lines, runs_file, script, submitted
from submitit.core.utils import DelayedSubmission

from dpfl_mpi import __main__
from dpfl_mpi.mpi import slurm
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Run
from dpfl_mpi.survival import signals
from dpfl_mpi.sweep import __main__ as sweep
from dpfl_mpi.sweep import entries
from dpfl_mpi.sweep import slurm as jobs

REFUSAL = "sbatch: error: invalid partition specified: typo\nsbatch: error: Batch job submission failed: Invalid name"
ON_SLURM = ("--cluster", "slurm")


# what sbatch gets --------------------------------------------------------------------------------------------------------
def test_what_sbatch_would_get(tmp_path, swept, monkeypatch):
    """A dry run needs no Slurm, as on a laptop; to submit is refused there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    words = "--seeds 1,2,3 --slurm_partition long --account me --nodes 2 --ranks 4 --cpus 2 --gpus 1 --time 1-00:00:00"
    words += " --max_parallel 2 --sbatch qos=low --sbatch exclusive --cluster slurm"
    out = swept(*words.split(), "--dry_run").out
    lines = "--array=0-2%2 --partition=long --account=me --nodes=2 --ntasks-per-node=4 --cpus-per-task=2"
    for line in f"{lines} --gpus-per-node=1 --time=1440 --qos=low --exclusive --requeue --open-mode=append".split():
        assert f"#SBATCH {line}\n" in out, line
    assert "--mpi=pmi2" in out and "OMP_NUM_THREADS=2" in out
    assert out.count("# task: python -m dpfl_mpi --") == 3
    assert 'error: --cluster is slurm: Could not detect "srun"' in swept(*words.split()).err
    assert not list(tmp_path.glob("sweeps/*/*"))


def test_what_is_shown_is_what_is_submitted(tmp_path, swept, fakes):
    shown = swept(*ON_SLURM, "--seeds", "1,2", "--dry_run").out
    assert not (fakes / "script").exists()
    assert swept(*ON_SLURM, "--seeds", "1,2").code == 0
    (folder,) = tmp_path.glob("sweeps/*")
    text = (fakes / "script").read_text().replace(str(folder), "FOLDER")
    assert shown.startswith(text) and shown.count(" --grace=100.0\n") == 2
    shown = swept(*ON_SLURM, base_and_tuned(tmp_path / "table.py"), "--dry_run").out
    assert "--array" not in shown and shown.count(" --save_models ") == 1  # a job, and one that waits for it


def test_a_short_job_is_warned_half_way_and_the_site_is_sourced(tmp_path, swept, monkeypatch):
    """In a folder with a blank in its name, too."""
    folder = tmp_path / "my dir"
    (folder / "slurm").mkdir(parents=True)
    (folder / "slurm" / "site.sh").write_text("SITE=mine\n")
    monkeypatch.chdir(folder)
    for time_limit, warning in (("1", 30), ("3", 90), ("4", 120), ("1-00:00:00", 120)):
        out = swept(*ON_SLURM, "--seeds", "1", "--dry_run", "--time", time_limit).out
        assert f"--signal=USR2@{warning}\n" in out
        (line,) = re.findall(r"^(.*site\.sh.*)\nexport OMP_NUM_THREADS=1$", out, re.M)
    shell = ended("sh", "-c", f"{line}\necho $SITE", cwd=tmp_path)
    assert shell.stdout == "mine\n", shell.stderr


def test_a_requeued_jobs_run_is_a_step_of_another_number(tmp_path, swept, fakes):
    """MPICH's shared memory has the name of job and step, and stays where a start was killed."""
    script(fakes / "srun", f'echo "$@" >> {fakes}/steps')
    out = swept(*ON_SLURM, "--seeds", "1", "--dry_run").out.splitlines()
    begin = next(i for i, line in enumerate(out) if line.startswith("export OMP_NUM_THREADS="))
    (end,) = (i for i, line in enumerate(out) if "submitit.core._submit" in line)
    for restarts, empty in (("", 0), ("1", 1), ("2", 2), ("13", 3)):
        (fakes / "steps").unlink(missing_ok=True)
        done = ended("bash", "-e", "-c", "\n".join(out[begin : end + 1]), SLURM_RESTART_COUNT=restarts)
        assert done.returncode == 0, done.stderr
        steps = [step.split()[-1] for step in lines(fakes / "steps")]
        assert steps[:-1] == ["true"] * empty and steps[-1] != "true"


@pytest.mark.parametrize(("more", "grace"), [((), "100.0"), (("--grace", "7"), "7.0")])
def test_a_job_has_most_of_its_warning_to_end_the_round(tmp_path, swept, fakes, more, grace):
    """What is pickled is a function that can be imported, and strings; a job that is warned too early is the same again."""
    swept(*ON_SLURM, "--seeds", "1", *more)
    (pickled,) = tmp_path.glob("sweeps/*/41_submitted.pkl")
    held = DelayedSubmission.load(pickled)
    (flags,) = held.args
    assert [flag for flag in flags if flag.startswith("--grace")] == [f"--grace={grace}"]
    same = jobs.again(flags)
    assert held.function is same.function is jobs.compute and same.args == (flags,)
    assert jobs.compute.checkpoint is jobs.again


def test_a_percent_sign_in_the_folder_is_refused(tmp_path, fakes, said):
    words = ["--seeds", "1", *starts.of_sweep(tmp_path / "100%j")]
    assert "Slurm replaces % in the names of logs" in said(sweep.main, *words, *ON_SLURM, code=2)
    assert not (fakes / "script").exists() and not list(tmp_path.glob("100*"))
    assert sweep.main([*words, "--list"]) == 0


@pytest.mark.parametrize(("text", "said"), [
    (f"echo {shlex.quote(REFUSAL)} >&2; exit 1", "Slurm refuses the jobs: Batch job submission failed: Invalid name"),
    ("printf 'sbatch: unknown --x\\nTry \"sbatch --help\"\\n' >&2; exit 1", "Slurm refuses the jobs: unknown --x"),
    ("exit 1", "sbatch does not say why"),
    ("echo what", "manually if needed)"),
])  # fmt: skip
def test_a_refusal_of_sbatch_is_one_sentence(tmp_path, swept, fakes, text, said):
    script(fakes / "sbatch", text)
    for seeds in ("1", "1,2"):  # a job, an array
        done = swept(*ON_SLURM, "--seeds", seeds)
        assert done.code == 2 and done.err.count("\n") == 1 and done.err.endswith(f"{said}\n")
    assert not list(tmp_path.glob("sweeps/*/jobs.json"))


def test_a_refusal_of_a_later_job_says_what_was_submitted(tmp_path, swept, fakes):
    refuse = f"[ -e {fakes}/once ] && echo {shlex.quote(REFUSAL)} >&2 && exit 1; touch {fakes}/once"
    script(fakes / "sbatch", f'{refuse}; echo "Submitted batch job 41"')
    done = swept(base_and_tuned(tmp_path / "t.py", **starts.small()), *ON_SLURM)
    assert done.code == 2
    assert done.err.endswith("submission failed: Invalid name; the 1 before stay submitted\n")
    (file,) = tmp_path.glob("sweeps/*/jobs.json")
    assert list(entries.read_submission(file).jobs.values()) == ["41"]


# what becomes of the jobs ------------------------------------------------------------------------------------------------
def test_an_array_is_submitted_once_and_failures_are_named(tmp_path, swept, fakes, no_blind_time):
    words = ["--seeds", "1,2", *ON_SLURM]
    (fakes / "queue").write_text("41 41_0\n42 41_1\n")
    assert "2 waiting of 2" in swept(*words).out
    (fakes / "script").unlink()
    assert swept(*words).code == 0  # both are in the queue
    assert not (fakes / "script").exists()
    (fakes / "broken").touch()
    silent = swept(*words, "--retry")
    assert silent.code == 2 and "error: squeue does not say which jobs are alive" in silent.err
    (fakes / "broken").unlink()
    (fakes / "queue").write_text("")
    (folder,) = tmp_path.glob("sweeps/*")
    (folder / "41_1_0_log.err").write_text("line\n" * 50 + "error: it broke\n")
    listed = swept(*words, "--list")
    assert listed.code == 1 and "2 failed of 2" in listed.out
    assert "job 41_1, --retry submits it again" in listed.out and "error: it broke" in listed.out
    assert swept(*words).code == 1
    assert not (fakes / "script").exists()  # only on request
    swept(*words, "--retry")
    assert (fakes / "script").exists()
    assert len(list(tmp_path.glob("sweeps/*/jobs.json"))) == 2


def test_what_is_said_of_a_failed_run(tmp_path, swept, fakes, no_blind_time):
    """That it gets no further: what Slurm says of the ranks that it ends comes after it, and is longer than what is shown of a log.

    Or that its result was damaged since, and not that it finished.
    """
    said = f"SIGUSR2: round 3 would outlast --grace 100, stopped at once; {signals.STALLED_TEXT}"
    folder, path = submitted(tmp_path, starts.small(seed=1), "39"), Run(**starts.small(seed=1)).resolve().path(tmp_path)
    (log := folder / "39_0_log.err").write_text(said + "\nsrun: error: n1: task 0: Exited\n" * 8)
    listed = swept("--seeds", "1", "--list")
    assert listed.code == 1 and listed.out.endswith(f" failed (job 39, --retry submits it again):\n{said}\n")
    log.rename(folder / "39_0_log.out").write_text("  test accuracy        97.30 %\n")
    (folder / "39_1_log.err").write_text("KeyError: 'mine'\nsrun: Job step aborted: waiting\n")  # of another rank
    assert swept("--seeds", "1", "--list").out.endswith("):\n  test accuracy        97.30 %\nKeyError: 'mine'\n")
    path.touch()
    listed = swept("--seeds", "1", "--list")
    assert listed.code == 1 and f"error: {path} is not a result of dpfl_mpi, or it is damaged" in listed.out
    assert listed.out.endswith("; move it away first\n") and "97.30" not in listed.out


def test_watching_ends_with_the_last_job(tmp_path, swept, fakes, no_blind_time, pauses):
    words = ["--seeds", "1,2", *ON_SLURM]
    (fakes / "queue").write_text("41 41_0\n42 41_1\n")
    assert swept(*words).code == 0
    runs = [Run(**starts.small(seed=seed)).resolve() for seed in (1, 2)]
    steps = iter([
        lambda: (fakes / "broken").touch(),  # squeue does not answer: what it said last holds
        lambda: (fakes / "broken").unlink(),
        lambda: Recorder(runs[0].path(tmp_path), runs[0], {}, {"time": "now"}).abandon(),
        lambda: starts.here(runs[0].path(tmp_path), starts.small(seed=1), fresh=True),
        lambda: (fakes / "queue").write_text(""),
    ])  # fmt: skip
    slept = pauses(lambda seconds: next(steps)())
    watched = swept(*words, "--list", "--watch")
    changes = [line.split()[1:3] for line in watched.out.splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]
    assert changes == [[runs[0].path(tmp_path).stem, "finished"], [runs[1].path(tmp_path).stem, "failed"]]
    assert watched.code == 1 and "1 failed, 1 finished of 2" in watched.out
    assert set(slept) == {entries.ASK_S}


def test_a_tuned_run_waits_for_its_base(tmp_path, fakes, said):
    count = f"n=$(ls {fakes} | grep -c script)"
    script(fakes / "sbatch", f'{count}; cp "$1" {fakes}/script$n; echo "Submitted batch job 4$n"')
    fields = [{"method": "fedavg", "finetune_epochs": e, "seed": s} for s in (1, 2) for e in (0, 2)]
    told = said(sweep.main, runs_file(tmp_path / "table.py", *fields), *ON_SLURM, f"--results={tmp_path}")
    assert "submitted 2 jobs as array 40 and 2 that wait for others" in told
    scripts = [path.read_text() for path in sorted(fakes.glob("script*"))]
    waits = [re.findall(r"--(?:dependency|kill-on-invalid-dep)=(\S+)", text) for text in scripts]
    assert waits == [[], ["afterok:40_0", "yes"], ["afterok:40_1", "yes"]]


def test_a_tuned_run_does_not_wait_for_a_job_that_is_gone(tmp_path, swept, fakes, no_blind_time):
    """The base's job failed and its Run was then finished by hand: Slurm would cancel what waits for that job."""
    fields = starts.small(method="fedavg")
    submitted(tmp_path, fields, "39_0")
    starts.here(Run(**fields).resolve().path(tmp_path), fields)
    (fakes / "queue").write_text("41\n")
    done = swept(base_and_tuned(tmp_path / "table.py", **starts.small()), *ON_SLURM)
    assert done.code == 0 and "submitted job 41; logs in" in done.out
    assert "--dependency" not in (fakes / "script").read_text()


# the end of a rank -------------------------------------------------------------------------------------------------------
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
    done = ended(sys.executable, "-c", WARNED.format(folder=str(tmp_path)), SLURM_JOB_ID="17")
    assert (done.stdout, done.returncode) == ("SIGUSR2\n", 0), done.stderr


@pytest.mark.parametrize(("code", "rank", "state", "asked"), [
    (signals.REQUEUE, 0, "RUNNING", ["requeue 41_1"]),
    (signals.REQUEUE, 0, "CANCELLED", []),
    (signals.REQUEUE, 1, "RUNNING", []),  # root does
    (signals.STALLED, 0, "RUNNING", []),
    (1, 0, "RUNNING", []),
])  # fmt: skip
def test_a_run_that_leaves_with_75_requeues_its_job(fakes, monkeypatch, code, rank, state, asked):
    """In order, or before its ranks are ended: nothing runs after an abort.

    The last task of an array has the array's number, by which all of its tasks would be requeued.
    """
    ends, slept = [], []  # (exit code of all ranks, what Slurm was asked before)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=slept.append))
    for name, value in {"PROCID": rank, "JOB_ID": 41, "ARRAY_JOB_ID": 41, "ARRAY_TASK_ID": 1}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    script(fakes / "squeue", f'[ "$3" != 41_1 ] || echo {state}')
    monkeypatch.setattr(__main__, "main", lambda _, before: (before(code), ends.append((code, lines(fakes / "asked")))))
    assert jobs.compute([]) == 0
    assert ends == [(code, asked)]
    assert slept == ([jobs.ROOT_S] if rank and code == signals.REQUEUE else [])
    monkeypatch.setattr(__main__, "main", lambda *_: sys.exit(code))
    with pytest.raises(SystemExit, match=str(code)):
        jobs.compute([])
    assert lines(fakes / "asked") == asked * 2


def test_a_slurm_that_is_silent_at_the_end_does_not_keep_the_ranks(fakes, monkeypatch, said):
    monkeypatch.setattr(__main__, "main", lambda *_: sys.exit(signals.REQUEUE))
    monkeypatch.setattr(slurm, "ANSWER_S", 0.2)
    script(fakes / "squeue", "exec sleep 20")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert said(lambda _: jobs.compute([]), code=75).startswith("error: job 17 could not be requeued (")
    assert not (fakes / "asked").exists()
