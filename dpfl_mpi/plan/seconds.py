"""How long a run will take, before it is trained: a short measurement on this machine, times what `needs` counted.

`describe` shows it, and `benchmarks/scaling_model.py` asks it about sizes that nobody has run.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from dpfl_mpi.data.partition import assemble
from dpfl_mpi.data.source import Source
from dpfl_mpi.plan.needs import Needs, in_native_kernels
from dpfl_mpi.settings import Job, Resolved

# seconds of Python and of sums per candidate of the greedy search, beside its averages and scores (measured)
DECISION = 5e-4
HELD = 64  # images in an epoch that is timed, in whole mini-batches; at least one
SCORED = 100  # images on which scoring is timed: a client's validation images in the paper, the last of them a part of a pass
LR = 1e-4  # small, so that the weights stay finite; a step costs what others do


@dataclass(frozen=True)
class Cost:
    """What a short measurement found on this machine, one core; seconds."""

    step: float  # one gradient step on a mini-batch
    image: float  # one image scored
    candidate: float  # one candidate of the greedy search, beside the scores of its two averages
    byte: float  # one byte copied


def measure(run: Resolved, job: Job, source: Source, ensemble: Any) -> Cost:
    """Return what a step, a scored image, a candidate and a copied byte cost here: the quickest of several tries, one thread, about a second."""
    from dpfl_mpi.numerics.ensemble import Block

    backend, steps = one_client(run, job, source, ensemble)
    client, one = slice(0, 1), np.ones(1)
    row = ensemble.initial_row(run.init, np.random.default_rng(0))[None].clone()
    block = Block(ensemble, row, backend.optimiser_rows(1), client)
    pair, sums = row.repeat(2, 1)[None], row.double()
    source_row, target = np.ones(2**24, np.uint8), np.empty(2**24, np.uint8)
    return Cost(
        step=quickest(lambda: backend.train_epochs(block, 1, np.zeros(1, np.int64), LR, None, None), 0.4) / steps,
        image=quickest(lambda: backend.validation_losses(client, pair)) / (2 * SCORED),
        candidate=quickest(lambda: backend.candidate(sums, sums, row, 0.1 * one, one, one, pair), 0.1) + DECISION,
        byte=quickest(lambda: np.copyto(target, source_row), 0.1) / 2**24,
    )


def one_client(run: Resolved, job: Job, source: Source, ensemble: Any) -> tuple[Any, int]:
    """Return what computes a run here, for one client with random samples, and the steps of its epoch."""
    from dpfl_mpi.numerics.backend import Backend, optimiser
    from dpfl_mpi.numerics.clients import Clients
    from dpfl_mpi.numerics.native import form_of
    from dpfl_mpi.numerics.native_backend import NativeBackend

    steps, rng = max(1, HELD // run.batch_size), np.random.default_rng(0)
    n = steps * run.batch_size
    images = rng.integers(0, source.vocabulary or 256, (n + SCORED, *source.shape)).astype(source.dtype)
    labels = rng.integers(0, source.classes, n + SCORED)
    parts = {"train": [np.arange(n)], "val": [np.arange(n, n + SCORED)], "test": [np.arange(0)]}
    partition = assemble(parts, np.zeros((1, source.classes), np.int64), np.ones(1), False)
    made: Any = SimpleNamespace(
        shape=source.shape,
        classes=source.classes,
        labels={"train": labels, "test": labels},
        images=lambda part, rows: images[rows],
    )
    clients = Clients(made, partition, np.zeros(1, np.int64), run.seed, bool(run.augment), ensemble)
    if in_native_kernels(job, source, ensemble):
        return NativeBackend(ensemble, clients, optimiser(run), form_of(job.kernels)), steps
    return Backend(ensemble, clients, optimiser(run), 1), steps


def quickest(action: Callable[[], object], seconds: float = 0.3) -> float:
    """Return the least seconds an action took over a short while, the first two aside: what other programs do here is no part of it."""
    action(), action()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def seconds_of(run: Resolved, needs: Needs, cost: Cost) -> dict[str, float]:
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
