"""Scores of whole responses, what a missing stop token costs, and the coefficient of the KL penalty."""

from pathlib import Path

import pytest
import torch

from marlhf.config import ModelConfig
from marlhf.data import left_pad, right_pad
from marlhf.errors import ConfigError
from marlhf.models import load_reward_model
from marlhf.rewards import KLController, k2_loss, penalise_length, penalise_missing_stop, scores_of_responses


def test_missing_stop_tokens() -> None:
    """`set` and `subtract`, and only where no stop token was seen."""
    scores, truncated = torch.tensor([0.5, 0.5, -2.0]), torch.tensor([False, True, True])
    for mode in ("subtract", "set"):
        assert torch.equal(penalise_missing_stop(scores, truncated, penalty=None, mode=mode), scores)
    lower = penalise_missing_stop(scores, truncated, penalty=1.5, mode="subtract")
    assert lower.tolist() == [0.5, -1.0, -3.5]
    put = penalise_missing_stop(scores, truncated, penalty=1.5, mode="set")
    assert put.tolist() == [0.5, -1.5, -1.5]
    assert scores.tolist() == [0.5, 0.5, -2.0]
    with pytest.raises(ConfigError, match=r"`ppo.missing_stop_mode` is 'sett'; .*`set`"):
        penalise_missing_stop(scores, truncated, penalty=1.0, mode="sett")


def test_scores_of_responses_are_those_of_the_rows_alone(scorers: dict[str, Path]) -> None:
    """Prompts padded on the left and responses on the right, whatever the pad token is."""
    model = load_reward_model(ModelConfig(path=str(scorers["gpt2"])), key="x", device=torch.device("cpu"))
    model.config.reward_mean, model.config.reward_std = 0.5, 2.0
    prompts, responses = [[1, 40, 77], [1]], [[9, 2], [30, 31, 32, 33]]
    for pad in (0, 2):
        together = scores_of_responses(model, *left_pad(prompts, pad), *right_pad(responses, pad))
        for i in range(2):
            alone = scores_of_responses(
                model, *left_pad(prompts[i : i + 1], pad), *right_pad(responses[i : i + 1], pad)
            )
            torch.testing.assert_close(together[i], alone[0], rtol=0, atol=1e-5)
        divided = scores_of_responses(model, *left_pad(prompts, pad), *right_pad(responses, pad), standardize=True)
        torch.testing.assert_close(divided, together / 2)


def test_adaptive_kl_by_hand() -> None:
    """0.15, KL 12, target 6, 64 responses, horizon 10000: 0.15 * (1 + 0.2 * 64 / 10000) = 0.150192."""
    controller = KLController(0.15, target=6.0, horizon=10000)
    controller.update(12.0, 64)
    assert controller.coefficient == pytest.approx(0.150192, abs=1e-9)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (7.2, 0.2), (600.0, 0.2), (0.0, -0.2), (-5.0, -0.2)],
)
def test_the_error_is_clipped_on_both_sides(kl: float, factor: float) -> None:
    controller = KLController(0.1, target=6.0, horizon=1000)
    controller.update(kl, 100)
    assert controller.coefficient == pytest.approx(0.1 * (1 + factor * 0.1), abs=1e-9)


def test_without_a_target_the_coefficient_stays() -> None:
    controller = KLController(0.15)
    controller.update(1e9, 64)
    assert controller.coefficient == 0.15


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"target": 0.0}, "kl_target"),
        ({"target": -6.0}, "kl_target"),
        ({"target": float("nan")}, "kl_target"),
        ({"target": 6.0, "horizon": 0}, "kl_horizon"),
        ({"target": 6.0, "horizon": -1}, "kl_horizon"),
    ],
)
def test_targets_and_horizons_that_cannot_be(settings: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"`ppo.{key}`"):
        KLController(0.1, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("coefficient", [-0.1, float("nan"), float("inf")])
def test_coefficients_that_cannot_be(coefficient: float) -> None:
    with pytest.raises(ConfigError, match=r"`ppo.kl_coef`"):
        KLController(coefficient)


def test_long_responses_may_cost_something() -> None:
    """.5 for each token beyond two, with DAPO's numbers 1/4 from 6 on: a response of 10 tokens costs 1."""
    scores, lengths = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([0, 2, 3, 6])
    assert penalise_length(scores, lengths, penalty=None, start=0).tolist() == [1.0] * 4
    assert penalise_length(scores, lengths, penalty=0.5, start=2).tolist() == [1.0, 1.0, 0.5, -1.0]
    assert penalise_length(scores, torch.tensor([6, 8, 10, 3]), penalty=0.25, start=6).tolist() == [1.0, 0.5, 0.0, 1.0]


def test_the_kl_loss_has_the_gradient_of_the_kl() -> None:
    """Policy (.8, .2), reference (.5, .5), tokens in the policy's own shares: dKL/dlogit = +-.2218."""
    logits = torch.tensor([0.8, 0.2]).log().requires_grad_()
    tokens = torch.tensor([[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]])
    actions = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    logprobs = logits.log_softmax(-1)[tokens]
    reference = torch.full((2, 6), 0.5).log().masked_fill(~actions, float("nan"))
    loss = k2_loss(logprobs, reference, actions, normalizer=torch.tensor(10))
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([0.2218, -0.2218], abs=5e-5)
    assert loss.item() == pytest.approx(0.8 * 0.47**2 / 2 + 0.2 * 0.9163**2 / 2, abs=1e-4)
    assert k2_loss(logprobs, reference, actions & False, normalizer=torch.tensor(0)).item() == 0.0
