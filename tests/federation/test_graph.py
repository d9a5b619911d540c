"""The search: ggc and bggc against Algorithms 2 and 3 in plain Python, Theorem 1 as a property; graphs; what is received is what was sent."""

import tracemalloc

import numpy as np
import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import differences, federation, refused, reward_of, run_here, run_many, text_file

from dpfl_mpi import streams
from dpfl_mpi.federation import orders
from dpfl_mpi.federation.orders import Order
from dpfl_mpi.federation.search import decide
from dpfl_mpi.graph import CollaborationGraph
from dpfl_mpi.mpi.placement import waves
from dpfl_mpi.mpi.window import Route
from dpfl_mpi.results import Result
from dpfl_mpi.settings.search import Rule

N = 7


@pytest.fixture(scope="module", params=[1, 3], ids=["block1", "block3"])
def fed(request, digits_file):
    fields = {"dataset": "image_folder", "data": str(digits_file), "model": "mlp", "clients": N, "augment": False}
    with federation(fields, block=request.param) as fed:
        yield fed


def test_decide():
    neither = [(0.0, 0.0, 0.0, True), (0.0, 0.0, 0.999999, True)]  # add, whatever the coin says
    one = [(0.3, 0.0, 0.999999, True), (0.0, 0.3, 0.0, False)]  # p = 0 is never, a coin of exactly 0 included
    quarter = [(0.1, 0.3, 0.24, True), (0.1, 0.3, 0.25, False), (0.1, 0.3, 0.26, False)]
    small = [(1e-300, 1e-300, 0.49, True), (1e-300, 1e-300, 0.51, False)]
    for a, b, coin, added in (*neither, *one, *quarter, *small):
        assert decide(a, b, coin) is (coin < reference.probability(a, b)) is added


def rows_of(fed, seed, spread=1.0):
    """Random models in the federation's row order and in client order: a common part and a part of their own."""
    rng = np.random.default_rng(seed)
    size = fed.ensemble.size
    models = (rng.normal(0, 0.3, size) + rng.normal(0, 0.3 * spread, (N, size))).astype(np.float32)
    w = fed.ensemble.zeros(len(fed.ids))
    w[:, :size] = torch.from_numpy(models[fed.ids])
    return w, models


def complete(n=N):
    return CollaborationGraph.from_lists([j for j in range(n) if j != k] for k in range(n))


def draws(fed, k, candidates, repeats):
    i = int(fed.row_of[k])
    orders = [[int(j) for j in fed.shuffle(k, candidates, r)] for r in range(repeats)]
    return orders, [fed.draws.coins(slice(i, i + 1), r)[0].random(N) for r in range(repeats)]


def start(fed, number, most, repeats=1):
    fed.begin_round(number)
    fed.members.limits.most_senders[:] = most
    fed.greedy.repeats = repeats


