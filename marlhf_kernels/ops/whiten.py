"""Whitening over the tokens of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.ops._registry import define
from marlhf_kernels.ops.macro import result_dtype


def masked_whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    unbiased: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    r"""Whiten the masked tokens: :math:`(x - \mu) / \sqrt{\sigma^2 + 10^{-8}}`.

    Mean and variance are over the True tokens of all ranks of `group`, each token with the same weight; a
    rank may have none.

    Args:
        x: floating point, any shape, such as `[B, T]` or packed `[N]`. Entries where the mask is False are
            never used.
        mask: bool, like `x`, True on a real token (`macro_ids >= 0`).
        shift_mean: False adds the mean back, so that only the scale changes.
        unbiased: divide by the number of tokens less one; with one token the variance is 0.
        group: the process group whose tokens count; None is this process alone. Every rank of it must call.

    Returns:
        A tensor like `x`, 0 where the mask is False; float32, float64 for float64 input. No gradient flows.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices.
    """
    checks.floating("x", x)
    checks.mask("mask", mask)
    checks.like("mask", mask, "x", x)
    moments = _masked_moments(x, mask)
    if group is not None:
        moments = _merge_moments(moments, group)
    return _masked_normalize(x, mask, moments, shift_mean, unbiased)


def _merge_moments(moments: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Pool (count, mean, sum of squares about the mean) of all ranks, in rank order: equal bits on each."""
    ranks = [torch.empty_like(moments) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, moments, group=group)
    counts, means, squares = torch.stack(ranks).unbind(1)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return torch.stack((count, mean, (squares + counts * (means - mean).square()).sum()))


_masked_moments = define(
    "masked_moments(Tensor x, Tensor mask) -> Tensor",
    lambda x, mask: x.new_empty((3,), dtype=result_dtype(x)),
    detached=True,
)

_masked_normalize = define(
    "masked_normalize(Tensor x, Tensor mask, Tensor moments, bool shift_mean, bool unbiased) -> Tensor",
    lambda x, mask, moments, shift_mean, unbiased: x.new_empty(x.shape, dtype=moments.dtype),
    detached=True,
)
