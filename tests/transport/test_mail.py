"""What is received is what was sent, on any ranks, through a window of any width."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launch import differences, federation, refused, run_here, run_many, text_file

from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.window import Route
from dpfl_mpi.results import Result
from dpfl_mpi.transport.packing import Packing

FIVE = {"clients": 5, "rounds": 2, "budget": 4, "tau_train": 1}
SEVEN = {"clients": 7, "rounds": 2, "tau_train": 1}
METHOD = """
import numpy as np
import torch
from dpfl_mpi.methods import Method
from dpfl_mpi.methods.local import init
METHOD = Method(searches=False, topology="TOPOLOGY", every_row=EVERY)

def round(fed, state, t):
    w = fed.local_opt(state["client"]["w"], 1)
    chosen = fed.collect([sorted({(k + i) % fed.n for i in (1, 2, 3)} - {k}) for k in fed.ids])
    DO
    fed.evaluate(w)
    return {"client": {"w": w}, "shared": {"chosen": chosen}}
"""
TRAINED_ON = """received = fed.exchange(w, chosen)
    fed.local_opt(w, 1)
    w = fed.average(w, chosen, received)
    kept = [row for _, row in fed.every_row(w)]
    fed.local_opt(w, 1)
    w = torch.stack([(row + sum(kept)) / 6 for row in w]) if len(w) else w"""
TOLD = "assert fed.tell(np.array([int(k) + 3 for k in fed.ids])).tolist() == [3, 4]"
WEIGHTED = """a = np.random.default_rng(t).random((fed.n, fed.n))[fed.ids] * (np.arange(fed.n) != 2)
    w = fed.average(w, chosen, weights=a)"""
AVERAGE_A = "w = fed.average(w, chosen, a)"
LATE = {
    "exchange": f"a = fed.exchange(w, chosen); b = fed.exchange(w * 0, chosen); {AVERAGE_A}",
    "average": f"a = fed.exchange(w, chosen); v = fed.average(w * 0, chosen); {AVERAGE_A}",
    "every_row": f"a = fed.exchange(w, chosen); v = [*fed.every_row(w * 0)]; {AVERAGE_A}",
    "narrow": f"a = fed.exchange(w, chosen); fed.narrow(chosen); {AVERAGE_A}",
    "inside": "w = sum(fed.average(w, chosen) for _ in fed.every_row(w))",
}


def method_file(at, do, topology="graph", every_row=0):
    """Write a method whose rounds do this; return its path."""
    text = METHOD.replace("DO", do).replace("TOPOLOGY", topology).replace("EVERY", str(every_row))
    if topology == "server":
        text = text.replace(', "chosen": chosen', "").replace("w, chosen, weights", "w, weights")
    return text_file(at / f"{topology}{len(list(at.iterdir()))}.py", text)


def weighted(at, topology):
    more = {"budget": 4} if topology == "graph" else {}
    return SEVEN | {"method": method_file(at, WEIGHTED, topology)} | more


def test_who_was_absent_gets_the_rows_of_all(result_of, tmp_path):
    """Clients 0 to 3 and 4 to 7 take turns: each round costs the models of four."""
    turns = "\n".join(["1 1 1 1 0 0 0 0", "0 0 0 0 1 1 1 1"] * 2)
    fields = {"clients": 8, "rounds": 4, "tau_init": 1, "tau_train": 1, "method": "fedamp"}
    fields |= {"network": "phones", "available": text_file(tmp_path / "turns.txt", turns)}
    sent = result_of(fields)["traffic/bytes_sent"].sum(1)
    assert sent[1] > 0 and (sent[1:] == sent[1]).all()


def test_a_slot_is_the_place_among_those_that_arrive():
    route = Route([], np.array([3, 5, 9]), np.array([3]), np.zeros(3, int))
    assert route.slots(np.array([9, 3])).tolist() == [2, 0] and route.slots(5) == 1
    empty = Route([], route.arriving[:0], route.need, route.source[:0])
    for path, asked in ((route, [3, 4]), (route, [10]), (empty, [3])):
        missing = f"the model of client {asked[-1]} is asked for, and was not sent"
        refused(missing, path.slots, np.array(asked))


def test_averages_have_the_same_bits_on_any_ranks(tmp_path):
    trained = FIVE | {"method": method_file(tmp_path, TRAINED_ON)}
    runs = {"few": trained, "narrow": trained, "three": trained, "empty": trained | {"clients": 2}}
    runs["told"] = FIVE | {"clients": 2, "method": method_file(tmp_path, TOLD)}
    for topology in ("graph", "server"):
        runs |= dict.fromkeys((f"{topology} on 2", topology), weighted(tmp_path, topology))
    two = {name: {"ranks": 2} for name in ("few", "narrow", "graph on 2", "server on 2")}
    two["narrow"]["window_gb"] = 3.7e-5
    out = run_many(3, tmp_path, runs, **two)
    bytes_put = {name: int(Result(out[name])["traffic/bytes_rma"].sum()) for name in two}
    # a sender that two clients of a rank want is sent to it in more than one pass
    assert bytes_put["narrow"] > bytes_put["few"]
    for name, fields in runs.items():
        assert differences(run_here(tmp_path / f"{name}, alone.h5", fields), out[name]) == [], name


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_what_is_averaged_is_what_was_sent(kernels):
    lists = [[1, 2], [0], [], [0, 1, 2], [3]]
    with federation(FIVE, kernels=kernels) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        graph = CollaborationGraph.from_lists(lists)
        before, received = w.clone(), fed.exchange(w, graph)
        after = fed.local_opt(w, 1).clone()
        assert not torch.equal(before, after)
        mean = fed.average(w, graph, received)[fed.row_of]
        for k, senders in enumerate(lists):
            rows = [after[fed.row_of[k]], *(before[fed.row_of[j]] for j in senders)]
            p = torch.from_numpy(fed.p[[k, *senders]])
            expected = (torch.stack(rows).double() * p[:, None]).sum(0) / p.sum()
            np.testing.assert_array_max_ulp(mean[k].numpy(), expected.float().numpy(), 1)
            assert senders or torch.equal(mean[k], rows[0])  # nobody sends: the row is untouched
        before = w[fed.row_of].clone()
        copies = [row for _, row in fed.every_row(w)]
        fed.exchange(w.zero_(), CollaborationGraph.empty(5))
        assert torch.equal(torch.stack(copies), before)


@pytest.mark.parametrize("what", LATE)
def test_models_of_an_earlier_sending_are_refused(tmp_path, what):
    fields = FIVE | {"method": method_file(tmp_path, LATE[what])}
    sentence = "fed.exchange or fed.every_row received are used after ...; only those of the last"
    refused(f"models that {sentence}", run_here, tmp_path / "run.h5", fields)


IN_PASSES = """
import os
from dpfl_mpi.mpi import placement, window
init = window.Inbox.__init__
def noted(box, *given, **how):
    with open(f"{folder}/{{os.getpid()}}.slots", "a") as file:
        file.write(f"{{given[2]}} ")
    init(box, *given, **how)
