"""Settings that are written as a short text, each parsed once into a frozen value; `str(value)` is the text of the flag and of the key.

`parse` reads the text alone, None where it changes nothing. `resolved` fills in what depends on the Run, and reads the file that the text names.
Both raise `UserError` with what is allowed. A text names a file only where it is written as a path: `file:PATH`, or with a slash or a suffix such as
`.txt`.
"""

import hashlib
import math
import os
import re
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import TEXT, Unreadable, read_text, refused_as

NEVER = ("inf", ".inf", "Infinity")  # as Python, YAML and JSON write it
SHARE = r"([0-9]{0,9}\.?[0-9]{1,18})"
PARTITIONS = ("pathological", "dirichlet", "natural", "fedrep", "motivation")
ATTACKS = ("label_flip", "sign_flip", "noise", "scale", "stale", "backdoor")
LIES = ("sign_flip", "noise", "scale", "stale")  # of them those that falsify what is sent
HONEST = tuple(kind for kind in ATTACKS if kind not in LIES)
NETWORKS = ("phones", "hospitals", "campus")
JOINS = ("join", "leave")  # in a file of --churn
# of a client, in a file of --network: the least that is allowed, and the most
SPEEDS = {"step": (1e-9, 1e3), "image": (0, 1e3), "up": (1e-3, math.inf), "down": (1e-3, math.inf), "latency": (0, 1e3)}


def file_of(text: str) -> str:
    """Return the path of the file that a setting names, "" where it is not written as a path."""
    if text.startswith("file:"):
        return text[5:]
    return text if "/" in text or re.fullmatch(r"\.[A-Za-z]\w*", Path(text).suffix) else ""


def is_file(path: Any) -> bool:
    """Return whether there is a file of this name; a text that can be no name, such as a long one, names none."""
    return isinstance(path, str) and os.path.isfile(Path(path))


def lines_of(flag: str, path: str, what: str = "") -> tuple[list[list[str]], str]:
    """Return the words of each line of a text file that is not empty, and its SHA-256; `what` it must hold is said where there is none."""
    if not is_file(path):
        raise UserError(f"--{flag} is {path}; there is no such file{what and f' ({what})'}")
    with refused_as(f"--{flag} is {path}, which is not a readable text file", (Unreadable,)):
        text = read_text(Path(path), TEXT).removeprefix("\ufeff")
    words = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
    return words, hashlib.sha256(text.encode()).hexdigest()


def number(kind: type, text: str) -> Any:
    """Return the number that a text in the digits 0 to 9 says, else a `ValueError`."""
    if not text.isascii() or "_" in text:  # `int` reads 1_0 as 10, and the digits of every script
        raise ValueError(text)
    return kind(text)


def whole(word: str) -> bool:
    """Return whether a word is a whole number of a size that arrays hold."""
    return word.isascii() and word.isdecimal() and len(word) <= 18


def nearest(share: float | str, count: int) -> int:
    """Return a share of a count as the nearest whole number, halves up: exact, where 0.29 * 50 in floats is below 14.5."""
    return math.floor(Fraction(str(share)) * count + Fraction(1, 2))


