"""What is checked of a method after each round: the form of its state, and, of one that is not shipped, what would differ with the number of ranks."""

import random
from typing import Any

import numpy as np
import torch

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import State
from dpfl_mpi.plugins import short
from dpfl_mpi.survival.checkpoint import numpy_of

HELD = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")  # by HDF5, NumPy and torch


def check_state(name: str, state: Any, parts: Parts, before: State | None = None, budgeted: bool = True) -> None:
    """Check what init (round 0) or round returned on this rank, from `before`; graphs keep to the budget where `budgeted`: a server need not."""
    who = f"{'round' if parts.round else 'init'} of the method {name}"
    if said := mistake(who, state, len(parts.ids), parts.n, before):
        raise UserError(said)
    for key in ("omega", "chosen"):
        if budgeted and key in state["shared"]:
            parts.members.check_budget(state["shared"][key], f'state["shared"]["{key}"] after {who}')
    if parts.round <= 1 and np.isnan(parts.log.notes["val_acc"][parts.members.active[parts.ids]]).any():
        must = f"it must call fed.evaluate(w) with the rows [K, W] of round {parts.round}"
        raise UserError(f"{who} has scored no models; {must}")


def mistake(who: str, state: Any, k: int, n: int, before: State | None) -> str:
    """Return what is wrong with the form of a state of k of n clients, a sentence; "" where nothing is."""
    whole = isinstance(state, dict) and set(state) == {"client", "shared"}
    if not (whole and all(isinstance(values, dict) for values in state.values())):
        keys = ", ".join(map(str, state)) or "nothing" if isinstance(state, dict) else ""
        got = f"a dict of {keys}" if keys else type(state).__name__
        return f'{who} returned {got}; a state is {{"client": {{...}}, "shared": {{...}}}}, of two dicts'
    for group, values in state.items():
        if gone := sorted(set(before[group] if before else ()) - set(values)):
            return f'{who} returned no state["{group}"]["{gone[0]}"], which it was given; every round returns all keys of init'
        if odd := [key for key in values if not (isinstance(key, str) and key and "/" not in key)]:
            return f'{who} returned state["{group}"][{odd[0]!r}]; a key is a text without /'
    for key, value in state["client"].items():
        shape = tuple(getattr(value, "shape", ()))
        if not (held(value) and shape[:1] == (k,)):
            got = f"of shape {shape}" if held(value) else kind(value)
            return f'state["client"]["{key}"] after {who} is {got}; it must be a tensor or array of {k} rows, one per client of this rank'
    for key, value in state["shared"].items():
        graph, what = isinstance(value, CollaborationGraph), f'state["shared"]["{key}"] after {who}'
        if key in ("omega", "chosen") and not (graph and value.n == n):
            got = f"a graph of {value.n} clients" if graph else kind(value)
            return f"{what} is {got}; it must be a CollaborationGraph of {n} clients"
        if not (graph or held(value) or value is None or isinstance(value, bool | int | float | str)):
            allowed = f"a tensor or array of {', '.join(HELD)}, a CollaborationGraph, a number, a text and None"
            return f"{what} is {kind(value)}, which a checkpoint cannot hold; allowed are {allowed}"
    return ""


def held(value: Any) -> bool:
    """Return whether this is a tensor or array of numbers, and not sparse, that a checkpoint can hold."""
    dense = str(getattr(value, "layout", "torch.strided")) == "torch.strided"
    return dense and str(getattr(value, "dtype", "")).removeprefix("torch.") in HELD and hasattr(value, "shape")


def kind(value: Any) -> str:
    """Return what a value is, in words."""
    return f"a {type(value).__name__}" + (f" of {value.dtype}" if hasattr(value, "dtype") else "")


def global_generators() -> tuple[Any, ...]:
    """Return the states of the generators that are not keyed: those of `torch`, `numpy.random` and `random`."""
    _, keys, position, *rest = np.random.get_state()  # noqa: NPY002  # read, not drawn from
    return torch.get_rng_state().numpy().tobytes(), np.asarray(keys).tobytes(), position, *rest, random.getstate()


def check_own(parts: Parts, state: State, drawn: tuple[Any, ...]) -> None:
    """Raise `UserError` where a round drew from a global generator (`drawn`: as they were), or `state["shared"]` differs. Collective in rounds 0 and 1."""
    name, world, shared = short(parts.run.method), parts.world, state["shared"]
    who = f"{'round' if parts.round else 'init'} of the method {name}"
    if global_generators() != drawn:
        how = "draw by fed.shuffle or dpfl_mpi.streams.stream(seed, purpose, client, round)"
        why = "the global generator of torch, numpy or random, which differs with the number of ranks"
        raise UserError(f"{who} draws from {why}; {how}")
    if parts.round > 1:
        return
    if world.unlike({"names": sorted(shared)}):
        raise UserError(f'state["shared"] after {who} has other names on some ranks; it must be the same on every rank')
    if unlike := world.unlike({key: as_text(shared[key]) for key in sorted(shared)}):
        how = 'what belongs to clients is in state["client"], and fed.collect makes one graph of what each rank chose'
        raise UserError(f'state["shared"]["{unlike[0]}"] after {who} is not the same on every rank; {how}')
    uncounted = parts.log.every_row and len(parts.ids) and not parts.log.notes["models_received"].any()
    if parts.round == 1 and world.root and uncounted:
        warning = f"{who} calls fed.every_row and counts no models received; say how many by fed.note_received"
        complain(f"warning: {warning}")


def as_text(value: Any) -> str:
    """Return what tells two values of `state["shared"]` apart, bit by bit."""
    if isinstance(value, CollaborationGraph):
        return as_text(value.indptr) + as_text(value.senders)
    return numpy_of(value).tobytes().hex() if isinstance(value, torch.Tensor | np.ndarray) else repr(value)