window.Inbox.__init__, placement.MAX_ROWS_PER_PASS = noted, {most}
"""
AS_ON_A_GPU = """
import torch
zeros = torch.zeros
torch.zeros = lambda *shape, pin_memory=False, **how: zeros(*shape, **how)
from dpfl_mpi.transport.packing import Packing
init_packing, unpack = Packing.__init__, Packing.unpack
def separate(rows, *given, **how):
    init_packing(rows, *given, **how)
    rows.on_gpu, rows.outgoing = True, rows.outgoing.clone()
def unpack_all(rows, number, path, box):
    unpack(rows, number, path, box)
    assert box.staging.ctypes.data == rows.staged[number].data_ptr() != rows.outgoing.data_ptr()
    box.staging[:] = box.view[:] = float("nan")  # nothing reads the host's memory any more
Packing.__init__, Packing.unpack = separate, unpack_all
"""


@pytest.mark.parametrize(("ranks", "most", "more", "slots"), [
    (3, 2, "", ["2 2 3 "] * 3), (2, 256, AS_ON_A_GPU, ["3 3 2 ", "4 4 3 "]),
])  # fmt: skip
def test_every_row_comes_in_passes_of_one_window(ranks, most, more, slots, tmp_path):
    """Each run makes one window; with AS_ON_A_GPU rows are apart from the memory that MPI sees."""
    runs = {name: SEVEN | {"method": name} for name in ("pfedgraph", "cobo")}
    runs["mine"] = FIVE | {"method": method_file(tmp_path, TRAINED_ON)}
    before = IN_PASSES.format(folder=tmp_path, most=most) + more
    out = run_many(ranks, tmp_path, runs, before, **{key: {"exchange": "rma"} for key in runs})
    assert sorted(path.read_text() for path in tmp_path.glob("*.slots")) == slots
    for name, fields in runs.items():
        assert differences(run_here(tmp_path / "alone.h5", fields, fresh=True), out[name]) == []


def test_codecs_and_columns_as_on_a_gpu(tmp_path):
    runs = {"all": FIVE, "some": FIVE | {"send": "layers=body"}, "few": FIVE | {"codec": "int8"}}
    out = run_many(2, tmp_path, runs, IN_PASSES.format(folder=tmp_path, most=256) + AS_ON_A_GPU)
    for name, fields in runs.items():
        assert differences(run_here(tmp_path / "alone.h5", fields, fresh=True), out[name]) == []


def test_rows_of_a_gpu_pass_through_page_locked_memory(monkeypatch):
    """By a CPU's tensors: MPI is given the same host memory each time, for any number of rows."""
    asked, zeros, rng = [], torch.zeros, np.random.default_rng(0)
    noted = lambda *shape, pin_memory: asked.append(pin_memory) or zeros(*shape)  # noqa: E731
    monkeypatch.setattr(torch, "zeros", noted)
    ensemble = SimpleNamespace(device=torch.device("cuda"), size=16, width=16)
    ensemble.zeros = lambda k: zeros(k, 16)
    of = lambda k: SimpleNamespace(count=1, placement=SimpleNamespace(ids=np.arange(k)))  # noqa: E731
    packing, without_clients = (Packing(ensemble, of(k), None) for k in (3, 0))
    assert asked == [True, True] and packing.on_gpu
    ensemble.device = torch.device("cpu")
    nothing = Route([], np.arange(0), np.zeros(1, int), np.arange(0))
    without_clients.unpack(0, nothing, SimpleNamespace(view=np.zeros((0, 16), np.float32)))
    assert without_clients.landed.shape == (0, 16)
    memory = packing.staged[0].data_ptr()
    for count in (2, 0, 8):
        packing.outgoing[:] = sent = torch.from_numpy(rng.random((3, 16), np.float32))
        packing.pack(0)
        assert torch.equal(packing.staged[0], sent)
        inbox = SimpleNamespace(view=rng.random((8, 16), np.float32))
        path = Route([], np.arange(count), np.array([count]), np.zeros(count, int))
        packing.unpack(0, path, inbox)
        assert np.array_equal(packing.landed.numpy(), inbox.view[:count])
        assert not np.shares_memory(packing.landed.numpy(), inbox.view)
        assert [rows.data_ptr() for rows in packing.staged] == [memory]
        assert torch.equal(packing.outgoing, sent)


