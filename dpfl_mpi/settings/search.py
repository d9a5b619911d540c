"""`Rule`: in what a greedy search may differ from Algorithms 2 and 3.

A method whose `Options` are this class, or extend it, searches by it.
"""

from dataclasses import dataclass
from typing import Literal

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings.run import option


@dataclass(frozen=True)
class Rule:
    """The defaults are the algorithms."""

    # fmt: off
    order: Literal["random", "loss"] = option(
        "random", "order of the candidates; loss: smallest loss of the model alone first")
    neither: Literal["add", "keep_out", "smaller"] = option(
        "add", "line 9, if neither gains; smaller: add if adding gives the smaller loss")
    search: Literal["both", "forward"] = option(
        "both", "forward: no Y; add a candidate if the loss of the average allows it")
    tolerance: float = option(
        0.0, "forward search: share by which the loss may rise", low=0, high=1)
    stop: bool = option(False, "end a search at the first candidate that is not added")
    # fmt: on

    def __post_init__(self) -> None:
        if self.search == "forward" and self.neither != "add":
            why = "a forward search has no Y: allowed is add"
            raise UserError(f"--options.neither is {self.neither}; {why}")
        if self.search != "forward" and self.tolerance:
            why = "only a forward search has one: allowed is 0"
            raise UserError(f"--options.tolerance is {self.tolerance:g}; {why}")

    @property
    def decides_as_paper(self) -> bool:
        """Whether lines 2 to 15 are the paper's, whatever the order."""
        return (self.neither, self.search, self.stop) == ("add", "both", False)
