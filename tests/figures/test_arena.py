"""The arena's cells and tables, and the verdicts of question.py, against SciPy and by hand."""

import arena
import map as harm_map
import numpy as np
import pandas as pd
import pytest
import question
import recomputed
import standings
import tiny_result
from launch import ROOT, refused, script
from scipy import stats

from dpfl_mpi.settings import Run


def test_chances():
    assert recomputed.holm([0.01, 0.04, 0.03, 0.2]) == pytest.approx([0.04, 0.09, 0.09, 0.2])
    assert recomputed.holm([0.9, 0.8]).tolist() == [1, 1]
    rng = np.random.default_rng(1)
    parts = [rng.normal(mean, 1, 50) for mean in (0.3, 0.5, 0.1)]
    one = stats.ttest_1samp(parts[0], 0).pvalue
    assert standings.chance(parts[:1], parts[:1]) == pytest.approx(one)
    over_partitions = stats.ttest_1samp([part.mean() for part in parts], 0).pvalue
    mean, error = np.mean(parts), np.sqrt(sum(part.var(ddof=1) / 50 for part in parts)) / 3
    over_clients = 2 * stats.t(147).sf(mean / error)
    assert standings.chance(parts, parts) == pytest.approx(max(over_partitions, over_clients))
    centred = [part - mean for part in parts]
    assert standings.chance(centred, centred) > 0.9
    people = standings.of_clients(standings.HAR, parts)  # in each of the three partitions
    over_people = stats.ttest_1samp(np.mean(parts, axis=0), 0)
    low, high = over_people.confidence_interval()
    assert standings.bounds(parts[:1] * 3, people) == pytest.approx(
        (parts[0].mean(), high / 2 - low / 2)
    )
    assert standings.chance(parts[:1] * 3, people) == pytest.approx(over_people.pvalue)


@pytest.fixture
def lines():
    """Return Runs and clients: three partitions of 50 clients, with little noise."""
    rng = np.random.default_rng(2)
    above = {"DPFL": 0.10, standings.RANDOM: 0.08, "Local": 0.0}
    costs = {"megabytes": 3, "evaluations": 0, "steps": 7, "core_hours": 0.5}
    runs, clients = [], []
    for seed in (1, 2, 3):
        of_client = rng.uniform(0.4, 0.6, 50)
        for row, gain in above.items():
            run, accuracy = f"{row}{seed}", of_client + gain + rng.normal(0, 0.002, 50)
            name = {"setting": "Digits", "epochs": 10, "row": row, "seed": seed, "run": run}
            runs.append(name | {"partition": f"p{seed}", "models": 100.0 * seed} | costs)
            clients.append(pd.DataFrame({"run": run, "client": range(50), "accuracy": accuracy}))
    return pd.DataFrame(runs), pd.concat(clients)


def test_a_table_shows_what_is_significant(lines):
    runs, clients = lines
    found = standings.differences(runs, clients)
    pairs = {("DPFL", "Local"), ("DPFL", standings.RANDOM), (standings.RANDOM, "Local")}
    assert set(zip(found["row"], found["to"], strict=True)) == pairs
    assert found["significant"].all()
    table = pd.DataFrame(standings.table(runs, clients, found)).set_index("row")
    assert table.loc["DPFL", "vs random graph"].startswith("**+1.98 ± 0.08 (3)")
    assert table.loc["Local", "vs Local"] == "-"
    assert (table["models"] == "200").all() and (table["core hours"] == "0.50").all()
    noise = clients.assign(accuracy=clients.groupby("client")["accuracy"].transform("mean"))
    noise["accuracy"] += np.random.default_rng(3).normal(0, 0.01, len(noise))
    assert not standings.differences(runs, noise)["significant"].any()
    one = standings.differences(runs[runs["seed"] == 1], clients)
    assert not one["significant"].any() and one["p"].min() < 1e-6  # of one partition
    longer = runs[runs["seed"] == 1].assign(epochs=20)  # of one partition, with one row more
    other = found[found["to"] == standings.RANDOM].assign(
        parts=[found["parts"][0][:1]], clients=[found["clients"][0][:1]]
    )
    other = other.assign(row="Oracle", epochs=20, significant=False)
    (front,) = standings.answer(pd.concat([runs, longer]), pd.concat([found, other]))
    assert (front["epochs"], front["DPFL"], front["Oracle"]) == ("10", "**+1.98 ± 0.08 (3)**", "-")
    assert front["random graph over Local"].startswith("**+8.0")


