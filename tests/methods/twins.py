"""Slow twins of the methods in plain PyTorch, of four clients with unequal training sets.

From the package are data, initial row and the recipe of the draws alone.
"""

import copy
import importlib
import itertools
import math

import numpy as np
import reference
import torch
from launch import federation, reward_of, training_rows, validation
from scipy.optimize import minimize
from sklearn.cluster import AgglomerativeClustering
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from dpfl_mpi import streams
from dpfl_mpi.models import mlp

N, ROUNDS, TAU = 4, 3, 2
FIELDS = {"clients": N, "rounds": ROUNDS, "tau_train": TAU, "tau_init": TAU}
FIELDS |= {"clip_norm": 2.0, "batch_size": 32}
HEAD = 64 * 64 + 64  # the first column of the perceptron's head


def play(method, rounds=ROUNDS, job=None, options=None, **fields):
    """Run a method in this process.

    Return the rows of each call of `evaluate` in client order (of DPFL also the mixed ones), the
    states after each round, and the Federation.
    """
    fields = FIELDS | {"method": method, "options": options} | fields
    with federation(fields, **(job or {})) as fed:
        module = importlib.import_module(f"dpfl_mpi.methods.{method}")
        evaluate, scored = fed.evaluate, []

        def note(w, series="", **how):
            evaluate(w, series, **how)
            if not series or method == "dpfl":
                scored.append(w[fed.row_of, : fed.ensemble.size].clone())

        fed.evaluate = note
        state = module.init(fed)
        states = [copy.deepcopy(state)]
        for t in range(1, rounds + 1):
            fed.begin_round(t)
            state = module.round(fed, state, t)
            states.append(copy.deepcopy(state))
        return scored, states, fed


def keyed(*key):
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def others(k):
    return [j for j in range(N) if j != k]


def squared(a, b):
    return (a - b).square().sum()


class Twin:
    def __init__(self, fed):
        samples = fed.partition.class_counts.sum(1)
        self.run, self.p, self.optimisers = fed.run, samples / samples.sum(), {}
        self.most = fed.run.most_senders
        self.module = mlp.build((8, 8, 1), 10)
        self.initial_row = fed.initial_row
        self.start = fed.initial_row()[: fed.ensemble.size].clone()
        self.head = torch.arange(len(self.start)) >= HEAD
        self.R = [reward_of(fed, k) for k in range(N)]
        self.val = [validation(fed, k) for k in range(N)]
        self.data = []
        for rows in (training_rows(fed, k) for k in range(N)):
            x = ((fed.clients.x[rows].float() / 255 - 0.305) / 0.376).permute(0, 3, 1, 2)
            self.data.append((x, fed.clients.y[rows]))
        assert len({len(y) for _, y in self.data}) > 1, "unequal"

    def batches(self, k, first_epoch, epochs):
        x, y = self.data[k]
        for epoch in range(first_epoch, first_epoch + epochs):
            order = torch.from_numpy(keyed(self.run.seed, 2, k, epoch).permutation(len(y)))
            yield from ((x[rows], y[rows]) for rows in order.split(self.run.batch_size))

    def model(self, w):
        vector_to_parameters(w.clone(), self.module.parameters())
        return self.module

    def gradient(self, w, batch, extra=None):
        """The gradient at row w of the mean loss, and of `extra(w)` by autograd."""
        module = self.model(w)
        loss = cross_entropy(module(batch[0]), batch[1])
        if extra is not None:
            loss = loss + extra(parameters_to_vector(module.parameters()))
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        return torch.cat([g.reshape(-1) for g in gradients])

    def optimiser(self, leaf):
        run = self.run
        how = {"lr": run.lr, "weight_decay": run.weight_decay}
        if run.optimizer == "sgd":
            return torch.optim.SGD([leaf], momentum=run.momentum, **how)
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[run.optimizer]
        return kind([leaf], eps=run.adam_eps, **how)

    def step(self, k, name, w, g, columns=None):
        columns = torch.ones(len(w), dtype=torch.bool) if columns is None else columns
        if (k, name) not in self.optimisers:
            leaf = torch.nn.Parameter(w[columns].clone())
            self.optimisers[k, name] = leaf, self.optimiser(leaf)
        leaf, optimiser = self.optimisers[k, name]
        leaf.data, leaf.grad = w[columns].clone(), g[columns].clone()
        clip_grad_norm_([leaf], self.run.clip_norm)
        optimiser.step()
        return w.masked_scatter(columns, leaf.data)

    def local(self, k, w, epoch, epochs=TAU, name="w", extra=None, columns=None):
        for batch in self.batches(k, epoch, epochs):
            w = self.step(k, name, w, self.gradient(w, batch, extra), columns)
        return w

    def loss(self, k, w):
        """The mean loss of row w on client k's training samples."""
        return cross_entropy(self.model(w)(self.data[k][0]), self.data[k][1]).item()

    def mean(self, rows):
        return sum(float(p) * w.double() for p, w in zip(self.p, rows, strict=True)).float()

    def over(self, members, w, a=None):
        """The mean of the members' rows, weighted by `a`, or p."""
        a = self.p if a is None else a
        total = sum(float(a[j]) * w[j].double() for j in members)
        return (total / sum(a[j] for j in members)).float()

    def draw(self, k, t, clients):
        """These clients in the order of a draw of client k."""
        return keyed(self.run.seed, streams.CANDIDATES, k, t * 1000).permutation(clients).tolist()

    def random_senders(self, t):
        return [self.draw(k, t, others(k))[: self.most] for k in range(N)]

    def peers(self, mix, rounds=ROUNDS):
        """The rounds of a method in which all train and then make new rows by `mix(w, t)`."""
        w = [self.start] * N
        yield w
        for t in range(1, rounds + 1):
            w = [self.local(k, w[k], (t - 1) * TAU) for k in range(N)]
            yield w
            w = mix(w, t)

    def keeping(self, own, train=None):
        """Clients keep columns `own`, bool, and take the others from the mean of all."""
        mean, w = self.start, [self.start] * N
        yield w
        for t in range(ROUNDS):
            rows = [torch.where(own, w[k], mean) for k in range(N)]
            w = [(train or self.local)(k, rows[k], t * TAU) for k in range(N)]
            yield w
            mean = self.mean(w)


