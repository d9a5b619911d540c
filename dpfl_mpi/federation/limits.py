"""What limits a client: its budget, whom it can reach, when it takes part, whose labels are flipped, who lies, who comes later.

The paper gives every client the same budget, lets everyone reach everyone and all take part; here these limitations are lifted. All draws
come from keyed streams of the Run's seed, so every rank draws the same without talking.

Axes: N clients, T rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.world import World
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.files import is_file
from dpfl_mpi.settings.texts import nearest, of_clients
from dpfl_mpi.storage.foreign import TEXT, Unreadable, read_text


@dataclass(frozen=True)
class Limits:
    """The limits of a Run's clients."""

    most_senders: np.ndarray  # int64 [N]: B_c - 1, with how many other clients' models a client may average
    reach: CollaborationGraph | None  # the senders each receiver can reach; None: everyone reaches everyone
    available: np.ndarray  # [T, N] of 0 and 1: who can take part; no rows: everyone can, always
    flipped: np.ndarray  # bool [N]: who holds flipped labels
    participation: float  # share of those available that takes part in a round
    seed: int
    liars: np.ndarray  # bool [N]: who attacks
    newcomers: np.ndarray  # bool [N]: who comes after the last round

    def present(self, t: int, can: np.ndarray | None = None) -> np.ndarray:
        """Return who takes part in round t, bool `[N]`: of those available that `can` `[N]` a share, at least one; all of them in round 0."""
        n = len(self.most_senders)
        able = np.flatnonzero(self.available[t - 1]) if 0 < t <= len(self.available) else np.arange(n)
        able = able if can is None else able[can[able]]
        if t > 0 and self.participation < 1:
            count = max(1, nearest(self.participation, len(able)))
            able = streams.stream(self.seed, streams.PRESENT, 0, t).permutation(able)[:count]  # of none: none
        out = np.zeros(n, bool)
        out[able] = True
        return out


def limits_of(run: Run, world: World) -> Limits:
    """Return the limits of a resolved Run on every rank. Collective: root reads the files.

    Raises:
        UserError: on every rank, where a file does not hold what it should.
    """

    held = world.share(lambda: {"most_senders": most_senders(run), "available": availability(run)})

    def edges() -> dict[str, np.ndarray]:
        graph = reach_graph(run)
        return {} if graph is None else {"indptr": graph.indptr, "senders": graph.senders}

    near = world.share(edges)
    reach = CollaborationGraph(**near) if near else None
    senders_N, available = held["most_senders"], held["available"]
    return Limits(senders_N, reach, available, flipped(run), run.participation, run.seed, liars(run), newcomers(run))


def most_senders(run: Run) -> np.ndarray:
    """Return with how many other clients' models each client may average, int64 `[N]`.

    With --no-flipped_run_ggc a client with flipped labels has 0: it trains alone, and still sends its model.

    Raises:
        UserError: the file does not hold one budget per client.
    """
    n, kind = run.clients, str(run.budget)
    if is_file(run.budget):
        words = read(kind, "budget").split()
        if len(words) != n or not all(w == "inf" or (whole(w) and int(w) >= 1) for w in words):
            raise UserError(
                f"--budget is {kind}, which must hold {n} numbers, one per client: whole and at least 1, or inf"
            )
        b_c = np.array([n + 1 if w == "inf" else int(w) for w in words])
    elif kind.startswith("uniform:"):
        low, high = (int(v) for v in kind.split(":")[1:])
        b_c = streams.stream(run.seed, streams.BUDGET, 0, 0).integers(low, high + 1, n)
    else:
        b_c = np.full(n, run.most_senders + run.budget_counts_self)
    most = np.minimum(b_c - run.budget_counts_self, n - 1)
    if not run.flipped_run_ggc:
        most[flipped(run)] = 0
    return most


def flipped(run: Run) -> np.ndarray:
    """Return which clients hold flipped labels, bool `[N]`: floor(flip_share N) of them, drawn uniformly."""
    if str(run.attack).startswith("label_flip:"):
        return liars(run)
    return drawn(run, streams.FLIP, run.flip_share)


