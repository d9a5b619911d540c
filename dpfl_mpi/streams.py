"""Keyed random streams: every draw of a Run comes from one.

A stream is a Philox generator keyed by (seed, purpose, client, counter). So a draw depends neither
on the number of ranks nor on what was drawn before.
"""

import numpy as np

# purposes of a stream; a number never changes its meaning
INIT, ORDER, AUGMENT, CANDIDATES, COIN, PRESENT, BUDGET, REACH = range(1, 9)
FLIP, _, PAIRS, DROPOUT, NETWORK, _, PEERS, _, CHURN, SKETCH = range(9, 19)

# of an experiment's controls, from 101 on: purposes can be added above
SEARCH, DRIFT, NOISE, NEWCOMERS, REWIRE, SHUFFLE = range(101, 107)


def stream(seed: int, purpose: int, client: int, counter: int) -> np.random.Generator:
    """Return the random generator of one purpose, client and counter (epoch or round)."""
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence((seed, purpose, client, counter)))
    )
