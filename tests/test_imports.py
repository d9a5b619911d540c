"""Rooms lie on floors: a module, in functions and for types, too, imports from below."""

import ast
import graphlib
import sys
from functools import cache
from pathlib import Path

import pytest
from launch import ROOT, ended, mpirun

PACKAGE = ROOT / "dpfl_mpi"
# from the ground to what a user types; a room does not use its neighbours on the same floor
FLOORS = (
    "errors version batch",
    "streams plugins graph storage",
    "settings",
    "mpi data",
    "results",
    "datasets numerics",
    "models",
    "transport",
    "plan federation",
    "methods",
    "survival",
    "engine",
    "figures",
    "commands",
    "sweep",  # starts the command of one run
)
COMMANDS = "__main__ prepare describe show export evaluate api objects testing"
HEAVY = ["torch", "mpi4py", "PIL", "sklearn", "matplotlib", "pandas"]
# all that a room may use; methods are handed a Federation, and import it for types alone
ALLOWED = {
    "methods": "methods errors streams plugins graph settings",
    "figures": "figures settings errors methods plugins results graph storage",
}
# what a room may never import, not even inside a function ...
BARE = "errors version batch streams plugins graph storage settings results"
NEVER = {
    "torch": f"{BARE} mpi data datasets figures prepare show export sweep",
    "mpi4py": f"{BARE} data datasets numerics models transport federation methods survival engine "
    "plan figures __main__ prepare describe show export evaluate sweep api",
    "h5py": "errors version streams plugins graph mpi numerics models transport federation methods",
    "os": "methods",
    "pathlib": "methods",
}
# ... and which load nothing heavy when they are imported, nor what only a command line needs
LIGHT = f"{BARE} data datasets methods prepare show export sweep __main__ api"


def module_of(path: Path) -> str:
    """Return a file's name as a module below the package, such as "federation.greedy"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imported(path: Path, types: bool = True) -> frozenset[str]:
    """Return what a file imports; without `types`, not what it imports for types alone."""
    found, nodes = set(), [ast.parse(path.read_text())]
    for node in nodes:  # to which it adds those inside
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: modules are imported by their whole name"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        nodes += ast.iter_child_nodes(node)
    return frozenset(found)


def own(path: Path, types: bool = True) -> set[str]:
    """Return the package's modules that a file imports: `graph` where it imports `graph.CASES`."""
    found = imported(path, types)
    names = {name.removeprefix("dpfl_mpi.") for name in found if name.startswith("dpfl_mpi.")}
    return {name if name in FILES else name.rpartition(".")[0] for name in names}


def top(module: str) -> str:
    return module.partition(".")[0]


def room(module: str) -> str:
    return "commands" if top(module) in COMMANDS.split() else top(module)


def test_every_room_has_a_floor_and_no_arrow_runs_up():
    level = {name: i for i, floor in enumerate(FLOORS) for name in floor.split()}
    assert {room(module) for module in FILES if module} == set(level)
    arrows = {(a, b) for a, path in FILES.items() if a for b in own(path) if room(a) != room(b)}
    assert sorted(f"{a} uses {b}" for a, b in arrows if level[room(b)] >= level[room(a)]) == []
    uses = {module: own(path) - {module} for module, path in FILES.items()}
    graphlib.TopologicalSorter(uses).prepare()  # else a CycleError, which lists a circle
    commands = sorted((ROOT / "analysis").glob("*.py"))
    assert {used for path in commands for used in own(path)} == {"figures.command"}
    assert [path.name for path in commands if "sys.path" in path.read_text()] == []


@pytest.mark.parametrize("library", NEVER)
def test_who_never_imports(library):
    rooms = NEVER[library].split()
    paths = [path for module, path in FILES.items() if top(module) in rooms]
    assert [path for path in paths if library in map(top, imported(path))] == []


@pytest.mark.parametrize("name", ALLOWED)
def test_a_room_uses_these_alone(name):
    paths = [path for module, path in FILES.items() if room(module) == name]
    used = {module for path in paths for module in own(path, types=name == "figures")}
    assert {*map(room, used)} <= {*ALLOWED[name].split()}
    # methods use neither files nor parts of the Federation
    odd = ("open(", "fed._") if name == "methods" else ()
    assert [path for path in paths if any(part in path.read_text() for part in odd)] == []


def test_light_rooms_and_resolving_a_run_load_nothing_heavy():
    light = [f"dpfl_mpi.{module}" for module in FILES if top(module) in LIGHT.split()]
    code = f"""
import importlib, sys, dpfl_mpi.__main__
assert not {{'yaml', 'h5py'}} & set(sys.modules)
for module in {light}: importlib.import_module(module)
from dpfl_mpi.settings import Run; from dpfl_mpi.plugins import shipped
for d in shipped('dataset'):
    for m in shipped('method'):
        Run(dataset=d, method=m).resolve()
Run().slug()
print(sorted(set({HEAVY}) & set(sys.modules)))"""
    done = ended(sys.executable, "-c", code, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


RANK = """
import os, sys; from dpfl_mpi.__main__ import main
try: main(sys.argv[1:])
except SystemExit as end: assert end.code == 0
from mpi4py import MPI
names = ["yaml", "sklearn", "scipy", "pandas", "torch", "torch._dynamo", "dpfl_mpi.settings"]
os.write(1, f"{MPI.COMM_WORLD.rank} {sorted({*names} & {*sys.modules})}\\n".encode())
"""


def test_what_ranks_load(tmp_path):
    """Of a start's seconds most are imports, once per rank; a finished Run needs none of them."""
    (tmp_path / "run.py").write_text(RANK)
    few = ["--clients=8", "--rounds=0", "--tau_init=0", "--quiet", f"--results={tmp_path}"]
    settings, torch = "dpfl_mpi.settings", "torch"
    for at_root, elsewhere in (([settings, torch], [settings, torch]), ([settings], [])):
        done = mpirun(2, tmp_path / "run.py", *few, cwd=tmp_path)
        lines = [f"0 {at_root}", f"1 {elsewhere}"]
        assert (sorted(done.stdout.splitlines()), done.stderr) == (lines, "")
    done = ended(sys.executable, "-m", "dpfl_mpi", *few, timeout=60, PATH="", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_torch_is_imported_without_the_paths_of_all_modules():
    """Each is one lookup per folder above it, on a file system that thousands of ranks share."""
    code = """
import inspect, os, posixpath, sys
from dpfl_mpi.mpi.start import modules_by_name
found, resolve, paths = inspect.getmodule, posixpath.realpath, []
posixpath.realpath = lambda path, **more: paths.append(path) or resolve(path, **more)
with modules_by_name():
    import torch
    assert inspect.getmodule(sys._getframe()) is sys.modules['__main__']
    assert inspect.getmodule(torch.relu) is found(torch.relu)
assert inspect.getmodule is found
print(len(paths))"""
    done = ended(sys.executable, "-c", code, timeout=60)
    assert int(done.stdout) < 100, done.stderr  # 1,152 without


def test_every_name_in_these_lists_is_a_room():
    texts = *FLOORS, COMMANDS, LIGHT, *NEVER.values(), *ALLOWED.values()
    rooms = {top(module) for module in FILES} | {"commands"}
    assert {name for text in texts for name in text.split()} - rooms == set()
