"""Builds dpfl_mpi/numerics/lanes/_lanes.so, the CPU kernels, with whatever C compiler there is; without one PyTorch computes instead.

It is a plain shared library: no Python headers, and one wheel for all versions of Python.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-g0", "-std=gnu11", "-fPIC", "-fvisibility=hidden"]
FLAGS += ["-ffp-contract=off", "-fno-fast-math"]  # the same bits from every compiler
FORMS: dict[int, list[str]] = {128: []}
if platform.machine().lower() in ("x86_64", "amd64"):
    FORMS |= {
        256: ["-mavx2", "-mfma"],
        512: ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma"],
    }


def compilers() -> list[list[str]]:
    """Return the commands that may compile C here, the best first."""
    named = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else []
    found = [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    return [*named, *found, [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"]]


def digest_of(source: Path) -> str:
    """Return what tells lanes.c and the files that it includes from other versions of them."""
    files = sorted([*source.parent.glob("*.h"), *source.parent.glob("*.c")], key=lambda file: file.name)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def compile_lanes(compiler: list[str], source: Path, target: Path, extra: list[str] | None = None) -> None:
    """Compile every form of lanes.c and link them into `target`.

    Raises:
        subprocess.CalledProcessError, OSError: the compiler failed, or is not there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # beside the target, whose place the library then takes at once: a run that has the old one open keeps it
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # zig keeps a cache, by default in the home directory
        env = os.environ | {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        command = [*compiler, *FLAGS, *(extra or [])]
        jobs = [(0, [f'-DSOURCE="{digest_of(source)}"'])] + [
            (form, [f"-DFORM={form}", *flags]) for form, flags in FORMS.items()
        ]
        objects = [f"{folder}/{form}.o" for form, _ in jobs]
        for (_, flags), out in zip(jobs, objects, strict=True):
            subprocess.run([*command, *flags, "-c", str(source), "-o", out], check=True, env=env, capture_output=True)
        library = f"{folder}/_lanes.so"
        subprocess.run([*command, "-shared", *objects, "-o", library, "-lm"], check=True, env=env, capture_output=True)
        os.replace(library, target)


class BuildLanes(build_ext):
    """Compiles with the first compiler that works; goes on without the library where none does."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path: its name says nothing of a version of Python."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        """Build the library."""
        failures = []
        for compiler in compilers():
            try:
                compile_lanes(compiler, Path(ext.sources[0]), Path(self.get_ext_fullpath(ext.name)))
                print(f"dpfl_mpi: the CPU kernels were compiled by {shlex.join(compiler)}")
                return
            except (OSError, subprocess.CalledProcessError) as error:
                said = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace").strip()
                lines = said.splitlines() or [str(error)]
                first = next((line for line in lines if "error" in line), lines[-1])  # the last one shows where
                failures.append(f"{shlex.join(compiler)}: {first}")
        print(f"dpfl_mpi: no C compiler works here, so PyTorch will compute ({'; '.join(failures)})", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the wheel's name."""
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("dpfl_mpi.numerics.lanes._lanes", ["dpfl_mpi/numerics/lanes/lanes.c"], optional=True)],
        cmdclass={"build_ext": BuildLanes, "bdist_wheel": PlatformWheel},
    )
