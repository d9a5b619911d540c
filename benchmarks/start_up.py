"""Files and start-up at many clients: seconds to the first step, what a rank holds of the data, and how the results file grows with the edges.

    python benchmarks/start_up.py [--clients 2000] [--rounds 100] [--ranks_list 1,2,4] [--budgets 2,5,10]

A perceptron on digits of scikit-learn: `--pool` 8x8 images to train and validate on and 2 to test on a client. Three tables:

- start-up: seconds from the start of the process to the first gradient step, slowest rank, less what importing torch took; from there to the end.
- data: what a rank's memory grew by between the imports and the first step with `--image_side` as large as images get, one step long, so
  that images are what fills it: a rank holds its clients' samples, not the file.
- results: bytes of the file a client and round beside those of a run without edges (B_c = 1), so bytes an edge.

Growth of the search is not measured here (B_c is small, one epoch a round): see growth.py.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from _scale import make_data, numbers, run, slope

from dpfl_mpi.results import Result

TEST = 2  # test samples a client
MB = 1e6


def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=2000, help="number of clients N")
    parser.add_argument("--rounds", type=int, default=100, help="rounds T of the results files")
    parser.add_argument("--pool", type=int, default=5, help="samples of a client to train and validate on")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the runs that fill results files")
    parser.add_argument("--ranks_list", type=numbers, default="1,2,4", help="ranks of the first two tables")
    parser.add_argument("--budgets", type=numbers, default="2,5,10", help="budgets B_c of the results files")
    parser.add_argument(
        "--image_side", type=int, default=64, help="pixels of a side, of the images of the second table"
    )
    args = parser.parse_args()
    common = {
        "dataset": "arrays",
        "partition": "natural",
        "model": "mlp",
        "clients": args.clients,
        "checkpoint_every": "never",
    }
    common |= {"min_samples": 3, "tau_train": 1}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = folder / "small.h5", folder / "large.h5"
        make_data(small, args.clients, args.pool, TEST, 8)
        make_data(large, args.clients, 4 * args.pool, TEST, args.image_side)
        print(
            f"N = {args.clients}: data files of {small.stat().st_size / MB:.1f} and {large.stat().st_size / MB:.1f} MB"
        )
        print(
            "ranks | s to the first step  importing torch  the rest | MB a rank grew by, large images: largest rank  file / ranks"
        )
        for ranks in args.ranks_list:
            short = common | {"rounds": 0, "tau_init": 1, "budget": 1}
            start = run(folder, ranks, f"start-{ranks}", short | {"data": small})
            held = run(folder, ranks, f"held-{ranks}", short | {"data": large, "method": "local"})
            grown = max(rank["before"] - rank["imported"] for rank in held.ranks)
            rest = max(rank["first_step"] - rank["torch"] for rank in start.ranks)
            print(
                f"{ranks:5d} | {start.most('first_step'):19.2f} {start.most('torch'):16.2f} {rest:9.2f} | "
                f"{grown / MB:45.1f} {large.stat().st_size / ranks / MB:13.1f}",
                flush=True,
            )
        print(
            "  B_c    edges   file MB | of it graph/chosen/senders: bytes an edge | bytes a client and round: all, without senders"
        )
        edges, sizes = [], []
        for budget in (1, *args.budgets):
            full = common | {
                "rounds": args.rounds,
                "tau_init": 1,
                "budget": budget,
                "data": small,
                "method": "random_graph",
            }
            done = run(folder, args.ranks, f"file-{budget}", full)
            with Result(done.path) as result:
                stored = result.file["graph/chosen/senders"].id.get_storage_size()
                edges.append(len(result.file["graph/chosen/senders"]))
            sizes.append(done.path.stat().st_size)
            cells = args.clients * (args.rounds + 1)
            print(
                f"{budget:5d} {edges[-1]:8d} {sizes[-1] / MB:9.2f} | {stored / max(edges[-1], 1):43.2f} | "
                f"{sizes[-1] / cells:31.1f} {(sizes[-1] - stored) / cells:12.1f}   "
                f"write {done.seconds()['write']:.3f} s a round",
                flush=True,
            )
        if args.budgets:
            base, each = slope(edges, sizes)
            print(f"file = {base / MB:.2f} MB + {each:.2f} bytes an edge and round")


if __name__ == "__main__":
    main()
