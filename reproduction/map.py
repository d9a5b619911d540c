"""Where does choosing pay? Harm, images per client and budget: the runs, and their CSV files.

    python reproduction/map.py --prepare CIFAR10 --seeds 201   # prepare data, 3.5 GB a seed
    python -m dpfl_mpi.sweep reproduction/map.py --mixed       # compute runs; again to go on
    python reproduction/map.py --collect results               # add finished runs to the files
    python reproduction/map.py                                 # print the map, and `goals`

harm.py makes the data: 100 clients in four groups. A cell is what groups disagree in (a share of
the classes' names, or an angle of rotation), the images of a client, B_c and a seed; all its rows
train 170 local epochs. *One partner* is a round of B_c = 2, whose clients average with one random
client each. What they lose by it in round 0 (`harm`, points of validation accuracy) is known before
a choice. Runs of data that are not prepared are left out, and those that map.csv holds. Cells of
`REAL` are of data whose groups nobody made (real_images.py says how they are prepared); only PACS
says what its groups are.

Two models of a client are scored, each in its best round by validation, on test images: the
`trained` one, as in the paper, and the `averaged` one, before the client trains it. `better` is
that of the two with the higher validation accuracy, mean over clients, in some round. map.csv has a
line per cell; the columns `_gain` and `_half` of each are its difference to the random graph of the
same place and seed, points, with the 95 % interval over clients. map-rounds.csv has a line per cell
and round: the accuracy of both models by validation and on test images, percent.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from arena import GROUPS, known
from csv_files import check_folder, core_hours, totals
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from question import LEVEL, MARGIN, chance_within, tail
from recomputed import holm
from scipy.special import stdtrit

from dpfl_mpi import prepare
from dpfl_mpi.errors import exit_with, in_a_sentence
from dpfl_mpi.figures.command import gather
from dpfl_mpi.figures.style import BLUE, DARK, GREEN, GREY, ORANGE, TEXT
from dpfl_mpi.figures.tables import interval, markdown
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.command_line import Parser

HERE = Path(__file__).resolve().parent
FILE, ROUNDS = HERE / "map.csv", HERE / "map-rounds.csv"
MADE = "CIFAR-10"  # the data whose groups harm.py makes
REAL = {
    "PACS by domain": {"dataset": "image_folder", "data": "data/pacs.h5"},
    "HAR by person": {"dataset": "pfllib", "data": "data/har.h5"},
    "iWildCam by camera": {"dataset": "reproduction/iwildcam.py", "data": "data/iwildcam.h5"},
}
DOMAINS = "groups:" + ";".join(",".join(map(str, range(g, g + 25))) for g in range(0, 100, 25))
GROUP_OF = {  # of client k; HAR and iWildCam do not say who is of one kind
    MADE: lambda k: k % 4,
    "PACS by domain": lambda k: k // 25,
}
SEEDS = range(201, 206)  # fresh: no other run has them
DECIDING = range(206, 211)  # of the claim on `spectral`, see question.md
HARMS = [(share, 0) for share in (0, 20, 40, 70, 100)]  # percent of the classes, degrees
HARMS += [(0, degrees) for degrees in (30, 60, 90)]
IMAGES, BUDGETS = (50, 100, 200, 500), ("0.05N", "0.2N")
SIZED = 201  # the seed of which other images and budgets than 100 and 0.2N are computed
WORTH, LEAST = 2.0, 0.8  # points and share of the oracle's gain: see `goals`
RANDOM, ORACLE, PARTNER = "Random graph", "Oracle", "One partner"
ROWS = {
    RANDOM: {"method": "random_graph"},
    ORACLE: {"method": "random_graph", "reach": GROUPS},
    "DPFL": {"method": "dpfl"},
    "Nearest": {"method": "nearest"},
    "Spectral": {"method": "spectral"},
    PARTNER: {"method": "random_graph", "rounds": 1},
}
EPOCHS, TAU_INIT, TAU_TRAIN = 170, 10, 5
RIVALS = {  # computed where choosing matters alone; options by tuned.py
    "Local": {"method": "local"},
    "Redrawn": {"method": "random_graph", "options": {"redraw": True}},  # Epidemic Learning
    "CFL": {"method": "cfl", "options": {"eps1": 0.5, "eps2": 0.0, "after": 10}},
    "IFCA": {"method": "ifca", "options": {"k": 4}},
    "Facade": {"method": "facade", "options": {"heads": 4, "final": True}},
    "DAC": {"method": "dac", "options": {"tau": 300.0}},
    "PENS": {"method": "pens", "options": {"m": 1}},
    "FedFomo": {"method": "fedfomo"},
    "FedAMP": {
        "method": "fedamp",
        "options": {"sigma": 1000.0, "alpha": 1000 / 99, "lam": 1000 / 99},
    },
    "Morph": {"method": "morph", "options": {"beta": 50.0}},
    "L2C": {"method": "l2c", "options": {"eta": 0.1}},
    "FedPAC": {"method": "fedpac", "options": {"lam": 0.1}},
    "Spectral, then search": {"method": "spectral_search"},
    "Ditto": {"method": "ditto"},  # twice the steps
}
MATTERS = [(100, 0), (40, 0), (0, 90)]
PLACES_ASKED = [(0, 0), (40, 0), (70, 0), (100, 0), (0, 30), (0, 90)]  # question.md

MODELS = {"averaged": "mixed", "trained": "round"}  # of a client: the name, and where scores are
SCORES = [*MODELS, "better"]
DRAWN = {ORACLE: DARK, "Spectral": GREEN, "Nearest": ORANGE, "DPFL": BLUE}


class Cell(NamedTuple):
    data: str
    share: int
    degrees: int
    images: int
    budget: str
    seed: int
    row: str

    def source(self) -> dict[str, str]:
        file = f"data/harm-{self.share}-{self.degrees}-{self.images}-{self.seed}.h5"
        return REAL.get(self.data, {"dataset": "reproduction/harm.py", "data": file})

    def run(self) -> Run:
        row = (ROWS | RIVALS)[self.row]
        before = TAU_INIT if find("method", row["method"]).preprocesses else 0
        fields = {"rounds": (EPOCHS - before) // TAU_TRAIN} | row
        fields |= {"budget": self.budget, "seed": self.seed}
        if self.row == ORACLE and self.data in REAL:
            fields["reach"] = DOMAINS
        return Run(**self.source(), **fields)


def cells() -> list[Cell]:
    """Return all cells, a seed after the other, few images first."""
    out = []
    for seed, images, harm in itertools.product(SEEDS, IMAGES, HARMS):
        out.append(Cell(MADE, *harm, images, "2", seed, PARTNER))
        rows = [row for row in ROWS if row != PARTNER]
        places = itertools.product(BUDGETS, [seed], rows)
        out += [Cell(MADE, *harm, images, *place) for place in places]
    for seed, harm, row in itertools.product(SEEDS, MATTERS, RIVALS):
        out.append(Cell(MADE, *harm, 100, "0.2N", seed, row))
    for seed, harm, row in itertools.product(DECIDING, PLACES_ASKED, (RANDOM, ORACLE, "Spectral")):
        out.append(Cell(MADE, *harm, 100, "0.2N", seed, row))
    for seed, data, row in itertools.product(SEEDS, REAL, ROWS):
        if row != ORACLE or data in GROUP_OF:
            out.append(Cell(data, 0, 0, 0, "2" if row == PARTNER else "0.2N", seed, row))
    return out


CELLS = cells()
PLACE = list(Cell._fields[:-2])  # the columns that tell places of the map apart
DONE = set(known(FILE).reindex(columns=Cell._fields).itertuples(index=False, name=None))
RUNS = [c.run() for c in CELLS if c not in DONE and Path(c.source()["data"]).is_file()]


def line_of(cell: Cell, result: Result, random: Result) -> dict:
    """Return a cell's line of map.csv; `random` is the random graph of its place and seed."""
    line = cell._asdict() | {"run": result.path.stem[-8:]}
    for name in SCORES:
        mine, theirs = (scores(each, name) for each in (result, random))
        line[name] = 100 * mine.mean()
        line[f"{name}_gain"], line[f"{name}_half"] = interval([100 * (mine - theirs)])
    line["harm"] = 100 * (result["round/val_acc"][0] - result["mixed/val_acc"][0]).mean()
    line["models"] = totals(result)["models_received"] / len(result["client/p"])
    line["core_hours"] = core_hours(result)
    edges = result.graph(len(result["round/val_acc"]) - 1)
    if (group_of := GROUP_OF.get(cell.data)) and edges.any():
        group = group_of(np.arange(len(edges)))
        line["own_group"] = 100 * edges[group[:, None] == group].sum() / edges.sum()
    return line | {"commit": result.starts()[-1]["commit"]}


