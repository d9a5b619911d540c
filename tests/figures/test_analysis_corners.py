"""Tables and figures of results that are alike but in one thing, have two models per client, or end in the middle of a round."""

import importlib
from pathlib import Path

import h5py
import pytest
import tiny_result

from dpfl_mpi.api import Result
from dpfl_mpi.errors import UserError
from dpfl_mpi.results.summary import outcome, summary

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")


@pytest.fixture
def module(monkeypatch):
    """Returns a file of analysis/ by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "analysis"))
    return importlib.import_module


def test_data_of_one_name_are_told_apart_by_their_hash(module, tmp_path):
    """The same Run on other pixels, as of a JPEG copy: a row of its own in every table, none lost."""
    each = {"aaaaaaaa": 0.5, "bbbbbbbb": 0.7}
    results = [Result(tiny_result.make(tmp_path / f"{sha}.h5", best=(x,) * 4, sha=sha)) for sha, x in each.items()]
    data = module("accuracy_table").draw(results).data
    assert dict(zip(data["method"], data["mean"], strict=True)) == {
        "DPFL (B_c = 0.75N), data_sha256 aaaaaa": 50,
        "DPFL (B_c = 0.75N), data_sha256 bbbbbb": pytest.approx(70),
    }
    assert len(module("tau_init_table").draw(results).data) == 2


def test_of_several_local_the_nearest_is_the_one_to_compare_with(module, tmp_path):
    """DPFL of 70 % with lr 0.01 is 5 above the Local of its rate, whatever the order, and not 50 above another rate's."""
    files = {"a": ("local", 0.2, 0.05), "b": ("local", 0.65, 0.01), "c": ("dpfl", 0.7, 0.01)}
    for order in ("abc", "bac"):
        results = [Result(tiny_result.make(tmp_path / f"{order}{n}.h5", m, best=(x,) * 4, lr=lr)) for n in order for m, x, lr in [files[n]]]  # fmt: skip
        gain = module("accuracy_table").draw(results).data.set_index("method")["vs_local"]
        assert gain.filter(like="DPFL").tolist() == [pytest.approx(5)] and gain.filter(like="Local").isna().all()


def test_epochs_are_those_of_both_models(module, tmp_path):
    """Round 2 of the tiny result is at 20 epochs: 40 of Ditto's two models."""
    path = tiny_result.make(tmp_path / "ditto.h5", "ditto", best=(0.5,) * 4, graphs=[[[]] * 4] * 3)
    data = module("accuracy_table").draw([Result(path)]).data
    assert data["epochs"].tolist() == [40]
    assert module("learning_curves").draw([Result(path)]).data["epochs"].max() == 40
    assert module("report").draw([Result(path)]).data["local epochs"].tolist() == [40]
    assert outcome(Result(path))["local epochs"] == 40
    assert Result(path).curves()["epochs"].tolist() == [20, 30, 40]


def test_a_method_without_omega_has_no_graph_before_round_1(module, tmp_path):
    """Its round 0 was drawn as an empty Omega, called 0 % one-way, and compared with DPFL's. The seeds of a method come in their order."""
    drawn = [[[]] * 4, [[2], [], [0], []], [[1, 2], [], [0], []]]
    made = {s: tiny_result.make(tmp_path / f"p{s}.h5", "pens", s, best=(0.5,) * 4, graphs=drawn) for s in (42, 52)}
    pens, dpfl = [Result(path) for path in made.values()], Result(tiny_result.make(tmp_path / "d.h5"))
    for name in ("sparsity", "asymmetry"):
        drawing = module(name).draw(pens)
        assert drawing.data["round"].min() == 1 and "in round 1, " in drawing.text
        assert "before round 1" in module(name).draw([dpfl]).text
    evolution = module("graph_evolution").draw([*pens[::-1], dpfl]).data
    assert evolution[["method", "seed", "round"]].values.tolist() == [
        *(["dpfl", 42, t] for t in (0, 1, 2)),
        *(["pens", s, t] for s in (42, 52) for t in (1, 2)),
    ]
    assert module("graph_evolution").draw(pens[:1]).data["round"].tolist() == [1, 2]
    omega = module("omega").draw([pens[0], dpfl], 3)
    assert "Agreement" not in omega.text and omega.text.count("Omega") == 1
    assert omega.data[omega.data["method"].str.startswith("PENS")]["round"].min() == 1
    assert "to build Omega" not in summary(made[42]) and "to build Omega" in summary(dpfl.path)


def test_a_method_that_is_not_shipped_never_looks_like_one_that_is(module):
    looks = module("_looks")
    known = {looks.look(method) for method in ("dpfl", *looks.METHODS) if looks.look(method)[1] == "-"}
    assert len(known) == 7 and not known & {looks.look(f"mine{i}") for i in range(100)}


def test_a_full_disk_leaves_no_half_of_a_figure(module, tmp_path, monkeypatch):
    """A second drawing that cannot be written leaves the first."""
    common, drawing = module("_common"), module("accuracy_table").draw([Result(tiny_result.make(tmp_path / "d.h5"))])
    (csv, *_) = common.save(drawing, "table", tmp_path)
    before = csv.read_bytes()

    def full(self, path, **_):
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    with pytest.raises(UserError, match="No space left on device"):
        common.save(drawing, "table", tmp_path)
    assert csv.read_bytes() == before and not list(tmp_path.glob(".*"))


def test_traffic_of_a_round_that_is_being_written_is_left_out(module, tmp_path):
    """A kill between two appends: round 2 has its traffic, and not its seconds."""
    path = tiny_result.make(tmp_path / "cut.h5", finished=False)
    with h5py.File(path, "a") as file:
        for array in file["seconds"].values():
            array.resize(2, 0)
    assert list(module("traffic_and_time").measure(Result(path))["round"]) == [0, 1]


def test_latex_escapes_what_it_must(module):
    table = pd.DataFrame({"method": ["DPFL (B_c = uniform:2:20)", "A & B_1 #2", "DPFL (B_c = inf), tau_init 1"]})
    text = module("_tables").latex(table)
    assert r"DPFL (B\_c = uniform:2:20)" in text and r"A \& B\_1 \#2" in text
    assert r"DPFL ($B_c = \infty$), $\tau_{\mathrm{init}}$ 1" in text
