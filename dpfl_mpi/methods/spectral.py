"""Spectral: partners of one's own kind (clients with alike data), found by all sketches together.

Shared: nothing; models move along a graph, and sketches to all.
Personal: w_i.
Scored: w_i after training, before averaging.

Partners are random at first. A client's own training then pulls the averaged model back towards
the client's kind. u_i is the sum of these movements, and every client sends a sketch of it (a count
sketch, a byte per entry). Two sketches alone say little where a client has few images. But the
kinds differ in few directions, one less than there are kinds: the eigenvectors of the sketches'
scatter matrix whose eigenvalue is at least twice the largest of noise, i.e. of that matrix after
the sign of each entry was drawn anew (Hong, Sheng and Dobriban, arXiv 2012.02985). Chance alone
gives clients with few images unlike shares of classes, whose eigenvalues lie between the two.

A client's position in these directions tells its kind; without any, partners stay random. B_c - 1
partners are drawn from all that are at least half as similar as the most similar one: if each took
the most similar alone, many would choose one another, and others would be in no average.

Clients may choose after rounds 1, 2, 4, 8, ... While partners are random, more rounds say more of
a client's kind; once kin are averaged, training says more of its own images. So a choice waits
until two checks in a row find the same number of directions, and a later one counts if they explain
more of the sketches than at the last choice. Eigenvectors are computed in whole numbers, whose
sums are exact: all processors choose alike.
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


@dataclass(frozen=True)
class Options:
    entries: int = option(1024, "entries of a sketch, a byte each", low=2, high=1024)
    clear: float = option(2.0, "least eigenvalue of a direction, in noise's largest", low=1)


def init(fed: Federation) -> State:
    u = fed.common_row() * 0
    state = _given.init(fed, lambda w: random_graph.draw(fed, 0, fed.candidates()))
    shared = {**state["shared"], "explained": np.zeros(1), "directions": np.zeros(1)}
    return {"client": {"u": u, **state["client"]}, "shared": shared}


def round(fed: Federation, state: State, t: int, average: _given.Average | None = None) -> State:
    start, u = state["client"]["w"].clone(), state["client"]["u"]
    explained, directions = state["shared"]["explained"], state["shared"]["directions"]

    def choose(w: Tensor) -> CollaborationGraph:
        u.add_(w - start)
        omega = state["shared"]["omega"]
        if t & (t - 1):  # t is no power of 2
            return omega
        position_NJ, share = kinds(fed, u)
        last, directions[0] = directions[0], position_NJ.shape[1]
        if directions[0] != last or share <= explained[0]:
            return omega
        explained[0] = share
        found = of_own_kind(fed, position_NJ, fed.candidates())
        return found.where(fed.learners, omega)  # an absent client's choice stays

    def choose_among(_: Tensor, candidates: Candidates) -> CollaborationGraph:
        return of_own_kind(fed, kinds(fed, u)[0], candidates)

    state = _given.round(fed, state, choose, choose_among, average)
    shared = {**state["shared"], "explained": explained, "directions": directions}
    return {"client": {"u": u, **state["client"]}, "shared": shared}


def kinds(fed: Federation, u: Tensor) -> tuple[np.ndarray, float]:
    """Return the `positions` of this round's sketches of u `[K, W]`. Collective."""
    rng = streams.stream(fed.run.seed, streams.SKETCH, 0, fed.round)
    sketches = fed.tell(fed.sketches(u, fed.options["entries"]))
    return positions(sketches, rng, fed.options["clear"])


def of_own_kind(
    fed: Federation, position_NJ: np.ndarray, candidates: Candidates
) -> CollaborationGraph:
    """Return the graph of partners of one's kind; who has no kind draws from all. Collective."""
    senders = []
    for k in fed.ids:
        others, room = candidates.of(k), candidates.room[k]
        similarity = (position_NJ @ position_NJ[k])[others]  # whole numbers, exact in any order
        near = 2 * similarity >= similarity.max(initial=0)
        senders.append(fed.shuffle(k, others[near] if near.any() else others, 0)[:room])
    return fed.collect(senders)


def positions(
    sketch_NE: np.ndarray, rng: np.random.Generator, clear: float
) -> tuple[np.ndarray, float]:
    """Return each client's position in the J directions in which kinds differ, float64 `[N, J]`.

    They are whole numbers, of length `STEP`; J is 0 where no eigenvalue is `clear` times the
    largest of noise, which `rng` draws. Return also which share of the sketches' scatter the
    directions explain.
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

    # how many eigenvalues are clearly larger than those of noise
    scatter_EE = scatter()
    of_noise = np.linalg.eigvalsh(scatter(signs=True))[-1]
    number = int((np.linalg.eigvalsh(scatter_EE) >= clear * of_noise).sum())
    if not number:
        return np.zeros((len(sketch_NE), 0)), 0.0
    # project on their eigenvectors, each weighed by the root of its eigenvalue; then to one length
    vectors_JE, values = largest(scatter_EE, number)
    weight_J = np.sqrt(values / (vectors_JE**2).sum(1))
    projected = [centred(part) @ vectors_JE.T * weight_J for part in parts(sketch_NE)]
    position = np.concatenate(projected)
    square = sum(column**2 for column in position.T)  # in a fixed order
    position *= (STEP / np.sqrt(np.maximum(square, np.finfo(float).tiny)))[:, None]
    return np.rint(position), float(values.sum() / np.trace(scatter_EE))


def parts(sketch_NE: np.ndarray) -> list[np.ndarray]:
    return np.split(sketch_NE, range(AT_ONCE, len(sketch_NE), AT_ONCE))


def units(sketch: np.ndarray) -> np.ndarray:
    """Return sketches scaled to the length `UNIT` and rounded, float64."""
    entries = sketch.astype(np.float64)
    length = np.sqrt((entries**2).sum(1, keepdims=True))
    return np.rint(entries * (UNIT / np.maximum(length, 1)))


def largest(scatter_EE: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvectors `[J, E]`, in whole numbers, and values `[J]`, the `number` largest.

    The power method finds them one by one; each is taken out of the matrix before the next.
    """
    scale = LARGEST / np.abs(scatter_EE).max()
    remaining, vectors, values = np.rint(scatter_EE * scale), list[np.ndarray](), list[float]()
    for _ in range(number):
        v = remaining[remaining.diagonal().argmax()]
        for _ in range(ITERATIONS):
            v = remaining @ to_whole(v)
        v = to_whole(v)
        square = float(v @ v)
        value = math.fsum(v * (remaining @ v)) / square  # fsum: the same in any order
        vectors.append(v)
        values.append(value / scale)
        remaining = np.rint(remaining - np.outer(v, v) * (value / square))
    return np.array(vectors), np.array(values)


def to_whole(v_E: np.ndarray) -> np.ndarray:
    """Return a vector scaled to whole numbers of at most `STEP`."""
    return np.rint(v_E * (STEP / max(np.abs(v_E).max(), 1.0)))
