"""The data sets, one file each (docs/extend-data.md). Besides `load` or `read` a file may hold

    TITLE         in tables; by default the file's name
    AUTHORS_CODE  defaults of --preset authors_code, where the authors' published code differs
    DOWNLOAD      (url, "md5:...", bytes): where `prepare` gets it without `--source`
    WEIGHTS       "train": p_k is proportional to the training samples; by default, "pool", to
                  training and validation samples
    OWN_DATA      True where the name says nothing of the content, so a Run's key has the content

No module imports torch. Files whose name starts with _ are helpers.
"""

from collections.abc import Mapping
from inspect import signature
from types import ModuleType
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import allowed, field_types, fields, fits, options_of

# Defaults for data of one's own: minutes on a laptop. Data that name their clients are dealt by
# them; the model depends on the samples (`settings.files.own_defaults`).
SMALL = {
    "partition": "pathological",
    "classes_per_client": 2,
    "dirichlet_alpha": 0.5,
    "min_per_class": 2,
    "min_samples": 5,
    "clients": 20,
    "model": "mlp",
    "rounds": 20,
    "tau_init": 10,
    "tau_train": 5,
    "budget": "0.25N",
    "lr": 0.01,
    "weight_decay": 1e-3,
    "lr_decay": 1.0,
    "batch_size": 16,
    "augment": False,
}


def load(name: str, module: ModuleType) -> ModuleType:
    """Return a data set's file with its defaults; a `UserError` names what breaks the contract."""
    what = f"the data set {name}"
    loads = callable(getattr(module, "load", None))
    if not loads and not callable(getattr(module, "read", None)):
        must = "one of them must return the data"
        raise UserError(f"{what} has neither load() nor read(source); {must}")
    for a in signature(module.load).parameters.values() if loads else ():
        if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD):
            raise UserError(f"load of {what} wants {a.name}; allowed is load(), or read(source)")
    if not isinstance(title := getattr(module, "TITLE", ""), str):
        raise UserError(f"TITLE of {what} is {title!r}; it must be a text")
    if (weights := getattr(module, "WEIGHTS", "pool")) not in ("pool", "train"):
        raise UserError(f"WEIGHTS of {what} is {weights!r}; allowed are 'pool' and 'train'")
    for settings in ("AUTHORS_CODE", "PAPER"):
        check_settings(f"{settings} of {what}", getattr(module, settings, {}))
    paper = getattr(module, "PAPER", {})
    found: dict[str, Any] = {
        "SAID": {*paper},  # by the file itself: what follows from prepared data does not replace it
        "SOURCE": "what its read takes",
        "NO_DOWNLOAD": "name it with --source PATH",
        "DATA": f"data/{name}.h5" if hasattr(module, "read") else None,
        "TITLE": name,
    }
    for field in found:
        if getattr(module, field, None) is not None:
            found[field] = getattr(module, field)
    vars(module).update(found, PAPER={**SMALL, **paper}, Options=options_of(what, module))
    return module


def check_settings(what: str, settings: Any) -> None:
    if not isinstance(settings, Mapping):
        kind = type(settings).__name__
        raise UserError(f"{what} is a {kind}; it must be a dict of settings")
    if unknown := sorted(set(settings) - set(SMALL)):
        raise UserError(f"{what} has {unknown[0]}; allowed are {', '.join(SMALL)}")
    types = field_types(Run)
    for f in fields(Run):
        if f.name not in settings:
            continue
        value, field_type = settings[f.name], types[f.name]
        if value is None or not fits(value, field_type, f.metadata):
            raise UserError(f"{what} has {f.name} {value!r}; allowed {allowed(f, field_type)}")
