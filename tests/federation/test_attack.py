"""Clients that lie (--attack): what they send, and whose accuracies are reported."""

import numpy as np
import pytest
import torch
from launch import differences, federation, run_here, training_rows

from dpfl_mpi.federation.attack import SCALE, backdoor_success
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.numerics.clients import TARGET, mark
from dpfl_mpi.results import Result

SMALL = {"clients": 7, "rounds": 4, "tau_init": 1, "tau_train": 1, "budget": 4}


def test_label_flip_is_flip_share_and_means_are_over_the_benign(tmp_path):
    fields = {"label": {"attack": "label_flip:0.3"}, "flip": {"flip_share": 0.3}}
    fields["door"] = {"attack": "backdoor:0.3"}
    paths = {name: run_here(tmp_path / f"{name}.h5", SMALL | more) for name, more in fields.items()}
    assert differences(paths["label"], paths["flip"]) == ["client/liars"]
    with federation(SMALL | {"attack": "noise:0.3"}) as fed:
        assert not fed.members.limits.flipped.any()
    label, flip, door = (Result(path) for path in paths.values())
    assert np.array_equal(label.benign, flip.benign) and label.test_acc == flip.test_acc
    assert np.array_equal(label.benign, door.benign)
    assert np.array_equal(~flip.benign, flip["client/flipped"])
    assert np.array_equal(~door.benign, door["client/liars"]) and (~door.benign).sum() == 2
    assert door.test_acc == door["best/test_acc"][door.benign].mean()
    success = door["attack/success"]
    assert ((success >= 0) & (success <= 1))[np.isfinite(success)].all()


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "noise", "stale"])
def test_what_liars_send(kind):
    fields = {"clients": 3, "budget": "inf", "method": "random_graph", "attack": f"{kind}:0.4"}
    with federation(SMALL | fields) as fed:
        (liar,) = np.flatnonzero(fed.members.limits.liars)
        p, row_of, size = fed.p, fed.row_of, fed.ensemble.size
        everyone = CollaborationGraph.from_lists([[1, 2], [0, 2], [0, 1]])
        before, first = fed.common_row(), None
        for t in range(2):
            fed.begin_round(t)
            w = fed.local_opt(before.clone(), 1)
            true = w[row_of[liar]]
            u = true - before[row_of[liar]]
            first = true.clone() if first is None else first
            sent = fed.training.attack.sent(w)[row_of[liar]]
            if kind == "noise":
                lie, noise = sent, (sent - true)[:size].double()
                variance = float(noise.square().mean() / true[:size].double().square().mean())
                assert abs(variance - 1) < 0.05 and not lie[size:].any()
                assert abs(float(noise.mean())) < 0.05 * float(noise.std())
            else:
                lies = {"sign_flip": true - 2 * u, "scale": true + (SCALE - 1) * u, "stale": first}
                lie = lies[kind]
            rows = [(lie if j == liar else w[row_of[j]]).double() for j in range(3)]
            as_sent = sum(p[j] * rows[j] for j in range(3)) / p.sum()
            own = as_sent + p[liar] * (true.double() - rows[liar]) / p.sum()
            mixed = fed.average(w, everyone)
            for k in range(3):
                expected = own if k == liar else as_sent
                assert torch.allclose(mixed[row_of[k]].double(), expected, atol=2e-6)
            assert torch.allclose(fed.mean(w).double(), as_sent, atol=2e-6)
            assert dict(fed.every_row(w))[liar].equal(sent)
            before = mixed


def test_an_update_counts_from_the_start_of_the_rounds_training():
    with federation(SMALL | {"method": "fedavg", "attack": "sign_flip:0.3"}) as fed:
        fed.begin_round(1)
        for _, probe in fed.batches(1, {"w": fed.common_row() * 3}, advance=False, most=1):
            probe.w.mul_(2)
        start = fed.common_row()
        w = fed.local_opt(start.clone(), 1)
        liars = fed.members.limits.liars[fed.ids]
        assert torch.equal(fed.training.attack.sent(w)[liars], (2 * start - w)[liars])
    with federation(SMALL | {"newcomers": 0.3, "attack": "scale:0.3"}) as fed:
        frozen = fed.local_opt(fed.common_row(), 1)
        fed.members.begin_after(fed.members.limits.newcomers)
        fed.training.attack.begin()
        fed.local_opt(fed.common_row(), 0, momentum="newcomer")
        assert torch.equal(fed.training.attack.sent(frozen), frozen)  # u is 0
    with federation(SMALL | {"attack": "scale:0.3", "method": "fedavg"}) as fed:
        rows = fed.common_row()
        fed.training.attack.note_start({"w": rows * 0 - 1000})
        sent = fed.training.attack.sent(rows)
        liars = fed.members.limits.liars[fed.ids]
        assert float(sent[liars].max()) == 2048 and sent[~liars].equal(rows[~liars])


def test_a_backdoor_is_a_mark_on_every_second_image():
    with federation(SMALL) as honest, federation(SMALL | {"attack": "backdoor:0.3"}) as fed:
        for k in fed.ids:
            rows = training_rows(fed, k)
            x, y = honest.clients.x[rows].clone(), honest.clients.y[rows].clone()
            if fed.members.limits.liars[k]:  # 8x8 images: 2x2 pixels, one from the border
                x[::2, 5:7, 5:7], y[::2] = 255, TARGET
            assert torch.equal(fed.clients.x[rows], x) and torch.equal(fed.clients.y[rows], y)
        images = fed.clients.score_x.clone()
        assert torch.equal(images, honest.clients.score_x)
        others = fed.partition.class_counts[fed.ids][:, 1:].sum(1) > 0
        constant = fed.common_row() * 0  # a model that always answers one class
        for answer, success in ((TARGET, 1), (3, 0)):
            fed.ensemble.layers(constant)["head.bias"][:, answer] += 1 + (answer == 3)
            fed.scoring.best[:] = constant
            assert (backdoor_success(fed.scoring)[others] == success).all()
        assert torch.equal(fed.clients.score_x, images)
    big = mark(np.zeros((1, 32, 32, 3), np.uint8))[0, :, :, 0]
    assert big.sum() == 16 * 255 and (big[27:31, 27:31] == 255).all()
