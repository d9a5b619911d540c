"""End to end: the same numbers for any number of ranks, and rounds that do not choose."""

import numpy as np
import pytest
import torch
from launch import differences, mpirun, run_here, run_many

from dpfl_mpi import testing
from dpfl_mpi.engine import machine
from dpfl_mpi.mpi.world import LIBRARY
from dpfl_mpi.results import Result
from dpfl_mpi.results.schema import PHASES
from dpfl_mpi.settings.fields import to_flags

ROW = 4816 * 4  # bytes of a row of the perceptron on 8x8 images
BASE = {"dataset": "image_folder", "model": "mlp", "augment": False, "clients": 10, "rounds": 3}
BASE |= {"tau_init": 2, "tau_train": 1, "budget": 4, "seed": 5}
NARROW = 4.5 * ROW / 2**30  # four rows: one for each of four clients, ten on three ranks
CNN = {"model": "cnn", "augment": True, "clients": 5, "classes_per_client": 2}
CNN |= {"rounds": 1, "tau_init": 1}
KINDS = {
    "base": {},
    "cnn": CNN,
    "inf": {"budget": "inf", "rounds": 2, "window_gb": NARROW, "exchange": "sendrecv"},
    "wide": {"budget": "inf", "rounds": 2, "window_gb": 1.0},  # all at once
    "eight": {"budget": 8, "rounds": 2, "ggc_period": 2, "window_gb": NARROW},
    "groups": {"rounds": 2, "window_gb": NARROW, "window": "create"},
    "few": {"clients": 2, "rounds": 2},  # of three ranks one has none
}
SMALL = {"clients": 6, "rounds": 4, "tau_init": 1, "budget": 3}
CONTROLS = {"clients": 7, "rounds": 5, "tau_init": 1, "search_share": 0.5, "omega_period": 2}
CONTROLS |= {"drift": "0.5:3", "patience": 2, "participation": 0.8, "window_gb": 1e-4}
# each writes a file for n clients
GRAPHS = {"graphs": lambda path, n: run_here(path, SMALL | {"clients": n, "tau_train": 1})}
AWAY = {"available": testing.write_present, "rounds": 3}
SPEEDS = lambda n: [[k / 10, 0.001, k, 2 * k, 0.01] for k in range(1, n + 1)]  # noqa: E731
LINKS = {"network": lambda path, n: np.savetxt(path, SPEEDS(n))}
PAIRS = {"reach": lambda path, n: path.write_text("0 1\n1 0\n2 3\n3 2\n4 5\n5 4\n")}
BUDGETS = {"budget": lambda path, n: path.write_text("2 3 2 1 2 inf\n")}
FLIPPED = {"flip_share": 0.3, "flipped_run_ggc": False}
ADAM = {"optimizer": "adam", "lr_schedule": "cosine"}
CODED = {"codec": "topk:0.2", "exchange": "sendrecv"}
NEAR = {"candidates": 4, "omega_period": 2, "window_gb": NARROW}
MORE = {
    "stale": CONTROLS | {"attack": "stale:0.3"},
    "noise": CONTROLS | {"method": "pairwise", "attack": "noise:0.3", "reach": "geometric:0.9"},
    "scale": CONTROLS | {"method": "fedavg", "attack": "scale:0.2", "on_divergence": "exclude"},
    "backdoor": CONTROLS | {"attack": "backdoor:0.3", "budget": "uniform:2:6"},
    "sign_flip": CONTROLS | {"attack": "sign_flip:0.3", "newcomers": 0.3, "finetune_epochs": 1},
    "newcomers": CONTROLS | {"method": "fedrep", "newcomers": 0.3, "tau_train": 2},
    "flipped": CONTROLS | FLIPPED | {"reach": "geometric:0.8", "finetune_epochs": 1},
    "metric": CONTROLS | {"metric": "batch"},
    "rewired": SMALL | GRAPHS | {"method": "replay", "options": {"variant": "rewired"}},
    "shuffled": SMALL | GRAPHS | {"method": "replay", "options": {"variant": "shuffled"}},
    "drawn": SMALL | GRAPHS | {"method": "random_graph", "participation": 0.7},
    "adam": SMALL | ADAM | {"method": "fedrep", "tau_train": 2},
    "files": SMALL | PAIRS | BUDGETS | AWAY,
    "churn": SMALL | {"churn": "0.3:0.5", "network": "phones", "staleness": 1},
    "late": SMALL | LINKS | CODED | {"staleness": 2, "participation": 0.8},
    "near": SMALL | NEAR | {"clients": 9, "budget": 6},
    "remembered": {"method": "knnper", "clients": 5, "newcomers": 0.4},  # alone on a rank, too
    "lies": SMALL | LINKS | {"attack": "stale:0.4", "codec": "int8", "staleness": 1},
    "half": SMALL | {"attack": "sign_flip:0.4", "send": "layers=body", "churn": "0.3:0.5"},
}
CUT = ("stale", "scale", "sign_flip", "shuffled", "adam", "churn", "late", "near", "lies", "half")


