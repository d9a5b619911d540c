"""`Members`: who the clients are, which rank computes each (in decreasing order of training size), and who takes part in a round."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.data.partition import Partition
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.candidates import Candidates
from dpfl_mpi.federation.limits import Limits
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.ensemble import LARGEST, largest
from dpfl_mpi.settings import Resolved
from dpfl_mpi.transport.placement import Placement


class Members(Placement):
    """The clients of a run. Every array is the same on every rank but `ids` `[K]`."""

    def __init__(self, world: World, partition: Partition, limits: Limits, run: Resolved):
        super().__init__(world, partition.sizes("train"))
        self.limits = limits
        self.exclude = run.on_divergence == "exclude"  # a client whose model diverges; else it ends the run
        self.serves = run.found("method").topology == "graph"  # a client that has stopped early; else it leaves
        self.p = partition.p  # the weight of every client in an average [N]
        self.advice = "lower --lr, set --clip_norm, or --on_divergence exclude"  # where a client diverges
        self.reach = limits.reach  # whom each client can receive from; None: everyone
        self.diverged_round = np.full(self.n, -1)
        self.stopped_round = np.full(self.n, -1)  # the last round of a client that has stopped early
        self.there = self.new = np.ones(self.n, bool)  # who has come and not left; who has not yet chosen since
        self.begin(0)

    def begin(self, number: int, time: float = 0.0) -> None:
        self.round, self.in_rounds, before = number, True, self.there
        self.there = self.limits.there(number, time, before)
        if not self.there.any():
            raise UserError(f"--churn leaves nobody in round {number}; allowed is at least one client at any time")
        self.new = self.there & (self.new | ~before) & (number > 0)
        self.trains = self.stopped_round < 0  # of who takes part; the others only send
        self.present = self.limits.present(number, self.there if self.serves else self.there & self.trains)

    def begin_after(self, comers: np.ndarray | None = None) -> None:
        """Start what comes after the rounds: all who are there train, also who has stopped early; or only who comes now, bool `[N]`."""
        self.in_rounds, self.trains = False, self.there if comers is None else comers
        self.present = self.there | self.trains

    def stop(self, mine: np.ndarray) -> None:
        """Let the clients of this rank that bool `[K]` marks stop early, with the round that ends. Collective."""
        self.stopped_round[self.of_all(mine) & (self.stopped_round < 0)] = self.round

    @property
    def all_stopped(self) -> bool:
        stopped = self.stopped_round >= 0
        return bool((stopped | ~self.alive | self.limits.newcomers).all() and stopped.any())

    @property
    def benign(self) -> np.ndarray:
        """Which clients reported means are over, bool `[N]`: those with true labels that do not lie and do not come later."""
        return ~(self.limits.flipped | self.limits.liars | self.limits.newcomers)

    @property
    def alive(self) -> np.ndarray:
        """Who has a finite model, bool `[N]`."""
        return self.diverged_round < 0

    @property
    def most_senders(self) -> np.ndarray:
        """With how many others' models each client may average, int64 `[N]`: B_c - 1, and 0 once it has diverged."""
        return np.where(self.alive, self.limits.most_senders, 0)

    @property
    def participants(self) -> np.ndarray:
        """Who takes part in some round and has a finite model, bool `[N]`: all but those who come after the last one (--newcomers)."""
        return self.alive & ~self.limits.newcomers

    @property
    def active(self) -> np.ndarray:
        """Who takes part in this round and has a finite model, bool `[N]`."""
        return self.alive & self.present

    @property
    def awake(self) -> np.ndarray:
        """Who trains and receives, bool `[N]`: who is active and has not stopped early; after the rounds as `begin_after` says."""
        return self.active & self.trains

    def candidates(self, room: np.ndarray | None = None, stays: CollaborationGraph | None = None) -> Candidates:
        """Return whom each client may ask now, and how many of these models it may average: by default its budget allows."""
        room = self.most_senders if room is None else np.where(self.alive, room, 0)
        return Candidates(self.awake, self.active & self.there, room, self.reach, stays)

    def reachable(self, k: int) -> np.ndarray:
        """Return the candidates of client k, ascending: all other clients it can reach that take part."""
        return self.candidates().of(k)

    def among_active(self, graph: CollaborationGraph) -> CollaborationGraph:
        """Return the edges of a graph between clients that take part in this round; a client that has stopped early receives nothing."""
        if self.awake.all():
            return graph
        return graph.only(self.awake[graph.receivers()] & self.active[graph.senders])

    def check_rows(self, w_KW: Any, width: int, verb: str) -> None:
        """Raise `UserError` where a verb is not given the rows of this rank's clients, float32 `[K, W]`."""
        shape = [len(self.ids), width]
        if not isinstance(w_KW, Tensor) or w_KW.dtype != torch.float32 or list(w_KW.shape) != shape:
            kind = str(getattr(w_KW, "dtype", type(w_KW).__name__)).removeprefix("torch.")
            given = f"{type(w_KW).__name__} {kind} {list(getattr(w_KW, 'shape', []))}"
            takes = f"it takes the rows of this rank's clients, Tensor float32 {shape}"
            raise UserError(f"{verb} was given {given}; {takes}")
        if len(w_KW) and w_KW.stride(1) != 1:
            mend = "as after .T; make them so by .contiguous()"
            raise UserError(f"{verb} was given rows whose numbers do not lie side by side in memory, {mend}")

    def check_graph(self, graph: CollaborationGraph, what: str) -> None:
        """Raise `UserError` where this is no graph of the clients, or one that has a client among its own senders, or a sender twice."""
        if not isinstance(graph, CollaborationGraph) or graph.n != self.n:
            of = f"graph of {graph.n} clients" if isinstance(graph, CollaborationGraph) else type(graph).__name__
            raise UserError(f"{what} is a {of}; fed.collect makes a graph of the senders of each client")
        receivers = graph.receivers()
        for wrong, how in (
            (graph.senders == receivers, "itself as a sender; its own model is in the mean anyway"),
            (np.diff(receivers * graph.n + graph.senders, prepend=-1) == 0, "one sender twice"),
        ):
            if wrong.any():
                raise UserError(f"{what} gives client {receivers[wrong][0]} {how}")

    def check_budget(self, graph: CollaborationGraph, what: str) -> None:
        """Raise `UserError` where a graph gives a client that takes part more senders than its budget allows, B_c - 1."""
        self.check_graph(graph, what)
        over = np.flatnonzero((graph.degrees() > self.most_senders) & self.active)
        if len(over):
            k = over[0]
            allows = f"its budget allows {self.most_senders[k]} (--budget is B_c, its own model included)"
            raise UserError(f"{what} gives client {k} {graph.degrees()[k]} senders; {allows}")

    def exclude_diverged(self, w_KW: Tensor) -> None:
        """Exclude clients whose row is not finite, or too large to sum, or end the run by a `UserError` on every rank. Collective."""
        finite = self.of_all(largest(w_KW) < LARGEST)  # false for NaN as well
        for k in np.flatnonzero(~finite & self.alive):
            if not self.exclude:
                why = f"its model is not finite or has a weight beyond {LARGEST:g}"
                raise UserError(f"client {k} diverged in round {self.round}: {why}; {self.advice}")
            self.diverged_round[k] = self.round

    def collect(self, mine: Sequence[Senders]) -> CollaborationGraph:
        """Return on every rank the graph whose edges each rank knows for its own receivers: lists of whole numbers. Collective."""
        for k, senders in zip(self.ids, mine, strict=False):
            numbers = np.asarray(senders)
            if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
                takes = "it takes for each of this rank's clients the numbers of its senders, such as np.array([3, 5])"
                raise UserError(f"fed.collect was given a {type(senders).__name__} for client {k}; {takes}")
        if len(mine) != len(self.ids):
            raise UserError(f"fed.collect was given senders for {len(mine)} clients; this rank has {len(self.ids)}")
        return self.graph_of(mine)
