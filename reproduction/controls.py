"""The Runs on which the controls are tried.

Call `python -m dpfl_mpi.sweep reproduction/controls.py` twice (replayed graphs need the result that
the first call computes), then `python reproduction/collect.py`.

All Runs are the paper's CIFAR-10 Patho(3), N = 100, B_c = 0.1N, but shorter. Comparisons, over
three partitions, have 20 rounds; DPFL then trains 110 local epochs. Attacks, newcomers and drift,
on one partition, have 6 rounds; DPFL then trains 40 epochs. Methods with a server do not train
before round 1, so they train ten epochs less.
"""

import functools
from typing import Any

from dpfl_mpi.settings import Run
from dpfl_mpi.settings.values import ATTACKS

SEEDS = (42, 32, 52)  # one partition each


def long(method: str, seed: int = 42, rounds: int = 20, **fields: Any) -> Run:
    """Return a Run of 20 rounds: DPFL trains 10 epochs before round 1 and 5 in each round."""
    usual = {"dataset": "cifar10", "budget": "0.1N"}
    return Run(**usual | {"method": method, "seed": seed, "rounds": rounds} | fields)


short = functools.partial(long, rounds=6)


def replayed(seed: int) -> list[Run]:
    """Return the Runs that take their graphs from DPFL's result, if it is in `results`."""
    source = long("dpfl", seed).path()
    if not source.is_file():
        return []
    of = {"graphs": str(source), "seed": seed}
    out = [long("random_graph", **of)]
    if seed == 42:
        for variant in ("rewired", "shuffled"):
            out.append(long("replay", **of, options={"variant": variant}))
        out.append(long("replay", **of | {"budget": "inf"}, options={"variant": "reversed"}))
    return out


COMPARED = []
for seed in SEEDS:
    COMPARED += [long("dpfl", seed), long("local", seed, 22), long("fedavg", seed)]
    COMPARED += [long("fedavg", seed, finetune_epochs=10), long("pairwise", seed)]
    COMPARED += [long("dpfl", seed, search_share=0.5), *replayed(seed)]
MORE = [long("oracle"), long("random_graph"), long("pens", rounds=22)]
HARMFUL = ("sign_flip", "scale", "backdoor")  # to a server, which averages whatever is sent
ATTACKED = [short("dpfl"), short("fedavg")]
ATTACKED += [short("dpfl", attack=f"{kind}:0.2") for kind in ATTACKS]
ATTACKED += [short("fedavg", attack=f"{kind}:0.2") for kind in ATTACKS if kind in HARMFUL]
NEWCOMERS = [short(m, newcomers=0.1) for m in ("dpfl", "fedavg", "fedrep", "knnper", "ditto")]
DRIFT = [short("dpfl", drift="0.5:3"), short("dpfl", drift="0.5:3", omega_period=2)]
DRIFT += [short("dpfl", omega_period=2), short("fedavg", drift="0.5:3")]
DRIFT += [short("local", rounds=8, drift="0.5:5"), long("dpfl", patience=5)]
SAME_CLIENTS = [long("dpfl", 32, partition_seed=42)]  # as the Run of seed 42, with other draws
RUNS = [*COMPARED, *MORE, *ATTACKED, *NEWCOMERS, *DRIFT, *SAME_CLIENTS]
