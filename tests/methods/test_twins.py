"""The methods against their slow twins, by the native kernels and by PyTorch."""

import itertools
from types import SimpleNamespace

import launch
import numpy as np
import pytest
import torch
import twins
from sklearn.cluster import AgglomerativeClustering
from sklearn.neighbors import NearestNeighbors
from twins import HEAD, N, Twin, play, quadratic

from dpfl_mpi.methods import cfl, fedpac, knnper, pfedgraph
from dpfl_mpi.models import resnet
from dpfl_mpi.numerics import backend

ADAM, ADAMW = ({"optimizer": name, "lr": 0.003, "adam_eps": 1e-4} for name in ("adam", "adamw"))
ALIKE = {"classes_per_client": 8, "lr": 0.1, "seed": 4}  # DPFL chooses some, and others each time
PLAIN = ["local", "fedavg", "ditto", "fedrep", "random_graph", "fedper"]
CASES = [
    *((method, None, {}) for method in PLAIN),
    ("dpfl", None, ALIKE),
    ("dpfl", None, ALIKE | {"budget": 3, "tau_init": 1}),
    ("dpfl", None, {"budget": 1}),
    ("dpfl", None, ALIKE | {"budget": 3, "ggc_period": 2}),
    ("dpfl", None, ALIKE | {"budget": 3, "ggc_period": 2, "ggc_off_rounds": "skip"}),
    ("dpfl", None, ALIKE | {"omega_period": 2}),
    ("fedprox", {"mu": 0.3}, {}),
    ("apfl", {"alpha": 0.3}, {}),
    ("apfl", {"alpha": 0.6, "adaptive": True}, {}),
    ("perfedavg", {"alpha": 0.05}, {}),
    ("pfedgraph", {"lam": 0.5}, {}),
    ("fedpac", None, {}),
    ("fedpac", {"lam": 3.0, "head_epochs": 0}, {"lr": 0.1}),
    ("scaffold", {"global_lr": 0.7}, {}),
    ("scaffold", None, {"momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.0}),
    ("pfedme", {"beta": 0.8}, {}),
    ("fedala", {"threshold": 0.02, "share": 0.5, "passes": 14}, {}),
    ("pens", {"m": 1, "first_step": 0.6}, {"budget": 3}),
    ("pens", None, {"budget": 1}),
    ("dac", {"tau": 3.0}, {"budget": 2}),
    ("dac", {"similarity": "l2"}, {"budget": 3}),
    ("dpsgd", None, {}),
    ("dpsgd", {"peers": 1}, {"graphs": "ring"}),
    ("fedfomo", {"epsilon": 0.5, "decay": 0.3}, ALIKE | {"budget": 3}),
    ("fedsim", None, {"budget": 3}),
    ("fedsim", {"similarity": "update"}, {"budget": 3}),
    ("fedsim", {"weights": "chances", "similarity": "loss", "tau": 3.0}, {"budget": 3}),
    ("pfedsv", {"orders": 0}, {"budget": 3}),
    ("dfedpgp", None, {"budget": 3}),
    ("facade", None, {"budget": 3}),
    ("facade", {"final": True, "heads": 3}, {"budget": 2, "seed": 4}),
    ("sketch", {"entries": 100}, {"budget": 2}),
    ("nearest", {"entries": 100, "hubs": 0.9, "pool": 2}, {"budget": 2}),
    ("nearest", {"until": 1, "alike": 0.98, "pool": 1}, {"budget": 3}),
    ("spectral", {"entries": 100}, {"budget": 2}),
    ("spectral", {"entries": 20}, {"budget": 3}),
    ("spectral_search", {"entries": 100}, ALIKE | {"budget": 3}),
    ("l2c", {"first_step": 0.4}, ALIKE | {"budget": 3}),
    ("l2c", {"eta": 2.0}, {}),
    ("morph", {"beta": 30.0, "refresh": 1}, {"budget": 2}),
    ("morph", {"refresh": 2}, ALIKE | {"budget": 3}),
    ("cobo", {"gamma": 5.0, "rho": 0.3}, {}),
    ("cfl", {"after": 1, "eps1": 9.0, "eps2": 0.01}, {"seed": 1}),
    ("cfl", None, {}),
    ("fedamp", {"sigma": 2.0, "alpha": 0.5, "lam": 0.4}, {}),
    ("ifca", {"k": 4}, {}),
    # native gradients with PyTorch's step, or PyTorch alone
    *((method, None, ADAM) for method in ("fedavg", "fedrep", "perfedavg", "scaffold")),
    *((method, None, ADAMW) for method in ("fedprox", "fedrep", "apfl")),
]


@pytest.fixture(params=["native", "torch"])
def job(request):
    return {"kernels": request.param}


def assert_near(scored, twin, atol=1e-5):
    assert len(scored) == len(twin)
    for rows, expected in zip(scored, twin, strict=True):
        assert torch.allclose(rows, torch.stack(list(expected)), rtol=0, atol=atol)
    # rows that do not move would pass with anything
    assert (scored[-1] - scored[0]).abs().max() > 0.01


@pytest.mark.parametrize(("method", "options", "fields"), CASES)
def test_twin(method, options, fields, job):
    scored, states, fed = play(method, job=job, options=options, **({"budget": "inf"} | fields))
    atol = 3e-5 if "optimizer" in fields else 1e-5
    if method == "l2c":  # ReLUs bend between the two losses of a difference
        atol = 1e-4
    assert_near(scored, list(getattr(twins, f"twin_{method}")(Twin(fed), fed.options)), atol)
    assert fed.backend.name == job["kernels"]
    state = states[-1]["client"]
    if method == "cobo":
        assert (state["w"] < 1).any() and (state["w"] > 0).any()
    if method == "cfl" and options:
        assert states[-1]["shared"]["cluster"].max() == 2
    if method == "fedala":
        learnt = state["W"][:, HEAD : fed.ensemble.size]
        assert (learnt < 1).any() and (learnt > 0).any() and (state["W"][:, :HEAD] == 1).all()


def test_a_mixture_has_the_same_bits_beside_any_others():
    """A tensor's last elements may be computed by other instructions than the rest."""
    log_p = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)).log_softmax(1)
    votes = torch.rand(40, 5, generator=torch.Generator().manual_seed(2)).softmax(1)
    votes[3] = 0
    whole = knnper.mixed(log_p, votes, 0.1)
    expected = (0.1 * votes.double() + 0.9 * log_p.double().exp()).log()
    assert whole.double().allclose(expected, atol=1e-6)
    for size in range(1, 40):
        assert knnper.mixed(log_p[:size], votes[:size], 0.1).equal(whole[:size])


