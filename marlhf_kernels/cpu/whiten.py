"""Calls of the native masked moments and whitening."""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf_kernels.cpu.loader import TYPES, Function, num_threads

_MASKED_MOMENTS = Function("masked_moments", "ipplip")
_MASKED_NORMALIZE = Function("masked_normalize", "ipplipiip")


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = x.contiguous(), mask.contiguous()
    moments = x.new_empty(3, dtype=torch.float32)
    if _MASKED_MOMENTS.call(
        TYPES[x.dtype], x.data_ptr(), mask.data_ptr(), x.numel(), num_threads(), moments.data_ptr()
    ):
        raise MemoryError("no memory for the moments of the parts of a tensor")
    return moments


def masked_normalize(x: Tensor, mask: Tensor, moments: Tensor, shift_mean: bool, unbiased: bool) -> Tensor:
    x, mask, moments = x.contiguous(), mask.contiguous(), moments.contiguous()
    result = x.new_empty(x.shape, dtype=torch.float32)
    _MASKED_NORMALIZE.call(
        TYPES[x.dtype],
        x.data_ptr(),
        mask.data_ptr(),
        x.numel(),
        num_threads(),
        moments.data_ptr(),
        shift_mean,
        unbiased,
        result.data_ptr(),
    )
    return result
