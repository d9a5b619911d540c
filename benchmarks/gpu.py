"""All clients of a rank as one tensor program: training against a loop over clients, the kernels to choose from, and the roofline.

    python benchmarks/gpu.py [--device cuda] [--clients 100] [--seconds 3] [--precision tf32]
    python benchmarks/gpu.py --ceilings --gpu h200 [--data cifar10.h5 ...]       # no GPU needed; other flags are of python -m dpfl_mpi

The paper's CNN on random 32x32 colour images, batches of 16. Clients have ragged sizes (lognormal, mean 400 samples).
Everything is timed on one device in one run, after a warm-up, each contender until `--seconds` are over:

- training: client-steps per second of a plain loop over clients (one `nn.Module` and one fused `torch.optim.SGD` each, data on the device), of ours
  step by step, of ours recorded (`recorded.py`; on a CPU the same calls without a recording) and, on a GPU, of that compiled by `torch.compile`.
  Ours includes drawing, cropping and copying the batches.
- kernels: milliseconds of one gradient of all clients by stacked matrix products (used), grouped convolutions, and `torch.func.vmap`; on a GPU the
  first and the last also compiled.
- layout: the same products and SGD on views of rows (used) and on one contiguous tensor per layer.
- ceilings, where --gpu names the device: what launches and bytes allow (`_ceilings.py`), and how far the recorded step is from either.
- roofline: operations and bytes of a step, what large products and copies reach on this device, and the share of the nearer ceiling that a step reaches.

The paper's whole run is `python -m dpfl_mpi --dataset cifar10 --device cuda`; its summary and /seconds say where the time goes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import h5py
import numpy as np
import torch
from _ceilings import (
    GPUS,
    LAUNCH_US,
    ceilings,
    launched,
    of_run,
    seconds,
    steps_of,
    us,
    work_of_a_step,
)
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl_mpi.data.partition import Partition
from dpfl_mpi.data.source import Source
from dpfl_mpi.datasets.cifar10 import MEAN, STD
from dpfl_mpi.errors import UserError, in_a_sentence
from dpfl_mpi.models.cnn import build
from dpfl_mpi.mpi.start import parse
from dpfl_mpi.numerics.clients import Clients
from dpfl_mpi.numerics.device import pick_device
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.optimiser import SGD
from dpfl_mpi.numerics.recorded import RecordedSteps

S = 16  # mini-batch
STEP = SGD(S, momentum=0.9, weight_decay=1e-3, clip_norm=20.0)


class Bench:
    """The device, the clients and a clock that waits for the device."""

    def __init__(self, device: str, k: int, seconds: float, precision: str = "float32"):
        self.device, self.k, self.seconds = pick_device(device, precision, 0), k, seconds
        torch.use_deterministic_algorithms(False)  # as everybody has it: a plain loop may not run else
        rng = np.random.default_rng(0)
        self.sizes = np.sort(np.clip(rng.lognormal(6, 0.5, k).astype(int), 32, None))[::-1].copy()
        n = int(self.sizes.sum())
        images, labels = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, n)
        ends, few = np.concatenate([[0], np.cumsum(self.sizes)]), np.arange(k + 1)
        partition = Partition(
            {"train": ends, "val": few, "test": few},
            {"train": np.arange(n), "val": np.arange(k), "test": np.arange(k)},
            np.ones((k, 10), np.int64),
            np.full(k, 1 / k),
        )
        source = Source((32, 32, 3), 10, MEAN, STD, {"train": labels, "test": labels}, "", lambda _, rows: images[rows])
        self.ensemble = Ensemble(build((32, 32, 3), 10), MEAN, STD, self.device, precision)
        self.clients = Clients(source, partition, np.arange(k), 0, True, self.ensemble)
        self.w = self.ensemble.initial_row("kaiming", np.random.default_rng(0)).repeat(k, 1)

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
    """Return some steps of each of a few clients, one after another, as everybody writes it."""
    few = 4
    models = [build((32, 32, 3), 10).to(bench.device) for _ in range(few)]
    fused = [torch.optim.SGD(m.parameters(), 0.01, momentum=0.9, weight_decay=1e-3, fused=True) for m in models]
    x = torch.randn(few, 8 * S, 3, 32, 32, device=bench.device)
    y = torch.randint(10, (few, 8 * S), device=bench.device)

    def run() -> int:
        for i, (model, sgd) in enumerate(zip(models, fused, strict=True)):
            for first in range(0, 8 * S, S):
                sgd.zero_grad()
                F.cross_entropy(model(x[i, first : first + S]), y[i, first : first + S]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 20.0)
                sgd.step()
        return few * 8

    return run


def ours(bench: Bench, recorded: RecordedSteps | None) -> Callable[[], int]:
    """Return one epoch of all clients, drawn and cropped; its client-steps are the sum over clients."""
    everyone, epoch = slice(0, bench.k), np.zeros(bench.k, np.int64)
    total = int((-(-bench.sizes // S)).sum())
    w, momentum = bench.w.clone(), torch.zeros_like(bench.w)

    def run() -> int:
        with torch.no_grad():
            if recorded:
                recorded.load(w, momentum, 0.01)
                for batch in bench.clients.batches(everyone, 1, epoch, S, padded=True):
                    recorded.step(batch)
                return total
            block = Block(bench.ensemble, w, momentum, everyone)
            for batch in bench.clients.batches(everyone, 1, epoch, S, padded=True):
                block = block.first(batch.k)
                bench.ensemble.gradient(block, batch.x, batch.y, batch.weight)
                STEP.step(block.w, block.g, block.momentum, 0.01)
        return total

    return run


def grouped(layers: dict[str, Tensor], x_kSHWC: Tensor, y_kS: Tensor) -> Tensor:
    """Return the summed loss with the clients as groups of one convolution, differentiable."""
    k, s, h, w, c = x_kSHWC.shape
    x = x_kSHWC.permute(1, 0, 4, 2, 3).reshape(s, k * c, h, w)
    for name in ("conv1", "conv2"):
        weight = layers[f"{name}.weight"].flatten(0, 1)
        x = F.max_pool2d(F.conv2d(x, weight, layers[f"{name}.bias"].flatten(), groups=k).relu(), 2)
    z = x.view(s, k, -1).transpose(0, 1)
    for name in ("fc1", "fc2", "head"):
        z = torch.baddbmm(layers[f"{name}.bias"][:, None], z, layers[f"{name}.weight"].transpose(1, 2))
        z = z if name == "head" else z.relu()
    return F.cross_entropy(z.flatten(0, 1), y_kS.flatten(), reduction="sum") / s


def kernels(bench: Bench) -> dict[str, float]:
    """Return milliseconds of one gradient of all clients by each way to compute it; they are checked to agree."""
    ensemble, k = bench.ensemble, bench.k
    x = torch.randn(k, S, 32, 32, 3, device=bench.device)
    y = torch.randint(10, (k, S), device=bench.device)
    weight = torch.full((k, S), 1 / S, device=bench.device)
    rows = ensemble.layers(bench.w)
    leaves = {n: v.detach().clone().requires_grad_() for n, v in rows.items()}
    fast = torch.compile(ensemble.gradient_of) if bench.device.type == "cuda" else None

    def by_groups() -> tuple[Tensor, ...]:
        return torch.autograd.grad(grouped(leaves, x, y), list(leaves.values()))

    def by(stacked: bool, gradient: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            held = ensemble.kernels
            ensemble.kernels = held if stacked else None
            try:
                with torch.no_grad():
                    return gradient(rows, x, y, weight, None)[0]
            finally:
                ensemble.kernels = held

        return run

    ways = {"stacked matrix products (used)": by(True, ensemble.gradient_of)}
    ways["torch.func.vmap"] = by(False, ensemble.gradient_of)
    if fast:
        ways |= {"stacked, torch.compile": by(True, fast), "torch.func.vmap, torch.compile": by(False, fast)}
    g = ways["stacked matrix products (used)"]()
    found = {title: way() for title, way in ways.items()}
    found["groups"] = torch.cat([of_layer.flatten(1) for of_layer in by_groups()], 1)
    # as a whole: of four phases that are nearly equal rounding decides which is the largest
    for title, other in found.items():
        assert float((other - g[:, : other.shape[1]]).norm() / g.norm()) < 1e-3, title
    return {title: bench.ms(way) for title, way in ways.items()} | {"grouped convolutions": bench.ms(by_groups)}


def layout(bench: Bench) -> dict[str, float]:
    """Return milliseconds of the first dense layer's product, and of SGD, on rows and on one tensor per layer."""
    k, ensemble = bench.k, bench.ensemble
    rows = ensemble.layers(bench.w)
    x = torch.randn(k, S, rows["fc1.weight"].shape[2], device=bench.device)
    alone = rows["fc1.weight"].contiguous()
    flat = [bench.w.clone(), torch.zeros_like(bench.w), torch.zeros_like(bench.w)]
    parts = [[v.contiguous().flatten(1) for v in ensemble.layers(t).values()] for t in flat]

    def sgd_by_layer() -> None:
        for w, g, m in zip(*parts, strict=True):
            STEP.step(w, g, m, 0.01)

    return {
        "product, views of rows (used)": bench.ms(lambda: torch.bmm(x, rows["fc1.weight"].transpose(1, 2))),
        "product, one tensor per layer": bench.ms(lambda: torch.bmm(x, alone.transpose(1, 2))),
        "SGD, rows (used)": bench.ms(lambda: STEP.step(flat[0], flat[1], flat[2], 0.01)),
        "SGD, one tensor per layer (clips by layer)": bench.ms(sgd_by_layer),
    }


