"""Sends random calls to the native CPU backend: shapes, strides, dtypes, extremes, and ids that are garbage.

    python -m tests.kernels.random_calls --calls 1000000 --seed 0

A call either returns or raises the error that its op documents; anything else ends the run with the call's number,
which with the same seed is the same call. What a call writes out of bounds only a library built with
`-DMARLHF_SANITIZE=address,undefined` can see. Counts per op are printed; less than half of them valid is a failure.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import marlhf_kernels as mk
from marlhf_kernels import segmentation

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EXTREMES = (0.0, -0.0, 1e-45, 1e-38, 65504.0, -65504.0, 3e38, -3e38, float("inf"), float("-inf"), float("nan"))
IDS = (-(2**31), -7, -1, 0, 1, 2, 1000, 2**31 - 1)


class Inputs:
    """Random arguments that fit together, from one generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rows = rng.choice((0, 1, 1, 2, 3, 5))
        self.width = rng.choice((0, 1, 2, 3, 7, 8, 9, 16, 17, 33, 70))
        self.packed = rng.random() < 0.4
        self.options: dict[str, Any] = {}
        if self.packed:
            self.options["cu_seqlens"] = self.offsets()
        self.shape = (self.rows * self.width,) if self.packed else (self.rows, self.width)

    def offsets(self) -> Tensor:
        total, rng = self.rows * self.width, self.rng
        cuts = sorted(rng.randint(0, total) for _ in range(self.rows))
        offsets = [0, *cuts]
        if rng.random() < 0.1:
            offsets[rng.randrange(len(offsets))] = rng.choice(IDS)
        return self.strided(torch.tensor(offsets, dtype=torch.int32))

    def strided(self, x: Tensor) -> Tensor:
        """The same numbers, perhaps with gaps, another order of axes in memory, or off a vector's border."""
        kind = self.rng.random()
        if kind < 0.6 or x.dim() == 0:
            return x
        if kind < 0.75:
            wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1] + 3))
            view = wide[..., 1 : 1 + 2 * x.shape[-1] : 2]
        elif kind < 0.9:
            wide = x.new_zeros((*x.shape[:-1], x.shape[-1] + 3))
            view = wide[..., 1 : 1 + x.shape[-1]]
        else:
            view = x.new_zeros(x.shape[::-1]).permute(*range(x.dim())[::-1])
        return view.copy_(x)

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        rng = self.rng
        x = torch.randn(shape) * rng.choice((1e-3, 1.0, 1.0, 30.0, 1e4))
        if x.numel() and rng.random() < 0.2:
            for _ in range(rng.randint(1, 4)):
                x.view(-1)[rng.randrange(x.numel())] = rng.choice(EXTREMES)
        return self.strided(x.to(dtype or rng.choice(FLOATS)))

    def tokens(self) -> Tensor:
        return self.values(*self.shape)

    def sequences(self) -> Tensor:
        return self.values(self.rows)

    def mask(self) -> Tensor:
        return self.strided(torch.rand(self.shape) < self.rng.choice((0.0, 0.5, 0.9, 1.0)))

    def ids(self) -> Tensor:
        """Macro actions, or any int32 content."""
        rng = self.rng
        if rng.random() < 0.3:
            x = torch.tensor([rng.choice(IDS) for _ in range(torch.Size(self.shape).numel())]).reshape(self.shape)
        else:
            rises = torch.rand(self.shape) < rng.choice((0.0, 0.3, 1.0))
            x = rises.cumsum(-1) if self.shape[-1] else rises.long()
            if not self.packed and self.width:
                x = x - x[:, :1]
            x = torch.where(torch.rand(self.shape) < rng.choice((0.0, 0.2)), -1, x)
        return self.strided(x.to(rng.choice((torch.int32, torch.int64))))

    def maybe(self, name: str, *choices: Any) -> None:
        """An option of the call, sometimes given."""
        if self.rng.random() < 0.5:
            self.options[name] = self.rng.choice(choices)


def learn(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def backward(x: Tensor, *outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.randn_like(out) for out in outputs])
    assert x.grad is not None
    assert x.grad.shape == x.shape


def token_logprobs(i: Inputs) -> None:
    rng = i.rng
    vocabulary = rng.choice((1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 2049, 16385))
    rows = (i.rows,) if vocabulary > 1000 or i.packed else (i.rows, min(i.width, 9))
    logits = i.values(*rows, vocabulary)
    labels = torch.randint(vocabulary, rows)
    if labels.numel() and rng.random() < 0.4:
        labels.view(-1)[rng.randrange(labels.numel())] = rng.choice((-100, -1, -(2**31), vocabulary, 2**31 - 1))
    labels = i.strided(labels.to(rng.choice((torch.int32, torch.int64))))
    options: dict[str, Any] = {"inplace_backward": rng.random() < 0.3, "return_entropy": True}
    if rng.random() < 0.3:
        options["temperature"] = rng.choice((0.5, 2.0, torch.rand(rows) + 0.1, torch.rand(rows) - 0.01))
    if rng.random() < 0.3:
        options["logit_softcap"] = rng.choice((1e-3, 1.0, 30.0))
    if rng.random() < 0.5:
        leaf = learn(logits)
        backward(leaf, *mk.token_logprobs(leaf.view_as(leaf), labels, **options))
    else:
        mk.token_logprobs(logits, labels, temperature=options.get("temperature", 1.0))


