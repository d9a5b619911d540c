"""A golden curve: a small run whose accuracies, losses and graphs are kept as text, compared exactly.

A change that is no change of numbers leaves the file alone. A change that means to alter numbers raises `config.NUMERICS`, says so in
CHANGELOG.md, and writes the file anew: `PYTHONPATH=. python tests/test_golden.py`. Exactness holds on one CPU type and one version of
torch, which the file names; on another the accuracies must agree to 1e-6 and the losses to 1e-4.
"""

import sys
from pathlib import Path

import pytest
from launch import run_here

GOLDEN = Path(__file__).parent / "golden" / "digits.txt"
FIELDS = {"clients": 8, "rounds": 4, "tau_init": 3, "tau_train": 1, "budget": 4, "seed": 42}


def curve(path: Path) -> tuple[str, list[str]]:
    """Return where it was computed, and a line a round: accuracies of all clients, mean losses, edges."""
    from dpfl_mpi.results import Result

    with Result(path) as result:
        start = result.starts()[0]
        lines = []
        for t in range(FIELDS["rounds"] + 1):
            columns = [f"{result['round/val_acc'][t].mean():.17g}", f"{result['round/test_acc'][t].mean():.17g}"]
            columns += [f"{result[f'round/{name}'][t].mean():.17g}" for name in ("train_loss", "val_loss", "test_loss")]
            edges = ";".join(",".join(map(str, result.chosen(t).of(k))) for k in range(FIELDS["clients"]))
            lines.append(" ".join([str(t), *columns, edges]))
    return f"{start['cpu']}, torch {start['versions']['torch']}", lines


def write() -> None:
    """Compute the curve and replace the file."""
    out = run_here(GOLDEN.with_suffix(".h5"), FIELDS, fresh=True)
    where, lines = curve(out)
    out.unlink()
    head = [
        "# round, mean val_acc, mean test_acc, mean train_loss, val_loss, test_loss, senders of client 0; of client 1; ...",
        f"# {where}",
    ]
    GOLDEN.write_text("\n".join([*head, *lines]) + "\n")


def test_golden_curve(tmp_path):
    where, lines = curve(run_here(tmp_path / "run.h5", FIELDS))
    _, kept_where, *kept = GOLDEN.read_text().splitlines()
    if kept_where == f"# {where}":
        assert lines == kept
        return
    for new, old in zip(lines, kept, strict=True):
        t, val, test, *losses, edges = new.split(" ")
        t_old, val_old, test_old, *losses_old, edges_old = old.split(" ")
        assert (t, edges) == (t_old, edges_old)
        assert [float(val), float(test)] == pytest.approx([float(val_old), float(test_old)], abs=1e-6)
        assert [*map(float, losses)] == pytest.approx([*map(float, losses_old)], rel=1e-4)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.exit(write())
