"""KL-penalised rewards and generalised advantage estimation over macro actions, each in one launch.

A program owns whole sequences and walks over them from right to left, the direction in which the score, Horner's
scheme and the recurrence run: first over tokens, reducing rewards and values to their macro actions; then over
macro actions, for the recurrence; then over tokens again, to which each macro action gives what it has. Between
these sweeps reward R_k and advantage A_k stand in slot k of the sequence's row of `advantages`, and value V_k in
that of `returns`: k is at most the position of each of its tokens, and the last sweep, from right to left, reads a
slot before it writes what belongs there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.gpu._rows import Walk, ids_at, row_start, rows_of_program
from marlhf_kernels.gpu._segments import (
    AFTER_ALL,
    BEFORE_ALL,
    k3,
    linked_sum,
    links,
    nearest_in_chunk,
    nearest_met,
    normalized,
    power,
    weighted_sum,
)
from marlhf_kernels.gpu.launch import coefficient, launch, number, optional_coefficient


def kl_penalized_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    macro_ids: Tensor,
    kl_coef: Tensor,
    kl_estimator: str,
    score_clip: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    """Bytes moved: 20 a token in float32 with int32 ids."""
    walk = Walk(cu_seqlens, max_seqlen, macro_ids, logprobs, ref_logprobs, None, None)
    rewards, kl = walk.outputs(2)
    launch(
        _advantages,
        (walk.programs,),
        *walk.tensors[:4],
        rewards,
        kl,
        scores.contiguous(),
        None,
        walk.cu_seqlens,
        None,
        None,
        None,
        coefficient(kl_coef, rewards),
        optional_coefficient(score_clip, rewards),
        None,
        None,
        *walk.sizes,
        KL_ESTIMATOR=kl_estimator,
        REWARD_WEIGHTS=None,
        VALUE_WEIGHTS=None,
        **walk.shapes,
    )
    return rewards, kl


def macro_gae(
    rewards: Tensor,
    values: Tensor,
    macro_ids: Tensor,
    gamma: Tensor,
    lam: Tensor,
    reward_weights: str,
    value_weights: str,
    discount_per: str,
    bootstrap_values: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    """Bytes moved: 20 a token in float32 with int32 ids."""
    walk = Walk(cu_seqlens, max_seqlen, macro_ids, None, None, values, rewards)
    advantages, returns = walk.outputs(2)
    launch(
        _advantages,
        (walk.programs,),
        *walk.tensors,
        None,
        None,
        _contiguous(bootstrap_values),
        walk.cu_seqlens,
        advantages,
        returns,
        _lengths(walk, discount_per),
        None,
        None,
        coefficient(gamma, advantages),
        coefficient(lam, advantages),
        *walk.sizes,
        KL_ESTIMATOR=None,
        REWARD_WEIGHTS=reward_weights,
        VALUE_WEIGHTS=value_weights,
        **walk.shapes,
    )
    return advantages, returns


def rollout_advantages(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor,
    macro_ids: Tensor,
    kl_coef: Tensor,
    kl_estimator: str,
    score_clip: Tensor | None,
    gamma: Tensor,
    lam: Tensor,
    reward_weights: str,
    value_weights: str,
    discount_per: str,
    bootstrap_values: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes moved: 32 a token in float32 with int32 ids."""
    walk = Walk(cu_seqlens, max_seqlen, macro_ids, logprobs, ref_logprobs, values, None)
    advantages, returns, rewards, kl = walk.outputs(4)
    launch(
        _advantages,
        (walk.programs,),
        *walk.tensors[:4],
        rewards,
        kl,
        scores.contiguous(),
        _contiguous(bootstrap_values),
        walk.cu_seqlens,
        advantages,
        returns,
        _lengths(walk, discount_per),
        coefficient(kl_coef, rewards),
        optional_coefficient(score_clip, rewards),
        coefficient(gamma, rewards),
        coefficient(lam, rewards),
        *walk.sizes,
        KL_ESTIMATOR=kl_estimator,
        REWARD_WEIGHTS=reward_weights,
        VALUE_WEIGHTS=value_weights,
        **walk.shapes,
    )
    return advantages, returns, rewards, kl


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _lengths(walk: Walk, discount_per: str) -> Tensor | None:
    """Room for the length of each macro action, where the discount depends on it."""
    return walk.outputs(1)[0] if discount_per == "token" else None


