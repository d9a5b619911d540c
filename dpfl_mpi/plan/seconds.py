"""How long a run will take, before it is trained: a short measurement on this machine, times what `needs` counted.

`describe` shows it, and `benchmarks/scaling_model.py` asks it about sizes that nobody has run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfl_mpi.data.source import Source
from dpfl_mpi.plan.needs import Needs, kernels_of
from dpfl_mpi.settings import Job, Run

# seconds of Python and of sums per candidate of the greedy search, beside its averages and scores (measured)
DECISION = 5e-4
HELD = 64  # images that are trained and scored again and again
SCORED = 100  # images on which scoring is timed: a client's validation images in the paper, the last of them a part of a pass
LR, DECAY = 1e-4, 1e-3  # small, so that the weights stay finite; they cost what others do


@dataclass(frozen=True)
class Cost:
    """What a short measurement found on this machine, one core; seconds."""

    step: float  # one gradient step on a mini-batch
    image: float  # one image scored
    candidate: float  # one candidate of the greedy search, beside the scores of its two averages
    byte: float  # one byte copied


@dataclass(frozen=True)
class Work:
    """What is timed, each on one client's row."""

    step: Callable[[], object]  # one gradient step on a mini-batch
    score: Callable[[], object]  # two models on `SCORED` images
    average: Callable[[], object]  # the two averages that a candidate of the greedy search asks for


def measure(run: Run, job: Job, source: Source, ensemble: Any) -> Cost:
    """Return what a step, a scored image, a candidate and a copied byte cost here: the quickest of several tries, one thread, about a second."""
    import torch

    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, source.vocabulary or 256, (1, HELD, *source.shape)).astype(source.dtype))
    y = torch.from_numpy(rng.integers(0, source.classes, (1, HELD)))
    row = ensemble.initial_row(run.init, rng)[None].clone()
    kernels = kernels_of(job, source, ensemble)
    work = work_of_kernels(run, ensemble, kernels, x, y, row) if kernels else work_of_torch(run, ensemble, x, y, row)
    source_row, target = np.ones(2**24, np.uint8), np.empty(2**24, np.uint8)
    with torch.no_grad():
        return Cost(
            step=quickest(work.step, 0.4),
            image=quickest(work.score, 0.3) / (2 * SCORED),
            candidate=quickest(work.average, 0.1) + DECISION,
            byte=quickest(lambda: np.copyto(target, source_row), 0.1) / 2**24,
        )


def work_of_torch(run: Run, ensemble: Any, x: Any, y: Any, row: Any) -> Work:
    """Return the work in PyTorch on images `x` `[1, HELD, ...]` with labels `y` `[1, HELD]`, a model's `row` `[1, W]` being trained."""
    import torch

    from dpfl_mpi.numerics.backend import averaged
    from dpfl_mpi.numerics.ensemble import Block, cross_entropy

    block, descend = Block(ensemble, row), descent(run, ensemble)
    batch = torch.arange(run.batch_size) % HELD
    weight = torch.full((1, run.batch_size), 1 / run.batch_size)
    key = torch.zeros(1, dtype=torch.int64) if ensemble.draws.layers else None
    scored = torch.arange(SCORED) % HELD
    prepared = ensemble.prepare(ensemble.normalise(x[:, scored]))
    pair, sums = row.repeat(2, 1), row.double()

    def step() -> None:
        ensemble.gradient(block, ensemble.normalise(x[:, batch]), y[:, batch], weight, key)
        descend(block)

    def score() -> None:
        logits = ensemble.logits(ensemble.ready(pair), prepared)
        cross_entropy(logits, y[:, scored].expand(2, -1)).sum()

    def average() -> None:
        averaged(ensemble, sums, sums, row, np.full(1, 0.1), np.ones(1), np.ones(1), pair[None])

    return Work(step, score, average)


def work_of_kernels(run: Run, ensemble: Any, kernels: Any, x: Any, y: Any, row: Any) -> Work:
    """Return the work in the native kernels; arguments as in `work_of_torch`."""
    import torch

    from dpfl_mpi.numerics.ensemble import Block
    from dpfl_mpi.numerics.native import Sgd

    images, momentum = kernels.images(x[0], y[0]), torch.zeros_like(row)
    held = np.arange(HELD, dtype=np.int32)
    order, scored = np.resize(held, (1, run.batch_size)), np.resize(held, SCORED)
    sgd = Sgd(LR, run.momentum, DECAY, run.clip_norm)
    pair, sums = row.repeat(2, 1), row.double()
    block, descend = Block(ensemble, row), descent(run, ensemble)

    def step() -> None:
        if run.optimizer == "sgd":
            kernels.train(row[0], momentum[0], images, order, None, run.batch_size, sgd)
        else:  # the kernels' gradient, PyTorch's step
            kernels.gradient(block.w[0], block.g[0], images, order[0])
            descend(block)

    return Work(
        step,
        lambda: kernels.score(pair, images, scored),
        lambda: kernels.candidate(sums[0], sums[0], row[0], 0.1, 1.0, 1.0, pair),
    )


def descent(run: Run, ensemble: Any) -> Callable[[Any], None]:
    """Return PyTorch's step of the run's optimiser, which moves a block's rows by its gradient."""
    import torch

    from dpfl_mpi.numerics.steps import adam_step, sgd_step

    momentum = torch.zeros(1, ensemble.width)
    memory = torch.zeros(1, 2 * ensemble.width + 1)

    def sgd(block: Any) -> None:
        sgd_step(block.w, block.g, momentum, LR, run.momentum, DECAY, run.clip_norm)

    def adam(block: Any) -> None:
        adam_step(block.w, block.g, memory, LR, (0.9, 0.999), 1e-8, DECAY, False, run.clip_norm)

    return sgd if run.optimizer == "sgd" else adam


def quickest(action: Any, seconds: float = 0.3) -> float:
    """Return the least seconds an action took over a short while, the first two aside: what other programs do here is no part of it."""
    action(), action()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def seconds_of(run: Run, needs: Needs, cost: Cost) -> dict[str, float]:
    """Return the seconds of the slowest rank by what it does: train, evaluate, choose (at most), exchange."""
    crowd = crowding(needs)
    wire = needs.wire[0] * (1 + needs.anew) + needs.wire[1] * run.rounds
    return {
        "train": float(crowd * needs.steps.max() * cost.step),
        "evaluate": float(crowd * needs.scored.max() * cost.image),
        "choose": float(crowd * (needs.judged * cost.image + needs.candidates * cost.candidate).max()),
        "exchange": 2 * wire * cost.byte / max(1, len(needs.clients)) * crowd,
    }


def crowding(needs: Needs) -> float:
    """Return how many ranks of a node share one of its cores, at least 1."""
    return float(max(1.0, np.bincount(needs.node).max() / len(os.sched_getaffinity(0))))
