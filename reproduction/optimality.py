"""How far the greedy search is from the best subset: `python reproduction/optimality.py RESULT` (needs torch, no MPI; the run needs --save_models).

Of each client, of at most 16, the losses of the averages over all subsets of the others are computed on its validation images, from the saved
models. The greedy search (Algorithm 2 over all others, as Algorithm 3 by Theorem 1) is then run in many orders and compared with the best
subset within the budget: in the reward that it maximises, and in the test accuracy that counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpfl_mpi.data.partition import search_first
from dpfl_mpi.engine.saved import dealt, source_of
from dpfl_mpi.errors import UserError, complain, exit_with, in_a_sentence
from dpfl_mpi.results import Result
from dpfl_mpi.settings.command_line import Parser
from dpfl_mpi.storage.files import check_apart, write_csv

MOST = 16  # clients: 2^15 subsets for each
CHUNK = 64  # averages scored at once


@dataclass(frozen=True)
class Found:
    """What was found for one client; a subset is a number whose bit i is the i-th of the other clients, ascending."""

    client: int
    others: np.ndarray  # [N - 1]
    rewards: np.ndarray  # [2^(N - 1)]: R of every subset
    best: int  # the best subset within the budget
    chosen: np.ndarray  # [orders]: the subsets of the greedy search
    test_acc: dict[int, float]  # of the best, of all that were chosen, of nobody (0)


def best_subset(rewards: np.ndarray, most: int) -> int:
    """Return the subset of at most `most` with the largest reward; of equal ones the first."""
    sizes = np.array([subset.bit_count() for subset in range(len(rewards))])
    return int(np.argmax(np.where(sizes <= most, rewards, -np.inf)))


def greedy(rewards: np.ndarray, order: np.ndarray, coins: np.ndarray, most: int) -> int:
    """Return the subset that Algorithm 2 chooses, its candidates (bits) in this order, with a coin in [0, 1) for each."""
    from dpfl_mpi.federation.search import decide

    x, y = 0, len(rewards) - 1
    for j, coin in zip(order.tolist(), coins.tolist(), strict=True):
        if x.bit_count() >= most:
            break
        more, less = x | 1 << j, y & ~(1 << j)
        a, b = max(rewards[more] - rewards[x], 0.0), max(rewards[less] - rewards[y], 0.0)
        x, y = (more, y) if decide(a, b, coin) else (x, less)
    return x


class Models:
    def __init__(self, result: Result, data: Path | None):
        import torch

        from dpfl_mpi.federation.limits import flipped
        from dpfl_mpi.numerics.backend import Backend
        from dpfl_mpi.numerics.clients import Clients
        from dpfl_mpi.numerics.native_backend import try_native
        from dpfl_mpi.numerics.optimiser import SGD
        from dpfl_mpi.plan.needs import ensemble_of

        run = result.run
        self.n, self.p = len(result["client/p"]), result["client/p"]
        if not 2 <= self.n <= MOST:
            raise UserError(f"{result.path} has {self.n} clients; all subsets are tried of 2 to {MOST}")
        if run.drift or run.newcomers or run.churn or run.send:
            why = "with --drift, --newcomers, --churn or --send, which averages other models than these"
            raise UserError(f"{result.path} is of a run {why}")
        result.state_dict(0)  # says so where no models were saved
        if (result["best/round"] < 0).any():
            raise UserError(f"{result.path} has clients without a model: they were never scored")
        source = source_of(result, data)
        partition = dealt(result, source)
        ensemble = ensemble_of(run, source)
        ordered, n_search = search_first(run, source.labels["train"], partition)
        clients = Clients(source, ordered, np.arange(self.n), run.seed, run.augment, ensemble, flipped(run), n_search)
        parts = ensemble, clients, SGD(run.batch_size, 0.0, 0.0, 0.0)  # nothing is trained
        native, why = try_native("auto", *parts)
        if why:
            complain(f"warning: PyTorch computes, several times slower: {why}")
        self.backend: Any = native or Backend(*parts, 1)
        self.rows = ensemble.zeros(self.n)
        self.rows[:, : ensemble.size] = torch.from_numpy(result["model/best"])

    def averages(self, k: int, subsets: np.ndarray) -> Any:
        """Return the averages of client k's model with those of each subset (equation 4), float32 `[m, W]`."""
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
        parts = (self.averages(k, subsets[i : i + CHUNK])[None] for i in range(0, len(subsets), CHUNK))
        return np.concatenate([-self.backend.validation_losses(slice(k, k + 1), part)[0] for part in parts])

    def test_acc(self, k: int, subset: int) -> float:
        """Return the test accuracy of the average with a subset, 0 to 1."""
        clients = self.backend.clients
        _, predicted, labels = self.backend.score(slice(k, k + 1), self.averages(k, np.array([subset])))
        test = slice(int(clients.n_val[k]), int(clients.n_val[k] + clients.n_test[k]))
        return float((predicted[0, test] == labels[0, test]).mean())

    def found(self, k: int, most: int, orders: int) -> Found:
        """Return the best subset of client k, and what the greedy search chooses in so many orders."""
        rewards, rng = self.rewards(k), np.random.default_rng((0, k))
        draws = [(rng.permutation(self.n - 1), rng.random(self.n - 1)) for _ in range(orders)]
        chosen = np.array([greedy(rewards, order, coins, most) for order, coins in draws])
        best = best_subset(rewards, most)
        test = {s: self.test_acc(k, s) for s in {0, best, *chosen.tolist()}}
        return Found(k, np.delete(np.arange(self.n), k), rewards, best, chosen, test)


