"""Over TCP between two network namespaces that share no memory: the same numbers as on one host."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import starts

from dpfl_mpi.results import Result

RSH = Path(__file__).parent / "rsh.sh"
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


def ip(words: str) -> str:
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two namespaces by their address, joined by one cable."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("two network namespaces need root and the command ip")
    one, two = f"dpfl{os.getpid()}a", f"dpfl{os.getpid()}b"
    try:
        try:
            ip(f"netns add {one}")
            ip(f"netns add {two}")
            ip(f"-n {one} link add wire type veth peer name wire netns {two}")
            for name, address in ((one, "10.91.0.1"), (two, "10.91.0.2")):
                ip(f"-n {name} addr add {address}/24 dev wire")
                ip(f"-n {name} link set lo up")
                ip(f"-n {name} link set wire up")
            for name in (one, two):
                # the cable has a carrier a moment after it is up; MPI would see no network until then
                deadline = time.monotonic() + 30
                while "state UP" not in ip(f"-n {name} -o link show wire"):
                    assert time.monotonic() < deadline, "the cable between the namespaces stays down"
                    time.sleep(0.05)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield {"10.91.0.1": one, "10.91.0.2": two}
    finally:
        for name in (one, two):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(f"netns del {name}")


def test_the_same_numbers_between_hosts(hosts, tmp_path):
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if "HYDRA" not in version:
        pytest.skip("this test knows how to start MPICH only")
    out = tmp_path / "run.h5"
    first = next(iter(hosts.values()))
    words = ["ip", "netns", "exec", first, "mpirun", "-launcher", "ssh", "-launcher-exec", str(RSH), "-iface", "wire"]
    words += ["-hosts", ",".join(hosts), "-ppn", "2", "-n", "4", *starts.command(out)]
    env = starts.environment(DPFL_HOSTS=" ".join(f"{address}={name}" for address, name in hosts.items()))
    done = subprocess.run(words, cwd=starts.ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    with Result(out) as result:
        assert len(result.starts()[0]["hosts"]) == 2
        assert result["traffic/bytes_rma"].sum() > 0
    assert starts.same(out, starts.here(tmp_path / "here.h5"))
