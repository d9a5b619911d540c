"""What memory a node still gives: the limits of all cgroups above this process, in both versions, on a faked /sys and /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfl_mpi.mpi import placement

GB = 10**9
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def group(folder: Path, names: tuple[str, str, str], limit: int | str, used: int, cache: int = 0) -> None:
    """Make a cgroup with a limit, of which some is used, and some of that is cache of files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\nactive_file 7\n{names[2]} {cache}\nslab 3\n")


def member(root: Path, lines: str) -> None:
    """Say of which cgroups this process is one."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)


def test_the_limit_of_a_slurm_job_is_far_below_the_topmost_group(tmp_path):
    """Under version 2 the topmost has no files of memory at all; the job's is above the step's."""
    slice_ = tmp_path / "sys/fs/cgroup/system.slice/slurmstepd.scope"
    member(tmp_path, "0::/system.slice/slurmstepd.scope/job_17/step_0/user/task_0\n")
    group(slice_, V2, "max", 90 * GB)
    group(slice_ / "job_17", V2, 24 * GB, 5 * GB)
    group(slice_ / "job_17/step_0", V2, 24 * GB, 4 * GB)
    group(slice_ / "job_17/step_0/user/task_0", V2, "max", 1 * GB)
    assert placement.cgroup_rooms(str(tmp_path)) == [20 * GB, 19 * GB]


def test_the_same_under_version_1(tmp_path):
    memory = tmp_path / "sys/fs/cgroup/memory"
    member(tmp_path, "9:cpu,cpuacct:/elsewhere\n4:memory:/slurm/uid_0/job_17/step_0\n0::/\n")
    group(memory, V1, 2**63 - 4096, 90 * GB)
    group(memory / "slurm/uid_0/job_17/step_0", V1, 24 * GB, 6 * GB, 2 * GB)
    assert placement.cgroup_rooms(str(tmp_path)) == [20 * GB, 2**63 - 4096 - 90 * GB]


def test_files_that_were_read_are_room(tmp_path):
    member(tmp_path, "0::/\n")
    group(tmp_path / "sys/fs/cgroup", V2, 16 * GB, 15 * GB, 12 * GB)
    assert placement.cgroup_rooms(str(tmp_path)) == [13 * GB]
    (tmp_path / "sys/fs/cgroup/memory.stat").unlink()
    assert placement.cgroup_rooms(str(tmp_path)) == [1 * GB]


@pytest.mark.parametrize("lines", ["0::/docker/abc\n", "0::/../../abc\n", "4:memory:/docker/abc\n", "", "nonsense\n"])
def test_a_container_sees_its_own_group_as_the_topmost(tmp_path, lines):
    """/proc may name it as the host does."""
    member(tmp_path, lines)
    group(tmp_path / "sys/fs/cgroup", V2, 8 * GB, 3 * GB)
    group(tmp_path / "sys/fs/cgroup/memory", V1, 4 * GB, 3 * GB)
    assert placement.cgroup_rooms(str(tmp_path)) == [5 * GB, 1 * GB]


def test_no_cgroups_are_no_limit(tmp_path, monkeypatch):
    assert placement.cgroup_rooms(str(tmp_path)) == []
    monkeypatch.setattr(placement, "cgroup_rooms", lambda: [5, 3, 4])
    assert placement.node_memory() == (3, "the cgroup's limit")