@dataclass(frozen=True)
class Text:
    """A setting that is written as a text."""

    text: str
    path: str = field(default="", kw_only=True)  # of the file that it names, "" where it names none
    sha256: str = field(default="", kw_only=True, compare=False, repr=False)  # of that file, once it is read

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Budget(Text):
    """B_c, how many models a client may average: one number for all, inf, drawn for each client, or a file with a number for each."""

    kind: str  # number, share, inf, uniform, file
    low: int = 0  # the number, or the least that is drawn
    high: int = 0
    each: tuple[int, ...] = field(default=(), compare=False, repr=False)  # of a file [N]

    @classmethod
    def parse(cls, value: Any) -> Self:
        text = str(value).strip()
        if text in NEVER:
            return cls("inf", "inf")
        if drawn := re.fullmatch(r"uniform:([0-9]{1,9}):([0-9]{1,9})", text):
            low, high = map(int, drawn.groups())
            if 1 <= low <= high:
                return cls(f"uniform:{low}:{high}", "uniform", low, high)
        elif share := re.fullmatch(rf"{SHARE}\s*\*?\s*N", text):
            if Fraction(share[1]) > 0:
                return cls(f"{share[1]}N", "share")
        elif re.fullmatch(r"[0-9]{1,18}", text):
            if int(text) > 0:
                return cls(str(int(text)), "number", int(text))
        elif path := file_of(text):
            return cls(text, "file", path=path)
        raise UserError(
            f"--budget is {value}; allowed is a whole number of at least 1, a share of the clients such as 0.1N, or inf; "
            "for a budget per client uniform:LOW:HIGH, or a file"
        )

    def resolved(self, clients: int, counts_self: bool) -> "Budget":
        """Return the budget of so many clients: a share as the nearest whole number, at least 1; inf where it does not bind; a file with what it holds."""
        if self.kind == "share":
            return Budget.parse(max(1, nearest(self.text[:-1], clients))).resolved(clients, counts_self)
        if self.kind == "number" and clients <= self.low - counts_self + 1 and self.low != 1:
            return Budget("inf", "inf")
        if self.kind != "file":
            return self
        lines, sha256 = lines_of("budget", self.path)
        words = [word for line in lines for word in line]
        if len(words) != clients or not all(w == "inf" or (whole(w) and int(w) >= 1) for w in words):
            raise UserError(f"--budget is {self.text}, which must hold {clients} numbers: whole and at least 1, or inf")
        return replace(self, each=tuple(clients + 1 if w == "inf" else int(w) for w in words), sha256=sha256)

    def most(self, clients: int, counts_self: bool) -> int:
        """Return the most models that any client may receive for one average."""
        most = {"number": self.low, "uniform": self.high}.get(self.kind, max(self.each, default=clients))
        return min(most - counts_self, clients - 1)

    def of_clients(self, clients: int, counts_self: bool, rng: np.random.Generator) -> np.ndarray:
        """Return how many models each client may receive for one average, int64 `[N]`; `rng` draws the budgets that are drawn."""
        if self.kind == "uniform":
            budgets = rng.integers(self.low, self.high + 1, clients)
        elif self.kind == "file":
            budgets = np.array(self.each, np.int64)
        else:
            return np.full(clients, self.most(clients, counts_self))
        return np.minimum(budgets - counts_self, clients - 1)


@dataclass(frozen=True)
class Reach(Text):
    """Whom a client can receive from: those within a distance, of its site, of its groups, or the pairs of a file."""

    kind: str  # geometric, sites, groups, file
    radius: float = 0.0
    sites: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    edges: Any = field(default=None, compare=False, repr=False)  # of a file, int64 [E, 2]: receiver, sender

    @classmethod
    def parse(cls, value: Any, clients: int | None = None) -> Self:
        text = str(value)
        kind, _, rest = text.partition(":")
        room = math.inf if clients is None else clients
        if kind == "geometric" and re.fullmatch(SHARE, rest) and float(rest) > 0:
            return cls(text, kind, radius=float(rest))
        if kind == "sites" and re.fullmatch(r"0*[1-9][0-9]{0,17}", rest) and int(rest) <= room:
            return cls(text, kind, sites=int(rest))
        if kind == "groups" and re.fullmatch(r"[0-9]{1,18}([,;][0-9]{1,18})*", rest):
            groups = tuple(tuple(map(int, group.split(","))) for group in rest.split(";"))
            if max(map(max, groups)) < room:
                return cls(text, kind, groups=groups)
        elif path := file_of(text):
            return cls(text, "file", path=path)
        most, last = ("N", "N - 1") if clients is None else (clients, clients - 1)
        raise UserError(
            f"--reach is {text}; allowed are geometric:R with R above 0, sites:S with S from 1 to {most}, groups of clients 0 to {last} "
            "such as groups:0,1;2,3, or a file of lines 'receiver sender'"
        )

    def resolved(self, clients: int) -> Self:
        lines, sha256 = lines_of("reach", self.path)
        if not all(len(words) == 2 and all(whole(w) and int(w) < clients for w in words) for words in lines):
            what = f"lines of two client numbers from 0 to {clients - 1}: receiver sender"
            raise UserError(f"--reach is {self.text}, which must hold {what}")
        return replace(self, edges=np.array(lines, np.int64).reshape(-1, 2), sha256=sha256)


@dataclass(frozen=True)
class Available(Text):
    """Who can take part in which round, by a file."""

    table: Any = field(default=None, compare=False, repr=False)  # [T or more, N] of 0 and 1

    @classmethod
    def parse(cls, value: Any) -> Self:
        return cls(str(value), path=str(value))

    def resolved(self, clients: int, rounds: int) -> Self:
        lines, sha256 = lines_of("available", self.path, "a line of 0 and 1 per round, a column per client")
        if len(lines) < rounds or any(len(line) != clients or not set(line) <= {"0", "1"} for line in lines):
            what = f"at least {rounds} lines (rounds) of {clients} (clients) zeros or ones"
            raise UserError(f"--available is {self.text}, which must hold {what}")
        table = np.array(lines, np.int64).reshape(-1, clients)
        if len(empty := np.flatnonzero(table[:rounds].sum(1) == 0)):
            raise UserError(f"--available is {self.text}; round {empty[0] + 1} has no client, allowed is at least one")
        return replace(self, table=table, sha256=sha256)


