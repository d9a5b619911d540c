"""Teams of a GPU's threads that compute clients, as a CPU emulates them."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from dpfl_mpi.numerics.gpu import SCORING, Gpu, plan_header
from dpfl_mpi.numerics.lanes.declared import SOURCES

HERE = Path(__file__).parent
TEAM = 64
# a network that is set while the program runs, so that one program serves all
ANY_NETWORK = 'static Net NET;\nextern "C" void use(const Net *net) { NET = *net; }\n'


def emulator(folder, block, cluster=1, plan=ANY_NETWORK):
    """Compile the kernels of a GPU for a CPU, for a team of blocks of so many threads.

    Return the library. A folder is for one `plan`, the text of plan.h.
    """
    target = folder / f"emulated_{block}_{cluster}.so"
    if not target.exists():
        (folder / "plan.h").write_text(plan)
        flags = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off"]
        define = ["-DGPU", "-DEMULATED", f"-DTEAM={block}", f"-DCLUSTER={cluster}"]
        places = [f"-I{HERE}", f"-I{SOURCES}", f"-I{folder}", str(HERE / "emulated.cpp")]
        command = ["g++", *flags, *define, *places, "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(target))
    library.cluster = cluster
    return library


@functools.cache
def emulated(header):
    """Return the library of one network's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        return emulator(Path(folder), TEAM, plan=header)


class Emulated(Gpu):
    """One client at a time on a CPU, by threads that run in their order or backwards."""

    backwards = False
    teams_of_client = 3  # that score

    def __init__(self, plan, ensemble, library=None):
        """Compute by a library for any network, or by one for this network."""
        self.net, self._held, self.launched = plan.net, (plan, ensemble), []
        self.net.width = ensemble.width
        self.net.scale, self.net.shift = (t.data_ptr() for t in (ensemble.scale, ensemble.shift))
        of_plan = ensemble.width, ensemble.scale, ensemble.shift
        self.library = library or emulated(plan_header(plan, *of_plan))
        super().__init__(plan, ensemble, 2, dict.fromkeys(SCORING, self.teams_of_client))

    def load(self, verbs):
        assert all(hasattr(self.library, verb) for verb in verbs)

    def blocks(self):
        return 2

    def teams_in_memory(self):
        return 2

    def launch(self, verb, teams, *arguments):
        if hasattr(self.library, "use"):
            self.library.use(ctypes.byref(self.net))
        if verb == "team_bytes":
            return self.library.team_bytes(ctypes.c_void_p(arguments[0].data_ptr()))
        self.launched.append(verb)
        tasks, count, following, memory, stride = arguments
        places = [ctypes.c_void_p(t.data_ptr()) for t in (tasks, following, memory)]
        kernel, size = getattr(self.library, verb), ctypes.c_int64
        how = size(count), places[1], places[2], size(stride)
        alone = self.library.cluster > 1  # a cluster is one team, or several of a block
        client = int(self.backwards), 1 if alone else self.clusters.get(verb, 1)
        return self.library.launch(kernel, *client, places[0], *how)
