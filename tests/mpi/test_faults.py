"""MPI that fails: at each place where the package calls it, and with each kind of wrong message."""

import itertools
import re
import sys

import pytest
import starts
from launch import ROOT, ended

VERBS = """
import contextlib
import numpy as np
from dpfl_mpi.errors import UserError
from dpfl_mpi.mpi.start import all_or_none, open_world
world = open_world()
from dpfl_mpi.mpi.probe import send_around, choose_transfer
from dpfl_mpi.mpi.window import Transfer
from dpfl_mpi.settings import Job
with all_or_none(world):
    assert world.decide(lambda: 5) == 5 and world.agree(world.root) and len(world.hosts()) == 2
    def odd():
        if not world.root:
            raise UserError("odd")
    with contextlib.suppress(UserError):
        world.each_rank(odd)
    assert world.share(lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
    assert world.sum_int64(np.array([7])).tolist() == [14]
    assert world.spread(np.ones(1)).tolist() == [[1, 1, 1]]
    for everywhere in (False, True):
        world.gather(np.full(1, world.rank), np.arange(2), everywhere)
    for way in (Transfer(), Transfer(window="create"), Transfer("sendrecv")):
        send_around(world, way, 5)
    assert choose_transfer(Job(), world, 5)[0] == Transfer()
    assert world.all_stop()
    if world.root:
        print("right")
"""
QUIET = {"UCX_LOG_LEVEL": "error", "UCX_WARN_UNUSED_ENV_VARS": "n"}
ALWAYS = 10**6
# what of MPI can fail before Abort, after which a process ends in any case
CALL = "Allgather Allgatherv Allocate Allreduce Barrier Bcast Commit Create Create_contiguous Dup"
CALL += " Fence Free Gatherv Get_processor_name Ibarrier Irecv Isend Put Split_type Test Waitall"
CALL += " Init_thread"
CALL = re.compile(rf"\.({CALL.replace(' ', '|')}|tomemory)\(")


def over(fault, *words, **more):
    """Return the process of two ranks of a program over an MPI with this fault."""
    command = "mpirun", "-n", 2, sys.executable, "-m", "faults", *words
    return ended(*command, FAULT=fault, **QUIET, **more)


@pytest.fixture(scope="module")
def verbs(tmp_path_factory):
    """The program that calls MPI everywhere, and these places by call."""
    folder = tmp_path_factory.mktemp("faults")
    (program := folder / "verbs.py").write_text(VERBS)
    done = over("", program, SITES=str(folder / "sites"))
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    places = {*(folder / "sites").read_text().split()}
    of_call = itertools.groupby(sorted(places, key=call_of), call_of)
    return program, {call: sorted(at, key=line_of) for call, at in of_call}


def call_of(place):
    return place.split(":")[2]


def line_of(place):
    return int(place.split(":")[1])


def sentences(done):
    return [line for line in done.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.timeout(600)
def test_an_error_of_any_call_is_a_sentence_and_75(verbs):
    program, places = verbs
    found = {at for of_call in places.values() for at in of_call}
    assert found == {
        f"{path.name}:{number}:{call}"
        for path in (ROOT / "dpfl_mpi").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for call in CALL.findall(line)
    }
    for place in sorted(found - {*places["Init_thread"]}):
        done = over(f"1 error {place} 1", program)
        if call_of(place) in ("Ibarrier", "Test"):
            assert done.returncode == 1 and "assert world.all_stop()" in done.stderr
            continue
        (why,) = sentences(done)
        assert done.returncode == 75 and "failed on rank 1 of 2 (" in why, (place, done.stderr)
        assert why.endswith("; the same command, without --fresh, goes on from the last checkpoint")


def test_what_does_not_arrive_as_it_was_sent_is_sent_again(verbs):
    program, places = verbs
    for call, kinds in (("Put", ("drop", "late", "older", "flip")), ("Isend", ("flip",))):
        for place, kind in itertools.product(places[call], kinds):
            done = over(f"1 {kind} {place} 1", program)
            assert (done.returncode, done.stdout) == (0, "right\n"), (place, kind, done.stderr)


LOST = "did not arrive as it was sent, twice, by"
NOT_STARTED = "error: rank 1: MPI did not start: "
RUNS = {  # what fails how often, flags, and the sentence of a run that ends
    "windows": ("flip", "Put", ["--exchange", "rma"], LOST),
    "nothing is put": ("drop", "Put", ["--exchange", "rma", "--window", "create"], LOST),
    "messages": ("flip", "Isend", ["--exchange", "sendrecv"], LOST),
    "no start": ("error", "Init_thread", [], NOT_STARTED),
    "no end": ("hang", "Fence", ["--exchange", "rma", "--watchdog", "6"], "the run hung"),
    "no message": ("drop", "Isend", ["--exchange", "sendrecv", "--watchdog", "6"], "the run hung"),
    "a trial": ("flip", "Put", [], ""),
    "a trial without end": ("hang", "Fence", [], ""),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_right_numbers_or_ends_with_a_sentence(name, verbs, tmp_path, undisturbed):
    kind, call, flags, sentence = RUNS[name]
    out = tmp_path / "run.h5"
    words = starts.command(out, checkpoint_every=1)[2:]
    done = over(f"1 {kind} {verbs[1][call][0]} {ALWAYS}", *words, *flags)
    if not sentence:
        assert done.returncode == 0 and starts.same(out, undisturbed), done.stderr
        assert "exchange: sendrecv (MPI_Isend, MPI_Irecv), as rma (a window of" in done.stdout
        return
    code = 3 if call == "Init_thread" else 75
    assert done.returncode == code and sentence in done.stderr, done.stderr
    if sentence == LOST:
        (why,) = sentences(done)
        assert why.startswith("error: round 0: a model from rank 1 (")
        assert done.stderr.count(" to rank 0 (") == 1
