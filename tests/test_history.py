"""The newest commits: a subject is `room: verb what`, and generated data has commits of its own."""

import re
import subprocess

import pytest
from launch import ROOT

START = "3ffef85"  # the rule begins after this commit
NEWEST = 50
LONGEST = 72  # characters of a subject
SUBJECT = re.compile(r"[a-z][\w.-]*(, [a-z][\w.-]*)*: (\[numerics\] )?[a-z][\w-]+ \S.*[^.\s]")
NO_VERB = {"a", "all", "an", "each", "every", "no", "one", "some", "the", "there", "this", "two"}
# what scripts make from the results of runs, and the pages whose tables they write
GENERATED = re.compile(r"reproduction/.*\.(csv|png)|docs/pictures/.*\.png")
WRITTEN = re.compile(r"reproduction/.*\.(csv|png|md)|docs/pictures/.*")


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), "-c", "core.quotePath=off", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def commits() -> list[str]:
    """The hashes of the newest commits since the start; skip where they are not there."""
    try:
        if git("rev-parse", "--is-shallow-repository").strip() == "true":
            pytest.skip("the clone is shallow: git fetch --unshallow")
        git("merge-base", "--is-ancestor", START, "HEAD")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this folder has no history since {START}: {error.stderr.strip()}")
    range_of = [f"--max-count={NEWEST}", "--no-merges", f"{START}..HEAD"]
    return git("rev-list", *range_of).split()


def wrong(subject: str) -> bool:
    found = SUBJECT.fullmatch(subject)
    verb = subject.partition(": ")[2].removeprefix("[numerics] ").partition(" ")[0]
    return not found or len(subject) > LONGEST or verb in NO_VERB


@pytest.mark.parametrize(("subject", "refused"), [
    ("sweep: print a line per change", False),
    ("models, numerics: name each check", False),
    ("methods: [numerics] draw once per round", False),
    ("Sweep: print a line", True),
    ("print a line per change", True),
    ("sweep: a line per change", True),
    ("sweep: print a line per change.", True),
    ("sweep: print " + "x" * 60, True),
])  # fmt: skip
def test_the_rule_of_subjects(subject, refused):
    assert wrong(subject) == refused


def test_subjects_and_generated_data(commits):
    subjects = [git("log", "-1", "--format=%s", commit).strip() for commit in commits]
    assert [subject for subject in subjects if wrong(subject)] == []
    mixed = []
    for commit in commits:
        changed = ["show", "--format=", "--name-only", "--find-renames", "--diff-filter=AM"]
        files = git(*changed, commit).splitlines()
        generated = any(map(GENERATED.fullmatch, files))
        if generated and not all(map(WRITTEN.fullmatch, files)):
            mixed.append(git("log", "-1", "--format=%h %s", commit).strip())
    assert mixed == []
