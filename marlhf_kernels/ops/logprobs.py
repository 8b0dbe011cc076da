"""Log-probabilities of labels under logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from marlhf_kernels import checks
from marlhf_kernels.checks import Number
from marlhf_kernels.ops._registry import define, differentiable


@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: Number = 1.0,
    logit_softcap: Number | None = None,
    return_entropy: Literal[False] = False,
    inplace_backward: bool = False,
) -> Tensor: ...


@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: Number = 1.0,
    logit_softcap: Number | None = None,
    return_entropy: Literal[True],
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]: ...


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: Number = 1.0,
    logit_softcap: Number | None = None,
    return_entropy: bool = False,
    inplace_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Log-probability of each label under its row of logits, and optionally the entropy of the row.

    With :math:`z = c \tanh(x / c)` (or :math:`z = x` without a softcap :math:`c`) and :math:`p` the softmax
    of :math:`z / \text{temperature}`, the results are :math:`\log p_y` and :math:`-\sum_j p_j \log p_j` in
    nats.

    The log-probability is computed as (z_y - max) - log S and the entropy as log S - E[z - max], S the sum of
    exp(z - max), which stay exact where all logits are large and of one sign. -inf logits (banned vocabulary)
    have probability 0 and leave the entropy and every gradient finite; a label on one has log-probability
    -inf.

    Args:
        logits: `[..., V]`, float32, bfloat16, float16 or float64, any strides.
        labels: `[...]`, int64 or int32. A negative label ignores its row: both results and the row's gradient
            are 0, and the logits there are never used (they may be NaN).
        temperature: a number > 0, or a tensor `[...]` with one for each row. It gets no gradient.
        logit_softcap: a number > 0 or a 0-d tensor, or None for none.
        return_entropy: return the entropy too.
        inplace_backward: let backward write the gradient over `logits`, which saves the memory of one more
            `[..., V]`. Nothing else may need the logits after that; autograd raises if another backward does.
            Compiled graphs, and logits whose rows share memory, get a gradient of its own all the same.

    Returns:
        Log-probabilities `[...]`, or `(log-probabilities, entropy)`; float32, float64 for float64 logits.
        The gradient flows to `logits`, in their dtype. There is no second derivative.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices; temperature or softcap not above 0; on a CPU also a
            label >= V (elsewhere its log-probability is -inf).
    """
    checks.floating("logits", logits)
    checks.tensor("labels", labels, checks.INTEGERS)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits must be [..., V] with V >= 1, got shape {list(logits.shape)}")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels has shape {list(labels.shape)}, but logits {list(logits.shape)} needs one label a row: "
            f"{list(logits.shape[:-1])}"
        )
    checks.same_device("labels", labels, "logits", logits)
    temperature = temperature_of(temperature, labels)
    softcap = checks.optional_coefficient("logit_softcap", logit_softcap, logits, above=0)
    if torch.compiler.is_compiling():
        inplace_backward = False  # a compiler plans the memory of its graph itself
    logprobs, entropy, _, _ = _token_logprobs(logits, labels, temperature, softcap, return_entropy, inplace_backward)
    return (logprobs, entropy) if return_entropy else logprobs


def temperature_of(temperature: Number, labels: Tensor) -> Tensor:
    """A 0-d tensor, or one shaped like the labels, checked."""
    if not isinstance(temperature, Tensor) or temperature.dim() == 0:
        return checks.coefficient("temperature", temperature, labels, above=0)
    checks.floating("temperature", temperature)
    checks.like("temperature", temperature, "labels", labels)
    return temperature


def _fake_token_logprobs(
    logits: Tensor,
    labels: Tensor,
    temperature: Tensor,
    logit_softcap: Tensor | None,
    return_entropy: bool,
    inplace_backward: bool,
) -> tuple[Tensor, ...]:
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    rows = [logits.new_empty(labels.shape, dtype=dtype) for _ in range(3)]
    entropy = logits.new_empty(labels.shape if return_entropy else (0,), dtype=dtype)
    return rows[0], entropy, rows[1], rows[2]


_token_logprobs = define(
    "token_logprobs(Tensor logits, Tensor labels, Tensor temperature, Tensor? logit_softcap, bool return_entropy, bool "
    "inplace_backward) -> (Tensor logprobs, Tensor entropy, Tensor maximum, Tensor log_sum)",
    _fake_token_logprobs,
)

_token_logprobs_backward = define(
    "token_logprobs_backward(Tensor? grad_logprobs, Tensor? grad_entropy, Tensor logits, Tensor labels, Tensor "
    "temperature, Tensor? logit_softcap, Tensor maximum, Tensor log_sum, Tensor entropy) -> Tensor",
    lambda grad_logprobs, grad_entropy, logits, *rest: logits.new_empty(logits.shape),
    detached=True,
)

_token_logprobs_backward_ = define(
    "token_logprobs_backward_(Tensor(a!) logits, Tensor? grad_logprobs, Tensor? grad_entropy, Tensor labels, Tensor "
    "temperature, Tensor? logit_softcap, Tensor maximum, Tensor log_sum, Tensor entropy) -> ()",
    lambda *args: None,
)


def _save(ctx: Any, args: tuple[Any, ...], results: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
    _, labels, temperature, softcap, ctx.return_entropy, ctx.inplace = args
    _, entropy, maximum, log_sum = results
    ctx.mark_non_differentiable(maximum, log_sum, *(() if ctx.return_entropy else (entropy,)))
    return labels, temperature, softcap, maximum, log_sum, entropy


def _backward(
    ctx: Any,
    saved: Sequence[Tensor],
    grad: Tensor | None,
    grad_entropy: Tensor | None,
    *unused: Tensor | None,
) -> Sequence[Tensor | None]:
    logits, labels, temperature, softcap, maximum, log_sum, entropy = saved
    if not ctx.return_entropy:
        grad_entropy = None
    if grad is None and grad_entropy is None:
        return (None,)
    rest = (labels, temperature, softcap, maximum, log_sum, entropy)
    if ctx.inplace and not _rows_overlap(logits):
        _token_logprobs_backward_(logits, grad, grad_entropy, *rest)
        torch.autograd.graph.increment_version(logits)
        return (logits.detach(),)
    return (_token_logprobs_backward(grad, grad_entropy, logits, *rest),)


def _rows_overlap(x: Tensor) -> bool:
    """Whether two entries may share memory: each stride must reach past all that the smaller ones span."""
    span = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride <= span:
            return True
        span += stride * (size - 1)
    return False


differentiable(_token_logprobs, inputs=(0,), save=_save, backward=_backward)
