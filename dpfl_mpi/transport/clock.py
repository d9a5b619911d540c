"""`Clock`: the simulated time of every client, in whole nanoseconds since the start of the run.

A client trains, scores and waits, one after the other. Its links work meanwhile: each carries one
message of an exchange at a time, first come, first served; ties go by client number. A message
takes its bytes through the sender's uplink, the latencies of both ends, and its bytes through the
receiver's downlink. `Speeds`: how fast all this is, from a profile or a file.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.errors import UserError
from dpfl_mpi.transport.links import Links

PARTS = ("train", "choose", "send", "wait")  # of a round
LATEST_NS = 2**61  # 73 years
NEVER_NS = 2**62
NS = 10**9  # nanoseconds in a second
MEGABITS_PER_BYTE = 8e-6
# medians of the five `Speeds`; sigmas of the logarithms of device, link and latency
PROFILES = {
    "phones": ((0.2, 0.002, 12.6, 55.0, 0.0185), (0.7, 0.8, 0.4)),
    "hospitals": ((0.02, 0.0002, 100.0, 100.0, 0.01), (0.3, 0.5, 0.3)),
    "campus": ((0.05, 0.0005, 1000.0, 1000.0, 0.0005), (0.4, 0.0, 0.2)),
}
DRAW_OF_VALUE = (0, 0, 1, 1, 2)  # one draw serves two values: a slow device is slow at both


@dataclass(frozen=True)
class Speeds:
    """The speeds of every client, float64 `[N]` each."""

    step: np.ndarray  # seconds of a gradient step
    image: np.ndarray  # seconds of scoring an image
    up: np.ndarray  # megabits per second
    down: np.ndarray
    latency: np.ndarray  # seconds between the client and the middle of the network


def speeds_of(profile: str, table: np.ndarray | None, clients: int, seed: int) -> Speeds:
    """Return the speeds in a file's table `[N, 5]`, else draws from a profile."""
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
    """Times of all N clients, int64 `[N]` each. Every rank has the same."""

    def __init__(self, speeds: Speeds, ages: int = 1):
        """Models may be of so many `ages`: 1, of this round alone."""
        n = len(speeds.step)
        self.speeds = speeds
        self.step, self.image = nanoseconds(speeds.step), nanoseconds(speeds.image)
        self.latency = nanoseconds(speeds.latency)
        self.now = np.zeros(n, np.int64)  # the end of what a client has done
        self.ready_at = np.zeros(n, np.int64)  # since when it has had the model that it sends
        self.asked_at = np.zeros(n, np.int64)  # since when its senders know that it wants theirs
        self.uplink_free = np.zeros(n, np.int64)  # when standing messages have passed its uplink
        self.present = np.ones(n, bool)  # who takes part in this round
        # by edge when the sender's model of a rounds ago arrived; empty unless models may be old
        self.arrived = [Links() for _ in range(ages)] if ages > 1 else []
        self.begin(self.present)

    def begin(self, present: np.ndarray) -> None:
        """Start a round of the clients that are present, bool `[N]`.

        One that was absent begins with the first of those that were there in the last round.
        """
        stayed, arrived = present & self.present, present & ~self.present
        first = stayed if stayed.any() else self.present
        self.now[arrived] = np.maximum(self.now[arrived], self.now[first].min())
        if present.any():  # an empty round leaves the last one's clients to the next
            self.present[:] = present
        if self.arrived:
            self.arrived = [Links(), *self.arrived[:-1]]
        if self.now.max(initial=0) > LATEST_NS:
            late = f"the clock of client {self.now.argmax()} has passed 73 years"
            raise UserError(f"{late}; --network has too slow a client or link")
        self.spent = {part: np.zeros(len(self.now), np.int64) for part in PARTS}
        self.waited_for = np.full(len(self.now), -1)  # whose model arrived last; -1: did not wait

    def work(self, steps: np.ndarray, images: np.ndarray) -> None:
        """Let clients take these gradient steps `[N]`, then score these images `[N]`."""
        trained, scored = steps * self.step, images * self.image
        # a model can be sent once it is trained
        self.ready_at = np.where(steps > 0, self.now + trained, self.ready_at)
        self.now = self.now + trained + scored
        self.spent["train"] += trained
        self.spent["choose"] += scored

    def ask(self, who: Any = slice(None)) -> None:
        """Let clients ask for models now: those that they want are new since the last round."""
        self.asked_at[who] = self.now[who]

    def exchange(self, to: np.ndarray, of: np.ndarray, sizes: np.ndarray, old: Any) -> np.ndarray:
        """Send models of these bytes along edges `[E]`; return how many rounds old they are, `[E]`.

        A receiver waits for models of this round. Where they may be `old`, bool or `[E]`, it takes
        the newest that it has of each sender; if it has none, it waits for the first.
        """
        arrival, age = self.arrivals(to, of, sizes, np.any(old)), np.zeros(len(to), np.int64)
        edges = to * len(self.now) + of
        if self.arrived:
            self.arrived[0].set(edges, arrival)
        if self.arrived and np.any(old):
            times = np.stack([links.get(edges, NEVER_NS) for links in self.arrived])
            arrived = times <= self.now[to]
            newest = np.where(arrived.any(0), arrived.argmax(0), times.argmin(0))
            age = np.where(old, newest, 0)
            arrival = times[age, np.arange(len(to))]
        self.wait(to, of, arrival)
        return age

    def arrivals(
        self, to: np.ndarray, of: np.ndarray, sizes: np.ndarray, standing: Any
    ) -> np.ndarray:
        """Return when the messages of edges `[E]` arrive.

        They queue with one another. Those of a `standing` graph also keep the uplink busy for later
        rounds. The downlink forgets: what a receiver still awaits delays nothing that is there.
        """
        up = nanoseconds(sizes * MEGABITS_PER_BYTE / self.speeds.up[of])
        down = nanoseconds(sizes * MEGABITS_PER_BYTE / self.speeds.down[to])
        free = self.uplink_free if standing else np.zeros_like(self.uplink_free)
        left = queue(np.maximum(self.ready_at[of], self.asked_at[to]), of, to, up, free)
        np.add.at(self.spent["send"], of, up)
        there = left + self.latency[of] + self.latency[to]
        return queue(there, to, of, down, np.zeros_like(self.uplink_free))

    def wait(self, to: np.ndarray, of: np.ndarray, arrival: np.ndarray) -> None:
        """Let receivers wait for the last of their models, which arrive at these times `[E]`."""
        last = self.now.copy()
        np.maximum.at(last, to, arrival)
        final = np.flatnonzero((arrival == last[to]) & (arrival > self.now[to]))
        final = final[np.argsort(-of[final], kind="stable")]  # of equal times the smallest sender
        self.waited_for[to[final]] = of[final]
        self.spent["wait"] += last - self.now
        self.now = last

    def server(self, active: np.ndarray, size: int) -> None:
        """Let active clients, bool `[N]`, wait for a server's answer of as many bytes.

        The server has no limits.
        """
        who = np.flatnonzero(active)
        up = nanoseconds(size * MEGABITS_PER_BYTE / self.speeds.up[who])
        down = nanoseconds(size * MEGABITS_PER_BYTE / self.speeds.down[who])
        left = np.maximum(self.ready_at[who], self.uplink_free[who]) + up
        self.uplink_free[who] = left
        at_server = left + self.latency[who]
        answered = at_server.max(initial=0) + self.latency[who] + down
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
    """Return when each message `[E]` has passed its link, first come, first served.

    It keeps the link busy for its cost `[E]`. `free` `[N]`, when each link is idle, is updated.
    """
    order = np.lexsort((other, ready, link))
    passed = np.empty(len(ready), np.int64)
    ends = np.cumsum(np.bincount(link, minlength=len(free)))
    for k in np.unique(link):
        messages = order[(ends[k - 1] if k else 0) : ends[k]]
        spent = np.cumsum(cost[messages])
        begins = np.maximum(ready[messages], free[k]) - (spent - cost[messages])
        passed[messages] = np.maximum.accumulate(begins) + spent
        free[k] = passed[messages[-1]]
    return passed
