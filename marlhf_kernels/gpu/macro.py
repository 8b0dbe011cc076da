"""Reductions of token tensors over macro actions, and back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.gpu._rows import Walk, ids_at, row_start, rows_of_program
from marlhf_kernels.gpu._segments import (
    AFTER_ALL,
    BEFORE_ALL,
    linked_sum,
    links,
    nearest_in_chunk,
    nearest_met,
    normalized,
    token_weight,
    weighted_sum,
)
from marlhf_kernels.gpu.launch import coefficient, launch, number, row_major

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def macro_reduce(
    x: Tensor,
    macro_ids: Tensor,
    weights: str,
    discount: Tensor,
    num_macros: int | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Tensor:
    """Bytes moved: 8 a token in float32 with int32 ids, and 4 for each entry of the result."""
    walk = Walk(cu_seqlens, max_seqlen, macro_ids, x)
    return _reduced(walk, weights, coefficient(discount, macro_ids), num_macros, torch.float32)


def macro_lengths(
    macro_ids: Tensor, num_macros: int | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    """Bytes moved: 4 a token with int32 ids, and 4 for each entry of the result."""
    return _reduced(Walk(cu_seqlens, max_seqlen, macro_ids, None), "sum", None, num_macros, torch.int32)


def _reduced(
    walk: Walk, weights: str, discount: float | Tensor | None, num_macros: int | None, dtype: torch.dtype
) -> Tensor:
    if num_macros is None:
        num_macros = int(macros_of_rows(walk).max())  # waits for the device
    reduced = torch.empty((walk.rows, num_macros), dtype=dtype, device=walk.device)
    if walk.programs == 0:
        return reduced.zero_()
    launch(
        _reduce,
        (walk.programs,),
        *walk.tensors,
        walk.cu_seqlens,
        reduced,
        discount,
        num_macros,
        *walk.sizes,
        WEIGHTS=weights,
        **walk.shapes,
    )
    return reduced


def macros_of_rows(walk: Walk) -> Tensor:
    """int32 `[B + 1]` max(id) + 1 of each sequence, 0 where there is none, and one 0 more."""
    most = torch.zeros(walk.rows + 1, dtype=torch.int32, device=walk.device)
    launch(_count_macros, (walk.programs,), *walk.tensors[:1], walk.cu_seqlens, most, *walk.sizes[:3], **walk.shapes)
    return most


def macro_reduce_backward(
    grad: Tensor,
    macro_ids: Tensor,
    weights: str,
    discount: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Bytes moved: 8 a token in float32 with int32 ids, and 4 for each entry of `grad`."""
    walk = Walk(cu_seqlens, max_seqlen, macro_ids)
    if weights == "sum":
        return _spread(walk, grad, dtype)
    grad_x = torch.empty(walk.shape, dtype=dtype, device=walk.device)
    grad = row_major(grad)
    launch(
        _reduce_backward,
        (walk.programs,),
        *walk.tensors,
        grad,
        walk.cu_seqlens,
        grad_x,
        walk.outputs(1)[0] if weights in ("mean", "position", "position_reversed") else None,
        coefficient(discount, macro_ids),
        grad.shape[1],
        grad.stride(0),
        *walk.sizes,
        WEIGHTS=weights,
        **walk.shapes,
    )
    return grad_x


