"""MPI: placement, collectives, and the one-sided inbox on one, two and three ranks."""

import os
import threading
import time
from unittest.mock import Mock

import making
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import mpirun, refused
from mpi4py import MPI

from dpfl_mpi.errors import RootFailed, UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi import node
from dpfl_mpi.mpi import world as comm_module
from dpfl_mpi.mpi.placement import models_per_pass, place, rows_of, window_slots
from dpfl_mpi.mpi.window import Inbox, Transfer, checksum, route
from dpfl_mpi.mpi.world import World

WIDTH = 32  # of a row
RANKS = [1, 2, 3]
WAYS = Transfer(), Transfer(window="create"), Transfer("sendrecv")


def ids_of(owner, work, rank):
    order, _ = rows_of(owner, work)
    return order[owner[order] == rank]


def test_the_last_text_is_read_before_the_ranks_are_ended():
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, open(os.devnull, "w") as file:
        for output in (stream, file):
            comm_module.until_read(output, seconds=0.0)
        print("why", file=stream, flush=True)
        late = threading.Timer(0.3, os.read, (read, 100))
        start = time.monotonic()
        late.start()
        comm_module.until_read(stream)
        assert 0.29 < time.monotonic() - start < comm_module.PATIENCE_S
        late.join()
        print("why", file=stream, flush=True)
        os.close(read)  # nobody reads any more
        start = time.monotonic()
        comm_module.until_read(stream, seconds=0.1)
        assert time.monotonic() - start < 1


# placement: every rank computes the same, without MPI --------------------------------------------
def test_place_and_passes_by_hand():
    """Heaviest first to the least work: 9 | 7 | 5, then 4 to the 5, 3 to the 7, 2 to the 9."""
    assert place(np.array([2, 9, 4, 7, 3, 5]), 3).tolist() == [0, 0, 2, 1, 1, 2]
    # Ranks of 10, 2 and 0 clients that want 4 models each, of 2, 10 and 12 other clients.
    clients = np.array([10, 2, 0])
    slots, limit = window_slots(4 * clients, clients, 1, 2**-20, 500)
    assert (slots.tolist(), limit) == ([2, 8, 0], 2)  # of 1 KiB
    assert window_slots(4 * clients, clients, 3, 1, 1)[0].tolist() == [6, 8, 0]
    for room, models in ((8, None), (5, 2), (1, 0)):  # of 5 slots the second rank has 2 per client
        assert models_per_pass(slots, np.full(3, room), clients) == models


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 12))
def test_no_rank_has_much_more_work_than_the_mean(work, ranks):
    work = np.array(work)
    owner = place(work, ranks)
    loads = np.bincount(owner, work, minlength=ranks)
    assert len(owner) == len(work) and owner.min() >= 0 and owner.max() < ranks
    assert loads.max() <= work.sum() / ranks + work.max()
    found = [ids_of(owner, work, r) for r in range(ranks)]
    assert sorted(np.concatenate(found)) == list(range(len(work)))
    assert all((np.diff(work[ids]) <= 0).all() for ids in found)


def drawn(n, ranks, density, seed):
    """A random directed graph, and its clients' ranks, rows there and work."""
    rng = np.random.default_rng(seed)
    matrix = rng.random((n, n)) < density
    np.fill_diagonal(matrix, False)
    graph, work = CollaborationGraph.from_lists(map(np.flatnonzero, matrix)), rng.integers(1, 50, n)
    owner = place(work, ranks)
    return graph, owner, rows_of(owner, work)[1], work


def rows(n, number):
    """Every client's model in round `number`: its values say whose it is, and of when."""
    whole = np.arange(n)[:, None] * 1000 + number
    return (whole + np.arange(WIDTH)[None] / WIDTH).astype(np.float32)


@given(st.integers(0, 31), st.integers(1, 2**32 - 1))
def test_what_is_not_the_row_that_was_sent_has_another_checksum(at, change):
    row = np.frombuffer(b"12345678", np.float32)
    assert checksum(row, 0, 5) == 0x5_9AE0DAAF  # CRC-32 of "12345678"
    row = rows(1, 3)[0]
    sent = checksum(row, 7, 5)
    assert sent != checksum(row, 7 ^ change, 5) and sent != checksum(row, 7, 5 + change)
    wrong = row.copy()
    wrong.view(np.uint32)[at] ^= np.uint32(change)
    assert sent != checksum(wrong, 7, 5)


def exchange_equals_permutation(world, n, density, seed, way=WAYS[0]):
    graph, owner, row, work = drawn(n, world.size, density, seed)
    ids = ids_of(owner, work, world.rank)
    step = route(graph, owner, row, world.rank, world.size)
    staging = np.zeros((len(ids), WIDTH), np.float32)
    inbox = Inbox(world, staging, int(step.need[world.rank]), way)
    for number in range(3):
        models = rows(n, number)
        staging[:] = models[ids]
        inbox.exchange(step)
        for k in ids:
            for s in graph.of(k):
                local = owner[s] == world.rank
                got = staging[row[s]] if local else inbox.take(int(step.slots(int(s))))
                assert np.array_equal(got, models[s]), (k, s)
    copy = inbox.take(0) if inbox.slots else None
    inbox.close()
    if copy is not None:  # it outlives the window
        assert copy[0] % 1000 == 2


