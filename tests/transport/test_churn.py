"""Clients that come and leave (--churn), late models (--staleness), clocks (--network)."""

import numpy as np
import pytest
from launch import differences, federation, refused, run_here, run_many, text_file

from dpfl_mpi.federation.limits import limits_of
from dpfl_mpi.plugins import find, shipped
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.values import NETWORKS
from dpfl_mpi.transport.clock import NS, PROFILES, Clock, Speeds, queue, speeds_of

WORKS = ""
SAME_ROUND = "sends more than models, of the same round: allowed is 0"
SERVER = "waits for all: allowed is 0"
LATE = dict.fromkeys(shipped("method"), SERVER)  # what a method says of --staleness
LATE |= dict.fromkeys(["dac", "fedsim", "dfedpgp", "facade", "l2c", "morph"], SAME_ROUND)
LATE |= dict.fromkeys(["sketch", "nearest", "spectral", "spectral_search"], SAME_ROUND)
CHOOSE = ["dpfl", "dpfl_choice", "random_graph", "pairwise", "oracle"]
LATE |= dict.fromkeys([*CHOOSE, "pens", "pfedsv", "fedfomo", "dpsgd", "local"], WORKS)
del LATE["replay"]  # whose graphs are given
GRAPH = [name for name in LATE if find("method", name).topology == "graph"]
MORE = {
    "dpfl_choice": {"options": {"order": "loss"}},
    "fedrep": {"tau_train": 2},  # an epoch for the head and one for the base
    "fedbn": {"model": "resnet", "model_options": {"widths": "4,8", "groups": 2}, "augment": False},
}
SMALL = {"clients": 6, "rounds": 4, "tau_init": 1, "tau_train": 1, "budget": 3}
EVENTS = "\n1 4 join\n1 0 leave\n2 5 join\n3,0,join\n3 1 leave\n"
THERE = [[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1]]


def fields_of(method, **fields):
    return SMALL | {"rounds": 3, "method": method} | MORE.get(method, {}) | fields


@pytest.mark.parametrize("method", LATE)
def test_who_has_left_is_in_no_round(method, result_of, tmp_path):
    result = result_of(fields_of(method, churn=text_file(tmp_path / "churn.csv", EVENTS)))
    graphs, there = [result.chosen(t) for t in range(4)], result["round/there"]
    assert there.astype(int).tolist() == THERE
    assert np.isfinite(result["round/val_acc"]).tolist() == THERE
    assert not result["traffic/models_received"][~there].any()
    assert np.isfinite(result["best/test_acc"]).all()
    for t, graph in enumerate(graphs):
        assert there[t][graph.senders].all()
        assert not graph.degrees()[~there[t]].any()
    if method not in ("dpfl", "random_graph", "pairwise", "oracle"):
        return
    models, evaluations = result["graph/repair_models"], result["graph/repair_evaluations"]
    assert (models <= result["traffic/models_received"]).all()
    assert (evaluations <= result["graph/evaluations"]).all()
    assert not models[0].any()
    for t in range(1, 4):
        arrived = there[t] & ~there[t - 1]
        if t == 1 or method != "dpfl":  # whose Omega is not recorded once it is repaired
            omega = result.omega() if t == 1 else graphs[t - 1]
            lost = np.array([not there[t, omega.of(k)].all() for k in range(6)]) & there[t]
            assert not models[t][~(arrived | lost)].any()
        assert (graphs[t].degrees() <= 2).all()
        if method in ("random_graph", "pairwise"):
            assert (graphs[t].degrees()[there[t]] == 2).all()  # as many as before
        if method in ("dpfl", "pairwise"):
            assert (models[t][arrived] > 0).all()
            assert (evaluations[t][arrived] > 0).all()


def test_who_joins_averages_along_its_omega_until_it_chooses_anew(result_of, tmp_path):
    fields = fields_of("dpfl", churn=text_file(tmp_path / "churn.csv", "1 3 join\n"), ggc_period=9)
    result = result_of(fields)
    senders = result.chosen(1).of(3).tolist()
    assert senders and [result.chosen(t).of(3).tolist() for t in (2, 3)] == [senders] * 2
    assert (result["traffic/models_received"][2:, 3] == len(senders)).all()


