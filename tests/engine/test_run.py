"""End to end: the same numbers for any number of ranks, DPFL against Algorithm 1 in plain Python, identities between settings."""

import json

import numpy as np
import pytest
import reference
import torch
from launch import federation, mpirun, run_here

from dpfl_mpi import streams
from dpfl_mpi.results import Result
from dpfl_mpi.settings.fields import to_flags

ROW = 4816 * 4  # bytes of a row of the perceptron on 8x8 images
BASE = {
    "dataset": "image_folder", "model": "mlp", "augment": False, "clients": 10, "rounds": 3, "tau_init": 2, "tau_train": 1,
    "budget": 4, "seed": 5,
}  # fmt: skip
KINDS = ("base", "cnn", "inf", "eight", "few")
NARROW = 4.5 * ROW / 2**30  # four rows: with ten clients on three ranks one at a time for each client of a rank


def fields_of(kind, digits_file, colour_file):
    """The runs that several numbers of ranks compute."""
    base = BASE | {"data": str(digits_file)}
    cnn = {"data": str(colour_file), "model": "cnn", "augment": True, "clients": 5, "classes_per_client": 2}
    more = {
        "base": {},
        "cnn": cnn | {"rounds": 1, "tau_init": 1},
        "inf": {"budget": "inf", "rounds": 2},
        "eight": {"budget": 8, "rounds": 2, "ggc_period": 2, "ggc_repeats": 2},
        "few": {"clients": 3, "rounds": 2},
    }
    return base | more[kind]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, digits_file, colour_file):
    """Each run on one rank, where nothing is sent."""
    folder = tmp_path_factory.mktemp("one")
    paths = {}
    for kind in KINDS:
        fields = fields_of(kind, digits_file, colour_file)
        paths[kind] = run_here(folder / f"{kind}.h5", fields, save_models=True, mixed=True)
    return paths


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_answer_does_not_know_the_ranks(ranks, one_rank, tmp_path, digits_file, colour_file):
    """Everything but provenance is bitwise the same, saved models included.

    Eight ranks for three clients leave ranks empty. On three ranks B_c = inf and B_c = 8 go through a window so narrow that
    every exchange runs in passes, so that is the same answer as well.
    """
    kinds = {2: ("base", "cnn"), 3: KINDS, 8: ("base", "few")}[ranks]
    window = {"inf": NARROW, "eight": NARROW, "wide": 1.0}  # which takes all at once
    runs = []
    for name in (*kinds, "wide") if ranks == 3 else kinds:
        job = {"out": str(tmp_path / f"{name}.h5"), "save_models": True, "mixed": True, "quiet": True}
        if name in window:
            job["window_gb"] = window[name]
        runs.append((fields_of("inf" if name == "wide" else name, digits_file, colour_file), job))
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    env = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    done = mpirun(ranks, "-m", "mpi4py", "tests/many.py", tmp_path / "runs.json", env=env, timeout=250)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for kind in kinds:
        with Result(one_rank[kind]) as a, Result(tmp_path / f"{kind}.h5") as b:
            assert Result.differences(a, b) == []
            assert Result.same_numbers(a, b)
            assert a.starts()[0]["ranks"] == 1 and b.starts()[0]["ranks"] == ranks
            assert a["traffic/bytes_rma"].sum() == 0 < b["traffic/bytes_rma"].sum()
            assert a["traffic/models_received"].sum() > 0
    if ranks == 3:
        with Result(tmp_path / "inf.h5") as narrow, Result(tmp_path / "wide.h5") as wide:
            assert Result.same_numbers(narrow, wide)
            # in passes a sender that several clients of a rank want is sent once per pass: so there were passes
            assert narrow["traffic/bytes_rma"].sum() > wide["traffic/bytes_rma"].sum()


def test_the_command(tmp_path, digits_file):
    """`python -m dpfl_mpi` on two ranks: one line per round, a summary, one file under the name of the Run; then nothing to do."""
    done = mpirun(2, "-m", "dpfl_mpi", *to_flags(BASE | {"data": digits_file}), "--results", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [["round", str(t)] for t in range(4)]
    told = "test accuracy", "spread over clients", "edges", "models received", "seconds", "results", "analysis/"
    for words in told:
        assert words in done.stdout
    (path,) = tmp_path.glob("*.h5")
    assert path.name.startswith("image_folder-pathological-dpfl-B4-s5-") and str(path) in done.stdout
    with Result(path) as result:
        assert f"{100 * result['best/test_acc'].mean():.2f} %" in done.stdout
        assert result.finished and len(result.starts()) == 1


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"budget": "inf"},
        {"budget": 3, "ggc_period": 2},
        {"budget": 3, "ggc_period": 2, "ggc_off_rounds": "skip", "clip_norm": 0.5},
    ],
    ids=["B4", "inf", "reuse", "skip"],
)
def test_dpfl_is_algorithm_1(tmp_path, digits_file, more):
    """Against tests/reference.py on the same batches, orders and coins: every graph and every accuracy of every round."""
    fields = BASE | {"data": str(digits_file), "clients": 6} | more
    path = run_here(tmp_path / "run.h5", fields)
    with federation(fields) as fed:
        run = fed.run
        twin = reference.DPFL(
            fed.ensemble.module,
            fed.common_row()[0, : fed.ensemble.size].numpy(),
            [data_of(fed, k) for k in range(6)],
            fed.partition.class_counts.sum(1) / fed.partition.class_counts.sum(),
            float(str(run.budget)),
            order=lambda k, e: streams.stream(5, streams.ORDER, k, e).permutation(len(fed.partition.of("train", k))),
            shuffle=lambda k, S, t: [int(j) for j in streams.stream(5, streams.CANDIDATES, k, 1000 * t).permutation(S)],
            coins=lambda k, t: streams.stream(5, streams.COIN, k, 1000 * t).random(6),
            **{name: getattr(run, name) for name in ("lr", "momentum", "weight_decay", "clip_norm", "batch_size")},
            period=run.ggc_period,
            off_rounds=run.ggc_off_rounds,
        )
    twin.run(run.rounds, run.tau_init, run.tau_train)
    with Result(path) as result:
        for t in range(run.rounds + 1):
            chosen = result.chosen(t)
            assert [chosen.of(k).tolist() for k in range(6)] == twin.chosen[t], f"round {t}"
        assert np.array_equal(result["round/val_acc"], twin.val_acc)
        assert np.array_equal(result["round/test_acc"], twin.test_acc)
        assert result.graph(0).any()


