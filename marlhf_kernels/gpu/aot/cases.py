"""The cases of every op."""

from __future__ import annotations

from marlhf_kernels.gpu.aot import elementwise, logprobs, whiten

ALL = [*logprobs.CASES, *whiten.CASES, *elementwise.CASES]
