"""Checkpoints: what goes in comes out, on any number of ranks, and only for the same Run."""

import contextlib
import errno
import io
import os
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import starts
import torch
from launch import federation, refused
from making import flip

from dpfl_mpi import prepare
from dpfl_mpi.data.own import arrays_of
from dpfl_mpi.engine.record import Record
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.plugins import find
from dpfl_mpi.results import Result, recorder, result
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.settings.files import file_sha256
from dpfl_mpi.settings.values import parse
from dpfl_mpi.survival import checkpoint
from dpfl_mpi.survival.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def after_3(tmp_path_factory) -> Path:
    """A folder with the small run, cut after round 3."""
    starts.cut_after(3, (folder := tmp_path_factory.mktemp("cut")) / "run.h5")
    return folder


@pytest.fixture
def cut(after_3, tmp_path) -> Path:
    """The small run, cut after round 3: its file is the test's own."""
    return shutil.copytree(after_3, tmp_path / "cut") / "run.h5"


@contextlib.contextmanager
def begun(out: Path, still_ours=lambda: None, **job: object):
    """Give the Federation of the small run after round 0, its state, Recorder and Checkpoints."""
    fed = federation(starts.small(), out=str(out))
    recorder = Recorder(out, fed.run, fed.provenance, {"time": "now"}, still_ours=still_ours)
    fed.begin_round(0)
    state = find("method", fed.run.method).init(fed)
    try:
        job = Job(out=str(out), **job)
        yield fed, state, recorder, Checkpoints(out, fed.run.key(), job, fed.world, still_ours)
    finally:
        recorder.abandon()
        fed.close()


def newest(out: Path, kind: str, which: int = -1) -> Path:
    """Return a manifest, shard or results of the newest generation, with -2 of the one before."""
    return sorted(Path(f"{out}.checkpoint").glob(f"*.{kind}.h5"))[which]


def test_a_cut_run_goes_on_to_the_same_numbers(cut, undisturbed):
    assert starts.checkpoint_rounds(cut) == [1, 2]  # round 3 was recorded, not saved
    assert len(Result(cut)["round/number"]) == 4
    assert starts.same(starts.here(cut), undisturbed)
    assert starts.times_started(cut) == 2
    assert [*cut.parent.iterdir()] == [cut]  # neither checkpoints nor lock


def test_ranks_may_change(tmp_path):
    fields = starts.small(rounds=5, clients=3, budget=2)
    whole, out = starts.here(tmp_path / "whole.h5", fields), tmp_path / "run.h5"
    how = {"before": "from dpfl_mpi.survival import checkpoint as c; c.SHARD = 1"}
    how |= {"fields": fields, "checkpoint_every": 1}
    for ranks, t in ((2, 1), (4, 3)):
        process = starts.start(ranks, starts.held(starts.UNHEARD, out, t + 1, **how))
        starts.wait_for(lambda t=t: t in starts.checkpoint_rounds(out), process)
        process.send_signal(signal.SIGUSR1)
        starts.finish(process, 75)
        # of two generations
        assert len(list(tmp_path.glob("run.h5.checkpoint/*.shard.h5"))) == 2 * 3
    assert starts.same(starts.here(out, fields), whole)
    with Result(out) as result:
        assert [s["ranks"] for s in result.starts()] == [2, 4, 1]
    assert {path.suffix for path in tmp_path.iterdir()} == {".h5", ".held"}


