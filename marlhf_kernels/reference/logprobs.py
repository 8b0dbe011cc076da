"""Log-probability and entropy of labels under logits, row by row, and their gradient.

Rows go through in blocks that stay in the cache, so nothing as large as the logits is made except their
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.reference._layout import accumulation_dtype, scalar

BLOCK_ELEMENTS = {"cpu": 1 << 18}
"""Elements of a block by device; elsewhere launches cost more than cache misses."""
DEFAULT_BLOCK_ELEMENTS = 1 << 26

FLOOR = -1000.0
"""exp of it is 0 in every dtype, and 0 times it is 0: it stands for -inf where -inf would make 0 * inf."""


class RowBlock:
    """The arithmetic of a block of logits rows: all that stands between a logit and a log-probability."""

    def __init__(
        self,
        logits: Tensor,
        labels: Tensor,
        temperature: Tensor,
        softcap: Tensor | None,
        dtype: torch.dtype,
        first_token: Tensor | None = None,
    ) -> None:
        """logits `[n, V]`, labels `[n]`, temperature 0-d or `[n]`; `first_token` is the id of the first column."""
        self.valid = labels >= 0
        column = labels.long() if first_token is None else labels - first_token
        self.here = (self.valid & (column >= 0) & (column < logits.shape[1])).unsqueeze(1)  # [n, 1]
        self.column = torch.where(self.here, column.unsqueeze(1), 0)  # [n, 1]
        self.temperature = temperature.unsqueeze(1) if temperature.dim() else temperature
        self.tanh: Tensor | None = None
        x = logits.to(dtype)
        if softcap is not None:
            self.tanh = torch.tanh(x / softcap)
            x = self.tanh * softcap
        self.plain = temperature.dim() == 0 and temperature.device.type == "cpu" and float(temperature) == 1
        self.x = x if self.plain else x / self.temperature  # [n, V]

    def masked(self, row: Tensor) -> Tensor:
        """0 where the label is negative."""
        return torch.where(self.valid, row, 0)

    def forward(self, want_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Log-probability, entropy, the maximum and the log of the sum above it: `[n]` each.

        A label that is none of the columns has log-probability -inf.
        """
        maximum = self.x.amax(1, keepdim=True)
        target = torch.where(self.here, self.x.gather(1, self.column) - maximum, -torch.inf)
        z = torch.sub(self.x, maximum)
        weight = torch.exp(z) if want_entropy else z.exp_()
        total = weight.sum(1, keepdim=True)
        log_sum = total.log()
        entropy = None
        if want_entropy:
            mean = z.clamp_(min=FLOOR).mul_(weight).sum(1, keepdim=True) / total
            entropy = self.masked((log_sum - mean).squeeze(1))
        logprob = self.masked((target - log_sum).squeeze(1))
        return logprob, entropy, self.masked(maximum.squeeze(1)), self.masked(log_sum.squeeze(1))

    def gradient_into(
        self,
        out: Tensor,
        grad_logprob: Tensor | None,
        grad_entropy: Tensor | None,
        maximum: Tensor,
        log_sum: Tensor,
        entropy: Tensor | None,
        all_valid: bool,
    ) -> None:
        """d / d logits `[n, V]`, from `[n]` gradients of the two results and what forward saved.

        `out` may be the logits themselves: each is read before its place is written.
        """
        log_sum = log_sum.unsqueeze(1)
        g, h = (
            None if grad is None else (grad.unsqueeze(1) if self.plain else grad.unsqueeze(1) / self.temperature)
            for grad in (grad_logprob, grad_entropy)
        )
        work = out if out.dtype is self.x.dtype else torch.empty_like(self.x)
        z = torch.sub(self.x, maximum.unsqueeze(1), out=work)
        if h is None:
            assert g is not None
            z.exp_().mul_(-g * torch.exp(-log_sum))
        else:
            assert entropy is not None
            # -p (g + h (log p + H)) with log p = z - log S
            slope = (z.clamp(min=FLOOR) - (log_sum - entropy.unsqueeze(1))).mul_(h)
            if g is not None:
                slope.add_(g)
            z.exp_().mul_(-torch.exp(-log_sum)).mul_(slope)
        if g is not None:
            z.scatter_add_(1, self.column, torch.where(self.here, g, 0))
        if self.tanh is not None:
            z.mul_(1 - self.tanh.square())
        if not all_valid:
            z.masked_fill_(~self.valid.unsqueeze(1), 0)
        if work is not out:
            out.copy_(work)


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor,
    logit_softcap: Tensor | None,
    return_entropy: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(logits)
    checks.labels_in_vocabulary(labels, logits.shape[-1])
    checks.temperature_above_zero(temperature, labels)
    shape = labels.shape
    logprob, maximum, log_sum = (torch.empty(shape.numel(), dtype=dtype, device=logits.device) for _ in range(3))
    entropy = torch.empty(shape.numel() if return_entropy else 0, dtype=dtype, device=logits.device)
    rows = Rows(labels, temperature, logit_softcap, dtype)
    for chunk, where in _blocks(logits):
        block = rows.block(chunk, where)
        logprob[where], h, maximum[where], log_sum[where] = block.forward(return_entropy)
        if h is not None:
            entropy[where] = h
    return (
        logprob.view(shape),
        entropy.view(shape) if return_entropy else entropy,
        maximum.view(shape),
        log_sum.view(shape),
    )


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
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    args = (grad_logprobs, grad_entropy, labels, temperature, logit_softcap, maximum, log_sum, entropy)
    _gradient_into(gradient.view(-1, logits.shape[-1]), logits, *args)
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
    """The gradient takes the place of the logits."""
    args = (grad_logprobs, grad_entropy, labels, temperature, logit_softcap, maximum, log_sum, entropy)
    _gradient_into(None, logits, *args)