def twin_dpfl(tw, o):
    """Algorithm 1, with reference.py's 2 and 3; yields rows after training, then mixed ones."""
    run, everyone = tw.run, [set(range(N))] * N

    def search(algorithm, w, t, reachable):
        found, models = [], [row.numpy() for row in w]
        for k in range(N):
            S = tw.draw(k, t, sorted(reachable[k] - {k}))
            coins = keyed(run.seed, streams.COIN, k, t * 1000).random(N)
            found.append(algorithm(k, S, models, tw.p, tw.R[k], tw.most + 1, coins))
        return found

    w = [tw.local(k, tw.start, 0, run.tau_init) for k in range(N)]  # line 2
    for t in range(ROUNDS + 1):
        if t:
            w = [tw.local(k, w[k], run.tau_init + (t - 1) * TAU) for k in range(N)]  # line 8
        yield w
        anew, choose = t % run.omega_period == 0, t % run.ggc_period == 0
        if anew:
            chosen = omega = search(reference.bggc, w, t, everyone)  # line 3
        elif choose:
            chosen = search(reference.ggc, w, t, omega)  # line 10
        if anew or choose or run.ggc_off_rounds == "reuse":
            w = [tw.over(sorted(chosen[k]), w) for k in range(N)]  # lines 4 and 11
        yield w


def twin_local(tw, o):
    return tw.peers(lambda w, t: w)


def twin_fedavg(tw, o, extra=lambda w: None):
    w = tw.start
    yield [w] * N
    for t in range(ROUNDS):
        w = tw.mean([tw.local(k, w, t * TAU, extra=extra(w)) for k in range(N)])
        yield [w] * N


def twin_fedprox(tw, o):
    return twin_fedavg(tw, o, lambda w: lambda v: o["mu"] / 2 * squared(v, w))


def twin_ditto(tw, o):
    w, v = tw.start, [tw.start] * N
    yield v
    for t in range(ROUNDS):
        pull = lambda row, w=w: o["lam"] / 2 * squared(row, w)  # noqa: E731
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
            for number, batch in enumerate(tw.batches(k, t * TAU, TAU)):
                w_k = tw.step(k, "w", w_k, tw.gradient(w_k, batch))
                g = tw.gradient(alpha[k] * v[k] + (1 - alpha[k]) * w_k, batch)
                moved = tw.step(k, "v", v[k], alpha[k] * g)
                if o["adaptive"] and number == 0:
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
    def train(k, w, epoch):
        w = tw.local(k, w, epoch, TAU - 1, "head", columns=tw.head)
        return tw.local(k, w, epoch + TAU - 1, 1, "base", columns=~tw.head)

    return tw.keeping(tw.head, train)


