"""`Federation`: the verbs a method may use. `Parts`: what does them, which the engine holds. One file each:

    members   who the clients are, which rank computes each, who takes part    training   local epochs of SGD
    limits    budget, reach, availability, who lies, comes later, drifts            scoring    accuracies, the best row, rewards
    attack    what liars send, and a backdoor's success
    mail      the verbs that send                                              sums       averages and exact sums
    candidates  whom a client may ask                                          greedy     the search for collaborators, Algorithms 2 and 3

A method sees the rows of this rank's clients, `w_KW`, and never MPI, files, devices or a part.

Axes: N clients in all, K on this rank, k in a block, W row width, S images, C classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.data.partition import Partition
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.greedy import REPAIR, Greedy
from dpfl_mpi.federation.limits import Drift
from dpfl_mpi.federation.mail import Mail
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.federation.sums import Sums
from dpfl_mpi.federation.training import Training
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.numerics import sketches
from dpfl_mpi.numerics.backend import Backend, Gradient, Proximal
from dpfl_mpi.plugins import shipped, short
from dpfl_mpi.settings import Resolved
from dpfl_mpi.transport.log import Log
from dpfl_mpi.transport.speeds import NS

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Parts:
    """This rank's share of a run, which `engine.build` makes from a Run; `fed` is what its method sees of it."""

    run: Resolved
    about: dict[str, Any]  # what a result says of its data, partition and model
    head: str  # the name of the model's last layer, "" where its file names none
    partition: Partition
    members: Members
    log: Log
    backend: Backend
    training: Training
    scoring: Scoring
    mail: Mail
    sums: Sums
    greedy: Greedy
    graphs: list[CollaborationGraph]  # of --graphs, those of rounds 0 to T
    drift: Drift
    fed: Federation = field(init=False)

    def __post_init__(self) -> None:
        self.world, self.n, self.ids = self.members.world, self.members.n, self.members.ids
        self.own = self.run.method not in shipped("method")
        if self.own:
            self.members.advice += f", or mend what {short(self.run.method)} computes beside the verbs"
        self.fed = Federation(self)

    @property
    def round(self) -> int:
        return self.members.round

    def begin_round(self, number: int) -> None:
        """Start a round: who takes part, and empty notes. Collective."""
        self._drift(number)
        if self.run.patience and not self.drift.round:  # who stops before a drift would never see it
            self.members.stop(self.scoring.stale >= self.run.patience)
        clock = self.mail.ledger.clock  # the simulated time, or else the round, at which this one begins
        self.members.begin(number, float(clock.now[clock.here].min(initial=2**62)) / NS if clock else number)
        self.log.begin()
        if self.run.churn:
            self.log.notes |= {name: np.zeros(len(self.ids)) for name in REPAIR}
        self.training.begin()
        self.mail.begin()
        self.world.bytes_collective = 0

    def _drift(self, number: int) -> None:
        """From the round of --drift on: exchange two classes of the clients that drift, once; all forget their best models, but who has diverged."""
        if 0 < self.drift.round <= number:
            self.drift.round = 0
            self.backend.exchange_classes(np.flatnonzero(self.drift.drifted[self.ids]), *self.drift.classes.tolist())
            self.scoring.forget_best(self.members.alive)
            self.scoring.stale[:] = 0

    def meet(self, place: str) -> None:
        """Wait for all ranks, where the method is not shipped: one that is elsewhere is a `UserError` on every rank. Collective."""
        self.mail.mailroom.meet(place)

    def close(self) -> None:
        self.mail.mailroom.close()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return by name the live arrays that a checkpoint keeps: `[K, ...]` of this rank's clients, and what all ranks share."""
        scoring, training, members = self.scoring, self.training, self.members
        mine = {name: getattr(scoring, name) for name in scoring.KEPT}
        mine |= {"epochs": training.epochs, "steps": training.steps}
        shared = {"diverged_round": members.diverged_round}
        if self.run.patience:
            mine, shared = mine | {"stale": scoring.stale}, shared | {"stopped_round": members.stopped_round}
        if self.run.churn:
            shared |= {"there": members.there, "new": members.new}
        held, known = self.mail.state()
        mine, shared = mine | held, shared | known
        if training.attack.kind == "stale":
            mine |= {"first": training.attack.first, "first_round": training.attack.first_round}
        return mine, shared

    def set_state(self, number: int, values: dict[str, Any], momentum: dict[str, Tensor]) -> None:
        """Go back to the end of round `number`, as `state` and `training.momentum` were."""
        self.begin_round(number)
        (mine, shared), links = self.state(), self.mail.links
        for name, held in (mine | shared).items():
            if name in links:  # of as many edges as there were then
                links[name].table = values[name]
            else:
                held[:] = values[name]
        device = self.backend.ensemble.device
        self.training.momentum = {name: rows.to(device, copy=True) for name, rows in momentum.items()}

    def adopt(self, best_KD: np.ndarray, reached: dict[str, np.ndarray], diverged: np.ndarray, steps: int) -> None:
        """Take over the clients as another run left them: this rank's models, and of all clients `reached` by names in `state`, `[N, ...]`."""
        self._drift(self.run.rounds)  # as in the rounds of that run
        mine, _ = self.state()
        ensemble = self.backend.ensemble
        self.scoring.best[:, : ensemble.size] = torch.from_numpy(best_KD).to(ensemble.device)
        for name, values in reached.items():
            mine[name][:] = values[self.ids]
        self.members.diverged_round[:] = diverged
        self.training.steps[:] = 0
        self.training.steps[:1] = steps if self.world.root else 0  # only the sum over all ranks is recorded


