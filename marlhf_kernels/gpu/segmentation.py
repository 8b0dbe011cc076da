"""Builders of macro-action ids from a mask of response tokens, each in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.gpu._rows import Tile, Walk, ids_at, row_start, rows_of_program
from marlhf_kernels.gpu.launch import launch

IN_ORDER = Tile(16, 8, 1)
"""For sums in order: one row a thread and a few tokens at a time, whose loads wait together."""


def fixed_ngram(mask: Tensor, n: int | None, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """Bytes moved: 5 a token."""
    return _counted(Walk(cu_seqlens, max_seqlen, _bytes(mask), None), None, n)


def from_ends(mask: Tensor, ends: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """Bytes moved: 6 a token."""
    return _counted(Walk(cu_seqlens, max_seqlen, _bytes(mask), _bytes(ends)), None, 1)


def from_bounds(mask: Tensor, bounds: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """Bytes moved: 5 a token, and those of `bounds` `[B, L]`, which rise in each row."""
    return _counted(Walk(cu_seqlens, max_seqlen, _bytes(mask), None), bounds.contiguous(), 1)


def _bytes(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8)


def _counted(walk: Walk, bounds: Tensor | None, n: int | None) -> Tensor:
    ids = torch.empty(walk.shape, dtype=torch.int32, device=walk.device)
    launch(
        _count_ids,
        (walk.programs,),
        *walk.tensors,
        bounds,
        walk.cu_seqlens,
        ids,
        n,
        0 if bounds is None else bounds.shape[1],
        *walk.sizes,
        **walk.shapes,
    )
    return ids


def perplexity(
    mask: Tensor, ref_logprobs: Tensor, rule: str, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    """Bytes moved: 9 a token in float32."""
    walk = Walk(cu_seqlens, max_seqlen, _bytes(mask), ref_logprobs, tile=IN_ORDER)
    ids = torch.empty(walk.shape, dtype=torch.int32, device=walk.device)
    launch(_perplexity, (walk.programs,), *walk.tensors, walk.cu_seqlens, ids, *walk.sizes, RULE=rule, **walk.shapes)
    return ids


def isolate_last(macro_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """Bytes moved: 8 a token with int32 ids."""
    walk = Walk(cu_seqlens, max_seqlen, macro_ids)
    isolated = torch.empty(walk.shape, dtype=torch.int32, device=walk.device)
    launch(_isolate_last, (walk.programs,), *walk.tensors, walk.cu_seqlens, isolated, *walk.sizes, **walk.shapes)
    return isolated


@triton.jit(do_not_specialize=["n", "num_bounds", "rows", "length", "mask_stride", "ends_stride"])
def _count_ids(
    mask_ptr,
    ends_ptr,
    bounds_ptr,
    cu_seqlens_ptr,
    ids_ptr,
    n,
    num_bounds,
    rows,
    length,
    mask_stride,
    ends_stride,
    R: tl.constexpr,
    T: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Ids from how many chosen tokens, or of those that end a macro action, stand before each.

    With `bounds_ptr` the id is the number of bounds that are not above that count; without n it is 0.
    """
    row, start, size = rows_of_program(cu_seqlens_ptr, rows, length, R, ALIGN)
    live = row < rows
    mask_row = row_start(cu_seqlens_ptr, row, start, mask_stride, ALIGN)
    ends_row = row_start(cu_seqlens_ptr, row, start, ends_stride, ALIGN)
    before = tl.zeros([R], tl.int32)
    for i in range(tl.cdiv(tl.max(size, axis=0), T)):
        position = i * T + tl.arange(0, T)[None, :]
        inside = position < size[:, None]
        chosen = inside & live[:, None] & (tl.load(mask_ptr + mask_row[:, None] + position, mask=inside, other=0) != 0)
        counts = chosen
        if ends_ptr is not None:
            counts = chosen & (tl.load(ends_ptr + ends_row[:, None] + position, mask=inside, other=0) != 0)
        counts = counts.to(tl.int32)
        rank = before[:, None] + tl.cumsum(counts, axis=1) - counts
        before += tl.sum(counts, axis=1)
        if bounds_ptr is not None:
            ids = _bounds_below(bounds_ptr + row.to(tl.int64)[:, None] * num_bounds, rank, num_bounds, chosen)
        elif n is None:
            ids = tl.zeros_like(rank)
        else:
            ids = rank // n
        tl.store(ids_ptr + start[:, None] + position, tl.where(chosen, ids, -1), mask=inside)


