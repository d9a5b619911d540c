"""A team of any size computes what one member does, to the bit: threads, or an emulated GPU's."""

import fcntl
import itertools
import os
import random
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from calls import Rule, Seen
from teams import Emulated, emulator
from test_lanes import make, numbers
from test_layers import DROPPING, NETS, TOKENS, Program, trial

from dpfl_mpi.models import text
from dpfl_mpi.numerics.cpu import Cpu, forms
from dpfl_mpi.numerics.optimiser import SGD, Adam

MEMBERS = [3, 8, 32]
CLIENTS = {
    "CNN": lambda: make("odd"),
    "perceptron": lambda: make("mlp"),
    "dropout": lambda: trial(*DROPPING["layers"]),
    "attention": lambda: trial(*DROPPING["attention"]),
    "text": lambda: trial(lambda shape: text.build(shape, 5, 17, 8, 2, 0, 0.3), TOKENS),
}


@pytest.fixture(scope="session", params=[(32, 2), (64, 1)])
def block(request, tmp_path_factory):
    """The kernels of a GPU for a block of 64 threads or a cluster of 2, compiled once for all."""
    if not shutil.which("g++"):
        pytest.skip("no g++")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with (folder / "emulated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return emulator(folder, *request.param)


def drawn(net, *epochs):
    """Return an order of images, and windows of them where they have a border."""
    rng = np.random.default_rng(1)
    order = numbers([rng.permutation(net.m)[: epochs[-1]] for _ in range(epochs[0])])
    if len(net.shape) < 3 or net.dtype != "uint8":
        return order, None
    windows = rng.integers(0, 9, (2, *epochs)), rng.integers(0, 2, (1, *epochs))
    return order, np.concatenate(windows).astype(np.uint8)


def gradient(net):
    """Return what a mini-batch of 19 images and their scores leave."""
    order, crop = drawn(net, 1, 19)
    g, key = torch.full_like(net.row, 7.0), np.array([2**62 + 12345])
    moved = None if crop is None else crop[:, 0]
    loss = net.client.gradient(net.row, g, order[0], moved, key)
    rows, head = torch.stack([net.row, net.row * 0.9]), bool(net.client.kernels.plan.features)
    return loss, g, *net.client.score(rows, order[0], head, logits=True).values()


def everything(net):
    """Return what each call leaves, by its name."""
    kernels, width = net.client, len(net.row)
    (order, crop), index = drawn(net, 2, 21), torch.arange(width)
    seen = Seen(order, crop, np.arange(4) * 2**55 + 3)
    towards, trained = net.row * 0.9, index % 5 > 0
    sgd = Rule(SGD(18, 0.9, 1e-3, 0.5), 0.01, trained, towards, 0.3)
    adam = Rule(Adam(18, 0.0, 1e-3, 0.5, decoupled=True), 0.01)
    left = {"gradient": gradient(net)}
    w, m = net.row.clone(), net.row * 0.1
    left["train"] = kernels.train(w, m, seen, sgd), w, m
    v, m_w, m_v = net.row * 0.8, *(torch.zeros(2 * width + 1) for _ in range(2))
    w = net.row.clone()
    left["mix"] = *kernels.mix((w, m_w), (v, m_v), 0.3, seen, adam), w, m_w, v, m_v
    w, m_w = net.row.clone(), torch.zeros(2 * width + 1)
    left["ahead"] = kernels.ahead(w, m_w, 0.05, seen, adam), w, m_w
    w = net.row.clone()
    left["descents"] = kernels.descents(w, towards, 0.5, 0.01, 3, order[0], seen.keys[:1]), w
    models = torch.stack([net.row * share for share in (1.1, -0.3, 0.95, 1.2)])
    x, y, pair = net.row.double() / 3, models.double().sum(0) / 8, torch.zeros(2, width)
    cases, p = np.zeros(4), np.array([0.1, 0.2, 0.1, 0.1])
    left["candidate"] = *kernels.candidate(x, y, w, 0.1, 0.4, 0.7, pair), pair.clone()
    chooser = kernels.chooser(order[0], x, y, pair, 1 / 3, 0.5, cases)
    places = np.uint64(models.data_ptr()) + np.arange(4, dtype=np.uint64) * np.uint64(4 * width)
    coins = np.array([0.4, 0.9, 0.1, 0.6])
    (added,) = chooser.decide(places, p, coins, np.array([4]), np.array([2]))
    left["search"] = added, x, y, pair, cases, chooser.rewards
    return left


def same(left, right):
    """Return whether arrays have the same bits."""
    return all(
        np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("name", CLIENTS)
def test_threads_compute_what_one_does(name, members):
    net = CLIENTS[name]()
    want = everything(net)
    for form in forms():
        net.compute_by(partial(Cpu, form=form, members=members))
        found = everything(net)
        assert [verb for verb in want if not same(found[verb], want[verb])] == [], form
    assert np.isfinite(want["train"][0])


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_gpus_block_computes_what_one_thread_does(name, backwards, block, monkeypatch):
    net = CLIENTS[name]()
    want = everything(net)
    monkeypatch.setattr(Emulated, "backwards", backwards)
    net.compute_by(partial(Emulated, library=block))
    found = everything(net)
    assert [verb for verb in want if not same(found[verb], want[verb])] == []


def program(seed):
    side = random.Random(seed + 1000)
    kind = (side.randint(7, 12), side.randint(7, 12), 3), "uint8"
    return trial(lambda shape: Program(seed, shape), kind, seed)


MADE = {name: partial(trial, *net) for name, net in NETS.items()}
MADE |= {f"program {seed}": partial(program, seed) for seed in range(80)}


@pytest.mark.parametrize("name", MADE)
def test_threads_compute_each_layer_as_one_does(name):
    net = MADE[name]()
    want = gradient(net)
    for form, members in itertools.product(forms(), MEMBERS):
        net.compute_by(partial(Cpu, form=form, members=members))
        assert same(gradient(net), want), (form, members)


@pytest.mark.parametrize("name", MADE)
def test_a_gpus_block_computes_each_layer_as_one_thread_does(name, block, monkeypatch):
    net = MADE[name]()
    want = gradient(net)
    net.compute_by(partial(Emulated, library=block))
    for backwards in (False, True):
        monkeypatch.setattr(Emulated, "backwards", backwards)
        assert same(gradient(net), want), backwards
