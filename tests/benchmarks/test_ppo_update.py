"""The time of ops inside an update: counted once, and no more than the whole."""

from __future__ import annotations

import time

import pytest
import torch

import marlhf_kernels
from benchmarks import ppo_update
from marlhf.demo.settings import SETTINGS
from marlhf_kernels.ops import _registry


def test_an_update_has_its_ops_inside() -> None:
    rows = ppo_update.measure(SETTINGS["tiny"], alternations=2)
    times = {(row.backend, row.options): row for row in rows}
    for backend in {row.backend for row in rows}:
        inside, whole = times[backend, ppo_update.IN_OPS], times[backend, ppo_update.WHOLE]
        assert inside.rounds == whole.rounds == 2
        assert inside.p80_us is not None
        assert whole.min_us is not None
        assert 0 < inside.p80_us < whole.min_us
    assert ("reference", ppo_update.WHOLE) in times


def test_the_ratio_is_the_middle_one_of_the_pairs() -> None:
    # Ratios 2, 3 and 10; the ratio of the middles would be 4 / 1.
    assert ppo_update.median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 0.4]) == pytest.approx(3.0)


def test_the_clock_counts_forward_and_backward() -> None:
    select = _registry.select
    logits = torch.randn(2, 3, requires_grad=True)
    with ppo_update.op_clock() as spent:
        result = marlhf_kernels.token_logprobs(logits, torch.tensor([0, 1]))
        assert len(spent) == 1
        result.sum().backward()
        assert len(spent) == 2
        assert min(spent) > 0
    assert _registry.select is select


def test_an_op_inside_of_another_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"outer": lambda: _registry.select("inner", ())(), "inner": lambda: time.sleep(0.01)}
    monkeypatch.setattr(_registry, "select", lambda op, args: kernels[op])
    with ppo_update.op_clock() as spent:
        _registry.select("outer", ())()
    assert len(spent) == 1
    assert spent[0] >= 0.01
