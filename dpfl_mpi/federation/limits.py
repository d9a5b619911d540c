"""`Limits`: the budget, reach, absences and role of each client, the same on every rank.

They are drawn from random streams keyed by the seed, or read from files that settings name.
`limits_of` makes them, `Members` (members.py) applies them. `graphs_of` reads those of --graphs.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import NAMED, CollaborationGraph, named
from dpfl_mpi.mpi.world import World
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.values import Text, at_most, nearest, whole
from dpfl_mpi.storage.foreign import Unreadable, read_text, refused_as


@dataclass(frozen=True)
class Limits:
    """What limits every client."""

    seed: int
    participation: float  # the share of the available clients that takes part in a round
    churn: Text | None  # --churn
    reach: CollaborationGraph | None  # the senders that each receiver can reach; None: everyone
    most_senders: np.ndarray  # int64 [N]: B_c - 1, how many others' models each may average
    available: np.ndarray  # [T, N]: 1 for who can take part in round t + 1; no rows: everyone
    events: np.ndarray  # float64 [E, 3], the file of --churn: time, client, 1 to join, 0 to leave
    flipped: np.ndarray  # bool [N]: who has flipped labels
    attackers: np.ndarray  # bool [N]: who attacks
    newcomers: np.ndarray  # bool [N]: who joins after the last round
    drifted: np.ndarray  # bool [N]: who exchanges two classes, from the round of --drift on

    def joined(self, t: int, time: float, before: np.ndarray) -> np.ndarray:
        """Return who has joined and not left at the start of round t, bool `[N]`.

        With chances in --churn, clients that were there `before`, in the last round, may leave and
        others may join: a Markov chain that begins in its stationary state. Or its file says who.
        """
        out, churn = np.ones(len(before), bool), self.churn
        if churn and not churn.path:
            drawn = streams.stream(self.seed, streams.CHURN, 0, t).random(len(before))
            chance = np.where(self.newcomers, np.inf, drawn)
            if t:
                out = np.where(before, chance >= churn.leave, chance < churn.join)
            else:
                out = chance < churn.join / (churn.leave + churn.join)
            out[chance.argmin()] |= not out.any()  # at least one stays
        # a client whose first event is to leave is there at first: reversed, that is written last
        backwards = self.events[::-1]
        out[backwards[:, 1].astype(int)] = backwards[:, 2] == 0
        for _, k, joins in self.events[self.events[:, 0] <= time]:
            out[int(k)] = joins
        return out & ~self.newcomers

    def present(self, t: int, joined: np.ndarray) -> np.ndarray:
        """Return who takes part in round t, bool `[N]`: in round 0 all that have `joined` `[N]`.

        Later a share of those available, at least one. After the table's rounds all are available.
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


def limits_of(run: Resolved, world: World) -> Limits:
    """Return the limits of a Run, made on root, which has the files that it names. Collective."""
    # the stream of --flip_share, so that attackers of label_flip are the clients that it flips
    attack, attacked = run.attack, run.attack.share if run.attack else 0.0
    flipped = attacked if attack and attack.kind == "label_flip" else run.flip_share
    shares = {
        "flipped": (streams.FLIP, flipped),
        "attackers": (streams.FLIP, attacked),
        "newcomers": (streams.NEWCOMERS, run.newcomers),
        "drifted": (streams.DRIFT, run.drift.share if run.drift else 0.0),
    }

    def on_root() -> dict[str, np.ndarray]:
        most = run.budget.of_clients(run.clients, run.budget_counts_self, run.seed)
        arrays = {"most_senders": np.minimum(most, run.most_asked)}
        arrays["available"] = np.zeros((0, run.clients), np.int64)
        arrays["events"] = np.zeros((0, 3))
        if run.available:
            arrays["available"] = run.available.table
        if run.churn and run.churn.path:
            arrays["events"] = run.churn.table
        for role, (purpose, share) in shares.items():  # a random share of all clients each
            order = streams.stream(run.seed, purpose, 0, 0).permutation(run.clients)
            arrays[role] = np.isin(np.arange(run.clients), order[: at_most(share, run.clients)])
        if not run.flipped_run_ggc:
            arrays["most_senders"] = np.where(arrays["flipped"], 0, arrays["most_senders"])
        rng = streams.stream(run.seed, streams.REACH, 0, 0)
        return arrays | (vars(reach_graph(run.reach, run.clients, rng)) if run.reach else {})

    arrays = world.share(on_root)
    reach = run.reach and CollaborationGraph(arrays.pop("indptr"), arrays.pop("senders"))
    return Limits(run.seed, run.participation, run.churn, reach, **arrays)


