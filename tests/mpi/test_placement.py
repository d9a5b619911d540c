"""What memory a node still gives: the limits of all cgroups above this process, in both versions, on a faked /sys and /proc."""

import pytest

from dpfl_mpi.mpi import placement

GB = 10**9
FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
}
JOB = "system.slice/slurmstepd.scope/job_17"
OWN = {"": (8 * GB, 3 * GB), "memory": (4 * GB, 3 * GB)}
CASES = {
    # version 2: the topmost has no files of memory at all; the job's is above the step's
    "a Slurm job": (
        f"0::/{JOB}/step_0/user/task_0\n",
        {
            "system.slice/slurmstepd.scope": ("max", 90 * GB),
            JOB: (24 * GB, 5 * GB),
            f"{JOB}/step_0": (24 * GB, 4 * GB),
            f"{JOB}/step_0/user/task_0": ("max", 1 * GB),
        },
        [20 * GB, 19 * GB],
    ),
    "a Slurm job under version 1": (
        "9:cpu,cpuacct:/elsewhere\n4:memory:/slurm/uid_0/job_17/step_0\n0::/\n",
        {"memory": (2**63 - 4096, 90 * GB), "memory/slurm/uid_0/job_17/step_0": (24 * GB, 6 * GB, 2 * GB)},
        [20 * GB, 2**63 - 4096 - 90 * GB],
    ),
    "files that were read are room": ("0::/\n", {"": (16 * GB, 15 * GB, 12 * GB)}, [13 * GB]),
    "no statistics": ("0::/\n", {"": (16 * GB, 15 * GB, None)}, [1 * GB]),
    # a container sees its own group as the topmost; /proc may name it as the host does
    **{
        f"a container: {lines!r}": (lines, OWN, [5 * GB, 1 * GB])
        for lines in ("0::/docker/abc\n", "0::/../../abc\n", "4:memory:/docker/abc\n", "", "nonsense\n")
    },
}


@pytest.mark.parametrize(("lines", "groups", "rooms"), CASES.values(), ids=CASES)
def test_room_in_cgroups(lines, groups, rooms, tmp_path):
    """Of each group the limit, what is used, and what of that is cache of files."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    for name, (limit, used, *cache) in groups.items():
        folder = tmp_path / "sys/fs/cgroup" / name
        top, now, inactive = FILES["memory" if name.startswith("memory") else ""]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / top).write_text(f"{limit}\n")
        (folder / now).write_text(f"{used}\n")
        if cache != [None]:
            text = f"anon 1\nactive_file 7\n{inactive} {cache[0] if cache else 0}\nslab 3\n"
            (folder / "memory.stat").write_text(text)
    assert placement.cgroup_rooms(str(tmp_path)) == rooms


def test_no_cgroups_are_no_limit(tmp_path, monkeypatch):
    assert placement.cgroup_rooms(str(tmp_path)) == []
    monkeypatch.setattr(placement, "cgroup_rooms", lambda: [5, 3, 4])
    assert placement.node_memory() == (3, "the cgroup's limit")
