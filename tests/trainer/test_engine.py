"""Device, seeds, and an optimiser whose schedule counts its own steps."""

import math
import random
from typing import Any

import pytest
import torch
from torch import nn

from marlhf.config import Config, OptimizerConfig
from marlhf.engine import Optimizer, check_optimizer, disable_dropout, freeze, next_seed, prepare, rollout_generator
from marlhf.errors import ConfigError, DivergedError


def rates(total: int, **settings: Any) -> list[float]:
    """The learning rate of every step."""
    optimizer = Optimizer(nn.Linear(1, 1), OptimizerConfig(learning_rate=2.0, **settings), total_steps=total)
    found = []
    for _ in range(total):
        found.append(optimizer.learning_rate)
        assert optimizer.adamw.param_groups[0]["lr"] == found[-1]
        optimizer.step()
    return found


def test_schedules_count_optimiser_steps() -> None:
    assert rates(4) == [2.0] * 4
    assert rates(4, schedule="linear") == pytest.approx([2.0, 1.5, 1.0, 0.5])
    cosine = [1 + math.cos(math.pi * step / 4) for step in range(4)]
    assert rates(4, schedule="cosine") == pytest.approx(cosine)


def test_warm_up_ends_at_the_full_rate() -> None:
    assert rates(6, schedule="linear", warmup_steps=2) == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5])
    assert rates(4, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_a_warm_up_over_the_whole_run_still_ends() -> None:
    assert all(0 < rate <= 2.0 for rate in rates(3, schedule="cosine", warmup_steps=9))


def test_adam_has_the_epsilon_it_was_given() -> None:
    """1e-5 by default; betas and weight decay as well."""
    group = Optimizer(nn.Linear(1, 1), OptimizerConfig(), total_steps=1).adamw.param_groups[0]
    assert (group["eps"], tuple(group["betas"]), group["weight_decay"]) == (1e-5, (0.9, 0.999), 0.0)
    config = OptimizerConfig(eps=1e-7, betas=(0.5, 0.6), weight_decay=0.3)
    group = Optimizer(nn.Linear(1, 1), config, total_steps=1).adamw.param_groups[0]
    assert (group["eps"], tuple(group["betas"]), group["weight_decay"]) == (1e-7, (0.5, 0.6), 0.3)


def test_a_step_is_that_of_adam_by_hand() -> None:
    """First step: lr * g / (|g| + eps), whatever the betas."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 1.0]])
    optimizer = Optimizer(layer, OptimizerConfig(learning_rate=0.1, max_grad_norm=100.0), total_steps=1)
    layer.weight.grad = torch.tensor([[3.0, -1e-5]])
    optimizer.step()
    assert layer.weight.tolist()[0] == pytest.approx([0.9, 1.05], abs=1e-5)
    assert layer.weight.grad is None


def test_gradients_are_clipped_to_the_stated_norm() -> None:
    layer = nn.Linear(2, 1, bias=False)
    seen: list[torch.Tensor] = []
    optimizer = Optimizer(layer, OptimizerConfig(max_grad_norm=0.5), total_steps=2)
    optimizer.adamw.register_step_pre_hook(lambda *_: seen.append(layer.weight.grad.clone()))  # type: ignore[union-attr]
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    assert optimizer.step().item() == pytest.approx(5.0)
    layer.weight.grad = torch.tensor([[0.03, 0.04]])
    assert optimizer.step().item() == pytest.approx(0.05)
    assert seen[0].tolist()[0] == pytest.approx([0.3, 0.4], abs=1e-5)
    assert seen[1].tolist()[0] == pytest.approx([0.03, 0.04], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(bad: float) -> None:
    """The step is skipped and counted, moments and schedule stay where they were; a finite one starts the row anew."""
    layer, twin = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    twin.load_state_dict(layer.state_dict())
    config = OptimizerConfig(learning_rate=0.1, schedule="linear", max_skipped_steps=2)
    optimizer, other = (Optimizer(model, config, total_steps=4) for model in (layer, twin))
    for gradient in ([1.0, bad], [2.0, 1.0], [bad, bad], [bad, 0.0], [-1.0, 3.0]):
        layer.weight.grad = torch.tensor([gradient])
        norm = optimizer.step().item()
        assert layer.weight.grad is None
        assert math.isfinite(norm) == all(map(math.isfinite, gradient))
        if math.isfinite(norm):
            twin.weight.grad = torch.tensor([gradient])
            other.step()
        assert torch.equal(layer.weight, twin.weight)
        assert optimizer.learning_rate == other.learning_rate
    assert (optimizer.skipped, other.skipped) == (3, 0)


def test_too_many_skipped_steps_in_a_row_stop_the_run() -> None:
    layer = nn.Linear(1, 1, bias=False)
    optimizer = Optimizer(layer, OptimizerConfig(learning_rate=0.1, max_skipped_steps=2), total_steps=9)
    for _ in range(2):
        layer.weight.grad = torch.tensor([[math.nan]])
        optimizer.step()
    again = Optimizer(layer, OptimizerConfig(learning_rate=0.1, max_skipped_steps=2), total_steps=9)
    again.load_state_dict(optimizer.state_dict())
    for one in (optimizer, again):
        layer.weight.grad = torch.tensor([[math.nan]])
        with pytest.raises(DivergedError, match=r"not finite in 3 steps in a row, at a learning rate of 0.1"):
            one.step()


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freeze(model[0].parameters())
    optimizer = Optimizer(model, OptimizerConfig(), total_steps=1)
    assert len(optimizer.parameters) == 2
    assert all(parameter.requires_grad for parameter in optimizer.parameters)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"schedule": "cosin"}, "schedule"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"eps": 0.0}, "eps"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"max_skipped_steps": -1}, "max_skipped_steps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"weight_decay": math.nan}, "weight_decay"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"ppo.policy_optimizer.*{key}"):
        check_optimizer(OptimizerConfig(**settings), key="ppo.policy_optimizer")
    check_optimizer(OptimizerConfig(), key="ppo.policy_optimizer")


def test_ranks_draw_different_noise_and_the_same_on_every_run() -> None:
    """Rollout seed = seed + rank * a prime; neighbouring seeds and ranks do not meet."""

    def drawn(seed: int, rank: int) -> tuple[int, ...]:
        generator = rollout_generator(seed, rank=rank)
        return tuple(next_seed(generator) for _ in range(4))

    assert drawn(0, 1) == drawn(0, 1)
    streams = {drawn(seed, rank) for seed in range(8) for rank in range(8)}
    assert len(streams) == 64
    assert len({number for stream in streams for number in stream}) == 256


def test_drawing_seeds_leaves_the_global_state_alone() -> None:
    before = torch.get_rng_state()
    next_seed(rollout_generator(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_of_every_kind_is_turned_off() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout = 0.5
            self.dropout = nn.Dropout(0.5)
            self.attn_dropout = 0.5

    model = nn.Sequential(Attention(), nn.Dropout(0.1), nn.Linear(1, 1), nn.Dropout1d(0.3), nn.AlphaDropout(0.3))
    disable_dropout(model)
    assert model[0].attention_dropout == model[0].attn_dropout == model[0].dropout.p == 0.0
    x = torch.ones(64, 8, 4)
    for module in (model[1], model[3], model[4]):
        assert torch.equal(module.train()(x), x)


def test_the_seed_sets_every_source() -> None:
    def numbers() -> tuple[float, float]:
        prepare(Config(seed=11, device="cpu"))
        return random.random(), torch.rand(()).item()

    assert numbers() == numbers()


def test_threads() -> None:
    before = torch.get_num_threads()
    try:
        prepare(Config(device="cpu", threads=1))
        assert torch.get_num_threads() == 1
        prepare(Config(device="cpu"))
        assert torch.get_num_threads() == 1
        with pytest.raises(ConfigError, match="`threads` is 0"):
            prepare(Config(device="cpu", threads=0))
    finally:
        torch.set_num_threads(before)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare(Config(device="cpu")) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert prepare(Config()) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"`device` is 'cuda', but this PyTorch sees no GPU"):
        prepare(Config(device="cuda"))
    for device in ("gpu", "", "cuda:x"):
        with pytest.raises(ConfigError, match=r"`device` is .*write auto, cpu, cuda or cuda:1"):
            prepare(Config(device=device))
