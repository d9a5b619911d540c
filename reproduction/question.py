"""Does the choice of collaborators help? The runs, the verdicts and the power of question.md.

    python -m dpfl_mpi.sweep reproduction/question.py        # compute the runs; again to go on
    python reproduction/question.py --collect results        # add finished runs to question.csv
    python reproduction/question.py                          # print the verdicts of question.csv
    python reproduction/question.py --power                  # what 12 seeds can find

Runs that question.csv holds are not computed again. The data are prepared as question.md says.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from arena import Cell, cell, collect, done_in, known
from matplotlib.figure import Figure
from recomputed import holm
from scipy.special import stdtr
from standings import HAR, RANDOM

from dpfl_mpi.errors import exit_with, in_a_sentence
from dpfl_mpi.figures.style import BLUE, DARK, GREY, ORANGE, TEXT
from dpfl_mpi.figures.tables import interval, markdown
from dpfl_mpi.settings.command_line import Parser

FOLDER = Path(__file__).resolve().parent
RUNS_FILE, CLIENTS_FILE = FOLDER / "question.csv", FOLDER / "question-clients.csv"
SEEDS = range(101, 113)  # fresh: no earlier run of this repository used one of them
MARGIN = 0.5  # points; two methods that differ by less are called equal
LEVEL = 0.05  # of all contrasts together
CHOOSERS = {"Oracle": DARK, "Nearest": ORANGE, "DPFL": BLUE}  # and their colours
EPOCHS = {
    "CIFAR-10 Patho(3)": 500,
    "CIFAR-10 Dir(0.1)": 500,
    "CIFAR-10, labels moved": 160,
    "CIFAR-100, superclasses": 160,
    HAR: 160,
}
CONTRASTS = [(s, row) for s in EPOCHS for row in CHOOSERS if (s, row) != (HAR, "Oracle")]
# Deviation over seeds of a chooser minus the random graph, points: arena.csv, earlier seeds.
DEVIATIONS = (0.54, 0.43, 0.40, 0.67, 0.50, 0.41, 1.17, 0.94, 0.66, 0.37, 0.37, 0.51, 0.37, 0.49)
# The accuracy that decides comes first; question.md says what the other two are.
SCORES = {
    "accuracy": "best, class images",
    "own": "best, own images",
    "last": "last round, own images",
}


def cells() -> list[Cell]:
    """Return the cells of all runs, seed by seed, cheap settings first."""
    out = []
    for seed in SEEDS:
        for setting, epochs in sorted(EPOCHS.items(), key=lambda item: item[1]):
            for row in (RANDOM, *CHOOSERS):
                if run := cell(setting, row, seed, epochs):
                    out.append((setting, row, epochs, run))
    return out


CELLS = cells()
DONE = done_in(RUNS_FILE)
RUNS = [run for *names, run in CELLS if (*names, run.seed) not in DONE]


def differences(
    setting: str, row: str, score: str, runs: pd.DataFrame, clients: pd.DataFrame
) -> np.ndarray:
    """Return a row's score minus the random graph's, points, `[shared seeds, clients]`."""
    sides = []
    for name in (row, RANDOM):
        of_row = runs[(runs["setting"] == setting) & (runs["row"] == name)][["run", "seed"]]
        lines = clients.merge(of_row, on="run")
        sides.append(lines.pivot(index="seed", columns="client", values=score))
    return (100 * (sides[0] - sides[1])).dropna(how="all").to_numpy()


def units(setting: str, points: np.ndarray) -> list[np.ndarray]:
    """Return the independent values whose mean is tested: per seed; in HAR also per person.

    A seed draws the partition, the first weights and the random graph. The people of HAR are the
    same in every seed, so its seeds say nothing of other people.
    """
    over_seeds, over_people = points.mean(axis=1), points.mean(axis=0)
    return [over_seeds, over_people] if setting == HAR else [over_seeds]


def tail(values: np.ndarray, shift: float) -> float:
    """Return the p of a one-sided t-test that the mean of values is above `shift`."""
    error = values.std(ddof=1) / np.sqrt(len(values))
    with np.errstate(divide="ignore"):  # values may all be the same
        return float(stdtr(len(values) - 1, -(values.mean() - shift) / error))


def chances(samples: list[np.ndarray]) -> tuple[float, float]:
    """Return two p-values: that the mean differs from 0, and that it lies within MARGIN of 0.

    The first is of a two-sided t-test, the second the larger of two one-sided ones
    (Schuirmann, 1987). Of several samples of units the larger p counts.
    """
    differs = max(2 * min(tail(each, 0), tail(-each, 0)) for each in samples)
    return differs, max(map(chance_within, samples))


def chance_within(values: np.ndarray) -> float:
    """Return the p that the mean of values lies within MARGIN of 0: of two one-sided t-tests."""
    return max(tail(values, -MARGIN), tail(-values, -MARGIN))


def verdicts(samples: list[list[np.ndarray]]) -> list[str]:
    """Return a verdict per contrast; `samples` are its units, as `units` returns them.

    Holm's correction is over all contrasts, once for "differs" and once for "equal".
    """
    pairs = [chances(each) for each in samples]
    differs, within = (holm(p) < LEVEL for p in zip(*pairs, strict=True))
    out = []
    for each, other, same in zip(samples, differs, within, strict=True):
        sign = "better" if each[0].mean() > 0 else "worse"
        out.append(f"equal within {MARGIN}" if same else sign if other else "open")
    return out


def half_width(samples: list[np.ndarray]) -> float:
    """Return the half width of the 95 % interval, points: the wider one of the samples."""
    return max(interval([each])[1] for each in samples)


def table(runs: pd.DataFrame, clients: pd.DataFrame) -> pd.DataFrame:
    """Return a line per contrast: for each score the difference, its interval and the verdict."""
    out = pd.DataFrame([{"setting": s, "chooser": row} for s, row in CONTRASTS])
    for score, title in SCORES.items():
        found = [differences(s, row, score, runs, clients) for s, row in CONTRASTS]
        ready = [i for i, points in enumerate(found) if len(points) == len(SEEDS)]
        samples = [units(CONTRASTS[i][0], found[i]) for i in ready]
        texts = [f"{len(points)} of {len(SEEDS)} seeds" for points in found]
        decided = ["no verdict before all runs"] * len(ready)
        if len(ready) == len(CONTRASTS):
            decided = verdicts(samples)
        for i, each, verdict in zip(ready, samples, decided, strict=True):
            texts[i] = f"{each[0].mean():+.2f} ± {half_width(each):.2f}, {verdict}"
        out[title] = texts
    return out


def forest(runs: pd.DataFrame, clients: pd.DataFrame) -> Figure:
    """Draw the difference of each contrast that has all its runs, with its 95 % interval."""
    figure, axes = plt.subplots(figsize=(TEXT, 2.8))
    names, score = list(EPOCHS), next(iter(SCORES))  # the score that decides
    complete = set()
    for (row, colour), shift in zip(CHOOSERS.items(), (-0.25, 0.0, 0.25), strict=True):
        points = []
        for y, setting in enumerate(names):
            found = differences(setting, row, score, runs, clients)
            if len(found) == len(SEEDS):
                complete.add(setting)
                points.append((found.mean(), y + shift, half_width(units(setting, found))))
        mean, y, half = np.array(points).reshape(-1, 3).T
        axes.errorbar(mean, y, xerr=half, fmt="o", capsize=2, color=colour, label=row)
    axes.axvspan(-MARGIN, MARGIN, color=GREY, alpha=0.2, lw=0, label="half a point")
    axes.axvline(0, color=GREY, lw=0.6)
    lacks = "\n(not all runs are in)"
    labels = [name if name in complete else name + lacks for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("points over a random graph of the same budget")
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def power(repetitions: int = 2000) -> pd.DataFrame:
    """Return how often each contrast gets each verdict, percent, for differences of 0 to 2 points.

    All contrasts have the same true difference and the deviations of earlier seeds; the tests and
    the correction are those of `verdicts`.
    """
    rng = np.random.default_rng(0)
    lines = [
        {"setting": s, "chooser": row, "deviation": f"{d:.2f}"}
        for (s, row), d in zip(CONTRASTS, DEVIATIONS, strict=True)
    ]
    for true in (0.0, 0.25, 0.5, 1.0, 2.0):
        better, equal = np.zeros((2, len(CONTRASTS)), int)
        for _ in range(repetitions):
            samples = [[true + d * rng.standard_normal(len(SEEDS))] for d in DEVIATIONS]
            for i, verdict in enumerate(verdicts(samples)):
                better[i] += verdict == "better"
                equal[i] += verdict.startswith("equal")
        for i, line in enumerate(lines):
            shares = (100 * np.array([better[i], equal[i]]) / repetitions).round().astype(int)
            line[f"{true:g} points"] = "{} better, {} equal".format(*shares)
    return pd.DataFrame(lines)


@in_a_sentence
def main() -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--collect", metavar="DIR", help="add the finished runs of this folder to question.csv")
    add("--power", action="store_true", help="print how often 12 seeds give each verdict")
    args = parser.parse_args()
    if args.collect:
        collect(args.collect, CELLS, RUNS_FILE, CLIENTS_FILE, list(SCORES))
    elif args.power:
        print(markdown(power()))
    else:
        print(markdown(table(known(RUNS_FILE), known(CLIENTS_FILE))))


if __name__ == "__main__":
    exit_with(main)