def twin_fedpac(tw, o):
    """Plain PyTorch with hooks, and SciPy's general solver for the heads' weights."""
    c, w, mean = {}, [tw.start] * N, tw.start
    yield w

    def features(k, w):
        module, seen = tw.model(w), []
        layer = module.get_submodule(mlp.HEAD)
        with layer.register_forward_pre_hook(lambda _, values: seen.append(values[0])):
            module(tw.data[k][0])
        return seen[0].detach().double().numpy(), tw.data[k][1].numpy()

    def gradient(w, batch):
        module, seen = tw.model(w), []
        layer = module.get_submodule(mlp.HEAD)
        with layer.register_forward_pre_hook(lambda _, values: seen.append(values[0])):
            loss = cross_entropy(module(batch[0]), batch[1])
        for z, y in zip(seen[0], batch[1].tolist(), strict=True):
            if y in c:
                away = z - torch.from_numpy(c[y]).float()
                loss = loss + o["lam"] * away.square().sum() / seen[0].numel()
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, module.parameters())])

    def mixed(k, h, v):
        def cost(x):
            return ((x[:, None] * (h[k] - h)).sum(0) ** 2).sum() + (v * x * x).sum()

        sums_to_1 = {"type": "eq", "fun": lambda x: x.sum() - 1}
        x = minimize(cost, np.full(N, 1 / N), bounds=[(0, 1)] * N, constraints=sums_to_1,
                     options={"ftol": 1e-14, "maxiter": 1000}).x  # fmt: skip
        x[x < 1e-3] = 0
        return x / x.sum()

    for t in range(ROUNDS):
        w = [torch.where(tw.head, w[k], mean) for k in range(N)]
        h, v = [], []
        for k in range(N):
            z, y = features(k, w[k])
            parts = [z[y == j].sum(0) / len(y) for j in range(10)]
            h.append(np.concatenate(parts))
            v.append(((z**2).sum(1).mean() - (h[-1] ** 2).sum()) / len(y))
        a = [mixed(k, np.array(h), np.array(v)) for k in range(N)]
        for k in range(N):
            w[k] = tw.local(k, w[k], t * TAU, o["head_epochs"], columns=tw.head)
            first, epochs = t * TAU + o["head_epochs"], TAU - o["head_epochs"]
            for batch in tw.batches(k, first, epochs):
                w[k] = tw.step(k, "base", w[k], gradient(w[k], batch), ~tw.head)
        yield w
        found = [features(k, w[k]) for k in range(N)]
        z, y = (np.concatenate(part) for part in zip(*found, strict=True))
        c.update({int(j): z[y == j].mean(0) for j in np.unique(y)})
        mean = tw.mean(w)
        w = [sum(float(a[k][j]) * w[j].double() for j in range(N)).float() for k in range(N)]


def twin_pfedgraph(tw, o):
    w = u = [tw.start] * N
    yield w
    for t in range(ROUNDS):
        if t:
            yield w
        terms = [(lambda v, u_k=u_k: o["lam"] * (u_k @ v) / v.norm()) if t else None for u_k in u]
        w = [tw.local(k, w[k], t * TAU, extra=terms[k]) for k in range(N)]
        yield w
        delta = [(row - tw.start).double() for row in w]
        wide = [row.double() for row in w]
        unit = [row / row.norm() for row in wide]
        new, u = [], []
        for i in range(N):
            d = [-float(cosine_similarity(delta[i], delta[j], 0)) for j in range(N)]
            d = [-1.0 if i == j or d[j] < -0.9 else d[j] for j in range(N)]
            x = quadratic(np.array(d), tw.p, o["alpha"])
            new.append(sum(float(x[j]) * wide[j] for j in range(N)).float())
            u.append(sum(float(x[j]) * unit[j] for j in range(N)).float())
        w = new


def twin_random_graph(tw, o):
    """Everyone reaches everyone."""
    return itertools.islice(tw.peers(lambda w, t: [tw.mean(w)] * N, ROUNDS + 1), 1, None)


