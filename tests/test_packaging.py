"""What states one fact in several files agrees: version, license, authors, Python, pins."""

import configparser
import json
import re
import sys

import yaml
from launch import ROOT, ended
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import dpfl_mpi

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path):
    (tmp_path / "dpfl_mpi").mkdir()
    code = "import dpfl_mpi; print(dpfl_mpi.__version__)"
    done = ended("env", "-u", "PYTHONPATH", sys.executable, "-c", code, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"{dpfl_mpi.__version__}\n", "")


def requirements(*texts: str) -> list[tuple[str, SpecifierSet]]:
    lines = [line for text in texts for line in text.splitlines() if line and line[0] not in "#-"]
    return [(canonicalize_name(r.name), r.specifier) for r in map(Requirement, lines)]


def pins(file: str) -> dict[str, str]:
    found = requirements((ROOT / file).read_text())
    return {name: str(specifier).removeprefix("==") for name, specifier in found}


def test_every_requirement_has_a_pin_that_it_allows():
    pinned = pins("constraints.txt")
    texts = [SETUP["options"]["install_requires"], *SETUP["options.extras_require"].values()]
    wrong = [name for name, allowed in requirements(*texts) if not allowed.contains(pinned[name])]
    assert wrong == []
    # everything else is pinned alike
    assert pins("constraints-cpu.txt") == {"torch": pinned["torch"] + "+cpu"}
    assert "\n-c constraints.txt\n" in (ROOT / "constraints-cpu.txt").read_text()


def test_the_recipes_have_the_same_requirements():
    named = requirements(SETUP["options"]["install_requires"])
    named.append(("python", SpecifierSet(SETUP["options"]["python_requires"])))
    conda = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    assert conda["package"] == {"name": dpfl_mpi.__name__, "version": dpfl_mpi.__version__}
    run = "\n".join(conda["requirements"]["run"]).replace("pytorch", "torch")
    assert sorted(map(str, requirements(run))) == sorted(map(str, named))
    spack = next((ROOT / "spack").rglob("package.py")).read_text()
    for name, allowed in named:
        package = name if name == "python" else f"py-{name}"
        asked = f'"{package}@{str(allowed).removeprefix(">=")}:"'
        assert (asked in spack) == (name != "submitit"), name


def test_the_metadata_agree():
    codemeta = json.loads((ROOT / "codemeta.json").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert codemeta["name"] == SETUP["metadata"]["name"] == dpfl_mpi.__name__
    assert codemeta["description"] == SETUP["metadata"]["description"]
    assert codemeta["version"] == citation["version"] == dpfl_mpi.__version__
    assert f"\n## {dpfl_mpi.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert codemeta["license"].endswith(f"/{SETUP['metadata']['license']}")
    assert citation["license"] == SETUP["metadata"]["license"]
    assert [a["name"] for a in codemeta["author"]] == [a["name"] for a in citation["authors"]]
    paper, cited = codemeta["referencePublication"], citation["preferred-citation"]
    of_paper = cited["title"], cited["url"], str(cited["year"])
    assert (paper["name"], paper["url"], paper["datePublished"]) == of_paper
    names = [[a["givenName"], a["familyName"]] for a in paper["author"]]
    assert names == [[a["given-names"], a["family-names"]] for a in cited["authors"]]
    python = SETUP["options"]["python_requires"]
    low, *_, high = versions = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert python == f">={low}" and SETUP["mypy"]["python_version"] == low
    assert all(SpecifierSet(python).contains(v) for v in versions)
    assert f'target-version = "py{low.replace(".", "")}"' in (ROOT / "pyproject.toml").read_text()
    # .ci/newest reads the highest from setup.cfg
    for page in ("README.md", "docs/install.md", "codemeta.json"):
        named = re.findall(r"Python (3\.\d+) to (3\.\d+)", (ROOT / page).read_text())
        assert named == [(low, high)], page
    assert f'python-version: "{low}"' in (ROOT / ".github/workflows/ci.yml").read_text()


def test_every_test_that_ci_names_is_there():
    for script in (ROOT / ".ci").iterdir():
        for path, name in re.findall(r"(tests/\S+\.py)::(\w+)", script.read_text()):
            found = re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M)
            assert found, f"{script.name}: {path}::{name}"
