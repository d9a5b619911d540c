"""Builds dpfl_mpi/numerics/lanes/_lanes.so, the CPU kernels, with any C compiler that is there.

Without one PyTorch computes instead. It is a plain shared library without Python headers, so one
wheel serves all versions of Python.
"""

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
FORMS: dict[int, list[str]] = {128: []}  # by the bits of a vector
if platform.machine().lower() in ("x86_64", "amd64"):
    FORMS[256] = ["-mavx2", "-mfma"]
    FORMS[512] = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", *FORMS[256]]


def compilers() -> list[list[str]]:
    """Return the commands that may compile C here, the best first."""
    named = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else []
    found = [[path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
    return [*named, *found, [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"]]


def digest_of(source: Path) -> str:
    """Return the hash of lanes.c and the files that it includes."""
    files = [*source.parent.glob("*.h"), *source.parent.glob("*.c")]
    files.sort(key=lambda file: file.name)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def compile_lanes(
    compiler: list[str], source: Path, target: Path, extra: list[str] | None = None
) -> None:
    """Compile every form of lanes.c and link them into `target`.

    Raises:
        subprocess.CalledProcessError, OSError: the compiler failed, or is not there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [*compiler, *FLAGS, *(extra or [])]
    # beside the target, which it replaces at once: a run that has the old library open keeps it
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # zig has a cache, by default in the home directory
        env = os.environ | {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}

        def run(*arguments: str) -> None:
            subprocess.run([*command, *arguments], check=True, env=env, capture_output=True)

        defined = {0: [f'-DSOURCE="{digest_of(source)}"']}
        defined |= {form: [f"-DFORM={form}", *flags] for form, flags in FORMS.items()}
        objects = {f"{folder}/{form}.o": flags for form, flags in defined.items()}
        for out, flags in objects.items():
            run(*flags, "-c", str(source), "-o", out)
        run("-shared", *objects, "-o", f"{folder}/_lanes.so", "-lm")
        os.replace(f"{folder}/_lanes.so", target)


class BuildLanes(build_ext):
    """Compiles with the first compiler that works; goes on without the library where none does."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path, without a version of Python."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        failures = []
        source, target = Path(ext.sources[0]), Path(self.get_ext_fullpath(ext.name))
        for compiler in compilers():
            try:
                compile_lanes(compiler, source, target)
            except (OSError, subprocess.CalledProcessError) as error:
                failures.append(f"{shlex.join(compiler)}: {first_line(error)}")
            else:
                print(f"dpfl_mpi: the CPU kernels were compiled by {shlex.join(compiler)}")
                return
        why = f"no C compiler works here, so PyTorch will compute ({'; '.join(failures)})"
        print(f"dpfl_mpi: {why}", file=sys.stderr)


def first_line(error: Exception) -> str:
    """Return the first line of a compiler's output that says "error", or its last one."""
    output = getattr(error, "stderr", None) or str(error).encode()
    lines = output.decode(errors="replace").strip().splitlines() or [str(error)]
    return next((line for line in lines if "error" in line), lines[-1])


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of the wheel's name."""
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    lanes = "dpfl_mpi/numerics/lanes/lanes.c"
    setup(
        ext_modules=[Extension("dpfl_mpi.numerics.lanes._lanes", [lanes], optional=True)],
        cmdclass={"build_ext": BuildLanes, "bdist_wheel": PlatformWheel},
    )
