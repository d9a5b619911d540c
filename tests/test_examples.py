"""The examples do what their first lines say, on any ranks; each script has --help."""

import json
import runpy
import shutil
import subprocess
import sys

import gpu
import numpy as np
import pytest
import starts
import torch
from launch import ROOT, environment, run_many, script, text_file

from dpfl_mpi import Result
from dpfl_mpi.streams import stream

EXAMPLES = ROOT / "examples"
FIELDS = {"clients": 5, "rounds": 3, "tau_train": 1, "budget": 3, "model": "mlp"}
LORA = {"rounds": 4, "lr": 0.05, "clients": 6, "method": "local"}
NOISE = {"rounds": 1, "lr": 1e-8}  # no training: the server's model is the common start and noise


@pytest.fixture(scope="module")
def folder(tmp_path_factory, terminal):
    """A copy of the examples, with the backbone that one of them makes."""
    copy = tmp_path_factory.mktemp("copy") / "examples"
    shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("base.pt", "__pycache__"))
    script(copy / "backbone.py").main(ranks=1, results=copy.parent, quiet=True)
    return copy


@pytest.fixture(scope="module")
def runs(folder):
    return {
        "lora": LORA | {"dataset": str(folder / "inside.py"), "model": str(folder / "lora.py")},
        "topk": FIELDS | {"method": str(folder / "topk.py")},
        "noise": FIELDS | {"method": str(folder / "client_noise.py")} | NOISE,
    }


@pytest.fixture(scope="module")
def on_two_ranks(folder, runs):
    return run_many(2, folder.parent, runs)


def test_each_is_short():
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")) < 40


def test_lora_over_a_backbone_of_other_clients(folder, runs, on_two_ranks, result_of):
    base = torch.load(folder / "base.pt")
    one = result_of(runs["lora"])
    assert one.file["meta"].attrs["parameters"] == 4 * (64 + 64) + 4 * (64 + 10)
    sizes = {name: values.shape for name, values in one.state_dict(0).items()}
    assert sizes == {"1.a": (4, 64), "1.b": (64, 4), "3.a": (4, 64), "3.b": (10, 4)}
    assert (Result(one.path).model(2).network[1].weight == base["fc1.weight"]).all()
    assert 0.8 < one.mean("round/test_acc")[0] < one.test_acc
    assert starts.same(one.path, on_two_ranks["lora"])
    torch.save({name: base[name] + 1 for name in base}, folder / "base.new")
    (folder / "base.new").replace(folder / "base.pt")
    assert result_of(runs["lora"] | {"rounds": 0}).key["model"] != one.key["model"]


def test_top_k_with_share_1_is_the_plain_average(folder, runs, on_two_ranks, result_of):
    one = result_of(runs["topk"])
    assert starts.same(one.path, on_two_ranks["topk"])
    assert one["traffic/models_received"].tolist() == [[0] * 5] + [[2] * 5] * 3
    text = (folder / "topk.py").read_text()
    plain = text.replace("fed.exchange(known, graph)", "fed.exchange(w, graph)")
    changes = {"options": {"share": 1.0}}, {"method": text_file(folder / "plain.py", plain)}
    every, average = (result_of(runs["topk"] | change)["round/test_loss"] for change in changes)
    # known + (w - known) is w but for rounding
    np.testing.assert_allclose(every, average, rtol=1e-4)
    assert (np.abs(one["round/test_loss"][2:] - average[2:]) > 1e-3).any()


