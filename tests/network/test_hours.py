"""The figure `hours` against numbers worked out by hand, and what `describe` says of simulated time before a run."""

import re

import numpy as np
import pytest
from launch import run_here

from dpfl_mpi import describe
from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result

pytest.importorskip("matplotlib.pyplot")
hours = pytest.importorskip("dpfl_mpi.figures.hours")


class Made(dict):
    """What a result with clocks of three clients has: two rounds, of which client 2 ends the last, waited for by client 0."""

    path, last_round, benign = "made.h5", 1, np.array([True, True, False])

    def __init__(self):
        of = "round/best_test_acc", "network/end", "network/wait", "network/waited_for", "traffic/bytes_sent"
        best, end, wait = [[0.5, 0.7, 0], [0.8, 0.9, 0]], [[36, 72, 36], [108, 72, 360]], [[0, 0, 0], [36, 0, 72]]
        whom, sent = [[-1, -1, -1], [2, -1, 1]], [[1e9, 0, 0], [1e9, 5e8, 5e8]]
        super().__init__((name, np.array(value)) for name, value in zip(of, (best, end, wait, whom, sent), strict=True))
        self |= {"network/train": np.full((2, 3), 36.0), "network/choose": np.full((2, 3), 6.0)}


def test_hours_and_gigabytes_by_hand():
    lines = hours.measure(Made())
    assert lines["accuracy"].tolist() == pytest.approx([60, 85])
    assert lines["hours"].tolist() == pytest.approx([0.02, 0.1])
    assert lines["gigabytes"].tolist() == pytest.approx([1, 3])
    assert hours.waits(Made()).tolist() == pytest.approx([0, 0.02, 0.01])
    row = hours.row_of(Made(), lines, 80)
    # 252 s of work and 108 of waiting; 72 of 108 for client 1; the last way is client 2, who waited for client 1, from round 0 on
    expected = {"accuracy": 85, "hours": 0.1, "gigabytes": 3, "hours to 80 %": 0.1, "gigabytes to 80 %": 3}
    assert row == pytest.approx(expected | {"waiting, %": 30, "longest": 200 / 3, "critical": 100})
    assert np.isnan(hours.row_of(Made(), lines, 90)["hours to 90 %"])
    with pytest.raises(UserError, match="no simulated time; compute it with --network"):
        hours.measure(type("Plain", (dict,), {"path": "x"})())


@pytest.mark.parametrize(
    ("method", "low", "high"), [("local", 1, 1), ("fedavg", 1, 1), ("random_graph", 0.9, 1.1), ("dpfl", 0.98, 1.5)]
)
def test_what_is_said_before_is_what_the_clocks_say(method, low, high, tmp_path, capsys):
    """Alone and with a server to the second; along a graph, whose edges are not known, about; of a search rather more."""
    fields = {"clients": 6, "rounds": 3, "tau_train": 1, "method": method, "network": "phones", "budget": 3}
    flags = [f"--{name}={value}" for name, value in fields.items()]
    assert describe.main([*flags, "--no-measure"]) == 0
    said = re.search(r"simulated +about ([\d.]+) s before round 1, ([\d.]+) (s|min) in all", capsys.readouterr().out)
    with Result(run_here(tmp_path / "run.h5", fields)) as result:
        end = result["network/end"].max(1)
    assert said
    for seconds, unit, took in ((said[1], "s", end[0]), (said[2], said[3], end[-1])):
        assert (
            low * took - 31 * (unit == "min") - 0.1
            <= float(seconds) * (60 if unit == "min" else 1)
            <= high * took + 31 * (unit == "min") + 0.1
        )
