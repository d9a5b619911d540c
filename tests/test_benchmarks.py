"""Each benchmark and each figure can be asked what it does, that of a GPU runs on a CPU, and says its ceilings of the embedded digits."""

import re
import runpy
import sys

import gpu
import pytest
from launch import ROOT

# _ starts the name of a helper
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("[a-z]*.py"), *(ROOT / "analysis").glob("*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_help(script, monkeypatch, said):
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    assert f"usage: {script.name}" in said(lambda _: runpy.run_path(str(script), run_name="__main__"))


def test_the_benchmark_of_a_gpu_runs_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device=cpu", "--gpu=h200", "--clients=2", "--seconds=0.01"])
    gpu.main()
    assert "ratio plain: " in capsys.readouterr().out


def test_ceilings_of_the_embedded_digits(monkeypatch, said):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--ceilings", "--gpu", "h200", "--launch_us", "1"])
    told = said(lambda _: gpu.main())
    # 10 + 20 x 5 epochs, the largest of 32 clients takes 6 mini-batches in each
    assert "32 clients, 110 local epochs (20 rounds), mini-batch 16" in told
    assert "in 660 lock-steps: the largest client takes 6 an epoch" in told
    kernels = int(re.search(r"(\d+) kernels per lock-step at 1 us", told)[1])
    assert f"at 1 us: {660 * kernels * 1e-6:.3g} s" in told
