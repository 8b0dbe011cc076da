"""Cases of `gpu/elementwise.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from marlhf_kernels.gpu import elementwise
from marlhf_kernels.gpu.aot.case import Case, hosted, meta


def _scale(dtype: torch.dtype) -> Case:
    return Case(
        "scale_gradient",
        str(dtype),
        lambda: elementwise.scale_gradient(meta(256, 1024), meta(), meta(), dtype),
        quick=dtype is torch.bfloat16,
    )


def _labels(
    name: str, shape: tuple[int, ...], sequences: int | None, ids: torch.dtype, quick: bool = False, vector: bool = True
) -> Case:
    return Case(
        "action_labels",
        name,
        lambda: elementwise.action_labels(
            meta(*shape, dtype=torch.int64),
            meta(*shape, dtype=ids),
            None if sequences is None else meta(sequences + 1, dtype=torch.int32),
            None,
        ),
        quick=quick,
        vector=vector,
    )


def _penalty(
    name: str,
    sequences: int | None,
    kl: bool,
    entropy: bool,
    dtype: torch.dtype = torch.float32,
    coefficient: Callable[[], Tensor] = hosted,
    normalizer: bool = False,
    quick: bool = False,
) -> Case:
    shape = (256, 1024) if sequences is None else (262144,)
    return Case(
        "policy_penalty",
        name,
        lambda: elementwise.policy_penalty(
            meta(*shape, dtype=dtype),
            meta(*shape, dtype=dtype) if entropy else None,
            meta(*shape, dtype=dtype) if kl else None,
            meta(*shape, dtype=torch.int32),
            coefficient(),
            coefficient(),
            coefficient() if normalizer else None,
            None if sequences is None else meta(sequences + 1, dtype=torch.int32),
            None,
        ),
        quick=quick,
    )


CASES = [
    *(_scale(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    _labels("padded", (256, 1024), None, torch.int32),
    _labels("padded, length of no alignment", (3, 1001), None, torch.int32, vector=False),
    _labels("packed", (256000,), 256, torch.int32, quick=True),
    _labels("packed, int64 ids", (256000,), 256, torch.int64),
    _penalty("padded, both", None, True, True),
    _penalty("padded, both, bfloat16", None, True, True, torch.bfloat16, quick=True),
    _penalty("packed, both, all on the device", 256, True, True, coefficient=meta, normalizer=True, quick=True),
    _penalty("padded, KL", None, True, False, normalizer=True),
    _penalty("padded, entropy", None, False, True),
]
