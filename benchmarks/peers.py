"""What the ops are compared with, each as its own users have it; all written anew.

Every function takes a case's inputs by name and returns results in the order of our op. Responses are right-padded,
so that trainers' own loops fit them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import CannotRunError, Inputs, Provider, Results
from marlhf_kernels import reference

Function = Callable[[Inputs], Results]

TRL_CHUNK_ROWS = 128
TRL_SEQUENCE_ROWS = 64
"""TRL goes sequence by sequence: rows of logits are taken as sequences of this many tokens."""


def compiled(function: Function) -> Function:
    """`torch.compile` for exactly this shape, in one graph: a piece left to eager would be an unfair rival."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def eager_and_compiled(function: Function) -> list[Provider]:
    """The same plain PyTorch code as it is and through Inductor."""
    return [Provider("eager", function), Provider("compile", compiled(function))]


# Log-probabilities from logits.


def eager_logprobs(x: Inputs) -> Results:
    return (_picked(torch.log_softmax(x["logits"].float(), -1), x["labels"]),)


def eager_logprobs_entropy(x: Inputs) -> Results:
    logp = torch.log_softmax(x["logits"].float(), -1)
    return _picked(logp, x["labels"]), -(logp.exp() * logp).sum(-1)


def trl_logprobs(x: Inputs) -> Results:
    """TRL's selective log-softmax: nothing as large as all logits is made, one sequence at a time."""
    return (_selective_log_softmax(x["logits"], x["labels"]),)


def trl_logprobs_entropy(x: Inputs) -> Results:
    """TRL's two functions one after the other: they share nothing."""
    parts = []
    for chunk in x["logits"].split(TRL_CHUNK_ROWS):
        logp = torch.log_softmax(chunk, -1)
        parts.append(-(logp.exp() * logp).sum(-1))
    return _selective_log_softmax(x["logits"], x["labels"]), torch.cat(parts)


def liger_logprobs(x: Inputs) -> Results:
    loss = _liger().liger_cross_entropy(x["logits"], x["labels"], reduction="none")
    return (-loss,)


def _selective_log_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    sequences = list(zip(logits.split(TRL_SEQUENCE_ROWS), labels.split(TRL_SEQUENCE_ROWS), strict=True))
    if logits.dtype is torch.float32:
        return torch.cat([_picked(rows, ids) - torch.logsumexp(rows, -1) for rows, ids in sequences])
    # A log-sum-exp rounded to 16 bits is useless; log_softmax rounds only its result.
    return torch.cat([_picked(torch.log_softmax(rows, -1), ids) for rows, ids in sequences])


def _picked(rows: Tensor, labels: Tensor) -> Tensor:
    return rows.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


# Log-probabilities from hidden states.


def eager_linear_logprobs(x: Inputs) -> Results:
    logits = torch.nn.functional.linear(x["hidden"], x["weight"])
    return (_picked(torch.log_softmax(logits.float(), -1), x["labels"]),)


def torch_linear_logprobs(x: Inputs) -> Results:
    """torch's own linear cross-entropy; over single tokens it has no chunked form."""
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise CannotRunError(f"torch {torch.__version__} has no linear_cross_entropy")
    return (-function(x["hidden"], x["weight"], x["labels"], reduction="none"),)


def liger_linear_logprobs(x: Inputs) -> Results:
    loss = _liger().liger_fused_linear_cross_entropy(x["hidden"], x["weight"], x["labels"], reduction="none")
    return (-loss,)


def cce_linear_logprobs(x: Inputs) -> Results:
    """cut-cross-entropy; without its filter, which drops small gradients."""
    function = _imported("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy
    return (-function(x["hidden"], x["weight"], x["labels"], reduction="none", filter_eps=None),)


def _liger() -> Any:
    return _imported("liger_kernel.transformers.functional", "liger-kernel")


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        raise CannotRunError(f"{package} is not installed ({problem})") from problem


def _raised(x: Inputs) -> Inputs:
    """Floating inputs in float32, as a user sums over 16-bit ones."""
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in x.items()}


# Rewards and advantages.


def eager_rewards(kl_coef: float) -> Function:
    """KL-penalised rewards as trainers write them for right-padded responses."""

    def rewards(x: Inputs) -> Results:
        x = _raised(x)
        mask = x["macro_ids"] >= 0
        kl = torch.where(mask, x["logprobs"] - x["ref_logprobs"], 0.0)
        last = mask.sum(1, keepdim=True) - 1
        return (-kl_coef * kl).scatter_add(1, last, x["scores"].unsqueeze(1)), kl

    return rewards


