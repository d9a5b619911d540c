"""The file of `--config`, looked at before the parser of the command line reads it.

YAML can say in a few lines what takes hours and all memory to build (anchors of anchors), or what is nested deeper than Python's stack. No
settings need either.
"""

from __future__ import annotations

from pathlib import Path

from dpfl_mpi.errors import UserError
from dpfl_mpi.storage.foreign import SMALL, read_text

DEEPEST = 8  # of nested lists and dictionaries; settings have two levels


def check_yaml(path: Path) -> None:
    """Raise `UserError` where a file is no YAML, has anchors, or is nested deeply. Its time grows with the length of the file alone."""
    import yaml

    try:
        text, depth = read_text(path, SMALL), 0
    except UserError as error:
        raise UserError(f"--config is {path}: {error}") from None
    opens = (
        yaml.BlockMappingStartToken,
        yaml.BlockSequenceStartToken,
        yaml.FlowMappingStartToken,
        yaml.FlowSequenceStartToken,
    )
    closes = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
    try:
        for token in yaml.scan(text, yaml.SafeLoader):
            if isinstance(token, yaml.AliasToken | yaml.AnchorToken):
                raise UserError(f"--config is {path}, which has anchors (& or *); write the settings out")
            depth += isinstance(token, opens) - isinstance(token, closes)
            if depth > DEEPEST:
                raise UserError(
                    f"--config is {path}, which is nested more than {DEEPEST} levels deep; settings have two"
                )
    except yaml.YAMLError as error:
        raise UserError(f"--config is {path}, which is not YAML: {' '.join(str(error).split())[:200]}") from None
