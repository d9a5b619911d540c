"""Controls where two of them meet: probes and lies, drift and patience, newcomers and controls of the server, clients that are gone."""

import contextlib
import math

import numpy as np
import pytest
import torch
from launch import federation, mpirun, run_here

from dpfl_mpi.errors import UserError
from dpfl_mpi.methods import scaffold
from dpfl_mpi.numerics.ensemble import fixed_point, from_fixed_point
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

N, T = 7, 4
SMALL = {"clients": N, "rounds": T, "tau_init": 1, "tau_train": 1, "budget": 4}


# lies --------------------------------------------------------------------------------------------------------------------
def test_a_probe_is_not_a_liars_way():
    """u counts from the start of the round's training: neither from what a method only tries, nor from a second model."""
    with contextlib.closing(federation(SMALL | {"method": "fedavg", "attack": "sign_flip:0.3"})) as fed:
        fed.begin_round(1)
        for _batch, probe in fed.batches(1, {"w": fed.common_row() * 3}, advance=False, most=1):
            probe.w.mul_(2)
        start = fed.common_row()
        w = fed.local_opt(start.clone(), 1)
        liars = fed.members.limits.liars[fed.ids]
        assert torch.equal(fed.training.attack.sent(w)[liars], (2 * start - w)[liars])


def test_a_frozen_liar_has_not_moved():
    """While newcomers arrive, nobody else trains."""
    with contextlib.closing(federation(SMALL | {"newcomers": 0.3, "attack": "scale:0.3"})) as fed:
        frozen = fed.local_opt(fed.common_row(), 1)
        fed.members.begin_arrival()
        fed.training.attack.begin()
        fed.local_opt(fed.common_row(), 0, momentum="newcomer")
        assert torch.equal(fed.training.attack.sent(frozen), frozen)


@pytest.mark.parametrize("method", ["scaffold", "cobo"])
def test_lies_about_models_are_refused_where_more_than_models_is_sent(method):
    for kind in ("sign_flip", "noise", "scale", "stale"):
        with pytest.raises(
            UserError, match=f"--attack is {kind}:0.2; {method} sends more.*allowed are label_flip, backd"
        ):
            Run(method=method, attack=f"{kind}:0.2").resolve()
    assert Run(method=method, attack="label_flip:0.2").resolve().attack == "label_flip:0.2"


def test_who_diverges_while_tuning_has_no_score_there(tmp_path):
    fields = {
        "clients": 4,
        "method": "fedavg",
        "rounds": 0,
        "finetune_epochs": 2,
        "lr": 60.0,
        "clip_norm": 0.0,
        "on_divergence": "exclude",
    }
    with Result(run_here(tmp_path / "a.h5", fields | {"weight_decay": 0.0})) as result:
        gone = result["client/diverged_round"] == 1  # in the first epoch, which counts on
        assert gone.any()
        for name in ("finetune/val_acc", "finetune/test_acc"):
            assert np.isfinite(result[name][0]).all() and np.isnan(result[name][1:, gone]).all()


def test_a_round_without_clients_changes_nothing(tmp_path):
    """Two stop after round 1, and the others come in round 3: of nobody in round 2 the server has no mean."""
    there = tmp_path / "there"
    there.write_text("1 1 0 0\n" * 2 + "0 0 1 1\n" * 7)
    fields = {"clients": 4, "rounds": 9, "method": "fedavg", "patience": 1, "available": str(there), "lr": 1e-12}
    with Result(run_here(tmp_path / "a.h5", fields)) as result:
        assert result.finished and result["client/stopped_round"].tolist() == [1, 1, 3, 3] and result.last_round == 3
        assert np.isfinite(result["round/test_acc"]).tolist() == [
            [True] * 4,
            [True] * 2 + [False] * 2,
            [False] * 4,
            [False] * 2 + [True] * 2,
        ]
    # who is there in round 1 comes after all rounds
    fields |= {"patience": 0, "newcomers": 0.5}
    with contextlib.closing(federation({k: v for k, v in fields.items() if k != "available"})) as fed:
        new = fed.members.limits.newcomers
    lines = [new.astype(int), np.ones(4, int)]
    there.write_text("\n".join(" ".join(map(str, line)) for line in lines))
    with Result(run_here(tmp_path / "b.h5", fields | {"rounds": 2})) as result:
        assert result.finished and np.isfinite(result["newcomers/test_acc"][:, new]).all()
        assert np.isnan(result["round/test_acc"][1]).all() and not result["traffic/models_received"][1].any()
        assert np.isfinite(result["round/test_acc"][2][~new]).all()


@pytest.mark.parametrize("reach", [None, "geometric:1.5"])
def test_a_liar_knows_its_own_model(reach):
    """w^Y over all: of the others what they sent, of itself the truth; so Algorithm 3 ends with X = Y for liars too."""
    with contextlib.closing(federation(SMALL | {"attack": "scale:0.3", "reach": reach})) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        sent, liars = fed.training.attack.sent(w), fed.members.limits.liars
        sums, p_sums = fed.sums.over_reachable(w)
        for i, k in enumerate(fed.ids):
            terms = [(w if j == k else sent)[fed.row_of[j]] for j in range(N)]
            share = torch.from_numpy(fed.p)
            assert torch.equal(sums[i], from_fixed_point(fixed_point(torch.stack(terms), share).sum(0)))
            assert p_sums[i] == math.fsum(fed.p)
        assert not torch.equal(sent[fed.row_of[liars]], w[fed.row_of[liars]])


