"""What a network changes: `python -m dpfl_mpi.sweep reproduction/network.py` computes the Runs; `python reproduction/network.py` says what each costs.

CIFAR-10 Patho(3), N = 100, B_c = 0.1N, three partitions, 160 local epochs, under two profiles. DPFL, a random graph and pairwise choice are tried with
models up to 1 and 5 rounds old, and with two codecs, one at a time; FedAvg+FT and Local beside them. `python analysis/hours.py RESULT...` draws them.
"""

from collections.abc import Iterator
from typing import Any

from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import open_source
from dpfl_mpi.errors import exit_with, in_a_sentence
from dpfl_mpi.plan.clock import simulated
from dpfl_mpi.plan.needs import ensemble_of, measure, needs_of, seconds_of
from dpfl_mpi.settings import Job, Run

SEEDS = (42, 32, 52)  # a partition each
PROFILES = ("phones", "hospitals")
CHANGES: tuple[dict[str, Any], ...] = ({}, {"staleness": 1}, {"staleness": 5}, {"codec": "int8"}, {"codec": "topk:0.1"})


def runs(seed: int) -> Iterator[Run]:
    """Yield the Runs of a partition. DPFL and its like train 10 epochs before round 1 and 5 in each of 30; the others 5 in each of 32 or 30, and tune 10."""
    for network in PROFILES:
        same = {"dataset": "cifar10", "budget": "0.1N", "seed": seed, "network": network}
        for method in ("dpfl", "random_graph", "pairwise"):
            yield from (Run(**same, method=method, rounds=30, **change) for change in CHANGES)
        yield Run(**same, method="fedavg", rounds=30, finetune_epochs=10)
        yield Run(**same, method="local", rounds=32)


RUNS = [run for seed in SEEDS for run in runs(seed)]


@in_a_sentence
def main() -> int:
    """Print of each Run of a partition the hours of one core, at most, and the simulated hours; codecs' own time is not in them."""
    first, job, total = RUNS[0].resolve(), Job(), 0.0
    source = open_source(first)
    ensemble, dealt = ensemble_of(first, source), deal(first, source)
    cost = measure(first, job, source, ensemble)
    print("core hours  simulated hours  Run (the other partitions alike)")
    for run in (run.resolve() for run in runs(SEEDS[0])):
        needs = needs_of(run, job, source, dealt, ensemble, 1, 1)
        hours = sum(seconds_of(run, needs, cost).values()) / 3600
        _, clock = simulated(run, dealt, needs.message)
        print(
            f"{hours:10.2f}{clock / 3600:17.1f}  {run.method} {run.network} staleness {run.staleness} {run.codec or 'none'}"
        )
        total += hours * len(SEEDS)
    print(f"{len(RUNS)} Runs, at most {total:.0f} core hours")
    return 0


if __name__ == "__main__":
    exit_with(main)
