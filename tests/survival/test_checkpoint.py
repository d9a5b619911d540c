"""Checkpoints: what goes in comes out, under any number of ranks, damaged or not, and only for the same Run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest
import starts
import torch
from mpi4py import MPI

from dpfl_mpi.engine.build import build
from dpfl_mpi.errors import UserError
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.world import World
from dpfl_mpi.plugins import names
from dpfl_mpi.results import Result
from dpfl_mpi.results.recorder import Recorder
from dpfl_mpi.settings import Job, Run
from dpfl_mpi.settings.fields import check
from dpfl_mpi.settings.texts import every
from dpfl_mpi.storage.files import replacing
from dpfl_mpi.survival import values
from dpfl_mpi.survival.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, computed without a stop."""
    return starts.here(tmp_path_factory.mktemp("undisturbed") / "run.h5")


def newest(out: Path, kind: str) -> Path:
    """Return the newest generation's file of a kind: manifest, shard or results."""
    return sorted(Path(f"{out}.checkpoint").glob(f"*.{kind}.h5"))[-1]


def test_a_cut_run_goes_on_to_the_same_numbers(tmp_path, monkeypatch, undisturbed):
    out = tmp_path / "run.h5"
    starts.cut_after(monkeypatch, 3, out)
    assert starts.checkpoint_rounds(out) == [1, 2]  # two generations; round 3 was recorded, not kept
    with Result(out) as result:
        assert len(result["round/number"]) == 4
    starts.here(out)
    assert starts.same(out, undisturbed)
    with Result(out) as result:
        assert len(result.starts()) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.h5"]  # neither checkpoints nor lock are left


def test_ranks_may_change(tmp_path):
    fields = starts.small(rounds=20)
    whole, out = starts.here(tmp_path / "whole.h5", fields), tmp_path / "run.h5"
    for ranks, t in ((2, 1), (3, 4)):
        process = starts.start(ranks, starts.command(out, fields, checkpoint_every=1))
        starts.wait_for(lambda t=t: max(starts.checkpoint_rounds(out), default=0) >= t, process)
        process.send_signal(signal.SIGUSR1)
        starts.finish(process, 75)
    starts.here(out, fields)
    assert starts.same(out, whole)
    with Result(out) as result:
        assert [s["ranks"] for s in result.starts()] == [2, 3, 1]


@pytest.mark.parametrize("method", sorted(set(names("method")) - {"dpfl", "fedbn", "replay"}))
def test_every_method_goes_on(tmp_path, monkeypatch, method):
    fields = starts.small(method=method, tau_train=2 if method == "fedrep" else 1)  # its head needs an epoch, too
    starts.cut_after(monkeypatch, 2, tmp_path / "run.h5", fields)
    assert starts.same(starts.here(tmp_path / "run.h5", fields), starts.here(tmp_path / "whole.h5", fields))


def test_more_ranks_than_clients(tmp_path, monkeypatch):
    out, fields = tmp_path / "run.h5", starts.small(clients=3, budget=2)
    starts.cut_after(monkeypatch, 2, out, fields)
    assert starts.complete(4, out, fields, quiet=True) == ""
    assert starts.same(out, starts.here(tmp_path / "whole.h5", fields))


def flip(path: Path, where: float) -> None:
    """Change one byte, at this share of the file."""
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda out: flip(newest(out, "shard"), 0.5),
        lambda out: flip(newest(out, "shard"), 0.0),
        lambda out: newest(out, "shard").write_bytes(newest(out, "shard").read_bytes()[:5000]),
        lambda out: newest(out, "shard").unlink(),
        lambda out: flip(newest(out, "manifest"), 0.3),
        lambda out: newest(out, "manifest").write_bytes(b""),
        lambda out: flip(newest(out, "results"), 0.9),
    ],
    ids=["shard row", "shard head", "shard cut", "shard gone", "manifest", "manifest empty", "results copy"],
)
def test_a_damaged_newest_falls_back(tmp_path, monkeypatch, capfd, undisturbed, damage):
    out = tmp_path / "run.h5"
    starts.cut_after(monkeypatch, 3, out)
    damage(out)
    starts.here(out)
    warnings = [line for line in capfd.readouterr().err.splitlines() if line]
    assert len(warnings) == 1
    assert "damaged; going back to the one before" in warnings[0]
    assert starts.same(out, undisturbed)


