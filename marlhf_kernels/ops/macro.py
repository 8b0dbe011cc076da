"""Reductions of token tensors over macro actions, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.checks import Number
from marlhf_kernels.ops._registry import define, differentiable

VALUE_WEIGHTS = ("mean", "first", "last", "position", "position_reversed")
REWARD_WEIGHTS = ("sum", "discounted_sum", *VALUE_WEIGHTS)


def macro_reduce(
    x: Tensor,
    macro_ids: Tensor,
    *,
    weights: str = "sum",
    discount: Number = 1.0,
    num_macros: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    r"""Reduce a token tensor over macro actions: :math:`X_k = \sum_i w_i x_{t_k(i)}`.

    :math:`t_k(0), \dots, t_k(n_k - 1)` are the action tokens of macro action k, holes skipped, and :math:`w`
    is

    ================= ==========================================================
    weights           w_i
    ================= ==========================================================
    sum               1
    discounted_sum    discount^i
    mean              1 / n
    first, last       1 at the first, the last token, else 0
    position          proportional to 1 / (n - i), summing to 1: grows toward the last token
    position_reversed proportional to 1 / (i + 1), summing to 1
    ================= ==========================================================

    The macro-action reductions of MA-RLHF (Chai et al., arXiv 2410.02743).

    Args:
        x: `[B, T]`, or packed `[N]`; floating point. Entries at id -1 are never used.
        macro_ids: like `x`, int32 or int64: the index of each token's macro action, -1 where there is none.
        weights: one of the names above.
        discount: a number or a 0-d tensor, of `discounted_sum` alone.
        num_macros: K. None takes max(id) + 1, which on a GPU waits for the device and under `torch.compile`
            makes a size that depends on data; pass it there.
        cu_seqlens: int32 `[B + 1]`, where each packed sequence starts, and their total; None for padded
            tensors.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `[B, K]`, 0 where a sequence has fewer macro actions; float32, float64 for float64 input.
        The gradient flows to `x`; for `sum` it is `macro_broadcast`.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices; an unknown name; `discount` where it has no
            meaning; on a CPU an id >= num_macros (dropped on a GPU).
    """
    checks.ids(macro_ids, cu_seqlens, max_seqlen)
    checks.per_token("x", x, macro_ids)
    checks.choice("weights", weights, REWARD_WEIGHTS)
    checks.count("num_macros", num_macros)
    if weights != "discounted_sum" and _is_not_one(discount):
        raise ValueError(f"discount belongs to weights='discounted_sum' and has no meaning for {weights!r}; leave it 1")
    factor = checks.coefficient("discount", discount, x, at_least=0)
    return _macro_reduce(x, macro_ids, weights, factor, num_macros, cu_seqlens, max_seqlen)


def macro_broadcast(
    macro_x: Tensor,
    macro_ids: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Give every token what its macro action has: `x[b, t] = macro_x[b, macro_ids[b, t]]`, 0 where it is -1.

    Args:
        macro_x: `[B, K]`, any dtype.
        macro_ids: `[B, T]`, or packed `[N]`; int32 or int64.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        A tensor like `macro_ids`, in the dtype of `macro_x`. The gradient flows to `macro_x`; it is
        `macro_reduce(..., weights="sum")`.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices; on a CPU an id >= K (0 on a GPU).
    """
    rows = checks.ids(macro_ids, cu_seqlens, max_seqlen)
    checks.tensor("macro_x", macro_x)
    if macro_x.dim() != 2 or macro_x.shape[0] != rows:
        raise ValueError(f"macro_x must be [B, K] with B = {rows} sequences, got shape {list(macro_x.shape)}")
    checks.same_device("macro_x", macro_x, "macro_ids", macro_ids)
    return _macro_broadcast(macro_x, macro_ids, cu_seqlens, max_seqlen)


