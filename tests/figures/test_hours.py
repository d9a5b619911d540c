"""The figure `hours` of simulated time, against numbers worked out by hand."""

import numpy as np
import pytest
from launch import refused

from dpfl_mpi.figures import hours


class Made(dict):
    """Two rounds of three clients: client 2 ends last, and client 0 waits for it."""

    path, last_round, benign = "made.h5", 1, np.array([True, True, False])

    def __init__(self):
        values = {
            "round/best_test_acc": [[0.5, 0.7, 0], [0.8, 0.9, 0]],
            "network/end": [[36, 72, 36], [108, 72, 360]],
            "network/wait": [[0, 0, 0], [36, 0, 72]],
            "network/waited_for": [[-1, -1, -1], [2, -1, 1]],
            "network/train": [[36.0] * 3] * 2,
            "network/choose": [[6.0] * 3] * 2,
            "traffic/bytes_sent": [[1e9, 0, 0], [1e9, 5e8, 5e8]],
        }
        super().__init__({name: np.array(value) for name, value in values.items()})


def test_who_came_by_age_by_hand():
    """Client 1 comes in round 1 and is absent in 2; 2 leaves in 2 and is back in 3; 3 lies."""
    there = [[1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]]
    nan = np.nan
    scored = [
        [0.5, nan, 0.5, nan],
        [0.6, 0.3, 0.6, 0.1],
        [0.7, nan, nan, 0.1],
        [0.8, 0.7, 0.5, 0.1],
    ]
    made = Made()
    made.last_round, made.benign = 3, np.array([True, True, True, False])
    made |= {"round/there": np.array(there, bool), "round/test_acc": np.array(scored)}
    # at age 0 client 1 in round 1, of a mean of 50, and client 2 in round 3, of 66.7
    # at age 2 client 1 in round 3
    found = hours.arrivals(made)
    assert found.index.tolist() == [0, 2]
    assert found.to_numpy() == pytest.approx(np.array([[40, (50 + 200 / 3) / 2], [70, 200 / 3]]))
    assert len(hours.arrivals(Made())) == 0


def test_hours_and_gigabytes_by_hand():
    lines = hours.measure(Made())  # after 72 s client 1 has ended both rounds
    assert lines["accuracy"].tolist() == pytest.approx([70, 85])
    assert lines["hours"].tolist() == pytest.approx([0.02, 0.1])
    assert lines["gigabytes"].tolist() == pytest.approx([1.5, 3])
    assert hours.waits(Made()).tolist() == pytest.approx([0, 0.02, 0.01])
    row = hours.row_of(Made(), lines, 80)
    # 252 s of work, 108 of waiting, 72 of them for client 1; client 2 waited for it and ends last
    expected = {"accuracy": 85, "hours": 0.1, "gigabytes": 3}
    expected |= {"hours to 80 %": 0.1, "gigabytes to 80 %": 3}
    assert row == pytest.approx(expected | {"waiting, %": 30, "longest": 200 / 3, "critical": 100})
    assert np.isnan(hours.row_of(Made(), lines, 90)["hours to 90 %"])
    without = type("Plain", (dict,), {"path": "x"})()
    refused("no simulated time; compute it with --network", hours.measure, without)
    end = np.array([[1, 2, 3], [4, 5, 4], [9, 6, 6]])
    assert hours.critical_path(end, np.array([[-1, -1, -1], [1, 2, -1], [1, -1, -1]])) == [2, 2, 1]
