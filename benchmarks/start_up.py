"""Start-up and files at many clients.

    python benchmarks/start_up.py [--clients 2000] [--rounds 100] [--ranks_list 1,2,4]

A perceptron on digits of scikit-learn. Printed:

- start-up: seconds from the start of the process to the first gradient step, slowest rank, and
  without importing torch; `--pool` 8x8 images per client to train and validate on.
- data: MB of a rank's samples, and by how much its memory grew while it read them, beside the data
  file, of `--large_pool` 16x16 images per client. A rank holds its clients' samples, not the file.
- results: MB of the file, and bytes of an edge, for each budget (a random graph: B_c - 1 edges per
  client and round); B_c = 1 has no edges.
"""

import tempfile
from pathlib import Path

from _scale import MB, flags_for, make_data, numbers, options, run, slope

from dpfl_mpi.results import Result

TEST = 2  # test samples per client


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=2000, help="number of clients N")
    parser.add_argument("--rounds", type=int, default=100, help="rounds T of the results files")
    parser.add_argument("--pool", type=int, default=5)
    parser.add_argument("--large_pool", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2, help="of the runs of the results table")
    parser.add_argument("--ranks_list", type=numbers, default="1,2,4", help="of the other tables")
    parser.add_argument("--budgets", type=numbers, default="2,5,10", help="of the results table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = folder / "small.h5", folder / "large.h5"
        make_data(small, args.clients, args.pool, TEST, 8)
        make_data(large, args.clients, args.large_pool, TEST, 16)
        size = large.stat().st_size / MB
        print(f"N = {args.clients}; data file of the data table {size:.1f} MB")
        print("ranks | s to first step  importing torch  the rest | "
              "MB of a rank's samples  memory it grew by  file / ranks")  # fmt: skip
        common = {"model": "mlp", "clients": args.clients}
        for ranks in args.ranks_list:
            short = common | {"rounds": 0, "budget": 1}
            start = run(folder, ranks, f"start-{ranks}", flags_for(small, **short))
            reads = run(folder, ranks, f"reads-{ranks}", flags_for(large, **short))
            rest = max(rank["first_step"] - rank["torch"] for rank in start.ranks)
            print(f"{ranks:5d} | {start.most('first_step'):15.2f} {start.most('torch'):16.2f} "
                  f"{rest:9.2f} | {reads.most('samples') / MB:22.1f} "
                  f"{reads.most('read') / MB:18.1f} {size / ranks:13.1f}", flush=True)  # fmt: skip
        print("  B_c    edges  file MB | bytes per edge | "
              "bytes per client and round, without edges | s per round to write")  # fmt: skip
        edges, sizes = [], []
        for budget in (1, *args.budgets):
            more = {"rounds": args.rounds, "budget": budget, "method": "random_graph"}
            done = run(folder, args.ranks, f"file-{budget}", flags_for(small, **common, **more))
            with Result(done.path) as result:
                senders = result.file["graph/chosen/senders"]
                stored = senders.id.get_storage_size()
                edges.append(len(senders))
            sizes.append(done.path.stat().st_size)
            rest = (sizes[-1] - stored) / (args.clients * (args.rounds + 1))
            print(f"{budget:5d} {edges[-1]:8d} {sizes[-1] / MB:8.2f} | "
                  f"{stored / max(edges[-1], 1):14.2f} | {rest:41.1f} | "
                  f"{done.seconds()['write']:.3f}", flush=True)  # fmt: skip
        base, each = slope(edges, sizes)
        print(f"file = {base / MB:.2f} MB + {each:.2f} bytes per edge and round")


if __name__ == "__main__":
    main()
