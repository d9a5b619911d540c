"""The steps of `Run.resolve`: what a Run leaves open is filled in, what it does not read is left at its default, and its method is asked.

Fields are dicts here, by name, as `dpfl_mpi.settings.run.Run` has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find, shipped, short
from dpfl_mpi.settings.controls import ATTACKS, FALSE, controls_of
from dpfl_mpi.settings.fields import as_dict, fields, is_read, method_options, model_options
from dpfl_mpi.settings.files import is_file, own_defaults, partition_file

PARTITIONS = ("pathological", "dirichlet", "natural", "fedrep", "motivation")
UNREAD = {"budget": 1, "tau_init": 0}  # values of fields that a method does not read; any other has its default


def filled_in(run: Any, dataset: ModuleType, method: Any) -> dict[str, Any]:
    """Return all fields of a Run, what it leaves open from its data set and its method.

    Raises:
        UserError: it names a file for data that are made, or options that its method does not have.
    """
    if run.data is not None and hasattr(dataset, "load"):
        raise UserError(
            f"--data is {run.data}; the data set {short(run.dataset)} makes its data itself, and reads no file"
        )
    filled, defaults = as_dict(run), defaults_of(run, dataset, method)
    filled |= {name: value for name, value in defaults.items() if filled[name] is None}
    filled["options"] = method_options(short(run.method), method.options, run.options, tuned=run.finetune_epochs > 0)
    return filled | {f.name: UNREAD.get(f.name, f.default) for f in fields(run) if f.name in method.unread}


def options_of_model(model: str, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a model's options, None where none are given: then its file, and torch with it, is not loaded."""
    return model_options(short(model), find("model", model), given) if given else None


def read_alone(filled: Mapping[str, Any], schema: Sequence[dataclasses.Field[Any]]) -> dict[str, Any]:
    """Return the fields, with the default that the `schema` has for each that this Run does not read: it names no different Run.

    Raises:
        UserError: there is no such partition, or a setting of the controls is out of range.
    """
    partition, out = str(filled["partition"]), dict(filled)
    if partition not in PARTITIONS and not partition.startswith("file:"):
        raise UserError(f"--partition is {partition}; allowed are {', '.join(PARTITIONS)} or file:PATH")
    kind = partition.partition(":")[0]
    out |= {f.name: f.default for f in schema if kind not in f.metadata.get("of", (kind,))}
    out |= {f.name: f.default for f in schema if "when" in f.metadata and not is_read(f, out)}
    if kind == "motivation":
        out["clients"] = 3
    if filled["flip_share"] == 0:
        out["flipped_run_ggc"] = True
    return out | controls_of(out)


def defaults_of(run: Any, dataset: ModuleType, method: Any) -> dict[str, Any]:
    """Return what the fields are that a Run leaves open."""
    out = {**dataset.PAPER, "partition_seed": run.seed, "data": dataset.DATA}
    if run.preset == "authors_code":
        out |= getattr(dataset, "AUTHORS_CODE", {})
    if getattr(dataset, "OWN_DATA", False) and is_file(run.data or out["data"]):
        least = out["min_samples"] if run.min_samples is None else run.min_samples
        dealt = run.partition or (out["partition"] if "partition" in dataset.SAID else "natural")
        found = own_defaults(str(run.data or out["data"]), dealt == "natural", least)
        out |= {name: value for name, value in found.items() if name not in dataset.SAID}
    own_alpha = run.dataset not in shipped("dataset") and "dirichlet_alpha" in dataset.SAID
    if (run.partition or out["partition"]) == "dirichlet" and not own_alpha:
        out["dirichlet_alpha"] = 0.1  # the paper's Dir(0.1); the shipped data sets name the 0.5 inside Patho(3)
    if not method.preprocesses:
        out["rounds"] = dataset.PAPER["rounds"] + 2  # preprocessing costs DPFL two rounds; the others train them
    if run.partition_file and run.clients is None:
        out["clients"] = len(partition_file(run.partition_file)["clients"])
    return out


def check_method(filled: Mapping[str, Any], method: Any) -> None:
    """Raise `UserError` where the filled-in fields of a Run ask something of its method that it does not do."""
    name = short(filled["method"])
    if filled["optimizer"] not in method.optimizers:
        raise UserError(
            f"--optimizer is {filled['optimizer']}; {name} takes steps of its own, allowed is {', '.join(method.optimizers)}"
        )
    if filled["finetune_epochs"] and not method.finetunes:
        raise UserError(
            f"--finetune_epochs is {filled['finetune_epochs']}; {name} is scored by more than its model and cannot be fine-tuned; use 0"
        )
    if str(filled["attack"]).partition(":")[0] in FALSE and not method.sends_models:
        raise UserError(
            f"--attack is {filled['attack']}; {name} sends more than models, which these lies do not falsify; allowed are "
            f"{', '.join(kind for kind in ATTACKS if kind not in FALSE)}"
        )


def facts_of_code(filled: Mapping[str, Any], code: Mapping[str, str], method: Any) -> dict[str, dict[str, Any]]:
    """Return by kind what readers of a result must know, who execute no code of it: the short name of `code` that is not shipped, and of
    the method all texts, numbers and switches of its `Method`.

    `unread` are the fields of `Run` that it does not read, `tuning` the defaults of its options that concern the tuning alone.
    """
    out: dict[str, dict[str, Any]] = {kind: {"name": short(filled[kind])} for kind in (*code, "method")}
    facts = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    tuning = {f.name: f.default for f in dataclasses.fields(method.options) if f.metadata.get("tuning")}
    out["method"] |= {n: v for n, v in facts.items() if isinstance(v, str | int)}
    out["method"] |= {"unread": sorted(method.unread), "tuning": tuning}
    return out
