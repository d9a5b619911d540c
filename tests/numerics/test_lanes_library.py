"""The library of the kernels: forms, compilers and processors give the same bits."""

import importlib.util
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from calls import Rule, Seen
from launch import ROOT, refused, script
from setuptools import Distribution, Extension
from test_lanes import FORMS, make, plan
from test_layers import NETS

from dpfl_mpi.models import resnet, text
from dpfl_mpi.models.cnn import CNN
from dpfl_mpi.models.mlp import MLP
from dpfl_mpi.numerics import cpu
from dpfl_mpi.numerics.cpu import Cpu
from dpfl_mpi.numerics.draws import Schedules
from dpfl_mpi.numerics.kernels import describe
from dpfl_mpi.numerics.lanes.plan import Arena
from dpfl_mpi.numerics.optimiser import SGD, Adam

SOURCE, SETUP = ROOT / "dpfl_mpi/numerics/lanes/lanes.c", script(ROOT / "setup.py")
IMAGE, TWO_CHANNELS = ((32, 32, 3), "uint8"), ((19, 23, 2), "uint8")
# networks for lanes_entries.c: how they are made, samples, images, border, batch
ENTRIES = {
    "colour": (lambda: CNN((32, 32, 3), 10, (6, 16), (120, 84)), IMAGE, (21, 4, 16)),
    "odd": (lambda: CNN((17, 18, 3), 4, (6, 16), (120, 84)), ((17, 18, 3), "uint8"), (19, 4, 8)),
    "two channels": (lambda: CNN((19, 23, 2), 3, (5, 7), (13, 9)), TWO_CHANNELS, (5, 2, 5)),
    "ones": (lambda: CNN((16, 16, 1), 2, (1, 1), (1, 1)), ((16, 16, 1), "uint8"), (3, 0, 1)),
    "mlp": (lambda: MLP(60, 2, 7), ((3, 5, 4), "uint8"), (33, 1, 32)),
    "resnet": (lambda: resnet.build((9, 7, 3), 5, "4,6", 1, 2), ((9, 7, 3), "uint8"), (7, 1, 5)),
    "text": (lambda: text.build((7,), 4, 9, 8, 2, 0, 0.3), ((7,), "int32"), (19, 0, 18)),
    "vector": (lambda: MLP(22, 5, 9), ((22,), "float32"), (19, 0, 7)),
}
# and layers that these lack
OTHERS = "LSTM", "masks", "RMSNorm, ELU"
ENTRIES |= {n: (partial(NETS[n][0], NETS[n][1][0]), NETS[n][1], (7, 0, 5)) for n in OTHERS}


