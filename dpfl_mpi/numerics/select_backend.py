"""Choose which `Backend` computes a run's clients: the native kernels in C, or PyTorch.

`engine/build.py` calls `select_backend` at a run's start, on all ranks. `plan/needs.py` asks the
other functions what this machine alone would choose.
"""

from functools import partial

import torch

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.cpu import FORMS
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.native_backend import try_native
from dpfl_mpi.numerics.optimiser import SGD

SLOWER = "usually 2 to 8"  # times: four models, a ViT, GPT, LSTM and GRU; batches of 16


def select_backend(
    kernels: str,
    world: World,
    ensemble: Ensemble,
    clients: Clients,
    optimiser: SGD,
    threads: int = 1,
) -> Backend:
    """Return the backend that --kernels asks for, the same kind on all ranks. Collective.

    It is native where all ranks can compute by the kernels, else PyTorch. `UserError`: what is
    asked for cannot compute, or --threads_per_client is more than 1 without a CPU's kernels.
    """
    computed, gpu = (ensemble, clients, optimiser), ensemble.device.type == "cuda"
    one_thread = f"--threads_per_client is {threads}; allowed is 1"
    if threads > 1 and world.agree(gpu):  # some node may have a GPU
        raise UserError(f"{one_thread} on a GPU")
    native, why = native_or_why(kernels, *computed, threads)
    if not world.agree(native is None) and native:
        return native
    if kernels != "torch":
        why = why or "another rank's node has no native kernels"
    backend = pytorch_instead(kernels, why, *computed)
    if threads > 1:
        raise UserError(f"{one_thread} where PyTorch computes" + (f": {why}" if why else ""))
    if gpu:
        check_deterministic(ensemble, clients)
    return backend


def native_or_why(
    kernels: str, ensemble: Ensemble, clients: Clients, optimiser: SGD, threads: int = 1
) -> tuple[Backend | None, str]:
    """Return this rank's native backend, or None and why not ("" if PyTorch is asked for)."""
    gpu = ensemble.device.type == "cuda"
    if kernels in FORMS and gpu:
        allowed = "allowed on a GPU are auto, native and torch"
        raise UserError(f"--kernels is {kernels}, a form of a CPU; {allowed}")
    if kernels == "torch":
        return None, ""
    if ensemble.bfloat16_products or (gpu and torch.backends.cuda.matmul.allow_tf32):
        return None, "the native kernels compute in float32, the default of --precision"
    return try_native(kernels, ensemble, clients, optimiser, threads)


def pytorch_instead(
    kernels: str, why: str, ensemble: Ensemble, clients: Clients, optimiser: SGD
) -> Backend:
    """Return PyTorch's backend; its `warning` says why the kernels do not compute.

    `UserError`: --kernels asks for them.
    """
    if kernels not in ("auto", "torch"):
        raise UserError(why)
    backend = Backend(ensemble, clients, optimiser)
    slower = "hundreds of" if ensemble.device.type == "cuda" else SLOWER
    backend.warning = f"{why}: PyTorch computes, {slower} times slower" if why else ""
    return backend


def check_deterministic(ensemble: Ensemble, clients: Clients) -> None:
    """Raise `UserError` for a module whose gradient has other bits at each call on a GPU.

    PyTorch refuses some layers, such as `nn.AdaptiveAvgPool2d(7)`, in its deterministic mode.
    """
    zeros = partial(torch.zeros, device=ensemble.device)
    key = zeros((), dtype=torch.int64)
    x = ensemble.normalise(zeros(1, *clients.shape))
    try:
        ensemble.gradient(ensemble.zeros(1)[0], x, zeros(1, dtype=torch.int64), key)
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        name = str(error).split()[0]
        fails = f"{name}, which it needs, has other bits at each call on a GPU"
        mend = "allowed are pools of fixed windows, such as nn.AvgPool2d, or --device cpu"
        raise UserError(f"--model: {fails}; {mend}") from error
