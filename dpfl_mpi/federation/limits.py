"""What limits a client: budget, reach, presence, flipped labels, lies, coming later, drift. All is drawn from keyed streams, alike on every rank."""

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
from dpfl_mpi.settings.values import nearest


@dataclass(frozen=True)
class Limits:
    run: Resolved
    most_senders: np.ndarray  # int64 [N]: B_c - 1, with how many other clients' models a client may average
    reach: CollaborationGraph | None  # the senders each receiver can reach; None: everyone reaches everyone
    available: np.ndarray  # [T, N] of 0 and 1: who can take part; no rows: everyone can, always
    events: np.ndarray  # float64 [E, 3] of the file of --churn: time, client, 1 to join or 0 to leave
    flipped: np.ndarray  # bool [N]: who holds flipped labels
    liars: np.ndarray  # bool [N]: who attacks
    newcomers: np.ndarray  # bool [N]: who comes after the last round

    def there(self, t: int, time: float, before: np.ndarray) -> np.ndarray:
        """Return who has come and not left by round t, which begins at a time, bool `[N]`, from who was there in the one before: all but newcomers,
        who come after the last one; with --churn as drawn, at first as in the long run, at least one; or as the file says."""
        out, churn = np.ones(len(before), bool), self.run.churn
        if churn and not churn.path:
            drawn = streams.stream(self.run.seed, streams.CHURN, 0, t).random(len(before))
            chance = np.where(self.newcomers, np.inf, drawn)
            stay = np.where(before, chance >= churn.leave, chance < churn.join)
            out = stay if t else chance < churn.join / (churn.leave + churn.join)
            out[chance.argmin()] |= not out.any()
        out[self.events[::-1, 1].astype(int)] = self.events[::-1, 2] == 0  # before its first event
        for _, k, joins in self.events[self.events[:, 0] <= time]:
            out[int(k)] = joins
        return out & ~self.newcomers

    def present(self, t: int, there: np.ndarray) -> np.ndarray:
        """Return who takes part in round t, bool `[N]`: a share of those who are `there` `[N]` and available, at least one; all of them in round 0."""
        out = np.zeros(len(self.most_senders), bool)
        able = np.flatnonzero((self.available[t - 1] if 0 < t <= len(self.available) else ~out) & there)
        if t > 0 and self.run.participation < 1:
            count = max(1, nearest(self.run.participation, len(able)))
            able = streams.stream(self.run.seed, streams.PRESENT, 0, t).permutation(able)[:count]  # of none: none
        out[able] = True
        return out


class Drift:
    """--drift SHARE:ROUND: from that round on a share of the clients has the labels of two classes exchanged, for training and scoring alike."""

    def __init__(self, run: Resolved, classes: int):
        share, self.round = (run.drift.share, run.drift.round) if run.drift else (0.0, 0)  # round 0: never, or already
        self.drifted = drawn(run, streams.DRIFT, share)
        self.classes = np.sort(streams.stream(run.seed, streams.DRIFT, 0, 1).permutation(classes)[:2])


def limits_of(run: Resolved, world: World) -> Limits:
    """Return the limits of a Run on every rank. Collective: root has what the files hold that the Run names."""

    def held() -> dict[str, np.ndarray]:
        graph = reach_graph(run)
        reach = {} if graph is None else vars(graph)
        available = run.available.table if run.available else np.zeros((0, run.clients), np.int64)
        events = run.churn.table if run.churn and run.churn.path else np.zeros((0, 3))
        return {"most_senders": most_senders(run), "available": available, "events": events} | reach

    told = world.share(held)
    reach = CollaborationGraph(told["indptr"], told["senders"]) if "indptr" in told else None
    who = {"flipped": flipped(run), "liars": liars(run), "newcomers": drawn(run, streams.NEWCOMERS, run.newcomers)}
    return Limits(run, told["most_senders"], reach, told["available"], told["events"], **who)


def most_senders(run: Resolved) -> np.ndarray:
    """Return with how many others' models each client may average, int64 `[N]`: with --no-flipped_run_ggc a client with flipped labels none."""
    rng = streams.stream(run.seed, streams.BUDGET, 0, 0)
    most = run.budget.of_clients(run.clients, run.budget_counts_self, rng)
    most = np.minimum(most, run.asked)
    return most if run.flipped_run_ggc else np.where(flipped(run), 0, most)


def flipped(run: Resolved) -> np.ndarray:
    """Return which clients hold flipped labels, bool `[N]`: floor(flip_share N) of them, drawn uniformly."""
    if run.attack and run.attack.kind == "label_flip":
        return liars(run)
    return drawn(run, streams.FLIP, run.flip_share)


def liars(run: Resolved) -> np.ndarray:
    """Return who attacks, bool `[N]`: with the same seed the same clients whatever the attack, those that --flip_share draws."""
    return drawn(run, streams.FLIP, run.attack.share if run.attack else 0.0)


def drawn(run: Resolved, purpose: int, share: float) -> np.ndarray:
    """Return a share of the clients, rounded down, drawn uniformly, bool `[N]`."""
    out = np.zeros(run.clients, bool)
    count = math.floor(Fraction(str(share)) * run.clients)  # exact, where 0.29 * 100 in floats is below 29
    out[streams.stream(run.seed, purpose, 0, 0).permutation(run.clients)[:count]] = True
    return out


def reach_graph(run: Resolved) -> CollaborationGraph | None:
    """Return who can receive from whom: the senders each receiver can reach, itself excluded; None where everyone reaches everyone."""
    n, reach = run.clients, run.reach
    if reach is None:
        return None
    near = np.zeros((n, n), bool)
    rng = streams.stream(run.seed, streams.REACH, 0, 0)
    if reach.kind == "file":
        near[reach.table[:, 0], reach.table[:, 1]] = True
    elif reach.kind == "geometric":
        place = rng.random((n, 2))
        for k in range(n):  # row by row: all at once would take 32 N^2 bytes
            near[k] = ((place[k] - place) ** 2).sum(1) <= reach.radius**2
    elif reach.kind == "sites":
        site = rng.permutation(n) % reach.sites
        near = site[:, None] == site[None]
    else:
        for members in reach.groups:
            near[np.ix_(members, members)] = True
    np.fill_diagonal(near, False)
    return CollaborationGraph.from_lists(np.flatnonzero(row) for row in near)


def graphs_of(run: Resolved, world: World) -> list[CollaborationGraph]:
    """Return on every rank the graphs of rounds 0 to T that the result of --graphs holds; none without --graphs. Collective."""
    if run.graphs is None:
        return []
    held = world.share(lambda: {f"{name}{t}": a for t, g in enumerate(recorded(run)) for name, a in vars(g).items()})
    return [CollaborationGraph(held[f"indptr{t}"], held[f"senders{t}"]) for t in range(run.rounds + 1)]


def recorded(run: Resolved) -> list[CollaborationGraph]:
    """Return the graphs that the result of --graphs holds."""
    with Result(str(run.graphs)) as result:
        n, rounds = len(result["client/p"]), result.last_round
        if n != run.clients or rounds < run.rounds:
            has = f"--graphs is {run.graphs}, with graphs of {n} clients in rounds 0 to {rounds}"
            raise UserError(f"{has}; this run has {run.clients} clients and {run.rounds} rounds")
        if result.run.ggc_period > 1 and result.run.ggc_off_rounds == "skip":
            raise UserError(f"--graphs is {run.graphs}, which did not average in every round (--ggc_off_rounds skip)")
        return [result.chosen(t) for t in range(run.rounds + 1)]