def macro_broadcast(macro_x: Tensor, macro_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """Bytes moved: 8 a token in float32 with int32 ids, and 4 for each entry of `macro_x`."""
    # Bits are copied, whatever they mean.
    bits = _BITS[macro_x.dtype.itemsize]
    return _spread(Walk(cu_seqlens, max_seqlen, macro_ids), macro_x.view(bits), bits).view(macro_x.dtype)


def _spread(walk: Walk, macro_x: Tensor, dtype: torch.dtype) -> Tensor:
    macro_x = row_major(macro_x)
    spread = torch.empty(walk.shape, dtype=dtype, device=walk.device)
    launch(
        _broadcast,
        (walk.programs, walk.splits),
        *walk.tensors,
        macro_x,
        walk.cu_seqlens,
        spread,
        macro_x.shape[1],
        macro_x.stride(0),
        *walk.sizes,
        **walk.shapes,
    )
    return spread


@triton.jit(do_not_specialize=["num_macros", "rows", "length", "ids_stride", "x_stride"])
def _reduce(
    ids_ptr,
    x_ptr,
    cu_seqlens_ptr,
    reduced_ptr,
    discount,
    num_macros,
    rows,
    length,
    ids_stride,
    x_stride,
    WEIGHTS: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Without `x_ptr` every token counts 1.

    The token of a macro action that the sweep meets last in a chunk writes the sum so far; where the macro action
    goes on in the next chunk, that one writes it again.
    """
    REVERSE: tl.constexpr = WEIGHTS != "position_reversed"
    HARMONIC: tl.constexpr = WEIGHTS == "position" or WEIGHTS == "position_reversed"
    row, start, size = rows_of_program(cu_seqlens_ptr, rows, length, R, ALIGN)
    live = row < rows
    ids_row = row_start(cu_seqlens_ptr, row, start, ids_stride, ALIGN)
    x_row = row_start(cu_seqlens_ptr, row, start, x_stride, ALIGN)
    reduced_row = row.to(tl.int64) * num_macros
    lane = tl.arange(0, T)[None, :]
    factor = 1.0
    if WEIGHTS == "discounted_sum":
        factor = number(discount)

    for i in range(tl.cdiv(num_macros, T)):
        macro = i * T + lane
        tl.store(reduced_ptr + reduced_row[:, None] + macro, 0, mask=live[:, None] & (macro < num_macros))
    tl.debug_barrier()

    zero = tl.zeros([R], tl.float32)
    count, harmonic, total = zero, zero, zero
    met = tl.full([R], AFTER_ALL if REVERSE else BEFORE_ALL, tl.int32)
    chunks = tl.cdiv(tl.max(size, axis=0), T)
    for i in range(chunks):
        position = (chunks - 1 - i if REVERSE else i) * T + lane
        ids = ids_at(ids_ptr, ids_row, position, live, size)
        before, met = nearest_met(ids_ptr, ids_row, position, live, size, ids, met, REVERSE)
        after = nearest_in_chunk(ids_ptr, ids_row, position, live, size, REVERSE)
        act = ids >= 0
        opens = act & (before != ids)
        ones = tl.where(act, 1.0, 0.0)
        if x_ptr is None:
            x = ones
        else:
            x = tl.load(x_ptr + x_row[:, None] + position, mask=position < size[:, None], other=0.0).to(tl.float32)
            x = tl.where(act, x, 0.0)
        counts = ones
        harmonics = ones
        if WEIGHTS == "mean" or HARMONIC:
            counts, count = linked_sum(ones, links(ids, opens, 1.0), count, REVERSE)
        if HARMONIC:
            harmonics, harmonic = linked_sum(
                tl.where(act, 1.0 / counts, 0.0), links(ids, opens, 1.0), harmonic, REVERSE
            )
        totals, total = weighted_sum(x, ids, opens, counts, total, factor, WEIGHTS)
        tl.store(
            reduced_ptr + reduced_row[:, None] + ids,
            normalized(totals, counts, harmonics, WEIGHTS).to(reduced_ptr.dtype.element_ty),
            mask=act & (after != ids) & (ids < num_macros),
        )
        tl.debug_barrier()


@triton.jit(do_not_specialize=["rows", "length", "ids_stride"])
def _count_macros(
    ids_ptr,
    cu_seqlens_ptr,
    most_ptr,
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
    largest = tl.full([R, T], BEFORE_ALL, tl.int32)
    for i in range(tl.cdiv(tl.max(size, axis=0), T)):
        position = i * T + tl.arange(0, T)[None, :]
        largest = tl.maximum(largest, ids_at(ids_ptr, ids_row, position, live, size))
    tl.store(most_ptr + row, tl.max(largest, axis=1) + 1, mask=live)


@triton.jit(do_not_specialize=["num_macros", "grad_stride", "rows", "length", "ids_stride"])
def _reduce_backward(
    ids_ptr,
    grad_ptr,
    cu_seqlens_ptr,
    grad_x_ptr,
    totals_ptr,
    discount,
    num_macros,
    grad_stride,
    rows,
    length,
    ids_stride,
    WEIGHTS: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Where weights are to sum to 1 a first sweep writes their sums to the slots of `totals_ptr`, else None."""
    REVERSE: tl.constexpr = WEIGHTS == "last" or WEIGHTS == "position"
    row, start, size = rows_of_program(cu_seqlens_ptr, rows, length, R, ALIGN)
    live = row < rows
    ids_row = row_start(cu_seqlens_ptr, row, start, ids_stride, ALIGN)
    grad_row = row.to(tl.int64) * grad_stride
    lane = tl.arange(0, T)[None, :]
    zero = tl.zeros([R], tl.float32)
    factor = 1.0
    if WEIGHTS == "discounted_sum":
        factor = number(discount)
    chunks = tl.cdiv(tl.max(size, axis=0), T)

    if totals_ptr is not None:
        carry, total = zero, zero
        met = tl.full([R], AFTER_ALL if REVERSE else BEFORE_ALL, tl.int32)
        for i in range(chunks):
            position = (chunks - 1 - i if REVERSE else i) * T + lane
            ids = ids_at(ids_ptr, ids_row, position, live, size)
            before, met = nearest_met(ids_ptr, ids_row, position, live, size, ids, met, REVERSE)
            after = nearest_in_chunk(ids_ptr, ids_row, position, live, size, REVERSE)
            opens = (ids >= 0) & (before != ids)
            weight, carry = token_weight(ids, opens, carry, factor, WEIGHTS)
            totals, total = linked_sum(weight, links(ids, opens, 1.0), total, REVERSE)
            tl.store(totals_ptr + start[:, None] + ids, totals, mask=(ids >= 0) & (after != ids))
            tl.debug_barrier()

    carry = zero
    met = tl.full([R], AFTER_ALL if REVERSE else BEFORE_ALL, tl.int32)
    for i in range(chunks):
        position = (chunks - 1 - i if REVERSE else i) * T + lane
        ids = ids_at(ids_ptr, ids_row, position, live, size)
        before, met = nearest_met(ids_ptr, ids_row, position, live, size, ids, met, REVERSE)
        weight, carry = token_weight(ids, (ids >= 0) & (before != ids), carry, factor, WEIGHTS)
        if totals_ptr is not None:
            weight = weight / tl.load(totals_ptr + start[:, None] + ids, mask=ids >= 0, other=1.0)
        known = (ids >= 0) & (ids < num_macros)
        grad = tl.load(grad_ptr + grad_row[:, None] + ids, mask=known, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + start[:, None] + position, grad * weight, mask=position < size[:, None])


@triton.jit(do_not_specialize=["num_macros", "macro_stride", "rows", "length", "ids_stride"])
def _broadcast(
    ids_ptr,
    macro_x_ptr,
    cu_seqlens_ptr,
    spread_ptr,
    num_macros,
    macro_stride,
    rows,
    length,
    ids_stride,
    R: tl.constexpr,
    T: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Programs along the second axis share the chunks of the same rows."""
    row, start, size = rows_of_program(cu_seqlens_ptr, rows, length, R, ALIGN)
    live = row < rows
    ids_row = row_start(cu_seqlens_ptr, row, start, ids_stride, ALIGN)
    macro_row = row.to(tl.int64) * macro_stride
    for i in range(tl.program_id(1), tl.cdiv(tl.max(size, axis=0), T), tl.num_programs(1)):
        position = i * T + tl.arange(0, T)[None, :]
        ids = ids_at(ids_ptr, ids_row, position, live, size)
        known = (ids >= 0) & (ids < num_macros)
        x = tl.load(macro_x_ptr + macro_row[:, None] + ids, mask=known, other=0)
        tl.store(spread_ptr + start[:, None] + position, x, mask=position < size[:, None])
