"""The clipped policy loss over tokens or macro actions, with its gradient before division by the count.

At the level of macro actions a program walks over its sequences three times: from right to left over tokens, summing
the log-ratios of each macro action; over macro actions, for loss and slope; from right to left over tokens again,
to which each macro action gives its slope. Between these sweeps both stand in the macro action's slot of the
gradient: the last sweep reads a slot before it writes what belongs there.
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
    k3,
    linked_sum,
    links,
    nearest_in_chunk,
    nearest_met,
)
from marlhf_kernels.gpu.launch import coefficient, launch, number, optional_coefficient

MAX_LOG_RATIO = tl.constexpr(60.0)


def macro_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    macro_ids: Tensor,
    clip_low: Tensor,
    clip_high: Tensor,
    dual_clip: Tensor | None,
    ratio_level: str,
    normalize_by: str,
    normalizer: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes moved: 20 a token in float32 with int32 ids."""
    walk = Walk(cu_seqlens, max_seqlen, macro_ids, logprobs, old_logprobs, advantages)
    (gradient,) = walk.outputs(1)
    partials = partials_of(walk)
    launch(
        _policy_loss,
        (walk.programs,),
        *walk.tensors,
        walk.cu_seqlens,
        gradient,
        walk.outputs(1)[0] if ratio_level != "token" else None,
        walk.outputs(1)[0] if ratio_level == "macro_mean" else None,
        partials,
        coefficient(clip_low, gradient),
        coefficient(clip_high, gradient),
        optional_coefficient(dual_clip, gradient),
        *walk.sizes,
        PER_SEQUENCE=normalize_by == "sequences",
        **walk.shapes,
    )
    loss, statistics, count = finish(partials, 4, normalize_by, normalizer, ratio_level != "token")
    return loss, statistics, gradient, count


