"""Segmented sums over macro actions, chunk by chunk of a sweep over a sequence, for all kernels of this package."""

from __future__ import annotations

import triton
import triton.language as tl

from marlhf_kernels.gpu._rows import ids_at

# Ids that no token has: to the left of the first action token, and to the right of the last one.
BEFORE_ALL = tl.constexpr(-1)
AFTER_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def nearest_met(macro_ids, base, position, live, size, ids, carry, REVERSE: tl.constexpr):
    """`[R, T]` id of the action token that a sweep met last before each, and `[R]` before the next chunk.

    `carry` is the latter from the chunk before: BEFORE_ALL at the start of a sweep, AFTER_ALL of one in reverse.
    """
    nearest = nearest_in_chunk(macro_ids, base, position, live, size, not REVERSE)
    if REVERSE:
        nearest = tl.minimum(nearest, carry[:, None])
        carry = tl.minimum(carry, tl.min(tl.where(ids < 0, AFTER_ALL, ids), axis=1))
    else:
        nearest = tl.maximum(nearest, carry[:, None])
        carry = tl.maximum(carry, tl.max(ids, axis=1))
    return nearest, carry


@triton.jit
def nearest_in_chunk(macro_ids, base, position, live, size, LEFT: tl.constexpr):
    """`[R, T]` id of the nearest action token to the left, else right, of each in its chunk; else the border.

    Ids never fall, so the nearest to the left has the largest id there and the nearest to the right the least: the
    running maximum and minimum step over tokens that are no action.
    """
    lane = tl.arange(0, position.shape[1])[None, :]
    if LEFT:
        ids = ids_at(macro_ids, base, position - 1, live, size)
        return tl.associative_scan(tl.where(lane > 0, ids, BEFORE_ALL), 1, _larger)
    else:
        ids = ids_at(macro_ids, base, position + 1, live, size)
        known = (lane < position.shape[1] - 1) & (ids >= 0)
        return tl.associative_scan(tl.where(known, ids, AFTER_ALL), 1, _smaller, reverse=True)


@triton.jit
def _affine(a1, b1, a2, b2):
    """First x -> a1 x + b1, then x -> a2 x + b2; a factor 0 drops what it meets, be it NaN."""
    return a1 * a2, tl.where(a2 == 0, b2, b2 + a2 * b1)


@triton.jit
def linked_sum(x, link, carry, REVERSE: tl.constexpr):
    """`[R, T]` s_t = x_t + link_t s', s' being the s before it in the order of the sweep, and `[R]` the last s.

    `carry` is the last s of the chunk before. No differences of running sums: they would cancel.
    """
    a, s = tl.associative_scan((link, x), 1, _affine, reverse=REVERSE)
    s = tl.where(a == 0, s, s + a * carry[:, None])
    lane = tl.arange(0, x.shape[1])[None, :]
    edge = 0 if REVERSE else x.shape[1] - 1
    return s, tl.sum(tl.where(lane == edge, s, 0.0), axis=1)


@triton.jit
def links(ids, opens, factor):
    """What a sum over each macro action is linked by: 0 where it opens, 1 over tokens that are no action."""
    return tl.where(ids < 0, 1.0, tl.where(opens, 0.0, factor))


@triton.jit
def weighted_sum(x, ids, opens, count, carry, discount, WEIGHTS: tl.constexpr):
    """`[R, T]` the sum over each macro action so far in the sweep of its WEIGHTS, and the carry of `linked_sum`.

    x is 0 where the token is no action, `count` how many of its macro action the sweep has met. The sweep runs from
    right to left, for `position_reversed` from left to right. Of `mean` and the positions it is the numerator.
    """
    if WEIGHTS == "first":
        return x, carry
    elif WEIGHTS == "last":
        return linked_sum(tl.where(opens, x, 0.0), links(ids, opens, 1.0), carry, True)
    elif WEIGHTS == "position":
        return linked_sum(tl.where(ids < 0, 0.0, x / count), links(ids, opens, 1.0), carry, True)
    elif WEIGHTS == "position_reversed":
        return linked_sum(tl.where(ids < 0, 0.0, x / count), links(ids, opens, 1.0), carry, False)
    elif WEIGHTS == "discounted_sum":
        return linked_sum(x, links(ids, opens, discount), carry, True)
    else:
        return linked_sum(x, links(ids, opens, 1.0), carry, True)


@triton.jit
def normalized(total, count, harmonic, WEIGHTS: tl.constexpr):
    """The weighted sum over the sum of its weights, which is that of 1 / count for the positions."""
    if WEIGHTS == "mean":
        return total / count
    elif WEIGHTS == "position" or WEIGHTS == "position_reversed":
        return total / harmonic
    else:
        return total


@triton.jit
def token_weight(ids, opens, carry, discount, WEIGHTS: tl.constexpr):
    """`[R, T]` what `normalized` divides the weight of each token by the sum of, and the carry.

    The sweep runs from right to left for `last` and `position`, else from left to right.
    """
    if WEIGHTS == "first" or WEIGHTS == "last":
        return tl.where(opens, 1.0, 0.0), carry
    elif WEIGHTS == "discounted_sum":
        return linked_sum(tl.where(opens, 1.0, 0.0), links(ids, opens, discount), carry, False)
    elif WEIGHTS == "position" or WEIGHTS == "position_reversed":
        count, carry = linked_sum(tl.where(ids < 0, 0.0, 1.0), links(ids, opens, 1.0), carry, WEIGHTS == "position")
        return tl.where(ids < 0, 0.0, 1.0 / count), carry
    else:
        return tl.where(ids < 0, 0.0, 1.0), carry


@triton.jit
def k3(d):
    """e^-d - 1 + d, never negative: near 0, where the terms cancel, by its series."""
    series = 1.0 / 3628800
    series = 1.0 / 362880 - d * series
    series = 1.0 / 40320 - d * series
    series = 1.0 / 5040 - d * series
    series = 1.0 / 720 - d * series
    series = 1.0 / 120 - d * series
    series = 1.0 / 24 - d * series
    series = 1.0 / 6 - d * series
    series = 0.5 - d * series
    return tl.where(tl.abs(d) < 0.5, d * d * series, tl.exp(-d) - 1.0 + d)


@triton.jit
def power(base, n):
    """base^n for base >= 0, n > 0: near 1, where n may be large, hardware's logarithm is too coarse for that."""
    s = (base - 1.0) / (base + 1.0)
    square = s * s
    series = 2.0 * s * (1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9)))))
    exponent = tl.where(tl.abs(base - 1.0) < 0.3, series * 1.4426950408889634, tl.log2(base))
    return tl.exp2(n * exponent)
