"""`Federation`, which a method knows as `fed`: its verbs, and facts of the run and its clients.

A method (methods/NAME.py) is a federated-learning algorithm. It sees the rows of this rank's
clients, `w_KW`: float32 `[K, W]`, a model per row. It never sees MPI, files or devices. `Parts` has
the objects that do the work, each of a class in a file of this folder; a verb such as `fed.average`
checks its rows and calls the method of the same name of one of them.

Axes: N clients in all, K on this rank, k in a block, W row width, S images, C classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.data.partition import Partition
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.greedy import Greedy
from dpfl_mpi.federation.mail import Mail
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.neighbours import COSTS, Neighbours
from dpfl_mpi.federation.orders import Draws
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.federation.sums import Sums
from dpfl_mpi.federation.training import Training
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.numerics import sketches
from dpfl_mpi.numerics.backend import Backend, Gradient, Loss, LossGradient, Proximal
from dpfl_mpi.plugins import short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.transport.clock import NS
from dpfl_mpi.transport.log import Log

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(kw_only=True)
class Parts:
    """The objects that do the work of a run on this rank. `engine.build` makes them."""

    run: Resolved
    provenance: dict[str, str | int]  # what a result records of its data, partition and model
    head: str  # the name of the model's last layer, "" where its file names none
    partition: Partition
    named: dict[str, list[str]]  # `Partition.names_and_groups`
    members: Members
    log: Log
    backend: Backend
    training: Training
    scoring: Scoring
    mail: Mail
    sums: Sums
    draws: Draws
    neighbours: Neighbours
    greedy: Greedy
    graphs: list[CollaborationGraph]  # of --graphs, for rounds 0 to T
    fed: Federation = field(init=False)

    def __post_init__(self) -> None:
        self.world, self.n, self.ids = self.members.world, self.members.n, self.members.ids
        # --drift: from this round on some clients have two classes exchanged; 0: never, or done
        self.drift_round = self.run.drift.round if self.run.drift else 0
        rng = streams.stream(self.run.seed, streams.DRIFT, 0, 1)
        self.drift_classes = np.sort(rng.permutation(self.partition.class_counts.shape[1])[:2])
        self.fed = Federation(self)

    @property
    def round(self) -> int:
        return self.members.round

    def begin_round(self, number: int) -> None:
        """Begin a round: drift, stop clients by --patience, find who takes part, reset all counts.

        Collective.
        """
        self._drift(number)
        if self.run.patience and not self.drift_round:  # nobody stops before a drift
            self.members.stop(self.scoring.stale >= self.run.patience)
        clock = self.mail.ledger.clock
        time: float = number
        if clock:  # of --network: the simulated seconds at which the first client begins
            time = float(clock.now[clock.present].min()) / NS
        self.members.begin(number, time)
        self.log.begin()
        if self.run.churn:
            self.log.notes |= {name: np.zeros(len(self.ids)) for name in COSTS}
        self.training.begin()
        self.mail.begin()
        self.mail.ledger.begin(self.members.learners)
        self.world.bytes_collective = 0

    def _drift(self, number: int) -> None:
        """Exchange two classes of the clients of --drift, once; all forget their best model."""
        if 0 < self.drift_round <= number:
            self.drift_round = 0
            drifted = np.flatnonzero(self.members.limits.drifted[self.ids])
            self.backend.clients.exchange_classes(drifted, *self.drift_classes.tolist())
            self.scoring.forget_best(np.ones(self.n, bool))
            self.scoring.stale[:] = 0

    def close(self) -> None:
        self.mail.mailroom.close()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arrays that a checkpoint stores: of local clients `[K, ...]`, and shared.

        They are the live arrays, not copies: `set_state` writes saved values into them.
        """
        scoring, training, members = self.scoring, self.training, self.members
        local = {name: getattr(scoring, name) for name in scoring.IN_CHECKPOINT}
        local |= {"epochs": training.epochs, "steps": training.steps}
        shared: dict[str, Any] = {"diverged_round": members.diverged_round}
        if self.run.patience:
            local["stale"], shared["stopped_round"] = scoring.stale, members.stopped_round
        if self.run.churn:
            shared |= {"there": members.joined, "new": members.yet_to_choose}
        if training.attack.kind == "stale":
            local["first"] = training.attack.first_sent
            local["first_round"] = training.attack.first_round
        of_mail, shared_by_mail = self.mail.state()
        return local | of_mail, shared | shared_by_mail

    def set_state(self, number: int, values: dict[str, Any], momentum: dict[str, Tensor]) -> None:
        """Go back to the end of round `number`, from `state` and `training.momentum` of then."""
        self.begin_round(number)
        (local, shared), links = self.state(), self.mail.ledger.links
        for name, array in (local | shared).items():
            if name in links:  # a table of edges, whose length changes
                links[name].table = values[name]
            else:
                array[:] = values[name]
        device = self.backend.ensemble.device
        self.training.momentum = {
            name: rows.to(device, copy=True) for name, rows in momentum.items()
        }

    def adopt(
        self, best_KD: np.ndarray, reached: dict[str, np.ndarray], diverged: np.ndarray, steps: int
    ) -> None:
        """Go on from the clients of a finished result, which took so many gradient `steps`.

        By client: best weights `[K, D]`, `reached` values by name in `state`, and `diverged` round.
        """
        self._drift(self.run.rounds)  # as the rounds of that run did
        local, _ = self.state()
        ensemble = self.backend.ensemble
        self.scoring.best[:, : ensemble.size] = torch.from_numpy(best_KD).to(ensemble.device)
        for name, values in reached.items():
            local[name][:] = values[self.ids]
        self.members.diverged_round[:] = diverged
        self.training.steps[:] = 0
        self.training.steps[:1] = steps if self.world.root else 0  # only the sum is recorded


