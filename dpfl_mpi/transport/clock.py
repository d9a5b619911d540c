"""`Clock`: the simulated time of every client under --network. `Ledger` (ledger.py) calls it.

Times are whole nanoseconds since the start of the run. A client trains, scores models and waits,
one after the other, while its uplink and its downlink carry messages. A link carries one message of
an exchange at a time: first come, first served, and of two at once that of the smaller client
number. A message needs time for its bytes in the sender's uplink, then the latencies of both
clients, then time for its bytes in the receiver's downlink. `Speeds` says how fast all this is.
`to` and `of` `[E]` are the receivers and the senders of the edges that messages go along.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.transport.links import Links

PARTS = ("train", "choose", "send", "wait")  # what a client spends the time of a round on
LATEST_NS = 2**61  # 73 years, after which the run ends with an error
NEVER_NS = 2**62  # stands for a model that has not arrived
NS = 10**9  # nanoseconds in a second
MEGABITS_PER_BYTE = 8e-6
# --network: medians of the five `Speeds`, whose values are log-normal, and three sigmas of their
# logarithms: of the device, the link and the latency
PROFILES = {
    "phones": ((0.2, 0.002, 12.6, 55.0, 0.0185), (0.7, 0.8, 0.4)),
    "hospitals": ((0.02, 0.0002, 100.0, 100.0, 0.01), (0.3, 0.5, 0.3)),
    "campus": ((0.05, 0.0005, 1000.0, 1000.0, 0.0005), (0.4, 0.0, 0.2)),
}
# which of three normal draws makes each of the five values: a slow device is slow at two of them
DRAW_OF_VALUE = (0, 0, 1, 1, 2)


@dataclass(frozen=True)
class Speeds:
    """The speeds of every client, float64 `[N]` each."""

    step: np.ndarray  # seconds of a gradient step
    image: np.ndarray  # seconds of scoring an image
    up: np.ndarray  # megabits per second
    down: np.ndarray
    latency: np.ndarray  # seconds between the client and the middle of the network


def speeds_of(profile: str, table: np.ndarray | None, clients: int, seed: int) -> Speeds:
    """Return the speeds in a file's table `[N, 5]`, else random ones from a profile."""
    if table is not None:
        return Speeds(*np.asarray(table).T)
    medians, sigmas = PROFILES[profile]
    normal = streams.stream(seed, streams.NETWORK, 0, 0).standard_normal((clients, 3))
    drawn = np.array(medians) * np.exp(normal * sigmas)[:, DRAW_OF_VALUE]
    # six digits, on which every processor's exp agrees
    return Speeds(*np.array([[float(f"{value:.6g}") for value in row] for row in drawn]).T)


def nanoseconds(seconds: np.ndarray) -> np.ndarray:
    """Return the nearest whole numbers of nanoseconds."""
    return np.rint(seconds * NS).astype(np.int64)


