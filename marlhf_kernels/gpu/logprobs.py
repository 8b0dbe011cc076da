"""Log-probability and entropy of labels under logits, and their gradient: one pass over the logits each.

Bytes moved, N rows of V logits of b bytes: forward N V b, backward 2 N V b (read and written), plus a few tens a row.
Rows whose label is negative are not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.gpu.launch import alignment, cdiv, coefficient, launch, num_processors, number, optional_coefficient


class Block(NamedTuple):
    """Logits that a program takes at a time, and its warps."""

    size: int
    warps: int


# 16 logits a thread take 64 to 104 registers: two or three programs of a long row fit on a multiprocessor.
SHORT_VOCABULARY = 4096
SHORT = Block(1024, 4)
LONG = Block(4096, 8)
STAGES = {4: 2, 2: 3}
"""Blocks of a row in work or on the way, by bytes of a logit: 16 KB on the way hide the latency of memory."""

PROGRAMS_PER_PROCESSOR = 4
"""With fewer rows than this for each multiprocessor, rows are split to keep all of them busy."""
MOST_PARTS = 512
LOG2_E = tl.constexpr(1.4426950408889634)
NO_WEIGHT = tl.constexpr(-200.0)
"""2 to the power of it is 0 in float32, and 0 times it is 0: it stands for -inf where -inf would make 0 * inf."""


class Rows(NamedTuple):
    """`[..., V]` as N rows: row n starts at n // inner * outer_stride + n % inner * inner_stride."""

    data: Tensor
    number: int
    vocabulary: int
    inner: int
    outer_stride: int
    inner_stride: int
    column_stride: int


def rows_of(x: Tensor) -> Rows:
    """Without a copy, unless more than two leading dimensions stay apart."""
    dims: list[tuple[int, int]] = []  # (size, stride) of the leading dimensions that cannot be merged
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    number, vocabulary = x.shape[:-1].numel(), x.shape[-1]
    if len(dims) > 2 and number:
        return rows_of(x.contiguous())
    (_, outer_stride), (inner, inner_stride) = [(1, 0), (1, 0), *dims][-2:] if number else [(1, 0), (1, 0)]
    return Rows(x, number, vocabulary, inner, outer_stride, inner_stride, x.stride(-1) if vocabulary > 1 else 1)


def _alignment(*every: Rows) -> int:
    """0 where a row has gaps between its entries, else as `alignment`."""
    if any(rows.column_stride != 1 for rows in every):
        return 0
    return min(alignment(r.data, r.vocabulary, r.outer_stride, r.inner_stride) for r in every)


def _geometry(rows: Rows, align: int) -> tuple[int, ...]:
    """The numbers of `rows` as a kernel takes them, where `align` divides them."""
    align = max(align, 1)
    return rows.inner, rows.outer_stride // align, rows.inner_stride // align, rows.column_stride


def _block(rows: Rows) -> Block:
    return SHORT if rows.vocabulary <= SHORT_VOCABULARY else LONG