def data_of(fed, k):
    """Client k's data as plain tensors, from the partition and the file."""
    import h5py

    out = {}
    with h5py.File(fed.run.data) as file:
        for part, stored in (("train", "train"), ("val", "train"), ("test", "test")):
            rows = fed.partition.of(part, k)
            x = torch.from_numpy(file[f"{stored}/images"][:][rows]).float() / 255
            out[f"{part}_x"] = ((x - 0.305) / 0.376).permute(0, 3, 1, 2)
            out[f"{part}_y"] = torch.from_numpy(file[f"{stored}/labels"][:][rows].astype(np.int64))
    return out


def test_blocks_of_clients(tmp_path, digits_file, colour_file, one_rank):
    """Four clients as one tensor program: the same graphs, losses but for rounding."""
    for kind in ("base", "cnn"):
        path = run_here(tmp_path / f"{kind}.h5", fields_of(kind, digits_file, colour_file), block=4)
        with Result(one_rank[kind]) as a, Result(path) as b:
            assert b.starts()[0]["block"] == 4
            for t in range(a.run.rounds + 1):
                assert np.array_equal(a.graph(t), b.graph(t))
            np.testing.assert_allclose(a["round/val_loss"], b["round/val_loss"], rtol=1e-4)
            np.testing.assert_allclose(a["round/train_loss"], b["round/train_loss"], rtol=1e-4)
            assert np.array_equal(a["round/gradient_steps"], b["round/gradient_steps"])
            np.testing.assert_allclose(a["round/test_acc"], b["round/test_acc"], atol=0.02)


def test_seeds_differ(tmp_path, digits_file, one_rank):
    """Another seed on the same partition gives other numbers, and the same Run computed again the same file."""
    fields = BASE | {"data": str(digits_file)}
    again = run_here(tmp_path / "again.h5", fields, save_models=True, mixed=True)
    other = run_here(tmp_path / "other.h5", fields | {"seed": 6, "partition_seed": 5, "rounds": 1})
    with Result(one_rank["base"]) as a, Result(again) as b, Result(other) as c:
        assert Result.same_numbers(a, b)
        assert not Result.same_numbers(a, c)
        assert np.array_equal(a["client/class_counts"], c["client/class_counts"])
        assert not np.array_equal(a["round/val_loss"][0], c["round/val_loss"][0])


def test_off_rounds(tmp_path, digits_file):
    """P = 2: an odd round searches nothing; `reuse` fetches and averages the last choice, `skip` does neither."""
    fields = BASE | {"data": str(digits_file), "rounds": 4, "ggc_period": 2}
    reuse = run_here(tmp_path / "reuse.h5", fields, mixed=True)
    skip = run_here(tmp_path / "skip.h5", fields | {"ggc_off_rounds": "skip"}, mixed=True)
    with Result(reuse) as a, Result(skip) as b:
        for result in (a, b):
            evaluated = result["graph/evaluations"].sum(1)
            assert evaluated[[1, 3]].tolist() == [0, 0] and (evaluated[[0, 2, 4]] > 0).all()
        degrees = np.diff(a["graph/chosen/indptr"], axis=1)
        received = a["traffic/models_received"]
        assert np.array_equal(received[1], degrees[0])  # before the first search: Omega
        assert np.array_equal(received[2], degrees[0])  # a search looks at all of Omega
        assert np.array_equal(received[3], degrees[2])  # an off round fetches only what was chosen
        assert np.array_equal(a["graph/chosen/indptr"][1] - a["graph/chosen/indptr"][1, 0], a["graph/omega/indptr"])
        assert np.array_equal(a.graph(3), a.graph(2)) and a.graph(2).sum() < a.graph(0).sum()
        assert b["traffic/models_received"][[1, 3]].sum() == 0
        assert np.array_equal(b["mixed/val_acc"][1], b["round/val_acc"][1])  # nothing was mixed
        assert not np.array_equal(a["mixed/val_acc"][1], a["round/val_acc"][1])
        assert np.array_equal(a["round/val_loss"][:2], b["round/val_loss"][:2])
        assert not np.array_equal(a["round/val_loss"][2], b["round/val_loss"][2])