DAMAGES = {
    "shard row": lambda out: flip(newest(out, "shard"), share=0.5),
    "shard head": lambda out: flip(newest(out, "shard"), 0),
    "shard cut": lambda out: os.truncate(newest(out, "shard"), 5000),
    "shard gone": lambda out: newest(out, "shard").unlink(),
    "shard of before": lambda out: shutil.copy(newest(out, "shard", -2), newest(out, "shard")),
    "manifest": lambda out: flip(newest(out, "manifest"), share=0.3),
    "results copy": lambda out: flip(newest(out, "results"), share=0.9),
    # what the newest checkpoint brings back
    "results file gone": lambda out: out.unlink(),
    "results file cut": lambda out: os.truncate(out, 3000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_falls_back(cut, capfd, undisturbed, damage):
    DAMAGES[damage](cut)
    assert starts.same(starts.here(cut), undisturbed)
    pattern = r".* is damaged \(.*\); going back to the one before.*\n"
    err = capfd.readouterr().err
    assert err == "" if "results file" in damage else re.fullmatch(pattern, err)


def test_a_damaged_generation_does_not_displace_whole_ones(cut, undisturbed):
    assert starts.checkpoint_rounds(cut) == [1, 2]
    flip(newest(cut, "shard"), share=0.5)
    starts.cut_after(3, cut)  # goes on from round 1 and saves round 2 once more
    assert starts.checkpoint_rounds(cut) == [1, 2]
    flip(newest(cut, "shard"), share=0.5)
    assert starts.same(starts.here(cut), undisturbed)


def test_what_a_kill_leaves_at_the_beginning_and_at_the_end(tmp_path, undisturbed):
    out = Path(shutil.copy(undisturbed, tmp_path / "run.h5"))
    folder = Path(f"{out}.checkpoint")
    folder.mkdir()
    (folder / "begun_from").write_text("3\n")
    starts.here(out)
    assert not folder.exists()
    folder.mkdir()
    (folder / "notes.txt").write_text("not ours")
    starts.here(out)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    for size in (3000, 0):
        out = tmp_path / f"torn-{size}.h5"
        starts.cut_after(0, out, checkpoint_every="never")
        assert starts.checkpoint_rounds(out) == []
        os.truncate(out, size)
        assert starts.same(starts.here(out), undisturbed)


def test_a_later_version_is_neither_replaced_nor_gone_on_with(
    cut, tmp_path, undisturbed, monkeypatch
):
    out = Path(shutil.copy(undisturbed, tmp_path / "run.h5"))
    with h5py.File(out, "a") as file:  # its checksum is wrong, but the schema is checked first
        file.attrs["schema"] = 99
    Path(f"{out}.checkpoint").mkdir()
    known = f"this version of dpfl_mpi reads up to {result.SCHEMA}"
    refused(f"has schema 99; {known}", starts.here, out)
    with pytest.MonkeyPatch.context() as patch:
        for module in (recorder, result):
            patch.setattr(module, "SCHEMA", 99)
        starts.cut_after(3, tmp_path / "later.h5")
    (tmp_path / "later.h5").unlink()
    refused("has schema 99", starts.here, tmp_path / "later.h5")
    out = starts.here(tmp_path / "x.h5")
    before, version = out.read_bytes(), recorder.NUMERICS
    for module in (result, recorder, checkpoint):
        monkeypatch.setattr(module, "NUMERICS", version + 1)
    versions = f"computed under version {version} of the numbers; it is {version + 1} now"
    refused(versions, starts.here, out)
    assert out.read_bytes() == before
    with Result(starts.here(out, fresh=True)) as anew:
        assert anew.finished and anew.fact("numerics") == str(version + 1)


def test_what_a_save_that_failed_has_left_is_removed(cut):
    left = newest(cut, "shard").with_name("000003.0123456789ab.00000.shard.h5")
    left.write_bytes(bytes(1000))
    with begun(cut) as (_, _, _, checkpoints):
        checkpoints.note_start()
    assert not left.exists() and starts.checkpoint_rounds(cut) == [1, 2]


def test_both_damaged_is_an_error(cut):
    for path in Path(f"{cut}.checkpoint").glob("*.manifest.h5"):
        flip(path, share=0.5)
    whole = "no checkpoint in ... is whole (its manifest, or ...); start over with --fresh"
    refused(whole, starts.here, cut)
    starts.here(cut, fresh=True)


def test_another_run_is_refused_with_the_fields(cut):
    other, fields = starts.small(lr=0.5, seed=7), "(different: lr, partition_seed, seed)"
    refused(f"holds another Run {fields}", starts.here, cut, other)
    cut.unlink()
    refused(f"holds a checkpoint of another run {fields}", starts.here, cut, other)
    refused("different: mixed", starts.here, cut, mixed=True)
    with Result(starts.here(cut, other, fresh=True)) as result:
        assert result.finished and result.run.seed == 7


def test_fresh_starts_over_but_not_when_requeued(cut, tmp_path, monkeypatch):
    other = starts.here(tmp_path / "other.h5", starts.small(seed=7))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert starts.times_started(starts.here(cut, fresh=True)) == 2
    with Result(starts.here(other, fresh=True)) as result:
        assert result.run.seed == 42 and result.finished
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert starts.times_started(starts.here(cut, fresh=True)) == 1


def test_root_alone_knows_that_a_job_was_requeued(tmp_path):
    """Not every launcher hands SLURM_RESTART_COUNT on to all ranks: they must stay in step."""
    out = tmp_path / "run.h5"
    words = 'rank="${PMI_RANK:-$OMPI_COMM_WORLD_RANK}"'
    words += '; [ "$rank" != 0 ] || export SLURM_RESTART_COUNT=1; exec "$@"'
    starts.finish(starts.start(2, ["sh", "-c", words, "sh", *starts.command(out, fresh=True)]))
    assert Result(out).finished


def test_every_kind_of_state_comes_back():
    graph = CollaborationGraph.from_lists([[1, 2], [], [0], [5], [3, 0], [1]])
    arrays = {"w": torch.rand(6, 16), "mix": np.arange(6), "on": torch.arange(6) % 2 == 0}
    arrays |= {"row": torch.rand(16, dtype=torch.float64), "table": np.eye(3)}
    arrays |= {"empty": np.zeros((0, 4), np.int64), "nothing": np.zeros(0)}
    without_axes = {"beta": torch.tensor(0.5, dtype=torch.float64), "seven": np.array(7)}
    arrays |= without_axes
    scalars = {"count": 3, "share": np.float64(0.1), "yes": True, "name": "x", "none": None}
    with h5py.File(io.BytesIO(checkpoint.hdf5_bytes({"omega": graph} | arrays | scalars))) as file:
        back = {name: checkpoint.stored(file[name], torch.device("cpu")) for name in file}
    for name, value in arrays.items():
        assert type(back[name]) is type(value)
        one, two = checkpoint.numpy_of(back[name]), checkpoint.numpy_of(value)
        assert (one.shape, one.dtype, one.tobytes()) == (two.shape, two.dtype, two.tobytes())
    assert back["omega"].indptr.tolist() == graph.indptr.tolist()
    assert back["omega"].senders.tolist() == graph.senders.tolist()
    assert [back[n] for n in scalars] == [3, 0.1, True, "x", None]
    assert type(back["share"]) is np.float64  # which makes float64 of float32


def test_checkpoint_every_takes_rounds_a_time_or_never():
    assert parse("checkpoint_every", "3").rounds == 3
    for text, seconds in {"90s": 90, "1.5min": 90, "2h": 7200, "never": np.inf}.items():
        every = parse("checkpoint_every", text)
        assert (str(every), every.seconds) == (text, seconds)
    allowed = "--checkpoint_every is ...; allowed is a number of rounds"
    for wrong in ("", "0", "-1", "5 minutes", "min", "1d"):
        refused(allowed, Job, checkpoint_every=wrong)


def test_nothing_is_replaced_or_deleted_once_the_lock_is_lost(tmp_path):
    out, lost = tmp_path / "run.h5", []

    def still_ours() -> None:
        if lost:
            raise UserError("another run has the lock")

    with begun(out, still_ours) as (fed, state, recorder, store):
        store.save(fed, state, recorder)
        (theirs := store.folder / "000001.0123456789ab.results.h5").touch()
        lost.append(True)
        anew = Recorder(out, fed.run, {"parameters": 2}, {"time": "later"})  # the other run's
        # `recorder` would refuse before `save` asks
        refused("has the lock", store.save, fed, state, anew)
        refused("has the lock", store.clear)
        assert theirs.exists() and starts.checkpoint_rounds(out) == [0]
        anew.abandon()
        before = out.read_bytes()
        refused("has the lock", recorder.copy, tmp_path / "later.h5")
    assert out.read_bytes() == before


SHIPPED = {"dataset": "cifar10", "partition": "pathological", "classes_per_client": 2}


def stage(seed: int, labels: int = 0) -> None:
    """Prepare CIFAR-10's file from small drawn pictures; `labels` changes their classes."""
    x = np.random.default_rng(seed).integers(0, 255, (640, 8, 8, 3)).astype(np.uint8)
    i = np.arange(640)
    data = arrays_of(x, i // (1 + labels) % 10, test=i >= 480)
    prepare.write(data, "cifar10", Path("data/cifar10.h5"))


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """The small run on a shipped data set, whose content the key of the Run does not have."""
    monkeypatch.chdir(tmp_path)
    stage(1)
    fields = {n: v for n, v in starts.small(**SHIPPED).items() if n != "data"}
    assert "data" not in Run(**fields).resolve().key()
    return fields


def test_a_checkpoint_is_not_mixed_with_data_made_anew(shipped):
    whole, out = starts.here(Path("whole.h5"), shipped), Path("run.h5")
    starts.cut_after(3, out, shipped)
    content = "content of the data"
    for again, different in (((2, 0), content), ((1, 1), f"{content}, partition")):
        stage(*again)
        other = f"a checkpoint of a run on other data (different: {different})"
        refused(f"{other}; bring back the data", starts.here, out, shipped)
    stage(1)
    assert starts.same(starts.here(out, shipped), whole)


def test_a_finished_result_of_other_data_is_not_found(shipped, capsys):
    out = starts.here(Path("run.h5"), shipped)
    before, then = out.read_bytes(), file_sha256(Path("data/cifar10.h5"))
    stage(2)
    current = file_sha256(Path("data/cifar10.h5"))
    hashes = f"data/cifar10.h5 has the sha256 {current[:12]} now, and had {then[:12]} then"
    refused(f"other data: {hashes}; bring back those data", starts.here, out, shipped)
    assert then != current and out.read_bytes() == before
    Path("data/cifar10.h5").unlink()
    starts.here(out, shipped, quiet=False)  # a result stands without its data
    assert "already finished" in capsys.readouterr().out and out.read_bytes() == before
    stage(2)
    with Result(starts.here(out, shipped, fresh=True)) as result:
        assert result.fact("data_sha256") == current and len(result.starts()) == 1
    starts.here(out, shipped, quiet=False)
    assert "already finished" in capsys.readouterr().out


def test_tuning_does_not_start_from_models_of_other_data(shipped, capfd):
    fields = shipped | {"method": "local", "rounds": 2}
    base = starts.here(Run(**fields).path("results"), fields, save_models=True)
    stage(2)
    tuned = fields | {"finetune_epochs": 1}
    beside = starts.here(Path("tuned.h5"), tuned, results="results")
    why = "of other data or another partition: its rounds are computed here"
    assert why in capfd.readouterr().err
    base.unlink()
    assert starts.same(beside, starts.here(Path("alone.h5"), tuned, results="results"))


def test_a_full_disk_names_the_round_that_is_whole(tmp_path, monkeypatch):
    with begun(tmp_path / "run.h5", fresh=True) as (fed, state, recorder, store):
        store.save(fed, state, recorder)
        monkeypatch.setattr(recorder, "copy", Mock(side_effect=OSError(errno.ENOSPC, "no room")))
        error = refused("", store.save, fed, state, recorder)
    full = f"the checkpoint in {store.folder} cannot be written: No space left on device"
    again = "the same command without --fresh goes on from there"
    assert error == f"{full}; the one of round 0 is whole, and {again}"
    with begun(tmp_path / "run.h5") as (fed, state, recorder, store):
        state["shared"]["odd"] = {1}
        with pytest.raises(TypeError, match="a checkpoint cannot hold state/odd: it is a set"):
            store.save(fed, state, recorder)


def test_a_checkpoint_is_kept_when_its_time_has_come(tmp_path, monkeypatch):
    """Every five minutes, counted from the last one that was kept."""
    now, saved = [0.0], []
    clock = SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]})
    monkeypatch.setattr(checkpoint, "time", clock)
    with begun(tmp_path / "run.h5", checkpoint_every="5min") as (fed, state, recorder, store):
        for now[0] in (0, 299, 300, 301, 599, 600, 1000):
            saved.append(store.save(fed, state, recorder, stop=False)[0])
    assert saved == [False, False, True, False, False, True, True]


@pytest.mark.parametrize("group", ["finetune", "newcomers"])
def test_what_follows_the_rounds_is_repeated_by_the_next_start(group, tmp_path):
    """A run that ends while it tunes, or while newcomers train, goes on after its last round."""
    fields, series = starts.small(finetune_epochs=2, newcomers=0.4), Record.series
    whole, out = starts.here(tmp_path / "whole.h5", fields), tmp_path / "run.h5"

    def cut(record, name, *noted, **more):
        if name == group:
            record.parts.close()
            raise starts.Cut
        series(record, name, *noted, **more)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(starts.Cut):
        patch.setattr(Record, "series", cut)
        starts.here(out, fields, checkpoint_every="1")
    assert starts.checkpoint_rounds(out) == [3, 4]
    assert starts.same(starts.here(out, fields), whole) and starts.times_started(out) == 2
