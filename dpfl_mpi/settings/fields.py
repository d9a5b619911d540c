"""Fields of a settings dataclass. Each knows its default, help and range; one check and one sentence serve them all.

The range of a number is in the field's metadata: `low` and `high` are allowed themselves, `above` and `below` are not. Named choices are
the field's type, `Literal["a", "b"]`. A field whose default is `None` may be left open.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find, short
from dpfl_mpi.settings.values import number, written
from dpfl_mpi.storage.foreign import encodable

SWITCH = {"true": True, "yes": True, "false": False, "no": False}
# values of other types are checked where they are read
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def field(default: Any, group: str, text: str, **limits: Any) -> Any:
    """Return a dataclass field with the group and the help that the command line shows.

    `limits` are low, high, above, below; `valid`, a function that says whether a text is right; `what`, the words for what is allowed;
    `of`, the partitions that read the field; `when`, the name of another field and its values with which this one is read.
    """
    return dataclasses.field(default=default, metadata={"group": group, "help": text, **limits})


def fields(settings: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields that a user can set, of a dataclass or an instance of one: all that are not `derived`."""
    return [f for f in dataclasses.fields(settings) if not f.metadata.get("derived")]


def as_dict(settings: Any) -> dict[str, Any]:
    """Return what a user can set, by name, as a file of settings says it."""
    return {f.name: written(getattr(settings, f.name)) for f in fields(settings)}


def changed(settings: Any) -> dict[str, Any]:
    """Return those that differ from their defaults."""
    defaults = {f.name: f.default for f in fields(settings)}
    return {name: value for name, value in as_dict(settings).items() if value != defaults[name]}


@functools.cache
def types(schema: type) -> dict[str, Any]:
    """Return the type of every field by name; of an optional one the type that is not None."""
    hints = get_type_hints(schema)
    optional = {name: [t for t in get_args(hint) if t is not NoneType] for name, hint in hints.items()}
    return {n: optional[n][0] if NoneType in get_args(h) and len(optional[n]) == 1 else h for n, h in hints.items()}


def choices(kind: Any) -> tuple[str, ...]:
    """Return the named choices of a field's type, none where it has none."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def check(settings: Any, prefix: str = "", ranges: bool = True) -> None:
    """Raise `UserError` for the first field that is of another type or, with `ranges`, out of its range; `prefix` comes before its name."""
    schema: type = type(settings)
    kinds = types(schema)
    for f in fields(settings):
        value = getattr(settings, f.name)
        if getattr(value, "ndim", 0):  # which cannot be compared
            raise UserError(f"--{prefix}{f.name} is an array; allowed are numbers, texts, and paths of files of tables")
        if not (value is None and f.default is None) and not fits(value, kinds[f.name], f.metadata if ranges else {}):
            text = f"[{', '.join(map(str, value))}]" if isinstance(value, list) else repr(value)
            raise UserError(f"--{prefix}{f.name} is {text}; allowed {allowed(f, kinds[f.name])}")


def read(schema: type, name: str, value: Any, prefix: str = "") -> Any:
    """Return the value of a field from a word of the command line or what a file of settings says, else a `UserError`.

    A whole number may stand for a number or a text: 1 and 1.0 are one setting, and so one Run.
    """
    kind = types(schema)[name]
    if kind in (float, str) and type(value) is int and abs(value) < 2**63:
        return kind(value)
    if isinstance(value, str) and kind in (int, float, bool):
        try:
            return SWITCH[value.lower()] if kind is bool else number(kind, value)
        except (KeyError, ValueError):
            f = next(f for f in fields(schema) if f.name == name)
            raise UserError(f"--{prefix}{name} is {value}; allowed {allowed(f, kind)}") from None
    return value


def fits(value: Any, kind: Any, limits: Any) -> bool:
    """Return whether a value is of a field's type and in its range."""
    if choices(kind):
        return value in choices(kind)
    if kind not in KINDS:
        return True
    if kind is bool:
        return isinstance(value, bool)
    if kind is str:
        stored = isinstance(value, str) and "\0" not in value and encodable(value)
        return stored and ("valid" not in limits or bool(limits["valid"](value)))
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return False
    if not abs(value) < 2**63:  # beyond what arrays count, or any float in use; nan
        return False
    low, high = limits.get("low", -math.inf), limits.get("high", math.inf)
    return low <= value <= high and limits.get("above", -math.inf) < value < limits.get("below", math.inf)


def allowed(f: dataclasses.Field[Any], kind: Any) -> str:
    """Return what a field takes, such as "are paper, authors_code" or "is a whole number of at least 1"."""
    if choices(kind):
        return f"are {', '.join(choices(kind))}"
    m = f.metadata
    what = m.get("what", KINDS.get(kind, "a text"))
    if "low" in m and "high" in m:
        return f"is {what} from {m['low']} to {m['high']}"
    ends = (("low", "of at least"), ("above", "above"), ("high", "at most"), ("below", "below"))
    return f"is {what} {' and '.join(f'{words} {m[end]}' for end, words in ends if end in m)}".rstrip()


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a file that has none."""


def options_of(whose: str, module: Any) -> type:
    """Return the dataclass `Options` of a file of a data set, a method or a model, if flags can set all its fields."""
    options: Any = getattr(module, "Options", NoOptions)
    known = dataclasses.fields(options) if isinstance(options, type) and dataclasses.is_dataclass(options) else None
    if known is not None and all(f.metadata and type(f.default) in (bool, int, float, str) for f in known):
        return options
    what = "its fields are option(default, text), with true or false, a number or a text as the default"
    raise UserError(f"Options of {whose} must be a dataclass; {what}")


def method_options(method: str, schema: type, given: Mapping[str, Any] | None, tuned: bool) -> dict[str, Any]:
    """Return all options of a method by name, checked, the defaults filled in; those of the tuning alone as given only where the Run is `tuned`."""
    out = chosen("options.", f"the method {method}", schema, given)
    tuning = {f.name: f.default for f in dataclasses.fields(schema) if f.metadata.get("tuning")}
    return out | ({} if tuned else tuning)


def model_options(model: str, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the options of a model that differ from its defaults, checked, None where none does; without any given its file is not loaded."""
    if not given:
        return None
    schema = find("model", model).Options
    out = chosen("model_options.", f"the model {short(model)}", schema, given)
    return {f.name: out[f.name] for f in dataclasses.fields(schema) if out[f.name] != f.default} or None


def chosen(prefix: str, whose: str, schema: type, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all options of a dataclass of them by name, checked; a whole number may stand for a number, a number for a text."""
    kinds = types(schema)
    if not isinstance(given or {}, Mapping):
        raise UserError(f"--{prefix[:-1]} is {given}; allowed are names and values, as --{prefix}NAME VALUE")
    for name in (name for name in given or {} if name not in kinds):
        raise UserError(f"--{prefix}{name}: {whose} has no such option; its options: {', '.join(kinds) or 'none'}")
    options = schema(**{name: read(schema, name, value, prefix) for name, value in (given or {}).items()})
    check(options, prefix)
    return {name: read(schema, name, value) for name, value in dataclasses.asdict(options).items()}


def to_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return the command line of these fields of Run and Job, such as `changed(run) | changed(job)`; what is None is left open."""
    out = []
    for name, value in settings.items():
        if name in ("options", "model_options"):
            out += [f"--{name}.{option}={given}" for option, given in (value or {}).items()]
        elif isinstance(value, bool):
            out.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            out.append(f"--{name}={value}")
    return out
