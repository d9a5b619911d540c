"""Which `Backend` computes a run's clients."""

from functools import partial

import torch

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.backend import SGD, Backend
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.model_check import in_one_line
from dpfl_mpi.numerics.native_backend import try_native
from dpfl_mpi.numerics.recorded import RecordedBackend
from dpfl_mpi.settings import Job


def select_backend(job: Job, world: World, ensemble: Ensemble, clients: Clients, sgd: SGD) -> tuple[Backend, str]:
    """Return what computes the clients, alike on all ranks: recorded steps on a GPU, on a CPU native kernels, if there, else PyTorch.

    With it a warning, "" but where PyTorch takes the place of the native kernels. Collective.
    """
    gpu, pytorch = ensemble.device.type == "cuda", partial(Backend, ensemble, clients, sgd, job.block)
    if job.kernels == "compiled" and not gpu:
        raise UserError("--kernels is compiled, which needs a GPU; on a CPU the native kernels are faster than either")
    if world.agree(gpu or ensemble.bf16 or job.block > 1 or job.kernels == "torch"):  # --device auto: nodes may differ
        if job.kernels not in ("auto", "torch", "compiled"):
            only = "the native kernels compute in float32 on a CPU, one client after the other (--block 1)"
            raise UserError(f"--kernels is {job.kernels}; {only}")
        if job.block > 1 or gpu:
            check_several(ensemble, clients, 1 if job.block == 1 else 2)
        if gpu and job.kernels != "torch":
            return RecordedBackend(ensemble, clients, sgd, job.block, job.kernels == "compiled"), ""
        return pytorch(), ""
    native, why = try_native(job, ensemble, clients, sgd)
    missing = world.agree(native is None)
    if native and not missing:
        return native, ""
    if job.kernels != "auto":
        raise UserError(why or "--kernels: another rank's node has no native kernels")
    return pytorch(), f"PyTorch computes, several times slower: {why or 'a node has no native kernels'}"


def check_several(ensemble: Ensemble, clients: Clients, k: int = 2) -> None:
    """Raise `UserError` where a module does not train and score k clients at once: PyTorch's vmap lacks some layers, and takes no `if` on values.

    On a GPU also where the gradient of a layer, such as `nn.AdaptiveAvgPool2d(7)`, has other bits at each call.
    """
    block, zeros = Block(ensemble, ensemble.zeros(k)), partial(torch.zeros, device=ensemble.device)
    x = ensemble.normalise(zeros(k, 1, *clients.shape))
    y, key = zeros(k, 1, dtype=torch.int64), zeros(k, dtype=torch.int64)
    try:
        with torch.no_grad():
            ensemble.gradient(block, x, y, zeros(k, 1), key)
            ensemble.logits(ensemble.ready(block.w), ensemble.prepare(x))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        fails = f"forward does not run for several clients at once ({in_one_line(error)})"
        lacks = "torch.func.vmap allows no `if` on values of x, no nn.LSTM and no nn.GRU; --block 1 does"
        if "deterministic implementation" in str(error):
            fails = f"{str(error).split()[0]}, which it needs, has other bits at each call on a GPU"
            lacks = "allowed are pools of fixed windows, such as nn.AvgPool2d, or --device cpu"
        raise UserError(f"--model: {fails}; {lacks}") from error
