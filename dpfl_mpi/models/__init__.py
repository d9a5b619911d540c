"""The models, one file each, by the contract of docs/extend-methods.md.

What a model may not do is in `numerics/model_check.py`.
"""

import dataclasses
import inspect
from types import ModuleType
from typing import Any

from numpy.random import Generator

from dpfl_mpi.data.source import Source
from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.fields import options_of


def load(name: str, module: ModuleType) -> ModuleType:
    """Return a model's file; one that breaks the contract is a `UserError`."""
    if not callable(getattr(module, "build", None)):
        must = "it must define build(shape, classes)"
        raise UserError(f"the model {name} has no function build; {must}")
    module.HEAD = getattr(module, "HEAD", "")  # type: ignore[attr-defined]
    if not isinstance(module.HEAD, str):
        raise UserError(f"HEAD of the model {name} is {module.HEAD!r}, not the name of a layer")
    module.Options = options_of(f"the model {name}", module)  # type: ignore[attr-defined]
    return module


def make(run: Resolved, source: Source, draws: Generator) -> Any:
    """Return a Run's model for its data, a checked `nn.Module`, the same on every rank.

    Its own weights and buffers are by `draws`.
    """
    from dpfl_mpi.numerics.model_check import check_module, in_one_line, seeded

    file, name = run.found("model"), short(run.model)
    options = {f.name: f.default for f in dataclasses.fields(file.Options)}
    keywords: dict[str, Any] = options | (run.model_options or {})
    signature = inspect.signature(file.build)
    takes_tokens = "vocabulary" in signature.parameters
    if source.vocabulary and not takes_tokens:
        mend = "use --model text, or a build with a parameter vocabulary"
        raise UserError(f"--model {name} takes numbers, and these data are tokens: {mend}")
    if takes_tokens and not source.vocabulary:
        raise UserError(f"--model {name} takes tokens, not {source.kind}: use --model mlp")
    if takes_tokens:
        keywords["vocabulary"] = source.vocabulary
    try:
        signature.bind(source.shape, source.classes, **keywords)
    except TypeError:
        called = f"build({', '.join(['shape', 'classes', *keywords])})"
        defined = f"the model {name} defines build{signature}"
        raise UserError(f"{defined}, which is called as {called}") from None
    with seeded(int(draws.integers(2**63))):
        try:
            module = file.build(source.shape, source.classes, **keywords)
        except UserError:
            raise
        except Exception as error:
            failed = f"build failed for samples of {source.size}"
            raise UserError(f"--model {name}: {failed}: {in_one_line(error)}") from error
    facts = source.shape, source.dtype, source.classes, file.HEAD, source.vocabulary
    check_module(name, module, *facts)
    return module
