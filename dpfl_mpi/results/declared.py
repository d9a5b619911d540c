"""What a result tells of its method: no reader of results imports or executes a method."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Declared:
    """What a method's file declares, as far as readers ask: see the fields of these names of `methods.Method`."""

    title: str = ""
    colour: str = ""
    line: str = "-"
    marker: str = "o"
    citation: str = ""
    topology: str = "graph"
    searches: bool = True
    finetunes: bool = True
    models: int = 1
    unread: list[str] = field(default_factory=list)


def declared(run: Any) -> Declared:
    """Return what the method of a resolved Run declares. That of a result is checked when the file is opened.

    Raises:
        ValueError: it is what no method can declare.
    """
    told = run.declared["method"]
    facts = {name: told[name] for name in vars(Declared())}
    typed = all(type(facts[name]) is type(value) for name, value in vars(Declared()).items())
    if not (typed and 1 <= facts["models"] <= 1000 and all(isinstance(name, str) for name in facts["unread"])):
        raise ValueError(f"the method declares {facts}")
    return Declared(**facts)