@pytest.mark.parametrize("method", ["apfl", "perfedavg", "pfedme"])
def test_passes_of_the_kernels_tell_the_losses(method):
    native, by_torch = (play(method, 1, {"kernels": name})[2] for name in ("native", "torch"))
    loss = native.notes["train_loss"]
    np.testing.assert_allclose(loss, by_torch.notes["train_loss"], rtol=1e-4)
    assert (loss > 0).all()


@pytest.mark.parametrize("share", [0.4, 0, "tune"])
def test_knnper_twin(job, share):
    how = {"tune": True} if share == "tune" else {"interpolation": share}
    scored, _, fed = play("knnper", job=job, options={"k": 5, "scale": 2} | how)
    tw = Twin(fed)
    assert_near(scored, list(twins.twin_fedavg(tw, {})))
    for k in range(N):
        module = tw.model(scored[-1][k])

        def z(x, module=module):
            return module.fc1(x.flatten(1)).relu().detach().double().numpy()

        (x, y), (x_val, y_val) = tw.data[k], tw.val[k]
        d, index = NearestNeighbors(n_neighbors=5).fit(z(x)).kneighbors(z(x_val))
        weight = np.exp((-(d**2) + (d**2).min(1, keepdims=True)) / 2)
        votes = np.zeros((len(y_val), 10))
        for s in range(len(y_val)):
            np.add.at(votes[s], y.numpy()[index[s]], weight[s] / weight[s].sum())
        p, losses = module(x_val).softmax(1).detach().double().numpy(), {}
        for lam in [n / 100 for n in range(101)] if share == "tune" else [share]:
            mixed = lam * votes + (1 - lam) * p
            right = (mixed.argmax(1) == y_val.numpy()).mean()
            with np.errstate(divide="ignore"):
                loss = -np.log(mixed[np.arange(len(y_val)), y_val.numpy()]).mean()
            losses.setdefault(right, []).append(loss)
        i, best = fed.row_of[k], max(losses)
        assert fed.notes["val_acc"][i] == best
        assert fed.notes["val_loss"][i] == pytest.approx(min(losses[best]), abs=1e-5)


def test_pfedgraph_weights_are_a_solvers():
    rng = np.random.default_rng(0)
    for n in (2, 5, 30):
        for alpha in (0.1, 0.8, 10):
            d, p = rng.uniform(-1, 1, n), rng.dirichlet(np.ones(n))
            x = pfedgraph.weights(d, p, alpha)
            assert x.sum() == pytest.approx(1) and (x >= 0).all()
            np.testing.assert_allclose(x, quadratic(d, p, alpha), atol=1e-6)


def test_fedpac_weights_by_hand():
    """With away 0 and d: x_2 = v_1 / (v_1 + v_2 + d^2)."""
    for d, v, right in ((1.0, (1, 1), 1 / 3), (0.0, (1, 3), 1 / 4), (2.0, (0.5, 0), 0.5 / 4.5)):
        x = fedpac.mixture(np.array([[0.0, 0], [d, 0]]), np.array(v, float))
        assert x == pytest.approx([1 - right, right], abs=2e-6)
    many = fedpac.mixture(np.zeros((2000, 1)), np.ones(2000))  # each is below LEAST
    assert many == pytest.approx(1 / 2000, abs=2e-6)
    far = fedpac.mixture(np.array([[0.0], [40]]), np.ones(2))  # 1 / 1602 counts as 0
    assert far.tolist() == [1, 0]