def test_a_damaged_generation_does_not_displace_whole_ones(tmp_path, monkeypatch, undisturbed):
    """Rounds 2 and 3 are kept, 3 is damaged: after two more saves the two kept are those, and both whole."""
    out = tmp_path / "run.h5"
    starts.cut_after(monkeypatch, 3, out)
    assert starts.checkpoint_rounds(out) == [1, 2]
    flip(newest(out, "shard"), 0.5)
    starts.cut_after(monkeypatch, 3, out)  # goes on from round 1 and saves round 2 once more
    assert starts.checkpoint_rounds(out) == [1, 2]
    flip(newest(out, "shard"), 0.5)
    starts.here(out)
    assert starts.same(out, undisturbed)


def test_a_first_round_torn_while_it_was_written_is_no_obstacle(tmp_path, monkeypatch, undisturbed):
    out = tmp_path / "run.h5"
    starts.cut_after(monkeypatch, 0, out, checkpoint_every="never")
    out.write_bytes(out.read_bytes()[:3000])
    starts.here(out)
    assert starts.same(out, undisturbed)


def test_what_a_kill_at_the_very_end_leaves_is_removed(tmp_path, undisturbed):
    out = tmp_path / "run.h5"
    out.write_bytes(undisturbed.read_bytes())
    folder = Path(f"{out}.checkpoint")
    folder.mkdir()
    (folder / "begun_from").write_text("3\n")
    starts.here(out)
    assert not folder.exists()


def test_both_damaged_is_an_error(tmp_path, monkeypatch):
    out = tmp_path / "run.h5"
    starts.cut_after(monkeypatch, 3, out)
    for path in Path(f"{out}.checkpoint").glob("*.manifest.h5"):
        flip(path, 0.5)
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole; start over with --fresh"):
        starts.here(out)
    starts.here(out, fresh=True)


@pytest.mark.parametrize("harm", [lambda out: out.unlink(), lambda out: out.write_bytes(out.read_bytes()[:3000])])
def test_a_lost_or_torn_results_file_comes_back(tmp_path, monkeypatch, undisturbed, harm):
    out = tmp_path / "run.h5"
    starts.cut_after(monkeypatch, 2, out)
    harm(out)
    starts.here(out)
    assert starts.same(out, undisturbed)


def test_another_run_is_refused_with_the_fields(tmp_path, monkeypatch):
    out = tmp_path / "run.h5"
    starts.cut_after(monkeypatch, 2, out)
    other = starts.small(lr=0.5, seed=7)
    with pytest.raises(UserError, match=r"holds another Run \(different: lr, partition_seed, seed\)"):
        starts.here(out, other)
    out.unlink()
    with pytest.raises(UserError, match=r"holds a checkpoint of another run \(different: lr, partition_seed, seed\)"):
        starts.here(out, other)
    with pytest.raises(UserError, match=r"different: mixed"):
        starts.here(out, mixed=True)
    starts.here(out, other, fresh=True)
    with Result(out) as result:
        assert result.finished and result.run.seed == 7


def test_fresh_starts_over_but_not_when_requeued(tmp_path, monkeypatch):
    out = tmp_path / "run.h5"
    starts.cut_after(monkeypatch, 2, out, fresh=True)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    starts.here(out, fresh=True)
    with Result(out) as result:
        assert len(result.starts()) == 2
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    starts.here(out, fresh=True)
    with Result(out) as result:
        assert len(result.starts()) == 1


def test_fresh_is_not_forgotten_where_a_requeued_job_has_nothing_to_go_on_from(tmp_path, monkeypatch):
    out = tmp_path / "run.h5"
    starts.here(out, starts.small(seed=7))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # stopped before it had replaced the old file
    starts.here(out, fresh=True)
    with Result(out) as result:
        assert result.run.seed == 42 and result.finished


def test_root_alone_knows_that_a_job_was_requeued(tmp_path):
    """Not every launcher hands SLURM_RESTART_COUNT on to all ranks: they must stay in step."""
    out = tmp_path / "run.h5"
    words = '[ "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" != 0 ] || export SLURM_RESTART_COUNT=1; exec "$@"'
    starts.finish(starts.start(2, ["sh", "-c", words, "sh", *starts.command(out, fresh=True)]))
    with Result(out) as result:
        assert result.finished


