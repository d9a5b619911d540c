"""How far the greedy search is from the best subset.

`python reproduction/optimality.py RESULT` needs torch but no MPI, and a run with --save_models.

For each client of at most 16, the losses of its averages with all subsets of the others are
computed from the saved models, on its validation images. The greedy search (Algorithm 2 over all
others; by Theorem 1 also Algorithm 3) is then run in many orders and compared with the best subset
within the budget: by the reward that it maximises, and by test accuracy. Bit i of a subset is the
i-th other client, ascending.
"""

from typing import Any

import numpy as np
import pandas as pd

from dpfl_mpi.data.partition import search_first
from dpfl_mpi.engine.saved import dealt, source_of
from dpfl_mpi.errors import UserError, complain, exit_with, in_a_sentence
from dpfl_mpi.figures.tables import interval
from dpfl_mpi.results import Result
from dpfl_mpi.settings.command_line import Parser

MOST_CLIENTS = 16  # 2^15 subsets for each
CHUNK = 64  # averages scored at once


def best_subset(rewards: np.ndarray, most: int) -> int:
    """Return the subset of at most `most` clients with the largest reward, the first of several."""
    sizes = np.array([subset.bit_count() for subset in range(len(rewards))])
    return int(np.argmax(np.where(sizes <= most, rewards, -np.inf)))


def greedy(rewards: np.ndarray, order: np.ndarray, coins: np.ndarray, most: int) -> int:
    """Return the subset that Algorithm 2 chooses from candidates (bits) in this order, by coins."""
    from dpfl_mpi.federation.search import decide

    x, y = 0, len(rewards) - 1
    for j, coin in zip(order.tolist(), coins.tolist(), strict=True):
        if x.bit_count() >= most:
            break
        more, less = x | 1 << j, y & ~(1 << j)
        a = max(rewards[more] - rewards[x], 0.0)
        b = max(rewards[less] - rewards[y], 0.0)
        x, y = (more, y) if decide(a, b, coin) else (x, less)
    return x


def check(result: Result) -> None:
    """Raise UserError if the models of a result cannot be compared."""
    run, n = result.run, len(result["client/p"])
    if not 2 <= n <= MOST_CLIENTS:
        allowed = f"all subsets are tried of 2 to {MOST_CLIENTS}"
        raise UserError(f"{result.path} has {n} clients; {allowed}")
    flags = "drift", "newcomers", "churn", "send", "reach"
    if run.metric == "batch" or any(getattr(run, flag) for flag in flags):
        named = f"--{', --'.join(flags)} or --metric batch"
        raise UserError(f"{result.path} is of a run with {named}, which searches otherwise")
    result.state_dict(0)  # raises if no models were saved
    if (result["best/round"] < 0).any() or not result.benign.any():
        raise UserError(f"{result.path} has clients that were never scored, or none that is honest")


