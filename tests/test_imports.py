"""Who may import what: analysis runs on a laptop without MPI and torch, methods know neither MPI nor files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT

PACKAGE = ROOT / "dpfl_mpi"
HEAVY = ("torch", "mpi4py", "PIL", "sklearn", "matplotlib", "pandas")


def imported(path: Path, anywhere: bool) -> set[str]:
    """Modules a file imports: at import time, or `anywhere` (inside functions as well, but not under TYPE_CHECKING)."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not anywhere:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def files(*patterns: str) -> list[Path]:
    return sorted(p for pattern in patterns for p in PACKAGE.glob(pattern))


def breaks(path: Path, forbidden: tuple[str, ...], anywhere: bool) -> list[str]:
    return sorted(m for m in imported(path, anywhere) if any(m == f or m.startswith(f + ".") for f in forbidden))


@pytest.mark.parametrize(
    "path",
    files("config.py", "settings/*.py", "data/*.py", "results.py", "prepare.py", "datasets/*.py"),
    ids=lambda p: p.name,
)
def test_data_side_needs_no_torch_and_no_mpi(path):
    assert breaks(path, ("torch", "mpi4py", "dpfl_mpi.federation", "dpfl_mpi.mpi"), anywhere=True) == []
    assert breaks(path, HEAVY, anywhere=False) == []


@pytest.mark.parametrize("path", files("methods/*.py"), ids=lambda p: p.name)
def test_methods_know_neither_mpi_nor_files(path):
    assert breaks(path, ("mpi4py", "h5py", "dpfl_mpi.mpi", "dpfl_mpi.results", "os", "pathlib"), anywhere=True) == []
    assert "open(" not in path.read_text()


@pytest.mark.parametrize(
    "path", files("numerics/ensemble.py", "numerics/clients.py", "models/*.py"), ids=lambda p: p.name
)
def test_numerics_know_no_mpi(path):
    assert breaks(path, ("mpi4py", "dpfl_mpi.mpi", "dpfl_mpi.federation", "h5py"), anywhere=True) == []


def test_only_comm_and_the_entry_import_mpi4py():
    users = {p.relative_to(PACKAGE).as_posix() for p in files("**/*.py") if breaks(p, ("mpi4py",), anywhere=True)}
    assert users <= {"mpi/world.py", "mpi/window.py", "__main__.py"}
    assert breaks(PACKAGE / "__main__.py", (*HEAVY, "jsonargparse", "h5py"), anywhere=False) == []


def test_comm_needs_no_torch():
    assert breaks(PACKAGE / "mpi" / "world.py", ("torch", "h5py"), anywhere=True) == []


@pytest.mark.parametrize("path", sorted((ROOT / "analysis").glob("*.py")), ids=lambda p: p.name)
def test_analysis_reads_results_only(path):
    own = {m for m in imported(path, anywhere=True) if m.startswith("dpfl_mpi.")}
    assert {".".join(m.split(".")[:2]) for m in own} <= {
        "dpfl_mpi.config",
        "dpfl_mpi.errors",
        "dpfl_mpi.plugins",
        "dpfl_mpi.results",
        "dpfl_mpi.graph",
        "dpfl_mpi.settings",
    }
    assert breaks(path, ("torch", "mpi4py"), anywhere=True) == []


def test_resolving_a_run_and_opening_results_loads_nothing_heavy():
    """In a fresh interpreter, through every data set and method: what a laptop without MPI would run."""
    code = (
        "import sys; from dpfl_mpi.config import Run; from dpfl_mpi.plugins import names; import dpfl_mpi.results, dpfl_mpi.data.partition\n"
        "import dpfl_mpi.prepare, dpfl_mpi.__main__\n"
        "for d in names('dataset'):\n"
        "    for m in names('method'):\n"
        "        Run(dataset=d, method=m).resolve()\n"
        "Run().slug()\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
