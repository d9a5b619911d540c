"""How many partitions a difference takes: by hand, by simulation, and in other programs' numbers."""

import numpy as np
import pytest
import tiny_result

from dpfl_mpi.results import Result
from dpfl_mpi.studies import plan_power
from dpfl_mpi.studies.plan_power import Chance, chance_of, needed, power


def test_chance_by_hand():
    """Means 2 and 6; within: (1 + 1 + 4 + 4) / 2 = 5; of a mean 5 / 2; between: 8 - 2.5."""
    chance = chance_of([np.array([1.0, 3.0]), np.array([4.0, 8.0])])
    assert (chance.mean, chance.partitions, chance.clients) == (4, 2, 2)
    assert chance.within**2 == pytest.approx(5) and chance.between**2 == pytest.approx(5.5)
    assert chance.half == pytest.approx(12.706 * 2, rel=1e-4)  # one degree of freedom; the error of the mean is 2
    one = chance_of([np.array([0.0, 1.0, 2.0, 5.0])])
    assert one.between == 0 and one.half == pytest.approx(3.1824 * np.sqrt(14 / 3 / 4), rel=1e-4)
    assert chance_of([np.array([1.0, 9.0]), np.array([5.1, 4.9])]).between == 0  # never below 0


def test_power_is_that_of_a_t_test():
    """An effect of one standard deviation: a paired t-test of 10 has a power of 0.8031 (G*Power 3.1, two-sided, 5 %)."""
    chance = Chance(0, within=2.0, between=0.0, partitions=1, clients=1, half=0)
    assert power(chance, 2.0, 10, 1, 0.05) == pytest.approx(0.8031, abs=1e-4)
    for difference, wanted, count in ((2, 0.8, 10), (-2, 0.8, 10), (2, 0.81, 11), (1e-3, 0.8, 0)):  # 0: over 10,000
        assert needed(chance, difference, 1, wanted, 0.05) == count
    assert power(chance, 1e-9, 10, 1, 0.05) == pytest.approx(0.05, abs=1e-6)  # nothing there: the level
    assert power(chance, 100.0, 5, 100, 0.05) == 1


def test_power_by_simulation():
    chance = Chance(0, within=5.0, between=1.0, partitions=2, clients=50, half=0)
    rng = np.random.default_rng(0)
    means = 1.5 + rng.normal(0, 1, (4000, 6)) + rng.normal(0, 5, (4000, 6, 50)).mean(2)
    found = np.abs(means.mean(1)) > 2.5706 * means.std(1, ddof=1) / np.sqrt(6)
    assert found.mean() == pytest.approx(power(chance, 1.5, 6, 50, 0.05), abs=0.025)


@pytest.fixture
def paths(tmp_path):
    return [str(tiny_result.make(tmp_path / f"{m}{s}.h5", m, s)) for m in ("dpfl", "local") for s in (42, 52)]


def test_from_results(paths, capsys):
    """Differences of two partitions: (20, 0, 20, -20) with mean 5, and (30, 10, 10, -10) with mean 10."""
    assert plan_power.main([*paths, "--difference", "5"]) == 0
    out = capsys.readouterr().out
    assert "dpfl, B_c = 3 minus local: +7.50 ± 31.77 points" in out  # 12.706 * 2.5
    assert "2 partitions, 4 clients each" in out and "within a partition 17.80, between partitions 0.00" in out
    row = next(line.split() for line in out.splitlines() if line.strip().startswith("100 "))
    chance = chance_of([np.array([20.0, 0, 20, -20]), np.array([30.0, 10, 10, -10])])
    assert int(row[1]) == needed(chance, 5, 100, 0.8, 0.05) and int(row[2]) == 100 * int(row[1])
    assert max(map(len, out.splitlines())) <= 130
    assert plan_power.main([*paths[::2], "--difference", "5"]) == 0
    assert "between partitions unknown: one partition, taken as 0" in capsys.readouterr().out


def test_seeds_of_one_partition_by_hand(tmp_path, monkeypatch):
    """Those that both have, each once: DPFL's seeds are 0.8 and 0.9, 0.6 and 0.7, 1 and 0.9, 0.4 and 0.5, Local's 0.6, 0.6, 0.8, 0.6."""
    both = {key: Result(tiny_result.make(tmp_path / f"{key}.h5", *key)) for key in tiny_result.BEST}
    monkeypatch.setattr(Result, "fact", lambda self, name: "the same")
    [pair], _ = plan_power.differences([*both.values(), both["dpfl", 42]])
    np.testing.assert_allclose(pair, [25, 5, 15, -15], atol=1e-9)
    [pair], _ = plan_power.differences([both["dpfl", 42], both["dpfl", 52], both["local", 42]])
    np.testing.assert_allclose(pair, [20, 0, 20, -20], atol=1e-9)


def test_runs_of_one_name_are_told_apart(tmp_path, capsys):
    paths = [str(tiny_result.make(tmp_path / f"{share}.h5", search_share=share)) for share in (0.5, 1.0)]
    assert plan_power.main([*paths, "--difference", "5"]) == 0
    assert "dpfl, B_c = 3, search_share 0.5 minus dpfl, B_c = 3, search_share 1.0: +0.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("which", "more", "sentence"),
    [
        ([0, 1], ["--difference", "1"], "these are results of 1 different Runs"),
        ([0, 2], ["--difference", "0"], "--difference is 0; allowed is a number of points other than 0"),
        ([0, 2], ["--difference", "1", "--power", "1"], "--power is 1; allowed is a probability"),
        ([0, 3], ["--difference", "1"], "no partition in common"),
    ],
)
def test_mistakes_are_sentences(paths, capsys, which, more, sentence):
    assert plan_power.main([*(paths[i] for i in which), *more]) == 2
    assert sentence in capsys.readouterr().err
