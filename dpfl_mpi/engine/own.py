"""What is checked of a method that is not shipped: nothing in it may give other numbers on another number of ranks."""

import random
import sys
from typing import Any

import numpy as np
import torch

from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import Parts
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import State
from dpfl_mpi.plugins import short


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
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def as_text(value: Any) -> str:
    """Return what tells two values of `state["shared"]` apart, bit by bit."""
    if isinstance(value, CollaborationGraph):
        return as_text(value.indptr) + as_text(value.senders)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    return value.tobytes().hex() if isinstance(value, np.ndarray) else repr(value)
