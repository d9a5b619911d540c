"""The contract of a method's file: what must be there, what is refused and in which words, and a file of nothing but `init` and `round`."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launch import differences, refused, run_here

from dpfl_mpi import methods, models
from dpfl_mpi.engine.checks import check_state
from dpfl_mpi.federation.members import Members
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.methods import Method
from dpfl_mpi.plugins import find, names
from dpfl_mpi.settings import Run, option


def test_init_and_round_are_a_method(tmp_path, monkeypatch):
    """A file in the folder, found by its name. Without a declaration it reads every field of a Run but tau_init; here it does what Local does."""
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    (tmp_path / "mine.py").write_text("from dpfl_mpi.methods.local import init, round\n")
    mine = find("method", "mine")
    assert (mine.title, mine.topology, mine.searches, mine.preprocesses) == ("mine", "graph", True, False)
    assert mine.unread == {"tau_init"}
    assert Run(method="mine", budget=3, ggc_period=2).resolve().most_senders == 2
    fields = {"clients": 4, "rounds": 3, "tau_train": 2, "finetune_epochs": 1}
    paths = [run_here(tmp_path / f"{name}.h5", fields | {"method": name}) for name in ("mine", "local")]
    assert differences(*paths) == ["client/budget"]


def test_what_the_methods_declare():
    found = {name: find("method", name) for name in names("method")}
    graphs = {"dpfl", "dpfl_choice", "random_graph", "oracle", "pairwise", "replay", "nearest"}
    rivals = {"pens", "dac", "fedsim", "pfedsv", "dfedpgp", "facade", "sketch"}
    assert {n for n, m in found.items() if m.topology == "graph"} == rivals | graphs
    assert {n for n, m in found.items() if m.preprocesses} == graphs
    assert found["dpfl"].unread == {"graphs"} and "budget" not in found["random_graph"].unread
    assert all(m.citation.startswith("@") for n, m in found.items() if n != "local")


GOOD = {"init": lambda fed: None, "round": lambda fed, state, t: None}


@dataclass(frozen=True)
class BadOptions:
    sizes: tuple = option((1, 2), "sizes")


@pytest.mark.parametrize(("content", "sentence"), [
    ({"init": 3}, "the method mine has no function init"),
    ({"finetune_gradient": lambda fed: None}, "which is called as finetune_gradient(fed, start)"),
    ({"METHOD": {"server": True}}, "METHOD of the method mine is {'server': True}; it must be a Method(...)"),
    ({"METHOD": Method(models=0)}, "has models=0; allowed are whole numbers from 1 to 1000"),
    ({"METHOD": Method(every_row=True)}, "has every_row=True; allowed are whole numbers from 0 to 1000"),
    ({"METHOD": Method(sends=3)}, "METHOD of the method mine has sends=3; allowed are texts"),
    ({"METHOD": Method(searches="no")}, "has searches='no'; allowed are True and False"),
    ({"METHOD": Method(ignores="graphs")}, "has ignores='graphs'; allowed are tuples of omega_period, graphs, averaging"),
    ({"METHOD": Method(optimizers=("sgd", "lion"))}, "has optimizers=('sgd', 'lion'); allowed are tuples of sgd, adam, adamw"),
    ({"Options": dict}, "Options of the method mine must be a dataclass"),
    ({"Options": BadOptions}, "with true or false, a number or a text as the default"),
    ({"build": print, "HEAD": 3}, "HEAD of the model mine is 3"),
    ({"build": print, "Options": dict}, "Options of the model mine must be a dataclass"),
])  # fmt: skip
def test_a_file_that_breaks_the_contract_is_refused(content, sentence):
    load = models.load if "build" in content else methods.load
    refused(sentence, load, "mine", SimpleNamespace(**(GOOD | content)))


def fed(number=1, **notes):
    """Return what `check_state` looks at: two local clients of four, in round `number`."""
    members = Members.__new__(Members)  # the present and the living of a run of four
    members.alive = members.present = np.ones(4, bool)
    members.n, members.most_senders = 4, np.array([3, 1, 1, 1])
    log = SimpleNamespace(notes={"val_acc": np.ones(2)} | notes)
    return SimpleNamespace(n=4, round=number, ids=np.array([1, 3]), members=members, log=log)


W = torch.zeros(2, 5)
GRAPH = CollaborationGraph.empty(4)
TWO = CollaborationGraph.from_lists([[1, 2, 3], [], [0, 1], []])


@pytest.mark.parametrize(("state", "sentence"), [
    ({"shared": {}}, "returned a dict of shared; a state is"),
    ({"client": {}, "shared": {}, "more": 1}, "returned a dict of client, shared, more; a state is"),
    ({"client": W, "shared": {}}, "of two dicts"),
    ({"client": {"w": [1, 2]}, "shared": {}}, "is a list; it must be a tensor or array of 2 rows, one per client of this rank"),
    ({"client": {}, "shared": {"omega": [[1], [0], [], []]}}, 'state["shared"]["omega"] after round of the method mine is a list; it must be a CollaborationGraph'),
    ({"client": {}, "shared": {"chosen": CollaborationGraph.empty(2)}}, "is a graph of 2 clients; it must be a CollaborationGraph of 4 clients"),
    ({"client": {}, "shared": {"w": W.bfloat16()}}, "is a Tensor of torch.bfloat16, which a checkpoint cannot hold"),
    ({"client": {}, "shared": {"w": np.array([None])}}, "is a ndarray of object, which a checkpoint cannot hold"),
    ({"client": {}, "shared": {"w": np.complex64(1)}}, "is a complex64 of complex64, which a checkpoint cannot hold"),
    ({"client": {}, "shared": {"w": W.to_sparse()}}, "is a Tensor of torch.float32, which a checkpoint cannot hold"),
    ({"client": {}, "shared": {"a/b": 1}}, "returned state[\"shared\"]['a/b']; a key is a text without /"),
    ({"client": {}, "shared": {"chosen": TWO}}, 'state["shared"]["chosen"] after round of the method mine gives client 2 2 senders; its budget allows 1')
])  # fmt: skip
def test_a_state_that_breaks_the_contract_is_refused(state, sentence):
    refused(sentence, check_state, "mine", state, fed())


def test_good_states_pass():
    shared = {"omega": GRAPH, "chosen": GRAPH, "phi": W[0], "mask": np.ones(3, bool), "step": 3, "name": "a", "x": None}
    check_state("mine", {"client": {"w": W, "a": np.zeros((2, 1))}, "shared": shared}, fed())
    check_state("mine", {"client": {}, "shared": {}}, fed(0))
    unscored = fed(2, val_acc=np.array([np.nan, 1]))  # a later round need not score
    check_state("mine", {"client": {}, "shared": {}}, unscored)
