"""`Rule`: in what a greedy search may differ from Algorithms 2 and 3. A method whose `Options` are this class, or extend it, searches so."""

from dataclasses import dataclass
from typing import Literal

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings.run import option


@dataclass(frozen=True)
class Rule:
    """The defaults are the algorithms."""

    order: Literal["random", "loss"] = option(
        "random", "of the candidates; loss: smallest loss of the model alone first, ties at random"
    )
    neither: Literal["add", "keep_out", "smaller"] = option(
        "add", "line 9 where neither gains: smaller adds where adding gives the smaller loss of the two"
    )
    search: Literal["both", "forward"] = option(
        "both", "forward: no Y; a candidate is added where the loss of the average allows it"
    )
    tolerance: float = option(0.0, "of the forward search: by what share the loss may rise", low=0, high=1)
    stop: bool = option(
        False, "end a search with the first candidate that is not added, in place of filling the budget"
    )

    def __post_init__(self) -> None:
        if self.search == "forward" and self.neither != "add":
            raise UserError(f"--options.neither is {self.neither}; a forward search has no Y: allowed is add")
        if self.search != "forward" and self.tolerance:
            raise UserError(f"--options.tolerance is {self.tolerance:g}; but for a forward search allowed is 0")

    @property
    def decides_as_paper(self) -> bool:
        """Whether lines 2 to 15 are the paper's, whatever the order."""
        return (self.neither, self.search, self.stop) == ("add", "both", False)
