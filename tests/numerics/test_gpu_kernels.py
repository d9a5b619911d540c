"""The kernels on a GPU, without one: numbers of a block that a CPU emulates, and the compiler.

An emulated GPU computes a block of clients to the bits of a CPU, which takes them one by one.
"""

import ctypes
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _samples import clients_of
from launch import differences, refused, run_here
from teams import Emulated
from torch import nn

from dpfl_mpi.engine import build
from dpfl_mpi.models import cnn, mlp
from dpfl_mpi.numerics import clients as of_rank
from dpfl_mpi.numerics import cpu, gpu, native_backend
from dpfl_mpi.numerics import select_backend as selection
from dpfl_mpi.numerics.backend import Backend, LocalEpochs, Proximal
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.lanes.declared import STRUCTURES
from dpfl_mpi.numerics.native_backend import NativeBackend
from dpfl_mpi.numerics.optimiser import SGD, Adam
from dpfl_mpi.plugins import shipped

if not cpu.LIBRARY.exists() or not shutil.which("g++"):
    pytest.skip("the kernels were not built, or there is no g++", allow_module_level=True)
TRAINED = 37, 24, 11, 3  # images of each client, in decreasing order
SCORED = 9, 20, 1, 18
K = len(TRAINED)
CLASSES, LR = 5, 0.05
SGDS = {"sgd": SGD(8, 0.9, 1e-2, 0.5), "adam": Adam(8, 0.9, 1e-2, 0.5, decoupled=True)}


class Dropping(nn.Module):
    """A perceptron with dropout."""

    def __init__(self):
        super().__init__()
        self.fc1, self.drop, self.head = nn.Linear(48, 24), nn.Dropout(0.3), nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.head(self.drop(self.fc1(x.flatten(1)).relu()))


NETS = {
    "mlp": (lambda shape: mlp.build(shape, CLASSES), (8, 8, 1)),
    "cnn": (lambda shape: cnn.CNN(shape, CLASSES, (3, 5), (9, 7)), (17, 16, 3)),
    "drop": (lambda shape: Dropping(), (4, 4, 3)),
}


class Pair:
    """A network's clients, with the numbers of an emulated GPU and of a CPU."""

    def __init__(self, name, augment=True):
        build, shape = NETS[name]
        rng = np.random.default_rng(0)
        self.ensemble = Ensemble(build(shape), *((0.5,) * shape[-1], (0.25,) * shape[-1]), CPU)
        rows = np.split(rng.permutation(sum(TRAINED + SCORED)), np.cumsum(TRAINED + SCORED)[:-1])
        images = rng.integers(0, 256, (sum(TRAINED + SCORED), *shape), dtype=np.uint8)
        labels = rng.integers(0, CLASSES, len(images))
        labels[:CLASSES] = np.arange(CLASSES)
        parts = rows[:K], rows[K:]
        self.clients = clients_of(self.ensemble, images, labels, *parts, augment)
        self.gpu = NativeBackend(self.ensemble, self.clients, SGDS["sgd"], Emulated)
        self.cpu = NativeBackend(self.ensemble, self.clients, SGDS["sgd"])
        self.ways = (self.gpu, K), (self.cpu, K), (self.cpu, 1)  # clients of a call

    def optimise(self, name):
        self.gpu.optimiser = self.cpu.optimiser = SGDS[name]

    def rows(self, seed, k=K, scale=0.1):
        out = self.ensemble.zeros(k)
        rng = np.random.default_rng(seed)
        values = scale * rng.normal(size=(k, self.ensemble.size))
        out[:, : self.ensemble.size] = torch.from_numpy(values)
        return out

    def trained(self, call, chosen=(0, 1, 2, 3), models=1):
        """Compare what `call(backend, *blocks)` leaves in rows of each client; return these."""
        which, out = np.array(chosen), []
        for backend, size in self.ways:
            w = [self.rows(seed) for seed in range(models)]
            m = [backend.zero_momentum(K) for _ in w]
            found = []
            for _ in range(2):  # the second goes on from the first one's momentum
                for rows in np.split(which, range(size, len(which), size)):
                    pairs = zip(w, m, strict=True)
                    blocks = [Block(self.ensemble, a[rows], b[rows], rows) for a, b in pairs]
                    call(backend, *blocks)
                    for i, block in enumerate(blocks):
                        w[i][rows], m[i][rows] = block.w, block.momentum
                        did = block.loss.tolist(), block.steps.tolist()
                        found += zip(rows, [i] * len(rows), *did, strict=True)
            order = sorted(range(len(found)), key=lambda at: found[at][:2])
            out.append(([found[at] for at in order], [row.numpy().tobytes() for row in (*w, *m)]))
        assert out[0] == out[1] == out[2]
        return out[0][1]

    def each(self, call):
        """Return the arrays that `call(backend, rows)` returns, of each client, by each way."""
        out = []
        for backend, size in self.ways:
            found = []
            for first in range(0, K, size):
                parts = call(backend, slice(first, first + size))
                found += [[np.asarray(part[i]) for part in parts] for i in range(size)]
            out.append(found)
        return out


CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=NETS)
def pair(request):
    return Pair(request.param)


@pytest.fixture(params=["forwards", "backwards"])
def order(request, monkeypatch):
    monkeypatch.setattr(Emulated, "backwards", request.param == "backwards")


EPOCHS = LocalEpochs(2, np.array([4, 1, 0, 2]), LR)


@pytest.mark.parametrize("optimiser", SGDS)
@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), (1, 3)])
def test_training_has_the_bits_of_a_cpu(pair, order, optimiser, chosen):
    """In one call, and step by step."""
    pair.optimise(optimiser)
    left = pair.trained(lambda backend, w: backend.train_epochs(w, EPOCHS), chosen)
    by_step = lambda backend, w: backend.train_epochs(w, EPOCHS, backend.gradient)  # noqa: E731
    assert pair.trained(by_step, chosen) == left


def test_the_next_epochs_are_drawn_while_a_gpu_computes(monkeypatch):
    """On a CPU, where nothing would overlap, only those that are trained."""
    pair, draw, did = Pair("mlp"), of_rank.schedules, []
    noted = lambda *of: did.append(int(of[2][0])) or draw(*of)  # noqa: E731
    monkeypatch.setattr(of_rank, "schedules", noted)
    first = int(EPOCHS.first[0])
    steps = [first, "run", first + 2, "run", first + 4]
    for backend, expected in ((pair.gpu, steps), (pair.cpu, steps[:4])):
        run = backend.kernels.run
        noted_run = lambda *of, run=run: did.append("run") or run(*of)  # noqa: E731
        monkeypatch.setattr(backend.kernels, "run", noted_run)
        block = Block(pair.ensemble, pair.rows(1), backend.zero_momentum(K), slice(0, K))
        for later in (0, 2):
            backend.train_epochs(block, EPOCHS._replace(first=EPOCHS.first + later))
        assert did == expected
        did.clear()


@pytest.mark.parametrize("optimiser", SGDS)
def test_frozen_columns_and_a_proximal_term(pair, optimiser):
    pair.optimise(optimiser)
    trained, towards = pair.rows(9, 1)[0] > -0.05, pair.rows(8)
    for target in (towards, towards[0]):

        def train(backend, w, target=target):
            backend.train_epochs(w, EPOCHS, Proximal(backend, target, 0.7), trained)

        pair.trained(train)


def learn(w, v, mixture):
    """A gradient of a method's own, which Python takes step by step."""
    v.g.add_(0.1 * mixture.g).sub_(0.01 * w.w)


@pytest.mark.parametrize("optimiser", SGDS)
def test_a_mixture_of_two_rows(pair, optimiser):
    pair.optimise(optimiser)
    alpha = torch.tensor([[0.3], [0.5], [0.71], [1.0]], dtype=torch.float64)
    for of_method in (None, learn):
        mix = lambda backend, w, v: backend.train_mixed(w, v, alpha, EPOCHS, of_method)  # noqa: B023, E731
        pair.trained(mix, models=2)


@pytest.mark.parametrize("optimiser", SGDS)
def test_pairs_of_mini_batches(pair, optimiser):
    pair.optimise(optimiser)
    pair.trained(lambda backend, w: backend.train_ahead(w, 0.03, EPOCHS))


@pytest.mark.parametrize("optimiser", SGDS)
def test_steps_that_a_method_writes(pair, order, optimiser):
    """One by one, along the gradient or by plain descent, with a mini-batch that is smaller."""
    pair.optimise(optimiser)

    def own(backend, w):
        for batch in backend.batches(w.rows, 2, np.array([4, 1, 0, 2])):
            w = w.first(batch.k)
            loss = backend.gradient(w, batch)
            if batch.step % 3:
                backend.step(w, loss, LR)
            else:
                backend.descend(w, 0.02, loss)
            w.g.add_(w.w, alpha=0.5)
            backend.descend(w, 0.01)
            towards = w.w + 0.1
            backend.descents(w, batch, 2, 0.03, towards, 0.9)

    pair.trained(own)


