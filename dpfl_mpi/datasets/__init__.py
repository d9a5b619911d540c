"""The data sets, one file each, by the contract of docs/own-data.md; `data.source.check` says what is refused. Beside it a file may hold

    TITLE         as tables print it; the file's name where it is left out
    AUTHORS_CODE  defaults of --preset authors_code, where the authors' published code differs
    DOWNLOAD      (url, "md5:...", bytes): where `prepare` gets it without `--source`
    WEIGHTS       "train": p_k follows the samples left to train; otherwise those before the validation split
    OWN_DATA      True where the name says nothing about the content, so a Run is keyed by the file's content under any path

No module imports torch; Pillow and scikit-learn only inside the function that needs them. Files whose name starts with _ are helpers.
"""

from collections.abc import Mapping
from inspect import signature
from types import ModuleType
from typing import Any

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.fields import allowed, fields, fits, options_of, types

# what a Run of one's own data is where nothing else is said: a small one, minutes on a laptop, without crops and flips. Data that name
# their clients are dealt by them, all of them; the model is the one for images, vectors or tokens (`settings.files.own_defaults`)
SMALL = {
    "partition": "pathological", "classes_per_client": 2, "dirichlet_alpha": 0.5, "min_per_class": 2, "min_samples": 5, "clients": 20,
    "model": "mlp", "rounds": 20, "tau_init": 10, "tau_train": 5, "budget": "0.25N",
    "lr": 0.01, "weight_decay": 1e-3, "lr_decay": 1.0, "batch_size": 16, "augment": False,
}  # fmt: skip


def load(name: str, module: ModuleType) -> ModuleType:
    """Return a data set's file, with what it leaves out; `UserError` where it breaks the contract."""
    what = f"the data set {name}"
    if not any(callable(getattr(module, function, None)) for function in ("load", "read")):
        raise UserError(f"{what} has neither load() nor read(source); one of them must return the data")
    takes = signature(module.load).parameters.values() if callable(getattr(module, "load", None)) else ()
    if wants := [a.name for a in takes if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]:
        raise UserError(f"load of {what} wants {wants[0]}; allowed is load(), or read(source)")
    if not isinstance(title := getattr(module, "TITLE", ""), str):
        raise UserError(f"TITLE of {what} is {title!r}; it must be a text")
    kinds = types(Run)
    for name_of in ("AUTHORS_CODE", "PAPER"):
        settings = getattr(module, name_of, {})
        if not isinstance(settings, Mapping):
            raise UserError(f"{name_of} of {what} is a {type(settings).__name__}; it must be a dict of settings")
        if unknown := sorted(set(settings) - set(SMALL)):
            raise UserError(f"{name_of} of {what} has {unknown[0]}; allowed are {', '.join(SMALL)}")
        for f in (f for f in fields(Run) if f.name in settings):
            if settings[f.name] is None or not fits(settings[f.name], kinds[f.name], f.metadata):
                value = f"{f.name} {settings[f.name]!r}"
                raise UserError(f"{name_of} of {what} has {value}; allowed {allowed(f, kinds[f.name])}")
    # what the file itself says of a Run: what follows from the prepared data does not replace it
    said = {n for n, value in settings.items() if len(settings) < len(SMALL) or value != SMALL[n]}
    module.SAID = getattr(module, "SAID", said)  # type: ignore[attr-defined]
    found: dict[str, Any] = {"SOURCE": "what its read takes", "NO_DOWNLOAD": "name it with --source PATH"}
    found |= {"DATA": f"data/{name}.h5" if hasattr(module, "read") else None, "TITLE": name}
    found |= {field: held for field in found if (held := getattr(module, field, None)) is not None}
    vars(module).update(found, PAPER={**SMALL, **settings}, Options=options_of(what, module))
    return module