def _gradient_into(
    out: Tensor | None,
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
    """Into the rows of `out` `[N, V]`, or over the logits where it is None."""
    dtype = maximum.dtype
    rows = Rows(labels, temperature, logit_softcap, dtype)
    all_valid = labels.device.type == "cpu" and bool((labels >= 0).all())
    flat = [None if x is None else x.to(dtype).reshape(-1) for x in (grad_logprobs, grad_entropy)]
    maximum, log_sum, entropy = maximum.view(-1), log_sum.view(-1), entropy.view(-1)
    for chunk, where in _blocks(logits):
        g, h = (None if x is None else x[where] for x in flat)
        saved_entropy = entropy[where] if h is not None else None
        rows.block(chunk, where).gradient_into(
            chunk if out is None else out[where], g, h, maximum[where], log_sum[where], saved_entropy, all_valid
        )


class Rows:
    """What belongs to a row beside its logits, cut as the logits are."""

    def __init__(
        self,
        labels: Tensor,
        temperature: Tensor,
        softcap: Tensor | None,
        dtype: torch.dtype,
        first_token: Tensor | None = None,
    ) -> None:
        self.first_token = first_token
        self.dtype = dtype
        self.labels = labels.reshape(-1)
        self.per_row = temperature.dim() > 0
        self.temperature = temperature.reshape(-1).to(dtype) if self.per_row else temperature
        self.softcap = None if softcap is None else scalar(softcap, dtype, labels.device)

    def block(self, logits: Tensor, where: slice) -> RowBlock:
        temperature = self.temperature[where] if self.per_row else self.temperature
        return RowBlock(logits, self.labels[where], temperature, self.softcap, self.dtype, self.first_token)


def _blocks(logits: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Views `[n, V]` of the rows in order, of any strides, and which rows they are."""
    vocabulary = logits.shape[-1]
    limit = BLOCK_ELEMENTS.get(logits.device.type, DEFAULT_BLOCK_ELEMENTS)
    size = max(1, limit // max(vocabulary, 1))
    first = 0
    for slab in _slabs(logits):
        for start in range(0, slab.shape[0], size):
            chunk = slab[start : start + size]
            yield chunk, slice(first, first + chunk.shape[0])
            first += chunk.shape[0]


def _slabs(logits: Tensor) -> Iterator[Tensor]:
    """2-d views that together hold every row in order, without a copy."""
    if logits.dim() == 1:
        yield logits.unsqueeze(0)
    elif logits.dim() == 2:
        yield logits
    elif logits.stride(0) == logits.stride(1) * logits.shape[1]:
        yield from _slabs(logits.flatten(0, 1))
    else:
        for part in logits:
            yield from _slabs(part)
