"""What comes after the rounds: +FT (--finetune_epochs), from the base Run's models or with its rounds computed again, and --newcomers."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from launch import differences, federation, run_here, run_many, text_file

from dpfl_mpi.engine import after
from dpfl_mpi.methods import dpfl, fedprox
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.survival import signals

N = 9
SMALL = {"clients": N, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": 4}
LOCAL = SMALL | {"method": "local"}
TUNED = LOCAL | {"finetune_epochs": 1}


def test_finetuning_from_the_base_run_is_finetuning(tmp_path):
    """On two ranks from the base Run's models, two rows at a time, as with the rounds computed again."""
    fields = {name: SMALL | {"method": name, "participation": 0.7} for name in ("fedprox", "dpfl")}
    base = {n: run_here(Run(**f).resolve().path(tmp_path), f, save_models=True) for n, f in fields.items()}
    more = {n: f | {"finetune_epochs": 3} for n, f in fields.items()}
    two = "from dpfl_mpi.engine import after\nafter.BLOCK = 2 * 4 * 4810 + 5"
    for name, path in run_many(2, tmp_path, more, two, **{n: {"results": str(tmp_path)} for n in more}).items():
        alone = run_here(tmp_path / f"{name}-alone.h5", more[name], results=str(tmp_path / "elsewhere"))
        assert differences(path, alone) == [], name
        with Result(path) as result, Result(base[name]) as before:
            assert np.array_equal(result["round/test_acc"], before["round/test_acc"], equal_nan=True)
            assert result["finetune/test_acc"].shape == (4, N)
            assert np.array_equal(result["finetune/test_acc"][0], before["best/test_acc"])
            val, test, best = result["finetune/val_acc"][1:], result["finetune/test_acc"][1:], result["best/val_acc"]
            assert np.array_equal(val.max(0), best)
            latest = 2 - np.argmax(val[::-1], 0)
            assert np.array_equal(result["best/round"], SMALL["rounds"] + 1 + latest)
            assert np.array_equal(test[latest, np.arange(N)], result["best/test_acc"])
            assert np.array_equal(result["last/test_acc"], test[-1])
            assert np.array_equal(result["client/epochs"], before["client/epochs"] + 3)
            assert result["finetune/gradient_steps"][0] == before["round/gradient_steps"][-1]


