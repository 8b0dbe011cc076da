"""Masked moments and whitening."""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf_kernels.reference._layout import accumulation_dtype

EPSILON = 1e-8


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    x = torch.where(mask, x.to(accumulation_dtype(x)), 0)
    count = mask.sum().to(x.dtype)
    mean = x.sum() / count.clamp(min=1)
    squares = torch.where(mask, (x - mean).square(), 0).sum()
    return torch.stack((count, mean, squares))


def masked_normalize(x: Tensor, mask: Tensor, moments: Tensor, shift_mean: bool, unbiased: bool) -> Tensor:
    x = torch.where(mask, x.to(moments.dtype), 0)
    count, mean, squares = moments.unbind(0)
    variance = squares / (count - 1 if unbiased else count).clamp(min=1)
    result = (x - mean) * torch.rsqrt(variance + EPSILON)
    if not shift_mean:
        result = result + mean
    return torch.where(mask, result, 0)
