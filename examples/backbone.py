"""Train the backbone of `lora.py`: `python examples/backbone.py` writes base.pt beside itself.

FedAvg trains it on other clients than those of `lora.py`.
"""

import sys
from pathlib import Path

import torch

import dpfl_mpi

HERE = Path(__file__).parent


def main(base=HERE / "base.pt", ranks=2, **settings):
    """Write the server's model that was best on client 0's validation images."""
    fields = {"dataset": HERE / "outside.py", "method": "fedavg", "rounds": 20}
    result = dpfl_mpi.run(ranks=ranks, save_models=True, **fields | settings)
    new = Path(base).with_suffix(".new")
    torch.save({name: torch.from_numpy(w) for name, w in result.state_dict(0).items()}, new)
    new.replace(base)  # a running run keeps the old file mapped
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
