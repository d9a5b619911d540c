"""How models travel between ranks: `Route` says which goes where, `Inbox` sends and receives them.

A row is one client's model, W float32 numbers. Each rank stages the rows that it sends, i.e. has
them in one array of host memory. A slot is room for one row that arrives, the window the memory of
all slots of a rank. With --exchange rma ranks put rows into others' windows (one-sided MPI); with
sendrecv rows travel as messages. `Mailroom` (transport/mailroom.py) makes and uses both classes.
"""

import time
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI

from dpfl_mpi.errors import Damaged, UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.world import LIBRARY, World

LINE = 64  # bytes of a cache line
ROW, SUM = 0, 1  # tags of MPI messages: a row, or its checksum


@dataclass(frozen=True)
class Route:
    """What one rank sends and receives along a graph; it serves every round with that graph."""

    # what it sends: its row by number, the rank that it goes to, the slot there, and its client
    puts: list[tuple[int, int, int, int]]
    arriving: np.ndarray  # whose rows it receives: clients, ascending; slot i gets the i-th's row
    need: np.ndarray  # how many slots the graph fills on each rank [ranks]
    source: np.ndarray  # the ranks that the arriving rows come from, by slot

    def slots(self, senders: Any) -> np.ndarray:
        """Return the slot of each of these senders; `UserError` if one sends nothing here."""
        slots, senders = np.searchsorted(self.arriving, senders), np.asarray(senders)
        last = len(self.arriving) - 1
        found = np.zeros(senders.shape, bool)
        if last >= 0:
            found = self.arriving[np.minimum(slots, last)] == senders
        if not found.all():
            missing = f"the model of client {senders[~found][0]} is asked for"
            raise UserError(f"{missing}, and was not sent along the graph")
        return slots


def route(
    graph: CollaborationGraph, owner: np.ndarray, row: np.ndarray, rank: int, ranks: int
) -> Route:
    """Return the route of one `rank` along a graph.

    `owner` `[N]` is the rank of each client, and `row` `[N]` the number of its row there. A sender
    that several clients of a rank want gets one slot there.
    """
    to = owner[graph.receivers()]
    remote = to != owner[graph.senders]
    # pairs of receiving rank and sender, each once. They are sorted by hand, as np.unique hashes
    # the numbers, which takes a hundred times as long.
    pairs = np.sort(to[remote] * graph.n + graph.senders[remote])
    to, sender = np.divmod(pairs[np.diff(pairs, prepend=-1) != 0], max(graph.n, 1))
    # pairs of a rank lie together: its slots are their places after the first of them
    need = np.bincount(to, minlength=ranks)
    slots = np.arange(len(to)) - (np.cumsum(need) - need)[to]
    leaving, arriving = owner[sender] == rank, to == rank
    columns = row[sender[leaving]], to[leaving], slots[leaving], sender[leaving]
    puts = list(zip(*(column.tolist() for column in columns), strict=True))
    return Route(puts, sender[arriving], need, owner[sender[arriving]])


@dataclass(frozen=True)
class Transfer:
    """How rows travel: what --exchange and --window say."""

    exchange: str = "rma"
    window: str = "allocate"

    def __str__(self) -> str:
        call = f"a window of MPI_Win_{self.window}"
        return f"rma ({call})" if self.exchange == "rma" else "sendrecv (MPI_Isend, MPI_Irecv)"


def checksum(row: np.ndarray, sender: int, exchange: int) -> int:
    """Return a 64-bit checksum: CRC-32 of sender and row, and above it the number of the exchange.

    A row of another sender or exchange always has another checksum, as does a row with one wrong
    float. A row with several wrong floats has the same one with a chance of 1 in 2^32.
    """
    return crc32(row.data, sender) | (exchange % 2**32) << 32


