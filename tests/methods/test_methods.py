"""The methods against slow twins in plain PyTorch (a loop over four ragged clients), their exact limits, and the number of ranks.

A twin takes from the package only the data, the initial row and the recipe of the keyed batch order; models are modules, steps are
`torch.optim.SGD`, sums are Python's.
"""

import contextlib
import importlib
import json

import launch
import numpy as np
import pytest
import torch
from launch import federation, mpirun, run_here, run_mpi
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from dpfl_mpi.errors import UserError
from dpfl_mpi.methods import knnper, pfedgraph
from dpfl_mpi.models import mlp
from dpfl_mpi.plugins import find, names
from dpfl_mpi.results import Result
from dpfl_mpi.settings import Run

N, ROUNDS, TAU = 4, 3, 2
FIELDS = {"clients": N, "rounds": ROUNDS, "tau_train": TAU, "tau_init": TAU, "clip_norm": 2.0, "batch_size": 32}


@pytest.fixture(scope="module", params=["auto", "torch"])
def kernels(request):
    """What computes the methods: the native kernels where they can (one client at a time), and PyTorch."""
    launch.DEFAULTS["kernels"] = request.param
    yield request.param
    del launch.DEFAULTS["kernels"]


def play(method, rounds=ROUNDS, block=0, options=None, **fields):
    """Run a method in this process; return per call of `evaluate` the rows in client order, the states after each round, and the Federation."""
    run = FIELDS | {"method": method, "options": options} | fields
    with contextlib.closing(federation(run, block=block)) as fed:
        module, scored, states = importlib.import_module(f"dpfl_mpi.methods.{method}"), [], []
        evaluate = fed.evaluate

        def note(w, series="", **how):
            evaluate(w, series, **how)
            if not series:
                scored.append(w[fed.row_of, : fed.ensemble.size].clone())

        fed.evaluate = note
        state = module.init(fed)
        states.append(clone(state))
        for t in range(1, rounds + 1):
            fed.begin_round(t)
            state = module.round(fed, state, t)
            states.append(clone(state))
        return scored, states, fed


def clone(state):
    return {g: {n: v.clone() if torch.is_tensor(v) else v for n, v in part.items()} for g, part in state.items()}


class Twin:
    """Four clients in plain PyTorch: data, modules and optimisers per client and name."""

    def __init__(self, fed):
        self.run, self.p, self.optimisers = fed.run, fed.p, {}
        self.module = mlp.build((8, 8, 1), 10)
        self.start = fed.initial_row()[: fed.ensemble.size].clone()
        self.data, self.val = [], []
        for k in range(N):
            i = int(fed.row_of[k])
            rows = slice(int(fed.clients.start[i]), int(fed.clients.start[i + 1]))
            self.data.append((self.image(fed.clients.x[rows]), fed.clients.y[rows]))
            first = int(fed.clients.scored[i])
            rows = slice(first, first + int(fed.clients.n_val[i]))
            self.val.append((self.image(fed.clients.score_x[rows]), fed.clients.score_y[rows]))
        assert len({len(y) for _, y in self.data}) > 1, "ragged"

    @staticmethod
    def image(x):
        return ((x.float() / 255 - 0.305) / 0.376).permute(0, 3, 1, 2)

    def batches(self, k, first_epoch, epochs):
        x, y = self.data[k]
        for epoch in range(first_epoch, first_epoch + epochs):
            keyed = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.run.seed, 2, k, epoch))))
            for rows in torch.from_numpy(keyed.permutation(len(y))).split(self.run.batch_size):
                yield x[rows], y[rows]

    def model(self, w):
        vector_to_parameters(w.clone(), self.module.parameters())
        return self.module

    def gradient(self, w, batch, extra=None):
        """The gradient at row w of the mean loss, plus `extra(w)` where a term has autograd's gradient."""
        module = self.model(w)
        loss = cross_entropy(module(batch[0]), batch[1])
        if extra is not None:
            loss = loss + extra(parameters_to_vector(module.parameters()))
        return parameters_to_vector(torch.autograd.grad(loss, list(module.parameters())))

    def step(self, k, name, w, g, columns=None):
        """One step of torch.optim.SGD of client k's optimiser `name` on (some columns of) a row, after clipping."""
        columns = torch.ones(len(w), dtype=torch.bool) if columns is None else columns
        if (k, name) not in self.optimisers:
            leaf = torch.nn.Parameter(w[columns].clone())
            run = self.run
            self.optimisers[k, name] = (
                leaf,
                torch.optim.SGD([leaf], run.lr, run.momentum, weight_decay=run.weight_decay),
            )
        leaf, sgd = self.optimisers[k, name]
        leaf.data, leaf.grad = w[columns].clone(), g[columns].clone()
        clip_grad_norm_([leaf], self.run.clip_norm)
        sgd.step()
        w = w.clone()
        w[columns] = leaf.data
        return w

    def local(self, k, w, epoch, epochs=TAU, name="w", extra=None, columns=None):
        for batch in self.batches(k, epoch, epochs):
            w = self.step(k, name, w, self.gradient(w, batch, extra), columns)
        return w

    def mean(self, rows):
        return sum(float(p) * w.double() for p, w in zip(self.p, rows, strict=True)).float()


