"""Slow twins of the methods in plain PyTorch, of four ragged clients: from the package are data, initial row and the recipe of the draws alone."""

import copy
import importlib
import itertools
import math

import numpy as np
import reference
import torch
from launch import federation, reward_of, training_rows, validation
from scipy.optimize import minimize
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from dpfl_mpi import streams
from dpfl_mpi.models import mlp

N, ROUNDS, TAU = 4, 3, 2
FIELDS = {"clients": N, "rounds": ROUNDS, "tau_train": TAU, "tau_init": TAU, "clip_norm": 2.0, "batch_size": 32}
HEAD = 64 * 64 + 64  # the first column of the perceptron's head


def play(method, rounds=ROUNDS, job=None, options=None, **fields):
    """Run a method in this process.

    Return per call of `evaluate` (DPFL: the mixed ones too) the rows in client order, the states after each round, and the Federation.
    """
    with federation(FIELDS | {"method": method, "options": options} | fields, **(job or {})) as fed:
        module, scored, states = importlib.import_module(f"dpfl_mpi.methods.{method}"), [], []
        evaluate = fed.evaluate

        def note(w, series="", **how):
            evaluate(w, series, **how)
            if not series or method == "dpfl":
                scored.append(w[fed.row_of, : fed.ensemble.size].clone())

        fed.evaluate = note
        state = module.init(fed)
        states.append(copy.deepcopy(state))
        for t in range(1, rounds + 1):
            fed.begin_round(t)
            state = module.round(fed, state, t)
            states.append(copy.deepcopy(state))
        return scored, states, fed


def keyed(*key):
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


class Twin:
    def __init__(self, fed):
        samples = fed.partition.class_counts.sum(1)
        self.run, self.p, self.optimisers = fed.run, samples / samples.sum(), {}
        self.module = mlp.build((8, 8, 1), 10)
        self.initial_row = fed.initial_row
        self.start = fed.initial_row()[: fed.ensemble.size].clone()
        self.head = torch.arange(len(self.start)) >= HEAD
        self.data, self.val, self.R = [], [], [reward_of(fed, k) for k in range(N)]
        for k in range(N):
            rows = training_rows(fed, k)
            x = ((fed.clients.x[rows].float() / 255 - 0.305) / 0.376).permute(0, 3, 1, 2)
            self.data.append((x, fed.clients.y[rows]))
            self.val.append(validation(fed, k))
        assert len({len(y) for _, y in self.data}) > 1, "ragged"

    def batches(self, k, first_epoch, epochs):
        x, y = self.data[k]
        for epoch in range(first_epoch, first_epoch + epochs):
            order = torch.from_numpy(keyed(self.run.seed, 2, k, epoch).permutation(len(y)))
            yield from ((x[rows], y[rows]) for rows in order.split(self.run.batch_size))

    def model(self, w):
        vector_to_parameters(w.clone(), self.module.parameters())
        return self.module

    def gradient(self, w, batch, extra=None):
        """The gradient at row w of the mean loss, plus `extra(w)` where a term has autograd's gradient."""
        module = self.model(w)
        loss = cross_entropy(module(batch[0]), batch[1])
        if extra is not None:
            loss = loss + extra(parameters_to_vector(module.parameters()))
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))])

    def step(self, k, name, w, g, columns=None):
        columns = torch.ones(len(w), dtype=torch.bool) if columns is None else columns
        if (k, name) not in self.optimisers:
            leaf, run = torch.nn.Parameter(w[columns].clone()), self.run
            kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[run.optimizer]
            adam = {"betas": (run.beta1, run.beta2), "eps": run.adam_eps}
            more = {"momentum": run.momentum} if run.optimizer == "sgd" else adam
            self.optimisers[k, name] = leaf, kind([leaf], run.lr, weight_decay=run.weight_decay, **more)
        leaf, optimiser = self.optimisers[k, name]
        leaf.data, leaf.grad = w[columns].clone(), g[columns].clone()
        clip_grad_norm_([leaf], self.run.clip_norm)
        optimiser.step()
        w = w.clone()
        w[columns] = leaf.data
        return w

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
        return (sum(float(a[j]) * w[j].double() for j in members) / sum(a[j] for j in members)).float()

    def peers(self, mix, rounds=ROUNDS):
        """The rounds of a method in which all train and then make new rows of all rows, `mix(w, t)`."""
        w = [self.start] * N
        yield w
        for t in range(1, rounds + 1):
            w = [self.local(k, w[k], (t - 1) * TAU) for k in range(N)]
            yield w
            w = mix(w, t)

    def keeping(self, own, train=None):
        """The rounds of a method whose clients keep these columns, bool, and take the others from the mean of all; they `train(k, w, epoch)`."""
        mean, w = self.start, [self.start] * N
        yield w
        for t in range(ROUNDS):
            w = [(train or self.local)(k, torch.where(own, w[k], mean), t * TAU) for k in range(N)]
            yield w
            mean = self.mean(w)


