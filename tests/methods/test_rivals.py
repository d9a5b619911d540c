"""Numbers worked out by hand of methods whose whole rounds have twins in `twins.py`, and of the verb that they tell small values by."""

import itertools

import numpy as np
import pytest
import torch
from launch import federation

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import dac, dfedpgp, pfedsv

SMALL = {"clients": 4, "rounds": 1, "tau_train": 1, "budget": 3}


def test_dac_hears_of_clients_from_the_most_similar_that_knows_them():
    s = np.array([0, 3.0, 2.0, 0, 0, 7.0])
    told = np.array([[1.0, 0, 0, 0, 0, 4.0], [5.0, 0, 0, 6.0, 0, 8.0]])  # by clients 1 and 2
    dac.hop(s, np.array([False, False, False, True, True, True]), told, np.array([3.0, 2.0]))
    assert s.tolist() == [
        0,
        3,
        2,
        6,
        0,
        4,
    ]  # of 3 only client 2 knows, of 4 none; client 1 is the more similar, so 5 is as it says


def test_dac_draws_as_softmax_says():
    """Of 4 clients, drawn one after the other by weights 1, 2, 3: the frequencies of the first and of pairs, within 4 standard errors."""
    with federation(SMALL | {"method": "dac"}) as fed:
        pairs = {}
        for t in range(2000):
            fed.members.round = t
            pair = tuple(dac.drawn(fed, 0, np.log([9, 1, 2, 3])).tolist())
            pairs[pair] = pairs.get(pair, 0) + 1
    for a, b in ((1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)):
        p = a / 6 * b / (6 - a)
        assert abs(pairs[a, b] / 2000 - p) < 4 * np.sqrt(p * (1 - p) / 2000)


def test_shapley_values_by_hand():
    """Player 2 is worth something only with player 1; through all 6 orders they share what they add together."""
    worth = {(0,): 1, (1,): 0, (2,): 0, (0, 1): 1, (0, 2): 1, (1, 2): 6, (0, 1, 2): 7}
    asked = []

    def of(coalitions):
        asked.append(len(coalitions))
        return np.array([worth[tuple(sorted(s))] for s in coalitions], float)

    orders = list(itertools.permutations(range(3)))
    assert pfedsv.shapley(orders, of, 0.0) == pytest.approx([1, 3, 3]) and asked == [7]
    assert pfedsv.shapley([[1, 0, 2]], of, -4.0) == pytest.approx([1, 4, 6])


def test_push_sum_keeps_the_mass_and_its_bytes_are_the_body():
    """Of 4 clients 0 sends to all: it keeps a quarter. Of clients 0 to 3 out_j is 3, 2, 0, 0."""
    graph = CollaborationGraph.from_lists([[1], [0], [0, 1], [0]])
    with federation(SMALL | {"method": "dfedpgp"}) as fed:
        order, head = fed.row_of, fed.columns("head")
        u = fed.common_row()
        u[:] = torch.arange(1.0, 5)[fed.ids, None]
        new, mu = dfedpgp.push(fed, u, np.ones(4), graph, head)
        assert mu[order].tolist() == pytest.approx([1 / 4 + 1 / 3, 1 / 4 + 1 / 3, 1 / 4 + 1 / 3 + 1, 1 / 4 + 1])
        at = [1 / 4 + 2 / 3, 1 / 4 + 2 / 3, 1 / 4 + 2 / 3 + 3, 1 / 4 + 4]
        assert new[order][:, 0].tolist() == pytest.approx(at)
        assert new[order][:, head][:, 0].tolist() == [1, 2, 3, 4]
        size = 4 * int((~head[: fed.ensemble.size]).sum()) + 8  # and mu
        assert fed._parts.mail.wire.bytes.tolist() == [3 * size, 2 * size, 0, 0]


def test_what_is_told_comes_from_everyone_and_costs_its_bytes():
    graph = CollaborationGraph.from_lists([[1, 2], [0], [], [1]])
    with federation(SMALL | {"method": "dac", "send": "layers=body"}) as fed:
        wire, values = fed._parts.mail.wire, np.arange(8.0).reshape(4, 2)[fed.ids]
        assert fed.tell(values, graph).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert wire.bytes.tolist() == [16, 32, 16, 0]
        fed.tell(values[:, 0].astype(np.float32))
        assert wire.bytes.tolist() == [28, 44, 28, 12]
        with pytest.raises(UserError, match=r"fed.tell was given list of shape \(\); it takes a NumPy array of 4 rows"):
            fed.tell([1, 2, 3, 4])