@dataclass(frozen=True)
class Churn(Text):
    """Who comes and leaves: with which chances in a round, or a file of joins and leaves by time."""

    leave: float = 0.0  # of who is there
    join: float = 0.0  # of who is not
    # of a file, float64 [E, 3]: time, client, 1 to join or 0
    events: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, value: Any) -> Self:
        text = str(value)
        found = re.fullmatch(rf"{SHARE}:{SHARE}", text)
        if found and 0 < float(found[1]) <= 1 and float(found[2]) <= 1:
            return cls(f"{float(found[1])}:{float(found[2])}", leave=float(found[1]), join=float(found[2]))
        if path := file_of(text):
            return cls(text, path=path)
        what = "LEAVE:JOIN such as 0.1:0.3, the chances that a client leaves in a round and comes back, from 0 to 1"
        raise UserError(f"--churn is {text}; allowed are {what}, or a file of lines 'time client join' or '... leave'")

    def resolved(self, clients: int, rounds: int) -> Self:
        lines, sha256 = lines_of("churn", self.path)
        events: list[tuple[float, int, bool]] = []
        last: dict[int, str] = {}
        for words in lines:
            if not (len(words) == 3 and re.fullmatch(SHARE, words[0]) and whole(words[1]) and words[2] in JOINS):
                raise UserError(f"--churn is {self.text}, which must hold lines of a time, a client, and join or leave")
            time, client, what = float(words[0]), int(words[1]), words[2]
            line = " ".join(words)
            wrong = f"--churn is {self.text}, whose line '{line}'"
            if client >= clients:
                raise UserError(f"{wrong} is of another client; allowed are clients 0 to {clients - 1}")
            if events and time < events[-1][0]:
                raise UserError(f"{wrong} is earlier than the one before; allowed is order by time")
            if last.get(client) == what:
                raise UserError(f"{wrong} says {what} twice of this client, without the other between")
            last[client] = what
            events.append((time, client, what == "join"))
        first = {client: joins for _, client, joins in reversed(events)}  # before a join it is not there
        there = clients - sum(first.values())
        changes = [(time, 1 if joins else -1) for time, _, joins in events]
        for (time, change), (next_time, _) in pairwise([(0.0, 0), *changes, (math.inf, 0)]):
            there += change
            number = math.ceil(time)
            if there == 0 and number < next_time and number <= rounds:  # -1: times are seconds
                raise UserError(f"--churn is {self.text}; round {number} has no client, allowed is at least one")
        return replace(self, events=np.array(events, np.float64).reshape(-1, 3), sha256=sha256)


@dataclass(frozen=True)
class Network(Text):
    """How fast clients compute, and their links: a named profile, or a file."""

    table: Any = field(default=None, compare=False, repr=False)  # of a file, float64 [N, 5]: SPEEDS of each client

    @classmethod
    def parse(cls, value: Any) -> Self:
        text = str(value)
        if text not in NETWORKS and not file_of(text):
            what = f"{', '.join(NETWORKS)}, or a file with a line per client: {', '.join(SPEEDS)}"
            raise UserError(f"--network is {text}; allowed are {what}")
        return cls(text, path=file_of(text))

    def resolved(self, clients: int) -> Self:
        lines, sha256 = lines_of("network", self.path)
        lines = lines[lines[:1] == [list(SPEEDS)] :]  # the names may head the columns
        try:
            table = np.array([[number(float, word) for word in line] for line in lines])
        except ValueError:
            table = np.zeros(0)
        if table.shape != (clients, len(SPEEDS)):
            what = f"{clients} lines (clients) of {len(SPEEDS)} numbers: {', '.join(SPEEDS)}"
            raise UserError(f"--network is {self.text}, which must hold {what}")
        for column, (name, (low, high)) in zip(table.T, SPEEDS.items(), strict=True):
            if len(wrong := np.flatnonzero(~((column >= low) & (column <= high)))):
                k = wrong[0]
                what = f"the {name} of client {k} is {column[k]:g}, allowed is a number from {low:g} to {high:g}"
                raise UserError(f"--network is {self.text}; {what}")
        return replace(self, table=table, sha256=sha256)


@dataclass(frozen=True)
class Codec(Text):
    """What is sent in place of a model."""

    kind: str  # int8, topk
    share: float = 0.0  # of the numbers that topk sends

    @classmethod
    def parse(cls, value: Any) -> Self | None:
        text = str(value)
        kind, _, amount = text.partition(":")
        if text in ("none", "int8"):
            return cls(text, text) if text == "int8" else None
        if kind == "topk" and re.fullmatch(SHARE, amount) and 0 < float(amount) <= 1:
            return cls(f"topk:{float(amount)}", kind, share=float(amount))
        raise UserError(f"--codec is {text}; allowed are none, int8, or topk:SHARE with a share above 0 up to 1")


