"""The models, one file each, by the contract of docs/own-model.md. What is refused, and in which words, is in `numerics/model_check.py`.

A method `stacked()` of a module's own class is for speed alone: kernels that compute many clients' models at once (without them `Ensemble`
uses `torch.func`).
"""

import dataclasses
import inspect
from types import ModuleType
from typing import Any

from dpfl_mpi.data.source import Source
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.fields import options_of
from dpfl_mpi.streams import INIT, stream


def load(name: str, module: ModuleType) -> ModuleType:
    """Return a model's file; one that breaks the contract is a `UserError`, whose sentence says where."""
    if not callable(getattr(module, "build", None)):
        raise UserError(f"the model {name} has no function build; it must define build(shape, classes)")
    module.HEAD = getattr(module, "HEAD", "")  # type: ignore[attr-defined]
    if not isinstance(module.HEAD, str):
        raise UserError(f"HEAD of the model {name} is {module.HEAD!r}; it must be the name of the last layer")
    module.Options = options_of(f"the model {name}", module)  # type: ignore[attr-defined]
    return module


def make(run: Resolved, source: Source) -> Any:
    """Return a resolved Run's model for its data, a module, the same on every rank; `UserError`: it cannot be built or trained (`numerics.model_check`)."""
    from dpfl_mpi.numerics.model_check import check_module, in_one_line, seeded

    file, name = run.found("model"), short(run.model)
    options = {f.name: f.default for f in dataclasses.fields(file.Options)}
    keywords: dict[str, Any] = options | (run.model_options or {})
    takes = inspect.signature(file.build)
    if source.vocabulary and "vocabulary" not in takes.parameters:
        mend = "use --model text, or a build with a parameter vocabulary"
        raise UserError(f"--model {name} takes numbers, and these data are tokens: {mend}")
    if "vocabulary" in takes.parameters:
        if not source.vocabulary:
            raise UserError(f"--model {name} takes tokens, and these data are {source.kind}: use --model mlp")
        keywords["vocabulary"] = source.vocabulary
    try:
        takes.bind(source.shape, source.classes, **keywords)
    except TypeError:
        called = ", ".join(["shape", "classes", *keywords])
        raise UserError(f"the model {name} defines build{takes}, which is called as build({called})") from None
    with seeded(int(stream(run.seed, INIT, 0, 1).integers(2**63))):
        try:
            module = file.build(source.shape, source.classes, **keywords)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"--model {name}: build failed for samples of {source.size}: {in_one_line(error)}") from error
    check_module(name, module, source.shape, source.dtype, source.classes, file.HEAD, source.vocabulary)
    return module
