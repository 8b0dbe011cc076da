"""KL-penalised rewards, and advantages over tokens and over macro actions."""

import math
from collections.abc import Callable

import torch

from benchmarks import inputs, peers
from benchmarks.harness import Bench, Case, Provider
from benchmarks.shapes import Shape, token_shape
from marlhf_kernels import kl_penalized_rewards, macro_gae, rollout_advantages

KL_COEF, GAMMA, LAM = 0.05, 0.99, 0.95
MACRO_TOKENS = 5
ID_BYTES = 4


def cases(sizes: str) -> list[tuple[Case, tuple[str, ...]]]:
    timed = ("forward",)
    if sizes == "tiny":
        tiny = token_shape(2, 11)
        return [(make(tiny, torch.float32, n), timed) for make in (rewards, gae, rollout) for n in (1, MACRO_TOKENS)]
    shapes = [token_shape(64, 512), token_shape(16, 4096)]
    if sizes == "few":
        return [(rollout(shape, torch.float32, MACRO_TOKENS), timed) for shape in shapes]
    if sizes == "quick":
        return [
            (rewards(shapes[0], torch.float32, MACRO_TOKENS), timed),
            *((make(shape, torch.float32, MACRO_TOKENS), timed) for make in (gae, rollout) for shape in shapes),
            (gae(shapes[0], torch.float32, 1), timed),
        ]
    return [
        (make(shape, dtype, n), timed)
        for make in (rewards, gae, rollout)
        for shape in (*shapes, token_shape(256, 1024), token_shape(1, 131_072))
        for dtype in (torch.float32, torch.bfloat16)
        for n in (1, MACRO_TOKENS, math.inf)
    ]


def rewards(shape: Shape, dtype: torch.dtype, n: float) -> Case:
    return Case(
        op="kl_penalized_rewards",
        options=_macro_actions(n),
        shape=shape,
        dtype=dtype,
        inputs=lambda: inputs.rollout(shape, dtype, n),
        call=lambda x: kl_penalized_rewards(
            x["scores"], x["logprobs"], x["ref_logprobs"], x["macro_ids"], kl_coef=KL_COEF
        ),
        names=("rewards", "kl"),
        peers=peers.eager_and_compiled(peers.eager_rewards(KL_COEF)),
        traffic={"forward": {"": _tokens(shape) * (2 * dtype.itemsize + ID_BYTES + 8)}},
    )


def gae(shape: Shape, dtype: torch.dtype, n: float) -> Case:
    return Case(
        op="macro_gae",
        options=_macro_actions(n),
        shape=shape,
        dtype=dtype,
        inputs=lambda: inputs.rollout(shape, dtype, n),
        call=lambda x: macro_gae(x["rewards"], x["values"], x["macro_ids"], gamma=GAMMA, lam=LAM),
        names=("advantages", "returns"),
        peers=_loops(n, lambda gae: gae),
        traffic={"forward": {"": _tokens(shape) * (2 * dtype.itemsize + ID_BYTES + 8)}},
    )


def rollout(shape: Shape, dtype: torch.dtype, n: float) -> Case:
    names = ("scores", "logprobs", "ref_logprobs", "values", "macro_ids")

    return Case(
        op="rollout_advantages",
        options=_macro_actions(n),
        shape=shape,
        dtype=dtype,
        inputs=lambda: inputs.rollout(shape, dtype, n),
        call=lambda x: rollout_advantages(*(x[name] for name in names), kl_coef=KL_COEF, gamma=GAMMA, lam=LAM),
        names=("advantages", "returns", "rewards", "kl"),
        peers=_loops(n, lambda gae: peers.with_rewards(peers.eager_rewards(KL_COEF), gae)),
        traffic={"forward": {"": _tokens(shape) * (3 * dtype.itemsize + ID_BYTES + 16)}},
    )


def _loops(n: float, whole: Callable[[peers.Function], peers.Function]) -> list[Provider]:
    """The trainers' loop: over tokens where each is an action, else over segments."""
    if n == 1:
        return [Provider("trl", whole(peers.trl_gae(GAMMA, LAM)))]
    return [Provider("loop", whole(peers.loop_gae(GAMMA, LAM)))]


def _macro_actions(n: float) -> str:
    return "token" if n == 1 else "whole" if n == math.inf else f"fixed {n:g}"


def _tokens(shape: Shape) -> int:
    return shape["B"] * shape["T"]


def bench_advantages(bench: Bench, case: Case, mode: str) -> None:
    bench(case, mode)
