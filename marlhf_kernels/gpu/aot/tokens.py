"""Token-aligned tensors of one layout for the cases of the ops on macro actions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf_kernels.gpu._rows import MAX_REGISTERS, MAX_REGISTERS_UNALIGNED
from marlhf_kernels.gpu.aot.case import meta


@dataclass(frozen=True)
class Tokens:
    """B sequences of T tokens, or about as many."""

    name: str
    rows: int
    length: int
    packed: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows * self.length,) if self.packed else (self.rows, self.length)

    def floats(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return meta(*self.shape, dtype=dtype)

    def ids(self, dtype: torch.dtype = torch.int32) -> Tensor:
        return meta(*self.shape, dtype=dtype)

    def mask(self) -> Tensor:
        return meta(*self.shape, dtype=torch.bool)

    def per_row(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return meta(self.rows, dtype=dtype)

    @property
    def where(self) -> tuple[Tensor | None, int | None]:
        """`cu_seqlens` and `max_seqlen`."""
        return (meta(self.rows + 1, dtype=torch.int32), self.length) if self.packed else (None, None)

    @property
    def vector(self) -> bool:
        """Are rows aligned, so that loads can be wide?"""
        return not self.packed and self.length % 16 == 0

    @property
    def registers(self) -> int:
        return MAX_REGISTERS if self.vector else MAX_REGISTERS_UNALIGNED


ROW = Tokens("rows", 256, 1024)
# One for each tile that is shipped, and each with what denies wide loads.
LAYOUTS = (
    ROW,
    Tokens("short rows", 4096, 64),
    Tokens("middle rows", 256, 512),
    Tokens("rows of no alignment", 3, 1001),
    Tokens("packed", 256, 1024, packed=True),
    Tokens("packed short", 4096, 64, packed=True),
    Tokens("packed middle", 256, 512, packed=True),
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)
