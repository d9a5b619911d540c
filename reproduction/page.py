"""Redraw every table and picture of this folder and of docs/findings.md from the CSV files: `python reproduction/page.py`.

The tables go between the marks `<!-- NAME -->` and `<!-- /NAME -->` of README.md here and of the project and of findings.md, the pictures beside the
CSV files and into docs/pictures. Neither MPI, torch nor a result is needed. Those of findings.md are made here, of the folder `controls`: there
comparisons have 20 rounds or more, lies and the like 6. Those of network.md are of network.csv, those of the other folders are made by recomputed.py.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import plan_power
import recomputed
import standings
from csv_files import of_folder
from matplotlib.figure import Figure
from plan_power import chance_of, needed
from recomputed import Lines

from dpfl_mpi.figures import omega, pareto
from dpfl_mpi.figures.controls_table import gaps, percent
from dpfl_mpi.figures.frames import Frames
from dpfl_mpi.figures.style import BLUE, DARK, GREY, PALE, STYLE, TEXT, curves
from dpfl_mpi.figures.tables import mean_text, comparable, interval, means, number, paired, difference_text
from dpfl_mpi.settings.values import ATTACKS

HERE = Path(__file__).resolve().parent
FRONT, PAGE, FINDINGS = HERE.parent / "README.md", HERE / "README.md", HERE.parent / "docs" / "findings.md"
ARENA = HERE / "arena.md"
NETWORK = HERE / "network.md"
DRAWN = 42  # the seed of which one curve per method is shown
COMPARED = (
    *("Local", "FedAvg", "FedAvg+FT", "Pairwise", "Random graph", "Random graph, DPFL's degrees"),
    *("Replay, rewired", "Replay, shuffled", "Replay, reversed", "Oracle", "PENS", "DPFL, search_share 0.5"),
)
COSTS = ("models", "evaluations", "steps")
OVER_COSTS = ("DPFL", "Pairwise", "Random graph", "Oracle", "PENS", "FedAvg+FT", "Local")


def long(frames: Frames) -> Frames:  # comparisons
    return frames.where(frames.runs["rounds"] >= 20)


def short(frames: Frames) -> Frames:  # lies, newcomers, drift
    return frames.where(frames.runs["rounds"] == 6)


def in_order(rows: Iterable[str], without: str) -> list[str]:
    """Return rows as the page names them: DPFL, then as in `COMPARED`, others last; without those that have one of the words."""
    known = ("DPFL", *COMPARED)
    shown = {row for row in rows if not re.search(without, row)}
    return sorted(shown, key=lambda row: (known.index(row) if row in known else len(known), row))


def costs(runs: pd.DataFrame, row: str, words: str = "") -> dict[str, str]:
    """Return what a row's Runs cost per client, means over the seeds."""
    mean = runs[runs["row"] == row][[f"{name}_per_client" for name in COSTS]].mean()
    return {pareto.COSTS[name] + words: number(mean[f"{name}_per_client"], ",.0f") for name in COSTS}


def benign(frames: Frames, method: str) -> pd.DataFrame:
    """Return the lines of clients of the Runs of 6 rounds, of the clients that lie in none of them: liars have no accuracy."""
    clients = short(frames)["clients"]
    lying = clients[clients["row"].str.startswith(f"{method}, attack")]
    return clients[clients["client"].isin(lying.dropna(subset=["test_acc"])["client"])]


def about(runs: pd.DataFrame, clients: pd.DataFrame, row: str, words: str, *pair: str) -> dict[str, str]:
    """Return the cells of every table: a row's accuracy, the difference of a pair of rows, the gap, and costs."""
    return {
        "method": row,
        "accuracy, %": mean_text(means(clients, row)),
        words: difference_text(paired(clients, *pair)) if len(set(pair)) > 1 else "-",
        "validation - test": difference_text(gaps(clients[clients["row"] == row])),
        **costs(runs, row),
    }


