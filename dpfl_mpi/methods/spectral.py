"""Spectral: partners of one's own kind (clients with alike data), found by all sketches together.

Shared: nothing; models move along a graph, and sketches to all.
Personal: w_i.
Scored: w_i after training, before averaging.

Partners are random at first. A client's own training then pulls the averaged model back towards
the client's kind: u_i sums these movements, and every client sends a sketch of u_i, a byte per
entry. Two sketches alone say little where a client has few images. But what kinds have in common
spans few directions, one less than there are kinds: the eigenvectors of the sketches' scatter whose
eigenvalues are larger than any after each entry's sign was drawn anew (Hong, Sheng and Dobriban,
arXiv 2012.02985). Where none is larger, partners stay random.

Clients are compared in these directions alone. B_c - 1 partners are drawn from all that are at
least half as similar as the most similar one: the most similar alone often choose one another, and
others would be in no average. The clients choose after rounds 1, 2, 4, 8, ...; a new choice
counts if kinds explain more of the sketches than when the last one was made. While partners are
random, more rounds say more of a client's kind; later ones say more of its own images.

Eigenvectors are found in whole numbers, exact in any order: all processors choose alike.
"""

import math
from dataclasses import dataclass

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import OWN_GRAPH, Candidates, Federation, State, Tensor, _given, random_graph
from dpfl_mpi.settings import option

METHOD = _given.method("Spectral", ignores=OWN_GRAPH, sends_models=False, look="#332288 P")
UNIT = 2**12  # length of a sketch in whole numbers
LARGEST = 2**26  # entry of a scatter; 1024 of them times STEP add up exactly
STEP = 2**16  # largest entry of a vector that a scatter is multiplied by
ITERATIONS = 100  # of the power method for one direction
AT_ONCE = 4096  # sketches summed at a time
DRAWS = 9  # of signs: a level of 10 %, at which kinds are found where there are none


@dataclass(frozen=True)
class Options:
    entries: int = option(1024, "entries of a sketch, a byte each", low=2, high=1024)


def init(fed: Federation) -> State:
    u = fed.common_row() * 0
    state = _given.init(fed, lambda w: random_graph.draw(fed, 0, fed.candidates()))
    shared = {**state["shared"], "explained": np.zeros(1)}
    return {"client": {"u": u, **state["client"]}, "shared": shared}


def round(fed: Federation, state: State, t: int) -> State:
    start, u = state["client"]["w"].clone(), state["client"]["u"]
    explained = state["shared"]["explained"]

    def graph(w: Tensor) -> CollaborationGraph:
        u.add_(w - start)
        chosen = state["shared"]["chosen"]
        if t & (t - 1):  # not 1, 2, 4, 8, ...
            return chosen
        place_NJ, share = kinds(fed, u)
        if share <= explained[0]:
            return chosen
        explained[0] = share
        found = of_own_kind(fed, place_NJ, fed.candidates())
        return found.where(fed.learners, chosen)  # an absent client's choice stays

    def among(_: Tensor, candidates: Candidates) -> CollaborationGraph:
        return of_own_kind(fed, kinds(fed, u)[0], candidates)

    state = _given.round(fed, state, graph, among)
    shared = {**state["shared"], "explained": explained}
    return {"client": {"u": u, **state["client"]}, "shared": shared}


def kinds(fed: Federation, u: Tensor) -> tuple[np.ndarray, float]:
    """Return `places` by this round's sketches of u `[K, W]`. Collective."""
    rng = streams.stream(fed.run.seed, streams.SKETCH, 0, fed.round)
    return places(fed.tell(fed.sketches(u, fed.options["entries"])), rng)


def of_own_kind(
    fed: Federation, place_NJ: np.ndarray, candidates: Candidates
) -> CollaborationGraph:
    """Return the graph of partners of one's kind; who has no kind draws from all. Collective."""
    senders = []
    for k in fed.ids:
        j, room = candidates.of(k), candidates.room[k]
        cosine = place_NJ[j] @ place_NJ[k]  # whole numbers
        near = 2 * cosine >= cosine.max(initial=0)
        senders.append(fed.shuffle(k, j[near] if near.any() else j, 0)[:room])
    return fed.collect(senders)


def places(sketch_NE: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """Return where each client lies in the directions of kinds, and what share these explain.

    The places are whole numbers of length `STEP`, float64 `[N, J]`; J is 0 where all is noise. The
    share is that of the squared distances of unit sketches from their mean. `rng` draws noise.
    """
    present = sketch_NE.any(1)  # who is absent sends zeros
    middle = np.rint(sum(units(part).sum(0) for part in parts(sketch_NE)) / max(present.sum(), 1))

    def centred(part: np.ndarray) -> np.ndarray:
        return np.where(part.any(1, keepdims=True), units(part) - middle, 0.0)

    def scatter(signs: bool = False) -> np.ndarray:
        """Return the sum of t t' over clients; with drawn `signs`, t' t between few clients."""
        out = np.zeros((len(middle), len(middle)))
        for part in map(centred, parts(sketch_NE)):
            if signs:
                part *= 2 * rng.integers(2, size=part.shape, dtype=np.int8) - 1
                if len(sketch_NE) < len(middle):
                    return part @ part.T
            out += part.T @ part
        return out

    found = scatter()
    edge = max(float(np.linalg.eigvalsh(scatter(signs=True))[-1]) for _ in range(DRAWS))
    number = int((np.linalg.eigvalsh(found) > edge).sum())
    if not number:
        return np.zeros((len(sketch_NE), 0)), 0.0
    vectors_JE, values = largest(found, number)
    weight_J = np.sqrt(values / (vectors_JE**2).sum(1))
    place = np.concatenate([centred(part) @ vectors_JE.T * weight_J for part in parts(sketch_NE)])
    square = sum(column * column for column in place.T)  # in a fixed order
    place *= (STEP / np.sqrt(np.maximum(square, np.finfo(float).tiny)))[:, None]
    return np.rint(place), float(values.sum() / np.trace(found))


def parts(sketch_NE: np.ndarray) -> list[np.ndarray]:
    return np.split(sketch_NE, range(AT_ONCE, len(sketch_NE), AT_ONCE))


def units(sketch: np.ndarray) -> np.ndarray:
    """Return sketches of length `UNIT`, rounded, float64."""
    whole = sketch.astype(np.float64)
    length = np.sqrt((whole**2).sum(1, keepdims=True))
    return np.rint(whole * (UNIT / np.maximum(length, 1)))


def largest(scatter_EE: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvectors `[J, E]`, in whole numbers, and values `[J]`, the `number` largest.

    The power method finds them one by one; each is taken out of the scatter before the next.
    """
    scale = LARGEST / np.abs(scatter_EE).max()
    rest, vectors, values = np.rint(scatter_EE * scale), list[np.ndarray](), list[float]()
    for _ in range(number):
        v = rest[rest.diagonal().argmax()]
        for _ in range(ITERATIONS):
            v = rest @ to_whole(v)
        v = to_whole(v)
        square = float(v @ v)
        value = math.fsum(v * (rest @ v)) / square  # the same in any order
        vectors.append(v)
        values.append(value / scale)
        rest = np.rint(rest - np.outer(v, v) * (value / square))
    return np.array(vectors), np.array(values)


def to_whole(v_E: np.ndarray) -> np.ndarray:
    """Return a vector in whole numbers of at most `STEP`."""
    return np.rint(v_E * (STEP / max(np.abs(v_E).max(), 1.0)))
