"""Train the backbone of `lora.py` by FedAvg on clients that then stay out: `python examples/backbone.py` writes base.pt beside itself."""

import sys
from pathlib import Path

import torch

import dpfl_mpi

HERE = Path(__file__).parent


def main(base=HERE / "base.pt", ranks=2, **settings):
    """Write the server's model as client 0 kept it, the best by its validation, by layer name."""
    outside = {"dataset": HERE / "outside.py", "method": "fedavg", "rounds": 20, "save_models": True}
    result = dpfl_mpi.run(ranks=ranks, **outside | settings)
    new = Path(base).with_suffix(".new")
    torch.save({name: torch.from_numpy(held) for name, held in result.state_dict(0).items()}, new)
    new.replace(base)  # a run that maps the old one keeps it
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