class Models:
    """The saved models of all clients, and the data to score them on."""

    def __init__(self, result: Result):
        import torch

        from dpfl_mpi.numerics.backend import Backend
        from dpfl_mpi.numerics.clients import Clients
        from dpfl_mpi.numerics.native_backend import try_native
        from dpfl_mpi.numerics.optimiser import SGD
        from dpfl_mpi.plan.needs import ensemble_of

        check(result)
        run = result.run
        self.p = result["client/p"]
        self.n = len(self.p)
        source = source_of(result, None)
        partition = dealt(result, source)
        ensemble = ensemble_of(run, source)
        ordered, n_search = search_first(run, source.labels["train"], partition)
        ids, flips = np.arange(self.n), result["client/flipped"]
        draws = run.seed, run.augment
        clients = Clients(source, ordered, ids, *draws, ensemble, flips, n_search)
        parts = ensemble, clients, SGD(run.batch_size, 0.0, 0.0, 0.0)  # nothing is trained
        native, why = try_native("auto", *parts)
        if why:
            complain(f"warning: PyTorch computes, several times slower: {why}")
        self.backend: Any = native or Backend(*parts)
        self.rows = ensemble.zeros(self.n)
        self.rows[:, : ensemble.size] = torch.from_numpy(result["model/best"])

    def averages(self, k: int, subsets: np.ndarray) -> Any:
        """Return client k's averages with each subset (equation 4), float32 `[m, W]`."""
        import torch

        others = np.delete(np.arange(self.n), k)
        weights = np.zeros((len(subsets), self.n))
        weights[:, others] = (subsets[:, None] >> np.arange(self.n - 1)) & 1
        weights[:, k] = 1
        weights *= self.p
        weights /= weights.sum(1, keepdims=True)
        return (torch.from_numpy(weights) @ self.rows.double()).float()

    def rewards(self, k: int) -> np.ndarray:
        """Return R of every subset, float64 `[2^(N - 1)]`."""
        subsets = np.arange(2 ** (self.n - 1))
        chunks = [subsets[i : i + CHUNK] for i in range(0, len(subsets), CHUNK)]
        averages = (self.averages(k, chunk)[None] for chunk in chunks)
        score = self.backend.validation_losses
        return np.concatenate([-score(slice(k, k + 1), each)[0] for each in averages])

    def test_acc(self, k: int, subset: int) -> float:
        """Return the test accuracy of the average with a subset, 0 to 1."""
        clients, average = self.backend.clients, self.averages(k, np.array([subset]))
        _, predicted, labels = self.backend.score(slice(k, k + 1), average)
        test = slice(int(clients.n_val[k]), int(clients.n_val[k] + clients.n_test[k]))
        return float((predicted[0, test] == labels[0, test]).mean())

    def search(self, k: int, most: int, orders: int) -> dict[str, Any]:
        """Return what the best subset and the greedy search, in random orders, give client k."""
        rewards, rng = self.rewards(k), np.random.default_rng((0, k))
        draws = [(rng.permutation(self.n - 1), rng.random(self.n - 1)) for _ in range(orders)]
        chosen = [greedy(rewards, order, coins, most) for order, coins in draws]
        best = best_subset(rewards, most)
        test = {s: self.test_acc(k, s) for s in {best, *chosen}}
        return {
            "alone": -rewards[0],
            "best": -rewards[best],
            "gaps": rewards[best] - rewards[chosen],  # of each order
            "best size": best.bit_count(),
            "greedy size": np.mean([subset.bit_count() for subset in chosen]),
            "ahead": test[best] - np.mean([test[subset] for subset in chosen]),
        }


def report(clients: pd.DataFrame) -> str:
    """Return the table of what `Models.search` found for each client."""
    gaps, mean = np.stack(clients["gaps"]), clients.drop(columns="gaps").mean()
    half, nine = np.quantile(gaps, (0.5, 0.9))
    losses = f"best subset {mean['best']:.4f}, greedy {mean['best'] + gaps.mean():.4f}"
    sizes = f"best subset {mean['best size']:.1f}, greedy {mean['greedy size']:.1f}"
    over_clients = "{:+.4f} ± {:.4f}, mean over orders, 95 % over clients"
    gap = over_clients.format(*interval([gaps.mean(1)]))
    ahead = "{:+.4f} ± {:.4f}".format(*interval([100 * clients["ahead"].to_numpy()]))
    return f"""{len(gaps)} clients, {gaps.shape[1]} orders
validation loss     alone {mean["alone"]:.4f}, {losses}
collaborators       {sizes}
gap of the reward   {gap}; half of all orders within {half:.4f}, 90 % within {nine:.4f}
best subset found   in {100 * (gaps < 1e-12).mean():.1f} % of the orders
test accuracy       best subset minus greedy {ahead} points"""


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    what = f"result of a run of at most {MOST_CLIENTS} clients with --save_models"
    add("result", metavar="RESULT", help=what)
    add("--orders", type=int, default=100, metavar="N", help="greedy searches per client (100)")
    args = parser.parse_args(arguments)
    if args.orders < 1:
        raise UserError(f"--orders is {args.orders}; allowed is a whole number of at least 1")
    with Result(args.result) as result:
        most, models = result["client/budget"] - result.run.budget_counts_self, Models(result)
        clients = np.flatnonzero(result.benign).tolist()
        lines = [models.search(k, min(int(most[k]), models.n - 1), args.orders) for k in clients]
    print(report(pd.DataFrame(lines)))


if __name__ == "__main__":
    exit_with(main)
