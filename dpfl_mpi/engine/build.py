"""From a Run to the parts of a `Federation`: source, partition, model and the rest, in the order in which they need each other."""

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from dpfl_mpi.data.partition import search_first, sharded
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import MOST_LISTED, Arrays, open_source, verify
from dpfl_mpi.errors import complain
from dpfl_mpi.federation import Parts, Provenance
from dpfl_mpi.federation.attack import Attack
from dpfl_mpi.federation.greedy import Greedy
from dpfl_mpi.federation.limits import Drift, graphs_of, limits_of
from dpfl_mpi.federation.losses import Losses
from dpfl_mpi.federation.mail import Mail
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.orders import Draws
from dpfl_mpi.federation.repair import Repair
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.federation.similar import Similar
from dpfl_mpi.federation.sums import Sums
from dpfl_mpi.federation.training import Training, learning_rate
from dpfl_mpi.models import make
from dpfl_mpi.mpi.placement import place
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.device import name_of, pick_device, why_hidden
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.optimiser import optimiser
from dpfl_mpi.numerics.select_backend import select_backend
from dpfl_mpi.plan.needs import refuse_results, saves_models
from dpfl_mpi.plugins import shipped, short
from dpfl_mpi.settings import Job, Resolved
from dpfl_mpi.settings.search import Rule
from dpfl_mpi.transport.build import transport_of
from dpfl_mpi.transport.log import Log


def build(run: Resolved, job: Job, world: World) -> Parts:
    """Return what this rank's share of a resolved Run is made of; what only the user can mend is a `UserError` on every rank. Collective."""
    warn(budget_of_one(run) if world.root else "", job, world)  # root has read its file
    limits, graphs = limits_of(run, world), graphs_of(run, world)
    device = pick_device(job.device, run.precision, world.local_rank)
    warn_of_device(job, world, device)
    source = world.each_rank(lambda: open_source(run, lambda load: on_root(load, world), deals=world.root))
    warn(source.unread, job, world)
    world.each_rank(lambda: verify(source) if world.local_rank == 0 else None)
    # each rank keeps its own clients, as `Members` places them
    partition = sharded(partial(deal, run, source), world.share, lambda n: place(n, world.size) == world.rank)
    ordered, n_search = search_first(run, source.labels["train"], partition)
    advice = "lower --lr, set --clip_norm, or --on_divergence exclude"
    if run.method not in shipped("method"):
        advice += f", or mend what {short(run.method)} computes beside the verbs"
    members = Members(
        world,
        partition,
        limits,
        exclude=run.on_divergence == "exclude",
        stopped_serve=run.found("method").topology == "graph",
        advice=advice,
    )
    module, head = make(run, source), run.found("model").HEAD  # "" where its file names no last layer
    ensemble = Ensemble(module, source.mean, source.std, device, run.precision, source.dtype)
    saved = 4 * ensemble.size * saves_models(job, partition.n, ensemble.size)
    world.decide(lambda: refuse_results(partition.n, source.classes, saved))
    marked = limits.liars if run.attack and run.attack.kind == "backdoor" else None
    clients = Clients(source, ordered, members.ids, run.seed, run.augment, ensemble, limits.flipped, n_search, marked)
    sgd = optimiser(
        run.optimizer,
        betas=(run.beta1, run.beta2),
        eps=run.adam_eps,
        batch_size=run.batch_size,
        momentum=run.momentum,
        weight_decay=run.weight_decay,
        clip_norm=run.clip_norm,
    )
    parts = ensemble, clients, sgd
    backend, slower = select_backend(job.kernels, job.block, world, *parts)
    warn(slower, job, world)
    log = Log(len(members.ids), synchronise=device.type == "cuda")
    kind = run.attack.kind if run.attack and run.attack.falsifies else ""
    attack = Attack(members, ensemble, kind, run.seed)
    training = Training(
        members,
        log,
        backend,
        attack,
        rate=partial(learning_rate, run),
        reset_momentum=run.momentum_state == "reset",
    )
    scoring = Scoring(
        members,
        log,
        backend,
        classes=source.classes,
        mixed=job.mixed,
        keep_latest=run.tie == "latest",
        metric_batch=run.batch_size if run.metric == "batch" else 0,
    )
    budgets, method = limits.most_senders, run.found("method")
    mailroom, ledger = transport_of(run, job.window_gb, members, ensemble, log, budgets)
    sends = f"--send is {run.send}" if run.send else f"sends is {method.sends}"
    mail = Mail(members, attack, mailroom, ledger, sends)
    sums = Sums(mail, backend, server=method.topology == "server")
    draws = Draws(members, run.seed)
    similar = Similar(mail, ensemble, most=run.candidates, seed=run.seed, init=run.init)
    losses = Losses(scoring, mail, similar)
    greedy = Greedy(
        scoring, sums, losses, similar, draws, rule=search_rule(run), repeats=run.ggc_repeats
    )
    lists = {
        name: json.dumps(values if len(values) <= MOST_LISTED else [])
        for name, values in (
            ("class_names", source.class_names),
            ("mean", source.mean),
            ("std", source.std),
        )
    }
    provenance = Provenance(
        data_sha256=source.sha256,
        data_note=source.note,
        dtype=source.dtype,
        **lists,
        partition_sha256=partition.sha256(),
        partition_note=partition.note(),
        parameters=ensemble.size,
    )
    return Parts(
        run=run,
        provenance=provenance,
        head=head,
        partition=partition,
        members=members,
        log=log,
        backend=backend,
        training=training,
        scoring=scoring,
        mail=mail,
        sums=sums,
        draws=draws,
        losses=losses,
        greedy=greedy,
        repair=Repair(members, log, churn=bool(run.churn)),
        graphs=graphs,
        drift=Drift(run, source.classes),
    )


