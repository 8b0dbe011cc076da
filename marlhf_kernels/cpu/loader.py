"""Finds and loads the native library, or tells why there is none."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / ("libmarlhf_cpu" + (".dylib" if sys.platform == "darwin" else ".so"))
FAILURE = FOLDER / "build_failure.txt"
"""Written by the build where there is no compiler, or it failed: the reason in one line."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        OSError: it is not there or does not load.
    """
    return ctypes.CDLL(str(LIBRARY))


@functools.cache
def missing() -> str | None:
    """Why the native library cannot be used, or None."""
    if not LIBRARY.exists():
        if build_failed():
            return f"it was not built: {FAILURE.read_text(encoding='utf-8').strip()}"
        return "it was not built; install the package with pip where a C++17 compiler is"
    try:
        library()
    except OSError as error:
        return f"{LIBRARY.name} does not load: {error}"
    return None


def build_failed() -> bool:
    """Whether a build was tried and failed: whoever installed the package should hear of it."""
    return FAILURE.exists()