def test_rows_of_a_setting_train_as_long_with_the_same_budget():
    # these train 10 epochs before round 1
    before = ("dpfl", "dpfl_choice", "random_graph", "oracle", "pairwise", "nearest")
    for setting, row, epochs, run in arena.CELLS:
        trained = 5 * run.rounds + run.finetune_epochs + (10 if run.method in before else 0)
        assert trained == epochs, (setting, row)
        assert str(run.budget) == ("6" if setting.startswith("HAR") else "0.1N")
    names = [(setting, row, epochs, run.seed) for setting, row, epochs, run in arena.CELLS]
    assert len(set(names)) == len(names) > 400
    command = arena.prepared("data/labels-42.h5")
    assert "groups.py --source OUT.zip --by labels --seed 42 --out" in command
    refused("--cell is no such; no cell's name has these words", arena.print_commands, "no such")


def test_a_cells_line_and_clients(tmp_path, result_of):
    result = tiny_result.tiny(tmp_path, "one", "dpfl", 42)
    line = arena.line_of(Run(method="dpfl"), result)
    models = result["traffic/models_received"].sum(0).mean()
    assert line["models"] == pytest.approx(models)
    assert line["megabytes"] == pytest.approx(4e-6 * models * int(result.fact("parameters")))
    result = result_of({"clients": 4, "rounds": 1, "method": "local", "tau_train": 1})
    settings = ("HAR, 30 people", "CIFAR-10 Patho(3)")
    alone, alike = (arena.clients_of(setting, result) for setting in settings)
    own = result["best/test_acc"].round(6).tolist()
    assert alone["accuracy"].tolist() == alone["own"].tolist() == alike["own"].tolist() == own
    assert alike["accuracy"].tolist() != own


def test_cells_are_collected_folder_by_folder(tmp_path):
    arena, setting = script(ROOT / "reproduction" / "arena.py"), "CIFAR-10 Patho(3)"
    files, cells = (tmp_path / "arena.csv", tmp_path / "arena-clients.csv"), []
    for row, method, more in ("DPFL", "dpfl", {"budget": 3}), ("Local", "local", {}):
        run = Run(method=method, clients=4, rounds=2, seed=42, classes_per_client=3, **more)
        tiny_result.make(run.path(tmp_path / row), method, 42)
        cells.append((setting, row, 160, run))
    scored = []

    def clients_of(_, result):  # these results hold no models
        scored.append(result.path.stem[-8:])
        columns = {"run": scored[-1], "client": range(4), "accuracy": result["best/test_acc"]}
        return pd.DataFrame(columns)

    arena.clients_of = clients_of
    arena.collect(str(tmp_path), cells, *files, ["accuracy"])  # holds no result itself
    assert not files[0].exists()
    for row in ("Local", "DPFL", "DPFL"):
        arena.collect(str(tmp_path / row), cells, *files, ["accuracy"])
    lines, clients = map(arena.known, files)
    assert lines["row"].tolist() == ["DPFL", "Local"] and len(scored) == 2
    assert clients["run"].unique().tolist() == lines["run"].tolist() and len(clients) == 8
    assert clients["client"].tolist() == [0, 1, 2, 3] * 2 and clients["client"].dtype == int
    assert clients["accuracy"].tolist() == [0.8, 0.6, 1.0, 0.4, 0.6, 0.6, 0.8, 0.6]
    arena.DONE = arena.done_in(files[0])
    # the random graph takes its degrees from DPFL's result
    wanted = [arena.is_wanted(setting, row, 160, 42) for row in ("DPFL", "Local", "Ditto")]
    assert wanted == [True, False, True]
    arena.DONE.add((setting, standings.DEGREES, 160, 42))
    assert not arena.is_wanted(setting, "DPFL", 160, 42)


SMALL = np.array([0.1, -0.1, 0.2, 0.0, -0.2, 0.1, 0.0, 0.1, -0.1, 0.0, 0.1, -0.1])
LARGE = SMALL + 2


