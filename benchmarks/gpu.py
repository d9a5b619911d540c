"""All clients of a rank as one tensor program, against a loop over clients, and its ceilings.

    python benchmarks/gpu.py [--device cuda] [--clients 100] [--seconds 3] [--precision tf32]
    python benchmarks/gpu.py --ceilings --gpu h200 [--data cifar10.h5]      # needs no GPU

With --ceilings, other flags are those of `python -m dpfl_mpi`. The paper's CNN on random images,
mini-batches of 16, training sets of unequal sizes (lognormal, mean 400). All is timed on one device
in one run, after a warm-up, each contender for `--seconds`:

- training: client-steps per second of a plain loop over clients (an `nn.Module` and a fused SGD
  each, data on the device); of ours step by step; of ours recorded (`recorded.py`; on a CPU the
  same calls); and, on a GPU, of that compiled. Ours draws, crops and copies its mini-batches.
- kernels: milliseconds of one gradient of all clients by stacked matrix products (used), grouped
  convolutions, and `torch.func.vmap`; on a GPU the first and the last also compiled.
- layout: the same products and SGD on views of rows (used) and on one tensor per layer.
- ceilings, where --gpu names the device: how far the recorded step is from `_ceilings.py`'s.
- roofline: operations and bytes of a step, what large products and copies reach on this device,
  and the share of the nearer ceiling that a step reaches.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import _ceilings
import h5py
import numpy as np
import torch
from _ceilings import GPUS, LAUNCH_US, as_text
from _samples import CIFAR, PAPER_SGD, S, clients_of
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl_mpi.datasets.cifar10 import MEAN, STD
from dpfl_mpi.errors import UserError, in_a_sentence
from dpfl_mpi.models.cnn import build
from dpfl_mpi.mpi.start import parse
from dpfl_mpi.numerics.device import pick_device
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.recorded import RecordedSteps

LR = 0.01


class Bench:
    """The device, the clients and a clock that waits for the device."""

    def __init__(self, device: str, k: int, seconds: float, precision: str = "float32"):
        self.device, self.k, self.seconds = pick_device(device, precision, 0), k, seconds
        torch.use_deterministic_algorithms(False)  # a plain loop may not run else
        rng = np.random.default_rng(0)
        sizes = np.clip(rng.lognormal(6, 0.5, k).astype(int), 32, None)
        self.sizes = np.sort(sizes)[::-1].copy()
        self.steps = -(-self.sizes // S)  # of an epoch, by client
        n = int(self.sizes.sum())
        images = rng.integers(0, 256, (n, *CIFAR), dtype=np.uint8)
        labels = rng.integers(0, 10, n)
        train = np.split(np.arange(n), np.cumsum(self.sizes)[:-1])
        val = list(np.arange(k)[:, None])
        self.ensemble = Ensemble(build(CIFAR, 10), MEAN, STD, self.device, precision)
        self.clients = clients_of(self.ensemble, images, labels, train, val, augment=True)
        row = self.ensemble.initial_row("kaiming", np.random.default_rng(0))
        self.w = row.repeat(k, 1)

    def sync(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def rate(self, action: Callable[[], int], seconds: float = 0.0) -> float:
        """Return units per second of an action that returns how many it did."""
        action()
        self.sync()
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < (seconds or self.seconds):
            done += action()
            self.sync()
        return done / (time.perf_counter() - start)

    def ms(self, action: Callable[[], object]) -> float:
        """Return milliseconds of an action."""

        def ten() -> int:
            for _ in range(10):
                action()
            return 10

        return 1e3 / self.rate(ten, self.seconds / 3)


def plain_loop(bench: Bench) -> Callable[[], int]:
    """Return 8 steps of each of a few clients, one after another, as everybody writes it."""
    few, how = 4, {"momentum": PAPER_SGD.momentum, "weight_decay": PAPER_SGD.weight_decay}
    models = [build(CIFAR, 10).to(bench.device) for _ in range(few)]
    fused = [torch.optim.SGD(m.parameters(), LR, **how, fused=True) for m in models]
    x = torch.randn(few, 8 * S, 3, 32, 32, device=bench.device)
    y = torch.randint(10, (few, 8 * S), device=bench.device)

    def run() -> int:
        for i, (model, sgd) in enumerate(zip(models, fused, strict=True)):
            for first in range(0, 8 * S, S):
                sgd.zero_grad()
                F.cross_entropy(model(x[i, first : first + S]), y[i, first : first + S]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), PAPER_SGD.clip_norm)
                sgd.step()
        return few * 8

    return run


def ours(bench: Bench, recorded: RecordedSteps | None) -> Callable[[], int]:
    """Return one epoch of all clients, drawn and cropped."""
    everyone, epoch = slice(0, bench.k), np.zeros(bench.k, np.int64)
    w, momentum = bench.w.clone(), torch.zeros_like(bench.w)

    @torch.no_grad()
    def run() -> int:
        if recorded:
            recorded.load(w, momentum, LR)
        block = Block(bench.ensemble, w, momentum, everyone)
        for batch in bench.clients.batches(everyone, 1, epoch, S, padded=True):
            if recorded:
                recorded.step(batch)
                continue
            block = block.first(batch.k)
            bench.ensemble.gradient(block, batch.x, batch.y, batch.weight)
            PAPER_SGD.step(block.w, block.g, block.momentum, LR)
        return int(bench.steps.sum())

    return run


def grouped(layers: dict[str, Tensor], x_kSHWC: Tensor, y_kS: Tensor) -> Tensor:
    """Return the summed loss with the clients as groups of one convolution, differentiable."""
    k, s, h, w, c = x_kSHWC.shape
    x = x_kSHWC.permute(1, 0, 4, 2, 3).reshape(s, k * c, h, w)
    for name in ("conv1", "conv2"):
        weight, bias = layers[f"{name}.weight"].flatten(0, 1), layers[f"{name}.bias"].flatten()
        x = F.max_pool2d(F.conv2d(x, weight, bias, groups=k).relu(), 2)
    z = x.view(s, k, -1).transpose(0, 1)
    for name in ("fc1", "fc2", "head"):
        weight, bias = layers[f"{name}.weight"], layers[f"{name}.bias"]
        z = torch.baddbmm(bias[:, None], z, weight.transpose(1, 2))
        z = z if name == "head" else z.relu()
    return F.cross_entropy(z.flatten(0, 1), y_kS.flatten(), reduction="sum") / s


def kernels(bench: Bench) -> dict[str, float]:
    """Return milliseconds of one gradient of all clients, by ways that are checked to agree."""
    ensemble, k = bench.ensemble, bench.k
    x = torch.randn(k, S, *CIFAR, device=bench.device)
    y = torch.randint(10, (k, S), device=bench.device)
    weight = torch.full((k, S), 1 / S, device=bench.device)
    rows = ensemble.layers(bench.w)
    leaves = {n: v.detach().clone().requires_grad_() for n, v in rows.items()}

    def by_groups() -> Tensor:
        gradients = torch.autograd.grad(grouped(leaves, x, y), list(leaves.values()))
        return torch.cat([of_layer.flatten(1) for of_layer in gradients], 1)

    def by(stacked: bool, gradient: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
        @torch.no_grad()
        def run() -> Tensor:
            own = ensemble.kernels
            ensemble.kernels = own if stacked else None
            try:
                return gradient(rows, x, y, weight, None)[0]
            finally:
                ensemble.kernels = own

        return run

    used, plain = "stacked matrix products (used)", ensemble.gradient_of
    ways = {used: by(True, plain), "torch.func.vmap": by(False, plain)}
    if bench.device.type == "cuda":
        fast = torch.compile(plain)
        ways["stacked, torch.compile"] = by(True, fast)
        ways["torch.func.vmap, torch.compile"] = by(False, fast)
    ways["grouped convolutions"] = by_groups
    g = ways[used]()
    for title, way in ways.items():
        other = way()
        # as a whole: rounding decides which of four nearly equal phases is the largest
        assert float((other - g[:, : other.shape[1]]).norm() / g.norm()) < 1e-3, title
    return {title: bench.ms(way) for title, way in ways.items()}


def layout(bench: Bench) -> dict[str, float]:
    """Return milliseconds of a dense layer's product and of SGD, on rows and on layers."""
    ensemble = bench.ensemble
    rows = ensemble.layers(bench.w)["fc1.weight"]
    x = torch.randn(bench.k, S, rows.shape[2], device=bench.device)
    alone = rows.contiguous()
    flat = [bench.w.clone(), torch.zeros_like(bench.w), torch.zeros_like(bench.w)]
    parts = [[v.contiguous().flatten(1) for v in ensemble.layers(t).values()] for t in flat]

    def sgd_by_layer() -> None:
        for w, g, m in zip(*parts, strict=True):
            PAPER_SGD.step(w, g, m, LR)

    actions = {
        "product, views of rows (used)": lambda: torch.bmm(x, rows.transpose(1, 2)),
        "product, one tensor per layer": lambda: torch.bmm(x, alone.transpose(1, 2)),
        "SGD, rows (used)": lambda: PAPER_SGD.step(*flat, LR),
        "SGD, one tensor per layer (clips by layer)": sgd_by_layer,
    }
    return {title: bench.ms(action) for title, action in actions.items()}


