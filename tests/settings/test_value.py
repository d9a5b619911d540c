"""A resolved Run is a value: its files count by what they held when it was resolved."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import starts
from launch import refused
from making import labelled

from dpfl_mpi import describe, show
from dpfl_mpi.engine import train
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Resolved, Run
from dpfl_mpi.settings.fields import as_dict, changed, to_flags

N, T = 6, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One file of each kind that a Run can name, and another of the same name under `other`."""
    out = tmp_path_factory.mktemp("named")
    one, two = (out, 3, "0 1\n1 0\n", "1", 42), (out / "other", 2, "2 1\n", "0", 7)
    for at, budget, reach, there, seed in (one, two):
        at.mkdir(exist_ok=True)
        (at / "budget.txt").write_text(f"{budget}\n" * N)
        (at / "reach.txt").write_text(reach)
        (at / "available.txt").write_text(f"{there} 1 1 1 1 1\n" * T)
        shutil.copy(starts.data(), at / "data.h5")
        flags = to_flags({**starts.small(), "seed": seed, "rounds": T})
        assert describe.main([*flags, "--no-measure", f"--save={at / 'partition.json'}"]) == 0
    labelled(out / "other" / "data.h5", (480, 160), (8, 8, 1), noise=80)
    return out


@pytest.mark.parametrize(("field", "text"), [
    ("churn", "0.00005:0.5"), ("codec", "topk:0.000001"), ("attack", "noise:0.00001"),
])  # fmt: skip
def test_a_small_share_is_written_as_it_is_read(field, text):
    run = Run(**{field: text}).resolve()
    assert str(getattr(run, field)) == text
    assert getattr(Resolved.from_json(run.to_json()), field) == getattr(run, field)


NAMED = {"data": "data.h5", "partition": "partition.json"}
NAMED |= {name: f"{name}.txt" for name in ("budget", "reach", "available")}


def run_of(name, path, **fields):
    value = f"file:{path}" if name == "partition" else str(path)
    return starts.small(rounds=T, **fields) | {name: value}


@pytest.fixture
def one(folder, tmp_path, request):
    """(field, a copy of its file that may be edited, the file with other content)."""
    name = request.param
    mine = tmp_path / "files" / NAMED[name]
    mine.parent.mkdir()
    shutil.copy(folder / NAMED[name], mine)
    return name, mine, folder / "other" / NAMED[name]


every_file = pytest.mark.parametrize("one", NAMED, indirect=True)


@every_file
def test_a_file_counts_by_what_it_held(one, tmp_path, said, monkeypatch):
    name, mine, other = one
    fields, out, saved = run_of(name, mine), tmp_path / "out.h5", tmp_path / "kept.h5"
    before = Run(**fields).resolve()
    slug = before.slug()
    # the checkpoint stays
    monkeypatch.setattr(train.Checkpoints, "clear", lambda self, sure=False: None)
    starts.here(out, fields, checkpoint_every="1")
    assert starts.checkpoint_rounds(out)
    changed_at = out.stat().st_mtime_ns
    starts.here(out, fields)  # the same: nothing to do
    assert Run(**run_of(name, shutil.copy(mine, tmp_path / f"x{mine.name}"))).slug() == slug
    shutil.copy(other, mine)
    after = Run(**fields).resolve()
    assert before.slug() == slug != after.slug()
    assert {n for n in before.key() if before.key()[n] != after.key()[n]} == {name}
    words = f"out.h5 holds another Run (different: {name}); move it away, and"
    refused(words, starts.here, out, fields)
    assert out.stat().st_mtime_ns == changed_at
    out.rename(saved)
    words = f"holds a checkpoint of another run (different: {name})"
    refused(words, starts.here, out, fields, checkpoint_every="1")
    shutil.copy(other.parent.parent / NAMED[name], mine)  # as it was
    with Result(starts.here(out, fields, checkpoint_every="1")) as result, Result(saved) as first:
        assert result.finished and result.key == first.key == before.key()
    mine.unlink()
    assert before.slug() == slug and before.resolve() is before
    assert before.path("results") == Path("results") / f"{slug}.h5"
    with Result(out) as result:
        assert (result.run, result.key) == (before, before.key()) and result.run.slug() == slug
    assert "the settings are the same" in said(show.main, out, "--compare", out, out)


def test_what_another_rank_has_not_read_is_an_error(folder):
    """Root sends texts and the largest budget of a file, so `most_senders` is right everywhere."""
    names = ("budget", "reach", "available")
    run = Run(**starts.small(rounds=T) | {n: str(folder / NAMED[n]) for n in names}).resolve()
    sent = as_dict(run) | {"contents": run.contents, "declared": run.declared}
    other = Resolved(**json.loads(json.dumps(sent)))
    assert other == run and other.slug() == run.slug()
    assert other.most_senders == run.most_senders == 2
    for name in names:
        assert getattr(run, name).table is not None
        with pytest.raises(LookupError, match="was not read on this rank"):
            assert getattr(other, name).table
    with pytest.raises(LookupError):
        assert Resolved(**sent | {"declared": {}}).most_senders
    run = Run(method="fedprox", finetune_epochs=2, options={"finetune_prox": False}).resolve()
    assert isinstance(run, Resolved) and run.untuned() == Run(method="fedprox").resolve()
    assert Run(**as_dict(run)).resolve() == run
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 1
    assert changed(Run(seed=3, augment=False)) == {"seed": 3, "augment": False}
    fields = {"seed": 3, "augment": False, "quiet": True, "out": None}
    fields |= {"options": {"mu": 1.0, "head": "a-b"}}
    flags = "--seed=3 --no-augment --quiet --options.mu=1.0 --options.head=a-b"
    assert to_flags(fields) == flags.split()
