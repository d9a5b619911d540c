"""What a results file holds: every array and attribute in one table, and the checks of what is read."""

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
/key                       JSON                    `Run.key`: what decides the numbers, files by their content
/declared                  JSON                    what the method, and code that is not shipped, say of themselves
/schema                    int                     of this table
/dataset                   text
/partition                 text
/method                    text
/budget                    text
/seed                      int
/state                     text                    running, stopped or finished
/rounds_done               int                     the last round; fine-tuning counts on
/test_acc                  float                   mean of best/test_acc over benign clients
/checksum                  text                    of all other attributes and of meta/starts, for which HDF5 has none
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
meta/starts                lines  starts           JSON of each start: time, hosts, ranks, device, CPU, versions, commit
round/number               int    T+1       0..    row 0 is after preprocessing, here and in all arrays [T+1]
round/epochs               int    T+1       0..    local epochs so far of a client, of one of its models
round/gradient_steps       int    T+1       0..    so far, of all clients
round/train_loss           float  T+1 N
round/val_loss             float  T+1 N            where a method scores twice: of the last models
round/val_acc              float  T+1 N     0..1
round/test_loss            float  T+1 N
round/test_acc             float  T+1 N     0..1
round/best_test_acc        float  T+1 N     0..1   of the best model by validation so far
round/there                bool   T+1 N            with --churn: who has come and not left
mixed/val_acc              float  T+1 N     0..1   with --mixed: after mixing
mixed/test_acc             float  T+1 N     0..1
best/round                 int    N         -1..   of the best model by validation; with --finetune_epochs of the tuned ones
best/val_acc               float  N         0..1
best/test_acc              float  N         0..1
best/confusion             int    N C C     0..    test images by true class and by class taken for; at the end
last/test_acc              float  N         0..1
finetune/epochs            int    E+1       0..    with --finetune_epochs: row 0 is the best model of the rounds
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
client/diverged_round      int    N         -1..   -1: it did not
client/of_data             int    N         0..    with --partition natural: row of client_names of the prepared file
client/flipped             bool   N                --flip_share
client/liars               bool   N                with --attack
client/newcomers           bool   N                with --newcomers
client/drifted             bool   N                with --drift
client/drift_classes       int    2         0..    the two classes that it exchanges
client/stopped_round       int    N         -1..   with --patience
attack/success             float  N         0..1   with --attack backdoor: share of marked test images taken for class 0
newcomers/epochs           int    rows      0..    with --newcomers: of their own, before each row
newcomers/val_acc          float  rows N    0..1
newcomers/test_acc         float  rows N    0..1
newcomers/models_received  int    rows N    0..
newcomers/evaluations      int    rows N    0..
graph/reach/indptr         int    N+1       0..    with --reach: k can receive from senders[indptr[k] : indptr[k + 1]]
graph/reach/senders        int    edges     0..
graph/omega/indptr         int    N+1       0..    Omega: k may choose senders[indptr[k] : indptr[k + 1]]
graph/omega/senders        int    edges     0..
graph/chosen/indptr        int    T+1 N+1   0..    in round t k takes senders[indptr[t, k] : indptr[t, k + 1]]; row 0 is Omega,
                                                   and a round that averages nothing repeats the one before
graph/chosen/senders       int    edges     0..    of all rounds, one after the other
graph/cases                int    T+1 N 4   0..    in the order of `graph.CASES`
graph/evaluations          int    T+1 N     0..    of the reward
graph/repair_models        int    T+1 N     0..    of traffic/models_received what --churn made necessary, as is the next
graph/repair_evaluations   int    T+1 N     0..
traffic/models_received    int    T+1 N     0..    what a network would carry; row 0: Algorithm 3 and line 4 of Algorithm 1
traffic/bytes_sent         int    T+1 N     0..    with --network, --codec or --send: of each client, and a server's answers to it
traffic/bytes_rma          int    T+1       0..    what MPI carried here, of all ranks
traffic/bytes_collective   int    T+1       0..
network/step               float  N         0..    with --network: simulated seconds of a gradient step
network/image              float  N         0..    simulated seconds for scoring an image
network/up                 float  N         0..    megabits per second, as is network/down
network/down               float  N         0..
network/latency            float  N         0..    seconds between the client and the middle of the network
network/train              float  T+1 N     0..    simulated seconds, as are the next four
network/choose             float  T+1 N     0..    scoring on validation images
network/send               float  T+1 N     0..    of the uplink, beside the rest
network/wait               float  T+1 N     0..    for the models of others
network/end                float  T+1 N     0..    when the client ended the round, since the start
network/age                int    T+1 N     0..    rounds that what the client received was old, summed (--staleness)
network/waited_for         int    T+1 N     -1..   whose model came last, -1: it did not wait
seconds/train              float  T+1 3     0..    least, mean and most of the ranks
seconds/graph              float  T+1 3     0..
seconds/exchange           float  T+1 3     0..
seconds/wait               float  T+1 3     0..    before the opening Fence
seconds/evaluate           float  T+1 3     0..
seconds/write              float  T+1 3     0..
model/best                 float  N D              with --save_models
model/names                JSON                    layers, in their order in a row, and their shapes
model/shapes               JSON

N clients, C classes, T rounds (fewer in a run that is not finished, or stopped early), E epochs of fine-tuning.
"""
SCHEMA = 1
CHUNK = 2**20  # bytes of a chunk, which is read and checked as a whole
PHASES = ("train", "graph", "exchange", "wait", "evaluate", "write")  # of a round, in the order in which they are shown
# provenance: may differ between equal runs
EXEMPT = ("meta", "seconds", "traffic/bytes_rma", "traffic/bytes_collective")
ADDED = ("model/", "mixed/")  # by flags of a Job
KINDS = {"int": "iu", "float": "f", "bool": "b", "lines": "OS"}  # NumPy's letters
ROUNDED = 1e-9  # a share is at most 1, but for rounding


class Layout(NamedTuple):
    """An array: NumPy's letters of its type, its axes, its lowest and highest value; not a number is allowed."""

    kinds: str
    axes: str
    low: float
    high: float


ARRAYS: dict[str, Layout] = {}  # by name, from the table
for line in LAYOUT.splitlines():
    array, kind, axes, ends = (line[a:b].strip() for a, b in ((0, 27), (27, 34), (34, 44), (44, 51)))
    if axes and kind in KINDS:
        low, _, high = ends.partition("..")
        ARRAYS[array] = Layout(KINDS[kind], axes, float(low or -math.inf), float(high or math.inf) + ROUNDED)
OVER_ROUNDS = [name for name, layout in ARRAYS.items() if layout.axes.startswith("T+1")]


def shape(axes: str, run: Resolved, finished: bool) -> list[Size]:
    """Return the lengths of axes in the result of a resolved Run; one that is not finished may have fewer rounds."""
    rounds = int(run.rounds) + 1
    whole = finished and not run.patience  # a run in which all have stopped early ends there
    lengths: dict[str, Size] = {"N": run.clients, "N+1": run.clients + 1, "E+1": run.finetune_epochs + 1}
    lengths["T+1"] = rounds if whole else range(rounds + 1)
    return [int(axis) if axis.isdigit() else lengths.get(axis) for axis in axes.split()]


def seal(file: h5py.File, starts: list[str]) -> str:
    """Return the checksum of what HDF5 has none for: all attributes, and the texts of meta/starts."""
    groups = [file[name].attrs for name in ("/", "meta", "model") if name in file]
    attributes = [{name: value for name, value in group.items() if name != "checksum"} for group in groups]
    text = json.dumps([attributes, starts], sort_keys=True, default=lambda value: value.tolist())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
