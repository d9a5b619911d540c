"""The controls of an experiment that are written as a short text: a period, a drift, an attack."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from dpfl_mpi.errors import UserError

ATTACKS = ("label_flip", "sign_flip", "noise", "scale", "stale", "backdoor")
FALSE = ("sign_flip", "noise", "scale", "stale")  # of them those that falsify what is sent
SHARE = r"(\d*\.?\d+)"


def controls_of(filled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Run that are written as texts here, each in its one form: what changes nothing is the default.

    Raises:
        UserError: a text is not what it should be; the sentence says what is allowed.
    """
    return {
        "omega_period": period(filled["omega_period"]),
        "drift": drift(filled["drift"], filled["rounds"]),
        "attack": attack(filled["attack"], filled["flip_share"]),
    }


def period(value: Any) -> int | str:
    """Return --omega_period as a whole number of rounds, or "inf": never again after round 0."""
    text = str(value).strip()
    if text in ("inf", ".inf", "Infinity"):
        return "inf"
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise UserError(f"--omega_period is {value}; allowed is a whole number of rounds of at least 1, or inf")


def drift(value: str | None, rounds: int) -> str | None:
    """Return --drift in its one form, "SHARE:ROUND"; None where no client drifts."""
    if value is None:
        return None
    found = re.fullmatch(rf"{SHARE}:(\d+)", value)
    if not found or float(found[1]) > 1 or not 1 <= int(found[2]) <= rounds:
        raise UserError(
            f"--drift is {value}; allowed is SHARE:ROUND such as 0.5:10, a share from 0 to 1 and a round from 1 to {rounds}"
        )
    return f"{float(found[1])}:{int(found[2])}" if float(found[1]) > 0 else None


def attack(value: str | None, flip_share: float) -> str | None:
    """Return --attack in its one form, "KIND:SHARE"; None where no client lies."""
    if value is None:
        return None
    kind, _, share = value.partition(":")
    if kind not in ATTACKS or not re.fullmatch(SHARE, share) or float(share) > 1:
        raise UserError(
            f"--attack is {value}; allowed is KIND:SHARE such as sign_flip:0.2, KIND one of {', '.join(ATTACKS)}, a share from 0 to 1"
        )
    if float(share) == 0:
        return None
    if flip_share > 0:
        raise UserError(
            f"--attack is {value} and --flip_share is {flip_share:g}; both draw the same clients: use one of them"
        )
    return f"{kind}:{float(share)}"


def search_period(value: int | str | float) -> float:
    """Return a resolved --omega_period as a number of rounds, inf for never."""
    return math.inf if value == "inf" else float(value)


def shares_of(run: Any) -> list[float]:
    """Return the shares of the clients that a resolved Run draws: those with flipped labels, newcomers, liars, and those that drift."""
    lying, drifting = str(run.attack or ":0").partition(":")[2], str(run.drift or "0:").partition(":")[0]
    return [run.flip_share, run.newcomers, float(lying), float(drifting)]
