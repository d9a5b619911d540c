"""The kernels of `lanes/` on an NVIDIA GPU: a network as a program, its compiler, its launches.

A kernel is a function that runs on the GPU; each verb (train, score, search, ...) has one, compiled
for one network. Its program is C++: the network's constants, from its `Plan`, and the sources that
a CPU has, too. NVRTC compiles it for the GPU that is here, without CUDA's toolkit, and the result
is kept in the user's cache folder. A block is a group of threads on one of the GPU's
multiprocessors. A team is the threads that compute together, as lanes/gpu.h says: those of a block
or, in a GPU's "cluster", of a few neighbouring blocks.
"""

import functools
import hashlib
import math
import os
import re
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import Array, Structure
from itertools import repeat
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_mpi.errors import UserError, complain
from dpfl_mpi.numerics.ensemble import Ensemble
from dpfl_mpi.numerics.lanes.declared import SOURCES
from dpfl_mpi.numerics.lanes.plan import Plan
from dpfl_mpi.storage import files

TEAM = 512  # threads of a block, a multiple of 32: 128 registers for each
UNROLLED = 24  # the loop over layers is unrolled for networks of at most so many
MEMORY_SHARE = 0.8  # of the memory that is free, for the teams' work
DIGEST_BYTES = 32  # SHA-256 of a program, before it in its file
USUAL = "team_bytes", "gradient", "score", "train", "search"  # verbs that most runs need
TRAINING = "train", "mix", "ahead"  # verbs whose time is that of a client's steps
SCORING = "search", "score"  # verbs in which each block of a client has some of its images
STEP_TIMES = {1: 1.0, 2: 0.8, 4: 0.5}  # of a step by so many blocks, measured on an H200
SCORING_BLOCKS = 4  # of a client: with 8, a few clusters too many are left over
CLUSTERS_SINCE = 9, 0  # compute capability
IMPORTING = Lock()  # while one thread imports cuda.core, another one finds half of it
INSTALL = "pip install 'dpfl_mpi[gpu]'"


# the program ---------------------------------------------------------------------------------
def plan_header(plan: Plan, width: int, scale: Tensor, shift: Tensor) -> str:
    """Return the C++ text that defines `NET`: a network of rows of `width` numbers.

    A sample's n enters as n * scale + shift, of each channel `[C]`.
    """
    # the constants that the addresses in the structures of C become
    names = {"value": "VALUES", "layer": "LAYERS", "scale": "SCALE", "shift": "SHIFT"}
    arrays, layers = [], []
    for i, (layer, table) in enumerate(zip(plan.layers, plan.tables, strict=True)):
        arrays.append(f"int32_t TABLE_{i}[] = {literal(table)}")
        layers.append(literal(layer, {"table": f"TABLE_{i}"}))
    arrays += [
        f"Value VALUES[] = {literal(plan.values)}",
        f"Layer LAYERS[] = {{{', '.join(layers)}}}",
        f"float SCALE[] = {literal(scale.tolist())}",
        f"float SHIFT[] = {literal(shift.tolist())}",
        f"Net NET = {literal(plan.net, names | {'width': str(width)})}",
    ]
    define = "#define UNROLLED_NET\n" if len(plan.layers) <= UNROLLED else ""
    define += "#define FIXED __device__ constexpr\n"
    return define + "".join(f"static FIXED {array};\n" for array in arrays)


def literal(value: Any, names: dict[str, str] | None = None) -> str:
    """Return a number, a sequence or a structure of ctypes as C++, to the last bit.

    A field of a structure whose name is in `names` is written as what they say.
    """
    if isinstance(value, Structure):
        fields, known = [field[0] for field in value._fields_], names or {}
        return f"{{{', '.join(known.get(f) or literal(getattr(value, f)) for f in fields)}}}"
    if isinstance(value, Array | list):
        return f"{{{', '.join(map(literal, value))}}}"
    if isinstance(value, int):
        return str(value)
    if math.isfinite(value):
        return f"{value.hex()}f"
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return f"__builtin_bit_cast(float, {bits:#x}u)"