def macro_lengths(i: Inputs) -> None:
    i.maybe("num_macros", 0, 1, 5, 80, 1001)
    mk.macro_lengths(i.ids(), **i.options)


def macro_reduce(i: Inputs) -> None:
    i.maybe("num_macros", 0, 1, 5, 80, 1001)
    i.maybe("weights", "sum", "mean", "first", "last", "position", "position_reversed", "discounted_sum")
    if i.options.get("weights") == "discounted_sum":
        i.maybe("discount", 0.0, 0.9, 1.0)
    x = learn(i.tokens())
    backward(x, mk.macro_reduce(x, i.ids(), **i.options))


def macro_broadcast(i: Inputs) -> None:
    x = learn(i.values(i.rows, i.rng.choice((0, 1, 4, 71))))
    backward(x, mk.macro_broadcast(x, i.ids(), **i.options))


def kl_penalized_rewards(i: Inputs) -> None:
    i.maybe("kl_estimator", "k1", "k2", "k3")
    i.maybe("score_clip", 0.0, 1.0)
    mk.kl_penalized_rewards(i.sequences(), i.tokens(), i.tokens(), i.ids(), kl_coef=0.1, **i.options)


def advantage_options(i: Inputs) -> None:
    i.maybe("gamma", 0.0, 0.9)
    i.maybe("lam", 0.0, 1.0)
    i.maybe("reward_weights", "sum", "mean", "last", "discounted_sum")
    i.maybe("value_weights", "mean", "first", "last", "position", "position_reversed")
    i.maybe("discount_per", "macro", "token")
    if i.rng.random() < 0.3:
        i.options["bootstrap_values"] = i.sequences()


def macro_gae(i: Inputs) -> None:
    advantage_options(i)
    mk.macro_gae(i.tokens(), i.tokens(), i.ids(), **i.options)


def rollout_advantages(i: Inputs) -> None:
    advantage_options(i)
    i.maybe("kl_estimator", "k1", "k2", "k3")
    mk.rollout_advantages(i.sequences(), i.tokens(), i.tokens(), i.tokens(), i.ids(), kl_coef=0.1, **i.options)


def macro_policy_loss(i: Inputs) -> None:
    i.maybe("ratio_level", "token", "macro", "macro_mean")
    i.maybe("normalize_by", "tokens", "macros", "sequences")
    i.maybe("dual_clip", 3.0)
    i.maybe("normalizer", 0.0, 7.0)
    x = learn(i.tokens())
    backward(x, mk.macro_policy_loss(x, i.tokens(), i.tokens(), i.ids(), **i.options).loss)


def macro_value_loss(i: Inputs) -> None:
    i.maybe("level", "token", "macro")
    i.maybe("normalize_by", "tokens", "macros", "sequences")
    i.maybe("clip", None, 0.1)
    x = learn(i.tokens())
    backward(x, mk.macro_value_loss(x, i.tokens(), i.tokens(), i.ids(), **i.options).loss)


def masked_whiten(i: Inputs) -> None:
    i.maybe("shift_mean", False)
    i.maybe("unbiased", True)
    mk.masked_whiten(i.tokens(), i.mask(), **{k: v for k, v in i.options.items() if k != "cu_seqlens"})


def fixed_ngram(i: Inputs) -> None:
    segmentation.fixed_ngram(i.mask(), i.rng.choice((1, 2, 5, 2**31 - 1, float("inf"))), **i.options)


def from_ends(i: Inputs) -> None:
    segmentation.from_ends(i.mask(), i.mask(), **i.options)


def perplexity(i: Inputs) -> None:
    i.maybe("rule", "running_mean", "neighbour")
    segmentation.perplexity(i.mask(), i.tokens(), **i.options)


def isolate_last(i: Inputs) -> None:
    segmentation.isolate_last(i.ids(), **i.options)


CALLS: dict[str, Callable[[Inputs], None]] = {
    call.__name__: call
    for call in (
        token_logprobs, macro_lengths, macro_reduce, macro_broadcast, kl_penalized_rewards, macro_gae,
        rollout_advantages, macro_policy_loss, macro_value_loss, masked_whiten, fixed_ngram, from_ends, perplexity,
        isolate_last,
    )
}  # fmt: skip
# Ops that a call needs beside the one of its name.
NEEDS = {"masked_whiten": ("masked_moments", "masked_normalize"), "macro_reduce": ("macro_reduce", "macro_broadcast")}


def available() -> list[str]:
    """The calls whose ops the native backend has."""
    ops = mk.backends()["cpu"].ops
    return [name for name in CALLS if all(op in ops for op in NEEDS.get(name, (name,)))]


def send(calls: int, seed: int) -> dict[str, Counter[str]]:
    """Sends them, and counts by op what returned and what was refused."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in available()}
    names = list(counts)
    with mk.use_backend("cpu"):
        for number in range(calls):
            rng = random.Random(f"{seed} {number}")
            torch.manual_seed(rng.getrandbits(32))
            torch.set_num_threads(2 if number % 50 == 0 else 1)
            name = names[number % len(names)]
            try:
                CALLS[name](Inputs(rng))
            except ValueError:
                counts[name]["refused"] += 1
            except BaseException:
                print(f"call {number} of seed {seed}: {name}", file=sys.stderr)
                raise
            else:
                counts[name]["valid"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts = send(arguments.calls, arguments.seed)
    for name, count in counts.items():
        print(f"{name:24} {count['valid']:9} valid {count['refused']:9} refused")
    return 0 if all(2 * count["valid"] >= count.total() for count in counts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