def test_who_is_absent_when_nearest_chooses_last_keeps_its_senders(result_of, tmp_path):
    there = text_file(tmp_path / "there.txt", "1 1 1 1 0 0\n" + "1 1 1 1 1 1\n" * 2)
    result = result_of(fields_of("nearest", available=there, options={"until": 1}))
    for t in (2, 3):
        assert [result.chosen(t).of(k).tolist() for k in (4, 5)] == [
            result.chosen(0).of(k).tolist() for k in (4, 5)
        ]


def test_late_models_and_clients_that_come_and_leave_are_the_same_on_any_ranks(tmp_path):
    slow = text_file(tmp_path / "slow.csv", "10,0.01,5,5,0.1\n" + "1,0.001,5,5,0.1\n" * 5)
    network, runs = {"network": slow, "churn": "0.2:0.6"}, {}
    for method in GRAPH:
        declared = find("method", method)
        send = {} if declared.asks_all or declared.sends else {"send": "layers=body"}
        late = 2 if LATE[method] == WORKS else 0
        codec = "none" if method == "l2c" else "topk:0.3"
        runs[method] = fields_of(method, **network, **send, codec=codec, staleness=late)
    done = run_many(3, tmp_path, runs)
    for method, fields in runs.items():
        assert differences(run_here(tmp_path / f"{method}1.h5", fields), done[method]) == [], method
        with Result(done[method]) as result:
            assert (result["network/age"].sum() > 0) == (LATE[method] == WORKS), method
            assert result["network/age"].max() <= 2 * 2


@pytest.mark.parametrize("method", [name for name, sentence in LATE.items() if sentence])
def test_who_takes_no_old_models_says_so(method):
    run = Run(**fields_of(method, network="phones", staleness=1))
    refused(f"--staleness is 1; ...{LATE[method]}", run.resolve)


def test_who_is_there_by_a_file_and_by_draws(tmp_path):
    with federation(SMALL | {"churn": text_file(tmp_path / "churn.csv", EVENTS)}) as fed:
        seen = []
        for t in range(5):
            fed._parts.begin_round(t)
            joined = "".join(map(str, fed.members.joined.astype(int)))
            seen.append((joined, np.flatnonzero(fed.members.yet_to_choose).tolist()))
            fed.members.yet_to_choose[:] = False
    # a client that joins later is absent at first
    expected = [("111100", []), ("011110", [4]), ("011111", [5]), ("101111", [0]), ("101111", [])]
    assert seen == expected
    run = Run(clients=400, rounds=60, churn="0.1:0.3").resolve()
    limits = limits_of(run, federation(SMALL).world)
    drawn = [np.zeros(400, bool)]
    for t in range(61):
        drawn.append(limits.joined(t, t, drawn[-1]))
    drawn = np.array(drawn[1:])
    assert drawn.mean() == pytest.approx(
        0.75, abs=0.02
    )  # 0.3 of 0.1 + 0.3, from the first round on
    assert drawn[0].mean() == pytest.approx(0.75, abs=0.07)
    assert drawn[1:][~drawn[:-1]].mean() == pytest.approx(0.3, abs=0.02)
    assert 1 - drawn[1:][drawn[:-1]].mean() == pytest.approx(0.1, abs=0.02)


