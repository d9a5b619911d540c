"""Where a client of --newcomers starts, and what it trains: the table of docs/experiments.md."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from launch import federation
from twins import Twin

from dpfl_mpi.engine import after
from dpfl_mpi.plugins import find

FIELDS = {"clients": 4, "rounds": 1, "tau_init": 1, "tau_train": 2, "newcomers": 0.3}
RESNET = {"model": "resnet", "model_options": {"widths": "4", "blocks": 1, "groups": 2}}
FROM_W = "fedavg apfl perfedavg scaffold pfedme fedala fedbn knnper fedprox ditto"
FROM = dict.fromkeys(FROM_W.split(), "w")
FROM |= dict.fromkeys(["pfedgraph", "cobo", "fedamp", "fedper"], "mean")
FROM |= dict.fromkeys(["fedrep", "fedpac"], "base") | dict.fromkeys(["ifca", "cfl"], "least")
FROM |= dict.fromkeys(["local", "dpfl", "pairwise", "pens"], "initial")
MORE = {"fedbn": RESNET, "ifca": {"options": {"k": 4}}}
PULLED = {"fedprox": 0.1, "ditto": 0.75}  # with which weight to w


@pytest.mark.parametrize("method", FROM)
def test_where_a_newcomer_starts_and_what_it_trains(method):
    calls, module = [], find("method", method)
    with federation(FIELDS | {"method": method} | MORE.get(method, {})) as fed:
        state = module.init(fed)
        fed.begin_round(1)
        state = module.round(fed, state, 1)
        train = fed.local_opt

        def note(w, epochs, gradient=None, **how):
            calls.append((w.clone(), epochs, gradient, how["trained"]))
            return train(w, epochs, gradient, **how)

        fed.local_opt = note
        new, best, shared = fed.members.limits.newcomers, fed.scoring.best.clone(), state["shared"]
        list(after.add_newcomers(Mock(), fed._parts, state, module))
        start, _, gradient, trained = calls[0]
        (k,) = np.flatnonzero(new)
        row, head = start[fed.row_of[k]], None
        if FROM[method] == "base":
            head = fed.columns("head")
            expected = torch.where(head, fed.initial_row(), shared["phi"])
        elif FROM[method] == "least":
            losses = [Twin(fed).loss(k, w[: fed.ensemble.size]) for w in shared["theta"]]
            expected = shared["theta"][int(np.argmin(losses))]
        elif FROM[method] == "mean":
            others = np.flatnonzero(~new)
            total = sum(fed.p[j] * best[fed.row_of[j]].double() for j in others)
            expected = (total / fed.p[others].sum()).float()
        else:
            expected = shared["w"] if FROM[method] == "w" else fed.initial_row()
        assert [epochs for _, epochs, *_ in calls] == [0, 1, 4]
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-6)
        assert trained is head is None or torch.equal(trained, head)
        assert (gradient is not None) == (method in PULLED)
        if gradient is not None:
            assert gradient.mu == PULLED[method]
            assert torch.equal(gradient.towards.expand_as(start), shared["w"].expand_as(start))