def verb(
    part: str, method: Callable[Concatenate[Any, P], T], collective: bool = False, rows: int = 0
) -> Callable[Concatenate[Federation, P], T]:
    """Return a verb of `Federation`: it calls this method of the object `Parts.<part>`.

    Its first `rows` arguments must be rows `[K, W]`. All ranks meet before a collective verb.
    """
    name = method.__name__
    names_of_rows = [*inspect.signature(method).parameters][1 : rows + 1]

    @functools.wraps(method)
    def call(fed: Federation, *args: P.args, **kwargs: P.kwargs) -> T:
        parts = fed._parts
        if collective:
            parts.mail.mailroom.meet(f"fed.{name}")
        by_name = (kwargs[argument] for argument in names_of_rows if argument in kwargs)
        for w_KW in (*args[:rows], *by_name):
            parts.members.check_rows(w_KW, parts.backend.ensemble.width, f"fed.{name}")
        return getattr(getattr(parts, part), name)(*args, **kwargs)

    return call


def fact(part: str, name: str) -> Any:
    """Return a property of `Federation`: the present value of `Parts.<part>.<name>`."""
    return property(lambda fed: getattr(getattr(fed._parts, part), name))


def read_only(values: np.ndarray) -> np.ndarray:
    """Return a view of an array that a method cannot write to: it would change the whole run."""
    view = values.view()
    view.flags.writeable = False
    return view