def _parts(rows: Rows, blocks: int) -> tuple[int, int]:
    """How many parts a row of so many blocks is taken in, and the blocks of each."""
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(rows.data.device)
    blocks_per_part = cdiv(blocks, min(cdiv(wanted, max(rows.number, 1)), MOST_PARTS))
    return cdiv(blocks, blocks_per_part), blocks_per_part


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor,
    logit_softcap: Tensor | None,
    return_entropy: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch, or two where rows are few and a program takes but a part of one."""
    rows = rows_of(logits)
    align = _alignment(rows)
    block = _block(rows)
    parts, blocks_per_part = _parts(rows, cdiv(rows.vocabulary, block.size))
    shape, device = labels.shape, logits.device
    logprobs, maximum, log_sum = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(3))
    entropy = torch.empty(shape if return_entropy else 0, dtype=torch.float32, device=device)
    partial = torch.empty((3, rows.number, parts), dtype=torch.float32, device=device) if parts > 1 else None
    inputs = (
        rows.data,
        labels.contiguous(),
        *_scalars(temperature, logit_softcap, logits),
        rows.vocabulary // max(align, 1),
        *_geometry(rows, align),
    )
    results = (logprobs, entropy if return_entropy else None, maximum, log_sum)
    shared = {"PER_ROW": temperature.dim() > 0, "ALIGN": align}
    launch(
        _forward,
        (rows.number, parts),
        *inputs,
        *results,
        partial,
        rows.number,
        blocks_per_part,
        **shared,
        STAGES=STAGES[logits.element_size()],
        BLOCK=block.size,
        num_warps=block.warps,
    )
    if partial is not None:
        launch(
            _combine,
            (rows.number,),
            *inputs,
            *results,
            partial,
            rows.number,
            parts,
            **shared,
            PARTS=MOST_PARTS,
            num_warps=4,
        )
    return logprobs, entropy, maximum, log_sum


def token_logprobs_backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor,
    logit_softcap: Tensor | None,
    maximum: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
) -> Tensor:
    """One launch."""
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    grads = (grad_logprobs, grad_entropy)
    _gradient_into(gradient, logits, *grads, labels, temperature, logit_softcap, maximum, log_sum, entropy)
    return gradient


def token_logprobs_backward_(
    logits: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    labels: Tensor,
    temperature: Tensor,
    logit_softcap: Tensor | None,
    maximum: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
) -> None:
    """One launch; the gradient takes the place of the logits."""
    grads = (grad_logprobs, grad_entropy)
    _gradient_into(logits, logits, *grads, labels, temperature, logit_softcap, maximum, log_sum, entropy)


def _gradient_into(
    gradient: Tensor,
    logits: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    labels: Tensor,
    temperature: Tensor,
    logit_softcap: Tensor | None,
    maximum: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
) -> None:
    source, target = rows_of(logits), rows_of(gradient)
    copied = target.data is not gradient
    align = _alignment(source, target)
    block = _block(source)
    launch(
        _backward,
        (source.number, cdiv(source.vocabulary, block.size)),
        source.data,
        labels.contiguous(),
        *_scalars(temperature, logit_softcap, logits),
        source.vocabulary // max(align, 1),
        *_geometry(source, align),
        target.data,
        *_geometry(target, align),
        *_upstream(grad_logprobs),
        *_upstream(grad_entropy),
        maximum.contiguous(),
        log_sum.contiguous(),
        None if grad_entropy is None else entropy.contiguous(),
        PER_ROW=temperature.dim() > 0,
        ALIGN=align,
        BLOCK=block.size,
        num_warps=block.warps,
    )
    if copied:
        gradient.copy_(target.data)


def _scalars(
    temperature: Tensor, softcap: Tensor | None, logits: Tensor
) -> tuple[float | Tensor, float | Tensor | None]:
    per_row = temperature.dim() > 0
    return (
        temperature.contiguous() if per_row else coefficient(temperature, logits),
        optional_coefficient(softcap, logits),
    )


def _upstream(gradient: Tensor | None) -> tuple[Tensor | None, int]:
    """A gradient of each row, and how far apart they stand: that of a sum is one number for all."""
    if gradient is None:
        return None, 0
    if not any(gradient.stride()):
        return gradient, 0
    return gradient.contiguous(), 1


@triton.jit
def _inverse_temperature(temperature, row, PER_ROW: tl.constexpr):
    temperature = tl.to_tensor(temperature)
    if temperature.dtype.is_ptr():
        return 1.0 / tl.load(temperature + row * PER_ROW).to(tl.float32)
    else:
        return 1.0 / temperature


@triton.jit
def _row_start(pointer, row, inner, outer_stride, inner_stride, ALIGN: tl.constexpr):
    outer = (row // inner).to(tl.int64) * outer_stride
    offset = outer + (row % inner).to(tl.int64) * inner_stride
    if ALIGN > 1:
        offset = offset * ALIGN
    return pointer + offset


@triton.jit
def _columns(pointer, column, column_stride, ALIGN: tl.constexpr):
    if ALIGN == 0:
        return pointer + column.to(tl.int64) * column_stride
    else:
        return pointer + column


@triton.jit
def _tanh(x):
    # libdevice's cannot be interpreted. Large x: exp2 is inf and the quotient 0.
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def _capped(x, softcap):
    x = x.to(tl.float32)
    if softcap is not None:
        cap = number(softcap)
        x = cap * _tanh(x / cap)
    return x


@triton.jit
def _add_block(x, maximum, total, moment, base2, ENTROPY: tl.constexpr):
    """Take a block of logits into the running maximum and the lanes' sums of exp(x - maximum) and of that times
    (x - maximum), all at the temperature that `base2`, its inverse times log2 e, holds."""
    least = (1.0 / base2) * NO_WEIGHT
    highest = tl.max(x)
    if highest > maximum:
        step = tl.maximum(maximum - highest, least)
        shrink = tl.exp2(step * base2)
        if ENTROPY:
            moment = (moment + total * step) * shrink
        total = total * shrink
        maximum = highest
    # Before the first logit above -inf nothing has weight, whatever it is compared with.
    z = x - tl.where(maximum == float("-inf"), 0.0, maximum)
    weight = tl.exp2(z * base2)
    total += weight
    if ENTROPY:
        moment += weight * tl.maximum(z, least)
    return maximum, total, moment


@triton.jit
def _finish(
    target,
    maximum,
    total,
    moment,
    inverse,
    row,
    logprobs_ptr,
    entropy_ptr,
    maximum_ptr,
    log_sum_ptr,
):
    """Write a row's results from its sums."""
    log_sum = tl.log(total)
    tl.store(logprobs_ptr + row, (target - maximum) * inverse - log_sum)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, log_sum - moment * inverse / total)
    # Backward compares with the maximum as it is stored, rounded.
    stored = maximum * inverse
    tl.store(maximum_ptr + row, stored)
    tl.store(log_sum_ptr + row, log_sum + tl.fma(maximum, inverse, -stored))


