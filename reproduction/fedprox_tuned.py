"""FedProx whose proximal term has another weight in +FT: `--method reproduction/fedprox_tuned.py --finetune_epochs 10 --options.finetune_mu 1`."""

import dataclasses
from typing import Any

from dpfl_mpi.methods import fedprox
from dpfl_mpi.settings import option

METHOD = dataclasses.replace(fedprox.METHOD, title="FedProx")
init, round = fedprox.init, fedprox.round


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of FedProx."""

    mu: float = option(0.1, "weight of the proximal term (the paper's lambda)", low=0)
    # 0 is none of the weights tried, so that each is named in its row and none is taken for the table's FedProx+FT
    finetune_mu: float = option(0.0, "+FT: weight of the proximal term", low=0, tuning=True)


def finetune_gradient(fed: Any, start: Any) -> Any:
    """Return the gradient of +FT: the proximal term pulls to the rows `[K, W]` that tuning starts from."""
    return fed.proximal(start, fed.options["finetune_mu"])