def twin_scaffold(tw, o):
    """Without momentum, decay and clipping a step is the paper's line 10, and c_i its option II.

    Else c_i is the mean of the gradients.
    """
    x, c, c_i = tw.start, torch.zeros_like(tw.start), [torch.zeros_like(tw.start)] * N
    yield [x] * N
    for t in range(ROUNDS):
        trained, controls = [], []
        for k in range(N):
            y, gradients = x, []
            for batch in tw.batches(k, t * TAU, TAU):
                gradients.append(tw.gradient(y, batch))
                g = gradients[-1] - c_i[k] + c
                y = tw.step(k, "w", y, g) if tw.run.momentum else y - tw.run.lr * g
            paper = c_i[k] - c + (x - y) / (len(gradients) * tw.run.lr)
            controls.append(sum(gradients) / len(gradients) if tw.run.momentum else paper)
            trained.append(y)
        x = x + o["global_lr"] * (tw.mean(trained) - x)
        c = c + tw.mean([new - old for new, old in zip(controls, c_i, strict=True)])
        c_i = controls
        yield [x] * N


def twin_fedper(tw, o):
    return tw.keeping(tw.head)


def twin_pfedme(tw, o):
    w = tw.start
    yield [w] * N
    for t in range(ROUNDS):
        thetas, trained = [], []
        for k in range(N):
            w_k = theta = w
            for batch in tw.batches(k, t * TAU, TAU):
                for _ in range(o["steps"]):
                    pull = lambda v, w_k=w_k: o["lam"] / 2 * squared(v, w_k)  # noqa: E731
                    theta = theta - o["personal_lr"] * tw.gradient(theta, batch, pull)
                w_k = w_k - tw.run.lr * o["lam"] * (w_k - theta)
            thetas.append(theta)
            trained.append(w_k)
        yield thetas
        w = (1 - o["beta"]) * w + o["beta"] * tw.mean(trained)


def twin_fedala(tw, o):
    w, w_i, weight = tw.start, [tw.start] * N, [torch.ones(len(tw.start) - HEAD)] * N
    yield list(w_i)
    for t in range(ROUNDS):
        for k in range(N):
            if t:
                batches, losses = list(tw.batches(k, t * TAU, 1)), []
                batches = batches[: int(np.ceil(o["share"] * len(batches)))]
                own, step = w_i[k][HEAD:], (w - w_i[k])[HEAD:]
                while len(losses) < (o["passes"] if t == 1 else 1):
                    for batch in batches:
                        mixed = torch.cat([w[:HEAD], own + step * weight[k]])
                        g = tw.gradient(mixed, batch)
                        loss = cross_entropy(tw.model(mixed)(batch[0]), batch[1]).detach()
                        weight[k] = (weight[k] - o["eta"] * g[HEAD:] * step).clamp(0, 1)
                    losses.append(float(loss))
                    if len(losses) > 10 and np.std(losses[-10:]) < o["threshold"]:
                        break
                w_i[k] = torch.cat([w[:HEAD], own + step * weight[k]])
            w_i[k] = tw.local(k, w_i[k], t * TAU)
        yield list(w_i)
        w = tw.mean(w_i)


def twin_pens(tw, o):
    taken, first = np.zeros((N, N)), round(o["first_step"] * ROUNDS)

    def senders(k, w, t):
        if t <= first:
            drawn = tw.draw(k, t, others(k))[: tw.most]
            chosen = sorted(drawn, key=lambda j: tw.loss(k, w[j]))[: o["m"]]
            taken[k, chosen] += 1
            return chosen
        liked = [j for j in others(k) if taken[k, j] > first * o["m"] / (N - 1)]
        return tw.draw(k, t, liked or others(k))[: tw.most]

    return tw.peers(lambda w, t: [tw.over([k, *senders(k, w, t)], w) for k in range(N)])


def twin_dac(tw, o, weighted=""):
    s, met = np.zeros((N, N)), np.zeros((N, N), bool)

    def similarity(i, own, row):
        a, b, x0 = own.double(), row.double(), tw.start.double()
        return {
            "loss": 1 / tw.loss(i, row),
            "l2": 1 / max(float((a - b).norm()), 1e-12),
            "cosine": cosine_similarity(a, b, 0),
            "update": cosine_similarity(a - x0, b - x0, 0),
        }[o["similarity"]]

    def mix(w, t):
        old, new = s.copy(), []
        tau = 2 * o["tau"] / (1 + np.exp(-0.2 * (t - 2))) - o["tau"] + 1
        for i in range(N):
            noise = keyed(tw.run.seed, 15, i, t).gumbel(size=N) + (tau * s[i] if t > 1 else 0)
            chosen = sorted(others(i), key=lambda j: -noise[j])[: tw.most]
            s[i, chosen] = [similarity(i, w[i], w[j]) for j in chosen]
            met[i, chosen] = True
            for j in set(others(i)) - {*chosen}:
                knows = [k for k in chosen if old[k, j] > 0]
                if knows and not met[i, j]:
                    s[i, j] = old[max(knows, key=lambda k: s[i, k]), j]
            a = None
            if weighted == "similarity":
                a = {j: max(s[i, j], 0) for j in chosen} | {i: similarity(i, w[i], w[i])}
            elif weighted:
                p = np.exp(old[i] * tau) if t > 1 else np.ones(N)
                a = {j: p[j] / sum(p[others(i)]) for j in chosen}
                a[i] = max(a.values())
            new.append(tw.over([*chosen, i], w, a))
        return new

    return tw.peers(mix)


