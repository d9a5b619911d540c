"""What the tests of survival compare with."""

from pathlib import Path

import pytest
import starts


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, computed without a stop."""
    return starts.here(tmp_path_factory.mktemp("undisturbed") / "run.h5")
