"""`describe`: the partition and the plan it prints, what it saves, and what it refuses."""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from launch import ended, federation, refused, run_here, run_many

from dpfl_mpi import prepare
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import open_source
from dpfl_mpi.describe import main
from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi import placement
from dpfl_mpi.mpi.placement import place
from dpfl_mpi.numerics import native
from dpfl_mpi.plan import needs
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Job, Run

FEW = {"rounds": 2, "clients": 8, "budget": 3, "tau_init": 1, "tau_train": 1}


def shown(capsys, *flags, code=0):
    assert main([*flags, "--no-measure"]) == code
    out, err = capsys.readouterr()
    assert (err == "") == (code == 0)
    return err if code else out


def planned(fields, ranks=1, nodes=1, **job):
    run = Run(**fields).resolve()
    source = open_source(run)
    return needs.needs_of(run, Job(**job), source, deal(run, source), needs.ensemble_of(run, source), ranks, nodes)


def test_partition_and_plan(said):
    text = said(main, "--ranks", 3, "--rows", 32, "--wide")
    run = Run().resolve()
    dealt = deal(run, open_source(run))
    assert f"sha256 {dealt.sha256()[:12]}" in text and "32 clients, seed 42" in text
    for part in ("train", "val", "test"):
        assert f"{part:<10} {dealt.sizes(part).sum()} samples" in text
    owner = place(dealt.sizes("train"), 3)
    for k, line in enumerate(re.findall(r"^ +\d+ +\d .*$", text, re.M)):
        fields = line.split()
        assert [int(f) for f in fields[:5]] == [k, owner[k], *(dealt.sizes(p)[k] for p in ("train", "val", "test"))]
        assert [0 if c == "." else int(c) for c in fields[6:]] == dealt.class_counts[k].tolist()
    for rank in range(3):
        ids = np.flatnonzero(owner == rank)[:12]
        assert re.search(rf"rank {rank} .*: {' '.join(map(str, ids))}", text)
    assert "at most 2208 received in preprocessing and 224 per round" in text
    assert re.search(r"time +under a second", text) and "ms per step" in text and "anew" not in text


def test_a_terminal_of_80_columns_shows_the_same_words(capsys):
    narrow, wide = (re.sub(r"\([\d.]+ s\)", "", shown(capsys, "--ranks", "3", *more)) for more in ([], ["--wide"]))
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    memory = re.compile(r"[\d.]+\s+GiB")  # of this machine, now
    assert memory.sub("", narrow).split() == memory.sub("", wide).split()


def test_a_plan_counts_the_rounds_that_search_anew(capsys):
    """PENS scores models to choose, but not by the greedy search: "at most 0 evaluations" would be wrong."""
    flags = ["--clients", "8", "--budget", "3", "--rounds", "7"]
    text = shown(capsys, *flags, "--method", "pens", "--wide")
    assert "models that pens scores by itself to choose are not counted" in text and "evaluations in" not in text
    assert "3 rounds search Omega anew" in shown(capsys, *flags, "--omega_period", "2")
    fields = {"clients": 8, "budget": 3, "rounds": 7}
    once, often = (planned(fields | {"omega_period": period}, 2) for period in ("inf", 2))
    run = Run(**fields).resolve()
    val = deal(run, open_source(run)).sizes("val")
    searches = 3 * (2 * 7 + 2)  # R of two models per candidate, and of the two at the start
    assert (often.judged - once.judged).tolist() == [searches * val[once.owner == rank].sum() for rank in (0, 1)]


PLANS = {
    "dpfl": {},
    "inf": {"budget": "inf", "ggc_repeats": 2},
    "pairwise": {"method": "pairwise"},
    **{f"near {m}": {"method": m, "candidates": 4, "budget": "inf"} for m in ("dpfl", "pairwise")},
    "uniform": {"budget": "uniform:2:3"},
    "ditto": {"method": "ditto", "finetune_epochs": 1},
    **{name: {"method": name} for name in ("local", "random_graph", "dfedpgp", "fedavg", "scaffold", "cobo")},
}
EACH = {"local": 0, "random_graph": 2, "dfedpgp": 2, "fedavg": 2, "scaffold": 4, "cobo": 22}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_bounds_what_the_run_does(name, tmp_path):
    """Steps exactly, models and evaluations never more; without a search models exactly. CoBo plans ten partners, two models each."""
    fields = FEW | PLANS[name]
    plan = planned(fields)
    with Result(run_here(tmp_path / "r.h5", fields)) as result:
        steps = "finetune/gradient_steps" if "finetune_epochs" in fields else "round/gradient_steps"
        assert result[steps][-1] == plan.steps.sum()
        received, evaluated = result["traffic/models_received"].sum(1), result["graph/evaluations"].sum(1)
    assert received[0] <= plan.received[0] and (received[1:] <= plan.received[1]).all()
    assert evaluated[0] <= plan.evaluations[0] and (evaluated[1:] <= plan.evaluations[1]).all()
    assert evaluated[0] >= 0.2 * plan.evaluations[0]
    if name == "dpfl":
        assert 2 * plan.candidates.sum() == plan.evaluations[0] + FEW["rounds"] * plan.evaluations[1]  # two models each
    if name in EACH:
        assert received[0] == plan.received[0] and plan.received[1] == 8 * EACH[name]
        assert name == "cobo" or (received[1:] == plan.received[1]).all()
        assert evaluated.sum() == sum(plan.evaluations) == 0