def program(header: str, verb: str, team: int = TEAM, cluster: int = 1) -> str:
    """Return the program of one verb for a network, as one text: our own #includes are replaced.

    A client has a `cluster` of blocks of `team` threads; `header` is `plan_header`'s.
    """
    texts = {path.name: path.read_text() for path in SOURCES.glob("*.[ch]")} | {"plan.h": header}

    def expanded(text: str) -> str:
        return re.sub(r'^#include "(.+)"', included, text, flags=re.MULTILINE)

    def included(match: re.Match[str]) -> str:
        name = match[1]  # a file that is not here, emulated.h, is a test's
        return expanded(texts[name]) if name in texts else match[0]

    settings = {"GPU": 1, "TEAM": team, "TEAMS" if verb in SCORING else "CLUSTER": cluster}
    defines = "".join(f"#define {name} {value}\n" for name, value in settings.items())
    # verbs are compiled at the same time, each without the lines VERB(...) of the others
    others = rf"^VERB\((?!{verb},).*\n"
    return defines + re.sub(others, "", expanded(texts["lanes.c"]), flags=re.MULTILINE)


# the compiler --------------------------------------------------------------------------------
def compiled(text: str, arch: str, log: Any = None) -> bytes:
    """Return the machine code of a program for an architecture such as sm_90, from the cache.

    With a `log`, a file, it is compiled anew, and its registers and spills are written there.
    `UserError`: the compiler is not there, or the program does not compile.
    """
    try:
        with IMPORTING:
            from cuda.bindings import nvrtc
            from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise UserError(f"the kernels need cuda-core on a GPU ({error}): {INSTALL}") from error
    options = {"std": "c++20", "fma": False, "prec_div": True, "prec_sqrt": True, "ftz": False}
    options |= {"device_as_default_execution_space": True, "arch": arch, "name": "lanes"}
    try:
        _, *version = nvrtc.nvrtcVersion()
        key = hashlib.sha256(repr((text, version, options)).encode()).hexdigest()
        path = cache() / f"{key}.cubin"
        code = None if log else read(path)
        if code is None:
            if not log:
                announce(arch)
            all_options = ProgramOptions(**options, ptxas_options=["-v"] if log else None)
            code = bytes(Program(text, "c++", all_options).compile("cubin", logs=log).code)
            keep(path, code)
        return code
    except Exception as error:  # a driver, a compiler or an architecture of another time
        lines = str(error).splitlines()
        why = next((line for line in lines if "error:" in line), " ".join(str(error).split()))
        raise UserError(f"the kernels do not compile for this GPU, {arch} ({why})") from error


@functools.cache
def announce(arch: str) -> None:
    complain(f"compiling the kernels for this GPU, {arch}: once, then they are in {cache()}")


def cache() -> Path:
    """Return the folder of compiled programs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "dpfl_mpi"


def read(path: Path) -> bytes | None:
    """Return a program from its file; None: there is none, or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def keep(path: Path, code: bytes) -> None:
    """Write a program into its file in one step: other ranks read and write it, too."""
    with suppress(OSError):  # where the folder is full or read-only, the next run compiles again
        files.write(path, hashlib.sha256(code).digest() + code)


