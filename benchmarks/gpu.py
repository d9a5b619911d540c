"""What a GPU gives that is at hand for a few minutes: bits, races, rates, and the paper's run.

    python benchmarks/gpu.py --reference bits.npz                    # on any CPU, beforehand
    python benchmarks/gpu.py --prepared DIR --reference bits.npz --data cifar10.h5
    python benchmarks/gpu.py --compile sm_90                         # needs no GPU

--prepared runs parts one after the other, each in a process of its own and with its own limit,
eight minutes at most in all. What a part finds is printed, and saved at once as DIR/PART.json, so
one that fails or is stopped keeps what it has and does not stop the next:

- compile: the kernels of the other parts, at the same time.
- bits: gradients of every layer, training, scores and searches of six networks, and a short run of
  DPFL, against the reference.
- sanitize: races and wrong addresses in the steps of two clients, by compute-sanitizer.
- rate: client-steps per second of the paper's CNN, 100 clients of unequal sizes (lognormal, mean
  400), by a plain loop, and by each team and cluster.
- paper: `python -m dpfl_mpi --dataset cifar10 --budget 10`: its clocks, and each client's accuracy
  against the one of `reproduction/`.
- ncu: what bounds one launch of `train`, by Nsight Compute.
- tests: those that need a GPU.

With --device cpu parts are shorter, and the CPU's kernels take the GPU's place.
"""

import argparse
import csv
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import _gpu_bits
import numpy as np
import torch
from _samples import CIFAR, PAPER_SGD, S
from torch import nn

from dpfl_mpi.errors import UserError, exit_with, in_a_sentence
from dpfl_mpi.models.cnn import build
from dpfl_mpi.numerics import gpu
from dpfl_mpi.numerics.backend import Backend, LocalEpochs
from dpfl_mpi.numerics.device import pick_device
from dpfl_mpi.numerics.ensemble import Block, Ensemble
from dpfl_mpi.numerics.gpu import SCORING, SCORING_BLOCKS, TEAM, TRAINING, USUAL, Gpu
from dpfl_mpi.numerics.kernels import describe
from dpfl_mpi.numerics.lanes.declared import SOURCES
from dpfl_mpi.numerics.native_backend import NativeBackend
from dpfl_mpi.results import Result
from dpfl_mpi.results.summary import slowest_seconds

ROOT = Path(__file__).resolve().parent.parent
LIMITS_S = {"compile": 90, "bits": 60, "sanitize": 120, "rate": 90, "paper": 120, "ncu": 60}
LIMITS_S |= {"tests": 120}
TOTAL_S, LAST_S = 480, 3  # LAST_S: a part's programs must end so long before its limit
LR, EPOCHS, GOAL = 0.01, 5, 300  # GOAL: times the plain loop
TEAMS, CLUSTERS = (256, 512, 128, 768, 1024), (1, 2, 4)
OF_TEAM = "team_bytes", "train"
USED = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
USED += r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?"
SHOWN = (  # by Nsight Compute's names; all are saved
    r"gpu__time_duration\.sum|launch__(registers_per_thread|occupancy_limit_\w+)"
    r"|sm__warps_active\.avg\.pct_of_peak_sustained_active"
    r"|smsp?__(inst_issued|issue_active|inst_executed_pipe_\w+)\.avg\.p\w+_active"
    r"|(l1tex|lts)__t_sector_hit_rate\.pct|smsp__average_warps?_issue_stalled_\w+\.ratio"
)
Args, Say = argparse.Namespace, Callable[[str], None]
Job = tuple[str, str, str, int, int]  # architecture, network, kernel, threads, blocks of a client


class Report:
    """Prints lines, and saves them with their numbers at once."""

    def __init__(self, path: Path):
        self.path, self.values = path, json.loads(path.read_text()) if path.exists() else {}

    def say(self, line: str, **values: Any) -> None:
        print(line, flush=True)
        self.values |= values | {"lines": [*self.values.get("lines", ()), line]}
        new = self.path.with_suffix(".new")  # a kill leaves no half of a file
        new.write_text(json.dumps(self.values, indent=1, default=str) + "\n")
        new.replace(self.path)