class Clock:
    """The times of all N clients, int64 `[N]` each. Every rank has the same clock."""

    def __init__(self, speeds: Speeds, ages: int = 1):
        """Start at 0. Models may be used for so many rounds (--staleness): 1, only in their own."""
        n = len(speeds.step)
        self.speeds = speeds
        self.step, self.image = nanoseconds(speeds.step), nanoseconds(speeds.image)
        self.latency = nanoseconds(speeds.latency)
        self.now = np.zeros(n, np.int64)  # when a client has done all that it did so far
        self.ready_at = np.zeros(n, np.int64)  # when its model was trained, and can be sent
        self.asked_at = np.zeros(n, np.int64)  # when it asked its senders for their models
        self.uplink_free = np.zeros(n, np.int64)  # when its uplink can send again (see `arrivals`)
        self.present = np.ones(n, bool)  # who takes part in this round
        # arrived[a]: when the model that a sender sent a rounds ago arrived, by edge
        self.arrived = [Links() for _ in range(ages)] if ages > 1 else []
        self.begin(self.present)

    def begin(self, present: np.ndarray) -> None:
        """Start a round of the clients that are present, bool `[N]`.

        A client that was absent in the last round begins when the first of the others does.
        """
        stayed, returned = present & self.present, present & ~self.present
        others = stayed if stayed.any() else self.present
        self.now[returned] = np.maximum(self.now[returned], self.now[others].min())
        if present.any():  # an empty round leaves the last one's clients to the next
            self.present[:] = present
        if self.arrived:  # all models are a round older
            self.arrived = [Links(), *self.arrived[:-1]]
        if self.now.max(initial=0) > LATEST_NS:
            late = f"the clock of client {self.now.argmax()} has passed 73 years"
            raise UserError(f"{late}; --network has too slow a client or link")
        self.spent = {part: np.zeros(len(self.now), np.int64) for part in PARTS}
        self.waited_for = np.full(len(self.now), -1)  # whose model arrived last; -1: did not wait

    def work(self, steps: np.ndarray, images: np.ndarray) -> None:
        """Let each client take so many gradient steps `[N]`, then score so many images `[N]`."""
        trained, scored = steps * self.step, images * self.image
        self.ready_at = np.where(steps > 0, self.now + trained, self.ready_at)
        self.now = self.now + trained + scored
        self.spent["train"] += trained
        self.spent["choose"] += scored

    def ask(self, who: Any = slice(None)) -> None:
        """Let clients ask for models now; their senders cannot have sent these unasked."""
        self.asked_at[who] = self.now[who]

    def exchange(self, to: np.ndarray, of: np.ndarray, sizes: np.ndarray, old: Any) -> np.ndarray:
        """Send models of `sizes` bytes along edges; return the age in rounds of those used, `[E]`.

        A receiver waits for models of this round. Where `old`, bool or bool `[E]`, allows older
        ones, it uses the newest that has arrived; if none has, it waits for the first.
        """
        arrival, age = self.arrivals(to, of, sizes, np.any(old)), np.zeros(len(to), np.int64)
        edges = to * len(self.now) + of
        if self.arrived:
            self.arrived[0].set(edges, arrival)
        if self.arrived and np.any(old):
            times = np.stack([links.get(edges, NEVER_NS) for links in self.arrived])  # [ages, E]
            is_here = times <= self.now[to]
            newest = np.where(is_here.any(0), is_here.argmax(0), times.argmin(0))
            age = np.where(old, newest, 0)
            arrival = times[age, np.arange(len(to))]
        self.wait(to, of, arrival)
        return age

    def arrivals(
        self, to: np.ndarray, of: np.ndarray, sizes: np.ndarray, standing: Any
    ) -> np.ndarray:
        """Return when messages of `sizes` bytes arrive, which queue for the links of both clients.

        Under --staleness nobody waits for the messages of a `standing` graph, whose senders send
        unasked: they keep the uplink busy in later rounds, too. Downlinks start each exchange idle.
        """
        up = nanoseconds(sizes * MEGABITS_PER_BYTE / self.speeds.up[of])
        down = nanoseconds(sizes * MEGABITS_PER_BYTE / self.speeds.down[to])
        free = self.uplink_free if standing else np.zeros_like(self.uplink_free)
        left_uplink = queue(np.maximum(self.ready_at[of], self.asked_at[to]), of, to, up, free)
        np.add.at(self.spent["send"], of, up)
        at_downlink = left_uplink + self.latency[of] + self.latency[to]
        return queue(at_downlink, to, of, down, np.zeros_like(self.uplink_free))

    def wait(self, to: np.ndarray, of: np.ndarray, arrival: np.ndarray) -> None:
        """Let receivers wait for the last of their models, which arrive at these times `[E]`."""
        last = self.now.copy()
        np.maximum.at(last, to, arrival)
        # the edges whose models were awaited longest; of equal ones the smallest sender is written
        # last, and so is noted
        final = np.flatnonzero((arrival == last[to]) & (arrival > self.now[to]))
        final = final[np.argsort(-of[final], kind="stable")]
        self.waited_for[to[final]] = of[final]
        self.spent["wait"] += last - self.now
        self.now = last

    def server(self, active: np.ndarray, size: int, down: int = 1) -> None:
        """Let active clients, bool `[N]`, send `size` bytes to a server and get `down` times it."""
        who = np.flatnonzero(active)
        up = nanoseconds(size * MEGABITS_PER_BYTE / self.speeds.up[who])
        back = nanoseconds(down * size * MEGABITS_PER_BYTE / self.speeds.down[who])
        left_uplink = np.maximum(self.ready_at[who], self.uplink_free[who]) + up
        self.uplink_free[who] = left_uplink
        at_server = left_uplink + self.latency[who]
        # the server answers all when it has all; its own links take no time
        answered = at_server.max(initial=0) + self.latency[who] + back
        self.spent["send"][who] += up
        slowest = who[at_server.argmax()] if len(who) else 0
        self.wait(who, np.full(len(who), slowest), answered)
        self.ready_at[who] = self.now[who]

    def state(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint stores, by name."""
        ends = {"now": self.now, "ready": self.ready_at, "asked": self.asked_at}
        return ends | {"sent": self.uplink_free, "here": self.present}


def queue(
    ready: np.ndarray, link: np.ndarray, other: np.ndarray, cost: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """Return when each message `[E]` has passed its `link`, the number of a client.

    A message that is `ready` earlier goes first, then the one of the smaller `other` client. It
    keeps the link busy for its `cost`. `free` `[N]` is when each link gets idle, and is updated.
    """
    order = np.lexsort((other, ready, link))
    passed = np.empty(len(ready), np.int64)
    ends = np.cumsum(np.bincount(link, minlength=len(free)))
    for k in np.unique(link):
        messages = order[(ends[k - 1] if k else 0) : ends[k]]
        # a message ends when it or one before it began, plus all costs from there on
        spent = np.cumsum(cost[messages])
        begins = np.maximum(ready[messages], free[k]) - (spent - cost[messages])
        passed[messages] = np.maximum.accumulate(begins) + spent
        free[k] = passed[messages[-1]]
    return passed
