"""Settings that are written as a short text: budgets, who reaches whom, times."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings.files import is_file

FILE_NAME = "the name of a file, in UTF-8, of at most 200 bytes"


def file_name(text: str) -> bool:
    """Return whether a text can name a file that is written: no folder, and room for the endings of what lies beside it."""
    try:
        name = Path(text).name
        return (
            0 < len(name.encode()) <= 200
            and "\0" not in text
            and name != ".."
            and len(text.encode()) < 4096
            and not Path(text).is_dir()
        )
    except (OSError, ValueError):
        return False


def every(text: str) -> tuple[str, float] | None:
    """Return `--checkpoint_every` as ("rounds", n), ("seconds", s) or ("never", 0); None where it is none of these."""
    if match := re.fullmatch(r"(\d{1,9}\.?\d{0,9})\s*(s|min|h)", text.strip()):
        return "seconds", float(match.group(1)) * {"s": 1, "min": 60, "h": 3600}[match.group(2)]
    if re.fullmatch(r"[1-9]\d{0,17}", text.strip()):
        return "rounds", int(text)
    return ("never", 0) if text.strip() == "never" else None


def of_clients(share: float, clients: int) -> int:
    """Return how many clients a share of them is, rounded down: exact, where 0.29 * 100 in floats is below 29."""
    return math.floor(Fraction(str(share)) * clients)


def nearest(share: float, count: int) -> int:
    """Return a share of a count as the nearest whole number, halves up: exact, where 0.29 * 50 in floats is below 14.5."""
    return math.floor(Fraction(str(share)) * count + Fraction(1, 2))


def lost_half(share: float, counts: Iterable[int]) -> bool:
    """Return whether floats round this share of some count to another number than `nearest`."""
    return share < 1 and any(nearest(share, n) != int(share * n + 0.5) for n in counts)


def budget_name(budget: Any, clients: int, counts_self: bool) -> int | str:
    """Return a budget as a whole number, or "inf" where it does not bind.

    A share such as "0.1N" is rounded to the nearest whole number (halves up) and is at least 1. Budgets that differ between clients
    stay as they are: "uniform:2:20", or the path of a file.
    """
    text = str(budget).strip()
    if text in ("inf", ".inf", "Infinity"):
        return "inf"
    if drawn := re.fullmatch(r"uniform:(\d{1,9}):(\d{1,9})", text):
        low, high = map(int, drawn.groups())
        if 1 <= low <= high:
            return f"uniform:{low}:{high}"
    value = 0
    if share := re.fullmatch(r"(\d{0,9}\.?\d{1,18})\s*\*?\s*N", text):
        part = Fraction(share.group(1))  # exact: 0.69 * 150 in floats is below 103.5
        value = max(1, math.floor(part * clients + Fraction(1, 2))) if part > 0 else 0
    elif re.fullmatch(r"\d{1,18}", text):
        value = int(text)
    elif is_file(text):
        return text
    if value < 1:
        raise UserError(
            f"--budget is {budget}; allowed is a whole number of at least 1, a share of the clients such as 0.1N, or inf; "
            "for a budget per client uniform:LOW:HIGH, or a file"
        )
    return "inf" if value - counts_self >= clients - 1 and value > 1 else value


def check_reach(reach: str | None, clients: int) -> None:
    """Raise `UserError` where --reach is neither a known kind with a good number nor a file."""
    if reach is None or is_file(reach):
        return
    kind, _, value = reach.partition(":")
    if kind == "geometric" and re.fullmatch(r"\d{0,9}\.?\d{1,18}", value) and float(value) > 0:
        return
    if kind == "sites" and re.fullmatch(r"\d{1,18}", value) and 1 <= int(value) <= clients:
        return
    if (
        kind == "groups"
        and re.fullmatch(r"\d{1,18}([,;]\d{1,18})*", value)
        and max(map(int, re.split("[,;]", value))) < clients
    ):
        return
    raise UserError(
        f"--reach is {reach}; allowed are geometric:R with R above 0, sites:S with S from 1 to {clients}, groups of clients 0 to {clients - 1} "
        "such as groups:0,1;2,3, or a file of lines 'receiver sender'"
    )
