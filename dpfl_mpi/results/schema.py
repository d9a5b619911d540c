"""The layout of a results file: every array and attribute, in one table.

`Result` checks the type, shape and range of what it reads by it. N clients, C classes, T rounds.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, NamedTuple

from dpfl_mpi.settings import Resolved
from dpfl_mpi.storage.foreign import Size

if TYPE_CHECKING:
    import h5py

# printed by `python -m dpfl_mpi.show --layout`; columns are two blanks apart
LAYOUT = """\
name                       type   axes      range  what it is
/run                       JSON                    the resolved Run
/key                       JSON                    `Run.key`: what decides the numbers
/declared                  JSON                    what the method and own code declare
/schema                    int                     of this table
/dataset                   text
/partition                 text
/method                    text
/budget                    text
/seed                      int
/state                     text                    running, stopped or finished
/rounds_done               int                     the last round; fine-tuning epochs continue the
                                                   count
/test_acc                  float                   mean of best/test_acc over benign clients
/checksum                  text                    of all other attributes and meta/starts
meta/numerics              int                     version of the numbers
meta/data_sha256           text
meta/data_note             text
meta/class_names           JSON                    of the data, as are mean and std
meta/mean                  JSON
meta/std                   JSON
meta/dtype                 text                    of samples
meta/partition_sha256      text
meta/partition_note        text
meta/parameters            int                     D, of one model
meta/starts                lines  starts           JSON per start: time, hosts, ranks, CPU, versions
round/number               int    T+1       0..    row 0 of all arrays [T+1]: after preprocessing
round/epochs               int    T+1       0..    local epochs so far, of one model of a client
round/gradient_steps       int    T+1       0..    so far, of all clients
round/train_loss           float  T+1 N
round/val_loss             float  T+1 N            of the last models if a method scores twice
round/val_acc              float  T+1 N     0..1
round/test_loss            float  T+1 N
round/test_acc             float  T+1 N     0..1
round/best_test_acc        float  T+1 N     0..1   of the best model by validation so far
round/there                bool   T+1 N            with --churn: who has joined and not left
mixed/val_acc              float  T+1 N     0..1   with --mixed: after mixing
mixed/test_acc             float  T+1 N     0..1
best/round                 int    N         -1..   of the best model by validation, -1: none;
                                                   with --finetune_epochs of the tuned models
best/val_acc               float  N         0..1
best/test_acc              float  N         0..1
best/test_auc              float  N         0..1   of a class against the rest, mean over those of
                                                   its test images; not of knnper
best/confusion             int    N C C     0..    test images by true and predicted class
last/test_acc              float  N         0..1
finetune/epochs            int    E+1       0..    with --finetune_epochs: row 0 is before them
finetune/gradient_steps    int    E+1       0..
finetune/val_acc           float  E+1 N     0..1
finetune/test_acc          float  E+1 N     0..1
client/p                   float  N         0..1   weight p_k in averages
client/budget              int    N         0..    B_c
client/epochs              int    N         0..    local epochs
client/n_train             int    N         0..
client/n_val               int    N         0..
client/n_test              int    N         0..
client/class_counts        int    N C       0..    training and validation samples by class
client/diverged_round      int    N         -1..   round in which its weights became non-finite or
                                                   too large; -1: never
client/of_data             int    N         0..    with --partition natural: row of client_names
client/name                text   N                where the data name their clients, as is
client/group               text   N                client/group where the data have groups
client/flipped             bool   N                with flipped labels (--flip_share)
client/attackers           bool   N                with --attack
client/newcomers           bool   N                with --newcomers
client/drifted             bool   N                with --drift
client/drift_classes       int    2         0..    the two classes that it exchanges
client/stopped_round       int    N         -1..   with --patience
attack/success             float  N         0..1   with --attack backdoor: share of marked test
                                                   images predicted as class 0
newcomers/epochs           int    rows      0..    with --newcomers: of their own, before each row
newcomers/val_acc          float  rows N    0..1
newcomers/test_acc         float  rows N    0..1
newcomers/models_received  int    rows N    0..
newcomers/evaluations      int    rows N    0..
graph/reach/indptr         int    N+1       0..    with --reach: k can receive from
                                                   senders[indptr[k] : indptr[k + 1]]
graph/reach/senders        int    edges     0..
graph/omega/indptr         int    N+1       0..    Omega, in the same form
graph/omega/senders        int    edges     0..
graph/chosen/indptr        int    T+1 N+1   0..    the same for each round t; row 0 is Omega, and a
                                                   round without averaging repeats the last one
graph/chosen/senders       int    edges     0..    of all rounds, one after the other
graph/cases                int    T+1 N 4   0..    in the order of `graph.CASES`
graph/evaluations          int    T+1 N     0..    of the reward
graph/repair_models        int    T+1 N     0..    received because of --churn (part of
                                                   traffic/models_received)