def test_each_contrast_has_all_its_runs():
    assert len(question.CONTRASTS) == len(question.DEVIATIONS) == 14
    runs = {(setting, row, run.seed) for setting, row, _, run in question.CELLS}
    assert len(runs) == len(question.CELLS) == 12 * (5 + 14)
    for setting, row in question.CONTRASTS:
        for seed in range(101, 113):
            assert (setting, row, seed) in runs and (setting, "Random graph", seed) in runs
    no_runs = pd.DataFrame({name: [] for name in ("setting", "row", "seed", "run")})
    no_clients = pd.DataFrame({name: [] for name in ("run", "client", *question.SCORES)})
    assert set(question.table(no_runs, no_clients)["best, class images"]) == {"0 of 12 seeds"}


def test_chances_and_verdicts():
    values = np.random.default_rng(1).normal(0.2, 0.4, 12)
    above = stats.ttest_1samp(values, -0.5, alternative="greater").pvalue
    below = stats.ttest_1samp(values, 0.5, alternative="less").pvalue
    differs, within = question.chances([values])
    assert differs == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert within == pytest.approx(max(above, below))
    people = np.linspace(-1, 1.4, 30)
    pairs = question.chances([SMALL]), question.chances([people])
    assert question.chances([SMALL, people]) == tuple(map(max, *pairs))
    wide = np.linspace(-3, 3, 12)
    samples = [[SMALL], [LARGE], [-LARGE], [wide], *[[wide]] * 10]
    assert question.verdicts(samples)[:4] == ["equal within 0.5", "better", "worse", "open"]
    values, edge, wide = np.array([0.4, 1.0] * 6), np.array([-0.2, 1.3] * 6), np.linspace(-3, 3, 12)
    assert 14 * stats.ttest_1samp(values, 0).pvalue < 0.05 < 14 * stats.ttest_1samp(edge, 0).pvalue
    assert stats.ttest_1samp(edge, 0).pvalue < 0.05
    assert question.verdicts([[edge]]) == ["better"]
    assert question.verdicts([[edge], *[[wide]] * 13])[0] == "open"
    assert question.verdicts([[values], *[[wide]] * 13])[0] == "better"


def test_differences_and_intervals_by_hand():
    names = {"setting": "CIFAR-10 Patho(3)", "run": list("abcd"), "seed": [101, 102] * 2}
    runs = pd.DataFrame(names | {"row": ["DPFL"] * 2 + ["Random graph"] * 2})
    accuracy = [0.5, 0.7, 0.6, 0.9, 0.4, 0.6, 0.5, 0.6]
    clients = pd.DataFrame({"run": list("aabbccdd"), "client": [0, 1] * 4, "accuracy": accuracy})
    points = question.differences("CIFAR-10 Patho(3)", "DPFL", "accuracy", runs, clients)
    assert points == pytest.approx(np.array([[10, 10], [10, 30]]))
    (over_seeds,) = question.units("CIFAR-10 Patho(3)", points)
    assert over_seeds == pytest.approx([10, 20])
    # deviation 7.0711 over sqrt(2) is 5; t(1) is 12.7062
    assert question.half_width([over_seeds]) == pytest.approx(63.531, abs=1e-3)
    seeds, people = question.units(question.HAR, points)
    assert seeds == pytest.approx([10, 20]) and people == pytest.approx([10, 20])


def test_the_forest_draws_contrasts_with_all_runs():
    gains = np.array([1, 3] * 6)  # of DPFL, points by seed; its last seed lacks at first
    names = {"setting": question.HAR, "seed": list(question.SEEDS) * 2}
    runs = pd.DataFrame(names | {"row": ["DPFL"] * 12 + ["Random graph"] * 12, "run": range(24)})
    accuracy = np.concatenate([0.5 + gains / 100, np.full(12, 0.5)])
    clients = pd.DataFrame({"run": range(24), "client": 0, "accuracy": accuracy})
    (axes,) = question.forest(runs.drop(11), clients).axes
    assert all("not all runs" in text.get_text() for text in axes.get_yticklabels())
    clients = pd.concat([clients, clients.assign(client=1)])
    (axes,) = question.forest(runs, clients).axes
    bars = [bar.lines[0].get_xydata() for bar in axes.containers]
    assert [len(points) for points in bars] == [0, 0, 1]
    assert bars[2] == pytest.approx(np.array([[2, 4.25]]))  # HAR is the last of five
    low, high = stats.ttest_1samp(gains, 0).confidence_interval()
    (segment,) = axes.containers[2].lines[2][0].get_segments()
    assert segment[:, 0] == pytest.approx([low, high])
    assert [t.get_text() for t in axes.get_yticklabels()][-1] == question.HAR


