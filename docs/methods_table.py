"""Write the tables of docs/methods.md from the methods' files: `python docs/methods_table.py`.

The first line of a method's docstring is its title, what it is, and the source in brackets. Lines
that begin with `Shared:`, `Personal:` and `Scored:` follow. Each departure from the paper is a
paragraph that begins with `Paper:`, in the docstring or in a comment.
"""

import ast
import dataclasses
import re
from pathlib import Path

from dpfl_mpi import methods
from dpfl_mpi.plugins import find, shipped

PAGE = Path(__file__).with_name("methods.md")
FOLDER = Path(methods.__file__).parent


def docstring(name: str) -> str:
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    assert text is not None, f"{name}.py has no docstring"
    return text


def line(name: str) -> str:
    """Return a method's line of the first table."""
    text = docstring(name)
    title, _, what = text.splitlines()[0].partition(": ")
    models = [
        re.search(rf"^{key}: (.*)$", text, re.M)[1] for key in ("Shared", "Personal", "Scored")
    ]  # type: ignore[index]
    options = dataclasses.fields(find("method", name).options)
    defaults = ", ".join(f"`{option.name}` {option.default}" for option in options)
    cells = [
        f"`{name}`",
        f"{title}: {what.rstrip('.')}",
        *(m.rstrip(".") for m in models),
        defaults or "-",
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def departures(name: str) -> list[str]:
    """Return the lines of the second table: what a method's file says of its paper."""
    found = re.findall(r"^Paper: (.*(?:\n    .*)*)", docstring(name), re.M)
    cells = [re.sub(r"\s+", " ", text).replace("|", r"\|") for text in found]
    return [f"| `{name}` | {cell} |" for cell in cells]


def tables() -> dict[str, str]:
    """Return both tables, by the mark that they stand behind."""
    names = shipped("method")
    columns = ("`--method`", "what it is", "shared", "personal", "scored", "options")
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    said = ["| `--method` | the paper |\n|---|---|"]
    for name in names:
        said += departures(name)
    return {"methods": "\n".join([head, *map(line, names)]), "departures": "\n".join(said)}


def page() -> str:
    """Return the page with its tables as the files have them."""
    text = PAGE.read_text()
    for mark, table in tables().items():
        pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
        text = pattern.sub(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
