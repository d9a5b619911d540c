"""`Members`: who the clients are, and who of them takes part. `Candidates`: whom each may ask.

A client may join, leave and join again (--churn), stop early (--patience), diverge (its model is
not finite), or be a newcomer that joins after the last round. The senders of a client are those
whose models it averages with; its budget B_c is their greatest number, itself included.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.data.partition import Partition
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.limits import Limits
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.mpi.placement import Placement
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.ensemble import LARGEST, largest


@dataclass(frozen=True, eq=False)
class Candidates:
    """Whose models each client may ask for at one moment. All ranks have the same."""

    receives: np.ndarray  # bool [N]: who may ask
    sends: np.ndarray  # bool [N]: who may be asked
    room: np.ndarray  # int64 [N]: how many others' models a client may choose
    reach: CollaborationGraph | None  # the senders that each receiver can reach; None: everyone
    stays: CollaborationGraph | None = None  # senders that a client has, and so needs not ask
    nearest: CollaborationGraph | None = None  # the M most similar senders that --candidates leaves

    def of(self, k: int) -> np.ndarray:
        """Return the candidates of client k, ascending, whether or not it has room for any."""
        if not self.receives[k]:
            return np.zeros(0, np.int64)
        graph = self.nearest or self.reach
        found = self._senders if graph is None else graph.of(k)
        if self.stays is not None:
            found = np.setdiff1d(found, self.stays.of(k))
        return found[(found != k) & self.sends[found]]

    def asked_by(self, k: int) -> np.ndarray:
        """Return the candidates of client k, ascending; none where it has no room."""
        return self.of(k) if self.room[k] > 0 else np.zeros(0, np.int64)

    @functools.cached_property
    def _senders(self) -> np.ndarray:
        return np.flatnonzero(self.sends)


class Members(Placement):
    """The clients of a run. Every array is the same on every rank, except `ids` `[K]`."""

    def __init__(
        self,
        world: World,
        partition: Partition,
        limits: Limits,
        *,
        stopped_serve: bool,
        advice: str,
        names: Sequence[str] = (),
    ):
        super().__init__(world, partition.sizes("train"))
        self.limits = limits
        self.stopped_serve = stopped_serve  # clients that have stopped early still send
        # a client that diverges ends the run by an error that ends with this; "": it is excluded
        self.advice = advice
        self.names = names  # of all clients, where the data have names
        self.p = partition.p  # the weight of every client in an average [N]
        self.reach = limits.reach  # the senders that each client can reach; None: everyone
        self.diverged_round = np.full(self.n, -1)  # -1: the client has a finite model
        self.stopped_round = np.full(self.n, -1)  # the last round of a client that stopped early
        self.joined = np.ones(self.n, bool)  # who has joined and not left
        self.yet_to_choose = np.ones(self.n, bool)  # and has not chosen senders since
        self.begin(0)

    def begin(self, number: int, time: float = 0.0) -> None:
        """Begin a round at a simulated time in seconds, without --network at its own number."""
        before = self.joined
        self.round, self.in_rounds = number, True
        self.joined = self.limits.joined(number, time, before)
        if not self.joined.any():
            allowed = "allowed is at least one client at any time"
            raise UserError(f"--churn leaves nobody in round {number}; {allowed}")
        self.yet_to_choose = self.joined & (self.yet_to_choose | ~before) & (number > 0)
        self.trains = self.stopped_round < 0  # others that take part only send
        able = self.joined if self.stopped_serve else self.joined & self.trains
        self.present = self.limits.present(number, able)

    def begin_after(self, newcomers: np.ndarray | None = None) -> None:
        """Begin the training after the last round: of all, or of `newcomers`, bool `[N]`."""
        self.in_rounds = False
        self.trains = self.joined if newcomers is None else newcomers
        self.present = self.joined | self.trains

    def stop(self, local: np.ndarray) -> None:
        """Let the local clients that bool `[K]` marks stop early, after this round. Collective."""
        stopping = self.of_all(local) & (self.stopped_round < 0)
        self.stopped_round[stopping] = self.round

    @property
    def all_stopped(self) -> bool:
        """Whether every client has stopped or diverged, and at least one has stopped."""
        stopped = self.stopped_round >= 0
        return bool((stopped | ~self.alive | self.limits.newcomers).all() and stopped.any())

    @property
    def benign(self) -> np.ndarray:
        """The clients that reported means are over, bool `[N]`: honest, and no newcomers."""
        return ~(self.limits.flipped | self.limits.attackers | self.limits.newcomers)

    @property
    def alive(self) -> np.ndarray:
        """Who has a finite model, bool `[N]`."""
        return self.diverged_round < 0

    @property
    def most_senders(self) -> np.ndarray:
        """How many others' models each may average with, B_c - 1, or 0 if it diverged, `[N]`."""
        return np.where(self.alive, self.limits.most_senders, 0)

    @property
    def participants(self) -> np.ndarray:
        """Who takes part in some round and has a finite model, bool `[N]`."""
        return self.alive & ~self.limits.newcomers

    @property
    def active(self) -> np.ndarray:
        """Who takes part in this round and has a finite model, bool `[N]`."""
        return self.alive & self.present

    @property
    def learners(self) -> np.ndarray:
        """Who trains and receives in this round, bool `[N]`: active and not stopped early."""
        return self.active & self.trains

    def candidates(
        self, room: np.ndarray | None = None, stays: CollaborationGraph | None = None
    ) -> Candidates:
        """Return whom each client may ask now: not the senders that it has in the graph `stays`.

        It may choose `room` `[N]` of them; None: as many as its budget allows.
        """
        room = self.most_senders if room is None else np.where(self.alive, room, 0)
        return Candidates(self.learners, self.active & self.joined, room, self.reach, stays)

    def reachable(self, k: int) -> np.ndarray:
        """Return the clients that take part and that client k can reach, ascending, without k."""
        return self.candidates().of(k)

    def among_active(self, graph: CollaborationGraph) -> CollaborationGraph:
        """Return the part of a graph that is from active clients to those that train."""
        if self.learners.all():
            return graph
        return graph.only(self.learners[graph.receivers()] & self.active[graph.senders])

    def check_rows(self, w_KW: Any, width: int, verb: str) -> None:
        """Raise `UserError` unless these are rows of this rank's clients, float32 `[K, W]`."""
        shape = [len(self.ids), width]
        right = isinstance(w_KW, Tensor) and w_KW.dtype == torch.float32
        if not right or list(w_KW.shape) != shape:
            kind = str(getattr(w_KW, "dtype", type(w_KW).__name__)).removeprefix("torch.")
            given = f"{type(w_KW).__name__} {kind} {list(getattr(w_KW, 'shape', []))}"
            takes = f"it takes the rows of this rank's clients, Tensor float32 {shape}"
            raise UserError(f"{verb} was given {given}; {takes}")
        if len(w_KW) and w_KW.stride(1) != 1:
            given = "rows whose numbers do not lie side by side in memory, as after .T"
            raise UserError(f"{verb} was given {given}; make them so by .contiguous()")
        if len(w_KW) > 1 and w_KW.stride(0) < width:
            given = "rows that share their memory, as after .expand"
            raise UserError(f"{verb} was given {given}; make them so by .clone()")

    def check_graph(self, graph: CollaborationGraph, name: str) -> None:
        """Raise `UserError` unless this is a graph of all clients, without loops or repeats."""
        if not isinstance(graph, CollaborationGraph) or graph.n != self.n:
            right = isinstance(graph, CollaborationGraph)
            kind = f"graph of {graph.n} clients" if right else type(graph).__name__
            makes = "fed.collect makes a graph of the senders of each client"
            raise UserError(f"{name} is a {kind}; {makes}")
        receivers = graph.receivers()
        loops = graph.senders == receivers
        repeated = np.diff(receivers * graph.n + graph.senders, prepend=-1) == 0
        for wrong, sender in (
            (loops, "itself as a sender; its own model is in the mean anyway"),
            (repeated, "one sender twice"),
        ):
            if wrong.any():
                raise UserError(f"{name} gives client {receivers[wrong][0]} {sender}")

    def check_budget(self, graph: CollaborationGraph, name: str) -> None:
        """Raise `UserError` where an active client has more senders than its budget allows."""
        most_senders = self.most_senders
        over = np.flatnonzero((graph.degrees() > most_senders) & self.active)
        if len(over):
            k = over[0]
            allows = f"its budget allows {most_senders[k]}"
            budget = "(--budget is B_c, its own model included)"
            raise UserError(
                f"{name} gives {self.called(k)} {graph.degrees()[k]} senders; {allows} {budget}"
            )

    def called(self, k: Any) -> str:
        return f"client {k} ({self.names[k]})" if self.names else f"client {k}"

    def exclude_diverged(self, w_KW: Tensor) -> None:
        """Exclude clients whose row is not finite or beyond LARGEST, or end the run. Collective."""
        finite = self.of_all(largest(w_KW) < LARGEST)  # false for NaN as well
        for k in np.flatnonzero(~finite & self.alive):
            if self.advice:
                why = f"its model is not finite or has a weight beyond {LARGEST:g}"
                where = f"{self.called(k)} diverged in round {self.round}"
                raise UserError(f"{where}: {why}; {self.advice}")
            self.diverged_round[k] = self.round

    def collect(self, local: Sequence[Senders]) -> CollaborationGraph:
        """Return on every rank the graph, from the senders of each local client. Collective."""
        for k, senders in zip(self.ids, local, strict=False):
            numbers = np.asarray(senders)
            if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
                given = f"a {type(senders).__name__} for client {k}"
                takes = "it takes for each of this rank's clients the numbers of its senders"
                raise UserError(f"fed.collect was given {given}; {takes}, such as np.array([3, 5])")
        if len(local) != len(self.ids):
            given = f"senders for {len(local)} clients"
            raise UserError(f"fed.collect was given {given}; this rank has {len(self.ids)}")
        return self.graph_of(local)