# launches ------------------------------------------------------------------------------------
class Gpu:
    """The kernels of a network on a GPU, launched on PyTorch's stream of work.

    A launch starts some teams. Each takes the largest client that none has taken, until all are
    done, and works in a piece of `memory` of its own.
    """

    def __init__(
        self, plan: Plan, ensemble: Ensemble, most: int, clusters: Any = None, team: int = TEAM
    ):
        """Compile the usual verbs of a network, for calls of at most `most` clients.

        A client has a block of `team` threads, or as many blocks as `clusters` says of a verb.
        `UserError`: there is no such program here.
        """
        self.header = plan_header(plan, ensemble.width, ensemble.scale, ensemble.shift)
        self.device, self.put, self.most, self.team = ensemble.device, ensemble.put, most, team
        self.clusters: dict[str, int] = clusters or {}
        self._kernels: dict[str, Any] = {}  # by verb
        self._codes: list[Any] = []  # the loaded code of the kernels, which must stay alive
        self.load(USUAL)
        team_bytes = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.launch("team_bytes", 1, team_bytes)
        self.team_bytes = int(team_bytes)
        self.memory = torch.zeros(0, self.team_bytes, dtype=torch.uint8, device=self.device)

    def run(self, verb: str, structs: np.ndarray, sizes: np.ndarray | None = None) -> Tensor:
        """Compute a task for each client, those of the largest `sizes` `[k]` (of work) first.

        Return the tasks as the kernel leaves them on the device, uint8 `[k, bytes]`.
        """
        count = len(structs)
        order = np.arange(count) if sizes is None else np.argsort(-sizes, kind="stable")
        tasks = self.put(structs[order].view(np.uint8).reshape(count, -1))
        if len(self.memory) == 0:  # at the first call: zeros, as the padding around values stays
            most_spaces = max(map(self.spaces, SCORING))
            teams = min(self.most * most_spaces, self.blocks(), self.teams_in_memory())
            self.memory = self.memory.new_zeros(max(teams, most_spaces), self.team_bytes)
        next_client = torch.zeros(1, dtype=torch.int32, device=self.device)  # that no team took
        by_blocks = self.blocks() // self.clusters.get(verb, 1)
        by_memory = len(self.memory) // self.spaces(verb)
        at_once = max(1, min(count, by_blocks, by_memory))  # clients
        self.launch(verb, at_once, tasks, count, next_client, self.memory, self.team_bytes)
        return tasks if sizes is None else tasks[self.put(np.argsort(order))]

    def spaces(self, verb: str) -> int:
        """Return how many pieces of memory a client needs: in scoring, each block works alone."""
        return self.clusters.get(verb, 1) if verb in SCORING else 1

    def blocks(self) -> int:
        """Return how many blocks compute at once: each fills a multiprocessor's registers."""
        return multiprocessors(self.device)

    def teams_in_memory(self) -> int:
        """Return for how many teams there is memory, at least 1."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(1, int(MEMORY_SHARE * free) // self.team_bytes)

    def load(self, verbs: Iterable[str]) -> None:
        """Compile the kernels of these verbs at the same time, and load them.

        `UserError`: the compiler is not there, or the driver cannot load them.
        """
        missing = [verb for verb in verbs if verb not in self._kernels]
        major, minor = torch.cuda.get_device_capability(self.device)
        clusters = [self.clusters.get(verb, 1) for verb in missing]
        texts = map(program, repeat(self.header), missing, repeat(self.team), clusters)
        with ThreadPoolExecutor() as pool:
            codes = [*pool.map(compiled, texts, repeat(f"sm_{major}{minor}"))]
        from cuda.core import Device, ObjectCode

        try:
            Device(self.device.index).set_current()
            for verb, code in zip(missing, codes, strict=True):
                self._codes.append(ObjectCode.from_cubin(code))
                self._kernels[verb] = self._codes[-1].get_kernel(verb)
        except Exception as error:  # the driver's errors are of many types
            why = " ".join(str(error).split())
            raise UserError(f"the GPU's driver cannot load the kernels ({why})") from error

    def launch(self, verb: str, clients: int, *arguments: Any) -> None:
        """Launch a kernel for so many clients at once; tensors are given by their addresses."""
        if verb not in self._kernels:
            self.load([verb])
        from cuda.core import LaunchConfig, launch

        shape: dict[str, int] = {"grid": clients, "block": self.team}
        if self.clusters.get(verb, 1) > 1:
            shape["cluster"] = self.clusters[verb]  # the grid then counts clusters
        values = [a.data_ptr() if isinstance(a, Tensor) else np.int64(a) for a in arguments]
        stream = Stream(torch.cuda.current_stream(self.device).cuda_stream)
        try:
            launch(stream, LaunchConfig(**shape), self._kernels[verb], *values)
        except Exception as error:
            why = " ".join(str(error).split())
            raise UserError(f"the GPU does not start the kernels ({why})") from error


class Stream:
    """PyTorch's current stream, in the form in which cuda.core takes streams."""

    def __init__(self, handle: int):
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def clusters_of(sizes: np.ndarray, device: torch.device) -> dict[str, int]:
    """Return how many blocks each verb should give a client, for these training sizes, `[k]`.

    More blocks finish one client sooner, but fewer clients run at once. The time of a choice is
    that of the largest client, or of all clients on all multiprocessors, whichever is longer.
    """
    if not len(sizes) or torch.cuda.get_device_capability(device) < CLUSTERS_SINCE:
        return {}

    def duration(blocks: int) -> float:
        at_once = max(1, multiprocessors(device) // blocks)
        return float(STEP_TIMES[blocks] * max(sizes.max(), sizes.sum() / at_once))

    fastest = min(STEP_TIMES, key=duration)
    return dict.fromkeys(TRAINING, fastest) | dict.fromkeys(SCORING, SCORING_BLOCKS)


def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
