"""Kills without notice: of a rank, of root, of mpirun, at random moments; a full disk; clients that diverge."""

import contextlib
import mmap
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import starts

from dpfl_mpi.federation import Federation
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.storage.lock import born
from dpfl_mpi.survival.shm import ABANDONED_S, mapped, remove_left

# who, and while it does what
KILLS = ("rank", "start"), ("root", "writing"), ("mpirun", "round"), ("rank", "writing")
SLOW = """
from dpfl_mpi.survival import checkpoint
def write(path, data):  # in two halves, so that it can be seen
    with checkpoint.replacing(path) as part:
        part.write_bytes(data[: len(data) // 2])
        time.sleep(0.05)
        part.write_bytes(data)
checkpoint.write = write
"""


def kill_once(out: Path, fields: dict, target: str, moment: str, rng: random.Random, segments: set[str]) -> bool:
    """Start (or continue) the run and kill something of it at a random moment; return whether it was killed before its end."""
    words = starts.held("False", out, -1, SLOW, fields=fields, checkpoint_every=1, quiet=True)
    process = starts.start(2, words)
    starts.wait_for(lambda: process.poll() is not None or len(starts.ranks_of(process.pid)) == 2)
    victims = starts.ranks_of(process.pid)
    goal = max(starts.checkpoint_rounds(out), default=-1) + rng.randint(1, 6)
    while moment != "start" and process.poll() is None and max(starts.checkpoint_rounds(out), default=-1) < goal:
        time.sleep(0.002)
    while moment == "writing" and process.poll() is None and not list(Path(f"{out}.checkpoint").glob(".*.part")):
        time.sleep(0.002)
    time.sleep(rng.random() * {"start": 2, "round": 0.3, "writing": 0.05}[moment])
    for victim in victims:
        segments.update(mapped(str(victim)))
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill({"rank": victims[-1:], "root": victims[:1], "mpirun": [process.pid]}[target][0], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    # ranks follow a killed mpirun by themselves
    starts.wait_for(lambda: not any(map(born, victims)), timeout=60)
    assert process.returncode != 2, err
    return process.returncode != 0


@pytest.mark.timeout(900)
def test_kills_at_random_moments_change_nothing(tmp_path):
    fields, rng, segments, out = starts.small(rounds=25), random.Random(6), set(), tmp_path / "run.h5"
    whole = starts.here(tmp_path / "whole.h5", fields)
    for target, moment in KILLS:
        while not kill_once(out, fields, target, moment, rng, segments):
            assert starts.same(out, whole)
            out.unlink()
        if out.exists():
            with Result(out) as result:  # it opens, whatever happened
                assert result.state.startswith(("running", "stopped", "finished"))
    for name in filter(os.path.exists, segments):
        os.utime(name, (1, 1))  # what was killed counts as abandoned only by its age
    starts.finish(starts.start(2, starts.command(out, fields, quiet=True)))
    assert starts.same(out, whole)
    assert segments and not [name for name in segments if os.path.exists(name)]  # nothing of ours stays in /dev/shm
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.h5", "whole.h5"]


def test_only_what_nobody_uses_is_removed(tmp_path):
    """Of what is named as MPICH's in /dev/shm: an old file goes; one just made or mapped by a process, a link and what it leads to stay."""
    names = [Path(f"/dev/shm/mpich_shm_test_{os.getpid()}_{i}") for i in range(4)]
    victim = tmp_path / "victim"
    try:
        for path in (*names[:3], victim):
            path.write_bytes(bytes(4096))
        names[3].symlink_to(victim)
        for path in (*names[:2], names[3], victim):
            os.utime(path, (time.time() - 2 * ABANDONED_S,) * 2, follow_symlinks=False)
        odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))  # another program's, not in UTF-8
        odd.write_bytes(bytes(4096))
        with contextlib.ExitStack() as stack:
            for path in (names[1], odd):
                file = stack.enter_context(path.open("rb"))
                stack.enter_context(mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ))
            remove_left()
        assert [path.exists() for path in (*names, victim)] == [False, True, True, True, True]
    finally:
        for path in names:
            path.unlink(missing_ok=True)