def test_every_kind_of_state_comes_back(tmp_path):
    world, job = World(MPI.COMM_SELF), Job(out=str(tmp_path / "run.h5"))
    run = Run(**starts.small()).resolve()
    parts = build(run, job, world)
    rng = torch.Generator().manual_seed(0)
    parts.begin_round(5)
    k = len(parts.ids)
    parts.training.momentum = {"w": torch.rand(k, parts.backend.ensemble.width, generator=rng), "v": torch.rand(k, 16)}
    parts.scoring.best.normal_(generator=rng)
    parts.scoring.best_round[:] = np.arange(k)
    parts.members.alive[2], parts.members.most_senders[2], parts.members.diverged_round[2] = False, 0, 4
    graph = CollaborationGraph.from_lists([[1, 2], [], [0], [5], [3, 0], [1]])
    state = {
        "client": {"w": torch.rand(k, 16), "mix": np.arange(k), "on": torch.arange(k) % 2 == 0},
        "shared": {
            "omega": graph,
            "row": torch.rand(16, dtype=torch.float64),
            "table": np.eye(3),
            "empty": np.zeros((0, 4), np.int64),
            "count": 3,
            "share": np.float64(0.1),
            "yes": True,
            "name": "x",
            "none": None,
        },
    }
    recorder = Recorder(tmp_path / "run.h5", run, {}, {"time": "now"})
    Checkpoints(tmp_path / "run.h5", run, job, world).save(parts, state, recorder)
    recorder.abandon()

    parts.close()
    fresh = build(run, job, world)
    back = Checkpoints(tmp_path / "run.h5", run, job, world).restore(fresh)
    assert back is not None
    assert fresh.round == 5
    for name, value in state["client"].items():
        assert type(back["client"][name]) is type(value)
        assert values.numpy_of(back["client"][name]).tobytes() == values.numpy_of(value).tobytes()
    shared = back["shared"]
    assert shared["omega"].indptr.tolist() == graph.indptr.tolist()
    assert shared["omega"].senders.tolist() == graph.senders.tolist()
    assert torch.equal(shared["row"], state["shared"]["row"])
    assert np.array_equal(shared["table"], np.eye(3)) and shared["empty"].shape == (0, 4)
    assert [shared[n] for n in ("count", "share", "yes", "name", "none")] == [3, 0.1, True, "x", None]
    assert [list(part) for part in parts.state()] == [
        ["best", "best_round", "best_val", "best_test", "best_confusion", "last_test", "epochs", "steps"],
        ["alive", "budget", "diverged_round"],
    ]
    kept, restored = ({**mine, **same} for mine, same in (parts.state(), fresh.state()))
    for name in kept:
        a, b = (values.numpy_of(f[name]) for f in (kept, restored))
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name
    assert all(torch.equal(fresh.training.momentum[n], parts.training.momentum[n]) for n in ("w", "v"))
    fresh.close()

    with (
        pytest.raises(TypeError, match="cannot hold state/odd: it is a set"),
        h5py.File(tmp_path / "x.h5", "w") as file,
    ):
        values.write(file, "state/odd", {1})


def test_files_are_plain_hdf5(tmp_path, monkeypatch):
    out = tmp_path / "run.h5"
    starts.cut_after(monkeypatch, 2, out)
    seen = []

    def check(_, item):
        if isinstance(item, h5py.Dataset):
            seen.append(item.name)
            assert item.dtype.kind in "biuf"  # no opaque and no object types, where a pickle could hide

    for kind in ("shard", "manifest"):
        with h5py.File(newest(out, kind), "r") as file:
            file.visititems(check)
    assert {"/state/w", "/momentum/w", "/federation/best", "/client/shard", "/state/omega/indptr"} <= set(seen)
    with h5py.File(newest(out, "manifest"), "r") as file:
        assert len(json.loads(file.attrs["shards"])) == 1


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="no space"), replacing(tmp_path / "file") as path:
        path.write_text("half")
        raise OSError("no space")
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_every_takes_rounds_a_time_or_never():
    assert every("3") == ("rounds", 3)
    assert every("90s") == ("seconds", 90)
    assert every("1.5min") == ("seconds", 90)
    assert every("2h") == ("seconds", 7200)
    assert every("never") == ("never", 0)
    for wrong in ("", "0", "-1", "5 minutes", "min", "1d"):
        assert every(wrong) is None
        with pytest.raises(UserError, match=r"--checkpoint_every is .*; allowed is a number of rounds"):
            check(Job(checkpoint_every=wrong))


def test_never_keeps_none(tmp_path, monkeypatch):
    out = tmp_path / "run.h5"
    starts.cut_after(monkeypatch, 2, out, checkpoint_every="never")
    assert starts.checkpoint_rounds(out) == []
