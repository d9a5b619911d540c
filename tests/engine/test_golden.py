"""A golden curve: accuracies, losses and graphs of a small run, as text.

`PYTHONPATH=. python tests/engine/test_golden.py` writes it anew: digits-native.txt of the native
kernels on any processor, and PyTorch's, which has the same bits where line 2 is the same.
"""

import sys
import tempfile
from pathlib import Path

import pytest
from launch import run_here

from dpfl_mpi.numerics.cpu import LIBRARY, forms
from dpfl_mpi.results import Result

FOLDER = Path(__file__).parent / "golden"
NATIVE = FOLDER / "digits-native.txt"
FILES = sorted(FOLDER.glob("digits-*.txt"))
FIELDS = {"clients": 8, "rounds": 4, "tau_init": 3, "tau_train": 1, "budget": 4, "seed": 42}
MEANS = ("val_acc", "test_acc", "train_loss", "val_loss", "test_loss")
HEAD = f"# round, mean {', mean '.join(MEANS[:3])}, {', '.join(MEANS[3:])}, "
HEAD += "senders of client 0; of client 1; ..."


def compute(path: Path, kernels: str) -> tuple[dict, list[str]]:
    with Result(run_here(path, FIELDS, kernels=kernels)) as result:
        lines = []
        for t in range(FIELDS["rounds"] + 1):
            columns = [f"{result[f'round/{name}'][t].mean():.17g}" for name in MEANS]
            senders = (result.chosen(t).of(k) for k in range(FIELDS["clients"]))
            edges = ";".join(",".join(map(str, of)) for of in senders)
            lines.append(" ".join([str(t), *columns, edges]))
        return result.starts()[0], lines


def type_of(start: dict) -> str:
    facts = ", ".join(f"{name} {fact}" for name, fact in start["processor"].items())
    return f"# {facts}, torch {start['versions']['torch']}"


def write() -> None:
    """Write the curve of the native kernels, and PyTorch's of this processor."""
    with tempfile.TemporaryDirectory() as folder:
        _, ours = compute(Path(folder) / "native.h5", "native")
        start, lines = compute(Path(folder) / "torch.h5", "torch")
    NATIVE.write_text("\n".join([HEAD, "# native kernels, any processor", *ours]) + "\n")
    facts = ("vendor", "family", "model", "stepping", "capability")
    name = "-".join(start["processor"][fact] for fact in facts)
    (FOLDER / f"digits-{name}.txt").write_text("\n".join([HEAD, type_of(start), *lines]) + "\n")


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    start, lines = compute(tmp_path_factory.mktemp("golden") / "run.h5", "torch")
    return type_of(start), lines


@pytest.mark.parametrize("form", forms() if LIBRARY.exists() else ())
def test_golden_curve_of_the_native_kernels_to_the_bit(form, tmp_path):
    _, lines = compute(tmp_path / "run.h5", form)
    assert lines == NATIVE.read_text().splitlines()[2:]


def test_golden_curve_to_the_bit(curve):
    processor, lines = curve
    golden = {head: old for _, head, *old in (path.read_text().splitlines() for path in FILES)}
    if processor not in golden:
        where = "tests/engine/golden has no file"
        pytest.skip(f"compared with tolerances only: {where} for {processor[2:]}")
    assert lines == golden[processor]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_curve_of_any_processor(curve, path):
    for new, old in zip(curve[1], path.read_text().splitlines()[2:], strict=True):
        t, *numbers, edges = new.split(" ")
        t_old, *golden, edges_old = old.split(" ")
        assert (t, edges) == (t_old, edges_old)
        numbers, golden = [*map(float, numbers)], [*map(float, golden)]
        assert numbers[:2] == pytest.approx(golden[:2], abs=1e-6)
        assert numbers[2:] == pytest.approx(golden[2:], rel=1e-4)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.exit(write())
