"""Spectral: partners of one's own kind (clients with alike data), found by all sketches together.

Shared: nothing; models move along a graph, and sketches to all.
Personal: w_i.
Scored: w_i after training, before averaging.

Partners are random at first. A client's own training then pulls the averaged model back towards
the client's kind. u_i is the sum of these movements, and every client sends a sketch of it (a count
sketch, a byte per entry). Two sketches alone say little where a client has few images. But the
kinds differ in few directions: the eigenvectors of the sketches' scatter matrix whose eigenvalue is
above the largest of noise, i.e. of that matrix after the sign of each entry was drawn anew (Hong,
Sheng and Dobriban, arXiv 2012.02985).

A client's position is its sketch in these directions alone. Positions of one kind lie around one
point, so each moves twice to the mean of those within 60 degrees (mean shift: Fukunaga and
Hostetler, 1975). Then a client lists all that are at least half as similar to it as the most
similar one. B_c - 1 partners are drawn from its list: if each took the most similar alone, many
would choose one another, and others would be in no average.

Clients look after rounds 1, 2, 4, 8, ... Chance, too, makes some clients alike: unlike shares of
classes, where there are few images. But what chance finds differs from look to look. So all choose
when the lists of two looks in a row have a Jaccard index of at least 0.5, mean over clients. While
partners are random, more rounds say more of a client's kind, and some more of these rounds cost
less than wrong partners. A client chooses once: with partners of its kind, training says more of
its own images. Eigenvectors are computed in whole numbers, whose sums are exact. How many there are
rests on floats (`eigvalsh`).
"""

import math
from dataclasses import dataclass

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import OWN_GRAPH, Candidates, Federation, State, Tensor, _given, random_graph
from dpfl_mpi.settings import option

METHOD = _given.method("Spectral", ignores=OWN_GRAPH, sends_models=False, look="#332288 P")
UNIT = 2**12  # length to which a sketch is brought, in whole numbers
LARGEST = 2**26  # entry of a scatter matrix; 1024 of them times STEP add up exactly
STEP = 2**16  # largest entry of a vector that a scatter matrix is multiplied by
ITERATIONS = 100  # of the power method for one direction
AT_ONCE = 4096  # sketches summed at a time
MOST = 32  # directions
SHIFTS = 2
SAMPLE = 1024  # clients to whose positions others move, whose lists two looks compare
AGREE = 0.5  # clients on both of two lists, as a share of those on either


@dataclass(frozen=True)
class Options:
    entries: int = option(1024, "entries of a sketch, a byte each", low=2, high=1024)


def init(fed: Federation) -> State:
    u = fed.common_row() * 0
    state = _given.init(fed, lambda w: random_graph.draw(fed, 0, fed.candidates()))
    chose = np.zeros(len(fed.ids), bool)
    shared = {**state["shared"], "position": np.zeros((fed.n, MOST), np.int32)}
    return {"client": {"u": u, "chose": chose, **state["client"]}, "shared": shared}


def round(fed: Federation, state: State, t: int, average: _given.Average | None = None) -> State:
    start, u = state["client"]["w"].clone(), state["client"]["u"]
    chose = state["client"]["chose"]
    position_NJ = state["shared"]["position"].astype(np.float64)

    def choose(w: Tensor) -> CollaborationGraph:
        nonlocal position_NJ
        u.add_(w - start)
        omega = state["shared"]["omega"]
        if t & (t - 1):  # t is no power of 2
            return omega
        before, position_NJ = position_NJ, kinds(fed, u)
        if agreement(fed, before, position_NJ) < AGREE:
            return omega
        choosing_N = fed.learners & ~fed.tell(chose)
        if not choosing_N.any():
            return omega
        chose[choosing_N[fed.ids]] = True
        return of_own_kind(fed, position_NJ, fed.candidates()).where(choosing_N, omega)

    def choose_among(_: Tensor, candidates: Candidates) -> CollaborationGraph:
        return of_own_kind(fed, position_NJ, candidates)

    state = _given.round(fed, state, choose, choose_among, average)
    client = {"u": u, "chose": chose, **state["client"]}
    padded = np.zeros((fed.n, MOST), np.int32)
    padded[:, : position_NJ.shape[1]] = position_NJ
    return {"client": client, "shared": {**state["shared"], "position": padded}}


def kinds(fed: Federation, u: Tensor) -> np.ndarray:
    """Return the `positions` of this round's sketches of u `[K, W]`, `gathered`. Collective."""
    rng = streams.stream(fed.run.seed, streams.SKETCH, 0, fed.round)
    sketch_NE = fed.tell(fed.sketches(u, fed.options["entries"]))
    return gathered(positions(sketch_NE, rng), rng)


