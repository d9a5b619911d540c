"""What a run holds, as the kernel counts it, against the plan: in a process of its own, of which only what more clients add is compared."""

import subprocess
import sys

import numpy as np
import pytest

from dpfl_mpi import prepare

WATCHED = """
import re, sys
from pathlib import Path
from mpi4py import MPI
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import open_source
from dpfl_mpi.engine.train import train
from dpfl_mpi.mpi import placement
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plan import needs
from dpfl_mpi.settings import Job, Run
placement.WAVE = 8
fields = {"dataset": "arrays", "data": "data.h5", "partition": "natural", "min_samples": 3, "model": "mlp", "budget": 10}
for clients in map(int, sys.argv[1:]):
    run = Run(**fields, clients=clients, rounds=1, tau_init=1, tau_train=1).resolve()
    train(run, Job(quiet=True, out="run.h5", fresh=True, save_models=False), World(MPI.COMM_SELF))
    held = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)
    source = open_source(run)
    plan = needs.needs_of(run, Job(), source, deal(run, source), needs.ensemble_of(run, source), 1, 1)
    print(int(held) * 1024, plan.memory[0], plan.row)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_client_holds_as_many_models_as_planned(tmp_path):
    few, many, each, rng = 150, 400, 8, np.random.default_rng(0)
    count = many * each
    whose = {"client": np.repeat(np.arange(many), each), "test": np.tile(np.arange(each) >= 6, many)}
    x, y = rng.integers(0, 256, (count, 28, 28, 1), dtype=np.uint8), rng.integers(0, 10, count)
    np.savez(tmp_path / "data.npz", x=x, y=y, **whose)
    prepare.prepare("arrays", tmp_path / "data.npz", tmp_path / "data.h5", {})
    command = [sys.executable, "-c", WATCHED, str(few), str(many)]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (held, planned, row), (held_more, planned_more, _) = (map(int, line.split()) for line in out.splitlines())
    models, expected = (
        (more - less) / (many - few) / row for less, more in ((held, held_more), (planned, planned_more))
    )
    assert models < 8
    assert models == pytest.approx(expected, rel=0.2)
