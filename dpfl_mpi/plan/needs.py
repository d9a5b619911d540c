"""What a run will need: the memory of each rank, computed, and the time of a step, measured.

`python -m dpfl_mpi.describe` prints both before a run is started; a run itself calls
`refuse_results` and `saved_bytes`. A row is the weights of a model, as float32 in memory. A window
is the shared memory (MPI RMA) in which a rank receives other clients' models; a slot is room for
one model in it. A pass is one filling and reading of all windows: wide graphs take several.
"""

import timeit
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dpfl_mpi.data.partition import PARTS, Partition, assemble
from dpfl_mpi.data.source import BORDER, Source
from dpfl_mpi.errors import UserError
from dpfl_mpi.models import make
from dpfl_mpi.mpi import placement
from dpfl_mpi.mpi.node import node_memory
from dpfl_mpi.mpi.placement import MAX_ROWS_PER_PASS, place
from dpfl_mpi.numerics.backend import LocalEpochs
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.optimiser import optimiser_of
from dpfl_mpi.numerics.select_backend import native_or_why, pytorch_instead
from dpfl_mpi.numerics.sketches import comparison_bytes
from dpfl_mpi.settings import Job, Resolved
from dpfl_mpi.streams import INIT, stream
from dpfl_mpi.transport.build import sent_of

LABEL = 8  # bytes
# bytes of a rank before it holds data: Python, torch, MPI and shared libraries (measured)
PYTHON = 390 * 2**20
GATHERED = 2**26  # bytes of models or confusion matrices that root receives at a time
# bytes of a model, and of all models together, below which they are saved unasked
SMALL_MODEL, SMALL_MODELS = 1e6, 1e8
TIMED_IMAGES = 64  # most images of the epoch that is timed, in whole mini-batches
TIMED_S = 0.5  # seconds that the measurement takes
LR = 1e-4  # of the steps that are timed: small, so that the weights stay finite


@dataclass(frozen=True)
class Needs:
    """What a run will need. Arrays have one value per rank but for `owner`; sizes are bytes."""

    owner: np.ndarray  # rank of every client [N]
    clients: np.ndarray  # how many a rank has
    node: np.ndarray  # the number of its node
    steps: np.ndarray  # gradient steps in the whole run
    data: np.ndarray
    rows: dict[str, np.ndarray]  # how many rows, by purpose; a row in 64 bits counts twice
    sketches: int  # while clients choose among the most similar (--candidates)
    results: np.ndarray  # confusion matrices; on rank 0 also what is written at the end
    window: np.ndarray
    passes: int  # that the widest graph takes; 0: not even one model per client fits
    parameters: int  # of a model
    row: int  # bytes of a row
    kernels: int = 0  # what the native kernels work in

    @property
    def models(self) -> np.ndarray:
        """Bytes of models in memory beside the window."""
        return sum(self.rows.values(), np.zeros_like(self.clients)) * self.row

    @property
    def memory(self) -> np.ndarray:
        beside = PYTHON + self.sketches + self.kernels
        return beside + self.data + self.models + self.results + self.window


def ensemble_of(run: Resolved, source: Source) -> Ensemble:
    """Return the `Ensemble` of a Run's model on a CPU; from now on PyTorch has one thread."""
    torch.set_num_threads(1)  # as each rank of a run
    module = make(run, source, stream(run.seed, INIT, 0, 1))
    mean, std, cpu = source.mean, source.std, torch.device("cpu")
    return Ensemble(module, mean, std, cpu, run.precision, source.dtype)