def compared(frames: Frames) -> Lines:
    runs, clients = long(frames).runs, long(frames)["clients"]
    for row in ("DPFL", *COMPARED):
        if len(clients[clients["row"] == row]):
            yield about(runs, clients, row, "DPFL minus it", "DPFL", row)


def reached(frames: Frames) -> str:
    runs = long(frames).runs
    shown = (runs["seed"] == DRAWN) & ~runs["row"].str.contains("same clients")
    return pareto.table(long(frames).where(shown), 78, COSTS)


def graphs(frames: Frames) -> Lines:
    lines = long(frames)["measures"]
    for row in in_order(lines["row"], "same clients|patience"):
        mine = lines[lines["row"] == row]
        for when, part in (("Omega", mine[mine["round"] == 0]), ("last round", mine[mine["round"] > 0])):
            values = part[["degree", "homophily", "z", "reciprocity", "asked", "gap", "classes"]].mean()
            cells = {n: f"{v:.1f}" if n in ("z", "degree") else f"{v:.3f}" for n, v in values.items()}
            yield {"method": f"{row} ({part['seed'].nunique()})", "graph": when} | cells


def power(frames: Frames) -> Lines:
    """Yield how many partitions of 100 clients it takes to find a difference as large as the measured one, and of 0.63 points."""
    for row in COMPARED:
        parts = paired(long(frames)["clients"], "DPFL", row)
        if len(parts) > 1:
            chance = chance_of(parts)
            some, few = (needed(chance, difference, chance.clients, 0.8, 0.05) for difference in (0.63, 2.0))
            yield {
                "DPFL minus": row,
                "points": difference_text(parts),
                "deviation within": f"{chance.within:.1f}",
                "between partitions": f"{chance.between:.2f}",
                "partitions for 0.63": str(some or "> 10,000"),  # 0 where 10,000 do not find it with a power of 80 %
                "for 2": str(few or "> 10,000"),
            }


def attacks(frames: Frames) -> Lines:
    runs = short(frames).runs
    for method in ("DPFL", "FedAvg"):
        clients = benign(frames, method)
        for line in runs[(runs["row"] == method) | runs["row"].str.startswith(f"{method}, attack")].itertuples():
            opened = f"{percent(line.backdoor)} ({percent(line.backdoor_unmarked)})"
            yield about(runs, clients, line.row, "to no lie", line.row, method) | {
                "liars of those chosen, %": percent(line.liars_chosen),
                "backdoor opens, % (unmarked)": "-" if np.isnan(line.backdoor) else opened,
            }


def newcomers(frames: Frames) -> Lines:
    base, clients, later = "DPFL, newcomers 0.1", frames["clients"], frames["newcomers"].query("epochs == 5")
    for _, line in frames.runs[frames.runs["row"].str.contains("newcomers")].iterrows():
        came = {e: [percent(line[f"newcomers_{e}{end}"]) for end in ("", "_half")] for e in (0, 1, 5)}
        yield {
            "method": line["row"],
            "those who trained, %": mean_text(means(clients, line["row"])),
            **{f"newcomers, E = {epochs}": " ± ".join(both) for epochs, both in came.items()},
            "DPFL minus it, E = 5": "-" if line["row"] == base else difference_text(paired(later, base, line["row"])),
        }


def moved(frames: Frames) -> Lines:
    for line in frames.runs[frames.runs["row"].str.contains("drift|omega_period|patience")].itertuples():
        same = frames.where((frames.runs["rounds"] == line.rounds) & (frames.runs["seed"] == line.seed))
        base = line.row.split(",")[0]
        mine = about(same.runs, same["clients"], line.row, "to the run without", line.row, base)
        yield mine | costs(same.runs, base, " without it")