def twin_local(tw, o):
    w = [tw.start] * N
    yield w
    for t in range(ROUNDS):
        w = [tw.local(k, w[k], t * TAU) for k in range(N)]
        yield w


def twin_fedavg(tw, o):
    w = tw.start
    yield [w] * N
    for t in range(ROUNDS):
        w = tw.mean([tw.local(k, w, t * TAU) for k in range(N)])
        yield [w] * N


def twin_fedprox(tw, o):
    w = tw.start
    yield [w] * N
    for t in range(ROUNDS):
        w = tw.mean(
            [tw.local(k, w, t * TAU, extra=lambda v, w=w: o["mu"] / 2 * (v - w).square().sum()) for k in range(N)]
        )
        yield [w] * N


def twin_ditto(tw, o):
    w, v = tw.start, [tw.start] * N
    yield v
    for t in range(ROUNDS):
        pull = lambda row, w=w: o["lam"] / 2 * (row - w).square().sum()  # noqa: E731
        v = [tw.local(k, v[k], t * TAU, name="v", extra=pull) for k in range(N)]
        yield v
        w = tw.mean([tw.local(k, w, t * TAU) for k in range(N)])


def twin_apfl(tw, o):
    w, v, alpha = tw.start, [tw.start] * N, [o["alpha"]] * N
    yield list(v)
    for t in range(ROUNDS):
        trained, mixed = [], []
        for k in range(N):
            w_k = w
            for batch in tw.batches(k, t * TAU, TAU):
                w_k = tw.step(k, "w", w_k, tw.gradient(w_k, batch))
                g = tw.gradient(alpha[k] * v[k] + (1 - alpha[k]) * w_k, batch)
                moved = tw.step(k, "v", v[k], alpha[k] * g)
                if o["adaptive"]:
                    slope = float((v[k] - w_k) @ g) + 0.02 * alpha[k]
                    alpha[k] = min(max(alpha[k] - tw.run.lr * slope, 0), 1)
                v[k] = moved
            trained.append(w_k)
            mixed.append(alpha[k] * v[k] + (1 - alpha[k]) * w_k)
        yield mixed
        w = tw.mean(trained)


def twin_perfedavg(tw, o):
    def adapted(k, w, epoch):
        return w - o["alpha"] * tw.gradient(w, next(tw.batches(k, epoch, 1)))

    w = tw.start
    yield [adapted(k, w, 0) for k in range(N)]
    for t in range(ROUNDS):
        trained = []
        for k in range(N):
            w_k, batches = w, list(tw.batches(k, t * TAU, TAU))
            for first, second in zip(batches[0::2], batches[1::2], strict=False):
                inner = w_k - o["alpha"] * tw.gradient(w_k, first)
                w_k = tw.step(k, "w", w_k, tw.gradient(inner, second))
            trained.append(w_k)
        w = tw.mean(trained)
        yield [adapted(k, w, (t + 1) * TAU) for k in range(N)]


def twin_fedrep(tw, o):
    module, head = mlp.build((8, 8, 1), 10), []
    for name, part in module.named_parameters():
        head.append(torch.full((part.numel(),), name.startswith("head.")))
    head = torch.cat(head)
    phi, h = tw.start, [tw.start] * N
    yield list(h)
    for t in range(ROUNDS):
        for k in range(N):
            w = torch.where(head, h[k], phi)
            w = tw.local(k, w, t * TAU, TAU - 1, "head", columns=head)
            h[k] = tw.local(k, w, t * TAU + TAU - 1, 1, "base", columns=~head)
        yield list(h)
        phi = tw.mean(h)


