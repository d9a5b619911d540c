"""From settings to what moves models. Nothing else in this room reads settings."""

import numpy as np
from torch import Tensor

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.placement import Placement
from dpfl_mpi.mpi.window import Transfer
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.plugins import shipped, short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.transport.clock import Clock, Speeds, speeds_of
from dpfl_mpi.transport.codec import Int8, TopK
from dpfl_mpi.transport.ledger import Ledger
from dpfl_mpi.transport.links import Ages
from dpfl_mpi.transport.log import Log
from dpfl_mpi.transport.mailroom import Mailroom
from dpfl_mpi.transport.packing import Encoded, Packing


def transport_of(
    run: Resolved,
    window_gb: float,
    transfer: Transfer,
    placement: Placement,
    log: Log,
    budgets: np.ndarray,
    start_W: Tensor,
    ensemble: Ensemble,
) -> tuple[Mailroom, Ledger]:
    """Return what moves `budgets` `[N]` models to clients, and what counts it. Collective."""
    clock, ages = None, Ages(placement, run.staleness)
    if network := run.network:  # root alone has its table, if that is in a file

        def speeds() -> dict[str, np.ndarray]:
            return vars(speeds_of(network.text, network.table, run.clients, run.seed))

        clock = Clock(Speeds(**placement.world.share(speeds)), ages.count)
    columns, codec = sent_of(run, ensemble)
    if codec:
        packing: Packing = Encoded(codec, ages, start_W, budgets)
    else:
        packing = Packing(ensemble, ages, columns)
    counts = bool(run.network or codec or columns is not None)
    own_code = run.method not in shipped("method")
    mailroom = Mailroom(
        packing, log, budgets=budgets, window_gb=window_gb, transfer=transfer, own_code=own_code
    )
    return mailroom, Ledger(packing, log, clock=clock, counts=counts)


def sent_of(run: Resolved, ensemble: Ensemble) -> tuple[Tensor | None, Int8 | TopK | None]:
    """Return which columns are sent, bool `[W]`, None: all (--send), and their codec (--codec).

    "body" is all but the last layer. Raises `UserError` if the model has no such layers.
    """
    columns, layers = None, run.send.names if run.send else run.found("method").sends
    if layers:
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
            columns = ensemble.columns(layers, head, setting, "body alone, head")
        if not columns[: ensemble.size].any():
            missing = f"the model {short(run.model)} has no such weights: allowed is all"
            raise UserError(f"{setting} is {layers}; {missing}")
    if not run.codec:
        return columns, None
    if run.codec.kind == "int8":
        return columns, Int8(ensemble, columns)
    return columns, TopK(ensemble, columns, run.codec.density)
