"""Decentralized Personalized Federated Learning over MPI: every client picks, under a budget, whose models to average with.

The way in is `python -m dpfl_mpi` (see `__main__.py`); the way down is `__main__` -> `train` -> `federation` -> `methods/dpfl.py`.
"""

__version__ = "0.1.0"
