"""Checks of what a method returns after each round, called by `engine.train`.

`check_state` checks the form of its state, {"client": {...}, "shared": {...}}: what belongs to each
client of this rank, and what is the same on all ranks. `check_own` finds, for the user's own
methods, numbers that would depend on the number of ranks.
"""

import itertools
from typing import Any

import numpy as np
import torch

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import State
from dpfl_mpi.numerics.model_check import global_generators
from dpfl_mpi.plugins import short
from dpfl_mpi.survival.checkpoint import numpy_of

# the types of numbers that HDF5, NumPy and torch all have
INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")
STORABLE = (*INTEGERS, "float16", "float32", "float64")


def check_state(
    name: str, state: Any, parts: Parts, before: State | None = None, budgeted: bool = True
) -> None:
    """Raise `UserError` where a method's state is wrong."""
    # `before` has the names that it must keep. With `budgeted`, its graphs may not exceed B_c.
    who = source_of_state(name, parts)
    check_form(who, state, before)
    for key, value in state["client"].items():
        shape, k = tuple(getattr(value, "shape", ())), len(parts.ids)
        if not (storable(value) and shape[:1] == (k,)):
            got = f"of shape {shape}" if storable(value) else kind(value)
            must = f"a tensor or array of {k} rows, one per client of this rank"
            raise UserError(f'state["client"]["{key}"] after {who} is {got}; it must be {must}')
    for key, value in state["shared"].items():
        is_graph = isinstance(value, CollaborationGraph)
        what = f'state["shared"]["{key}"] after {who} is'
        if key in ("omega", "chosen") and not (is_graph and value.n == parts.n):
            got = f"a graph of {value.n} clients" if is_graph else kind(value)
            must = f"it must be a CollaborationGraph of {parts.n} clients"
            raise UserError(f"{what} {got}; {must}")
        scalar = value is None or isinstance(value, bool | int | float | str)
        if not (is_graph or scalar or storable(value)):
            arrays = f"a tensor or array of {', '.join(STORABLE)}"
            allowed = f"{arrays}, a CollaborationGraph, a number, a text and None"
            got = f"{kind(value)}, which a checkpoint cannot hold"
            raise UserError(f"{what} {got}; allowed are {allowed}")
    check_memory(who, state)
    for key in ("omega", "chosen"):
        if budgeted and key in state["shared"]:
            where = f'state["shared"]["{key}"] after {who}'
            parts.members.check_graph(state["shared"][key], where)
            parts.members.check_budget(state["shared"][key], where)
    # rounds 0 and 1 show whether the method scores its models
    active = parts.members.active[parts.ids]
    if parts.round <= 1 and np.isnan(parts.log.notes["val_acc"][active]).any():
        must = f"it must call fed.evaluate(w) with the rows [K, W] of round {parts.round}"
        raise UserError(f"{who} has scored no models; {must}")


def check_memory(who: str, state: State) -> None:
    """Raise `UserError` where two values share memory: a checkpoint would bring back two copies."""
    arrays = {}
    for group, values in state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                value = value.detach().numpy()
            if isinstance(value, np.ndarray):
                arrays[f'state["{group}"]["{key}"]'] = value
    for (one, a), (other, b) in itertools.combinations(arrays.items(), 2):
        if np.shares_memory(a, b):
            why = "they share their memory, which a checkpoint does not bring back"
            raise UserError(f"{who} returned {one} and {other}; {why}: store a copy of one")


def source_of_state(name: str, parts: Parts) -> str:
    return f"{'round' if parts.round else 'init'} of the method {name}"


def check_form(who: str, state: Any, before: State | None) -> None:
    """Raise `UserError` unless a state is two dicts that have all names of `before`."""
    groups = isinstance(state, dict) and set(state) == {"client", "shared"}
    if not (groups and all(isinstance(values, dict) for values in state.values())):
        got = type(state).__name__
        if isinstance(state, dict):
            got = f"a dict of {', '.join(map(str, state))}" if state else "an empty dict"
        form = '{"client": {...}, "shared": {...}}'
        raise UserError(f"{who} returned {got}; a state must be {form}, both dicts")
    for group, values in state.items():
        if gone := sorted(set(before[group] if before else ()) - set(values)):
            lacks = f'no state["{group}"]["{gone[0]}"], which it was given'
            raise UserError(f"{who} returned {lacks}; every round returns all keys of init")
        for key in values:
            if not isinstance(key, str) or key in ("", ".") or {"/", "\0"} & {*key}:
                wrong = f'state["{group}"][{key!r}]; a key is a text without / or NUL, and not "."'
                raise UserError(f"{who} returned {wrong}")


def storable(value: Any) -> bool:
    """Return whether a value is a dense tensor or array of numbers, which a checkpoint can hold."""
    dense = str(getattr(value, "layout", "torch.strided")) == "torch.strided"
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return dense and dtype in STORABLE and hasattr(value, "shape")


def kind(value: Any) -> str:
    """Return what a value is, in words."""
    of = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    return f"a {type(value).__name__}{of}"


def check_own(parts: Parts, state: State, generators: tuple[Any, ...]) -> None:
    """Raise `UserError` where numbers would depend on the ranks. Collective in rounds 0 and 1."""
    # `generators` is what `global_generators` returned before this round
    world, shared, clients = parts.world, state["shared"], state["client"]
    who = source_of_state(short(parts.run.method), parts)
    if global_generators() != generators:
        how = "draw by fed.shuffle or dpfl_mpi.streams.stream(seed, purpose, client, round)"
        which = "the global generator of torch, numpy or random"
        raise UserError(f"{who} draws from {which}, which differs with the number of ranks; {how}")
    if parts.round > 1:  # the rest takes time, and finds a mistake in the first rounds
        return
    forms = [(key, str(clients[key].dtype), clients[key].shape[1:]) for key in sorted(clients)]
    if world.unlike({"client": forms}):
        what = f'state["client"] after {who} has other names, types or shapes on some ranks'
        raise UserError(f"{what}; allowed are rows that are alike for every client")
    if world.unlike({"names": sorted(shared)}):
        what = f'state["shared"] after {who} has other names on some ranks'
        raise UserError(f"{what}; it must be the same on every rank")
    if unlike := world.unlike({key: bits_of(shared[key]) for key in sorted(shared)}):
        how = 'what belongs to clients is in state["client"]'
        graph = "fed.collect makes one graph of what each rank chose"
        what = f'state["shared"]["{unlike[0]}"] after {who} is not the same on every rank'
        raise UserError(f"{what}; {how}, and {graph}")
    uncounted = parts.log.every_row_called and not parts.log.notes["models_received"].any()
    if parts.round == 1 and world.root and len(parts.ids) and uncounted:
        how = "say how many by fed.note_received"
        complain(f"warning: {who} calls fed.every_row and counts no models received; {how}")


def bits_of(value: Any) -> str:
    """Return a text that tells two values of `state["shared"]` apart, bit by bit."""
    if isinstance(value, CollaborationGraph):
        return bits_of(value.indptr) + bits_of(value.senders)
    is_array = isinstance(value, torch.Tensor | np.ndarray)
    return numpy_of(value).tobytes().hex() if is_array else repr(value)
