"""The one-sided RMA window, and who puts which row where along a graph."""

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

    puts: list[tuple[int, int, int]]  # my row, rank, slot there
    arriving: np.ndarray  # the senders on other ranks, ascending: each one's place is its slot of my window
    need: np.ndarray  # [ranks] slots used

    def slots(self, senders: Any) -> np.ndarray:
        """Return the slot of each of these senders, which are on other ranks; of one that does not send to mine there is none, a `UserError`."""
        # one search, without a pass over all that arrive: every client asks for its own
        at, senders, last = np.searchsorted(self.arriving, senders), np.asarray(senders), len(self.arriving) - 1
        here = np.zeros(senders.shape, bool) if last < 0 else self.arriving[np.minimum(at, last)] == senders
        if not here.all():
            raise UserError(f"the model of client {senders[~here][0]} is asked for, and was not sent along the graph")
        return at


def route(graph: CollaborationGraph, owner: np.ndarray, row: np.ndarray, rank: int, ranks: int) -> Route:
    """Return the route of a graph, by each client's rank and row there `[N]`; a sender that several clients of a rank want gets one slot."""
    to = owner[graph.receivers()]
    remote = to != owner[graph.senders]
    wanted = np.sort(to[remote] * graph.n + graph.senders[remote])  # np.unique hashes numbers: a hundred times slower
    to, sender = np.divmod(wanted[np.diff(wanted, prepend=-1) != 0], max(graph.n, 1))  # rank by rank
    need = np.bincount(to, minlength=ranks)
    slots = np.arange(len(to)) - (np.cumsum(need) - need)[to]
    mine, arriving = owner[sender] == rank, to == rank
    puts = list(zip(row[sender[mine]].tolist(), to[mine].tolist(), slots[mine].tolist(), strict=True))
    return Route(puts, sender[arriving], need)


class Inbox:
    """One RMA window of `slots` rows that other ranks Put models into, and the staging rows that this rank Puts from.

    A graph that needs more slots than the window has cannot be sent.
    """

    def __init__(self, world: World, staging: np.ndarray, slots: int):
        """Allocate collectively. `staging` is this rank's persistent float32 `[K, W]` rows, page-locked where it can be."""
        self.world, self.staging, self.slots = world, staging, slots
        self.row_bytes = staging.shape[1] * 4
        world.check_memory(slots * self.row_bytes, "set a smaller --window_gb")
        self.window: Any = MPI.Win.Allocate(slots * self.row_bytes, self.row_bytes, comm=world.comm)
        memory: Any = self.window.tomemory()
        self.view: np.ndarray = np.ndarray((slots, staging.shape[1]), np.float32, memory)

    def exchange(self, route: Route) -> float:
        """Put the staged rows along the route: Fence, one Put per row and rank, Fence; return the seconds until the slowest rank came. Collective.

        Every Put's origin is a staging row, unchanged until the closing Fence: a temporary would pass in shared memory and crash between nodes.
        """
        if self.window is None:
            raise ValueError("this Inbox is closed")
        if route.need[self.world.rank] > self.slots:
            raise ValueError(f"the graph needs {route.need[self.world.rank]} slots, the window has {self.slots}")
        start = time.perf_counter()
        self.window.Fence()
        waited = time.perf_counter() - start
        for row, rank, slot in route.puts:
            self.window.Put([self.staging[row], MPI.FLOAT], rank, [slot, self.staging.shape[1], MPI.FLOAT])
        self.window.Fence()
        return waited

    def take(self, slot: int) -> np.ndarray:
        """Return a copy of the row in a slot, float32 `[W]`."""
        return self.view[slot].copy()

    def close(self) -> None:
        """Free the window on all ranks, and the view before it: reading that of a freed window is a segmentation fault."""
        if self.window is not None:
            del self.view
            self.window.Fence()
            self.window.Free()
            self.window = None