def twin_dpfl(tw, o):
    """Algorithm 1, of which lines 3 and 10 are tests/reference.py's; the rows are those after training, then those that are mixed."""
    run, everyone = tw.run, [set(range(N))] * N

    def search(algorithm, w, t, near):
        found, models = [], [row.numpy() for row in w]
        for k in range(N):
            S = keyed(run.seed, streams.CANDIDATES, k, t * 1000).permutation(sorted(near[k] - {k})).tolist()
            coins = keyed(run.seed, streams.COIN, k, t * 1000).random(N)
            found.append(algorithm(k, S, models, tw.p, tw.R[k], run.most_senders + 1, coins))
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
    return twin_fedavg(tw, o, lambda w: lambda v: o["mu"] / 2 * (v - w).square().sum())


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
    def train(k, w, epoch):
        w = tw.local(k, w, epoch, TAU - 1, "head", columns=tw.head)
        return tw.local(k, w, epoch + TAU - 1, 1, "base", columns=~tw.head)

    return tw.keeping(tw.head, train)


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
        new, u = [], []
        for i in range(N):
            d = [-float(delta[i] @ delta[j] / (delta[i].norm() * delta[j].norm())) for j in range(N)]
            d = [-1.0 if i == j or d[j] < -0.9 else d[j] for j in range(N)]
            x = quadratic(np.array(d), tw.p, o["alpha"])
            new.append(sum(float(x[j]) * w[j].double() for j in range(N)).float())
            u.append(sum(float(x[j]) * w[j].double() / w[j].double().norm() for j in range(N)).float())
        w = new


def twin_random_graph(tw, o):
    return itertools.islice(tw.peers(lambda w, t: [tw.mean(w)] * N, ROUNDS + 1), 1, None)  # everyone reaches everyone


def twin_scaffold(tw, o):
    """Without momentum, decay and clipping a step is the paper's line 10, and c_i its option II; else c_i is the mean of the gradients."""
    x, c, c_i = tw.start, torch.zeros_like(tw.start), [torch.zeros_like(tw.start)] * N
    yield [x] * N
    for t in range(ROUNDS):
        trained, controls = [], []
        for k in range(N):
            y, seen = x, []
            for batch in tw.batches(k, t * TAU, TAU):
                seen.append(tw.gradient(y, batch))
                g = seen[-1] - c_i[k] + c
                y = tw.step(k, "w", y, g) if tw.run.momentum else y - tw.run.lr * g
            paper = c_i[k] - c + (x - y) / (len(seen) * tw.run.lr)
            controls.append(sum(seen) / len(seen) if tw.run.momentum else paper)
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
                    pull = lambda v, w_k=w_k: o["lam"] / 2 * (v - w_k).square().sum()  # noqa: E731
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
                batches = list(tw.batches(k, t * TAU, 1))
                batches, losses = batches[: int(np.ceil(o["share"] * len(batches)))], []
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
    taken, most, first = np.zeros((N, N)), tw.run.most_senders, round(o["first_step"] * ROUNDS)

    def of(k, w, t):
        draw = keyed(tw.run.seed, 4, k, t * 1000).permutation
        everyone = np.array([j for j in range(N) if j != k])
        if t <= first:
            chosen = sorted(draw(everyone)[:most].tolist(), key=lambda j: tw.loss(k, w[j]))[: o["m"]]
            taken[k, chosen] += 1
            return chosen
        liked = [j for j in everyone if taken[k, j] > first * o["m"] / (N - 1)]
        return draw(np.array(liked or everyone))[:most]

    return tw.peers(lambda w, t: [tw.over([k, *of(k, w, t)], w) for k in range(N)])