@pytest.fixture(scope="module")
def fields(digits_file, colour_file, tmp_path_factory):
    folder, out = tmp_path_factory.mktemp("files"), {}
    for name, more in (KINDS | MORE).items():
        out[name] = BASE | {"data": str(colour_file if name == "cnn" else digits_file)} | more
        for setting, write in more.items():
            if callable(write):
                path = folder / f"{name}-{setting}.h5"  # of graphs, a result
                write(path, out[name]["clients"])
                out[name][setting] = str(path)
    return out


@pytest.fixture(scope="module")
def computed(fields, tmp_path_factory):
    """Result files by way and name: on 1, 2 and 3 ranks, and after stops."""
    folder = tmp_path_factory.mktemp("computed")
    runs = {n: more | {"mixed": True, "save_models": True} for n, more in fields.items()}
    cut = {name: runs[name] for name in CUT}
    return {
        1: run_many(1, folder / "1", runs),
        2: run_many(2, folder / "2", {name: runs[name] for name in ("base", "cnn")}),
        3: run_many(3, folder / "3", runs),
        # before the drift and after it, with clients that have stopped
        "stops": run_many(3, folder / "stops", cut, stops=(3, 2, 1, 1)),
    }


@pytest.mark.parametrize("name", KINDS | MORE)
def test_the_answer_knows_neither_ranks_nor_stops(name, computed):
    one, *others = (paths[name] for paths in computed.values() if name in paths)
    assert [differences(one, other) for other in others] == [[]] * len(others) != []


def test_a_rank_without_clients_takes_part_in_every_pass(fields, tmp_path):
    """Of four ranks one has none; a window of one row needs two passes for both other models."""
    three = fields["base"] | {"clients": 3, "budget": "inf", "tau_init": 0}
    out = run_many(4, tmp_path, {"idle": three | {"window_gb": 1.2 * ROW / 2**30}})
    assert differences(run_here(tmp_path / "alone.h5", three), out["idle"]) == []


def test_what_ranks_send(computed):
    """B_c = inf and 8 need several passes through a narrow window; B_c = 4 has a wide one."""
    for name in KINDS:
        with Result(computed[1][name]) as one:
            assert one["traffic/bytes_rma"].sum() == 0 < one["traffic/models_received"].sum()
            for ranks in (2, 3):
                if name not in computed[ranks]:
                    continue
                with Result(computed[ranks][name]) as result:
                    assert Result.same_numbers(one, result)
                    assert result["traffic/bytes_rma"].sum() > 0
                    assert result.starts()[0]["ranks"] == ranks
    with Result(computed[3]["inf"]) as narrow, Result(computed[3]["wide"]) as wide:
        assert Result.same_numbers(narrow, wide)
        # in passes a sender that several clients of a rank want is sent once per pass
        assert narrow["traffic/bytes_rma"].sum() > wide["traffic/bytes_rma"].sum()
    assert Result(computed[3]["late"])["network/age"].sum() > 0


def test_seconds_of_ranks(computed):
    for ranks in (1, 3):
        with Result(computed[ranks]["base"]) as result:
            for phase in PHASES:
                lowest, mean, highest = result[f"seconds/{phase}"].T
                assert (lowest <= mean * (1 + 1e-12)).all()
                assert (mean <= highest * (1 + 1e-12)).all()
            assert (result["seconds/write"] > 0).all()