def verb(
    part: str, done: Callable[Concatenate[Any, P], T], collective: bool = False, rows: int = 0
) -> Callable[Concatenate[Federation, P], T]:
    """Return the verb that a part does, by the same name, of which the first so many arguments are `rows`; a collective one begins when all ranks are at it."""
    name = done.__name__
    of_rows = [*inspect.signature(done).parameters][1 : rows + 1]

    @functools.wraps(done)
    def called(fed: Federation, *args: P.args, **kwargs: P.kwargs) -> T:
        parts = fed._parts
        if collective:
            parts.meet(f"fed.{name}")
        for w_KW in (*args[:rows], *(kwargs[given] for given in of_rows if given in kwargs)):
            parts.members.check_rows(w_KW, parts.backend.ensemble.width, f"fed.{name}")
        return getattr(getattr(parts, part), name)(*args, **kwargs)

    return called


def fact(part: str, name: str) -> Any:
    """Return the attribute that a part has by this name, which may change from round to round."""
    return property(lambda fed: getattr(getattr(fed._parts, part), name))


class Federation:
    """What a method sees: the facts of a Run and its clients, and one verb for each thing that the parts can do."""

    def __init__(self, parts: Parts):
        members = parts.members
        self._parts, self.run, self.options = parts, parts.run, parts.run.options
        self.n, self.ids = members.n, members.ids  # N; this rank's clients [K]
        self.p = members.p  # the weight of every client in a mean [N]
        self.budget = members.limits.most_senders  # B_c - 1 of every client [N], also of who has diverged
        self.reach = members.reach  # whom each client can receive from; None: everyone
        self.n_train = parts.backend.clients.n_train  # [K]
        self.class_counts = parts.partition.class_counts  # training images of each class [N, C]
        self.graphs = parts.graphs  # of --graphs, those of rounds 0 to T

    round = fact("members", "round")  # the number of this round
    most_senders = fact("members", "most_senders")  # with how many others' models a client may average, B_c - 1 [N]
    active = fact("members", "active")  # who takes part in this round and has a finite model, bool [N]
    awake = fact("members", "awake")  # who is active and has not stopped early, bool [N]: it trains and receives
    participants = fact("members", "participants")  # who takes part in some round and has a finite model, bool [N]
    notes = fact("log", "notes")  # what the verbs noted in this round, [K, ...] of this rank's clients
    lr = fact("training", "lr")  # the learning rate of this round
    clock = verb("log", Log.clock)

    def note_received(self, models: int) -> None:
        """Note that every client that takes part received so many models in a way that no verb counts, such as by `every_row`.

        What `every_row` brought and is averaged then, before or after this note, is counted once: in `models`.
        """
        log = self._parts.log
        self.notes["models_received"] += models * self.active[self.ids] - log.counted_twice
        log.received_noted, log.counted_twice = True, log.counted_twice * 0

    def initial_row(self, number: int = 0) -> Tensor:
        """Return the initial model that all clients have in common, `[W]`, or another draw, of this number."""
        draws = streams.stream(self.run.seed, streams.INIT, 0, number)
        return self._parts.backend.ensemble.initial_row(self.run.init, draws)

    def common_row(self) -> Tensor:
        """Return one common initial row for every client, `[K, W]`."""
        return self.copies(self.initial_row())

    def copies(self, w_W: Tensor) -> Tensor:
        """Return a row of the server's for each of this rank's clients, `[K, W]`."""
        return w_W.repeat(len(self.ids), 1)

    def column(self, values: np.ndarray) -> Tensor:
        """Return one number per row as float64 `[k, 1]`, beside rows `[k, W]`."""
        return self._parts.backend.ensemble.column(values)

    local_opt = verb("training", Training.local_opt, rows=1)
    mixed_opt = verb("training", Training.mixed_opt, rows=2)
    ahead_opt = verb("training", Training.ahead_opt, rows=1)
    batches = verb("training", Training.batches)
    step = verb("training", Training.step)
    gradient = verb("backend", Backend.gradient)
    descend = verb("backend", Backend.descend)
    descents = verb("backend", Backend.descents)

    def proximal(self, towards: Tensor, mu: float) -> Gradient:
        """Return the gradient of f_i(w_i) + (mu / 2) ||w_i - towards||^2, for `local_opt`; one row `[W]`, or one per client `[K, W]`."""
        return Proximal(self._parts.backend, towards, mu)

    def columns(self, layers: str, option: str = "head") -> Tensor:
        """Return which columns hold these layers, bool `[W]`: "head" (the last), "none", "all", "normalisation", or names with commas, as `option` has."""
        head = self._head() if "head" in layers.split(",") else ""
        flag = f"--options.{option}" if option in self.options else "what fed.columns is given"
        return self._parts.backend.ensemble.columns(layers, head, flag)

    def _head(self) -> str:
        if not self._parts.head:
            needs = f"--method {short(self.run.method)} needs the model's last layer"
            layers = dict.fromkeys(name.rpartition(".")[0] for name in self._parts.backend.ensemble.names)
            mend = f'let its file say HEAD = "NAME"; its layers are {", ".join(layers)}'
            raise UserError(f"{needs}, and --model {short(self.run.model)} names none: {mend}")
        return self._parts.head

    evaluate = verb("scoring", Scoring.evaluate, collective=True, rows=1)
    losses = verb("scoring", Scoring.losses)
    training_losses = verb("scoring", Scoring.training_losses)

    def outputs(self, w_kW: Tensor, images: Any) -> tuple[Tensor, Tensor]:
        """Return the logits `[k, S, C]` of the images that a `Predict` is given, and their representation `[k, S, F]`: what the head reads."""
        return self._parts.backend.outputs(w_kW, images, self._head())

    def memory(self, i: int, w_1W: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the representations `[M, F]` and labels `[M]` of local client i's training images, at most `most` of them."""
        return self._parts.backend.training_features(i, w_1W, most, self._head())

    def sketches(self, moved_KW: Tensor, entries: int) -> np.ndarray:
        """Return count sketches of rows, int8 `[K, E]`, whose cosines come near those of the rows; 0 of clients that take no part."""
        active = self.active[self.ids]
        return sketches.sketches(moved_KW, moved_KW.new_zeros(moved_KW.shape[1]), active, self.run.seed, entries)

    exchange = verb("mail", Mail.exchange, collective=True, rows=1)
    tell = verb("mail", Mail.tell, collective=True)
    narrow = verb("mail", Mail.narrow, collective=True)
    average = verb("sums", Sums.average, collective=True, rows=1)
    mean = verb("sums", Sums.mean, collective=True, rows=1)
    every_row = verb("mail", Mail.every_row, collective=True, rows=1)
    bggc = verb("greedy", Greedy.bggc, collective=True, rows=1)
    ggc = verb("greedy", Greedy.ggc, collective=True, rows=1)
    losses_of_all = verb("greedy", Greedy.losses_of_all, collective=True, rows=1)
    repaired = verb("greedy", Greedy.repaired, collective=True)
    shuffle = verb("greedy", Greedy.shuffle)
    candidates = verb("members", Members.candidates)
    reachable = verb("members", Members.reachable)
    collect = verb("members", Members.collect, collective=True)
