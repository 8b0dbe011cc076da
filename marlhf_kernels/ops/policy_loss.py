"""The clipped policy loss over tokens or macro actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.checks import Number
from marlhf_kernels.ops._registry import define, differentiable
from marlhf_kernels.ops.macro import result_dtype

RATIO_LEVELS = ("token", "macro", "macro_mean")
NORMALIZATIONS = ("tokens", "macros", "sequences")


class PolicyLoss(NamedTuple):
    """0-d tensors. The gradient flows through `loss`; the others are statistics of this call."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of units whose clipped term is strictly larger."""
    approx_kl: Tensor
    """Mean over action tokens of e^d - 1 - d, d = logprobs - old_logprobs, in nats."""
    ratio_mean: Tensor
    ratio_max: Tensor


def macro_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    macro_ids: Tensor,
    *,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    ratio_level: str = "token",
    normalize_by: str | None = None,
    normalizer: Number | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> PolicyLoss:
    r"""PPO's clipped policy loss with the ratio of tokens or of macro actions.

    A unit (a token at level `token`, else a macro action) has the ratio :math:`\rho = e^s` and the loss

    .. math:: \max(-A \rho,\; -A\, \mathrm{clip}(\rho, 1 - \text{clip\_low}, 1 + \text{clip\_high})),

    where with :math:`d = \log p - \log p_{old}` the log-ratio :math:`s` is :math:`d` of the token, the sum of
    :math:`d` over the macro action (`macro`), or its mean (`macro_mean`; with one macro action a response
    that is GSPO, Zheng et al., arXiv 2507.18071). It is clamped to +-60 before exp, with gradient 0 beyond.
    Where the two terms tie the unclipped one counts, with its full gradient. With `dual_clip` c (Ye et al.,
    arXiv 1912.09729) a unit with A < 0 has at most the loss -A c, with gradient 0 where that is strictly
    smaller. A unit with advantage 0 contributes 0. Sources: PPO, Schulman et al., arXiv 1707.06347; MA-RLHF,
    Chai et al., arXiv 2410.02743.

    The result is the sum over units divided by the number of action `tokens` or of `macros`; or for
    `sequences` the mean over sequences that have a unit of each one's mean over its units.

    Args:
        logprobs, old_logprobs, advantages: `[B, T]`, or packed `[N]`. Entries at id -1 are never used. At the
            levels `macro` and `macro_mean` the advantage is read at the first token of the macro action.
        macro_ids: alike, int32 or int64, -1 where the token is no action.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; numbers >= 0 or 0-d
            tensors.
        dual_clip: a number > 1 + clip_high or a 0-d tensor; None turns it off.
        ratio_level: `"token"`, `"macro"` or `"macro_mean"`.
        normalize_by: `"tokens"`, `"macros"` or `"sequences"`; None takes the level's own unit.
        normalizer: a number or a 0-d tensor that replaces the count. Under gradient accumulation and data
            parallelism pass the count of the whole step on all ranks: the split then changes nothing.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `PolicyLoss(loss, clip_fraction, approx_kl, ratio_mean, ratio_max)`, 0-d tensors on the device;
        float32, float64 where an input is. Statistics use this call's own counts. Without any action token
        the loss and its gradient are 0 and the ratios 1. The gradient flows to `logprobs`; there is no second
        derivative.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices; unknown names; numbers out of range.
    """
    checks.ids(macro_ids, cu_seqlens, max_seqlen)
    checks.per_token("logprobs", logprobs, macro_ids)
    checks.per_token("old_logprobs", old_logprobs, macro_ids)
    checks.per_token("advantages", advantages, macro_ids)
    options = policy_options(logprobs, clip_low, clip_high, dual_clip, ratio_level, normalize_by, normalizer)
    loss, statistics, _, _ = policy_loss(
        logprobs, old_logprobs, advantages, macro_ids, *options, cu_seqlens, max_seqlen
    )
    return PolicyLoss(loss, *statistics.unbind(0))


class PolicyOptions(NamedTuple):
    """The options of the policy loss as the op takes them, checked."""

    clip_low: Tensor
    clip_high: Tensor
    dual_clip: Tensor | None
    ratio_level: str
    normalize_by: str
    normalizer: Tensor | None


def policy_options(
    data: Tensor,
    clip_low: Number,
    clip_high: Number,
    dual_clip: Number | None,
    ratio_level: str,
    normalize_by: str | None,
    normalizer: Number | None,
) -> PolicyOptions:
    """Check the options of the policy loss."""
    checks.choice("ratio_level", ratio_level, RATIO_LEVELS)
    low = checks.coefficient("clip_low", clip_low, data, at_least=0, finite=False)
    high = checks.coefficient("clip_high", clip_high, data, at_least=0, finite=False)
    dual = checks.optional_coefficient("dual_clip", dual_clip, data, above=1, finite=False)
    known = not isinstance(dual_clip, Tensor) and not isinstance(clip_high, Tensor)
    if dual_clip is not None and known and not dual_clip > 1 + clip_high:
        raise ValueError(f"dual_clip must be greater than 1 + clip_high = {1 + clip_high}, got {dual_clip}")
    return PolicyOptions(
        low,
        high,
        dual,
        ratio_level,
        normalization(normalize_by, own="tokens" if ratio_level == "token" else "macros"),
        checks.optional_coefficient("normalizer", normalizer, data, at_least=0),
    )