def test_the_page_shows_the_power_that_the_code_computes():
    text = (question.FOLDER / "question.md").read_text()
    page = text.split("<!-- power -->\n")[1].split("\n\n")[0]
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()[2:16]]
    for theirs, ours in zip(shown, question.power(repetitions=200).to_numpy(), strict=True):
        assert theirs[:3] == list(ours[:3])
        for a, b in zip(theirs[3:], ours[3:], strict=True):
            percent = [[int(part.split()[0]) for part in text.split(", ")] for text in (a, b)]
            # 3.5 deviations of 200 draws
            assert percent[0] == pytest.approx(percent[1], abs=12), (theirs, ours)


def test_gains_of_the_map_by_hand():
    """One seed has its interval over clients, two have theirs over seeds: t(1) = 12.7062."""
    place = {"data": "CIFAR-10", "share": 40, "degrees": 0, "images": 100, "budget": "0.2N"}
    line = {f"{m}_{n}": 0.0 for m in harm_map.SCORES for n in ("gain", "half")}
    one = place | line | {"row": "DPFL", "trained_gain": 1.0, "trained_half": 0.4}
    one["own_group"] = 40.0
    two = [
        place | line | {"row": "Oracle", "averaged_gain": gain, "own_group": 100.0}
        for gain in (4.0, 6.0)
    ]
    partner = place | line | {"row": harm_map.PARTNER, "budget": "2", "harm": 3.25}
    found = harm_map.gains(pd.DataFrame([one, *two, partner]))
    averaged, trained, better = found.to_dict("records")
    assert (trained["harm"], trained["Nearest"]) == ("3.2", "not computed yet")
    assert trained["DPFL"] == "+1.0 ± 0.4 (1)"
    assert averaged["Oracle"] == "+5.0 ± 12.7 (2)"
    assert better["kin, %"] == "Oracle 100, DPFL 40"


def test_goals_of_the_map_by_hand():
    """Two seeds: a one-sided p is 1/2 - arctan(t) / pi, and t is 11 at 40 % and 69 at 70 %."""

    def lines(share, oracle, spectral):
        place = dict(zip(harm_map.PLACE, ("CIFAR-10", share, 0, 100, "0.2N"), strict=True))
        for row, gain in (("Oracle", oracle), ("Spectral", spectral)):
            for seed, points in enumerate(gain):
                yield place | {"row": row, "seed": seed, "trained_gain": points}

    near = [*lines(0, [1, 1], [0, 0]), *lines(40, [10, 10], [9, 9.2])]
    found = harm_map.goals(pd.DataFrame(near), range(2))
    assert found["verdict"].tolist() == ["reached", "reached"]  # p = 0 and 0.029
    assert found["spectral's gain"].tolist() == ["+0.00 ± 0.00", "+9.10 ± 1.27"]
    found = harm_map.goals(pd.DataFrame([*near, *lines(70, [10, 10], [1, 1.2])]), range(2))
    # with three places 0.029 counts twice; at 70 % "missed" has p = 0.0046, three times
    assert found["verdict"].tolist() == ["reached", "open", "missed"]
    assert harm_map.goals(pd.DataFrame(near[:1]), range(2)).empty


