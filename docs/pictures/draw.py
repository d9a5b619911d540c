"""Compute the default run, draw the picture of the first page: `python docs/pictures/draw.py`."""

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
        script = ROOT / "analysis" / "graph_evolution.py"
        subprocess.run([sys.executable, script, result.path, "--out", folder], check=True)
        picture.write_bytes(Path(folder, "graph_evolution.png").read_bytes())


if __name__ == "__main__":
    draw()
