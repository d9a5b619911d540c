"""How fast each client computes and sends: drawn from a profile, or read from a file."""

from dataclasses import dataclass

import numpy as np

from dpfl_mpi import streams

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
    """Return the speeds in a file's table `[N, 5]`, or else those that are drawn from a profile.

    Drawn values have six digits, on which every processor's exp agrees.
    """
    if table is not None:
        return Speeds(*np.asarray(table).T)
    medians, sigmas = PROFILES[profile]
    normal = streams.stream(seed, streams.NETWORK, 0, 0).standard_normal((clients, 3))
    drawn = np.array(medians) * np.exp(normal * sigmas)[:, DRAW_OF_VALUE]
    return Speeds(*np.array([[float(f"{value:.6g}") for value in row] for row in drawn]).T)


def nanoseconds(seconds: np.ndarray) -> np.ndarray:
    """Return the nearest whole numbers of nanoseconds."""
    return np.rint(seconds * NS).astype(np.int64)
