"""Sweeps on a fake Slurm: what sbatch gets, what becomes of the jobs, and what a job does."""

import re
import shlex
import sys

import pytest
import starts
from launch import ended
from starts import base_and_tuned, lines, runs_file, script, submitted
from submitit.core.utils import DelayedSubmission

from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Run
from dpfl_mpi.survival import signals
from dpfl_mpi.sweep import __main__ as sweep
from dpfl_mpi.sweep import entries
from dpfl_mpi.sweep.slurm import compute

INVALID = "Batch job submission failed: Invalid name"
REFUSAL = f"sbatch: error: invalid partition specified: typo\nsbatch: error: {INVALID}"
ON_SLURM = ("--cluster", "slurm")


def test_what_sbatch_would_get(tmp_path, swept, monkeypatch):
    """A dry run needs no Slurm, as on a laptop; to submit is refused there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    words = """--cluster slurm --seeds 1,2,3 --sbatch partition=long --sbatch account=me
        --max_parallel 2 --nodes 2 --ranks 4 --cpus 2 --gpus 1 --time 1440 --sbatch qos=low
        --sbatch exclusive"""
    out = swept(*words.split(), "--dry_run").out
    options = """--array=0-2%2 --partition=long --account=me --requeue --open-mode=append --nodes=2
        --ntasks-per-node=4 --cpus-per-task=2 --gpus-per-node=1 --time=1440 --qos=low --exclusive"""
    lacking = [option for option in options.split() if f"#SBATCH {option}\n" not in out]
    assert lacking == []
    assert "srun" not in out  # the launcher calls it
    assert out.count("# task: python -m dpfl_mpi --") == 3
    assert 'error: --cluster is slurm: Could not detect "srun"' in swept(*words.split()).err
    assert not list(tmp_path.glob("sweeps/*/*"))


def test_a_short_job_is_warned_half_way_and_the_site_is_sourced(tmp_path, swept, monkeypatch):
    folder = tmp_path / "my dir"
    (folder / "slurm").mkdir(parents=True)
    (folder / "slurm" / "site.sh").write_text("SITE=mine\n")
    monkeypatch.chdir(folder)
    for time_limit, warning in (("1", 30), ("3", 90), ("4", 120), ("1440", 120)):
        out = swept(*ON_SLURM, "--seeds", "1", "--dry_run", "--time", time_limit).out
        assert f"--signal=USR2@{warning}\n" in out
        (line,) = re.findall(r"^(.*site\.sh.*)$", out, re.M)
    shell = ended("sh", "-c", f"{line}\necho $SITE", cwd=tmp_path)
    assert shell.stdout == "mine\n", shell.stderr


def test_what_is_shown_is_submitted_without_a_percent_sign(tmp_path, fakes, said, swept):
    words = ["--seeds", "1", *starts.of_sweep(tmp_path / "100%j")]
    assert "Slurm replaces % in the names of logs" in said(sweep.main, *words, *ON_SLURM, code=2)
    assert not (fakes / "script").exists() and not list(tmp_path.glob("100*"))
    assert sweep.main([*words, "--list"]) == 0
    shown = swept(*ON_SLURM, "--seeds", "1,2", "--dry_run").out
    assert not (fakes / "script").exists()
    assert swept(*ON_SLURM, "--seeds", "1,2").code == 0
    (folder,) = tmp_path.glob("sweeps/*")
    text = (fakes / "script").read_text().replace(str(folder), "FOLDER")
    assert shown.startswith(text) and shown.count(" --grace=100.0\n") == 2
    shown = swept(*ON_SLURM, base_and_tuned(tmp_path / "table.py"), "--dry_run").out
    assert "--array" not in shown  # a job, and one that waits for it
    assert shown.count(" --save_models ") == 1


@pytest.mark.parametrize(("text", "sentence"), [
    (f"echo {shlex.quote(REFUSAL)} >&2; exit 1", f"Slurm refuses the jobs: {INVALID}"),
    ("printf 'sbatch: unknown --x\\nTry \"sbatch --help\"\\n' >&2; exit 1", "jobs: unknown --x"),
    ("exit 1", "sbatch does not say why"),
    ("echo what", "manually if needed)"),
])  # fmt: skip
def test_a_refusal_of_sbatch_is_one_sentence(tmp_path, swept, fakes, text, sentence):
    script(fakes / "sbatch", text)
    for seeds in ("1", "1,2"):  # a job, an array
        done = swept(*ON_SLURM, "--seeds", seeds)
        assert done.code == 2 and done.err.count("\n") == 1
        assert done.err.endswith(f"{sentence}\n")
    assert not list(tmp_path.glob("sweeps/*/jobs.json"))


def test_a_refusal_of_a_later_job_says_what_was_submitted(tmp_path, swept, fakes):
    refuse = f"[ -e {fakes}/once ] && echo {shlex.quote(REFUSAL)} >&2 && exit 1; touch {fakes}/once"
    script(fakes / "sbatch", f'{refuse}; echo "Submitted batch job 41"')
    done = swept(base_and_tuned(tmp_path / "t.py", **starts.small()), *ON_SLURM)
    assert done.code == 2
    assert done.err.endswith("submission failed: Invalid name; the 1 before stay submitted\n")
    (file,) = tmp_path.glob("sweeps/*/jobs.json")
    assert list(entries.read_submission(file).jobs.values()) == ["41"]


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))  # neither the fake squeue nor an installed one
        copied = swept(*words, "--list")  # results that were copied from the cluster
    assert (
        copied.code == 1 and "2 failed of 2" in copied.out and "its job left no log" in copied.out
    )
    assert copied.err == "warning: there is no squeue here; jobs of Slurm count as ended\n"
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
    """Its own error, although Slurm prints more after it; or that its result was damaged since."""
    late = "SIGUSR2: round 3 would outlast --grace 100, stopped at once"
    error = f"{late}; {signals.STALLED_TEXT}"
    folder = submitted(tmp_path, starts.small(seed=1), "39")
    path = Run(**starts.small(seed=1)).resolve().path(tmp_path)
    log = folder / "39_0_log.err"
    log.write_text(error + "\nsrun: error: n1: task 0: Exited\n" * 8)
    listed = swept("--seeds", "1", "--list")
    assert listed.code == 1
    assert listed.out.endswith(f" failed (job 39, --retry submits it again):\n{error}\n")
    (folder / "39_0_log.out").write_text("  test accuracy        97.30 %\n")
    log.write_text("KeyError: 'mine'\nsrun: Job step aborted: waiting\n")
    shown = "):\n  test accuracy        97.30 %\nKeyError: 'mine'\n"
    assert swept("--seeds", "1", "--list").out.endswith(shown)
    # one that stopped in order goes on with the same command
    log.write_text(f"stopped after round 2 of 3 (SIGUSR1); the same command {signals.GOES_ON}\n")
    listed = swept("--seeds", "1", "--list")
    assert listed.code == 0 and "1 missing of 1" in listed.out
    log.write_text("KeyError: 'mine'\n")
    path.touch()
    listed = swept("--seeds", "1", "--list")
    assert listed.code == 1 and "97.30" not in listed.out
    assert f"error: {path} is not a result of dpfl_mpi, or it is damaged" in listed.out
    assert listed.out.endswith("; move it away first\n")


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
    changes = re.findall(r"^\d\d:\d\d:\d\d  (\S+)  (\w+)", watched.out, re.M)
    names = [run.path(tmp_path).stem for run in runs]
    assert changes == [(names[0], "finished"), (names[1], "failed")]
    assert watched.code == 1 and "1 failed, 1 finished of 2" in watched.out
    assert set(slept) == {entries.ASK_S}


def test_a_tuned_run_waits_for_its_base(tmp_path, fakes, said):
    count = f"n=$(ls {fakes} | grep -c script)"
    script(fakes / "sbatch", f'{count}; cp "$1" {fakes}/script$n; echo "Submitted batch job 4$n"')
    fields = [{"method": "fedavg", "finetune_epochs": e, "seed": s} for s in (1, 2) for e in (0, 2)]
    file = runs_file(tmp_path / "table.py", *fields)
    out = said(sweep.main, file, *ON_SLURM, f"--results={tmp_path}")
    assert "submitted 2 jobs as array 40 and 2 that wait for others" in out
    scripts = [path.read_text() for path in sorted(fakes.glob("script*"))]
    waits = [re.findall(r"--(?:dependency|kill-on-invalid-dep)=(\S+)", text) for text in scripts]
    assert waits == [[], ["afterok:40_0", "yes"], ["afterok:40_1", "yes"]]


def test_a_tuned_run_does_not_wait_for_a_job_that_is_gone(tmp_path, swept, fakes, no_blind_time):
    """The base's job failed and its Run was finished by hand: Slurm would cancel what waits."""
    fields = starts.small(method="fedavg")
    submitted(tmp_path, fields, "39_0")
    starts.here(Run(**fields).resolve().path(tmp_path), fields)
    (fakes / "queue").write_text("41\n")
    done = swept(base_and_tuned(tmp_path / "table.py", **starts.small()), *ON_SLURM)
    assert done.code == 0 and "submitted job 41; logs in" in done.out
    assert "--dependency" not in (fakes / "script").read_text()


