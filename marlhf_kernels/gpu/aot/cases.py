"""The cases of every op."""

from __future__ import annotations

from marlhf_kernels.gpu.aot import advantages, elementwise, logprobs, losses, macro, segmentation, whiten

ALL = [
    *logprobs.CASES,
    *whiten.CASES,
    *elementwise.CASES,
    *advantages.CASES,
    *macro.CASES,
    *losses.CASES,
    *segmentation.CASES,
]
