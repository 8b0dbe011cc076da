"""Walking over sequences of tokens, and segmented sums inside them, for all kernels of this package.

A program owns R whole sequences and walks over them in chunks of T tokens, so a chunk is a tile `[R, T]`.
Nothing is shared between programs. What a macro action has in common stands in a slot: macro action k of the
sequence that starts at flat index s has slot s + k, and k is at most the position of any of its tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.gpu import interpreted
from marlhf_kernels.gpu.launch import alignment, cdiv, row_major


class Tile(NamedTuple):
    """What a program works on at a time."""

    rows: int
    tokens: int
    warps: int


TILES = (Tile(1, 128, 1), Tile(1, 512, 4), Tile(1, 1024, 8))
"""By length, on every architecture: 4 tokens a thread. With 8, or with several rows, the kernels spill registers.

A short row is one warp's, which needs no barrier and no shared memory; many such programs fit on a multiprocessor.
"""
MAX_REGISTERS, MAX_REGISTERS_UNALIGNED = 128, 168
"""Of a thread: 16 warps fit on a multiprocessor, or 12 where each entry of an unaligned row has its own address."""
_MOST_SPLITS = 64


def tile_for(rows: int, longest: int) -> Tile:
    """The tile for `rows` sequences of at most about `longest` tokens."""
    if interpreted():  # where every program, every chunk and every step of a scan take their time
        longest = _power_of_two(longest)
        return Tile(min(64, _power_of_two(rows)), min(longest, max(16, longest // 8), 1024), 1)
    return next((tile for tile in TILES if longest <= tile.tokens), TILES[-1])


def _power_of_two(x: int) -> int:
    """The least one that is not below x."""
    return 1 << max(x - 1, 0).bit_length()


class Walk:
    """How a kernel walks over the sequences of tensors of one layout."""

    def __init__(
        self, cu_seqlens: Tensor | None, max_seqlen: int | None, *tensors: Tensor | None, tile: Tile | None = None
    ) -> None:
        """`tensors` are the token-aligned inputs in the order of the kernel's strides; the first is not None."""
        self.tensors = tuple(None if x is None else row_major(x) for x in tensors)
        first = self.tensors[0]
        assert first is not None
        self.shape = first.shape
        self.device = first.device
        strides = [0] * len(tensors)
        self.align = 1
        if cu_seqlens is None:
            self.cu_seqlens = None
            self.rows, self.length = self.shape
            longest, programmed = self.length, self.rows
            if self.rows > 1:
                strides = [0 if x is None else x.stride(0) for x in self.tensors]
            self.align = min(
                alignment(x, self.length, stride)
                for x, stride in zip(self.tensors, strides, strict=True)
                if x is not None
            )
        else:
            self.cu_seqlens = cu_seqlens.contiguous()
            self.rows, self.length = cu_seqlens.shape[0] - 1, self.shape[0]
            programmed = self.rows + 1  # what follows the last sequence is one more
            longest = cdiv(self.length, max(self.rows, 1)) if max_seqlen is None else min(max_seqlen, self.length)
        self.tile = tile or tile_for(programmed, longest)
        self.programs = cdiv(programmed, self.tile.rows) if self.length else 0
        self.splits = min(cdiv(max(longest, 1), self.tile.tokens), _MOST_SPLITS)
        """Programs that share a row where each of its chunks can be done alone."""
        self.sizes = (self.rows, self.length // self.align, *(stride // self.align for stride in strides))
        """Arguments of the kernel: rows, length and the row strides."""
        self.shapes: dict[str, Any] = {
            "R": self.tile.rows,
            "T": self.tile.tokens,
            "ALIGN": self.align,
            "num_warps": self.tile.warps,
            "max_registers": MAX_REGISTERS if self.align > 1 else MAX_REGISTERS_UNALIGNED,
        }

    def outputs(self, number: int) -> tuple[Tensor, ...]:
        """Token-aligned float32 tensors that hold nothing yet."""
        return tuple(torch.empty(self.shape, dtype=torch.float32, device=self.device) for _ in range(number))


@triton.jit
def rows_of_program(cu_seqlens, rows, length, R: tl.constexpr, ALIGN: tl.constexpr):
    """`[R]` each: the index of the row, the flat index of its first token, its number of tokens.

    Padded, all rows have length * ALIGN tokens. Packed, `length` is the number of all tokens, and one more row
    after the sequences holds the tokens that belong to none; `cu_seqlens` is clamped, so nothing that stands in
    it leads out of the tensors.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    if cu_seqlens is None:
        start = row.to(tl.int64) * (length * ALIGN)
        size = tl.where(row < rows, length * ALIGN, 0)
    else:
        start = tl.load(cu_seqlens + row, mask=row <= rows, other=length)
        end = tl.load(cu_seqlens + row + 1, mask=row < rows, other=length)
        start = tl.minimum(tl.maximum(start, 0), length)
        size = tl.maximum(tl.minimum(end, length) - start, 0)
        start = start.to(tl.int64)
    return row, start, size


@triton.jit
def row_start(cu_seqlens, row, start, stride, ALIGN: tl.constexpr):
    """`[R]` where the rows of an input start: a padded one may have any row stride."""
    if cu_seqlens is None:
        return row.to(tl.int64) * stride * ALIGN
    else:
        return start


@triton.jit
def ids_at(macro_ids, base, position, live, size):
    """`[R, T]` int32 ids at `position`, -1 where there is no action."""
    inside = (position >= 0) & (position < size[:, None])
    ids = tl.load(macro_ids + base[:, None] + position, mask=inside, other=-1)
    return tl.where(inside & live[:, None] & (ids >= 0) & (ids <= position), ids, -1).to(tl.int32)
