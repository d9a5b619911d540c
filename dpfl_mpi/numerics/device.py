"""Which device a rank computes on, and what makes it deterministic."""

import os
import re

import torch

from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.node import installed_gpus, visible_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
LISTED = 8  # devices of one line
TAIL = r"(-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # of a UUID: a GPU is known by what is before


def place_of(local_rank: int, ranks: int, devices: int) -> int:
    """Return the number of the device, of so many on a node with `ranks`, that a rank takes.

    Where ranks outnumber devices, neighbours share one.
    """
    return local_rank * devices // ranks if ranks > devices else local_rank


def pick_device(wanted: str, precision: str, local_rank: int = 0, ranks: int = 1) -> torch.device:
    """Return this rank's device, by --device and --precision, and set it up.

    Of the GPUs that it may see on its node with `ranks` it takes the one in its place. Of MIG
    instances CUDA shows a process only one: it is named in CUDA_VISIBLE_DEVICES before CUDA starts.
    """
    gpus = visible_gpus() if wanted != "cpu" else []
    if any(name.startswith("MIG-") for name in gpus):
        os.environ[VISIBLE] = gpus[place_of(local_rank, ranks, len(gpus))]
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
    device = torch.device("cuda", place_of(local_rank, ranks, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    tf32 = precision == "tf32"  # cuDNN's default is True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    # bf16 rounds factors and results, not the sums in between, as on a CPU
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_deterministic_debug_mode("error")
    # memory is written before it is read
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return device


def why_hidden() -> str:
    """Return why PyTorch sees none of the GPUs that this node has; "" where it has none."""
    count = len(installed_gpus())
    if not count:
        return ""
    if not visible_gpus():
        why = f"{VISIBLE} is {os.environ[VISIBLE] or 'empty'}"
    elif not torch.backends.cuda.is_built():
        why = "this PyTorch is built without CUDA"
    else:
        why = "PyTorch cannot use them (`python -c 'import torch; torch.cuda.init()'` says why)"
    return f"{count} {'GPU is' if count == 1 else 'GPUs are'} installed, but {why}"


def name_of(device: torch.device) -> str:
    """Return a GPU's model and UUID, which tells it from all others on any node; "" for a CPU."""
    if device.type != "cuda":
        return ""
    found, visible = torch.cuda.get_device_properties(device), os.environ.get(VISIBLE, "")
    return f"{found.name} ({visible if visible.startswith('MIG-') else f'GPU-{found.uuid}'})"


def devices_line(names: list[str]) -> str:
    """Return which ranks compute on which device, by each rank's `name_of`; "" without a GPU."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(re.sub(TAIL, "", name) or "the CPU", []).append(rank)
    if not any(names):
        return ""
    parts = [f"{spans(of)} on {name}" for name, of in ranks.items()]
    more = [f"{len(parts) - LISTED} more devices"] if len(parts) > LISTED else []
    return f"devices: rank{'s' * (len(names) > 1)} " + "; ".join(parts[:LISTED] + more)


def spans(numbers: list[int]) -> str:
    """Return ascending numbers as text, those that follow each other by the first and the last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
