"""The even half of scikit-learn's digits: of clients that train the backbone and then stay out."""

from inside import PAPER, half  # noqa: F401


def load():
    return half(0)
