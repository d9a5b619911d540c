"""The launch line, on faked launchers: the first that makes one world of two, or a sentence."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import starts
from launch import ROOT, ended, refused
from starts import lines, open_mpi

from dpfl_mpi.mpi import launcher


@pytest.fixture
def place(tmp_path, terminal, monkeypatch):
    """Return a function that puts fake launchers first, and alone, in the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = launcher.shutil.which
    monkeypatch.setattr(launcher.shutil, "which", lambda name: found(name, path=tmp_path))
    return lambda name, text: starts.script(tmp_path / name, text)


GOOD = "echo 'world of 2'; echo 'world of 2'"
SINGLETONS = "echo 'world of 1'; echo 'world of 1'"


def srun(**kinds: str) -> str:
    """Return a fake srun that offers these --mpi kinds."""
    cases = " ".join(f"--mpi={kind}) {text};;" for kind, text in kinds.items())
    return f"case $1 in --mpi=list) echo {' '.join(kinds)};; {cases} esac"


@pytest.mark.parametrize(("job", "kinds", "line"), [
    ("1", {"pmi2": GOOD, "pmix": "exit 16"}, "srun --mpi=pmi2"),
    ("1", {"pmi2": SINGLETONS, "pmix": GOOD}, "srun --mpi=pmix"),
    ("1", {"pmi2": SINGLETONS, "pmix": "exit 1"}, "mpirun --bind-to none"),
    ("1", {"cray_shasta": GOOD}, "srun --mpi=cray_shasta"),
    ("1", {"pmi2": "exec sleep 60"}, "mpirun --bind-to none"),  # one that hangs is passed over
    (None, {"pmi2": GOOD}, "mpirun"),  # outside Slurm
])  # fmt: skip
def test_inside_slurm_the_truth_is_tried(place, monkeypatch, job, kinds, line):
    if "exec sleep 60" in kinds.values():
        monkeypatch.setattr(launcher, "TRY_S", 1)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_NTASKS", "8")
    place("srun", srun(**kinds))
    place("mpirun", GOOD if job else "exit 1")
    assert " ".join(launcher.find_line()).startswith(line)


@pytest.mark.parametrize(("job", "line"), [
    ("PBS_JOBID", "mpiexec --ppn 4 --depth 3 --cpu-bind depth"),
    ("LSB_JOBID", "jsrun --tasks_per_rs 1 --cpu_per_rs 3"),
    ("FLUX_URI", "flux run --cores-per-task=3"),
])  # fmt: skip
def test_each_batch_system_has_its_launcher(place, tmp_path, monkeypatch, said, job, line):
    """Where that starts single worlds, mpirun is next. Nodes that differ are refused."""
    (tmp_path / "nodes").write_text("n1\n" * 4 + "n2\n" * 4)
    env = {"PBS_NODEFILE": tmp_path / "nodes", "LSB_DJOB_NUMPROC": "8", "OMP_NUM_THREADS": "3"}
    for name, value in (env | {job: "17", "DPFL_RANKS": "8" if job == "FLUX_URI" else ""}).items():
        monkeypatch.setenv(name, str(value))
    place("mpirun", GOOD)
    name, words = line.split(" ", 1)
    for answer, found in ((GOOD, line), (SINGLETONS, "mpirun --bind-to none")):
        place(name, f'case "$*" in "{words} -n 2 "*) {answer};; esac')
        assert " ".join(launcher.find_line()) == found
    place("squeue", f"touch {tmp_path}/asked")
    launcher.requeue()
    assert not (tmp_path / "asked").exists()
    if job == "PBS_JOBID":
        (tmp_path / "nodes").write_text("n1\n" * 4 + "n2\n" * 3)
        text = said(lambda _: launcher.run([]), code=2)
        assert text.startswith("error: this job is heterogeneous; allowed")


