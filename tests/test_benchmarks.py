"""The benchmarks' own arithmetic, by hand, and that each script can be asked what it does."""

import importlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from launch import ROOT

FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("[a-z]*.py"))  # files whose name starts with _ are helpers


@pytest.fixture(scope="module")
def benchmarks():
    """The scripts' modules by name: imported as when one of them is the main program."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


def test_every_script_has_help():
    """One interpreter asks them all: most of the time goes into the import of torch."""
    code = (
        "import runpy, sys\n"
        "for sys.argv in [[path, '--help'] for path in sys.argv[1:]]:\n"
        "    try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "    except SystemExit as end: assert not end.code, sys.argv\n"
    )
    paths = [str(FOLDER / script) for script in SCRIPTS]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(FOLDER)])}
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    for script in SCRIPTS:
        assert f"usage: {script}" in done.stdout
    assert done.stdout.count("--help") >= len(SCRIPTS)


def test_exponents(benchmarks):
    scale = benchmarks("_scale")
    n = [50, 100, 200, 400]
    assert scale.exponent(n, [3 * k for k in n]) == pytest.approx(1)
    assert scale.exponent(n, [7.0] * 4) == pytest.approx(0, abs=1e-12)
    assert scale.exponent(n, [k**2 / 9 for k in n]) == pytest.approx(2)
    assert math.isnan(scale.exponent([50], [1])) and math.isnan(scale.exponent(n, [1, 0, 1, 1]))
    assert scale.slope(n, [5 + 2 * k for k in n]) == pytest.approx((5, 2))
    assert all(map(math.isnan, scale.slope([1], [1])))
    assert scale.numbers("50,100") == [50, 100]


def test_cost_model_by_hand(benchmarks):
    model = benchmarks("scaling_model")
    costs = model.Costs(
        step=1e-3, score=2e-3, evaluation=1e-4, add=1e-5, edge=1e-7, bandwidth=1e6, latency=1e-3, disk=1e6
    )
    alone = model.Work(clients=10, ranks=1, nodes=1, row=1000, steps=5, others=3, kept=2, samples=6, image=64)
    terms = model.round_seconds(alone, costs)
    assert terms == pytest.approx(
        {
            "arithmetic": 10 * (5e-3 + 2e-3),
            "choosing": 10 * 8 * 1e-4,  # three candidates of two models, and the two it starts from
            "mixing": 10 * 5 * 1e-5,
            "RMA": 0,  # nobody else is there
            "collectives": 0,
            "graph": 20 * 1e-7,
            "files": (10 * 116 + 4 * 20) / 1e6,
        }
    )
    two = model.round_seconds(model.dataclasses.replace(alone, ranks=2), costs)
    assert two["arithmetic"] == pytest.approx(terms["arithmetic"] / 2)
    rows = 5 * (1 - (6 / 9) ** 5)  # each of 5 rows there, missed by 5 clients who pick 3 of 9
    assert model.arriving(10, 5, 3) == pytest.approx(rows)
    assert two["RMA"] == pytest.approx(rows * (1000 / 1e6 + 1e-3))
    assert two["collectives"] == pytest.approx(18 * 1e-3 + (10 * 10 + 8 * 20 + 10 * 208) / 1e6)
    eight = model.round_seconds(model.dataclasses.replace(alone, ranks=8), costs)
    assert eight["collectives"] - two["collectives"] == pytest.approx(18 * 2 * 1e-3)  # three levels instead of one
    assert (eight["graph"], eight["files"]) == (two["graph"], two["files"])  # what ranks do not share


def test_rows_arriving_is_what_a_route_counts(benchmarks):
    from dpfl_mpi.graph import CollaborationGraph
    from dpfl_mpi.mpi.window import route

    n, ranks, others = 60, 4, 5
    owner, rng = np.arange(n) % ranks, np.random.default_rng(0)
    needs = []
    for _ in range(40):
        lists = [rng.choice(np.delete(np.arange(n), k), others, replace=False) for k in range(n)]
        needs.append(route(CollaborationGraph.from_lists(lists), owner, np.arange(n) // ranks, 0, ranks).need.mean())
    assert np.mean(needs) == pytest.approx(benchmarks("scaling_model").arriving(n, n // ranks, others), rel=0.01)


def test_memory_of_a_node_by_hand(benchmarks):
    model = benchmarks("scaling_model")
    work = model.Work(clients=100, ranks=4, nodes=2, row=1000, steps=1, others=3, kept=2, samples=6, image=64)
    assert model.node_bytes(work) == {
        "rows": 50 * 12 * 1000,
        "best": 50 * 1000,
        "window": 2 * 75 * 1000,  # 25 clients of a rank by three slots, and 75 others could fill them
        "data": 50 * 6 * 72,
        "shared": 2 * 8 * 100 * (9 + 6 + 20),
    }
