"""The clocks of --network, against numbers worked out by hand."""

import numpy as np
import pytest
from launch import differences, run_here, text_file

from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run
from dpfl_mpi.settings.values import NETWORKS
from dpfl_mpi.transport.clock import NS, PROFILES, Clock, Speeds, queue, speeds_of

SMALL = {"clients": 6, "rounds": 2, "tau_init": 1, "tau_train": 1, "budget": 3}


def clock_of(step, image=0, down=8, latency=0, staleness=0):
    values = (np.full(len(step), value, float) for value in (step, image, 8, down, latency))
    return Clock(Speeds(*values), staleness)


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
    clock, to, of = clock_of(step=(1, 2), staleness=1), np.array([0, 1]), np.array([1, 0])
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


@pytest.mark.parametrize("method", ["dpfl", "fedavg", "pairwise", "pfedgraph", "local"])
def test_clocks_change_no_model_and_add_up(method, tmp_path):
    fields = SMALL | {"method": method}
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
        if method in ("dpfl", "pairwise"):
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
