"""Clients that lie (--attack): who, what they send, what a probe or a liar itself sees, and a backdoor."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from launch import differences, federation, run_here, training_rows

from dpfl_mpi.data.source import Source, check_images
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import limits
from dpfl_mpi.federation.attack import SCALE, backdoor_success
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.numerics.clients import TARGET, mark
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

N = 7
SMALL = {"clients": N, "rounds": 4, "tau_init": 1, "tau_train": 1, "budget": 4}


def test_the_same_clients_lie_whatever_they_do():
    masks = [limits.liars(Run(**SMALL, attack=f"{kind}:0.3").resolve()) for kind in ("noise", "stale", "label_flip")]
    flip = Run(**SMALL, flip_share=0.3).resolve()
    assert all(np.array_equal(mask, limits.flipped(flip)) for mask in masks) and masks[0].sum() == 2
    assert not limits.flipped(Run(**SMALL, attack="noise:0.3").resolve()).any()
    assert not limits.liars(flip).any()


def test_label_flip_is_flip_share_and_averages_are_over_the_benign(tmp_path):
    fields = {"label": {"attack": "label_flip:0.3"}, "flip": {"flip_share": 0.3}, "door": {"attack": "backdoor:0.3"}}
    paths = {name: run_here(tmp_path / f"{name}.h5", SMALL | more) for name, more in fields.items()}
    assert differences(paths["label"], paths["flip"]) == ["client/liars"]
    with Result(paths["label"]) as one, Result(paths["flip"]) as two, Result(paths["door"]) as door:
        assert np.array_equal(one.benign, two.benign) and one.test_acc == two.test_acc
        assert np.array_equal(door.benign, ~door["client/liars"]) and door["client/liars"].sum() == 2
        assert door.test_acc == door["best/test_acc"][door.benign].mean()
        success = door["attack/success"]
        assert ((success >= 0) & (success <= 1))[np.isfinite(success)].all()


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "noise", "stale"])
def test_what_liars_send(kind):
    fields = SMALL | {"clients": 3, "budget": "inf", "method": "random_graph", "attack": f"{kind}:0.4"}
    with federation(fields) as fed:
        (liar,) = np.flatnonzero(fed.members.limits.liars)
        p, at = fed.p, fed.row_of
        full = CollaborationGraph.from_lists([[1, 2], [0, 2], [0, 1]])
        before, first = fed.common_row(), None
        for t in range(2):
            fed.begin_round(t)
            w = fed.local_opt(before.clone(), 1)
            true = w[at[liar]]
            u = true - before[at[liar]]
            first = true.clone() if first is None else first
            if kind == "noise":
                lie = fed.training.attack.sent(w)[at[liar]]
                n = (lie - true)[: fed.ensemble.size].double()
                assert abs(float(n.square().mean() / true[: fed.ensemble.size].double().square().mean()) - 1) < 0.05
                assert abs(float(n.mean())) < 0.05 * float(n.std()) and not lie[fed.ensemble.size :].any()
            else:
                lie = {"sign_flip": true - 2 * u, "scale": true + (SCALE - 1) * u, "stale": first}[kind]
            mixed = fed.average(w, full)
            for k in range(3):
                rows = [w[at[j]].double() if j != liar or k == liar else lie.double() for j in range(3)]
                expected = sum(p[j] * rows[j] for j in range(3)) / p.sum()
                assert torch.allclose(mixed[at[k]].double(), expected, atol=2e-6)
            honest = sum(p[j] * (w[at[j]] if j != liar else lie).double() for j in range(3)) / p.sum()
            assert torch.allclose(fed.mean(w).double(), honest, atol=2e-6)
            assert {int(j): row for j, row in fed.every_row(w)}[liar].equal(fed.training.attack.sent(w)[at[liar]])
            before = mixed


def test_a_lie_that_cannot_be_summed_is_cut():
    with federation(SMALL | {"attack": "scale:0.3", "method": "fedavg"}) as fed:
        rows = fed.common_row()
        fed.training.attack.note_start({"w": rows * 0 - 1000})
        sent = fed.training.attack.sent(rows)
        liars = fed.members.limits.liars[fed.ids]
        assert float(sent[liars].max()) == 2048 and sent[~liars].equal(rows[~liars])


def test_a_probe_is_not_a_liars_way():
    """u counts from the start of the round's training: neither from what a method only tries, nor from a second model."""
    with federation(SMALL | {"method": "fedavg", "attack": "sign_flip:0.3"}) as fed:
        fed.begin_round(1)
        for _batch, probe in fed.batches(1, {"w": fed.common_row() * 3}, advance=False, most=1):
            probe.w.mul_(2)
        start = fed.common_row()
        w = fed.local_opt(start.clone(), 1)
        liars = fed.members.limits.liars[fed.ids]
        assert torch.equal(fed.training.attack.sent(w)[liars], (2 * start - w)[liars])