@pytest.mark.parametrize("most", [0, 1, 2, 4, N - 1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bggc_is_algorithm_3(fed, most, seed):
    start(fed, seed, most)
    w, models = rows_of(fed, seed)
    omega = fed.bggc(w)
    for k in range(N):
        (order,), (coins,) = draws(fed, k, np.array([j for j in range(N) if j != k]), 1)
        X = reference.bggc(k, order, models, fed.p, reward_of(fed, k), most + 1, coins)
        assert list(omega.of(k)) == sorted(X - {k}) and len(X) <= most + 1


@pytest.mark.parametrize("most", [0, 1, 3, N - 1])
@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("repeats", [1, 3])
def test_ggc_is_algorithm_2(fed, most, seed, repeats):
    start(fed, seed, most, repeats)
    w, models = rows_of(fed, seed)
    rng = np.random.default_rng(seed)
    others = [np.delete(np.arange(N), k) for k in range(N)]
    omega = CollaborationGraph.from_lists(rng.choice(each, min(most + 1, N - 1), replace=False) for each in others)
    chosen = fed.ggc(w, fed.exchange(w, omega))
    alone = set()
    for k in range(N):
        orders, coins = draws(fed, k, omega.of(k), repeats)
        reward = reward_of(fed, k)
        found = [reference.ggc(k, a, models, fed.p, reward, most + 1, b) for a, b in zip(orders, coins, strict=True)]
        # Paper: m is an input of Algorithm 1 that no line uses; m repeats of which the best counts, the first of equally good ones
        X = max(found, key=lambda X, R=reward: R(reference.average(fed.p, models, X)))
        assert list(chosen.of(k)) == sorted(X - {k}) and len(X) <= most + 1
        alone.add(len(set(map(frozenset, found))))
    assert most in (0, N - 1) or max(alone) > 1 or repeats == 1  # repeats end in different sets


RULES = [
    {"order": "loss"},
    {"neither": "keep_out"},
    {"neither": "smaller", "order": "loss"},
    {"stop": True},
    {"search": "forward", "order": "loss", "tolerance": 0.02},
    {"search": "forward", "stop": True},
]


def departing(order, coins, models, p, R, most, rule):
    """X of Algorithm 2 by a rule, in plain Python: all averages and rewards anew for each candidate."""
    X, Y = [], list(order)
    for j, coin in zip(order, coins, strict=False):
        if len(X) >= most:
            break
        more, less = [*X, j], [i for i in Y if i != j]
        x, x_j, y, y_j = (R(reference.average(p, models, {*s, len(p) - 1})) for s in (X, more, Y, less))
        a, b = max(x_j - x, 0), max(y_j - y, 0)
        add = coin < reference.probability(a, b)
        if rule.search == "forward":
            add = -x_j <= -x * (1 + rule.tolerance)
        elif a == b == 0 and rule.neither != "add":
            add = rule.neither == "smaller" and x_j - x >= y_j - y
        X, Y = (more, Y) if add else (X, less)
        if rule.stop and not add:
            break
    return sorted(X)


@pytest.mark.parametrize("spread", [1.0, 0.05])  # of far and of near models: gains of all signs
@pytest.mark.parametrize("rule", RULES)
def test_a_search_may_depart_from_the_algorithms(fed, rule, spread, monkeypatch):
    start(fed, 5, 3)
    rule = Rule(**rule)
    monkeypatch.setattr(fed.greedy, "rule", rule)
    w, models = rows_of(fed, 5, spread=spread)
    fed.notes["evaluations"][:] = 0
    before = fed.notes["cases"].sum(1)
    omega = fed.bggc(w)
    of_bggc, decided = fed.notes["evaluations"].copy(), fed.notes["cases"].sum(1) - before
    chosen = fed.ggc(w, fed.exchange(w, omega))
    for k in range(N):
        for found, candidates in ((omega, np.delete(np.arange(N), k)), (chosen, omega.of(k))):
            (order,), (coins,) = draws(fed, k, candidates, 1)
            reward = reward_of(fed, k)
            if rule.order == "loss":
                order = sorted(order, key=lambda j, reward=reward: -reward(models[j]))
            own = [*models, models[k]]  # k itself stands last, so that it is in every set
            p = np.append(fed.p, fed.p[k])
            assert found.of(k).tolist() == (departing(order, coins, own, p, reward, 3, rule) if len(order) else [])
    scored = (1 if rule.search == "forward" else 2) * (1 + decided) + (N - 1) * (rule.order == "loss")
    assert of_bggc.tolist() == scored.tolist()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    number=st.integers(0, 99),
    most=st.lists(st.integers(0, N - 1), min_size=N, max_size=N),
    twins=st.lists(st.integers(0, N - 1), min_size=N, max_size=N),
    shares=st.lists(st.integers(1, 1000), min_size=N, max_size=N),
    spread=st.sampled_from([1e-6, 1e-3, 1.0]),
)
def test_theorem_1(fed, seed, number, most, twins, shares, spread):
    """GGC with all models and BGGC in batches choose the same; equal models (`twins`) make gains of nearly 0, where one rounding would decide."""
    fed.p[:] = np.array(shares) / sum(shares)
    w, _ = rows_of(fed, seed, spread=spread)
    w = w[[int(fed.row_of[twins[k]]) for k in fed.ids]]
    start(fed, number, most)
    together = fed.ggc(w, fed.exchange(w, complete()))
    evaluations = fed.notes["evaluations"].copy()
    start(fed, number, most)
    batched = fed.bggc(w)
    assert np.array_equal(together.matrix(), batched.matrix())
    assert np.array_equal(evaluations, fed.notes["evaluations"])
    assert (batched.degrees() <= most).all()


@pytest.mark.parametrize(
    "fields", [{}, {"reach": "geometric:0.7", "ggc_repeats": 2}, {"budget": 3, "omega_period": 2}, {"budget": "file"}]
)
def test_in_groups_the_search_finds_the_same(fields, tmp_path, monkeypatch):
    if fields.get("budget") == "file":  # with which the first group asks nobody
        with federation({"clients": N, "budget": 3}) as fed:
            budgets = np.where(np.isin(np.arange(N), fed.ids[:3]), 1, 3)
        np.savetxt(tmp_path / "budgets", budgets, "%d")
        fields = {"budget": str(tmp_path / "budgets")}
    fields = {"clients": N, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": "inf"} | fields
    for name, least in (("whole", 256), ("groups", 2)):
        monkeypatch.setattr("dpfl_mpi.mpi.placement.WAVE", least)
        run_here(tmp_path / f"{name}.h5", fields)
    assert waves(np.array([N])) == N // 2
    assert set(differences(tmp_path / "whole.h5", tmp_path / "groups.h5")) <= {"traffic/bytes_collective"}


def test_evaluations_are_two_a_candidate_and_none_with_budget_one(fed):
    start(fed, 0, [0] * (N - 1) + [3])
    w, _ = rows_of(fed, 0)
    omega = fed.bggc(w)
    assert omega.degrees()[:-1].tolist() == [0] * (N - 1)
    alone = np.array([int(fed.row_of[k]) for k in range(N - 1)])
    assert (fed.notes["evaluations"][alone] == 0).all()
    assert (fed.notes["models_received"][alone] == 0).all()
    assert fed.notes["evaluations"][fed.row_of[N - 1]] > 0
    assert torch.equal(fed.average(w, omega)[alone], w[alone])
    # R(X) and R(Y) are carried over: 2 to start with and 2 per candidate, one case counted per candidate
    start(fed, 0, N - 1)
    fed.bggc(w)
    decided = fed.notes["cases"].sum(1)
    assert np.array_equal(fed.notes["evaluations"], 2 + 2 * decided) and decided.max() == N - 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 9))
