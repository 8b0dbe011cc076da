"""Builders of macro-action ids: termination rules that need nothing but tensors and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.ops._registry import define

PERPLEXITY_RULES = ("running_mean", "neighbour")


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
    # No sequence is longer than an int32 can count, and the dispatcher takes no larger whole numbers than
    # int64.
    return _fixed_ngram(mask, min(int(n), _LONGEST), cu_seqlens, max_seqlen)


def token(mask: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
    """Every token its own macro action: token-level PPO.

    Args:
        mask: bool `[B, T]`, or packed `[N]`, True on an action token.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `macro_ids`, int32 like `mask`, -1 where it is False.

    Raises:
        TypeError, ValueError: wrong types or shapes.
    """
    return fixed_ngram(mask, 1, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)


def whole(mask: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
    """One macro action for each sequence: the whole response.

    Args:
        mask: bool `[B, T]`, or packed `[N]`, True on an action token.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `macro_ids`, int32 like `mask`, -1 where it is False.

    Raises:
        TypeError, ValueError: wrong types or shapes.
    """
    return fixed_ngram(mask, math.inf, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)


def randomized_ngram(
    mask: Tensor,
    *,
    lengths: Sequence[int] = (2, 3, 5, 10),
    repeats: int = 3,
    generator: torch.Generator | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Macro actions of random lengths: each of `lengths` `repeats` times, shuffled for every sequence.

    What a sequence has beyond their sum is one more macro action. The randomized n-gram rule of MA-RLHF (Chai
    et al., arXiv 2410.02743).

    Args:
        mask: bool `[B, T]`, or packed `[N]`, True on an action token. Holes are skipped.
        lengths: numbers of tokens, each at least 1.
        repeats: how often each length comes, at least 1.
        generator: a CPU generator; None is PyTorch's default one. Every sequence takes one shuffle from it,
            in order, whatever its mask.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `macro_ids`, int32 like `mask`, -1 where it is False.

    Raises:
        TypeError, ValueError: wrong types or shapes; no lengths, or one below 1; a generator that is not on
            the CPU.
    """
    rows = _check_mask(mask, cu_seqlens, max_seqlen)
    if not isinstance(lengths, Sequence):
        raise TypeError(f"lengths must be a sequence of ints, got {type(lengths).__name__}")
    whole_numbers = [isinstance(n, int) and not isinstance(n, bool) for n in (*lengths, repeats)]
    if not all(whole_numbers):
        raise TypeError(f"lengths and repeats must be ints, got {tuple(lengths)} and {repeats!r}")
    if not lengths or min(lengths) < 1 or repeats < 1:
        raise ValueError(f"lengths must hold numbers >= 1 and repeats be >= 1, got {tuple(lengths)} and {repeats}")
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(
            f"generator must be on the CPU, so that ids do not depend on the device; it is on {generator.device}"
        )
    deck = torch.tensor(lengths, dtype=torch.int64).repeat(repeats)
    order = [torch.randperm(deck.shape[0], generator=generator) for _ in range(rows)]
    shuffled = deck[torch.stack(order)] if rows else deck.new_empty((0, deck.shape[0]))
    return _from_bounds(mask, shuffled.cumsum(1).to(mask.device), cu_seqlens, max_seqlen)


