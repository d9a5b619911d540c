"""--churn: who is there, who searches when clients come and leave, and what it costs."""

import numpy as np
import pytest
from launch import federation, refused, run_here, text_file
from test_all_methods import EVENTS

from dpfl_mpi.federation.limits import limits_of
from dpfl_mpi.settings import Run

SMALL = {"clients": 6, "rounds": 4, "tau_init": 1, "tau_train": 1, "budget": 3}


def test_who_is_there_by_a_file(tmp_path):
    with federation(SMALL | {"churn": text_file(tmp_path / "churn.csv", EVENTS)}) as fed:
        seen = []
        for t in range(5):
            fed._parts.begin_round(t)
            seen.append(("".join(map(str, fed.members.there.astype(int))), np.flatnonzero(fed.members.new).tolist()))
            fed.members.new[:] = False
    # who joins later is not there at first
    assert seen == [("111100", []), ("011110", [4]), ("011111", [5]), ("101111", [0]), ("101111", [])]


def test_who_is_there_by_draws():
    limits = limits_of(Run(clients=400, rounds=60, churn="0.1:0.3").resolve(), federation(SMALL).world)
    drawn = [np.zeros(400, bool)]
    for t in range(61):
        drawn.append(limits.there(t, t, drawn[-1]))
    drawn = np.array(drawn[1:])
    assert drawn.mean() == pytest.approx(0.75, abs=0.02)  # 0.3 of 0.1 + 0.3, from the first round on
    assert drawn[0].mean() == pytest.approx(0.75, abs=0.07)
    assert drawn[1:][~drawn[:-1]].mean() == pytest.approx(0.3, abs=0.02)
    assert 1 - drawn[1:][drawn[:-1]].mean() == pytest.approx(0.1, abs=0.02)


def test_by_the_clock(tmp_path, result_of):
    """With clocks times are simulated seconds: a round of one step takes a second; local work has no preprocessing."""
    equal = text_file(tmp_path / "net.csv", "1,0,inf,inf,0\n" * 6)
    fields = SMALL | {"batch_size": 4096, "network": equal, "method": "local"}
    result = result_of(fields | {"churn": text_file(tmp_path / "churn.csv", "0.5 0 leave\n2 1 leave\n2.5 0 join\n")})
    assert result["round/there"][:, :2].tolist() == [[1, 1], [1, 1], [0, 1], [0, 0], [1, 0]]
    assert np.isfinite(result["round/test_acc"]).tolist() == result["round/there"].tolist()


def test_who_has_left_is_not_tuned_and_keeps_its_best(tmp_path, result_of):
    fields = SMALL | {"method": "local", "churn": text_file(tmp_path / "churn.csv", "2 1 leave\n")}
    before, tuned = result_of(fields), result_of(fields | {"finetune_epochs": 1})
    assert tuned["best/round"].tolist() == [5, before["best/round"][1], 5, 5, 5, 5] and before["best/round"][1] < 2
    assert tuned["best/test_acc"][1] == before["best/test_acc"][1] > 0


def test_what_stays_is_no_candidate_and_keeps_its_place(tmp_path):
    with federation(SMALL | {"churn": text_file(tmp_path / "churn.csv", EVENTS), "budget": 4}) as fed:
        omega = fed.collect([np.array([[1, 2, 3], [0, 2], [0], [1], [], []][k]) for k in fed.ids])
        fed._parts.begin_round(1)  # 0 has left, 4 has come
        room = []

        def choose():
            room.append((fed.most_senders.tolist(), [fed.reachable(k).tolist() for k in range(5)]))
            return fed.collect([fed.reachable(k)[: fed.most_senders[k]] for k in fed.ids])

        mended = fed.repaired(omega, choose)
        assert room == [([0, 1, 1, 0, 3, 0], [[], [3, 4], [1, 3, 4], [2, 4], [1, 2, 3]])]
        assert [mended.of(k).tolist() for k in range(6)] == [[1, 2, 3], [2, 3], [1], [1], [1, 2, 3], []]
        assert fed.most_senders.tolist() == [3] * 6
        assert fed.repaired(mended, choose) is not None
        assert len(room) == 1  # nobody asks again


def test_who_does_not_search_goes_on_with_older_models(tmp_path, result_of):
    """Client 0 takes a hundred times as long; 5 comes in round 2, for which client 0's models of that round are awaited, by it alone."""
    fields = SMALL | {"method": "pairwise", "budget": 6, "batch_size": 4096, "staleness": 2}
    fields |= {"network": text_file(tmp_path / "slow.csv", "100,0,inf,inf,0\n" + "1,0,inf,inf,0\n" * 5)}
    result = result_of(fields | {"churn": text_file(tmp_path / "churn.csv", "100.5 5 join\n")})
    assert result["round/there"][:, 5].tolist() == [0, 0, 1, 1, 1]
    assert result["graph/repair_models"][2].tolist() == [0, 0, 0, 0, 0, 5]
    assert result["network/age"][:3].tolist() == [[0] * 6, [0, 1, 1, 1, 1, 0], [0, 2, 2, 2, 2, 0]]
    assert result["network/end"][2].tolist() == [300, 102, 102, 102, 102, 300]


def test_somebody_stays(tmp_path):
    nobody = "".join(f"1 {k} leave\n" for k in range(6))
    fields = SMALL | {"churn": text_file(tmp_path / "churn.csv", nobody)}
    refused("--churn leaves nobody in round 1", run_here, tmp_path / "run.h5", fields)
