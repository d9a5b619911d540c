"""The notebook of the documentation runs from its first cell to its last, and what it shows is of the cells as they are."""

import os
import re
import warnings

import pytest
from launch import ROOT
from starts import environment

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")


def texts(notebook):
    """Return what each code cell shows as text."""
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    return [" ".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in c.outputs) for c in cells]


def test_the_notebook(tmp_path, monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for name in [n for n in os.environ if n.startswith(("PMI", "SLURM_"))]:
        monkeypatch.delenv(name)
    stored = nbformat.read(ROOT / "docs" / "notebook.ipynb", 4)
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Jupyter's own
        client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
        client.execute()
    before, now = texts(stored), texts(notebook)
    results = re.findall(r"results-notebook/\S+\.h5", " ".join(now))
    assert len(results) == 2 and results == re.findall(r"results-notebook/\S+\.h5", " ".join(before))
    accuracy, recorded = re.search(r"'([\d.]+) of \d+ images, recorded ([\d.]+)'", now[-1]).groups()
    assert accuracy == recorded
    assert [bool(text) for text in before] == [bool(text) for text in now]
