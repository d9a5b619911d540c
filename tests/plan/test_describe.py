"""`describe`: the partition and the plan it prints, what it saves, and what it refuses."""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from launch import ended, federation, refused

from dpfl_mpi import prepare
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.data.partition import PARTS
from dpfl_mpi.data.recipes import deal
from dpfl_mpi.data.source import open_source
from dpfl_mpi.describe import main, time_text
from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi import placement
from dpfl_mpi.mpi.placement import place
from dpfl_mpi.numerics import cpu, native_backend
from dpfl_mpi.numerics.kernels import Kernels
from dpfl_mpi.plan import needs
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
    dealt, ensemble = deal(run, source), needs.ensemble_of(run, source)
    return needs.needs_of(run, Job(**job), source, dealt, ensemble, ranks, nodes)


def test_partition_and_plan(said):
    text = said(main, "--ranks", 3, "--rows", 32)
    run = Run().resolve()
    dealt = deal(run, open_source(run))
    assert f"sha256 {dealt.sha256()[:12]}" in text and "32 clients, seed 42" in text
    for part in PARTS:
        assert f"{part:<10} {dealt.sizes(part).sum()} samples" in text
    owner, sizes = place(dealt.sizes("train"), 3), [dealt.sizes(part) for part in PARTS]
    for k, line in enumerate(re.findall(r"^ +\d+ +\d .*$", text, re.M)):
        fields = line.split()
        assert [int(f) for f in fields[:5]] == [k, owner[k], *(size[k] for size in sizes)]
        assert [0 if c == "." else int(c) for c in fields[6:]] == dealt.class_counts[k].tolist()
    counts = np.bincount(owner)
    assert f"clients    {counts.min()} to {counts.max()} per rank; at most 1.0" in text
    words = " ".join(text.split())
    assert re.search(r"time training takes at least \d+\.\d s .*: 3300 steps of \S+ ms", words)
    assert max(map(len, text.splitlines())) <= 80