def interval(values: np.ndarray) -> str:
    """Return "mean ± half width" of Student's 95 % interval over clients."""
    from scipy.special import stdtrit

    n, mean = len(values), f"{values.mean():+.4f}"
    return mean if n < 2 else f"{mean} ± {stdtrit(n - 1, 0.975) * values.std(ddof=1) / n**0.5:.4f}"


def report(all_found: list[Found], budget: Any, orders: int) -> str:
    gaps = np.array([f.rewards[f.best] - f.rewards[f.chosen] for f in all_found])  # [clients, orders]
    best = np.mean([-f.rewards[f.best] for f in all_found])
    alone = np.mean([-f.rewards[0] for f in all_found])
    test = np.array([f.test_acc[f.best] - np.mean([f.test_acc[int(s)] for s in f.chosen]) for f in all_found])
    sizes = [f.best.bit_count() for f in all_found], [int(s).bit_count() for f in all_found for s in f.chosen]
    half, nine = np.quantile(gaps, (0.5, 0.9))
    within = f"half of all orders within {half:.4f}, nine of ten within {nine:.4f}"
    lines = {
        "validation loss": f"alone {alone:.4f}, best subset {best:.4f}, greedy {best + gaps.mean():.4f}",
        "collaborators": f"best subset {np.mean(sizes[0]):.1f}, greedy {np.mean(sizes[1]):.1f}",
        "gap of the reward": f"{interval(gaps.mean(1))}, mean over orders, 95 % over clients; {within}",
        "best subset found": f"in {100 * (gaps < 1e-12).mean():.1f} % of the orders",
        "test accuracy": f"of the best subset minus that of the greedy one {interval(100 * test)} points, 95 % over clients",
    }
    subsets = len(all_found[0].rewards)
    title = f"{len(all_found)} clients, B_c = {budget}, {subsets} subsets per client, {orders} orders"
    return "\n".join([title, *(f"{name:20}{text}" for name, text in lines.items())])


def rows(all_found: list[Found]) -> Iterator[tuple[Any, ...]]:
    """Yield one row per client and order: the subset, its reward, gap and test accuracy; order -1 is the best subset."""
    for f in all_found:
        for i, s in enumerate([f.best, *f.chosen.tolist()]):
            members = " ".join(str(j) for bit, j in enumerate(f.others) if s >> bit & 1)
            numbers = float(f.rewards[s]), float(f.rewards[f.best] - f.rewards[s]), f.test_acc[s]
            yield f.client, i - 1, members, *map(repr, numbers)


@in_a_sentence
def main(arguments: list[str] | None = None) -> None:
    about = str(__doc__).split("\n\n")[0]
    parser = Parser(prog="python reproduction/optimality.py", description=about)
    add = parser.add_argument
    add("result", metavar="RESULT", help=f"result of a run of at most {MOST} clients with --save_models")
    add("--data", type=Path, help="prepared data file (default: the one of the run)")
    add("--orders", type=int, default=100, metavar="N", help="orders of the greedy search per client (100)")
    add("--out", type=Path, help="CSV file: every order's subset, its gap, its test accuracy")
    args = parser.parse_args(arguments)
    if args.orders < 1:
        raise UserError(f"--orders is {args.orders}; allowed is a whole number of at least 1")
    with Result(args.result) as result:
        check_apart(args.out, args.result, args.data or result.run.data)
        models, run = Models(result, args.data), result.run
        most = np.minimum(result["client/budget"] - run.budget_counts_self, models.n - 1).tolist()
        all_found = [models.found(k, most[k], args.orders) for k in np.flatnonzero(result.benign).tolist()]
    if not all_found:
        raise UserError(f"{args.result}: no client is scored: all have flipped labels or lie")
    print(report(all_found, run.said_budget, args.orders))
    if run.reach:
        print("here a client may choose any other; in the run it reached fewer (--reach)")
    if run.metric == "batch":
        print("losses are means over images; the run took means over mini-batches (--metric batch)")
    if args.out:
        write_csv(args.out, ("client_id", "order", "collaborators", "reward", "gap", "test_acc"), rows(all_found))
        print(args.out)


if __name__ == "__main__":
    exit_with(main)
