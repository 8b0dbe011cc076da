"""Estimators by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from marlhf.advantages import estimate, group_advantages, needs_critic, whitens
from marlhf.config import PPOConfig

RETURNS = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
ALL = torch.ones(6, dtype=torch.bool)


def settings(estimator: str, **changes: Any) -> PPOConfig:
    return PPOConfig(estimator=estimator, samples_per_prompt=2, **changes)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; 0 - 3 / 2, 0 - 3 / 2, 3 - 0
        ("rloo", [-3.0, -1.5, 4.5, -1.5, -1.5, 3.0]),
        # means 3 and 1, deviations sqrt(14 / 2) and sqrt(6 / 2)
        ("grpo", [-0.755929, -0.377964, 1.133893, -0.577350, -0.577350, 1.154700]),
    ],
)
def test_groups_of_three(estimator: str, expected: list[float]) -> None:
    got = group_advantages(RETURNS, ALL, samples=3, estimator=estimator)
    assert got.tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_a_response_without_actions_is_not_in_its_group(estimator: str) -> None:
    """Of 1, -, 6 the others are 6 and 1; one that stands alone learns nothing, and neither do equal ones."""
    counted = torch.tensor([True, False, True, False, False, True])
    returns = torch.tensor([1.0, float("nan"), 6.0, float("nan"), 5.0, 3.0])
    got = group_advantages(returns, counted, samples=3, estimator=estimator)
    pair = {"rloo": 5.0, "grpo": 2.5 / (12.5**0.5)}[estimator]
    assert got.tolist() == pytest.approx([-pair, 0.0, pair, 0.0, 0.0, 0.0], abs=1e-5)
    assert not group_advantages(torch.full((6,), 7.0), ALL, samples=3, estimator=estimator).any()


IDS = torch.tensor([[0, 0, -1, 1, 1], [0, 1, 1, -1, -1]], dtype=torch.int32)
REWARDS = torch.tensor([[0.25, 0.25, 9.0, 0.0, 1.0], [0.5, 0.0, 2.0, 9.0, 9.0]])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Responses return 1.5 and 2.5; each is the other's baseline. Holes get nothing and give nothing.
        (settings("rloo"), [[-1.0, -1.0, 0.0, -1.0, -1.0], [1.0, 1.0, 1.0, 0.0, 0.0]]),
        (settings("grpo"), [[-0.707106, -0.707106, 0.0, -0.707106, -0.707106], [0.707106] * 3 + [0.0] * 2]),
        # Rewards of macro actions .5, 1 and .5, 2, summed from each one on.
        (settings("reinforce"), [[1.5, 1.5, 0.0, 1.0, 1.0], [2.5, 2.0, 2.0, 0.0, 0.0]]),
        (settings("reinforce", gamma=0.5), [[1.0, 1.0, 0.0, 1.0, 1.0], [1.5, 2.0, 2.0, 0.0, 0.0]]),
        # By the token, two of which make the first macro action of the first row.
        (
            settings("reinforce", gamma=0.5, discount_per="token"),
            [[0.75, 0.75, 0.0, 1.0, 1.0], [1.5, 2.0, 2.0, 0.0, 0.0]],
        ),
    ],
)
def test_advantages_without_a_critic(config: PPOConfig, expected: list[list[float]]) -> None:
    advantages, returns = estimate(REWARDS, torch.full((2, 5), 100.0), IDS, config=config)
    assert not needs_critic(config)
    for got, row in zip(advantages.tolist(), expected, strict=True):
        assert got == pytest.approx(row, abs=2e-6)
    assert not returns.any()


def gae(bootstrap: Tensor | None) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)
    return estimate(rewards, values, ids, config=settings("gae"), bootstrap_values=bootstrap)


def test_gae_by_hand() -> None:
    """gamma 1, lambda .95, V = .5, r = [0, 0, 1]; then with .6 after the end."""
    advantages, returns = gae(None)
    assert advantages[0].tolist() == pytest.approx([0.45125, 0.475, 0.5], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.95125, 0.975, 1.0], abs=1e-6)
    advantages, _ = gae(torch.tensor([0.6]))
    assert advantages[0].tolist() == pytest.approx([0.99275, 1.045, 1.1], abs=1e-6)


def test_what_is_compared_within_a_group_is_not_whitened_unasked() -> None:
    assert [whitens(settings(name)) for name in ("gae", "reinforce", "rloo", "grpo")] == [True, True, False, False]
    assert whitens(settings("grpo", whiten_advantages=True))
    assert not whitens(settings("gae", whiten_advantages=False))
