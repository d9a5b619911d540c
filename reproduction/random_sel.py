"""DPFL's published `random_sel`: `--method reproduction/random_sel.py`.

Each client searches among a random half of the others, and a random 70 % of those that it finds are
its Omega. Everything else is DPFL. The paper's random graph is not in the published code, so this
may be what it names so.
"""

import dataclasses
from typing import Any

from dpfl_mpi.methods import dpfl

SEARCHED, STAYS = 0.5, 0.7  # shares of the others, and of those found
FIRST, SECOND = 1_000_000, 1_000_001  # of the two draws, beyond every round's number

METHOD = dataclasses.replace(dpfl.METHOD, title="DPFL")
round = dpfl.round


def init(fed: Any) -> dict:
    w = fed.local_opt(fed.common_row(), epochs=fed.run.tau_init)
    fed.evaluate(w)
    with fed.clock("graph"):
        everyone = fed.candidates()
        half = drawn(fed, everyone, SEARCHED, FIRST)
        found = fed.bggc(w, dataclasses.replace(everyone, reach=half))
        omega = drawn(fed, found, STAYS, SECOND)
    fed.narrow(omega)
    w = fed.average(w, omega)
    fed.evaluate(w, "mixed")
    return {"client": {"w": w}, "shared": {"omega": omega, "chosen": omega}}


def drawn(fed: Any, lists: Any, share: float, number: int) -> Any:
    """Return the graph of a random share of each client's list."""
    of_client = [(k, lists.of(k)) for k in fed.ids]
    most = [int(share * len(others) + 0.5) for _, others in of_client]
    kept = zip(of_client, most, strict=True)
    return fed.collect([fed.shuffle(k, others, number=number, first=n) for (k, others), n in kept])