def twin_pfedgraph(tw, o):
    w, u = [tw.start] * N, None
    yield w
    for t in range(ROUNDS):
        if t:
            yield w
            w = [
                tw.local(k, w[k], t * TAU, extra=lambda v, k=k: o["lam"] * (u[k] @ v) / v.norm())  # noqa: B023
                for k in range(N)
            ]
        else:
            w = [tw.local(k, w[k], t * TAU) for k in range(N)]
        yield w
        delta = [(row - tw.start).double() for row in w]
        new, u = [], []
        for i in range(N):
            d = [-float(delta[i] @ delta[j] / (delta[i].norm() * delta[j].norm())) for j in range(N)]
            d = [-1.0 if i == j or d[j] < -0.9 else d[j] for j in range(N)]
            x = quadratic(np.array(d), tw.p, o["alpha"])
            new.append(sum(float(x[j]) * w[j].double() for j in range(N)).float())
            u.append(sum(float(x[j]) * w[j].double() / w[j].double().norm() for j in range(N)).float())
        w = new


def twin_random_graph(tw, o):  # everyone reaches everyone: sum p_i w_i over all
    w = [tw.local(k, tw.start, 0) for k in range(N)]
    yield w
    for t in range(ROUNDS):
        mean = tw.mean(w)
        w = [tw.local(k, mean, (t + 1) * TAU) for k in range(N)]
        yield w


