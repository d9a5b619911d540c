"""Runs that look for the cause where a row of Table 1 is not the paper's: `python -m dpfl_mpi.sweep reproduction/tried.py`.

- FedProx+FT lies far above the paper's: its proximal term gets other weights while tuning.
- PerFedAvg lies far below: what is scored is the locally trained model, as in the code that the paper's authors built on, and not the mean after
  one step.
- kNN-Per lies above: squared distances are divided by 84, the length of a representation, as its authors' code does; or its neighbours have no vote
  and each client's locally trained model is scored. The published code of pFedGraph comes to nearly that: a softmax of the votes makes them equal
  where distances are large.
- DPFL averages one client after the other, or scores by mini-batches, as in the authors' code.
"""

from dpfl_mpi.config import Run

CIFAR10 = {"dataset": "cifar10", "seed": 42}
TUNED = {"method": "reproduction/fedprox_tuned.py", "finetune_epochs": 10}
RUNS = [
    Run(**CIFAR10, method="perfedavg", options={"score_trained": True}),
    Run(**CIFAR10, method="knnper", options={"scale": 84.0}),
    Run(**CIFAR10, method="knnper", options={"interpolation": 0.0, "score_trained": True}),
    Run(**CIFAR10, budget="0.1N", averaging="serial"),
    Run(**CIFAR10, budget="0.1N", metric="batch"),
    Run(**CIFAR10, **TUNED | {"finetune_epochs": 0}),  # whose rounds are those of all weights
    *(Run(**CIFAR10, **TUNED, options={"finetune_mu": mu}) for mu in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)),
]