def test_seconds_by_hand():
    """Of the rank that chooses longest: 100 images of 0.01 s and 2 candidates of 3 s, or 300 and 1."""
    plan = dataclasses.replace(planned(FEW), judged=np.array([100, 300]), candidates=np.array([2, 1]))
    cost = needs.Cost(step=0.5, image=0.01, candidate=3.0, byte=0.0)
    took = needs.seconds_of(Run(**FEW).resolve(), plan, cost)
    assert took["choose"] == pytest.approx(7.0) and took["train"] == pytest.approx(0.5 * plan.steps.max())
    # 1000 bytes before round 1, which the search asks for, and 10 a round, each copied twice, a microsecond a byte
    plan, cost = dataclasses.replace(plan, wire=(1000, 10), anew=1), dataclasses.replace(cost, byte=1e-6)
    run, crowd = Run(**FEW).resolve(), needs.crowding(plan)
    took = needs.seconds_of(run, plan, cost)
    assert took["choose"] == pytest.approx(crowd * (7.0 + 4000e-6))
    assert took["exchange"] == pytest.approx(crowd * 20e-6 * run.rounds)
    # of 7 or 39 candidates, two averages each and two at first, five for either slot are usual; then six in each of two rounds
    assert planned(FEW).usual == pytest.approx((10 + 12) / (16 + 12))
    assert planned(FEW | {"clients": 40}).usual == pytest.approx((10 + 12) / (80 + 12))
    only = dataclasses.replace(plan, usual=0.5, wire=(0, 0), steps=np.zeros(2), scored=np.zeros(2))
    assert needs.length_of(run, only, cost) == "about 3.5 s, at most 7.0 s if every candidate is scored"
    took = needs.seconds_of(run, dataclasses.replace(plan, judged=np.zeros(2), candidates=np.zeros(2)), cost)
    assert took["choose"] == 0 and took["exchange"] == pytest.approx(crowd * (4000e-6 + 20e-6 * run.rounds))


def test_window_of_a_rank():
    fields = {"clients": 30, "budget": 5, "min_per_class": 1}
    plan = planned(fields, 4, 2)
    assert np.array_equal(plan.window, np.minimum(plan.clients * 4, 30 - plan.clients) * plan.row)
    assert plan.node.tolist() == [0, 0, 1, 1] and plan.row % 64 == 0 and plan.passes == 1
    narrow = planned(fields, 4, 2, window_gb=plan.clients.max() * plan.row * 2.01 / 2**30)
    assert narrow.passes == 2 and (narrow.window < plan.window).all()  # four clients a time of 4 models each, of 8
    assert not narrow.rows["passes"].any()
    columns = planned(fields | {"budget": 20}, 4, 2, window_gb=plan.clients.max() * plan.row * 2.01 / 2**30)
    assert columns.passes == 10 and columns.rows["passes"].tolist() == (8 * columns.clients).tolist()
    more = planned(fields, 40, 2)
    assert (more.clients == 0).sum() == 10 and more.window[more.clients == 0].sum() == 0
    everywhere = dataclasses.replace(find("method", "random_graph"), every_row=2)
    run = Run(method="random_graph", **fields).resolve()
    received, _ = needs.traffic(run, everywhere, plan.clients, plan.clients * 4, plan.row, plan.row)
    assert received[1] == 30 * 4 + 2 * 30 * 29
    alone = planned({"method": "local", "clients": 30, "min_per_class": 1}, 4)
    assert alone.received == (0, 0) and alone.wire == (0, 0) and alone.evaluations == (0, 0)


