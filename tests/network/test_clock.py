"""The clocks of --network against numbers worked out by hand, and against a queue that takes one message after the other."""

import numpy as np
import pytest
from launch import differences, run_here, run_many

from dpfl_mpi.errors import UserError
from dpfl_mpi.network.clock import Clock, critical_path, queue
from dpfl_mpi.network.profiles import NS, PROFILES, Speeds, speeds_of
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.values import NETWORKS

SMALL = {"clients": 6, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": 3}


def clock_of(step, image=(0, 0, 0), up=(8, 8, 8), down=(8, 8, 8), latency=(0, 0, 0)):
    return Clock(Speeds(*(np.array(values, float) for values in (step, image, up, down, latency))))


def seconds(values):
    return (np.asarray(values) / NS).tolist()


def test_a_round_by_hand():
    """Megabytes at 8 megabits per second take a second each. Client 0 receives from 1 and 2, client 1 from 0, client 2 from no one."""
    clock = clock_of(step=(1, 2, 3), image=(0.5, 0, 0), latency=(0.25, 0, 0.5), down=(4, 8, 8))
    clock.work(np.array([2, 2, 2]), np.array([2, 0, 0]))
    assert seconds(clock.ready) == [2, 4, 6]
    assert seconds(clock.now) == [3, 4, 6]
    to, of = np.array([0, 0, 1]), np.array([1, 2, 0])
    here = clock.arrivals(to, of, np.full(3, 10**6))
    clock.wait(to, of, here)
    # 1 to 0: leaves at 4, up 5, latency 5.25, down (2 s) 7.25; 2 to 0: 6, 7, 7.75, 9.75; 0 to 1: 2, 3, 3.25, 4.25
    assert seconds(here) == [7.25, 9.75, 4.25]
    assert seconds(clock.now) == [9.75, 4.25, 6]
    assert {name: seconds(spent) for name, spent in clock.spent.items()} == {
        "train": [2, 4, 6],
        "choose": [1, 0, 0],
        "send": [1, 1, 1],
        "wait": [6.75, 0.25, 0],
    }
    assert clock.waited_for.tolist() == [2, 0, -1]
    clock.begin(np.ones(3, bool))
    clock.work(np.array([1, 1, 1]), np.zeros(3, int))
    clock.server(np.array([True, True, False]), 10**6)
    # 0 is trained at 10.75, at the server at 12; 1 at 6.25, then 7.25: both have the answer of 12
    assert seconds(clock.now) == [12 + 0.25 + 2, 12 + 1, 9]
    assert clock.waited_for.tolist() == [0, 0, -1]


def test_what_is_old_by_hand():
    """Client 1 takes two seconds a step, client 0 one; a model takes two more, one on either link."""
    speeds = Speeds(*(np.array(values, float) for values in ((1, 2), (0, 0), (8, 8), (8, 8), (0, 0))))
    clock, to, of = Clock(speeds, staleness=1), np.array([0, 1]), np.array([1, 0])
    seen = []
    for t in range(3):
        clock.begin(np.ones(2, bool))
        clock.work(np.ones(2, int), np.zeros(2, int))
        seen.append((clock.exchange(to, of, np.full(2, 10**6), old=t > 0).tolist(), seconds(clock.now)))
    # 0: 1 is trained at 2 and there at 4; 0 at 1, there at 3. 1: they are trained at 5 and at 5, and both take round 0's
    # 2: trained at 6 and 7; 0's of round 1 was there at 7, 1's of round 1 comes at 7, for which client 0 waits
    assert seen == [([0, 0], [4, 3]), ([1, 1], [5, 5]), ([1, 1], [7, 7])]


def test_one_who_was_away_begins_with_the_first_of_the_others():
    clock = clock_of(step=(1, 2, 3))
    clock.begin(np.array([True, True, False]))
    clock.work(np.array([1, 1, 0]), np.zeros(3, int))
    clock.begin(np.ones(3, bool))
    assert seconds(clock.now) == [1, 2, 1]


def test_a_search_is_asked_for_and_a_standing_graph_is_not():
    for asks, there in ((False, 3), (True, 6)):  # 0 has trained at 1; 1, which is at 4, receives in two seconds more
        clock = clock_of(step=(1, 4, 1))
        clock.work(np.ones(3, int), np.zeros(3, int))
        if asks:
            clock.ask()
        assert seconds(clock.arrivals(np.array([1]), np.array([0]), np.array([10**6]))) == [there]


def test_a_queue_is_one_message_after_the_other():
    rng = np.random.default_rng(0)
    ready, link, cost, free = (rng.integers(0, high, n) for high, n in ((9, 60), (5, 60), (4, 60), (6, 7)))
    other, busy, expected = rng.permutation(60), free.copy(), np.zeros(60, int)
    for edge in sorted(range(60), key=lambda e: (ready[e], other[e])):
        busy[link[edge]] = expected[edge] = max(busy[link[edge]], ready[edge]) + cost[edge]
    assert queue(ready, link, other, cost, free).tolist() == expected.tolist()
    assert free.tolist() == busy.tolist()


def test_the_critical_path_goes_back_over_who_was_waited_for():
    end = np.array([[1, 2, 3], [4, 5, 4], [9, 6, 6]])
    assert critical_path(end, np.array([[-1, -1, -1], [1, 2, -1], [1, -1, -1]])) == [2, 2, 1]


@pytest.mark.parametrize("method", ["dpfl", "fedavg", "pairwise", "pfedgraph", "local"])
def test_clocks_change_no_model_and_add_up(method, tmp_path):
    fields = SMALL | {"method": method}
    plain = run_here(tmp_path / "plain.h5", fields)
    path = run_here(tmp_path / "phones.h5", fields | {"network": "phones"})
    assert all(name.startswith(("network/", "traffic/bytes_sent", "/")) for name in differences(plain, path))
    with Result(path) as result:
        parts = {name: result[f"network/{name}"] for name in ("train", "choose", "wait", "end")}
        sent = result["traffic/bytes_sent"].sum(1) / (4 * int(result.fact("parameters")))
        spent = (parts["train"] + parts["choose"] + parts["wait"]).cumsum(0)
        np.testing.assert_allclose(spent, parts["end"], rtol=1e-12)
        steps = np.round(parts["train"] / result["network/step"]).sum(1).cumsum()
        assert steps.tolist() == result["round/gradient_steps"].tolist()
        assert (parts["wait"].sum() > 0) == (sent.sum() > 0) == (method != "local")
        if method in ("dpfl", "pairwise"):
            assert sent.tolist() == result["traffic/models_received"].sum(1).tolist()


def test_clocks_are_the_same_on_any_ranks_and_after_a_checkpoint(tmp_path):
    fields = SMALL | {"network": "hospitals", "participation": 0.7}
    one = run_here(tmp_path / "one.h5", fields)
    three = run_many(3, tmp_path, {"three": fields})["three"]
    assert differences(one, three) == []


def test_speeds_are_drawn_once_by_the_seed():
    drawn = [speeds_of(Run(**SMALL, network="phones", seed=seed).resolve()) for seed in (1, 1, 2)]
    assert drawn[0].step.tolist() == drawn[1].step.tolist() != drawn[2].step.tolist()
    assert tuple(PROFILES) == NETWORKS
    many = speeds_of(Run(clients=1000, network="phones").resolve())
    assert np.median(many.up) == pytest.approx(12.6, rel=0.1)
    assert np.log(many.step).std() == pytest.approx(0.7, rel=0.1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1 1 1 1 0\n" * 5, "must hold 6 lines .clients. of 5 numbers: step, image, up, down, latency"),
        ("1 1 1 1 0\n" * 5 + "1 1 1\n", "must hold 6 lines"),
        ("1 1 1 one 0\n" * 6, "must hold 6 lines"),
        ("0,1,1,1,0\n" * 6, "the step of client 0 is 0, allowed is a number from 1e-09 to 1000"),
        ("1,1,1,1,0\n" * 5 + "1,1,1,-1,0\n", "the down of client 5 is -1"),
        ("1,1,nan,1,0\n" * 6, "the up of client 0 is nan"),
        ("1,1,1,1,-0.1\n" * 6, "the latency of client 0 is -0.1"),
    ],
)
def test_bad_networks_are_sentences(text, sentence, tmp_path):
    (tmp_path / "net.csv").write_text(text)
    with pytest.raises(UserError, match=sentence):
        Run(**SMALL, network=str(tmp_path / "net.csv")).resolve()
    with pytest.raises(UserError, match="--network is lan; allowed are phones, hospitals, campus, or a file"):
        Run(network="lan").resolve()


def test_a_file_of_speeds(tmp_path):
    (tmp_path / "net.csv").write_text("step,image,up,down,latency\n" + "0.1,0,inf,inf,0\n" * 6)
    run = Run(**SMALL, network=str(tmp_path / "net.csv")).resolve()
    assert speeds_of(run).up.tolist() == [np.inf] * 6
    assert run.key()["network"] == run.network.sha256
