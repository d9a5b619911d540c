"""What follows the rounds: +FT (--finetune_epochs), from a base Run's models, and --newcomers."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from launch import differences, federation, run_here, run_many, text_file

from dpfl_mpi.engine import after
from dpfl_mpi.figures import controls_table
from dpfl_mpi.methods import dpfl, fedprox
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.results.summary import summary
from dpfl_mpi.settings import Run
from dpfl_mpi.survival import signals

N = 9
SMALL = {"clients": N, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": 4}
LOCAL = SMALL | {"method": "local"}
TUNED = LOCAL | {"finetune_epochs": 1}


def base_path(folder, fields):
    """Where a tuned Run looks for its base."""
    return Run(**fields).resolve().untuned().path(folder)


def test_finetuning_from_the_base_run_is_finetuning(tmp_path):
    fields = {name: SMALL | {"method": name, "participation": 0.7} for name in ("fedprox", "dpfl")}
    base = {}
    for name, run in fields.items():
        base[name] = run_here(base_path(tmp_path, run), run, save_models=True)
    tuned = {name: run | {"finetune_epochs": 3} for name, run in fields.items()}
    two_rows = "from dpfl_mpi.engine import after\nafter.BLOCK = 2 * 4 * 4810 + 5"
    jobs = {name: {"results": str(tmp_path)} for name in tuned}
    for name, path in run_many(2, tmp_path, tuned, two_rows, **jobs).items():
        elsewhere = str(tmp_path / "elsewhere")
        alone = run_here(tmp_path / f"{name}-alone.h5", tuned[name], results=elsewhere)
        assert differences(path, alone) == [], name
        with Result(path) as result, Result(base[name]) as before:
            accuracies = result["round/test_acc"], before["round/test_acc"]
            assert np.array_equal(*accuracies, equal_nan=True)
            assert result["finetune/test_acc"].shape == (4, N)
            assert np.array_equal(result["finetune/test_acc"][0], before["best/test_acc"])
            val, test = result["finetune/val_acc"][1:], result["finetune/test_acc"][1:]
            assert np.array_equal(val.max(0), result["best/val_acc"])
            latest = 2 - np.argmax(val[::-1], 0)
            assert np.array_equal(result["best/round"], SMALL["rounds"] + 1 + latest)
            assert np.array_equal(test[latest, np.arange(N)], result["best/test_acc"])
            assert np.array_equal(result["last/test_acc"], test[-1])
            assert np.array_equal(result["client/epochs"], before["client/epochs"] + 3)
            steps = result["finetune/gradient_steps"], before["round/gradient_steps"]
            assert steps[0][0] == steps[1][-1]


PROBLEMS = {
    "no models": "holds no models (--save_models)",
    "torn": "cannot be read",
    "another run": "is of another Run",
    "last models damaged": "cannot be read",
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_tuning_computes_the_rounds_again_and_says_why(what, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(after, "BLOCK", 1)
    base = run_here(base_path(tmp_path, TUNED), LOCAL, save_models=what != "no models")
    whole = run_here(tmp_path / "whole.h5", TUNED, results=str(tmp_path / "elsewhere"))
    content = base.read_bytes()
    if what == "another run":
        other = run_here(tmp_path / "other.h5", LOCAL | {"lr": 0.5}, save_models=True)
        base.write_bytes(other.read_bytes())
    if what == "torn":
        base.write_bytes(content[:4000])
    if what == "last models damaged":
        at = content.index(Result(base)["model/best"][-1].tobytes())
        base.write_bytes(content[:at] + bytes(4) + content[at + 4 :])
    capfd.readouterr()
    assert differences(whole, run_here(tmp_path / "a.h5", TUNED, results=str(tmp_path))) == []
    assert f"{PROBLEMS[what]}: its rounds are computed here" in capfd.readouterr().err


def test_tuning_from_a_base_keeps_who_had_stopped(tmp_path, result_of):
    fields = SMALL | {"method": "fedavg", "drift": "0.5:2", "patience": 1, "rounds": 7}
    tuned = fields | {"finetune_epochs": 1}
    alone = run_here(tmp_path / "alone.h5", tuned, results=str(tmp_path))
    run_here(base_path(tmp_path, tuned), fields, save_models=True)
    assert differences(alone, run_here(tmp_path / "a.h5", tuned, results=str(tmp_path))) == []
    assert (Result(alone)["client/stopped_round"] >= 0).any()
    fields = TUNED | {"clients": 4, "seed": 1}
    there = text_file(tmp_path / "there", "1 1 1 1\n0 1 1 1\n")
    churn = text_file(tmp_path / "churn.csv", "2 0 join\n")
    late = result_of(fields | {"available": there, "churn": churn})["finetune/test_acc"][0, 0]
    assert late == result_of(fields)["round/test_acc"][0, 0] > 0


def test_who_diverges_before_or_while_tuning_has_no_score_there(result_of, capfd):
    fields = {"clients": 4, "finetune_epochs": 2, "on_divergence": "exclude"}
    result = result_of(fields | {"method": "local", "rounds": 1, "lr": 1e6}, quiet=False)
    assert ["1/3", "-", "-"] in [line.split()[:3] for line in capfd.readouterr().out.splitlines()]
    assert (result["client/diverged_round"] >= 0).all()
    last = result["round/epochs"][-1]
    assert result["finetune/epochs"].tolist() == [last, last + 1, last + 2]
    some = {"method": "fedavg", "rounds": 0, "lr": 60.0, "clip_norm": 0.0, "weight_decay": 0.0}
    result = result_of(fields | some)
    gone = result["client/diverged_round"] == 1  # in the first epoch, which counts on
    assert gone.any()
    for name in ("finetune/val_acc", "finetune/test_acc"):
        assert np.isfinite(result[name][0]).all() and np.isnan(result[name][1:, gone]).all()


def test_finetune_prox_pulls_back():
    moved = {}
    for prox in (True, False):
        options = {"mu": 50.0, "finetune_prox": prox}
        fields = SMALL | {"method": "fedprox", "finetune_epochs": 2, "options": options}
        with federation(fields | {"momentum": 0.0}) as fed:
            start = fed.common_row()
            gradient = fedprox.finetune_gradient(fed, start)
            moved[prox] = float((fed.local_opt(start.clone(), 2, gradient) - start).norm())
    assert moved[True] < 0.5 * moved[False]


SEVEN = SMALL | {"clients": 7, "rounds": 4}


def test_newcomers_of_fedavg_tune_the_global_model(tmp_path, monkeypatch):
    """The rounds are a FedAvg of the five others, by hand; then each trains the global model."""
    fields, marked = SEVEN | {"method": "fedavg", "newcomers": 0.3, "rounds": 2}, []
    monkeypatch.setattr(signals.Watch, "begin", lambda watch, t: marked.append(t))
    path = run_here(tmp_path / "a.h5", fields)
    # each score of newcomers too, or the watchdog takes them for a round that hangs
    assert marked == [0, 1, 2, 3, 3, 3]
    with Result(path) as result, federation(fields) as fed:
        new = fed.members.limits.newcomers
        assert new.sum() == 2 and np.array_equal(result["client/newcomers"], new)
        assert np.array_equal(result.benign, ~new)
        assert np.isnan(result["round/val_acc"][:, new]).all()
        assert (result["client/epochs"][new] == 0).all()
        w, others = fed.initial_row(), np.flatnonzero(~new)
        p = fed.p / fed.p[others].sum()
        for t in (1, 2):
            fed.begin_round(t)
            w_KW = fed.local_opt(fed.copies(w), 1)
            w = sum(p[k] * w_KW[fed.row_of[k]].double() for k in others).float()
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
        assert result["newcomers/epochs"].tolist() == [0, 1, 5]
        assert np.isnan(stored[:, ~new]).all()
        # an image or two: the twin's mean is in other order
        assert np.abs(stored[:, new] - np.array(accuracy)).max() <= 0.05
        assert result["newcomers/models_received"].sum() == 0
        # best models are of the rounds
        assert not result["best/confusion"][new].any() and result["best/confusion"][~new].any()
        assert not result["model/best"][new].any() and result["model/best"][~new].any(1).all()
        assert np.array_equal(np.isnan(result["best/test_auc"]), new)


def test_newcomers_with_wrong_labels_do_not_count(result_of):
    result = result_of(SEVEN | {"newcomers": 0.5, "flip_share": 0.5, "rounds": 1})
    new, flipped = (result[f"client/{name}"].astype(bool) for name in ("newcomers", "flipped"))
    assert 0 < (new & flipped).sum() < new.sum()
    of_honest = 100 * result["newcomers/test_acc"][:, new & ~flipped].mean(1)
    text = ", ".join(
        f"{mean:.2f} % after {e}" for mean, e in zip(of_honest, (0, 1, 5), strict=True)
    )
    assert text in " ".join(summary(result.path).split())
    assert 100 * controls_table.newcomers(result) == pytest.approx(of_honest)


def test_newcomers_of_dpfl_choose_among_the_frozen(result_of):
    """What they receive, by the verbs of a Federation in which they are ordinary clients."""
    notes = []
    with federation(SEVEN | {"newcomers": 0.3, "budget": 3}) as fed:
        state = dpfl.init(fed)
        new, omega = fed.members.limits.newcomers, state["shared"]["omega"]
        assert not new[omega.senders].any() and (omega.degrees()[new] == 0).all()
        best = fed.scoring.best.clone()
        record = Mock(series=lambda group, epochs, of_epochs: notes.extend(of_epochs))
        bggc, graphs = fed.bggc, []
        fed.bggc = lambda w: graphs.append((w.clone(), bggc(w))) or graphs[-1][1]
        list(after.add_newcomers(record, fed._parts, state, find("method", "dpfl")))
        assert len(graphs) == 3
        for rows, omega in graphs:
            assert torch.equal(rows[fed.row_of[~new]], best[fed.row_of[~new]])
            assert (omega.degrees()[~new] == 0).all() and not new[omega.senders].any()
            assert (omega.degrees() <= 2).all()
        assert graphs[0][1].degrees()[new].all()  # an untrained model is worth nothing
        assert torch.equal(graphs[0][0][fed.row_of[new]], fed.common_row()[fed.row_of[new]])
        received = np.stack([of_epoch["models_received"] for of_epoch in notes], 1)
        in_phases = received[fed.row_of[new]]
        # the sum of five, up to five candidates, the chosen two
        assert (in_phases >= 5 + 2).all() and (in_phases <= 5 + 5 + 2).all()
        assert (received[fed.row_of[~new]] == 0).all()
