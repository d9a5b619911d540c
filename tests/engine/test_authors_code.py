"""What the authors' code does otherwise than the paper says, on demand: averages one client after the other, means over mini-batches."""

import numpy as np
import pytest
import reference
import torch
from launch import differences, federation, run_here, run_mpi

from dpfl_mpi.graph import CollaborationGraph

N = 9
SMALL = {"clients": N, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": 4}


def test_serial_average_is_one_client_after_the_other():
    with federation(SMALL | {"averaging": "serial"}) as fed:
        rng = np.random.default_rng(3)
        graph = CollaborationGraph.from_lists(
            rng.choice([j for j in range(N) if j != k], k % 4, replace=False) for k in range(N)
        )
        models = rng.normal(size=(N, fed.ensemble.size)).astype(np.float32)
        w = fed.ensemble.zeros(N)
        w[:, : fed.ensemble.size] = torch.from_numpy(models[fed.ids])
        serial = fed.average(w, graph).numpy()[fed.row_of, : fed.ensemble.size]
        now, order = list(models), fed.sums.order
        for k in order:
            if len(graph.of(k)):
                now[k] = reference.average(fed.p, now, {int(k), *map(int, graph.of(k))}).astype(np.float32)
        assert sorted(order) == list(range(N))
        np.testing.assert_allclose(serial, now, rtol=0, atol=1e-6)
        at_once = np.array(
            [reference.average(fed.p, models, {k, *map(int, graph.of(k))}) if k % 4 else models[k] for k in range(N)]
        )
        changed = [k for k in range(N) if np.abs(serial[k] - at_once[k]).max() > 1e-3]
        late = [k for k in range(N) if any(j % 4 and list(order).index(j) < list(order).index(k) for j in graph.of(k))]
        assert changed == late and changed  # who averages over an average, and no one else


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 3 / 5), (2, (1.0 + 0.5 + 0.0) / 3), (4, (0.75 + 0.0) / 2), (5, 3 / 5)]
)
def test_means_over_mini_batches(size, expected):
    with federation(SMALL) as fed:
        fed.scoring.metric_batch = size
        assert fed.scoring.mean(np.array([True, True, True, False, False])) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("block", [1, 3])
def test_the_search_has_the_same_mean(block):
    with federation(SMALL | {"metric": "batch", "batch_size": 7}, block=block) as fed:
        fed.begin_round(1)
        w = fed.local_opt(fed.common_row(), 1)
        rows = fed.backend.blocks[0]
        pair = torch.stack([w[rows], 0.5 * w[rows]], 1).contiguous()
        counted = np.ones(rows.stop - rows.start, int)
        batched = fed.scoring.reward(rows, pair, counted)
        for i in range(rows.start, rows.stop):
            n = int(fed.clients.n_val[i])
            losses = fed.backend.score(rows, pair[:, 1].contiguous())[0][i - rows.start][:n]
            parts = [losses[at : at + 7].mean() for at in range(0, n, 7)]
            assert batched[i - rows.start, 1] == pytest.approx(-np.mean(parts), rel=1e-12)
        fed.scoring.metric_batch = 10**6
        whole = fed.scoring.reward(rows, pair, counted)
        fed.scoring.metric_batch = 0
        np.testing.assert_allclose(whole, fed.scoring.reward(rows, pair, counted), rtol=1e-6)


def test_ranks_with_the_authors_ways(tmp_path):
    """Both together give the same bits on one rank and on three, also where the window makes many passes."""
    fields = SMALL | {"averaging": "serial", "metric": "batch", "participation": 0.7}
    one = run_here(tmp_path / "1.h5", fields)
    three = run_mpi(3, tmp_path / "3.h5", fields, window_gb=1e-4)
    assert differences(one, three) == []
