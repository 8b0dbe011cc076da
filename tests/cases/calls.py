"""Every macro op called on a batch, beside the oracle's answer: the list that all-op tests run over.

A `Call` is one op with one setting of its options. `run` returns the op's outputs, `exact` the oracle's outputs
as (nested) lists in the same order, and `exact_gradients` the gradient of
`sum(upstream(output) * output)` for the first output in every field of `learns`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import marlhf_kernels as mk
from tests.cases import oracle
from tests.cases.batches import Batch

# What an output is aligned with.
TOKEN, MACRO, SCALAR = "token", "macro", "scalar"


@dataclass(frozen=True)
class Call:
    """One op with one setting of its options."""

    op: str
    options: str
    outputs: tuple[str, ...]
    run: Callable[[Batch], tuple[Tensor, ...]]
    exact: Callable[[Batch], Sequence[Any]]
    learns: str | None = None
    exact_gradient: Callable[[Batch, Any], Any] | None = None

    def __str__(self) -> str:
        return f"{self.op}({self.options})"


def _text(options: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in options.items())


def reduce_call(**options: Any) -> Call:
    return Call(
        "macro_reduce",
        _text(options),
        (MACRO,),
        lambda b: (mk.macro_reduce(b["values"], b.macro_ids, **options, **b.keywords),),
        lambda b: (oracle.macro_reduce(b.lists("values"), b.ids, **options),),
        "values",
        lambda b, g: oracle.macro_reduce_gradient(g, b.ids, **{k: v for k, v in options.items() if k != "num_macros"}),
    )


def _broadcast_gradient(b: Batch, g: Any) -> Any:
    width = b["macro_x"].shape[1]
    masked = [
        [v if 0 <= k <= t else 0.0 for t, (v, k) in enumerate(zip(*pair, strict=True))]
        for pair in zip(g, b.ids, strict=True)
    ]
    return oracle.macro_reduce(masked, b.ids, "sum", num_macros=width)


BROADCAST = Call(
    "macro_broadcast",
    "",
    (TOKEN,),
    lambda b: (mk.macro_broadcast(b["macro_x"], b.macro_ids, **b.keywords),),
    lambda b: (oracle.macro_broadcast(b.lists("macro_x"), b.ids),),
    "macro_x",
    _broadcast_gradient,
)


def lengths_call(**options: Any) -> Call:
    return Call(
        "macro_lengths",
        _text(options),
        (MACRO,),
        lambda b: (mk.macro_lengths(b.macro_ids, **options, **b.keywords),),
        lambda b: (oracle.macro_lengths(b.ids, **options),),
    )


def kl_call(**options: Any) -> Call:
    names = ("scores", "logprobs", "ref_logprobs")
    return Call(
        "kl_penalized_rewards",
        _text(options),
        (TOKEN, TOKEN),
        lambda b: tuple(mk.kl_penalized_rewards(*(b[n] for n in names), b.macro_ids, **options, **b.keywords)),
        lambda b: oracle.kl_penalized_rewards(*(b.lists(n) for n in names), b.ids, **options),
    )


def gae_call(bootstrap: bool = False, **options: Any) -> Call:
    def keywords(b: Batch) -> dict[str, Any]:
        return {**options, **({"bootstrap_values": b["bootstrap_values"]} if bootstrap else {}), **b.keywords}

    def lists(b: Batch) -> dict[str, Any]:
        return {**options, **({"bootstrap_values": b.lists("bootstrap_values")} if bootstrap else {})}

    return Call(
        "macro_gae",
        _text({**options, "bootstrap": bootstrap}),
        (TOKEN, TOKEN),
        lambda b: tuple(mk.macro_gae(b["rewards"], b["values"], b.macro_ids, **keywords(b))),
        lambda b: oracle.macro_gae(b.lists("rewards"), b.lists("values"), b.ids, **lists(b)),
    )


def rollout_call(bootstrap: bool = False, **options: Any) -> Call:
    names = ("scores", "logprobs", "ref_logprobs", "values")

    def keywords(b: Batch) -> dict[str, Any]:
        return {**options, **({"bootstrap_values": b["bootstrap_values"]} if bootstrap else {}), **b.keywords}

    def lists(b: Batch) -> dict[str, Any]:
        return {**options, **({"bootstrap_values": b.lists("bootstrap_values")} if bootstrap else {})}

    return Call(
        "rollout_advantages",
        _text({**options, "bootstrap": bootstrap}),
        (TOKEN, TOKEN, TOKEN, TOKEN),
        lambda b: tuple(mk.rollout_advantages(*(b[n] for n in names), b.macro_ids, **keywords(b))),
        lambda b: oracle.rollout_advantages(*(b.lists(n) for n in names), b.ids, **lists(b)),
    )


POLICY_STATISTICS = ("clip_fraction", "approx_kl", "ratio_mean", "ratio_max")


def policy_call(**options: Any) -> Call:
    names = ("logprobs", "old_logprobs", "advantages")

    def exact(b: Batch) -> list[float]:
        out = oracle.macro_policy_loss(*(b.lists(n) for n in names), b.ids, **options)
        return [out.loss, *(out.statistics[s] for s in POLICY_STATISTICS)]

    def run(b: Batch) -> tuple[Tensor, ...]:
        out = mk.macro_policy_loss(*(b[n] for n in names), b.macro_ids, **options, **b.keywords)
        return (out.loss, *(getattr(out, s) for s in POLICY_STATISTICS))

    def gradient(b: Batch, g: float) -> list[list[float]]:
        out = oracle.macro_policy_loss(*(b.lists(n) for n in names), b.ids, **options)
        return [[g * v for v in row] for row in out.gradient]

    return Call("macro_policy_loss", _text(options), (SCALAR,) * 5, run, exact, "logprobs", gradient)


def value_call(**options: Any) -> Call:
    names = ("values", "old_values", "returns")

    def exact(b: Batch) -> list[float]:
        out = oracle.macro_value_loss(*(b.lists(n) for n in names), b.ids, **options)
        return [out.loss, out.statistics["clip_fraction"]]

    def run(b: Batch) -> tuple[Tensor, ...]:
        out = mk.macro_value_loss(*(b[n] for n in names), b.macro_ids, **options, **b.keywords)
        return (out.loss, out.clip_fraction)

    def gradient(b: Batch, g: float) -> list[list[float]]:
        out = oracle.macro_value_loss(*(b.lists(n) for n in names), b.ids, **options)
        return [[g * v for v in row] for row in out.gradient]

    return Call("macro_value_loss", _text(options), (SCALAR,) * 2, run, exact, "values", gradient)


REDUCE = [
    *(reduce_call(weights=w) for w in oracle.REWARD_WEIGHTS if w != "discounted_sum"),
    reduce_call(weights="discounted_sum", discount=0.9),
    reduce_call(weights="discounted_sum", discount=0.0),
    reduce_call(weights="discounted_sum"),
    reduce_call(weights="mean", num_macros=9),
]
LENGTHS = [lengths_call(), lengths_call(num_macros=9)]
KL = [
    *(kl_call(kl_coef=0.3, kl_estimator=e) for e in oracle.KL_ESTIMATORS),
    kl_call(kl_coef=0.0),
    kl_call(kl_coef=0.3, score_clip=1.5),
]
GAE = [
    gae_call(),
    gae_call(bootstrap=True),
    *(
        gae_call(bootstrap=True, reward_weights=r, value_weights=v, discount_per=p, gamma=0.97, lam=0.9)
        for r in oracle.REWARD_WEIGHTS
        for v in oracle.VALUE_WEIGHTS
        for p in ("macro", "token")
    ),
    *(
        gae_call(bootstrap=True, gamma=gamma, lam=lam, discount_per=p, reward_weights="discounted_sum")
        for gamma in (0.0, 1.0)
        for lam in (0.0, 1.0)
        for p in ("macro", "token")
    ),
]
ROLLOUT = [
    rollout_call(kl_coef=0.1),
    *(rollout_call(kl_coef=0.1, kl_estimator=e, bootstrap=True) for e in oracle.KL_ESTIMATORS),
    rollout_call(kl_coef=0.1, score_clip=1.0, gamma=0.9, lam=0.8, discount_per="token", bootstrap=True),
    *(rollout_call(kl_coef=0.2, reward_weights=r, gamma=0.97) for r in oracle.REWARD_WEIGHTS),
    *(rollout_call(kl_coef=0.2, value_weights=v, gamma=0.97) for v in oracle.VALUE_WEIGHTS),
]
POLICY = [
    policy_call(),
    *(policy_call(ratio_level=r) for r in oracle.RATIO_LEVELS),
    *(policy_call(ratio_level=r, normalize_by=n) for r in oracle.RATIO_LEVELS for n in oracle.NORMALIZE_BY),
    *(
        policy_call(ratio_level=r, normalize_by=n, normalizer=7.0)
        for r in oracle.RATIO_LEVELS
        for n in (None, "sequences")
    ),
    *(policy_call(ratio_level=r, clip_low=0.1, clip_high=0.3) for r in oracle.RATIO_LEVELS),
    *(policy_call(ratio_level=r, dual_clip=1.3) for r in oracle.RATIO_LEVELS),
]
VALUE = [
    value_call(),
    value_call(clip=None),
    value_call(clip=0.05),
    *(value_call(level=level, normalize_by=n) for level in ("token", "macro") for n in oracle.NORMALIZE_BY),
    *(value_call(level="macro", value_weights=v) for v in oracle.VALUE_WEIGHTS),
    *(value_call(level="macro", value_weights=v, clip=None) for v in oracle.VALUE_WEIGHTS),
    *(
        value_call(level=level, normalize_by=n, normalizer=7.0)
        for level in ("token", "macro")
        for n in (None, "sequences")
    ),
]
ALL = [*REDUCE, BROADCAST, *LENGTHS, *KL, *GAE, *ROLLOUT, *POLICY, *VALUE]
# One call an op, with the options that reach the most code: for tests that repeat every op many times.
ONE_EACH = [
    reduce_call(weights="position"),
    BROADCAST,
    LENGTHS[0],
    kl_call(kl_coef=0.3, kl_estimator="k3", score_clip=1.5),
    gae_call(
        bootstrap=True,
        reward_weights="discounted_sum",
        value_weights="position_reversed",
        discount_per="token",
        gamma=0.97,
        lam=0.9,
    ),
    rollout_call(kl_coef=0.2, bootstrap=True, value_weights="position", gamma=0.97),
    policy_call(ratio_level="token", dual_clip=1.3),
    policy_call(ratio_level="macro", normalize_by="sequences"),
    policy_call(ratio_level="macro_mean"),
    value_call(),
    value_call(level="macro", value_weights="position"),
]