def test_graph_operations_are_those_of_lists(seed, n):
    rng = np.random.default_rng(seed)

    def some():
        return [rng.permutation(n)[: rng.integers(0, n + 1)] for _ in range(n)]

    mine, theirs, marked = some(), some(), rng.random(n) < 0.5
    g, other = CollaborationGraph.from_lists(mine), CollaborationGraph.from_lists(theirs)
    assert [list(g.of(k)) for k in range(n)] == [sorted(s) for s in mine]
    assert g.indptr.dtype == g.senders.dtype == np.int64 and g.degrees().tolist() == [len(s) for s in mine]
    assert g.matrix().tolist() == [[j in senders for j in range(n)] for senders in mine]
    mixed = g.where(marked, other)
    assert [list(mixed.of(k)) for k in range(n)] == [sorted((mine if marked[k] else theirs)[k]) for k in range(n)]
    among = g.only(marked[g.receivers()] & marked[g.senders])
    kept = [[j for j in sorted(mine[k]) if marked[k] and marked[j]] for k in range(n)]
    assert [list(among.of(k)) for k in range(n)] == kept
    assert g.within(other) == all(set(a) <= set(b) for a, b in zip(mine, theirs, strict=True))
    assert among.within(g) and CollaborationGraph.empty(n).within(other)


def test_a_few_edges_are_found_in_a_graph_of_all_without_a_copy_of_it():
    n = 400  # of 10,000 clients in 10 sites --reach has 10 million edges, and every exchange looks
    reach = complete(n)
    graph = CollaborationGraph.from_lists([(k + 1) % n, (k + 7) % n] for k in range(n))
    tracemalloc.start()
    assert graph.within(reach)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < reach.senders.nbytes / 4
    assert not reach.within(graph)


