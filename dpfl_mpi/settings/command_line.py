"""The command line: one flag per field of `Run` and `Job`. `given` is what it says, by name; what it leaves open is not in there."""

import argparse
import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import KINDS, admit, find, names, short
from dpfl_mpi.settings.fields import allowed, check, choices, fields, read, types
from dpfl_mpi.settings.job import Job
from dpfl_mpi.settings.run import Run
from dpfl_mpi.settings.values import number
from dpfl_mpi.storage.foreign import SMALL, UNREADABLE, read_text

# what the help shows for a value, by type or by name
PLACEHOLDERS = {int: "N", float: "X", "budget": "B", "omega_period": "P"}
SCHEMA = {f.name: kind for kind in (Run, Job) for f in fields(kind)}


class Help(argparse.HelpFormatter):
    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.dest}" if "[no]" not in str(action.help) else f"--{action.dest}"
        return f"{action.option_strings[0]} {action.metavar}" if action.metavar else ", ".join(action.option_strings)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, with the name of the flag first."""

    def __init__(self, **how: Any):
        super().__init__(
            formatter_class=partial(Help, max_help_position=29), allow_abbrev=False, conflict_handler="resolve", **how
        )
        for kind in (int, float):
            self.register("type", kind, partial(number, kind))

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


class Config(argparse.Action):
    """--config FILE: its settings stand where the flag stands, so flags after it win."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        held, lines = in_file(Path(values))
        vars(namespace).update(held)
        for of, options in ((of, o) for of, o in held.items() if isinstance(o, Mapping)):
            for name in options:
                vars(namespace).pop(f"{of}.{name}", None)  # it stands before
        namespace.config = (namespace.config or {}) | {name: (held[name], lines[name]) for name in held}


@contextlib.contextmanager
def naming_lines(said: Mapping[str, Any]) -> Iterator[None]:
    """Let a `UserError` inside begin with the file and the line of the setting that it is about, where --config set that."""
    try:
        yield
    except UserError as error:
        flag = re.match(r"--(\w*)", str(error))
        if not (where := (said.get("config") or {}).get(flag and flag[1])):
            raise
        raise UserError(f"--config is {where}: {error}") from None


def in_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a YAML file as texts, and its path and their lines, by name."""
    import yaml

    # a few lines of anchors fill all memory; a tag says what only the flag knows
    odd = yaml.AnchorToken | yaml.AliasToken | yaml.TagToken
    try:
        text = read_text(path, SMALL)
        if any(isinstance(token, odd) for token in yaml.scan(text, yaml.SafeLoader)):
            raise UserError("it has anchors (& or *) or tags (!); write the settings out")
        loader = yaml.SafeLoader(text)
        kinds = loader.yaml_implicit_resolvers.items()  # as YAML 1.1: 010 is 8, 1:30 is 90
        texts = {c: [k for k in of if k[0].endswith((":null", ":merge"))] for c, of in kinds}
        loader.yaml_implicit_resolvers = texts
        held = loader.get_single_data() or {}
    except (UserError, yaml.YAMLError, *UNREADABLE) as error:
        what = str(error) if isinstance(error, UserError) else f"it is not YAML ({' '.join(str(error).split())[:200]})"
        raise UserError(f"--config is {path}: {what}") from None
    if not isinstance(held, Mapping):
        raise UserError(f"--config is {path}: it must hold lines NAME: VALUE")
    nodes = [yaml.compose(text, yaml.SafeLoader)] if held else []
    lines = {name: str(path) for name in held}
    for node in nodes:  # the settings, and mappings among their values
        places: dict[str, str] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            where = f"{path}, line {key.start_mark.line + 1}"
            if before := places.get(key.value):
                raise UserError(f"--config is {where}: {key.value} stands in {before.rpartition(', ')[2]} already")
            places[key.value] = where
            nodes.append(value)
        lines = lines if node is not nodes[0] else lines | places
    for name in held:
        if name not in SCHEMA:
            where = lines.get(str(name), str(path))
            raise unknown(str(name), f"--config is {where}: there is no setting {name}", "")
    return dict(held), lines


def unknown(name: str, text: str, before: str = "--") -> UserError:
    """Return the error of a setting that does not exist, with the one that may be meant, by its name or its help, `before` its name."""
    close = difflib.get_close_matches(name.replace("-", "_"), [*SCHEMA, "config", "print_config"], 1)
    words = re.escape(re.sub("[-_]", " ", name))
    told = {f.name: f.metadata["help"] for kind in (Run, Job) for f in fields(kind)} if len(name) > 3 else {}
    close += [n for n, text in told.items() if re.match(rf"{words}\b", text, re.I)]
    lists = "--help lists all flags" if before else "`python -m dpfl_mpi --help` lists all"
    return UserError(f"{text}; " + (f"did you mean {before}{close[0]}?" if close else lists))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run to a parser, in the groups that their metadata name."""
    words = "YAML file with these settings; flags after it win"
    parser.add_argument("--config", action=Config, metavar="FILE", help=words)
    groups: dict[str, Any] = {}
    for f, kind in ((f, types(settings)[f.name]) for settings in (Run, Job) for f in fields(settings)):
        title = f.metadata["group"]
        group = groups.setdefault(title, parser.add_argument_group(title))
        text = f.metadata["help"].format(names=", ".join(names(f.name)) if f.name in KINDS else "")
        if f.default is not None:
            text += f" [{('yes' if f.default else 'no') if kind is bool else f.default}]"
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if kind is not bool:
            how = {"metavar": "|".join(choices(kind)) or PLACEHOLDERS.get(f.name) or PLACEHOLDERS.get(kind, "NAME")}
        group.add_argument(f"--{f.name}", help=text.replace("%", "%%"), default=argparse.SUPPRESS, **how)