def agreement(fed: Federation, before_NJ: np.ndarray, position_NJ: np.ndarray) -> float:
    """Return the Jaccard index of a client's lists by two positions. Collective.

    It is the mean over the clients that list others, of about `SAMPLE`; 0 if none does.
    """
    candidates, share = fed.candidates(), np.full(len(fed.ids), np.nan)
    every = -(-fed.n // SAMPLE)
    for i in np.flatnonzero(fed.ids % every == 0):
        k = int(fed.ids[i])
        others = compared(fed, k, candidates)
        now, before = (alike(k, found, others) for found in (position_NJ, before_NJ))
        if either := (now | before).sum():
            share[i] = (now & before).sum() / either
    known = [value for value in fed.tell(share).tolist() if value == value]
    return math.fsum(known) / max(len(known), 1)


def alike(k: int, position_NJ: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return which of these others are on client k's list, bool."""
    similarity = position_NJ[others] @ position_NJ[k]  # whole: exact in any order
    return (similarity > 0) & (2 * similarity >= similarity.max(initial=0))


def compared(fed: Federation, k: int, candidates: Candidates) -> np.ndarray:
    """Return client k's candidates; of many as many as `MOST` equal kinds need to fill a budget."""
    others, few = candidates.of(k), max(SAMPLE, MOST * candidates.room[k])
    if len(others) <= few:
        return others
    rng = streams.stream(fed.run.seed, streams.SKETCH, int(k) + 1, fed.round)
    return rng.choice(others, few, replace=False)


def of_own_kind(
    fed: Federation, position_NJ: np.ndarray, candidates: Candidates
) -> CollaborationGraph:
    """Return the graph of partners of one's kind; who has no kind draws from all. Collective."""
    senders = []
    for k in fed.ids:
        others = compared(fed, k, candidates)
        listed = alike(k, position_NJ, others)
        pool = others[listed] if listed.any() else others
        senders.append(fed.shuffle(k, pool, first=candidates.room[k]))
    return fed.collect(senders)


def positions(sketch_NE: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return each client's position in the J directions in which kinds differ, float64 `[N, J]`.

    They are whole numbers, of length `STEP`. Directions, at most `MOST`, have an eigenvalue above
    the largest of noise, which `rng` draws.
    """
    present = sketch_NE.any(1)  # absent clients send zeros
    mean_E = np.rint(sum(units(part).sum(0) for part in parts(sketch_NE)) / max(present.sum(), 1))

    def centred(part: np.ndarray) -> np.ndarray:
        return np.where(part.any(1, keepdims=True), units(part) - mean_E, 0.0)

    def scatter(signs: bool = False) -> np.ndarray:
        """Return t' t of the centred sketches t `[N, E]`, or t t' (smaller) with drawn signs."""
        out = np.zeros((len(mean_E), len(mean_E)))
        for part in map(centred, parts(sketch_NE)):
            if signs:
                part *= 2 * rng.integers(2, size=part.shape, dtype=np.int8) - 1
                if len(sketch_NE) < len(mean_E):
                    return part @ part.T  # it has the same eigenvalues
            out += part.T @ part
        return out

    scatter_EE = scatter()
    of_noise = np.linalg.eigvalsh(scatter(signs=True))[-1]
    number = int((np.linalg.eigvalsh(scatter_EE) > of_noise).sum())
    if not number:
        return np.zeros((len(sketch_NE), 0))
    vectors_JE = largest(scatter_EE, min(number, MOST))
    weight_J = 1 / np.sqrt((vectors_JE**2).sum(1))
    projected = [centred(part) @ vectors_JE.T * weight_J for part in parts(sketch_NE)]
    return to_length(np.concatenate(projected), STEP)


def gathered(position_NJ: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return each client's position, moved towards the point around which its kind lies."""
    present = np.flatnonzero(position_NJ.any(1))
    sample = position_NJ[np.sort(rng.permutation(present)[:SAMPLE])]
    for _ in range(SHIFTS if len(present) else 0):
        position_NJ = np.concatenate([shifted(part, sample) for part in parts(position_NJ)])
    return position_NJ


def shifted(position: np.ndarray, sample: np.ndarray) -> np.ndarray:
    """Return each position moved to the mean of those in a sample within 60 degrees of it."""
    near = 2 * position @ sample.T >= STEP**2
    means = to_length(near @ sample, STEP)
    return np.where(near.any(1, keepdims=True), means, position)  # alone, it stays


def parts(sketch_NE: np.ndarray) -> list[np.ndarray]:
    return np.split(sketch_NE, range(AT_ONCE, len(sketch_NE), AT_ONCE))


def units(sketch: np.ndarray) -> np.ndarray:
    """Return sketches scaled to the length `UNIT` and rounded, float64."""
    rows = sketch.astype(np.float64)
    return scaled(rows, np.einsum("ne,ne->n", rows, rows), UNIT)  # whole: exact in any order


def to_length(rows: np.ndarray, length: int) -> np.ndarray:
    """Return rows scaled to a length and rounded; rows of zeros stay."""
    return scaled(rows, sum(column**2 for column in rows.T), length)  # in a fixed order


def scaled(rows: np.ndarray, square: np.ndarray, length: int) -> np.ndarray:
    return np.rint(rows * (length / np.sqrt(np.maximum(square, np.finfo(float).tiny)))[:, None])


def largest(scatter_EE: np.ndarray, number: int) -> np.ndarray:
    """Return the eigenvectors of the `number` largest eigenvalues, `[number, E]`, in whole numbers.

    The power method finds them one by one; each is taken out of the matrix before the next.
    """
    scale = LARGEST / np.abs(scatter_EE).max()
    remaining, vectors = np.rint(scatter_EE * scale), list[np.ndarray]()
    for _ in range(number):
        v = remaining[remaining.diagonal().argmax()]
        for _ in range(ITERATIONS):
            v = remaining @ to_whole(v)
        v = to_whole(v)
        square = float(v @ v)
        value = math.fsum(v * (remaining @ v)) / square  # fsum: the same in any order
        vectors.append(v)
        remaining = np.rint(remaining - np.outer(v, v) * (value / square))
    return np.array(vectors)


def to_whole(v_E: np.ndarray) -> np.ndarray:
    """Return a vector scaled to whole numbers of at most `STEP`."""
    return np.rint(v_E * (STEP / max(np.abs(v_E).max(), 1.0)))
