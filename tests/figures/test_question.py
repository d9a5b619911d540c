"""The verdicts of reproduction/question.py, against SciPy and numbers worked out by hand."""

import numpy as np
import pandas as pd
import pytest
import question
from scipy import stats

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
    assert set(question.table(no_runs, no_clients)["best, class images"]) == {"not computed yet"}


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