def twin_dac(tw, o, weighted=False):
    s, met, most = np.zeros((N, N)), np.zeros((N, N), bool), tw.run.most_senders

    def similarity(i, own, row):
        a, b, x0 = own.double(), row.double(), tw.start.double()
        cosine = torch.nn.functional.cosine_similarity
        of = {"loss": 1 / tw.loss(i, row), "l2": 1 / max(float((a - b).norm()), 1e-12), "cosine": cosine(a, b, 0)}
        return (of | {"update": cosine(a - x0, b - x0, 0)})[o["similarity"]]

    def mix(w, t):
        old, new = s.copy(), []
        tau = 2 * o["tau"] / (1 + np.exp(-0.2 * (t - 2))) - o["tau"] + 1
        for i in range(N):
            noise = keyed(tw.run.seed, 15, i, t).gumbel(size=N) + (tau * s[i] if t > 1 else 0)
            chosen = sorted((j for j in range(N) if j != i), key=lambda j: -noise[j])[:most]
            s[i, chosen] = [similarity(i, w[i], w[j]) for j in chosen]
            met[i, chosen] = True
            for j in set(range(N)) - {i, *chosen}:
                if (knows := [k for k in chosen if old[k, j] > 0]) and not met[i, j]:
                    s[i, j] = old[max(knows, key=lambda k: s[i, k]), j]
            a = {j: max(s[i, j], 0) for j in chosen} | {i: similarity(i, w[i], w[i])} if weighted else None
            new.append(tw.over([*chosen, i], w, a))
        return new

    return tw.peers(mix)


def twin_fedsim(tw, o):
    return twin_dac(tw, o, weighted=True)


def random_senders(tw, t):
    near = [np.array([j for j in range(N) if j != k]) for k in range(N)]
    return [keyed(tw.run.seed, 4, k, t * 1000).permutation(near[k])[: tw.run.most_senders].tolist() for k in range(N)]


def twin_pfedsv(tw, o):
    """By the formula over subsets: a coalition S without j counts |S|! (m - 1 - |S|)! / m!."""
    r = np.zeros((N, N))

    def mix(w, t):
        new = []
        for k in range(N):
            near = keyed(tw.run.seed, 4, k, t * 1000).permutation([j for j in range(N) if j != k])
            members = [k, *sorted(near, key=lambda j: -r[k, j])[: tw.run.most_senders]]

            def v(s, k=k):
                return -tw.loss(k, tw.over(s, w, np.ones(N))) if s else -np.log(10)

            m, phi = len(members), {}
            for j in members:
                others = [i for i in members if i != j]
                sets = [c for n in range(m) for c in itertools.combinations(others, n)]
                share = [math.factorial(len(s)) * math.factorial(m - 1 - len(s)) / math.factorial(m) for s in sets]
                phi[j] = sum(a * (v((*s, j)) - v(s)) for a, s in zip(share, sets, strict=True))
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
        senders = random_senders(tw, t)
        out = [1 + sum(j in s for s in senders) for j in range(N)]
        body = [sum(u[j].double() / out[j] for j in (k, *senders[k])).float() for k in range(N)]
        mu = np.array([sum(mu[j] / out[j] for j in (k, *senders[k])) for k in range(N)])
        u = [torch.where(head, u[k], body[k]) for k in range(N)]


def twin_facade(tw, o):
    w, head = [tw.start] * N, tw.head
    heads = [[tw.initial_row(c)[: len(head)][head] for c in range(o["heads"])] for k in range(N)]
    yield list(w)
    for t in range(1, ROUNDS + 1):
        cluster = []
        for k in range(N):
            models = [w[k].masked_scatter(head, h) for h in heads[k]]
            cluster.append(int(np.argmin([tw.loss(k, m) for m in models])))
            w[k] = tw.local(k, models[cluster[k]], (t - 1) * TAU)
            heads[k][cluster[k]] = w[k][head]
        yield list(w)
        senders, new = random_senders(tw, t), []
        core = [torch.stack([w[j] for j in (k, *senders[k])]).double().mean(0).float() for k in range(N)]
        for k in range(N):
            come = [[w[j][head] for j in senders[k] if cluster[j] == c] for c in range(o["heads"])]
            both = zip(heads[k], come, strict=True)
            new.append([torch.stack([h, *more]).double().mean(0).float() for h, more in both])
        heads = new
        w = [core[k].masked_scatter(head, heads[k][cluster[k]]) for k in range(N)]


