"""The command line: one flag per field of `Run` and `Job`.

`given` reads the words of a command line, and with --config a YAML file of the same settings;
`run_and_job` makes the Run and the Job of what it returns. Other commands use `Parser`, too.
"""

import argparse
import contextlib
import difflib
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import KINDS, admit, find, shipped, short
from dpfl_mpi.settings.fields import allowed, check, choices, field_types, fields, read
from dpfl_mpi.settings.job import Job
from dpfl_mpi.settings.run import Run
from dpfl_mpi.settings.values import number
from dpfl_mpi.storage.foreign import UNREADABLE, read_text, refused_as
from dpfl_mpi.version import VERSION

# what --help shows in place of a value, by the type or the name of a field
PLACEHOLDERS = {int: "N", float: "X", "budget": "B", "omega_period": "P", "candidates": "M"}
PLACEHOLDERS |= dict.fromkeys(("data", "graphs", "available", "out", "callback"), "FILE")
PLACEHOLDERS |= {Any: "VALUE", dict[str, Any]: "...", "results": "FOLDER", "log": "WHERE"}
SCHEMA = {f.name: kind for kind in (Run, Job) for f in fields(kind)}  # Run or Job, by field
HELP = ("-h", "--help")
EPILOG = (
    "Where no default is shown, the data set decides (the paper's value, if it has this data set), "
    "or nothing is set; `python -m dpfl_mpi --print_config` shows the values that a run would use. "
    "`python -m dpfl_mpi.testing FILE` checks code of your own."
)


class Help(argparse.HelpFormatter):
    """Folds the paragraphs of a help text, but leaves lists as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        return "\n\n".join(p if "    " in p else textwrap.fill(p, width) for p in parts)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, with the name of the flag first."""

    def __init__(self, **arguments: Any):
        formatter = partial(Help, max_help_position=29)
        arguments |= {"formatter_class": formatter, "conflict_handler": "resolve"}
        super().__init__(allow_abbrev=False, **arguments)
        for kind in (int, float):
            self.register("type", kind, partial(number, kind))
        self.add_argument("--version", action="version", version=f"dpfl_mpi {VERSION}")

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


class Config(argparse.Action):
    """--config FILE: its settings stand where the flag stands, so flags after it win."""

    def __call__(self, parser: Any, namespace: Any, path: Any, option_string: Any = None) -> None:
        settings, lines = settings_of_yaml(Path(path))
        vars(namespace).update(settings)
        for name, options in settings.items():
            for option in options if isinstance(options, Mapping) else ():
                vars(namespace).pop(f"{name}.{option}", None)  # a flag before --config
        # each value and its line, which errors name; see `given`
        with_lines = {name: (settings[name], lines[name]) for name in settings}
        namespace.config = (namespace.config or {}) | with_lines


@contextlib.contextmanager
def naming_lines(settings: Mapping[str, Any]) -> Iterator[None]:
    """Let a `UserError` about a setting of --config begin with the file and the line."""
    try:
        yield
    except UserError as error:
        flag = re.match(r"--(\w*)", str(error))
        where = (settings.get("config") or {}).get(flag and flag[1])
        if not where:
            raise
        raise UserError(f"--config is {where}: {error}") from None