def test_by_the_clock(tmp_path, result_of):
    """With clocks the file has simulated seconds; here a round of one step takes a second."""
    equal = text_file(tmp_path / "net.csv", "1,0,inf,inf,0\n" * 6)
    fields = SMALL | {"batch_size": 4096, "network": equal, "method": "local"}
    events = text_file(tmp_path / "churn.csv", "0.5 0 leave\n2 1 leave\n2.5 0 join\n")
    result = result_of(fields | {"churn": events})
    assert result["round/there"][:, :2].tolist() == [[1, 1], [1, 1], [0, 1], [0, 0], [1, 0]]
    assert np.isfinite(result["round/test_acc"]).tolist() == result["round/there"].tolist()
    # Client 5 comes in round 2. It alone waits for slow client 0's model of that round.
    fields = SMALL | {"method": "pairwise", "budget": 6, "batch_size": 4096, "staleness": 2}
    slow = text_file(tmp_path / "slow.csv", "100,0,inf,inf,0\n" + "1,0,inf,inf,0\n" * 5)
    joins = text_file(tmp_path / "churn.csv", "100.5 5 join\n")
    result = result_of(fields | {"network": slow, "churn": joins})
    assert result["round/there"][:, 5].tolist() == [0, 0, 1, 1, 1]
    assert result["graph/repair_models"][2].tolist() == [0, 0, 0, 0, 0, 5]
    assert result["network/age"][:3].tolist() == [[0] * 6, [0, 1, 1, 1, 1, 0], [0, 2, 2, 2, 2, 0]]
    assert result["network/end"][2].tolist() == [300, 102, 102, 102, 102, 300]


def test_who_has_left_is_not_tuned_and_keeps_its_best(tmp_path, result_of):
    fields = SMALL | {"method": "local", "churn": text_file(tmp_path / "churn.csv", "2 1 leave\n")}
    before, tuned = result_of(fields), result_of(fields | {"finetune_epochs": 1})
    last = before["best/round"][1]
    assert last < 2
    assert tuned["best/round"].tolist() == [5, last, 5, 5, 5, 5]
    assert tuned["best/test_acc"][1] == before["best/test_acc"][1] > 0


def test_what_stays_is_no_candidate_and_keeps_its_place(tmp_path):
    events = text_file(tmp_path / "churn.csv", EVENTS)
    with federation(SMALL | {"churn": events, "budget": 4}) as fed:
        omega = fed.collect([np.array([[1, 2, 3], [0, 2], [0], [1], [], []][k]) for k in fed.ids])
        fed._parts.begin_round(1)  # 0 has left, 4 has come
        room = []

        def choose(candidates):
            room.append((candidates.room.tolist(), [candidates.of(k).tolist() for k in range(5)]))
            return fed.collect([candidates.of(k)[: candidates.room[k]] for k in fed.ids])

        mended = fed.repaired(omega, choose)
        assert room == [([0, 1, 1, 0, 3, 0], [[], [3, 4], [1, 3, 4], [2, 4], [1, 2, 3]])]
        senders = [mended.of(k).tolist() for k in range(6)]
        assert senders == [[1, 2, 3], [2, 3], [1], [1], [1, 2, 3], []]
        assert fed.most_senders.tolist() == [3] * 6
        assert fed.repaired(mended, choose) is not None
        assert len(room) == 1  # nobody asks again


def test_somebody_stays(tmp_path):
    def run(text, **fields):
        return SMALL | {"churn": text_file(tmp_path / "churn.csv", text)} | fields

    leave = "".join(f"1.5 {k} leave\n" for k in range(1, 6))
    for text, number in (
        ("".join(f"1 {k} join\n" for k in range(6)), 0),
        (leave + "2.5 0 leave\n", 3),
        (leave + "2 0 leave\n2.1 3 join\n", 2),
        (leave + "4 0 leave\n", 4),
    ):
        empty = f"churn.csv; round {number} has no client, allowed is at least one"
        refused(empty, Run(**run(text)).resolve)
    for text in (leave + "2.5 0 leave\n2.9 3 join\n", leave + "4.1 0 leave\n"):
        assert Run(**run(text)).resolve().rounds == 4
    fields = run(leave + "2 0 leave\n", network="phones")
    refused("--churn leaves nobody in round", run_here, tmp_path / "run.h5", fields)


def clock_of(step, image=0, down=8, latency=0, ages=1):
    values = (np.full(len(step), value, float) for value in (step, image, 8, down, latency))
    return Clock(Speeds(*values), ages)


