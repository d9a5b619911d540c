"""How seconds and memory grow with the number of clients N: DPFL on a fixed number of samples per client, so that a round should be linear in N.

    python benchmarks/growth.py [--clients 50,100,200,500,1000,2000] [--ranks 2] [--parts clients,ranks,passes]

Real digits of scikit-learn, enlarged to 16x16 and moved a little until there are enough of them: `--pool` samples to train and validate on
and 10 to test on for each of the largest N clients, three classes each; a run with fewer clients takes some of them. The paper's CNN.
With `--images FILE` they are CIFAR-10's.

- clients: DPFL with B_c = `--budget` at each N; a table, the exponents of a log-log fit, and the figure growth.{pdf,png,csv}.
- ranks: the same at `--ranks_clients` clients on each of `--ranks_list` ranks.
- passes: B_c = inf at `--passes_clients` clients with a window of `--passes_gb` GiB per rank, beside what all models on every rank would take.

Seconds are of the slowest rank, bytes of the largest; one run each, so look at the free cores first.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from _scale import PHASES, Watched, deal, exponent, make_data, numbers, run, slope

from dpfl_mpi.results import Result

TEST = 10  # test samples per client
MB = 1e6


def point(watched: Watched, clients: int) -> dict[str, Any]:
    """Return what one run says: N, seconds per round by phase, of preprocessing, bytes per rank, evaluations per client, bytes of the file."""
    with Result(watched.path) as result:
        evaluations = result["graph/evaluations"]
        row = 4 * int(result.file["meta"].attrs["parameters"])
        edges = int(result["graph/chosen/indptr"][-1, -1])
    seconds, first = watched.seconds(), watched.seconds(0, 1)
    return {
        "clients": clients,
        "ranks": len(watched.ranks),
        **seconds,
        "round": sum(seconds.values()),
        "preprocessing": sum(first.values()),
        "start": watched.most("first_step") - watched.most("torch"),
        "resident": watched.most("resident"),
        "private": watched.most("private"),
        "grown": sum(rank["private"] - rank["imported_private"] for rank in watched.ranks),  # of all ranks
        "evaluations_first": float(evaluations[0].mean()),
        "most_first": int(evaluations[0].max()),
        "evaluations": float(evaluations[1:].mean()),
        "edges": edges,
        "row": row,
        "file": watched.path.stat().st_size,
    }


def table(points: list[dict[str, Any]]) -> str:
    """Return the points as lines."""
    lines = [
        "    N ranks | s per round:"
        + " ".join(f"{name:>8s}" for name in PHASES)
        + "      all | preprocessing | MB of a rank: peak private | evaluations per client: first (most)  round | file MB"
    ]
    for p in points:
        lines.append(
            f"{p['clients']:5d} {p['ranks']:5d} |             "
            + " ".join(f"{p[name]:8.3f}" for name in PHASES)
            + f" {p['round']:8.3f} | {p['preprocessing']:11.2f} s | {p['resident'] / MB:18.0f} {p['private'] / MB:7.0f} | "
            f"{p['evaluations_first']:29.1f} ({p['most_first']:4d}) {p['evaluations']:6.1f} | {p['file'] / MB:7.2f}"
        )
    return "\n".join(lines)


def fits(points: list[dict[str, Any]]) -> str:
    """Return exponents of N and the memory of a client."""
    n = [p["clients"] for p in points]
    grown = [p["grown"] for p in points]
    base, client = slope(n, grown)
    of = {
        "a round": [p["round"] for p in points],
        "preprocessing": [p["preprocessing"] for p in points],
        "memory of all ranks without the part that is the same for any N": [bytes_ - base for bytes_ in grown],
        "the results file": [p["file"] for p in points],
    }
    lines = ["exponents of N (1 is linear): " + ", ".join(f"{name} {exponent(n, y):.2f}" for name, y in of.items())]
    lines.append(
        f"memory per client {client / MB:.2f} MB ({client / points[0]['row']:.1f} models of {points[0]['row']} bytes), and {base / MB:.0f} MB whatever N; "
        "per client at each N: "
        + ", ".join(f"{p['clients']}: {(p['grown'] - base) / p['clients'] / MB:.2f}" for p in points)
    )
    return "\n".join(lines)


def draw(points: list[dict[str, Any]], out: Path) -> list[Path]:
    """Draw seconds per round by phase and memory of all ranks over N, log-log with a line of slope 1, and return the files written."""
    import matplotlib.pyplot as plt
    import pandas as pd

    from dpfl_mpi.figures.command import Drawing, save
    from dpfl_mpi.figures.style import COLOURS, GREY, STYLE, TEXT

    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.4))
        n = [p["clients"] for p in points]
        for name, colour in zip(("round", "graph", "train", "evaluate", "exchange"), COLOURS, strict=False):
            left.plot(n, [p[name] for p in points], "o-", color=colour, label="all" if name == "round" else name)
        right.plot(n, [p["grown"] / MB for p in points], "o-", color=COLOURS[0], label="all ranks, beyond the imports")
        for axes, last in ((left, points[-1]["round"]), (right, points[-1]["grown"] / MB)):
            axes.plot(n, [last * k / n[-1] for k in n], ":", color=GREY, label="linear")
            axes.set(xscale="log", yscale="log", xlabel="clients $N$")
            axes.set_xticks(n, [str(k) for k in n])
            axes.minorticks_off()
            axes.legend()
        left.set_ylabel("seconds per round")
        right.set_ylabel("memory, MB")
        return save(Drawing(pd.DataFrame(points), figure), "growth", out)


def passes(watched: Watched, clients: int, window_gb: float) -> str:
    """Return the memory of a run whose graph is wider than its window, beside that of all models on every rank."""
    p = point(watched, clients)
    ranks = p["ranks"]
    all_models = clients * p["row"]
    held = max(rank["resident"] - rank["imported"] for rank in watched.ranks)
    return (
        f"B_c = inf, N = {clients}, {ranks} ranks: a round {p['round']:.1f} s, preprocessing {p['preprocessing']:.1f} s; {p['edges']} edges recorded\n"
        f"a rank: window at most {window_gb * 2**30 / MB:.0f} MB, {held / MB:.0f} MB beyond the imports with everything else (its own clients' "
        f"models, data, windows of other ranks that it wrote to); all models on every rank: {all_models / MB:.0f} MB per rank for one copy"
    )


def main() -> None:
    """Run the parts that were asked for and print what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=numbers, default="50,100,200,500,1000,2000", help="numbers of clients N")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the first part")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a run after preprocessing")
    parser.add_argument("--pool", type=int, default=25, help="samples of a client to train and validate on")
    parser.add_argument("--model", default="cnn", help="cnn or mlp")
    parser.add_argument("--images", type=Path, help="a prepared CIFAR-10 file instead of digits; clients share images")
    parser.add_argument("--side", type=int, default=16, help="of an image: 8 as they are, or 16")
    parser.add_argument(
        "--budget", default="10", help="B_c of the first two parts; inf needs more than a minute from 200 clients on"
    )
    parser.add_argument(
        "--window_gb", type=float, default=4.0, help="largest window of a rank, GiB; the last part's is --passes_gb"
    )
    parser.add_argument("--parts", default="clients", help="clients, ranks, passes, with commas")
    parser.add_argument("--ranks_list", type=numbers, default="1,2,4,8", help="numbers of ranks of the second part")
    parser.add_argument("--ranks_clients", type=int, default=500, help="clients of the second part")
    parser.add_argument("--passes_clients", type=int, default=1000, help="clients of the last part")
    parser.add_argument("--passes_ranks", type=int, default=4, help="ranks of the last part")
    parser.add_argument("--passes_gb", type=float, default=0.02, help="window of a rank of the last part, GiB")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if set(parts) - {"clients", "ranks", "passes"}:
        parser.error(f"--parts is {args.parts}; allowed are clients, ranks, passes, with commas")
    needed = {"clients": max(args.clients), "ranks": args.ranks_clients, "passes": args.passes_clients}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "digits.h5"
        if not args.images:
            make_data(data, max(needed[part] for part in parts), args.pool, TEST, args.side)
        common = {"dataset": "arrays", "data": data, "partition": "natural", "model": args.model}
        common |= {"tau_init": 1, "tau_train": 1, "checkpoint_every": "never"}
        common |= {"save_models": False}  # else those of a small run are kept, and its file is the larger one

        def measured(part: str, ranks: int, clients: int, budget: str, rounds: int, window_gb: float) -> Watched:
            flags = {"clients": clients, "budget": budget, "rounds": rounds, "window_gb": window_gb}
            if args.images:
                dealt = folder / f"{clients}.json"
                deal(dealt, args.images, clients, args.pool, TEST)
                flags |= {"dataset": "cifar10", "data": args.images, "partition": f"file:{dealt}"}
            watched = run(folder, ranks, f"{part}-{ranks}-{clients}", common | flags)
            print(f"  {part}: N = {clients}, {ranks} ranks done", file=sys.stderr, flush=True)
            return watched

        print(
            f"{len(os.sched_getaffinity(0))} cores, {args.pool} samples per client to train and validate on, {args.model}, B_c = {args.budget}"
        )
        for part, choices in (
            ("clients", [(args.ranks, n) for n in args.clients]),
            ("ranks", [(ranks, args.ranks_clients) for ranks in args.ranks_list]),
        ):
            if part in parts:
                points = [
                    point(measured(part, ranks, n, args.budget, args.rounds, args.window_gb), n) for ranks, n in choices
                ]
                print(table(points))
                if part == "clients" and len(points) > 1:
                    print(fits(points))
                    print(*draw(points, args.out))
        if "passes" in parts:
            watched = measured("passes", args.passes_ranks, args.passes_clients, "inf", 1, args.passes_gb)
            print(passes(watched, args.passes_clients, args.passes_gb))


if __name__ == "__main__":
    main()
