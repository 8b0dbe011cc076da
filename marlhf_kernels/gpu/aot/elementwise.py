"""Cases of `gpu/elementwise.py`."""

from __future__ import annotations

import torch

from marlhf_kernels.gpu import elementwise
from marlhf_kernels.gpu.aot.case import Case, meta


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


CASES = [
    *(_scale(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    _labels("padded", (256, 1024), None, torch.int32),
    _labels("padded, length of no alignment", (3, 1001), None, torch.int32, vector=False),
    _labels("packed", (256000,), 256, torch.int32, quick=True),
    _labels("packed, int64 ids", (256000,), 256, torch.int64),
]
