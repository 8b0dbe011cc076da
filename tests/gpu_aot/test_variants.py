"""How often the token-sized ops compile: for kinds of layout and options, never for lengths or numbers."""

from __future__ import annotations

import pytest
import torch

from marlhf_kernels.gpu import interpreted

pytest.importorskip("triton")
if interpreted():
    pytest.skip("kernels are decorated for the interpreter in this process", allow_module_level=True)

from marlhf_kernels.gpu import advantages, macro, policy_loss, segmentation, value_loss
from marlhf_kernels.gpu._rows import TILES
from marlhf_kernels.gpu.aot.build import specializations
from marlhf_kernels.gpu.aot.case import hosted
from marlhf_kernels.gpu.aot.tokens import Tokens

LENGTHS = (1, 2, 15, 16, 17, 50, 64, 65, 100, 300, 512, 513, 1000, 1024, 2048, 5000, 131072)
OPS = {
    "rollout_advantages": lambda t, x: advantages.rollout_advantages(
        t.per_row(), t.floats(), t.floats(), t.floats(), t.ids(),
        hosted(x), "k1", hosted(x), hosted(x), hosted(x), "sum", "mean", "macro", None, *t.where,
    ),
    "macro_reduce": lambda t, x: macro.macro_reduce(
        t.floats(), t.ids(), "discounted_sum", hosted(x), int(10 * x), *t.where
    ),
    "macro_broadcast": lambda t, x: macro.macro_broadcast(
        torch.empty(t.rows, int(10 * x), device="meta"), t.ids(), *t.where
    ),
    "macro_policy_loss": lambda t, x: policy_loss.macro_policy_loss(
        t.floats(), t.floats(), t.floats(), t.ids(), hosted(x), hosted(x), hosted(2 + x), "macro", "macros", hosted(x),
        *t.where,
    ),
    "macro_value_loss": lambda t, x: value_loss.macro_value_loss(
        t.floats(), t.floats(), t.floats(), t.ids(), hosted(x), "token", "mean", "tokens", hosted(x), *t.where
    ),
    "fixed_ngram": lambda t, x: segmentation.fixed_ngram(t.mask(), int(10 * x), *t.where),
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("packed", [False, True])
def test_compilations_are_bounded(op, packed):
    """Padded: one for each tile, with and without aligned rows; packed: one for each tile."""
    found = set()
    for rows in (1, 2, 3, 16, 1000):
        for length in LENGTHS:
            for x in (0.1, 0.5, 1.0, 3.2):
                tokens = Tokens("", rows, length, packed)
                kernel, *_ = specializations(lambda tokens=tokens, x=x: OPS[op](tokens, x))
                found.add(kernel)
    assert len(found) == len(TILES) * (1 if packed else 2)
