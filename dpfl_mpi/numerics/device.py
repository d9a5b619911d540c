"""Which device a rank computes on, and what makes it deterministic."""

import os

import torch

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.node import installed_gpus, visible_gpus


def pick_device(wanted: str, precision: str, local_rank: int) -> torch.device:
    """Return this rank's device, by --device and --precision, and set it up.

    Of the GPUs that PyTorch sees it is that of the local rank, modulo their number.
    """
    # without a workspace of its own, cuBLAS has other bits at each call
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    available = torch.cuda.is_available() if wanted != "cpu" else False
    if wanted == "cuda" and not available:
        hidden = why_hidden()
        why = f": {hidden}" if hidden else ""
        allowed = "auto, cpu, or a node with a GPU and a CUDA build of torch"
        raise UserError(f"--device is cuda; PyTorch sees no GPU here{why} (allowed: {allowed})")
    if not available:
        if precision == "tf32":
            raise UserError("--precision is tf32; only a GPU has it (on a CPU: float32 or bf16)")
        return torch.device("cpu")
    if precision == "bf16" and "dtype" not in torch.ops.aten.bmm.overloads():
        needs = "a GPU needs PyTorch 2.8 or newer for it (allowed: float32 or tf32)"
        raise UserError(f"--precision is bf16; {needs}")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    tf32 = precision == "tf32"  # cuDNN's default is True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    # bf16 rounds factors and results, not the sums in between, as on a CPU
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(True)
    # memory is written before it is read
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return device


def why_hidden() -> str:
    """Return why PyTorch sees none of the GPUs that this node has; "" where it has none."""
    count = len(installed_gpus())
    if not count:
        return ""
    if not visible_gpus():
        why = f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES'] or 'empty'}"
    elif not torch.backends.cuda.is_built():
        why = "this PyTorch is built without CUDA"
    else:
        why = "PyTorch cannot use them (`python -c 'import torch; torch.cuda.init()'` says why)"
    return f"{count} {'GPU is' if count == 1 else 'GPUs are'} installed, but {why}"


def name_of(device: torch.device) -> str:
    """Return a name that no other GPU of the node has in any process; "" for a CPU."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))