@pytest.mark.parametrize("what", ["no models", "torn", "another run", "last models damaged"])
def test_tuning_computes_the_rounds_again_and_says_why(what, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(after, "BLOCK", 1)
    base = run_here(Run(**TUNED).resolve().untuned().path(tmp_path), LOCAL, save_models=what != "no models")
    whole = run_here(tmp_path / "whole.h5", TUNED, results=str(tmp_path / "elsewhere"))
    content = base.read_bytes()
    if what == "another run":
        content = run_here(tmp_path / "other.h5", LOCAL | {"lr": 0.5}, save_models=True).read_bytes()
        base.write_bytes(content)
    if what == "torn":
        base.write_bytes(content[:4000])
    if what == "last models damaged":
        with Result(base) as result:
            at = content.index(result["model/best"][-1].tobytes())
        base.write_bytes(content[:at] + bytes(4) + content[at + 4 :])
    capfd.readouterr()
    assert differences(whole, run_here(tmp_path / "again.h5", TUNED, results=str(tmp_path))) == []
    whys = {"no models": "holds no models (--save_models)", "another run": "is of another Run"}
    assert f"{whys.get(what, 'cannot be read')}: its rounds are computed here" in capfd.readouterr().err


def test_who_was_never_scored_is_tuned_from_the_initial_row(tmp_path, result_of):
    """Client 0 comes in round 2, in which it takes no part."""
    fields, there = TUNED | {"clients": 4, "seed": 1}, text_file(tmp_path / "there", "1 1 1 1\n0 1 1 1\n")
    late = fields | {"available": there, "churn": text_file(tmp_path / "churn.csv", "2 0 join\n")}
    assert result_of(late)["finetune/test_acc"][0, 0] == result_of(fields)["round/test_acc"][0, 0] > 0


def test_tuning_from_a_base_keeps_who_had_stopped(tmp_path):
    fields = SMALL | {"method": "fedavg", "drift": "0.5:2", "patience": 1, "rounds": 7}
    tuned = fields | {"finetune_epochs": 1}
    base = Run(**tuned).resolve().untuned().path(tmp_path)
    alone = run_here(tmp_path / "alone.h5", tuned, results=str(tmp_path))
    run_here(base, fields, save_models=True)
    assert differences(alone, run_here(tmp_path / "after.h5", tuned, results=str(tmp_path))) == []
    with Result(alone) as result:
        assert (result["client/stopped_round"] >= 0).any()


def test_who_diverges_before_or_while_tuning_has_no_score_there(tmp_path, capfd):
    fields = {"clients": 4, "method": "fedavg", "rounds": 0, "finetune_epochs": 2, "on_divergence": "exclude"}
    all_diverge = fields | {"method": "local", "rounds": 1, "lr": 1e6}
    with Result(run_here(tmp_path / "before.h5", all_diverge, quiet=False)) as result:
        assert ["1/3", "-", "-"] in [line.split()[:3] for line in capfd.readouterr().out.splitlines()]
        assert (result["client/diverged_round"] >= 0).all()
        assert result["finetune/epochs"].tolist() == [result["round/epochs"][-1] + e for e in range(3)]
    with Result(run_here(tmp_path / "a.h5", fields | {"lr": 60.0, "clip_norm": 0.0, "weight_decay": 0.0})) as result:
        gone = result["client/diverged_round"] == 1  # in the first epoch, which counts on
        assert gone.any()
        for name in ("finetune/val_acc", "finetune/test_acc"):
            assert np.isfinite(result[name][0]).all() and np.isnan(result[name][1:, gone]).all()


def test_finetune_prox_pulls_back():
    moved = {}
    for prox in (True, False):
        fields = SMALL | {"method": "fedprox", "finetune_epochs": 2, "options": {"mu": 50.0, "finetune_prox": prox}}
        with federation(fields | {"momentum": 0.0}) as fed:
            start = fed.common_row()
            moved[prox] = float((fed.local_opt(start.clone(), 2, fedprox.finetune_gradient(fed, start)) - start).norm())
    assert moved[True] < 0.5 * moved[False]


SEVEN = SMALL | {"clients": 7, "rounds": 4}


def test_newcomers_of_fedavg_tune_the_global_model(tmp_path, monkeypatch):
    """They take no part in the rounds: the others are a FedAvg of five clients, by hand; then each trains on from the global model."""
    fields, marked = SEVEN | {"method": "fedavg", "newcomers": 0.3, "rounds": 2}, []
    monkeypatch.setattr(signals.Watch, "begin", lambda watch, t: marked.append(t))
    path = run_here(tmp_path / "a.h5", fields)
    # each score of newcomers too, or the watchdog takes them for a round that hangs
    assert marked == [0, 1, 2, 3, 3, 3]
    with Result(path) as result, federation(fields) as fed:
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
    with federation(SEVEN | {"newcomers": 0.3, "budget": 3}) as fed:
        state = dpfl.init(fed)
        new = fed.members.limits.newcomers
        assert not new[state["shared"]["omega"].senders].any() and (state["shared"]["omega"].degrees()[new] == 0).all()
        best = fed.scoring.best.clone()
        record = Mock(series=lambda group, epochs, notes: caught.extend(notes))
        bggc, graphs = fed.bggc, []
        fed.bggc = lambda w: graphs.append((w.clone(), bggc(w))) or graphs[-1][1]
        list(after.add_newcomers(record, fed._parts, state, find("method", "dpfl")))
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
    """kNN-Per: in one block with all a newcomer kept the representations of the model before its training; alone on a rank, too (test_run.py)."""
    fields = {"method": "knnper", "clients": 8, "rounds": 1, "newcomers": 0.25}
    by_block = [run_here(tmp_path / f"{b}.h5", fields, kernels="torch", block=b) for b in (2, 8)]
    np.testing.assert_allclose(*(Result(path)["newcomers/test_acc"] for path in by_block))
