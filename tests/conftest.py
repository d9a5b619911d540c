"""What all tests share: one thread, small data files, and what only CI asks for."""

import contextlib
import itertools
import os
import resource
import signal
import sys
from unittest import mock

# before torch: bitwise equality holds for one thread per rank
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# ignored in a script's background job; what tests start would ignore it, too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

too_slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=too_slow)
hypothesis.settings.load_profile("busy")

ASKED = {
    "cluster": "also run what starts a Slurm, as root; missing packages of Debian are installed",
    "browser": "also run what opens the HTML report in Chromium",
}


def pytest_addoption(parser):
    for name, text in ASKED.items():
        parser.addoption(f"--{name}", action="store_true", help=text)


def pytest_configure(config):
    """Let no pytest that a test starts, such as a rank's, start workers of its own."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        os.environ["PYTEST_ADDOPTS"] = "-n 0"


def pytest_collection_modifyitems(config, items):
    """Skip what nobody asked for: `pytest` alone installs and starts nothing."""
    for name in (name for name in ASKED if not config.getoption(name)):
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"runs with pytest --{name}"))


@pytest.fixture(scope="module")
def terminal():
    """The environment of a terminal outside of any job, where nothing of MPI has started."""
    from launch import environment

    around_no_job = mock.patch.dict(os.environ, environment(), clear=True)
    with around_no_job, pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "mpi4py.MPI", raising=False)
        yield


@pytest.fixture
def said(capfd):
    """A function that returns what a command prints: its errors where `code` is not 0."""

    def run(main, *words, code=0):
        try:
            ended = main([str(word) for word in words])
        except SystemExit as end:
            ended = end.code
        out, err = capfd.readouterr()
        assert (ended or 0) == code, out + err
        return err if code else out

    return run


@pytest.fixture
def at_most():
    """A function that limits a resource of this process, such as RLIMIT_FSIZE, in this test."""
    with contextlib.ExitStack() as after:

        def limit(kind, most):
            before = resource.getrlimit(kind)
            after.callback(resource.setrlimit, kind, before)
            resource.setrlimit(kind, (most, before[1]))

        yield limit


@pytest.fixture
def result_of(tmp_path):
    """A function that computes a Run here and returns its result, open until the test ends."""
    from launch import run_here

    from dpfl_mpi.results import Result

    paths = (tmp_path / f"result-{i}.h5" for i in itertools.count())
    with contextlib.ExitStack() as opened:
        put = opened.enter_context
        yield lambda fields, **job: put(Result(run_here(next(paths), fields, **job)))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The small run of `starts`, computed without a stop."""
    import starts

    return starts.here(tmp_path_factory.mktemp("undisturbed") / "run.h5")


@pytest.fixture(scope="session")
def digits_file(tmp_path_factory):
    """The embedded digits as a prepared file: an own data set of 8x8 grey images."""
    from dpfl_mpi import prepare
    from dpfl_mpi.datasets import digits

    path = tmp_path_factory.mktemp("data") / "digits.h5"
    prepare.write(digits.load(), "image_folder", path)
    return path


@pytest.fixture(scope="session")
def colour_file(tmp_path_factory):
    """600 training and 200 test images of 17x18 colour pixels in four classes."""
    from making import labelled

    path = tmp_path_factory.mktemp("data") / "colour.h5"
    return labelled(path, (600, 200), (17, 18, 3), noise=60)
