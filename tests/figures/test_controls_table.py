"""analysis/controls_table.py by hand."""

import sys

import h5py
import numpy as np
import pytest
import tiny_result
from launch import ROOT

pytest.importorskip("pandas")
sys.path.insert(0, str(ROOT / "analysis"))

import controls_table

from dpfl_mpi.results import Result


def test_the_table_by_hand(tmp_path):
    """Client 2 lies. The others chose 2 in round 1, and 1 and 2 in round 2: two liars of three."""
    path = tiny_result.make(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file["client/liars"] = np.array([False, False, True, False])
        file["best/val_acc"][...] = np.array([0.9, 0.6, 0.1, 0.5])  # test 0.8, 0.6, 1.0, 0.4
        file["attack/success"] = np.array([0.5, 0.25, 1, np.nan])
        confusion = np.zeros((4, 3, 3), int)
        confusion[0, 1] = [1, 3, 0]  # of 4 images of class 1 one is taken for class 0
        confusion[1, 2] = [0, 0, 5]
        file["best/confusion"] = confusion
        file["newcomers/test_acc"] = np.array([[np.nan, 0.5, np.nan, 0.7], [np.nan, 0.6, np.nan, 1.0]])
    result = Result(path)
    assert sorted(controls_table.gap([result])[0].tolist()) == pytest.approx([0, 10, 10])
    assert controls_table.liar_shares(result) == (0.25, pytest.approx(2 / 3))
    assert controls_table.backdoor(result) == (0.375, 0.125)
    assert controls_table.newcomers(result).tolist() == pytest.approx([0.6, 0.8])
    text = controls_table.draw([result]).text
    assert "+6.67" in text and "66.7 of 25.0" in text and "37.5 (12.5)" in text and "60.0 / 80.0" in text
    plain = controls_table.draw([Result(tiny_result.make(tmp_path / "b.h5"))])
    assert "liars" not in plain.text and "stopped" not in plain.text and plain.data["accuracy"].tolist() == [70]