@triton.jit
def _bounds_below(bounds, rank, num_bounds, chosen):
    """`[R, T]` how many bounds of the row are at most `rank`, by bisection."""
    low = tl.zeros_like(rank)
    high = low + num_bounds
    span = num_bounds
    while span > 0:
        middle = (low + high) // 2
        open_ = chosen & (low < high)
        below = open_ & (tl.load(bounds + middle, mask=open_, other=0) <= rank)
        low = tl.where(below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
        span = span // 2
    return low


@triton.jit(do_not_specialize=["rows", "length", "mask_stride", "ref_stride"])
def _perplexity(
    mask_ptr,
    ref_ptr,
    cu_seqlens_ptr,
    ids_ptr,
    rows,
    length,
    mask_stride,
    ref_stride,
    RULE: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """A token opens a macro action where nll n > sum, both over the one before it: float32, in order, no division."""
    row, start, size = rows_of_program(cu_seqlens_ptr, rows, length, R, ALIGN)
    live = row < rows
    mask_row = row_start(cu_seqlens_ptr, row, start, mask_stride, ALIGN)
    ref_row = row_start(cu_seqlens_ptr, row, start, ref_stride, ALIGN)
    lane = tl.arange(0, T)[None, :]
    current = tl.full([R], -1, tl.int32)
    number = tl.zeros([R], tl.float32)
    total = tl.zeros([R], tl.float32)
    for i in range(tl.cdiv(tl.max(size, axis=0), T)):
        position = i * T + lane
        inside = position < size[:, None]
        mask = inside & live[:, None] & (tl.load(mask_ptr + mask_row[:, None] + position, mask=inside, other=0) != 0)
        nlls = -tl.load(ref_ptr + ref_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
        ids = tl.full([R, T], -1, tl.int32)
        for t in tl.static_range(T):
            chosen = tl.max(tl.where(lane == t, mask.to(tl.int32), 0), axis=1) != 0
            nll = tl.sum(tl.where(lane == t, nlls, 0.0), axis=1)
            if RULE == "neighbour":
                opens = chosen & ((current < 0) | (nll > total))
                total = tl.where(chosen, nll, total)
            else:
                opens = chosen & ((current < 0) | (nll * number > total))
                total = tl.where(opens, nll, tl.where(chosen, total + nll, total))
                number = tl.where(opens, 1.0, tl.where(chosen, number + 1.0, number))
            current = tl.where(opens, current + 1, current)
            ids = tl.where((lane == t) & chosen[:, None], current[:, None], ids)
        tl.store(ids_ptr + start[:, None] + position, ids, mask=inside)


@triton.jit(do_not_specialize=["rows", "length", "ids_stride"])
def _isolate_last(
    ids_ptr,
    cu_seqlens_ptr,
    isolated_ptr,
    rows,
    length,
    ids_stride,
    R: tl.constexpr,
    T: tl.constexpr,
    ALIGN: tl.constexpr,
):
    row, start, size = rows_of_program(cu_seqlens_ptr, rows, length, R, ALIGN)
    live = row < rows
    ids_row = row_start(cu_seqlens_ptr, row, start, ids_stride, ALIGN)
    lane = tl.arange(0, T)[None, :]
    chunks = tl.cdiv(tl.max(size, axis=0), T)
    lasts = tl.full([R, T], -1, tl.int32)
    for i in range(chunks):
        ids = ids_at(ids_ptr, ids_row, i * T + lane, live, size)
        lasts = tl.maximum(lasts, tl.where(ids < 0, -1, i * T + lane))
    last = tl.max(lasts, axis=1)
    last_id = tl.load(ids_ptr + ids_row + last, mask=last >= 0, other=-1).to(tl.int32)
    counts = tl.zeros([R, T], tl.int32)
    for i in range(chunks):
        ids = ids_at(ids_ptr, ids_row, i * T + lane, live, size)
        counts += ((ids >= 0) & (ids == last_id[:, None])).to(tl.int32)
    shared = tl.sum(counts, axis=1) > 1
    for i in range(chunks):
        position = i * T + lane
        ids = ids_at(ids_ptr, ids_row, position, live, size)
        moved = shared[:, None] & (position == last[:, None])
        tl.store(isolated_ptr + start[:, None] + position, ids + moved.to(tl.int32), mask=position < size[:, None])
