"""The result of a Run, where the files that the Run names may not be at hand."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dpfl_mpi.errors import UserError
from dpfl_mpi.plugins import find, short
from dpfl_mpi.results import Result
from dpfl_mpi.settings import NUMERICS, Run
from dpfl_mpi.settings.fields import as_dict
from dpfl_mpi.settings.files import no_data
from dpfl_mpi.settings.values import is_file


def found(run: Run, folder: str | Path) -> Path | None:
    """Return the file in a folder that holds the result of a Run, None where there is none.

    A laptop that has only results does not have the files that a Run names: there the one result counts that is of files of these names.

    Raises:
        UserError: there can be no such result, or there are several.
    """
    reason = None
    try:
        if (path := run.path(folder)).is_file():
            return path
    except UserError as error:
        reason = error
    paths = []
    for path in sorted(Path(folder).glob(f"{short(run.dataset)}-*-{short(run.method)}-*-s{run.seed}-*.h5")):
        with contextlib.suppress(UserError), Result(path) as result:
            paths += [path] if answers(result, run) else []
    if len(paths) > 1:
        raise UserError(f"{' and '.join(map(str, paths))} are of different files of one name: name the one to draw")
    if reason and not paths:
        raise reason
    return paths[0] if paths else None


def check_data(run: Run) -> None:
    """Raise `UserError` where the data file of a Run is not there: nothing here computes the Run."""
    run = run.resolve()
    if run.data and not is_file(run.data):
        raise no_data(run.dataset, run.data)


def answers(result: Result, run: Run) -> bool:
    """Return whether a result is that of a Run of which some files are not here: these count by their names.

    Raises:
        UserError: the Run cannot be resolved.
    """
    mine, asked = as_dict(result.run), as_dict(run)
    asked["data"] = asked["data"] or find("dataset", run.dataset).DATA
    gone = {
        name: held for name, held in result.run.contents.items() if not is_file(str(asked[name]).removeprefix("file:"))
    }
    if not gone or any(Path(str(asked[name])).name != Path(str(mine[name])).name for name in gone):
        return False
    if "partition" in gone:
        asked["clients"] = asked["clients"] or mine["clients"]
    today = Run(**asked).resolve(gone)
    return today.key() == result.key and result.fact("numerics") == str(NUMERICS)
