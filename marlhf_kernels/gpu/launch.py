"""Starting kernels, and what they are started with.

A kernel compiles once for each combination of its arguments' types and its constexprs. Lengths, strides and
coefficients are never constexprs, and integers are marked `do_not_specialize`, so that their values do not matter.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.backends import BackendUnavailableError
from marlhf_kernels.gpu import INTERPRET, interpreted

VECTOR = 16
"""Entries: where this divides base address, strides and lengths, loads of every dtype are as wide as the device has."""

Starter = Callable[..., None]
"""Called as `starter(kernel, grid, args, num_warps, max_registers, constexprs)`."""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int,
    max_registers: int | None = None,
    **constexprs: Any,
) -> None:
    """Start `kernel` on the device of its first tensor; nothing where the grid is empty.

    `max_registers` is what a thread may take on CUDA. Left to itself, its assembler spills a few to let more warps
    reside, which a kernel that waits at barriers gains nothing from.
    """
    if 0 not in grid:
        _starter.get()(kernel, grid, args, num_warps, max_registers, constexprs)


@contextlib.contextmanager
def intercepted(starter: Starter) -> Iterator[None]:
    """Hand the launches of the current thread to `starter`, which may `start` them, count them or compile them."""
    token = _starter.set(starter)
    try:
        yield
    finally:
        _starter.reset(token)


def start(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    num_warps: int,
    max_registers: int | None,
    constexprs: dict[str, Any],
) -> None:
    """What `launch` does unless intercepted."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    with _current(device):
        kernel[grid](*args, **options_of(num_warps, max_registers, torch.version.hip is not None), **constexprs)


def options_of(num_warps: int, max_registers: int | None, amd: bool) -> dict[str, int]:
    """The options of a compilation; AMD's compiler knows no limit of registers by that name."""
    if max_registers is None or amd:
        return {"num_warps": num_warps}
    return {"num_warps": num_warps, "maxnreg": max_registers}


_starter: contextvars.ContextVar[Starter] = contextvars.ContextVar("marlhf_starter", default=start)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type == "cuda":
        if device.index == torch.cuda.current_device():
            return contextlib.nullcontext()
        return torch.cuda.device(device)
    if not interpreted():
        raise BackendUnavailableError(
            f"the 'gpu' backend was asked for, but got tensors on {device}; move them to a GPU, or set {INTERPRET}=1 "
            "at the start to run the kernels on a CPU, slowly"
        )
    return contextlib.nullcontext()


def coefficient(value: Tensor, data: Tensor) -> float | Tensor:
    """A 0-d coefficient as the argument that `number` reads in a kernel.

    A number where the host has it, else the tensor: it is on the device of `data`, and asking for it would wait.
    """
    if value.device.type == "cpu" and (data.device.type != "cpu" or value.dtype is torch.float64):
        return float(value)
    return value.to(torch.float32)


def optional_coefficient(value: Tensor | None, data: Tensor) -> float | Tensor | None:
    """`coefficient`, or None where the option is off."""
    return None if value is None else coefficient(value, data)


@triton.jit
def number(x):
    """float32 of an argument made by `coefficient`."""
    x = tl.to_tensor(x)  # the interpreter hands a number on as it is
    if x.dtype.is_ptr():
        return tl.load(x).to(tl.float32)
    else:
        return x


def alignment(x: Tensor, *lengths: int) -> int:
    """VECTOR where it divides the lengths and strides and `x` starts at a multiple of 16 bytes, else 1.

    The kernel gets the quotients and this number as a constexpr, and multiplies: like this the compiler knows.
    """
    if x.data_ptr() % 16 or any(length % VECTOR for length in lengths):
        return 1
    return VECTOR


def row_major(x: Tensor) -> Tensor:
    """`x`, or a copy of it if its last dimension has gaps."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors or compute units; the interpreter has one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
