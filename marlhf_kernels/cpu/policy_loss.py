"""Calls of the native policy loss."""

from __future__ import annotations

import math

import torch
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

RATIO_LEVELS = {"token": 0, "macro": 1, "macro_mean": 2}
"""As `policy_loss.cpp` numbers them."""
NORMALIZATIONS = {"tokens": 0, "macros": 1, "sequences": 2}
"""As `units.h` numbers them."""
NORMALIZER = "qd"

_MACRO_POLICY_LOSS = BatchFunction("macro_policy_loss", TENSOR * 3 + "dddq" + NORMALIZER + "PPPP")
_POLICY_PENALTY = BatchFunction("policy_penalty", TENSOR * 3 + "dd" + NORMALIZER + "PPPP")
_ACTION_LABELS = BatchFunction("action_labels", TENSOR + "P")


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
    batch = Batch(macro_ids, cu_seqlens)
    logprobs, old_logprobs = with_unit_stride(logprobs), with_unit_stride(old_logprobs)
    advantages = with_unit_stride(advantages)
    gradient, statistics = batch.empty(), logprobs.new_empty(4, dtype=torch.float32)
    loss, count = logprobs.new_empty((), dtype=torch.float32), logprobs.new_empty((), dtype=torch.float32)
    _MACRO_POLICY_LOSS(
        batch,
        *tensor_fields(logprobs),
        *tensor_fields(old_logprobs),
        *tensor_fields(advantages),
        clip_low.item(),
        clip_high.item(),
        number(dual_clip, math.inf),
        RATIO_LEVELS[ratio_level],
        NORMALIZATIONS[normalize_by],
        number(normalizer, math.nan),
        loss.data_ptr(),
        statistics.data_ptr(),
        gradient.data_ptr(),
        count.data_ptr(),
    )
    return loss, statistics, gradient, count


def policy_penalty(
    logprobs: Tensor,
    entropy: Tensor | None,
    ref_logprobs: Tensor | None,
    macro_ids: Tensor,
    entropy_coef: Tensor,
    kl_loss_coef: Tensor,
    normalizer: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, logprobs = Batch(macro_ids, cu_seqlens), with_unit_stride(logprobs)
    entropy = None if entropy is None else with_unit_stride(entropy)
    ref_logprobs = None if ref_logprobs is None else with_unit_stride(ref_logprobs)
    grad_logprobs = batch.empty()
    grad_entropy = logprobs.new_empty(0, dtype=torch.float32) if entropy is None else batch.empty()
    loss, count = logprobs.new_empty((), dtype=torch.float32), logprobs.new_empty((), dtype=torch.float32)
    _POLICY_PENALTY(
        batch,
        *tensor_fields(logprobs),
        *optional_fields(entropy),
        *optional_fields(ref_logprobs),
        entropy_coef.item(),
        kl_loss_coef.item(),
        NORMALIZATIONS["tokens"],
        number(normalizer, math.nan),
        loss.data_ptr(),
        grad_logprobs.data_ptr(),
        grad_entropy.data_ptr(),
        count.data_ptr(),
    )
    return loss, grad_logprobs, grad_entropy, count


def action_labels(labels: Tensor, macro_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    batch, labels = Batch(macro_ids, cu_seqlens), with_unit_stride(labels)
    result = batch.empty(labels.dtype)
    _ACTION_LABELS(batch, *tensor_fields(labels), result.data_ptr())
    return result
