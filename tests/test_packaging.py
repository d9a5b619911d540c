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
    """In the folder that holds a clone named dpfl_mpi, the package is found before it."""
    (tmp_path / "dpfl_mpi").mkdir()
    command = [
        "env",
        "-u",
        "PYTHONPATH",
        sys.executable,
        "-c",
        "import dpfl_mpi; print(dpfl_mpi.__version__)",
    ]
    done = ended(*command, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"{dpfl_mpi.__version__}\n", "")


def pins(file: str) -> dict[str, str]:
    lines = [
        line for line in (ROOT / file).read_text().splitlines() if line and line[0] not in "#-"
    ]
    return {
        canonicalize_name(r.name): str(r.specifier).removeprefix("==")
        for r in map(Requirement, lines)
    }


def test_every_requirement_has_a_pin_that_it_allows():
    pinned = pins("constraints.txt")
    texts = [SETUP["options"]["install_requires"], *SETUP["options.extras_require"].values()]
    required = [
        Requirement(line) for text in texts for line in text.splitlines() if line and line[0] != "#"
    ]
    assert [
        r for r in required if not r.specifier.contains(pinned[canonicalize_name(r.name)])
    ] == []
    assert pins("constraints-cpu.txt") == {
        "torch": pinned["torch"] + "+cpu"
    }  # and everything else is pinned alike
    assert "\n-c constraints.txt\n" in (ROOT / "constraints-cpu.txt").read_text()


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
    assert (paper["name"], paper["url"], paper["datePublished"]) == (
        cited["title"],
        cited["url"],
        str(cited["year"]),
    )
    names = [[a["givenName"], a["familyName"]] for a in paper["author"]]
    assert names == [[a["given-names"], a["family-names"]] for a in cited["authors"]]


def test_one_lowest_and_one_highest_python_everywhere():
    python = SETUP["options"]["python_requires"]
    low, *_, high = versions = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert python == f">={low}" and SETUP["mypy"]["python_version"] == low
    assert all(SpecifierSet(python).contains(v) for v in versions)
    assert f'target-version = "py{low.replace(".", "")}"' in (ROOT / "pyproject.toml").read_text()
    for page in (
        "README.md",
        "docs/install.md",
        "codemeta.json",
    ):  # .ci/newest reads the highest from setup.cfg
        assert re.findall(r"Python (3\.\d+) to (3\.\d+)", (ROOT / page).read_text()) == [
            (low, high)
        ], page
    assert f'python-version: "{low}"' in (ROOT / ".github/workflows/ci.yml").read_text()


def test_every_test_that_ci_names_is_there():
    for script in (ROOT / ".ci").iterdir():
        for path, name in re.findall(r"(tests/\S+\.py)::(\w+)", script.read_text()):
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), (
                f"{script.name}: {path}::{name}"
            )
