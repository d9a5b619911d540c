"""Mistakes of the user's own methods and models that would change numbers, or lose work, by ranks.

Each is one sentence on all of two ranks.
"""

import numpy as np
import own
import pytest
from launch import differences, federation, refused, run_here, run_many

from dpfl_mpi.results import Result

METHOD = """
import os
import numpy as np
from dpfl_mpi.graph import CollaborationGraph

def init(fed):
    w = fed.common_row()
    fed.evaluate(w)
    return {"client": {"w": w}, "shared": {}}

def round(fed, state, t):
    w, more = fed.local_opt(state["client"]["w"], epochs=1), {}
    LINE
    fed.evaluate(w)
    return {"client": {"w": w, **more}, "shared": {}}
"""
OWN = "np.isin(np.arange(fed.n), fed.ids).astype(int)"  # 1 for the clients of this rank
MISTAKES = {
    "a graph of one rank": (
        f"fed.exchange(w, CollaborationGraph.from_lists([[]] + [[0] * i for i in {OWN}[1:]]))",
        "the graph of fed.exchange is not the same on every rank; fed.collect makes"),
    "groups of one rank": (f"fed.means(w, {OWN}, fed.initial_row().repeat(2, 1))",
        "the groups of fed.means are not the same on every rank; fed.tell brings"),
    "too many groups": ("fed.means(w, np.arange(fed.n), fed.initial_row().repeat(2, 1))",
        "other groups than it takes: 5 whole numbers from 0 to 1, one per client"),
    "a square of local clients": ('more["like"] = np.zeros((len(fed.ids),) * 2)',
        "has other names, types or shapes on some ranks"),
    "one row for all": ("w = fed.initial_row().expand(len(fed.ids), -1)",
        "rows that share their memory, as after .expand; make them so by .clone()"),
}  # fmt: skip
MODEL = """
import math
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.head = nn.Linear(inputs, classes)
        self.register_buffer("scale", torch.tensor(SCALE, dtype=torch.float32))

    def forward(self, x):
        return self.head(x.flatten(1) * self.scale)

def build(shape, classes):
    return Net(math.prod(shape), classes)
"""
SMALL = {"clients": 5, "rounds": 1, "tau_init": 1, "tau_train": 1}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """What two ranks say of each mistake, by its name."""
    folder, runs = tmp_path_factory.mktemp("mistakes"), {}
    for i, (name, (line, _)) in enumerate(MISTAKES.items()):
        file = own.write(folder / str(i), mine=METHOD.replace("LINE", line)) / "mine.py"
        runs[name] = SMALL | {"method": str(file)}
    unseeded = MODEL.replace("SCALE", "np.random.default_rng().random()")
    file = own.write(folder / "net", net=unseeded) / "net.py"
    runs["a model of its own on each rank"] = SMALL | {"method": "local", "model": str(file)}
    return run_many(2, folder / "runs", runs, sentences=True)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_that_ranks_would_compute_is_refused(refusals, name):
    assert MISTAKES[name][1] in refusals[name]


def test_a_model_is_the_same_on_all_ranks(refusals, tmp_path):
    assert (
        "net: build differs between ranks; draw by" in refusals["a model of its own on each rank"]
    )
    seeded = own.write(tmp_path, net=MODEL.replace("SCALE", "np.random.rand()")) / "net.py"
    fields = SMALL | {"method": "local", "model": str(seeded)}
    one = run_here(tmp_path / "one.h5", fields)
    assert differences(run_many(2, tmp_path / "two", {"two": fields})["two"], one) == []


def test_facts_of_the_run_cannot_be_written_to():
    with federation(SMALL) as fed:
        for values in (fed.p, fed.budget, fed.n_train, fed.class_counts):
            with pytest.raises(ValueError, match="read-only"):
                values[:] = 0


def test_code_that_changes_the_folder_changes_no_path(tmp_path, monkeypatch):
    text = METHOD.replace("LINE", "os.chdir('/')").replace("def init", "os.chdir('/')\n\ndef init")
    own.write(tmp_path, mine=text)
    own.write(tmp_path, callback="import os\n\ndef on_round(result, t):\n    os.chdir('/')\n")
    monkeypatch.chdir(tmp_path)
    run_here("a.h5", SMALL | {"method": "mine.py"}, callback="callback.py")
    assert Result(tmp_path / "a.h5").finished
    assert np.isfinite(Result("a.h5")["best/test_acc"]).all()


def test_a_newcomer_that_returns_nothing_is_named(tmp_path):
    file = own.write(
        tmp_path, mine=METHOD.replace("LINE", "") + "\ndef newcomer(fed, state):\n    1\n"
    )
    fields = SMALL | {"method": str(file / "mine.py"), "newcomers": 0.4}
    with pytest.raises(Exception, match="newcomer of the method mine returned a NoneType; it must"):
        run_here(tmp_path / "a.h5", fields)


def test_a_gradient_that_is_no_function_is_named():
    with federation(SMALL) as fed:
        refused("was given a Tensor as its gradient; it takes a function, as fed.gradient_of",
                fed.local_opt, fed.common_row(), 1, fed.common_row())  # fmt: skip
