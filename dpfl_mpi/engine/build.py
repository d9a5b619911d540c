"""`build` makes this rank's `Parts` of a Run: the objects that compute it, and the method's verbs.

The engine calls it once, before the first round. First the data are opened and dealt to clients,
then the clients to ranks; then come the model and what trains, scores and sends it, each made of
those before. Rank 0, called root, alone has all labels. Functions marked collective must be called
on every rank.
"""

import json
import os
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from dpfl_mpi import streams
from dpfl_mpi.data.partition import search_first, sharded
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import MOST_LISTED, Arrays, Source, load_arrays, open_source
from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.federation import Parts
from dpfl_mpi.federation.attack import Attack
from dpfl_mpi.federation.greedy import Greedy
from dpfl_mpi.federation.limits import graphs_of, limits_of
from dpfl_mpi.federation.mail import Mail
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.neighbours import Neighbours
from dpfl_mpi.federation.orders import Draws
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.federation.sums import Sums
from dpfl_mpi.federation.training import Training, learning_rate
from dpfl_mpi.models import make
from dpfl_mpi.mpi.placement import place
from dpfl_mpi.mpi.probe import choose_transfer
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.device import devices_line, name_of, pick_device, why_hidden
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.optimiser import optimiser_of
from dpfl_mpi.numerics.select_backend import select_backend
from dpfl_mpi.plan.needs import refuse_results
from dpfl_mpi.plugins import shipped, short
from dpfl_mpi.settings import Job, Resolved
from dpfl_mpi.settings.search import Rule
from dpfl_mpi.transport.build import transport_of
from dpfl_mpi.transport.log import Log


def build(run: Resolved, job: Job, world: World) -> Parts:
    """Return this rank's share of a run. Collective."""
    # a `UserError` is raised on every rank
    method, attack = run.found("method"), run.attack
    # the end of the error if a model diverges
    advice = "lower --lr, set --clip_norm, or --on_divergence exclude"
    if run.on_divergence == "exclude":
        advice = ""
    elif run.method not in shipped("method"):
        advice += f", or mend what {short(run.method)} computes beside the verbs"
    # the data, and what limits each client: budget, reach, attacks, who takes part
    source = open_on_ranks(run, world)
    warn(source.warning, job, world)
    if world.root:  # which alone has read a file of budgets
        warn(budget_of_one(run), job, world)
    limits, graphs = limits_of(run, world), graphs_of(run, world)
    if method.given:  # each client needs room for as many models as any given graph sends it
        distinct = {id(graph): graph for graph in graphs}.values()
        most = np.max([graph.degrees() for graph in distinct], 0)
        limits = replace(limits, most_senders=np.minimum(limits.most_senders, most))
    device = pick_device(job.device, run.precision, world.local_rank, world.node.size)
    tell_devices(job, world, device)
    # which client has which samples, and which clients this rank has, as `Members` places them
    on_rank = lambda n_train: place(n_train, world.size) == world.rank  # noqa: E731
    whole = world.each_rank(lambda: deal(run, source) if world.root else None)
    partition = sharded(whole, world.share, on_rank)
    named = partition.names_and_groups(source)
    ordered, n_search = search_first(run, source.labels["train"], partition)
    on_graph = method.topology == "graph"
    members = Members(
        world, partition, limits, stopped_serve=on_graph, advice=advice, names=named.get("name", ())
    )
    # the model: its numerics and the row of weights with which every client starts
    init, own_init = (streams.stream(run.seed, streams.INIT, 0, number) for number in (0, 1))
    module = make(run, source, own_init)
    ensemble = Ensemble(module, source.mean, source.std, device, run.precision, source.dtype)
    start = ensemble.initial_row(run.init, init)
    if run.model not in shipped("model"):
        numbers = [x.cpu().flatten().view(torch.uint8).numpy() for x in (start, *module.buffers())]
        if world.unlike({"model": [x.tobytes() for x in numbers]}):
            how = "draw by torch, numpy.random or random, whose global generators are seeded"
            raise UserError(f"--model {short(run.model)}: build differs between ranks; {how}")
    provenance = {"data_sha256": source.sha256, "data_note": source.note, "dtype": source.dtype}
    for name in ("class_names", "mean", "std"):
        values = getattr(source, name)
        provenance[name] = json.dumps(values if len(values) <= MOST_LISTED else [])
    provenance |= {"partition_sha256": partition.sha256(), "partition_note": partition.note()}
    # the clients' samples in memory, and the backend that trains and scores: kernels or PyTorch
    backdoor = attack is not None and attack.kind == "backdoor"
    clients = Clients(
        source,
        ordered,
        members.ids,
        run.seed,
        run.augment,
        ensemble,
        flipped=limits.flipped,
        n_search=n_search,
        marked=limits.attackers if backdoor else None,
    )
    computed = ensemble, clients, optimiser_of(run)
    backend = select_backend(job.kernels, world, *computed, job.threads_per_client)
    warn(backend.warning, job, world)
    warn_of_few_cores(job, world)
    world.decide(lambda: refuse_results(job, partition.n, source.classes, ensemble.size))
    # training, scoring, and how models travel: `transfer` is RMA windows or messages
    transfer, chosen = choose_transfer(job, world, ensemble.width)
    if chosen and world.root and not job.quiet:
        print(f"exchange: {chosen}", flush=True)
    log = Log(len(members.ids), synchronise=device.type == "cuda")
    falsification = attack.kind if attack and attack.falsifies else ""
    falsify = Attack(members, ensemble, falsification, run.seed)
    rate, reset = partial(learning_rate, run), run.momentum_state == "reset"
    training = Training(log, backend, falsify, rate=rate, reset=reset)
    scoring = Scoring(
        members,
        log,
        backend,
        classes=source.classes,
        mixed=job.mixed,
        keep_latest=run.tie == "latest",
        metric_batch=run.batch_size if run.metric == "batch" else 0,
    )
    mailroom, ledger = transport_of(
        run, job.window_gb, transfer, members, log, limits.most_senders, start, ensemble
    )
    sends = f"--send is {run.send}" if run.send else f"sends is {method.sends}"
    mail = Mail(members, training.attack, mailroom, ledger, sends)
    sums = Sums(mail, backend, server=method.topology == "server")
    draws = Draws(members, run.seed)
    neighbours = Neighbours(
        scoring, mail, start, most=run.candidates, seed=run.seed, churn=bool(run.churn)
    )
    rule = method.options(**run.options) if issubclass(method.options, Rule) else Rule()
    return Parts(
        run=run,
        provenance=provenance | {"parameters": ensemble.size},
        head=run.found("model").HEAD,  # "" if the model file names no last layer
        partition=partition,
        named=named,
        members=members,
        log=log,
        backend=backend,
        training=training,
        scoring=scoring,
        mail=mail,
        sums=sums,
        draws=draws,
        neighbours=neighbours,
        greedy=Greedy(sums, neighbours, draws, rule),
        graphs=graphs,
    )


