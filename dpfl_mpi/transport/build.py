"""From settings to what moves models. Nothing else in this room reads settings."""

import numpy as np
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.plugins import shipped, short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.transport.ages import Ages
from dpfl_mpi.transport.clock import Clock
from dpfl_mpi.transport.codec import Int8, TopK
from dpfl_mpi.transport.ledger import Ledger
from dpfl_mpi.transport.log import Log
from dpfl_mpi.transport.mailroom import Mailroom
from dpfl_mpi.transport.packing import Encoded, Packing
from dpfl_mpi.transport.placement import Placement
from dpfl_mpi.transport.speeds import Speeds, speeds_of


def transport_of(
    run: Resolved,
    window_gb: float,
    placement: Placement,
    ensemble: Ensemble,
    log: Log,
    budgets: np.ndarray,
) -> tuple[Mailroom, Ledger]:
    """Return what moves `budgets` `[N]` models to clients, and what it costs. Collective."""
    ages, columns = Ages(placement, run.staleness), columns_of(run, ensemble)
    codec = codec_of(run, ensemble, columns)
    packing: Packing
    if codec is None:
        packing = Packing(ensemble, placement, ages, columns)
    else:
        start = ensemble.initial_row(run.init, streams.stream(run.seed, streams.INIT, 0, 0))
        packing = Encoded(ensemble, placement, ages, columns, codec, start, budgets)
    clock = None
    if run.network:

        def speeds() -> dict[str, np.ndarray]:  # root alone has what a file holds
            return vars(speeds_of(run.network.text, run.network.table, run.clients, run.seed))

        clock = Clock(Speeds(**placement.world.share(speeds)), run.staleness)
    counts = bool(run.network or run.codec or columns is not None)
    own_code = run.method not in shipped("method")
    mailroom = Mailroom(packing, log, budgets=budgets, window_gb=window_gb, own_code=own_code)
    return mailroom, Ledger(packing, log, clock=clock, counts=counts)


def codec_of(run: Resolved, ensemble: Ensemble, columns_W: Tensor | None) -> Int8 | TopK | None:
    """Return the codec for these columns, bool `[W]`, None: all; None without --codec."""
    if not run.codec:
        return None
    if run.codec.kind == "int8":
        return Int8(ensemble, columns_W)
    return TopK(ensemble, columns_W, run.codec.density)


def columns_of(run: Resolved, ensemble: Ensemble) -> Tensor | None:
    """Return which columns leave a client, bool `[W]`, by --send or as its method says; None: all.

    "body" is all but the head.

    Raises:
        UserError: the model has no such layers.
    """
    layers = run.send.names if run.send else run.found("method").sends
    if not layers:
        return None
    head = run.found("model").HEAD
    if not head and {"head", "body"} & set(layers.split(",")):
        what, mend = f"--send is {run.send}", "name its layers"
        if not run.send:
            what = f"--method {short(run.method)} sends its {layers}"
            mend = 'let its file say HEAD = "NAME"'
        raise UserError(f"{what}; --model {short(run.model)} names no last layer: {mend}")
    setting = "--send layers" if run.send else f"sends of the method {short(run.method)}"
    if layers == "body":
        columns = ~ensemble.columns("head", head, setting)
    else:
        columns = ensemble.columns(layers, head, setting)
    if not columns[: ensemble.size].any():
        missing = f"the model {short(run.model)} has no such weights: allowed is all"
        raise UserError(f"{setting} is {layers}; {missing}")
    return columns