def liars(run: Run) -> np.ndarray:
    """Return who attacks, bool `[N]`: with the same seed the same clients, whatever the attack, and those that --flip_share draws."""
    return drawn(run, streams.FLIP, float(run.attack.partition(":")[2]) if run.attack else 0.0)


def newcomers(run: Run) -> np.ndarray:
    """Return who comes after the last round, bool `[N]`: floor(newcomers N) of them, drawn uniformly."""
    return drawn(run, streams.NEWCOMERS, run.newcomers)


def drawn(run: Run, purpose: int, share: float) -> np.ndarray:
    """Return a share of the clients, as `of_clients` counts them, drawn uniformly, bool `[N]`."""
    n = run.clients
    out = np.zeros(n, bool)
    out[streams.stream(run.seed, purpose, 0, 0).permutation(n)[: of_clients(share, n)]] = True
    return out


def reach_graph(run: Run) -> CollaborationGraph | None:
    """Return who can receive from whom: the senders each receiver can reach, itself excluded; None where everyone reaches everyone.

    Raises:
        UserError: the file holds something other than lines of two client numbers, receiver and sender.
    """
    if run.reach is None:
        return None
    n = run.clients
    kind, _, value = run.reach.partition(":")
    near = np.zeros((n, n), bool)
    rng = streams.stream(run.seed, streams.REACH, 0, 0)
    if is_file(run.reach):
        lines = [line.split() for line in read(run.reach, "reach").splitlines() if line.strip()]
        if not all(len(words) == 2 and all(whole(w) and int(w) < n for w in words) for words in lines):
            raise UserError(
                f"--reach is {run.reach}, which must hold lines of two client numbers from 0 to {n - 1}: receiver sender"
            )
        edges = np.array(lines, np.int64).reshape(-1, 2)
        near[edges[:, 0], edges[:, 1]] = True
    elif kind == "geometric":
        place = rng.random((n, 2))
        for k in range(n):  # row by row: all at once would take 32 N^2 bytes
            near[k] = ((place[k] - place) ** 2).sum(1) <= float(value) ** 2
    elif kind == "sites":
        site = rng.permutation(n) % int(value)
        near = site[:, None] == site[None]
    else:
        for group in value.split(";"):
            members = [int(k) for k in group.split(",")]
            near[np.ix_(members, members)] = True
    np.fill_diagonal(near, False)
    return CollaborationGraph.from_lists(np.flatnonzero(row) for row in near)


def availability(run: Run) -> np.ndarray:
    """Return who can take part in rounds 1 to T, `[T, N]` of 0 and 1; without --available an array of no rows.

    Raises:
        UserError: the file does not hold T lines of N zeros and ones, or a round in which nobody is there.
    """
    n, t = run.clients, run.rounds
    if run.available is None:
        return np.zeros((0, n), np.int64)
    lines = [line.replace(",", " ").split() for line in read(run.available, "available").splitlines() if line.strip()]
    if len(lines) < t or any(len(line) != n or not set(line) <= {"0", "1"} for line in lines):
        raise UserError(
            f"--available is {run.available}, which must hold at least {t} lines (rounds) of {n} (clients) zeros or ones"
        )
    table = np.array(lines, np.int64).reshape(-1, n)
    empty = np.flatnonzero(table[:t].sum(1) == 0)
    if len(empty):
        raise UserError(
            f"--available is {run.available}; round {empty[0] + 1} has no client, and at least one must be there"
        )
    return table


def whole(word: str) -> bool:
    """Return whether a word is a whole number of a size that arrays hold."""
    return word.isdecimal() and len(word) <= 18


def read(path: str, flag: str) -> str:
    """Return a small text file."""
    try:
        return read_text(Path(path), TEXT)
    except Unreadable:
        raise UserError(f"--{flag} is {path}, which is not a readable text file") from None
