"""What a run will need: memory and window of each rank; and the time of one measured step.

Memory is arithmetic on what the ranks will hold, with the placement that the run itself uses.
"""

import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dpfl_mpi.data.partition import PARTS, Partition, assemble
from dpfl_mpi.data.source import Source
from dpfl_mpi.errors import UserError
from dpfl_mpi.models import make
from dpfl_mpi.mpi import placement
from dpfl_mpi.mpi.node import node_memory
from dpfl_mpi.mpi.placement import MAX_ROWS_PER_PASS, place
from dpfl_mpi.numerics import BORDER
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
# bytes of a rank before it holds data: interpreter, torch, MPI and shared libraries (measured)
PYTHON = 390 * 2**20
GATHERED = 2**26  # bytes of models or confusion matrices that root receives at a time
# models of at most this size, and of this size in all, are saved unless --no-save_models; bytes
SMALL_MODEL, SMALL_MODELS = 1e6, 1e8
TIMED_IMAGES = 64  # most images of the epoch that is timed, in whole mini-batches
TIMED_S = 0.5  # seconds that the measurement takes
LR = 1e-4  # small, so that the weights stay finite


@dataclass(frozen=True)
class Needs:
    """What a run will need: arrays have one value per rank, sizes are bytes."""

    owner: np.ndarray  # rank of every client [N]
    clients: np.ndarray
    node: np.ndarray
    steps: np.ndarray  # gradient steps
    data: np.ndarray
    rows: dict[str, np.ndarray]  # of float32, by what holds them; a row in 64 bits counts twice
    sketches: int  # while clients choose among the most similar
    results: np.ndarray  # confusion matrices; on root also what is written at the end
    window: np.ndarray
    passes: int  # times that the windows are filled to exchange the widest graph
    parameters: int
    row: int  # bytes of a model in memory

    @property
    def models(self) -> np.ndarray:
        """Bytes of models in memory beside the window."""
        return sum(self.rows.values(), np.zeros_like(self.clients)) * self.row

    @property
    def memory(self) -> np.ndarray:
        return PYTHON + self.data + self.models + self.sketches + self.results + self.window


def ensemble_of(run: Resolved, source: Source) -> Ensemble:
    """Return the model's numerics on this machine's CPU."""
    torch.set_num_threads(1)  # as each rank of a run
    cpu = torch.device("cpu")
    how = run.precision, source.dtype
    module = make(run, source, stream(run.seed, INIT, 0, 1))
    return Ensemble(module, source.mean, source.std, cpu, *how)