def roofline(bench: Bench, rate: float) -> str:
    """Return what a step needs, what this device reaches, and the share that `rate` is of it."""
    side, numbers = (4096, 2**28) if bench.device.type == "cuda" else (1024, 2**24)
    a, big = torch.randn(side, side, device=bench.device), torch.zeros(numbers, device=bench.device)
    copy = torch.empty_like(big)
    flops = 2 * side**3 / bench.ms(lambda: a @ a) * 1e3
    bandwidth = 2 * 4 * numbers / bench.ms(lambda: copy.copy_(big)) * 1e3
    step = _ceilings.work_of_a_step(bench.ensemble, CIFAR, S)
    arithmetic, memory = flops / step.operations, bandwidth / step.bytes
    return (
        f"roofline   a client-step is {step.operations / 1e6:.1f} MFLOP and "
        f"{step.bytes / 1e6:.1f} MB; products reach {flops / 1e12:.2f} TFLOP/s, "
        f"copies {bandwidth / 1e9:.0f} GB/s\n"
        f"roofline   ceilings {arithmetic:,.0f} (arithmetic) and {memory:,.0f} (memory) "
        f"client-steps/s; ours reaches {100 * rate / min(arithmetic, memory):.0f} % of the nearer"
    )


def against_ceilings(bench: Bench, rate: float, gpu: str, launch_us: Sequence[float]) -> str:
    """Return how a rate, client-steps per second, stands to both ceilings of the same epoch."""
    steps = _ceilings.steps_of(bench.sizes, S, 1)
    on_cpu = Ensemble(build(CIFAR, 10), MEAN, STD, torch.device("cpu"))
    count, row_bytes = _ceilings.launched(on_cpu, CIFAR, PAPER_SGD)
    bound, epoch = (
        _ceilings.ceilings(steps, count, row_bytes, gpu, launch_us),
        steps.client_steps / rate,
    )
    return (
        f"ceilings   an epoch took {epoch:.3f} s; launches ({count} kernels at "
        f"{as_text(launch_us)} us) {as_text(bound.launches)} s, bytes ({row_bytes / 1e6:.1f} MB a "
        f"row at {GPUS[gpu][0]:g} TB/s) {bound.bytes:.3f} s: {epoch / max(bound.launches):.2f} and "
        f"{epoch / bound.bytes:.2f} times these"
    )