def twin_sketch(tw, o):
    def mix(w, t):
        u = np.stack([(row - tw.start).numpy() for row in w]).astype(float)
        np.put_along_axis(u, np.argsort(-abs(u), 1, kind="stable")[:, o["entries"] :], 0, 1)
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        chosen = np.argsort(np.where(np.eye(N) > 0, np.inf, -u @ u.T), 1, kind="stable")[:, : tw.run.most_senders]
        return [tw.over([k, *chosen[k]], w) for k in range(N)]

    return tw.peers(mix)


def counted(tw, u, entries):
    """Cosines of count sketches of u."""
    drawn = streams.stream(tw.run.seed, streams.SKETCH, 0, 0).integers(0, 2 * entries, len(tw.start))
    matrix = np.zeros((len(drawn), entries))
    matrix[np.arange(len(drawn)), drawn % entries] = np.where(drawn < entries, 1, -1)
    sums = np.stack([row.numpy().astype(float) @ matrix for row in u])
    told = np.rint(127 * sums / abs(sums).max(1, keepdims=True))
    cos = told @ told.T / np.sqrt(np.outer((told**2).sum(1), (told**2).sum(1)))
    return np.where(np.eye(N) > 0, -np.inf, cos)


def twin_nearest(tw, o):
    w = [tw.local(k, tw.start, 0) for k in range(N)]
    u = [row - tw.start for row in w]
    for t in range(1, ROUNDS + 2):
        yield w
        if t - 1 <= o["until"]:
            cos, m = counted(tw, u, o["entries"]), tw.run.most_senders
            r = np.sort(cos, 1)[:, -m:].mean(1)
            order = np.argsort(o["hubs"] * r - cos, axis=1, kind="stable")
            alike = [[j for j in row if cos[k, j] >= o["alike"] * max(cos[k])] for k, row in enumerate(order)]
            draw = [keyed(tw.run.seed, 4, k, (t - 1) * 1000).permutation(alike[k][: o["pool"] * m]) for k in range(N)]
            chosen = [drawn[:m].astype(int).tolist() for drawn in draw]
        start = [tw.over([k, *chosen[k]], w) for k in range(N)]
        w = [tw.local(k, start[k], t * TAU) for k in range(N)]
        u = [u[k] + (w[k] - start[k]) for k in range(N)]


def twin_cobo(tw, o):
    x, w = [tw.start] * N, np.ones((N, N))
    yield x
    for t in range(1, ROUNDS + 1):
        drawn = np.array([keyed(tw.run.seed, streams.PAIRS, k, t).random(N) < 1 / N for k in range(N)])
        for i in range(N):
            for j in range(i):
                if drawn[i, j] or drawn[j, i]:
                    z = (x[i] + x[j]) / 2
                    g_i, g_j = (tw.gradient(z, next(tw.batches(k, (t - 1) * TAU, 1))) for k in (i, j))
                    w[i, j] = w[j, i] = min(max(w[i, j] + o["gamma"] * float(g_i @ g_j), 0), 1)
        old = x

        def pull(v, i, old=old):
            return o["rho"] / 2 * sum(w[i, j] * (v - old[j]).square().sum() for j in range(N) if j != i)

        x = [tw.local(i, x[i], (t - 1) * TAU, extra=lambda v, i=i: pull(v, i)) for i in range(N)]
        yield x


def quadratic(d, p, alpha):
    slope = d - 2 * alpha * p
    simplex = {"type": "eq", "fun": lambda x: x.sum() - 1, "jac": lambda x: np.ones(len(x))}
    how = {"bounds": [(0, None)] * len(p), "constraints": simplex, "options": {"ftol": 1e-12, "maxiter": 500}}
    found = minimize(lambda x: alpha * x @ x + slope @ x, p, jac=lambda x: 2 * alpha * x + slope, method="SLSQP", **how)
    assert found.success
    return found.x
