"""setuptools, which also asks for a C compiler from PyPI (`ziglang`, 90 MB) where the machine has none."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # every other hook


def _compiler() -> list[str]:
    """Return what to install to compile C: nothing where there is a compiler, or where ziglang has no wheel."""
    here = bool(os.environ.get("CC")) or any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    offered = sys.platform in ("linux", "darwin") and platform.machine() in ("x86_64", "aarch64", "arm64")
    return ["ziglang>=0.13"] if offered and not here else []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what a wheel needs beside pyproject.toml's requirements."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _compiler()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return what an editable installation needs beside pyproject.toml's requirements."""
    return build_meta.get_requires_for_build_editable(config_settings) + _compiler()
