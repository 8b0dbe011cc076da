"""Calls of the native value loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from marlhf_kernels.cpu.calls import TENSOR, Batch, BatchFunction, number, tensor_fields, with_unit_stride
from marlhf_kernels.cpu.loader import TYPES, Function
from marlhf_kernels.cpu.macro import WEIGHTS
from marlhf_kernels.cpu.policy_loss import NORMALIZATIONS, NORMALIZER

LEVELS = {"token": 0, "macro": 1}
"""As `value_loss.cpp` numbers them."""

_MACRO_VALUE_LOSS = BatchFunction("macro_value_loss", TENSOR * 3 + "dqq" + NORMALIZER + "PPPP")
_SCALE_GRADIENT = Function("scale_gradient", "plfpi")


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
    batch = Batch(macro_ids, cu_seqlens)
    values, old_values, returns = with_unit_stride(values), with_unit_stride(old_values), with_unit_stride(returns)
    gradient = batch.empty()
    loss, clip_fraction, count = (values.new_empty((), dtype=torch.float32) for _ in range(3))
    _MACRO_VALUE_LOSS(
        batch,
        *tensor_fields(values),
        *tensor_fields(old_values),
        *tensor_fields(returns),
        number(clip, math.inf),
        LEVELS[level],
        WEIGHTS[value_weights],
        NORMALIZATIONS[normalize_by],
        number(normalizer, math.nan),
        loss.data_ptr(),
        clip_fraction.data_ptr(),
        gradient.data_ptr(),
        count.data_ptr(),
    )
    return loss, clip_fraction, gradient, count


def scale_gradient(gradient: Tensor, grad_output: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    gradient = gradient.contiguous()
    result = gradient.new_empty(gradient.shape, dtype=dtype)
    factor = (grad_output.to(count.dtype) / count).item()  # a normalizer may be 0
    _SCALE_GRADIENT.call(gradient.data_ptr(), gradient.numel(), factor, result.data_ptr(), TYPES[dtype])
    return result