def open_on_ranks(run: Resolved, world: World) -> Source:
    """Return the data on every rank; root alone has all labels. Collective."""
    # one rank per node verifies a prepared file
    has_load = hasattr(run.found("dataset"), "load")
    arrays = share_arrays(run, world) if has_load else None
    first = world.local_rank == 0
    return world.each_rank(lambda: open_source(run, arrays, labelled=world.root, verified=first))


def share_arrays(run: Resolved, world: World) -> Arrays:
    """Return on every rank the data that `load` returns on root. Collective."""
    # root alone calls it, and imports the library that has the data
    load = cache(lambda: vars(load_arrays(run)))
    is_array = lambda value: isinstance(value, np.ndarray)  # noqa: E731
    arrays = world.share(lambda: {n: v for n, v in load().items() if is_array(v)})
    facts = world.decide(lambda: {n: v for n, v in load().items() if not is_array(v)})
    fields: dict[str, Any] = {**arrays}
    for name, fact in facts.items():
        fields[name] = tuple(fact) if isinstance(fact, list) else fact  # as before JSON
    return Arrays(**fields)


def warn(text: str, job: Job, world: World) -> None:
    """Print a warning on root, unless it is empty or the Job is quiet."""
    if text and world.root and not job.quiet:
        complain(f"warning: {text}")


def tell_devices(job: Job, world: World, device: torch.device) -> None:
    """Print which ranks have which GPU. Collective."""
    # warn where ranks share one, or where `--device auto` takes the CPU although the node has a GPU
    why = why_hidden() if job.device == "auto" and device.type == "cpu" else ""
    names = world.texts(name_of(device))
    if (line := devices_line(names)) and world.root and not job.quiet:
        print(line, flush=True)
    sharing = max(map(names.count, filter(None, names)), default=0)
    if world.agree(bool(why)):
        why = why or "a node has GPUs that its ranks do not see"
        warn(f"--device auto takes the CPU: {why}", job, world)
    if sharing > 1:
        turns = "they take turns on it, unless CUDA's MPS runs"
        warn(f"up to {sharing} ranks share one GPU; {turns}", job, world)


def warn_of_few_cores(job: Job, world: World) -> None:
    """Warn where a rank may use fewer cores than it, or one client, has threads. Collective."""
    of_rank, of_client = torch.get_num_threads(), job.threads_per_client
    threads = max(of_rank, of_client)
    fewest = min(map(int, world.texts(str(len(os.sched_getaffinity(0))))))
    if 1 < threads > fewest:
        name = "--threads_per_client" if threads == of_client else "OMP_NUM_THREADS"
        bound = f"a rank is bound to {fewest} core{'s' * (fewest > 1)}, which its threads share"
        mend = f"mpirun --bind-to none or srun --cpus-per-task={threads} gives it more"
        warn(f"{name} is {threads}, but {bound}; {mend}", job, world)


def budget_of_one(run: Resolved) -> str:
    """Return a warning where no client may average with others, as in the method Local."""
    if run.found("method").topology != "graph" or not run.most_senders == 0 < run.clients - 1:
        return ""
    alone = "B_c counts the client's own model, so every client averages with itself alone"
    mend = "as --method local does; --budget 2 or more lets it choose others"
    return f"--budget is {run.budget} of {run.clients} clients: {alone}, {mend}"