@pytest.fixture
def small_disk(tmp_path):
    """A folder with 3 MB of room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_a_clear_error_and_the_last_checkpoint_is_whole(small_disk, undisturbed):
    """Full from round 3 on; with room again the run goes on."""
    out, filler = small_disk / "run.h5", small_disk / "filler"
    there = f"os.chdir({str(small_disk)!r})"
    process = starts.start(2, starts.held("not os.path.exists('full')", out, before=there, checkpoint_every=1))
    starts.wait_for(lambda: 2 in starts.checkpoint_rounds(out), process)
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    (small_disk / "full").touch()
    message = starts.finish(process, 2)
    assert "cannot be written: No space left on device" in message and message.count("\n") == 1
    assert 2 in starts.checkpoint_rounds(out)
    with Result(out) as result:
        assert result.last_round >= 2
    filler.unlink()
    assert starts.same(starts.here(out), undisturbed)


def poisoned(monkeypatch: pytest.MonkeyPatch, *places: tuple[int, int, float]) -> None:
    """Let a number of a client's model be another one after its training: (round, client, number)."""
    train = Federation.local_opt

    def local_opt(fed, w_KW, *args, **kwargs):
        w_KW = train(fed, w_KW, *args, **kwargs)
        for t, client, number in places:
            if fed.round == t:
                w_KW[np.flatnonzero(fed.ids == client), 5] = number
        return w_KW

    monkeypatch.setattr(Federation, "local_opt", local_opt)


def test_a_diverged_client_keeps_its_scores_where_the_others_are_tuned(tmp_path, monkeypatch):
    """From the base Run's file as when its rounds are computed again."""
    poisoned(monkeypatch, (1, 2, np.nan))
    fields = starts.small(on_divergence="exclude", method="local")
    base = starts.here(Run(**fields).resolve().path(tmp_path), fields, save_models=True)
    tuned = fields | {"finetune_epochs": 2}
    from_file = starts.here(tmp_path / "file.h5", tuned, results=str(tmp_path))
    assert starts.same(from_file, starts.here(tmp_path / "again.h5", tuned, results=str(tmp_path / "elsewhere")))
    with Result(from_file) as result, Result(base) as before:
        assert np.isfinite(result["best/test_acc"]).all()
        assert result["best/test_acc"][2] == before["best/test_acc"][2]
        assert result["client/diverged_round"].tolist() == [-1, -1, 1, -1, -1, -1]


def test_a_diverged_client_can_be_excluded_also_after_going_on(tmp_path, monkeypatch, digits_file):
    """It is scored with its last finite best, and no one averages with it."""
    poisoned(monkeypatch, (1, 2, np.nan), (2, 4, 5000.0))  # finite, but beyond what exact sums hold
    more = {"data": str(digits_file), "min_per_class": None, "budget": "inf", "augment": True}
    fields = starts.small(on_divergence="exclude", **more)
    whole, out = starts.here(tmp_path / "whole.h5", fields), tmp_path / "run.h5"
    starts.cut_after(3, out, fields, checkpoint_every="2")
    assert starts.same(starts.here(out, fields), whole)
    with Result(out) as result:
        assert result["client/diverged_round"].tolist() == [-1, -1, 1, -1, 2, -1]
        assert result.graph(0)[:, 2].any() and result.graph(0)[:, 4].any()  # they had been chosen
        for t, gone in ((1, [2]), (2, [2, 4]), (3, [2, 4]), (4, [2, 4])):
            assert not result.graph(t)[gone].any() and not result.graph(t)[:, gone].any()
        assert result.graph(4).any()
        assert result["best/round"][2] == 0 and result["best/round"][4] <= 1
        assert result["best/test_acc"][2] == result["round/test_acc"][0, 2]
        assert np.isnan(result["round/val_acc"][1:, 2]).all() and np.isnan(result["round/val_acc"][2:, 4]).all()
        assert np.isfinite(np.delete(result["round/val_loss"], [2, 4], 1)).all()
        assert np.isfinite(result["model/best"]).all() and np.isfinite(result["best/test_acc"]).all()
