"""Ops of one entry at a time: labels of actions, the penalties of the policy, and a stored gradient times another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from marlhf_kernels.gpu.launch import alignment, cdiv, coefficient, launch, number, optional_coefficient

BLOCK, WARPS = 1024, 4
MOST_PROGRAMS = 1024
"""Their sums are added by one program in one block."""


def scale_gradient(gradient: Tensor, grad_output: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes moved: those of `gradient` and of the result."""
    gradient = gradient.contiguous()
    scaled = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    entries = gradient.numel()
    align = alignment(gradient, entries)
    launch(
        _scale_gradient,
        (cdiv(entries, BLOCK),),
        gradient,
        grad_output,
        count,
        scaled,
        entries // align,
        ALIGN=align,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return scaled


@triton.jit(do_not_specialize=["grad_output_ptr", "count_ptr", "entries"])
def _scale_gradient(
    gradient_ptr, grad_output_ptr, count_ptr, scaled_ptr, entries, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < entries * ALIGN
    factor = tl.load(grad_output_ptr).to(tl.float32) / tl.load(count_ptr).to(tl.float32)
    gradient = tl.load(gradient_ptr + i, inside, other=0).to(tl.float32)
    tl.store(scaled_ptr + i, gradient * factor, inside)


def action_labels(labels: Tensor, macro_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
    """Bytes moved: those of `labels`, `macro_ids` and the result."""
    labels, macro_ids = labels.contiguous(), macro_ids.contiguous()
    chosen = torch.empty_like(labels)
    tokens = labels.numel()
    align = min(alignment(labels, tokens), alignment(macro_ids))
    launch(
        _action_labels,
        (cdiv(tokens, BLOCK),),
        labels,
        macro_ids,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        chosen,
        tokens // align,
        labels.shape[-1] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        ALIGN=align,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return chosen


@triton.jit(do_not_specialize=["cu_seqlens_ptr", "tokens", "size"])
def _action_labels(
    labels_ptr, ids_ptr, cu_seqlens_ptr, chosen_ptr, tokens, size, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):
    tokens = tokens * ALIGN
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tokens
    action = is_action(ids_ptr, i, cu_seqlens_ptr, tokens, size)
    label = tl.load(labels_ptr + i, inside, other=-1)
    tl.store(chosen_ptr + i, tl.where(action, label, -1), inside)


@triton.jit
def is_action(ids_ptr, i, cu_seqlens_ptr, tokens, size):
    """Whether each of the tokens `i` is an action: its id >= 0 and not above its position.

    There are `tokens` of them; `size` is the length T of padded rows, or the number of sequences that
    `cu_seqlens_ptr` (else None) tells of.
    """
    ids = tl.load(ids_ptr + i, i < tokens, other=-1)
    action = ids >= 0
    if cu_seqlens_ptr is None:
        position = i % size
    else:
        # How many sequences end at the token or before it, by bisection.
        low = tl.zeros_like(i)
        high = low + size
        span = size
        while span > 0:
            middle = (low + high) // 2
            open_ = low < high
            end = tl.load(cu_seqlens_ptr + 1 + middle, open_, other=0)
            after = open_ & (end <= i)
            high = tl.where(open_ & ~after, middle, high)
            low = tl.where(after, middle + 1, low)
            span = span // 2
        action &= low < size
        position = i - tl.load(cu_seqlens_ptr + low, action, other=0)
    return action & (ids <= position)


def policy_penalty(
    logprobs: Tensor,
    entropy: Tensor | None,
    ref_logprobs: Tensor | None,
    macro_ids: Tensor,
    entropy_coef: Tensor,
    kl_loss_coef: Tensor,
    normalizer: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two launches. Bytes moved: those of the tensors given, and 4 for each entry of the gradients."""
    shape, device = macro_ids.shape, macro_ids.device
    tokens = macro_ids.numel()
    blocks_per_program = max(cdiv(cdiv(tokens, BLOCK), MOST_PROGRAMS), 1)
    programs = max(cdiv(cdiv(tokens, BLOCK), blocks_per_program), 1)
    grad_logprobs = torch.empty(shape, dtype=torch.float32, device=device)
    grad_entropy = torch.empty(0 if entropy is None else shape, dtype=torch.float32, device=device)
    sums = torch.empty((programs, 2), dtype=torch.float32, device=device)
    loss, count = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
    pair = (None, None) if ref_logprobs is None else (logprobs.contiguous(), ref_logprobs.contiguous())
    read = (*pair, None if entropy is None else entropy.contiguous(), macro_ids.contiguous())
    align = min(alignment(x, tokens) for x in read if x is not None)
    launch(
        _penalty,
        (programs,),
        *read,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        coefficient(entropy_coef, logprobs),
        coefficient(kl_loss_coef, logprobs),
        grad_logprobs,
        None if entropy is None else grad_entropy,
        sums,
        tokens // align,
        shape[-1] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        blocks_per_program,
        ALIGN=align,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    launch(
        _mean,
        (1,),
        sums,
        optional_coefficient(normalizer, logprobs),
        loss,
        count,
        programs,
        BLOCK=MOST_PROGRAMS,
        num_warps=WARPS,
    )
    return loss, grad_logprobs, grad_entropy, count


@triton.jit(
    do_not_specialize=[
        "cu_seqlens_ptr", "entropy_coef", "kl_loss_coef", "sums_ptr", "tokens", "size", "blocks_per_program",
    ]
)  # fmt: skip
def _penalty(
    logprobs_ptr,
    ref_ptr,
    entropy_ptr,
    ids_ptr,
    cu_seqlens_ptr,
    entropy_coef,
    kl_loss_coef,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    sums_ptr,
    tokens,
    size,
    blocks_per_program,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program writes the gradients of its tokens, and (sum of the penalties, number of actions) of them."""
    tokens = tokens * ALIGN
    first = tl.program_id(0).to(tl.int64) * blocks_per_program
    total = tl.zeros((BLOCK,), tl.float32)
    actions = tl.zeros((BLOCK,), tl.float32)
    for block in range(blocks_per_program):
        i = (first + block) * BLOCK + tl.arange(0, BLOCK)
        inside = i < tokens
        action = is_action(ids_ptr, i, cu_seqlens_ptr, tokens, size)
        actions += action.to(tl.float32)
        slope = tl.zeros((BLOCK,), tl.float32)
        if ref_ptr is not None:
            difference = tl.load(logprobs_ptr + i, inside, other=0).to(tl.float32)
            difference -= tl.load(ref_ptr + i, inside, other=0).to(tl.float32)
            difference = tl.where(action, difference, 0.0)
            slope = difference * number(kl_loss_coef)
            total += difference * slope * 0.5
        tl.store(grad_logprobs_ptr + i, slope, inside)
        if entropy_ptr is not None:
            slope = tl.where(action, -number(entropy_coef), 0.0)
            entropy = tl.load(entropy_ptr + i, inside, other=0).to(tl.float32)
            total += tl.where(action, entropy, 0.0) * slope
            tl.store(grad_entropy_ptr + i, slope, inside)
    sums_ptr += tl.program_id(0) * 2
    tl.store(sums_ptr, tl.sum(total))
    tl.store(sums_ptr + 1, tl.sum(actions))


@triton.jit(do_not_specialize=["sums_ptr", "normalizer", "loss_ptr", "count_ptr", "programs"])
def _mean(sums_ptr, normalizer, loss_ptr, count_ptr, programs, BLOCK: tl.constexpr):
    program = tl.arange(0, BLOCK)
    inside = program < programs
    total = tl.sum(tl.load(sums_ptr + program * 2, inside, other=0.0))
    actions = tl.sum(tl.load(sums_ptr + program * 2 + 1, inside, other=0.0))
    count = tl.maximum(actions, 1.0)
    if normalizer is not None:
        count = tl.where(actions > 0, number(normalizer), 1.0)
    tl.store(loss_ptr, total / count)
    tl.store(count_ptr, count)
