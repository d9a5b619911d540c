"""Several runs by one start of the ranks: `mpirun -n 3 python -m mpi4py tests/many.py runs.json`, a list of [fields, job]."""

import json
import sys
from pathlib import Path

import torch
from mpi4py import MPI

from dpfl_mpi.config import Job, Run
from dpfl_mpi.engine.train import train
from dpfl_mpi.mpi.world import World

torch.set_num_threads(1)
world = World(MPI.COMM_WORLD)
for fields, job in json.loads(Path(sys.argv[1]).read_text()):
    train(Run(**fields).resolve(), Job(**job), world)