@dataclass(frozen=True)
class Send(Text):
    """Which layers leave a client."""

    layers: str

    @classmethod
    def parse(cls, value: Any) -> Self | None:
        text = str(value)
        found = re.fullmatch(r"layers=([^\s,=]+(,[^\s,=]+)*)", text)
        if text in ("all", "layers=all"):
            return None
        if not found or found[1] == "none":
            raise UserError(f"--send is {text}; allowed are all, layers=body, layers=head or layers=NAMES with commas")
        return cls(text, found[1])


@dataclass(frozen=True)
class Attack(Text):
    """A share of the clients that lies, and how."""

    kind: str
    share: float

    @classmethod
    def parse(cls, value: Any) -> Self | None:
        kind, _, share = str(value).partition(":")
        if kind not in ATTACKS or not re.fullmatch(SHARE, share) or float(share) > 1:
            what = f"KIND:SHARE such as sign_flip:0.2, KIND one of {', '.join(ATTACKS)}, a share from 0 to 1"
            raise UserError(f"--attack is {value}; allowed is {what}")
        return cls(f"{kind}:{float(share)}", kind, float(share)) if float(share) > 0 else None

    @property
    def falsifies(self) -> bool:
        """Whether what is sent is false, and not only what it was trained on."""
        return self.kind in LIES


@dataclass(frozen=True)
class Drift(Text):
    """A share of the clients whose classes change in a round."""

    share: float
    round: int

    @classmethod
    def parse(cls, value: Any, rounds: int | None = None) -> Self | None:
        found = re.fullmatch(rf"{SHARE}:([0-9]{{1,18}})", str(value))
        if not found or float(found[1]) > 1 or not 1 <= int(found[2]) <= (math.inf if rounds is None else rounds):
            last = "the last" if rounds is None else rounds
            what = f"SHARE:ROUND such as 0.5:10, a share from 0 to 1 and a round from 1 to {last}"
            raise UserError(f"--drift is {value}; allowed is {what}")
        share, round = float(found[1]), int(found[2])
        return cls(f"{share}:{round}", share, round) if share > 0 else None


@dataclass(frozen=True)
class Dealing(Text):
    """How samples are dealt to clients: by a recipe of `data.recipes`, or by a file."""

    kind: str  # of PARTITIONS, or file

    @classmethod
    def parse(cls, value: Any) -> Self:
        text = str(value)
        if text in PARTITIONS:
            return cls(text, text)
        if path := file_of(text):
            return cls(f"file:{path}", "file", path=path)
        raise UserError(f"--partition is {text}; allowed are {', '.join(PARTITIONS)} or file:PATH")


@dataclass(frozen=True)
class Every(Text):
    """How often something is done: every so many rounds, every so many seconds, or never."""

    unit: str  # rounds, seconds, never
    amount: float

    @classmethod
    def parse(cls, value: Any) -> Self:
        text = str(value).strip()
        if found := re.fullmatch(r"([0-9]{1,9}\.?[0-9]{0,9})\s*(s|min|h)", text):
            return cls(text, "seconds", float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]])
        if re.fullmatch(r"[1-9][0-9]{0,17}", text):
            return cls(text, "rounds", int(text))
        if text == "never":
            return cls(text, "never", 0)
        what = "a number of rounds such as 3, a time such as 90s, 5min or 2h, or never"
        raise UserError(f"--checkpoint_every is {value!r}; allowed is {what}")


def count(flag: str, of: str, value: Any) -> float:
    """Return a setting that is a number of something, from 1 on, or inf."""
    text = str(value).strip()
    if text in NEVER:
        return math.inf
    if whole(text) and int(text) >= 1:
        return int(text)
    raise UserError(f"--{flag} is {value}; allowed is a whole number of {of} of at least 1, or inf")


# by the field of a Run
PARSED: dict[str, Any] = {"partition": Dealing.parse, "budget": Budget.parse}
PARSED |= {flag: partial(count, flag, of) for flag, of in (("omega_period", "rounds"), ("candidates", "clients"))}
PARSED |= {kind.__name__.lower(): kind.parse for kind in (Network, Churn, Codec, Send, Reach, Available, Attack, Drift)}


def written(value: Any) -> Any:
    """Return what a file of settings says of a value: a text, a number, a switch, None, or a dict of them."""
    if isinstance(value, Budget) and value.kind == "number":
        return value.low
    if isinstance(value, Text):
        return value.text
    return "inf" if value == math.inf else value
