"""How long `spectral` takes to find its kin among many clients.

    python benchmarks/kinds.py [--clients 20000,100000]

Digits of scikit-learn, 25 images per client to train and validate on, an MLP, B_c = 10. Clients are
of three kinds, to which a digit has different names. A line per N: seconds of a look (round 1) and
of a look and the choice (round 2), slowest rank, bytes of the largest rank, and the percentage of
partners in round 3 that are of the client's kind. Each is one run: use free cores.
"""

import tempfile
from pathlib import Path

import _scale
import numpy as np
from _scale import MB, numbers
from sklearn.datasets import load_digits

from dpfl_mpi import prepare
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.results import Result

KINDS, POOL, TEST, ROUNDS = 3, 25, 10, 3


def make_data(path: Path, clients: int) -> None:
    """Write a prepared file; to kind g a digit d has the name d + 3 g, modulo 10."""
    digits, rng = load_digits(), np.random.default_rng(0)
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    drawn = rng.integers(0, len(images), clients * (POOL + TEST))
    client = np.repeat(np.arange(clients), POOL + TEST)
    names = (digits.target[drawn] + 3 * (client % KINDS)) % 10
    is_test = np.tile(np.arange(POOL + TEST) >= POOL, clients)
    prepare.write(arrays_of(images[drawn], names, client, is_test), "arrays", path, own=True)


def main() -> None:
    parser = _scale.options(__doc__)
    parser.add_argument("--clients", type=numbers, default="20000", help="numbers of clients N")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    args = parser.parse_args()
    print("      N | a look, s | a look and the choice, s | MB of a rank | kin, %")
    for n in args.clients:
        with tempfile.TemporaryDirectory() as name:
            data = Path(name, "digits.h5")
            make_data(data, n)
            flags = {"model": "mlp", "method": "spectral", "budget": 10, "rounds": ROUNDS}
            flags |= {"tau_init": 2, "tau_train": 2, "save_models": False}
            watched = _scale.run(Path(name), args.ranks, "run", _scale.flags_for(data) | flags)
            with Result(watched.path) as result:
                look, choice = result["seconds/graph"][1:3, 2]
                graph = result.chosen(ROUNDS)
            kin = 100 * np.mean(graph.senders % KINDS == graph.receivers() % KINDS)
        memory = watched.most("resident") / MB
        print(f"{n:7d} | {look:9.1f} | {choice:24.1f} | {memory:12.0f} | {kin:6.1f}", flush=True)


if __name__ == "__main__":
    main()