def test_scores(pair):
    w, head = pair.rows(3, scale=0.3), "head" if hasattr(pair.ensemble.module, "head") else "fc3"
    two = pair.rows(5, 2 * K, 0.3).view(K, 2, -1)

    def scores(backend, rows):
        predict = lambda rows, w, images: backend.outputs(w, images, head)[0]  # noqa: E731
        own, by_method = (backend.score(rows, w[rows], how) for how in (None, predict))
        losses = backend.validation_losses(rows, two[rows])
        assert own[0].dtype == np.float64 and np.isfinite(losses).all()
        return *own, *by_method, *backend.outputs(w[rows], rows, head), losses

    *others, right = pair.each(scores)
    for found in others:
        assert len(found[0][0]) == max(SCORED) + 1  # with a test image
        for n, ours, theirs in zip(SCORED, found, right, strict=True):
            pairs = zip(ours, theirs, strict=True)
            assert all(np.array_equal(a[: n + 1], b[: n + 1]) for a, b in pairs)
    for i in range(K):
        three = pair.rows(i, 3, 0.3)
        for backend in (pair.gpu, pair.cpu):
            read, labels = backend.training_features(i, three[:1], 7, head)
            out = read, labels, backend.training_losses(i, three)
            ours = out if backend is pair.gpu else ours
        assert all(map(np.array_equal, ours, out)) and len(labels) == min(7, TRAINED[i])


def test_searches(pair, order):
    """Several passes, of different numbers of candidates; one client has none in the first."""
    rng = np.random.default_rng(6)
    models, own = pair.rows(7, 12, 0.3), pair.rows(8, K, 0.3)
    sums, share = models.double().sum(0) / 12, np.full(K, 1 / 12)
    counts = np.array([[5, 0, 4, 3], [2, 6, 0, 4]])
    drawn = [(rng.integers(12, size=count.sum()), rng.random(count.sum())) for count in counts]

    def searched(backend, rows):
        k = rows.stop - rows.start
        cases, most, found = np.zeros((k, 4)), np.full(k, 3), []
        x, y, averages = own[rows].double() / 12, sums.repeat(k, 1), own[rows, None].repeat(1, 2, 1)
        chooser = backend.chooser(rows, (x, y, averages, share[rows].copy(), np.ones(k)), cases)
        for count, (which, coins) in zip(counts, drawn, strict=True):
            of = np.repeat(np.arange(K), count)
            mine = (of >= rows.start) & (of < rows.stop)
            at = (models.data_ptr() + 4 * models.shape[1] * which[mine]).astype(np.uint64)
            p = np.full(len(at), 1 / 12)
            found.append(chooser.decide(at, p, coins[mine], count[rows], most))
        return *found, chooser.rewards, cases, x, y, averages

    *others, right = pair.each(searched)
    for found in others:
        for ours, theirs in zip(found, right, strict=True):
            assert all(map(np.array_equal, ours, theirs))
    assert sum(cases.sum() for *_, cases, _, _, _ in right) > 12


def test_a_candidate_of_a_search_step_by_step(pair):
    x, y = (pair.rows(seed, K, 0.3).double() / 7 for seed in (1, 2))
    w, p = pair.rows(3, K, 0.3), np.array([0.1, 0.25, 1 / 3, 0.0])

    def candidates(backend, rows):
        averages = torch.zeros_like(x[rows, None].repeat(1, 2, 1)).float()
        sums, shares = (x[rows], y[rows], w[rows]), (p[rows], p[rows] + 0.3, 1 - p[rows])
        return *backend.candidate(*sums, shares, averages), averages

    *others, right = pair.each(candidates)
    for found in others:
        assert all(all(map(np.array_equal, *of)) for of in zip(found, right, strict=True))


