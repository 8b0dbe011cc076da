"""Calls of the native KL-penalised rewards and generalised advantage estimation over macro actions."""

from __future__ import annotations

import math

from torch import Tensor

from marlhf_kernels.cpu.calls import (
    TENSOR,
    Batch,
    BatchFunction,
    number,
    optional_fields,
    tensor_fields,
    with_unit_stride,
)
from marlhf_kernels.cpu.macro import WEIGHTS

# As `advantages.cpp` numbers them.
ESTIMATORS = {"k1": 0, "k2": 1, "k3": 2}
DISCOUNT_PER = {"macro": 0, "token": 1}

_KL_PENALTY = TENSOR * 3 + "ddq"
_GAE = TENSOR * 2 + "ddqqq"
_KL_PENALIZED_REWARDS = BatchFunction("kl_penalized_rewards", _KL_PENALTY + "PP")
_MACRO_GAE = BatchFunction("macro_gae", TENSOR + _GAE + "PP")
_ROLLOUT_ADVANTAGES = BatchFunction("rollout_advantages", _KL_PENALTY + _GAE + "PPPP")


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
    batch = Batch(macro_ids, cu_seqlens)
    logprobs, ref_logprobs = with_unit_stride(logprobs), with_unit_stride(ref_logprobs)
    rewards, kl = batch.empty(), batch.empty()
    _KL_PENALIZED_REWARDS(
        batch,
        *tensor_fields(scores),
        *tensor_fields(logprobs),
        *tensor_fields(ref_logprobs),
        kl_coef.item(),
        number(score_clip, math.inf),
        ESTIMATORS[kl_estimator],
        rewards.data_ptr(),
        kl.data_ptr(),
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
    batch = Batch(macro_ids, cu_seqlens)
    rewards, values = with_unit_stride(rewards), with_unit_stride(values)
    advantages, returns = batch.empty(), batch.empty()
    _MACRO_GAE(
        batch,
        *tensor_fields(rewards),
        *tensor_fields(values),
        *optional_fields(bootstrap_values),
        gamma.item(),
        lam.item(),
        WEIGHTS[reward_weights],
        WEIGHTS[value_weights],
        DISCOUNT_PER[discount_per],
        advantages.data_ptr(),
        returns.data_ptr(),
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
    batch = Batch(macro_ids, cu_seqlens)
    logprobs, ref_logprobs = with_unit_stride(logprobs), with_unit_stride(ref_logprobs)
    values = with_unit_stride(values)
    advantages, returns, rewards, kl = batch.empty(), batch.empty(), batch.empty(), batch.empty()
    _ROLLOUT_ADVANTAGES(
        batch,
        *tensor_fields(scores),
        *tensor_fields(logprobs),
        *tensor_fields(ref_logprobs),
        kl_coef.item(),
        number(score_clip, math.inf),
        ESTIMATORS[kl_estimator],
        *tensor_fields(values),
        *optional_fields(bootstrap_values),
        gamma.item(),
        lam.item(),
        WEIGHTS[reward_weights],
        WEIGHTS[value_weights],
        DISCOUNT_PER[discount_per],
        advantages.data_ptr(),
        returns.data_ptr(),
        rewards.data_ptr(),
        kl.data_ptr(),
    )
    return advantages, returns, rewards, kl
