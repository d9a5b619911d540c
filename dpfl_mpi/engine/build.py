"""From a Run to the parts of a `Federation`: source, partition, model and the rest, in the order in which they need each other."""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dpfl_mpi.data.partition import Partition
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import MOST_LISTED, Arrays, Source, open_source, unread_clients, verify
from dpfl_mpi.data.validation import search_first
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation import Parts
from dpfl_mpi.federation.attack import Attack
from dpfl_mpi.federation.drift import Drift
from dpfl_mpi.federation.graphs import graphs_of
from dpfl_mpi.federation.greedy import Greedy
from dpfl_mpi.federation.limits import limits_of
from dpfl_mpi.federation.log import Log
from dpfl_mpi.federation.mail import MailRoom
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.federation.sums import Sums
from dpfl_mpi.federation.training import Training
from dpfl_mpi.models import make
from dpfl_mpi.mpi.placement import node_memory
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.backend import SGD, Backend, optimiser
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.device import name_of, pick_device, why_hidden
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.native import computes, form_of
from dpfl_mpi.numerics.native_backend import NativeBackend
from dpfl_mpi.numerics.recorded import RecordedBackend
from dpfl_mpi.plan.needs import written
from dpfl_mpi.settings import Job, Resolved


def build(run: Resolved, job: Job, world: World, on_window: Callable[[], None] | None = None) -> Parts:
    """Return what this rank's share of a resolved Run is made of. Collective.

    Args:
        on_window: called after this rank's RMA window was made, or made anew.

    Raises:
        UserError: on every rank, for what only the user can mend.
    """
    device = pick_device(job.device, run.precision, world.local_rank)
    warn_of_device(job, world, device)
    warn_of_budget(run, job, world)
    source = open_source(run, lambda load: on_root(load, world))
    warn_of_clients(run, source, job, world)
    world.each_node(lambda: verify(source))
    partition = Partition.from_arrays(world.share(lambda: deal(run, source).arrays()))
    limits = limits_of(run, world)
    members = Members(world, partition, limits, run)

    model = make(run, source)
    ensemble = Ensemble(model.module, source.mean, source.std, device, run.precision, source.dtype)
    ordered, n_search = search_first(run, source.labels["train"], partition)
    marked = limits.liars if run.attack and run.attack.kind == "backdoor" else None
    clients = Clients(source, ordered, members.ids, run.seed, run.augment, ensemble, limits.flipped, n_search, marked)
    backend = pick_backend(job, world, ensemble, clients, optimiser(run))

    log = Log(len(members.ids), synchronise=device.type == "cuda")
    attack = Attack(run, members, ensemble)
    training = Training(members, log, backend, attack, run)
    world.decide(lambda: check_classes(run.clients, source.classes))
    scoring = Scoring(members, log, backend, run, source.classes, job.mixed)
    mail = MailRoom(log, attack, job.window_gb, on_window)
    sums = Sums(mail, backend.blocks, run)
    greedy = Greedy(scoring, sums, run)
    graphs, drift = graphs_of(run, world), Drift(run, source.classes)
    about = {
        "data_sha256": source.sha256,
        "data_note": source.note,
        **{name: listed(getattr(source, name)) for name in ("class_names", "mean", "std")},
        "partition_sha256": partition.sha256(),
        "partition_note": partition.note(),
        "parameters": ensemble.size,
    }
    return Parts(
        run, about, model.head, partition, members, log, backend, training, scoring, mail, sums, greedy, graphs, drift
    )


def check_classes(clients: int, classes: int) -> None:
    """Raise `UserError` where root could not write every client's confusion matrix at the end: it grows with the square of the classes."""
    need, (limit, name) = written(clients, classes), node_memory(shared=False)
    if need > limit:
        raise UserError(
            f"the confusion matrices of {clients} clients and {classes} classes need {need / 2**30:.2f} GiB on rank 0, whose node has "
            f"{limit / 2**30:.2f} GiB ({name}): use fewer --clients, or data with fewer classes"
        )


