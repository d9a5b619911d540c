"""The launch line, on faked launchers: the first that makes one world of two, or a sentence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import starts
from launch import ROOT, ended, refused
from starts import open_mpi

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
        monkeypatch.setattr(launcher, "SECONDS", 1)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_NTASKS", "8")
    place("srun", srun(**kinds))
    place("mpirun", GOOD if job else "exit 1")
    assert " ".join(launcher.find_line()).startswith(line)


def test_no_launcher_is_a_sentence(place, monkeypatch, said):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    place("mpirun", SINGLETONS)
    refused("neither srun nor mpirun starts one MPI world", launcher.find_line)
    assert said(lambda _: launcher.main(), code=3).count("\n") == 1


def test_the_real_mpirun_makes_a_world(terminal):
    assert launcher.works(["mpirun"], 2)


def in_shm(size: str, ranks: int, *words: object):
    """Return the finished process of `mpirun -n RANKS python WORDS` where /dev/shm has this size; skip where nobody may mount it."""
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    if ended(*(own := ["unshare", "-rm", "sh", "-c"]), mount).returncode:
        pytest.skip("a user may not mount a file system of its own here")
    return ended(*own, f'{mount} && exec "$@"', "sh", "mpirun", "-n", ranks, sys.executable, *words)


@pytest.mark.skipif(open_mpi(), reason="Open MPI does without /dev/shm")
@pytest.mark.parametrize(("size", "ranks"), [("16m", 4), ("22m", 4), ("2m", 1)])
def test_mpich_starts_in_a_small_shm(size, ranks):
    """With UCX's share, 4 ranks in 16 to 30 MiB end by a segmentation fault, though not every time."""
    code = "import os; from dpfl_mpi.mpi.start import open_world; os.write(1, b'world of %d\\n' % open_world().size)"
    for _ in range(2):
        done = in_shm(size, ranks, "-c", code)
        assert done.returncode == 0 and done.stdout.count(f"world of {ranks}\n") == ranks, done.stderr


@pytest.mark.skipif(open_mpi(), reason="Open MPI does without /dev/shm")
@pytest.mark.parametrize(("size", "ranks", "need"), [("1m", 1, "1.1"), ("3m", 4, "4.2")])
def test_a_shm_too_small_for_mpich_is_a_sentence(tmp_path, size, ranks, need):
    """Each rank takes 64 cells of 16 KiB and what manages them: 1.06 MB."""
    done = in_shm(size, ranks, "-m", "dpfl_mpi", "--quiet", "--results", tmp_path)
    has = f"error: /dev/shm has {int(size[0]) * 2**20 / 1e6:.1f} MB"
    assert done.returncode == 3 and done.stderr.startswith(has) and done.stderr.count("\n") == 1, done.stderr
    assert f"MPICH needs {need} for -n {ranks}; enlarge it (docker run --shm-size)" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["train", "cifar10"])
def test_the_sbatch_files_pass_signals_on_and_requeue(name):
    path = ROOT / "slurm" / f"{name}.sbatch"
    text = path.read_text()
    parts = '"$@"', "--signal=B:USR1@", "--requeue", "--open-mode=append", "SLURM_SUBMIT_DIR", "SRUN_CPUS_PER_TASK"
    for part in (*parts, "OMP_NUM_THREADS", "dpfl_mpi.mpi.launcher", "scontrol requeue", "--dataset cifar10 "):
        assert part in text, part
    assert "#SBATCH --account" not in text and "#SBATCH --partition" not in text
    assert subprocess.run(["bash", "-n", path]).returncode == 0


START = """# in the place of python and of the launcher: the attempt's number, whether MPI "starts" in it, and the exit code
if [ "$2" = dpfl_mpi.mpi.launcher ]; then echo {folder}/python; exit; fi
echo "$SITE $*" >> {folder}/tries
case $(wc -l < {folder}/tries) in
{cases}
esac"""


def submitted(folder, cases, asked="17", flags=(), **env):
    """Run train.sbatch as Slurm would, on fake commands, in job 17; return the finished process."""
    commands = {
        "python": START.format(folder=folder, cases=cases),
        "squeue": f'[ "$3" != {asked} ] || echo RUNNING',
        "scontrol": f'echo "$@" > {folder}/requeued',
    }
    for name, text in commands.items():
        starts.script(folder / name, text)
    of_job = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(folder), "DPFL_START_S": "1"}
    of_job |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "17", "SLURM_NTASKS": "2"}
    return ended("bash", ROOT / "slurm" / "train.sbatch", *flags, **of_job | env)