graph/repair_evaluations   int    T+1 N     0..    likewise
traffic/models_received    int    T+1 N     0..    on a network; row 0: Algorithm 3, and line 4 of
                                                   Algorithm 1
traffic/bytes_sent         int    T+1 N     0..    with --network, --codec or --send: by a client,
                                                   and a server's answers to it
traffic/bytes_rma          int    T+1       0..    what MPI carried here, of all ranks
traffic/bytes_collective   int    T+1       0..
network/step               float  N         0..    with --network: simulated seconds of a step
network/image              float  N         0..    simulated seconds for scoring an image
network/up                 float  N         0..    megabits per second, as is network/down
network/down               float  N         0..
network/latency            float  N         0..    seconds from client to the middle of the network
network/train              float  T+1 N     0..    simulated seconds, as are the next four
network/choose             float  T+1 N     0..    scoring on validation images
network/send               float  T+1 N     0..    of the uplink, in parallel to the rest
network/wait               float  T+1 N     0..    for the models of others
network/end                float  T+1 N     0..    when the client ended the round, since the start
network/age                int    T+1 N     0..    sum of the ages of models received, in rounds
network/waited_for         int    T+1 N     -1..   whose model came last; -1: did not wait
seconds/train              float  T+1 3     0..    lowest, mean and highest of the ranks
seconds/graph              float  T+1 3     0..
seconds/exchange           float  T+1 3     0..
seconds/wait               float  T+1 3     0..    before the opening Fence
seconds/evaluate           float  T+1 3     0..
seconds/write              float  T+1 3     0..    until the row is written; without the checkpoint
model/best                 float  N D              with --save_models
model/names                JSON                    layers, in their order in a row, and their shapes
model/shapes               JSON

N clients, C classes, T rounds (fewer before the end, or if all clients stopped early),
E epochs of fine-tuning.
"""
SCHEMA = 1  # version of the layout
CHUNK = 2**20  # bytes of a chunk, the piece of an array that HDF5 reads and checks as a whole
# the phases of a round whose seconds are measured, in the order in which they are shown
PHASES = ("train", "graph", "exchange", "wait", "evaluate", "write")
# arrays that may differ between runs with equal numbers
EXEMPT = ("meta", "seconds", "traffic/bytes_rma", "traffic/bytes_collective", "client/name")
ADDED = ("model/", "mixed/")  # arrays that a result has by --save_models and --mixed
KINDS = {"int": "iu", "float": "f", "bool": "b", "lines": "OS", "text": "OS"}  # NumPy's letters
ROUNDING = 1e-9  # by which a share may exceed 1
COLUMNS = ((0, 27), (27, 34), (34, 44), (44, 51))  # of the table: name, type, axes, range


class Layout(NamedTuple):
    """An array: NumPy's letters of its type, its axes, its lowest and highest value or nan."""

    kinds: str
    axes: str
    low: float
    high: float


def parse_layout() -> dict[str, Layout]:
    """Return the arrays of `LAYOUT`, by name; its other lines are attributes."""
    out = {}
    for line in LAYOUT.splitlines():
        name, kind, axes, limits = (line[start:end].strip() for start, end in COLUMNS)
        if axes and kind in KINDS:
            low, _, high = limits.partition("..")
            highest = float(high or math.inf) + ROUNDING
            out[name] = Layout(KINDS[kind], axes, float(low or -math.inf), highest)
    return out


ARRAYS = parse_layout()
OVER_ROUNDS = [name for name, layout in ARRAYS.items() if layout.axes.startswith("T+1")]


def shape(axes: str, run: Resolved, finished: bool) -> list[Size]:
    """Return the lengths of axes, such as "T+1 N", in the result of a resolved Run."""
    # before it is finished, or if all clients stopped early, the rounds are a range of lengths
    rows = int(run.rounds) + 1
    lengths: dict[str, Size] = {
        "N": run.clients,
        "N+1": run.clients + 1,
        "E+1": run.finetune_epochs + 1,
        "T+1": rows if finished and not run.patience else range(rows + 1),
    }
    return [int(axis) if axis.isdigit() else lengths.get(axis) for axis in axes.split()]


def checksum(file: h5py.File, starts: list[str]) -> str:
    """Return the checksum of all attributes and of meta/starts, for which HDF5 has none."""
    groups = [file[name].attrs for name in ("/", "meta", "model") if name in file]
    attributes = [{n: value for n, value in group.items() if n != "checksum"} for group in groups]
    parts = [attributes, starts]
    text = json.dumps(parts, sort_keys=True, default=lambda value: value.tolist())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
