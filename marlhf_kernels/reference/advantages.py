"""KL-penalised rewards and generalised advantage estimation over macro actions."""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf_kernels.reference._layout import Macros, accumulation_dtype, scalar
from marlhf_kernels.reference.macro import reduce_slots, token_weights


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
    dtype = accumulation_dtype(scores, logprobs, ref_logprobs)
    macros = Macros(macro_ids, cu_seqlens)
    rewards, kl = _rewards(macros, scores, logprobs, ref_logprobs, kl_coef, kl_estimator, score_clip, dtype)
    return macros.unflat(rewards), macros.unflat(kl)


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
    dtype = accumulation_dtype(rewards, values, bootstrap_values)
    macros = Macros(macro_ids, cu_seqlens)
    advantages, returns = _gae(
        macros,
        macros.clean(rewards, dtype),
        values,
        gamma,
        lam,
        reward_weights,
        value_weights,
        discount_per,
        bootstrap_values,
    )
    return macros.unflat(advantages), macros.unflat(returns)


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
    dtype = accumulation_dtype(scores, logprobs, ref_logprobs, values, bootstrap_values)
    macros = Macros(macro_ids, cu_seqlens)
    rewards, kl = _rewards(macros, scores, logprobs, ref_logprobs, kl_coef, kl_estimator, score_clip, dtype)
    advantages, returns = _gae(
        macros, rewards, values, gamma, lam, reward_weights, value_weights, discount_per, bootstrap_values
    )
    return macros.unflat(advantages), macros.unflat(returns), macros.unflat(rewards), macros.unflat(kl)


def _rewards(
    macros: Macros,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kl_coef: Tensor,
    kl_estimator: str,
    score_clip: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """[N], [N]: r_t = -kl_coef kl_t, plus the score on the last action token of each sequence."""
    d = torch.where(macros.action, macros.flat(logprobs).to(dtype) - macros.flat(ref_logprobs).to(dtype), 0)
    if kl_estimator == "k1":
        kl = d
    elif kl_estimator == "k2":
        kl = d * d / 2
    else:  # k3 = e^-d - 1 + d
        kl = torch.expm1(-d) + d
    scores = scores.to(dtype)
    if score_clip is not None:
        limit = scalar(score_clip, dtype, macros.device)
        scores = torch.clamp(scores, -limit, limit)
    rewards = -(kl * scalar(kl_coef, dtype, macros.device))
    if macros.num_rows:
        rewards = torch.where(macros.last_of_row, rewards + scores[macros.row], rewards)
    return torch.where(macros.action, rewards, 0), kl


def _gae(
    macros: Macros,
    rewards: Tensor,
    values: Tensor,
    gamma: Tensor,
    lam: Tensor,
    reward_weights: str,
    value_weights: str,
    discount_per: str,
    bootstrap_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """[N], [N]: A_k = delta_k + g_k l_k A_{k+1}, delta_k = R_k + g_k V_{k+1} - V_k; G_k = A_k + V_k."""
    dtype = rewards.dtype
    reward = reduce_slots(macros, rewards, token_weights(macros, reward_weights, gamma, dtype))[:-1]
    value = reduce_slots(macros, macros.clean(values, dtype), token_weights(macros, value_weights, gamma, dtype))[:-1]

    # How many macro actions of the same sequence follow the one in each slot; negative in an empty slot.
    following = macros.macros_before[macros.end] - macros.macros_before[1:]
    following = torch.where(macros.exists, following, -1)

    steps = macros.lengths[:-1].to(dtype) if discount_per == "token" else torch.ones_like(reward)
    g = torch.pow(scalar(gamma, dtype, macros.device), steps)
    decay = torch.pow(scalar(lam, dtype, macros.device), steps) * g
    next_value = torch.nn.functional.pad(value[1:], (0, 1))
    if bootstrap_values is None or macros.num_rows == 0:
        next_value = torch.where(following > 0, next_value, 0)
    else:
        next_value = torch.where(following > 0, next_value, bootstrap_values.to(dtype)[macros.row])
    delta = torch.where(macros.exists, reward + g * next_value - value, 0)

    advantage = _discounted_suffix_sums(delta, decay, following)
    spill = (0, 1)
    advantages = macros.to_tokens(torch.nn.functional.pad(advantage, spill))
    returns = macros.to_tokens(torch.nn.functional.pad(advantage + value, spill))
    return advantages, returns


def _discounted_suffix_sums(delta: Tensor, decay: Tensor, following: Tensor) -> Tensor:
    """Solve A[s] = delta[s] + decay[s] A[s + 1] inside each sequence, by doubling.

    After the step of stride d every A[s] covers 2 d entries, and decay[s] is the product over them.
    `following` keeps it inside the sequence by selection, not by a factor 0: one sequence's NaN stays its
    own.
    """
    advantage = delta
    longest = delta.shape[0] - 1
    if delta.device.type == "cpu" and delta.shape[0]:
        longest = int(following.max())
    stride = 1
    while stride <= longest:
        reaches = following[:-stride] >= stride
        head = advantage[:-stride]
        head = torch.where(reaches, head + decay[:-stride] * advantage[stride:], head)
        advantage = torch.cat((head, advantage[-stride:]))
        product = torch.where(reaches, decay[:-stride] * decay[stride:], decay[:-stride])
        decay = torch.cat((product, decay[-stride:]))
        stride *= 2
    return advantage