class Federation:
    """What a method sees: facts of the run and its clients, and verbs."""

    def __init__(self, parts: Parts):
        members = parts.members
        self._parts, self.run = parts, parts.run
        # the method's options by name, also `added` ones at their default, which `run` lacks
        self.options = asdict(parts.run.found("method").options(**parts.run.options))
        self.n, self.ids = members.n, members.ids  # N; this rank's clients [K]
        self.p = read_only(members.p)  # the weight of every client in a mean [N]
        # how many others a client may receive, B_c - 1 (`client/budget` of results is B_c), also
        # of diverged ones [N]
        self.budget = read_only(members.limits.most_senders)
        self.reach = members.reach  # the senders that each client can reach; None: everyone
        self.n_train = read_only(parts.backend.clients.n_train)  # [K]
        # training and validation images of each class [N, C]
        self.class_counts = read_only(parts.partition.class_counts)
        # the group of each client, such as its domain, texts [N]; "" where the data have none
        self.groups = np.array(parts.named.get("group", [""] * self.n))
        self.graphs = parts.graphs  # of --graphs, for rounds 0 to T

    round = fact("members", "round")  # the number of this round
    most_senders = fact("members", "most_senders")  # B_c - 1; 0 of diverged clients [N]
    active = fact("members", "active")  # who takes part now and has a finite model, bool [N]
    learners = fact("members", "learners")  # who of these trains and receives, bool [N]
    participants = fact("members", "participants")  # who takes part in some round, bool [N]
    notes = fact("log", "notes")  # what the verbs noted in this round, [K, ...]
    lr = fact("training", "lr")  # the learning rate of this round
    clock = verb("log", Log.clock)

    def note_received(self, models: int) -> None:
        """Count so many models as received by every active client, besides those that verbs count.

        For methods that call `every_row`, which counts nothing itself. Rows that `fed.exchange` has
        sent and counted, too, count once.
        """
        log = self._parts.log
        self.notes["models_received"] += models * self.active[self.ids] - log.counted_twice
        log.received_noted, log.counted_twice = True, log.counted_twice * 0

    def initial_row(self, number: int = 0) -> Tensor:
        """Return the common initial model `[W]`; another number is another draw."""
        draws = streams.stream(self.run.seed, streams.INIT, 0, number)
        return self._parts.backend.ensemble.initial_row(self.run.init, draws)

    def common_row(self) -> Tensor:
        """Return the common initial model for every client, `[K, W]`."""
        return self.copies(self.initial_row())

    def copies(self, w_W: Tensor) -> Tensor:
        """Return a row for each of this rank's clients, `[K, W]`."""
        return w_W.repeat(len(self.ids), 1)

    def column(self, values: np.ndarray) -> Tensor:
        """Return one number per row as float64 `[k, 1]`, beside rows `[k, W]`."""
        return self._parts.backend.ensemble.column(values)

    # fed.local_opt calls `Parts.training.local_opt`; so do all verbs, each of its own part
    local_opt = verb("training", Training.local_opt, rows=1)
    mixed_opt = verb("training", Training.mixed_opt, rows=2)
    ahead_opt = verb("training", Training.ahead_opt, rows=1)
    batches = verb("training", Training.batches)
    step = verb("training", Training.step)
    gradient = verb("backend", Backend.gradient)
    descend = verb("backend", Backend.descend)
    descents = verb("backend", Backend.descents)

    def proximal(self, towards: Tensor, mu: float) -> Gradient:
        """Return the gradient of f_i(w_i) + mu / 2 ||w_i - towards||^2, from a row or `[K, W]`."""
        return Proximal(self._parts.backend, towards, mu)

    def gradient_of(self, loss: Loss) -> Gradient:
        """Return the gradient of a loss of one's own, which PyTorch computes, for `local_opt`.

        `loss(i, logits [S, C], z [S, F], y [S])` returns the mean loss of a mini-batch of local
        client i; z is what the last layer reads.
        """
        return LossGradient(self._parts.backend, loss, self._head())

    def columns(self, layers: str, option: str = "head") -> Tensor:
        """Return which columns hold these layers, which the method's `option` names, bool `[W]`.

        They are "head" (the last), "none", "all", "normalisation", or names with commas between.
        """
        head = self._head() if "head" in layers.split(",") else ""
        flag = f"--options.{option}" if option in self.options else "what fed.columns is given"
        return self._parts.backend.ensemble.columns(layers, head, flag)

    def _head(self) -> str:
        """Return the name of the model's last layer; `UserError` if its file names none."""
        if not self._parts.head:
            weights = self._parts.backend.ensemble.names
            layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in weights))
            needs = f"--method {short(self.run.method)} needs the model's last layer"
            lacks = f"--model {short(self.run.model)} names none"
            mend = f'let its file say HEAD = "NAME"; its layers are {layers}'
            raise UserError(f"{needs}, and {lacks}: {mend}")
        return self._parts.head

    evaluate = verb("scoring", Scoring.evaluate, collective=True, rows=1)
    training_losses = verb("scoring", Scoring.training_losses)
    validation_losses = verb("scoring", Scoring.validation_losses)

    def outputs(self, w_kW: Tensor, images: Any) -> tuple[Tensor, Tensor]:
        """Return a `predict`'s logits `[k, S, C]`, and the last layer's inputs `[k, S, F]`."""
        return self._parts.backend.outputs(w_kW, images, self._head())

    def memory(self, i: int, w_1W: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the last layer's inputs and labels of client i's first `most` training images."""
        return self._parts.backend.training_features(i, w_1W, most, self._head())

    def validation_outputs(self, i: int, w_1W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, the last layer's inputs and labels of client i's validation images."""
        return self._parts.backend.validation_outputs(i, w_1W, self._head())

    def sketches(self, moved_KW: Tensor, entries: int) -> np.ndarray:
        """Return short int8 vectors `[K, entries]`, whose cosines are near those of active rows."""
        active, zero = self.active[self.ids], moved_KW.new_zeros(moved_KW.shape[1])
        return sketches.sketches(moved_KW, zero, active, self.run.seed, entries)

    # fed.exchange calls `Parts.mail.exchange` when all ranks have come to it; so do those below
    exchange = verb("mail", Mail.exchange, collective=True, rows=1)
    tell = verb("mail", Mail.tell, collective=True)
    narrow = verb("mail", Mail.narrow, collective=True)
    average = verb("sums", Sums.average, collective=True, rows=1)
    mean = verb("sums", Sums.mean, collective=True, rows=1)
    means = verb("sums", Sums.means, collective=True, rows=1)
    every_row = verb("mail", Mail.every_row, collective=True, rows=1)
    bggc = verb("greedy", Greedy.bggc, collective=True, rows=1)
    ggc = verb("greedy", Greedy.ggc, collective=True, rows=1)
    losses_of_all = verb("neighbours", Neighbours.losses_of_all, collective=True, rows=1)
    repaired = verb("neighbours", Neighbours.repaired, collective=True)
    shuffle = verb("draws", Draws.shuffle)
    candidates = verb("members", Members.candidates)
    reachable = verb("members", Members.reachable)
    collect = verb("members", Members.collect, collective=True)
