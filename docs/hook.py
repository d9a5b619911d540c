"""Gives MkDocs the pages that are not under docs/.

These are the README and the like, and the API, a page per room, from docstrings. A link that leaves
docs/ must name a file of the repository. It becomes a link to that file's page, or plain text where
the file has none. A picture that is not there becomes its description.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

REPOSITORY = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "reproduction/index.md": "reproduction/README.md",
    "reproduction/table1.md": "reproduction/table1.md",
    "reproduction/tables.md": "reproduction/tables.md",
    "reproduction/log.md": "reproduction/log.md",
    "reproduction/question.md": "reproduction/question.md",
    "contributing.md": "CONTRIBUTING.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def rooms() -> dict[str, list[str]]:
    """Return the modules of every room by the address of its page.

    Modules above all rooms are on `api/dpfl_mpi.md`.
    """
    pages: dict[str, list[str]] = {}
    for file in sorted((REPOSITORY / "dpfl_mpi").rglob("*.py")):
        folder = file.parent.relative_to(REPOSITORY)
        module = ".".join((folder if file.name == "__init__.py" else folder / file.stem).parts)
        pages.setdefault(f"api/{'.'.join(folder.parts)}.md", []).append(module)
    return pages


def on_config(config: Any) -> Any:
    """Add the pages of the rooms to the group Inside."""
    *_, inside = config["nav"]
    inside["Inside"].append({"Rooms": list(rooms())})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add pages that lie elsewhere, and those that are made."""
    for address, source in PAGES.items():
        files.append(File.generated(config, address, content=(REPOSITORY / source).read_text()))
    for picture in (REPOSITORY / "reproduction").rglob("*.png"):
        address = picture.relative_to(REPOSITORY).as_posix()
        files.append(File.generated(config, address, content=picture.read_bytes()))
    for address, modules in rooms().items():
        text = f"# {Path(address).stem}\n\n" + "\n\n".join(f"::: {module}" for module in modules)
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point every link at the page of the file that it names.

    A link is relative to the file that it stands in.
    """
    here = page.file.src_uri
    source = Path(PAGES.get(here, f"docs/{here}"))
    homes = {source: address for address, source in PAGES.items()}
    for uri in (file.src_uri for file in files if file.src_uri not in PAGES):
        homes[uri if uri.startswith("reproduction/") else f"docs/{uri}"] = uri

    def pointed(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        path = Path(os.path.normpath(source.parent / target))
        if not picture and not (REPOSITORY / path).exists():
            raise PluginError(f"{source} links to {target}, which is not there")
        home = homes.get(path.as_posix())
        if path.parts[0] == "dpfl_mpi":
            home = f"api/{'.'.join((path.parent if path.suffix else path).parts)}.md"
        if home is None:
            return text
        return f"{picture}[{text}]({os.path.relpath(home, Path(here).parent)}{anchor or ''})"

    return LINK.sub(pointed, markdown)
