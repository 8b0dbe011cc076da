"""Calls of the native builders of macro-action ids."""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf_kernels.cpu.calls import TENSOR, Batch, BatchFunction, tensor_fields, with_unit_stride

_FIXED_NGRAM = BatchFunction("fixed_ngram", "qP")
_FROM_ENDS = BatchFunction("from_ends", TENSOR + "P")
_FROM_BOUNDS = BatchFunction("from_bounds", TENSOR + "qP")
_PERPLEXITY = BatchFunction("perplexity", TENSOR + "qP")
_ISOLATE_LAST = BatchFunction("isolate_last", "P")

_ENDLESS = 2**63 - 1


def fixed_ngram(mask: Tensor, n: int | None, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    batch = Batch(mask, cu_seqlens)
    ids = batch.empty(torch.int32)
    _FIXED_NGRAM(batch, _ENDLESS if n is None else n, ids.data_ptr())
    return ids


def from_ends(mask: Tensor, ends: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    batch, ends = Batch(mask, cu_seqlens), with_unit_stride(ends)
    ids = batch.empty(torch.int32)
    _FROM_ENDS(batch, *tensor_fields(ends), ids.data_ptr())
    return ids


def from_bounds(mask: Tensor, bounds: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    batch, bounds = Batch(mask, cu_seqlens), with_unit_stride(bounds.long())
    ids = batch.empty(torch.int32)
    _FROM_BOUNDS(batch, *tensor_fields(bounds), bounds.shape[1], ids.data_ptr())
    return ids


def perplexity(
    mask: Tensor, ref_logprobs: Tensor, rule: str, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    batch, ref_logprobs = Batch(mask, cu_seqlens), with_unit_stride(ref_logprobs)
    ids = batch.empty(torch.int32)
    _PERPLEXITY(batch, *tensor_fields(ref_logprobs), rule == "neighbour", ids.data_ptr())
    return ids


def isolate_last(macro_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    batch = Batch(macro_ids, cu_seqlens)
    ids = batch.empty(torch.int32)
    _ISOLATE_LAST(batch, ids.data_ptr())
    return ids