def test_all_rows_to_all_ranks_are_planned(tmp_path, monkeypatch):
    """The window and the bytes of methods whose server compares all models: as a run has them, exactly for pfedgraph."""
    runs = {name: {"rounds": 2, "clients": 7, "tau_train": 1, "method": name} for name in ("pfedgraph", "cobo")}
    for name, path in run_many(3, tmp_path, runs).items():
        plan, put = planned(runs[name], 3), Result(path)["traffic/bytes_rma"]
        assert np.array_equal(plan.window, (7 - plan.clients) * plan.row)
        once = (3 * 7 - 7) * plan.row  # every row to the two other ranks
        assert put[0] == 0 and (put[1:] <= plan.wire[1]).all()
        assert name == "cobo" or put[1:].tolist() == [2 * once] * 2
        sums = 2 * 3 * 2 * plan.row  # of a mean, which other server methods ask for
        assert plan.wire == (0, find("method", name).every_row * once + sums)
        more = planned(runs[name], 9)
        assert more.window[more.clients == 0].tolist() == [0, 0] and more.window[more.clients > 0].all()
        narrow = planned(runs[name], 3, window_gb=3.01 * plan.row / 2**30)
        assert narrow.window.tolist() == [3 * plan.row] * 3 and narrow.wire == plan.wire and narrow.passes == 1
        with monkeypatch.context() as patch:
            patch.setattr(needs, "MOST_ROWS", 2)
            assert planned(runs[name], 3).window.tolist() == [2 * plan.row] * 3


def test_a_plan_counts_confusion_matrices():
    """Of 9 clients on 3 ranks: 3 each, 8 bytes per pair of classes and 4 to send; rank 0 writes all nine, at 12 bytes."""
    plan = planned(FEW | {"clients": 9}, 3)
    assert plan.confusion.tolist() == (plan.clients * 1200 + [9 * 100 * 12, 0, 0]).tolist()
    without = needs.PYTHON + plan.data + plan.models + plan.scratch + plan.window
    assert (plan.memory - without).tolist() == plan.confusion.tolist()


