"""Choosing the graph: this package's search against Algorithm 2 written down as it stands.

    OMP_NUM_THREADS=1 python benchmarks/graph_construction.py --data data/cifar10.h5 [--clients 100] [--budget 10] [--measured 10]

Both search the first graph of `--measured` of N clients on the same trained models, in the same order of candidates and with the same
coins, on one thread. The twin averages its sets anew for each evaluation and evaluates R(X), R(X and j), R(Y) and R(Y without j) for every
candidate, one model at a time through `nn.Module`; it stops at a full budget as well. Printed: seconds and evaluations per client of both,
whether they chose the same sets, and the ratio. A last line says what the twin would take without stopping.
"""

from __future__ import annotations

import argparse
import copy
import time

import numpy as np
import torch
from mpi4py import MPI

from dpfl_mpi.engine.build import build
from dpfl_mpi.federation import Parts
from dpfl_mpi.federation.search import decide
from dpfl_mpi.mpi.world import World
from dpfl_mpi.settings import Job, Run


class Twin:
    """Algorithm 2 for one client after another, each average made anew."""

    def __init__(self, parts: Parts, w_KW: torch.Tensor):
        self.parts, self.fed, self.w, self.evaluations = parts, parts.fed, w_KW, 0
        self.module = copy.deepcopy(parts.backend.ensemble.module)

    def reward(self, members: set[int]) -> float:
        """Return R = -validation loss of the average over the members on the client searched."""
        fed = self.fed
        ids = sorted(members)
        p = torch.from_numpy(fed.p[ids])
        rows = self.w[self.parts.members.row_of[ids]].double()
        average = ((rows * p[:, None]).sum(0) / p.sum()).float()
        torch.nn.utils.vector_to_parameters(average[: self.parts.backend.ensemble.size], self.module.parameters())
        self.evaluations += 1
        return -float(torch.nn.functional.cross_entropy(self.module(self.x), self.y))

    def images(self, i: int) -> None:
        """Keep local client i's validation images in the module's order of channels."""
        backend = self.parts.backend
        rows = slice(int(backend.clients.scored[i]), int(backend.clients.scored[i] + backend.clients.n_val[i]))
        x = backend.ensemble.normalise(backend.clients.score_x[rows])
        self.x, self.y = x.permute(0, 3, 1, 2).contiguous(), backend.clients.score_y[rows]

    def search(self, i: int) -> list[int]:
        """Return the set that local client i chooses (lines 1-13)."""
        fed, k = self.fed, int(self.fed.ids[i])
        self.images(i)
        order = fed.shuffle(k, fed.reachable(k), 0)
        coins = self.parts.draws.coins(slice(i, i + 1), 0)[0]
        x, y = {k}, {k, *map(int, order)}
        for j in map(int, order):
            if len(x) - 1 >= fed.most_senders[k]:
                break
            a = max(self.reward(x | {j}) - self.reward(x), 0.0)
            b = max(self.reward(y - {j}) - self.reward(y), 0.0)
            if decide(a, b, coins.random()):
                x.add(j)
            else:
                y.remove(j)
        return sorted(x - {k})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="data/cifar10.h5")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--budget", default="10")
    parser.add_argument("--epochs", type=int, default=1, help="local epochs before the first graph")
    parser.add_argument("--measured", type=int, default=10, help="clients that the twin searches")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(dataset="cifar10", data=args.data, clients=args.clients, budget=args.budget, tau_init=args.epochs)
    parts = build(run.resolve(), Job(device="cpu"), World(MPI.COMM_SELF))
    fed = parts.fed
    w = fed.local_opt(fed.common_row(), epochs=args.epochs)
    start = time.perf_counter()
    omega = fed.bggc(w)
    ours = (time.perf_counter() - start) / len(fed.ids)
    evaluations = fed.notes["evaluations"]
    twin, same = Twin(parts, w), 0
    measured = np.linspace(0, len(fed.ids) - 1, min(args.measured, len(fed.ids))).astype(int)
    start = time.perf_counter()
    with torch.no_grad():
        for i in measured:
            same += twin.search(int(i)) == omega.of(int(fed.ids[i])).tolist()
    theirs = (time.perf_counter() - start) / len(measured)
    print(f"one thread, torch {torch.__version__}, N = {args.clients}, B_c = {args.budget}, "
          f"{parts.backend.clients.n_val.mean():.0f} validation images per client")  # fmt: skip
    print(
        f"ours   {ours:.3f} s per client, {evaluations.mean():.1f} evaluations, {1e3 * ours / evaluations.mean():.2f} ms each"
    )
    print(f"twin   {theirs:.3f} s per client, {twin.evaluations / len(measured):.1f} evaluations, "
          f"{1e3 * theirs * len(measured) / twin.evaluations:.2f} ms each ({len(measured)} clients measured)")  # fmt: skip
    print(f"the same sets for {same} of {len(measured)} clients")
    own = evaluations[measured].mean()
    print(f"ratio graph: {theirs / ours * evaluations.mean() / own:.2f}x (for equal shares of evaluations)")
    full = 4 * (args.clients - 1) * theirs * len(measured) / twin.evaluations
    print(f"without stopping at a full budget the twin would take about {full:.2f} s per client")


if __name__ == "__main__":
    main()