def test_a_frozen_liar_has_not_moved():
    with federation(SMALL | {"newcomers": 0.3, "attack": "scale:0.3"}) as fed:
        frozen = fed.local_opt(fed.common_row(), 1)
        fed.members.begin_arrival()
        fed.training.attack.begin()
        fed.local_opt(fed.common_row(), 0, momentum="newcomer")
        assert torch.equal(fed.training.attack.sent(frozen), frozen)


@pytest.mark.parametrize("method", ["scaffold", "cobo"])
@pytest.mark.parametrize("kind", ["sign_flip", "noise", "scale", "stale"])
def test_lies_about_models_are_refused_where_more_than_models_is_sent(method, kind):
    sentence = f"--attack is {kind}:0.2; {method} sends more.*allowed are label_flip, backd"
    with pytest.raises(UserError, match=sentence):
        Run(method=method, attack=f"{kind}:0.2").resolve()
    Run(method=method, attack="label_flip:0.2").resolve()


@pytest.mark.parametrize(
    ("shape", "dtype", "have"), [((5,), "float32", "none"), ((5,), "int32", "none"), ((8, 8, 1), "float32", "floats")]
)
def test_a_backdoor_needs_images_of_bytes(shape, dtype, have):
    source = Source(shape, 2, (), (), {}, "", images=lambda part, rows: rows, dtype=dtype)
    check_images(Run(attack="scale:0.3").resolve(), source)
    check_images(Run(attack="backdoor:0.3").resolve(), replace(source, shape=(8, 8, 1), dtype="uint8"))
    with pytest.raises(UserError, match=f"--attack backdoor needs images of 8 bits.* have .*{have}"):
        check_images(Run(attack="backdoor:0.3").resolve(), source)


def test_a_backdoor_is_a_mark_on_every_second_image():
    with federation(SMALL) as honest, federation(SMALL | {"attack": "backdoor:0.3"}) as fed:
        liars = fed.members.limits.liars
        for k in fed.ids:
            rows = training_rows(fed, k)
            x, y = honest.clients.x[rows].clone(), honest.clients.y[rows].clone()
            if liars[k]:
                x[::2, 5:7, 5:7], y[::2] = 255, TARGET  # 8x8 images: a square of 2 pixels, one from the border
            assert torch.equal(fed.clients.x[rows], x) and torch.equal(fed.clients.y[rows], y)
        assert torch.equal(fed.clients.score_x, honest.clients.score_x)
        held = fed.clients.score_x.clone()
        always = fed.common_row() * 0
        fed.ensemble.layers(always)["head.bias"][:, TARGET] = 1
        fed.scoring.best[:] = always
        others = fed.partition.class_counts[fed.ids][:, 1:].sum(1) > 0
        assert (backdoor_success(fed.scoring)[others] == 1).all()
        fed.ensemble.layers(always)["head.bias"][:, 3] = 2
        fed.scoring.best[:] = always
        assert (backdoor_success(fed.scoring)[others] == 0).all()
        assert torch.equal(fed.clients.score_x, held)
    big = mark(np.zeros((1, 32, 32, 3), np.uint8))[0, :, :, 0]
    assert big.sum() == 16 * 255 and (big[27:31, 27:31] == 255).all()
