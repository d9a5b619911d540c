"""What --candidates M keeps of a choice among all, and what it saves, for DPFL and `pairwise`.

    python benchmarks/candidates.py [--clients 500] [--budgets inf,0.2N] [--nearest 25,50,100]

The data are those of `growth.py` in 8x8, the model is the perceptron. Each client has three
classes, so clients form groups that overlap. Recall is the share of the clients which `pairwise`
(B_c = 10) chooses among all that it also chooses among the M most similar. Received models, and
seconds of choosing and sending, are of preprocessing. One run each.
"""

import tempfile
from pathlib import Path

from _scale import flags_for, make_data, numbers, options, run

from dpfl_mpi.results import Result

POOL, TEST = 40, 20  # samples of a client to train and validate on, and to test on


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--budgets", default="inf,0.2N", help="B_c of DPFL, with commas")
    parser.add_argument("--nearest", type=numbers, default="25,50,100", help="numbers M")
    args = parser.parse_args()
    methods = [("pairwise", "10"), *(("dpfl", budget) for budget in args.budgets.split(","))]
    print("method   B_c      M  accuracy  recall  seconds: graph  exchange  models received  "
          "seconds of a round")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "digits.h5")
        make_data(data, args.clients, POOL, TEST, 8)
        flags = flags_for(data, model="mlp", clients=args.clients, rounds=args.rounds, tau_init=2)
        for method, budget in methods:
            for m in ("inf", *args.nearest):
                more = {"method": method, "budget": budget, "candidates": m}
                watched = run(Path(folder), args.ranks, f"{method}-{budget}-{m}", flags | more)
                with Result(watched.path) as result:
                    omega = result.chosen(0).matrix()
                    received = result["traffic/models_received"][0].mean()
                    accuracy = 100 * result["best/test_acc"].mean()
                if m == "inf":
                    of_all = omega
                recall = (omega & of_all).sum() / of_all.sum()
                before, a_round = watched.seconds(0, 1), sum(watched.seconds().values())
                print(f"{method:8s} {budget:4s} {m:>5} {accuracy:8.2f} {recall:8.3f} "
                      f"{before['graph']:14.1f} {before['exchange']:9.1f} {received:16.1f} "
                      f"{a_round:19.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