def listed(values: Sequence[str | float]) -> str:
    """Return a list as JSON for an attribute of the result, an empty one where there are too many for it."""
    return json.dumps(values if len(values) <= MOST_LISTED else [])


def warn_of_device(job: Job, world: World, device: torch.device) -> None:
    """Warn of what would cost speed unnoticed: `auto` on a CPU beside GPUs, ranks that share a GPU. Collective."""
    hidden = why_hidden() if job.device == "auto" and device.type == "cpu" else ""
    somewhere, sharing = world.agree(bool(hidden)), world.most_alike(name_of(device))
    if somewhere:
        warn(f"--device auto takes the CPU: {hidden or 'a node has GPUs that its ranks do not see'}", job, world)
    if sharing > 1:
        warn(f"up to {sharing} ranks share one GPU; they take turns on it, unless CUDA's MPS runs", job, world)


def warn_of_clients(run: Resolved, source: Source, job: Job, world: World) -> None:
    """Warn where data of one's own name the client of each sample, and the Run makes other clients."""
    if why := unread_clients(run, source):
        warn(why, job, world)


def warn_of_budget(run: Resolved, job: Job, world: World) -> None:
    """Warn where a budget leaves nobody to average with: then the method is Local under another name."""
    if run.found.method.topology == "graph" and run.most_senders == 0 < run.clients - 1:
        warn(
            f"--budget is {run.budget} of {run.clients} clients: B_c counts the client's own model, so every client averages with itself "
            "alone, as --method local does; --budget 2 or more lets it choose others",
            job,
            world,
        )


def warn(text: str, job: Job, world: World) -> None:
    """Print a warning in a line of root's, unless the run is --quiet."""
    if world.root and not job.quiet:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def on_root(load: Callable[[], Arrays], world: World) -> Arrays:
    """Return on every rank the data that `load` returns on root, which alone imports the library that has them. Collective."""
    load = functools.cache(load)
    arrays = world.share(lambda: {n: v for n, v in vars(load()).items() if isinstance(v, np.ndarray)})
    facts: dict[str, Any] = world.decide(lambda: {n: v for n, v in vars(load()).items() if n not in arrays})
    fields: dict[str, Any] = {**arrays, **{n: tuple(v) if isinstance(v, list) else v for n, v in facts.items()}}
    return Arrays(**fields)


def pick_backend(job: Job, world: World, ensemble: Ensemble, clients: Clients, sgd: SGD) -> Backend:
    """Return what computes this rank's clients: recorded steps on a GPU, on a CPU the native kernels, else PyTorch. Collective.

    All ranks compute alike: with `--kernels auto` one rank without the kernels sends all of them to PyTorch, and root says so.

    Raises:
        UserError: on every rank, where `--kernels` asks for what cannot be had.
    """
    gpu = ensemble.device.type == "cuda"
    if world.agree(gpu or ensemble.bf16 or job.block > 1 or job.kernels == "torch"):  # --device auto: nodes may differ
        recorded = job.cuda_graphs and gpu
        if job.kernels not in ("auto", "torch"):
            raise UserError(
                f"--kernels is {job.kernels}; the native kernels compute in float32 on a CPU, one client after the other (--block 1)"
            )
        return (RecordedBackend if recorded else Backend)(ensemble, clients, sgd, job.block)
    if job.kernels == "auto" and not (computes(ensemble.module) and ensemble.dtype == "uint8"):
        return Backend(ensemble, clients, sgd, job.block)
    try:
        backend: Backend | None = NativeBackend(ensemble, clients, sgd, form_of(job.kernels))
        why = ""
    except UserError as error:
        backend, why = None, str(error)
    if world.agree(backend is None):
        if job.kernels != "auto":
            raise UserError(why or "--kernels: another rank's node has no native kernels")
        warn(f"PyTorch computes, several times slower: {why or 'a node has no native kernels'}", job, world)
        return Backend(ensemble, clients, sgd, job.block)
    assert backend is not None
    return backend
