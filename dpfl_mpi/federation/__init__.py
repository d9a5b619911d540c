"""`Federation`: the verbs a method may use. Each of them is done by one part of this package:

    members   who the clients are, which rank computes each, who takes part    training   local epochs of SGD
    limits    budget, reach, availability, who lies or comes later             scoring    accuracies, the best row, rewards
    attack    what liars send, and a backdoor's success                        drift      classes that change their names
    mail      the window, and what arrived through it                          sums       averages and exact sums
    greedy    the search for collaborators, Algorithms 2 and 3                 log        what a round notes

A method sees the rows of this rank's clients, `w_KW`, and never MPI, files or devices.

Axes: N clients in all, K on this rank, k in a block, W row width, S images, C classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi import streams
from dpfl_mpi.data.partition import Partition
from dpfl_mpi.errors import UserError
from dpfl_mpi.federation.drift import Drift
from dpfl_mpi.federation.greedy import Greedy
from dpfl_mpi.federation.log import Log
from dpfl_mpi.federation.mail import MailRoom, Received
from dpfl_mpi.federation.members import Members
from dpfl_mpi.federation.scoring import Scoring
from dpfl_mpi.federation.sums import Sums
from dpfl_mpi.federation.training import Training
from dpfl_mpi.graph import CollaborationGraph, Senders
from dpfl_mpi.numerics.backend import Backend, Gradient, Predict, Proximal
from dpfl_mpi.numerics.clients import Batch
from dpfl_mpi.numerics.ensemble import Block, one_hot
from dpfl_mpi.plugins import shipped, short
from dpfl_mpi.settings import Run


@dataclass
class Parts:
    """What a `Federation` is made of; `engine.build` makes it from a Run."""

    run: Run
    about: dict[str, Any]  # what a result says of its data, partition and model
    head: str  # the name of the model's last layer, "" where its file names none
    partition: Partition
    members: Members
    log: Log
    backend: Backend
    training: Training
    scoring: Scoring
    mail: MailRoom
    sums: Sums
    greedy: Greedy
    recorded: list[CollaborationGraph]  # of --graphs, those of rounds 0 to T
    drift: Drift


P = ParamSpec("P")
T = TypeVar("T")


def collective(verb: Callable[Concatenate[Federation, P], T]) -> Callable[Concatenate[Federation, P], T]:
    """Return a verb that begins when all ranks are at it."""

    @functools.wraps(verb)
    def called(fed: Federation, *args: P.args, **kwargs: P.kwargs) -> T:
        fed.meet(f"fed.{verb.__name__}")
        return verb(fed, *args, **kwargs)

    return called


class Federation(Parts):
    """This rank's share of a run: its parts, and one verb for each thing that they can do."""

    def __init__(self, parts: Parts):
        super().__init__(**vars(parts))
        members, backend = self.members, self.backend
        self.options = self.run.options or {}
        self.ensemble, self.clients, self.device = backend.ensemble, backend.clients, backend.ensemble.device
        self.world, self.n, self.p, self.ids = members.world, members.n, members.p, members.ids
        self.owner, self.row_of, self.others = members.owner, members.row_of, members.others
        self.flipped = members.flipped
        self.own = self.run.method not in shipped("method")
        self.mail.meet = self.meet
        if self.own:
            members.advice += f", or mend what {short(self.run.method)} computes beside the verbs"

    # a round -------------------------------------------------------------------------------------------------------------
    def begin_round(self, number: int) -> None:
        """Start a round: who takes part, and empty notes. Collective."""
        if self.drift.due(number):
            self.drift.happen(self.members, self.scoring)
        if self.run.patience and not self.drift.awaited:
            self.members.stop(self.scoring.stale >= self.run.patience)
        self.members.begin(number)
        self.log.begin()
        self.training.begin()
        self.mail.begin()
        self.world.bytes_collective = 0

    def meet(self, place: str) -> None:
        """Wait for all ranks, where the method is not shipped: one of them that is elsewhere would let the others wait for ever. Collective.

        Raises:
            UserError: on every rank, where they are not at the same place.
        """
        if self.own:
            with self.clock("wait"):
                self.world.meet(place)

    @property
    def round(self) -> int:
        """The number of this round."""
        return self.members.round

    @property
    def active(self) -> np.ndarray:
        """Who takes part in this round and has a finite model, bool `[N]`."""
        return self.members.active

    @property
    def awake(self) -> np.ndarray:
        """Who takes part in this round and has not stopped early (--patience), bool `[N]`: it trains and receives."""
        return self.members.awake

    @property
    def participants(self) -> np.ndarray:
        """Who takes part in some round and has a finite model, bool `[N]`: all but those who come after the last one (--newcomers)."""
        return self.members.alive & ~self.members.limits.newcomers

    @property
    def notes(self) -> dict[str, np.ndarray]:
        """What the verbs noted in this round, one value or row per client of this rank `[K, ...]`."""
        return self.log.notes

    def clock(self, phase: str) -> AbstractContextManager[None]:
        """Add the time spent inside to a phase of the round, less what phases inside it have counted."""
        return self.log.clock(phase)

    def note_received(self, models: int) -> None:
        """Note that every client that takes part received so many models in a way that no verb counts, such as by `every_row`."""
        self.notes["models_received"] += models * self.active[self.ids]

    # training ------------------------------------------------------------------------------------------------------------
    def initial_row(self) -> Tensor:
        """Return the initial model that all clients have in common, `[W]`."""
        return self.ensemble.initial_row(self.run.init, streams.stream(self.run.seed, streams.INIT, 0, 0))

    def common_row(self) -> Tensor:
        """Return one common initial row for every client, `[K, W]`."""
        return self.copies(self.initial_row())

    def copies(self, w_W: Tensor) -> Tensor:
        """Return a row of the server's for each of this rank's clients, `[K, W]`."""
        return w_W.repeat(len(self.ids), 1)

    @property
    def lr(self) -> float:
        """The learning rate of this round."""
        return self.training.lr

    def local_opt(
        self,
        w_KW: Tensor,
        epochs: int,
        gradient: Gradient | None = None,
        momentum: str = "w",
        trained: Tensor | None = None,
        advance: bool = True,
    ) -> Tensor:
        """Train every client's row in place for `epochs` local epochs and return it (LocalOpt of Algorithm 1).

        `gradient` replaces the plain gradient of the loss. `momentum` names the momentum rows: a method with a second model gives it a
        name of its own. Columns where `trained` (bool `[W]`) is false are frozen. With `advance=False` the next call sees the same
        batches again: for the second model.
        """
        self.members.check_rows(w_KW, self.backend.ensemble.width, "fed.local_opt")
        if isinstance(epochs, bool) or not isinstance(epochs, int | np.integer) or epochs < 0:
            raise UserError(f"fed.local_opt was given epochs={epochs!r}; allowed is a whole number of at least 0")
        return self.training.local_opt(w_KW, epochs, gradient, momentum, trained, advance)

    def batches(
        self, epochs: int, rows_KW: dict[str, Tensor], advance: bool = True, most: int | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Yield each step of `epochs` local epochs as a mini-batch and one `Block` per set of rows: LocalOpt's loop, for methods that write the step.

        Each set is named after its momentum rows and trained in place; /round/train_loss is that of the last one. Absent clients take no
        step. With `advance=False` the epochs do not count: the next call sees the same batches. `most` limits the steps of a client.
        """
        return self.training.batches(epochs, rows_KW, advance, most)

    def gradient(self, block: Block, batch: Batch) -> Tensor:
        """Write the gradient of a mini-batch's mean loss into `block.g` and return the losses `[k]`."""
        return self.backend.gradient(block, batch)

    def proximal(self, towards: Tensor, mu: float) -> Gradient:
        """Return the gradient of f_i(w_i) + (mu / 2) ||w_i - towards||^2, for `local_opt`; one row `[W]`, or one per client `[K, W]`."""
        return Proximal(self.backend, towards, mu)

    def descend(self, block: Block, rate: float, loss: Tensor | None = None) -> None:
        """Take a step of plain gradient descent from `block.g`: no momentum, no decay, no clipping. With its `loss` it counts as a step of training."""
        self.backend.descend(block, rate, loss)

    def step(self, block: Block, loss: Tensor, trained: Tensor | None = None) -> None:
        """Take one step from `block.g`: the Run's optimiser, clipping, decay and momentum; columns not `trained` are frozen."""
        self.training.step(block, loss, trained)

    def columns(self, layers: str, option: str = "head") -> Tensor:
        """Return which columns of a row hold these layers, bool `[W]`: "head" (the model's last), "none", "all", "normalisation", or names with commas.

        Args:
            option: the method's option that names them, for the sentence of an error.

        Raises:
            UserError: the model has no such layer.
        """
        return self.ensemble.columns(layers, self._head() if "head" in layers.split(",") else "", option)

    def _head(self) -> str:
        """Return the name of the model's last layer.

        Raises:
            UserError: the model's file names none.
        """
        if not self.head:
            layers = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in self.ensemble.names))
            raise UserError(
                f"--method {short(self.run.method)} needs the model's last layer, and --model {short(self.run.model)} names none: let its file say "
                f'HEAD = "NAME"; its layers are {layers}'
            )
        return self.head

    # scoring -------------------------------------------------------------------------------------------------------------
    @collective
    def evaluate(self, w_KW: Tensor, series: str = "", predict: Predict | None = None) -> None:
        """Score every client's row on its validation and test set, record it, and keep the client's best by validation. Collective.

        Called where the algorithm's reported model exists. With `series="mixed"` (the row after mixing) the scores are only recorded,
        and only where `--mixed` asks for them. `predict(rows, w_kW, images)` replaces the model's logits `[k, S, C]` where more than
        the row decides. Clients that are absent in a round are not scored. A client whose row is not finite is excluded, or ends the run.
        """
        self.members.check_rows(w_KW, self.backend.ensemble.width, "fed.evaluate")
        self.scoring.evaluate(w_KW, series, predict)

    def outputs(self, w_kW: Tensor, images: Any) -> tuple[Tensor, Tensor]:
        """Return the logits `[k, S, C]` of the images that a `Predict` is given, and their representation `[k, S, F]`: what the head reads."""
        return self.backend.outputs(w_kW, images, self._head())

    def memory(self, i: int, w_1W: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the representations `[M, F]` and labels `[M]` of local client i's training images, at most `most` of them."""
        return self.backend.memory(i, w_1W, most, self._head())

    def training_losses(self, i: int, w_mW: Tensor) -> np.ndarray:
        """Return the mean loss of m models on local client i's training images, float64 `[m]`; they count as evaluations."""
        self.notes["evaluations"][i] += len(w_mW)
        return self.backend.training_losses(i, w_mW)

    def one_hot(self, y: Tensor) -> Tensor:
        """Return float32 `[..., C]`: 1 at each label."""
        return one_hot(y, self.scoring.classes)

    # models along the graph ----------------------------------------------------------------------------------------------
    @collective
    def exchange(self, w_KW: Tensor, graph: CollaborationGraph) -> Received:
        """Send every row along the graph, into the receivers' inboxes, and return what arrived (Algorithm 1, line 9). Collective.

        It is here until rows are sent again, by this or another verb; to use it after that is a `UserError`.
        """
        return self.mail.exchange(w_KW, graph)

    @collective
    def every_row(self, w_KW: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield `(j, row [W])` of every client that takes part, in client order, on every rank with clients. Collective.

        The rows are copies of what `w_KW` holds at the start; no verb that sends may be called until the last one has come. What a real
        network would carry of it is the method's to say, by `note_received`.
        """
        self.log.every_row = True
        return self.mail.every_row(w_KW)

    @collective
    def narrow(self, graph: CollaborationGraph) -> None:
        """Give the window just the slots that a graph needs. Collective."""
        self.mail.narrow(graph)

    @collective
    def average(self, w_KW: Tensor, graph: CollaborationGraph, received: Received | None = None) -> Tensor:
        """Return sum p_i w_i / sum p_i over each client and its senders (equation 4); a client without senders keeps its row. Collective.

        `received` saves the exchange where the models are already here. All clients average the rows of one snapshot;
        with --averaging serial those who come later average over averages.
        """
        return self.sums.average(w_KW, graph, received)

    @collective
    def mean(self, w_KW: Tensor) -> Tensor:
        """Return the exact p-weighted mean over all clients that take part, `[W]`. Collective."""
        return self.sums.mean(w_KW)

    # choosing whose models to average --------------------------------------------------------------------------------------
    @collective
    def bggc(self, w_KW: Tensor) -> CollaborationGraph:
        """Return Omega, chosen by every client among all it can reach (Algorithm 3). Collective."""
        return self.greedy.bggc(w_KW)

    @collective
    def ggc(self, w_KW: Tensor, received: Received) -> CollaborationGraph:
        """Return C, chosen by every client among the models it received (Algorithm 2). Collective."""
        return self.greedy.ggc(w_KW, received)

    def losses(self, row_W: Tensor, who: np.ndarray) -> np.ndarray:
        """Return a model's loss on the validation images that the search sees, for the clients of this rank that bool `who` `[K]` marks: float64 `[K]`.

        Those of the others are nan. Each counts as an evaluation.
        """
        return self.scoring.losses(row_W, who)

    def reachable(self, k: int) -> np.ndarray:
        """Return the candidates of client k, ascending: all other clients it can reach that take part."""
        return self.members.reachable(k)

    def shuffle(self, k: int, candidates: np.ndarray, repeat: int) -> np.ndarray:
        """Return the candidates in client k's order of this round (and repeat)."""
        return self.greedy.shuffle(k, candidates, repeat)

    @collective
    def collect(self, mine: Sequence[Senders]) -> CollaborationGraph:
        """Return on every rank the graph whose edges each rank knows for its own receivers. Collective."""
        return self.members.collect(mine)

    def close(self) -> None:
        """Free the window on all ranks. Collective."""
        self.mail.close()

    # from start to start, and to the tuning after the rounds --------------------------------------------------------------
    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return by name what a checkpoint keeps beside the method's state: `[K, ...]` of this rank's clients, and what all ranks share.

        The values are the live arrays, not copies; a name never changes, so that old checkpoints can be read.
        """
        scoring, training, members = self.scoring, self.training, self.members
        mine = {name: getattr(scoring, name) for name in scoring.KEPT} | {
            "epochs": training.epochs,
            "steps": training.steps,
        }
        shared = {"alive": members.alive, "budget": members.others, "diverged_round": members.diverged_round}
        if self.run.patience:
            mine, shared = mine | {"stale": scoring.stale}, shared | {"stopped_round": members.stopped_round}
        if training.attack.kind == "stale":
            mine |= {"first": training.attack.first, "first_round": training.attack.first_round}
        return mine, shared

    def set_state(self, number: int, values: dict[str, Any], momentum: dict[str, Tensor]) -> None:
        """Go back to the end of round `number`, as `state` and `training.momentum` were."""
        self.begin_round(number)
        mine, shared = self.state()
        for name, held in (mine | shared).items():
            held[:] = values[name]
        self.training.momentum = dict(momentum)

    def adopt(
        self, best_KD: np.ndarray, reached: dict[str, np.ndarray], diverged_round: np.ndarray, steps: int
    ) -> None:
        """Take over the clients as another run left them: this rank's models, and of all clients `reached` by names in `state`, `[N, ...]`.

        A client that has diverged keeps what it had reached.
        """
        mine, _ = self.state()
        self.scoring.best[:, : self.ensemble.size] = torch.from_numpy(best_KD).to(self.device)
        for name, values in reached.items():
            mine[name][:] = values[self.ids]
        self.members.diverged_round[:] = diverged_round
        self.members.alive[:] = diverged_round < 0
        self.training.steps[:] = 0
        self.training.steps[:1] = steps if self.world.root else 0  # only the sum over all ranks is recorded

    def begin_tuning(self) -> Tensor:
        """Return a copy of every client's best row, to train on from; everyone takes part but newcomers, and momentum starts anew."""
        if self.drift.due(self.run.rounds):
            self.drift.happen(self.members, self.scoring)
        self.members.begin_tuning()
        self.training.momentum.clear()
        return self.scoring.best.clone()

    def begin_epoch(self, number: int) -> None:
        """Start an epoch of tuning; its number counts on from the rounds."""
        self.members.round = number
        self.log.begin()  # no score of the epoch before stays for a client that diverges in this one