def seconds(values):
    return (np.asarray(values) / NS).tolist()


def test_a_round_by_hand():
    """A megabyte takes a second. Client 0 receives from 1 and 2, client 1 from 0, 2 from no one."""
    clock = clock_of(step=(1, 2, 3), image=(0.5, 0, 0), latency=(0.25, 0, 0.5), down=(4, 8, 8))
    clock.work(np.array([2, 2, 2]), np.array([2, 0, 0]))
    assert seconds(clock.ready_at) == [2, 4, 6]
    assert seconds(clock.now) == [3, 4, 6]
    to, of = np.array([0, 0, 1]), np.array([1, 2, 0])
    there = clock.arrivals(to, of, np.full(3, 10**6), standing=True)
    clock.wait(to, of, there)
    # 1 to 0: leaves at 4, up 5, latency 5.25, down (2 s) 7.25
    # 2 to 0: 6, 7, 7.75, 9.75; 0 to 1: 2, 3, 3.25, 4.25
    assert seconds(there) == [7.25, 9.75, 4.25]
    assert seconds(clock.now) == [9.75, 4.25, 6]
    expected = {"train": [2, 4, 6], "choose": [1, 0, 0], "send": [1, 1, 1], "wait": [6.75, 0.25, 0]}
    assert {name: seconds(spent) for name, spent in clock.spent.items()} == expected
    assert clock.waited_for.tolist() == [2, 0, -1]
    clock.begin(np.ones(3, bool))
    clock.work(np.array([1, 1, 1]), np.zeros(3, int))
    clock.server(np.array([True, True, False]), 10**6)
    # 0 is trained at 10.75, at the server at 12; 1 at 6.25, then 7.25: both have the answer of 12
    assert seconds(clock.now) == [12 + 0.25 + 2, 12 + 1, 9]
    assert clock.waited_for.tolist() == [0, 0, -1]
    # Client 1 takes two seconds a step, client 0 one; a model travels two seconds.
    clock, to, of = clock_of(step=(1, 2), ages=2), np.array([0, 1]), np.array([1, 0])
    seen = []
    for t in range(3):
        clock.begin(np.ones(2, bool))
        clock.work(np.ones(2, int), np.zeros(2, int))
        ages = clock.exchange(to, of, np.full(2, 10**6), old=t > 0)
        seen.append((ages.tolist(), seconds(clock.now)))
    # round 0: 1 is trained at 2 and there at 4; 0 is trained at 1 and there at 3
    # round 1: both are trained at 5, and take the models of round 0
    # round 2: trained at 6 and 7; 0's of round 1 is there at 7, and 1's, for which client 0 waits
    assert seen == [([0, 0], [4, 3]), ([1, 1], [5, 5]), ([1, 1], [7, 7])]


def test_one_who_was_away_begins_with_the_first_of_the_others():
    clock = clock_of(step=(1, 2, 3))
    clock.begin(np.array([True, True, False]))
    clock.work(np.array([1, 1, 0]), np.zeros(3, int))
    clock.begin(np.ones(3, bool))
    assert seconds(clock.now) == [1, 2, 1]
    clock.work(np.array([0, 0, 1]), np.zeros(3, int))
    # nobody of the last round, nobody at all, then client 0
    for alone, now in ((2, [1, 2, 4]), (None, [1, 2, 4]), (0, [4, 2, 4])):
        clock.begin(np.arange(3) == (3 if alone is None else alone))
        assert seconds(clock.now) == now
    # 0 has trained at 1; 1, which is at 4, receives two seconds later
    for asks, there in ((False, 3), (True, 6)):
        clock = clock_of(step=(1, 4, 1))
        clock.work(np.ones(3, int), np.zeros(3, int))
        if asks:
            clock.ask()
        arrival = clock.arrivals(np.array([1]), np.array([0]), np.array([10**6]), standing=True)
        assert seconds(arrival) == [there]


