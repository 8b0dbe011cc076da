"""Every kernel as it ships, compiled for GPUs that need not be there: nothing spills, loads are wide."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import marlhf_kernels
from marlhf_kernels.gpu import interpreted

pytest.importorskip("triton")
if interpreted():
    pytest.skip("kernels are decorated for the interpreter in this process", allow_module_level=True)

import triton
import triton.language as tl

from marlhf_kernels.gpu import logprobs, whiten
from marlhf_kernels.gpu.aot.build import TARGETS, compile_for, specializations, vector_bits
from marlhf_kernels.gpu.aot.case import hosted, meta
from marlhf_kernels.gpu.aot.cases import ALL
from marlhf_kernels.gpu.launch import launch


def when(case, target):
    """Each kernel on each target in `make test`, all cases for one in `make test-all`, the rest in `make test-long`."""
    if case.quick:
        return []
    return pytest.mark.slow if target == "sm_90" else pytest.mark.long


@pytest.mark.parametrize(
    ("case", "target"),
    [pytest.param(case, target, id=f"{case}-{target}", marks=when(case, target)) for case in ALL for target in TARGETS],
)
def test_needs(case, target):
    """No spill, no float64, registers and shared memory within the limits, and wide loads where they can be."""
    needs = [compile_for(target, which) for which in specializations(case.run)]
    assert needs
    assert [words for one in needs for words in one.excess(case)] == []
    if case.vector:
        assert max(one.load_bits for one in needs) >= vector_bits(target)


def test_every_op_is_compiled():
    """No op of the backend is without a case, nor without a quick one."""
    ops = set(marlhf_kernels.backends()["gpu"].ops)
    assert {case.op for case in ALL} == {case.op for case in ALL if case.quick} == ops


def distinct(runs):
    """What so many calls compile in all."""
    return {which for run in runs for which in specializations(run)}


def test_lengths_do_not_compile():
    """50 numbers of rows, vocabularies and temperatures: one kernel where 16 divides all sizes, one where not."""

    def forward(rows, vocabulary, temperature):
        logits, labels = meta(rows, vocabulary, dtype=torch.bfloat16), meta(rows, dtype=torch.int64)
        return lambda: logprobs.token_logprobs(logits, labels, hosted(temperature), None, True, False)

    def whitening(number):
        return lambda: whiten.masked_moments(meta(number), meta(number, dtype=torch.bool))

    sizes = [(4 + n, 5000 + 16 * n + n % 2, 0.5 + n) for n in range(50)]
    assert len(distinct(forward(*size) for size in sizes)) <= 2
    # One program, or two launches where the moments are merged; each with and without alignment.
    assert len(distinct(whitening(n) for n in (1, 2, 3, 16, 17, 1000, 1024, 5000, 5008, 3_000_000))) <= 3


def test_a_length_that_compiles_is_refused():
    """An integer argument that is not marked `do_not_specialize` would compile for 1, for multiples of 16, and else."""

    @triton.jit
    def careless(x_ptr, number):
        tl.store(x_ptr, number)

    with pytest.raises(TypeError, match=r"careless.*number"):
        specializations(lambda: launch(careless, (1,), meta(1), 7, num_warps=1))


def test_what_is_wrong_is_told():
    """Limits that a kernel breaks are found: registers allowed, spilled values, float64 arithmetic."""

    @triton.jit
    def wide(x_ptr, y_ptr):
        tl.store(y_ptr, tl.load(x_ptr).to(tl.float64) * 0.1)

    @triton.jit
    def crowded(x_ptr, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        x = tl.load(x_ptr + i)
        tl.debug_barrier()
        tl.store(x_ptr + SIZE - i, x)

    for kernel, arguments, warps, constexprs, words in (
        (wide, (meta(1), meta(1, dtype=torch.float64)), 1, {}, "float64"),
        (crowded, (meta(1),), 1, {"SIZE": 4096}, "registers"),
    ):
        (which,) = specializations(lambda: launch(kernel, (1,), *arguments, num_warps=warps, **constexprs))  # noqa: B023
        excess = compile_for("sm_90", which).excess(dataclasses.replace(ALL[0], registers=100))
        assert any(words in line for line in excess), excess
