"""The files of examples/ run as they stand, give the same numbers on any ranks, and do what their first lines say; each is under 40 lines."""

import importlib.util
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from launch import ROOT, environment, run_here, run_mpi

from dpfl_mpi import api
from dpfl_mpi.results import Result
from dpfl_mpi.streams import stream

EXAMPLES = ROOT / "examples"
FIELDS = {"clients": 5, "rounds": 3, "tau_train": 1, "budget": 3, "model": "mlp"}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("base.pt", "__pycache__"))


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_each_is_short():
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")) < 40


def test_lora_over_a_backbone_of_clients_that_stay_out(folder, tmp_path, monkeypatch):
    """Rows hold the adapter alone; it starts as the backbone, gains by training, and another backbone is another Run."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for name in [n for n in environment() if n.startswith("PMI")]:
        monkeypatch.delenv(name)
    module(folder / "backbone.py").main(results=tmp_path, quiet=True)
    base = torch.load(folder / "base.pt")
    fields = {"dataset": str(folder / "inside.py"), "model": str(folder / "lora.py"), "rounds": 4, "lr": 0.05}
    fields |= {"clients": 6, "method": "local"}
    with api.Result(run_here(tmp_path / "a.h5", fields)) as one:
        assert one.file["meta"].attrs["parameters"] == 4 * (64 + 64) + 4 * (64 + 10)
        sizes = {name: held.shape for name, held in one.state_dict(0).items()}
        assert sizes == {"1.a": (4, 64), "1.b": (64, 4), "3.a": (4, 64), "3.b": (10, 4)}
        assert "1.weight" not in sizes and (one.model(2).network[1].weight == base["fc1.weight"]).all()
        start, best = one.mean("round/test_acc")[0], one.test_acc
        assert start > 0.8 and best > start
        with Result(run_mpi(2, tmp_path / "b.h5", fields)) as two:
            assert Result.same_numbers(one, two)
    torch.save({name: base[name] + 1 for name in base}, folder / "base.new")
    (folder / "base.new").replace(folder / "base.pt")
    with Result(run_here(tmp_path / "c.h5", fields | {"rounds": 0})) as other:
        assert other.key["model"] != one.key["model"]


def test_top_k_sends_a_share_and_all_of_it_is_the_plain_average(folder, tmp_path):
    fields = FIELDS | {"method": str(folder / "topk.py")}
    with Result(run_here(tmp_path / "a.h5", fields)) as one, Result(run_mpi(2, tmp_path / "b.h5", fields)) as two:
        assert Result.same_numbers(one, two)
        assert one["traffic/models_received"].tolist() == [[0] * 5] + [[2] * 5] * 3
        few = one["round/test_loss"]
    plain = folder / "plain.py"
    plain.write_text((folder / "topk.py").read_text().replace("fed.exchange(known, graph)", "fed.exchange(w, graph)"))
    every = {"options": {"share": 1.0}}
    with (
        Result(run_here(tmp_path / "c.h5", fields | every)) as all_sent,
        Result(run_here(tmp_path / "d.h5", fields | {"method": str(plain)})) as average,
    ):
        # known + (w - known) is w but for rounding
        np.testing.assert_allclose(all_sent["round/test_loss"], average["round/test_loss"], rtol=1e-4)
        assert (np.abs(few[2:] - average["round/test_loss"][2:]) > 1e-3).any()


def test_client_level_noise(folder, tmp_path):
    """Without noise and with a clip beyond every change it is FedAvg; the models of one round differ by the noise of the stream."""
    fields = FIELDS | {"method": str(folder / "client_noise.py"), "rounds": 1}
    wide = {"clip": 1e6, "noise": 0.0}
    with (
        Result(run_here(tmp_path / "a.h5", fields | {"options": wide})) as silent,
        Result(run_here(tmp_path / "b.h5", fields | {"method": "fedavg"})) as fedavg,
    ):
        np.testing.assert_allclose(silent["round/test_loss"], fedavg["round/test_loss"], rtol=1e-5)
    fields |= {"lr": 1e-8}  # nobody changes anything: the server's model is the common start and noise
    with (
        Result(run_here(tmp_path / "c.h5", fields)) as one,
        Result(run_mpi(2, tmp_path / "d.h5", fields)) as two,
        Result(run_here(tmp_path / "e.h5", fields | {"options": {"noise": 0.2}})) as twice,
        Result(run_here(tmp_path / "f.h5", fields | {"options": wide})) as start,
    ):
        assert Result.same_numbers(one, two)
        k = int(one["best/round"].argmax())  # whose best model is the one with noise
        assert one["best/round"][k] == twice["best/round"][k] == 1
        common, noisy, noisier = (
            np.concatenate([v.ravel() for v in r.state_dict(k).values()]) for r in (start, one, twice)
        )
        drawn = (
            one["client/p"].max() * stream(42, 1000, 0, 1).standard_normal(-(-len(common) // 16) * 16)[: len(common)]
        )
        np.testing.assert_allclose(noisy - common, 0.1 * drawn, atol=1e-5)
        np.testing.assert_allclose(noisier - common, 0.2 * drawn, atol=1e-5)


def test_the_poller_tells_each_round_once(tmp_path):
    out = tmp_path / "run.h5"
    words = [sys.executable, "-m", "dpfl_mpi", "--rounds=6", "--clients=5", "--method=local", "--quiet", f"--out={out}"]
    follow = module(EXAMPLES / "follow.py").follow
    with subprocess.Popen(words, env=environment()) as process:
        told = list(follow(out, pause=0.05))
    with Result(out) as result:
        assert process.returncode == 0 and [t for t, _, _ in told] == list(range(7)) and told[-1][2] == "finished"
        assert [accuracy for _, accuracy, _ in told] == result.mean("round/test_acc").tolist()
