"""How many partitions and clients it takes to find a difference.

`python reproduction/plan_power.py RESULT RESULT --difference 0.63` takes results of two Runs, each
of any number of partitions and seeds, and compares them client by client. Clients of one partition
share what its split happened to give them, so a difference has two sources of chance:
d_ik = delta + b_i + e_ik, with b_i of partition i and e_ik of its client k. Their variances come
from the results (one-way random effects; with one partition, that of b is taken as 0). The power
is that of a two-sided paired t-test over partition means (noncentral t distribution).
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import nctdtr, stdtrit

from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.figures.command import has_rounds
from dpfl_mpi.figures.frames import of_results
from dpfl_mpi.figures.names import labels
from dpfl_mpi.figures.tables import Parts, difference_text, interval, paired
from dpfl_mpi.results import Result
from dpfl_mpi.settings.command_line import Parser

SIZES = (16, 32, 100, 200, 500)  # clients per partition in the table, beside that of the results
MOST_PARTITIONS = 10_000
LEVEL, WANTED = 0.05, 0.8  # of the two-sided test; the probability of finding the difference


@dataclass(frozen=True)
class Chance:
    """The two sources of chance of a difference of two Runs: standard deviations, points."""

    within: float  # between clients of one partition
    between: float  # between partitions
    partitions: int
    clients: float  # per partition


def compared(results: Sequence[Result]) -> tuple[Parts, list[str]]:
    """Return the paired differences of two Runs, first minus second, and their names."""
    frames = of_results(results)
    rows = frames.files.drop_duplicates(["setting", "row"])
    if len(rows) != 2:
        allowed = "allowed are two, of any seeds or partitions"
        raise UserError(f"these are results of {len(rows)} different Runs; {allowed}")
    names = labels(rows)
    lines = frames["clients"].merge(rows[["setting", "row"]].assign(name=names))
    parts = paired(lines.assign(row=lines["name"]), *names)
    if not parts or min(map(len, parts)) < 2:
        needed = "on which two clients or more can be compared"
        raise UserError(f"the two Runs have no partition in common {needed}")
    return parts, names


def chance_of(parts: Parts) -> Chance:
    """Return the chance of the mean difference (one-way random effects, equal weights)."""
    means, sizes = np.array([d.mean() for d in parts]), np.array([len(d) for d in parts])
    m = len(parts)
    within = sum(((d - d.mean()) ** 2).sum() for d in parts) / (sizes.sum() - m)
    from_clients = within * (1 / sizes).mean()  # their part of the variance of a partition's mean
    between = max(means.var(ddof=1) - from_clients, 0.0) if m > 1 else 0.0
    return Chance(math.sqrt(within), math.sqrt(between), m, float(sizes.mean()))


def power(chance: Chance, difference: float, partitions: int, clients: float) -> float:
    """Return the probability that a two-sided t-test at `LEVEL` finds the difference, points.

    The test is over partition means, or over the clients of a single partition.
    """
    several = partitions > 1
    df = partitions - 1 if several else clients - 1
    variance = chance.within**2 / clients + (chance.between**2 if several else 0.0)
    if variance == 0:
        return 1.0
    shift = abs(difference) / math.sqrt(variance / partitions)
    limit = stdtrit(df, 1 - LEVEL / 2)
    wrong_sign = np.nan_to_num(nctdtr(df, shift, -limit))  # SciPy returns nan at some zeros
    missed = nctdtr(df, shift, limit) - wrong_sign
    return 1.0 if math.isnan(missed) else float(1 - missed)  # nan: too far out to be computed


def needed(chance: Chance, difference: float, clients: float) -> int:
    """Return the fewest partitions, from 2 on, that have the power `WANTED`; 0 beyond the most."""
    counts = range(2, MOST_PARTITIONS + 1)
    found = bisect_left(counts, WANTED, key=lambda n: power(chance, difference, n, clients))
    return counts[found] if found < len(counts) else 0


def cells(parts: Parts, differences: Mapping[str, float], clients: float = 0) -> dict[str, str]:
    """Return a table's cells: the mean difference, its chance, and the partitions needed.

    These are for each of `differences`, by column, with as many clients as in `parts` by default.
    """
    chance = chance_of(parts)
    counts = {
        column: needed(chance, each, clients or chance.clients)
        for column, each in differences.items()
    }
    return {
        "points": difference_text(parts),
        "deviation within": f"{chance.within:.1f}",
        "between partitions": f"{chance.between:.2f}",
        **{column: str(count or f"> {MOST_PARTITIONS:,}") for column, count in counts.items()},
    }


def report(parts: Parts, names: Sequence[str], difference: float) -> str:
    chance, (mean, half) = chance_of(parts), interval(parts)
    m, clients = chance.partitions, chance.clients
    over = "partition means" if m > 1 else "the clients of one partition"
    between = f"{chance.between:.2f}" if m > 1 else "unknown (one partition, taken as 0)"
    found = 100 * power(chance, difference, m, clients)
    goal = f"with a power of {100 * WANTED:.0f} % at the level {100 * LEVEL:g} %"
    lines = [
        f"{names[0]} minus {names[1]}: {mean:+.2f} ± {half:.2f} points "
        f"(95 %, over {over}; {m} partitions, {clients:.0f} clients each)",
        f"standard deviation of a client's difference: within a partition {chance.within:.2f}, "
        f"between partitions {between}",
        f"power of these results for {difference:g} points: {found:.0f} %",
        "",
        f"To find {difference:g} points {goal}:",
        "  clients per partition   partitions   clients in all",
    ]
    for size in sorted({*SIZES, round(clients)}):
        count = needed(chance, difference, size)
        beyond = f"{f'over {MOST_PARTITIONS}':>10}"
        lines.append(f"  {size:21d}   {f'{count:10d}   {count * size:14d}' if count else beyond}")
    return "\n".join(lines)


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("results", nargs="+", metavar="RESULT", help="results of two Runs, of the same partitions")
    add("--difference", type=float, required=True, metavar="X", help="points to find")
    args = parser.parse_args(arguments)
    if not args.difference or not math.isfinite(args.difference):
        allowed = "allowed is a number of points other than 0"
        raise UserError(f"--difference is {args.difference:g}; {allowed}")
    results = [result for result in map(Result, args.results) if has_rounds(result)]
    if not results:
        raise UserError("none of these results has a recorded round yet")
    parts, names = compared(results)
    print(report(parts, names, args.difference))


if __name__ == "__main__":
    exit_with(main)
