"""The clipped value loss over tokens or macro actions, with its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf_kernels.reference._layout import Macros, accumulation_dtype, scalar
from marlhf_kernels.reference.macro import reduce_slots, token_weights
from marlhf_kernels.reference.units import Units


def macro_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    macro_ids: Tensor,
    clip: Tensor | None,
    level: str,
    value_weights: str,
    normalize_by: str,
    normalizer: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, clip fraction, the gradient before division by the count, the count."""
    dtype = accumulation_dtype(values, old_values, returns)
    macros = Macros(macro_ids, cu_seqlens)
    units = Units(macros, of_macros=level == "macro")
    value = macros.clean(values, dtype)
    old = macros.clean(old_values, dtype)
    target = macros.clean(returns, dtype)
    weight = None
    if level == "macro":
        weight = token_weights(macros, value_weights, torch.ones((), dtype=dtype), dtype)
        value = reduce_slots(macros, value, weight)[:-1]
        old = reduce_slots(macros, old, weight)[:-1]
        target = macros.at_first(target)[:-1]

    error = value - target
    loss = error.square()
    slope = error
    is_clipped = torch.zeros_like(units.chosen)
    if clip is not None:
        # Where the clipped term is the larger one the value is outside of the range, and it has no gradient
        # there.
        limit = scalar(clip, dtype, macros.device)
        clipped = (torch.clamp(value, old - limit, old + limit) - target).square()
        is_clipped = units.chosen & (clipped > loss)
        loss = torch.where(is_clipped, clipped, loss)
        slope = torch.where(is_clipped, 0, slope)
    loss = torch.where(units.chosen, loss * 0.5, 0)
    slope = torch.where(units.chosen, slope, 0)
    if normalize_by == "sequences":
        row_weight = units.row_weight(dtype)
        loss, slope = loss * row_weight, slope * row_weight
    count = units.effective_count(normalize_by, normalizer, dtype)
    gradient = slope
    if weight is not None:
        gradient = macros.to_tokens(torch.nn.functional.pad(slope, (0, 1))) * weight
    clip_fraction = is_clipped.sum().to(dtype) / units.number.clamp(min=1).to(dtype)
    return loss.sum() / count, clip_fraction, macros.unflat(gradient), count


def scale_gradient(gradient: Tensor, grad_output: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """The stored gradient times d total / d loss, over the count: both stay on the device."""
    return (gradient * (grad_output.to(count.dtype) / count)).to(dtype)
