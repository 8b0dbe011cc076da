"""Calls of the native reductions over macro actions."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from marlhf_kernels.cpu.loader import TYPES, Function, address

_MAX_MACRO_ID = Function("max_macro_id", "iplpllp")
_MACRO_LENGTHS = Function("macro_lengths", "ipplllp")


def macro_lengths(
    macro_ids: Tensor, num_macros: int | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    ids = macro_ids.contiguous()
    if cu_seqlens is None:
        rows, width = ids.shape
    else:
        rows, width = cu_seqlens.shape[0] - 1, 0
        cu_seqlens = cu_seqlens.contiguous()
    id_type, tokens, offsets = TYPES[ids.dtype], ids.data_ptr(), address(cu_seqlens)

    largest = ctypes.c_int64()
    if _MAX_MACRO_ID.call(id_type, tokens, ids.numel(), offsets, rows, width, ctypes.addressof(largest)):
        raise ValueError(
            "cu_seqlens must start with 0, not decrease, and end at the number of tokens or before, got "
            f"{cu_seqlens.tolist() if cu_seqlens is not None else None}"
        )
    if num_macros is None:
        num_macros = largest.value + 1
    elif largest.value >= num_macros:
        raise ValueError(f"macro_ids has id {largest.value}, but there is room for {num_macros} macro actions only")
    lengths = torch.zeros((rows, num_macros), dtype=torch.int32)
    _MACRO_LENGTHS.call(id_type, tokens, offsets, rows, width, num_macros, lengths.data_ptr())
    return lengths
