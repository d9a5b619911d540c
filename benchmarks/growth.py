"""How seconds and memory grow with the number of clients N.

    python benchmarks/growth.py [--clients 50,100,200,500,1000,2000]
    python benchmarks/growth.py --clients 500 --ranks_list 1,2,4,8
    python benchmarks/growth.py --clients 1000 --ranks_list 4 --budget inf --window_gb 0.02

DPFL on `--pool` samples per client to train and validate on, 10 to test on, three classes per
client: digits of scikit-learn, enlarged and moved until there are enough. A round should be linear
in N. Each N is computed on each number of ranks, and a table is printed; with several N on one
number of ranks also the exponents of a log-log fit, and the figure growth.{pdf,png,csv}.

Seconds are of the slowest rank, bytes of the largest. Each is one run: use free cores.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import _scale
from _scale import MB, PHASES, Watched, numbers

from dpfl_mpi.results import Result

TEST = 10  # test samples per client
DRAWN = "round", "graph", "train", "evaluate", "exchange"


def point(watched: Watched, clients: int) -> dict[str, Any]:
    """Return one run's numbers: seconds per round, bytes, evaluations per client."""
    with Result(watched.path) as result:
        evaluations = result["graph/evaluations"]
        row = 4 * int(result.file["meta"].attrs["parameters"])
    seconds, ranks = watched.seconds(), watched.ranks
    return {
        "clients": clients,
        "ranks": len(ranks),
        **seconds,
        "round": sum(seconds.values()),
        "preprocessing": sum(watched.seconds(0, 1).values()),
        "resident": watched.most("resident"),
        "private": watched.most("private"),
        # of all ranks together
        "grown": sum(rank["private"] - rank["imported_private"] for rank in ranks),
        "evaluations_first": float(evaluations[0].mean()),
        "most_first": int(evaluations[0].max()),
        "evaluations": float(evaluations[1:].mean()),
        "row": row,
        "file": watched.path.stat().st_size,
    }


def table(points: list[dict[str, Any]]) -> str:
    """Return a line per point."""
    phases = " ".join(f"{name:>8s}" for name in PHASES)
    lines = [f"    N ranks | s per round:{phases}      all | preprocessing | "
             "MB of a rank: peak private | evaluations per client: first (most)  round | "
             "file MB"]  # fmt: skip
    for p in points:
        phases = " ".join(f"{p[name]:8.3f}" for name in PHASES)
        lines.append(
            f"{p['clients']:5d} {p['ranks']:5d} |             {phases} {p['round']:8.3f} | "
            f"{p['preprocessing']:11.2f} s | {p['resident'] / MB:18.0f} {p['private'] / MB:7.0f} | "
            f"{p['evaluations_first']:29.1f} ({p['most_first']:4d}) {p['evaluations']:6.1f} | "
            f"{p['file'] / MB:7.2f}"
        )
    return "\n".join(lines)


def fits(points: list[dict[str, Any]]) -> str:
    """Return exponents of N and the memory of a client."""
    n, grown = ([p[name] for p in points] for name in ("clients", "grown"))
    base, client = _scale.slope(n, grown)
    series = {
        "a round": [p["round"] for p in points],
        "preprocessing": [p["preprocessing"] for p in points],
        "memory of all ranks without what any N takes": [size - base for size in grown],
        "the results file": [p["file"] for p in points],
    }
    exponents = ", ".join(f"{name} {_scale.exponent(n, y):.2f}" for name, y in series.items())
    row = points[0]["row"]
    each = (f"{k}: {(size - base) / k / MB:.2f}" for k, size in zip(n, grown, strict=True))
    return (
        f"exponents of N (1 is linear): {exponents}\n"
        f"memory per client {client / MB:.2f} MB ({client / row:.1f} models of {row} bytes), and "
        f"{base / MB:.0f} MB whatever N; per client at each N: {', '.join(each)}"
    )


def picture(points: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw seconds per round and memory of all ranks over N, with lines of slope 1."""
    import matplotlib.pyplot as plt
    import pandas as pd

    from dpfl_mpi.figures.command import Drawing, save
    from dpfl_mpi.figures.style import COLOURS, GREY, STYLE, TEXT

    n = [p["clients"] for p in points]
    seconds = {"all" if name == "round" else name: [p[name] for p in points] for name in DRAWN}
    memory = {"all ranks, beyond the imports": [p["grown"] / MB for p in points]}
    panels = {"seconds per round": seconds, "memory, MB": memory}
    with plt.rc_context(STYLE):
        figure, places = plt.subplots(1, 2, figsize=(TEXT, 2.4))
        for axes, (y_label, lines) in zip(places, panels.items(), strict=True):
            for (label, y), colour in zip(lines.items(), COLOURS, strict=False):
                axes.plot(n, y, "o-", color=colour, label=label)
            last = next(iter(lines.values()))[-1]
            axes.plot(n, [last * k / n[-1] for k in n], ":", color=GREY, label="linear")
            axes.set(xscale="log", yscale="log", xlabel="clients $N$", ylabel=y_label)
            axes.set_xticks(n, map(str, n))
            axes.minorticks_off()
            axes.legend()
        return save(Drawing(pd.DataFrame(points), figure), "growth", folder)


def main() -> None:
    parser = _scale.options(__doc__)
    counts = "50,100,200,500,1000,2000"
    parser.add_argument("--clients", type=numbers, default=counts, help="numbers of clients N")
    parser.add_argument("--ranks_list", type=numbers, default="2", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after preprocessing")
    parser.add_argument("--pool", type=int, default=25, help="samples to train and validate on")
    parser.add_argument("--model", default="cnn", help="cnn or mlp")
    parser.add_argument("--side", type=int, default=16, help="of an image: 8, 16 or 32")
    parser.add_argument("--budget", default="10", help="B_c")
    parser.add_argument("--window_gb", type=float, default=4.0, help="largest window, GiB")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figure")
    args = parser.parse_args()
    cores, points = len(os.sched_getaffinity(0)), []
    print(f"{cores} cores, {args.pool} samples per client to train and validate on, {args.model}, "
          f"B_c = {args.budget}")  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        data = Path(name, "digits.h5")
        _scale.make_data(data, max(args.clients), args.pool, TEST, args.side)
        flags = _scale.flags_for(data, model=args.model, budget=args.budget, rounds=args.rounds)
        # models are kept by default in small runs only: their files would be the larger ones
        flags |= {"window_gb": args.window_gb, "save_models": False}
        for ranks in args.ranks_list:
            for n in args.clients:
                watched = _scale.run(Path(name), ranks, f"{ranks}-{n}", flags | {"clients": n})
                points.append(point(watched, n))
                print(f"  N = {n}, {ranks} ranks done", file=sys.stderr, flush=True)
    print(table(points))
    if len(args.clients) > 1 and len(args.ranks_list) == 1:
        print(fits(points))
        print(*picture(points, args.out))


if __name__ == "__main__":
    main()
