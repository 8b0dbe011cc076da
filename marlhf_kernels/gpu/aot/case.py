"""A call of an op as it is shipped, whose kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RESIDENT_WARPS_REGISTERS = 128
"""With so many a thread, 16 warps fit on a multiprocessor (65,536 registers) and on a compute unit of gfx942."""


@dataclass(frozen=True)
class Case:
    """`run` calls an op's launcher on meta tensors; the launches that it makes are what gets compiled."""

    op: str
    name: str
    run: Callable[[], object]
    quick: bool = False
    """One of the few that stand for the others where time is short."""
    vector: bool = True
    """Its widest load must be a whole vector of aligned memory."""
    registers: int = RESIDENT_WARPS_REGISTERS
    """A thread may use so many."""

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory, as aligned as a fresh one."""
    return torch.empty(shape, dtype=dtype, device="meta")


def hosted(value: float = 0.5) -> Tensor:
    """A coefficient that the host knows: what a number becomes."""
    return torch.full((), value, dtype=torch.float64, device="cpu")
