"""Masked moments and whitening.

Bytes moved: moments read x and the mask, 4 + 1 bytes an entry in float32; normalising reads them and writes the
result, 4 more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.gpu.launch import alignment, cdiv, launch

BLOCK, WARPS = 1024, 4
MOST_PROGRAMS = 1024
"""Their moments are merged by one program in one block."""
EPSILON = tl.constexpr(1e-8)


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """One launch up to a block of entries, else two: the moments of the programs are merged in order."""
    x, mask = x.contiguous(), mask.contiguous()
    number = x.numel()
    align = min(alignment(x, number), alignment(mask))
    blocks = cdiv(number, BLOCK)
    blocks_per_program = max(cdiv(blocks, MOST_PROGRAMS), 1)
    programs = max(cdiv(blocks, blocks_per_program), 1)
    moments = torch.empty((programs, 3), dtype=torch.float32, device=x.device)
    launch(
        _moments,
        (programs,),
        x,
        mask,
        moments,
        number // align,
        blocks_per_program,
        ALIGN=align,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    if programs == 1:
        return moments.view(3)
    merged = torch.empty(3, dtype=torch.float32, device=x.device)
    launch(_merge, (1,), moments, merged, programs, BLOCK=MOST_PROGRAMS, num_warps=WARPS)
    return merged


def masked_normalize(x: Tensor, mask: Tensor, moments: Tensor, shift_mean: bool, unbiased: bool) -> Tensor:
    """One launch."""
    x, mask = x.contiguous(), mask.contiguous()
    result = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    number = x.numel()
    align = min(alignment(x, number), alignment(mask))
    launch(
        _normalize,
        (cdiv(number, BLOCK),),
        x,
        mask,
        moments.contiguous(),
        result,
        number // align,
        SHIFT_MEAN=shift_mean,
        UNBIASED=unbiased,
        ALIGN=align,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return result


@triton.jit
def _load_masked(x_ptr, mask_ptr, i, inside):
    """Entries and whether they count; 0 where they do not."""
    chosen = tl.load(mask_ptr + i, inside, other=0) != 0
    x = tl.load(x_ptr + i, inside, other=0).to(tl.float32)
    return tl.where(chosen, x, 0.0), chosen


@triton.jit(do_not_specialize=["moments_ptr", "number", "blocks_per_program"])
def _moments(x_ptr, mask_ptr, moments_ptr, number, blocks_per_program, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Each program: count, mean, and sum of squares about it, of its blocks, one block merged after the other."""
    number = number * ALIGN
    first = tl.program_id(0).to(tl.int64) * blocks_per_program
    count = tl.zeros((), tl.float32)
    mean = tl.zeros((), tl.float32)
    squares = tl.zeros((), tl.float32)
    for block in range(blocks_per_program):
        i = (first + block) * BLOCK + tl.arange(0, BLOCK)
        x, chosen = _load_masked(x_ptr, mask_ptr, i, i < number)
        block_count = tl.sum(chosen.to(tl.float32))
        block_mean = tl.sum(x) / tl.maximum(block_count, 1.0)
        apart = tl.where(chosen, x - block_mean, 0.0)
        total = tl.maximum(count + block_count, 1.0)
        step = block_mean - mean
        squares += tl.sum(apart * apart) + step * step * (count * block_count / total)
        mean += step * (block_count / total)
        count += block_count
    moments_ptr += tl.program_id(0) * 3
    tl.store(moments_ptr, count)
    tl.store(moments_ptr + 1, mean)
    tl.store(moments_ptr + 2, squares)


@triton.jit(do_not_specialize=["moments_ptr", "merged_ptr", "programs"])
def _merge(moments_ptr, merged_ptr, programs, BLOCK: tl.constexpr):
    program = tl.arange(0, BLOCK)
    inside = program < programs
    counts = tl.load(moments_ptr + program * 3, inside, other=0.0)
    means = tl.load(moments_ptr + program * 3 + 1, inside, other=0.0)
    squares = tl.load(moments_ptr + program * 3 + 2, inside, other=0.0)
    count = tl.sum(counts)
    mean = tl.sum(counts * means) / tl.maximum(count, 1.0)
    apart = means - mean
    tl.store(merged_ptr, count)
    tl.store(merged_ptr + 1, mean)
    tl.store(merged_ptr + 2, tl.sum(squares + counts * apart * apart))


@triton.jit(do_not_specialize=["moments_ptr", "number"])
def _normalize(
    x_ptr,
    mask_ptr,
    moments_ptr,
    result_ptr,
    number,
    SHIFT_MEAN: tl.constexpr,
    UNBIASED: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < number * ALIGN
    count = tl.load(moments_ptr)
    mean = tl.load(moments_ptr + 1)
    if UNBIASED:
        count -= 1.0
    variance = tl.load(moments_ptr + 2) / tl.maximum(count, 1.0)
    x, chosen = _load_masked(x_ptr, mask_ptr, i, inside)
    result = (x - mean) * tl.rsqrt(variance + EPSILON)
    if not SHIFT_MEAN:
        result += mean
    tl.store(result_ptr + i, tl.where(chosen, result, 0.0), inside)
