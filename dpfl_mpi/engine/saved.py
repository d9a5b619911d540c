"""The models that a run saved (--save_models), and the data to score them on.

What does not belong together is a `UserError`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl_mpi.data.partition import Partition
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import Source, as_dealt, in_file
from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.models import make
from dpfl_mpi.plugins import admit, admitted, changes, codes, parts
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Resolved
from dpfl_mpi.settings.run import PREPARED
from dpfl_mpi.streams import INIT, stream

if TYPE_CHECKING:
    from dpfl_mpi.numerics.normalising import NormalisingModel


def with_code(run: Resolved, given: Mapping[str, str | None]) -> Resolved:
    """Return the run with code `given` here: what a result names is never executed."""
    named: dict[str, Any] = {kind: name for kind, name in given.items() if name is not None}
    for kind, name in named.items():
        sha256, own = run.contents.get(kind, ""), getattr(run, kind)
        # a prepared data set (PREPARED) is read without its code, so any name will do
        same = admit(kind, name) == sha256 and bool(sha256 or name == own)
        if not same and sha256 != PREPARED:
            wrong = f"the run has the shipped {own}"
            if sha256:
                then = run.declared.get(kind, {}).get("parts", {})
                now = parts(kind, name) if admitted(kind, name) else {}
                wrong = f"other code than the run's: {changes(now, then)}"
            raise UserError(f"--{kind} is {name}; {wrong}")
    lacking = [kind for kind in given if kind not in named and kind in codes(run.contents)]
    if "model" in lacking:
        one = "model is code of its own; name it"
        what = one if len(lacking) == 1 else "model and data set are code of their own; name them"
        flags = " and ".join(f"--{kind} ({getattr(run, kind)})" for kind in lacking)
        raise UserError(f"the run's {what} with {flags}, in Python Result(path, model=...)")
    return dataclasses.replace(run, **named)


def source_of(result: Result, data: Path | None) -> Source:
    """Return the data to score on: those of the run, or those of `--data`."""
    if data is None:
        return result.source
    source = in_file(data)
    if source.sha256 == result.fact("data_sha256"):
        return as_dealt(result.run, source)
    return as_trained(result, source)


def as_trained(result: Result, source: Source) -> Source:
    """Return other data of the same classes, normalised as those of the models."""
    names = result.listed("class_names")
    if len(names) not in (0, source.classes):
        return source  # `network_of` refuses them
    for i, (trained, name) in enumerate(zip(names, source.class_names, strict=False)):
        if trained != name:
            both = "both must have the same classes"
            differ = f"class {i} is {name}, and {trained} in the run"
            raise UserError(f"--data {source.path}: {differ}; {both}")
    mean, std = (tuple(result.listed(name)) for name in ("mean", "std"))
    if not len(mean) == len(std) == len(source.mean):  # a result does not list very many
        own = "these are by their own mean and deviation"
        complain(f"note: the result does not say how its images were normalised; {own}")
        return source
    if (trained := result.hdf5.attribute("dtype", str, "meta", source.dtype)) != source.dtype:
        kinds = f"its samples are {source.dtype}, those of the run {trained}"
        raise UserError(f"--data {source.path}: {kinds}; prepare both alike")
    return dataclasses.replace(source, mean=mean, std=std)


def dealt(result: Result, source: Source, advice: str = "") -> Partition:
    """Return the partition of the run, dealt anew; `advice` ends the sentence of an error."""
    if source.sha256 != result.fact("data_sha256"):
        others = "these are not the data of the run, so no client has samples in them"
        raise UserError(f"{others}{advice}")
    partition = deal(result.run, source)
    if partition.sha256() != result.fact("partition_sha256"):
        changed = "this version deals the data differently from the one that made the result"
        raise UserError(f"{changed}{advice}")
    return partition


def network_of(result: Result, source: Source) -> NormalisingModel:
    """Return the network of a run's clients, for raw images of this source; `fill` sets weights."""
    from dpfl_mpi.numerics.normalising import NormalisingModel

    shapes = {name: values.shape for name, values in result.state_dict(0).items()}
    if result.run.contents.get("model", "") != admitted("model", str(result.run.model)):
        how = f"name the very same, with --model or by admit ({result.run.model})"
        raise UserError(f"the run's model is code of its own; {how}")
    network = make(result.run, source, stream(result.run.seed, INIT, 0, 1))
    if {name: tuple(p.shape) for name, p in network.named_parameters()} != shapes:
        these = f"these data (samples of {source.size}, {source.classes} classes)"
        raise UserError(f"the saved models do not fit {these}")
    return NormalisingModel(network, source.mean, source.std, source.dtype).eval()


def fill(model: NormalisingModel, result: Result, client: int) -> NormalisingModel:
    """Put the weights of a client's best model into a network of the run, and return it."""
    import torch

    weights = {name: torch.from_numpy(values) for name, values in result.state_dict(client).items()}
    model.network.load_state_dict(weights, strict=False)  # buffers stay as they were built
    return model
