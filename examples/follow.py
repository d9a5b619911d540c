"""Follow a running result: `python examples/follow.py RESULT` prints a line per new round."""

import contextlib
import sys
import time

from dpfl_mpi.errors import UserError
from dpfl_mpi.results import Result


def follow(path, pause=0.5):
    """Yield (round, mean test accuracy, state) once per round; wait for a file that is missing.

    The last round is yielded when the run has ended, with the state of the end. A run is taken as
    stopped at the second look that says so: the first may meet a file whose writer has not begun,
    or one that was finished since it was opened.
    """
    seen, stops, state, scores = -1, 0, "running", []
    while state != "finished" and stops < 2:
        with contextlib.suppress(UserError), Result(path) as result:
            state = result.state
            stops = stops + 1 if state.startswith("stopped") else 0
            scores = result.mean("round/test_acc") if result.last_round >= 0 else []
            if state != "finished" and stops < 2:
                scores = scores[: result.run.rounds]
        for t in range(seen + 1, len(scores)):
            yield t, float(scores[t]), state
        seen = len(scores) - 1
        time.sleep(0 if state == "finished" else pause)


if __name__ == "__main__":
    for t, accuracy, state in follow(sys.argv[1]):
        print(f"round {t}  test {100 * accuracy:.2f} %  {state}", flush=True)