def windows_one_after_the_other(world):
    for slots in (0, 3, 0, 5):
        inbox = Inbox(world, np.zeros((1, WIDTH), np.float32), slots if world.rank else 0)
        inbox.close()
        inbox.close()  # twice is once


def a_graph_wider_than_the_window_is_refused(world):
    """The window is the budget: what does not fit cannot be sent. One rank sends nothing."""
    n = 6
    graph, owner, row, work = drawn(n, world.size, 1.0, 0)
    step = route(graph, owner, row, world.rank, world.size)
    staging = rows(n, 0)[ids_of(owner, work, world.rank)]
    need = int(step.need[world.rank])
    assert need == n - len(staging)
    inbox = Inbox(world, staging, max(need - 1, 0))
    if world.size == 1:
        inbox.exchange(step)
    else:
        with pytest.raises(ValueError, match=f"needs {need} slots, the window has {need - 1}"):
            inbox.exchange(step)
    inbox.close()


def too_much_memory_is_refused_on_every_rank(world, monkeypatch):
    asks = comm_module.node_memory()[0] * 2 if world.rank == world.size - 1 else 1
    text = r"need \d+\.\d\d GiB on a node of \d+\.\d\d GiB \(.*\); set a smaller --window_gb"
    with pytest.raises(UserError, match=text):
        Inbox(world, np.zeros((1, WIDTH), np.float32), int(asks // (4 * WIDTH)))
    exchange_equals_permutation(world, 5, 0.5, 1)  # and they are still in step
    monkeypatch.setattr(comm_module, "node_memory", lambda _: (1000 * world.size - 1, "a test"))
    refused("a test", world.check_memory, 1000, "flag")
    world.check_memory(999, "flag")


def collectives(world):
    assert world.agree(world.rank == world.size - 1) and not world.agree(False)
    spread = world.spread(np.array([float(world.rank), 5.0]))
    assert spread.tolist() == [[0.0, (world.size - 1) / 2, world.size - 1.0], [5.0, 5.0, 5.0]]
    assert world.share(dict) == {}
    for value in (None, True, 7, 0.1, "größer", [1, "a", None], {"a": [2]}):
        assert world.decide(lambda value=value: value if world.root else "never asked") == value
    assert world.decide(lambda: (1, 2)) == [1, 2]  # the same on all ranks
    assert world.texts("GPU" * world.rank) == ["GPU" * rank for rank in range(world.size)]
    assert world.hosts() == [MPI.Get_processor_name()] * world.size


def counts_fit_into_an_int(world, monkeypatch):
    counted = World(world.comm)
    counted.comm = comm = Mock(wraps=world.comm, size=world.size)
    for n in (1, 2, 7):  # fewer clients than ranks, too
        work = np.arange(n) + 1
        owner = place(work, world.size)
        order = np.concatenate([ids_of(owner, work, r) for r in range(world.size)])
        of_ranks = np.bincount(owner, minlength=world.size).tolist()
        ids = order[owner[order] == world.rank]
        floats = np.arange(n * 6.0).reshape(n, 2, 3)
        for table in (floats, np.arange(n, dtype=np.int16), np.zeros((n, 0)), np.eye(n) > 0):
            for call, everywhere in ((comm.Gatherv, False), (comm.Allgatherv, True)):
                call.reset_mock()
                got = counted.gather(table[ids], owner, everywhere)
                receives = everywhere or world.root
                if receives:
                    assert np.array_equal(got, table[order]) and got.dtype == table.dtype
                else:
                    assert len(got) == 0
                buffers = filter(None, call.call_args.args) if call.called else ()
                expected = [len(ids), *([of_ranks] if receives else [])] if table[0].size else []
                assert [np.asarray(counts).tolist() for _, counts, _ in buffers] == expected
    monkeypatch.setattr(comm_module, "PIECE", 7)
    sent = {"a": np.arange(8).reshape(2, 4), "b": np.arange(21, dtype=np.uint8)}
    sent |= {"none": np.zeros((3, 0)), "c": np.float32([[1.5], [np.nan]]).T}
    sent |= {"d": np.array([True, False])}
    got = counted.share(lambda: sent if world.root else {})
    assert list(got) == list(sent)
    for name, values in sent.items():
        assert np.array_equal(got[name], values, equal_nan=name == "c")
        assert got[name].dtype == values.dtype
    pieces = [call.args[0].size for call in comm.Bcast.call_args_list]
    assert pieces == [*[7] * 9, 1, 7, 7, 7, 7, 1, 2]


def what_root_raises_reaches_everyone(world):
    def make():
        raise UserError("no such thing: größer")

    for ask in (world.decide, world.share):
        refused("no such thing: größer", ask, make)
    bugs = (lambda: [][1], IndexError), (lambda: 1 / 0, ZeroDivisionError), (lambda: {1}, TypeError)
    for wrong, error in bugs:
        with pytest.raises(error if world.root else RootFailed):
            world.decide(wrong)
    with pytest.raises(KeyError if world.root else RootFailed):
        world.share(lambda: {}["nothing"])
    assert world.agree(True)


def exchanges(world):
    for n in (1, 2, 7, 20):
        for seed, density in enumerate((0.0, 0.1, 0.5, 1.0)):
            for way in WAYS:
                exchange_equals_permutation(world, n, density, seed, way)


# one start of the ranks for all of these: starting them costs more than all they do
@pytest.mark.parallel(RANKS)
def test_ranks_exchange_and_agree(monkeypatch):
    world = World(MPI.COMM_WORLD)
    exchanges(world)
    windows_one_after_the_other(world)
    a_graph_wider_than_the_window_is_refused(world)
    collectives(world)
    what_root_raises_reaches_everyone(world)
    too_much_memory_is_refused_on_every_rank(world, monkeypatch)
    counts_fit_into_an_int(world, monkeypatch)


MPICH = "mpich" in MPI.Get_library_version().casefold()


@pytest.mark.skipif(not MPICH, reason="NOLOCAL is a setting of MPICH")
def test_rma_without_shared_memory():
    """As between nodes: MPICH uses the network, where a Put from a temporary would crash."""
    code = "import tests.mpi.test_comm as t; world = t.World(t.MPI.COMM_WORLD)"
    code += "; t.exchanges(world); t.windows_one_after_the_other(world); print('done')"
    done = mpirun(3, "-c", code, MPIR_CVAR_NOLOCAL="1")
    assert (done.returncode, done.stdout.count("done")) == (0, 3), done.stderr


# memory that a node still gives: cgroups of both versions, on a faked /sys ------------------------
GB = 10**9
VERSION_2 = "memory.max", "memory.current", "inactive_file"
VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
JOB, MOST = "system.slice/slurmstepd.scope/job_17", 2**63 - 4096
# of a group its limit, what is used, and of that the cache of files (None: no statistics)
OWN = {"": (8 * GB, 3 * GB), "memory": (4 * GB, 3 * GB)}
# version 2: the topmost has no files of memory; the job's is above the step's
GROUPS_2 = {"system.slice/slurmstepd.scope": ("max", 90 * GB), JOB: (24 * GB, 5 * GB)}
GROUPS_2 |= {f"{JOB}/step_0": (24 * GB, 4 * GB), f"{JOB}/step_0/user/task_0": ("max", 1 * GB)}
# lines of /proc/self/cgroup, groups, and the room in each
CASES = {
    "a Slurm job": (f"0::/{JOB}/step_0/user/task_0\n", GROUPS_2, [20 * GB, 19 * GB]),
    "a Slurm job under version 1": (
        "9:cpu,cpuacct:/elsewhere\n4:memory:/slurm/uid_0/job_17/step_0\n0::/\n",
        {"memory": (MOST, 90 * GB), "memory/slurm/uid_0/job_17/step_0": (24 * GB, 6 * GB, 2 * GB)},
        [20 * GB, MOST - 90 * GB],
    ),
    "files that were read are room": ("0::/\n", {"": (16 * GB, 15 * GB, 12 * GB)}, [13 * GB]),
    "no statistics": ("0::/\n", {"": (16 * GB, 15 * GB, None)}, [1 * GB]),
}
# a container sees its own group as the topmost; /proc may name it as the host does
CONTAINERS = "0::/docker/abc\n", "0::/../../abc\n", "4:memory:/docker/abc\n", "", "nonsense\n"
CASES |= {f"a container: {lines!r}": (lines, OWN, [5 * GB, 1 * GB]) for lines in CONTAINERS}


@pytest.mark.parametrize(("lines", "groups", "rooms"), CASES.values(), ids=CASES)
def test_room_in_cgroups(lines, groups, rooms, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    for name, (limit, used, *cache) in groups.items():
        top, current, inactive = VERSION_1 if name.startswith("memory") else VERSION_2
        files = {top: f"{limit}\n", current: f"{used}\n"}
        if cache != [None]:
            cached = f"{inactive} {cache[0] if cache else 0}"
            files["memory.stat"] = f"anon 1\nactive_file 7\n{cached}\nslab 3\n"
        texts = {file: text.encode() for file, text in files.items()}
        making.folder(tmp_path / "sys/fs/cgroup" / name, texts)
    assert node.cgroup_rooms(str(tmp_path)) == rooms


def test_no_cgroups_are_no_limit(tmp_path, monkeypatch):
    assert node.cgroup_rooms(str(tmp_path)) == []
    monkeypatch.setattr(node, "cgroup_rooms", lambda: [5, 3, 4])
    assert node.node_memory() == (3, "the cgroup's limit")