def described(folder):
    """Write each network of ENTRIES as lanes_entries.c reads it; return the files."""
    files = []
    for name, (build, (shape, dtype), how) in ENTRIES.items():
        module = build()
        plan, _ = describe(module, shape, dtype)
        plan.net.width = -(-sum(p.numel() for p in module.parameters()) // 16) * 16
        tables = [list(t) for t in plan.tables]
        starts = np.cumsum([0, *map(len, tables)])[:-1]
        head = [*how, len(plan.values), sum(map(len, tables)), len(plan.pieces)]
        parts = [np.int32(head), plan.net, plan.values, plan.layers]
        parts += [np.int32(starts), np.int32([n for t in tables for n in t]), np.int64(plan.pieces)]
        files.append(str(folder / name))
        (folder / name).write_bytes(b"".join(bytes(part) for part in parts))
    return files


def built(folder, compiler, form):
    """Compile lanes_entries.c in a form; return the program's path."""
    width, program = cpu.FORMS[form], str(folder / form)
    source = str(ROOT / "tests/numerics/lanes_entries.c")
    build = [*compiler, f"-DFORM={width}", *SETUP.FORMS[width], f"-I{SOURCE.parent}", source]
    words = [*build, "-o", program, "-w", "-lm", "-pthread"]
    done = subprocess.run(words, capture_output=True, text=True)
    if "cannot find -l" in done.stderr:
        pytest.skip("gcc has no sanitizers here")
    assert done.returncode == 0, done.stderr
    return program


def entries(folder, compiler, form, runner=()):
    """Return what lanes_entries.c prints of the networks of ENTRIES in a form."""
    words = [*runner, built(folder, compiler, form), *described(folder)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bits(kind, form, path=cpu.LIBRARY):
    """Everything that 40 steps and a scoring leave, as bytes."""
    net = make(kind, form=form, path=path)
    order, crop = plan(net, n=40, epochs=10)
    w, m = net.row.clone(), torch.zeros_like(net.row)
    # four steps an epoch, the last of 1: 40 images in mini-batches of 13
    loss = net.client.train(w, m, Seen(order, crop), Rule(SGD(13, 0.9, 1e-3, 20.0), 0.01))
    pair = torch.stack([w, net.row])
    scores = net.client.score(pair, np.arange(37), head=True, logits=True).values()
    sums = net.client.candidate(w.double() / 3, net.row.double() / 7, m, 0.1, 0.3, 0.7, pair)
    v, m_v, m_w = net.row * 0.9, *(torch.zeros(2 * len(w) + 1) for _ in range(2))
    adamw = Rule(Adam(13, 0.0, 1e-3, 20.0, decoupled=True), 0.01)
    losses = net.client.mix((w, m_w), (v, m_v), 0.3, Seen(order[:2], crop[:, :2]), adamw)
    assert np.isfinite(loss)
    parts = loss, losses, v, m_v, w, m, *scores, *sums, pair
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)


@pytest.mark.parametrize(("name", "extra"), [("gcc", ["-O1"]), ("clang", []), ("zig", [])])
def test_every_compiler_gives_the_same_bits(name, extra, tmp_path):
    """gcc's with -O1, compiled in half the time, has the bits of the library here."""
    zig = importlib.util.find_spec("ziglang") is not None
    if not (zig if name == "zig" else shutil.which(name)):
        pytest.skip(f"{name} is not here")
    compiler = SETUP.compilers()[-1] if name == "zig" else [name]
    SETUP.compile_lanes(compiler, SOURCE, tmp_path / "_lanes.so", extra)
    for form in FORMS:
        assert bits("odd", form, tmp_path / "_lanes.so") == bits("odd", FORMS[0]), form


@pytest.mark.slow
@pytest.mark.timeout(900)  # zig compiles a C library first
def test_another_processor_gives_the_same_bits(tmp_path):
    """The portable form, compiled by zig for ARM and run by QEMU, against the widest one here."""
    if importlib.util.find_spec("ziglang") is None or not shutil.which("qemu-aarch64"):
        pytest.skip("needs ziglang and qemu-user")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", *SETUP.FLAGS]
    there = entries(tmp_path, zig, "portable", ["qemu-aarch64"])
    assert there == entries(tmp_path, [*SETUP.compilers()[0], *SETUP.FLAGS], FORMS[0])
    assert there.count("\n") == 2 * len(ENTRIES)


def test_what_cannot_be_used_says_why(tmp_path):
    net = make("mlp")
    here = net.client.kernels.plan, net.ensemble
    lacks = {"forward": lambda module, x: CNN.forward(module, x).cumsum(1)}  # no layer for that
    inherits = type("Inherits", (CNN,), lacks)((16, 16, 3), 10, (6, 16), (120, 84))
    (tmp_path / "text.so").write_text("no library")
    digest, library = SETUP.digest_of(SOURCE).encode(), cpu.LIBRARY.read_bytes()
    assert library.count(digest) == 1
    (tmp_path / "other.so").write_bytes(library.replace(digest, digest[::-1]))  # of other sources
    have = "--kernels is avx9; this processor and library have ...portable"
    refused(have, Cpu, *here, form="avx9")
    for name, end in (
        ("_lanes.so", "were not built: ... is not there; install again"),
        ("text.so", "cannot be loaded"),
        ("other.so", "are of another version of their sources; install again"),
    ):
        refused(f"the kernels {end}", Cpu, *here, path=tmp_path / name)
    cumsum = "the kernels have no layer for cumsum"
    refused(cumsum, describe, inherits, (16, 16, 3), "uint8")


def test_installation_without_a_compiler(monkeypatch, capsys, tmp_path):
    """pip is asked for one; where that fails, too, the build says so and goes on without."""
    backend, build = script(ROOT / "_build/backend.py"), SETUP
    monkeypatch.delenv("CFLAGS", raising=False)
    monkeypatch.setenv("CC", "my-cc -m64")
    assert backend._compiler() == [] and build.compilers()[0] == ["my-cc", "-m64"]
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert backend._compiler() == ["ziglang>=0.13"]
    assert [c[1:4] for c in build.compilers()] == [["-m", "ziglang", "cc"]]
    monkeypatch.setattr(build, "compilers", lambda: [["no-such-cc"]])
    command = build.BuildLanes(Distribution())
    command.build_lib, command.inplace = str(tmp_path), False
    command.build_extension(Extension("dpfl_mpi.numerics.lanes._lanes", [str(SOURCE)]))
    said = "no C compiler works here, so PyTorch will compute (no-such-cc: "
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.so"))


ZERO, ADAM = np.zeros(1, np.int32), Rule(Adam(1, 0, 0, 0), 0.1)


def stored(net, x=None, y=None, start=0):
    given = (net.padded, net.labels)
    x, y = (torch.from_numpy(a if b is None else b) for a, b in zip(given, (x, y), strict=True))
    net.client.kernels.images(x, y, np.array([start]), np.array([40]))


def decided(net, x, models):
    pair = torch.zeros(2, net.ensemble.width)
    chooser = net.client.chooser(ZERO, x, x.double(), pair, 0.5, 0.5, np.zeros(4))
    chooser.decide(models, np.zeros(1), np.zeros(1), np.ones(1, int), np.ones(1, int))


def keyed(net, keys):
    drawn = Schedules(ZERO, np.zeros(3, np.uint8), np.array([0, 1]), 1)
    net.client.kernels.schedule(net.client.backend._train_images, drawn, 1, keys)


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda n, w: n.gradient([0, 40]), "an image that is not among the 40"),
    (lambda n, w: n.gradient([0, -1]), "an image that is not among the 40"),
    (lambda n, w: stored(n, start=1), "an image that is not among the 40"),
    (lambda n, w: stored(n, start=-1), "an image that is not among the 40"),
    (lambda n, w: stored(n, x=n.pixels[:, :6, :6].copy()), "images of 6 rows"),
    (lambda n, w: stored(n, x=n.padded[:, :, ::2]), "an array torch.uint8 .*, not uint8"),
    (lambda n, w: stored(n, y=n.labels + 1), "a label that is not among the 10"),
    (lambda n, w: stored(n, y=n.labels.astype(np.int32)), "an array torch.int32"),
    (lambda n, w: n.gradient([0], np.uint8([[9], [0], [0]])), "a crop beyond the border of 8"),
    (lambda n, w: n.gradient([0], np.zeros((3, 2), np.uint8)), r"crops of uint8 \(6,\)"),
    (lambda n, w: n.client.gradient(w, w, np.array([0])), "an order or crops of int64"),
    (lambda n, w: n.gradient([0], row=torch.zeros(len(w), 2)[:, 0]), "without gaps"),
    (lambda n, w: n.gradient([0], row=w.double()), "float64"),
    (lambda n, w: n.gradient([0], row=w[:-1]), "not 1 of 4816"),
    (lambda n, w: n.client.train(w, w, Seen(ZERO[None]), ADAM), "not 1 of 9633"),
    (lambda n, w: n.client.score(w[None].double(), ZERO), "float64"),
    (lambda n, w: keyed(n, torch.zeros(1, 0, dtype=torch.int64)), "0 keys; a mini-batch each"),
    (lambda n, w: keyed(n, torch.zeros(1, 1)), "not 1 of 1 torch.int64"),
    (lambda n, w: decided(n, w, np.zeros(1, np.uint64)), "float32 .* not 1 of 4816 torch.float64"),
    (lambda n, w: decided(n, w.double(), np.zeros(1)), "models that are float64"),
    (lambda n, w: decided(n, w.double(), np.zeros(2, np.uint64)), r"models that are uint64 \(2,\)"),
    (lambda n, w: n.client.kernels.machine.fixed(np.zeros(1, np.uint64), np.ones(1), w), "int64"),
])  # fmt: skip
def test_arrays_that_would_be_misread_are_refused(call, sentence):
    net = make("mlp")
    with pytest.raises(ValueError, match=sentence):
        call(net, net.row.clone())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
