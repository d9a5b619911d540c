"""Another score than the accuracy in a table."""

import pytest
from launch import run_here
from test_analysis import module

from dpfl_mpi.results import Result


def test_a_table_of_another_score(tmp_path):
    with Result(run_here(tmp_path / "run.h5", {"method": "local", "clients": 3, "rounds": 1})) as result:
        drawing = module("accuracy_table").draw([result], score="macro_f1")
        mean = 100 * result.score("macro_f1").mean()
    assert "Test macro F1, %" in drawing.text and drawing.data["mean"].tolist() == [pytest.approx(mean)]
