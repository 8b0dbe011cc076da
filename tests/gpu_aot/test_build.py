"""Every kernel as it ships, compiled for GPUs that need not be there: nothing spills, loads are wide."""

from __future__ import annotations

import pytest

import marlhf_kernels
from marlhf_kernels.gpu import interpreted

pytest.importorskip("triton")
if interpreted():
    pytest.skip("kernels are decorated for the interpreter in this process", allow_module_level=True)

from marlhf_kernels.gpu.aot.build import TARGETS, VECTOR_BITS, compile_for, specializations
from marlhf_kernels.gpu.aot.cases import ALL


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if case.quick else pytest.mark.slow) for case in ALL]
)
def test_needs(case, target):
    """No spill, no float64, registers and shared memory within the limits, and a load of 128 bits where one can be."""
    needs = [compile_for(target, which) for which in specializations(case.run)]
    assert needs
    assert [words for one in needs for words in one.excess(case)] == []
    if case.vector:
        assert max(one.load_bits for one in needs) >= VECTOR_BITS


def test_every_op_is_compiled():
    """No op of the backend is without a case, nor without a quick one."""
    ops = set(marlhf_kernels.backends()["gpu"].ops)
    assert {case.op for case in ALL} == {case.op for case in ALL if case.quick} == ops
