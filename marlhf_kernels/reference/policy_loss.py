"""The clipped policy loss over tokens or macro actions, with its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf_kernels.reference._layout import Macros, accumulation_dtype, scalar
from marlhf_kernels.reference.units import Units

MAX_LOG_RATIO = 60.0


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
    """Loss, the four statistics, the gradient before division by the count, the count."""
    dtype = accumulation_dtype(logprobs, old_logprobs, advantages)
    macros = Macros(macro_ids, cu_seqlens)
    units = Units(macros, of_macros=ratio_level != "token")
    d = torch.where(macros.action, macros.flat(logprobs).to(dtype) - macros.flat(old_logprobs).to(dtype), 0)
    advantage = macros.clean(advantages, dtype)
    if ratio_level == "token":
        log_ratio = d
    else:
        log_ratio = macros.sum(d)[:-1]
        advantage = macros.at_first(advantage)[:-1]
        if ratio_level == "macro_mean":
            log_ratio = log_ratio / macros.lengths[:-1].clamp(min=1)

    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    unclipped = -advantage * ratio
    low = 1 - scalar(clip_low, dtype, macros.device)
    high = 1 + scalar(clip_high, dtype, macros.device)
    clipped = -advantage * torch.clamp(ratio, low, high)
    is_clipped = clipped > unclipped
    loss = torch.where(is_clipped, clipped, unclipped)
    is_flat = is_clipped | (log_ratio.abs() > MAX_LOG_RATIO)
    if dual_clip is not None:
        bound = -advantage * scalar(dual_clip, dtype, macros.device)
        is_bounded = (advantage < 0) & (bound < loss)
        loss = torch.where(is_bounded, bound, loss)
        is_flat = is_flat | is_bounded
    counts = units.chosen & (advantage != 0)
    loss = torch.where(counts, loss, 0)
    slope = torch.where(counts & ~is_flat, unclipped, 0)  # d loss / d log_ratio

    weight = units.row_weight(dtype) if normalize_by == "sequences" else None
    if weight is not None:
        loss, slope = loss * weight, slope * weight
    count = units.effective_count(normalize_by, normalizer, dtype)
    if ratio_level == "token":
        gradient = slope
    else:
        if ratio_level == "macro_mean":
            slope = slope / macros.lengths[:-1].clamp(min=1)
        gradient = macros.to_tokens(torch.nn.functional.pad(slope, (0, 1)))

    num_units = units.number.to(dtype)
    divisor = num_units.clamp(min=1)
    kl = torch.where(macros.action, torch.expm1(d) - d, 0).sum() / macros.num_before[-1].clamp(min=1).to(dtype)
    ratio = torch.where(units.chosen, ratio, 0)
    largest = ratio.max() if ratio.numel() else ratio.sum()
    one = torch.ones_like(divisor)
    statistics = torch.stack(
        (
            (is_clipped & units.chosen).sum().to(dtype) / divisor,
            kl,
            torch.where(num_units > 0, ratio.sum() / divisor, one),
            torch.where(num_units > 0, largest, one),
        )
    )
    return loss.sum() / count, statistics, macros.unflat(gradient), count


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
    """kl_loss_coef mean(d^2 / 2) - entropy_coef mean(entropy), its gradients before division, the count."""
    dtype = accumulation_dtype(logprobs, entropy, ref_logprobs)
    macros = Macros(macro_ids, cu_seqlens)
    count = Units(macros, of_macros=False).effective_count("tokens", normalizer, dtype)
    total = torch.zeros_like(count)
    grad_logprobs = torch.zeros(macros.shape, dtype=dtype, device=macros.device)
    grad_entropy = grad_logprobs.new_zeros(macros.shape if entropy is not None else 0)
    if ref_logprobs is not None:
        difference = macros.flat(logprobs).to(dtype) - macros.flat(ref_logprobs).to(dtype)
        difference = torch.where(macros.action, difference, 0)
        slope = difference * scalar(kl_loss_coef, dtype, macros.device)
        total = total + (difference * slope).sum() / 2
        grad_logprobs = macros.unflat(slope)
    if entropy is not None:
        slope = -(macros.action.to(dtype) * scalar(entropy_coef, dtype, macros.device))
        total = total + (macros.clean(entropy, dtype) * slope).sum()
        grad_entropy = macros.unflat(slope)
    return total / count, grad_logprobs, grad_entropy, count


def action_labels(labels: Tensor, macro_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """The labels of action tokens; -1, which ignores the row, elsewhere."""
    macros = Macros(macro_ids, cu_seqlens)
    return macros.unflat(torch.where(macros.action, macros.flat(labels), -1))
