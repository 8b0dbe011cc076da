"""The clipped value loss over tokens or macro actions, with its gradient before division by the count.

At the level of macro actions a program walks over its sequences three times: over tokens, reducing values and old
values; over macro actions, for loss and slope; over tokens again, to which each gives its slope times their weight.
Between these sweeps what belongs to a macro action stands in its slot of tensors made for that.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.gpu._losses import finish, partials_of, store_partials
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
from marlhf_kernels.gpu.launch import launch, number, optional_coefficient


def macro_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    macro_ids: Tensor,
    clip: Tensor | None,
    level: str,
    value_weights: str,
    normalize_by: str,
    normalizer: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes moved: 20 a token in float32 with int32 ids."""
    walk = Walk(cu_seqlens, max_seqlen, macro_ids, values, old_values, returns)
    (gradient,) = walk.outputs(1)
    partials = partials_of(walk)
    of_macros = level == "macro"
    launch(
        _value_loss,
        (walk.programs,),
        *walk.tensors,
        walk.cu_seqlens,
        gradient,
        *(walk.outputs(4) if of_macros else (None,) * 4),
        partials,
        optional_coefficient(clip, gradient),
        *walk.sizes,
        # Without an effect at the level of tokens: one compilation for all of them.
        VALUE_WEIGHTS=value_weights if of_macros else None,
        PER_SEQUENCE=normalize_by == "sequences",
        **walk.shapes,
    )
    loss, clip_fraction, count = finish(partials, 1, normalize_by, normalizer, of_macros)
    return loss, clip_fraction, gradient, count