def parser() -> Parser:
    out = Parser(
        prog="python -m dpfl_mpi",
        usage="mpirun -n RANKS python -m dpfl_mpi [--config FILE] [--SETTING VALUE ...]",
        description="Train N simulated clients that each pick their own collaborators, on all ranks of mpirun or srun.",
        epilog="Where no default is shown it is the paper's value for the data set; --print_config shows the values that a run would use. "
        "`python -m dpfl_mpi.testing FILE` checks code of your own.",
    )
    out.add_argument("--print_config", action="store_true", help="print the settings of the run and exit")
    add_flags(out)
    return out


def add_options(parser: argparse.ArgumentParser, said: Mapping[str, Any]) -> None:
    """Add the options of the method and the model that a command line names to what the help shows."""
    for kind, field in (("method", "options"), ("model", "model_options")):
        if name := said.get(kind):
            admit(kind, name)
            schema = find(kind, name).options if kind == "method" else find(kind, name).Options
            known = fields(schema)
            group = parser.add_argument_group(f"options of the {kind} {short(name)}", None if known else "none")
            for f in known:
                limits = allowed(f, types(schema)[f.name]).removeprefix("is ").removeprefix("are ")
                text = f"{f.metadata['help']}: {limits} [{f.default}]".replace("%", "%%")
                group.add_argument(f"--{field}.{f.name}", metavar="X", help=text)


def given(arguments: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return what a command line says, by name: settings by their type, other flags of the parser as they are; a mistake is a `UserError`."""
    if {"-h", "--help"} & {*arguments}:
        add_options(parser, vars(parser.parse_known_args([w for w in arguments if w not in ("-h", "--help")])[0]))
    else:
        named = (word.partition("=")[0] for word in arguments if re.match(r"--(model_)?options\.", word))
        for flag in dict.fromkeys(named):
            parser.add_argument(flag, dest=flag[2:], default=argparse.SUPPRESS)
    known, odd = parser.parse_known_args(arguments)
    if odd:
        flag = odd[0].partition("=")[0].removeprefix("--").removeprefix("no-")
        raise unknown(flag, f"unrecognized arguments: {' '.join(odd)}")
    said: dict[str, Any] = vars(known)
    for flag in [flag for flag in said if "." in flag]:
        field, _, option = flag.partition(".")
        value, held = said.pop(flag), said.get(field) or {}
        said[field] = {**held, option: value} if isinstance(held, Mapping) else held
    of_files = (said.get("config") or {}).items()  # flags that come later win
    said["config"] = {name: where for name, (value, where) in of_files if said[name] is value}
    with naming_lines(said):
        return {n: read(SCHEMA[n], n, v) if n in SCHEMA else v for n, v in said.items()}


def run_and_job(said: Mapping[str, Any]) -> tuple[Run, Job]:
    """Return the Run and the Job of settings by name; the Run is checked where it is resolved, the Job here."""
    run, job = ({n: v for n, v in said.items() if SCHEMA.get(n) is kind} for kind in (Run, Job))
    check(out := Job(**job))
    return Run(**run), out