@pytest.mark.parametrize("ahead", [1, 2, 64])
def test_an_order_drawn_in_parts_is_the_whole_order(fed, monkeypatch, ahead):
    monkeypatch.setattr(orders, "AHEAD", ahead)
    fed.begin_round(4)
    for k in range(N):
        order, handed = Order(fed.draws, fed.candidates(), k, 0), []
        for width in (0, 2, 2, 2, 2, 2):
            handed.append(order.next(width).tolist())
        assert [j for part in handed for j in part] == fed.shuffle(k, fed.reachable(k), 0).tolist()
        assert [len(part) for part in handed] == [0, 2, 2, 2, 0, 0]


@pytest.mark.parametrize("ahead", [1, 2])
def test_of_many_candidates_the_first_are_drawn_alone_and_the_others_once_these_are_used_up(fed, monkeypatch, ahead):
    monkeypatch.setattr(orders, "AHEAD", ahead)
    monkeypatch.setattr(orders, "MANY", 1)
    monkeypatch.setattr(orders, "MANY_TIMES", 1)
    drawn = []
    for t in range(1, 300):
        fed.begin_round(t)
        order, reachable = Order(fed.draws, fed.candidates(), 0, 0), fed.reachable(0).tolist()
        first, draws = order.next(2).tolist(), fed.draws.stream(streams.CANDIDATES, 0, 0)
        assert first == draws.choice(reachable, 2 * ahead, replace=False)[:2].tolist()
        drawn.append(first + [j for _ in range(N) for j in order.next(2).tolist()])
        assert sorted(drawn[-1]) == reachable
    # each candidate at each place as often as any other: 299 / (N - 1) times, four standard deviations
    times = np.array([np.bincount(place, minlength=N)[1:] for place in zip(*drawn, strict=True)])
    expected = 299 / (N - 1)
    assert np.abs(times - expected).max() < 4 * np.sqrt(expected)


def test_a_slot_is_the_place_among_those_that_arrive():
    came = Route([], np.array([3, 5, 9]), np.array([3]))
    assert came.slots(np.array([9, 3])).tolist() == [2, 0] and came.slots(5) == 1
    for route, asked in ((came, [3, 4]), (came, [10]), (Route([], came.arriving[:0], came.need), [3])):
        refused(f"the model of client {asked[-1]} is asked for, and was not sent", route.slots, np.array(asked))


FIELDS = {"clients": 5, "rounds": 2, "budget": 4, "tau_train": 1}
METHOD = """
import torch
from dpfl_mpi.methods import Method
from dpfl_mpi.methods.local import init
METHOD = Method(searches=False, topology="TOPOLOGY", every_row=EVERY)

def round(fed, state, t):
    w = fed.local_opt(state["client"]["w"], 1)
    chosen = fed.collect([sorted({(k + i) % fed.n for i in (1, 2, 3)} - {k}) for k in fed.ids])
    DO
    fed.evaluate(w)
    return {"client": {"w": w}, "shared": {"chosen": chosen}}
"""
TRAINED_ON = """received = fed.exchange(w, chosen)
    fed.local_opt(w, 1)
    w = fed.average(w, chosen, received)
    kept = [row for _, row in fed.every_row(w)]
    fed.local_opt(w, 1)
    w = torch.stack([(row + sum(kept)) / 6 for row in w]) if len(w) else w"""
PARTS = """received = fed.exchange(w, chosen)
    parts = [sum(b.stop - b.start for b in blocks) for _, blocks in received.parts(chosen, fed._parts.sums.blocks)]
    assert sum(parts) == len(fed.ids) and MANY, parts
    w = fed.average(w, chosen, received)"""
TOLD = "assert fed.tell(__import__('numpy').array([int(k) + 3 for k in fed.ids])).tolist() == [3, 4]"
GONE = {
    "exchange": "a = fed.exchange(w, chosen); b = fed.exchange(w * 0, chosen); w = fed.average(w, chosen, a)",
    "average": "a = fed.exchange(w, chosen); v = fed.average(w * 0, chosen); w = fed.average(w, chosen, a)",
    "every_row": "a = fed.exchange(w, chosen); v = [row for _, row in fed.every_row(w * 0)]; w = fed.average(w, chosen, a)",
    "narrow": "a = fed.exchange(w, chosen); fed.narrow(chosen); w = fed.average(w, chosen, a)",
    "inside": "w = sum(fed.average(w, chosen) for _ in fed.every_row(w))",
}