SRUN = """
case "$*" in
--mpi=pmix" "*" -c "*) echo "world of 2"; echo "world of 2"; exit ;;
*" -c "*) exit 1 ;;
esac
echo "$OMP_NUM_THREADS $*" > {folder}/started
exit {code}"""


@pytest.mark.parametrize(("code", "state", "asked"), [
    (75, "RUNNING", ["requeue 41_1"]),
    (75, "CANCELLED", []),
    (76, "RUNNING", []),
    (2, "RUNNING", []),
    (0, "RUNNING", []),
])  # fmt: skip
def test_a_job_starts_the_ranks_of_its_run(tmp_path, swept, fakes, code, state, asked):
    """As the last task of an array, which has the array's own number; it brings no seed."""
    assert swept(*ON_SLURM, "--seeds", "42", "--grace", "7").code == 0
    (pickled,) = tmp_path.glob("sweeps/*/41_submitted.pkl")
    submission = DelayedSubmission.load(pickled)
    assert submission.function is compute
    script(fakes / "squeue", f'[ "$3" != 41_1 ] || echo {state}')
    script(fakes / "srun", SRUN.format(folder=fakes, code=code))
    job = {"JOB_ID": "41", "ARRAY_JOB_ID": "41", "ARRAY_TASK_ID": "1", "NTASKS": "2"}
    env = {f"SLURM_{name}": value for name, value in (job | {"CPUS_PER_TASK": "3"}).items()}
    load = "from submitit.core.utils import DelayedSubmission"
    program = f"{load}; DelayedSubmission.load({str(pickled)!r}).result()"
    done = ended(sys.executable, "-c", program, **env)
    assert done.returncode == code and done.stderr == ""
    launch = "--mpi=pmix --kill-on-bad-exit=1 -n 2"
    flags = shlex.join(submission.args[0])
    assert "--grace=7.0" in flags and "--seed" not in flags
    assert lines(fakes / "started") == [f"3 {launch} {sys.executable} -m dpfl_mpi {flags}"]
    assert lines(fakes / "asked") == asked
