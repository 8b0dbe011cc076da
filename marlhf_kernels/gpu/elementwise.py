"""Small ops, one entry at a time: labels of actions, and a stored gradient times the upstream one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.gpu.launch import alignment, cdiv, launch

BLOCK, WARPS = 1024, 4


def scale_gradient(gradient: Tensor, grad_output: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes moved: those of `gradient` and of the result."""
    gradient = gradient.contiguous()
    scaled = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    number = gradient.numel()
    align = alignment(gradient, number)
    launch(
        _scale_gradient,
        (cdiv(number, BLOCK),),
        gradient,
        grad_output,
        count,
        scaled,
        number // align,
        ALIGN=align,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return scaled


@triton.jit(do_not_specialize=["grad_output_ptr", "count_ptr", "number"])
def _scale_gradient(
    gradient_ptr, grad_output_ptr, count_ptr, scaled_ptr, number, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < number * ALIGN
    factor = tl.load(grad_output_ptr).to(tl.float32) / tl.load(count_ptr).to(tl.float32)
    gradient = tl.load(gradient_ptr + i, inside, other=0).to(tl.float32)
    tl.store(scaled_ptr + i, gradient * factor, inside)


def action_labels(labels: Tensor, macro_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """Bytes moved: those of `labels`, `macro_ids` and the result."""
    labels, macro_ids = labels.contiguous(), macro_ids.contiguous()
    chosen = torch.empty_like(labels)
    number = labels.numel()
    align = min(alignment(labels, number), alignment(macro_ids))
    launch(
        _action_labels,
        (cdiv(number, BLOCK),),
        labels,
        macro_ids,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        chosen,
        number // align,
        labels.shape[-1] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        ALIGN=align,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return chosen


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "number", "size"])
def _action_labels(
    labels_ptr, ids_ptr, cu_seqlens_ptr, chosen_ptr, number, size, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):
    number = number * ALIGN
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < number
    action = is_action(ids_ptr, i, cu_seqlens_ptr, number, size)
    label = tl.load(labels_ptr + i, inside, other=-1)
    tl.store(chosen_ptr + i, tl.where(action, label, -1), inside)


@triton.jit
def is_action(ids_ptr, i, cu_seqlens_ptr, number, size):
    """Whether each of the tokens `i` of all `number` is an action: its id >= 0 and not above its position.

    `size` is the length T of padded rows, or the number of sequences that `cu_seqlens_ptr` (else None) tells of.
    """
    inside = i < number
    if cu_seqlens_ptr is None:
        position = i % size
    else:
        # How many sequences end at the token or before it, by bisection.
        low = tl.zeros_like(i)
        high = low + size
        span = size
        while span > 0:
            middle = (low + high) // 2
            open_ = low < high
            end = tl.load(cu_seqlens_ptr + 1 + middle, open_, other=0)
            after = open_ & (end <= i)
            high = tl.where(open_ & ~after, middle, high)
            low = tl.where(after, middle + 1, low)
            span = span // 2
        inside &= low < size
        position = i - tl.load(cu_seqlens_ptr + low, inside, other=0)
    ids = tl.load(ids_ptr + i, inside, other=-1)
    return inside & (ids >= 0) & (ids <= position)