# the kernels -------------------------------------------------------------------------------------
def compiled(
    arch: str, network: str, verb: str, team: int, cluster: int, anew: bool
) -> tuple[str, int]:
    """Compile a kernel into the cache.

    Return, where that is done anew, its registers and bytes as a line, and most bytes of its stack,
    its spill stores or loads.
    """
    subject = _gpu_bits.NETWORKS[network]
    module, log = subject.build(), StringIO() if anew else None
    scales, device = _gpu_bits.scales(subject), torch.device("cpu")
    ensemble = Ensemble(module, *scales, device, dtype=subject.dtype)
    plan, _ = describe(module, subject.shape, subject.dtype)
    header = gpu.plan_header(plan, ensemble.width, ensemble.scale, ensemble.shift)
    gpu.compiled(gpu.program(header, verb, team, cluster), arch, log)
    if not log:
        return "is there", 0
    own = log.getvalue().partition(f"entry function '{verb}'")[2]  # behind it: of other functions
    found = re.search(USED, own, re.DOTALL)
    assert found, log.getvalue()
    line = "{3:>4} registers,{0:>5} bytes of stack,{1:>5} and{2:>5} of spills,{4:>6} shared"
    return line.format(*found.groups("0")), max(map(int, found.groups()[:3]))


def compile_all(jobs: list[Job], anew: bool, say: Say) -> bool:
    """Compile kernels at the same time.

    Return whether all compile, and none of the paper's CNN has a stack or spills. Kernels that need
    not be compiled `anew` may fail: another size may fit.
    """
    start, failed, spill = time.perf_counter(), list[str](), list[str]()
    with ThreadPoolExecutor() as pool:
        waiting = {pool.submit(compiled, *job, anew): job for job in jobs}
        for done in as_completed(waiting):
            title = "{}: {}, {}, team {}, cluster {}".format(*waiting[done])
            try:
                text, spilled = done.result()
            except UserError as error:
                text, spilled = str(error), 0
                failed += [title] if anew else []
            say(f"{title:44s} {text}")
            if spilled and waiting[done][1] == "cnn":
                spill.append(f"{title} ({spilled} bytes)")
    say(f"{len(jobs)} kernels in {time.perf_counter() - start:.1f} s")
    if failed:
        say(f"error: these do not compile: {'; '.join(sorted(failed))}")
    if spill:
        say(f"error: stack or spills of {'; '.join(sorted(spill))}")
    return not failed and not spill


def needed(args: Args, arch: str) -> list[Job]:
    """Return all that the parts launch."""
    networks, sizes = _gpu_bits.NETWORKS, [*itertools.product(args.teams, args.clusters)]
    verbs = {
        name: {*USUAL, *_gpu_bits.verbs_of(name)} - {"frozen", "proximal"} for name in networks
    }
    jobs = [(arch, "cnn", verb, *size) for size in sizes for verb in OF_TEAM]
    jobs += [usual(arch, name, verb) for name in networks for verb in sorted(verbs[name])]
    return [*dict.fromkeys(jobs)]


def usual(arch: str, network: str, verb: str) -> Job:
    """Return a kernel for a client of as many blocks as it may have."""
    clusters = int(arch[3:]) >= 90 and verb in TRAINING + SCORING
    return arch, network, verb, TEAM, SCORING_BLOCKS if clusters else 1


