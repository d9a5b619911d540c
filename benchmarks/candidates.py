"""What --candidates M keeps of a choice among all, and what it saves: DPFL with a large budget, and `pairwise`.

    python benchmarks/candidates.py [--clients 500] [--budgets inf,0.2N] [--nearest 25,50,100]

The data of `growth.py`: real digits of scikit-learn, 8x8, three classes per client, so that clients form groups that overlap; the perceptron. Recall is
the share of the clients that `pairwise` with B_c = 10 chooses among all and also chooses among the nearest M: those that are among them. Seconds and
received models are of preprocessing, the rest of all rounds. One run each.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
from _scale import make_data, numbers, run

from dpfl_mpi.results import Result

POOL, TEST = 40, 20  # samples of a client to train and validate on, and to test on


def recall(some: np.ndarray, every: np.ndarray) -> float:
    """Return the share of the edges of a graph, bool `[N, N]`, that another one has, too."""
    return float((some & every).sum() / every.sum())


def main() -> None:
    """Run and print a line for each method, budget and M."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2, help="before the first graph")
    parser.add_argument("--budgets", default="inf,0.2N", help="B_c of DPFL, with commas; none: pairwise alone")
    parser.add_argument("--nearest", type=numbers, default="25,50,100", help="numbers M")
    args = parser.parse_args()
    methods = [("pairwise", "10"), *(("dpfl", budget) for budget in filter(None, args.budgets.split(",")))]
    print("method   B_c      M  accuracy  recall  seconds: graph  exchange  models received  seconds of a round")
    with tempfile.TemporaryDirectory() as name:
        make_data(data := Path(name, "digits.h5"), args.clients, POOL, TEST, 8)
        flags = {"dataset": "arrays", "data": data, "partition": "natural", "model": "mlp", "clients": args.clients}
        flags |= {"rounds": args.rounds, "tau_init": args.epochs, "tau_train": 1, "checkpoint_every": "never"}
        for method, budget in methods:
            every = np.zeros((args.clients, args.clients), bool)  # Omega of the first, among all
            for m in (math.inf, *args.nearest):
                more = {"method": method, "budget": budget, "candidates": "inf" if math.isinf(m) else m}
                made = run(Path(name), args.ranks, f"{method}-{budget}-{m}", flags | more)
                with Result(made.path) as result:
                    omega, received = result.chosen(0).matrix(), result["traffic/models_received"][0].mean()
                    accuracy = 100 * result["best/test_acc"].mean()
                every = omega if math.isinf(m) else every
                before, a_round = made.seconds(0, 1), sum(made.seconds().values())
                print(f"{method:8s} {budget:4s} {m:5g} {accuracy:8.2f} {recall(omega, every):8.3f} {before['graph']:14.1f} "
                      f"{before['exchange']:9.1f} {received:16.1f} {a_round:19.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
