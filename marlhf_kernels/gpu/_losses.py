"""What the losses share: partial sums that each program leaves, and the small launch that makes scalars of them.

No program waits for another and nothing outlives a call: one program adds the partial sums in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.gpu._rows import Walk
from marlhf_kernels.gpu.launch import launch, number, optional_coefficient

NUM_PARTIALS = 8
BLOCK = 128


def partials_of(walk: Walk) -> Tensor:
    """`[8, programs]` room for what `store_partials` writes."""
    return torch.empty((NUM_PARTIALS, walk.programs), dtype=torch.float32, device=walk.device)


def finish(
    partials: Tensor, num_statistics: int, normalize_by: str, normalizer: Tensor | None, of_macros: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, statistics and count: `[4]` statistics for the policy loss, or the clip fraction alone, 0-d."""
    loss, count = (torch.empty((), dtype=torch.float32, device=partials.device) for _ in range(2))
    statistics = torch.empty((num_statistics,) if num_statistics > 1 else (), dtype=torch.float32, device=loss.device)
    launch(
        _finish,
        (1,),
        partials,
        loss,
        statistics,
        count,
        optional_coefficient(normalizer, partials),
        partials.shape[1],
        NORMALIZE_BY=normalize_by,
        OF_MACROS=of_macros,
        RATIOS=num_statistics > 1,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return loss, statistics, count


@triton.jit
def store_partials(partials_ptr, loss, clipped, tokens, macros, kl, ratio_sum, ratio_max):
    """Of a program: sums over its units (`[R, T]` lanes), counts of its rows (`[R]`), the largest ratio."""
    at = partials_ptr + tl.program_id(0)
    step = tl.num_programs(0)
    tl.store(at, _total(loss))
    tl.store(at + step, _total(clipped))
    tl.store(at + 2 * step, tl.sum(tokens, axis=0))
    tl.store(at + 3 * step, tl.sum(macros.to(tl.float32), axis=0))
    tl.store(at + 4 * step, tl.sum(tl.where(tokens > 0, 1.0, 0.0), axis=0))
    tl.store(at + 5 * step, _total(kl))
    tl.store(at + 6 * step, _total(ratio_sum))
    tl.store(at + 7 * step, tl.max(tl.max(ratio_max, axis=1), axis=0))


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit(do_not_specialize=["programs"])
def _finish(
    partials_ptr,
    loss_ptr,
    statistics_ptr,
    count_ptr,
    normalizer,
    programs,
    NORMALIZE_BY: tl.constexpr,
    OF_MACROS: tl.constexpr,
    RATIOS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    which = tl.arange(0, 8)[:, None]
    sums = tl.zeros([8, BLOCK], tl.float32)
    largest = sums
    for i in range(tl.cdiv(programs, BLOCK)):
        program = i * BLOCK + tl.arange(0, BLOCK)[None, :]
        part = tl.load(partials_ptr + which * programs + program, mask=program < programs, other=0.0)
        sums += part
        largest = tl.maximum(largest, part)
    sums = tl.sum(sums, axis=1)
    total = _entry(sums, 0)
    clipped = _entry(sums, 1)
    tokens = _entry(sums, 2)
    macros = _entry(sums, 3)
    if normalizer is not None:
        count = tl.where(tokens > 0, number(normalizer), 1.0)
    elif NORMALIZE_BY == "tokens":
        count = tl.maximum(tokens, 1.0)
    elif NORMALIZE_BY == "macros":
        count = tl.maximum(macros, 1.0)
    else:
        count = tl.maximum(_entry(sums, 4), 1.0)
    tl.store(count_ptr, count)
    tl.store(loss_ptr, total / count)
    units = macros if OF_MACROS else tokens
    divisor = tl.maximum(units, 1.0)
    tl.store(statistics_ptr, clipped / divisor)
    if RATIOS:
        tl.store(statistics_ptr + 1, _entry(sums, 5) / tl.maximum(tokens, 1.0))
        tl.store(statistics_ptr + 2, tl.where(units > 0, _entry(sums, 6) / divisor, 1.0))
        ratio_max = _entry(tl.max(largest, axis=1), 7)
        tl.store(statistics_ptr + 3, tl.where(units > 0, ratio_max, 1.0))


@triton.jit
def _entry(x, which: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 8) == which, x, 0.0), axis=0)
