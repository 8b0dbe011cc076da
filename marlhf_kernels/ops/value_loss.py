"""The clipped value loss over tokens or macro actions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.checks import Number
from marlhf_kernels.ops._registry import define, differentiable
from marlhf_kernels.ops.macro import VALUE_WEIGHTS, result_dtype
from marlhf_kernels.ops.policy_loss import backward_gradient, normalization, save_gradient

LEVELS = ("token", "macro")


class ValueLoss(NamedTuple):
    """0-d tensors. The gradient flows through `loss`."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of units whose clipped term is strictly larger."""


def macro_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    macro_ids: Tensor,
    *,
    clip: Number | None = 0.2,
    level: str = "token",
    value_weights: str = "mean",
    normalize_by: str | None = None,
    normalizer: Number | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> ValueLoss:
    r"""Clipped squared error between values and returns.

    .. math:: \tfrac12 \max\big((V - G)^2,\; (\mathrm{clip}(V, V_{old} - c, V_{old} + c) - G)^2\big)

    At level `token` every token's value regresses to its macro action's return. At level `macro` the values
    and the old values of a macro action are first reduced by `value_weights` (see `macro_reduce`), and the
    return is read at its first token. Where the two terms tie the unclipped one counts, with its full
    gradient. Sources: the clipped value loss of OpenAI baselines' PPO; MA-RLHF, Chai et al., arXiv
    2410.02743.

    The result is the sum over units (tokens, or macro actions at level `macro`) divided by the number of
    action `tokens` or of `macros`; or for `sequences` the mean over sequences that have a unit of each one's
    mean.

    Args:
        values, old_values, returns: `[B, T]`, or packed `[N]`. Entries at id -1 are never used.
        macro_ids: alike, int32 or int64, -1 where the token is no action.
        clip: c, a number >= 0 or a 0-d tensor; None turns clipping off.
        level: `"token"` or `"macro"`.
        value_weights: mean, first, last, position or position_reversed; used at level `macro` alone.
        normalize_by: `"tokens"`, `"macros"` or `"sequences"`; None takes the level's own unit.
        normalizer: a number or a 0-d tensor that replaces the count.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `ValueLoss(loss, clip_fraction)`, 0-d tensors on the device; float32, float64 where an input is.
        Without any action token both and the gradient are 0. The gradient flows to `values`; there is no
        second derivative.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices; unknown names; numbers out of range.
    """
    checks.ids(macro_ids, cu_seqlens, max_seqlen)
    checks.per_token("values", values, macro_ids)
    checks.per_token("old_values", old_values, macro_ids)
    checks.per_token("returns", returns, macro_ids)
    checks.choice("level", level, LEVELS)
    checks.choice("value_weights", value_weights, VALUE_WEIGHTS)
    normalize_by = normalization(normalize_by, own="tokens" if level == "token" else "macros")
    limit = checks.optional_coefficient("clip", clip, values, at_least=0, finite=False)
    count = checks.optional_coefficient("normalizer", normalizer, values, at_least=0)
    loss, clip_fraction, _, _ = _macro_value_loss(
        values,
        old_values,
        returns,
        macro_ids,
        limit,
        level,
        value_weights,
        normalize_by,
        count,
        cu_seqlens,
        max_seqlen,
    )
    return ValueLoss(loss, clip_fraction)


def _fake_macro_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *rest: object) -> tuple[Tensor, ...]:
    dtype = result_dtype(values, old_values, returns)
    return (
        values.new_empty((), dtype=dtype),
        values.new_empty((), dtype=dtype),
        values.new_empty(values.shape, dtype=dtype),
        values.new_empty((), dtype=dtype),
    )


_macro_value_loss = define(
    "macro_value_loss(Tensor values, Tensor old_values, Tensor returns, Tensor macro_ids, Tensor? clip, str level, str "
    "value_weights, str normalize_by, Tensor? normalizer, Tensor? cu_seqlens, SymInt? max_seqlen) -> (Tensor loss, "
    "Tensor clip_fraction, Tensor gradient, Tensor count)",
    _fake_macro_value_loss,
)

differentiable(_macro_value_loss, inputs=(0,), save=save_gradient, backward=backward_gradient)