def trl_gae(gamma: float, lam: float) -> Function:
    """TRL's loop over tokens from the last to the first, all sequences at a time."""

    def gae(x: Inputs) -> Results:
        x = _raised(x)
        mask = x["macro_ids"] >= 0
        rewards, values = (torch.where(mask, x[name], 0.0) for name in ("rewards", "values"))
        length = rewards.shape[1]
        running = torch.zeros_like(values[:, 0])
        columns: list[Tensor] = []
        for t in reversed(range(length)):
            after = values[:, t + 1] if t + 1 < length else torch.zeros_like(running)
            running = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * running
            columns.append(running)
        advantages = torch.stack(columns[::-1], dim=1)
        return torch.where(mask, advantages, 0.0), torch.where(mask, advantages + values, 0.0)

    return gae


def loop_gae(gamma: float, lam: float) -> Function:
    """The released macro-action code's way: per sequence a Python loop over its segments, twice, then their tokens.

    Rewards are summed and values averaged over a segment. Segment lengths are given, as that code keeps them.
    """

    def gae(x: Inputs) -> Results:
        x = _raised(x)
        advantages, returns = torch.zeros_like(x["values"]), torch.zeros_like(x["values"])
        for b, lengths in enumerate(_segments(x)):
            start = 0
            rewards, values = [], []
            for n in lengths:
                rewards.append(x["rewards"][b, start : start + n].sum())
                values.append(x["values"][b, start : start + n].mean())
                start += n
            running = after = torch.zeros(())
            for n, reward, value in zip(reversed(lengths), reversed(rewards), reversed(values), strict=True):
                running = reward + gamma * after - value + gamma * lam * running
                after = value
                advantages[b, start - n : start] = running
                returns[b, start - n : start] = running + value
                start -= n
        return advantages, returns

    return gae


def with_rewards(rewards: Function, gae: Function) -> Function:
    """Rewards, then advantages of them: what `rollout_advantages` does."""

    def both(x: Inputs) -> Results:
        penalized, kl = rewards(x)
        return *gae({**x, "rewards": penalized}), penalized, kl

    return both


def _segments(x: Inputs) -> list[list[int]]:
    return [[n for n in row if n] for row in x["lengths"].tolist()]


# Macro actions.


def eager_reduce(x: Inputs) -> Results:
    """Sums by scatter."""
    x = _raised(x)
    mask = x["macro_ids"] >= 0
    sums = x["x"].new_zeros(x["lengths"].shape)
    return (sums.scatter_add(1, x["macro_ids"].clamp(min=0).long(), torch.where(mask, x["x"], 0.0)),)


def loop_reduce(x: Inputs) -> Results:
    x = _raised(x)
    sums = x["x"].new_zeros(x["lengths"].shape)
    for b, lengths in enumerate(_segments(x)):
        start = 0
        for k, n in enumerate(lengths):
            sums[b, k] = x["x"][b, start : start + n].sum()
            start += n
    return (sums,)


def eager_broadcast(x: Inputs) -> Results:
    mask = x["macro_ids"] >= 0
    return (torch.where(mask, x["macro_x"].gather(1, x["macro_ids"].clamp(min=0).long()), 0.0),)


def eager_lengths(x: Inputs) -> Results:
    mask = x["macro_ids"] >= 0
    counts = torch.zeros_like(x["lengths"])
    return (counts.scatter_add(1, x["macro_ids"].clamp(min=0).long(), mask.to(counts.dtype)),)


