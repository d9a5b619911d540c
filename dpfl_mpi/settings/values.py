"""Settings that are written as a short text, such as `--drift 0.5:10` or `--budget 0.1N`.

Resolving a Run calls `parse`, which turns such a text into a `Text`: a frozen value whose parts are
attributes. If the text names a file, `add_file` then adds the table in that file. `SETTINGS` lists
the forms in which each setting may be written, `FIELDS` what may stand for a part of a form, and
`SHAPES` what the file of a setting may hold. A mistake is a `UserError` that says what is allowed.
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import Unreadable, read_text, refused_as

# patterns of words
SHARE, WHOLE = r"[0-9]{0,9}\.?[0-9]{1,18}", "[0-9]{1,18}"
POSITIVE = "0*[1-9][0-9]{0,17}"
NUMBER = r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?|inf|nan"
SMALLEST_POSITIVE = 1e-18  # smallest value accepted where a setting must be positive
PARTITIONS = ("pathological", "dirichlet", "natural", "fedrep", "motivation")
ATTACKS = ("label_flip", "sign_flip", "noise", "scale", "stale", "backdoor")
LIES = ("sign_flip", "noise", "scale", "stale")  # attacks that falsify the models sent
HONEST = tuple(kind for kind in ATTACKS if kind not in LIES)
NETWORKS = ("phones", "hospitals", "campus")
SECONDS = {"s": 1, "min": 60, "h": 3600}
# columns of a file of --network, each with its smallest and largest value for a client
NETWORK_COLUMNS = {"step": (1e-9, 1e3), "image": (0, 1e3)}
NETWORK_COLUMNS |= {"up": (1e-3, math.inf), "down": (1e-3, math.inf), "latency": (0, 1e3)}


def file_of(text: str) -> str:
    """Return the path of the file that a setting names, "" where it is not written as a path."""
    if text.startswith("file:"):
        return text[5:]
    return text if "/" in text or re.fullmatch(r"\.[A-Za-z]\w*", Path(text).suffix) else ""


def is_file(path: Any) -> bool:
    """Return whether a value is the path of a file that exists."""
    return isinstance(path, str) and os.path.isfile(Path(path))


def number(kind: type, text: str) -> Any:
    """Return a text in the digits 0 to 9 as an int or a float, else raise `ValueError`."""
    if not text.isascii() or "_" in text:  # `int` would take 1_0, and the digits of every script
        raise ValueError(text)
    return kind(text)


def whole(word: str) -> bool:
    """Return whether a word is a whole number that fits into an array."""
    return re.fullmatch(WHOLE, word) is not None


def nearest(share: float | str, count: int) -> int:
    """Return a share of a count, rounded to the nearest whole number, a half upwards."""
    # in exact fractions: as floats 0.29 * 50 is below 14.5
    return math.floor(Fraction(str(share)) * count + Fraction(1, 2))


def at_most(share: float | str, count: int) -> int:
    """Return a share of a count, rounded down: how many clients have a role by a share of all."""
    return math.floor(Fraction(str(share)) * count)  # as floats 0.29 * 100 is below 29


# the values ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Text:
    """A parsed setting; `str` returns its text, as it is typed and as the key of a Run has it.

    Its fields are attributes, too: those of --drift 0.5:10 are `share` and `round`.
    """

    text: str
    kind: str  # the first word of its form, such as "uniform" of uniform:{low}:{high}; or "file"
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    path: str = ""  # of the file that it names
    sha256: str = field(default="", compare=False, repr=False)  # of that file
    content: Any = field(default=None, compare=False, repr=False)  # the table in that file

    def __str__(self) -> str:
        return self.text

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("fields", ()):
            return self.fields[name]
        raise AttributeError(f"{self.text} has no {name}")

    @property
    def table(self) -> Any:
        """The table in its file, None without a file. Only the rank that read it has it."""
        if self.path and self.content is None:
            raise LookupError(f"{self.path} was not read on this rank")
        return self.content

    @property
    def seconds(self) -> float:
        """The seconds of a time such as 90s, 5min or 2h; inf where it is no time, as in never."""
        if self.kind not in SECONDS:
            return math.inf
        return float(self.fields[self.kind] * SECONDS[self.kind])

    @property
    def falsifies(self) -> bool:
        """Whether an attack falsifies the models sent, and not only the data trained on."""
        return self.kind in LIES


class Budget(Text):
    """B_c, how many models a client may average: `counts_self` says whether its own is one."""

    def resolved(self, clients: int, counts_self: bool) -> "Budget":
        """Return the budget of N clients: a share of N as a number, or inf if it limits nothing."""
        # 1 stays 1, because a method that reads no budget stores 1 for any N
        if self.kind == "fraction":
            number = max(1, nearest(self.fraction, clients))
            budget = Budget(str(number), "number", {"number": number})
            return budget.resolved(clients, counts_self)
        if self.kind != "number" or self.number == 1:
            return self
        never_binds = clients - 1 <= self.number - counts_self
        return Budget("inf", "inf") if never_binds else self

    def most(self, clients: int, counts_self: bool) -> int:
        """Return how many models the client with the largest budget may receive for an average."""
        if self.kind == "file" and "high" not in self.fields:
            raise LookupError(f"{self.path} was not read on this rank")
        largest = self.fields.get("high", self.fields.get("number", clients))
        return int(min(largest - counts_self, clients - 1))

    def of_clients(self, clients: int, counts_self: bool, seed: int) -> np.ndarray:
        """Return how many models each client may receive for an average, int64 `[N]`."""
        if self.kind == "file":
            budgets = self.table
        elif self.kind != "uniform":
            return np.full(clients, self.most(clients, counts_self))
        else:  # drawn for each client
            rng = streams.stream(seed, streams.BUDGET, 0, 0)
            budgets = rng.integers(self.low, self.high + 1, clients)
        return np.minimum(budgets - counts_self, clients - 1)


# what may be written ------------------------------------------------------------------------------
def number_or_inf(text: str, kind: str, fields: Mapping[str, int]) -> float:
    return fields.get("number", math.inf)


class Setting(NamedTuple):
    forms: str  # separated by blanks; a word in braces is one of FIELDS, FILE the path of a file
    allowed: str  # end of an error; {most} is the number of clients or rounds, {last} one less
    make: Callable[..., Any] = Text  # makes the value from the text, its kind and its fields


def groups_of(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, group.split(","))) for group in text.split(";"))


# of each field its pattern, its type, its smallest and its largest value; None stands for the
# number of clients or rounds, which `parse` is told
FIELDS: dict[str, tuple[str, Callable[[str], Any], float, float | None]] = {
    "number": (WHOLE, int, 1, math.inf),
    "low": ("[0-9]{1,9}", int, 1, math.inf),
    "high": ("[0-9]{1,9}", int, 1, math.inf),
    "fraction": (SHARE, str, SMALLEST_POSITIVE, math.inf),
    "radius": (SHARE, float, SMALLEST_POSITIVE, math.inf),
    "sites": (WHOLE, int, 1, None),
    "groups": (f"{WHOLE}(?:[,;]{WHOLE})*", groups_of, 1, None),
    "leave": (SHARE, float, SMALLEST_POSITIVE, 1),
    "join": (SHARE, float, 0, 1),
    "share": (SHARE, float, 0, 1),
    "density": (SHARE, float, SMALLEST_POSITIVE, 1),
    "names": (r"(?!none$)[^\s,=]+(?:,[^\s,=]+)*", str, 0, math.inf),
    "round": (WHOLE, int, 1, None),
    "rounds": (WHOLE, int, 1, math.inf),
}
FIELDS |= {unit: (r"[0-9]{1,9}\.?[0-9]{0,9}", float, 0, math.inf) for unit in SECONDS}
AT_LEAST_1 = "is a whole number of {} of at least 1"
# fmt: off
SETTINGS = {
    "partition": Setting(
        f"{' '.join(PARTITIONS)} FILE", f"are {', '.join(PARTITIONS)} or file:PATH"),
    "budget": Setting(
        "inf {number} {fraction}N uniform:{low}:{high} FILE",
        "is a whole number of at least 1, a share of the clients such as 0.1N, or inf; "
        "for a budget per client uniform:LOW:HIGH, or a file", Budget),
    "omega_period": Setting(
        "inf {number}", f"{AT_LEAST_1.format('rounds')}, or inf", number_or_inf),
    "candidates": Setting(
        "inf {number}", f"{AT_LEAST_1.format('clients')}, or inf", number_or_inf),
    "reach": Setting(
        "geometric:{radius} sites:{sites} groups:{groups} FILE",
        "are geometric:R with R above 0, sites:S with S from 1 to {most}, groups of clients "
        "0 to {last} such as groups:0,1;2,3, or a file of lines 'receiver sender'"),
    "available": Setting("FILE", "is a file"),
    "attack": Setting(
        " ".join(f"{kind}:{{share}}" for kind in ATTACKS), "is KIND:SHARE such as sign_flip:0.2, "
        f"KIND one of {', '.join(ATTACKS)}, a share from 0 to 1"),
    "drift": Setting(
        "{share}:{round}",
        "is SHARE:ROUND such as 0.5:10, a share from 0 to 1 and a round from 1 to {most}"),
    "network": Setting(
        f"{' '.join(NETWORKS)} FILE", f"are {', '.join(NETWORKS)}, or a file with a line per "
        f"client: {', '.join(NETWORK_COLUMNS)}"),
    "churn": Setting(
        "{leave}:{join} FILE",
        "are LEAVE:JOIN such as 0.1:0.3, the chances that a client leaves in a round, above 0, "
        "and comes back, up to 1, or a file of lines 'time client join' or '... leave'"),
    "codec": Setting(
        "none int8 topk:{density}", "are none, int8, or topk:SHARE with a share above 0 up to 1"),
    "send": Setting(
        "all layers=all layers={names}",
        "are all, layers=body, layers=head or layers=NAMES with commas"),
    "checkpoint_every": Setting(
        "never {rounds} {s}s {min}min {h}h",
        "is a number of rounds such as 3, a time such as 90s, 5min or 2h, or never"),
}
# fmt: on
PARSED = tuple(name for name in SETTINGS if name != "checkpoint_every")  # the fields of a Run


def parse(name: str, value: Any, most: int | None = None) -> Any:
    """Return the value of a setting: a `Text`, a number, or None where it changes nothing."""
    # `most` is the number of clients, or of rounds, where it is known
    setting, text = SETTINGS[name], str(value).strip()
    text = "inf" if text in (".inf", "Infinity") else text  # as YAML and JSON write it
    for form in setting.forms.removesuffix("FILE").split():
        if (fields := fields_of(form, text, most)) is not None:
            if form in ("none", "all", "layers=all") or fields.get("share") == 0:
                return None
            kind = re.findall(r"\w+", form)[0]  # its first word
            # 0.50 and 0.5 become one text, so that one setting has one key; groups have no form to
            # write them by, and checkpoint_every is in no key
            as_typed = kind == "groups" or name == "checkpoint_every"
            parts = {field: decimals(number) for field, number in fields.items()}
            return setting.make(text if as_typed else form.format(**parts), kind, fields)
    path = text if name == "available" else file_of(text)
    if path and "FILE" in setting.forms:
        return setting.make(f"file:{path}" if name == "partition" else text, "file", path=path)
    words = {"most": "N" if name == "reach" else "the last", "last": "N - 1"}
    if most is not None:
        words = {"most": str(most), "last": str(most - 1)}
    raise UserError(f"--{name} is {value}; allowed {setting.allowed.format(**words)}")


def decimals(value: Any) -> str:
    """Return the text of a value; of a small number 0.00005, not 5e-05, which no form takes."""
    text = str(value)
    small = isinstance(value, float) and "e" in text
    return np.format_float_positional(value) if small else text


def fields_of(form: str, text: str, most: int | None) -> dict[str, Any] | None:
    """Return the fields of a text, None if it has another form or a field is out of its limits."""
    # each {field} of the form becomes a named group with the pattern of the field
    pattern = re.sub(r"\{(\w+)\}", lambda found: f"(?P<{found[1]}>{FIELDS[found[1]][0]})", form)
    found = re.fullmatch(pattern, text)
    if found is None:
        return None
    fields = {}
    for name, word in found.groupdict().items():
        _, convert, low, high = FIELDS[name]
        fields[name] = value = convert(word)
        if name == "names":
            continue
        # of groups of clients, one more than the last client's number
        compared = 1 + max(map(max, value)) if name == "groups" else float(value)
        if high is None:
            high = math.inf if most is None else most
        if not low <= compared <= high:
            return None
    return fields if fields.get("low", 0) <= fields.get("high", math.inf) else None


def written(value: Any) -> Any:
    """Return a value as a file of settings writes it: text, number, switch, None, or a dict."""
    if isinstance(value, Budget) and value.kind == "number":
        return value.number
    if isinstance(value, Text):
        return value.text
    return "inf" if value == math.inf else value


# what a file may hold -----------------------------------------------------------------------------
# Each check returns "" or the end of an error sentence. A table has a row per line of the file.
def check_reach(edges: np.ndarray, clients: int, rounds: int) -> str:
    if not len(edges):
        return "; it has no line, allowed is at least one"
    high = edges.max(initial=0)
    return f"; it has client {high:g}, allowed are 0 to {clients - 1}" if high >= clients else ""


def check_available(table: np.ndarray, clients: int, rounds: int) -> str:
    return without_clients(np.flatnonzero(table[:rounds].sum(1) == 0) + 1)


def check_churn(events: np.ndarray, clients: int, rounds: int) -> str:
    if not len(events):
        return "; it has no line, allowed is at least one"
    time, client, joins = events.T  # joins is 1 where the client joins, 0 where it leaves
    if (client >= clients).any():
        return f"; it has client {client.max():g}, allowed are 0 to {clients - 1}"
    if (np.diff(time) < 0).any():
        return "; its lines must be in the order of time"
    for k in np.unique(client):
        events_of_k = joins[client == k]
        if (events_of_k[1:] == events_of_k[:-1]).any():
            return f"; client {k:g} must join and leave in turn"
    # how many clients are present before the first event, and after each: a client whose first
    # event is that it joins is absent before
    _, first = np.unique(client, return_index=True)
    present = clients - joins[first].sum()
    present += np.concatenate([[0], np.cumsum(2 * joins - 1)])
    # the first round at or after each of these events; it must come before the next one
    start, end = np.concatenate([[0], time]), np.concatenate([time, [math.inf]])
    t = np.ceil(start)
    return without_clients(t[(present == 0) & (t < end) & (t <= rounds)])


def without_clients(rounds: np.ndarray) -> str:
    """Return the end of the error sentence for rounds without a client; "" if there is none."""
    return f"; round {rounds[0]:g} has no client, allowed is at least one" if len(rounds) else ""


def check_network(table: np.ndarray, clients: int, rounds: int) -> str:
    for column, (name, (low, high)) in zip(table.T, NETWORK_COLUMNS.items(), strict=True):
        for k in np.flatnonzero(~((low <= column) & (column <= high))):
            allowed = f"allowed is a number from {low:g} to {high:g}"
            return f"; the value of {name!r} for client {k} is {column[k]:g}, {allowed}"
    return ""


class Shape(NamedTuple):
    line: str  # the pattern of a line
    lines: str  # how many: "N" one per client, "T" one per round or more, or "" for any number
    what: str  # the same in words, for errors
    check: Callable[[np.ndarray, int, int], str] = lambda table, clients, rounds: ""


TWO_CLIENTS = "lines of two client numbers from 0 to {last}: receiver sender"
ZEROS_AND_ONES = "at least {T} lines (rounds) of {N} (clients) zeros or ones"
EVENTS = "lines of a time, a client, and join or leave"
FIVE_NUMBERS = f"{{N}} lines (clients) of 5 numbers: {', '.join(NETWORK_COLUMNS)}"
SHAPES = {
    "budget": Shape(f"inf|{POSITIVE}", "N", "{N} numbers: whole and at least 1, or inf"),
    "reach": Shape(f"{WHOLE} {WHOLE}", "", TWO_CLIENTS, check_reach),
    "available": Shape("[01]( [01])*", "T", ZEROS_AND_ONES, check_available),
    "churn": Shape(f"{SHARE} {WHOLE} (join|leave)", "", EVENTS, check_churn),
    "network": Shape(f"({NUMBER})( ({NUMBER})){{4}}", "N", FIVE_NUMBERS, check_network),
}


def add_file(name: str, value: Any, clients: int, rounds: int) -> Any:
    """Return a value with the table that its file holds."""
    # `rounds` is -1 for a file of --churn whose times are seconds: these fall into no known round
    shape = SHAPES[name]
    what = f"which must hold {shape.what.format(N=clients, T=rounds, last=clients - 1)}"
    if not is_file(value.path):
        raise UserError(f"--{name} is {value.path}; there is no such file, {what}")
    unreadable = f"--{name} is {value.path}, which is not a readable text file"
    with refused_as(unreadable, (Unreadable,)):
        text = read_text(Path(value.path)).removeprefix("\ufeff")
    # the words of each line, which blanks or commas separate; empty lines do not count
    lines = [line.replace(",", " ").split() for line in text.splitlines()]
    lines = [words for words in lines if words]
    if name == "network" and lines[:1] == [list(NETWORK_COLUMNS)]:  # a head above the columns
        del lines[0]
    if name == "budget":  # numbers may stand in lines of any length
        lines = [[word] for words in lines for word in words]
    fits = all(re.fullmatch(shape.line, " ".join(words)) for words in lines)
    if name == "available":
        fits &= all(len(words) == clients for words in lines)
    fits &= {"N": len(lines) == clients, "T": len(lines) >= rounds}.get(shape.lines, True)
    if not fits:
        raise UserError(f"--{name} is {value}, {what}")
    numbers = {"join": "1", "leave": "0"}
    rows = [[numbers.get(word, word) for word in words] for words in lines]
    table = np.array(rows, np.float64) if rows else np.zeros((0, 3))
    if name == "budget":
        table = np.minimum(table[:, 0], clients + 1)  # inf becomes a whole number
    if mistake := shape.check(table, clients, rounds):
        raise UserError(f"--{name} is {value}{mistake}")
    if name in ("budget", "reach", "available"):
        table = table.astype(np.int64)
    fields = {"high": int(table.max())} if name == "budget" else {}
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return replace(value, fields=fields, content=table, sha256=sha256)