def twin_dpsgd(tw, o):
    """Along the ring 0-1-2-3 by W, or with `peers` one neighbour drawn by each."""
    ring = {k: sorted([(k - 1) % N, (k + 1) % N]) for k in range(N)}

    def mix(w, t):
        near = {k: tw.draw(k, t, ring[k])[: o["peers"] or 2] for k in ring}
        third = 1 / (1 + (o["peers"] or 2))  # everybody has as many
        return [tw.over([k, *near[k]], w, dict.fromkeys(ring, third)) for k in ring]

    return tw.peers(mix)


def twin_fedfomo(tw, o):
    """By the formula: theta + sum of w_n (theta_n - theta), w_n relative first-order gains."""
    g, w = np.zeros((N, N)), [tw.start] * N
    yield w
    for t in range(1, ROUNDS + 1):
        old, w = w, [tw.local(k, w[k], (t - 1) * TAU) for k in range(N)]
        yield w
        new = []
        for i in range(N):
            chosen = tw.draw(i, t, others(i))
            if keyed(tw.run.seed, 15, i, t).random() >= o["epsilon"] - o["decay"] * (t - 1):
                chosen = sorted(chosen, key=lambda j, i=i: -g[i, j])
            weight = {}
            for n in (i, *chosen[: tw.most]):
                gain = tw.R[i](w[n].numpy()) - tw.R[i](old[i].numpy())
                weight[n] = gain / float((w[n] - old[i]).double().norm())
                g[i, n] += weight[n]
            total = sum(max(x, 0) for x in weight.values())
            pull = sum(max(x, 0) * (w[n].double() - old[i]) for n, x in weight.items())
            new.append((old[i] + pull / total).float() if total else w[i])
        w = new


def twin_fedsim(tw, o):
    return twin_dac(tw, o, weighted=o["weights"])


def twin_pfedsv(tw, o):
    """By the formula over subsets: a coalition S without j counts |S|! (m - 1 - |S|)! / m!."""
    r, f = np.zeros((N, N)), math.factorial

    def mix(w, t):
        new = []
        for k in range(N):
            members = [k, *sorted(tw.draw(k, t, others(k)), key=lambda j: -r[k, j])[: tw.most]]

            def v(s, k=k):
                return -tw.loss(k, tw.over(s, w, np.ones(N))) if s else -np.log(10)

            m, phi = len(members), {}
            for j in members:
                rest = [i for i in members if i != j]
                sets = [c for n in range(m) for c in itertools.combinations(rest, n)]
                terms = [f(len(s)) * f(m - 1 - len(s)) * (v((*s, j)) - v(s)) for s in sets]
                phi[j] = sum(terms) / f(m)
                r[k, j] = 0.2 * r[k, j] + 0.8 * phi[j]
            a = {j: max(phi[j], 0) for j in members}
            new.append(tw.over(members, w, a) if sum(a.values()) else w[k])
        return new

    return tw.peers(mix)


def twin_dfedpgp(tw, o):
    u, mu, head = [tw.start] * N, np.ones(N), tw.head
    yield list(u)
    for t in range(1, ROUNDS + 1):
        first, e = (t - 1) * TAU, o["head_epochs"]
        for k in range(N):
            z = torch.where(head, u[k], u[k] / mu[k])
            u[k] = torch.where(head, tw.local(k, z, first, e, "head", columns=head), u[k])
            for batch in tw.batches(k, first + e, TAU - e):
                at = torch.where(head, u[k], u[k] / mu[k])
                u[k] = tw.step(k, "w", u[k], tw.gradient(at, batch), ~head)
        yield [torch.where(head, u[k], u[k] / mu[k]) for k in range(N)]
        senders = tw.random_senders(t)
        out = [1 + sum(j in s for s in senders) for j in range(N)]
        body = [sum(u[j].double() / out[j] for j in (k, *senders[k])).float() for k in range(N)]
        mu = np.array([sum(mu[j] / out[j] for j in (k, *senders[k])) for k in range(N)])
        u = [torch.where(head, u[k], body[k]) for k in range(N)]


