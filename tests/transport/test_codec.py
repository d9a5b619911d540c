"""--codec, --send and --staleness: what arrives, how old it is, and its bytes."""

import numpy as np
import own
import pytest
import torch
from launch import differences, federation, refused, run_here, run_many, text_file

from dpfl_mpi.results import Result
from dpfl_mpi.transport.links import Links

SMALL = {"clients": 6, "rounds": 3, "tau_init": 1, "tau_train": 1, "budget": 3}
LATE = {"network": "phones", "staleness": 2}
OF_NETWORK = ("/", "network/", "traffic/bytes_sent")  # what a network adds to a result


def encoding(codec):
    """Return a Federation, its codec, a row, and the one that its receivers have."""
    fed = federation(SMALL | {"codec": codec})
    x = fed.initial_row()
    w = x + 0.1 * torch.from_numpy(np.random.default_rng(0).standard_normal(len(x))).float()
    w[fed.ensemble.size :] = 0
    return fed, fed.mail.packing.codec, w, x.clone()


def test_int8_and_topk():
    fed, codec, w, x = encoding("int8")
    errors = []
    for _ in range(2):
        before = fed.ensemble.layers(x.clone()[None])
        codec.encode(w, x)
        for name, layer in fed.ensemble.layers(w[None]).items():
            step = (layer - before[name]).abs().max() / 127
            assert (layer - fed.ensemble.layers(x[None])[name]).abs().max() <= step * 0.5001 + 1e-6
        errors.append(float((w - x).abs().max()))
    assert errors[1] < errors[0] / 100
    assert codec.bytes == fed.ensemble.size + 4 * len(fed.ensemble.names)
    fed, codec, w, x = encoding("topk:0.25")
    size, before = fed.ensemble.size, (w - x).abs()[: fed.ensemble.size]
    codec.encode(w, x)
    same = (x == w)[:size]
    assert codec.count == (size + 2) // 4 <= int(same.sum())
    assert before[~same].max() <= before[same].max()
    assert float((w - x).abs().max()) <= float(before.sort(descending=True).values[codec.count])
    for _ in range(4):
        codec.encode(w, x)
    assert torch.equal(w, x)
    assert codec.bytes == 4 * codec.count + min(4 * codec.count, -(-size // 8))


def test_what_a_receiver_missed_is_sent_again():
    with federation(SMALL | {"codec": "int8"}) as fed:
        mail, packing, sent = fed.mail, fed.mail.packing, []
        whole = packing.row_bytes / packing.codec.bytes
        w = fed.common_row()
        # the senders of clients 0, 1 and 2 in each round; messages that clients 1, 2 and 3 send
        for lists, messages in (
            ([[1], [], [1]], [2, 0, 0]),
            ([[1], [], []], [1, 0, 0]),
            ([[2], [], [1]], [2, 3, 0]),  # 1 to 2: two versions; 2 to 0: its third
            ([[1], [], []], [2, 0, 0]),
            ([[2, 3], [], []], [0, 2, whole]),  # 3 to 0: all versions, so the row comes whole
            ([[1], [], []], [whole, 0, 0]),  # client 0 no longer stores client 1's row
        ):
            w = w + 0.01
            mail.mailroom.begin()
            mail.ledger.begin(fed.members.learners)
            fed.exchange(w, fed.collect([np.array((lists + [[]] * 3)[k], int) for k in fed.ids]))
            sent = (mail.ledger.bytes / packing.codec.bytes).tolist()
            assert sent[1:4] == messages
    assert 3 < whole < 4


def test_links_are_a_dictionary_of_edges():
    rng, links, known = np.random.default_rng(0), Links(2), {}
    for when in range(30):
        edges, values = rng.permutation(25)[:6], rng.integers(0, 9, 6)
        links.set(edges, values, when)
        known |= {int(e): (int(value), when) for e, value in zip(edges, values, strict=True)}
        most = rng.integers(2, 5, 5)
        links.trim(most)
        for k in range(5):
            for _, edge in sorted((-known[e][1], e) for e in known if e // 5 == k)[most[k] :]:
                del known[edge]
        expected = [known.get(e, (-1,))[0] for e in range(25)]
        assert links.get(np.arange(25), -1).tolist() == expected


def test_encoded_rows_are_what_ranks_put(tmp_path):
    drawn = {"method": "random_graph", "options": {"redraw": True}}
    runs = {
        "none": {},
        "int8": {"codec": "int8"},
        "topk": {"codec": "topk:0.05", "participation": 0.7} | drawn,
        "newcomers": {"codec": "int8", "send": "layers=body", "newcomers": 0.2},
        "body": {"send": "layers=body", "finetune_epochs": 1},
        "fewer than ranks": {"codec": "int8", "clients": 2, "budget": 2},
        "late": LATE | {"codec": "int8", "budget": 4},
        "late topk": LATE | {"codec": "topk:0.1", "send": "layers=body", "churn": "0.3:0.7"},
        "late body": LATE | {"send": "layers=body", "method": "random_graph"},
    }
    runs = {name: SMALL | fields for name, fields in runs.items()}
    narrow = {"window_gb": 2.01 * 4 * 4816 / 2**30}  # two whole rows, or eight encoded ones
    done = run_many(3, tmp_path, runs, late=narrow)
    for name, fields in runs.items():
        assert differences(run_here(tmp_path / f"{name}1.h5", fields), done[name]) == [], name
    put = {name: Result(path)["traffic/bytes_rma"][1:] for name, path in done.items()}
    with federation(runs["int8"]) as fed:
        row, packing = 4 * fed.ensemble.width, fed.mail.packing
        encoded = -(-packing.codec.bytes // 4) * 4
        head = 4 * int(fed.columns("head").sum())
    assert (put["int8"] / encoded).tolist() == (put["none"] / row).tolist()
    assert (put["body"] % (packing.row_bytes - head)).tolist() == [0, 0, 0]
    assert 0 < put["topk"].sum() < put["none"].sum()  # a graph that changes needs whole rows
    assert (put["late"] % encoded).tolist() == [0, 0, 0]
    with Result(done["late"]) as late:
        assert late["network/age"].sum() > 0
        assert 0 < put["late"].sum() <= late["traffic/bytes_sent"][1:].sum() * 1.01


@pytest.mark.parametrize("codec", ["int8", "topk:0.1"])
def test_who_chooses_sees_what_arrived(codec):
    with federation(SMALL | {"codec": codec}) as fed:
        w = fed.local_opt(fed.common_row(), 1)
        total, _ = fed._parts.sums.over_candidates(w, fed.candidates())
        known = fed.mail.packing.known.double()
        assert not torch.equal(known, w.double())
        of_all = (torch.from_numpy(fed.p[fed.ids])[:, None] * known).sum(0)
        for i, k in enumerate(fed.ids):
            own_change = fed.p[k] * (w[i].double() - known[i])
            assert torch.allclose(total[i], of_all + own_change, atol=1e-7)


def test_a_head_that_is_not_sent_stays_at_home():
    with federation(SMALL | {"send": "layers=body", "budget": 6}) as fed:
        w, head = fed.local_opt(fed.common_row(), 1), fed.columns("head")
        others = [np.array([j for j in range(6) if j != k]) for k in fed.ids]
        mixed = fed.average(w, fed.collect(others))
        assert torch.allclose(mixed[:, head], w[:, head], atol=1e-6)
        assert torch.allclose(mixed[0, ~head], mixed[1, ~head], atol=1e-6)
        assert fed.mail.packing.row_bytes == 4 * (fed.ensemble.size - int(head.sum()))
        total, p = fed._parts.sums.over_candidates(w, fed.candidates())
        mean = (total / torch.from_numpy(p)[:, None]).float()
        assert torch.allclose(mean[:, head], w[:, head], atol=1e-6)


@pytest.mark.parametrize("method", ["dpfl", "random_graph", "pairwise", "local"])
def test_what_changes_no_model(method, tmp_path):
    """The whole change as the largest part; and --staleness if all are equally fast."""
    fields = SMALL | {"method": method, "batch_size": 4096}  # one step an epoch for everyone
    plain = run_here(tmp_path / "plain.h5", fields)
    late = {"network": text_file(tmp_path / "equal.csv", "1,0,inf,inf,0\n" * 6), "staleness": 3}
    for more in (late, {"codec": "topk:1"})[: 1 if method == "local" else 2]:
        path = run_here(tmp_path / "run.h5", fields | more, fresh=True)
        assert [name for name in differences(plain, path) if not name.startswith(OF_NETWORK)] == []


def test_old_models_are_those_of_the_round_that_the_ledger_says(tmp_path):
    """Client 0 takes a hundred times as long: the others take what it had up to S rounds ago."""
    slow = text_file(tmp_path / "slow.csv", "100,0,inf,inf,0\n" + "1,0,inf,inf,0\n" * 5)
    fields = SMALL | {"method": "random_graph", "budget": 6, "rounds": 5, "batch_size": 4096}
    fields |= {"network": slow, "staleness": 2}
    with Result(run_here(tmp_path / "slow.h5", fields)) as result:
        # round 0: all wait for the first model of client 0; then of each the newest that is there
        assert result["network/age"][:, 1:].max(1).tolist() == [0, 1, 2, 2, 2, 2]
        assert result["network/age"][:, 0].tolist() == [0] * 6
        assert (result["network/waited_for"][3:, 1:] == 0).all()


def test_a_layer_that_is_not_there_is_a_sentence(tmp_path):
    sends_nose = own.METHOD.replace("METHOD = Method(", "METHOD = Method(sends='nose', ")
    own.folder(tmp_path, mine=sends_nose)
    none = "--send layers is normalisation; the model mlp has no such weights: allowed is all"
    refused(none, federation, SMALL | {"send": "layers=normalisation", "model": "mlp"})
    mine = {"method": str(tmp_path / "mine.py")}
    nose = "is nose; allowed are body alone, head, or of the layers"
    refused(f"--send layers {nose}", federation, SMALL | {"send": "layers=nose"})
    refused(f"sends of the method mine {nose}", federation, SMALL | mine)


def test_no_method_is_given_rows_of_which_layers_are_missing():
    """Rows of the same rank would be whole, those of others not."""
    whole = "fed.every_row and losses of all models need whole ones: allowed is all"
    declared = {"--send": {"send": "layers=body", "method": "random_graph"}}
    for sent, fields in (declared | {"sends": {"method": "dfedpgp"}}).items():
        with federation(SMALL | fields) as fed:
            w = fed.common_row()
            refused(f"{sent} is ...body; {whole}", lambda w=w: next(fed.every_row(w)))
            refused(f"{sent} is ...body; {whole}", fed.losses_of_all, w)


def test_a_lie_is_encoded_and_the_liar_averages_its_own_model():
    lying = {"codec": "int8", "attack": "scale:0.4", "budget": "inf", "method": "random_graph"}
    with federation(SMALL | lying) as fed:
        fed.begin_round(1)
        w = fed.local_opt(fed.common_row(), 1)
        lies = fed.training.attack.sent(w)
        mixed = fed.average(w, fed.collect([np.delete(np.arange(6), k) for k in fed.ids]))
        known, p = fed.mail.packing.known.double(), torch.from_numpy(fed.p[fed.ids])[:, None]
        expected = ((p * known).sum(0) + p * (w.double() - known)) / p.sum()
        assert torch.allclose(mixed.double(), expected, atol=2e-6)
        off, of_lies = ((known - rows).abs().amax(1) for rows in (w, lies))
        liars = fed.members.limits.attackers[fed.ids]
        assert liars.sum() == 2 and ((of_lies < off).numpy() == liars).all()
