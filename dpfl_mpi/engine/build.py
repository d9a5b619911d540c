"""From a Run to the parts of a `Federation`: source, partition, model and the rest, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Callable

from dpfl_mpi.config import Job, Run
from dpfl_mpi.data.partition import Partition
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import open_source
from dpfl_mpi.federation import Parts
from dpfl_mpi.federation.greedy import Greedy
from dpfl_mpi.federation.limits import limits_of
from dpfl_mpi.federation.log import Log
from dpfl_mpi.federation.mail import MailRoom
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.federation.sums import Sums
from dpfl_mpi.federation.training import Training
from dpfl_mpi.mpi.world import World
from dpfl_mpi.numerics.backend import SGD, Backend
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.device import pick_device
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.recorded import RecordedBackend
from dpfl_mpi.plugins import find


def build(run: Run, job: Job, world: World, on_window: Callable[[], None] | None = None) -> Parts:
    """Return what this rank's share of a resolved Run is made of. Collective.

    Args:
        on_window: called after this rank's RMA window was made, or made anew.

    Raises:
        UserError: on every rank, for what only the user can mend.
    """
    device = pick_device(job.device, run.precision, world.local_rank)
    source = open_source(run)
    partition = Partition.from_arrays(world.share(lambda: deal(run, source).arrays()))
    limits = limits_of(run, world)
    members = Members(world, partition.sizes("train"), partition.p, limits, run.on_divergence == "exclude")

    model = find("model", run.model)
    ensemble = Ensemble(model.build(source.shape, source.classes), source.mean, source.std, device, run.precision)
    clients = Clients(source, partition, members.ids, run.seed, run.augment, ensemble, limits.flipped)
    sgd = SGD(run.batch_size, run.momentum, run.weight_decay, run.clip_norm)
    kind = RecordedBackend if job.cuda_graphs and device.type == "cuda" else Backend
    backend = kind(ensemble, clients, sgd, job.block)

    log = Log(len(members.ids), synchronise=device.type == "cuda")
    training = Training(members, log, backend, run.lr, run.lr_decay, run.momentum_state == "reset")
    scoring = Scoring(members, log, backend, source.classes, run.tie == "latest", job.mixed)
    mail = MailRoom(members, log, ensemble, job.window_gb, on_window)
    sums = Sums(members, log, mail, ensemble, backend.blocks)
    greedy = Greedy(members, log, scoring, mail, sums, run.seed, run.ggc_repeats)
    about = {
        "data_sha256": source.sha256,
        "data_note": source.note,
        "partition_sha256": partition.sha256(),
        "partition_note": partition.note(),
        "parameters": ensemble.size,
    }
    return Parts(run, about, model.HEAD, partition, members, log, backend, training, scoring, mail, sums, greedy)