def test_a_plan_has_slots_of_an_encoded_row():
    """On two ranks of three clients, two others each: three slots a rank; what is decoded lies beside the window."""
    six = FEW | {"rounds": 3, "clients": 6}
    tried = {"none": {}, "int8": {"codec": "int8"}, "body": {"send": "layers=body"}}
    plans = {name: planned(six | fields, 2) for name, fields in tried.items()}
    with federation(six | {"codec": "int8"}) as fed:
        size, encoded = fed.ensemble.size, -(-fed.mail.wire.encoder.bytes // 4) * 4
        body = size - int(fed.columns("head").sum())
    assert plans["none"].window.tolist() == [3 * plans["none"].row] * 2
    assert plans["int8"].window.tolist() == [3 * encoded] * 2
    assert plans["body"].window.tolist() == [3 * 4 * body] * 2
    assert (plans["int8"].models - plans["none"].models).tolist() == [(2 * 3 + 3) * plans["none"].row] * 2
    assert plans["int8"].message == encoded
    # of three versions six slots a rank, for three clients one after the other, two whole rows each of three that fit, or all at once, encoded
    narrow, late = 3.01 * plans["none"].row / 2**30, six | {"network": "phones", "staleness": 2}
    whole, coded = (planned(late | {"codec": codec}, 2, window_gb=narrow) for codec in ("none", "int8"))
    assert (whole.passes, coded.passes) == (3, 1)
    assert coded.window.tolist() == [6 * encoded] * 2
    assert planned(late | {"codec": "int8"}, 2, window_gb=narrow / 1.1).passes == 0  # a row may have to come whole


@pytest.mark.parametrize("form", native.forms() if native.LIBRARY.exists() else ())
def test_a_plan_counts_the_kernels_work_space(form):
    """Of an mlp 64 - 64 - 10 on 8x8 images, in vectors: a sample, what the layers give and its gradient, the inputs of one turned. One gradient of a row."""
    plan = planned(FEW | {"clients": 2, "model": "mlp"}, 3, kernels=form)
    work = (64 + 2 * 64 + 2 * 10 + 65) * native.FORMS[form] // 8 + 4 * 4816 + 64
    assert plan.scratch.tolist() == [work, work, 0]
    assert planned(FEW | {"clients": 2, "model": "mlp"}, 3, kernels="torch").scratch[0] != work


def test_where_no_kernels_were_built_pytorch_is_planned_and_measured(said, monkeypatch):
    def load(path=None):
        raise UserError("the CPU kernels were not built")

    monkeypatch.setattr(native, "load", load)
    assert "ms per step" in said(main, "--clients", 3, "--rounds", 1)


def test_saves_what_a_run_reads(tmp_path, capsys):
    path = tmp_path / "p.json"
    text = shown(capsys, "--clients", "6", "--save", str(path))
    sha = re.search(r"seed 42, sha256 (\w+)", text).group(1)
    assert f"--partition file:{path}" in text
    assert f"sha256 {sha}" in shown(capsys, "--partition", f"file:{path}")
    slugs = {Run(partition=f"file:{path}", partition_seed=seed).slug() for seed in (None, 1)}
    assert len(slugs) == 1  # it draws nothing
    stored = json.loads(path.read_text())
    assert len(stored["clients"]) == 6 and stored["partition_sha256"].startswith(sha)
    assert "holds 6 clients; --clients is 7" in shown(capsys, "--partition", f"file:{path}", "--clients", "7", code=2)


@pytest.mark.parametrize(("flags", "text"), [
    (["--window_gb", "0.00001", "--ranks", "2"], "--window_gb is 1e-05; a pass needs one row"),
    (["--ranks", "0"], "--ranks is 0; allowed is a whole number of at least 1"),
    (["--ranks", "x"], "--ranks"),
    (["--rows", "-1"], "--rows is -1; allowed is a whole number of at least 0"),
    (["--dataset", "cinic10", "--data", "nowhere.h5"], "make it with `python -m dpfl_mpi.prepare cinic10"),
])  # fmt: skip
def test_refuses_what_cannot_run(capsys, flags, text):
    error = shown(capsys, *flags, code=2)
    assert text in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("clients", range(8, 40, 3))
def test_the_window_that_a_refusal_names_is_enough(capsys, clients):
    flags = ["--ranks=2", f"--clients={clients}", "--min_per_class=2"]
    text = shown(capsys, *flags, "--window_gb=1e-5", code=2)
    shown(capsys, *flags, f"--window_gb={re.search(r'client, (.*) GiB per rank', text)[1]}")


def test_refuses_more_memory_than_a_node_has(capsys, monkeypatch):
    small_shm = {True: (2**20, "/dev/shm"), False: (2**40, "available memory")}
    monkeypatch.setattr(needs, "node_memory", lambda shared=True: small_shm[shared])
    assert "the RMA windows need" in shown(capsys, "--budget", "inf", "--ranks", "64", code=2)
    monkeypatch.setattr(needs, "node_memory", lambda shared=True: (2**30, "available memory"))
    assert "use more --nodes" in shown(capsys, "--ranks", "64", code=2)
    shown(capsys, "--ranks", "64", "--nodes", "32")


def test_many_classes_and_many_clients(tmp_path, capsys):
    path, y = tmp_path / "many.h5", np.arange(3000) % 15
    prepare.write(arrays_of(np.zeros((3000, 2)), y), "arrays", path)
    flags = ["--dataset", "arrays", "--data", str(path), "--clients", "20", "--classes_per_client", "15"]
    flags += ["--dirichlet_alpha", "5", "--min_per_class", "0", "--ranks", "20", "--rows", "3"]
    text = shown(capsys, *flags)
    assert "largest classes" in text and "... and 17 more (--rows 20)" in text and "and 8 more ranks" in text


def test_too_many_classes_are_refused_before_the_first_round(monkeypatch):
    """Rank 0 holds 12 bytes per client and pair of classes at the end: of 9 clients and 10 classes 10,800."""
    monkeypatch.setattr(needs, "node_memory", lambda shared: (10_800, "a test"))
    federation({"clients": 9}).close()
    monkeypatch.setattr(needs, "node_memory", lambda shared: (10_799, "a test"))
    refused("of 9 clients and 10 classes need 0.00 GiB on rank 0, ... fewer classes", federation, {"clients": 9})


WATCHED = """
import re, sys, threading
from pathlib import Path
from launch import run_here
from dpfl_mpi.mpi import placement
placement.WAVE = {wave}
def held():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024
def watch():
    while not end.wait(0.002):
        most.append(held())
most, end = [], threading.Event()
(watcher := threading.Thread(target=watch)).start()
run_here(Path("run.h5"), {fields}, fresh=True, save_models=False)
end.set()
watcher.join()
print(max(*most, held()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_client_holds_as_many_models_as_planned(tmp_path, monkeypatch):
    """As the kernel counts it, of which only what more clients add is compared."""
    monkeypatch.setattr(placement, "WAVE", wave := 8)
    few, many, each, rng = 150, 400, 8, np.random.default_rng(0)
    count = many * each
    whose = {"client": np.repeat(np.arange(many), each), "test": np.tile(np.arange(each) >= 6, many)}
    x, y = rng.integers(0, 256, (count, 28, 28, 1), dtype=np.uint8), rng.integers(0, 10, count)
    prepare.write(arrays_of(x, y, **whose), "arrays", tmp_path / "data.h5")
    natural = {"dataset": "arrays", "data": str(tmp_path / "data.h5"), "partition": "natural", "min_samples": 3}
    natural |= {"model": "mlp", "budget": 10, "rounds": 1, "tau_init": 1, "tau_train": 1}
    held, plans = [], []
    for clients in (few, many):  # a process each: what one frees the next would get in pieces
        fields = natural | {"clients": clients}
        plans.append(planned(fields))
        code = WATCHED.format(wave=wave, fields=fields)
        held.append(int(ended(sys.executable, "-c", code, cwd=tmp_path).stdout))
    expected = [plan.memory[0] for plan in plans]
    models, expected = ((more - less) / (many - few) / plans[0].row for less, more in (held, expected))
    assert models < 8
    assert models == pytest.approx(expected, abs=1.1)