def test_predictions_from_harm_by_hand():
    """Six places at harm 0, 2 and 4 gain 1 more and 1 less than it: 2 sqrt(6 / 4) is 2.4."""
    lines = []

    def add(data, share, degrees, budget, row, seed=1, **more):
        names = (data, share, degrees, 100 if data == harm_map.MADE else 0, budget, row)
        columns = [*harm_map.PLACE, "row"]
        lines.append({"seed": seed} | dict(zip(columns, names, strict=True)) | more)

    for i, place in enumerate(harm_map.PLACES_ASKED):
        harm, gain = i // 2 * 2, i // 2 * 2 + (-1) ** i
        add(harm_map.MADE, *place, "2", harm_map.PARTNER, harm=harm)
        add(harm_map.MADE, *place, "0.2N", "Oracle", trained_gain=gain, trained_half=0.5)
    for data, row, gain in (("PACS by domain", "Oracle", 7), ("HAR by person", "Spectral", 8)):
        add(data, 0, 0, "2", harm_map.PARTNER, harm=10)
        for seed in harm_map.SEEDS if row == "Oracle" else range(4):
            add(data, 0, 0, "0.2N", row, seed, trained_gain=gain + seed % 2)
    pacs, har = harm_map.predictions(pd.DataFrame(lines)).to_dict("records")
    # odd seeds gain 1 more: deviation 0.5477, over sqrt(5) 0.2449, t(4) = 2.77645
    assert (pacs["predicted gain"], pacs["gain"]) == ("+10.0 ± 2.4", "+7.6 ± 0.7 (5)")
    assert (pacs["the prediction"], har["the prediction"]) == ("holds", "4 of 5 seeds")
    # harms deviate by 2 from their mean 2 in four places: 1 + 1 / 6 + 8 ** 2 / 16 is 5.1667
    assert pacs["95 % interval"] == f"± {2.77645 * np.sqrt(6 / 4 * 5.1667):.1f}" == "± 7.7"
    low = pd.DataFrame(lines)
    low.loc[low["row"] == "Oracle", "trained_gain"] -= 0.1 * (low["data"] == "PACS by domain")
    assert harm_map.predictions(low)["the prediction"][0] == "fails"
    assert harm_map.predictions(pd.DataFrame(lines[1:])).empty


def test_a_model_is_scored_in_its_last_best_round_by_validation():
    result = {
        "round/val_acc": np.array([[0.5, 0.6], [0.7, 0.6], [0.7, 0.2]]),
        "round/test_acc": np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]),
    }
    result |= {
        "mixed/val_acc": np.array([[0.1, 0.7], [0.7, 0.6], [0.2, 0.6]]),
        "mixed/test_acc": np.array([[0.0, 0.8], [0.9, 0.0], [0.0, 0.0]]),
    }
    assert harm_map.scores(result, "trained").tolist() == [0.5, 0.4]
    assert harm_map.scores(result, "averaged").tolist() == [0.9, 0.8]
    # mean over clients of the best validation: 0.65 of the trained, 0.7 of the averaged
    assert harm_map.scores(result, "better").tolist() == [0.9, 0.8]
    result["mixed/val_acc"][0] = np.nan  # most methods average first in round 1
    assert harm_map.scores(result, "averaged").tolist() == [0.9, 0.0]
    result |= {name: np.full((3, 2), np.nan) for name in ("mixed/val_acc", "mixed/test_acc")}
    assert harm_map.scores(result, "better").tolist() == [0.5, 0.4]  # it does not average


def test_rivals_are_compared_on_one_set_of_seeds():
    place = dict(zip(harm_map.PLACE, (harm_map.MADE, 40, 0, 100, "0.2N"), strict=True))
    gains = {f"{m}_{n}": v for m in harm_map.SCORES for n, v in (("gain", 2.0), ("half", 0.5))}
    seeds = harm_map.SEEDS[0], harm_map.DECIDING[0]
    values = gains | {"row": "PENS", "models": 12.4}
    lines = [place | values | {"seed": s, "own_group": 10.0 * s} for s in seeds]
    found = harm_map.rivals(pd.DataFrame(lines)).set_index("method").loc["PENS"]
    assert found["40 %, better"] == "+2.0 ± 0.5 (1)" and found["40 %, kin"] == "2010"
    assert found["models"] == "12"
    assert found["100 %, trained"] == "not computed yet" and found["90 degrees, kin"] == ""


def test_leads_of_the_last_common_round_by_hand():
    place = dict(zip(harm_map.PLACE, (harm_map.MADE, 40, 0, 100, "0.2N"), strict=True))
    rows = {harm_map.RANDOM: 3, harm_map.ORACLE: 3, "DPFL": 2}  # and their rounds
    runs, rounds = [], []
    for i, (row, number) in enumerate(rows.items()):
        for seed in harm_map.SEEDS[:2]:
            run = f"{i}{seed}"
            runs.append(place | {"row": row, "seed": seed, "run": run})
            values = {"averaged": 10 * i, "averaged_test": seed, "trained_test": 5 - i}
            rounds += [{"round": t, "run": run} | values for t in range(number)]
            rounds[-1]["averaged"] += 1  # of the last round of each row
    found = harm_map.undone(pd.DataFrame(runs), pd.DataFrame(rounds))
    assert found.values.tolist() == [
        [40, "DPFL", "+21.0", "+0.0", "-2.0"],
        [40, "Oracle", "+10.0", "+0.0", "-1.0"],
    ]