def settings_of_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a YAML file by name, as texts, and where each one stands."""
    import yaml

    try:
        loader = yaml.SafeLoader(read_text(path))
        # words stay texts: in YAML 1.1 010 is 8 and 1:30 is 90
        loader.yaml_implicit_resolvers = {
            first: [kind for kind in kinds if kind[0].endswith(":null")]
            for first, kinds in loader.yaml_implicit_resolvers.items()
        }
        root = loader.get_single_node()
        settings = loader.construct_document(root) if root else {}
    except UserError as error:
        raise UserError(f"--config is {path}: {error}") from None
    except (yaml.YAMLError, *UNREADABLE) as error:
        what = f"it is not YAML ({' '.join(str(error).split())[:200]})"
        raise UserError(f"--config is {path}: {what}") from None
    if not isinstance(settings, Mapping):
        raise UserError(f"--config is {path}: it must hold lines NAME: VALUE")
    with refused_as(f"--config is {path}: a value holds itself", (RecursionError,)):
        lines = {name: str(path) for name in settings} | lines_of(path, root)
    for name in settings:
        if name not in SCHEMA:
            where = lines.get(str(name), str(path))
            raise unknown(str(name), f"--config is {where}: there is no setting {name}", "")
    return dict(settings), lines


def lines_of(path: Path, node: Any) -> dict[str, str]:
    """Return "FILE, line N" for each key of a YAML mapping; a key that stands twice is an error."""
    out: dict[str, str] = {}
    for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
        where = f"{path}, line {key.start_mark.line + 1}"
        if earlier := out.get(key.value):
            line = earlier.rpartition(", ")[2]
            raise UserError(f"--config is {where}: {key.value} stands in {line} already")
        out[key.value] = where
        lines_of(path, value)
    return out


def unknown(name: str, text: str, before: str = "--") -> UserError:
    """Return the error `text` of a setting that does not exist, with the one that may be meant."""
    # `before` stands before a setting's name: nothing in a file or in Python
    known = [*SCHEMA, *(("config", "print_config") if before else ())]
    close = difflib.get_close_matches(name.replace("-", "_"), {*known} - {name}, 1)
    # or its help begins with the name
    words = re.compile(re.escape(re.sub("[-_]", " ", name)) + r"\b", re.IGNORECASE)
    for f in (*fields(Run), *fields(Job)):
        if len(name) > 3 and words.match(f.metadata["help"]):
            close.append(f.name)
    lists = "--help lists all flags" if before else "`python -m dpfl_mpi --help` lists all"
    return UserError(f"{text}; " + (f"did you mean {before}{close[0]}?" if close else lists))


def add_flags(parser: argparse.ArgumentParser, hidden: Collection[str] = ()) -> None:
    """Add the flags of a run to a parser, in the groups that their metadata name.

    The help does not show those that are `hidden`.
    """
    text = "YAML file with these settings; flags after it win"
    parser.add_argument("--config", action=Config, metavar="FILE", help=text)
    groups: dict[str, Any] = {}
    for f in (*fields(Run), *fields(Job)):
        field_type = field_types(SCHEMA[f.name])[f.name]
        title = f.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        names = shipped(f.name) if f.name in KINDS else []
        text = f.metadata["help"].format(names=", ".join(names))
        if f.default is not None:
            text += f" [{('yes' if f.default else 'no') if field_type is bool else f.default}]"
        keywords: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if field_type is not bool:
            usual = PLACEHOLDERS.get(field_type, "NAME")
            keywords = {"metavar": "|".join(choices(field_type)) or PLACEHOLDERS.get(f.name, usual)}
        # a flag that is not given is not in the result: it may be set elsewhere
        shown = argparse.SUPPRESS if f.name in hidden else text.replace("%", "%%")
        keywords |= {"help": shown, "default": argparse.SUPPRESS}
        groups[title].add_argument(f"--{f.name}", **keywords)


def parser() -> Parser:
    out = Parser(
        prog="python -m dpfl_mpi",
        usage="mpirun -n RANKS python -m dpfl_mpi [--config FILE] [--SETTING VALUE ...]",
        description="Train N simulated clients on all ranks of mpirun or srun. "
        "Each client picks its own collaborators.",
        epilog=EPILOG,
    )
    text = "print the settings of the run and exit"
    out.add_argument("--print_config", action="store_true", help=text)
    add_flags(out)
    return out


def add_options(parser: argparse.ArgumentParser, settings: Mapping[str, Any]) -> None:
    """Add the options of the method and the model of a command line to what the help shows."""
    for kind, field in (("method", "options"), ("model", "model_options")):
        name = settings.get(kind)
        if not name:
            continue
        admit(kind, name)
        code = find(kind, name)
        schema = code.options if kind == "method" else code.Options
        options = fields(schema)
        title = f"options of the {kind} {short(name)}"
        group = parser.add_argument_group(title, None if options else "none")
        for f in options:
            limits = allowed(f, field_types(schema)[f.name])
            limits = limits.removeprefix("is ").removeprefix("are ")
            text = f"{f.metadata['help']}: {limits} [{f.default}]".replace("%", "%%")
            group.add_argument(f"--{field}.{f.name}", metavar="X", help=text)


def given(arguments: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the settings that a command line gives, by name, as values of their types."""
    # `config` has the line of each setting that is from a file. A mistake is a `UserError`.
    # options of methods and models become flags: all of them for the help, else those given
    if {*HELP} & {*arguments}:
        others, _ = parser.parse_known_args([word for word in arguments if word not in HELP])
        add_options(parser, vars(others))
    else:
        flags = [word.partition("=")[0] for word in arguments]
        for flag in dict.fromkeys(flags):
            if flag.startswith(("--options.", "--model_options.")):
                parser.add_argument(flag, dest=flag[2:], default=argparse.SUPPRESS)
    known, rest = parser.parse_known_args(arguments)
    if rest:
        flag = rest[0].partition("=")[0].removeprefix("--").removeprefix("no-")
        raise unknown(flag, f"unrecognized arguments: {' '.join(rest)}")
    settings: dict[str, Any] = vars(known)
    # options.NAME of a flag goes into the dict `options`
    for flag in [flag for flag in settings if "." in flag]:
        field, _, option = flag.partition(".")
        value, options = settings.pop(flag), settings.get(field) or {}
        settings[field] = {**options, option: value} if isinstance(options, Mapping) else options
    # a flag after --config has replaced the value of the file
    in_files = (settings.get("config") or {}).items()
    settings["config"] = {n: where for n, (value, where) in in_files if settings[n] is value}
    with naming_lines(settings):
        return {n: read(SCHEMA[n], n, v) if n in SCHEMA else v for n, v in settings.items()}


def run_and_job(settings: Mapping[str, Any]) -> tuple[Run, Job]:
    """Return the Run, not checked yet, and the checked Job of settings by name."""
    run = Run(**{name: value for name, value in settings.items() if SCHEMA.get(name) is Run})
    job = Job(**{name: value for name, value in settings.items() if SCHEMA.get(name) is Job})
    check(job)
    return run, job
