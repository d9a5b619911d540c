"""Methods, models and data sets outside of the package: files in a folder, and of pages."""

import re
from pathlib import Path

import making
from launch import ROOT

METHOD = """
from dataclasses import dataclass
from dpfl_mpi.settings import option
from dpfl_mpi.methods import Method
from dpfl_mpi.methods.local import init
from . import helper

METHOD = Method(title="Mine", topology="none", models=2, citation="@misc{mine, title = {Mine}}")

@dataclass(frozen=True)
class Options:
    scale: float = option(1.0, "factor on the rows")

def round(fed, state, t):
    w = fed.local_opt(state["client"]["w"], epochs=1) * (helper.SCALE * fed.options["scale"])
    fed.evaluate(w)
    return {"client": {"w": w}, "shared": {}}
"""
MODEL = """
import math
from torch import nn
from .parts import hidden
HEAD = "head"

class Net(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.body, self.head = hidden(inputs), nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())

def build(shape, classes):
    return Net(math.prod(shape), classes)
"""
PARTS = "from torch import nn\n\ndef hidden(inputs):\n    return nn.Linear(inputs, 8)\n"
DATA = """
import numpy as np
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.datasets.digits import PAPER
DATA, TITLE = None, "Trees"
SEED, NAMES = 0, np.array(["ash", "birch", "cedar", "elm"])

def load():
    rng, i = np.random.default_rng(SEED), np.arange(320)
    x = rng.integers(0, 255, (4, 3, 3, 1))[i % 4] + rng.normal(0, 60, (320, 3, 3, 1))
    return arrays_of(np.clip(x, 0, 255).astype(np.uint8), NAMES[i % 4], test=i >= 240)
"""
WAITING = """
import os, time
from dpfl_mpi.methods import local
from dpfl_mpi.methods.local import METHOD, init
from dpfl_mpi.survival.signals import Heard

def round(fed, state, t):
    while t == 3 and {condition}:
        time.sleep(0.02)
    return local.round(fed, state, t)
"""
SMALL = {"clients": 4, "rounds": 1, "classes_per_client": 2}


def write(at: Path, **files: str) -> Path:
    """Write Python files by their names without `.py` into a folder; return it."""
    return making.folder(at, {f"{name}.py": text.encode() for name, text in files.items()})


def folder(at: Path, **files: str) -> Path:
    """Write and return a package with `mine.py`, `nets/net.py`, `trees.py` and what they import."""
    texts = {"mine": METHOD, "nets/net": MODEL, "nets/parts": PARTS, "trees": DATA}
    texts |= {"__init__": "", "nets/__init__": "", "helper": "SCALE = 1.0\n"}
    return write(at, **(texts | files))


def example(name: str) -> str:
    """Return the complete file NAME.py that a page of docs/ shows after its mark."""
    pages = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    (found,) = re.findall(rf"<!-- {name}\.py -->\n```python\n(.*?)```", pages, re.S)
    return found