def scores(result: Result, model: str) -> np.ndarray:
    """Return each client's test accuracy `[N]` in its best round by validation (the last best)."""
    if model == "better":
        best = {name: validation(result, name).mean(1).max() for name in MODELS}
        model = max(best, key=lambda name: best[name])
    group = MODELS[model]
    latest_first = validation(result, model)[::-1].argmax(0)
    return result[f"{group}/test_acc"][::-1][latest_first, np.arange(len(latest_first))]


def validation(result: Result, model: str) -> np.ndarray:
    """Return each client's validation accuracy by round `[T + 1, N]`, -1 without an average."""
    return np.nan_to_num(result[f"{MODELS[model]}/val_acc"], nan=-1)


def rounds_of(result: Result) -> pd.DataFrame:
    """Return a result's lines of map-rounds.csv."""
    columns = {
        name + of: 100 * result[f"{group}/{scores}"].mean(1)
        for of, scores in (("", "val_acc"), ("_test", "test_acc"))
        for name, group in MODELS.items()
    }
    lines = pd.DataFrame(columns)
    return lines.rename_axis("round").reset_index().assign(run=result.path.stem[-8:])


def collect(folder: str) -> None:
    """Add the finished cells of a folder to both files, in the order of CELLS."""
    check_folder(folder)
    prepared = [cell for cell in CELLS if Path(cell.source()["data"]).is_file()]
    wanted = [cell for cell in prepared if cell not in DONE or cell.row == RANDOM]
    results = {cell: gather([cell.run()], folder)[0] for cell in wanted}
    done = {cell: found[0] for cell, found in results.items() if found and found[0].finished}
    before = known(FILE).to_dict("records")
    lines = {tuple(line[name] for name in Cell._fields): line for line in before}
    parts = []
    for cell, result in done.items():
        random = done.get(cell._replace(row=RANDOM), result if cell.row == PARTNER else None)
        if cell not in lines and random is not None:
            lines[cell] = line_of(cell, result, random)
            parts.append(rounds_of(result))
    table = pd.DataFrame([lines[cell] for cell in CELLS if cell in lines]).round(4)
    table.to_csv(FILE, index=False)
    rounds = pd.concat([known(ROUNDS), *parts]).round(4).astype({"round": int})
    rounds.to_csv(ROUNDS, index=False)
    print(f"{len(table)} of {len(CELLS)} cells are in {FILE.name}")