@triton.jit(
    do_not_specialize=["rows", "length", "ids_stride", "logprobs_stride", "ref_stride", "values_stride", "given_stride"]
)
def _advantages(
    ids_ptr,
    logprobs_ptr,
    ref_ptr,
    values_ptr,
    rewards_ptr,
    kl_ptr,
    scores_ptr,
    bootstrap_ptr,
    cu_seqlens_ptr,
    advantages_ptr,
    returns_ptr,
    lengths_ptr,
    kl_coef,
    score_clip,
    gamma,
    lam,
    rows,
    length,
    ids_stride,
    logprobs_stride,
    ref_stride,
    values_stride,
    given_stride,
    KL_ESTIMATOR: tl.constexpr,
    REWARD_WEIGHTS: tl.constexpr,
    VALUE_WEIGHTS: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The rewards come from the log-probabilities, or, where there are none, are given; `values_ptr` may be None."""
    row, start, size = rows_of_program(cu_seqlens_ptr, rows, length, R, ALIGN)
    live = row < rows
    ids_row = row_start(cu_seqlens_ptr, row, start, ids_stride, ALIGN)
    rewards_row = start
    if logprobs_ptr is None:
        rewards_row = row_start(cu_seqlens_ptr, row, start, given_stride, ALIGN)
    else:
        logprobs_row = row_start(cu_seqlens_ptr, row, start, logprobs_stride, ALIGN)
        ref_row = row_start(cu_seqlens_ptr, row, start, ref_stride, ALIGN)
        score = _clamped_scores(scores_ptr, score_clip, row, live)
        beta = number(kl_coef)
    discount = 1.0
    if values_ptr is not None:
        values_row = row_start(cu_seqlens_ptr, row, start, values_stride, ALIGN)
        discount = number(gamma)

    chunks = tl.cdiv(tl.max(size, axis=0), T)
    lane = tl.arange(0, T)[None, :]
    zero = tl.zeros([R], tl.float32)
    count, harmonic, reward_sum, value_sum = zero, zero, zero, zero
    met = tl.full([R], AFTER_ALL, tl.int32)
    largest = tl.full([R], BEFORE_ALL, tl.int32)
    for i in range(chunks):
        position = (chunks - 1 - i) * T + lane
        inside = position < size[:, None]
        ids = ids_at(ids_ptr, ids_row, position, live, size)
        act = ids >= 0
        right, met = nearest_met(ids_ptr, ids_row, position, live, size, ids, met, True)
        if logprobs_ptr is None:
            reward = tl.load(rewards_ptr + rewards_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
            reward = tl.where(act, reward, 0.0)
        else:
            logprob = tl.load(logprobs_ptr + logprobs_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
            ref = tl.load(ref_ptr + ref_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
            kl = _kl(tl.where(act, logprob - ref, 0.0), KL_ESTIMATOR)
            last = act & (right == AFTER_ALL)
            reward = tl.where(act, tl.where(last, score[:, None], 0.0) - kl * beta, 0.0)
            tl.store(kl_ptr + start[:, None] + position, kl, mask=inside)
            tl.store(rewards_ptr + start[:, None] + position, reward, mask=inside)
        if values_ptr is not None:
            value = tl.load(values_ptr + values_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
            left = nearest_in_chunk(ids_ptr, ids_row, position, live, size, True)
            largest = tl.maximum(largest, tl.max(ids, axis=1))
            count, harmonic, reward_sum, value_sum = _reduce_chunk(
                reward, tl.where(act, value, 0.0), ids, right, left, start,
                advantages_ptr, returns_ptr, lengths_ptr, discount, count, harmonic, reward_sum, value_sum,
                REWARD_WEIGHTS, VALUE_WEIGHTS, True,
            )  # fmt: skip

    if values_ptr is not None:
        if REWARD_WEIGHTS == "position_reversed" or VALUE_WEIGHTS == "position_reversed":
            count, harmonic, reward_sum, value_sum = zero, zero, zero, zero
            met = tl.full([R], BEFORE_ALL, tl.int32)
            for i in range(chunks):
                position = i * T + lane
                inside = position < size[:, None]
                ids = ids_at(ids_ptr, ids_row, position, live, size)
                act = ids >= 0
                left, met = nearest_met(ids_ptr, ids_row, position, live, size, ids, met, False)
                right = nearest_in_chunk(ids_ptr, ids_row, position, live, size, False)
                reward = tl.load(rewards_ptr + rewards_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
                value = tl.load(values_ptr + values_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
                count, harmonic, reward_sum, value_sum = _reduce_chunk(
                    tl.where(act, reward, 0.0), tl.where(act, value, 0.0), ids, left, right, start,
                    advantages_ptr, returns_ptr, lengths_ptr, discount, count, harmonic, reward_sum, value_sum,
                    REWARD_WEIGHTS, VALUE_WEIGHTS, False,
                )  # fmt: skip

        next_value = zero
        if bootstrap_ptr is not None:
            next_value = tl.load(bootstrap_ptr + row, mask=live, other=0.0).to(tl.float32)
        decay = number(lam)
        macros = largest + 1
        chunks = tl.cdiv(tl.max(macros, axis=0), T)
        advantage = zero
        for i in range(chunks):
            macro = (chunks - 1 - i) * T + lane
            inside = macro < macros[:, None]
            slot = start[:, None] + macro
            reward = tl.load(advantages_ptr + slot, mask=inside, other=0.0)
            value = tl.load(returns_ptr + slot, mask=inside, other=0.0)
            following = tl.load(returns_ptr + slot + 1, mask=macro + 1 < macros[:, None], other=0.0)
            following = tl.where(macro + 1 < macros[:, None], following, next_value[:, None])
            if lengths_ptr is None:
                g = tl.zeros_like(reward) + discount
                link = tl.where(inside, discount * decay, 1.0)
            else:
                steps = tl.load(lengths_ptr + slot, mask=inside, other=1.0)
                g = power(discount, steps)
                link = tl.where(inside, g * power(decay, steps), 1.0)
            delta = tl.where(inside, reward + g * following - value, 0.0)
            advantages, advantage = linked_sum(delta, link, advantage, True)
            tl.store(advantages_ptr + slot, advantages, mask=inside)

        tl.debug_barrier()
        chunks = tl.cdiv(tl.max(size, axis=0), T)
        for i in range(chunks):
            position = (chunks - 1 - i) * T + lane
            ids = ids_at(ids_ptr, ids_row, position, live, size)
            slot = start[:, None] + ids
            advantages = tl.load(advantages_ptr + slot, mask=ids >= 0, other=0.0)
            values = tl.load(returns_ptr + slot, mask=ids >= 0, other=0.0)
            tl.debug_barrier()
            inside = position < size[:, None]
            tl.store(advantages_ptr + start[:, None] + position, advantages, mask=inside)
            tl.store(returns_ptr + start[:, None] + position, advantages + values, mask=inside)


@triton.jit
def _clamped_scores(scores_ptr, score_clip, row, live):
    """`[R]`; a score that is NaN stays NaN."""
    score = tl.load(scores_ptr + row, mask=live, other=0.0).to(tl.float32)
    if score_clip is not None:
        limit = number(score_clip)
        score = tl.where(score > limit, limit, tl.where(score < -limit, -limit, score))
    return score


@triton.jit
def _kl(d, KL_ESTIMATOR: tl.constexpr):
    if KL_ESTIMATOR == "k1":
        return d
    elif KL_ESTIMATOR == "k2":
        return d * d * 0.5
    else:
        return k3(d)


@triton.jit
def _reduce_chunk(
    reward,
    value,
    ids,
    before,
    after,
    start,
    advantages_ptr,
    returns_ptr,
    lengths_ptr,
    discount,
    count,
    harmonic,
    reward_sum,
    value_sum,
    REWARD_WEIGHTS: tl.constexpr,
    VALUE_WEIGHTS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Reduce the tensors whose weights belong to this sweep, into slots; returns what is carried to the next chunk.

    The token of a macro action that the sweep meets last in a chunk writes the slot. Where the macro action goes on
    in the next chunk, that one writes the slot again: no border of chunks is a special case. The barrier keeps the
    two writes in order, and puts all of them before the next sweep.
    """
    REWARDS: tl.constexpr = (REWARD_WEIGHTS != "position_reversed") == REVERSE
    VALUES: tl.constexpr = (VALUE_WEIGHTS != "position_reversed") == REVERSE
    HARMONIC: tl.constexpr = (REWARDS and (REWARD_WEIGHTS == "position" or REWARD_WEIGHTS == "position_reversed")) or (
        VALUES and (VALUE_WEIGHTS == "position" or VALUE_WEIGHTS == "position_reversed")
    )
    LENGTHS: tl.constexpr = REVERSE and lengths_ptr is not None
    COUNT: tl.constexpr = (
        HARMONIC or LENGTHS or (REWARDS and REWARD_WEIGHTS == "mean") or (VALUES and VALUE_WEIGHTS == "mean")
    )
    opens = (ids >= 0) & (before != ids)
    closes = (ids >= 0) & (after != ids)
    slot = start[:, None] + ids
    counts = tl.zeros_like(reward)
    harmonics = counts
    if COUNT:
        counts, count = linked_sum(tl.where(ids < 0, 0.0, 1.0), links(ids, opens, 1.0), count, REVERSE)
    if HARMONIC:
        harmonics, harmonic = linked_sum(
            tl.where(ids < 0, 0.0, 1.0 / counts), links(ids, opens, 1.0), harmonic, REVERSE
        )
    if LENGTHS:
        tl.store(lengths_ptr + slot, counts, mask=closes)
    if REWARDS:
        sums, reward_sum = weighted_sum(reward, ids, opens, counts, reward_sum, discount, REWARD_WEIGHTS)
        tl.store(advantages_ptr + slot, normalized(sums, counts, harmonics, REWARD_WEIGHTS), mask=closes)
    if VALUES:
        sums, value_sum = weighted_sum(value, ids, opens, counts, value_sum, discount, VALUE_WEIGHTS)
        tl.store(returns_ptr + slot, normalized(sums, counts, harmonics, VALUE_WEIGHTS), mask=closes)
    tl.debug_barrier()
    return count, harmonic, reward_sum, value_sum
