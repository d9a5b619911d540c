"""Counts of clients, models and bytes: shares that floats miss, models that are sent once, arrays that are not held at once."""

import dataclasses

import numpy as np
import pytest
import torch
from launch import federation, run_here
from mpi4py import MPI

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import limits
from dpfl_mpi.graph import CollaborationGraph, rewired
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics import backend
from dpfl_mpi.plan import needs
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.values import nearest, of_clients

SMALL = {"clients": 9, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": 4}


@pytest.mark.parametrize(
    ("rule", "share", "clients", "count"),
    [  # in floats 0.29 * 50 is 14.499999999999998, and 0.29 * 100 is 28.999999999999996
        *((nearest, *case) for case in ((0.29, 50, 15), (0.3, 45, 14), (0.5, 5, 3), (0.24, 10, 2))),
        *((of_clients, *case) for case in ((0.29, 100, 29), (0.58, 50, 29), (0.82, 150, 123), (0.1, 5, 0), (1, 7, 7))),
    ],
)
def test_a_share_is_that_of_the_decimal(rule, share, clients, count):
    assert rule(share, clients) == count
    run = Run(clients=clients, rounds=5, flip_share=share, drift=f"{share}:2").resolve()
    if rule is nearest:
        all_of = limits.limits_of(Run(**SMALL).resolve(), World(MPI.COMM_SELF))
        some = dataclasses.replace(all_of, participation=share, most_senders=np.zeros(clients))
        assert some.present(1).sum() == count
    else:
        assert limits.flipped(run).sum() == limits.Drift(run, 10).drifted.sum() == count


def test_one_after_the_other_sends_each_model_once(tmp_path):
    for averaging in ("synchronous", "serial"):
        path = run_here(tmp_path / f"{averaging}.h5", SMALL | {"method": "random_graph", "averaging": averaging})
        assert (Result(path)["traffic/models_received"][1:] == 3).all()


def test_rewiring_in_parts_draws_what_it_drew_at_once():
    rng = np.random.default_rng(5)
    graph = CollaborationGraph.from_lists(
        rng.choice(np.delete(np.arange(30), k), k % 6, replace=False) for k in range(30)
    )
    receivers, senders = graph.receivers().tolist(), graph.senders.tolist()
    draws, edges = np.random.default_rng(1), set(zip(receivers, senders, strict=True))
    for a, b in draws.integers(0, len(senders), (20 * len(senders), 2)).tolist():
        one, two = (receivers[a], senders[b]), (receivers[b], senders[a])
        if one[0] != one[1] and two[0] != two[1] and one not in edges and two not in edges:
            edges = edges - {(receivers[a], senders[a]), (receivers[b], senders[b])} | {one, two}
            senders[a], senders[b] = senders[b], senders[a]
    found = rewired(graph, np.random.default_rng(1))
    assert set(zip(found.receivers().tolist(), found.senders.tolist(), strict=True)) == edges


def test_who_is_near_row_by_row():
    run = Run(clients=40, reach="geometric:0.4").resolve()
    place = streams.stream(run.seed, streams.REACH, 0, 0).random((40, 2))
    near = ((place[:, None] - place[None]) ** 2).sum(2) <= 0.4**2
    np.fill_diagonal(near, False)
    assert np.array_equal(limits.reach_graph(run).matrix(), near)


def test_a_memory_is_prepared_in_parts(monkeypatch):
    with federation(SMALL, kernels="torch") as fed:
        w = fed.common_row()
        whole, labels = fed.memory(0, w[:1], 30)
        monkeypatch.setattr(backend, "PREPARED", 7 * 64)
        parts, again = fed.memory(0, w[:1], 30)
        assert len(whole) == 30 and torch.equal(labels, again)
        torch.testing.assert_close(parts, whole)


def test_what_a_method_does_not_read_gives_its_run_no_other_name():
    assert Run(method="pens", omega_period=5).slug() == Run(method="pens").slug()
    for method in ("fedavg", "local"):
        assert Run(method=method, averaging="serial").slug() == Run(method=method).slug()
    assert Run(method="random_graph", averaging="serial").slug() != Run(method="random_graph").slug()


def test_a_layer_that_is_not_there_is_refused_at_once_by_its_option():
    refused = pytest.raises(UserError, match=r"--options.layers is foo; allowed are head, none, all, or of the layers")
    with federation(SMALL | {"method": "fedala", "options": {"layers": "foo"}}) as fed, refused:
        find("method", "fedala").init(fed)


def test_too_many_classes_are_refused_before_the_first_round(monkeypatch):
    """Rank 0 holds 20 bytes per client and pair of classes at the end: of 9 clients and 10 classes 18,000."""
    monkeypatch.setattr(needs, "node_memory", lambda shared: (18_000, "a test"))
    federation(SMALL).close()
    monkeypatch.setattr(needs, "node_memory", lambda shared: (17_999, "a test"))
    with pytest.raises(UserError, match=r"of 9 clients and 10 classes need 0.00 GiB on rank 0, .* fewer classes"):
        federation(SMALL)
