"""What a results file may hold: type, shape and range of every array, and checksums of what HDF5 has none for, its attributes.

The names are explained in `results`. Axes: N clients, C classes, T + 1 rounds, E + 1 epochs of tuning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.settings import Resolved, Run
from dpfl_mpi.settings.run import stored_run
from dpfl_mpi.storage.foreign import Hdf5, Size, open_regular, refused_as

SCHEMA = 1
CHUNK = 2**20  # bytes of a chunk, which is read and checked as a whole
PHASES = ("train", "graph", "exchange", "wait", "evaluate", "write")  # of a round, in the order in which they are shown
# provenance: may differ between equal runs
EXEMPT = ("meta", "seconds", "traffic/bytes_rma", "traffic/bytes_collective")
# attributes of the file; and all of /meta
SEALED = ("run", "key", "declared", "schema", "dataset", "partition", "method", "budget", "seed")


class Layout(NamedTuple):
    """An array: NumPy's letters of its type, its axes, its lowest and highest value; not a number is allowed."""

    kinds: str
    axes: str
    low: float = -math.inf
    high: float = math.inf


def several(names: str, *layout: Any) -> dict[str, Layout]:
    """Return the same layout for several names: "round/{epochs,number}"."""
    folder, _, rest = names.partition("{")
    return {f"{folder}{name}": Layout(*layout) for name in rest.rstrip("}").split(",")}


INT, FLOAT = "iu", "f"
ONE = 1 + 1e-9  # a share, rounded
ARRAYS: dict[str, Layout] = {
    **several("round/{number,epochs,gradient_steps}", INT, "T", 0),
    **several("round/{train_loss,val_loss,test_loss}", FLOAT, "T N"),
    **several("round/{val_acc,test_acc,best_test_acc}", FLOAT, "T N", 0, ONE),
    **several("mixed/{val_acc,test_acc}", FLOAT, "T N", 0, ONE),
    **several("best/{round}", INT, "N", -1),
    **several("best/{val_acc,test_acc}", FLOAT, "N", 0, ONE),
    **several("best/{confusion}", INT, "N C C", 0),
    **several("last/{test_acc}", FLOAT, "N", 0, ONE),
    **several("finetune/{val_acc,test_acc}", FLOAT, "E N", 0, ONE),
    **several("finetune/{epochs,gradient_steps}", INT, "E", 0),
    **several("client/{p}", FLOAT, "N", 0, ONE),
    **several("client/{budget,epochs,n_train,n_val,n_test,of_data}", INT, "N", 0),
    **several("client/{diverged_round}", INT, "N", -1),
    **several("client/{flipped}", "b", "N"),
    **several("client/{class_counts}", INT, "N C", 0),
    **several("graph/{reach/indptr,omega/indptr}", INT, "N+1", 0),
    **several("graph/{reach/senders,omega/senders,chosen/senders}", INT, "any", 0),
    **several("graph/{chosen/indptr}", INT, "T N+1", 0),
    **several("graph/{cases}", INT, "T N 4", 0),
    **several("graph/{evaluations}", INT, "T N", 0),
    **several("traffic/{models_received}", INT, "T N", 0),
    **several("traffic/{bytes_rma,bytes_collective}", INT, "T", 0),
    **several("seconds/{train,graph,exchange,wait,evaluate,write}", FLOAT, "T 3", 0),
    **several("model/{best}", FLOAT, "N any"),
    **several("client/{liars,newcomers,drifted}", "b", "N"),
    **several("client/{stopped_round}", INT, "N", -1),
    **several("client/{drift_classes}", INT, "2", 0),
    **several("attack/{success}", FLOAT, "N", 0, ONE),
    **several("newcomers/{val_acc,test_acc}", FLOAT, "any N", 0, ONE),
    **several("newcomers/{models_received,evaluations}", INT, "any N", 0),
    **several("newcomers/{epochs}", INT, "any", 0),
}
OVER_ROUNDS = [name for name, layout in ARRAYS.items() if layout.axes.startswith("T")]


def shape(axes: str, run: Run, finished: bool) -> list[Size]:
    """Return the lengths of axes in the result of a resolved Run; one that is not finished may have fewer rounds."""
    n, rounds = int(run.clients), int(run.rounds) + 1
    whole = finished and not run.patience  # a run in which all have stopped early ends there
    lengths: dict[str, Size] = {"N": n, "N+1": n + 1, "T": rounds if whole else range(rounds + 1)}
    lengths |= {"E": int(run.finetune_epochs) + 1, "C": None, "any": None, "2": 2, "3": 3, "4": 4}
    return [lengths[axis] for axis in axes.split()]


def array(file: Hdf5, name: str, run: Run, finished: bool, rows: slice | None = None) -> np.ndarray:
    """Return an array of a result, or some rows of it, checked; one that a later version added is any array of numbers."""
    if name not in ARRAYS:
        return file.array(name, "iufbOS", rows=rows)
    kinds, axes, low, high = ARRAYS[name]
    return file.array(name, kinds, shape(axes, run, finished), low, high, rows)