TRAINED = {
    "dpfl": {},
    "ditto": {"method": "ditto", "finetune_epochs": 1},
    **{name: {"method": name} for name in ("local", "fedavg", "scaffold", "cobo")},
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_plan_has_the_steps_of_the_run(name, result_of):
    result, plan = result_of(FEW | TRAINED[name]), planned(FEW | TRAINED[name])
    group = "finetune" if "finetune/gradient_steps" in result.arrays() else "round"
    assert result[f"{group}/gradient_steps"][-1] == plan.steps.sum()


def test_time_by_hand(monkeypatch):
    """The slowest rank: 300 steps of half a second; twice as long where ranks share a core."""
    plan = dataclasses.replace(planned(FEW, 2), steps=np.array([100, 300]))
    for cores, took, crowded in (({0, 1}, "2 min", ""), ({0}, "5 min", ", 2.0 ranks per core")):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
        text = f"takes at least {took} on the slowest rank: 300 steps of 5e+02 ms{crowded}\n"
        assert text in time_text(plan, 0.5)


def test_window_of_a_rank(monkeypatch):
    fields = {"clients": 30, "budget": 5, "min_per_class": 1}
    plan = planned(fields, 4, 2)
    assert np.array_equal(plan.window, np.minimum(plan.clients * 4, 30 - plan.clients) * plan.row)
    assert plan.node.tolist() == [0, 0, 1, 1] and plan.row % 64 == 0 and plan.passes == 1
    two_rows = plan.clients.max() * plan.row * 2.01 / 2**30  # per client
    narrow = planned(fields, 4, 2, window_gb=two_rows)  # two models at a time, of 4 and of 19
    assert narrow.passes == 2 and (narrow.window < plan.window).all()
    assert narrow.rows["passes"].tolist() == (8 * narrow.clients).tolist()
    assert planned(fields | {"budget": 20}, 4, 2, window_gb=two_rows).passes == 10
    head = planned(fields | {"send": "layers=head"}, 4, 2, window_gb=two_rows / 4)
    assert head.passes > 0 and head.window.max() < plan.window.max() / 4  # no model comes whole
    more = planned(fields, 40, 2)
    assert (more.clients == 0).sum() == 10 and more.window[more.clients == 0].sum() == 0
    fields = {"clients": 7, "method": "pfedgraph"}
    plan = planned(fields, 3)
    assert np.array_equal(plan.window, (7 - plan.clients) * plan.row)
    more = planned(fields, 9)
    assert more.window[more.clients == 0].tolist() == [0, 0] and more.window[more.clients > 0].all()
    narrow = planned(fields, 3, window_gb=3.01 * plan.row / 2**30)
    assert narrow.window.tolist() == [3 * plan.row] * 3 and narrow.passes == 1
    monkeypatch.setattr(needs, "MAX_ROWS_PER_PASS", 2)
    assert planned(fields, 3).window.tolist() == [2 * plan.row] * 3


def test_a_plan_counts_what_root_writes_and_slots_of_encoded_rows():
    """Nine clients on 3 ranks: 3 each, of 12 bytes per pair of classes.

    Root writes 9 matrices of 400 bytes and 9 models of 4 D bytes, and holds twice what it receives
    at a time: the models, or 2 ** 26 bytes.
    """
    plans = {save: planned(FEW | {"clients": 9}, 3, save_models=save) for save in (False, True)}
    of_rank, models = plans[True].clients * 1200, 9 * 4 * plans[True].parameters
    for save, root in ((False, 3 * 9 * 400), (True, 9 * 400 + 3 * models)):
        plan = plans[save]
        assert (plan.results - of_rank).tolist() == [root, 0, 0]
        rest = needs.PYTHON + plan.data + plan.models + plan.window
        assert (plan.memory - rest).tolist() == plan.results.tolist()
    assert needs.results_bytes(10**6, 10, 10**5) == 10**6 * (400 + 10**5) + 2 * 2**26
    # Two ranks of three clients with two others each: three slots a rank.
    six = FEW | {"rounds": 3, "clients": 6}
    tried = {"none": {}, "int8": {"codec": "int8"}, "body": {"send": "layers=body"}}
    plans = {name: planned(six | fields, 2) for name, fields in tried.items()}
    with federation(six | {"codec": "int8"}) as fed:
        size, encoded = fed.ensemble.size, -(-fed.mail.packing.codec.bytes // 4) * 4
        body = size - int(fed.columns("head").sum())
    row = plans["none"].row
    assert plans["none"].window.tolist() == [3 * row] * 2
    assert plans["int8"].window.tolist() == [3 * encoded] * 2
    assert plans["body"].window.tolist() == [3 * 4 * body] * 2
    assert (plans["int8"].models - plans["none"].models).tolist() == [(2 * 3 + 3) * row] * 2
    # of three versions six slots a rank. Three rows that fit serve each client with one at a time;
    # encoded, all fit at once
    window_gb, late = 3.01 * row / 2**30, six | {"network": "phones", "staleness": 2}
    whole, coded = (planned(late | {"codec": c}, 2, window_gb=window_gb) for c in ("none", "int8"))
    assert (whole.passes, coded.passes) == (2, 1)
    assert coded.window.tolist() == [6 * encoded] * 2
    # a row may have to come whole
    assert planned(late | {"codec": "int8"}, 2, window_gb=window_gb / 1.1).passes == 0


def test_where_no_kernels_were_built_pytorch_is_planned_and_measured(said, monkeypatch):
    def load(path=None):
        raise UserError("the kernels were not built")

    for module in (native_backend, cpu):
        monkeypatch.setattr(module, "load", load)
    shown = " ".join(said(main, "--clients", 3, "--rounds", 1).split())
    slower = "the kernels were not built: PyTorch computes, usually 2 to 8 times slower"
    assert f"warning {slower} time" in shown and "steps of" in shown
    flags = "--clients", 3, "--kernels", "native", "--no-measure"
    assert said(main, *flags, code=2).endswith("error: the kernels were not built\n")


@pytest.mark.skipif(not cpu.LIBRARY.exists(), reason="the kernels were not built")
def test_what_the_kernels_work_in_is_planned(said, monkeypatch):
    run = Run(model="resnet").resolve()
    source = open_source(run)
    kernels = Kernels(needs.ensemble_of(run, source), source.shape, cpu.Cpu)
    size = kernels.machine.memory.nbytes
    assert size > 2**20
    words = " ".join(said(main, "--model=resnet", "--no-measure").split())
    assert f", kernels {needs.megabytes(size)})" in words
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # four clients at a time, or two
    for flags, at_once in (([], 4), (["--threads_per_client=2"], 2)):
        words = " ".join(said(main, "--model=resnet", "--no-measure", *flags).split())
        planned_mib = float(re.search(r", kernels ([\d.]+) MiB", words)[1])
        assert planned_mib == pytest.approx(at_once * size / 2**20, rel=0.02)


def test_bfloat16_is_measured_by_what_computes_it():
    run = Run(precision="bf16").resolve()
    source = open_source(run)
    backend, _ = needs.one_client(run, Job(), source, needs.ensemble_of(run, source), 1)
    assert backend.name == "torch" and backend.ensemble.bfloat16_products


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
    flags = ["--partition", f"file:{path}", "--clients", "7"]
    assert "holds 6 clients; --clients is 7" in shown(capsys, *flags, code=2)


@pytest.mark.parametrize(("flags", "text"), [
    (["--window_gb", "0.00001", "--ranks", "2"], "--window_gb is 1e-05; a pass needs one row"),
    (["--ranks", "0"], "--ranks is 0; allowed is a whole number of at least 1"),
    (["--ranks", "x"], "--ranks"),
    (["--rows", "-1"], "--rows is -1; allowed is a whole number of at least 0"),
    (["--dataset", "cinic10", "--data", "nowhere.h5"], "`python -m dpfl_mpi.prepare cinic10"),
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
    for save, need in ((False, 10_800), (True, 3600 + 3 * 9 * 4 * planned(FEW).parameters)):
        monkeypatch.setattr(needs, "node_memory", lambda shared, need=need: (need, "a test"))
        federation({"clients": 9}, save_models=save).close()
        monkeypatch.setattr(needs, "node_memory", lambda shared, need=need: (need - 1, "a test"))
        words = "of 9 clients and 10 classes... need 0.00 GiB on rank 0, ... fewer classes"
        error = refused(words, federation, {"clients": 9}, save_models=save)
        assert ("--no-save_models" in error) == save


def test_many_classes_and_many_clients(tmp_path, capsys):
    path, y = tmp_path / "many.h5", np.arange(3000) % 15
    prepare.write(arrays_of(np.zeros((3000, 2)), y), "arrays", path)
    flags = f"--dataset arrays --data {path} --clients 20 --classes_per_client 15 --rows 3"
    flags += " --dirichlet_alpha 5 --min_per_class 0 --ranks 20"
    text = shown(capsys, *flags.split())
    for words in ("largest classes", "... and 17 more (--rows 20)", "1 per rank"):
        assert words in text


MEASURED = """
import re
from pathlib import Path
from launch import run_here
from dpfl_mpi.mpi import placement
placement.WAVE = {wave}
run_here(Path("run.h5"), {fields}, fresh=True, save_models=False)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_client_holds_as_many_models_as_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "WAVE", wave := 8)
    few, many, each, rng = 150, 400, 8, np.random.default_rng(0)
    count = many * each
    clients = {"client": np.repeat(np.arange(many), each)}
    test = np.tile(np.arange(each) >= 6, many)
    x = rng.integers(0, 256, (count, 28, 28, 1), dtype=np.uint8)
    data = arrays_of(x, rng.integers(0, 10, count), **clients, test=test)
    prepare.write(data, "arrays", tmp_path / "data.h5")
    natural = {"dataset": "arrays", "data": str(tmp_path / "data.h5"), "partition": "natural"}
    natural |= {"min_samples": 3, "model": "mlp", "budget": 10, "rounds": 1, "tau_init": 1}
    measured, plans = [], []
    for clients in (few, many):  # a process each: what one frees the next would get in pieces
        fields = natural | {"clients": clients, "tau_train": 1}
        plans.append(planned(fields, save_models=False))
        code = MEASURED.format(wave=wave, fields=fields)
        measured.append(1024 * int(ended(sys.executable, "-c", code, cwd=tmp_path).stdout))
    expected = [plan.memory[0] for plan in plans]
    models, expected = (
        (more - less) / (many - few) / plans[0].row for less, more in (measured, expected)
    )
    assert models == pytest.approx(expected, abs=1.1)


SAVED = """
import re
from pathlib import Path
import numpy as np
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Run

def most():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))

recorder = Recorder(Path("run.h5"), Run(clients=200).resolve(), {}, {})
rows = np.random.default_rng(0).random((20, 2**17))  # 20 MiB
before = most()
for first in range(0, 200, 20):
    recorder.write_rows("model/best", rows, 200, first)
recorder.close("finished")
print((most() - before) * 1024 / (10 * rows.nbytes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_root_holds_the_saved_models_once(tmp_path):
    done = ended(sys.executable, "-c", SAVED, cwd=tmp_path)
    assert 1 <= float(done.stdout) < 1.3, done.stderr
