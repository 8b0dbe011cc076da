"""Cases of `gpu/policy_loss.py` and `gpu/value_loss.py`."""

from __future__ import annotations

import torch

from marlhf_kernels.gpu import policy_loss, value_loss
from marlhf_kernels.gpu.aot.advantages import VALUE_WEIGHTS
from marlhf_kernels.gpu.aot.case import Case, hosted, meta
from marlhf_kernels.gpu.aot.pairs import pairwise
from marlhf_kernels.gpu.aot.tokens import FLOATS, LAYOUTS, ROW, Tokens

NORMALIZE_BY = ("sequences", "tokens", "macros")


def _policy(
    tokens: Tokens = ROW,
    level: str = "token",
    normalize_by: str = "tokens",
    dtype: torch.dtype = torch.float32,
    dual: bool = False,
    on_device: bool = False,
    quick: bool = False,
) -> Case:
    def run() -> object:
        number = meta if on_device else hosted
        return policy_loss.macro_policy_loss(
            tokens.floats(dtype),
            tokens.floats(dtype),
            tokens.floats(),
            tokens.ids(),
            number(),
            number(),
            number() if dual else None,
            level,
            normalize_by,
            number() if on_device else None,
            *tokens.where,
        )

    name = f"{tokens}, {level}, {normalize_by}, {dtype}" + ", dual clip" * dual + ", on device" * on_device
    return Case("macro_policy_loss", name, run, quick, tokens.vector, tokens.registers)


def _value(
    tokens: Tokens = ROW,
    weights: str | None = None,
    normalize_by: str = "tokens",
    dtype: torch.dtype = torch.float32,
    clip: bool = True,
    quick: bool = False,
) -> Case:
    return Case(
        "macro_value_loss",
        f"{tokens}, {weights}, {normalize_by}, {dtype}" + ", clip" * clip,
        lambda: value_loss.macro_value_loss(
            tokens.floats(dtype),
            tokens.floats(dtype),
            tokens.floats(),
            tokens.ids(),
            hosted() if clip else None,
            "token" if weights is None else "macro",
            weights or "mean",
            normalize_by,
            None,
            *tokens.where,
        ),
        quick,
        tokens.vector,
        tokens.registers,
    )


CASES = [
    _policy(quick=True),
    _policy(level="macro_mean", quick=True),
    *(
        _policy(**options)
        for options in pairwise(
            tokens=LAYOUTS,
            level=("token", "macro", "macro_mean"),
            normalize_by=NORMALIZE_BY,
            dtype=FLOATS,
            dual=(True, False),
            on_device=(True, False),
        )
    ),
    _value(quick=True),
    _value(weights="position", quick=True),
    *(
        _value(**options)
        for options in pairwise(
            tokens=LAYOUTS,
            weights=(None, *VALUE_WEIGHTS),
            normalize_by=NORMALIZE_BY,
            dtype=FLOATS,
            clip=(True, False),
        )
    ),
]