def test_client_level_noise(runs, on_two_ranks, result_of):
    """Without noise and clipping it is FedAvg; models of a round differ by the drawn noise."""
    silent = {"options": {"clip": 1e6, "noise": 0.0}}
    trained = runs["noise"] | {"lr": 0.01}
    a, b = (result_of(trained | more)["round/test_loss"] for more in (silent, {"method": "fedavg"}))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    changes = silent, {}, {"options": {"noise": 0.2}}
    results = [result_of(runs["noise"] | change) for change in changes]
    _, one, twice = results
    assert starts.same(one.path, on_two_ranks["noise"])
    k = int(one["best/round"].argmax())  # a client whose best model has noise
    assert one["best/round"][k] == twice["best/round"][k] == 1
    models = [result.state_dict(k).values() for result in results]
    common, noisy, noisier = (np.concatenate([v.ravel() for v in each]) for each in models)
    normal = stream(42, 1000, 0, 1).standard_normal(-(-len(common) // 16) * 16)
    drawn = normal[: len(common)] * one["client/p"].max()
    np.testing.assert_allclose(noisy - common, 0.1 * drawn, atol=1e-5)
    np.testing.assert_allclose(noisier - common, 0.2 * drawn, atol=1e-5)


def test_follow_yields_each_round_once(tmp_path):
    out = tmp_path / "run.h5"
    words = starts.command(out, {"rounds": 6, "clients": 5, "method": "local"}, quiet=True)
    with subprocess.Popen(words, env=environment()) as process:
        rounds = list(script(EXAMPLES / "follow.py").follow(out, pause=0.05))
    numbers, accuracies, states = zip(*rounds, strict=True)
    assert process.returncode == 0 and numbers == (*range(7),) and states[-1] == "finished"
    assert list(accuracies) == Result(out).mean("round/test_acc").tolist()


def test_a_spill_or_a_kernel_that_does_not_compile_fails_the_check(monkeypatch):
    logs = {"clean": ("fine", 0), "spilled": ("bad", 8)}

    def compiled(arch, network, verb, team, cluster, anew):
        if verb == "broken":
            raise gpu.UserError("no such identifier")
        return logs[verb]

    monkeypatch.setattr(gpu, "compiled", compiled)
    lines = []

    def compile_all(network, *verbs, anew=True):
        lines.clear()
        jobs = [("sm_90", network, verb, 512, 4) for verb in verbs]
        return gpu.compile_all(jobs, anew, lines.append)

    assert compile_all("cnn", "clean") and compile_all("mlp", "clean", "spilled")
    assert not compile_all("cnn", "clean", "spilled")
    assert (
        lines[-1] == "error: stack or spills of sm_90: cnn, spilled, team 512, cluster 4 (8 bytes)"
    )
    assert not compile_all("cnn", "broken")
    assert lines[-1] == "error: these do not compile: sm_90: cnn, broken, team 512, cluster 4"
    assert compile_all("cnn", "broken", anew=False)


# names of helpers begin with _
SCRIPTS = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))  # tests/figures runs those of analysis


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_help(script, monkeypatch, said):
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    text = said(lambda _: runpy.run_path(str(script), run_name="__main__"))
    assert f"usage: {script.name}" in text


def test_the_script_for_a_gpu_runs_on_a_cpu_and_finds_a_changed_bit(tmp_path, monkeypatch, said):
    def start(*flags):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--device=cpu", "--seconds=0.01", *flags])
        said(lambda _: gpu.main())

    reference = f"--reference={tmp_path / 'bits.npz'}"
    start(reference)
    arrays = dict(np.load(tmp_path / "bits.npz"))
    was = arrays["mlp/train/w"][1, 2].copy()
    arrays["mlp/train/w"][1, 2] = 8
    np.savez(tmp_path / "bits.npz", **arrays)
    start(reference, f"--prepared={tmp_path}", "--parts=bits,sanitize,rate,paper")
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    size = arrays["mlp/train/w"].size
    how = f"1 of {size} differ by up to {8 - was:.3g}, first [1, 2]: {was} for 8.0"
    assert found["bits"]["off"] == {"mlp/train/w": how}
    assert min(found["rate"]["rates"].values()) > 0
    with Result(tmp_path / "paper.h5") as result:
        assert np.mean(found["paper"]["test_acc"]) == pytest.approx(result.test_acc)
    assert {part["ended"] for part in found.values()} == {"done"}