@triton.jit
def _target(start, label, vocabulary, column_stride, softcap, ALIGN: tl.constexpr):
    """The label's logit; -inf for a label above the vocabulary."""
    known = label < vocabulary
    column = tl.where(known, label, 0)
    target = _capped(tl.load(_columns(start, column, column_stride, ALIGN)), softcap)
    return tl.where(known, target, float("-inf"))


@triton.jit
def _ignore(row, logprobs_ptr, entropy_ptr, maximum_ptr, log_sum_ptr):
    tl.store(logprobs_ptr + row, 0.0)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, 0.0)
    tl.store(maximum_ptr + row, 0.0)
    tl.store(log_sum_ptr + row, 0.0)


@triton.jit(
    do_not_specialize=[
        "labels_ptr", "temperature", "softcap", "vocabulary", "inner", "outer_stride", "inner_stride", "column_stride",
        "logprobs_ptr", "entropy_ptr", "maximum_ptr", "log_sum_ptr", "partial_ptr", "number_of_rows", "blocks_per_part",
    ]
)  # fmt: skip
def _forward(
    logits_ptr,
    labels_ptr,
    temperature,
    softcap,
    vocabulary,
    inner,
    outer_stride,
    inner_stride,
    column_stride,
    logprobs_ptr,
    entropy_ptr,
    maximum_ptr,
    log_sum_ptr,
    partial_ptr,
    number_of_rows,
    blocks_per_part,
    PER_ROW: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (n, j) takes part j of row n, and writes the row's results, or where there are parts its sums."""
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row)
    if label < 0:
        if partial_ptr is None:
            _ignore(row, logprobs_ptr, entropy_ptr, maximum_ptr, log_sum_ptr)
        return
    if ALIGN > 1:
        vocabulary = vocabulary * ALIGN
    inverse = _inverse_temperature(temperature, row, PER_ROW)
    base2 = inverse * LOG2_E
    start = _row_start(logits_ptr, row, inner, outer_stride, inner_stride, ALIGN)
    first = tl.program_id(1) * blocks_per_part * BLOCK
    end = tl.minimum(first + blocks_per_part * BLOCK, vocabulary)
    whole = first + (end - first) // BLOCK * BLOCK
    lane = tl.arange(0, BLOCK)
    ENTROPY: tl.constexpr = entropy_ptr is not None
    maximum = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for column in tl.range(first, whole, BLOCK, num_stages=STAGES):
        x = _capped(tl.load(_columns(start, column + lane, column_stride, ALIGN)), softcap)
        maximum, total, moment = _add_block(x, maximum, total, moment, base2, ENTROPY)
    if whole < end:
        inside = whole + lane < end
        x = tl.load(_columns(start, whole + lane, column_stride, ALIGN), inside, other=0)
        x = tl.where(inside, _capped(x, softcap), float("-inf"))
        maximum, total, moment = _add_block(x, maximum, total, moment, base2, ENTROPY)
    total = tl.sum(total)
    moment = tl.sum(moment)
    if partial_ptr is None:
        target = _target(start, label, vocabulary, column_stride, softcap, ALIGN)
        _finish(target, maximum, total, moment, inverse, row, logprobs_ptr, entropy_ptr, maximum_ptr, log_sum_ptr)
    else:
        parts = tl.num_programs(1)
        place = partial_ptr + row.to(tl.int64) * parts + tl.program_id(1)
        size = number_of_rows.to(tl.int64) * parts
        tl.store(place, maximum)
        tl.store(place + size, total)
        tl.store(place + 2 * size, moment)