@triton.jit(do_not_specialize=["rows", "length", "ids_stride", "logprobs_stride", "old_stride", "advantages_stride"])
def _policy_loss(
    ids_ptr,
    logprobs_ptr,
    old_ptr,
    advantages_ptr,
    cu_seqlens_ptr,
    gradient_ptr,
    firsts_ptr,
    lengths_ptr,
    partials_ptr,
    clip_low,
    clip_high,
    dual_clip,
    rows,
    length,
    ids_stride,
    logprobs_stride,
    old_stride,
    advantages_stride,
    PER_SEQUENCE: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The unit is a macro action where there is `firsts_ptr`, room for advantages; with `lengths_ptr` its mean."""
    row, start, size = rows_of_program(cu_seqlens_ptr, rows, length, R, ALIGN)
    live = row < rows
    ids_row = row_start(cu_seqlens_ptr, row, start, ids_stride, ALIGN)
    logprobs_row = row_start(cu_seqlens_ptr, row, start, logprobs_stride, ALIGN)
    old_row = row_start(cu_seqlens_ptr, row, start, old_stride, ALIGN)
    advantages_row = row_start(cu_seqlens_ptr, row, start, advantages_stride, ALIGN)
    low = 1.0 - number(clip_low)
    high = 1.0 + number(clip_high)
    lane = tl.arange(0, T)[None, :]
    chunks = tl.cdiv(tl.max(size, axis=0), T)

    row_weight = tl.full([R], 1.0, tl.float32)
    if PER_SEQUENCE and firsts_ptr is None:
        counts = tl.zeros([R, T], tl.float32)
        for i in range(chunks):
            ids = ids_at(ids_ptr, ids_row, i * T + lane, live, size)
            counts += tl.where(ids < 0, 0.0, 1.0)
        row_weight = 1.0 / tl.maximum(tl.sum(counts, axis=1), 1.0)

    lanes = tl.zeros([R, T], tl.float32)
    losses, clips, ratios, largest_ratio, kls, tokens = lanes, lanes, lanes, lanes, lanes, lanes
    largest = tl.full([R, T], BEFORE_ALL, tl.int32)
    met = tl.full([R], AFTER_ALL, tl.int32)
    total = tl.zeros([R], tl.float32)
    counted = total
    for i in range(chunks):
        position = (chunks - 1 - i) * T + lane
        inside = position < size[:, None]
        ids = ids_at(ids_ptr, ids_row, position, live, size)
        act = ids >= 0
        logprob = tl.load(logprobs_ptr + logprobs_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(old_ptr + old_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
        advantage = tl.load(advantages_ptr + advantages_row[:, None] + position, mask=inside, other=0.0)
        advantage = advantage.to(tl.float32)
        d = tl.where(act, logprob - old, 0.0)
        kls += k3(-d)
        tokens += tl.where(act, 1.0, 0.0)
        largest = tl.maximum(largest, ids)
        if firsts_ptr is None:
            loss, slope, clipped, ratio = _unit(d, advantage, act, low, high, dual_clip)
            losses += loss * row_weight[:, None]
            clips += clipped
            ratios += ratio
            largest_ratio = tl.maximum(largest_ratio, ratio)
            tl.store(gradient_ptr + start[:, None] + position, slope * row_weight[:, None], mask=inside)
        else:
            # The token of a macro action met last in a chunk writes the slot, and the next chunk does so again
            # where the macro action goes on: in the end its first token has.
            right, met = nearest_met(ids_ptr, ids_row, position, live, size, ids, met, True)
            left = nearest_in_chunk(ids_ptr, ids_row, position, live, size, True)
            link = links(ids, act & (right != ids), 1.0)
            closes = act & (left != ids)
            slot = start[:, None] + ids
            log_ratio, total = linked_sum(d, link, total, True)
            tl.store(gradient_ptr + slot, log_ratio, mask=closes)
            tl.store(firsts_ptr + slot, advantage, mask=closes)
            if lengths_ptr is not None:
                count, counted = linked_sum(tl.where(act, 1.0, 0.0), link, counted, True)
                tl.store(lengths_ptr + slot, count, mask=closes)
            tl.debug_barrier()

    macros = tl.max(largest, axis=1) + 1
    if firsts_ptr is not None:
        if PER_SEQUENCE:
            row_weight = 1.0 / tl.maximum(macros.to(tl.float32), 1.0)
        for i in range(tl.cdiv(tl.max(macros, axis=0), T)):
            macro = i * T + lane
            inside = macro < macros[:, None]
            slot = start[:, None] + macro
            log_ratio = tl.load(gradient_ptr + slot, mask=inside, other=0.0)
            advantage = tl.load(firsts_ptr + slot, mask=inside, other=0.0)
            weight = row_weight[:, None]
            count = tl.full([R, T], 1.0, tl.float32)
            if lengths_ptr is not None:
                count = tl.load(lengths_ptr + slot, mask=inside, other=1.0)
            loss, slope, clipped, ratio = _unit(log_ratio / count, advantage, inside, low, high, dual_clip)
            losses += loss * weight
            clips += clipped
            ratios += ratio
            largest_ratio = tl.maximum(largest_ratio, ratio)
            tl.store(gradient_ptr + slot, slope * weight / count, mask=inside)

        tl.debug_barrier()
        for i in range(chunks):
            position = (chunks - 1 - i) * T + lane
            ids = ids_at(ids_ptr, ids_row, position, live, size)
            slope = tl.load(gradient_ptr + start[:, None] + ids, mask=ids >= 0, other=0.0)
            tl.debug_barrier()
            tl.store(gradient_ptr + start[:, None] + position, slope, mask=position < size[:, None])

    store_partials(partials_ptr, losses, clips, tl.sum(tokens, axis=1), macros, kls, ratios, largest_ratio)


@triton.jit
def _unit(log_ratio, advantage, chosen, low, high, dual_clip):
    """Of each unit, 0 where it is not chosen: loss, d loss / d log_ratio, is it clipped, ratio."""
    ratio = tl.exp(tl.minimum(tl.maximum(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO))
    unclipped = -advantage * ratio
    clipped = -advantage * tl.minimum(tl.maximum(ratio, low), high)
    is_clipped = clipped > unclipped
    loss = tl.where(is_clipped, clipped, unclipped)
    is_flat = is_clipped | (tl.abs(log_ratio) > MAX_LOG_RATIO)
    if dual_clip is not None:
        bound = -advantage * number(dual_clip)
        is_bounded = (advantage < 0) & (bound < loss)
        loss = tl.where(is_bounded, bound, loss)
        is_flat = is_flat | is_bounded
    counts = chosen & (advantage != 0)
    return (
        tl.where(counts, loss, 0.0),
        tl.where(counts & ~is_flat, unclipped, 0.0),
        tl.where(chosen & is_clipped, 1.0, 0.0),
        tl.where(chosen, ratio, 0.0),
    )
