"""How many partitions and clients a difference takes: `python reproduction/plan_power.py RESULT RESULT --difference 0.63`.

The results are of two Runs, each of any number of partitions and seeds. They are compared client by client. Clients of one partition share what
chance dealt to all of them, so a difference has two sources of chance, d_ik = delta + b_i + e_ik: b_i of partition i, e_ik of its client k.
Their variances are estimated from the results (a random-effects analysis of variance; with one partition that of b is taken as 0, which is said).
The power is that of a two-sided paired t-test over partition means, from the noncentral t distribution.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.figures.command import has_rounds
from dpfl_mpi.figures.frames import of_results
from dpfl_mpi.figures.names import labels
from dpfl_mpi.figures.tables import Parts, interval, paired
from dpfl_mpi.results import Result
from dpfl_mpi.settings.command_line import Parser

SIZES = (16, 32, 100, 200, 500)  # clients per partition in the table, beside those of the results
MOST = 10_000  # partitions


@dataclass(frozen=True)
class Chance:
    """The two sources of chance of a difference of two Runs, as standard deviations, points."""

    within: float  # between clients of one partition
    between: float  # between partitions
    partitions: int
    clients: float  # per partition


def compared(results: Sequence[Result]) -> tuple[Parts, list[str]]:
    """Return the differences of two Runs by client, points, first Run minus second, an array per partition, and what the two are called."""
    frames = of_results(results)
    if len(rows := frames.files.drop_duplicates(["setting", "row"])) != 2:
        raise UserError(f"these are results of {len(rows)} different Runs; allowed are two, of any seeds or partitions")
    names = labels(rows)
    lines = frames["clients"].merge(rows[["setting", "row"]].assign(name=names))
    parts = paired(lines.assign(row=lines["name"]), *names)
    if not parts or min(map(len, parts)) < 2:
        raise UserError("the two Runs have no partition in common on which two clients or more can be compared")
    return parts, names


def chance_of(parts: Parts) -> Chance:
    """Return the chance of the mean difference, from the differences per partition (one-way random effects, partitions weigh the same)."""
    means = np.array([d.mean() for d in parts])
    m, sizes = len(parts), np.array([len(d) for d in parts])
    within = sum(((d - d.mean()) ** 2).sum() for d in parts) / (sizes.sum() - m)
    of_mean = within * (1 / sizes).mean()  # what the clients' chance alone gives a partition's mean
    between = max(means.var(ddof=1) - of_mean, 0.0) if m > 1 else 0.0
    return Chance(math.sqrt(within), math.sqrt(between), m, float(sizes.mean()))


def power(chance: Chance, difference: float, partitions: int, clients: float, level: float) -> float:
    """Return the probability that a two-sided t-test over partition means (of one partition, over its clients) finds the difference, points."""
    from scipy.special import (  # late: where SciPy is missing, `figures` says it in a sentence
        nctdtr,
        stdtrit,
    )

    df = partitions - 1 if partitions > 1 else clients - 1
    variance = (chance.between**2 if partitions > 1 else 0.0) + chance.within**2 / clients
    if variance == 0:
        return 1.0
    shift, limit = abs(difference) / math.sqrt(variance / partitions), stdtrit(df, 1 - level / 2)
    far = np.nan_to_num(nctdtr(df, shift, -limit))  # SciPy has nan at some of its zeros
    missed = nctdtr(df, shift, limit) - far
    return 1.0 if math.isnan(missed) else float(1 - missed)  # so far out that the distribution cannot be computed


def needed(chance: Chance, difference: float, clients: float, wanted: float, level: float) -> int:
    """Return the fewest partitions, at least 2, that find the difference with the power wanted; 0 where `MOST` do not suffice."""
    counts = range(2, MOST + 1)
    i = bisect.bisect_left(counts, wanted, key=lambda m: power(chance, difference, m, clients, level))
    return counts[i] if i < len(counts) else 0


def report(parts: Parts, names: Sequence[str], difference: float, wanted: float, level: float) -> str:
    chance, (mean, half) = chance_of(parts), interval(parts)
    over, between = "partition means", f"{chance.between:.2f}"
    if chance.partitions == 1:
        over, between = "the clients of one partition", "unknown: one partition, taken as 0"
    found = 100 * power(chance, difference, chance.partitions, chance.clients, level)
    lines = [
        f"{names[0]} minus {names[1]}: {mean:+.2f} ± {half:.2f} points (95 %, over {over}; {chance.partitions} partitions, "
        f"{chance.clients:.0f} clients each)",
        f"standard deviation of a client's difference within a partition {chance.within:.2f}, between partitions {between}",
        f"power of these results for {difference:g} points: {found:.0f} %",
        "",
        f"To find {difference:g} points with a power of {100 * wanted:.0f} % at the level {100 * level:g} %:",
        "  clients per partition   partitions   clients in all",
    ]
    for clients in sorted({*SIZES, round(chance.clients)}):
        count = needed(chance, difference, clients, wanted, level)
        shown = f"{count:10d}   {count * clients:14d}" if count else f"{'over ' + str(MOST):>10}"
        lines.append(f"  {clients:21d}   {shown}")
    return "\n".join(lines)


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    about = str(__doc__).split("\n\n")[0]
    parser = Parser(prog="python reproduction/plan_power.py", description=about)
    add = parser.add_argument
    add("results", nargs="+", metavar="RESULT", help="results of two Runs, of the same partitions")
    add("--difference", type=float, required=True, metavar="X", help="the difference to find, points")
    add("--power", type=float, default=0.8, metavar="X", help="probability of finding it (0.8)")
    add("--level", type=float, default=0.05, metavar="X", help="level of the two-sided test (0.05)")
    args = parser.parse_args(arguments)
    if not args.difference or not math.isfinite(args.difference):
        raise UserError(f"--difference is {args.difference:g}; allowed is a number of points other than 0")
    for name in ("power", "level"):
        if not 0 < (given := getattr(args, name)) < 1:
            raise UserError(f"--{name} is {given:g}; allowed is a probability above 0 and below 1")
    if not (results := [result for result in map(Result, args.results) if has_rounds(result)]):
        raise UserError("none of these results has a recorded round yet")
    parts, names = compared(results)
    print(report(parts, names, args.difference, args.power, args.level))


if __name__ == "__main__":
    exit_with(main)
