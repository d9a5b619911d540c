"""The structures and functions that the sources in C declare, for ctypes."""

import ctypes
import re
from collections.abc import Iterator
from ctypes import POINTER, c_void_p
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent
NUMBERS: dict[str, Any] = {"float": ctypes.c_float, "double": ctypes.c_double, "void": None}
NUMBERS |= {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}
STRUCTURES: dict[str, Any] = {}


def source(name: str) -> str:
    """Return a file without its comments."""
    return re.sub(r"/\*.*?\*/", "", (SOURCES / name).read_text(), flags=re.DOTALL)


def parsed(declaration: str) -> Iterator[tuple[str, Any]]:
    """Yield each name and type of a declaration such as `const float *x, y, z[4]`."""
    words = re.fullmatch(r"\s*(?:const )?(\w+) (.*?)\s*", declaration, re.DOTALL)
    assert words, declaration
    kind, names = words.groups()
    for text in names.split(","):
        name, count = re.findall(r"(\w+)(?:\[(\d+)\])?$", text.strip())[0]
        if "*" in text:
            yield name, POINTER(STRUCTURES[kind]) if kind in STRUCTURES else c_void_p
        else:
            of = STRUCTURES.get(kind) or NUMBERS[kind]
            yield name, of * int(count) if count else of


for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", source("net.h"), re.DOTALL):
    fields = [field for line in body.split(";")[:-1] for field in parsed(line)]
    STRUCTURES[name] = type(name, (ctypes.Structure,), {"_fields_": fields})

# the kinds of layers, by the numbers that a `Layer` has
KINDS = re.findall(r"kind\((\w+)\)", source("lanes.c").split("#define NUMBER")[0])


def functions(declaration: str, *files: str) -> dict[str, tuple[Any, list[Any]]]:
    """Return result and arguments of each function that is so declared, by its name."""
    pattern = re.compile(rf"PUBLIC (\w+) {declaration}\((.*?)\) \{{", re.DOTALL)
    return {
        name: (NUMBERS[kind], [of for part in arguments.split(",") for _, of in parsed(part)])
        for file in files
        for kind, name, arguments in pattern.findall(source(file))
        if "##" not in name and name != "verb"
    }


DRAWS = functions(r"(\w+)", "draws.h")  # in no form
FUNCTIONS = functions(r"NAME\((\w+)\)", "calls.h", "averages.h")  # in each form
# what computes a task for each client: (net, tasks, count, teams, members, memory)
VERBS = re.findall(r"^VERB\((\w+), ", source("lanes.c"), re.MULTILINE)
TAKEN = [POINTER(STRUCTURES["Net"]), c_void_p, *3 * [ctypes.c_int64], c_void_p]
FUNCTIONS |= {verb: (None, TAKEN) for verb in VERBS}
