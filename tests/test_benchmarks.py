"""Each benchmark and each figure can be asked what it does, that of a GPU runs on a CPU, and says its ceilings of the embedded digits."""

import importlib
import re
import runpy
import sys

import pytest
from launch import ROOT

FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted([*FOLDER.glob("[a-z]*.py"), *(ROOT / "analysis").glob("*.py")])  # _ starts the name of a helper


@pytest.fixture(scope="module")
def benchmarks():
    """The scripts' modules by name: imported as when one of them is the main program."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_help(benchmarks, script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert not end.value.code and f"usage: {script.name}" in capsys.readouterr().out


def test_the_benchmark_of_a_gpu_runs_on_a_cpu(benchmarks, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device=cpu", "--gpu=h200", "--clients=2", "--seconds=0.01"])
    benchmarks("gpu").main()
    assert "ratio plain: " in capsys.readouterr().out


def test_ceilings_of_the_embedded_digits(benchmarks, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--ceilings", "--gpu", "h200", "--launch_us", "1"])
    with pytest.raises(SystemExit) as end:
        benchmarks("gpu").main()
    said = capsys.readouterr().out
    assert not end.value.code
    # 10 + 20 x 5 epochs, the largest of 32 clients takes 6 mini-batches in each
    assert "32 clients, 110 local epochs (20 rounds), mini-batch 16" in said
    assert "in 660 lock-steps: the largest client takes 6 an epoch" in said
    kernels = int(re.search(r"(\d+) kernels per lock-step at 1 us", said)[1])
    assert f"at 1 us: {660 * kernels * 1e-6:.3g} s" in said
