"""What a method of one's own receives is what was sent, on whichever ranks the clients are; or one sentence says that it is gone."""

import numpy as np
import pytest
import torch
from launch import differences, federation, mpirun, run_here, run_many

from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.results import Result

FIELDS = {"clients": 5, "rounds": 2, "budget": 4, "tau_train": 1}
METHOD = """
import torch
from dpfl_mpi.methods import Method
METHOD = Method(searches=False)

def init(fed):
    w = fed.common_row()
    fed.evaluate(w)
    return {"client": {"w": w}, "shared": {}}

def round(fed, state, t):
    w = fed.local_opt(state["client"]["w"], 1)
    chosen = fed.collect([[(k + i) % fed.n for i in (1, 2, 3)] for k in fed.ids])
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
GONE = {
    "exchange": "a = fed.exchange(w, chosen); b = fed.exchange(w * 0, chosen); w = fed.average(w, chosen, a)",
    "average": "a = fed.exchange(w, chosen); v = fed.average(w * 0, chosen); w = fed.average(w, chosen, a)",
    "every_row": "a = fed.exchange(w, chosen); v = [row for _, row in fed.every_row(w * 0)]; w = fed.average(w, chosen, a)",
    "narrow": "a = fed.exchange(w, chosen); fed.narrow(chosen); w = fed.average(w, chosen, a)",
    "inside": "w = sum(fed.average(w, chosen) for _ in fed.every_row(w))",
}


@pytest.fixture
def method(tmp_path):
    def write(do):
        (tmp_path / "mine.py").write_text(METHOD.replace("DO", do))
        return str(tmp_path / "mine.py")

    return write


def test_rows_may_be_trained_on_before_they_are_averaged(method, tmp_path):
    fields = FIELDS | {"method": method(TRAINED_ON)}
    few, narrow = {"ranks": 2}, {"ranks": 2, "window_gb": 3.7e-5}
    out = run_many(6, tmp_path, dict.fromkeys(["few", "narrow", "six"], fields), few=few, narrow=narrow)
    alone = run_here(tmp_path / "alone.h5", fields)
    assert [differences(alone, path) for path in out.values()] == [[], [], []]
    bytes_put = {name: int(Result(path)["traffic/bytes_rma"].sum()) for name, path in out.items()}
    # a sender that two clients of a rank want is sent to it in more than one pass
    assert bytes_put["narrow"] > bytes_put["few"]


@pytest.mark.parametrize("block", [1, 3])
def test_what_is_averaged_is_what_was_sent(block):
    """The sum of equation 4 written out: the senders as they were at the exchange, oneself as now."""
    with federation(FIELDS, block=block) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        graph = CollaborationGraph.from_lists([[1, 2], [0], [], [0, 1, 2], [3]])
        before, received = w.clone(), fed.exchange(w, graph)
        after = fed.local_opt(w, 1).clone()
        assert not torch.equal(before, after)
        mean = fed.average(w, graph, received)
        for k, senders in enumerate(([1, 2], [0], [], [0, 1, 2], [3])):
            rows = [after[fed.row_of[k]], *(before[fed.row_of[j]] for j in senders)]
            p = torch.from_numpy(fed.p[[k, *senders]])
            expected = (torch.stack(rows).double() * p[:, None]).sum(0) / p.sum()
            np.testing.assert_array_max_ulp(mean[fed.row_of[k]].numpy(), expected.float().numpy(), 1)
            assert senders or torch.equal(mean[fed.row_of[k]], rows[0])  # nobody sends: the row is untouched


@pytest.mark.parametrize("what", GONE)
def test_what_is_no_longer_here_is_refused(method, tmp_path, what):
    fields = FIELDS | {"method": method(GONE[what])}
    with pytest.raises(UserError, match=r"^the models that a fed.exchange or fed.every_row received are used after"):
        run_here(tmp_path / "run.h5", fields)


def test_all_ranks_end_where_it_is_no_longer_here(method, tmp_path):
    flags = [f"--{name}={value}" for name, value in (FIELDS | {"method": method(GONE["every_row"])}).items()]
    done = mpirun(6, "-m", "dpfl_mpi", "--quiet", f"--out={tmp_path / 'run.h5'}", *flags)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "only those of the last sending are here" in lines[0]


IN_PASSES = """
import os
from dpfl_mpi.mpi import placement, window
init = window.Inbox.__init__
def noted(box, *given, **how):
    with open(f"{folder}/{{os.getpid()}}.slots", "a") as file:
        file.write(f"{{given[2]}} ")
    init(box, *given, **how)
window.Inbox.__init__, placement.MOST_ROWS = noted, {most}
"""
AS_ON_A_GPU = """
from dpfl_mpi.federation import mail
whole = mail.MailRoom.__init__
def separate(room, *given):
    whole(room, *given)
    room.sent = room.staging.clone()
mail.MailRoom.__init__ = separate
"""


@pytest.mark.parametrize(
    ("ranks", "most", "more", "slots"), [(3, 2, "", ["2 2 3 "] * 3), (2, 256, AS_ON_A_GPU, ["3 3 2 ", "4 4 3 "])]
)
def test_every_row_comes_in_passes_of_one_window(method, ranks, most, more, slots, tmp_path):
    """At most MOST_ROWS rows at a time, through a window that each run makes once, also where what is sent is a tensor of its own."""
    runs = {name: {"clients": 7, "rounds": 2, "tau_train": 1, "method": name} for name in ("pfedgraph", "cobo")}
    runs["mine"] = FIELDS | {"method": method(TRAINED_ON)}
    out = run_many(ranks, tmp_path, runs, IN_PASSES.format(folder=tmp_path, most=most) + more)
    assert sorted(path.read_text() for path in tmp_path.glob("*.slots")) == slots
    for name, fields in runs.items():
        assert differences(run_here(tmp_path / "alone.h5", fields, fresh=True), out[name]) == []


def test_kept_rows_are_copies():
    with federation(FIELDS) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        before = w[fed.row_of].clone()
        kept = [row for _, row in fed.every_row(w)]
        fed.exchange(w.zero_(), CollaborationGraph.empty(5))
        assert torch.equal(torch.stack(kept), before)
