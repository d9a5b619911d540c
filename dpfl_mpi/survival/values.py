"""What a checkpoint can hold, and how it lies in HDF5: tensors, arrays, graphs and scalars.

Axes: K clients on this rank.
"""

import json
from typing import Any

import h5py
import numpy as np
import torch

from dpfl_mpi.graph import CollaborationGraph


def numpy_of(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def row_layout(value: Any) -> dict[str, Any]:
    """Return what a rank without clients must know of a client array: kind, type and shape of a row."""
    array = numpy_of(value)
    kind = "tensor" if isinstance(value, torch.Tensor) else "array"
    return {"kind": kind, "dtype": array.dtype.str, "shape": array.shape[1:]}


def write(file: h5py.File, name: str, value: Any) -> None:
    """Write a tensor, array, graph or scalar, one row as one checksummed chunk; raise `TypeError` for any other value."""
    if isinstance(value, CollaborationGraph):
        file[f"{name}/indptr"], file[f"{name}/senders"] = value.indptr, value.senders
        file[name].attrs["kind"] = "graph"
    elif isinstance(value, torch.Tensor | np.ndarray):
        array = numpy_of(value)
        rows = (1, *array.shape[1:]) if array.ndim > 1 else array.shape
        checked = {"chunks": rows, "fletcher32": True} if rows and array.size else {}  # a number alone is no chunk
        file.create_dataset(name, data=array, **checked)
        file[name].attrs["kind"] = "tensor" if isinstance(value, torch.Tensor) else "array"
    elif value is None or isinstance(value, bool | int | float | str | np.generic):
        group = file.create_group(name)
        group.attrs["kind"] = "scalar"
        group.attrs["json"] = json.dumps(value.item() if isinstance(value, np.generic) else value)
    else:
        raise TypeError(
            f"a checkpoint cannot hold {name}: it is a {type(value).__name__}, not a tensor, array, graph or scalar"
        )


def read(item: Any, device: torch.device) -> Any:
    """Return what `write` wrote."""
    kind = item.attrs["kind"]
    if kind == "graph":
        return CollaborationGraph(item["indptr"][()], item["senders"][()])
    if kind == "scalar":
        return json.loads(item.attrs["json"])
    array = np.asarray(item[()])  # h5py gives an array of no axes as a number
    return torch.from_numpy(array).to(device) if kind == "tensor" else array