# drift and patience --------------------------------------------------------------------------------------------------------
def test_who_is_not_scored_after_a_drift_has_no_accuracy(tmp_path):
    """The accuracy on the old labels would be one of another task."""
    with Result(run_here(tmp_path / "a.h5", SMALL | {"drift": f"0.5:{T}", "participation": 0.5})) as result:
        absent = np.isnan(result["round/test_acc"][T])
        assert 0 < absent.sum() < N and np.array_equal(np.isnan(result["best/test_acc"]), absent)
        assert (result["best/round"] == np.where(absent, -1, T)).all() and not result["best/confusion"][absent].any()
        assert result.test_acc == result["best/test_acc"][~absent].mean()


@pytest.mark.parametrize("method", ["dpfl", "fedavg"])
def test_nobody_stops_before_a_drift(tmp_path, method):
    """Nothing is learned, so all would have stopped after round 1: but then nobody would see the drift before round 4."""
    fields = SMALL | {"method": method, "patience": 1, "lr": 1e-12, "rounds": 9, "drift": "0.5:4"}
    with Result(run_here(tmp_path / "a.h5", fields)) as result:
        assert result.finished and result["client/drifted"].sum() == 3 and (result["client/stopped_round"] >= 5).all()
        assert result.last_round < 9


def test_tuning_from_a_base_keeps_who_had_stopped(tmp_path):
    """With the base's file and without it the numbers are the same."""
    fields = SMALL | {"method": "fedavg", "drift": "0.5:2", "patience": 1, "rounds": 7}
    tuned = fields | {"finetune_epochs": 1}
    base = Run(**tuned).resolve().untuned().path(tmp_path)
    alone = run_here(tmp_path / "alone.h5", tuned, results=str(tmp_path))
    run_here(base, fields, save_models=True)
    with Result(alone) as one, Result(run_here(tmp_path / "after.h5", tuned, results=str(tmp_path))) as two:
        assert set(Result.differences(one, two)) == set() and (one["client/stopped_round"] >= 0).any()


# counts --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("repeats", [1, 3])
def test_a_repeated_search_receives_its_phases_again_and_the_sum_once(repeats):
    """Lines 1-7 of Algorithm 3 do not depend on the order of the candidates."""
    with contextlib.closing(federation(SMALL | {"budget": "inf", "ggc_repeats": repeats})) as fed:
        fed.bggc(fed.local_opt(fed.common_row(), 1))
        assert (fed.notes["models_received"] == (N - 1) + repeats * (N - 1)).all()


def test_the_servers_control_is_the_mean_of_those_who_can_take_part():
    """SCAFFOLD, lines 16 and 17 where all take part: c is the mean of all c_i, newcomers apart."""
    with contextlib.closing(federation(SMALL | {"method": "scaffold", "newcomers": 0.3})) as fed:
        state = scaffold.init(fed)
        for t in (1, 2):
            fed.begin_round(t)
            state = scaffold.round(fed, state, t)
            there = ~fed.members.limits.newcomers[fed.ids]
            p, c_i = torch.from_numpy(fed.p[fed.ids])[:, None], state["client"]["c"].double()
            mean = (p * c_i)[there].sum(0) / p[there].sum()
            assert torch.allclose(state["shared"]["c"].double(), mean, atol=1e-7) and mean.abs().max() > 1e-4


# clients that are gone -----------------------------------------------------------------------------------------------------
GONE = """
from mpi4py import MPI
import torch
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.engine.build import build
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.world import World

parts = build(Run(clients=4, budget=2).resolve(), Job(quiet=True, device="cpu"), World(MPI.COMM_WORLD))
fed = parts.fed
omega = CollaborationGraph.from_lists([[(k + 1) % 4] for k in range(4)])
parts.members.alive[2] = False
parts.members.most_senders[2] = 0  # who has diverged receives no more
fed.narrow(omega)
w = fed.common_row() + torch.from_numpy(fed.ids)[:, None]
mixed = fed.average(w, omega)
for i, k in enumerate(fed.ids):
    j, kept = (k + 1) % 4, k in (1, 2)
    expected = k if kept else (fed.p[k] * k + fed.p[j] * j) / (fed.p[k] + fed.p[j])
    assert abs(float((mixed[i] - fed.common_row()[i])[0]) - expected) < 1e-5, k
parts.close()
"""


def test_the_window_has_no_place_for_who_has_diverged(tmp_path):
    """One client per rank: a graph that keeps a diverged client's edges asks for more slots than its rank has."""
    (tmp_path / "gone.py").write_text(GONE)
    done = mpirun(4, "-m", "mpi4py", tmp_path / "gone.py")
    assert (done.returncode, done.stderr) == (0, "")
