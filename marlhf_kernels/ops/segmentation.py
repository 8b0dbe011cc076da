"""Builders of macro-action ids: termination rules that need nothing but a mask and numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.ops._registry import define


def fixed_ngram(mask: Tensor, n: float, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
    """Macro actions of n tokens each; the last one of a sequence may be shorter.

    Args:
        mask: bool `[B, T]`, or packed `[N]`, True on an action token. Holes are skipped.
        n: a whole number >= 1, or `math.inf` for one macro action a sequence.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `macro_ids`, int32 like `mask`, -1 where it is False.

    Raises:
        TypeError, ValueError: wrong types or shapes; n below 1 or not whole.
    """
    _check_mask(mask, cu_seqlens, max_seqlen)
    if isinstance(n, bool) or not isinstance(n, (int, float, torch.SymInt)):
        raise TypeError(f"n must be a whole number >= 1 or math.inf, got {type(n).__name__}")
    if n == math.inf:
        return _fixed_ngram(mask, None, cu_seqlens, max_seqlen)
    if n != n or n < 1 or n != int(n):
        raise ValueError(f"n must be a whole number >= 1 or math.inf, got {n}")
    return _fixed_ngram(mask, int(n), cu_seqlens, max_seqlen)


def token(mask: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
    """Every token its own macro action: token-level PPO. Arguments and result as in `fixed_ngram`."""
    return fixed_ngram(mask, 1, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)


def whole(mask: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
    """One macro action for each sequence. Arguments and result as in `fixed_ngram`."""
    return fixed_ngram(mask, math.inf, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)


def validate(macro_ids: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> None:
    """Check that ids start at 0 in each sequence and rise by 0 or 1 from one action token to the next.

    The ops do not check what stands in `macro_ids`; this reads it back from the device and does.

    Args:
        macro_ids: `[B, T]`, or packed `[N]`; int32 or int64.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Raises:
        TypeError, ValueError: wrong types or shapes.
        ValueError: broken ids; the message names row and column of the first, and what is wrong there.
    """
    checks.ids(macro_ids, cu_seqlens, max_seqlen)
    ids = macro_ids.detach().cpu()
    if cu_seqlens is None:
        rows = list(ids)
    else:
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or sorted(bounds) != bounds or bounds[-1] > ids.shape[0]:
            raise ValueError(f"cu_seqlens must rise from 0 to at most {ids.shape[0]} tokens, got {bounds}")
        rows = [ids[start:end] for start, end in pairwise(bounds)]
    for row, row_ids in enumerate(rows):
        _validate_row(row, row_ids)


def _validate_row(row: int, ids: Tensor) -> None:
    (columns,) = torch.nonzero(ids != -1, as_tuple=True)
    chosen = ids[columns].long()
    rise = torch.diff(chosen, prepend=chosen.new_full((1,), -1))
    broken = (chosen < -1) | (rise < 0) | (rise > 1)
    if chosen.numel():
        broken[0] = chosen[0] != 0
    if not bool(broken.any()):
        return
    at = int(broken.int().argmax())
    value, column = int(chosen[at]), int(columns[at])
    if value < -1:
        reason = "negative ids other than -1 mean nothing"
    elif at == 0:
        reason = "the first action token of a sequence has id 0"
    else:
        reason = (
            f"the action token before it, in column {int(columns[at - 1])}, has id {int(chosen[at - 1])}, "
            "and ids rise "
            "by 0 or 1"
        )
    raise ValueError(f"macro_ids is broken at row {row}, column {column}: id {value}; {reason}")


def _check_mask(mask: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> int:
    checks.mask("mask", mask)
    return checks.layout("mask", mask, cu_seqlens, max_seqlen)


def _like_mask(mask: Tensor, *rest: object) -> Tensor:
    return mask.new_empty(mask.shape, dtype=torch.int32)


_fixed_ngram = define(
    "fixed_ngram(Tensor mask, SymInt? n, Tensor? cu_seqlens, SymInt? max_seqlen) -> Tensor", _like_mask
)