def dataset_of(path: str) -> str:
    """Return whose data a file of `python -m dpfl_mpi.prepare` holds; another file is taken for CIFAR-10, and refused when it is opened."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return str(file.attrs["dataset"])
    except (OSError, KeyError):
        return "cifar10"


@in_a_sentence
def of_flags(args: argparse.Namespace, rest: list[str]) -> None:
    """Print the ceilings of the Run whose flags are `rest`."""
    if not args.gpu:
        raise UserError(f"--ceilings needs --gpu: {', '.join(GPUS)}")
    dataset = args.dataset or (args.data and dataset_of(args.data))
    given = {"clients": args.clients, "data": args.data, "dataset": dataset}
    run, _ = parse([*rest, *(f"--{name}={value}" for name, value in given.items() if value)])
    print(of_run(run, args.gpu, tuple(args.launch_us)))


def against_ceilings(bench: Bench, rate: float, gpu: str, launch_us: tuple[float, ...]) -> str:
    """Return how the measured rate (client-steps per second) stands to both ceilings of the same epoch, as text."""
    steps = steps_of(bench.sizes, S, 1)
    kernels, row_bytes = launched(Ensemble(build((32, 32, 3), 10), MEAN, STD, torch.device("cpu")), (32, 32, 3), STEP)
    bound, took = ceilings(steps, kernels, row_bytes, GPUS[gpu], launch_us), steps.client_steps / rate
    return (
        f"ceilings   an epoch took {took:.3f} s; launches ({kernels} kernels at {us(launch_us)} us) {seconds(bound.launches)}, "
        f"bytes ({row_bytes / 1e6:.1f} MB a row at {GPUS[gpu].bandwidth:g} TB/s) {bound.bytes:.3f} s: "
        f"{took / max(bound.launches):.2f} and {took / bound.bytes:.2f} times these"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--clients", type=int, help="[100]")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each contender")
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--data", help="with --ceilings: a file of dpfl_mpi.prepare [the embedded digits]")
    parser.add_argument("--dataset", help="with --ceilings [what the file says]")
    parser.add_argument("--gpu", choices=sorted(GPUS), help="whose memory bandwidth the ceilings have")
    parser.add_argument(
        "--ceilings",
        action="store_true",
        help="print both ceilings of a Run (its flags follow) and exit; no GPU needed",
    )
    parser.add_argument(
        "--launch_us", type=float, nargs="+", default=LAUNCH_US, help="microseconds per kernel [1.3 2.0, assumed]"
    )
    args, rest = parser.parse_known_args()
    if args.ceilings:
        sys.exit(of_flags(args, rest))
    if rest:
        parser.error(f"unknown: {' '.join(rest)}; flags of a Run go with --ceilings")
    torch.set_num_threads(1)
    bench = Bench(args.device, args.clients or 100, args.seconds, args.precision)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "one CPU thread"
    print(f"{name}, torch {torch.__version__}, {bench.k} clients, batch {S}, {args.precision}", flush=True)

    rates = {"plain loop": bench.rate(plain_loop(bench)), "ours, step by step": bench.rate(ours(bench, None))}
    for title in ("recorded", "compiled")[: 2 if args.device == "cuda" else 1]:
        start, used = time.perf_counter(), torch.cuda.memory_reserved()
        with torch.no_grad():
            recorded = RecordedSteps(bench.ensemble, -(-bench.sizes // S), (32, 32, 3), STEP, title == "compiled")
        took, held = time.perf_counter() - start, torch.cuda.memory_reserved() - used
        rates[f"ours, {title}"] = bench.rate(ours(bench, recorded))
        alone = " ".join(f"{n}: {bench.ms(step):.3f}" for n, step in recorded.graphs.items())
        memory = f"{held / 2**20:.0f} MiB"
        print(f"{title} {len(recorded.sizes)} block sizes in {took:.2f} s, {memory}; ms of a step alone {alone}")
    for title, value in rates.items():
        print(f"training   {title:34s} {value:12,.0f} client-steps/s", flush=True)
    best = max(value for title, value in rates.items() if title != "plain loop")
    if args.gpu:
        print(against_ceilings(bench, rates["ours, recorded"], args.gpu, tuple(args.launch_us)))
    for title, value in kernels(bench).items() if args.precision == "float32" else ():
        print(f"kernels    {title:34s} {value:12.3f} ms")
    for title, value in layout(bench).items():
        print(f"layout     {title:38s} {value:8.3f} ms")

    side, numbers = (4096, 2**28) if args.device == "cuda" else (1024, 2**24)
    a, big = torch.randn(side, side, device=bench.device), torch.zeros(numbers, device=bench.device)
    copy = torch.empty_like(big)
    flops = 2 * side**3 / bench.ms(lambda: a @ a) * 1e3
    bandwidth = 2 * 4 * big.numel() / bench.ms(lambda: copy.copy_(big)) * 1e3
    operations, moved = work_of_a_step(bench.ensemble, (32, 32, 3), S)
    ceiling = min(flops / operations, bandwidth / moved)
    print(f"roofline   a client-step is {operations / 1e6:.1f} MFLOP and {moved / 1e6:.1f} MB; products reach {flops / 1e12:.2f} TFLOP/s, "
          f"copies {bandwidth / 1e9:.0f} GB/s")  # fmt: skip
    print(f"roofline   ceilings {flops / operations:,.0f} (arithmetic) and {bandwidth / moved:,.0f} (memory) client-steps/s; "
          f"ours reaches {100 * best / ceiling:.0f} % of the nearer")  # fmt: skip
    print(f"ratio plain: {best / rates['plain loop']:.2f}x")


if __name__ == "__main__":
    main()
