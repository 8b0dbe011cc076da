"""KL-penalised rewards and generalised advantage estimation over macro actions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.checks import Number
from marlhf_kernels.ops._registry import define
from marlhf_kernels.ops.macro import REWARD_WEIGHTS, VALUE_WEIGHTS, result_dtype

KL_ESTIMATORS = ("k1", "k2", "k3")
DISCOUNTS = ("macro", "token")


class Advantages(NamedTuple):
    """Token-aligned results of `macro_gae`; 0 where the id is -1."""

    advantages: Tensor
    returns: Tensor


class TokenRewards(NamedTuple):
    """Token-aligned results of `kl_penalized_rewards`; 0 where the id is -1."""

    rewards: Tensor
    kl: Tensor


class RolloutAdvantages(NamedTuple):
    """Token-aligned results of `rollout_advantages`; 0 where the id is -1."""

    advantages: Tensor
    returns: Tensor
    rewards: Tensor
    kl: Tensor


def kl_penalized_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    macro_ids: Tensor,
    *,
    kl_coef: Number,
    kl_estimator: str = "k1",
    score_clip: Number | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> TokenRewards:
    r"""Token rewards :math:`r_t = -\beta\, kl_t`, plus the sequence's score on its last action token.

    With :math:`d = \log p - \log p_{ref}` the estimators of the KL divergence are k1 :math:`d`, k2 :math:`d^2
    / 2` and k3 :math:`e^{-d} - 1 + d` (J. Schulman, "Approximating KL divergence", 2020), in nats. The
    penalty is that of Ziegler et al., arXiv 1909.08593.

    Args:
        scores: `[B]`, one for each sequence. That of a sequence without an action token is dropped, even NaN.
        logprobs, ref_logprobs: `[B, T]`, or packed `[N]`. Entries at id -1 are never used.
        macro_ids: alike, int32 or int64, -1 where the token is no action.
        kl_coef: :math:`\beta`, a number or a 0-d tensor.
        kl_estimator: `"k1"`, `"k2"` or `"k3"`.
        score_clip: scores are clamped to +-score_clip where given; a number > 0 or a 0-d tensor.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `(rewards, kl)`, token-aligned, 0 where the id is -1; float32, float64 where an input is. No gradient
        flows.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices; an unknown estimator; a bound that is not above
            0.
    """
    _check_rollout(scores, logprobs, ref_logprobs, macro_ids, kl_estimator, cu_seqlens, max_seqlen)
    beta = checks.coefficient("kl_coef", kl_coef, logprobs)
    limit = checks.optional_coefficient("score_clip", score_clip, logprobs, above=0, finite=False)
    return TokenRewards(
        *_kl_penalized_rewards(
            scores, logprobs, ref_logprobs, macro_ids, beta, kl_estimator, limit, cu_seqlens, max_seqlen
        )
    )


def macro_gae(
    rewards: Tensor,
    values: Tensor,
    macro_ids: Tensor,
    *,
    gamma: Number = 1.0,
    lam: Number = 0.95,
    reward_weights: str = "sum",
    value_weights: str = "mean",
    discount_per: str = "macro",
    bootstrap_values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Advantages:
    r"""Generalised advantage estimation over macro actions.

    With macro reward :math:`R_k` and macro value :math:`V_k` (see `macro_reduce`) of macro actions 0 .. M -
    1,

    .. math::
        \delta_k = R_k + g_k V_{k+1} - V_k, \qquad A_k = \delta_k + g_k l_k A_{k+1}, \qquad G_k = A_k + V_k,

    with :math:`g_k = \gamma, l_k = \lambda`, or :math:`\gamma^{n_k}, \lambda^{n_k}` for
    `discount_per="token"`. :math:`V_M` is the bootstrap value and :math:`A_M = 0`. With one token in every
    macro action it is the estimator of Schulman et al., arXiv 1506.02438; over macro actions it is that of
    MA-RLHF (Chai et al., arXiv 2410.02743).

    Args:
        rewards, values: `[B, T]`, or packed `[N]`, of tokens. Entries at id -1 are never used.
        macro_ids: alike, int32 or int64, -1 where the token is no action. Holes neither decay nor leak.
        gamma, lam: discount and GAE lambda in [0, 1], numbers or 0-d tensors.
        reward_weights: a name of `macro_reduce`; `discounted_sum` takes `gamma`.
        value_weights: one of mean, first, last, position, position_reversed.
        discount_per: `"macro"` or `"token"`.
        bootstrap_values: `[B]`, the value after the last macro action (of truncated responses); None is 0.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `(advantages, returns)`: every token has those of its macro action; 0 where the id is -1. float32,
        float64 where an input is. No gradient flows.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices; unknown names; gamma or lam outside of [0, 1].
    """
    rows = checks.ids(macro_ids, cu_seqlens, max_seqlen)
    checks.per_token("rewards", rewards, macro_ids)
    _check_gae(values, macro_ids, rows, reward_weights, value_weights, discount_per, bootstrap_values)
    discount = checks.coefficient("gamma", gamma, rewards, at_least=0, at_most=1)
    decay = checks.coefficient("lam", lam, rewards, at_least=0, at_most=1)
    return Advantages(
        *_macro_gae(
            rewards,
            values,
            macro_ids,
            discount,
            decay,
            reward_weights,
            value_weights,
            discount_per,
            bootstrap_values,
            cu_seqlens,
            max_seqlen,
        )
    )


def rollout_advantages(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor,
    macro_ids: Tensor,
    *,
    kl_coef: Number,
    kl_estimator: str = "k1",
    score_clip: Number | None = None,
    gamma: Number = 1.0,
    lam: Number = 0.95,
    reward_weights: str = "sum",
    value_weights: str = "mean",
    discount_per: str = "macro",
    bootstrap_values: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> RolloutAdvantages:
    """`kl_penalized_rewards` and `macro_gae` in one: from a rollout to its advantages.

    Args:
        scores: `[B]`, one for each sequence. That of a sequence without an action token is dropped, even NaN.
        logprobs, ref_logprobs, values: `[B, T]`, or packed `[N]`. Entries at id -1 are never used.
        macro_ids: alike, int32 or int64, -1 where the token is no action.
        kl_coef, kl_estimator, score_clip: as in `kl_penalized_rewards`.
        gamma, lam, reward_weights, value_weights, discount_per, bootstrap_values: as in `macro_gae`.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `(advantages, returns, rewards, kl)`, token-aligned, 0 where the id is -1; float32, float64 where an
        input is. No gradient flows.

    Raises:
        TypeError, ValueError: as the two functions do.
    """
    rows = _check_rollout(scores, logprobs, ref_logprobs, macro_ids, kl_estimator, cu_seqlens, max_seqlen)
    _check_gae(values, macro_ids, rows, reward_weights, value_weights, discount_per, bootstrap_values)
    beta = checks.coefficient("kl_coef", kl_coef, logprobs)
    limit = checks.optional_coefficient("score_clip", score_clip, logprobs, above=0, finite=False)
    discount = checks.coefficient("gamma", gamma, logprobs, at_least=0, at_most=1)
    decay = checks.coefficient("lam", lam, logprobs, at_least=0, at_most=1)
    return RolloutAdvantages(
        *_rollout_advantages(
            scores,
            logprobs,
            ref_logprobs,
            values,
            macro_ids,
            beta,
            kl_estimator,
            limit,
            discount,
            decay,
            reward_weights,
            value_weights,
            discount_per,
            bootstrap_values,
            cu_seqlens,
            max_seqlen,
        )
    )


def _check_rollout(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    macro_ids: Tensor,
    kl_estimator: str,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> int:
    rows = checks.ids(macro_ids, cu_seqlens, max_seqlen)
    checks.per_token("logprobs", logprobs, macro_ids)
    checks.per_token("ref_logprobs", ref_logprobs, macro_ids)
    checks.per_sequence("scores", scores, rows, macro_ids)
    checks.choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    return rows


def _check_gae(
    values: Tensor,
    macro_ids: Tensor,
    rows: int,
    reward_weights: str,
    value_weights: str,
    discount_per: str,
    bootstrap_values: Tensor | None,
) -> None:
    checks.per_token("values", values, macro_ids)
    checks.choice("reward_weights", reward_weights, REWARD_WEIGHTS)
    checks.choice("value_weights", value_weights, VALUE_WEIGHTS)
    checks.choice("discount_per", discount_per, DISCOUNTS)
    if bootstrap_values is not None:
        checks.per_sequence("bootstrap_values", bootstrap_values, rows, macro_ids)


def _like_ids(macro_ids: Tensor, number: int, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    dtype = result_dtype(*inputs)
    return tuple(macro_ids.new_empty(macro_ids.shape, dtype=dtype) for _ in range(number))


_kl_penalized_rewards = define(
    "kl_penalized_rewards(Tensor scores, Tensor logprobs, Tensor ref_logprobs, Tensor macro_ids, Tensor kl_coef, str "
    "kl_estimator, Tensor? score_clip, Tensor? cu_seqlens, SymInt? max_seqlen) -> (Tensor rewards, Tensor kl)",
    lambda scores, logprobs, ref_logprobs, macro_ids, *rest: _like_ids(macro_ids, 2, scores, logprobs, ref_logprobs),
    detached=True,
)

_macro_gae = define(
    "macro_gae(Tensor rewards, Tensor values, Tensor macro_ids, Tensor gamma, Tensor lam, str reward_weights, str "
    "value_weights, str discount_per, Tensor? bootstrap_values, Tensor? cu_seqlens, SymInt? max_seqlen) -> (Tensor "
    "advantages, Tensor returns)",
    lambda rewards, values, macro_ids, gamma, lam, rw, vw, per, bootstrap, cu_seqlens, max_seqlen: _like_ids(
        macro_ids, 2, rewards, values, bootstrap
    ),
    detached=True,
)


def _fake_rollout_advantages(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, values: Tensor, macro_ids: Tensor, *rest: object
) -> tuple[Tensor, ...]:
    bootstrap = rest[-3]
    assert bootstrap is None or isinstance(bootstrap, torch.Tensor)
    return _like_ids(macro_ids, 4, scores, logprobs, ref_logprobs, values, bootstrap)


_rollout_advantages = define(
    "rollout_advantages(Tensor scores, Tensor logprobs, Tensor ref_logprobs, Tensor values, Tensor macro_ids, Tensor "
    "kl_coef, str kl_estimator, Tensor? score_clip, Tensor gamma, Tensor lam, str reward_weights, str value_weights, "
    "str discount_per, Tensor? bootstrap_values, Tensor? cu_seqlens, SymInt? max_seqlen) -> (Tensor advantages, Tensor "
    "returns, Tensor rewards, Tensor kl)",
    _fake_rollout_advantages,
    detached=True,
)
