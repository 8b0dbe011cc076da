"""Finds and loads the native library, or tells why there is none, and calls its functions."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / ("libmarlhf_cpu" + (".dylib" if sys.platform == "darwin" else ".so"))
_OTHER_VERSION = f"{LIBRARY.name} is from another version of the package; install it again"
FAILURE = FOLDER / "build_failure.txt"
"""Written by the build where there is no compiler, or it failed: the reason in one line."""

VARIABLE = "MARLHF_CPU_ISA"
"""Names the instruction set to use instead of the best one that the processor has."""
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")
"""In the order of the bits that the library reports."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int64: 4}
"""Element types as `api.h` numbers them."""

_ARGUMENTS = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}

_forked = False
_names: list[str] = []


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        OSError: it is not there or does not load.
    """
    return ctypes.CDLL(str(LIBRARY))


@functools.cache
def instruction_set() -> str:
    """The instruction set whose functions are called: the best one, or the one that `MARLHF_CPU_ISA` names.

    Raises:
        ValueError: the variable names an unknown set, or one that cannot be used here.
    """
    bits = library().marlhf_instruction_sets()
    usable = [name for bit, name in enumerate(INSTRUCTION_SETS) if bits >> bit & 1]
    asked = os.environ.get(VARIABLE) or usable[-1]
    if asked not in INSTRUCTION_SETS:
        raise ValueError(f"{VARIABLE}: unknown instruction set {asked!r}; known: {', '.join(INSTRUCTION_SETS)}")
    if asked not in usable:
        raise ValueError(f"{VARIABLE}: this processor has no {asked}; it has: {', '.join(usable)}")
    return asked


@functools.cache
def missing() -> str | None:
    """Why the native library cannot be used, or None."""
    if not LIBRARY.exists():
        if FAILURE.exists():
            return f"it was not built: {FAILURE.read_text(encoding='utf-8').strip()}"
        return "it was not built; install the package with pip where a C++17 compiler is"
    try:
        prefix = f"marlhf_{instruction_set()}"
        if not all(hasattr(library(), f"{prefix}_{name}") for name in _names):
            return _OTHER_VERSION
    except AttributeError:
        return _OTHER_VERSION
    except (OSError, ValueError) as error:
        return str(error) if isinstance(error, ValueError) else f"{LIBRARY.name} does not load: {error}"
    return None


def expected() -> bool:
    """Whether a library was built, or tried to be: whoever installed the package should hear that it cannot run."""
    return LIBRARY.exists() or FAILURE.exists()


class Function:
    """A native function in the instruction set in use.

    Args:
        name: as `MARLHF_FUNCTION` names it.
        arguments: a letter for each: `p` pointer (an address, or None), `i` int, `l` int64, `f` float, `d` double.
            Nothing else is checked: the tensors behind the addresses must be alive, and laid out as the function reads.
    """

    def __init__(self, name: str, arguments: str) -> None:
        self._name = name
        _names.append(name)
        self._arguments = arguments

    @functools.cached_property
    def call(self) -> Callable[..., int]:
        """Calls it with the interpreter's lock released, and returns its status. Looked up when first used."""
        function: Any = getattr(library(), f"marlhf_{instruction_set()}_{self._name}")
        function.argtypes = [_ARGUMENTS[letter] for letter in self._arguments]
        function.restype = ctypes.c_int
        return function


def address(x: Tensor | None) -> int | None:
    """Where the first element of an optional tensor lies."""
    return None if x is None else x.data_ptr()


def num_threads() -> int:
    """How many threads a native loop may use: torch's number, but 1 in a forked process.

    The OpenMP runtime's threads do not survive a fork, and a loop that waits for them never ends.
    """
    return 1 if _forked else torch.get_num_threads()


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)