def equal(lines: pd.DataFrame, cost: str) -> Lines:
    """Yield what each row of a profile has reached at a quarter, half and all of what DPFL's Runs cost: mean over partitions, its interval, their number.

    A Run that has ended keeps its accuracy; the difference to DPFL is at the last of the three, of the same partitions.
    """
    whole, rows = lines[lines["row"] == "DPFL"].groupby("seed")[cost].max().mean(), dict.fromkeys(lines["row"])
    costs = [share * whole for share in (0.25, 0.5, 1.0)]
    known = [lines[lines[cost] <= 1.000001 * most].groupby(["row", "seed"])["accuracy"].last() for most in costs]
    reached = [values.unstack("seed").reindex(rows) for values in known]
    for row in rows:
        out = {"method": row}
        for most, values in zip(costs, reached, strict=True):
            parts = [np.array([mean]) for mean in values.loc[row].dropna()]
            mean, half = interval(parts) if parts else (np.nan, np.nan)
            text = f"{mean:.2f} ± {half:.2f} ({len(parts)})".replace(" ± nan", "")
            out[f"{most:.2f} {cost}"] = text if parts else "-"
        ahead = [np.array([points]) for points in (reached[-1].loc["DPFL"] - reached[-1].loc[row]).dropna()]
        yield out | {"DPFL minus it": difference_text(ahead) if row != "DPFL" else "-"}


def changed(lines: pd.DataFrame) -> Lines:
    """Yield what a change of the network does to each method by the end of its Runs, points, paired by partitions, and what DPFL then sends."""
    keys = ["network", "row", "seed"]
    last, sent = (lines.groupby(keys)[name].last().unstack("seed") for name in ("accuracy", "gigabytes"))
    for change in ("staleness 1", "staleness 5", "int8", "topk:0.1"):
        for profile in dict.fromkeys(lines["network"]):
            out = {"change": f"{change}, {profile}"}
            for method in ("DPFL", "Random graph", "Pairwise"):
                both = [(profile, f"{method}, {change}"), (profile, method)]
                parts = last.loc[both[0]] - last.loc[both[1]]
                out[method] = difference_text([np.array([points]) for points in parts.dropna()])
            yield out | {"GB of DPFL": number(sent.loc[profile, f"DPFL, {change}"].mean())}


def over_network() -> dict[str, str]:
    held = pd.read_csv(NETWORK.with_suffix(".csv"))
    named = ((profile, cost) for profile in ("phones", "hospitals") for cost in ("hours", "gigabytes"))
    at = {f"{name}, {cost}": recomputed.text(equal(held[held["network"] == name], cost)) for name, cost in named}
    return at | {"changed": recomputed.text(changed(held))}


@cache
def arena_lines() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the arena's Runs, their clients, and the differences between rows."""
    runs, clients = (
        pd.read_csv(HERE / name, dtype={"run": str, "commit": str}) for name in ("arena.csv", "arena-clients.csv")
    )
    return runs, clients, standings.differences(runs, clients)


def deciding() -> Lines:
    """Yield how many partitions of 100 clients decide half a point, and what ten find, in 80 % of the cases at a level of 5 %."""
    dpfl, random = "DPFL (B_c = 0.1N)", "Random graph (B_c = 0.1N)"
    asked = [
        (f"Table 1, {setting}, 500", "their own", row, paired(folders()[name]["clients"], dpfl, row))
        for name, setting in (("cifar-10-patho-3", "Patho(3)"), ("cifar-10-dir-0-1", "Dir(0.1)"))
        for row in (random, "FedAvg+FT", "Ditto")
    ]
    runs, clients, _ = arena_lines()
    for (setting, epochs), mine in runs.groupby(["setting", "epochs"], sort=False):
        lines, where = clients.merge(mine, on="run"), f"{setting}, {epochs}"
        for scored, of in (("own", "their own"), ("accuracy", "all of their classes")):
            asked.append((where, of, standings.RANDOM, paired(lines, "DPFL", standings.RANDOM, scored)))
    for where, of, row, parts in asked:
        if len(parts) > 1:
            chance = chance_of(parts)
            found = (d / 100 for d in range(1, 10_000) if plan_power.power(chance, d / 100, 10, 100, 0.05) >= 0.8)
            yield {
                "of, local epochs": where,
                "test images": of,
                "DPFL minus": row,
                "points": difference_text(parts),
                "deviation within": f"{chance.within:.1f}",
                "between partitions": f"{chance.between:.2f}",
                "partitions for 0.5": str(needed(chance, 0.5, 100, 0.8, 0.05) or "> 10,000"),
                "ten find": f"{next(found):.2f}",
            }


