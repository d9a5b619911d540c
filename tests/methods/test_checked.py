"""The checks of one's own code: shipped methods and models and the pages' examples pass, what is broken is found, each in one sentence."""

import numpy as np
import own
import pytest
from launch import refused

from dpfl_mpi import testing
from dpfl_mpi.plugins import find, names
from dpfl_mpi.results import Result
from dpfl_mpi.testing import Check, Suite, made_of

SEVEN = {"clients": 7, "budget": 3}
RESNET = {"model": "resnet", "model_options": {"widths": "8", "blocks": 1, "groups": 2}}
METHODS = {name: SEVEN | (RESNET if name == "fedbn" else {}) for name in names("method") if name != "replay"}
OFTEN = {"newcomers": 0.3, "participation": 0.6}
WHOLE = dict.fromkeys(("dpfl", "fedavg", "pens", "scaffold"), 3)  # also with clients away, and with one that diverges
PAGES = {"gossip": "method", "net": "model", "topics": "dataset"}
AVERAGE, END = "    mean = fed.average(w, chosen)\n", '    return {"client": {"w": w}, "shared": {"chosen"'
HEAD = "        self.head = nn.Linear(widths[-1], classes)\n"
ROWS = "    rows = [row for _, row in fed.every_row(w)]\n    fed.note_received(len(rows))\n"
# a product of matrices sums in another order where a rank has fewer rows, on most processors; this does on all
TURNED = "    at = int(fed.ids[0])\n    rows = rows[at:] + rows[:at]\n"
# of each mistake: what is written instead of what, which check finds it, and a part of its sentence
BROKEN = {
    "gossip": {
        "product": (AVERAGE, f"{ROWS}    import torch\n{TURNED}    mean = torch.stack(rows).sum(0).expand_as(w) / fed.n\n", "5 clients", r"by 2 ranks are .* on, by \de-0[5-8]\): do not multiply matrices of rows"),
        "mean": (AVERAGE, "    mean = w.mean(0).expand_as(w)\n", "8 clients", "by 3 ranks are .*: sum over clients by fed.mean"),
        "global": (AVERAGE, f"{AVERAGE}    import random\n    random.random()\n", "5 clients", "draws from the global generator of torch"),
        "unkeyed": (AVERAGE, f"{AVERAGE}    import numpy as np\n    w *= np.random.default_rng().random()\n", "5 clients", "by another start are .*: draw by fed.shuffle"),
        "forgets": (END, f"    w += getattr(fed, 'last', 0)\n    fed.last = 0.1 * t\n{END}", "5 clients", "by going on after stops are .* round 3 on.*: put what must outlive"),
        "module": (END, f"    w += HELD.pop('last', 0)\n    HELD['last'] = 0.1 * t\n{END}", "5 clients", "by going on after stops are"),
        "budget": ("[: fed.most_senders[k]]", "[:2]", "12 clients", "client 0 2 senders; its budget allows 0"),
        "away": (END, f"    fed.notes['models_received'] += 1\n{END}", "some away", "client 0 is away in round 1 and receives 1 models"),
        "fails": (AVERAGE, f"    1 / (1 not in fed.ids)\n{AVERAGE}", "one of them", r"\(1 rank\): ZeroDivisionError: division by zero"),
        "empty": (AVERAGE, f"{AVERAGE}    w[0] *= 1\n", "a rank has none", r"\(3 ranks\): IndexError: index 0 is out of bounds .*empty.py, line 3"),
    },
    "net": {
        "ten": (HEAD, HEAD.replace("classes", "10"), "8x8x1", r"returned a tensor \[2, 10\] for 2 samples of 4 classes"),
        "branch": ("        return self.head(", "        x = x if x.sum() > 0 else -x\n        return self.head(", "8x8x1", "all clients at once.*no `if` on values"),
        "start": (HEAD, f"{HEAD}        import numpy, torch\n        self.register_buffer('s', torch.tensor(numpy.random.default_rng().random()))\n", "8x8x1", "let build draw from PyTorch"),
    },
    "topics": {
        "order": ("sorted(set(sum(texts, [])))", "set(sum(texts, []))", "as a run", "by 3 ranks are .*: seed what load draws, and sort"),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """All checks by (code, name), computed together; the last but one ends all ranks."""
    at = tmp_path_factory.mktemp("checked")
    made = []
    for name, fields in METHODS.items():
        first = made_of("method", name, fields | OFTEN)[0]
        if name not in WHOLE:  # both stops on two ranks, and no other time on two
            first.ways, first.stops = (testing.ONE, testing.THREE, testing.STOPPED), (2, 2)
        made += [first, *made_of("method", name, fields)[1 : WHOLE.get(name, 1)]]
    made += made_of("method", "pfedgraph", {"clients": 2, "window_gb": 2e-5})[:1]  # five rows: several passes
    for name, kind in PAGES.items():
        text = own.example(name)
        own.write(at, **{name: text}, both="build = load = print\n", nothing="x = 1\n")
        made += [c for c in made_of(kind, str(at / f"{name}.py"), {}) if "x3" not in c.name]
        for mistake, (old, new, where, _) in BROKEN[name].items():
            assert old in text
            broken = text.replace(old, new).replace("self.body(x)", "self.body(x * getattr(self, 's', 1))")
            own.write(at, **{mistake: broken.replace("METHOD =", "HELD = {}\nMETHOD =")})
            made += [c for c in made_of(kind, str(at / f"{mistake}.py"), {}) if where in c.name][:1]
    assert testing.kinds_of(str(at / "both.py")) == ["model", "dataset"]
    refused("has none of the functions init and round", testing.kinds_of, str(at / "nothing.py"))
    refused("there is no such file", testing.kinds_of, str(at / "no.py"))
    return {str(check): check for check in Suite(made).checks}


@pytest.mark.timeout(900)  # the first one computes the checks of all
@pytest.mark.parametrize("code", [*METHODS, *PAGES])
def test_what_is_shipped_passes(suite, code):
    mine = [check for check in suite.values() if str(check).startswith(f"{code}, ")]
    assert [check.complaint() for check in mine] == [""] * len(mine) != []
    assert code != "net" or [check.not_taken() for check in mine] == [False, True, True]


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_counts(suite, method):
    """Of seven clients two come after the rounds, and of five three take part in each; where one's samples are too large, it diverges."""
    checks = [check for check in suite.values() if str(check).startswith(f"{method}, 7 clients")]
    with Result(checks[0].file(testing.ONE)) as a, Result(checks[-1].file(testing.ONE)) as wild:
        new, scored = a["client/newcomers"], np.isfinite(a["round/val_acc"])
        assert new.sum() == 2 and scored[0].tolist() == (~new).tolist()
        assert (scored[1:].sum(1) == 3).all() and not scored[:, new].any()
        for name, who in (("newcomers/test_acc", new), ("best/test_acc", ~new)):
            assert (np.isfinite(a[name]) == who).all()
        assert np.isfinite(a.test_acc) and not any(new[a.chosen(t).receivers()].any() for t in range(4))
        assert a["round/gradient_steps"][-1] > 0
        epochs = 2 * scored[1:].sum(0) + (~new if find("method", method).preprocesses else 0)
        assert a["client/epochs"].tolist() == epochs.tolist()
        expected = {"local": 0, "scaffold": 4}.get(method, 2)  # x and c
        received = a["traffic/models_received"][1:]
        searching = {"cobo": (2, np.inf), "dpfl": (0, np.inf)}  # cobo: and pairs' midpoints
        # of a graph that stands, or keeps fewer
        searching |= dict.fromkeys(("dpfl_choice", "nearest", "oracle", "pairwise", "random_graph"), (0, 2))
        low, high = searching.get(method, (expected, expected))
        assert ((low <= received) & (received <= high))[scored[1:]].all() and not received[~scored[1:]].any()
        assert np.flatnonzero(wild["client/diverged_round"] >= 0).tolist() == [testing.WILD] * (method in WHOLE)


@pytest.mark.parametrize("mistake", [name for mistakes in BROKEN.values() for name in mistakes])
def test_what_is_broken_is_found(suite, mistake):
    (check,) = [check for check in suite.values() if str(check).startswith(f"{mistake}, ")]
    *_, sentence = next(mistakes[mistake] for mistakes in BROKEN.values() if mistake in mistakes)
    with pytest.raises(AssertionError, match=sentence) as found:
        check()
    assert "\n" not in str(found.value)


def test_a_setting_that_does_not_exist_fails():
    (check,) = Suite(made_of("method", "local", {"cleints": 7})[:1]).checks
    with pytest.raises(AssertionError, match="there is no setting cleints; did you mean clients"):
        check()


def test_the_command_and_the_call_say_what_fails(monkeypatch, capsys):
    def found(kind, code, settings):
        assert settings == {"clients": 3}
        return [Check(kind, code, name, settings, ()) for name in ("a", "b")]

    monkeypatch.setattr(testing, "made_of", found)
    monkeypatch.setattr(Check, "complaint", lambda check: "wrong" * (check.name == "b"))
    monkeypatch.setattr(Check, "not_taken", lambda check: False)
    assert testing.main(["fedavg", "--clients", "3"]) == 1
    assert capsys.readouterr().out.startswith("ok   fedavg, a\nFAIL wrong\n1 of 2 checks passed in ")
    with pytest.raises(AssertionError, match=r"^wrong$"):
        testing.check_method("fedavg", clients=3)
    assert [str(check) for check in testing.checks("fedavg", clients=3)] == ["fedavg, a", "fedavg, b"]
