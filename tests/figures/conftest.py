"""Tiny results that the tests of figures share; `tiny_result` lists their numbers."""

import matplotlib.pyplot as pyplot
import pytest
import tiny_result
from tiny_result import tiny

THREE = {"clients": 3, "partition": "motivation"}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return results by name: DPFL and Local of two seeds by (method, seed), and others."""
    folder = tmp_path_factory.mktemp("tiny")
    out = {(m, s): tiny(folder, f"{m}{s}", m, s) for m, s in tiny_result.BEST}
    out["flip"] = tiny(folder, "flip", flipped=[False, True, False, True])
    out["clocked"] = tiny(folder, "clocked", network="phones")
    out["unsearched"] = tiny(folder, "unsearched", "random_graph", best=(0.5,) * 4)
    both = [[[1, 2], [0, 2], [0, 1]]] * 3
    pair = {"graphs": [[[1], [0], []]] * 3, "reach": "groups:0,1;2"}
    out["alone"] = tiny(folder, "alone", "local", best=(0.5, 0.9, 0.9), **THREE)
    out["pair"] = tiny(folder, "pair", "random_graph", best=(0.4, 0.9, 0.9), **pair, **THREE)
    out["all"] = tiny(folder, "all", "random_graph", best=(0.7, 0.9, 0.9), graphs=both, **THREE)
    return out


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """Return Runs of one method, budget and seed with different settings."""
    folder = tmp_path_factory.mktemp("unlike")
    one = {"tau_train": 3, "tau_init": 1, "best": (0.5,) * 4}
    fields = {"a": {}, "b": {"tau_train": 3}, "c": one, "d": {"batch_size": 7}}
    return [tiny(folder, name, **more) for name, more in fields.items()]