@pytest.mark.parametrize(("cases", "tries", "code"), [
    ("1|2) exit 7 ;; 3) echo up > $DPFL_BEGUN; exit 0 ;;", 3, 0),  # MPI starts at last
    ("*) exit 7 ;;", 3, 7),  # never: at most twice again
    ("*) echo up > $DPFL_BEGUN; exit 1 ;;", 1, 1),  # an error of ours, after MPI's start
    ("*) exit 2 ;;", 1, 2),  # a mistake that only the user can mend
    # two starts kept nothing, in a round that was cut: srun has 137, and a requeued job would do no better
    ('*) echo "ended with 76" > $DPFL_BEGUN; kill -USR1 $PPID; sleep 0.2; exit 137 ;;', 1, 76),
    ("1) kill -USR1 $PPID; sleep 0.2; exit 138 ;;", 1, 138),  # warned before MPI was up: requeued instead
])  # fmt: skip
def test_a_job_whose_mpi_does_not_start_is_started_again(tmp_path, cases, tries, code):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "site.sh").write_text("export SITE=mine\n")
    done = submitted(tmp_path, cases, flags=["--budget", "10"])
    assert done.returncode == code, done.stderr
    lines = (tmp_path / "tries").read_text().splitlines()
    assert lines == ["mine -n 2 python -m dpfl_mpi --dataset cifar10 --grace 100 --budget 10"] * tries
    assert done.stderr.count("MPI did not start (exit code 7)") == tries - (code == 0) if tries > 1 else not done.stderr
    assert (tmp_path / "requeued").exists() == (code == 138)
    assert not list(tmp_path.glob("tmp.*"))


def test_an_mpi_that_hangs_is_ended_unless_nobody_can_tell(tmp_path):
    hangs = "1) exec sleep 60 ;; *) echo up > $DPFL_BEGUN; sleep 2; exit 0 ;;"
    assert submitted(tmp_path, hangs).stderr == "MPI did not start (exit code 143), try 1 of 3\n"
    done = submitted(tmp_path, "*) sleep 2; exit 7 ;;", TMPDIR="/nowhere")  # no room for what rank 0 would write
    assert done.returncode == 7 and "MPI" not in done.stderr and len((tmp_path / "tries").read_text().split("\n")) == 4


def test_an_abort_leaves_its_code_for_the_script(tmp_path):
    """What a launcher makes of the code of MPI_Abort is its own affair: srun ends with 137. A sweep's job is requeued before."""
    (tmp_path / "begun").touch()
    code = "from dpfl_mpi.mpi.start import open_world; w = open_world(); w.before_abort = lambda code: print(code, flush=True); w.abort(76, 'said')"
    done = ended(sys.executable, "-c", code, DPFL_BEGUN=str(tmp_path / "begun"))
    assert done.returncode != 0 and "said" in done.stderr and done.stdout == "76\n"
    assert (tmp_path / "begun").read_text() == "ended with 76\n"


@pytest.mark.parametrize(("task", "asked"), [({}, "17"), ({"JOB_ID": "17", "TASK_ID": "5"}, "17_5")])
def test_of_an_array_its_task_has_its_seed_and_is_requeued(tmp_path, task, asked):
    """The last task of an array has the array's own number, by which squeue lists, and scontrol would requeue, all of them."""
    array = {f"SLURM_ARRAY_{name}": value for name, value in task.items()}
    done = submitted(tmp_path, "*) exit 75 ;;", asked, **array)
    assert done.returncode == 75
    assert ("--seed 5" in (tmp_path / "tries").read_text()) == bool(task)
    assert (tmp_path / "requeued").read_text() == f"requeue {asked}\n"


@pytest.mark.parametrize(
    ("tasks", "code", "said"), [({}, 2, "error: SLURM_NTASKS is not set"), ({"SLURM_NTASKS": "2"}, 0, "")]
)
def test_a_job_without_a_number_of_tasks_starts_nothing(tmp_path, tasks, code, said):
    """The sbatch file in a job such as a heterogeneous one: a sentence, before any launcher is called."""
    fakes = {"python": "echo srun", "srun": f'printf "%s\\n" "$*" >> {tmp_path}/calls'}
    for name, text in fakes.items():
        starts.script(tmp_path / name, text)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = ended("bash", ROOT / "slurm" / "train.sbatch", "--seed", "3", **path, **tasks)
    assert done.returncode == code and done.stderr.startswith(said) and done.stderr.count("\n") == (code > 0)
    calls = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    assert calls == "-n 2 python -m dpfl_mpi --dataset cifar10 --grace 100 --seed 3\n" * (code == 0)