def graph(file: Hdf5, name: str, indptr: np.ndarray, senders: np.ndarray) -> CollaborationGraph:
    """Return the graph of N clients that these arrays `[N+1]` and `[E]` describe, checked."""
    senders, n = senders.astype(np.int64), len(indptr) - 1
    edges = int(indptr[-1]) if n >= 0 else -1
    if n < 0 or indptr[0] != 0 or (np.diff(indptr) < 0).any() or edges != len(senders) or (senders >= n).any():
        raise file.damaged(name, "is no graph")
    return CollaborationGraph(indptr.astype(np.int64), senders)


def chosen(file: Hdf5, run: Run, t: int) -> CollaborationGraph:
    """Return the graph of round t, of which no more is read than that round."""
    rows = file.dataset("graph/chosen/indptr", "iu", (None, int(run.clients) + 1))
    if not 0 <= t < len(rows):
        raise UserError(f"round {t} is not in {file.path}; allowed are 0 to {len(rows) - 1}")
    senders = file.dataset("graph/chosen/senders", "iu", (None,))
    with file.reading("graph/chosen"):
        indptr = rows[t]
        mine = senders[indptr[0] : indptr[-1]]
    return graph(file, "graph/chosen", indptr - indptr[0], mine)


def last_round(file: Hdf5) -> int:
    """Return the last round of which every array has a row, -1 before there is one."""
    there = ["round/number"] if state(file) == "finished" else OVER_ROUNDS
    rounds = min((len(file.dataset(name, "iuf")) for name in there if name in file), default=0)
    return max(-1, min(file.attribute("rounds_done", int), rounds - 1))  # fine-tuning counts on, without rounds


# what attributes and texts say, and their checksums ------------------------------------------------------------------------
def checksum(values: Any) -> str:
    """Return a short hash of texts and numbers, or of lists and dicts of them."""
    text = json.dumps(values, sort_keys=True, default=lambda value: value.tolist())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def number(values: Any) -> int:
    """Return a checksum as a number of 8 bytes: an attribute that changes in its place."""
    return int(checksum(values)[:15], 16)


def seal(attributes: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """Return the checksum of what a file's attributes say about the Run, and of all those of /meta."""
    return checksum([{n: attributes[n] for n in SEALED if n in attributes}, dict(meta)])


def open_result(path: Path, newest: int) -> tuple[Hdf5, Resolved, dict[str, Any]]:
    """Return a result open for reading, its Run and its key. Files of earlier versions have no checksums.

    Raises:
        UserError: it is not a result, damaged, or of a schema beyond the `newest` known.
    """
    what = "a result of dpfl_mpi"
    file = Hdf5(path, what)
    try:
        with refused_as(f"{path} is not {what}, or it is damaged"):
            attributes, schema = dict(file.file.attrs), int(file.file.attrs["schema"])
            meta = dict(file.file["meta"].attrs) if "meta" in file.file else {}
        if schema > newest:
            raise UserError(f"{path} has schema {schema}; this version of dpfl_mpi reads up to {newest}")
        with refused_as(f"{path} is not {what}, or it is damaged"):
            if attributes.get("checksum", "") not in ("", seal(attributes, meta)):
                raise ValueError
            return file, *stored_run(attributes, str(meta.get("data_sha256", "")))
    except UserError:
        file.close()
        raise


def torn(path: Path) -> bool:
    """Return whether a file that is no readable result begins as one, so that a checkpoint beside it may replace it."""
    with contextlib.suppress(UserError), open_regular(path, follow=False) as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"
    return False


def check_ours(path: Path) -> None:
    """Raise `UserError` where --fresh would replace something else than a result: a text, a link, a device."""
    if not os.path.lexists(path):
        return
    ours = False
    with contextlib.suppress(UserError), open_regular(path, follow=False), Hdf5(path, "a result") as file:
        ours = {"run", "schema", "state"} <= set(file.file.attrs)
    if not ours:
        raise UserError(
            f"{path} is not a result of dpfl_mpi, and --fresh replaces nothing else; remove it, or choose another --out"
        )


def state(file: Hdf5) -> str:
    """Return the state: running, stopped or finished. In a finished file, what it says of its progress is checked."""
    out: str = file.attribute("state", str)
    if out not in ("running", "stopped", "finished"):
        raise file.damaged("the attribute state", f"is {out!r}")
    with file.reading("its progress"):
        done = [file.file.attrs[name] for name in ("rounds_done", "test_acc")]
        if out == "finished" and file.attribute("progress", int, default=number(done)) != number(done):
            raise ValueError
    return out


def starts(file: Hdf5) -> list[dict[str, Any]]:
    """Return one description per start."""
    texts = file.texts("meta/starts")
    with file.reading("meta/starts"):
        if file.file["meta/starts"].attrs.get("checksum", checksum(texts)) != checksum(texts):
            raise ValueError
        return [dict(json.loads(text)) for text in texts]


def layers(file: Hdf5) -> list[tuple[str, list[int]]]:
    """Return name and shape of every layer of the saved models, in their order in a row."""
    texts = {name: file.attribute(name, str, "model") for name in ("names", "shapes")}
    with file.reading("its list of layers"):
        if file.attribute("checksum", str, "model", default=checksum(texts)) != checksum(texts):
            raise ValueError
        return list(zip(*(json.loads(text) for text in texts.values()), strict=True))
