"""The benchmarks' own arithmetic, by hand, and that each script can be asked what it does."""

import importlib
import re
import runpy
import sys

import pytest
import torch
from launch import ROOT

from dpfl_mpi.models.cnn import build
from dpfl_mpi.numerics.backend import SGD
from dpfl_mpi.numerics.ensemble import Ensemble

FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("[a-z]*.py"))  # files whose name starts with _ are helpers


@pytest.fixture(scope="module")
def benchmarks():
    """The scripts' modules by name: imported as when one of them is the main program."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_help(benchmarks, script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    assert not end.value.code and f"usage: {script}" in capsys.readouterr().out


def test_cost_model_by_hand(benchmarks):
    model = benchmarks("scaling_model")
    costs = model.Costs(1e-3, score=2e-3, evaluation=1e-4, add=1e-5, edge=1e-7, bandwidth=1e6, latency=1e-3, disk=1e6)
    alone = model.Work(clients=10, ranks=1, nodes=1, row=1000, steps=5, others=3, kept=2, samples=6, image=64)
    terms = model.round_seconds(alone, costs)
    # choosing: three candidates of two models, and the two it starts from
    by_hand = {"arithmetic": 10 * (5e-3 + 2e-3), "choosing": 10 * 8 * 1e-4, "mixing": 10 * 5 * 1e-5, "graph": 20 * 1e-7}
    by_hand |= {"RMA": 0, "collectives": 0, "files": (10 * 116 + 4 * 20) / 1e6}  # nobody else is there
    assert terms == pytest.approx(by_hand)
    two = model.round_seconds(model.dataclasses.replace(alone, ranks=2), costs)
    assert two["arithmetic"] == pytest.approx(terms["arithmetic"] / 2)
    rows = 5 * (1 - (6 / 9) ** 5)  # each of 5 rows there, missed by 5 clients who pick 3 of 9
    assert model.arriving(10, 5, 3) == pytest.approx(rows)
    assert two["RMA"] == pytest.approx(rows * (1000 / 1e6 + 1e-3))
    assert two["collectives"] == pytest.approx(18 * 1e-3 + (10 * 10 + 8 * 20 + 10 * 208) / 1e6)
    eight = model.round_seconds(model.dataclasses.replace(alone, ranks=8), costs)
    assert eight["collectives"] - two["collectives"] == pytest.approx(18 * 2 * 1e-3)  # three levels instead of one
    assert (eight["graph"], eight["files"]) == (two["graph"], two["files"])  # what ranks do not share
    work = model.Work(clients=100, ranks=4, nodes=2, row=1000, steps=1, others=3, kept=2, samples=6, image=64)
    # model, average, momentum, best and staging, and the four of a search, which so few clients do at once
    by_hand = {"rows": 50 * 9 * 1000, "data": 50 * 6 * 72, "shared": 2 * 8 * 100 * (9 + 30)}
    # memory of a node: 25 clients of a rank by three slots, and 75 others could fill them
    assert model.node_bytes(work) == by_hand | {"window": 2 * 75 * 1000}


# ceilings of a GPU -------------------------------------------------------------------------------------------------------
def test_ceilings_by_hand(benchmarks):
    c = benchmarks("_ceilings")
    # 3, 1 and 3 mini-batches of at most 16: 7 of them; lock-steps of 3, 2 and 2 clients
    assert c.steps_of([40, 10, 33], 16, 10) == c.Steps(client_steps=70, lock_steps=30, row_steps=70)
    # clients of 1 to 10 mini-batches: eight recorded sizes for ten, so two lock-steps carry a row more
    assert c.steps_of([16 * n for n in range(1, 11)], 16, 1) == c.Steps(client_steps=55, lock_steps=10, row_steps=57)
    bound = c.ceilings(c.Steps(1500, 1000, 2000), 100, 1e6, c.GPU(2.0, "by hand"), (1.0, 2.0))
    assert bound.launches == pytest.approx((0.1, 0.2))  # 1,000 x 100 x 1 or 2 us
    assert bound.bytes == pytest.approx(1e-3)  # 2,000 x 1 MB / 2 TB/s
    # the paper's run as it was counted once: 42,400 lock-steps of 118 kernels
    assert c.ceilings(c.Steps(0, 42_400, 0), 118, 0, c.GPUS["h200"]).launches == pytest.approx((6.5, 10.0), abs=0.01)


def test_work_of_a_step_by_hand(benchmarks):
    c = benchmarks("_ceilings")
    ensemble = Ensemble(build((32, 32, 3), 10), (0.5,) * 3, (0.25,) * 3, torch.device("cpu"))
    # pooled pixels of 16 images x window: 16 * 14 * 14 x 108 and 16 * 5 * 5 x 216; rows of filters 24 and 64
    operations = 2 * 2 * 24 * 3136 * 108 + 3 * 2 * 64 * 400 * 216 + 3 * 2 * 16 * (400 * 120 + 120 * 84 + 84 * 10)
    moved = 4 * (2 * 2 * 3136 * 108 + 6 * 24 * 3136) + 4 * (2 * 3 * 400 * 216 + 6 * 64 * 400) + 40 * 62_016
    assert c.work_of_a_step(ensemble, (32, 32, 3), 16) == (operations, moved)
    kernels, row_bytes = c.launched(ensemble, (32, 32, 3), SGD(16, 0.9, 1e-3, 20.0))
    unclipped, _ = c.launched(ensemble, (32, 32, 3), SGD(16, 0.9, 1e-3, 0.0))
    assert kernels - unclipped == 6  # norm, + 1e-6, 1 / that, times the limit, at most 1, times the gradient
    assert row_bytes > moved and 110 < kernels < 140  # elementwise operations are calls of their own


def test_ceilings_of_the_embedded_digits(benchmarks, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--ceilings", "--gpu", "h200", "--launch_us", "1"])
    with pytest.raises(SystemExit) as end:
        benchmarks("gpu").main()
    said = capsys.readouterr().out
    assert not end.value.code
    # 10 + 20 x 5 epochs, the largest of 32 clients takes 6 mini-batches in each
    assert "32 clients, 110 local epochs (20 rounds), mini-batch 16" in said
    assert "in 660 lock-steps: the largest client takes 6 an epoch" in said
    kernels = int(re.search(r"(\d+) kernels per lock-step at 1 us", said)[1])
    assert f"at 1 us: {660 * kernels * 1e-6:.3g} s" in said