def search_rule(run: Resolved) -> Rule:
    """Return in what the method's search departs from the paper's, by its options."""
    options = run.found("method").options
    return options(**run.options) if issubclass(options, Rule) else Rule()


def warn_of_device(job: Job, world: World, device: torch.device) -> None:
    """Warn of what would cost speed unnoticed: `auto` on a CPU beside GPUs, ranks that share a GPU. Collective."""
    hidden = why_hidden() if job.device == "auto" and device.type == "cpu" else ""
    somewhere, sharing = world.agree(bool(hidden)), world.most_alike(name_of(device))
    if somewhere:
        warn(f"--device auto takes the CPU: {hidden or 'a node has GPUs that its ranks do not see'}", job, world)
    if sharing > 1:
        warn(f"up to {sharing} ranks share one GPU; they take turns on it, unless CUDA's MPS runs", job, world)


def budget_of_one(run: Resolved) -> str:
    """Return a warning where a budget leaves nobody to average with: then the method is Local under another name."""
    if run.found("method").topology != "graph" or not run.most_senders == 0 < run.clients - 1:
        return ""
    own = "B_c counts the client's own model, so every client averages with itself alone, as --method local does"
    return f"--budget is {run.budget} of {run.clients} clients: {own}; --budget 2 or more lets it choose others"


def warn(text: str, job: Job, world: World) -> None:
    if text and world.root and not job.quiet:
        complain(f"warning: {text}")


def on_root(load: Callable[[], Arrays], world: World) -> Arrays:
    """Return on every rank the data that `load` returns on root, which alone imports the library that has them. Collective."""
    load = cache(load)
    arrays = world.share(lambda: {n: v for n, v in vars(load()).items() if isinstance(v, np.ndarray)})
    facts: dict[str, Any] = world.decide(lambda: {n: v for n, v in vars(load()).items() if n not in arrays})
    fields: dict[str, Any] = {**arrays, **{n: tuple(v) if isinstance(v, list) else v for n, v in facts.items()}}
    return Arrays(**fields)
