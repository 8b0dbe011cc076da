"""Cases of `gpu/macro.py`."""

from __future__ import annotations

import torch

from marlhf_kernels.gpu import macro
from marlhf_kernels.gpu.aot.advantages import REWARD_WEIGHTS
from marlhf_kernels.gpu.aot.case import Case, hosted, meta
from marlhf_kernels.gpu.aot.pairs import pairwise
from marlhf_kernels.gpu.aot.tokens import FLOATS, LAYOUTS, ROW, Tokens


def _reduce(
    tokens: Tokens = ROW, weights: str = "sum", dtype: torch.dtype = torch.float32, quick: bool = False
) -> Case:
    return Case(
        "macro_reduce",
        f"{tokens}, {weights}, {dtype}",
        lambda: macro.macro_reduce(tokens.floats(dtype), tokens.ids(), weights, hosted(), 100, *tokens.where),
        quick,
        tokens.vector,
        tokens.registers,
    )


def _reduce_backward(
    tokens: Tokens = ROW, weights: str = "sum", dtype: torch.dtype = torch.float32, quick: bool = False
) -> Case:
    return Case(
        "macro_reduce_backward",
        f"{tokens}, {weights}, {dtype}",
        lambda: macro.macro_reduce_backward(
            meta(tokens.rows, 100), tokens.ids(), weights, hosted(), *tokens.where, dtype
        ),
        quick,
        tokens.vector,
        tokens.registers,
    )


def _broadcast(tokens: Tokens, dtype: torch.dtype, quick: bool = False) -> Case:
    return Case(
        "macro_broadcast",
        f"{tokens}, {dtype}",
        lambda: macro.macro_broadcast(meta(tokens.rows, 100, dtype=dtype), tokens.ids(), *tokens.where),
        quick,
        tokens.vector,
        tokens.registers,
    )


def _lengths(tokens: Tokens, quick: bool = False) -> Case:
    return Case(
        "macro_lengths",
        str(tokens),
        lambda: macro.macro_lengths(tokens.ids(), 100, *tokens.where),
        quick,
        tokens.vector,
        tokens.registers,
    )


def _most_macros(tokens: Tokens) -> Case:
    return Case(
        "macro_lengths",
        f"{tokens}, the number of macro actions",
        lambda: macro.macros_of_rows(macro.Walk(*tokens.where, tokens.ids())),
        vector=tokens.vector,
    )


CASES = [
    _reduce(weights="position", quick=True),
    *(_reduce(**options) for options in pairwise(tokens=LAYOUTS, weights=REWARD_WEIGHTS, dtype=FLOATS)),
    _reduce_backward(weights="position_reversed", quick=True),
    *(_reduce_backward(**options) for options in pairwise(tokens=LAYOUTS, weights=REWARD_WEIGHTS, dtype=FLOATS)),
    *(
        _broadcast(**options, quick=i == 0)
        for i, options in enumerate(pairwise(tokens=LAYOUTS, dtype=(torch.float32, torch.bfloat16, torch.int64)))
    ),
    *(_lengths(tokens, quick=tokens is ROW) for tokens in LAYOUTS),
    *(_most_macros(tokens) for tokens in LAYOUTS),
]
