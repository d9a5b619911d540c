"""Which `Backend` computes a run's clients."""

import torch

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.gpu_backend import try_gpu
from dpfl_mpi.numerics.native import FORMS
from dpfl_mpi.numerics.native_backend import try_native
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.recorded import RecordedBackend, check_several

AUTO_ON_GPU = False  # whether `auto` takes the native kernels on a GPU


def select_backend(
    kernels: str,
    block: int,
    world: World,
    ensemble: Ensemble,
    clients: Clients,
    optimiser: SGD,
    threads: int = 1,
) -> tuple[Backend, str]:
    """Return what computes the clients, alike on all ranks, by --kernels and --block. Collective.

    It is the native kernels, else PyTorch: recorded steps on a GPU. Where PyTorch takes the place
    of the native kernels, a warning comes with it; else "". `UserError`: they cannot be used, or
    --threads_per_client is more than 1, and they are not the native kernels of a CPU.
    """
    parts, gpu = (ensemble, clients, optimiser), ensemble.device.type == "cuda"
    if kernels == "compiled" and not gpu:
        mend = "on a CPU the native kernels are faster than either"
        raise UserError(f"--kernels is compiled, which needs a GPU; {mend}")
    if kernels in FORMS and gpu:
        allowed = "allowed on a GPU are auto, native, torch and compiled"
        raise UserError(f"--kernels is {kernels}, a form of a CPU; {allowed}")
    alone = f"--threads_per_client is {threads}; allowed is 1"
    if threads > 1 and world.agree(gpu):
        raise UserError(f"{alone} on a GPU")
    rounds = ensemble.bfloat16_products or (gpu and torch.backends.cuda.matmul.allow_tf32)
    wanted = (
        kernels == "native" or (kernels == "auto" and (AUTO_ON_GPU or not gpu)) or kernels in FORMS
    )
    if world.agree(rounds or not wanted or (block > 1 and not gpu)):  # nodes may differ
        if kernels not in ("auto", "torch", "compiled"):
            only = "compute in float32 and, on a CPU, one client after the other (--block 1)"
            raise UserError(f"--kernels is {kernels}; the native kernels {only}")
        if threads > 1:
            raise UserError(f"{alone} where PyTorch computes")
        return by_torch(kernels, block, *parts), ""
    native, why = try_gpu(block, *parts) if gpu else try_native(kernels, *parts, threads)
    missing = world.agree(native is None)
    if native and not missing:
        return native, ""
    if kernels != "auto":
        raise UserError(why or "--kernels: another rank's node has no native kernels")
    why = why or "a node has no native kernels"
    if threads > 1:
        raise UserError(f"{alone} where PyTorch computes: {why}")
    return by_torch(kernels, block, *parts), f"PyTorch computes, several times slower: {why}"


def by_torch(
    kernels: str, block: int, ensemble: Ensemble, clients: Clients, optimiser: SGD
) -> Backend:
    """Return what computes in PyTorch; `UserError`: it cannot compute several clients at once."""
    parts, gpu = (ensemble, clients, optimiser), ensemble.device.type == "cuda"
    if block > 1 or gpu:
        check_several(ensemble, clients, 1 if block == 1 else 2)
    if gpu and kernels != "torch":
        return RecordedBackend(*parts, block, kernels == "compiled")
    return Backend(*parts, block)
