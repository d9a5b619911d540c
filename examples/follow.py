"""Follow a running result: `python examples/follow.py RESULT` prints a line per new round."""

import contextlib
import sys
import time

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result


def follow(path, pause=0.5):
    """Yield (round, mean test accuracy, state) once per round; wait for a file that is missing.

    The last round is yielded when the run has ended, with the state of the end.
    """
    seen, state, scores = -1, "running", []
    while state.startswith("running"):
        with contextlib.suppress(UserError), Result(path) as result:
            state = result.state
            scores = result.mean("round/test_acc") if result.last_round >= 0 else []
            if state.startswith("running"):
                scores = scores[: result.run.rounds]
        for t in range(seen + 1, len(scores)):
            yield t, float(scores[t]), state
        seen = len(scores) - 1
        time.sleep(pause if state.startswith("running") else 0)


if __name__ == "__main__":
    for t, accuracy, state in follow(sys.argv[1]):
        print(f"round {t}  test {100 * accuracy:.2f} %  {state}", flush=True)
