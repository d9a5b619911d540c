"""Choosing the graph: this package's search against a twin, Algorithm 2 as it stands.

    OMP_NUM_THREADS=1 python benchmarks/graph_construction.py --data data/cifar10.h5 [--clients 100]

Both search the first graph of `--measured` of N clients on the same models, in the same order of
candidates and with the same coins, on one thread. The twin averages its sets anew for each
evaluation and evaluates R(X), R(X and j), R(Y) and R(Y without j) for every candidate, one model at
a time through `nn.Module`; it also stops at a full budget. Printed: seconds and evaluations per
client of both, whether they chose the same sets, the ratio, and what the twin would take without
stopping.
"""

import argparse
import copy
import time

import numpy as np
import torch
from mpi4py import MPI
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

from dpfl_mpi.engine.build import build
from dpfl_mpi.federation import Parts
from dpfl_mpi.federation.search import decide
from dpfl_mpi.mpi.world import World
from dpfl_mpi.settings import Job, Run


class Twin:
    """Algorithm 2 for one client after another, each average made anew."""

    def __init__(self, parts: Parts, w_KW: torch.Tensor):
        self.parts, self.fed, self.w = parts, parts.fed, w_KW
        self.evaluations = 0
        self.module = copy.deepcopy(parts.backend.ensemble.module)

    def reward(self, members: set[int]) -> float:
        """Return R: minus the validation loss of the members' average on the searching client."""
        ids = sorted(members)
        p = torch.from_numpy(self.fed.p[ids])
        rows = self.w[self.parts.members.row_of[ids]].double()
        average = ((rows * p[:, None]).sum(0) / p.sum()).float()
        size = self.parts.backend.ensemble.size
        vector_to_parameters(average[:size], self.module.parameters())
        self.evaluations += 1
        return -float(cross_entropy(self.module(self.x), self.y))

    def search(self, i: int) -> list[int]:
        """Return the set that local client i chooses (lines 1-13)."""
        fed, backend, k = self.fed, self.parts.backend, int(self.fed.ids[i])
        clients, first = backend.clients, int(backend.clients.score_start[i])
        rows = slice(first, first + int(clients.n_val[i]))
        images = backend.ensemble.normalise(clients.score_x[rows])
        self.x, self.y = images.permute(0, 3, 1, 2).contiguous(), clients.score_y[rows]
        order = fed.shuffle(k, fed.reachable(k)).tolist()
        coins = self.parts.draws.coins(slice(i, i + 1))[0]
        x, y = {k}, {k, *order}
        for j in order:
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="data/cifar10.h5")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--budget", default="10")
    parser.add_argument("--measured", type=int, default=10, help="clients of the twin")
    args = parser.parse_args()
    torch.set_num_threads(1)
    n = args.clients
    run = Run(dataset="cifar10", data=args.data, clients=n, budget=args.budget, tau_init=1)
    parts = build(run.resolve(), Job(device="cpu"), World(MPI.COMM_SELF))
    fed = parts.fed
    w = fed.local_opt(fed.common_row(), epochs=1)
    start = time.perf_counter()
    omega = fed.bggc(w)
    ours = (time.perf_counter() - start) / n
    evaluations = fed.notes["evaluations"]
    twin, same = Twin(parts, w), 0
    measured = np.linspace(0, n - 1, min(args.measured, n)).astype(int)
    start = time.perf_counter()
    with torch.no_grad():
        for i in measured.tolist():
            same += twin.search(i) == omega.of(int(fed.ids[i])).tolist()
    seconds = time.perf_counter() - start
    theirs, each = seconds / len(measured), seconds / twin.evaluations
    mean, own = evaluations.mean(), evaluations[measured].mean()
    print(f"one thread, torch {torch.__version__}, N = {n}, B_c = {args.budget}, "
          f"{parts.backend.clients.n_val.mean():.0f} validation images per client\n"
          f"ours   {ours:.3f} s per client, {mean:.1f} evaluations, "
          f"{1e3 * ours / mean:.2f} ms each\n"
          f"twin   {theirs:.3f} s per client, {twin.evaluations / len(measured):.1f} evaluations, "
          f"{1e3 * each:.2f} ms each ({len(measured)} clients measured)\n"
          f"the same sets for {same} of {len(measured)} clients\n"
          f"ratio graph: {theirs / ours * mean / own:.2f}x (for equal shares of evaluations)\n"
          f"without stopping at a full budget the twin would take about {4 * (n - 1) * each:.2f} s "
          "per client")  # fmt: skip


if __name__ == "__main__":
    main()
