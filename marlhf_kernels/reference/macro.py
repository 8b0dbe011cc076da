"""Reductions over macro actions, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from marlhf_kernels.reference._layout import Macros, accumulation_dtype, scalar


def token_weights(macros: Macros, weights: str, discount: Tensor, dtype: torch.dtype) -> Tensor:
    """[N] the weight that each token has in the reduction of its macro action; 0 where it is no action."""
    rank = macros.rank
    if weights in ("sum", "mean"):
        weight = torch.ones(macros.num_tokens, dtype=dtype, device=macros.device)
    elif weights == "discounted_sum":
        weight = torch.pow(scalar(discount, dtype, macros.device), rank.to(dtype))
    elif weights == "first":
        weight = (rank == 0).to(dtype)
    elif weights == "last":
        weight = (macros.to_tokens(macros.lengths) - rank == 1).to(dtype)
    elif weights == "position":
        weight = 1 / (macros.to_tokens(macros.lengths) - rank).to(dtype)
    else:  # position_reversed
        weight = 1 / (rank + 1).to(dtype)
    weight = torch.where(macros.action, weight, 0)
    if weights in ("mean", "position", "position_reversed"):
        weight = torch.where(macros.action, weight / macros.to_tokens(macros.sum(weight)), 0)
    return weight


def reduce_slots(macros: Macros, x: Tensor, weight: Tensor) -> Tensor:
    """[N] -> [N + 1]. A token of weight 0 adds nothing, not even NaN out of 0 * inf."""
    return macros.sum(torch.where(weight == 0, 0, x * weight))


def macro_reduce(
    x: Tensor,
    macro_ids: Tensor,
    weights: str,
    discount: Tensor,
    num_macros: int | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Tensor:
    dtype = accumulation_dtype(x)
    macros = Macros(macro_ids, cu_seqlens)
    num_macros = _num_macros(macros, num_macros)
    slots = reduce_slots(macros, macros.clean(x, dtype), token_weights(macros, weights, discount, dtype))
    return macros.to_rows(slots, num_macros)


def macro_reduce_backward(
    grad: Tensor,
    macro_ids: Tensor,
    weights: str,
    discount: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    dtype: torch.dtype,
) -> Tensor:
    macros = Macros(macro_ids, cu_seqlens)
    weight = token_weights(macros, weights, discount, grad.dtype)
    return macros.unflat((_broadcast(macros, grad) * weight).to(dtype))


def macro_broadcast(macro_x: Tensor, macro_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    macros = Macros(macro_ids, cu_seqlens)
    macros.check_num_macros(macro_x.shape[1])
    return macros.unflat(_broadcast(macros, macro_x))


def macro_lengths(
    macro_ids: Tensor, num_macros: int | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    macros = Macros(macro_ids, cu_seqlens)
    num_macros = _num_macros(macros, num_macros)
    return macros.to_rows(macros.lengths, num_macros).int()


def _num_macros(macros: Macros, num_macros: int | None) -> int:
    if num_macros is None:
        return macros.max_macros()
    macros.check_num_macros(num_macros)
    return num_macros


def _broadcast(macros: Macros, macro_x: Tensor) -> Tensor:
    """[B, K] -> [N], 0 where the token is no action."""
    num_macros = macro_x.shape[1]
    if macro_x.numel() == 0:
        return macro_x.new_zeros(macros.num_tokens)
    inside = macros.action & (macros.ids < num_macros)
    index = torch.where(inside, macros.row * num_macros + macros.ids, 0)
    return torch.where(inside, macro_x.reshape(-1)[index], 0)