def test_no_launcher_and_no_answer_are_a_sentence(place, monkeypatch, said):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    place("mpirun", SINGLETONS)
    refused("no launcher starts one MPI world", launcher.find_line)
    monkeypatch.setattr(sys, "argv", ["launcher"])
    assert said(lambda _: launcher.main(), code=3).count("\n") == 1
    monkeypatch.setattr(launcher, "ANSWER_S", 0.2)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for squeue in ("exec sleep 20", "exit 1"):
        place("squeue", squeue)
        text = said(lambda _: launcher.requeue() or 1, code=1)
        assert text.startswith("error: job 17 could not be requeued (") and text.count("\n") == 1


def test_the_real_mpirun_makes_a_world(terminal):
    assert launcher.works(["mpirun"], 2)


def in_shm(size: str, ranks: int, *words: object):
    """Return the finished `mpirun -n RANKS python WORDS` with a /dev/shm of this size, or skip."""
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    if ended(*(own := ["unshare", "-rm", "sh", "-c"]), mount).returncode:
        pytest.skip("a user may not mount a file system of its own here")
    return ended(*own, f'{mount} && exec "$@"', "sh", "mpirun", "-n", ranks, sys.executable, *words)


@pytest.mark.skipif(open_mpi(), reason="Open MPI does without /dev/shm")
@pytest.mark.parametrize(("size", "ranks"), [("16m", 4), ("22m", 4), ("2m", 1)])
def test_mpich_starts_in_a_small_shm(size, ranks):
    """With UCX's share, 4 ranks in 16 to 30 MiB mostly end by a segmentation fault."""
    code = "import os; from dpfl_mpi.mpi.start import open_world as world"
    code += "; os.write(1, b'world of %d\\n' % world().size)"
    for _ in range(2):
        done = in_shm(size, ranks, "-c", code)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"world of {ranks}\n") == ranks


@pytest.mark.skipif(open_mpi(), reason="Open MPI does without /dev/shm")
@pytest.mark.parametrize(("size", "ranks", "need"), [("1m", 1, "1.1"), ("3m", 4, "4.2")])
def test_a_shm_too_small_for_mpich_is_a_sentence(tmp_path, size, ranks, need):
    """Each rank takes 64 cells of 16 KiB and what manages them: 1.06 MB."""
    done = in_shm(size, ranks, "-m", "dpfl_mpi", "--quiet", "--results", tmp_path)
    has = f"error: /dev/shm has {int(size[0]) * 2**20 / 1e6:.1f} MB"
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith(has) and done.stderr.count("\n") == 1
    assert f"MPICH needs {need} for -n {ranks}; enlarge it (docker run --shm-size)" in done.stderr
    assert not list(tmp_path.iterdir())


SBATCH = ROOT / "slurm" / "train.sbatch"
SRUN = """
case "$*" in
--mpi=list) echo pmi2; exit ;;
*" -c "*) echo "world of 2"; echo "world of 2"; exit ;;
esac
echo "$SITE $OMP_NUM_THREADS $*" >> {folder}/tries
case $(wc -l < {folder}/tries) in
{cases}
esac"""
FIXED = "--dataset cifar10 --grace 100 --watchdog 600"


def submitted(folder, cases, job="17", flags=(), **env):
    """Return what became of train.sbatch as a job of two tasks, which squeue knows as `job`.

    `cases` are those of a shell's `case`: what srun does when it starts the ranks for the nth time.
    """
    starts.script(folder / "srun", SRUN.format(folder=folder, cases=cases))
    starts.script(folder / "squeue", f'[ "$3" != {job} ] || echo RUNNING')
    starts.script(folder / "scontrol", f'echo "$@" > {folder}/requeued')
    path = os.pathsep.join([str(folder), os.path.dirname(sys.executable), "/usr/bin:/bin"])
    of_job = {"PATH": path, "TMPDIR": str(folder), "DPFL_START_S": "1", "SLURM_NTASKS": "2"}
    of_job |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "17"}
    done = ended("bash", SBATCH, *flags, **of_job | env)
    assert not list(folder.glob("dpfl-*"))
    return done


