"""Several runs by one start of the ranks: `mpirun -n 3 python -m mpi4py tests/many.py runs.json`, a list of [fields, job] or [fields, job, ranks]: the first few."""

import json
import sys
from pathlib import Path

from mpi4py import MPI  # first: a torch that is linked with an MPI of its own would bring that one

# isort: split
import torch

from dpfl_mpi.engine.train import train
from dpfl_mpi.mpi.world import World
from dpfl_mpi.settings import Job, Run

torch.set_num_threads(1)
everyone = MPI.COMM_WORLD
for fields, job, *ranks in json.loads(Path(sys.argv[1]).read_text()):
    comm = everyone.Split(0 if everyone.rank < ranks[0] else MPI.UNDEFINED) if ranks else everyone
    if comm != MPI.COMM_NULL:
        train(Run(**fields).resolve(), Job(**job), World(comm))
    everyone.Barrier()