def macro_lengths(
    macro_ids: Tensor,
    *,
    num_macros: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Count the action tokens of each macro action; holes are not counted.

    Args:
        macro_ids: `[B, T]`, or packed `[N]`; int32 or int64.
        num_macros: K. None takes max(id) + 1, which on a GPU waits for the device and under `torch.compile`
            makes a size that depends on data; pass it there.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        int32 `[B, K]`, 0 where a sequence has fewer macro actions.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices; on a CPU an id >= num_macros (dropped on a
            GPU).
    """
    checks.ids(macro_ids, cu_seqlens, max_seqlen)
    checks.count("num_macros", num_macros)
    return _macro_lengths(macro_ids, num_macros, cu_seqlens, max_seqlen)


def _is_not_one(discount: Number) -> bool:
    if isinstance(discount, Tensor):
        # Reading a tensor back waits for a GPU and breaks a compiled graph: there it is taken on trust.
        return discount.device.type == "cpu" and not torch.compiler.is_compiling() and bool((discount != 1).any())
    return discount != 1


def _fake_rows(macro_ids: Tensor, cu_seqlens: Tensor | None, num_macros: Any, dtype: torch.dtype) -> Tensor:
    rows = macro_ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if num_macros is None:
        num_macros = torch.library.get_ctx().new_dynamic_size()
    return macro_ids.new_empty((rows, num_macros), dtype=dtype)


def result_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where one of the tensors is, else float32."""
    wide = any(x is not None and x.dtype is torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


_macro_reduce = define(
    "macro_reduce(Tensor x, Tensor macro_ids, str weights, Tensor discount, SymInt? num_macros, Tensor? cu_seqlens, "
    "SymInt? max_seqlen) -> Tensor",
    lambda x, macro_ids, weights, discount, num_macros, cu_seqlens, max_seqlen: _fake_rows(
        macro_ids, cu_seqlens, num_macros, result_dtype(x)
    ),
)

_macro_reduce_backward = define(
    "macro_reduce_backward(Tensor grad, Tensor macro_ids, str weights, Tensor discount, Tensor? cu_seqlens, SymInt? "
    "max_seqlen, ScalarType dtype) -> Tensor",
    lambda grad, macro_ids, weights, discount, cu_seqlens, max_seqlen, dtype: macro_ids.new_empty(
        macro_ids.shape, dtype=dtype
    ),
    detached=True,
)

_macro_broadcast = define(
    "macro_broadcast(Tensor macro_x, Tensor macro_ids, Tensor? cu_seqlens, SymInt? max_seqlen) -> Tensor",
    lambda macro_x, macro_ids, cu_seqlens, max_seqlen: macro_ids.new_empty(macro_ids.shape, dtype=macro_x.dtype),
)

_macro_lengths = define(
    "macro_lengths(Tensor macro_ids, SymInt? num_macros, Tensor? cu_seqlens, SymInt? max_seqlen) -> Tensor",
    lambda macro_ids, num_macros, cu_seqlens, max_seqlen: _fake_rows(macro_ids, cu_seqlens, num_macros, torch.int32),
)


def _save_reduce(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
    x, macro_ids, ctx.weights, discount, _, cu_seqlens, ctx.max_seqlen = args
    ctx.dtype = x.dtype
    return macro_ids, discount, cu_seqlens


def _backward_reduce(ctx: Any, saved: Sequence[Tensor], grad: Tensor | None) -> Sequence[Tensor | None]:
    _, macro_ids, discount, cu_seqlens = saved
    if grad is None:
        return (None,)
    return (_macro_reduce_backward(grad, macro_ids, ctx.weights, discount, cu_seqlens, ctx.max_seqlen, ctx.dtype),)


def _save_broadcast(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
    macro_x, macro_ids, cu_seqlens, ctx.max_seqlen = args
    ctx.dtype = macro_x.dtype
    ctx.num_macros = macro_x.shape[1]
    return macro_ids, cu_seqlens


def _backward_broadcast(ctx: Any, saved: Sequence[Tensor], grad: Tensor | None) -> Sequence[Tensor | None]:
    _, macro_ids, cu_seqlens = saved
    if grad is None:
        return (None,)
    one = torch.ones((), dtype=torch.float64)
    result = _macro_reduce(grad, macro_ids, "sum", one, ctx.num_macros, cu_seqlens, ctx.max_seqlen)
    return (result.to(ctx.dtype),)


differentiable(_macro_reduce, inputs=(0,), save=_save_reduce, backward=_backward_reduce)
differentiable(_macro_broadcast, inputs=(0,), save=_save_broadcast, backward=_backward_broadcast)