def test_the_sbatch_file_is_short_and_names_no_account(tmp_path):
    text = SBATCH.read_text()
    assert len(text.splitlines()) <= 25 and SBATCH.with_name("cifar10.sbatch").samefile(SBATCH)
    assert "#SBATCH --account" not in text and "#SBATCH --partition" not in text
    for part in ("--signal=B:USR1@", "--requeue", "--open-mode=append"):
        assert f"#SBATCH {part}" in text
    for size, why in (("", "has no number of tasks"), ("2", "is heterogeneous")):
        of_parts = {"SLURM_HET_SIZE": size} if size else {}  # a job of parts has no SLURM_NTASKS
        done = submitted(tmp_path, "", SLURM_NTASKS="", **of_parts)
        assert done.returncode == 2 and not (tmp_path / "tries").exists()
        assert done.stderr.startswith(f"error: this job {why}; allowed")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("cases", "tries", "code", "requeued"), [
    ("1|2) exit 7 ;; 3) echo up > $DPFL_BEGUN; exit 0 ;;", 3, 0, False),  # MPI starts at last
    ("*) exit 7 ;;", 3, 7, False),
    ("*) echo up > $DPFL_BEGUN; exit 1 ;;", 1, 1, False),  # an error after MPI's start
    ("*) exit 2 ;;", 1, 2, False),
    ("*) exit 3 ;;", 1, 3, False),
    ("*) exit 75 ;;", 1, 75, True),
    # srun's code for ranks that end at once, and the one that rank 0 reported
    ('*) echo "ended with 75" > $DPFL_BEGUN; exit 137 ;;', 1, 75, True),
    ('*) echo "ended with 76" > $DPFL_BEGUN; kill -USR1 $PPID; sleep 1 ;;', 1, 76, False),
    ("*) kill -USR1 $PPID; sleep 0.2; exit 138 ;;", 1, 138, True),  # before MPI was up
    ('*) trap "exit 10" USR1; kill -USR1 $PPID; sleep 0.4 ;;', 1, 10, True),  # by MPICH's mpirun
    ('*) trap "exit 2" USR1; kill -USR1 $PPID; sleep 0.4 ;;', 1, 2, False),
    ('*) sleep 59 & trap "kill $!; exit 75" USR1; kill -TERM $PPID; wait ;;', 1, 75, True),
    ("1) exec sleep 60 ;; *) echo up > $DPFL_BEGUN; sleep 2; exit 0 ;;", 2, 0, False),  # hangs once
])  # fmt: skip
def test_a_job_starts_mpi_up_to_three_times_and_is_requeued(tmp_path, cases, tries, code, requeued):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "site.sh").write_text("export SITE=mine\n")
    done = submitted(tmp_path, cases, flags=["--budget", "10"], SLURM_CPUS_PER_TASK="4")
    assert done.returncode == code, done.stderr
    python = Path(sys.executable).with_name("python")  # as the script calls it
    words = f"--mpi=pmi2 --kill-on-bad-exit=1 -n 2 {python} -m dpfl_mpi {FIXED} --budget 10"
    assert lines(tmp_path / "tries") == [f"mine 4 {words}"] * tries
    failed = f"MPI did not start (exit code {143 if 'sleep 60' in cases else 7})"
    again = tries - 1 if code == 0 else tries if tries > 1 else 0
    assert done.stderr.splitlines() == [f"{failed}, try {i + 1} of 3" for i in range(again)]
    assert lines(tmp_path / "requeued") == ["requeue 17"] * requeued


PALS = """case "$*" in
*" -c "*) echo "world of 2"; echo "world of 2"; exit ;;
esac
echo "$DPFL_JOB $DPFL_RESTARTS $*" >> {folder}/tries
exit {code}"""