def eager_fixed_ngram(n: int) -> Function:
    def ids(x: Inputs) -> Results:
        rank = x["mask"].cumsum(1) - 1
        return (torch.where(x["mask"], rank // n, -1).int(),)

    return ids


def loop_perplexity(x: Inputs) -> Results:
    """Token by token in Python, the way a rule is written down."""
    ids = torch.full(x["mask"].shape, -1, dtype=torch.int32)
    for b, (mask, nll) in enumerate(zip(x["mask"].tolist(), -x["ref_logprobs"].float(), strict=True)):
        index, number, total = -1, 0, nll.new_zeros(())
        for t, chosen in enumerate(mask):
            if not chosen:
                continue
            if number == 0 or nll[t] * number > total:
                index, number, total = index + 1, 1, nll[t]
            else:
                number, total = number + 1, total + nll[t]
            ids[b, t] = index
    return (ids,)


# Whitening and losses.


def eager_whiten(x: Inputs) -> Results:
    x = _raised(x)
    mask = x["mask"]
    count = mask.sum()
    mean = (x["x"] * mask).sum() / count
    variance = ((x["x"] - mean).square() * mask).sum() / count
    return (torch.where(mask, (x["x"] - mean) * torch.rsqrt(variance + 1e-8), 0.0),)


def eager_policy_loss(x: Inputs) -> Results:
    """Token-level PPO as trainers write it, with the statistics that they log."""
    x = _raised(x)
    mask = x["macro_ids"] >= 0
    count = mask.sum()
    d = x["logprobs"] - x["old_logprobs"]
    ratio = d.exp()
    plain, clipped = -x["advantages"] * ratio, -x["advantages"] * ratio.clamp(0.8, 1.2)
    loss = (torch.maximum(plain, clipped) * mask).sum() / count
    with torch.no_grad():
        statistics = (
            ((clipped > plain) & mask).sum() / count,
            ((ratio - 1 - d) * mask).sum() / count,
            (ratio * mask).sum() / count,
            (ratio * mask).max(),
        )
    return loss, *statistics


def eager_value_loss(x: Inputs) -> Results:
    x = _raised(x)
    mask = x["macro_ids"] >= 0
    count = mask.sum()
    near = torch.clamp(x["values"], x["old_values"] - 0.2, x["old_values"] + 0.2)
    plain, clipped = (x["values"] - x["returns"]).square(), (near - x["returns"]).square()
    loss = 0.5 * (torch.maximum(plain, clipped) * mask).sum() / count
    return loss, ((clipped > plain) & mask).sum() / count


# Our own reference through Inductor: loss, statistics and gradient in one graph.


def compiled_reference(function: Function, full: Function | None = None) -> Provider:
    """The reference's own code, without the op around it."""
    return Provider(
        "compile",
        compiled(function),
        full=None if full is None else compiled(full),
        backend="reference",
        context=_traceable,
    )


@contextlib.contextmanager
def _traceable() -> Iterator[None]:
    """Inside, the reference's cached properties are plain ones, which Inductor computes once all the same.

    Up to Python 3.11 a `cached_property` takes a lock, and Dynamo cannot trace that.
    """
    replaced = [
        (kind, name, entry)
        for kind in (reference._layout.Sequences, reference._layout.Macros)
        for name, entry in vars(kind).items()
        if isinstance(entry, functools.cached_property)
    ]
    for kind, name, entry in replaced:
        setattr(kind, name, property(entry.func))
    try:
        yield
    finally:
        for kind, name, entry in replaced:
            setattr(kind, name, entry)


def reference_policy_loss(ratio_level: str) -> tuple[Function, Function]:
    """The reference's loss and statistics, and the same with the gradient."""
    unit = "tokens" if ratio_level == "token" else "macros"
    clip = torch.tensor(0.2)

    def full(x: Inputs) -> Results:
        data = (x["logprobs"], x["old_logprobs"], x["advantages"], x["macro_ids"])
        loss, statistics, gradient, count = reference.policy_loss.macro_policy_loss(
            *data,
            clip_low=clip,
            clip_high=clip,
            dual_clip=None,
            ratio_level=ratio_level,
            normalize_by=unit,
            normalizer=None,
            cu_seqlens=None,
            max_seqlen=None,
        )
        return loss, *statistics.unbind(0), (gradient / count).to(x["logprobs"].dtype)

    return (lambda x: full(x)[:-1]), full


def reference_value_loss(level: str) -> tuple[Function, Function]:
    """The reference's loss and clip fraction, and the same with the gradient."""
    unit = "tokens" if level == "token" else "macros"
    clip = torch.tensor(0.2)

    def full(x: Inputs) -> Results:
        data = (x["values"], x["old_values"], x["returns"], x["macro_ids"])
        loss, clip_fraction, gradient, count = reference.value_loss.macro_value_loss(
            *data,
            clip=clip,
            level=level,
            value_weights="mean",
            normalize_by=unit,
            normalizer=None,
            cu_seqlens=None,
            max_seqlen=None,
        )
        return loss, clip_fraction, (gradient / count).to(x["values"].dtype)

    return (lambda x: full(x)[:-1]), full