def in_arena() -> dict[str, str]:
    """Return the tables of arena.md: what is decided by how many partitions, and as one text a part per setting."""
    runs, clients, found = arena_lines()
    parts = []
    for (setting, epochs), mine in runs.groupby(["setting", "epochs"], sort=False):
        its = found[(found["setting"] == setting) & (found["epochs"] == epochs)]
        parts.append(f"### {setting}, {epochs} epochs\n\n{recomputed.text(standings.table(mine, clients, its))}\n")
    return {"arena": "\n".join(parts), "deciding": recomputed.text(deciding())}


def differences(frames: Frames) -> Figure:
    clients = long(frames)["clients"]
    pairs = {row: paired(clients, "DPFL", row) for row in COMPARED if row != "FedAvg"}
    pairs = {"DPFL": [], **{row: parts for row, parts in pairs.items() if comparable(parts)}}
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 3.2), sharey=True)
    recomputed.intervals(left, pairs)
    recomputed.intervals(right, {row: gaps(clients[clients["row"] == row]) for row in pairs})
    left.set_xlabel("DPFL minus this method, points")
    right.set_xlabel("validation minus test accuracy, points")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def over_costs(frames: Frames) -> Figure | None:
    runs = long(frames).runs
    return pareto.draw(long(frames).where((runs["seed"] == DRAWN) & runs["row"].isin(OVER_COSTS)), costs=COSTS).figure


def graph_figure(frames: Frames) -> Figure:
    """Return homophily, reciprocity and the spectral gap of Omega and of the last graph, means over the partitions."""
    lines = long(frames)["measures"]
    rows = in_order(lines["row"], "same clients|patience|search_share")
    figure, panels = plt.subplots(1, 3, figsize=(TEXT, 2.2), sharey=True)
    for axes, measure in zip(panels, ("homophily", "reciprocity", "gap"), strict=True):
        for when, shift, colour, name in ((True, -0.2, BLUE, "Omega"), (False, 0.2, PALE, "last round")):
            values = lines[(lines["round"] == 0) == when].groupby("row")[measure].mean().reindex(rows)
            axes.barh(np.arange(len(rows)) + shift, values, 0.38, color=colour, label=name)
        axes.set_xlabel(measure)
    panels[0].set_yticks(range(len(rows)), rows)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def power_figure(frames: Frames) -> Figure:
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    points, looks = np.linspace(0.4, 3, 27), frames.rows.set_index("row")
    for row in ("Local", "FedAvg+FT", "Pairwise"):
        chance = chance_of(paired(long(frames)["clients"], "DPFL", row))
        counts = [needed(chance, difference, chance.clients, 0.8, 0.05) for difference in points]
        axes.plot(points, counts, label=f"DPFL minus {row}", color=looks["colour"][row], ls=looks["line"][row])
    axes.axhline(3, color=GREY, lw=0.6)
    axes.axvline(0.63, color=GREY, lw=0.6)
    axes.set(xlabel="difference to find, points", ylabel="partitions")
    axes.set_ylim(0)
    axes.legend()
    return figure