@pytest.mark.parametrize(("code", "before", "job", "again"), [
    (75, {}, "17.pbs 1", True),  # PBS ran it twice
    (75, {"DPFL_JOB": "9.pbs", "DPFL_RESTARTS": "2"}, "9.pbs 4", True),
    (2, {}, "17.pbs 1", False),
    (75, {"PBS_ARRAY_INDEX": "3"}, "17.pbs 1", True),
])  # fmt: skip
def test_a_job_of_pbs_submits_the_next(tmp_path, code, before, job, again):
    starts.script(tmp_path / "mpiexec", PALS.format(folder=tmp_path, code=code))
    starts.script(tmp_path / "qstat", 'echo "Job Id: $2"; echo "    run_count = 2"')
    starts.script(tmp_path / "qsub", f'echo "$@, $FLAGS" > {tmp_path}/requeued')
    (tmp_path / "nodes").write_text("n1\nn1\n")
    path = os.pathsep.join([str(tmp_path), os.path.dirname(sys.executable), "/usr/bin:/bin"])
    of_job = {"PATH": path, "PBS_JOBID": "17.pbs", "PBS_NODEFILE": str(tmp_path / "nodes")}
    of_job |= {"PBS_O_WORKDIR": str(tmp_path), "FLAGS": "--budget 10", "DPFL_START_S": "1"}
    done = ended("bash", ROOT / "pbs" / "train.pbs", **of_job | before)
    assert done.returncode == code, done.stderr
    words = "--ppn 2 --depth 1 --cpu-bind depth -n 2"
    flags = "--budget 10" + " --seed 3" * ("PBS_ARRAY_INDEX" in before)
    python = Path(sys.executable).with_name("python")
    assert lines(tmp_path / "tries") == [f"{job} {words} {python} -m dpfl_mpi {FIXED} {flags}"]
    submitted = [f"-v FLAGS,DPFL_JOB,DPFL_RESTARTS pbs/train.pbs, {flags}"] * again
    assert lines(tmp_path / "requeued") == submitted


def test_a_task_of_an_array_has_its_seed_and_is_requeued_alone(tmp_path):
    """One that squeue does not list as running, as it was cancelled, is not requeued."""
    array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "5"}
    for job, requeued in (("17_4", []), ("17_5", ["requeue 17_5"])):
        assert submitted(tmp_path, "*) exit 75 ;;", job, **array).returncode == 75
        assert lines(tmp_path / "tries")[-1].endswith(f" -m dpfl_mpi {FIXED} --seed 5")
        assert lines(tmp_path / "requeued") == requeued
    # the seed comes after a file of --config, which has one, too, but not after a flag
    submitted(tmp_path, "*) exit 0 ;;", flags=["--config", "a.yaml"], **array)
    assert lines(tmp_path / "tries")[-1].endswith(" --config a.yaml --seed 5")
    submitted(tmp_path, "*) exit 0 ;;", flags=["--seed=3"], **array)
    assert lines(tmp_path / "tries")[-1].endswith(f"{FIXED} --seed=3")


def test_words_that_the_launcher_does_not_know_are_refused(monkeypatch, capsys):
    for words, code in ((["--help"], 0), (["foo"], 2)):
        monkeypatch.setattr(sys, "argv", ["launcher", *words])
        assert launcher.main() == code
        assert capsys.readouterr().out.startswith("Find the launch line")


def test_an_abort_reports_its_code(tmp_path, monkeypatch):
    """srun makes 137 of it."""
    (tmp_path / "report").touch()
    code = "from dpfl_mpi.mpi.start import open_world; open_world().abort(76, 'why')"
    done = ended(sys.executable, "-c", code, DPFL_BEGUN=str(tmp_path / "report"))
    assert done.returncode != 0 and "why" in done.stderr
    assert (tmp_path / "report").read_text() == "ended with 76\n"
    monkeypatch.setattr(launcher.tempfile, "mkstemp", Mock(side_effect=OSError))
    report = launcher.Report()
    assert report.started() and report.end(137) == 137