FIELDS = {"dataset": "image_folder", "model": "mlp", "clients": 6, "classes_per_client": 3}
FIELDS |= {"batch_size": 8, "budget": 3, "rounds": 3, "tau_init": 2, "tau_train": 2, "seed": 3}
RESNET = {"model": "resnet", "model_options": {"widths": "4", "blocks": 1, "groups": 2}}
RUNS = {
    "dpfl": {}, "a part of the clients": {"participation": 0.6},
    "mini-batches' means": {"metric": "batch"}, "dpfl_choice": {"options": {"neither": "smaller"}},
    "adam": {"optimizer": "adamw", "lr": 0.01}, "fedbn": RESNET,
}  # fmt: skip
OTHERS = ["apfl", "cobo", "dac", "ditto", "fedala", "fedprox", "fedrep", "fedsim", "ifca", "pens"]
RUNS |= {name: {} for name in [*OTHERS, "perfedavg", "pfedme", "pfedsv", "scaffold"]}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_numbers_of_a_cpu(digits_file, tmp_path, monkeypatch, name):
    """A CPU takes the clients of the rank one by one, the GPU all together."""
    monkeypatch.setattr(native_backend, "BLOCK_BYTES", 1)
    method = name if name in shipped("method") else "dpfl"
    fields = FIELDS | {"data": str(digits_file), "method": method} | RUNS[name]
    by_cpu = run_here(tmp_path / "cpu.h5", fields, device="cpu")
    made = []

    def select(kernels, world, *parts):
        made.append(NativeBackend(*parts[:3], make=Emulated))
        return made[0]

    monkeypatch.undo()
    monkeypatch.setattr(build, "select_backend", select)
    by_gpu = run_here(tmp_path / "gpu.h5", fields, device="cpu")
    assert len(made[0].blocks) == 1 and made[0].kernels.machine.launched
    assert differences(by_cpu, by_gpu) == []


# the program and its compiler --------------------------------------------------------------------
def test_constants_have_the_bits_of_the_plan(tmp_path):
    values = np.float32([0.1, -0.0, 1e-45, -3e38, np.inf, -np.inf, np.nan, 16])
    numbers = gpu.literal([ctypes.c_float(x).value for x in values])
    text = f"#include <cstdio>\n#include <cstring>\nstatic constexpr float X[] = {numbers};\n"
    text += 'int main() { for (float x : X) { unsigned u; memcpy(&u, &x, 4); printf("%u ", u); } }'
    (tmp_path / "x.cpp").write_text(text)
    subprocess.run(["g++", "-std=c++17", "-o", tmp_path / "x", tmp_path / "x.cpp"], check=True)
    printed = subprocess.run([tmp_path / "x"], capture_output=True, text=True, check=True).stdout
    assert [*map(int, printed.split())] == values.view(np.uint32).tolist()
    layers = STRUCTURES["Layer"](kind=3, size=(4, 5), number=(0.5, -2), weight=-1)
    zeros = ", ".join(["0"] * 10)
    numbers = "{0x1.0000000000000p-1f, -0x1.0000000000000p+1f}"
    want = f"{{3, 0, 0, 0, 0, {{4, 5, {zeros}}}, {numbers}, -1, 0, 0, TABLE_7}}"
    assert gpu.literal(layers, {"table": "TABLE_7"}) == want