def twin_facade(tw, o):
    def mean(rows):
        return torch.stack(rows).double().mean(0).float()

    w, head = [tw.start] * N, tw.head
    heads = [[tw.initial_row(c)[: len(head)][head] for c in range(o["heads"])] for k in range(N)]

    def choose():
        cluster = []
        for k in range(N):
            models = [w[k].masked_scatter(head, h) for h in heads[k]]
            cluster.append(int(np.argmin([tw.loss(k, m) for m in models])))
            w[k] = models[cluster[k]]
        return cluster

    yield list(w)
    for t in range(1, ROUNDS + 1):
        cluster = choose()
        for k in range(N):
            w[k] = tw.local(k, w[k], (t - 1) * TAU)
            heads[k][cluster[k]] = w[k][head]
        yield list(w)
        senders, new = tw.random_senders(t), []
        core = [mean([w[j] for j in (k, *senders[k])]) for k in range(N)]
        for k in range(N):
            received = [(cluster[j], w[j][head]) for j in senders[k]]
            own = enumerate(heads[k])
            new.append([mean([h, *(row for of, row in received if of == c)]) for c, h in own])
        heads = new
        w = [core[k].masked_scatter(head, heads[k][cluster[k]]) for k in range(N)]
    if o["final"]:
        cluster, new = choose(), []
        for k in range(N):
            sent = [(cluster[j], w[j][head]) for j in others(k)]
            own = enumerate(heads[k])
            new.append([mean([h, *(row for of, row in sent if of == c)]) for c, h in own])
        heads, w = new, [mean(w)] * N
        choose()
        yield list(w)


def twin_cfl(tw, o):
    clusters, models = [np.arange(N)], [tw.start]
    yield [tw.start] * N
    for t in range(1, ROUNDS + 1):
        start = [next(m for c, m in zip(clusters, models, strict=True) if k in c) for k in range(N)]
        u = [tw.local(k, start[k], (t - 1) * TAU) - start[k] for k in range(N)]
        old, clusters, models = zip(clusters, models, strict=True), [], []
        for members, model in old:
            rows = torch.stack([u[k] for k in members]).double()
            halves, at_rest = [members], tw.over(members, u).norm() < o["eps1"]
            apart = len(members) > 2 and rows.norm(dim=1).max() > o["eps2"]
            if t > o["after"] and at_rest and apart:
                away = 1 - cosine_similarity(rows[:, None], rows, 2).numpy()
                how = {"metric": "precomputed", "linkage": o["linkage"]}
                label = AgglomerativeClustering(**how).fit(away).labels_
                halves = [members[label == 0], members[label == 1]]
            clusters += halves
            models += [model + tw.over(half, u) for half in halves]
        rows = dict(zip(map(tuple, clusters), models, strict=True))
        yield [next(row for c, row in rows.items() if k in c) for k in range(N)]


def twin_fedamp(tw, o):
    w = [tw.start] * N
    yield w
    for t in range(ROUNDS):
        old = torch.stack(w).double()
        d = (old[:, None] - old).square().sum(2)
        xi = o["alpha"] * (-d / o["sigma"]).exp() / o["sigma"]
        xi.fill_diagonal_(0)
        xi += torch.diag(1 - xi.sum(1))
        u = (xi @ old).float()

        def pull(v, k, u=u):
            return o["lam"] / (2 * o["alpha"]) * squared(v, u[k])

        w = [tw.local(k, w[k], t * TAU, extra=lambda v, k=k: pull(v, k)) for k in range(N)]
        yield w


def twin_ifca(tw, o):
    theta = [tw.initial_row(j)[: len(tw.start)] for j in range(o["k"])]

    def estimate():
        return [int(np.argmin([tw.loss(k, row) for row in theta])) for k in range(N)]

    yield [theta[j] for j in estimate()]
    for t in range(ROUNDS):
        cluster = estimate()
        w = [tw.local(k, theta[cluster[k]], t * TAU) for k in range(N)]
        for j in set(cluster):
            theta[j] = tw.over([k for k in range(N) if cluster[k] == j], w)
        yield [theta[j] for j in cluster]


