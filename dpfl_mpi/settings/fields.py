"""Fields of a settings dataclass, such as `Run`, `Job` or the `Options` of a method.

A field has a default, a text for --help and a range; its type may list choices, as Literal["a"]
does. One whose default is `None` may be left open. The functions below read values from words,
check them, and say what is allowed as the end of an error. `schema` is the dataclass itself.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings.values import number, written
from dpfl_mpi.storage.foreign import encodable

SWITCH = {"true": True, "yes": True, "false": False, "no": False}
# types that are checked here, and how errors name them; other values are checked by `parse`
TYPE_TEXTS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def field(group: str, default: Any, text: str, **limits: Any) -> Any:
    """Return a dataclass field with the group and the help that the command line shows.

    `limits` are low and high (allowed themselves), above and below (not allowed); `valid`, a check
    of a text; `what`, the words for what is allowed; `of`, the partitions that read the field;
    `when`, another field and its values with which this one is read.
    """
    return dataclasses.field(default=default, metadata={"group": group, "help": text, **limits})


def fields(settings: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass or an instance that a user can set: not `derived` ones."""
    return [f for f in dataclasses.fields(settings) if not f.metadata.get("derived")]


def as_dict(settings: Any) -> dict[str, Any]:
    """Return what a user can set by name, as a file of settings has it."""
    return {f.name: written(getattr(settings, f.name)) for f in fields(settings)}


def changed(settings: Any) -> dict[str, Any]:
    """Return what differs from the defaults, as `as_dict` does."""
    defaults = {f.name: f.default for f in fields(settings)}
    return {name: value for name, value in as_dict(settings).items() if value != defaults[name]}


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """Return the type of every field by name, without the None of an optional field."""
    out = {}
    for name, hint in get_type_hints(schema).items():
        members = [member for member in get_args(hint) if member is not NoneType]
        is_optional = NoneType in get_args(hint) and len(members) == 1
        out[name] = members[0] if is_optional else hint
    return out


def choices(field_type: Any) -> tuple[str, ...]:
    """Return the named choices of a field's type; empty if it is no `Literal`."""
    return get_args(field_type) if get_origin(field_type) is Literal else ()


def check(settings: Any, prefix: str = "", ranges: bool = True) -> None:
    """Raise `UserError` for the first field whose value has the wrong type."""
    # With `ranges`, also for a value out of its range. `prefix` comes before the name of the field.
    schema: type = type(settings)
    types = field_types(schema)
    for f in fields(settings):
        value = getattr(settings, f.name)
        field_type = types[f.name]
        if getattr(value, "ndim", 0):  # an array, which cannot be compared to a limit
            allowed_types = "numbers, texts, and paths of files of tables"
            raise UserError(f"--{prefix}{f.name} is an array; allowed are {allowed_types}")
        is_open = value is None and f.default is None
        if not is_open and not fits(value, field_type, f.metadata if ranges else {}):
            text = f"[{', '.join(map(str, value))}]" if isinstance(value, list) else repr(value)
            raise UserError(f"--{prefix}{f.name} is {text}; allowed {allowed(f, field_type)}")


def read(schema: type, name: str, value: Any, prefix: str = "") -> Any:
    """Return the value that a word of a command line or a file stands for, else a `UserError`.

    A whole number may stand for a number or a text: 1 and 1.0 are one setting, and so one Run.
    Values of other types are returned as they are.
    """
    field_type, f = field_types(schema)[name], next(f for f in fields(schema) if f.name == name)
    if value == "" != f.default:
        raise UserError(f"--{prefix}{name} is empty; leave it out, or give it a value")
    if field_type in (float, str) and type(value) is int and abs(value) < 2**63:
        return field_type(value)
    if isinstance(value, str) and field_type in (int, float, bool):
        try:
            if field_type is bool:
                return SWITCH[value.lower()]
            return number(field_type, value)
        except (KeyError, ValueError):
            what = allowed(f, field_type)
            raise UserError(f"--{prefix}{name} is {value}; allowed {what}") from None
    return value


def fits(value: Any, field_type: Any, limits: Any) -> bool:
    """Return whether a value is of a field's type and in its range."""
    if choices(field_type):
        return value in choices(field_type)
    if field_type not in TYPE_TEXTS:
        return True
    if field_type is bool:
        return isinstance(value, bool)
    if field_type is str:
        stored = isinstance(value, str) and "\0" not in value and encodable(value)
        return stored and ("valid" not in limits or bool(limits["valid"](value)))
    number_types = int if field_type is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, number_types):
        return False
    if not abs(value) < 2**63:  # too large for an array of int64, or nan
        return False
    closed = limits.get("low", -math.inf) <= value <= limits.get("high", math.inf)
    return closed and limits.get("above", -math.inf) < value < limits.get("below", math.inf)


def allowed(f: dataclasses.Field[Any], field_type: Any) -> str:
    """Return what a field takes: "are paper, authors_code" or "is a whole number of at least 1"."""
    if choices(field_type):
        return f"are {', '.join(choices(field_type))}"
    limits = f.metadata
    what = limits.get("what", TYPE_TEXTS.get(field_type, "a text"))
    if "low" in limits and "high" in limits:
        return f"is {what} from {limits['low']} to {limits['high']}"
    words = {"low": "of at least", "above": "above", "high": "at most", "below": "below"}
    ends = [f"{word} {limits[end]}" for end, word in words.items() if end in limits]
    return f"is {what} {' and '.join(ends)}".rstrip()


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a method, model or data set that has none."""


def options_of(whose: str, module: Any) -> type:
    """Return the dataclass `Options` of a data set, method or model; flags can set its fields."""
    options: Any = getattr(module, "Options", NoOptions)
    if isinstance(options, type) and dataclasses.is_dataclass(options):
        known = dataclasses.fields(options)
        if all(f.metadata and type(f.default) in (bool, int, float, str) for f in known):
            return options
    what = "with true or false, a number or a text as the default"
    what = f"its fields are option(default, text), {what}"
    raise UserError(f"Options of {whose} must be a dataclass; {what}")


def options_given(
    prefix: str, whose: str, schema: type, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return all options of a method or a model by name, checked, with defaults filled in."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        what = f"names and values, as --{prefix}NAME VALUE"
        raise UserError(f"--{prefix[:-1]} is {given}; allowed are {what}")
    types = field_types(schema)
    for name in given:
        if name not in types:
            known = f"its options: {', '.join(types) or 'none'}"
            raise UserError(f"--{prefix}{name}: {whose} has no such option; {known}")
    options = schema(**{name: read(schema, name, value, prefix) for name, value in given.items()})
    check(options, prefix)
    return {name: read(schema, name, value) for name, value in dataclasses.asdict(options).items()}


def to_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return the command line that sets these fields of Run and Job; what is None is left out."""
    out = []
    for name, value in settings.items():
        if name in ("options", "model_options"):
            out += [f"--{name}.{option}={given}" for option, given in (value or {}).items()]
        elif isinstance(value, bool):
            out.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            out.append(f"--{name}={value}")
    return out
