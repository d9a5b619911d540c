"""Log a run to Weights & Biases: `python -m dpfl_mpi --callback examples/to_wandb.py`.

It needs `pip install wandb`.
"""

import wandb

from dpfl_mpi.settings.fields import as_dict


def on_round(result, t):
    """Log round t. A run that was stopped goes on under its id."""
    if wandb.run is None:
        name, config = result.path.stem, as_dict(result.run)
        wandb.init(project="dpfl_mpi", id=name, name=name, resume="allow", config=config)
    wandb.log({name: values[t] for name, values in result.by_round().items()}, step=t)