def test_sanitizers(tmp_path, monkeypatch):
    """Every entry in every form: no access beyond an array, nor to gaps in the work space."""
    monkeypatch.setattr(Arena, "gap", 1)
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    # with -O0 every access stays, and it compiles in a third of the time
    flags = ["-std=gnu11", "-O0", "-ffp-contract=off"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    said = {entries(tmp_path, ["gcc", *flags], form) for form in FORMS}
    assert len(said) == 1 and "nan" not in said.pop()


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
def test_fewer_threads_than_asked_for_compute_the_same(tmp_path):
    """Of two teams of three, one of them or a part of one is there."""
    networks = [path for path in described(tmp_path) if path.endswith(("mlp", "text"))]
    compiler = ["gcc", "-std=gnu11", "-O1", "-ffp-contract=off"]
    printed = []
    for more in ([], ["-DMEMBERS=3", "-DSPINS=16", "-DFEWER"]):
        program = built(tmp_path, [*compiler, *more], "portable")
        done = subprocess.run([program, *networks], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]


def racing(folder, sources, networks):
    """Return what ThreadSanitizer says of teams of 8 threads."""
    compiler = ["gcc", "-std=gnu11", "-O1", "-ffp-contract=off", "-DMEMBERS=8", "-DSPINS=16"]
    program = built(folder, [*compiler, "-fsanitize=thread", f"-I{sources}"], "portable")
    # with addresses that are not drawn, which older ThreadSanitizers need
    words = ["setarch", "-R", program, *networks]
    return subprocess.run(words, capture_output=True, text=True).stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which("gcc") or not shutil.which("setarch"), reason="no gcc")
def test_threads_of_a_team_do_not_race(tmp_path):
    """With a barrier taken out they do, and are reported."""
    small = "odd", "ones", "mlp", "resnet", "text", "vector", "LSTM"
    networks = [path for path in described(tmp_path) if path.endswith(small)]
    said = racing(tmp_path, SOURCE.parent, networks)
    assert said == ""
    shutil.copytree(SOURCE.parent, tmp_path / "sources")
    changed = tmp_path / "sources/lanes.c"
    barrier = "  switch (layer->kind) { KINDS(FORWARD) }\n  barrier(&p->team);\n"
    text = SOURCE.read_text()
    assert text.count(barrier) == 1
    changed.write_text(text.replace(barrier, barrier.splitlines()[0]))
    said = racing(tmp_path, changed.parent, [path for path in networks if path.endswith("mlp")])
    assert "data race" in said
