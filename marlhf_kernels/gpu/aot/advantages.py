"""Cases of `gpu/advantages.py`."""

from __future__ import annotations

import torch

from marlhf_kernels.gpu import advantages
from marlhf_kernels.gpu.aot.case import Case, hosted, meta
from marlhf_kernels.gpu.aot.pairs import pairwise
from marlhf_kernels.gpu.aot.tokens import FLOATS, IDS, LAYOUTS, ROW, Tokens

REWARD_WEIGHTS = ("sum", "discounted_sum", "mean", "first", "last", "position", "position_reversed")
VALUE_WEIGHTS = REWARD_WEIGHTS[2:]


def _rollout(
    tokens: Tokens = ROW,
    dtype: torch.dtype = torch.float32,
    ids: torch.dtype = torch.int32,
    kl: str = "k1",
    rewards: str = "sum",
    values: str = "mean",
    per: str = "macro",
    bootstrap: bool = False,
    clip: bool = False,
    on_device: bool = False,
    quick: bool = False,
) -> Case:
    def run() -> object:
        number = meta if on_device else hosted
        return advantages.rollout_advantages(
            tokens.per_row(dtype),
            tokens.floats(dtype),
            tokens.floats(dtype),
            tokens.floats(dtype),
            tokens.ids(ids),
            number(),
            kl,
            number() if clip else None,
            number(),
            number(),
            rewards,
            values,
            per,
            tokens.per_row(dtype) if bootstrap else None,
            *tokens.where,
        )

    name = f"{tokens}, {dtype}, {ids}, {kl}, {rewards}, {values}, {per}" + "".join(
        f", {word}" for word, given in (("bootstrap", bootstrap), ("clip", clip), ("on device", on_device)) if given
    )
    return Case("rollout_advantages", name, run, quick, tokens.vector, tokens.registers)


def _gae(
    tokens: Tokens = ROW,
    dtype: torch.dtype = torch.float32,
    rewards: str = "sum",
    values: str = "mean",
    quick: bool = False,
) -> Case:
    return Case(
        "macro_gae",
        f"{tokens}, {dtype}, {rewards}, {values}",
        lambda: advantages.macro_gae(
            tokens.floats(dtype), tokens.floats(), tokens.ids(), hosted(), hosted(), rewards, values, "macro", None,
            *tokens.where,
        ),
        quick,
        tokens.vector,
        tokens.registers,
    )  # fmt: skip


def _kl(tokens: Tokens = ROW, dtype: torch.dtype = torch.float32, kl: str = "k1", quick: bool = False) -> Case:
    return Case(
        "kl_penalized_rewards",
        f"{tokens}, {dtype}, {kl}",
        lambda: advantages.kl_penalized_rewards(
            tokens.per_row(), tokens.floats(dtype), tokens.floats(), tokens.ids(), hosted(), kl, hosted(),
            *tokens.where,
        ),
        quick,
        tokens.vector,
        tokens.registers,
    )  # fmt: skip


CASES = [
    _rollout(quick=True),
    *(
        _rollout(**options)
        for options in pairwise(
            tokens=LAYOUTS,
            values=VALUE_WEIGHTS,
            rewards=REWARD_WEIGHTS,
            kl=("k1", "k2", "k3"),
            dtype=FLOATS,
            per=("token", "macro"),
            bootstrap=(True, False),
            clip=(True, False),
            on_device=(True, False),
            ids=IDS[::-1],
        )
    ),
    _gae(rewards="mean", values="position_reversed", quick=True),
    *(_gae(**options) for options in pairwise(tokens=LAYOUTS, dtype=FLOATS)),
    *(_kl(**options, quick=i == 0) for i, options in enumerate(pairwise(tokens=LAYOUTS, kl=("k3", "k2", "k1")))),
]
