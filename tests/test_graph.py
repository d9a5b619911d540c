"""Operations on graphs are those on lists, and copy nothing that is large."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_mpi.graph import CollaborationGraph, asymmetry, named, sparsity


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 9))
def test_graph_operations_are_those_of_lists(seed, n):
    rng = np.random.default_rng(seed)

    def some():
        return [rng.permutation(n)[: rng.integers(0, n + 1)] for _ in range(n)]

    mine, theirs, marked = some(), some(), rng.random(n) < 0.5
    g, other = CollaborationGraph.from_lists(mine), CollaborationGraph.from_lists(theirs)
    assert [list(g.of(k)) for k in range(n)] == [sorted(s) for s in mine]
    assert g.indptr.dtype == g.senders.dtype == np.int64
    assert g.degrees().tolist() == [len(s) for s in mine]
    assert g.matrix().tolist() == [[j in senders for j in range(n)] for senders in mine]
    mixed = g.where(marked, other)
    lists = [mine[k] if marked[k] else theirs[k] for k in range(n)]
    assert [list(mixed.of(k)) for k in range(n)] == [sorted(s) for s in lists]
    among = g.only(marked[g.receivers()] & marked[g.senders])
    remaining = [[j for j in sorted(mine[k]) if marked[k] and marked[j]] for k in range(n)]
    assert [list(among.of(k)) for k in range(n)] == remaining
    assert g.within(other) == all(set(a) <= set(b) for a, b in zip(mine, theirs, strict=True))
    assert among.within(g) and CollaborationGraph.empty(n).within(other)


def test_named_graphs():
    def lists(name, n):
        return [named(name, n).of(k).tolist() for k in range(n)]

    assert lists("ring", 4) == [[1, 3], [0, 2], [1, 3], [0, 2]]
    assert lists("ring", 2) == [[1], [0]] and lists("ring", 1) == lists("grid", 1) == [[]]
    # 0 1 2 / 3 4 5 / 6
    assert lists("grid", 7) == [[1, 3], [0, 2, 4], [1, 5], [0, 4, 6], [1, 3, 5], [2, 4], [3]]
    assert lists("complete", 3) == [[1, 2], [0, 2], [0, 1]]


def test_a_few_edges_are_found_in_a_graph_of_all_without_a_copy_of_it():
    n = 400  # in 10 sites of 1,000 clients --reach has 10 million edges, and every exchange looks
    reach = CollaborationGraph.from_lists(np.delete(np.arange(n), k) for k in range(n))
    graph = CollaborationGraph.from_lists([(k + 1) % n, (k + 7) % n] for k in range(n))
    tracemalloc.start()
    assert graph.within(reach)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < reach.senders.nbytes / 4
    assert not reach.within(graph)


def test_measures_against_a_matrix():
    for n in (1, 2, 7):
        matrix = (np.random.default_rng(n).random((n, n)) < 0.4) & ~np.eye(n, dtype=bool)
        graph = CollaborationGraph.from_edges(n, *np.nonzero(matrix))
        one_way, pairs = (matrix & ~matrix.T).sum(), max(n * (n - 1) / 2, 1)
        assert sparsity(graph) == pytest.approx(1 - (matrix | np.eye(n, dtype=bool)).mean())
        assert asymmetry(graph) == (one_way / max(matrix.sum(), 1), one_way / pairs)