def reach_graph(reach: Text, n: int, rng: np.random.Generator) -> CollaborationGraph:
    """Return the graph of the senders that each of n clients can reach, as --reach says."""
    if reach.kind == "file":
        receivers, senders = np.unique(reach.table, axis=0).T
        apart = receivers != senders
        return CollaborationGraph.from_edges(n, receivers[apart], senders[apart])
    if reach.kind == "geometric":
        points = rng.random((n, 2))  # in a square
    elif reach.kind == "sites":
        site = rng.permutation(n) % reach.sites
    else:
        groups = np.array([np.isin(np.arange(n), group) for group in reach.groups])

    def reached(k: int) -> np.ndarray:
        """Return the clients that k can reach."""
        if reach.kind == "geometric":
            near = ((points[k] - points) ** 2).sum(1) <= reach.radius**2
        else:
            near = site == site[k] if reach.kind == "sites" else groups[groups[:, k]].any(0)
        near[k] = False
        return np.flatnonzero(near)

    return CollaborationGraph.from_lists(map(reached, range(n)))


def graphs_of(run: Resolved, world: World) -> list[CollaborationGraph]:
    """Return the graphs that --graphs gives rounds 0 to T, or none. Collective."""

    def on_root() -> dict[str, np.ndarray]:
        if Path(str(run.graphs)).suffix in (".h5", ".hdf5"):
            graphs, of_round = graphs_in_result(run), np.arange(run.rounds + 1)
        else:
            graphs, of_round = graphs_in_text(str(run.graphs), run.clients, run.rounds)
        senders = np.concatenate([graph.senders for graph in graphs])
        indptr = np.stack([graph.indptr for graph in graphs])
        return {"indptr": indptr, "senders": senders, "of_round": of_round}

    if run.graphs is None:
        return []
    if run.graphs in NAMED:
        return [named(run.graphs, run.clients)] * (run.rounds + 1)
    arrays = world.share(on_root)
    ends = np.cumsum(arrays["indptr"][:, -1])
    senders = np.split(arrays["senders"], ends[:-1])
    graphs = [CollaborationGraph(*both) for both in zip(arrays["indptr"], senders, strict=True)]
    return [graphs[i] for i in arrays["of_round"]]


def graphs_in_result(run: Resolved) -> list[CollaborationGraph]:
    """Return the graphs that clients chose in rounds 0 to T of the result that --graphs names."""
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


def graphs_in_text(path: str, n: int, rounds: int) -> tuple[list[CollaborationGraph], np.ndarray]:
    """Return the graphs in a text file, and which of them each round has, `[T+1]`."""
    with refused_as(f"--graphs is {path}, which is not a readable text file", (Unreadable,)):
        rows = read_text(Path(path)).splitlines()
    lines = [words for row in rows if (words := row.replace(",", " ").split())]
    right = {len(words) for words in lines} in ({2}, {3}) and all(map(whole, chain(*lines)))
    edges = np.array(lines if right else [[n, n]], np.int64)
    sent, received = edges[:, -2:].T
    if edges[:, -2:].max() >= n or (sent == received).any():
        numbers = f"two client numbers from 0 to {n - 1}, unlike"
        must = f"which must hold lines 'from to' of {numbers}, or 'round from to'"
        raise UserError(f"--graphs is {path}, {must}")
    # rows of round, from, to; without rounds all are of round 0
    edges = np.unique(np.pad(edges, ((0, 0), (3 - edges.shape[1], 0))), axis=0)
    begins = np.unique(edges[:, 0])  # a graph holds until the next round in the file
    if begins[0] > 1:
        why = f"whose first graph is of round {begins[0]}; allowed is 0 or 1"
        raise UserError(f"--graphs is {path}, {why}")
    parts = (edges[edges[:, 0] == t] for t in begins)
    graphs = [CollaborationGraph.from_edges(n, part[:, 2], part[:, 1]) for part in parts]
    of_round = np.searchsorted(begins, np.arange(rounds + 1), side="right") - 1
    return graphs, np.maximum(of_round, 0)