@triton.jit(
    do_not_specialize=[
        "logits_ptr", "labels_ptr", "temperature", "softcap", "vocabulary", "inner", "outer_stride", "inner_stride",
        "column_stride", "logprobs_ptr", "entropy_ptr", "maximum_ptr", "log_sum_ptr", "partial_ptr", "number_of_rows",
        "parts",
    ]
)  # fmt: skip
def _combine(
    logits_ptr,
    labels_ptr,
    temperature,
    softcap,
    vocabulary,
    inner,
    outer_stride,
    inner_stride,
    column_stride,
    logprobs_ptr,
    entropy_ptr,
    maximum_ptr,
    log_sum_ptr,
    partial_ptr,
    number_of_rows,
    parts,
    PER_ROW: tl.constexpr,
    ALIGN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program n merges the parts of row n, in order."""
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row)
    if label < 0:
        _ignore(row, logprobs_ptr, entropy_ptr, maximum_ptr, log_sum_ptr)
        return
    if ALIGN > 1:
        vocabulary = vocabulary * ALIGN
    inverse = _inverse_temperature(temperature, row, PER_ROW)
    base2 = inverse * LOG2_E
    start = _row_start(logits_ptr, row, inner, outer_stride, inner_stride, ALIGN)
    part = tl.arange(0, PARTS)
    place = partial_ptr + row.to(tl.int64) * parts + part
    size = number_of_rows.to(tl.int64) * parts
    maxima = tl.load(place, part < parts, other=float("-inf"))
    total = tl.load(place + size, part < parts, other=0.0)
    moment = tl.load(place + 2 * size, part < parts, other=0.0)
    maximum = tl.max(maxima)
    step = maxima - tl.where(maximum == float("-inf"), 0.0, maximum)
    weight = tl.exp2(step * base2)
    moment = tl.sum(weight * (moment + total * tl.maximum(step, (1.0 / base2) * NO_WEIGHT)))
    total = tl.sum(weight * total)
    target = _target(start, label, vocabulary, column_stride, softcap, ALIGN)
    _finish(target, maximum, total, moment, inverse, row, logprobs_ptr, entropy_ptr, maximum_ptr, log_sum_ptr)


@triton.jit(
    do_not_specialize=[
        "labels_ptr", "temperature", "softcap", "vocabulary", "inner", "outer_stride", "inner_stride", "column_stride",
        "target_inner", "target_outer_stride", "target_inner_stride", "target_column_stride", "grad_logprobs_ptr",
        "grad_logprobs_stride", "grad_entropy_ptr", "grad_entropy_stride", "maximum_ptr", "log_sum_ptr", "entropy_ptr",
    ]
)  # fmt: skip
def _backward(
    logits_ptr,
    labels_ptr,
    temperature,
    softcap,
    vocabulary,
    inner,
    outer_stride,
    inner_stride,
    column_stride,
    target_ptr,
    target_inner,
    target_outer_stride,
    target_inner_stride,
    target_column_stride,
    grad_logprobs_ptr,
    grad_logprobs_stride,
    grad_entropy_ptr,
    grad_entropy_stride,
    maximum_ptr,
    log_sum_ptr,
    entropy_ptr,
    PER_ROW: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (n, j) writes block j of row n: (g (1[label] - p) - h p (log p + H)) / T for gradients g of the
    log-probability and h of the entropy H. It reads nothing that another program writes, so that the gradient may
    stand where the logits do."""
    row = tl.program_id(0)
    if ALIGN > 1:
        vocabulary = vocabulary * ALIGN
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    target = _row_start(target_ptr, row, target_inner, target_outer_stride, target_inner_stride, ALIGN)
    target = _columns(target, column, target_column_stride, ALIGN)
    label = tl.load(labels_ptr + row)
    if label < 0:
        tl.store(target, tl.zeros((BLOCK,), target_ptr.dtype.element_ty), inside)
        return
    start = _row_start(logits_ptr, row, inner, outer_stride, inner_stride, ALIGN)
    x = tl.load(_columns(start, column, column_stride, ALIGN), inside, other=0).to(tl.float32)
    inverse = _inverse_temperature(temperature, row, PER_ROW)
    maximum = tl.load(maximum_ptr + row)
    log_sum = tl.load(log_sum_ptr + row)
    slope = inverse
    if softcap is not None:
        cap = number(softcap)
        tanh = _tanh(x / cap)
        x = cap * tanh
        slope = inverse * (1.0 - tanh * tanh)
    z = tl.fma(x, inverse, -maximum)
    p = tl.exp2(z * LOG2_E) * tl.exp2(-log_sum * LOG2_E)
    gradient = tl.zeros((BLOCK,), tl.float32)
    if grad_logprobs_ptr is not None:
        g = tl.load(grad_logprobs_ptr + row * grad_logprobs_stride).to(tl.float32)
        gradient = tl.where(column == label, g, 0.0) - p * g
    if grad_entropy_ptr is not None:
        h = tl.load(grad_entropy_ptr + row * grad_entropy_stride).to(tl.float32)
        gradient -= p * h * (tl.maximum(z, NO_WEIGHT) - (log_sum - tl.load(entropy_ptr + row)))
    tl.store(target, (gradient * slope).to(target_ptr.dtype.element_ty), inside)
