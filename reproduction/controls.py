"""What the controls are tried on: `python -m dpfl_mpi.sweep reproduction/controls.py`, called twice, then `python reproduction/collect.py`.

All Runs are the paper's CIFAR-10 Patho(3), N = 100, B_c = 0.1N, but shorter. Comparisons over three partitions have 20 rounds, of DPFL 110 local epochs.
Lies, newcomers and drift, on one partition, have 6 rounds, of DPFL 40 epochs. Methods with a server train none before round 1, so ten epochs less.
Replayed graphs need the result that they replay, which the first call computes.
"""

import functools
from typing import Any

from dpfl_mpi.settings import Run
from dpfl_mpi.settings.values import ATTACKS

SEEDS = (42, 32, 52)  # a partition each


def long(method: str, seed: int = 42, rounds: int = 20, **fields: Any) -> Run:
    """Return a Run of 110 local epochs: DPFL's 10 before round 1 and 5 in each of 20 rounds. Methods with a server have 100."""
    return Run(**{"dataset": "cifar10", "budget": "0.1N", "method": method, "seed": seed, "rounds": rounds} | fields)


short = functools.partial(long, rounds=6)  # 40 local epochs; methods with a server have 30


def replayed(seed: int) -> list[Run]:
    """Return the Runs that take their graphs from DPFL's, as far as that is in the folder `results`."""
    source = long("dpfl", seed).path()
    if not source.is_file():
        return []
    of = {"graphs": str(source), "seed": seed}
    out = [long("random_graph", **of)]
    if seed == 42:
        out += [long("replay", **of, options={"variant": variant}) for variant in ("rewired", "shuffled")]
        out += [long("replay", **of | {"budget": "inf"}, options={"variant": "reversed"})]
    return out


COMPARED = []
for seed in SEEDS:
    COMPARED += [long("dpfl", seed), long("local", seed, 22), long("fedavg", seed)]
    COMPARED += [long("fedavg", seed, finetune_epochs=10), long("pairwise", seed)]
    COMPARED += [long("dpfl", seed, search_share=0.5), *replayed(seed)]
MORE = [long("oracle"), long("random_graph"), long("pens", rounds=22)]
SAME_CLIENTS = [long("dpfl", 32, partition_seed=42)]  # as the Run of seed 42, with other draws
HARMFUL = ("sign_flip", "scale", "backdoor")  # to a server, which averages with whoever sends
ATTACKED = [short(m) for m in ("dpfl", "fedavg")] + [
    short(m, attack=f"{kind}:0.2") for m in ("dpfl", "fedavg") for kind in ATTACKS if m == "dpfl" or kind in HARMFUL
]
LATER = [short(m, newcomers=0.1) for m in ("dpfl", "fedavg", "fedrep", "knnper", "ditto")]
MOVED = [short("dpfl", drift="0.5:3"), short("dpfl", drift="0.5:3", omega_period=2), short("dpfl", omega_period=2)]
MOVED += [short("fedavg", drift="0.5:3"), short("local", rounds=8, drift="0.5:5"), long("dpfl", patience=5)]
RUNS = [*COMPARED, *MORE, *ATTACKED, *LATER, *MOVED, *SAME_CLIENTS]