SQUARE = """import numpy as np
    a = np.random.default_rng(t).random((fed.n, fed.n))[fed.ids] * (np.arange(fed.n) != 2)
    w = fed.average(w, chosen, weights=a)"""
SEVEN = {"clients": 7, "rounds": 2, "tau_train": 1}


def written(at, do, topology="graph", every_row=0):
    """Write a method whose rounds do this; return its file."""
    text = METHOD.replace("DO", do).replace("TOPOLOGY", topology).replace("EVERY", str(every_row))
    if topology == "server":
        text = text.replace(', "chosen": chosen', "").replace("w, chosen, weights", "w, weights")
    return text_file(at / f"{topology}{len(list(at.iterdir()))}.py", text)


def squares(at, topology):
    return SEVEN | {"method": written(at, SQUARE, topology)} | ({"budget": 4} if topology == "graph" else {})


def test_what_is_averaged_has_the_same_bits_on_any_ranks(tmp_path):
    """Rows that are trained on before they are averaged, also through a narrow window and where a rank has no client; a matrix times the rows."""
    trained = FIELDS | {"method": written(tmp_path, TRAINED_ON)}
    runs = {"few": trained, "narrow": trained, "three": trained, "empty": trained | {"clients": 2}}
    runs["told"] = FIELDS | {"clients": 2, "method": written(tmp_path, TOLD)}
    for topology in ("graph", "server"):
        runs |= dict.fromkeys((f"{topology} on 2", topology), squares(tmp_path, topology))
    two = {name: {"ranks": 2} for name in ("few", "narrow", "graph on 2", "server on 2")}
    two["narrow"]["window_gb"] = 3.7e-5
    nine = FIELDS | {"clients": 9}  # three clients a rank, three senders each, room for three rows
    for name, many in (("a client or two at a time", "len(parts) > 1"), ("in blocks", "len(parts) == 1")):
        runs[name] = nine | {"method": written(tmp_path, PARTS.replace("MANY", f"({many} or len(fed.ids) == fed.n)"))}
        two[name] = {"window_gb": 5.5e-5} | ({"block": 2, "kernels": "torch"} if name == "in blocks" else {})
    out = run_many(3, tmp_path, runs, **two)
    bytes_put = {name: int(Result(path)["traffic/bytes_rma"].sum()) for name, path in out.items()}
    # a sender that two clients of a rank want is sent to it in more than one pass
    assert bytes_put["narrow"] > bytes_put["few"]
    del runs["in blocks"]  # PyTorch's numbers
    for name, fields in runs.items():
        assert differences(run_here(tmp_path / f"{name}, alone.h5", fields), out[name]) == [], name


@pytest.mark.parametrize("block", [1, 3])
def test_what_is_averaged_is_what_was_sent(block):
    """The sum of equation 4 written out: the senders as they were at the exchange, oneself as now."""
    with federation(FIELDS, block=block) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        graph = CollaborationGraph.from_lists([[1, 2], [0], [], [0, 1, 2], [3]])
        before, received = w.clone(), fed.exchange(w, graph)
        after = fed.local_opt(w, 1).clone()
        assert not torch.equal(before, after)
        mean = fed.average(w, graph, received)
        for k, senders in enumerate(([1, 2], [0], [], [0, 1, 2], [3])):
            rows = [after[fed.row_of[k]], *(before[fed.row_of[j]] for j in senders)]
            p = torch.from_numpy(fed.p[[k, *senders]])
            expected = (torch.stack(rows).double() * p[:, None]).sum(0) / p.sum()
            np.testing.assert_array_max_ulp(mean[fed.row_of[k]].numpy(), expected.float().numpy(), 1)
            assert senders or torch.equal(mean[fed.row_of[k]], rows[0])  # nobody sends: the row is untouched


