"""Calls of the native log-probabilities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.cpu.loader import TYPES, Function, address, num_threads

SEGMENT = 16384
"""Columns of a unit of work in `logprobs.cpp`; each needs room for its partial sums."""

_FORWARD = Function("token_logprobs", "ipplllippddpppppi")
_BACKWARD = Function("token_logprobs_backward", "ipplllippddpppppppli")


class Rows:
    """The rows of a tensor `[..., V]` as the native functions take them: read in place unless V is strided."""

    def __init__(self, x: Tensor) -> None:
        self.tensor = x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
        self.stride = 0
        self.offsets: Tensor | None = None
        shape, strides = x.shape[:-1], x.stride()[:-1]
        # One stride steps through all rows where each axis continues the one inside of it.
        inner = 1
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size == 1:
                continue
            if inner == 1:
                self.stride = stride
            elif stride != self.stride * inner:
                self.offsets = _row_offsets(shape, strides)
                break
            inner *= size


def _row_offsets(shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """Where each row starts, in elements."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
    return offsets.contiguous()


class Call:
    """The arguments that forward and backward share, and what keeps their memory alive."""

    def __init__(self, logits: Tensor, labels: Tensor, temperature: Tensor, logit_softcap: Tensor | None) -> None:
        self.rows = rows = Rows(logits)
        self.labels = labels = labels.contiguous()
        self.temperatures = _flat(temperature) if temperature.dim() else None
        self.arguments = (
            TYPES[logits.dtype],
            rows.tensor.data_ptr(),
            address(rows.offsets),
            rows.stride,
            labels.numel(),
            logits.shape[-1],
            TYPES[labels.dtype],
            labels.data_ptr(),
            address(self.temperatures),
            1.0 if self.temperatures is not None else temperature.item(),
            math.inf if logit_softcap is None else logit_softcap.item(),
        )


def _flat(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous()


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor,
    logit_softcap: Tensor | None,
    return_entropy: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Call(logits, labels, temperature, logit_softcap)
    # Twice as fast as torch.empty with a shape.
    logprob, maximum, log_sum = (torch.empty_like(call.labels, dtype=torch.float32) for _ in range(3))
    entropy = torch.empty_like(call.labels, dtype=torch.float32) if return_entropy else torch.empty(0)
    partials = torch.empty(3 * labels.numel() * math.ceil(logits.shape[-1] / SEGMENT), dtype=torch.float64)
    status = _FORWARD.call(
        *call.arguments,
        partials.data_ptr(),
        logprob.data_ptr(),
        entropy.data_ptr() if return_entropy else None,
        maximum.data_ptr(),
        log_sum.data_ptr(),
        num_threads(),
    )
    if status:
        checks.labels_in_vocabulary(labels, logits.shape[-1])
        checks.temperature_above_zero(temperature, labels)
    return logprob, entropy, maximum, log_sum


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
    gradient = torch.empty(logits.shape, dtype=logits.dtype)
    call = Call(logits, labels, temperature, logit_softcap)
    _gradient_into(Rows(gradient), call, grad_logprobs, grad_entropy, maximum, log_sum, entropy)
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
    call = Call(logits, labels, temperature, logit_softcap)
    _gradient_into(call.rows, call, grad_logprobs, grad_entropy, maximum, log_sum, entropy)
    if call.rows.tensor is not logits:
        logits.copy_(call.rows.tensor)


def _gradient_into(
    out: Rows,
    call: Call,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    maximum: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
) -> None:
    g, h = (None if grad is None else _flat(grad) for grad in (grad_logprobs, grad_entropy))
    saved = [x.contiguous() for x in (maximum, log_sum, entropy)]
    _BACKWARD.call(
        *call.arguments,
        address(g),
        address(h),
        *(x.data_ptr() for x in saved),
        out.tensor.data_ptr(),
        address(out.offsets),
        out.stride,
        num_threads(),
    )