TINY = 'extern "C" __global__ void f(float *x) { *x = 1.f / *x; }'


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """The module of the compiler, with an empty cache."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="the extra [gpu] is not installed")
    core = pytest.importorskip("cuda.core", reason="the extra [gpu] is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return core


def test_compiled_programs_are_kept(compiler, monkeypatch, tmp_path):
    code = gpu.compiled(TINY, "sm_90")
    (file,) = (tmp_path / "dpfl_mpi").iterdir()
    gpu.compiled(TINY, "sm_80")
    assert code.startswith(b"\x7fELF") and len([*file.parent.iterdir()]) == 2
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "Program", None)  # nothing compiles
        assert gpu.compiled(TINY, "sm_90") == code
        for damaged in (b"", file.read_bytes()[:-1], b"\0" * 1000):
            file.write_bytes(damaged)
            refused("the kernels do not compile for this GPU, sm_90", gpu.compiled, TINY, "sm_90")
    assert gpu.compiled(TINY, "sm_90") == code == gpu.read(file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # no folder can be there
    assert gpu.compiled(TINY, "sm_90") == code


def test_what_does_not_compile_is_one_sentence(compiler, monkeypatch):
    why = "the kernels do not compile for this GPU, sm_90 (lanes(1): error: identifier"
    refused(why, gpu.compiled, "int f() { return unknown; }", "sm_90")
    refused("the kernels do not compile for this GPU, sm_10 (", gpu.compiled, TINY, "sm_10")
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    refused("the kernels need cuda-core on a GPU (", gpu.compiled, TINY, "sm_90")


def test_the_largest_clients_come_first_and_results_stay_in_their_places():
    launched = []

    def launch(verb, at_once, tasks, *rest):
        launched.append((verb, at_once, tasks[:, 0].tolist()))

    put, memory = torch.from_numpy, torch.zeros(3, 8)
    device = {"put": put, "memory": memory, "team_bytes": 8, "device": torch.device("cpu")}
    limits = {"clusters": {}, "blocks": lambda: 2, "spaces": lambda verb: 1, "launch": launch}
    of_gpu, clients = SimpleNamespace(**device, **limits), np.arange(4, dtype=np.uint8)
    out = gpu.Gpu.run(of_gpu, "score", clients, np.array([3, 9, 1, 9]))
    assert launched == [("score", 2, [1, 3, 0, 2])] and out[:, 0].tolist() == [0, 1, 2, 3]


# by hand: 4 blocks do a step in 0.5 of the time of one, 2 in 0.8
@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ([100] * 8, 1),  # 8 at once: 100; by two blocks 0.8 * 800 / 4 = 160
        ([800] + [10] * 9, 4),  # the largest one takes longest: 0.5 * 800
        ([300, 200, 200, 200, 100], 2),  # 300; 0.8 * 300 = 240, by 4 blocks 0.5 * 1000 / 2 = 250
    ],
)
def test_a_large_client_gets_more_blocks(sizes, blocks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(gpu, "multiprocessors", lambda _: 8)
    found = gpu.clusters_of(np.array(sizes), torch.device("cuda", 0))
    assert {found[verb] for verb in gpu.TRAINING} == {blocks} and found["score"] == 4
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert gpu.clusters_of(np.array(sizes), torch.device("cuda", 0)) == {}


def test_a_driver_that_is_too_old_and_a_full_gpu_are_one_sentence(monkeypatch):
    def fails(error, *of, **named):
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for name in ("program", "compiled"):
        monkeypatch.setattr(gpu, name, lambda *of: b"")
    old = partial(fails, RuntimeError("CUDA_ERROR_INVALID_IMAGE:\n no kernel image"))
    core = SimpleNamespace(Device=old, ObjectCode=None)
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    device = torch.device("cuda", 0)
    of_gpu = SimpleNamespace(_kernels={}, clusters={}, header="", team=512, device=device)
    why = "the GPU's driver cannot load the kernels (CUDA_ERROR_INVALID_IMAGE: no kernel image)"
    refused(why, gpu.Gpu.load, of_gpu, ["train"])
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    monkeypatch.setattr(native_backend, "NativeBackend", partial(fails, full))
    found = native_backend.try_native("auto", of_gpu, range(3), SGDS["sgd"])
    assert found == (None, "the GPU's memory is full (CUDA out of memory)")


# selection ---------------------------------------------------------------------------------------
def test_who_computes_on_a_gpu(monkeypatch, request):
    ensemble = SimpleNamespace(device=torch.device("cuda"), bfloat16_products=False)
    alone, sgd, made = SimpleNamespace(agree=bool), SGDS["sgd"], SimpleNamespace(warning="")
    tried = []
    monkeypatch.setattr(selection, "check_deterministic", lambda *of: tried.append(of))

    def select(kernels):
        backend = selection.select_backend(kernels, alone, ensemble, range(3), sgd)
        return "PyTorch" if type(backend) is Backend else backend, backend.warning

    monkeypatch.setattr(selection, "try_native", lambda *of: (made, ""))
    assert select("native") == select("auto") == (made, "") and not tried
    assert select("torch") == ("PyTorch", "") and tried == [(ensemble, range(3))]
    monkeypatch.setattr(selection, "try_native", lambda *of: (None, "there is no such driver"))
    slower = "{}: PyTorch computes, hundreds of times slower".format
    assert select("auto") == ("PyTorch", slower("there is no such driver"))
    refused("there is no such driver", select, "native")
    refused("--kernels is avx2, a form of a CPU; allowed on a GPU are auto", select, "avx2")
    request.addfinalizer(lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False))
    torch.backends.cuda.matmul.allow_tf32 = True
    float32 = "the native kernels compute in float32, the default of --precision"
    assert select("auto") == ("PyTorch", slower(float32))
    refused(float32, select, "native")
