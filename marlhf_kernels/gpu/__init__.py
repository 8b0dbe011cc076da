"""The Triton backend: for CUDA and ROCm, or on a CPU in Triton's interpreter. Imported when an op first needs it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from marlhf_kernels.backends import Backend, register

OLDEST = (3, 4)
INTERPRET = "TRITON_INTERPRET"

OPS = {
    "advantages": ("kl_penalized_rewards", "macro_gae", "rollout_advantages"),
    "elementwise": ("scale_gradient", "action_labels", "policy_penalty"),
    "logprobs": ("token_logprobs", "token_logprobs_backward", "token_logprobs_backward_"),
    "macro": ("macro_broadcast", "macro_lengths", "macro_reduce", "macro_reduce_backward"),
    "policy_loss": ("macro_policy_loss",),
    "segmentation": ("fixed_ngram", "from_bounds", "from_ends", "isolate_last", "perplexity"),
    "value_loss": ("macro_value_loss",),
    "whiten": ("masked_moments", "masked_normalize"),
}
"""The ops by the module that has them."""


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter; fixed for a kernel when its module is imported."""
    return os.environ.get(INTERPRET, "").lower() in ("1", "true", "yes", "on", "y")


def missing() -> str | None:
    """Why Triton kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install the extra `gpu`"
    if not interpreted() and not _has_gpu():
        return f"PyTorch sees no GPU; {INTERPRET}=1, set at the start, runs the kernels on a CPU, slowly"
    return _too_old()


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


@functools.cache
def _too_old() -> str | None:
    version: str = importlib.import_module("triton").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"Triton {version} is too old; it takes {'.'.join(map(str, OLDEST))} or later"
    return None


def _deferred(module: str, op: str) -> Callable[..., Any]:
    """`op` of `marlhf_kernels.gpu.<module>`, imported at the first call."""

    @functools.cache
    def implementation() -> Callable[..., Any]:
        return getattr(importlib.import_module(f"{__name__}.{module}"), op)  # type: ignore[no-any-return]

    return lambda *args: implementation()(*args)


register(
    Backend(
        name="gpu",
        where="Triton, on CUDA and ROCm tensors, or on CPU tensors in its interpreter",
        implementations={op: _deferred(module, op) for module, ops in OPS.items() for op in ops},
        missing=missing,
        # Asked only about tensors on a GPU: whoever has one expects its kernels.
        worth_a_warning=lambda: True,
    )
)
