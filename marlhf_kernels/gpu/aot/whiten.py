"""Cases of `gpu/whiten.py`."""

from __future__ import annotations

from itertools import product

import torch

from marlhf_kernels.gpu import whiten
from marlhf_kernels.gpu.aot.case import Case, meta


def _moments(name: str, shape: tuple[int, ...], dtype: torch.dtype, quick: bool = False, vector: bool = True) -> Case:
    return Case(
        "masked_moments",
        f"{name}, {str(dtype).removeprefix('torch.')}",
        lambda: whiten.masked_moments(meta(*shape, dtype=dtype), meta(*shape, dtype=torch.bool)),
        quick=quick,
        vector=vector,
    )


def _normalize(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    shift_mean: bool = True,
    unbiased: bool = False,
    quick: bool = False,
    vector: bool = True,
) -> Case:
    return Case(
        "masked_normalize",
        f"{name}, {str(dtype).removeprefix('torch.')}{', mean kept' * (not shift_mean)}{', unbiased' * unbiased}",
        lambda: whiten.masked_normalize(
            meta(*shape, dtype=dtype), meta(*shape, dtype=torch.bool), meta(3), shift_mean, unbiased
        ),
        quick=quick,
        vector=vector,
    )


CASES = [
    *(_moments("aligned", (256, 1024), dtype, dtype is torch.float32) for dtype in (torch.float32, torch.bfloat16)),
    _moments("of no alignment", (3, 1001), torch.float32, vector=False),
    *(
        _normalize("aligned", (256, 1024), torch.float32, shift, unbiased, quick=shift and not unbiased)
        for shift, unbiased in product((True, False), repeat=2)
    ),
    _normalize("aligned", (256, 1024), torch.bfloat16),
    _normalize("of no alignment", (3, 1001), torch.float32, vector=False),
]