class Inbox:
    """This rank's slots, and the exchange that fills the slots of all ranks."""

    def __init__(
        self, world: World, staging: np.ndarray, slots: int, transfer: Transfer | None = None
    ):
        """Allocate the slots. Collective. Exchanges send rows of `staging`, float32 `[K, W]`."""
        self.world, self.staging, self.slots = world, staging, slots
        self.transfer = transfer or Transfer()
        self.row_bytes = staging.shape[1] * 4
        self.closed, self.exchanges = False, 0
        # bytes of the memory: rows, padded to a multiple of 8, then a checksum for each
        size = -(-slots * self.row_bytes // 8) * 8 + 8 * slots
        rma = self.transfer.exchange == "rma"
        shared = rma and self.transfer.window == "allocate"
        world.check_memory(size, "set a smaller --window_gb", shared)
        self.window: Any = None
        if shared:
            self.window = MPI.Win.Allocate(size, 1, comm=world.comm)
            memory: Any = self.window.tomemory()
        else:
            memory = np.zeros(size + LINE, np.uint8)
            memory = memory[-memory.ctypes.data % LINE :][:size]  # begins with a cache line
            if rma:
                self.window = MPI.Win.Create(memory, 1, comm=world.comm)
        self.view: np.ndarray = np.ndarray((slots, staging.shape[1]), np.float32, memory)
        self.sums: np.ndarray = np.ndarray(slots, np.uint64, memory, size - 8 * slots)
        self._sent = np.zeros(len(staging), np.uint64)  # checksums of the rows that are staged
        # where the checksums begin in the memory of each rank, in bytes
        self._sums_start = list(map(int, world.texts(str(size - 8 * slots))))

    def exchange(self, route: Route) -> float:
        """Send the staged rows along the route; return the seconds of waiting for other ranks.

        Collective. If a row arrives wrong, all are sent again; then every rank raises `Damaged`.
        """
        need = int(route.need[self.world.rank])
        if need > self.slots:
            raise ValueError(f"the graph needs {need} slots, the window has {self.slots}")
        self.exchanges += 1
        wrong = np.zeros(0, np.int64)
        for _ in range(2):
            waited = self._move(route)
            arrived = zip(self.view, route.arriving.tolist(), strict=False)
            expected = [checksum(row, sender, self.exchanges) for row, sender in arrived]
            wrong = np.flatnonzero(np.array(expected, np.uint64) != self.sums[:need])
            if not self.world.agree(len(wrong) > 0):
                return waited
        hosts, text = self.world.hosts(), ""
        if len(wrong):
            source, rank = int(route.source[wrong[0]]), self.world.rank
            ends = f"from rank {source} ({hosts[source]}) to rank {rank} ({hosts[rank]})"
            library = f"{self.transfer} of {LIBRARY}"
            text = f"a model {ends} did not arrive as it was sent, twice, by {library}"
        raise Damaged(self.world.first(text))

    def _move(self, route: Route) -> float:
        """Send the rows and their checksums once; return the seconds of waiting for other ranks."""
        start = time.perf_counter()
        if self.window:
            self.window.Fence()
        else:
            self.world.comm.Barrier()
        waited = time.perf_counter() - start
        # one checksum for each row, to however many ranks it goes
        for row, sender in {row: sender for row, _, _, sender in route.puts}.items():
            self._sent[row] = checksum(self.staging[row], sender, self.exchanges)
        if self.window:
            self._put(route)
        else:
            self._send(route)
        return waited

    def _put(self, route: Route) -> None:
        """Put rows and checksums into other ranks' windows, from memory that lasts until Fence."""
        width = self.staging.shape[1]
        for row, rank, slot, _ in route.puts:
            target = [slot * self.row_bytes, width, MPI.FLOAT]
            self.window.Put([self.staging[row], MPI.FLOAT], rank, target)
            target = [self._sums_start[rank] + 8 * slot, 1, MPI.UINT64_T]
            self.window.Put([self._sent[row:], 1, MPI.UINT64_T], rank, target)
        self.window.Fence()

    def _send(self, route: Route) -> None:
        """Exchange rows as messages; those between two ranks keep their order, as slots do."""
        comm, requests = self.world.comm, []
        for slot, rank in enumerate(route.source.tolist()):
            requests.append(comm.Irecv(self.view[slot], rank, ROW))
            requests.append(comm.Irecv(self.sums[slot : slot + 1], rank, SUM))
        for row, rank, _, _ in route.puts:
            requests.append(comm.Isend(self.staging[row], rank, ROW))
            requests.append(comm.Isend(self._sent[row : row + 1], rank, SUM))
        MPI.Request.Waitall(requests)

    def take(self, slot: int) -> np.ndarray:
        """Return a copy of the row in a slot, float32 `[W]`."""
        return self.view[slot].copy()

    def close(self) -> None:
        """Free the slots on all ranks, and before it their views: reading them would crash."""
        if self.closed:
            return
        self.closed = True
        del self.view, self.sums
        if self.window:
            self.window.Fence()
            self.window.Free()