def dataset_of(path: str) -> str:
    """Return the dataset of a prepared file; a file that is none is refused when it is opened."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return str(file.attrs["dataset"])
    except (OSError, KeyError):
        return "cifar10"


@in_a_sentence
def print_ceilings(args: argparse.Namespace, rest: list[str]) -> None:
    """Print the ceilings of the Run whose flags are `rest`."""
    if not args.gpu:
        raise UserError(f"--ceilings needs --gpu: {', '.join(GPUS)}")
    if args.data:
        rest = [f"--dataset={dataset_of(args.data)}", f"--data={args.data}", *rest]
    if args.clients:
        rest = [f"--clients={args.clients}", *rest]
    print(_ceilings.ceilings_of_run(parse(rest)[0], args.gpu, args.launch_us))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found, choices=("cuda", "cpu"))
    parser.add_argument("--clients", type=int, help="[100]")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each contender")
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--gpu", choices=sorted(GPUS), help="whose memory bandwidth ceilings have")
    help_ = "print both ceilings of a Run (its flags follow) and exit; no GPU needed"
    parser.add_argument("--ceilings", action="store_true", help=help_)
    parser.add_argument("--data", help="with --ceilings: a prepared file [the embedded digits]")
    help_ = "microseconds per kernel [1.3 2.0, assumed]"
    parser.add_argument("--launch_us", type=float, nargs="+", default=LAUNCH_US, help=help_)
    args, rest = parser.parse_known_args()
    if args.ceilings:
        sys.exit(print_ceilings(args, rest))
    if rest:
        parser.error(f"unknown: {' '.join(rest)}; flags of a Run go with --ceilings")
    torch.set_num_threads(1)
    bench = Bench(args.device, args.clients or 100, args.seconds, args.precision)
    on_gpu = args.device == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "one CPU thread"
    title = f"torch {torch.__version__}, {bench.k} clients, batch {S}, {args.precision}"
    print(f"{name}, {title}", flush=True)

    plain = bench.rate(plain_loop(bench))
    rates = {"ours, step by step": bench.rate(ours(bench, None))}
    for form in ("recorded", "compiled") if on_gpu else ("recorded",):
        start, used = time.perf_counter(), torch.cuda.memory_reserved()
        with torch.no_grad():
            recorded = RecordedSteps(
                bench.ensemble, bench.steps, CIFAR, PAPER_SGD, form == "compiled"
            )
        seconds = time.perf_counter() - start
        mebibytes = (torch.cuda.memory_reserved() - used) / 2**20
        rates[f"ours, {form}"] = bench.rate(ours(bench, recorded))
        alone = " ".join(f"{n}: {bench.ms(step):.3f}" for n, step in recorded.graphs.items())
        print(f"{form} {len(recorded.sizes)} block sizes in {seconds:.2f} s, {mebibytes:.0f} MiB; "
              f"ms of a step alone {alone}")  # fmt: skip
    for title, value in {"plain loop": plain, **rates}.items():
        print(f"training   {title:34s} {value:12,.0f} client-steps/s", flush=True)
    best = max(rates.values())
    if args.gpu:
        print(against_ceilings(bench, rates["ours, recorded"], args.gpu, args.launch_us))
    if args.precision == "float32":
        for title, value in kernels(bench).items():
            print(f"kernels    {title:34s} {value:12.3f} ms")
    for title, value in layout(bench).items():
        print(f"layout     {title:38s} {value:8.3f} ms")
    print(roofline(bench, best))
    print(f"ratio plain: {best / plain:.2f}x")


if __name__ == "__main__":
    main()