@pytest.mark.parametrize("topology", ["graph", "server"])
def test_a_matrix_times_the_rows(topology, result_of, tmp_path):
    fields, along = weighted(tmp_path, topology), topology == "graph"
    received = result_of(fields)["traffic/models_received"][1:]
    assert received.tolist() == [[3 if along else 2] * 7] * 2
    with federation(fields) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        weights = np.random.default_rng(1).random((7, 7)) * (np.arange(7) != 2)
        weights[5] = 0
        chosen = fed.collect([[(k + i) % 7 for i in (1, 2, 3)] for k in fed.ids])
        mean = fed.average(w, *[chosen] * along, weights=weights[fed.ids])
        rows = w[fed.row_of].double().numpy()
        weights *= (chosen.matrix() | np.eye(7, dtype=bool)) if along else 1
        expected = weights @ rows / np.where(weights.sum(1), weights.sum(1), 1)[:, None]
        expected[5] = rows[5]
        np.testing.assert_allclose(mean[fed.row_of].numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_models_that_came_by_every_row_are_not_counted_again(when, result_of, tmp_path):
    note = "fed.note_received(4); "
    do = f"""any(0 for _ in fed.every_row(w))
    {note * (when == "before")}w = fed.average(w, chosen)
    {note * (when == "after")}w = fed.average(fed.local_opt(w, 1), chosen)"""
    fields = FIVE | {"method": method_file(tmp_path, do, every_row=1)}
    counted = result_of(fields)["traffic/models_received"][1]
    assert counted.tolist() == [(0 if when == "never" else 1) + 3 + 3] * 5
