"""Draw the picture of the first page anew: `python docs/pictures/draw.py`. It computes the default run, and does what that prints at its end.

`reproduction/page.py` draws those of findings.md; the two of CIFAR-10 are figures of results that are not in the repository.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import dpfl_mpi

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_name("digits-graph.png")


def draw(picture: Path = PICTURE, ranks: int = 2) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = dpfl_mpi.run(ranks=ranks, results=folder, kernels="native", quiet=True)
        command = [sys.executable, ROOT / "analysis" / "graph_evolution.py", result.path, "--out", folder]
        subprocess.run(command, check=True)
        picture.write_bytes(Path(folder, "graph_evolution.png").read_bytes())


if __name__ == "__main__":
    draw()
