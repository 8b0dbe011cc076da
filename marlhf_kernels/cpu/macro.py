"""Calls of the native reductions over macro actions, and back."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from marlhf_kernels.cpu.calls import TENSOR, Batch, BatchFunction, tensor_fields, with_unit_stride
from marlhf_kernels.cpu.loader import TYPES

WEIGHTS = {
    name: number
    for number, name in enumerate(
        ("sum", "discounted_sum", "mean", "first", "last", "position", "position_reversed")
    )
}  # fmt: skip
"""As `weights.h` numbers them."""

_MAX_MACRO_ID = BatchFunction("max_macro_id", "P")
_MACRO_LENGTHS = BatchFunction("macro_lengths", "qP")
_MACRO_REDUCE = BatchFunction("macro_reduce", TENSOR + "qdqP")
_MACRO_REDUCE_BACKWARD = BatchFunction("macro_reduce_backward", TENSOR + "qdqPq")
_MACRO_BROADCAST = BatchFunction("macro_broadcast", TENSOR + "qqP")


def macro_reduce(
    x: Tensor,
    macro_ids: Tensor,
    weights: str,
    discount: Tensor,
    num_macros: int | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Tensor:
    batch, x = Batch(macro_ids, cu_seqlens), with_unit_stride(x)
    num_macros = _num_macros(batch, num_macros)
    result = x.new_empty((batch.rows, num_macros), dtype=torch.float32)
    _MACRO_REDUCE(batch, *tensor_fields(x), WEIGHTS[weights], discount.item(), num_macros, result.data_ptr())
    return result


def macro_reduce_backward(
    grad: Tensor,
    macro_ids: Tensor,
    weights: str,
    discount: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    dtype: torch.dtype,
) -> Tensor:
    batch, grad = Batch(macro_ids, cu_seqlens), with_unit_stride(grad)
    result = batch.empty(dtype)
    _MACRO_REDUCE_BACKWARD(
        batch,
        *tensor_fields(grad),
        WEIGHTS[weights],
        discount.item(),
        grad.shape[1],
        result.data_ptr(),
        TYPES[dtype],
    )
    return result


def macro_broadcast(macro_x: Tensor, macro_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    batch, macro_x = Batch(macro_ids, cu_seqlens), with_unit_stride(macro_x)
    num_macros = _num_macros(batch, macro_x.shape[1])
    result = batch.empty(macro_x.dtype)
    _MACRO_BROADCAST(batch, *tensor_fields(macro_x), num_macros, macro_x.element_size(), result.data_ptr())
    return result


def macro_lengths(
    macro_ids: Tensor, num_macros: int | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    batch = Batch(macro_ids, cu_seqlens)
    num_macros = _num_macros(batch, num_macros)
    lengths = batch.ids.new_empty((batch.rows, num_macros), dtype=torch.int32)
    _MACRO_LENGTHS(batch, num_macros, lengths.data_ptr())
    return lengths


def _num_macros(batch: Batch, num_macros: int | None) -> int:
    """How many macro actions a sequence has at most; where that is given, no id may be above it."""
    largest = ctypes.c_int64()
    _MAX_MACRO_ID(batch, ctypes.addressof(largest))
    if num_macros is None:
        return largest.value + 1
    if largest.value >= num_macros:
        raise ValueError(f"macro_ids has id {largest.value}, but there is room for {num_macros} macro actions only")
    return num_macros