def test_the_command(tmp_path, digits_file):
    done = mpirun(2, "-m", "dpfl_mpi", *to_flags(BASE | {"data": digits_file, "results": tmp_path}))
    assert (done.returncode, done.stderr) == (0, "")
    way, *lines = done.stdout.splitlines()
    chosen = "exchange: rma (a window of MPI_Win_allocate), which passed a trial under "
    assert way == f"{chosen}{LIBRARY}"
    clients = BASE["clients"]
    assert lines[0] == f"dpfl on image_folder, {clients} clients, 2 ranks, means over clients"
    heads = lines[1].replace(" %", "").split()
    assert heads == ["round", "val", "test", "best", "received", "seconds", "left"]
    assert [line.split()[0] for line in lines[2:6]] == [f"{t}/3" for t in range(4)]
    took, left = ([float(line.split()[i]) for line in lines[3:6]] for i in (5, 6))
    # rounds to come at the mean of those that were, preprocessing aside
    assert left == pytest.approx([2 * took[0], sum(took[:2]) / 2, 0], abs=0.07)
    assert len(lines[1]) <= 80
    for words in ("test accuracy", "spread over clients", "edges", "models received", "analysis/"):
        assert words in done.stdout
    (path,) = tmp_path.glob("image_folder-pathological-dpfl-B4-s5-*.h5")
    assert str(path) in done.stdout
    with Result(path) as result:
        assert lines[2].split()[1] == f"{100 * result['round/val_acc'][0].mean():.2f}"
        assert f"{100 * result['best/test_acc'].mean():.2f} %" in done.stdout
        assert result.finished and len(result.starts()) == 1
        made = "rma (a window of MPI_Win_allocate) of"
        assert result.starts()[0]["exchange"] == f"{made} {LIBRARY}"


@pytest.mark.parametrize("off", ["reuse", "skip"])
def test_a_round_that_does_not_choose(tmp_path, digits_file, off):
    fields = BASE | {"data": str(digits_file), "clients": 6, "budget": 3, "ggc_period": 2}
    path = run_here(tmp_path / "run.h5", fields | {"ggc_off_rounds": off}, mixed=True)
    with Result(path) as result:
        unmixed = np.array_equal(result["mixed/val_acc"][1], result["round/val_acc"][1])
        assert unmixed == (off == "skip")
        assert result["graph/evaluations"].any(1).tolist() == [True, False, True, False]
        assert result["traffic/models_received"].any(1).tolist() == [True, off == "reuse"] * 2


EPYC = {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "17", "stepping": "1"}
EPYC |= {"model name": "AMD EPYC", "flags": "fpu sse2 avx2 fma avx512f smep"}
ARM = {"CPU implementer": "0x41", "CPU architecture": "8", "CPU part": "0xd40", "CPU revision": "1"}
ARM["Features"] = "fp sve"


@pytest.mark.parametrize(("cpuinfo", "facts"), [
    (EPYC, ["AuthenticAMD", "25", "17", "1", "AVX512", "avx2 avx512f fma"]),
    (ARM, ["0x41", "8", "0xd40", "1", "AVX512", "sve"]),
    ({}, ["unknown"] * 4 + ["AVX512", ""]),  # no Linux
])  # fmt: skip
def test_a_processor_is_more_than_its_name(cpuinfo, facts, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(machine, "cpuinfo", lambda: cpuinfo)
    names = ["vendor", "family", "model", "stepping", "capability", "extensions"]
    assert machine.processor() == dict(zip(names, facts, strict=True))


START = {"device": "cpu", "cpu": "AMD EPYC", "threads": 1, "time": "now", "kernels": "native"}
START |= {"processor": {"model": "17", "stepping": "1"}, "portable": False}
START |= {"versions": {"torch": "2.13.0", "h5py": "3.16"}}
OTHER = {"processor": {"model": "1", "stepping": "2"}}


@pytest.mark.parametrize(("before", "now", "changes"), [
    (OTHER, {}, "processor model 1 -> 17; processor stepping 2 -> 1"),
    ({"versions": {"torch": "2.12.0"}}, {}, "versions torch 2.12.0 -> 2.13.0"),
    ({"threads": 2, "time": "then"}, {}, "threads 2 -> 1"),  # no number depends on the time
    # the processor is no difference under the native kernels alone
    (OTHER | {"portable": True}, {"portable": True}, ""),
    (OTHER, {"portable": True}, "processor model 1 -> 17; processor stepping 2 -> 1"),
    ({"portable": True}, {"kernels": "torch"}, "kernels native -> torch"),
    # nor is what a start does not know
    ({"processor": {}, "versions": {}}, {}, ""),
])  # fmt: skip
def test_a_start_that_may_round_differently_warns(before, now, changes, capsys):
    machine.warn_of_change(START | before, START | now)
    warning = f"warning: this start may round differently than the one before ({changes})\n"
    assert capsys.readouterr().err == (warning if changes else "")