@triton.jit(do_not_specialize=["rows", "length", "ids_stride", "values_stride", "old_stride", "returns_stride"])
def _value_loss(
    ids_ptr,
    values_ptr,
    old_ptr,
    returns_ptr,
    cu_seqlens_ptr,
    gradient_ptr,
    macro_values_ptr,
    macro_old_ptr,
    macro_returns_ptr,
    divisors_ptr,
    partials_ptr,
    clip,
    rows,
    length,
    ids_stride,
    values_stride,
    old_stride,
    returns_stride,
    VALUE_WEIGHTS: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The unit is a token where there are no VALUE_WEIGHTS, nor room for what belongs to macro actions."""
    row, start, size = rows_of_program(cu_seqlens_ptr, rows, length, R, ALIGN)
    live = row < rows
    ids_row = row_start(cu_seqlens_ptr, row, start, ids_stride, ALIGN)
    values_row = row_start(cu_seqlens_ptr, row, start, values_stride, ALIGN)
    old_row = row_start(cu_seqlens_ptr, row, start, old_stride, ALIGN)
    returns_row = row_start(cu_seqlens_ptr, row, start, returns_stride, ALIGN)
    lane = tl.arange(0, T)[None, :]
    chunks = tl.cdiv(tl.max(size, axis=0), T)
    zero = tl.zeros([R], tl.float32)
    lanes = tl.zeros([R, T], tl.float32)
    losses, clips, tokens = lanes, lanes, lanes
    largest = tl.full([R, T], BEFORE_ALL, tl.int32)

    if VALUE_WEIGHTS is None:
        row_weight = tl.full([R], 1.0, tl.float32)
        if PER_SEQUENCE:
            for i in range(chunks):
                ids = ids_at(ids_ptr, ids_row, i * T + lane, live, size)
                tokens += tl.where(ids < 0, 0.0, 1.0)
            row_weight = 1.0 / tl.maximum(tl.sum(tokens, axis=1), 1.0)
            tokens = lanes
        for i in range(chunks):
            position = i * T + lane
            inside = position < size[:, None]
            ids = ids_at(ids_ptr, ids_row, position, live, size)
            act = ids >= 0
            value = tl.load(values_ptr + values_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
            old = tl.load(old_ptr + old_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
            target = tl.load(returns_ptr + returns_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
            loss, slope, clipped = _unit(value, old, target, act, clip)
            losses += loss * row_weight[:, None]
            clips += clipped
            tokens += tl.where(act, 1.0, 0.0)
            largest = tl.maximum(largest, ids)
            tl.store(gradient_ptr + start[:, None] + position, slope * row_weight[:, None], mask=inside)
        macros = tl.max(largest, axis=1) + 1
    else:
        FORWARD: tl.constexpr = VALUE_WEIGHTS == "position_reversed"
        HARMONIC: tl.constexpr = VALUE_WEIGHTS == "position" or VALUE_WEIGHTS == "position_reversed"
        count, harmonic, value_sum, old_sum = zero, zero, zero, zero
        met = tl.full([R], BEFORE_ALL if FORWARD else AFTER_ALL, tl.int32)
        for i in range(chunks):
            position = (i if FORWARD else chunks - 1 - i) * T + lane
            inside = position < size[:, None]
            ids = ids_at(ids_ptr, ids_row, position, live, size)
            act = ids >= 0
            before, met = nearest_met(ids_ptr, ids_row, position, live, size, ids, met, not FORWARD)
            after = nearest_in_chunk(ids_ptr, ids_row, position, live, size, not FORWARD)
            opens = act & (before != ids)
            closes = act & (after != ids)
            ones = tl.where(act, 1.0, 0.0)
            tokens += ones
            largest = tl.maximum(largest, ids)
            value = tl.load(values_ptr + values_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
            old = tl.load(old_ptr + old_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
            target = tl.load(returns_ptr + returns_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
            counts = ones
            harmonics = ones
            if VALUE_WEIGHTS == "mean" or HARMONIC:
                counts, count = linked_sum(ones, links(ids, opens, 1.0), count, not FORWARD)
            if HARMONIC:
                harmonics, harmonic = linked_sum(
                    tl.where(act, 1.0 / counts, 0.0), links(ids, opens, 1.0), harmonic, not FORWARD
                )
            values, value_sum = weighted_sum(
                tl.where(act, value, 0.0), ids, opens, counts, value_sum, 1.0, VALUE_WEIGHTS
            )
            olds, old_sum = weighted_sum(tl.where(act, old, 0.0), ids, opens, counts, old_sum, 1.0, VALUE_WEIGHTS)
            slot = start[:, None] + ids
            # The token of a macro action met last in a chunk writes the slot, and the next chunk does so again
            # where the macro action goes on. Its first token, which has the return, is met first or last.
            tl.store(macro_values_ptr + slot, normalized(values, counts, harmonics, VALUE_WEIGHTS), mask=closes)
            tl.store(macro_old_ptr + slot, normalized(olds, counts, harmonics, VALUE_WEIGHTS), mask=closes)
            tl.store(divisors_ptr + slot, normalized(ones, counts, harmonics, VALUE_WEIGHTS), mask=closes)
            tl.store(macro_returns_ptr + slot, target, mask=opens if FORWARD else closes)
            tl.debug_barrier()

        macros = tl.max(largest, axis=1) + 1
        row_weight = tl.full([R], 1.0, tl.float32)
        if PER_SEQUENCE:
            row_weight = 1.0 / tl.maximum(macros.to(tl.float32), 1.0)
        for i in range(tl.cdiv(tl.max(macros, axis=0), T)):
            macro = i * T + lane
            inside = macro < macros[:, None]
            slot = start[:, None] + macro
            value = tl.load(macro_values_ptr + slot, mask=inside, other=0.0)
            old = tl.load(macro_old_ptr + slot, mask=inside, other=0.0)
            target = tl.load(macro_returns_ptr + slot, mask=inside, other=0.0)
            divisor = tl.load(divisors_ptr + slot, mask=inside, other=0.0)
            loss, slope, clipped = _unit(value, old, target, inside, clip)
            losses += loss * row_weight[:, None]
            clips += clipped
            tl.store(macro_values_ptr + slot, slope * row_weight[:, None] * divisor, mask=inside)

        tl.debug_barrier()
        LEFTWARD: tl.constexpr = VALUE_WEIGHTS == "last" or VALUE_WEIGHTS == "position"
        count = zero
        met = tl.full([R], AFTER_ALL if LEFTWARD else BEFORE_ALL, tl.int32)
        for i in range(chunks):
            position = (chunks - 1 - i if LEFTWARD else i) * T + lane
            ids = ids_at(ids_ptr, ids_row, position, live, size)
            before, met = nearest_met(ids_ptr, ids_row, position, live, size, ids, met, LEFTWARD)
            weight, count = token_weight(ids, (ids >= 0) & (before != ids), count, 1.0, VALUE_WEIGHTS)
            slope = tl.load(macro_values_ptr + start[:, None] + ids, mask=ids >= 0, other=0.0)
            tl.store(gradient_ptr + start[:, None] + position, slope * weight, mask=position < size[:, None])

    store_partials(partials_ptr, losses, clips, tl.sum(tokens, axis=1), macros, lanes, lanes, lanes)


@triton.jit
def _unit(value, old, target, chosen, clip):
    """Of each unit, 0 where it is not chosen: loss, d loss / d value, is it clipped.

    Where the clipped term is the larger one the value is outside of the range, and it has no gradient there.
    """
    error = value - target
    loss = error * error
    is_clipped = loss < 0
    if clip is not None:
        limit = number(clip)
        held = tl.minimum(tl.maximum(value, old - limit), old + limit) - target
        is_clipped = held * held > loss
        loss = tl.where(is_clipped, held * held, loss)
    return (
        tl.where(chosen, 0.5 * loss, 0.0),
        tl.where(chosen & ~is_clipped, error, 0.0),
        tl.where(chosen & is_clipped, 1.0, 0.0),
    )