def perplexity(
    mask: Tensor,
    ref_logprobs: Tensor,
    *,
    rule: str = "running_mean",
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Macro actions that end where the text becomes less predictable to the reference model.

    With nll = -ref_logprobs, a token opens the next macro action where its nll is strictly above the mean nll
    of the macro action so far (`running_mean`: it would raise the perplexity; MA-RLHF, Chai et al., arXiv
    2410.02743), or above the nll of the action token before it (`neighbour`). The comparison is nll * n >
    sum, the sum taken in float32 in order, so that every backend gives equal ids.

    Args:
        mask: bool `[B, T]`, or packed `[N]`, True on an action token. Holes are skipped.
        ref_logprobs: like `mask`, floating point, log-probabilities under the reference model, in nats. Never
            used where the mask is False.
        rule: `"running_mean"` or `"neighbour"`.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `macro_ids`, int32 like `mask`, -1 where it is False.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices; an unknown rule.
    """
    _check_mask(mask, cu_seqlens, max_seqlen)
    checks.floating("ref_logprobs", ref_logprobs)
    checks.like("ref_logprobs", ref_logprobs, "mask", mask)
    checks.choice("rule", rule, PERPLEXITY_RULES)
    return _perplexity(mask, ref_logprobs, rule, cu_seqlens, max_seqlen)


def from_ends(mask: Tensor, ends: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
    """Macro actions from a flag on the last token of each.

    Args:
        mask: bool `[B, T]`, or packed `[N]`, True on an action token.
        ends: bool, like `mask`, True on the last token of a macro action; never used where the mask is False.
            The last action token of a sequence ends one with or without a flag.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `macro_ids`, int32 like `mask`, -1 where it is False.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices.
    """
    _check_mask(mask, cu_seqlens, max_seqlen)
    checks.mask("ends", ends)
    checks.like("ends", ends, "mask", mask)
    return _from_ends(mask, ends, cu_seqlens, max_seqlen)


def from_lengths(
    mask: Tensor,
    lengths: Sequence[Sequence[int]] | Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Macro actions from their lengths.

    Args:
        mask: bool `[B, T]`, or packed `[N]`, True on an action token. Holes are skipped.
        lengths: for each sequence the numbers of tokens of its macro actions, as B lists or as int32 `[B, L]`
            (also int64) filled up with 0 at the end; their sum is the number of action tokens of the
            sequence.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `macro_ids`, int32 like `mask`, -1 where it is False. Lengths and sums are read back from the device.

    Raises:
        TypeError, ValueError: wrong types or shapes; a length below 1 before the filling; a sum that does not
            match.
    """
    rows = _check_mask(mask, cu_seqlens, max_seqlen)
    table = _length_table(lengths, rows).cpu()
    width = table.shape[1]
    column = torch.arange(width)
    used = torch.where(table != 0, column + 1, 0).amax(1) if width else table.new_zeros(rows)  # [B]
    for row, col in torch.nonzero((column < used.unsqueeze(1)) & (table < 1)).tolist()[:1]:
        raise ValueError(f"lengths[{row}][{col}] is {int(table[row, col])}; a macro action has at least 1 token")
    present = _rows_of(mask.detach().cpu(), cu_seqlens)
    for row, (total, row_mask) in enumerate(zip(table.sum(1).tolist(), present, strict=True)):
        if total != int(row_mask.sum()):
            raise ValueError(
                f"lengths[{row}] sums to {total}, but sequence {row} has {int(row_mask.sum())} action tokens"
            )
    return _from_bounds(mask, table.cumsum(1).to(mask.device), cu_seqlens, max_seqlen)


def isolate_last(macro_ids: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
    """Make the last action token of every sequence a macro action of its own.

    The score of a sequence stands on that token; alone, it is not averaged away where rewards are averaged
    inside macro actions. It is what the code released with MA-RLHF (Chai et al., arXiv 2410.02743) does. A
    last token that stands alone already stays as it is, so no macro action is ever empty.

    Args:
        macro_ids: `[B, T]`, or packed `[N]`; int32 or int64.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Returns:
        `macro_ids`, int32, -1 where the token is no action.

    Raises:
        TypeError, ValueError: wrong types or shapes.
    """
    checks.ids(macro_ids, cu_seqlens, max_seqlen)
    return _isolate_last(macro_ids, cu_seqlens, max_seqlen)


def validate(macro_ids: Tensor, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> None:
    """Check that ids start at 0 in each sequence and rise by 0 or 1 from one action token to the next.

    The ops do not check what stands in `macro_ids`; this reads it back from the device and does.

    Args:
        macro_ids: `[B, T]`, or packed `[N]`; int32 or int64.
        cu_seqlens: int32 `[B + 1]` for packed tensors, else None.
        max_seqlen: the longest packed sequence, a hint for speed.

    Raises:
        TypeError, ValueError: wrong types or shapes.
        ValueError: broken ids; the message names row and column of the first, and what is wrong there. The
            row of a packed tensor is its sequence, the column the position in that.
    """
    checks.ids(macro_ids, cu_seqlens, max_seqlen)
    for row, ids in enumerate(_rows_of(macro_ids.detach().cpu(), cu_seqlens)):
        _validate_row(row, ids)


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
        reason = "of negative ids only -1 has a meaning: no action"
    elif at == 0:
        reason = "the first action token of a sequence has id 0"
    else:
        reason = (
            f"the action token before it, in column {int(columns[at - 1])}, has id {int(chosen[at - 1])}, and ids rise "
            "by 0 or 1"
        )
    raise ValueError(f"macro_ids is broken at row {row}, column {column}: id {value}; {reason}")


def _rows_of(x: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The sequences one by one, on the host."""
    if cu_seqlens is None:
        return list(x)
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or sorted(bounds) != bounds or bounds[-1] > x.shape[0]:
        raise ValueError(
            f"cu_seqlens must start with 0, not decrease, and end at most at {x.shape[0]} tokens, got {bounds}"
        )
    return [x[start:end] for start, end in pairwise(bounds)]


def _length_table(lengths: Sequence[Sequence[int]] | Tensor, rows: int) -> Tensor:
    """int64 `[B, L]`, filled up with 0."""
    if isinstance(lengths, Tensor):
        checks.tensor("lengths", lengths, checks.INTEGERS)
        if lengths.dim() != 2 or lengths.shape[0] != rows:
            raise ValueError(f"lengths must be [B, L] with B = {rows} sequences, got shape {list(lengths.shape)}")
        return lengths.detach().long()
    if not isinstance(lengths, Sequence) or not all(isinstance(row, Sequence) for row in lengths):
        raise TypeError(f"lengths must be a list of lists of ints or an int32 tensor [B, L], got {lengths!r}")
    listed = [list(row) for row in lengths]
    if len(listed) != rows:
        raise ValueError(f"lengths has {len(listed)} lists, but there are {rows} sequences")
    for row, values in enumerate(listed):
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"lengths[{row}] must hold ints, got {value!r}")
    width = max((len(row) for row in listed), default=0)
    filled = [row + [0] * (width - len(row)) for row in listed]
    return torch.tensor(filled, dtype=torch.int64).view(rows, width)


def _check_mask(mask: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> int:
    checks.mask("mask", mask)
    return checks.layout("mask", mask, cu_seqlens, max_seqlen)


def _like_first(first: Tensor, *rest: object) -> Tensor:
    return first.new_empty(first.shape, dtype=torch.int32)


_LONGEST = 2**31 - 1

_fixed_ngram = define(
    "fixed_ngram(Tensor mask, SymInt? n, Tensor? cu_seqlens, SymInt? max_seqlen) -> Tensor", _like_first
)
_from_ends = define(
    "from_ends(Tensor mask, Tensor ends, Tensor? cu_seqlens, SymInt? max_seqlen) -> Tensor", _like_first
)
_from_bounds = define(
    "from_bounds(Tensor mask, Tensor bounds, Tensor? cu_seqlens, SymInt? max_seqlen) -> Tensor", _like_first
)
_perplexity = define(
    "perplexity(Tensor mask, Tensor ref_logprobs, str rule, Tensor? cu_seqlens, SymInt? max_seqlen) -> Tensor",
    _like_first,
    detached=True,
)
_isolate_last = define("isolate_last(Tensor macro_ids, Tensor? cu_seqlens, SymInt? max_seqlen) -> Tensor", _like_first)