def quadratic(d, p, alpha):
    """argmin alpha ||x||^2 + (d - 2 alpha p) x over the simplex, by a general solver."""
    from scipy.optimize import minimize

    found = minimize(
        lambda x: alpha * x @ x + (d - 2 * alpha * p) @ x,
        p,
        jac=lambda x: 2 * alpha * x + d - 2 * alpha * p,
        bounds=[(0, None)] * len(p),
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": lambda x: np.ones(len(x))},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    assert found.success
    return found.x


CASES = [
    ("local", None),
    ("fedavg", None),
    ("fedprox", {"mu": 0.3}),
    ("ditto", None),
    ("apfl", {"alpha": 0.3}),
    ("apfl", {"alpha": 0.6, "adaptive": True}),
    ("perfedavg", {"alpha": 0.05}),
    ("fedrep", None),
    ("pfedgraph", {"lam": 0.5}),
    ("random_graph", None),
]


@pytest.mark.parametrize("block", [1, N])
@pytest.mark.parametrize(("method", "options"), CASES)
def test_twin(method, options, block, kernels):
    scored, _, fed = play(method, block=block, options=options, budget="inf")
    twin = list(globals()[f"twin_{method}"](Twin(fed), fed.options))
    assert fed.backend.name == ("native" if (kernels, block) == ("auto", 1) else "torch")
    assert len(scored) == len(twin)
    for rows, expected in zip(scored, twin, strict=True):
        assert torch.allclose(rows, torch.stack(list(expected)), rtol=0, atol=1e-5)
    moved = (scored[-1] - scored[0]).abs().max()
    assert moved > 0.01, "a test of rows that do not move would pass with anything"


@pytest.mark.parametrize("block", [1, N])
def test_knnper_twin(block, kernels):
    """The rows are FedAvg's; loss and accuracy are those of the mixture, neighbours by scikit-learn."""
    from sklearn.neighbors import NearestNeighbors

    options = {"k": 5, "interpolation": 0.4, "scale": 2}
    scored, _, fed = play("knnper", block=block, options=options)
    tw = Twin(fed)
    expected = list(twin_fedavg(tw, {}))
    for rows, twin in zip(scored, expected, strict=True):
        assert torch.allclose(rows, torch.stack(twin), rtol=0, atol=1e-5)
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
        mixed = 0.4 * votes + 0.6 * module(x_val).softmax(1).detach().double().numpy()
        i = fed.row_of[k]
        assert fed.notes["val_acc"][i] == (mixed.argmax(1) == y_val.numpy()).mean()
        loss = -np.log(mixed[np.arange(len(y_val)), y_val.numpy()]).mean()
        assert fed.notes["val_loss"][i] == pytest.approx(loss, abs=1e-5)


def test_neighbours_are_scikit_learns():
    from sklearn.neighbors import NearestNeighbors

    rng = np.random.default_rng(0)
    z, remembered = rng.normal(size=(20, 7)).astype(np.float32), rng.normal(size=(50, 7)).astype(np.float32)
    d2, index = knnper.neighbours(torch.from_numpy(z), torch.from_numpy(remembered), 10)
    distance, expected = NearestNeighbors(n_neighbors=10).fit(remembered).kneighbors(z)
    assert np.array_equal(index.numpy(), expected)
    np.testing.assert_allclose(d2.sqrt().numpy(), distance, rtol=1e-5)
    assert knnper.neighbours(torch.from_numpy(z), torch.from_numpy(remembered[:3]), 10)[1].shape == (20, 3)


def test_pfedgraph_weights_are_a_solvers():
    rng = np.random.default_rng(0)
    for n in (2, 5, 30):
        for alpha in (0.1, 0.8, 10):
            d, p = rng.uniform(-1, 1, n), rng.dirichlet(np.ones(n))
            x = pfedgraph.weights(d, p, alpha)
            assert x.sum() == pytest.approx(1) and (x >= 0).all()
            np.testing.assert_allclose(x, quadratic(d, p, alpha), atol=1e-6)


# exact limits ------------------------------------------------------------------------------------------------------------
def shared(states, name="w"):
    return [s["shared"][name] for s in states]


def client(states, name="w"):
    return [s["client"][name] for s in states]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def base(kernels):
    return {method: play(method) for method in ("local", "fedavg")}


def test_fedprox_of_0_is_fedavg(base):
    assert same(shared(play("fedprox", options={"mu": 0})[1]), shared(base["fedavg"][1]))


def test_ditto_of_0_is_local_and_its_shared_row_fedavgs(base):
    states = play("ditto", options={"lam": 0})[1]
    assert same(client(states, "v"), client(base["local"][1]))
    assert same(shared(states), shared(base["fedavg"][1]))


def test_apfl_of_alpha_1_is_local_and_of_alpha_0_fedavg(base):
    scored, states, _ = play("apfl", options={"alpha": 1.0})
    assert same(client(states, "v"), client(base["local"][1]))
    assert same(scored, base["local"][0])
    assert same(shared(play("apfl", options={"alpha": 0.0})[1]), shared(base["fedavg"][1]))


def test_fedrep_without_an_epoch_for_the_head_is_refused():
    with pytest.raises(
        UserError, match=r"^--options.base_epochs is 1 of 1 epochs of a round, so no head is ever trained; use fewer, "
    ):
        play("fedrep", tau_train=1)


def test_fedrep_without_head_is_fedavg_and_with_nothing_else_local(base):
    states = play("fedrep", options={"head": "none", "base_epochs": TAU})[1]
    assert same(shared(states, "phi"), shared(base["fedavg"][1]))
    scored, states, _ = play("fedrep", options={"head": "all", "base_epochs": 0})
    assert same(scored, base["local"][0])
    assert same(client(states, "h"), client(base["local"][1]))


def test_knnper_of_interpolation_0_is_its_base_model(base):
    _, states, fed = play("knnper", options={"interpolation": 0})
    assert same(shared(states), shared(base["fedavg"][1]))
    for name in ("val_acc", "test_acc"):
        assert np.array_equal(fed.notes[name], base["fedavg"][2].notes[name])
    for name in ("val_loss", "test_loss"):
        np.testing.assert_allclose(fed.notes[name], base["fedavg"][2].notes[name], atol=1e-6)


def test_random_graph_of_all_is_fedavg(base):
    states = play("random_graph", rounds=ROUNDS - 1, budget="inf")[1]
    for rows, w in zip(client(states), shared(base["fedavg"][1])[1:], strict=True):
        assert torch.allclose(rows, w.expand_as(rows), rtol=0, atol=1e-6)


def test_dpfl_of_budget_1_is_local(base):
    """tau_init = c tau_train epochs and R rounds are c + R rounds of Local."""
    _, states, dpfl = play("dpfl", rounds=1, budget=1, tau_init=2 * TAU)
    assert torch.equal(client(states)[-1], client(base["local"][1])[-1])
    assert np.array_equal(dpfl.training.epochs, base["local"][2].training.epochs)


def test_two_epochs_twice_are_four_and_a_second_model_counts_no_epoch(base):
    for method in ("ditto", "apfl", "perfedavg", "fedrep", "pfedgraph"):
        _, _, fed = play(method, rounds=2)
        assert (fed.training.epochs == 2 * TAU).all()
        per_epoch = -(-fed.clients.n_train // 32)
        steps = {"ditto": 2 * per_epoch, "apfl": 2 * per_epoch}.get(method, per_epoch) * 2 * TAU
        assert np.array_equal(fed.training.steps, 2 * ((per_epoch * TAU) // 2) if method == "perfedavg" else steps)
        assert (fed.notes["models_received"] == 2).all()


def test_a_frozen_head_keeps_weights_and_momentum():
    """Freezing masks weights, momentum, decay and clip norm: the base's steps are as if the head did not exist."""
    with contextlib.closing(federation(FIELDS | {"method": "fedrep", "weight_decay": 0.1})) as fed:
        head = fed.columns("head")
        assert int(head.sum()) == 64 * 10 + 10
        w = fed.local_opt(fed.common_row(), 1)
        before, momentum = w.clone(), fed.training.momentum["w"].clone()
        w = fed.local_opt(w, 2, trained=~head)
        assert torch.equal(w[:, head], before[:, head]) and not torch.equal(w, before)
        assert torch.equal(fed.training.momentum["w"][:, head], momentum[:, head])
        with pytest.raises(UserError, match="allowed are head, none, all, or of the layers fc1, head"):
            fed.columns("fc7")


# ranks, options, scores --------------------------------------------------------------------------------------------------
BASELINES = [
    m for m in names("method") if m not in ("dpfl", "fedbn", "replay")
]  # replay needs a result, fedbn a normalisation
SEVEN = {"clients": 7, "rounds": 2, "tau_train": 2, "tau_init": 1, "budget": 3}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The folder of the results of all baselines on three ranks, which are started once."""
    folder = tmp_path_factory.mktemp("three")
    runs = [(SEVEN | {"method": m}, {"out": str(folder / f"{m}.h5"), "quiet": True}) for m in BASELINES]
    (folder / "runs.json").write_text(json.dumps(runs))
    done = mpirun(3, "-m", "mpi4py", "tests/many.py", folder / "runs.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.mark.parametrize("method", BASELINES)
def test_a_method_does_not_know_the_ranks(method, tmp_path, three):
    """The same bits on one and on three ranks."""
    one = run_here(
        tmp_path / "one.h5", SEVEN | {"method": method}, kernels="auto"
    )  # as on three, whatever `kernels` was
    with Result(one) as a, Result(three / f"{method}.h5") as b:
        assert Result.differences(a, b) == []
        assert a["round/gradient_steps"][-1] > 0
        assert a["round/epochs"].tolist() == ([1, 3, 5] if find("method", method).preprocesses else [0, 2, 4])
        expected = {"local": 0, "scaffold": 4}.get(method, 2)  # x and c
        received = a["traffic/models_received"][1:]
        assert (received >= 2).all() if method == "cobo" else (received == expected).all()  # cobo: and pairs' midpoints


def test_more_ranks_than_clients(tmp_path):
    fields = {"method": "pfedgraph", "clients": 3, "rounds": 2, "tau_train": 1}
    with (
        Result(run_here(tmp_path / "one.h5", fields, kernels="auto")) as a,
        Result(run_mpi(4, tmp_path / "four.h5", fields, window_gb=2e-5)) as b,  # a window of five rows: several passes
    ):
        assert Result.differences(a, b) == []


def test_random_graph_draws():
    """B_c - 1 distinct others each, once or anew each round."""
    for redraw in (False, True):
        _, states, _ = play("random_graph", budget=3, options={"redraw": redraw})
        graphs = [s["shared"]["chosen"] for s in states]
        assert all((g.degrees() == 2).all() and not g.matrix().diagonal().any() for g in graphs)
        assert (len({g.matrix().tobytes() for g in graphs}) > 1) is redraw


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("fedprox", {"lambda": 1}, "the method fedprox has no such option; its options: mu"),
        ("fedprox", {"mu": -1}, "allowed is a number of at least 0"),
        ("fedprox", {"mu": "much"}, "allowed is a number"),
        ("apfl", {"alpha": 1.5}, "a number from 0 to 1"),
        ("apfl", {"adaptive": 1}, "allowed is true or false"),
        ("knnper", {"k": 2.5}, "allowed is a whole number of at least 1"),
    ],
)
def test_options_are_checked(method, options, sentence):
    with pytest.raises(UserError, match=sentence):
        Run(method=method, options=options).resolve()


def test_options_name_the_run():
    assert Run(method="fedprox", options={"mu": 0.1}).slug() == Run(method="fedprox").slug()
    assert Run(method="fedprox", options={"mu": 1}).slug() == Run(method="fedprox", options={"mu": 1.0}).slug()
    assert Run(method="fedprox", options={"mu": 1}).slug() != Run(method="fedprox").slug()


def test_methods_import_without_torch(tmp_path):
    import subprocess
    import sys

    code = "import sys, dpfl_mpi.plugins as c; [c.find('method', m) for m in c.names('method')]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
