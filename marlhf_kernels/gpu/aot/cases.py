"""The cases of every op."""

from __future__ import annotations

from marlhf_kernels.gpu.aot import elementwise

ALL = [*elementwise.CASES]
