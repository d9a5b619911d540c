"""Client-level noise (McMahan et al., 2018): clipped changes are averaged, then noise is added.

It counts no privacy budget; an accountant such as that of Opacus takes `noise` and the rounds.
"""

from dataclasses import dataclass

import torch

from dpfl_mpi.methods import Method
from dpfl_mpi.settings import option
from dpfl_mpi.streams import stream

METHOD = Method(title="FedAvg, noisy", topology="server")
NOISE = 1000  # purpose of the stream: see docs/extend-methods.md


@dataclass(frozen=True)
class Options:
    clip: float = option(1.0, "longest change of a client", above=0)
    noise: float = option(0.1, "standard deviation, as a multiple of clip and weight", low=0)


def init(fed):
    w = fed.initial_row()
    fed.evaluate(fed.copies(w))
    return {"client": {}, "shared": {"w": w}}


def round(fed, state, t):
    w, clip = state["shared"]["w"], fed.options["clip"]
    change = fed.local_opt(fed.copies(w), epochs=fed.run.tau_train) - w
    change *= (clip / change.double().norm(dim=1, keepdim=True)).clamp(max=1).float()
    spread = fed.options["noise"] * clip * fed.p.max() / fed.p[fed.active].sum()
    noise = torch.from_numpy(spread * stream(fed.run.seed, NOISE, 0, t).standard_normal(len(w)))
    w = w + fed.mean(change) + noise.to(w) * fed.columns("all")
    fed.evaluate(fed.copies(w))
    return {"client": {}, "shared": {"w": w}}
