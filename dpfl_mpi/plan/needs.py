"""What a run will need before it is trained, by its own arithmetic (`mpi.placement`): memory, bytes on the wire, steps; and the seconds of these."""

import os
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
from dpfl_mpi.mpi.placement import MOST_ROWS, node_memory, place
from dpfl_mpi.numerics import BORDER
from dpfl_mpi.numerics.backend import Backend, optimiser
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.codec import Encoder, columns_of
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.native_backend import try_native
from dpfl_mpi.numerics.sketches import ENTRIES, comparison_bytes
from dpfl_mpi.settings import Job, Resolved

LABEL = 8  # bytes
# bytes of a rank before it holds anything: interpreter, torch, MPI and their shared libraries (measured)
PYTHON = 390 * 2**20
# seconds of Python and of sums per candidate of PyTorch's greedy search, beside its averages and scores (measured)
DECISION = 5e-4
AT_ONCE = 2**26  # bytes of all clients' models or confusion matrices that come to root at a time
# averages that a search for Omega scores per model it may choose: 4.4 to 5.3 on digits and CIFAR-10, 50 to 100,000 clients, B_c = 10 (measured)
USUAL = 5
HELD = 64  # most images of an epoch that is timed, in whole mini-batches; at least one
SCORED = 100  # most images on which scoring is timed: a client's validation images in the paper, the last of them a part of a pass
LR = 1e-4  # small, so that the weights stay finite; a step costs what others do


@dataclass(frozen=True)
class Needs:
    """What a run will need: arrays have one value per rank."""

    owner: np.ndarray  # rank of every client [N]
    clients: np.ndarray
    node: np.ndarray
    data: np.ndarray  # bytes
    rows: dict[str, np.ndarray]  # rows of float32, by what holds them: a search's two sums in 64 bits are four
    scratch: np.ndarray  # bytes while one client is trained or scored
    confusion: np.ndarray  # bytes of confusion matrices: each rank's, and on root all of them, which it writes
    window: np.ndarray  # bytes
    passes: int  # in which the widest graph is exchanged
    parameters: int
    row: int  # bytes of a model in memory
    message: int  # bytes of a model as it is sent
    received: tuple[int, int]  # most models that clients receive: in preprocessing, in a round
    wire: tuple[int, int]  # most bytes that MPI moves: in preprocessing, in a round
    evaluations: tuple[int, int]  # most models scored by all clients while they choose: in preprocessing, in a round
    # rounds that search Omega anew (--omega_period): each receives, moves and scores as much as preprocessing
    anew: int
    steps: np.ndarray  # gradient steps
    scored: np.ndarray  # images scored by evaluate
    judged: np.ndarray  # images scored while choosing, at most
    candidates: np.ndarray  # of the greedy search, at most
    usual: float  # share of what is scored while choosing that usually is: a search ends once its budget is full
    sizes: tuple[int, int]  # samples of a client to train on, and to validate on: means

    @property
    def models(self) -> np.ndarray:
        """Bytes of models in memory beside the window."""
        return sum(self.rows.values(), np.zeros_like(self.clients)) * self.row

    @property
    def memory(self) -> np.ndarray:
        return PYTHON + self.data + self.models + self.scratch + self.confusion + self.window


def ensemble_of(run: Resolved, source: Source) -> Ensemble:
    """Return the model's numerics on this machine's CPU."""
    torch.set_num_threads(1)  # as each rank of a run
    return Ensemble(make(run, source), source.mean, source.std, torch.device("cpu"), dtype=source.dtype)


