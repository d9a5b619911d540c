"""Images of floats that are bytes in other units: n * s + t, as PFLlib's (n / 255 - 0.5) / 0.5 and torchvision's Normalize leave them."""

import numpy as np

AT_ONCE = 4096  # images
Steps = tuple[tuple[float, float], ...]  # (s, t) of each channel


def bytes_of(x: np.ndarray) -> tuple[np.ndarray, Steps] | None:
    """Return images float32 `[M, H, W, C]` as bytes n, uint8, and s and t of each channel; None where they are no n * s + t.

    Exact: in a channel each byte stands for one float32, which n * s + t is up to the rounding of a few operations.
    """
    out, steps = np.empty(x.shape, np.uint8), []
    for c in range(x.shape[-1]):
        if (found := channel(x[..., c], out[..., c])) is None:
            return None
        steps.append(found)
    return out, tuple(steps)


def channel(x: np.ndarray, out: np.ndarray) -> tuple[float, float] | None:
    """Write one channel `[M, H, W]` as bytes into `out`, which reach 255 or come near it, and return s and t."""
    parts = [slice(first, first + AT_ONCE) for first in range(0, len(x), AT_ONCE)]
    values = np.zeros(0, np.float32)
    for part in parts:
        if len(values := np.union1d(values, x[part])) > 256:
            return None
    if (found := fitted(values.astype(np.float64))) is None:
        return None
    s, t = found
    times = 255 // max(round((values[-1] - t) / s), 1)  # what has few levels has them from black to white
    for part in parts:
        out[part] = np.rint((x[part].astype(np.float64) - t) / s) * times
    return s / times, t


def fitted(values: np.ndarray) -> tuple[float, float] | None:
    """Return s and t of at most 256 values in ascending order, of which n goes from 0 to at most 255; the largest s that there is."""
    t, span = values[0], values[-1] - values[0]
    allowed = 8 * np.finfo(np.float32).eps * np.abs(values).max()  # how far off float32 may be after a few operations
    if not span:
        return 1.0, float(t)
    gap = np.diff(values).min()
    for parts in range(1, int(255.5 * gap / span) + 1):
        n = np.rint((values - t) * (parts / gap))
        s = span / n[-1]
        if n[-1] <= 255 and s > 100 * allowed and np.abs(n * s + t - values).max() <= allowed:
            return float(s), float(t)
    return None
