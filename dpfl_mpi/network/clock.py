"""`Clock`: the simulated time of every client. Alike on every rank; in whole nanoseconds, `[N]`, from the start of the run.

A client trains, scores and waits one after the other. Its links work beside that: of one exchange a message at a time, first come first served; ties go by
client number. A message takes its bytes through the sender's uplink, the latencies of both ends, then its bytes through the receiver's downlink.
"""

from typing import Any

import numpy as np

from dpfl_mpi.errors import UserError
from dpfl_mpi.network.links import Links
from dpfl_mpi.network.profiles import BYTE, Speeds, nanoseconds

PARTS = ("train", "choose", "send", "wait")  # of a round
LATEST = 2**61  # nanoseconds that clocks count to: 73 years
NEVER = 2**62


class Clock:
    def __init__(self, speeds: Speeds, staleness: int = 0):
        n = len(speeds.step)
        self.speeds, self.step, self.image = speeds, nanoseconds(speeds.step), nanoseconds(speeds.image)
        self.latency = nanoseconds(speeds.latency)
        self.now = np.zeros(n, np.int64)  # when what a client has done ends
        self.ready = np.zeros(n, np.int64)  # since when it has had the model that it sends
        self.asked = np.zeros(n, np.int64)  # since when its senders have known that it wants theirs
        self.sent = np.zeros(n, np.int64)  # until when its uplink is busy with what its neighbours await each round
        self.here = np.ones(n, bool)  # who takes part in this round
        # by edge when the model that the sender had a rounds ago came; none where none may be old
        self.came = [Links() for _ in range(staleness + 1 if staleness else 0)]
        self.begin(self.here)

    def begin(self, present: np.ndarray) -> None:
        """Start a round of those who are `present` `[N]`: who was not in the last one begins with the first of those who were."""
        stayed, come = present & self.here, present & ~self.here
        first = stayed if stayed.any() else self.here
        self.now[come] = np.maximum(self.now[come], self.now[first].min())
        if present.any():  # else the next one follows on the one before
            self.here[:] = present
        if self.came:
            self.came = [Links(), *self.came[:-1]]
        if self.now.max(initial=0) > LATEST:
            late = f"the clock of client {self.now.argmax()} has passed 73 years"
            raise UserError(f"{late}; --network has too slow a client or link")
        self.spent = {part: np.zeros(len(self.now), np.int64) for part in PARTS}
        self.waited_for = np.full(len(self.now), -1)  # whose model came last, of who has waited

    def work(self, steps: np.ndarray, images: np.ndarray) -> None:
        """Let clients take so many gradient steps `[N]`, then score so many images; a model is ready to be sent once it is trained."""
        trained, scored = steps * self.step, images * self.image
        self.ready = np.where(steps > 0, self.now + trained, self.ready)
        self.now = self.now + trained + scored
        self.spent["train"] += trained
        self.spent["choose"] += scored

    def ask(self, who: Any = slice(None)) -> None:
        """Let clients ask now, `who` of them: what they want no longer stands since a round before."""
        self.asked[who] = self.now[who]

    def exchange(self, to: np.ndarray, of: np.ndarray, sizes: np.ndarray, old: Any = False) -> np.ndarray:
        """Send models of so many bytes along edges `[E]` to receivers of senders, and let the receivers go on; return how many rounds old what they take is.

        A receiver waits for the models of this round. Where they may be `old`, all or `[E]`, it takes of each sender the newest that it has, and waits
        only where it has none, for the first to come.
        """
        here, age = self.arrivals(to, of, sizes, np.any(old)), np.zeros(len(to), np.int64)
        edges = to * len(self.now) + of
        if self.came:
            self.came[0].set(edges, here)
        if self.came and np.any(old):
            times = np.stack([came.get(edges, NEVER) for came in self.came])
            there = times <= self.now[to]
            age = np.where(old, np.where(there.any(0), there.argmax(0), times.argmin(0)), 0)
            here = times[age, np.arange(len(to))]
        self.wait(to, of, here)
        return age

    def arrivals(self, to: np.ndarray, of: np.ndarray, sizes: np.ndarray, standing: Any = True) -> np.ndarray:
        """Return when the messages of edges `[E]` are at their receivers.

        They queue on the links with one another. Of other messages only those of a `standing` graph hinder one another, on the uplink: a round's leave in
        order. What a receiver still awaits from a slow sender must not hold up what is there before, so its downlink forgets.
        """
        up, down = nanoseconds(sizes * BYTE / self.speeds.up[of]), nanoseconds(sizes * BYTE / self.speeds.down[to])
        left = queue(
            np.maximum(self.ready[of], self.asked[to]), of, to, up, self.sent if standing else np.zeros_like(self.sent)
        )
        np.add.at(self.spent["send"], of, up)
        return queue(left + self.latency[of] + self.latency[to], to, of, down, np.zeros_like(self.sent))

    def wait(self, to: np.ndarray, of: np.ndarray, here: np.ndarray) -> None:
        """Let receivers go on when the last of their models is `here` `[E]`; of equal ones that of the smallest number counts as the last."""
        last = self.now.copy()
        np.maximum.at(last, to, here)
        final = np.flatnonzero((here == last[to]) & (here > self.now[to]))
        final = final[np.argsort(-of[final], kind="stable")]  # of several the last one is kept
        self.waited_for[to[final]] = of[final]
        self.spent["wait"] += last - self.now
        self.now = last

    def server(self, active: np.ndarray, size: int) -> None:
        """Let all that take part `[N]` send a model to a server, which has no limits, and wait for its answer of the same size."""
        who = np.flatnonzero(active)
        up, down = (nanoseconds(size * BYTE / rate[who]) for rate in (self.speeds.up, self.speeds.down))
        left = np.maximum(self.ready[who], self.sent[who]) + up
        self.sent[who] = left
        there = left + self.latency[who]
        here = there.max(initial=0) + self.latency[who] + down
        self.spent["send"][who] += up
        self.wait(who, np.full(len(who), who[there.argmax()] if len(who) else 0), here)
        self.ready[who] = self.now[who]

    def state(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint holds, by name."""
        return {name: getattr(self, name) for name in ("now", "ready", "asked", "sent", "here")}


def queue(ready: np.ndarray, link: np.ndarray, other: np.ndarray, cost: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Return when each message `[E]` has passed its link, of clients `[E]`: in the order in which they are ready, ties by the other end.

    A link is busy with a message for its cost `[E]`, and until `free` `[N]` with those before, which is moved on in place.
    """
    order = np.lexsort((other, ready, link))
    out = np.empty(len(ready), np.int64)
    ends = np.cumsum(np.bincount(link, minlength=len(free)))
    for k in np.unique(link):
        mine = order[(ends[k - 1] if k else 0) : ends[k]]
        spent = np.cumsum(cost[mine])
        begins = np.maximum(ready[mine], free[k]) - (spent - cost[mine])
        out[mine] = np.maximum.accumulate(begins) + spent
        free[k] = out[mine[-1]]
    return out


def critical_path(end: np.ndarray, waited_for: np.ndarray) -> list[int]:
    """Return for each round 0 to T the client that the end of the last one hung on, from ends and waits `[T+1, N]` of a result.

    It is followed back from who ended last: to the client that it waited for, where it waited, else to itself a round before.
    """
    at, path = int(end[-1].argmax()), []
    for row in waited_for[::-1]:
        at = int(row[at]) if row[at] >= 0 else at
        path.append(at)
    return path[::-1]