def needs_of(
    run: Resolved, job: Job, source: Source, dealt: Partition, ensemble: Ensemble, ranks: int, nodes: int
) -> Needs:
    """Return what each of `ranks` ranks will hold and do: arithmetic alone."""
    n = dealt.n
    train, val, test = (dealt.sizes(part) for part in PARTS)
    owner = place(train, ranks)
    k_r = np.bincount(owner, minlength=ranks)
    row = 4 * ensemble.width

    def per_rank(values: np.ndarray) -> np.ndarray:
        return np.bincount(owner, values, ranks).astype(np.int64)

    method = run.found("method")
    packed, native = packed_bytes(run, ensemble), one_client(run, job, source, ensemble, 1, 1)[0].native
    slots, window, passes, columns = windows(run, job, method, k_r, row, packed or row)
    received, wire = traffic(run, method, k_r, slots, row, packed or row)
    unpacked = np.minimum(k_r * run.most_senders, n - k_r) * (run.staleness + 1)  # what was decoded lies in memory
    graph = run.most_senders > 0
    # models that a client scores at most to choose, in preprocessing and in a round, without repeats
    first, later = run.asked * (graph and method.asks_all), 0
    if graph and method.searches:  # R of two models per candidate, and of the two that the search starts from
        models = 2 + method.asks_all  # of a candidate; the model alone, too, where the order is by loss
        first, later = models * run.asked + 2, models * run.most_senders + 2
    anew = run.rounds if graph and run.churn else int(run.rounds // run.omega_period) if graph else 0
    rounds = run.rounds * run.participation  # in which a client takes part
    searches = rounds // max(run.ggc_period, 1)
    choices = first * (1 + anew) + later * searches
    alone = run.asked * (run.options.get("order") == "loss")  # every candidate's own model is scored, too
    usual = min(first, USUAL * run.most_senders + alone) if method.searches else first
    epochs = run.tau_init + rounds * run.tau_train * method.models * run.options.get("steps", 1) + run.finetune_epochs
    sketched = comparison_bytes(n) * (run.asked < n - 1)
    rim = [2 * BORDER, 2 * BORDER, 0] if run.augment else 0  # an image that is cropped has a border
    width = np.dtype(source.dtype).itemsize
    to_train, to_score = (int(np.prod(shape)) * width + LABEL for shape in (np.add(source.shape, rim), source.shape))
    # what `load` makes comes to each rank
    whole = 0 if source.path else sum(map(len, source.labels.values())) * to_score
    largest_val = np.zeros(ranks, np.int64)
    np.maximum.at(largest_val, owner, val)
    # models that come in columns: sums in 64 bits, their quotients, and what the kernels' search keeps, of all clients
    held_K = k_r * (8 if graph and method.searches else 2) * columns
    rows, best_confusion = rows_of(run, k_r), k_r * 8 * source.classes**2
    return Needs(
        owner=owner,
        clients=k_r,
        node=np.arange(ranks) // -(-ranks // nodes),
        data=per_rank(train * to_train + (val + test) * to_score) + whole,
        rows=rows | ({"unpacked": unpacked} if packed else {}) | ({"passes": held_K} if passes > 1 else {}),
        scratch=(native.bytes * (k_r > 0) if native else largest_val * image_bytes(source, ensemble)) + sketched,
        confusion=best_confusion // 2
        + best_confusion
        + np.where(np.arange(ranks) == 0, written(n, source.classes), 0),
        window=window * (packed or row),
        passes=passes,
        parameters=ensemble.size,
        row=row,
        message=packed or 4 * ensemble.size,
        received=received,
        wire=wire,
        evaluations=(n * first * run.ggc_repeats, n * later * run.ggc_repeats),
        anew=anew,
        steps=per_rank(-(-train // run.batch_size) * epochs),
        scored=per_rank((val + test) * (rounds + 1)),
        judged=per_rank(val * choices * run.ggc_repeats),
        candidates=k_r * choices * run.ggc_repeats // 2,
        usual=(usual * (1 + anew) + later * searches) / max(choices, 1),
        sizes=(int(train.mean()), int(val.mean())),
    )


def packed_bytes(run: Resolved, ensemble: Ensemble) -> int:
    """Return the bytes of a slot where not whole rows are sent (--codec, --send, or as the method says), else 0."""
    columns = columns_of(run, ensemble, run.found("model").HEAD)
    if run.codec:
        return -(-Encoder(run, ensemble, ensemble.zeros(1)[0], columns).bytes // 4) * 4
    return 0 if columns is None else 4 * int(columns[: ensemble.size].sum())


def groups(run: Resolved, k_r: np.ndarray) -> int:
    """Return in how many groups the clients of ranks with so many search Omega."""
    return 1 if run.network or run.codec or run.send else placement.waves(k_r)


def rows_of(run: Resolved, k_r: np.ndarray) -> dict[str, np.ndarray]:
    """Return how many rows each rank of so many clients holds, by what holds them, while it holds most."""
    method = run.found("method")
    searches = bool(run.most_senders > 0 and method.searches)
    together = -(-k_r // groups(run, k_r))  # clients that search Omega at once
    return {
        "model": k_r * method.models,
        "average": k_r,  # that takes the model's place
        "momentum": k_r * method.models * (1 + (run.optimizer != "sgd")),  # Adam has two means in its place
        "best": k_r,
        # rows of rounds before may be sent; others know another row than was trained
        "staging": k_r * (1 + run.staleness + 2 * bool(run.codec)),
        "search": (4 * together + 2 * k_r * (run.reach is not None or run.asked < run.clients - 1)) * searches,
    }


def windows(
    run: Resolved, job: Job, method: Any, k_r: np.ndarray, row: int, slot: int
) -> tuple[np.ndarray, np.ndarray, int, bool]:
    """Return per rank the slots of the widest graph and those of the window, and in how many passes it is sent; 0: not even one model per client fits.

    And whether a pass brings all clients a few models each: the window has no room for all of one client, or they compute in blocks.
    A slot has the bytes of a model as it is sent; it may have to come whole once, `row` bytes.
    """
    n, limit = int(k_r.sum()), np.full(len(k_r), placement.window_rows(job.window_gb, slot))
    versions = run.staleness + 1
    slots = placement.window_slots(k_r * run.most_senders, k_r * versions, n * versions)
    window = np.minimum(slots, limit)
    if run.most_senders == 0 and method.every_row:  # no graph says how wide the window is
        most = placement.rows_per_pass(limit, k_r, min(n, MOST_ROWS))
        window = np.where(k_r > 0, np.minimum(n - k_r, most), 0)
    whole = np.full(len(k_r), placement.window_rows(job.window_gb, row))
    if placement.models_per_pass(slots, whole, k_r) == 0:
        return slots, window, 0, False
    if (slots <= limit).all():
        return slots, window, 1, False
    room = whole if run.codec else limit  # a row may have to come whole
    columns = job.block > 1 or bool((np.minimum(slots, room) < np.minimum(slots, run.most_senders)).any())
    if columns:
        return slots, window, -(-run.most_senders // (placement.models_per_pass(slots, room, k_r) or 1)), True
    return slots, window, int((-(-k_r // (room // run.most_senders)))[slots > room].max(initial=1)), False


def traffic(
    run: Resolved, method: Any, k_r: np.ndarray, slots: np.ndarray, row: int, slot: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the models that clients receive and the bytes that MPI moves, at most, each in preprocessing and in a round; arguments as in `windows`.

    With --codec a client's whole row, where a rank has missed what came before, is not in them.
    """
    n, ranks, repeats = int(k_r.sum()), len(k_r), run.ggc_repeats
    graph, server = run.most_senders > 0, method.topology == "server"
    searches, asks = graph and method.searches, graph and method.asks_all
    every = n * (n - 1)
    # Algorithm 3: lines 1-7, then its phases; and line 4 of Algorithm 1, which averages
    choosing = n * run.asked * ((1 + repeats) if searches else asks)
    averaging = n * run.most_senders if graph else 0
    at_first = bool(searches or asks or method.preprocesses)  # whether init averages, too
    counted = method.sent * n if server else averaging + method.every_row * every * (method.topology == "graph")
    received = choosing + averaging * at_first, counted
    # a row may come to a rank again in another phase, for another client
    narrowest = run.most_senders if run.budget.kind in ("number", "inf") else 1  # of unlike budgets
    phases = -(-run.asked // narrowest) if searches else 0
    most = np.minimum(k_r * run.most_senders, groups(run, k_r) * slots)  # in a phase of all groups
    asked = int(np.minimum(k_r * run.asked, phases * most).sum()) * repeats + asks * min(n * ranks, n * run.asked)
    sketched = 0
    if run.asked < n - 1:  # all sketches to all ranks; no sum serves all clients
        asked += searches * int(np.minimum(k_r * run.asked, n - k_r).sum())
        sketched = n * ENTRIES * ranks
    averaged = int(slots.sum()) * slot if graph else 0
    summed = 2 * ranks * 2 * row if server or searches else 0  # an exact sum: 64 bits a number, there and back
    everywhere = method.every_row * int((n - k_r)[k_r > 0].sum()) * slot
    before = averaged * at_first + summed * (not server) + sketched
    return received, (asked * slot + before, averaged + summed * server + everywhere)


def image_bytes(source: Source, ensemble: Ensemble) -> int:
    """Return the bytes that one image takes once PyTorch has prepared it for scoring."""
    prepared = ensemble.prepare(ensemble.normalise(torch.zeros(1, 1, *source.shape)))
    tensors = prepared if isinstance(prepared, tuple) else (prepared,)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def megabytes(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    minutes = f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    return f"{seconds:.1f} s" if seconds < 120 else minutes


def refuse(job: Job, needs: Needs) -> None:
    """Raise `UserError` for a run that this machine cannot hold (it counts as each of the nodes)."""
    if needs.passes == 0:
        raise placement.too_narrow(job.window_gb, needs.row, needs.clients)
    for what, need_r, advice in (
        ("the RMA windows", needs.window, "set a smaller --window_gb"),
        ("data, models and windows", needs.memory, "use more --nodes or a smaller --window_gb"),
    ):
        need, (limit, name) = np.bincount(needs.node, need_r).max(), node_memory(shared=need_r is needs.window)
        if need > limit:
            sizes = f"{megabytes(need)} on a node; this machine can give {megabytes(limit)} ({name})"
            raise UserError(f"{what} need {sizes}: {advice}")


def written(clients: int, classes: int) -> int:
    """Return the bytes of all clients' confusion matrices in the file, which root holds, and of those that come and are put in order, int32."""
    size = 4 * clients * classes**2
    return size + 2 * min(size, AT_ONCE)


def refuse_classes(clients: int, classes: int) -> None:
    """Raise `UserError` where root could not write every client's confusion matrix at the end: it grows with the square of the classes."""
    need, (limit, name) = written(clients, classes), node_memory(shared=False)
    if need > limit:
        sizes = f"{need / 2**30:.2f} GiB on rank 0, whose node has {limit / 2**30:.2f} GiB ({name})"
        what, mend = f"{clients} clients and {classes} classes", "use fewer --clients, or data with fewer classes"
        raise UserError(f"the confusion matrices of {what} need {sizes}: {mend}")


@dataclass(frozen=True)
class Cost:
    """What a short measurement found on this machine, one core; seconds."""

    step: float  # one gradient step on a mini-batch
    image: float  # one image scored
    candidate: float  # one candidate of the greedy search, beside the scores of its two averages
    byte: float  # one byte copied


def measure(
    run: Resolved,
    job: Job,
    source: Source,
    ensemble: Ensemble,
    seconds: float = 0.9,
    sizes: tuple[int, int] = (HELD, SCORED),
) -> Cost:
    """Return what a step, a scored image, a candidate and a copied byte cost here: the quickest of several tries, one thread, in about `seconds`.

    `sizes` are a client's images to train on and to score: what a visit of a client costs beside them is then a part of these.
    """
    most = max(1, HELD // run.batch_size) * run.batch_size, SCORED
    trained, scored = (max(1, min(pair)) for pair in zip(sizes, most, strict=True))
    backend, steps = one_client(run, job, source, ensemble, trained, scored)
    client, one = slice(0, 1), np.ones(1)
    row = ensemble.initial_row(run.init, np.random.default_rng(0))[None].clone()
    block = Block(ensemble, row, backend.zero_momentum(1), client)
    pair, sums = row.repeat(2, 1)[None], row.double()
    decision = 0 if backend.name == "native" else DECISION
    source_row, target, first = np.ones(2**24, np.uint8), np.empty(2**24, np.uint8), np.zeros(1, np.int64)
    epoch = quickest(lambda: backend.train_epochs(block, 1, first, LR, None, None), 0.4 * seconds)
    losses = quickest(lambda: backend.validation_losses(client, pair), 0.3 * seconds)
    candidate = quickest(lambda: backend.candidate(sums, sums, row, 0.1 * one, one, one, pair), 0.1 * seconds)
    copy = quickest(lambda: np.copyto(target, source_row), 0.1 * seconds)
    return Cost(epoch / steps, losses / (2 * scored), candidate + decision, copy / 2**24)


def one_client(run: Resolved, job: Job, source: Source, ensemble: Ensemble, n: int, scored: int) -> tuple[Any, int]:
    """Return what computes a run here, for one client with n random samples to train on and `scored` others, and the steps of its epoch."""
    steps, rng = -(-n // run.batch_size), np.random.default_rng(0)
    images = rng.integers(0, source.vocabulary or 256, (n + scored, *source.shape)).astype(source.dtype)
    labels = rng.integers(0, source.classes, n + scored)
    parts = {"train": [np.arange(n)], "val": [np.arange(n, n + scored)], "test": [np.arange(0)]}
    partition = assemble(parts, np.zeros((1, source.classes), np.int64), np.ones(1), False)
    made = replace(source, labels={"train": labels, "test": labels}, images=lambda part, rows: images[rows])
    clients, sgd = Clients(made, partition, np.zeros(1, np.int64), run.seed, run.augment, ensemble), optimiser(run)
    by_torch = ensemble.bf16 or job.block > 1 or job.kernels == "torch"
    native = None if by_torch else try_native(job, ensemble, clients, sgd)[0]
    return native or Backend(ensemble, clients, sgd, 1), steps


def quickest(action: Callable[[], object], seconds: float) -> float:
    """Return the least seconds an action took over a short while, the first two aside: what other programs do here is no part of it."""
    timer = timeit.Timer(action)
    timer.timeit(1)
    return min(timer.repeat(max(3, int(seconds / timer.timeit(1))), 1))


def seconds_of(run: Resolved, needs: Needs, cost: Cost) -> dict[str, float]:
    """Return the seconds of the slowest rank by what it does: train, evaluate, choose (at most), exchange."""
    crowd = crowding(needs)
    copied = 2 * cost.byte / max(1, len(needs.clients))  # seconds a byte on the wire
    asked, sent = needs.wire[0] * (1 + needs.anew) * copied, needs.wire[1] * run.rounds * copied
    choose = (needs.judged * cost.image + needs.candidates * cost.candidate).max()
    chooses = bool(needs.judged.any())  # then most of what is sent before round 1 is what the search asks for
    return {
        "train": float(crowd * needs.steps.max() * cost.step),
        "evaluate": float(crowd * needs.scored.max() * cost.image),
        "choose": float(crowd * (choose + asked * chooses)),
        "exchange": crowd * (sent + asked * (not chooses)),
    }


def length_of(run: Resolved, needs: Needs, cost: Cost) -> str:
    """Return how long the slowest rank takes; where it chooses, as is usual, and if it scores all that it may."""
    seconds = seconds_of(run, needs, cost)
    if (every := sum(seconds.values())) < 1:
        return "under a second"
    usual, most = duration(every - seconds["choose"] * (1 - needs.usual)), duration(every)
    return f"about {usual}" if usual == most else f"about {usual}, at most {most} if every candidate is scored"


def crowding(needs: Needs) -> float:
    """Return how many ranks of a node share one of its cores, at least 1."""
    return float(max(1.0, np.bincount(needs.node).max() / len(os.sched_getaffinity(0))))