def normalization(normalize_by: str | None, *, own: str) -> str:
    """The name of what the sum is divided by, checked; None is the level's own unit."""
    if normalize_by is None:
        return own
    checks.choice("normalize_by", normalize_by, NORMALIZATIONS)
    return normalize_by


def _fake_macro_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *rest: object
) -> tuple[Tensor, ...]:
    dtype = result_dtype(logprobs, old_logprobs, advantages)
    return (
        logprobs.new_empty((), dtype=dtype),
        logprobs.new_empty((4,), dtype=dtype),
        logprobs.new_empty(logprobs.shape, dtype=dtype),
        logprobs.new_empty((), dtype=dtype),
    )


policy_loss = define(
    "macro_policy_loss(Tensor logprobs, Tensor old_logprobs, Tensor advantages, Tensor macro_ids, Tensor clip_low, "
    "Tensor clip_high, Tensor? dual_clip, str ratio_level, str normalize_by, Tensor? normalizer, Tensor? cu_seqlens, "
    "SymInt? max_seqlen) -> (Tensor loss, Tensor statistics, Tensor gradient, Tensor count)",
    _fake_macro_policy_loss,
)

_scale_gradient = define(
    "scale_gradient(Tensor gradient, Tensor grad_output, Tensor count, ScalarType dtype) -> Tensor",
    lambda gradient, grad_output, count, dtype: gradient.new_empty(gradient.shape, dtype=dtype),
    detached=True,
)


def save_gradient(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
    """Forward has the gradient already, but for the count: keep both."""
    ctx.dtype = args[0].dtype
    _, statistics, gradient, count = results
    ctx.mark_non_differentiable(statistics, gradient, count)
    return gradient, count


def backward_gradient(
    ctx: Any, saved: Sequence[Tensor], grad: Tensor | None, *unused: Tensor | None
) -> Sequence[Tensor | None]:
    """The saved gradient times the upstream one over the count, in the dtype of the input."""
    _, gradient, count = saved
    return (None if grad is None else _scale_gradient(gradient, grad, count, ctx.dtype),)


differentiable(policy_loss, inputs=(0,), save=save_gradient, backward=backward_gradient)


def _fake_policy_penalty(
    logprobs: Tensor, entropy: Tensor | None, ref_logprobs: Tensor | None, *rest: object
) -> tuple[Tensor, ...]:
    dtype = result_dtype(logprobs, entropy, ref_logprobs)
    return (
        logprobs.new_empty((), dtype=dtype),
        logprobs.new_empty(logprobs.shape, dtype=dtype),
        logprobs.new_empty((0,) if entropy is None else entropy.shape, dtype=dtype),
        logprobs.new_empty((), dtype=dtype),
    )


policy_penalty = define(
    "policy_penalty(Tensor logprobs, Tensor? entropy, Tensor? ref_logprobs, Tensor macro_ids, Tensor entropy_coef, "
    "Tensor kl_loss_coef, Tensor? normalizer, Tensor? cu_seqlens, SymInt? max_seqlen) -> (Tensor loss, Tensor "
    "grad_logprobs, Tensor grad_entropy, Tensor count)",
    _fake_policy_penalty,
)
"""kl_loss_coef mean(d^2 / 2) - entropy_coef mean(entropy) over action tokens, d = logprobs - ref_logprobs."""


def _save_penalty(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
    ctx.dtypes = [None if x is None else x.dtype for x in args[:2]]
    _, grad_logprobs, grad_entropy, count = results
    ctx.mark_non_differentiable(grad_logprobs, grad_entropy, count)
    return grad_logprobs, grad_entropy, count


def _backward_penalty(
    ctx: Any, saved: Sequence[Tensor], grad: Tensor | None, *unused: Tensor | None
) -> Sequence[Tensor | None]:
    *_, grad_logprobs, grad_entropy, count = saved
    if grad is None:
        return None, None
    for_logprobs, for_entropy = ctx.dtypes
    return (
        _scale_gradient(grad_logprobs, grad, count, for_logprobs),
        None if for_entropy is None else _scale_gradient(grad_entropy, grad, count, for_entropy),
    )


differentiable(policy_penalty, inputs=(0, 1), save=_save_penalty, backward=_backward_penalty)

action_labels = define(
    "action_labels(Tensor labels, Tensor macro_ids, Tensor? cu_seqlens, SymInt? max_seqlen) -> Tensor",
    lambda labels, macro_ids, cu_seqlens, max_seqlen: labels.new_empty(labels.shape),
)
"""The labels of action tokens, -1 elsewhere."""
