"""The one-sided window of a rank, and who puts which row where along a graph."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.world import World


@dataclass(frozen=True)
class Route:
    """Who puts which row where, for one graph: made once, used every round."""

    puts: list[tuple[int, int, int]]  # this rank's row, the rank it goes to, the slot there
    arriving: np.ndarray  # senders on other ranks, ascending: slot i of this window is the i-th's
    need: np.ndarray  # slots used on each rank [ranks]

    def slots(self, senders: Any) -> np.ndarray:
        """Return the slot of each of these senders; `UserError` if one sends nothing to here."""
        # one search instead of a pass over all that arrive: every client asks for its own
        at, senders = np.searchsorted(self.arriving, senders), np.asarray(senders)
        last = len(self.arriving) - 1
        found = np.zeros(senders.shape, bool)
        if last >= 0:
            found = self.arriving[np.minimum(at, last)] == senders
        if not found.all():
            missing = f"the model of client {senders[~found][0]} is asked for"
            raise UserError(f"{missing}, and was not sent along the graph")
        return at


def route(
    graph: CollaborationGraph, owner: np.ndarray, row: np.ndarray, rank: int, ranks: int
) -> Route:
    """Return the route of a graph, by each client's rank and row there `[N]`.

    A sender that several clients of a rank want gets one slot there.
    """
    to = owner[graph.receivers()]
    remote = to != owner[graph.senders]
    # sorted: np.unique hashes the numbers, which takes a hundred times as long
    wanted = np.sort(to[remote] * graph.n + graph.senders[remote])
    to, sender = np.divmod(wanted[np.diff(wanted, prepend=-1) != 0], max(graph.n, 1))
    need = np.bincount(to, minlength=ranks)
    slots = np.arange(len(to)) - (np.cumsum(need) - need)[to]  # `to` ascends
    leaving, arriving = owner[sender] == rank, to == rank
    columns = row[sender[leaving]], to[leaving], slots[leaving]
    puts = list(zip(*(column.tolist() for column in columns), strict=True))
    return Route(puts, sender[arriving], need)


class Inbox:
    """One window of `slots` rows that other ranks put into, and the rows that this rank puts."""

    def __init__(self, world: World, staging: np.ndarray, slots: int):
        """Allocate the window. Collective. `staging`: this rank's persistent float32 `[K, W]`."""
        self.world, self.staging, self.slots = world, staging, slots
        self.row_bytes = staging.shape[1] * 4
        world.check_memory(slots * self.row_bytes, "set a smaller --window_gb")
        size = slots * self.row_bytes
        self.window: Any = MPI.Win.Allocate(size, self.row_bytes, comm=world.comm)
        memory: Any = self.window.tomemory()
        self.view: np.ndarray = np.ndarray((slots, staging.shape[1]), np.float32, memory)

    def exchange(self, route: Route) -> float:
        """Put the staged rows along the route; return the seconds until the slowest rank came.

        Collective: Fence, one Put per row and rank, Fence. The origin of a Put is a staging row: a
        temporary would pass in shared memory and crash between nodes.
        """
        if self.window is None:
            raise ValueError("this Inbox is closed")
        need, width = route.need[self.world.rank], self.staging.shape[1]
        if need > self.slots:
            raise ValueError(f"the graph needs {need} slots, the window has {self.slots}")
        start = time.perf_counter()
        self.window.Fence()
        waited = time.perf_counter() - start
        for row, rank, slot in route.puts:
            self.window.Put([self.staging[row], MPI.FLOAT], rank, [slot, width, MPI.FLOAT])
        self.window.Fence()
        return waited

    def take(self, slot: int) -> np.ndarray:
        """Return a copy of the row in a slot, float32 `[W]`."""
        return self.view[slot].copy()

    def close(self) -> None:
        """Free the window on all ranks, its view first: to read it later would crash."""
        if self.window is not None:
            del self.view
            self.window.Fence()
            self.window.Free()
            self.window = None
