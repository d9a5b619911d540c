"""All shipped methods: equal numbers on any ranks and after stops; and `dpfl_mpi.testing`."""

import numpy as np
import own
import pytest
from launch import differences, refused, run_many
from making import WILD, labelled, wild

from dpfl_mpi import testing
from dpfl_mpi.plugins import find, shipped
from dpfl_mpi.results import Result
from dpfl_mpi.testing import Check, made_of

SMALL = {"clients": 7, "budget": 3, "rounds": 3, "tau_init": 1, "tau_train": 2, "min_per_class": 2}
SMALL |= {"dataset": "image_folder", "model": "mlp", "augment": False}
FIELDS = {name: {"newcomers": 0.3, "participation": 0.6} for name in shipped("method")}
del FIELDS["replay"]
RESNET = {"model": "resnet", "model_options": {"widths": "8", "blocks": 1, "groups": 2}}
FIELDS["fedbn"] = FIELDS["fedbn"] | RESNET
STOPS = (*FIELDS, "cfl halved")
MORE = ("dpfl", "fedavg", "pens", "scaffold")  # also with a client that diverges
DIVERGES = {"partition": "natural", "clip_norm": 0.0, "on_divergence": "exclude"}
PAGES = ("gossip", "net", "topics")
AVERAGE = "    mean = fed.average(w, chosen)\n"
HEAD = "        self.head = nn.Linear(widths[-1], classes)\n"
# of each mistake: the page's name, old and new text, the check that finds it, part of its sentence
BROKEN = {
    "mean": ("gossip", AVERAGE, "    mean = w.mean(0).expand_as(w)\n", "5 clients",
             r": 2 ranks give other numbers than 1 \(.*\); sum over clients by fed.mean"),
    "unkeyed": ("gossip", AVERAGE,
                f"{AVERAGE}    import numpy as np\n    w *= np.random.default_rng().random()\n",
                "5 clients, some away", "draw by fed.shuffle"),
    "fails": ("gossip", AVERAGE, f"    1 / (1 not in fed.ids)\n{AVERAGE}", "5 clients",
              "on 1 rank: "),
    # ten outputs pass, as a run on data of ten classes takes them
    "eleven": ("net", HEAD, HEAD.replace("classes", "11"), "a run",
               r"on 1 rank: .*returned a tensor \[2, 11\] for 2 samples of 4 classes"),
    "order": ("topics", "sorted(set(sum(texts, [])))", "set(sum(texts, []))", "as a run takes it",
              "give other numbers .*; seed what load draws, and sort"),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    small = SMALL | {"data": str(labelled(folder / "data.h5", (480, 160), (8, 8, 1), noise=60))}
    out = {name: small | {"method": name} | more for name, more in FIELDS.items()}
    diverges = DIVERGES | {"data": str(wild(folder / "wild.h5", 7))}
    for name in MORE:
        out[f"{name} diverges"] = small | {"method": name} | diverges
    # two clients, and a window of five rows: several passes
    passes = small | {"method": "pfedgraph", "clients": 2, "window_gb": 2e-5}
    halved = small | {"method": "cfl", "options": {"after": 0, "eps1": 100.0, "eps2": 0.0}}
    return out | {"pfedgraph passes": passes, "cfl halved": halved}


@pytest.fixture(scope="module")
def computed(runs, tmp_path_factory):
    """Result files by way and name: on 1 and 3 ranks, and on 2 ranks after two stops."""
    folder = tmp_path_factory.mktemp("computed")
    return {
        1: run_many(1, folder / "1", runs),
        3: run_many(3, folder / "3", runs),
        "stops": run_many(2, folder / "stops", {name: runs[name] for name in STOPS}, stops=(2, 2)),
    }


@pytest.mark.timeout(900)  # the first one computes all
@pytest.mark.parametrize("method", FIELDS)
def test_numbers_are_equal_on_any_ranks_and_after_stops(computed, method):
    for name in (n for n in computed[1] if n.split()[0] == method):
        others = [paths[name] for way, paths in computed.items() if way != 1 and name in paths]
        found = [differences(computed[1][name], other) for other in others]
        assert found == [[]] * len(others) != []


@pytest.mark.parametrize("method", FIELDS)
def test_what_a_method_counts(computed, method):
    """Two of seven clients come after the rounds; three of the five others take part in each."""
    with Result(computed[1][method]) as a:
        new, scored = a["client/newcomers"], np.isfinite(a["round/val_acc"])
        assert new.sum() == 2 and scored[0].tolist() == (~new).tolist()
        assert (scored[1:].sum(1) == 3).all() and not scored[:, new].any()
        for name, clients in (("newcomers/test_acc", new), ("best/test_acc", ~new)):
            assert (np.isfinite(a[name]) == clients).all()
        assert np.isfinite(a.test_acc)
        assert not any(new[a.chosen(t).receivers()].any() for t in range(4))
        assert a["round/gradient_steps"][-1] > 0
        epochs = 2 * scored[1:].sum(0) + (~new if find("method", method).preprocesses else 0)
        assert a["client/epochs"].tolist() == epochs.tolist()
        # SCAFFOLD: x and c; IFCA: 2 models down, 1 up
        expected = {"local": 0, "scaffold": 4, "ifca": 3}.get(method, 2)
        received = a["traffic/models_received"][1:]
        limits = {"cobo": (2, np.inf), "dpfl": (0, np.inf)}  # CoBo: also midpoints of pairs
        # of a graph that is fixed, or keeps fewer
        keeping = "dpfl_choice dpsgd nearest oracle pairwise random_graph spectral spectral_search"
        limits |= dict.fromkeys(keeping.split(), (0, 2))
        low, high = limits.get(method, (expected, expected))
        assert ((low <= received) & (received <= high))[scored[1:]].all()
        assert not received[~scored[1:]].any()


def test_a_rank_without_clients_takes_part_in_every_method(runs, tmp_path):
    """Of five ranks one has none; a window of one row needs two passes for two models."""
    four = {"clients": 4, "participation": 1.0, "window_gb": 1.7e-5}  # one of them a newcomer
    few = {name: runs[name] | four for name in FIELDS}
    alone, idle = run_many(1, tmp_path / "1", few), run_many(5, tmp_path / "5", few)
    assert [name for name in few if differences(alone[name], idle[name])] == []


@pytest.mark.parametrize("method", MORE)
def test_a_method_with_a_client_that_diverges(computed, method):
    with Result(computed[1][f"{method} diverges"]) as result:
        assert np.flatnonzero(result["client/diverged_round"] >= 0).tolist() == [WILD]


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_the_pages_pass(tmp_path, page):
    own.write(tmp_path, **{page: own.example(page)})
    found = testing.checks(tmp_path / f"{page}.py")
    assert [check.complaint() for check in found] == [""] * len(found) != []


@pytest.mark.parametrize("mistake", BROKEN)
def test_what_is_broken_is_found(tmp_path, mistake, capfd):
    page, old, new, name, sentence = BROKEN[mistake]
    text = own.example(page)
    assert old in text
    own.write(tmp_path, **{mistake: text.replace(old, new)})
    (check,) = [c for c in testing.checks(tmp_path / f"{mistake}.py") if c.name == name]
    with pytest.raises(AssertionError, match=sentence) as error:
        check()
    assert "\n" not in str(error.value)
    assert mistake != "fails" or "ZeroDivisionError" in str(error.value) + capfd.readouterr().err


def test_what_cannot_be_checked(tmp_path, monkeypatch, capsys):
    own.write(tmp_path, both="build = load = print\n", nothing="x = 1\n")
    assert testing.kinds_of(str(tmp_path / "both.py")) == ["model", "dataset"]
    refused("has none of the functions init and round", testing.checks, tmp_path / "nothing.py")
    refused("there is no such file", testing.checks, tmp_path / "no.py")
    (check, *_) = made_of("method", "local", {"cleints": 7})
    with pytest.raises(AssertionError, match="there is no setting cleints; did you mean clients"):
        check()
    away = next(c for c in testing.checks("local", rounds=4, clients=1) if c.away)
    assert away.complaint() == ""  # a table of four rounds, in which the client is always there
    (check,) = testing.checks("cnn")
    shapes = []

    def compute(self, shape):
        shapes.append(shape)
        return "" if shape == "32x32x3" else "--model cnn needs images of at least 30x30"

    monkeypatch.setattr(Check, "compute", compute)
    assert check.complaint() == "" and shapes == ["8x8x1", "28x28x1", "32x32x3"]
    monkeypatch.setattr(Check, "compute", lambda self, shape: "it takes tokens")
    assert check.complaint() == "it takes tokens"

    def found(kind, code, settings):
        assert settings == {"clients": 3}
        return [Check(kind, code, name, settings) for name in ("a", "b")]

    monkeypatch.setattr(testing, "made_of", found)
    monkeypatch.setattr(Check, "complaint", lambda check: "wrong" * (check.name == "b"))
    assert testing.main(["fedavg", "--clients", "3"]) == 1
    printed = "ok   fedavg, a\nFAIL wrong\n1 of 2 checks passed in "
    assert capsys.readouterr().out.startswith(printed)
    with pytest.raises(AssertionError, match=r"^wrong$"):
        testing.check_method("fedavg", clients=3)
    assert [*map(str, testing.checks("fedavg", clients=3))] == ["fedavg, a", "fedavg, b"]
