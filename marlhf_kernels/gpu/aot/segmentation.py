"""Cases of `gpu/segmentation.py`."""

from __future__ import annotations

import torch

from marlhf_kernels.gpu import segmentation
from marlhf_kernels.gpu.aot.case import Case, meta
from marlhf_kernels.gpu.aot.pairs import pairwise
from marlhf_kernels.gpu.aot.tokens import FLOATS, IDS, LAYOUTS, ROW, Tokens


def _fixed(tokens: Tokens, n: int | None, quick: bool = False) -> Case:
    return Case(
        "fixed_ngram",
        f"{tokens}, {n}",
        lambda: segmentation.fixed_ngram(tokens.mask(), n, *tokens.where),
        quick,
        vector=False,
        registers=tokens.registers,
    )


def _ends(tokens: Tokens) -> Case:
    return Case(
        "from_ends",
        str(tokens),
        lambda: segmentation.from_ends(tokens.mask(), tokens.mask(), *tokens.where),
        quick=tokens is ROW,
        vector=False,
        registers=tokens.registers,
    )


def _bounds(tokens: Tokens, dtype: torch.dtype) -> Case:
    return Case(
        "from_bounds",
        f"{tokens}, {dtype}",
        lambda: segmentation.from_bounds(tokens.mask(), meta(tokens.rows, 12, dtype=dtype), *tokens.where),
        quick=tokens is ROW and dtype is torch.int64,
        vector=False,
        registers=tokens.registers,
    )


def _perplexity(tokens: Tokens, rule: str, dtype: torch.dtype) -> Case:
    return Case(
        "perplexity",
        f"{tokens}, {rule}, {dtype}",
        lambda: segmentation.perplexity(tokens.mask(), tokens.floats(dtype), rule, *tokens.where),
        quick=tokens is ROW and dtype is torch.float32,
        vector=False,
        registers=tokens.registers,
    )


def _isolate(tokens: Tokens, ids: torch.dtype) -> Case:
    return Case(
        "isolate_last",
        f"{tokens}, {ids}",
        lambda: segmentation.isolate_last(tokens.ids(ids), *tokens.where),
        quick=tokens is ROW and ids is torch.int32,
        vector=tokens.vector,
        registers=tokens.registers,
    )


CASES = [
    *(_fixed(**options, quick=i == 0) for i, options in enumerate(pairwise(tokens=LAYOUTS, n=(3, None)))),
    *(_ends(tokens) for tokens in LAYOUTS),
    *(_bounds(**options) for options in pairwise(tokens=LAYOUTS, dtype=IDS)),
    *(_perplexity(**options) for options in pairwise(tokens=LAYOUTS, rule=("running_mean", "neighbour"), dtype=FLOATS)),
    *(_isolate(**options) for options in pairwise(tokens=LAYOUTS, ids=IDS)),
]
