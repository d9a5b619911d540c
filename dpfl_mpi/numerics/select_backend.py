"""Which `Backend` computes a run's clients."""

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.backend import Backend
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.native_backend import try_native
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.recorded import RecordedBackend, check_several


def select_backend(
    kernels: str, block: int, world: World, ensemble: Ensemble, clients: Clients, optimiser: SGD
) -> tuple[Backend, str]:
    """Return what computes the clients, alike on all ranks, by --kernels and --block. Collective.

    It is recorded steps on a GPU, the native kernels on a CPU, else PyTorch. Where PyTorch takes
    the place of the native kernels, a warning comes with it; else "".
    """
    parts, gpu = (ensemble, clients, optimiser), ensemble.device.type == "cuda"
    if kernels == "compiled" and not gpu:
        mend = "on a CPU the native kernels are faster than either"
        raise UserError(f"--kernels is compiled, which needs a GPU; {mend}")
    by_torch = gpu or ensemble.bfloat16_products or block > 1 or kernels == "torch"
    if world.agree(by_torch):  # with --device auto nodes may differ
        if kernels not in ("auto", "torch", "compiled"):
            only = "compute in float32 on a CPU, one client after the other (--block 1)"
            raise UserError(f"--kernels is {kernels}; the native kernels {only}")
        if block > 1 or gpu:
            check_several(ensemble, clients, 1 if block == 1 else 2)
        if gpu and kernels != "torch":
            return RecordedBackend(*parts, block, kernels == "compiled"), ""
        return Backend(*parts, block), ""
    native, why = try_native(kernels, *parts)
    missing = world.agree(native is None)
    if native and not missing:
        return native, ""
    if kernels != "auto":
        raise UserError(why or "--kernels: another rank's node has no native kernels")
    why = why or "a node has no native kernels"
    return Backend(*parts, block), f"PyTorch computes, several times slower: {why}"