def harms(runs: pd.DataFrame) -> pd.Series:
    """Return what averaging with one partner loses, points, by share, degrees and images."""
    partners = runs[runs["row"] == PARTNER]
    return partners.groupby(PLACE[:-1])["harm"].mean()


def central(runs: pd.DataFrame) -> pd.Series:
    """Return which lines have the images and the budget of which all seeds are computed."""
    return (runs["data"] == MADE) & (runs["images"] == 100) & (runs["budget"] == "0.2N")


def of_question(runs: pd.DataFrame) -> pd.Series:
    """Return which lines are of the six places that question.md names."""
    harm = pd.MultiIndex.from_frame(runs[["share", "degrees"]]).isin(PLACES_ASKED)
    return central(runs) & harm


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the central places by two scores: the random graph's, percent, and what rows gain."""
    out = []
    for (share, degrees), part in runs[central(runs)].groupby(["share", "degrees"], sort=False):
        for model in ("trained", "better"):
            line = {"names, %": share, "degrees": degrees, "scored": model}
            accuracy = part[part["row"] == RANDOM][model]
            line[RANDOM] = f"{accuracy.mean():.1f}"
            out.append(line | {row: gain_text(part[part["row"] == row], model) for row in DRAWN})
    return pd.DataFrame(out)


def gain_text(of_row: pd.DataFrame, model: str) -> str:
    """Return "+1.0 ± 0.4 (5)": mean gain of a row at a place, 95 % interval, and seeds."""
    if not len(of_row):
        return "not computed yet"
    mean, half = of_seeds(of_row, model)
    return f"{mean:+.1f} ± {half:.1f} ({len(of_row)})"


