"""Calls of the native reductions over macro actions."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from marlhf_kernels.cpu.loader import library

_SUFFIX = {torch.int32: "i32", torch.int64: "i64"}


def macro_lengths(
    macro_ids: Tensor, num_macros: int | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    ids = macro_ids.contiguous()
    if cu_seqlens is None:
        rows, width = ids.shape
        offsets = None
    else:
        rows, width = cu_seqlens.shape[0] - 1, 0
        cu_seqlens = cu_seqlens.contiguous()
        offsets = ctypes.c_void_p(cu_seqlens.data_ptr())
    suffix = _SUFFIX[ids.dtype]
    tokens = (ctypes.c_void_p(ids.data_ptr()), ctypes.c_int64(ids.numel()))
    where = (offsets, ctypes.c_int64(rows), ctypes.c_int64(width))

    largest = ctypes.c_int64()
    status = getattr(library(), f"marlhf_max_macro_id_{suffix}")(*tokens, *where, ctypes.byref(largest))
    if status:
        raise ValueError(
            "cu_seqlens must start with 0, not decrease, and end at the number of tokens or before, got "
            f"{cu_seqlens.tolist() if cu_seqlens is not None else None}"
        )
    if num_macros is None:
        num_macros = largest.value + 1
    elif largest.value >= num_macros:
        raise ValueError(f"macro_ids has id {largest.value}, but there is room for {num_macros} macro actions only")
    lengths = torch.zeros((rows, num_macros), dtype=torch.int32)
    getattr(library(), f"marlhf_macro_lengths_{suffix}")(
        *tokens, *where, ctypes.c_int64(num_macros), ctypes.c_void_p(lengths.data_ptr())
    )
    return lengths
