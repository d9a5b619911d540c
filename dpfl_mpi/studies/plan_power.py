"""How many partitions and clients a difference takes: `python -m dpfl_mpi.studies.plan_power RESULT RESULT --difference 0.63`.

The results are of two Runs, each of any number of partitions and seeds. They are compared client by client. Clients of one partition share what
chance dealt to all of them, so a difference has two sources of chance, d_ik = delta + b_i + e_ik: b_i of partition i, e_ik of its client k.
Their variances are estimated from the results (a random-effects analysis of variance; with one partition that of b is taken as 0, which is said).
The power is that of a two-sided paired t-test over partition means, from the noncentral t distribution.
"""

import argparse
import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.plugins import short
from dpfl_mpi.results import Result
from dpfl_mpi.settings.run import REPEATED

SIZES = (16, 32, 100, 200, 500)  # clients per partition in the table, beside those of the results
MOST = 10_000  # partitions


@dataclass(frozen=True)
class Chance:
    """What two Runs differ by: the mean difference, and its two sources of chance as standard deviations, points."""

    mean: float
    within: float  # between clients of one partition
    between: float  # between partitions
    partitions: int
    clients: float  # per partition
    half: float  # of the 95 % interval of the mean


def differences(results: Sequence[Result]) -> tuple[list[np.ndarray], list[Result]]:
    """Return each common partition's differences by client, points, first Run minus second, and a result of each Run; common seeds are averaged first."""
    runs: dict[str, dict[str, dict[int, np.ndarray]]] = {}  # by settings, partition and seed
    first: dict[str, Result] = {}
    for r in results:
        # what repetitions of a Run have in common
        kind = json.dumps({n: v for n, v in r.key.items() if n not in REPEATED}, sort_keys=True)
        name = r.fact("data_sha256") + r.fact("partition_sha256")
        first.setdefault(kind, r)
        scores = np.where(r.benign, 100 * r["best/test_acc"], np.nan)
        runs.setdefault(kind, {}).setdefault(name, {})[r.run.seed] = scores
    if len(runs) != 2:
        raise UserError(f"these are results of {len(runs)} different Runs; allowed are two, of any seeds or partitions")
    first_run, second_run = runs.values()
    pairs = []
    for a, b in ((first_run[name], second_run[name]) for name in first_run if name in second_run):
        common = a.keys() & b.keys() or a.keys() | b.keys()
        one, two = (np.mean([scores for seed, scores in side.items() if seed in common], 0) for side in (a, b))
        pairs.append((one - two)[np.isfinite(one - two)])
    if not pairs or min(map(len, pairs)) < 2:
        raise UserError("the two Runs have no partition in common on which two clients or more can be compared")
    return pairs, list(first.values())


def names_of(both: Sequence[Result]) -> list[str]:
    """Return what two Runs are called: method and budget, and where these are the same, what they differ in."""
    names = [
        short(r.run.method) + (f", B_c = {r.run.said_budget}" if r.method.topology == "graph" else "") for r in both
    ]
    if names[0] != names[1]:
        return names
    a, b = (r.key for r in both)
    differ = [n for n in a | b if n not in REPEATED and a.get(n) != b.get(n)]

    def held(r: Result, name: str) -> Any:
        return r.run.contents.get(name, "")[:12] or r.key.get(name, getattr(r.run, name, None))

    return [", ".join([name, *(f"{n} {held(r, n)}" for n in differ)]) for name, r in zip(names, both, strict=True)]


def chance_of(pairs: Sequence[np.ndarray]) -> Chance:
    """Return the mean difference and its chance, from the differences per partition (one-way random effects, partitions weigh the same)."""
    from scipy.special import stdtrit

    means = np.array([d.mean() for d in pairs])
    m, sizes = len(pairs), np.array([len(d) for d in pairs])
    within = sum(((d - d.mean()) ** 2).sum() for d in pairs) / (sizes.sum() - m)
    of_mean = within * (1 / sizes).mean()  # what the clients' chance alone gives a partition's mean
    between, error, df = 0.0, of_mean, sizes.sum() - 1  # error: the variance of the mean
    if m > 1:
        between, error, df = max(means.var(ddof=1) - of_mean, 0.0), means.var(ddof=1) / m, m - 1
    half = float(stdtrit(df, 0.975)) * math.sqrt(error)
    return Chance(float(means.mean()), math.sqrt(within), math.sqrt(between), m, float(sizes.mean()), half)


def power(chance: Chance, difference: float, partitions: int, clients: float, level: float) -> float:
    """Return the probability that a two-sided t-test over partition means (of one partition, over its clients) finds the difference, points."""
    from scipy.special import nctdtr, stdtrit

    df = partitions - 1 if partitions > 1 else clients - 1
    variance = (chance.between**2 if partitions > 1 else 0.0) + chance.within**2 / clients
    if variance == 0:
        return 1.0
    shift, limit = abs(difference) / math.sqrt(variance / partitions), stdtrit(df, 1 - level / 2)
    missed = nctdtr(df, shift, limit) - nctdtr(df, shift, -limit)
    return 1.0 if math.isnan(missed) else float(1 - missed)  # so far out that the distribution cannot be computed


def needed(chance: Chance, difference: float, clients: float, wanted: float, level: float) -> int:
    """Return the fewest partitions, at least 2, that find the difference with the power wanted; 0 where `MOST` do not suffice."""
    counts = range(2, MOST + 1)
    i = bisect.bisect_left(counts, wanted, key=lambda m: power(chance, difference, m, clients, level))
    return counts[i] if i < len(counts) else 0


def report(chance: Chance, names: Sequence[str], difference: float, wanted: float, level: float) -> str:
    over, between = "partition means", f"{chance.between:.2f}"
    if chance.partitions == 1:
        over, between = "the clients of one partition", "unknown: one partition, taken as 0"
    found = 100 * power(chance, difference, chance.partitions, chance.clients, level)
    lines = [
        f"{names[0]} minus {names[1]}: {chance.mean:+.2f} ± {chance.half:.2f} points (95 %, over {over}; {chance.partitions} partitions, "
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
    parser = argparse.ArgumentParser("python -m dpfl_mpi.studies.plan_power", description=about, allow_abbrev=False)
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
    pairs, both = differences([Result(path) for path in args.results])
    print(report(chance_of(pairs), names_of(both), args.difference, args.power, args.level))


if __name__ == "__main__":
    exit_with(main)
