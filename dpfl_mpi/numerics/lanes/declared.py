"""What the sources in C declare, as ctypes has it: the structures of net.h, and the functions that a caller calls."""

import ctypes
import re
from collections.abc import Iterator
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent
NUMBERS: dict[str, Any] = {"float": c_float, "double": c_double, "int32_t": c_int32, "int64_t": c_int64, "void": None}


def source(name: str) -> str:
    """Return a file without its comments."""
    return re.sub(r"/\*.*?\*/", "", (SOURCES / name).read_text(), flags=re.DOTALL)


def named(declaration: str) -> Iterator[tuple[str, Any]]:
    """Yield name and type of what one declaration declares, such as `const float *x, y, z[4]`: a pointer knows only its structure."""
    kind, names = re.fullmatch(r"\s*(?:const )?(\w+) (.*?)\s*", declaration, re.DOTALL).groups()  # type: ignore[union-attr]
    for text in names.split(","):
        name, count = re.search(r"(\w+)(?:\[(\d+)\])?$", text.strip()).groups()  # type: ignore[union-attr]
        if "*" in text:
            yield name, POINTER(STRUCTURES[kind]) if kind in STRUCTURES else c_void_p
        else:
            yield name, NUMBERS[kind] * int(count) if count else NUMBERS[kind]


STRUCTURES: dict[str, Any] = {}
for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", source("net.h"), re.DOTALL):
    fields = [field for line in body.split(";")[:-1] for field in named(line)]
    STRUCTURES[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
# the kinds of layers, by the numbers that a `Layer` has
KINDS = re.findall(r"\{(\w+), \w+\}", source("lanes.c"))
# result and arguments of each function of a form, by its name
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    name: (NUMBERS[kind], [of for part in arguments.split(",") for _, of in named(part)])
    for file in ("lanes.c", "step.h", "search.h")
    for kind, name, arguments in re.findall(r"PUBLIC (\w+) NAME\((\w+)\)\((.*?)\) \{", source(file), re.DOTALL)
}