@torch.no_grad()
def train(backend: Backend, k: int) -> int:
    """Train the first k clients for some epochs; return their steps."""
    n = backend.clients.n_train
    epochs = LocalEpochs(EPOCHS, np.zeros(len(n), np.int64), LR)
    row = backend.ensemble.initial_row("kaiming", np.random.default_rng(0))
    w, momentum = row.repeat(len(n), 1), backend.zero_momentum(len(n))
    for rows in backend.blocks if k == len(n) else [slice(0, k)]:
        backend.train_epochs(Block(backend.ensemble, w[rows], momentum[rows], rows), epochs)
    if w.is_cuda:
        torch.cuda.synchronize()
    return EPOCHS * int((-(-n[:k] // S)).sum())


def clients_on(device: torch.device, k: int) -> Backend:
    """Return what computes k clients of the paper's CNN."""
    sizes = np.clip(np.random.default_rng(0).lognormal(6, 0.5, k).astype(int), 32, None)
    train = sorted(sizes.tolist(), reverse=True)
    return _gpu_bits.backend_of(_gpu_bits.NETWORKS["cnn"], PAPER_SGD, device, train, [1] * k)


def by_teams(clients: Backend, team: int, cluster: int) -> Any:
    """Return what trains these clients by teams of a size, with the seconds of its last launch."""

    class Timed(Gpu):
        def load(self, verbs: Iterable[str]) -> None:
            super().load([verb for verb in verbs if verb in OF_TEAM])

        def launch(self, *arguments: Any) -> None:
            self.ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.ends[0].record()
            super().launch(*arguments)
            self.ends[1].record()

        def seconds(self) -> float:
            self.ends[1].synchronize()
            return float(self.ends[0].elapsed_time(self.ends[1])) / 1e3

    most = len(clients.clients)
    make = functools.partial(Timed, most=most, clusters={"train": cluster}, team=team)
    return NativeBackend(clients.ensemble, clients.clients, PAPER_SGD, make)


# the parts ---------------------------------------------------------------------------------------
def compile_here(args: Args, report: Report) -> None:
    if args.device == "cpu":
        return report.say("skipped: the kernels of a CPU are there")
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    compile_all(needed(args, arch), False, report.say)


def bits(args: Args, report: Report) -> None:
    if not args.reference:
        return report.say("skipped: no --reference")
    off, wanted = dict[str, str](), dict(np.load(args.reference))
    for name, got in _gpu_bits.arrays_of(pick_device(args.device, "float32", 0), args.prepared):
        expected = wanted.pop(name, None)
        how = "is new" if expected is None else _gpu_bits.difference(got, expected)
        off |= {name: how} if how else {}
        if how:
            report.say(f"DIFFERS {name}: {how}", off=off)
    off |= dict.fromkeys(wanted, "was not computed")
    report.say(f"{len(off)} arrays differ; not computed: {', '.join(wanted) or 'none'}", off=off)


def step(args: Args, report: Report) -> None:
    device = pick_device(args.device, "float32", 0)
    steps = train(_gpu_bits.backend_of(_gpu_bits.NETWORKS["small"], PAPER_SGD, device), 2)
    report.say(f"{steps} steps of two clients")


def launch(args: Args, report: Report) -> None:
    backend = clients_on(pick_device(args.device, "float32", 0), 100)
    report.say(f"{train(backend, 100)} steps of 100 clients")


def sanitize(args: Args, report: Report) -> None:
    tool = shutil.which("compute-sanitizer")
    if not tool:
        return report.say("skipped: compute-sanitizer is not here")
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor has ends of its own
    for name in ("racecheck", "memcheck"):
        command = [tool, "--tool", name, "--print-limit", "20", *this(args, "step")]
        text = output(command, LIMITS_S["sanitize"] / 2 - LAST_S, env)
        found = [line for line in text.splitlines() if line.startswith("=====")]
        report.say(f"{name}: {found[-1] if found else short(text)}", **{name: found or text})


def rate(args: Args, report: Report) -> None:
    torch.set_num_threads(1)
    device, rates = pick_device(args.device, "float32", 0), dict[str, float]()
    torch.use_deterministic_algorithms(False)  # a plain loop may not run else
    on_gpu, k = device.type == "cuda", 100 if device.type == "cuda" else 8
    card = torch.cuda.get_device_name() if on_gpu else "one CPU thread"
    report.say(f"{card}, torch {torch.__version__}, {k} clients, mini-batches of {S}")

    def measure(title: str, action: Callable[[], int], seconds: float = args.seconds) -> None:
        done, start = 0 * action(), time.perf_counter()
        while time.perf_counter() - start < seconds:
            done += action()
        say(title, done / (time.perf_counter() - start))

    def say(title: str, of: float) -> None:
        rates[title] = of
        times = f"{of / rates['plain loop']:7.1f} times the loop, of which {GOAL} are the goal"
        report.say(f"{title:44s} {of:11,.0f} client-steps/s, {times}", rates=rates)

    measure("plain loop", plain_loop(device))
    backend = clients = clients_on(device, k)
    sizes = itertools.product(args.clusters, args.teams) if on_gpu else [(1, 1)]
    for cluster, team in sizes:
        title = f"team {team}, cluster {cluster}"
        try:
            backend = by_teams(clients, team, cluster) if on_gpu else clients
            measure(title, functools.partial(train, backend, k))
            if on_gpu:
                of_launch = train(backend, k) / backend.kernels.machine.seconds()
                say(f"{title}, the launch alone", of_launch)
            one = functools.partial(train, backend, 1)
            measure(f"{title}, the largest client", one, args.seconds / 3)
        except Exception as error:  # a size that does not fit
            report.say(f"{title}: {short(str(error))}")


def plain_loop(device: torch.device) -> Callable[[], int]:
    """Return 8 steps of each of a few clients, one after another, as everybody writes it."""
    few, how = 4, {"momentum": PAPER_SGD.momentum, "weight_decay": PAPER_SGD.weight_decay}
    models = [build(CIFAR, 10).to(device) for _ in range(few)]
    fused = [torch.optim.SGD(m.parameters(), LR, **how, fused=True) for m in models]
    x = torch.randn(few, 8, S, 3, 32, 32, device=device)
    y = torch.randint(10, (few, 8, S), device=device)

    def run() -> int:
        for model, sgd, of_x, of_y in zip(models, fused, x, y, strict=True):
            for images, labels in zip(of_x, of_y, strict=True):
                sgd.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                nn.utils.clip_grad_norm_(model.parameters(), PAPER_SGD.clip_norm)
                sgd.step()
        if x.is_cuda:
            torch.cuda.synchronize()
        return few * 8

    return run


def paper(args: Args, report: Report) -> None:
    on_gpu, end = args.device == "cuda", time.monotonic() + LIMITS_S["paper"] - LAST_S
    if on_gpu and not args.data:
        return report.say("skipped: no --data")
    flags = ["--dataset=cifar10", f"--data={args.data}"] if args.data else []
    flags += ["--budget=10"] if on_gpu else ["--clients=8", "--rounds=2", "--tau_init=1"]
    out, start = args.prepared / "paper.h5", time.perf_counter()
    how = [f"--device={args.device}", "--kernels=native", "--fresh", f"--out={out}"]
    text = output([sys.executable, "-m", "dpfl_mpi", *flags, *how], end - time.monotonic())
    wall = time.perf_counter() - start
    try:
        with Result(out) as result:
            clocks = {phase: s.sum() for phase, s in slowest_seconds(result).items()}
            got = np.where(result.benign, result.score("accuracy"), np.nan)
            run, state = result.run.slug().rpartition("-")[2], result.state
    except UserError as error:
        return report.say(f"{error}; {short(text)}", output=text)
    seconds = ", ".join(f"{phase} {s:.1f}" for phase, s in clocks.items())
    line = f"{state}: {wall:.1f} s ({seconds}), {100 * np.nanmean(got):.4f} %"
    wanted = stored(run)
    if len(wanted) == len(got):
        same = np.isclose(got, wanted, rtol=0, atol=1e-12, equal_nan=True).sum()
        line += f"; {same} of {len(got)} clients as stored, {100 * np.nanmean(wanted):.4f} %"
    report.say(line, wall=wall, **clocks, test_acc=got.tolist(), output=text)


def stored(run: str) -> np.ndarray:
    """Return the accuracies of a Run's clients, 0 to 1, by `reproduction/`; none: it is new."""
    for path in (ROOT / "reproduction").glob("*/clients.csv"):
        with path.open(newline="") as file:
            lines = [line for line in csv.DictReader(file) if line["run"] == run]
        if lines:
            lines.sort(key=lambda line: int(line["client"]))
            return np.array([float(line["test_acc"] or "nan") for line in lines])
    return np.zeros(0)


def ncu(args: Args, report: Report) -> None:
    tool = shutil.which("ncu")
    if not tool:
        return report.say("skipped: ncu is not here")
    command = [tool, "--kernel-name", "train", "--launch-count", "1", "--clock-control", "none"]
    command += ["--set", "full", "--csv", "--page", "raw"]
    text = output([*command, *this(args, "launch")], LIMITS_S["ncu"] - LAST_S)
    head, found, table = text.partition('"ID",')
    if not found:
        why = [line for line in head.splitlines() if line.startswith("==")]
        return report.say(f"skipped: {' '.join(why[-2:]) or short(text)}", output=text)
    names, units, values, *_ = csv.reader(StringIO(found + table))
    of_launch = list(zip(names, values, units, strict=True))
    for name, value, unit in of_launch:
        if re.fullmatch(SHOWN, name):
            report.say(f"{value:>16s} {unit:12s} {name}")
    report.say(f"{len(names)} values", values=of_launch)


def tests(args: Args, report: Report) -> None:
    wanted = [ROOT / f"tests/numerics/{name}.py" for name in ("test_gpu", "test_gpu_kernels")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0"]
    command += [str(path) for path in wanted if path.exists()]
    report.say(output(command, LIMITS_S["tests"] - LAST_S))


# processes ---------------------------------------------------------------------------------------
def this(args: Args, part: str) -> list[str]:
    """Return the command of one part in a process of its own."""
    given = ("prepared", "reference", "data", "device", "seconds")
    flags = [f"--{name}={value}" for name in given if (value := getattr(args, name))]
    sizes = [
        f"--{name}={','.join(map(str, getattr(args, name)))}" for name in ("teams", "clusters")
    ]
    return [sys.executable, __file__, *flags, *sizes, f"--part={part}"]


def output(command: list[str], seconds: float, env: dict[str, str] | None = None) -> str:
    """Return what a command prints, in at most so many seconds."""
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": ROOT}
    with subprocess.Popen(command, env=env, text=True, **both) as process:
        try:
            return str(process.communicate(timeout=max(seconds, 1))[0])
        except subprocess.TimeoutExpired:
            process.terminate()
            return f"{process.communicate()[0]}\nstopped after {seconds:.0f} s"


def short(text: str) -> str:
    """Return the end of a text as one line."""
    return " ".join(text.split())[-300:] or "nothing was printed"


def run_parts(args: Args) -> None:
    args.prepared.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for part in args.parts:
        start, file = time.monotonic(), args.prepared / f"{part}.json"
        limit = min(LIMITS_S[part], begin + TOTAL_S - start)
        file.unlink(missing_ok=True)
        print(f"== {part}, at most {limit:.0f} s", flush=True)
        with subprocess.Popen(this(args, part), start_new_session=True) as process:
            try:
                code = process.wait(max(limit, 0))
                how = f"failed with code {code}" if code else "done"
            except subprocess.TimeoutExpired:
                how = "stopped at its limit"
            with suppress(ProcessLookupError):  # with what it has started
                os.killpg(process.pid, signal.SIGKILL)
        Report(file).say(f"== {part}: {how}, {time.monotonic() - start:.1f} s", ended=how)


PARTS: dict[str, Callable[[Args, Report], None]] = dict(zip(
    (*LIMITS_S, "step", "launch"),
    (compile_here, bits, sanitize, rate, paper, ncu, tests, step, launch),
    strict=True,
))  # fmt: skip


@in_a_sentence
def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    words = lambda t: t.split(",")  # noqa: E731
    parser.add_argument("--prepared", type=Path, metavar="DIR", help="run the parts")
    help_ = f"which parts [{','.join(LIMITS_S)}]"
    parser.add_argument("--parts", type=words, default=[*LIMITS_S], help=help_)
    help_ = "write the bits of a CPU there; with --prepared: compare with them"
    parser.add_argument("--reference", type=Path, metavar="FILE", help=help_)
    parser.add_argument("--data", type=Path, metavar="FILE", help="prepared CIFAR-10")
    parser.add_argument("--device", default=found, choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=1.0, help="of each rate [1]")
    for name, values in (("teams", TEAMS), ("clusters", CLUSTERS)):
        of = "threads of a block" if name == "teams" else "blocks of a team"
        numbers = lambda t: [int(part) for part in t.split(",")]  # noqa: E731
        parser.add_argument(f"--{name}", type=numbers, default=[*values], help=f"{of} {values}")
    help_ = "such as sm_80,sm_90: print registers and spills; code 1 where a kernel of the paper's "
    help_ += "CNN has a stack or spills, or any does not compile"
    parser.add_argument("--compile", type=words, metavar="ARCHS", help=help_)
    every = re.findall(r"^VERB\((\w+), ", (SOURCES / "lanes.c").read_text(), re.MULTILINE)
    help_ = f"with --compile: which kernels [{','.join(every)}]"
    parser.add_argument("--verbs", type=words, default=every, help=help_)
    parser.add_argument("--all", action="store_true", help="with it: all that the parts launch")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("prepared", "reference", "data"):
        if path := getattr(args, name):
            setattr(args, name, path.resolve())
    for name, known in (("parts", [*LIMITS_S]), ("verbs", every)):
        if unknown := {*getattr(args, name)} - {*known}:
            others, allowed = ", ".join(sorted(unknown)), ", ".join(known)
            raise UserError(f"--{name} has {others}; allowed: {allowed}")
    if args.part:
        PARTS[args.part](args, Report(args.prepared / f"{args.part}.json"))
    elif args.prepared:
        run_parts(args)
    elif args.compile:
        jobs = list[Job]()
        for arch in args.compile:
            some = [usual(arch, "cnn", verb) for verb in args.verbs]
            jobs += needed(args, arch) if args.all else some
        return int(not compile_all(jobs, True, functools.partial(print, flush=True)))
    elif args.reference:
        device, folder = pick_device("cpu", "float32", 0), args.reference.parent
        np.savez_compressed(args.reference, **dict(_gpu_bits.arrays_of(device, folder)))
    else:
        raise UserError("one of --prepared, --compile and --reference says what to do")
    return 0


if __name__ == "__main__":
    exit_with(main)
