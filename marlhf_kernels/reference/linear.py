"""Log-probabilities from hidden states: the logits of a few tokens at a time, made again in backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.reference._layout import accumulation_dtype
from marlhf_kernels.reference.logprobs import Rows

CHUNK_ELEMENTS = {"cpu": 1 << 21}
"""Logits made at a time, by device, where `chunk_tokens` is not given."""
DEFAULT_CHUNK_ELEMENTS = 1 << 27


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    logit_softcap: Tensor | None,
    return_entropy: bool,
    chunk_tokens: int | None,
    first_token: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The vocabulary may be a slice of a larger one, whose id `first_token` its first row has."""
    head = _Head(hidden, weight, labels, bias, temperature, logit_softcap, chunk_tokens, first_token)
    if first_token is None:
        checks.labels_in_vocabulary(labels, weight.shape[0])
    checks.temperature_above_zero(temperature, labels)
    number = labels.numel()
    logprob, maximum, log_sum = (torch.empty(number, dtype=head.dtype, device=labels.device) for _ in range(3))
    entropy = torch.empty(number if return_entropy else 0, dtype=head.dtype, device=labels.device)
    with head.no_autocast():
        for where, _, logits in head.chunks():
            logprob[where], h, maximum[where], log_sum[where] = head.rows.block(logits, where).forward(return_entropy)
            if h is not None:
                entropy[where] = h
    shape = labels.shape
    return (
        logprob.view(shape),
        entropy.view(shape) if return_entropy else entropy,
        maximum.view(shape),
        log_sum.view(shape),
    )


def linear_token_logprobs_backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    logit_softcap: Tensor | None,
    chunk_tokens: int | None,
    first_token: Tensor | None,
    maximum: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias, in their dtypes; empty where not needed."""
    head = _Head(hidden, weight, labels, bias, temperature, logit_softcap, chunk_tokens, first_token)
    grad_hidden = hidden.new_empty(hidden.shape if need_hidden else 0)
    hidden_rows = grad_hidden.view(-1, hidden.shape[-1])
    # Over many tokens a 16-bit sum would stop growing.
    grad_weight = head.weight.new_zeros(head.weight.shape if need_weight else 0)
    grad_bias = head.weight.new_zeros(weight.shape[0] if need_bias else 0)
    flat = [None if x is None else x.to(head.dtype).reshape(-1) for x in (grad_logprobs, grad_entropy)]
    maximum, log_sum, entropy = maximum.view(-1), log_sum.view(-1), entropy.view(-1)
    with head.no_autocast():
        for where, rows, logits in head.chunks():
            g, h = (None if x is None else x[where] for x in flat)
            saved_entropy = entropy[where] if h is not None else None
            head.rows.block(logits, where).gradient_into(
                logits, g, h, maximum[where], log_sum[where], saved_entropy, all_valid=False
            )
            if need_hidden:
                hidden_rows[where] = (logits @ head.weight).to(hidden.dtype)
            if need_weight:
                grad_weight.addmm_(logits.t(), rows)
            if need_bias:
                grad_bias += logits.sum(0)
    return (
        grad_hidden,
        grad_weight.to(weight.dtype),
        grad_bias if bias is None else grad_bias.to(bias.dtype),
    )


def merge_slices(slices: Tensor, labels: Tensor, return_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results over a whole vocabulary from those over its slices.

    slices `[ranks, 3 or 4, ...]`: log-probability, entropy (if there), maximum and log of the sum of each
    slice.
    """
    own, *own_entropy, maximum, log_sum = slices.unbind(1)  # [ranks, ...] each
    top = maximum.amax(0)
    dead = maximum == -torch.inf  # every token of the slice is banned: it adds nothing, and its log S is NaN
    shift = maximum - top
    mass = torch.where(dead, 0, torch.exp(log_sum + shift))
    total = mass.sum(0)
    log_total = total.log()
    target = torch.where(dead, -torch.inf, own + log_sum + shift).amax(0)  # -inf but on the rank that has the label
    valid = labels >= 0
    logprobs, top, log_total = (torch.where(valid, x, 0) for x in (target - log_total, top, log_total))
    if not own_entropy:
        return logprobs, slices.new_empty(0), top, log_total
    mean = torch.where(mass == 0, 0, mass * (log_sum - own_entropy[0] + shift)).sum(0) / total
    return logprobs, torch.where(valid, log_total - mean, 0), top, log_total


class _Head:
    """The linear layer in front of the softmax, applied to a chunk of tokens at a time."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        temperature: Tensor,
        softcap: Tensor | None,
        chunk_tokens: int | None,
        first_token: Tensor | None,
    ) -> None:
        self.dtype = accumulation_dtype(hidden, weight, bias)
        self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.weight = weight.to(self.dtype)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.valid = labels.reshape(-1, 1) >= 0
        self.rows = Rows(labels, temperature, softcap, self.dtype, first_token)
        if chunk_tokens is None:
            budget = CHUNK_ELEMENTS.get(hidden.device.type, DEFAULT_CHUNK_ELEMENTS)
            chunk_tokens = max(1, budget // max(weight.shape[0], 1))
        self.chunk_tokens = chunk_tokens

    def no_autocast(self) -> torch.autocast:
        """Here the dtype is decided already."""
        return torch.autocast(self.hidden.device.type, enabled=False)

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Which tokens, their hidden states `[n, H]`, 0 where the label is negative, and their logits `[n, V]`."""
        for start in range(0, self.hidden.shape[0], self.chunk_tokens):
            where = slice(start, start + self.chunk_tokens)
            rows = torch.where(self.valid[where], self.hidden[where].to(self.dtype), 0)
            yield where, rows, torch.nn.functional.linear(rows, self.weight, self.bias)
