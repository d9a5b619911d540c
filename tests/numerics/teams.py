"""Teams that compute a client: of the CPU's threads, and of a GPU's as a CPU emulates them."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np

from dpfl_mpi.numerics.lanes.declared import SOURCES

HERE = Path(__file__).parent
# a network that is set while the program runs, so that one program serves all
ANY_NETWORK = 'static Net NET;\nextern "C" void use(const Net *net) { NET = *net; }\n'


def work_space(size):
    """Return zeros, and where in them a multiple of 128 is."""
    memory = np.zeros(size + 128, np.uint8)
    return memory, -(-memory.ctypes.data // 128) * 128


def share_out(native, members):
    """Let a `Native` compute by a team of so many threads."""
    native.held, place = work_space(native._call.space(native._net, members))

    def run(verb, task):
        getattr(native._call, verb)(native._net, task, 1, 1, members, place)
        return task

    native._run = run


def emulator(folder, team, plan=ANY_NETWORK):
    """Compile the kernels of a GPU for a CPU, for a team of so many threads; return the library.

    A folder is for one `plan`, the text of plan.h.
    """
    target = folder / f"emulated_{team}.so"
    if not target.exists():
        (folder / "plan.h").write_text(plan)
        flags = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off"]
        define = ["-DGPU", "-DEMULATED", f"-DTEAM={team}"]
        places = [f"-I{HERE}", f"-I{SOURCES}", f"-I{folder}", str(HERE / "emulated.cpp")]
        command = ["g++", *flags, *define, *places, "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(target))
    library.space.restype = ctypes.c_int64
    return library


def emulate(native, library, backwards=False):
    """Let a `Native` compute by a block of an emulated GPU."""
    library.use(ctypes.byref(native._net))
    native.held, place = work_space(library.space())
    count, stride = ctypes.c_int64(1), ctypes.c_int64(0)

    def run(verb, task):
        library.use(ctypes.byref(native._net))
        queue = ctypes.byref(task), count, ctypes.byref(ctypes.c_int32(0))
        kernel, memory = getattr(library, verb), ctypes.c_void_p(place)
        library.launch(kernel, int(backwards), *queue, memory, stride)
        return task

    native._run = run
