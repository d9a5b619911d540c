"""How long a Run will take by its simulated clocks (--network), before it is trained."""

import numpy as np

from dpfl_mpi.data.partition import Partition
from dpfl_mpi.numerics.sketches import ENTRIES
from dpfl_mpi.settings import Resolved
from dpfl_mpi.transport.clock import Clock
from dpfl_mpi.transport.speeds import NS, speeds_of

PLAYED = 5  # rounds; the others take as long as these on average


def simulated(run: Resolved, dealt: Partition, size: int) -> tuple[float, float]:
    """Return the simulated seconds of preprocessing, and up to the end of the last round, with models of so many bytes.

    Steps, scores and a server's messages are those of the run. Whom a client will choose is not known: it has as many neighbours as its budget allows,
    those behind it by number, and scores all that it may.
    """
    method, n, clock = run.found("method"), dealt.n, Clock(speeds_of(str(run.network), run.network.table, run.clients, run.seed))
    train, val = dealt.sizes("train"), dealt.sizes("val")
    steps, none = -(-train // run.batch_size), np.zeros(n, np.int64)
    most = run.most_senders if method.topology == "graph" else 0

    def send(first: int, asked: bool = False) -> None:
        width = min(most, run.asked - first)
        of = (np.arange(n)[:, None] + 1 + first + np.arange(width)) % n
        if asked:
            clock.ask()
        clock.exchange(np.repeat(np.arange(n), width), of.ravel(), np.full(of.size, size), not asked)

    def choose() -> None:
        """Algorithm 3: all models once for their sum, once more to be judged; with --candidates all sketches first."""
        if run.asked < n - 1:
            to, of = np.nonzero(~np.eye(n, dtype=bool))
            clock.ask()
            clock.wait(to, of, clock.arrivals(to, of, np.full(len(to), ENTRIES), standing=False))
        for judged in range(1 + method.searches * run.ggc_repeats):
            for first in range(0, run.asked, most):
                send(first, asked=True)
                counts = judged > 0 if method.searches else method.asks_all
                clock.work(none, (1 + method.searches) * min(most, run.asked - first) * val * counts)

    clock.work(steps * run.tau_init, val)
    if most and (method.searches or method.asks_all):
        choose()
    if most and method.preprocesses:
        send(0)
    began, played = int(clock.now.max()), min(run.rounds, PLAYED)
    for _ in range(played):
        clock.begin(clock.here)
        if method.topology == "server":  # whose answer is scored
            clock.work(steps * run.tau_train * method.models, none)
            clock.server(clock.here, size)
            clock.work(none, val)
            continue
        clock.work(steps * run.tau_train * method.models, val)
        if most:
            send(0)
            clock.work(none, (2 * most + 2) * val // run.ggc_period * (method.searches and run.ggc_repeats))
    a_round = (int(clock.now.max()) - began) / max(played, 1)
    return began / NS, (began + a_round * run.rounds) / NS
