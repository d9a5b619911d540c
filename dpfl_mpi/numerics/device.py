"""Which device a rank computes on, and what makes it exact: float32, deterministic."""

from __future__ import annotations

import os

import torch

from dpfl_mpi.errors import UserError


def pick_device(wanted: str, precision: str, local_rank: int) -> torch.device:
    """Return this rank's device: its local rank modulo the GPUs seen, set before anything else touches CUDA.

    Args:
        wanted: "auto", "cpu" or "cuda".
        precision: "float32", "tf32" or "bf16".
        local_rank: this rank's number on its node.
    """
    # cuBLAS is deterministic only with a workspace of its own
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    available = torch.cuda.is_available() if wanted != "cpu" else False
    if wanted == "cuda" and not available:
        raise UserError(
            "--device is cuda; PyTorch sees no GPU here (allowed: auto, cpu, or a node with a GPU and a CUDA build of torch)"
        )
    if not available:
        if precision == "tf32":
            raise UserError("--precision is tf32; only a GPU has it (on a CPU: float32 or bf16)")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    tf32 = precision == "tf32"  # cuDNN's default is True: float32 must mean float32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # each is written first
    return device