def needs_of(
    run: Resolved,
    job: Job,
    source: Source,
    dealt: Partition,
    ensemble: Ensemble,
    ranks: int,
    nodes: int,
) -> Needs:
    """Return what each rank will hold and train."""
    n, row, method = dealt.n, 4 * ensemble.width, run.found("method")
    train, val, test = (dealt.sizes(part) for part in PARTS)
    owner = place(train, ranks)
    k_r = np.bincount(owner, minlength=ranks)
    per_rank = lambda values: np.bincount(owner, values, ranks).astype(np.int64)  # noqa: E731
    columns, codec = sent_of(run, ensemble)
    packed = 0  # bytes of a slot that does not hold a whole row
    if codec:
        packed = -(-codec.bytes // 4) * 4
    elif columns is not None:
        packed = 4 * int(columns[: ensemble.size].sum())
    window, passes = windows(run, job, k_r, row, packed or row)
    rows = rows_of(run, k_r)
    if packed:  # decoded models lie in memory
        unpacked = np.minimum(k_r * run.most_senders, n - k_r)
        rows["unpacked"] = unpacked * (run.staleness + 1)
    if passes > 1:
        # a few models for all clients at a time: sums in 64 bits, quotients, the kernels' search
        searches = run.most_senders > 0 and method.searches
        rows["passes"] = k_r * (8 if searches else 2)
    results = 12 * k_r * source.classes**2  # the best in 64 bits, what is sent in 32
    results[0] += results_bytes(n, source.classes, saved_bytes(job, n, ensemble.size))
    rounds = run.rounds * run.participation  # in which a client takes part
    of_round = run.tau_train * method.models * run.options.get("steps", 1)
    epochs = run.tau_init + rounds * of_round + run.finetune_epochs
    # bytes of a sample with its label; to train, with the border of an image that is cropped
    border = [2 * BORDER, 2 * BORDER, 0] if run.augment else 0
    width = np.dtype(source.dtype).itemsize
    to_train, to_score = (
        int(np.prod(shape)) * width + LABEL
        for shape in (np.add(source.shape, border), source.shape)
    )
    # data made by `load` is copied in full to every rank
    whole = 0 if source.path else sum(map(len, source.labels.values())) * to_score
    return Needs(
        owner=owner,
        clients=k_r,
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


def rows_of(run: Resolved, k_r: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows that ranks with so many clients hold when they hold most, by purpose."""
    method = run.found("method")
    groups = 1 if run.network or run.codec or run.send else placement.waves(k_r)
    searching = -(-k_r // groups)  # clients that search Omega at once, with two sums in 64 bits
    some_only = run.reach is not None or run.most_asked < run.clients - 1
    search = 4 * searching + 2 * k_r * some_only
    return {
        "model": k_r * method.models,
        "average": k_r,  # which takes the model's place
        "momentum": k_r * method.models * (1 + (run.optimizer != "sgd")),  # Adam has two means
        "best": k_r,
        # rows of earlier rounds may be sent; others know another row than was trained
        "staging": k_r * (1 + run.staleness + 2 * bool(run.codec)),
        "search": search * bool(run.most_senders > 0 and method.searches),
    }


def windows(
    run: Resolved, job: Job, k_r: np.ndarray, row: int, slot: int
) -> tuple[np.ndarray, int]:
    """Return the slots of each rank's window, and the passes that the widest graph takes.

    A pass fills the windows once; each rank reads its models from its own before the next pass.
    There are 0 passes where not even one model per client fits.
    A slot has the bytes of a model as it is sent; it may have to come whole once, `row` bytes.
    """
    most, versions = run.most_senders, run.staleness + 1
    slots, limit = placement.window_slots(k_r * most, k_r, versions, job.window_gb, slot)
    window = np.minimum(slots, limit)
    if most == 0 and run.found("method").every_row:  # no graph says how wide the window is
        others = int(k_r.sum()) - k_r
        max_rows = min(int(k_r.sum()), MAX_ROWS_PER_PASS)
        rows = placement.rows_per_pass(np.full(len(k_r), limit), k_r, max_rows)
        window = np.where(k_r > 0, np.minimum(others, rows), 0)
    _, whole = placement.window_slots(k_r * most, k_r, versions, job.window_gb, row)
    per_pass = placement.models_per_pass(slots, np.full(len(k_r), whole), k_r)
    if per_pass == 0 or (slots <= limit).all():
        return window, 0 if per_pass == 0 else 1
    room = np.full(len(k_r), whole if run.codec else limit)
    per_pass = placement.models_per_pass(slots, room, k_r) or 1
    return window, -(-most // per_pass)


def saved_bytes(job: Job, clients: int, parameters: int) -> int:
    """Return the bytes of each saved model: 0 without --save_models, or if models are large."""
    size = 4 * parameters
    small = size < SMALL_MODEL and clients * size < SMALL_MODELS
    return size * (small if job.save_models is None else job.save_models)


def results_bytes(clients: int, classes: int, saved: int) -> int:
    """Return the bytes of the results file, and of root's two buffers for parts of it."""
    confusion = 4 * classes**2
    received = clients * max(confusion, saved)
    return clients * (confusion + saved) + 2 * min(received, GATHERED)


def refuse_results(job: Job, clients: int, classes: int, parameters: int) -> None:
    """Raise `UserError` where root could not hold the results of so many clients."""
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
    for shared, need_r, what, advice in (
        (True, needs.window, "the RMA windows", "set a smaller --window_gb"),
        (
            False,
            needs.memory,
            "data, models, results and windows",
            "use more --nodes or a smaller --window_gb",
        ),
    ):
        need, (limit, name) = np.bincount(needs.node, need_r).max(), node_memory(shared=shared)
        if need > limit:
            room = f"this machine can give {megabytes(limit)} ({name})"
            raise UserError(f"{what} need {megabytes(need)} on a node; {room}: {advice}")


# time -------------------------------------------------------------------------------------------
def step_seconds(run: Resolved, backend: Any, steps: int) -> float:
    """Return the shortest measured time of one gradient step of `one_client`, in seconds."""
    ensemble = backend.ensemble
    row = ensemble.initial_row(run.init, np.random.default_rng(0))[None].clone()
    block = Block(ensemble, row, backend.zero_momentum(1), slice(0, 1))
    first = np.zeros(1, np.int64)
    epoch = lambda: backend.train_epochs(block, LocalEpochs(1, first, LR))  # noqa: E731
    return fastest(epoch, TIMED_S) / steps


def one_client(
    run: Resolved, job: Job, source: Source, ensemble: Ensemble, n: int, scored: int = 1
) -> tuple[Any, int]:
    """Return a backend with one client of n random training samples, and the steps of an epoch.

    n is at most `TIMED_IMAGES`, at least one mini-batch. Raises `UserError` if --kernels asks for
    native kernels, which are not available here.
    """
    n = max(1, min(n, max(1, TIMED_IMAGES // run.batch_size) * run.batch_size))
    rng = np.random.default_rng(0)
    images = rng.integers(0, source.vocabulary or 256, (n + scored, *source.shape))
    images = images.astype(source.dtype)
    labels = rng.integers(0, source.classes, n + scored)
    parts = {"train": [np.arange(n)], "val": [np.arange(n, n + scored)], "test": [np.arange(0)]}
    counts = np.zeros((1, source.classes), np.int64)
    partition = assemble(parts, counts, np.ones(1), False)
    drawn = replace(
        source,
        labels={"train": labels, "test": labels},
        images=lambda part, rows: images[rows],
    )
    ids, sgd = np.zeros(1, np.int64), optimiser_of(run)
    clients = Clients(drawn, partition, ids, run.seed, run.augment, ensemble)
    native, why = native_or_why(job.kernels, ensemble, clients, sgd)
    backend = native or pytorch_instead(job.kernels, why, ensemble, clients, sgd)
    return backend, -(-n // run.batch_size)


def fastest(action: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of an action, repeated for about so many `seconds`, in seconds."""
    timer = timeit.Timer(action)
    timer.timeit(1)
    return min(timer.repeat(max(3, int(seconds / timer.timeit(1))), 1))


# texts ------------------------------------------------------------------------------------------
def megabytes(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
