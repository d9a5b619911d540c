"""The files of examples/ run as they stand, give the same numbers on any ranks, and do what their first lines say; each is under 40 lines.

Each benchmark and each figure can be asked what it does.
"""

import re
import runpy
import shutil
import subprocess
import sys

import gpu
import numpy as np
import pytest
import starts
import torch
from launch import ROOT, environment, run_many, script

from dpfl_mpi.api import model
from dpfl_mpi.results import Result
from dpfl_mpi.streams import stream

EXAMPLES = ROOT / "examples"
FIELDS = {"clients": 5, "rounds": 3, "tau_train": 1, "budget": 3, "model": "mlp"}


LORA = {"rounds": 4, "lr": 0.05, "clients": 6, "method": "local"}
NOISE = {
    "rounds": 1,
    "lr": 1e-8,
}  # nobody changes anything: the server's model is the common start and noise


@pytest.fixture(scope="module")
def folder(tmp_path_factory, terminal):
    """A copy of the examples, with the backbone that one of them makes."""
    at = tmp_path_factory.mktemp("copy") / "examples"
    shutil.copytree(EXAMPLES, at, ignore=shutil.ignore_patterns("base.pt", "__pycache__"))
    script(at / "backbone.py").main(ranks=1, results=at.parent, quiet=True)
    return at


@pytest.fixture(scope="module")
def on_two_ranks(folder):
    """The result files of all examples by name, of one start of two ranks."""
    lora = LORA | {"dataset": str(folder / "inside.py"), "model": str(folder / "lora.py")}
    topk, noise = (
        FIELDS | {"method": str(folder / name)} for name in ("topk.py", "client_noise.py")
    )
    return run_many(2, folder.parent, {"lora": lora, "topk": topk, "noise": noise | NOISE})


def test_each_is_short():
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")) < 40


def test_lora_over_a_backbone_of_clients_that_stay_out(folder, on_two_ranks, result_of):
    """Rows hold the adapter alone; it starts as the backbone, gains by training, and another backbone is another Run."""
    base = torch.load(folder / "base.pt")
    fields = LORA | {"dataset": str(folder / "inside.py"), "model": str(folder / "lora.py")}
    one = result_of(fields)
    assert one.file["meta"].attrs["parameters"] == 4 * (64 + 64) + 4 * (64 + 10)
    sizes = {name: held.shape for name, held in one.state_dict(0).items()}
    assert sizes == {"1.a": (4, 64), "1.b": (64, 4), "3.a": (4, 64), "3.b": (10, 4)}
    assert (model(one, 2).network[1].weight == base["fc1.weight"]).all()
    start, best = one.mean("round/test_acc")[0], one.test_acc
    assert start > 0.8 and best > start
    assert starts.same(one.path, on_two_ranks["lora"])
    torch.save({name: base[name] + 1 for name in base}, folder / "base.new")
    (folder / "base.new").replace(folder / "base.pt")
    assert result_of(fields | {"rounds": 0}).key["model"] != one.key["model"]


def test_top_k_sends_a_share_and_all_of_it_is_the_plain_average(folder, on_two_ranks, result_of):
    fields = FIELDS | {"method": str(folder / "topk.py")}
    one = result_of(fields)
    assert starts.same(one.path, on_two_ranks["topk"])
    assert one["traffic/models_received"].tolist() == [[0] * 5] + [[2] * 5] * 3
    plain = folder / "plain.py"
    plain.write_text(
        (folder / "topk.py")
        .read_text()
        .replace("fed.exchange(known, graph)", "fed.exchange(w, graph)")
    )
    changes = {"options": {"share": 1.0}}, {"method": str(plain)}
    every, average = (result_of(fields | change)["round/test_loss"] for change in changes)
    np.testing.assert_allclose(
        every, average, rtol=1e-4
    )  # known + (w - known) is w but for rounding
    assert (np.abs(one["round/test_loss"][2:] - average[2:]) > 1e-3).any()


def test_client_level_noise(folder, on_two_ranks, result_of):
    """Without noise and with a clip beyond every change it is FedAvg; the models of one round differ by the noise of the stream."""
    fields = FIELDS | {"method": str(folder / "client_noise.py"), "rounds": 1}
    wide = {"options": {"clip": 1e6, "noise": 0.0}}
    silent, fedavg = (
        result_of(fields | more)["round/test_loss"] for more in (wide, {"method": "fedavg"})
    )
    np.testing.assert_allclose(silent, fedavg, rtol=1e-5)
    start, one, twice = (
        result_of(fields | NOISE | more) for more in (wide, {}, {"options": {"noise": 0.2}})
    )
    assert starts.same(one.path, on_two_ranks["noise"])
    k = int(one["best/round"].argmax())  # whose best model is the one with noise
    assert one["best/round"][k] == twice["best/round"][k] == 1
    rows = [
        np.concatenate([v.ravel() for v in r.state_dict(k).values()]) for r in (start, one, twice)
    ]
    common, noisy, noisier = rows
    drawn = (
        stream(42, 1000, 0, 1).standard_normal(-(-len(common) // 16) * 16)[: len(common)]
        * one["client/p"].max()
    )
    np.testing.assert_allclose(noisy - common, 0.1 * drawn, atol=1e-5)
    np.testing.assert_allclose(noisier - common, 0.2 * drawn, atol=1e-5)


def test_the_poller_tells_each_round_once(tmp_path):
    out = tmp_path / "run.h5"
    words = [
        sys.executable,
        "-m",
        "dpfl_mpi",
        "--rounds=6",
        "--clients=5",
        "--method=local",
        "--quiet",
        f"--out={out}",
    ]
    follow = script(EXAMPLES / "follow.py").follow
    with subprocess.Popen(words, env=environment()) as process:
        told = list(follow(out, pause=0.05))
    with Result(out) as result:
        assert (
            process.returncode == 0
            and [t for t, _, _ in told] == list(range(7))
            and told[-1][2] == "finished"
        )
        assert [accuracy for _, accuracy, _ in told] == result.mean("round/test_acc").tolist()


# benchmarks/ and analysis/ ---------------------------------------------------------------------------------------------------
# _ starts the name of a helper
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("[a-z]*.py"), *(ROOT / "analysis").glob("*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_help(script, monkeypatch, said):
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    assert f"usage: {script.name}" in said(
        lambda _: runpy.run_path(str(script), run_name="__main__")
    )


def test_the_benchmark_of_a_gpu_runs_on_a_cpu(monkeypatch, said):
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--device=cpu", "--gpu=h200", "--clients=2", "--seconds=0.01"]
    )
    assert "ratio plain: " in said(lambda _: gpu.main())


def test_ceilings_of_the_embedded_digits(monkeypatch, said):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--ceilings", "--gpu", "h200", "--launch_us", "1"])
    told = said(lambda _: gpu.main())
    # 10 + 20 x 5 epochs, the largest of 32 clients takes 6 mini-batches in each
    assert "32 clients, 110 local epochs (20 rounds), mini-batch 16" in told
    assert "in 660 lock-steps: the largest client takes 6 an epoch" in told
    kernels = int(re.search(r"(\d+) kernels per lock-step at 1 us", told)[1])
    assert f"at 1 us: {660 * kernels * 1e-6:.3g} s" in told