def test_fedpac_leaves_out_who_diverged_since_the_weights():
    rows = torch.tensor([[1.0], [5], [float("nan")]])
    fed = SimpleNamespace(
        ids=np.arange(3),
        active=np.array([True, True, False]),
        p=np.array([0.25, 0.25, 0.5]),
        every_row=lambda w: [(0, rows[0]), (1, rows[1])],
    )
    a = np.array([[0.6, 0.2, 0.2], [0.5, 0.5, 0], [0.5, 0, 0.5]])
    w, phi = fedpac.aggregate(fed, rows, a, torch.zeros(1))
    assert w[:2].tolist() == [[2], [3]] and w[2].isnan()  # 0.75 + 0.25 * 5, and (1 + 5) / 2
    assert phi.tolist() == [3]
    fed.active[:] = False
    assert fedpac.aggregate(fed, rows, a, torch.full((1,), 7.0))[1].tolist() == [7]


def test_fedpac_pulls_no_feature_to_an_unknown_class():
    logits, y = torch.zeros(2, 3), torch.tensor([0, 1])
    z, c = torch.tensor([[1.0, 2], [3, 4]]), np.array([[0, 0], [np.nan] * 2, [7, 7]])
    loss = fedpac.objective(0.5, c, 0, logits, z, y).item()
    assert loss == pytest.approx(np.log(3) + 0.5 * (1 + 4) / 4, rel=1e-6)


@pytest.mark.parametrize("linkage", ["complete", "single"])
def test_cfl_halves_are_scikit_learns_and_single_ones_the_best(linkage):
    rng = np.random.default_rng(0)
    for n in (3, 4, 8):
        u = rng.standard_normal((n, 5))
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        cosine = u @ u.T
        half = cfl.second_half(cosine, linkage)
        label = AgglomerativeClustering(metric="precomputed", linkage=linkage).fit(1 - cosine)
        np.testing.assert_array_equal(half, label.labels_ != label.labels_[0])
        sides = [np.array(s) for s in itertools.product([False, True], repeat=n - 1) if any(s)]
        sides = [np.concatenate([[False], s]) for s in sides]
        between = [cosine[np.ix_(~s, s)].max() for s in sides]
        if linkage == "single":
            np.testing.assert_array_equal(half, sides[np.argmin(between)])


def test_a_cfl_cluster_is_halved_at_rest_when_all_are_there():
    """Of clients 0, 1 and 2, 3 the updates are opposite, of length 2; all p are alike."""
    u = np.array([[2.0, 0], [2.0, 0.1], [-2.0, 0], [-2.0, 0.1]])
    fed = SimpleNamespace(participants=np.ones(4, bool), active=np.ones(4, bool), p=np.ones(4))
    for eps1, eps2, expected in ((0.1, 1.9, [0, 0, 1, 1]), (0.04, 1.9, [0] * 4), (0.1, 3, [0] * 4)):
        fed.options = {"eps1": eps1, "eps2": eps2, "linkage": "complete"}
        cluster = np.zeros(4, int)
        assert cfl.halve(fed, cluster, u @ u.T).tolist() == [0] * (1 + max(expected))
        assert cluster.tolist() == expected
    fed.options |= {"eps2": 1.9}
    cluster = np.array([0, 0, 1, 1])
    assert cfl.halve(fed, cluster, u @ u.T).tolist() == [0, 1]  # two clients each
    fed.active[3] = False
    assert cfl.halve(fed, cluster * 0, u @ u.T).tolist() == [0]
    fed.participants[3] = False  # a newcomer stays with the first half
    cluster = np.zeros(4, int)
    assert cfl.halve(fed, cluster, u @ u.T).tolist() == [0]  # the mean is 2 / 3 long
    fed.options |= {"eps1": 0.7}
    assert cfl.halve(fed, cluster, u @ u.T).tolist() == [0, 0] and cluster.tolist() == [0, 0, 1, 0]


def test_fedbn_twin():
    small = {"widths": "4", "blocks": 1, "groups": 2}
    scored, _, fed = play("fedbn", model="resnet", model_options=small)
    tw = Twin(fed)
    tw.module = resnet.build((8, 8, 1), 10, "4", 1, 2)
    sizes = {name: p.numel() for name, p in tw.module.named_parameters()}
    own = torch.cat([torch.full((size,), "norm" in name) for name, size in sizes.items()])
    assert int(own.sum()) == 3 * 8 and torch.equal(fed.columns("normalisation")[: len(own)], own)
    assert_near(scored, list(tw.keeping(own)))
    norms = scored[-1][:, own]
    assert (norms[0] - norms[1]).abs().max() > 1e-3


def test_a_memory_is_prepared_in_parts(monkeypatch):
    with launch.federation({"clients": 9}, kernels="torch") as fed:
        w = fed.common_row()
        whole, labels = fed.memory(0, w[:1], 30)
        monkeypatch.setattr(backend, "PREPARED_NUMBERS", 7 * 64)
        parts, again = fed.memory(0, w[:1], 30)
        assert len(whole) == 30 and torch.equal(labels, again)
        torch.testing.assert_close(parts, whole)
    distances, index = knnper.neighbours(torch.rand(20, 7), torch.rand(3, 7), 10)
    assert distances.shape == index.shape == (20, 3)