def twin_sketch(tw, o):
    def mix(w, t):
        u = np.stack([(row - tw.start).numpy() for row in w]).astype(float)
        np.put_along_axis(u, np.argsort(-abs(u), 1, kind="stable")[:, o["entries"] :], 0, 1)
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        distance = np.where(np.eye(N) > 0, np.inf, -u @ u.T)
        nearest = np.argsort(distance, 1, kind="stable")[:, : tw.most]
        return [tw.over([k, *nearest[k]], w) for k in range(N)]

    return tw.peers(mix)


def count_sketches(tw, u, entries):
    draws = streams.stream(tw.run.seed, streams.SKETCH, 0, 0)
    drawn = draws.integers(0, 2 * entries, len(tw.start))
    matrix = np.zeros((len(drawn), entries))
    matrix[np.arange(len(drawn)), drawn % entries] = np.where(drawn < entries, 1, -1)
    sums = np.stack([row.numpy().astype(float) @ matrix for row in u])
    return np.rint(127 * sums / abs(sums).max(1, keepdims=True))


def counted(tw, u, entries):
    """Cosines of count sketches of u."""
    sent = count_sketches(tw, u, entries)
    cos = sent @ sent.T / np.sqrt(np.outer((sent**2).sum(1), (sent**2).sum(1)))
    return np.where(np.eye(N) > 0, -np.inf, cos)


def twin_nearest(tw, o):
    m, w = tw.most, [tw.local(k, tw.start, 0) for k in range(N)]
    u = [row - tw.start for row in w]
    for t in range(1, ROUNDS + 2):
        yield w
        if t - 1 <= o["until"]:
            cos, chosen = counted(tw, u, o["entries"]), []
            r = np.sort(cos, 1)[:, -m:].mean(1)
            order = np.argsort(o["hubs"] * r - cos, axis=1, kind="stable")
            for k in range(N):
                alike = [j for j in order[k] if cos[k, j] >= o["alike"] * max(cos[k])]
                chosen.append(tw.draw(k, t - 1, alike[: o["pool"] * m])[:m])
        start = [tw.over([k, *chosen[k]], w) for k in range(N)]
        w = [tw.local(k, start[k], t * TAU) for k in range(N)]
        u = [u[k] + (w[k] - start[k]) for k in range(N)]


def twin_spectral_search(tw, o):
    def chosen_of(k, S, w, t):
        coins = keyed(tw.run.seed, streams.COIN, k, t * 1000).random(N)
        order, models = tw.draw(k, t, sorted(S)), [row.numpy() for row in w]
        return sorted(reference.ggc(k, order, models, tw.p, tw.R[k], tw.most + 1, coins))

    return twin_spectral(tw, o, chosen_of)


def twin_spectral(tw, o, search=lambda k, S, w, t: [k, *S]):
    w, u, before = [tw.local(k, tw.start, 0) for k in range(N)], [0 * tw.start] * N, [set()] * N
    chosen, chose = [tw.draw(k, 0, others(k))[: tw.most] for k in range(N)], False
    for t in range(1, ROUNDS + 2):
        yield w
        if t - 1 in (1, 2, 4):
            kin = spectral_kin(tw, o, u, t - 1)
            both = [(a & b, a | b) for a, b in zip(kin, before, strict=True) if a | b]
            if both and not chose and np.mean([len(a) / len(b) for a, b in both]) >= 0.5:
                chose = True
                for k in range(N):
                    chosen[k] = tw.draw(k, t - 1, sorted(kin[k]) or others(k))[: tw.most]
            before = kin
        averaged = [search(k, chosen[k], w, t - 1) if t > 1 else [k, *chosen[k]] for k in range(N)]
        start = [tw.over(averaged[k], w) for k in range(N)]
        w = [tw.local(k, start[k], t * TAU) for k in range(N)]
        u = [u[k] + (w[k] - start[k]) for k in range(N)]


def spectral_kin(tw, o, u, t):
    """Return the set of each client's kin, from the sketches of u."""
    unit = count_sketches(tw, u, o["entries"])
    unit /= np.sqrt((unit**2).sum(1, keepdims=True))
    unit -= unit.mean(0)
    draws = streams.stream(tw.run.seed, streams.SKETCH, 0, t)
    noise = np.linalg.svd(unit * (2 * draws.integers(2, size=unit.shape, dtype=np.int8) - 1))[1][0]
    vectors, values, _ = np.linalg.svd(unit)
    if values[0] <= noise:
        return [set()] * N
    first = [c / np.sqrt(c @ c) for c in (vectors[:, : len(values)] * values)[:, values > noise]]
    moved = first
    for _ in range(2):
        sums = [sum(b for b in first if a @ b >= 0.5) for a in moved]
        moved = [c / np.sqrt(c @ c) for c in sums]
    kin = []
    for k in range(N):
        cos = {j: moved[j] @ moved[k] for j in others(k)}
        kin.append({j for j, c in cos.items() if c > 0 and 2 * c >= max(cos.values())})
    return kin


