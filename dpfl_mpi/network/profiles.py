"""How fast each client computes, and its links: drawn once from a named profile, or read from a file (docs/network.md)."""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi import streams
from dpfl_mpi.settings import Resolved

NS = 10**9  # nanoseconds in a second
BYTE = 8e-6  # megabits
# medians of `settings.values.SPEEDS`, and sigmas of the logarithms: of the device, of its link, of its latency
PROFILES = {
    "phones": ((0.2, 0.002, 12.6, 55.0, 0.0185), (0.7, 0.8, 0.4)),
    "hospitals": ((0.02, 0.0002, 100.0, 100.0, 0.01), (0.3, 0.5, 0.3)),
    "campus": ((0.05, 0.0005, 1000.0, 1000.0, 0.0005), (0.4, 0.0, 0.2)),
}
OF = (0, 0, 1, 1, 2)  # which of the three draws each value takes: a slow device is slow at both


@dataclass(frozen=True)
class Speeds:
    """Of every client `[N]`."""

    step: np.ndarray  # seconds of a gradient step
    image: np.ndarray  # seconds for scoring an image
    up: np.ndarray  # megabits per second
    down: np.ndarray
    latency: np.ndarray  # seconds between the client and the middle of the network


def speeds_of(run: Resolved) -> Speeds:
    """Return the speeds of a Run's clients; values drawn have six digits, which every processor's exp agrees on."""
    if run.network.path:
        return Speeds(*np.asarray(run.network.table).T)
    medians, sigmas = PROFILES[run.network.text]
    normal = streams.stream(run.seed, streams.NETWORK, 0, 0).standard_normal((run.clients, 3))
    drawn = np.array(medians) * np.exp(normal * sigmas)[:, OF]
    return Speeds(*np.array([[float(f"{value:.6g}") for value in row] for row in drawn]).T)


def nanoseconds(seconds: np.ndarray) -> np.ndarray:
    """Return the nearest whole numbers of nanoseconds."""
    return np.rint(seconds * NS).astype(np.int64)
