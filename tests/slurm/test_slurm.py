"""The sbatch files and sweeps on a real Slurm of two nodes; a run between two hosts over TCP."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own
import pytest
import starts
from launch import ended

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

HERE = Path(__file__).parent
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
SECONDS = 400  # a job of these tests takes about 20 on an idle machine
LONG = {"rounds": 120}  # of a Run that takes long enough to be disturbed


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which sbatch reaches a fresh cluster."""
    folder = tempfile.mkdtemp(prefix="dpfl-slurm-")
    try:
        up = ended("bash", HERE / "up.sh", folder, timeout=600)
        if up.returncode:
            pytest.skip(f"no Slurm here: {up.stderr.strip().splitlines()[-1]}")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        yield starts.environment(SLURM_CONF=f"{folder}/slurm.conf", PATH=path, DPFL_START_S="60")
    finally:
        subprocess.run(["bash", str(HERE / "down.sh"), folder], capture_output=True, timeout=120)
        shutil.rmtree(folder, ignore_errors=True)


class Jobs:
    """sbatch, scancel and what became of the jobs of one test."""

    def __init__(self, env: dict[str, str], folder: Path):
        self.env, self.folder = env, folder

    def ask(self, *words: str, code: int = 0) -> str:
        """Return what a command prints, which must end with this exit code."""
        how = {"cwd": starts.ROOT, "env": self.env, "timeout": SECONDS}
        done = subprocess.run(words, capture_output=True, text=True, **how)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout.strip()

    def submit(self, out: Path, fields=None, script="cifar10", per_node=1, **job: Any) -> str:
        """Submit an sbatch file of the repository on two nodes; return the job's number."""
        shape = ["--nodes=2", f"--ntasks-per-node={per_node}", "--mem-per-cpu=1G"]
        words = [*shape, f"--output={self.folder}/%j.log", f"slurm/{script}.sbatch"]
        return self.ask("sbatch", "--parsable", *words, *starts.command(out, fields, **job)[3:])

    def sweep(self, *words: str, code: int = 0) -> str:
        """Return what `python -m dpfl_mpi.sweep` prints for Runs on Slurm."""
        flags = ["--cluster=slurm", "--ranks=2", "--time=30", *words]
        return self.ask(sys.executable, "-m", "dpfl_mpi.sweep", *flags, code=code)

    def field(self, job: str, name: str = "JobState") -> str:
        """Return one field of `scontrol show job`."""
        text = self.ask("scontrol", "show", "job", job)
        return next(word.split("=", 1)[1] for word in text.split() if word.startswith(f"{name}="))

    def until(self, job: str, *wanted: str) -> None:
        """Wait until a job is in one of these states; fail with its log if it ends otherwise."""
        end = time.monotonic() + SECONDS
        while (state := self.field(job)) not in wanted:
            over = state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED")
            assert not over and time.monotonic() < end, f"{state}\n{self.log(job)}"
            time.sleep(0.3)

    def log(self, job: str) -> str:
        path = self.folder / f"{job}.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def jobs(cluster: dict[str, str], tmp_path: Path) -> Jobs:
    return Jobs(cluster, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return starts.here(tmp_path_factory.mktemp("undisturbed") / "run.h5", starts.small(**LONG))


def kept(out: Path, t: int) -> bool:
    """Whether a checkpoint of round t or later is there."""
    return max(starts.checkpoint_rounds(out), default=0) >= t


@pytest.fixture
def begun(jobs: Jobs, tmp_path: Path) -> tuple[Path, str]:
    """The results file and the number of a job that has kept round 2."""
    out = tmp_path / "run.h5"
    job = jobs.submit(out, starts.small(**LONG), checkpoint_every=1)
    starts.wait_for(lambda: kept(out, 2), timeout=SECONDS)
    return out, job


def test_two_nodes_make_one_world(jobs, tmp_path):
    out = tmp_path / "run.h5"
    jobs.until(jobs.submit(out, script="train", per_node=2), "COMPLETED")
    assert starts.same(out, starts.here(tmp_path / "here.h5"))
    with Result(out) as result:
        assert [s["ranks"] for s in result.starts()] == [4]


def test_a_signal_leads_to_a_checkpoint_a_requeue_and_the_same_numbers(jobs, begun, undisturbed):
    out, job = begun
    jobs.ask("scancel", "--batch", "--signal=USR1", job)
    starts.wait_for(lambda: jobs.field(job, "Restarts") == "1", timeout=SECONDS)
    jobs.until(job, "COMPLETED")
    assert starts.same(out, undisturbed) and starts.times_started(out) == 2
    assert "stopped after round" in jobs.log(job)


def test_a_preempted_job_goes_on(jobs, begun, tmp_path, undisturbed):
    out, job = begun
    all_nodes = ["-p", "urgent", "-N2", "--exclusive", f"-o{tmp_path}/urgent"]
    jobs.until(jobs.ask("sbatch", "--parsable", *all_nodes, "--wrap", "sleep 1"), "COMPLETED")
    jobs.until(job, "COMPLETED")
    assert starts.same(out, undisturbed) and starts.times_started(out) >= 2
    assert int(jobs.field(job, "Restarts")) >= 1


def test_a_cancelled_job_stays_cancelled_and_can_be_continued(jobs, begun, undisturbed):
    out, job = begun
    jobs.ask("scancel", job)
    jobs.until(job, "CANCELLED")
    time.sleep(3)  # longer than Slurm takes to start a requeued job
    assert jobs.field(job) == "CANCELLED" and kept(out, 2)
    jobs.until(jobs.submit(out, starts.small(**LONG)), "COMPLETED")
    assert starts.same(out, undisturbed)


def test_a_job_that_hangs_is_requeued_twice(jobs, tmp_path):
    own.write(tmp_path, endless=own.WAITING.format(condition="True"))
    fields = starts.small(method=f"{tmp_path}/endless.py", clients=4, budget=1)
    job = jobs.submit(tmp_path / "run.h5", fields, checkpoint_every=1, watchdog=15)
    jobs.until(job, "FAILED")
    assert jobs.field(job, "Restarts") == "2" and jobs.field(job, "ExitCode") == "76:0"
    assert jobs.log(job).count("the same command goes on from the last checkpoint") == 2
    assert jobs.log(job).count("the run hung") == 3


def test_a_sweep_is_submitted_once_and_watched_to_its_end(jobs, tmp_path):
    words = ["--seeds=1,2", *starts.of_sweep(tmp_path)]
    assert "submitted 2 jobs as array" in jobs.sweep(*words)
    assert "2 finished of 2" in jobs.sweep(*words, "--list", "--watch")
    listed = jobs.sweep(*words, "--list")
    assert [line.split()[1:3] for line in listed.splitlines()[1:3]] == [["finished", "4/4"]] * 2
    assert "submitted" not in jobs.sweep(*words)
    assert len(list(tmp_path.glob("sweeps/*/jobs.json"))) == 1
    for path in tmp_path.glob("*.h5"):
        with Result(path) as result:
            assert [s["ranks"] for s in result.starts()] == [2]
            seed = result.run.seed
        local = starts.here(tmp_path / "here" / path.name, starts.small(seed=seed))
        assert starts.same(path, local)


def test_a_killed_job_of_a_sweep_goes_on_when_retried(jobs, tmp_path, undisturbed):
    words = [f"--seeds={Run().seed}", *starts.of_sweep(tmp_path, **LONG), "--checkpoint_every=1"]
    job = jobs.sweep(*words).split("submitted job ")[1].split(";")[0]
    out = Run(**starts.small(**LONG)).resolve().path(tmp_path)
    starts.wait_for(lambda: kept(out, 2), timeout=SECONDS)
    os.kill(json.loads(Path(f"{out}.lock").read_text())["pid"], signal.SIGKILL)
    jobs.until(job, "FAILED")
    assert not Result(out).finished
    reported = jobs.sweep(*words, "--list", "--watch", code=1)
    assert "1 failed of 1" in reported
    assert f"(job {job}, --retry submits it again)" in reported
    assert "submitted" not in jobs.sweep(*words, code=1)  # only on request
    job = jobs.sweep(*words, "--retry").split("submitted job ")[1].split(";")[0]
    jobs.until(job, "COMPLETED")
    assert "1 finished of 1" in jobs.sweep(*words, "--list")
    assert starts.times_started(out) == 2 and starts.same(out, undisturbed)


def begun_and_kept(folder: Path, t: int) -> list[int]:
    """Return how often each Run with seed 2 that has a checkpoint of round t was started."""
    found = []
    for path in folder.glob("*-s2-*.h5"):
        with contextlib.suppress(UserError, OSError), Result(path) as result:
            found += [len(result.starts())] * kept(path, t)
    return found


def test_a_sweep_whose_round_outlasts_the_warning_is_not_requeued_for_ever(jobs, tmp_path):
    """Each warning cuts round 3: the third start is the last. The array's other task goes on."""
    own.write(tmp_path, endless=own.WAITING.format(condition="True"))
    endless = starts.of_sweep(tmp_path, method=f"{tmp_path}/endless.py", clients=4, budget=1)
    words = ["--seeds=1,2", *endless, "--checkpoint_every=1", "--grace=1"]
    array = jobs.sweep(*words).split("as array ")[1].split(" ")[0].split(";")[0]
    for number in (1, 2, 3):
        while begun_and_kept(tmp_path, 2) != [number]:
            jobs.until(f"{array}_1", "RUNNING", "PENDING", "COMPLETING", "REQUEUED")
            time.sleep(0.3)
        jobs.ask("scancel", "--signal=USR2", f"{array}_1")
    jobs.until(f"{array}_1", "FAILED")
    assert [jobs.field(f"{array}_{i}", "Restarts") for i in (0, 1)] == ["0", "2"]
    assert jobs.field(f"{array}_0") == "RUNNING"
    listed = jobs.sweep(*words, "--list", code=1)
    assert "1 failed, 1 running of 2" in listed
    assert "two starts in a row kept no new checkpoint" in listed
    log = next(tmp_path.glob(f"sweeps/*/{array}_1_0_log.err")).read_text()
    assert log.count("the same command replays it") == 2 and "Traceback" not in log


def ip(words: str) -> str:
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two network namespaces that share no memory by their address, joined by one cable."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("two network namespaces need root and the command ip")
    one, two = f"dpfl{os.getpid()}a", f"dpfl{os.getpid()}b"
    places = {"10.91.0.1": one, "10.91.0.2": two}
    try:
        for name in (one, two):
            ip(f"netns add {name}")
        ip(f"-n {one} link add wire type veth peer name wire netns {two}")
        for address, name in places.items():
            for words in (f"addr add {address}/24 dev wire", "link set lo up", "link set wire up"):
                ip(f"-n {name} {words}")
        # the cable has a carrier a moment after it is up; before, MPI sees no network
        shown = [f"-n {name} -o link show wire" for name in (one, two)]
        starts.wait_for(lambda: all("state UP" in ip(words) for words in shown), timeout=30)
        yield places
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        for name in (one, two):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(f"netns del {name}")


def test_the_same_numbers_between_hosts(hosts, tmp_path):
    if starts.open_mpi():
        pytest.skip("this test knows how to start MPICH only")
    out = tmp_path / "run.h5"
    first = next(iter(hosts.values()))
    words = ["ip", "netns", "exec", first, "mpirun", "-launcher", "ssh", "-iface", "wire"]
    words += ["-launcher-exec", f"{HERE}/rsh.sh", "-hosts", ",".join(hosts)]
    words += ["-ppn", "2", "-n", "4", *starts.command(out)]
    names = " ".join(f"{address}={name}" for address, name in hosts.items())
    done = ended(*words, DPFL_HOSTS=names, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    with Result(out) as result:
        assert len(result.starts()[0]["hosts"]) == 2
        assert result["traffic/bytes_rma"].sum() > 0
    assert starts.same(out, starts.here(tmp_path / "here.h5"))
