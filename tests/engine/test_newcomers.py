"""--newcomers: clients that come after the last round."""

import numpy as np
import pytest
import torch
from launch import differences, federation, run_here, run_mpi

from dpfl_mpi.engine import after
from dpfl_mpi.methods import dpfl
from dpfl_mpi.plugins import find, names
from dpfl_mpi.results import Result

N = 7
SMALL = {"clients": N, "rounds": 4, "tau_init": 1, "tau_train": 1, "budget": 4}


def test_newcomers_of_fedavg_tune_the_global_model(tmp_path):
    """They take no part in the rounds: the others are a FedAvg of five clients, by hand; then each trains on from the global model."""
    fields = SMALL | {"method": "fedavg", "newcomers": 0.3, "rounds": 2}
    with Result(run_here(tmp_path / "a.h5", fields)) as result, federation(fields) as fed:
        new = fed.members.limits.newcomers
        assert new.sum() == 2
        assert np.array_equal(result["client/newcomers"], new) and np.array_equal(result.benign, ~new)
        assert np.isnan(result["round/val_acc"][:, new]).all() and (result["client/epochs"][new] == 0).all()
        w = fed.initial_row()
        for t in (1, 2):
            fed.begin_round(t)
            w_i = fed.local_opt(fed.copies(w), 1)
            here = np.flatnonzero(~new)
            w = sum(fed.p[k] / fed.p[here].sum() * w_i[fed.row_of[k]].double() for k in here).float()
        fed.members.begin(0)
        fed.members.present[:] = True
        fed.training.momentum.clear()
        rows, accuracy = fed.copies(w), []
        for epochs in (0, 1, 4):
            fed.local_opt(rows, epochs)
            fed.log.begin()
            fed.evaluate(rows)
            accuracy.append(fed.notes["test_acc"][fed.row_of[new]])
        stored = result["newcomers/test_acc"]
        assert result["newcomers/epochs"].tolist() == [0, 1, 5] and np.isnan(stored[:, ~new]).all()
        # an image or two: the twin's mean is in other order
        assert np.abs(stored[:, new] - np.array(accuracy)).max() <= 0.05
        assert result["newcomers/models_received"].sum() == 0


def test_newcomers_of_dpfl_choose_among_the_frozen(monkeypatch):
    """What they receive, and their average, by the verbs of a second Federation in which they are ordinary clients."""
    caught = []
    with federation(SMALL | {"newcomers": 0.3, "budget": 3}) as fed:
        state = dpfl.init(fed)
        new = fed.members.limits.newcomers
        assert not new[state["shared"]["omega"].senders].any() and (state["shared"]["omega"].degrees()[new] == 0).all()
        best = fed.scoring.best.clone()
        monkeypatch.setattr(after, "write_series", lambda *args: caught.extend(args[-1]))
        bggc, graphs = fed.bggc, []
        fed.bggc = lambda w: graphs.append((w.clone(), bggc(w))) or graphs[-1][1]
        after.arrive(None, fed._parts, state, find("method", "dpfl"))
        assert len(graphs) == 3
        for rows, omega in graphs:
            assert torch.equal(rows[fed.row_of[~new]], best[fed.row_of[~new]])
            assert (omega.degrees()[~new] == 0).all() and not new[omega.senders].any() and (omega.degrees() <= 2).all()
        assert graphs[0][1].degrees()[new].all()  # an untrained model is worth nothing
        assert torch.equal(graphs[0][0][fed.row_of[new]], fed.common_row()[fed.row_of[new]])
        received = np.stack([notes["models_received"] for notes in caught], 1)
        in_phases = received[fed.row_of[new]]
        assert (in_phases >= 5 + 2).all() and (in_phases <= 5 + 5 + 2).all()  # the sum of five, candidates, the chosen
        assert (received[fed.row_of[~new]] == 0).all()


def test_newcomers_remember_what_the_model_is_that_is_scored(tmp_path):
    """kNN-Per: alone on a rank, or in one block with all, a newcomer kept the representations of the model before its training."""
    fields = {"method": "knnper", "clients": 8, "rounds": 1, "newcomers": 0.25}
    one = run_here(tmp_path / "one.h5", fields)
    assert differences(one, run_mpi(4, tmp_path / "four.h5", fields)) == []
    by_block = [run_here(tmp_path / f"{b}.h5", fields, kernels="torch", block=b) for b in (2, 8)]
    np.testing.assert_allclose(*(Result(path)["newcomers/test_acc"] for path in by_block))


@pytest.mark.parametrize("method", [m for m in names("method") if m != "replay"])
def test_every_method_takes_newcomers_and_absent_clients(tmp_path, method):
    fields = SMALL | {"method": method, "newcomers": 0.3, "rounds": 2, "participation": 0.6}
    if method == "fedrep":  # an epoch for the head and one for the base
        fields |= {"tau_train": 2}
    if method == "fedbn":  # needs normalisation layers
        fields |= {"model": "resnet", "model_options": {"widths": "4,8", "groups": 2}, "augment": False}
    with Result(run_here(tmp_path / "a.h5", fields)) as result:
        new, scored = result["client/newcomers"], np.isfinite(result["round/val_acc"])
        assert new.sum() == 2 and scored[0, ~new].all() and not scored[:, new].any()
        assert (scored[1:, ~new].sum(1) == 3).all()
        later = np.isfinite(result["newcomers/test_acc"])
        assert later[:, new].all() and not later[:, ~new].any()
        best = np.isfinite(result["best/test_acc"])
        assert best[~new].all() and not best[new].any() and np.isfinite(result.test_acc)
        assert all(len(result.chosen(t).of(k)) == 0 for t in range(3) for k in np.flatnonzero(new))