def needs_of(
    run: Resolved,
    job: Job,
    source: Source,
    partition: Partition,
    ensemble: Ensemble,
    ranks: int,
    nodes: int,
) -> Needs:
    """Return what each rank will hold and train."""
    n, row, method = partition.n, 4 * ensemble.width, run.found("method")
    train, val, test = (partition.sizes(part) for part in PARTS)
    owner = place(train, ranks)  # as the run itself will place the clients
    clients = np.bincount(owner, minlength=ranks)
    per_rank = lambda values: np.bincount(owner, values, ranks).astype(np.int64)  # noqa: E731
    # the window, and the rows beside it
    columns, codec = sent_of(run, ensemble)
    packed = 0  # bytes of a slot, if models are sent compressed or in part
    if codec:
        packed = -(-codec.bytes // 4) * 4
    elif columns is not None:
        packed = 4 * int(columns[: ensemble.size].sum())
    window, passes = windows(run, job, clients, row, packed or row)
    rows = rows_per_rank(run, clients)
    if packed:  # models are unpacked into memory
        unpacked = np.minimum(clients * run.most_senders, n - clients)
        rows["unpacked"] = unpacked * (run.staleness + 1)
    if passes > 1:
        # the sums of all clients at once, of 64 bits, i.e. 2 rows each: totals, and for a search
        # also the Y that it starts from, and its X and Y
        searches = run.most_senders > 0 and method.searches
        rows["passes"] = clients * (8 if searches else 2)
    # confusion matrices: the best in 64 bits, what is sent in 32
    results = 12 * clients * source.classes**2
    results[0] += results_bytes(n, source.classes, saved_bytes(job, n, ensemble.size))
    # local epochs of a client in the whole run
    rounds = run.rounds * run.participation  # in which a client takes part
    of_round = run.tau_train * method.models * run.options.get("steps", 1)
    epochs = run.tau_init + rounds * of_round + run.finetune_epochs
    # bytes of a sample with its label; to train, with a border around images that are cropped
    border = [2 * BORDER, 2 * BORDER, 0] if run.augment else 0
    itemsize = np.dtype(source.dtype).itemsize
    to_train = int(np.prod(np.add(source.shape, border))) * itemsize + LABEL
    to_score = int(np.prod(source.shape)) * itemsize + LABEL
    # data made by `load` is copied in full to every rank
    whole = 0 if source.path else sum(map(len, source.labels.values())) * to_score
    return Needs(
        owner=owner,
        clients=clients,
        node=np.arange(ranks) // -(-ranks // nodes),
        steps=per_rank(-(-train // run.batch_size) * epochs),
        data=per_rank(train) * to_train + per_rank(val + test) * to_score + whole,
        rows=rows,
        sketches=comparison_bytes(n) * (run.most_asked < run.clients - 1),
        results=results,
        window=window * (packed or row),
        passes=passes,
        parameters=ensemble.size,
        row=row,
    )


def rows_per_rank(run: Resolved, clients: np.ndarray) -> dict[str, np.ndarray]:
    """Return how many rows ranks with so many clients hold at most, by purpose."""
    method = run.found("method")
    # Clients search in groups, one after the other; what counts or changes single messages needs
    # all at once. A client that searches has two sums of 64 bits, i.e. 4 rows. Where clients ask
    # different others, each also has a sum to start from, 2 rows.
    in_parts = run.send or method.sends
    groups = 1 if run.network or run.codec or in_parts else placement.waves(clients)
    searching = -(-clients // groups)
    asks_some = run.reach is not None or run.most_asked < run.clients - 1
    search = 4 * searching + 2 * clients * asks_some
    return {
        "model": clients * method.models,
        "average": clients,  # which takes the model's place
        "momentum": clients * method.models * (1 + (run.optimizer != "sgd")),  # Adam has two means
        "best": clients,
        # what is sent, now and in --staleness earlier rounds; with a codec also the rows as they
        # were encoded last, and as receivers have them
        "staging": clients * (1 + run.staleness + 2 * bool(run.codec)),
        "search": search * bool(run.most_senders > 0 and method.searches),
    }


def windows(
    run: Resolved, job: Job, clients: np.ndarray, row: int, slot: int
) -> tuple[np.ndarray, int]:
    """Return the slots of each rank's window, and the passes that the widest graph takes.

    A slot has the bytes of a model as it is sent. With a codec a model may have to come whole once,
    in `row` bytes. 0 passes: not even one model per client fits.
    """
    most, versions = run.most_senders, run.staleness + 1
    # how many slots a rank could use, and how many --window_gb allows
    slots, limit = placement.window_slots(clients * most, clients, versions, job.window_gb, slot)
    window = np.minimum(slots, limit)
    if most == 0 and run.found("method").every_row:  # no graph, but all rows go to all ranks
        others = int(clients.sum()) - clients
        max_rows = min(int(clients.sum()), MAX_ROWS_PER_PASS)
        rows = placement.rows_per_pass(np.full(len(clients), limit), clients, max_rows)
        window = np.where(clients > 0, np.minimum(others, rows), 0)
    # slots of whole models that --window_gb allows
    largest = row if run.codec else slot
    _, whole = placement.window_slots(clients * most, clients, versions, job.window_gb, largest)
    per_pass = placement.models_per_pass(slots, np.full(len(clients), whole), clients)
    if per_pass == 0:
        return window, 0
    if (slots <= limit).all():
        return window, 1
    capacity = np.full(len(clients), whole if run.codec else limit)
    per_pass = placement.models_per_pass(slots, capacity, clients) or 1
    return window, -(-most // per_pass)


def saved_bytes(job: Job, clients: int, parameters: int) -> int:
    """Return the bytes of a model in the results file: 0 if models are not saved."""
    size = 4 * parameters
    small = size < SMALL_MODEL and clients * size < SMALL_MODELS
    return size * (small if job.save_models is None else job.save_models)


def results_bytes(clients: int, classes: int, saved: int) -> int:
    """Return what the results take on rank 0: the file in memory, and two buffers for its parts."""
    confusion = 4 * classes**2
    received = clients * max(confusion, saved)
    return clients * (confusion + saved) + 2 * min(received, GATHERED)


def refuse_results(job: Job, clients: int, classes: int, parameters: int) -> None:
    """Raise `UserError` where rank 0 could not hold the results of so many clients."""
    saved = saved_bytes(job, clients, parameters)
    need, (limit, name) = results_bytes(clients, classes, saved), node_memory(shared=False)
    if need > limit:
        what = f"confusion matrices of {clients} clients and {classes} classes"
        what += f", and {clients} models of {megabytes(saved)}," if saved else ""
        room = f"{need / 2**30:.2f} GiB on rank 0, whose node has {limit / 2**30:.2f} GiB ({name})"
        advice = "use --no-save_models, " if saved else "use "
        advice += "fewer --clients, or data with fewer classes"
        raise UserError(f"the {what} need {room}: {advice}")


def refuse(job: Job, needs: Needs) -> None:
    """Raise `UserError` for a run that does not fit, if every node is like this machine."""
    if needs.passes == 0:
        raise placement.too_narrow(job.window_gb, needs.row, needs.clients)
    everything, more_nodes = "data, models, results and windows", "use more --nodes or a"
    for shared, of_ranks, what, advice in (
        (True, needs.window, "the RMA windows", "set a"),
        (False, needs.memory, everything, more_nodes),
    ):
        need, (limit, name) = np.bincount(needs.node, of_ranks).max(), node_memory(shared=shared)
        if need > limit:
            given = f"this machine can give {megabytes(limit)} ({name})"
            mend = f"{advice} smaller --window_gb"
            raise UserError(f"{what} need {megabytes(need)} on a node; {given}: {mend}")


# time -------------------------------------------------------------------------------------------
def step_seconds(run: Resolved, backend: Any, steps: int) -> float:
    """Return the shortest measured time of a gradient step, in seconds."""
    # `backend` and `steps` are those of `one_client`
    ensemble = backend.ensemble
    row = ensemble.initial_row(run.init, np.random.default_rng(0))[None].clone()
    block = Block(ensemble, row, backend.zero_momentum(1), slice(0, 1))
    first = np.zeros(1, np.int64)
    timer = timeit.Timer(lambda: backend.train_epochs(block, LocalEpochs(1, first, LR)))
    timer.timeit(1)  # the first time is longer
    return min(timer.repeat(max(3, int(TIMED_S / timer.timeit(1))), 1)) / steps


def one_client(
    run: Resolved, job: Job, source: Source, ensemble: Ensemble, n: int
) -> tuple[Any, int]:
    """Return a backend with one client of random samples, and the steps of its epoch.

    It has up to n samples to train, but at most `TIMED_IMAGES` or one mini-batch, and one to
    validate. A `UserError` if --kernels asks for native kernels that are not available here.
    """
    n = max(1, min(n, max(1, TIMED_IMAGES // run.batch_size) * run.batch_size))
    rng = np.random.default_rng(0)
    images = rng.integers(0, source.vocabulary or 256, (n + 1, *source.shape))
    images = images.astype(source.dtype)
    labels = rng.integers(0, source.classes, n + 1)
    samples = {"train": [np.arange(n)], "val": [np.arange(n, n + 1)], "test": [np.arange(0)]}
    counts = np.zeros((1, source.classes), np.int64)
    partition = assemble(samples, counts, np.ones(1), False)
    both = {"train": labels, "test": labels}
    drawn = replace(source, labels=both, images=lambda half, rows: images[rows])
    ids, sgd = np.zeros(1, np.int64), optimiser_of(run)
    clients = Clients(drawn, partition, ids, run.seed, run.augment, ensemble)
    native, why = native_or_why(job.kernels, ensemble, clients, sgd)
    backend = native or pytorch_instead(job.kernels, why, ensemble, clients, sgd)
    return backend, -(-n // run.batch_size)


# texts ------------------------------------------------------------------------------------------
def megabytes(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
