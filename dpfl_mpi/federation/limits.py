"""`Limits`: what limits each client, drawn from keyed streams, alike on every rank."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.world import World
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.values import Text, nearest


@dataclass(frozen=True)
class Limits:
    """Budget, reach, availability, churn and role of every client."""

    seed: int
    participation: float  # the share of the available clients that takes part in a round
    churn: Text | None  # --churn
    most_senders: np.ndarray  # int64 [N]: B_c - 1, how many others' models each may average
    reach: CollaborationGraph | None  # the senders that each receiver can reach; None: everyone
    available: np.ndarray  # [T, N] of 0 and 1: who can take part; no rows: everyone, always
    events: np.ndarray  # float64 [E, 3] of the file of --churn: time, client, 1 to join, 0 to leave
    flipped: np.ndarray  # bool [N]: who has flipped labels
    liars: np.ndarray  # bool [N]: who attacks
    newcomers: np.ndarray  # bool [N]: who joins after the last round

    def joined(self, t: int, time: float, before: np.ndarray) -> np.ndarray:
        """Return who has joined and not left by the start of round t, bool `[N]`.

        `before` `[N]` is the answer for the round before. With --churn this is a Markov chain begun
        in its stationary state, in which at least one client stays; or a file has the events.
        """
        out, churn = np.ones(len(before), bool), self.churn
        if churn and not churn.path:
            drawn = streams.stream(self.seed, streams.CHURN, 0, t).random(len(before))
            chance = np.where(self.newcomers, np.inf, drawn)
            if t:
                out = np.where(before, chance >= churn.leave, chance < churn.join)
            else:
                out = chance < churn.join / (churn.leave + churn.join)
            out[chance.argmin()] |= not out.any()
        first_events = self.events[::-1]  # in this order a client's first event is written last
        out[first_events[:, 1].astype(int)] = first_events[:, 2] == 0
        for _, k, joins in self.events[self.events[:, 0] <= time]:
            out[int(k)] = joins
        return out & ~self.newcomers

    def present(self, t: int, joined: np.ndarray) -> np.ndarray:
        """Return who takes part in round t, bool `[N]`.

        In round 0 these are all that have `joined` `[N]`; later a share of those that are
        available, at least one.
        """
        out = np.zeros(len(self.most_senders), bool)
        if 0 < t <= len(self.available):
            joined = joined & (self.available[t - 1] > 0)
        able = np.flatnonzero(joined)
        if t > 0 and self.participation < 1:
            count = max(1, nearest(self.participation, len(able)))
            able = streams.stream(self.seed, streams.PRESENT, 0, t).permutation(able)[:count]
        out[able] = True
        return out


class Drift:
    """--drift SHARE:ROUND: from that round on a share of the clients exchanges two classes.

    Their labels change for training and scoring alike.
    """

    def __init__(self, run: Resolved, classes: int):
        self.round = run.drift.round if run.drift else 0  # 0: there is none, or it has happened
        self.drifted = drawn(run, streams.DRIFT, run.drift.share if run.drift else 0.0)
        rng = streams.stream(run.seed, streams.DRIFT, 0, 1)
        self.classes = np.sort(rng.permutation(classes)[:2])


def limits_of(run: Resolved, world: World) -> Limits:
    """Return the limits of a Run. Collective: root has the contents of the files it names."""

    def on_root() -> dict[str, np.ndarray]:
        graph = reach_graph(run)
        no_table, no_events = np.zeros((0, run.clients), np.int64), np.zeros((0, 3))
        return {
            "most_senders": most_senders(run),
            "available": run.available.table if run.available else no_table,
            "events": run.churn.table if run.churn and run.churn.path else no_events,
            **({} if graph is None else vars(graph)),
        }

    arrays = world.share(on_root)
    reach = None
    if "indptr" in arrays:
        reach = CollaborationGraph(arrays.pop("indptr"), arrays.pop("senders"))
    return Limits(
        seed=run.seed,
        participation=run.participation,
        churn=run.churn,
        reach=reach,
        flipped=flipped(run),
        liars=liars(run),
        newcomers=drawn(run, streams.NEWCOMERS, run.newcomers),
        **arrays,
    )


def most_senders(run: Resolved) -> np.ndarray:
    """Return how many others' models each client may average with, int64 `[N]`.

    With --no-flipped_run_ggc a client with flipped labels may average with none.
    """
    rng = streams.stream(run.seed, streams.BUDGET, 0, 0)
    most = run.budget.of_clients(run.clients, run.budget_counts_self, rng)
    most = np.minimum(most, run.asked)
    return most if run.flipped_run_ggc else np.where(flipped(run), 0, most)


def flipped(run: Resolved) -> np.ndarray:
    """Return which clients have flipped labels, bool `[N]`: floor(flip_share N), at random."""
    if run.attack and run.attack.kind == "label_flip":
        return liars(run)
    return drawn(run, streams.FLIP, run.flip_share)


def liars(run: Resolved) -> np.ndarray:
    """Return who attacks, bool `[N]`: for every attack those that --flip_share would draw."""
    return drawn(run, streams.FLIP, run.attack.share if run.attack else 0.0)


def drawn(run: Resolved, purpose: int, share: float) -> np.ndarray:
    """Return a share of the clients, rounded down, drawn uniformly, bool `[N]`."""
    out = np.zeros(run.clients, bool)
    count = math.floor(Fraction(str(share)) * run.clients)  # in floats 0.29 * 100 is below 29
    out[streams.stream(run.seed, purpose, 0, 0).permutation(run.clients)[:count]] = True
    return out


def reach_graph(run: Resolved) -> CollaborationGraph | None:
    """Return the senders that each receiver can reach, without itself; None: everyone."""
    n, reach = run.clients, run.reach
    if reach is None:
        return None
    reached = np.zeros((n, n), bool)
    rng = streams.stream(run.seed, streams.REACH, 0, 0)
    if reach.kind == "file":
        reached[reach.table[:, 0], reach.table[:, 1]] = True
    elif reach.kind == "geometric":
        place = rng.random((n, 2))
        for k in range(n):  # row by row: all at once would take 32 N^2 bytes
            reached[k] = ((place[k] - place) ** 2).sum(1) <= reach.radius**2
    elif reach.kind == "sites":
        site = rng.permutation(n) % reach.sites
        reached = site[:, None] == site[None]
    else:
        for group in reach.groups:
            reached[np.ix_(group, group)] = True
    np.fill_diagonal(reached, False)
    return CollaborationGraph.from_lists(np.flatnonzero(row) for row in reached)


def graphs_of(run: Resolved, world: World) -> list[CollaborationGraph]:
    """Return the graphs of rounds 0 to T in the result of --graphs, or none. Collective."""
    if run.graphs is None:
        return []

    def on_root() -> dict[str, np.ndarray]:
        graphs = enumerate(recorded(run))
        return {f"{name}{t}": array for t, graph in graphs for name, array in vars(graph).items()}

    arrays = world.share(on_root)
    rounds = range(run.rounds + 1)
    return [CollaborationGraph(arrays[f"indptr{t}"], arrays[f"senders{t}"]) for t in rounds]


def recorded(run: Resolved) -> list[CollaborationGraph]:
    """Return the graphs in the result of --graphs."""
    with Result(str(run.graphs)) as result:
        n, rounds = len(result["client/p"]), result.last_round
        if n != run.clients or rounds < run.rounds:
            has = f"with graphs of {n} clients in rounds 0 to {rounds}"
            wants = f"this run has {run.clients} clients and {run.rounds} rounds"
            raise UserError(f"--graphs is {run.graphs}, {has}; {wants}")
        if result.run.ggc_period > 1 and result.run.ggc_off_rounds == "skip":
            why = "which did not average in every round (--ggc_off_rounds skip)"
            raise UserError(f"--graphs is {run.graphs}, {why}")
        return [result.chosen(t) for t in range(run.rounds + 1)]
