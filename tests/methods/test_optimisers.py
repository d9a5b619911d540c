"""Adam, AdamW and schedules of the learning rate: against PyTorch's own, and as settings of a Run."""

import math

import pytest
import starts
import torch
from launch import federation
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from twins import FIELDS

from dpfl_mpi.federation.training import learning_rate
from dpfl_mpi.numerics.steps import adam_step
from dpfl_mpi.settings import Run

BETAS, EPS, DECAY = (0.8, 0.95), 1e-6, 0.1


@pytest.mark.parametrize("decoupled", [False, True])
def test_steps_are_pytorchs(decoupled):
    """Two rows, each clipped by itself; in the third a mask freezes columns, which are as if they did not exist."""
    w = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    trained = torch.arange(16) % 3 > 0
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    for mask in (None, trained):
        columns = slice(None) if mask is None else trained
        rows, memory = w.clone(), torch.zeros(2, 33)
        leaves = [torch.nn.Parameter(row[columns].clone()) for row in w]
        theirs = [kind([leaf], 0.05, betas=BETAS, eps=EPS, weight_decay=DECAY) for leaf in leaves]
        for step in range(6):
            g = torch.randn(2, 16, generator=torch.Generator().manual_seed(step + 1)) * (1 + step)
            for leaf, row, optimiser in zip(leaves, g, theirs, strict=True):
                leaf.grad = row[columns].clone()
                torch.nn.utils.clip_grad_norm_([leaf], 5.0)
                optimiser.step()
            adam_step(rows, g, memory, 0.05, BETAS, EPS, DECAY, decoupled, 5.0, mask)
        expected = torch.stack([leaf.detach() for leaf in leaves])
        assert torch.allclose(rows[:, columns], expected, rtol=0, atol=2e-6)
        if mask is not None:
            assert torch.equal(rows[:, ~trained], w[:, ~trained]) and not memory[:, :16][:, ~trained].any()


def test_its_memory_is_kept_reset_and_checkpointed(tmp_path, monkeypatch):
    """As momentum: rows by name; a run that is cut and goes on has the same bits."""
    for state, steps in (("keep", 2), ("reset", 1)):
        with federation(FIELDS | {"optimizer": "adam", "momentum_state": state, "method": "local"}) as fed:
            w, per_epoch = fed.common_row(), -(-fed.clients.n_train // 32)
            for t in (1, 2):
                fed.begin_round(t)
                fed.local_opt(w, 1)
            assert fed.training.momentum["w"][:, -1].tolist() == (steps * per_epoch).tolist()
    fields = starts.small(method="fedrep", tau_train=2, optimizer="adam", lr_schedule="cosine")
    starts.cut_after(monkeypatch, 2, tmp_path / "run.h5", fields)
    assert starts.same(starts.here(tmp_path / "run.h5", fields), starts.here(tmp_path / "whole.h5", fields))


# schedules ----------------------------------------------------------------------------------------------------------------
def rates(**fields):
    run = Run(method="fedavg", rounds=10, lr=0.1, **fields).resolve()
    return run, [learning_rate(run, t) for t in range(1, 11)]


def scheduled(kind, **how):
    """The rates of ten epochs of a PyTorch scheduler."""
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    schedule, out = kind(optimiser, **how), []
    for _ in range(10):
        out.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    return out


def test_schedules_are_pytorchs():
    step, cosine = scheduled(StepLR, step_size=3, gamma=0.5), scheduled(CosineAnnealingLR, T_max=10, eta_min=0.01)
    assert rates(lr_schedule="step", lr_step=3, lr_gamma=0.5)[1] == pytest.approx(step)
    assert rates(lr_schedule="cosine", lr_final=0.1)[1] == pytest.approx(cosine)
    assert rates()[1] == [0.1] * 10
    run, _ = rates(lr_schedule="cosine", lr_decay=0.5)
    assert [learning_rate(run, t) for t in (0, 1)] == [0.1, 0.1]  # preprocessing, the first round
    assert learning_rate(run, 10) == pytest.approx(0.5 * 0.1 * (1 + math.cos(0.9 * math.pi)) / 2, rel=1e-12)
    assert learning_rate(run, 12) == 0.05  # fine-tuning starts at the schedule's start anew


# settings -----------------------------------------------------------------------------------------------------------------
def test_what_a_run_does_not_read_names_no_other_run():
    default = Run(method="fedavg")
    assert default.slug() == Run(method="fedavg", beta1=0.5, lr_step=7, lr_gamma=0.3, lr_final=0.2, adam_eps=1.0).slug()
    assert Run(optimizer="adam").slug() == Run(optimizer="adam", momentum=0.5).slug() != Run().slug()
    assert len({Run(lr_schedule=s).slug() for s in ("constant", "step", "cosine")}) == 3
    assert Run(lr_schedule="step", lr_step=7).slug() != Run(lr_schedule="step").slug()
    assert Run(optimizer="adam", beta1=0.8).slug() != Run(optimizer="adam").slug() != Run(optimizer="adamw").slug()
    assert not {"optimizer", "lr_schedule", "beta1", "lr_step"} & set(default.key())