def test_a_queue_is_one_message_after_the_other():
    rng = np.random.default_rng(0)
    sizes = ((9, 60), (5, 60), (4, 60), (6, 7))
    ready, link, cost, free = (rng.integers(0, high, n) for high, n in sizes)
    other, busy, expected = rng.permutation(60), free.copy(), np.zeros(60, int)
    for edge in sorted(range(60), key=lambda e: (ready[e], other[e])):
        busy[link[edge]] = expected[edge] = max(busy[link[edge]], ready[edge]) + cost[edge]
    assert queue(ready, link, other, cost, free).tolist() == expected.tolist()
    assert free.tolist() == busy.tolist()


@pytest.mark.parametrize("method", ["dpfl", "fedavg", "pairwise", "pfedgraph", "ifca", "local"])
def test_clocks_change_no_model_and_add_up(method, tmp_path):
    fields = SMALL | {"method": method, "rounds": 2}
    plain = run_here(tmp_path / "plain.h5", fields)
    path = run_here(tmp_path / "phones.h5", fields | {"network": "phones"})
    of_network = ("network/", "traffic/bytes_sent", "/")
    assert all(name.startswith(of_network) for name in differences(plain, path))
    with Result(path) as result:
        parts = {name: result[f"network/{name}"] for name in ("train", "choose", "wait", "end")}
        sent = result["traffic/bytes_sent"].sum(1) / (4 * int(result.fact("parameters")))
        spent = (parts["train"] + parts["choose"] + parts["wait"]).cumsum(0)
        np.testing.assert_allclose(spent, parts["end"], rtol=1e-12)
        steps = np.round(parts["train"] / result["network/step"]).sum(1).cumsum()
        assert steps.tolist() == result["round/gradient_steps"].tolist()
        assert (parts["wait"].sum() > 0) == (sent.sum() > 0) == (method != "local")
        if method in ("dpfl", "pairwise", "ifca"):
            assert sent.tolist() == result["traffic/models_received"].sum(1).tolist()


def test_speeds_of_a_file_and_of_a_draw(tmp_path):
    lines = "step,image,up,down,latency\n" + "0.1,0,inf,inf,0\n" * 6
    run = Run(**SMALL, network=text_file(tmp_path / "net.csv", lines)).resolve()
    assert speeds_of(str(run.network), run.network.table, 6, 42).up.tolist() == [np.inf] * 6
    assert run.key()["network"] == run.network.sha256
    drawn = [speeds_of("phones", None, 6, seed) for seed in (1, 1, 2)]
    assert drawn[0].step.tolist() == drawn[1].step.tolist() != drawn[2].step.tolist()
    assert tuple(PROFILES) == NETWORKS
    many = speeds_of("phones", None, 1000, 42)
    assert np.median(many.up) == pytest.approx(12.6, rel=0.1)
    assert np.log(many.step).std() == pytest.approx(0.7, rel=0.1)


def test_who_joins_trains_on_from_where_it_left_or_from_the_start(tmp_path, result_of):
    """Local: client 4 comes in round 2; client 1 is away in rounds 2 and 3."""
    churn = text_file(tmp_path / "churn.csv", "2 4 join\n2 1 leave\n4 1 join\n")
    fields = SMALL | {"method": "local"}
    plain, late = (result_of(fields | more)["round/test_loss"] for more in ({}, {"churn": churn}))
    assert late[2:, 4].tolist() == plain[1:4, 4].tolist() and np.isnan(late[:2, 4]).all()
    assert late[[0, 1, 4], 1].tolist() == plain[:3, 1].tolist() and np.isnan(late[2:4, 1]).all()


def test_by_chances_too_somebody_stays():
    run = Run(clients=5, rounds=30, churn="1:0", newcomers=0.4).resolve()
    limits, joined = limits_of(run, federation(SMALL).world), np.ones(5, bool)
    for t in range(31):
        joined = limits.joined(t, t, joined)
        assert joined.sum() == 1 and not joined[limits.newcomers].any()
