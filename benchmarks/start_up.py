"""Files and start-up at many clients: seconds to the first step, what a rank holds of the data, and how the results file grows with the edges.

    python benchmarks/start_up.py [--clients 2000] [--rounds 100] [--ranks_list 1,2,4] [--budgets 2,5,10]

A perceptron on digits of scikit-learn: `--pool` 8x8 images per client to train and validate on, and 2 to test on. Printed:

- start-up: seconds from the start of the process to the first gradient step, slowest rank, and without importing torch.
- data: bytes of a rank's samples, and what its resident memory grew by while it read them, beside the data file (`--large_pool` 16x16 images
  per client): a rank holds its clients' samples, not the file.
- results: bytes of the file and of the edges in it for each budget (a random graph: B_c - 1 edges per client and round), B_c = 1 without edges.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from _scale import make_data, numbers, run, slope

from dpfl_mpi.results import Result

TEST = 2  # test samples per client
MB = 1e6


def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=2000, help="number of clients N")
    parser.add_argument("--rounds", type=int, default=100, help="rounds T of the results files")
    parser.add_argument("--pool", type=int, default=5, help="samples of a client to train and validate on")
    parser.add_argument("--large_pool", type=int, default=100, help="as --pool, of the data table")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the runs that fill results files")
    parser.add_argument("--ranks_list", type=numbers, default="1,2,4", help="ranks of start-up and data")
    parser.add_argument("--budgets", type=numbers, default="2,5,10", help="budgets B_c of the results files")
    args = parser.parse_args()
    common = {"dataset": "arrays", "partition": "natural", "model": "mlp", "clients": args.clients, "min_samples": 3}
    common |= {"tau_init": 1, "tau_train": 1, "checkpoint_every": "never"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = folder / "small.h5", folder / "large.h5"
        make_data(small, args.clients, args.pool, TEST, 8)
        make_data(large, args.clients, args.large_pool, TEST, 16)
        print(f"N = {args.clients}; data file of the data table {large.stat().st_size / MB:.1f} MB")
        print(
            "ranks | s to first step  importing torch  the rest | MB of a rank's samples  memory it grew by  file / ranks"
        )
        for ranks in args.ranks_list:
            short = common | {"rounds": 0, "budget": 1}
            start = run(folder, ranks, f"start-{ranks}", short | {"data": small})
            held = run(folder, ranks, f"held-{ranks}", short | {"data": large})
            rest = max(rank["first_step"] - rank["torch"] for rank in start.ranks)
            print(
                f"{ranks:5d} | {start.most('first_step'):15.2f} {start.most('torch'):16.2f} {rest:9.2f} | "
                f"{held.most('samples') / MB:22.1f} {held.most('read') / MB:18.1f} {large.stat().st_size / ranks / MB:13.1f}",
                flush=True,
            )
        print(
            "  B_c    edges  file MB | bytes per edge | bytes per client and round, without edges | s per round to write"
        )
        edges, sizes = [], []
        for budget in (1, *args.budgets):
            fields = {"rounds": args.rounds, "budget": budget, "data": small, "method": "random_graph"}
            done = run(folder, args.ranks, f"file-{budget}", common | fields)
            with Result(done.path) as result:
                stored = result.file["graph/chosen/senders"].id.get_storage_size()
                edges.append(len(result.file["graph/chosen/senders"]))
            sizes.append(done.path.stat().st_size)
            rest = (sizes[-1] - stored) / (args.clients * (args.rounds + 1))
            print(
                f"{budget:5d} {edges[-1]:8d} {sizes[-1] / MB:8.2f} | {stored / max(edges[-1], 1):14.2f} | "
                f"{rest:41.1f} | {done.seconds()['write']:.3f}",
                flush=True,
            )
        base, each = slope(edges, sizes)
        print(f"file = {base / MB:.2f} MB + {each:.2f} bytes per edge and round")


if __name__ == "__main__":
    main()