def gains(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a line per place of the map and model: what each row gains on the random graph.

    With several seeds the interval is over their means, with one over its clients.
    """
    measured, out = harms(runs), []
    for names, at_place in runs[runs["row"] != PARTNER].groupby(PLACE, sort=False):
        by_row = {row: at_place[at_place["row"] == row] for row in DRAWN}
        harm = measured.get(names[:-1])
        for model in SCORES:
            line = dict(zip(PLACE, names, strict=True))
            line |= {"harm": "-" if harm is None else f"{harm:.1f}", "scored": model}
            line |= {row: gain_text(part, model) for row, part in by_row.items()}
            if names[0] not in GROUP_OF:
                line[ORACLE] = "none"
            out.append(line)
        computed = {
            row: of_row["own_group"].mean() for row, of_row in by_row.items() if len(of_row)
        }
        kin = (f"{row} {share:.0f}" for row, share in computed.items() if share == share)
        out[-1]["kin, %"] = ", ".join(kin)
    return pd.DataFrame(out).fillna("")


def rivals(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a line per row: what it gains where choosing matters, and its share of kin.

    Models are those that a client receives in the whole run.
    """
    compared, out = runs[central(runs) & runs["seed"].isin(SEEDS)], []
    for row in [ORACLE, "Spectral", "Nearest", "DPFL", *RIVALS]:
        line = {"method": row}
        if len(models := compared["models"][compared["row"] == row]):
            line["models"] = f"{models.mean():.0f}"
        for share, degrees in MATTERS:
            at_place = (compared["share"] == share) & (compared["degrees"] == degrees)
            part = compared[at_place & (compared["row"] == row)]
            place = f"{degrees} degrees" if degrees else f"{share} %"
            for model in ("trained", "better"):
                line[f"{place}, {model}"] = gain_text(part, model)
            kin = part["own_group"].mean()
            line[f"{place}, kin"] = "" if kin != kin else f"{kin:.0f}"
        out.append(line)
    return pd.DataFrame(out).fillna("")


def undone(runs: pd.DataFrame, rounds: pd.DataFrame) -> pd.DataFrame:
    """Return how far DPFL and the oracle lead the random graph in one round, points, by share.

    That is the last round that all of them have, on the mean over SEEDS.
    """
    compared = runs[of_question(runs) & (runs["degrees"] == 0) & runs["seed"].isin(SEEDS)]
    scored = rounds.merge(compared[["run", "share", "row"]], on="run")
    last = scored.groupby("row")["round"].max()[[RANDOM, ORACLE, "DPFL"]].min()
    columns = {
        "averaged": "averaged, on validation images",
        "averaged_test": "averaged, on test images",
        "trained_test": "trained, on test images",
    }
    mean = scored[scored["round"] == last].groupby(["share", "row"])[[*columns]].mean()
    out = []
    for share, row in itertools.product(scored["share"].unique(), ("DPFL", ORACLE)):
        lead = mean.loc[(share, row)] - mean.loc[(share, RANDOM)]
        cells = {title: f"{lead[name]:+.1f}" for name, title in columns.items()}
        out.append({"names, %": share, "lead of": row} | cells)
    return pd.DataFrame(out)


def of_seeds(of_row: pd.DataFrame, model: str) -> tuple[float, float]:
    """Return mean and half width of the 95 % interval of a row's gain at one place of the map."""
    gain = of_row[f"{model}_gain"].to_numpy()
    return interval([gain]) if len(gain) != 1 else (gain[0], of_row[f"{model}_half"].iloc[0])


def goals(runs: pd.DataFrame, seeds: Iterable[int]) -> pd.DataFrame:
    """Return a line per place of question.md with all `seeds`: does `spectral` reach the claim?

    That is at least 80 % of what the oracle gains, where this is above 2 points; elsewhere a gain
    of 0 within MARGIN. Verdicts are after Holm's correction over the places.
    """
    needed = runs["row"].isin(["Spectral", ORACLE]) & runs["seed"].isin(seeds)
    runs = runs[needed & of_question(runs)]
    lines, chances = [], []  # chances: p-values of "reached" and of "missed"
    for names, part in runs.groupby(PLACE, sort=False):
        gain = part.pivot(index="seed", columns="row", values="trained_gain").dropna()
        if len(gain) < len([*seeds]) or len(gain.columns) < 2:
            continue
        spectral, oracle = gain["Spectral"].to_numpy(), gain[ORACLE].to_numpy()
        if oracle.mean() > WORTH:
            claim, beyond = f"at least {LEAST:.0%} of the oracle's", spectral - LEAST * oracle
            chances.append((tail(beyond, 0), tail(-beyond, 0)))
        else:
            claim, missed = f"0 within {MARGIN}", [tail(x, MARGIN) for x in (spectral, -spectral)]
            chances.append((chance_within(spectral), 2 * min(missed)))
        line = dict(zip(PLACE, names, strict=True))
        for name, points in (("oracle's gain", oracle), ("spectral's gain", spectral)):
            mean, half = interval([points])
            line[name] = f"{mean:+.2f} ± {half:.2f}"
        lines.append(line | {"seeds": len(gain), "claim": claim})
    reached, missed = (holm(p) < LEVEL for p in zip(*chances, strict=True)) if lines else ((), ())
    for line, *decided in zip(lines, reached, missed, strict=True):
        line["verdict"] = "reached" if decided[0] else "missed" if decided[1] else "open"
    return pd.DataFrame(lines)


def predictions(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a line per data set of `REAL`: does harm predict what a choice gains (question.md)?

    The oracle's gain at the places of question.md is a line of harm, by least squares. The
    prediction holds within two standard deviations of these places from that line. The interval
    beside it is a new place's, by the t distribution, which grows with the distance to these
    places. Where nobody knows the groups, `spectral` stands for the oracle.
    """
    of_oracle = runs[of_question(runs) & (runs["row"] == ORACLE)]
    by_place = of_oracle.groupby(PLACE[:-1])["trained_gain"].mean()
    measured, out = harms(runs), []
    at_places = measured.reindex(by_place.index)
    if len(by_place) < len(PLACES_ASKED) or at_places.isna().any():
        return pd.DataFrame()
    slope, start = np.polyfit(at_places, by_place, 1)
    free, away = len(by_place) - 2, at_places - at_places.mean()
    deviation = np.sqrt(((by_place - start - slope * at_places) ** 2).sum() / free)
    for data in REAL:
        row = ORACLE if data in GROUP_OF else "Spectral"
        part = runs[(runs["data"] == data) & (runs["row"] == row)]
        if len(part) and (data, 0, 0, 0) in measured:
            harm, (gain, half) = measured[data, 0, 0, 0], of_seeds(part, "trained")
            predicted = start + slope * harm
            holds = abs(gain - predicted) <= 2 * deviation
            line = {"data": data, "harm": f"{harm:.1f}", "chooser": row}
            line["predicted gain"] = f"{predicted:+.1f} ± {2 * deviation:.1f}"
            spread = 1 + 1 / len(by_place) + (harm - at_places.mean()) ** 2 / (away**2).sum()
            line["95 % interval"] = f"± {stdtrit(free, 0.975) * deviation * np.sqrt(spread):.1f}"
            line |= {"gain": f"{gain:+.1f} ± {half:.1f} ({len(part)})"}
            verdict = "holds" if holds else "fails"
            finished = len(part) == len(SEEDS)
            line["the prediction"] = verdict if finished else f"{len(part)} of {len(SEEDS)} seeds"
            out.append(line)
    return pd.DataFrame(out)


def tables() -> dict[str, pd.DataFrame]:
    """Return the tables of the pages by their names, from both files."""
    runs, rounds = known(FILE), known(ROUNDS)
    made = runs["data"] == MADE
    return {
        "summary": summary(runs),
        "undone": undone(runs, rounds),
        "map": gains(runs[made]).drop(columns="data"),
        "goals": goals(runs[made], DECIDING)
        .drop(columns=["data", "images", "budget"], errors="ignore")
        .rename(columns={"share": "names, %"}),
        "rivals": rivals(runs),
        "predictions": predictions(runs),
        "real data": gains(runs[~made]).drop(columns=PLACE[1:], errors="ignore"),
    }


def lines_of(axes: Axes, runs: pd.DataFrame, x: str, model: str, form: str = "o-") -> None:
    """Draw what each row gains over the random graph, with 95 % intervals, over column `x`."""
    for row, colour in DRAWN.items():
        points = [
            (value, *of_seeds(part, model)) for value, part in runs[runs["row"] == row].groupby(x)
        ]
        if points:
            at, mean, half = np.array(points).T
            axes.errorbar(at, mean, yerr=half, fmt=form, capsize=2, color=colour, label=row)
    axes.axhline(0, color=GREY, lw=0.6)


def draw_map(runs: pd.DataFrame) -> Figure:
    """Return gains at the central places, over names, angles and measured harm."""
    measured = harms(runs).rename("measured")
    cells = runs[central(runs)].join(measured, on=measured.index.names)
    figure, panels = plt.subplots(2, 3, figsize=(TEXT, 4.8), sharey="row")
    for model, (names, angles, harm) in zip(("trained", "better"), panels, strict=True):
        lines_of(names, cells[cells["degrees"] == 0], "share", model)
        lines_of(angles, cells[cells["share"] == 0], "degrees", model)
        of_oracle = cells[cells["row"] == ORACLE]
        lines_of(harm, of_oracle, "measured", model, "o")
        for (share, degrees), of_place in of_oracle.groupby(["share", "degrees"]):
            point = of_place["measured"].mean(), of_seeds(of_place, model)[0]
            name = f"{degrees}°" if degrees else f"{share} %"
            # 30 and 90 degrees are left of 60
            at, side = ((-4, 2), "right") if degrees in (30, 90) else ((4, 2), "left")
            harm.annotate(name, point, at, textcoords="offset points", ha=side, size="small")
        names.set_ylabel(f"the {model} model:\npoints over a random graph")
        harm.margins(x=0.15)  # for the names
    for axes, label in zip(
        panels[-1], ("names exchanged, %", "rotation, degrees", ""), strict=True
    ):
        axes.set_xlabel(label or "lost by averaging with\none random client, points")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def draw_sizes(runs: pd.DataFrame) -> Figure:
    """Return gains over images per client; crosses are of B_c = 0.05N in place of 0.2N."""
    runs = runs[(runs["data"] == MADE) & (runs["seed"] == SIZED) & (runs["row"] != PARTNER)]
    places = {(0, 0): "0 % of the names", (40, 0): "40 %", (100, 0): "100 %", (0, 90): "90°"}
    images, size = sorted(runs["images"].unique()), (TEXT, 4.8)
    figure, panels = plt.subplots(2, len(places), figsize=size, sharex=True, sharey="row")
    for (share, degrees), column in zip(places, panels.T, strict=True):
        at_place = runs[(runs["share"] == share) & (runs["degrees"] == degrees)]
        for axes, model in zip(column, ("trained", "better"), strict=True):
            lines_of(axes, at_place[at_place["budget"] == "0.2N"], "images", model)
            smaller = at_place[at_place["budget"] == "0.05N"]
            beside = smaller.assign(images=1.2 * smaller["images"])
            lines_of(axes, beside, "images", model, "x")
            axes.set(xscale="log", xlim=(0.8 * images[0], 1.28 * images[-1]))
            axes.set_xticks(images, map(str, images), size="small")
            axes.minorticks_off()
        column[0].set_title(places[share, degrees])
        column[1].set_xlabel("images per client")
    for axes, model in zip(panels[:, 0], ("trained", "better"), strict=True):
        axes.set_ylabel(f"the {model} model:\npoints over a random graph")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    rows = len(set(labels))
    cross = panels[0, 0].plot([], [], "x", color=GREY)
    named = handles[:rows] + cross, [*labels[:rows], "with B_c = 0.05N"]
    figure.legend(*named, loc="outside upper center", ncols=5)
    return figure


def draw_undone(runs: pd.DataFrame, rounds: pd.DataFrame) -> Figure:
    """Return test accuracy over rounds, after averaging and after training, by harm."""
    shares = (0, 40, 100)
    figure, panels = plt.subplots(1, len(shares), figsize=(TEXT, 2.4), sharey=True)
    at_place = (runs["degrees"] == 0) & central(runs) & runs["seed"].isin(SEEDS)  # of all rows
    for axes, share in zip(panels, shares, strict=True):
        of_share = runs[at_place & (runs["share"] == share)]
        for row, colour in {RANDOM: GREY, **DRAWN}.items():
            lines = rounds[rounds["run"].isin(of_share["run"][of_share["row"] == row])]
            mean = lines.groupby("round")[["averaged_test", "trained_test"]].mean()
            axes.plot(mean.index, mean["averaged_test"], "--", color=colour)
            axes.plot(mean.index, mean["trained_test"], color=colour, label=row)
        axes.set(title=f"{share} % of names exchanged", xlabel="round")
    panels[0].set_ylabel("test accuracy, %\n(dashed: after averaging)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    return figure


@in_a_sentence
def main() -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--prepare", metavar="CIFAR10", help="prepare the data from what `prepare cifar10` takes")
    add("--seeds", type=int, nargs="+", default=list(SEEDS), help="of these seeds")
    add("--collect", metavar="DIR", help="add the finished runs of this folder to map.csv")
    args = parser.parse_args()
    if args.prepare:
        for seed, images, (share, degrees) in itertools.product(args.seeds, IMAGES, HARMS):
            options = {"share": share, "degrees": degrees, "images": images, "seed": seed}
            flags = [f"--{name}={value}" for name, value in options.items()]
            source = Cell(MADE, share, degrees, images, "2", seed, PARTNER).source()
            out = ["--out", source["data"], *flags]
            if code := prepare.main([source["dataset"], "--source", args.prepare, *out]):
                return code
    elif args.collect:
        collect(args.collect)
    else:
        for table in tables().values():
            print(markdown(table))
    return 0


if __name__ == "__main__":
    exit_with(main)