def twin_l2c(tw, o):
    """By backpropagation to alpha."""
    alpha, v = np.zeros((N, N)), [tw.start] * N
    yield v
    for t in range(1, ROUNDS + 1):
        w = [tw.local(k, v[k], (t - 1) * TAU) for k in range(N)]
        yield w
        u, new = [(after - before).double() for after, before in zip(w, v, strict=True)], []
        for i in range(N):
            order = tw.draw(i, t, others(i))
            if t > round(o["first_step"] * ROUNDS):
                order.sort(key=lambda j: -alpha[i, j])
            members = [i, *order[: tw.most]]
            leaf = torch.tensor(alpha[i, members], requires_grad=True)
            mixed = v[i] + leaf.softmax(0) @ torch.stack([u[j] for j in members])
            new.append(mixed.detach().float())
            mixed.backward(tw.gradient(new[i], tw.val[i]).double())
            alpha[i, members] -= o["eta"] * leaf.grad.numpy()
        v = new


def twin_morph(tw, o):
    s, met, kept, beta = np.zeros((N, N)), np.eye(N) > 0, [[] for _ in range(N)], o["beta"]

    def mix(w, t):
        old, new = s.copy(), []
        for i in range(N):
            drop, take = keyed(tw.run.seed, streams.PEERS, i, t).gumbel(size=(2, N))
            guess = old[i][old[i] != 0].mean() if old[i].any() else 0
            like = beta * np.where(old[i] != 0, old[i], guess)
            rest = sorted(set(others(i)) - {*kept[i]}, key=lambda j: take[j] - like[j])
            if kept[i] and t % o["refresh"] == 0:
                kept[i].remove(max(kept[i], key=lambda j: like[j] + drop[j]))
            while len(kept[i]) < tw.most:
                kept[i].append(rest.pop())
            met[i, kept[i]] = True
            for j in kept[i]:
                s[i, j] = cosine_similarity(w[i].double(), w[j].double(), 0)
            for j in np.flatnonzero(~met[i]):
                told = [s[i, k] * old[k, j] for k in kept[i] if old[k, j] != 0]
                s[i, j] = np.mean(told) if told else s[i, j]
            new.append(tw.over([i, *kept[i]], w))
        return new

    return tw.peers(mix)


def twin_cobo(tw, o):
    x, w = [tw.start] * N, np.ones((N, N))
    yield x
    for t in range(1, ROUNDS + 1):
        epoch = (t - 1) * TAU
        draws = [keyed(tw.run.seed, streams.PAIRS, k, t).random(N) for k in range(N)]
        drawn = np.array(draws) < 1 / N
        for i, j in itertools.combinations(range(N), 2):
            if drawn[i, j] or drawn[j, i]:
                z = (x[i] + x[j]) / 2
                g_i, g_j = (tw.gradient(z, next(tw.batches(k, epoch, 1))) for k in (i, j))
                w[i, j] = w[j, i] = min(max(w[i, j] + o["gamma"] * float(g_i @ g_j), 0), 1)
        old = x

        def pull(v, i, old=old):
            return o["rho"] / 2 * sum(w[i, j] * squared(v, old[j]) for j in others(i))

        x = [tw.local(i, x[i], epoch, extra=lambda v, i=i: pull(v, i)) for i in range(N)]
        yield x


def quadratic(d, p, alpha):
    """The x on the simplex that minimises alpha x^2 + (d - 2 alpha p) x, by a solver."""
    slope, bounds = d - 2 * alpha * p, [(0, None)] * len(p)
    value, jac = lambda x: alpha * x @ x + slope @ x, lambda x: 2 * alpha * x + slope
    simplex = {"type": "eq", "fun": lambda x: x.sum() - 1, "jac": lambda x: np.ones(len(x))}
    how = {"bounds": bounds, "constraints": simplex, "options": {"ftol": 1e-12, "maxiter": 500}}
    found = minimize(value, p, jac=jac, method="SLSQP", **how)
    assert found.success
    return found.x
