"""FedProx whose +FT trains one part of the model, the last layer ("head") or all others ("body").

python -m dpfl_mpi --method reproduction/fedprox_part.py --finetune_epochs 10 --options.part head
"""

import dataclasses
from typing import Any, Literal

import torch

from dpfl_mpi.methods import fedprox
from dpfl_mpi.settings import option

METHOD = dataclasses.replace(fedprox.METHOD, title="FedProx")
init, round = fedprox.init, fedprox.round


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of FedProx."""

    mu: float = option(0.1, "weight of the proximal term (the paper's lambda)", low=0)
    part: Literal["none", "head", "body"] = option("none", "+FT: the trained part", tuning=True)


def finetune_gradient(fed: Any, start: Any) -> Any:
    """Return the gradient of +FT, by which the other part of the rows `[K, W]` stays as it is."""
    head = fed.columns("head")
    trained = {"none": head & False, "head": head, "body": ~head}[fed.options["part"]]
    proximal, decay = fed.proximal(start, fed.options["mu"]), fed.run.weight_decay

    def gradient(block: Any, batch: Any) -> Any:
        loss = proximal(block, batch)
        # the optimiser adds the weight decay to this, so that what is not trained gets 0
        block.g.copy_(torch.where(trained, block.g, -decay * block.w))
        return loss

    return gradient