@pytest.mark.parametrize("what", GONE)
def test_what_is_no_longer_here_is_refused(tmp_path, what):
    fields = FIELDS | {"method": written(tmp_path, GONE[what])}
    said = "fed.exchange or fed.every_row received are used after ...; only those of the last are here"
    refused(f"models that {said}", run_here, tmp_path / "run.h5", fields)


IN_PASSES = """
import os
from dpfl_mpi.mpi import placement, window
init = window.Inbox.__init__
def noted(box, *given, **how):
    with open(f"{folder}/{{os.getpid()}}.slots", "a") as file:
        file.write(f"{{given[2]}} ")
    init(box, *given, **how)
window.Inbox.__init__, placement.MOST_ROWS = noted, {most}
"""
AS_ON_A_GPU = """
from dpfl_mpi.transport import packing
whole = packing.Packing.__init__
def separate(rows, *given, **how):
    whole(rows, *given, **how)
    rows.left = rows.left.clone()
packing.Packing.__init__ = separate
"""


@pytest.mark.parametrize(
    ("ranks", "most", "more", "slots"), [(3, 2, "", ["2 2 3 "] * 3), (2, 256, AS_ON_A_GPU, ["3 3 2 ", "4 4 3 "])]
)
def test_every_row_comes_in_passes_of_one_window(ranks, most, more, slots, tmp_path):
    """At most MOST_ROWS rows at a time, through a window that each run makes once, also where what is sent is a tensor of its own."""
    runs = {name: SEVEN | {"method": name} for name in ("pfedgraph", "cobo")}
    runs["mine"] = FIELDS | {"method": written(tmp_path, TRAINED_ON)}
    out = run_many(ranks, tmp_path, runs, IN_PASSES.format(folder=tmp_path, most=most) + more)
    assert sorted(path.read_text() for path in tmp_path.glob("*.slots")) == slots
    for name, fields in runs.items():
        assert differences(run_here(tmp_path / "alone.h5", fields, fresh=True), out[name]) == []


def test_kept_rows_are_copies():
    with federation(FIELDS) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        before = w[fed.row_of].clone()
        kept = [row for _, row in fed.every_row(w)]
        fed.exchange(w.zero_(), CollaborationGraph.empty(5))
        assert torch.equal(torch.stack(kept), before)


@pytest.mark.parametrize("topology", ["graph", "server"])
def test_a_matrix_times_the_rows(topology, result_of, tmp_path):
    """Weights of all rows at a server, and of the senders along a graph; of client 2 nobody takes anything."""
    fields, along = squares(tmp_path, topology), topology == "graph"
    assert result_of(fields)["traffic/models_received"][1:].tolist() == [[3 if along else 2] * 7] * 2
    with federation(fields) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        weights = np.random.default_rng(1).random((7, 7)) * (np.arange(7) != 2)
        weights[5] = 0
        chosen = fed.collect([[(k + i) % 7 for i in (1, 2, 3)] for k in fed.ids])
        mean = fed.average(w, *[chosen] * along, weights=weights[fed.ids])
        rows = w[fed.row_of].double().numpy()
        weights *= (chosen.matrix() | np.eye(7, dtype=bool)) if along else 1
        expected = weights @ rows / np.where(weights.sum(1), weights.sum(1), 1)[:, None]
        expected[5] = rows[5]
        np.testing.assert_allclose(mean[fed.row_of].numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_models_that_came_by_every_row_are_not_counted_again(when, result_of, tmp_path):
    """Of 5 clients 4 rows come to each, of which 3 are averaged; rows that were trained on since come anew; `describe` knows of both."""
    note = "fed.note_received(4); "
    one = (
        "any(0 for _ in fed.every_row(w)); {}w = fed.average(w, chosen); {}w = fed.average(fed.local_opt(w, 1), chosen)"
    )
    do = one.format(note * (when == "before"), note * (when == "after"))
    counted = result_of(FIELDS | {"method": written(tmp_path, do, every_row=1)})["traffic/models_received"][1]
    assert counted.tolist() == [(0 if when == "never" else 1) + 3 + 3] * 5