def lies(frames: Frames) -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(TEXT, 2.3), width_ratios=(1.6, 1))
    for shift, method in ((-0.2, "DPFL"), (0.2, "FedAvg")):
        colour = frames.rows.set_index("row")["colour"][method]
        values = 100 * benign(frames, method).groupby("row")["test_acc"].mean()
        bars = values.reindex([f"{method}, attack {kind}:0.2" for kind in ATTACKS])
        left.bar(np.arange(len(ATTACKS)) + shift, bars, 0.38, color=colour, label=method)
        left.axhline(values[method], color=colour, lw=0.8, ls="--")
    left.set_ylabel("accuracy of the benign, %")
    runs = short(frames).runs.set_index("row")
    chosen = [100 * runs.loc[f"DPFL, attack {kind}:0.2", "liars_chosen"] for kind in ATTACKS]
    right.bar(range(len(ATTACKS)), chosen, 0.6, color=BLUE)
    right.axhline(20, color=DARK, lw=0.8, ls="--")
    right.set_ylabel("liars of those chosen, %")
    for axes in (left, right):
        axes.set_xticks(range(len(ATTACKS)), [kind.replace("_", "\n") for kind in ATTACKS], fontsize=6)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def over_epochs(frames: Frames, name: str, words: str, xlabel: str, ylabel: str) -> Figure:
    figure, axes = plt.subplots(figsize=(TEXT / 2, 2.4))
    rows = frames.rows[frames.rows["row"].str.contains(words)]
    lines = frames[name].groupby(["setting", "row", "run", "epochs"], as_index=False)["test_acc"].mean()  # of newcomers
    curves(axes, rows, lines, "test_acc", "epochs", 100)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


@cache
def folders() -> dict[str, Frames]:
    names = sorted((path.parent.name for path in HERE.glob("*/runs.csv")), key=lambda name: (name == "controls", name))
    return {name: of_folder(HERE / name) for name in names}


def tables() -> dict[Path, dict[str, str]]:
    """Return every page's tables by the names of their marks."""
    full = {name: frames for name, frames in folders().items() if name != "controls"}
    of_controls = (compared, reached, graphs, power, attacks, newcomers, moved)
    found = {table.__name__: recomputed.text(table(folders()["controls"])) for table in of_controls}
    found["agreement"] = omega.agreement_table(pd.read_csv(HERE / "controls" / "agreement.csv"))
    runs, _, against = arena_lines()
    front = {"answer": recomputed.text(standings.answer(runs, against)), "core hours": recomputed.total(full)}
    return {
        PAGE: recomputed.tables(folders()),
        FRONT: front,
        FINDINGS: found,
        NETWORK: over_network(),
        ARENA: in_arena(),
    }


def filled(page: str, tables: dict[str, str]) -> str:
    """Return the page with every table between its marks; a table without marks is a mistake."""
    for name, table in tables.items():
        marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.S)
        if not marks.search(page):
            raise SystemExit(f"the page has no place for the table {name!r}")
        page = marks.sub(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", page)
    return page


def pictures() -> Iterator[tuple[Path, Figure]]:
    for name, frames in folders().items():
        if name not in ("controls", "cifar-10-motivation"):
            yield from ((HERE / name / f"{picture}.png", figure) for picture, figure in recomputed.pictures(frames))
    frames = folders()["controls"]
    found = {
        "compared": differences(frames),
        "costs": over_costs(frames),
        "graphs": graph_figure(frames),
        "power": power_figure(frames),
        "attacks": lies(frames),
        "newcomers": over_epochs(frames, "newcomers", "newcomers", "epochs of their own", "newcomers' accuracy, %"),
        "drift": over_epochs(frames, "curves", "drift", "local epochs", "test accuracy, %"),
    }
    runs, _, against = arena_lines()
    yield HERE / "arena.png", standings.picture(runs, against)
    yield from ((FINDINGS.parent / "pictures" / f"findings-{name}.png", figure) for name, figure in found.items())


def main() -> None:
    for page, its in tables().items():
        page.write_text(filled(page.read_text(), its))
        print(page)
    with plt.rc_context(STYLE):
        for path, figure in pictures():
            figure.savefig(path, dpi=160 if path.parent.name == "pictures" else 200)
            plt.close(figure)
            print(path)


if __name__ == "__main__":
    main()
