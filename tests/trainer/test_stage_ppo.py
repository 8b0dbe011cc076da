"""PPO and macro-action PPO: the update by hand, and whole runs from files to folders."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from marlhf.config import ModelConfig, OptimizerConfig, PPOConfig, load_config
from marlhf.engine import Optimizer
from marlhf.errors import UserError
from marlhf.models import load_critic, load_policy, load_reward_model, response_logprobs, response_values
from marlhf.report.reading import read_run
from marlhf.responses import Responses
from marlhf.rewards import ModelReward, Rewards
from marlhf.rollout import Rollout, complete
from marlhf.stages import evaluate, ppo
from marlhf.stages.ppo import prompt_batches, run_ppo, update
from marlhf.stages.ppo_metrics import rollout_metrics, unit_count
from tests.trainer.test_rollout import PAIRS, moved, responses_of
from tests.trainer.tiny import (
    ROWS,
    leftovers,
    read_jsonl,
    resolved,
    save_policy,
    save_scorer,
    status,
    without_times,
    write_jsonl,
)

CPU = torch.device("cpu")
STILL = "1e-30"
"""A learning rate that moves no float32 weight."""


@pytest.fixture
def words(policies: dict[str, Path], scorers: dict[str, Path], row_file: Path) -> list[str]:
    """Two iterations of eight responses, four optimiser steps each, four rows held out."""
    return [
        f"ppo.model.path={policies['gpt2']}",
        f"ppo.reward_model.path={scorers['gpt2']}",
        f"ppo.data.train={row_file}",
        f"ppo.data.validation={row_file}",
        "ppo.eval_rows=4",
        "ppo.rollout.batch_size=8",
        "ppo.rollout.max_new_tokens=6",
        "ppo.termination.n=2",
        "ppo.iterations=2",
        "ppo.eval_every=1",
        "ppo.samples_per_eval=2",
        "ppo.policy_optimizer.learning_rate=1e-3",
        "ppo.critic_optimizer.learning_rate=1e-3",
    ]


class Models:
    """Policy, critic and what PPO keeps fixed, from saved folders, with optimisers that note every gradient."""

    def __init__(self, policy: Path, scorer: Path, *, rate: float = 1e-3) -> None:
        start = ModelConfig(path=str(policy))
        self.policy = load_policy(start, key="ppo.model", device=CPU)
        self.reference = moved(load_policy(start, key="ppo.model", device=CPU)).eval()
        scorer_config = ModelConfig(path=str(scorer))
        reward_model = load_reward_model(scorer_config, key="ppo.reward_model", device=CPU).eval()
        self.rewards = Rewards([ModelReward(reward_model)])
        self.critic = load_critic(reward_model, head="reward")
        config = OptimizerConfig(learning_rate=rate, max_grad_norm=1e9)
        self.optimizers = [Optimizer(model, config, total_steps=100) for model in (self.policy, self.critic)]
        self.gradients: list[Tensor] = []
        for optimizer in self.optimizers:
            optimizer.adamw.register_step_pre_hook(
                lambda *_, o=optimizer: self.gradients.extend(parameter.grad.clone() for parameter in o.parameters)
            )

    def complete(self, responses: Responses, config: PPOConfig) -> Rollout:
        models = {name: getattr(self, name) for name in ("policy", "reference", "critic", "rewards")}
        return complete(responses, config=config, kl_coef=config.kl_coef, **models)

    def update(self, rollout: Rollout, config: PPOConfig, *, seed: int = 0) -> dict[str, float]:
        order = torch.Generator().manual_seed(seed)
        optimizers = dict(zip(("policy", "critic"), self.optimizers, strict=True))
        return update(rollout, self.policy, self.critic, optimizers, config, order)


@pytest.fixture
def make(policies: dict[str, Path], scorers: dict[str, Path]) -> Callable[..., Models]:
    return lambda **settings: Models(policies["gpt2"], scorers["gpt2"], **settings)


def settings(*words: str) -> PPOConfig:
    """One epoch and one minibatch unless told otherwise."""
    return load_config(None, ["ppo.ppo_epochs=1", "ppo.minibatches=1", *words]).ppo


# The update


@pytest.mark.parametrize("microbatch", ["null", "1", "2"])
def test_the_token_mean_is_over_the_whole_optimiser_step(make: Callable[..., Models], microbatch: str) -> None:
    """Lengths 1 and 3, A = +1 and -1, ratio 1: loss (-1 + 3) / 4 = .5 for every microbatch size."""
    config = settings(f"ppo.microbatch_size={microbatch}", "ppo.termination.rule=token")
    models = make()
    rollout = models.complete(responses_of([([1, 40], [2]), ([1, 50, 60], [70, 80, 2])]), config)
    rollout.advantages = torch.tensor([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])
    metrics = models.update(rollout, config)
    assert metrics["policy_loss"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy_clip_fraction"] == 0.0


@pytest.mark.parametrize(("unit", "expected"), [("sequences", 0.0), ("macros", 2 / 3), ("tokens", 0.5)])
def test_other_units_divide_by_their_own_count(make: Callable[..., Models], unit: str, expected: float) -> None:
    """Macro actions of 2: one and two of them. Sequences: the mean of -1 and +1."""
    for microbatch in ("null", "1"):
        config = settings(f"ppo.normalize_by={unit}", "ppo.termination.n=2", f"ppo.microbatch_size={microbatch}")
        models = make()
        rollout = models.complete(responses_of([([1, 40], [2]), ([1, 50, 60], [70, 80, 2])]), config)
        rollout.advantages = torch.tensor([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])
        assert models.update(rollout, config)["policy_loss"] == pytest.approx(expected, abs=1e-5)


def test_optimiser_steps_are_epochs_times_minibatches(
    make: Callable[..., Models], monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 rows, microbatch 1, 4 minibatches, 2 epochs: 8 steps of each optimiser, every row once an epoch in a fresh
    order."""
    config = settings("ppo.microbatch_size=1", "ppo.minibatches=4", "ppo.ppo_epochs=2")
    models = make()
    rollout = models.complete(responses_of(PAIRS * 2), config)
    rollout.scores = torch.arange(8.0)
    seen: list[int] = []
    steps: list[int] = []
    original = ppo.macro_policy_loss

    def watched(logprobs: Tensor, old: Tensor, *rest: Any, **named: Any) -> Any:
        assert logprobs.shape[0] == 1
        [row] = [i for i in range(8) if torch.equal(tags[i], old[0, :1])]
        seen.append(row)
        return original(logprobs, old, *rest, **named)

    # Old log-probabilities tell the rows apart; these are their first tokens'.
    rollout.logprobs[:, 0] -= torch.arange(8.0) * 1e-3
    tags = rollout.logprobs[:, :1].clone()
    monkeypatch.setattr(ppo, "macro_policy_loss", watched)
    for optimizer in models.optimizers:
        optimizer.adamw.register_step_pre_hook(lambda *_: steps.append(len(seen)))
    models.update(rollout, config)
    assert steps == [count for count in range(2, 17, 2) for _ in range(2)]
    epochs = seen[:8], seen[8:]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    minibatches = [[{*epoch[start : start + 2]} for start in range(0, 8, 2)] for epoch in epochs]
    assert minibatches[0] != minibatches[1]
    for optimizer in models.optimizers:
        states = optimizer.adamw.state.values()
        assert {int(state["step"]) for state in states} == {8}


@pytest.mark.parametrize("level", ["token", "macro", "macro_mean"])
def test_the_split_into_microbatches_changes_neither_metrics_nor_gradient(
    make: Callable[..., Models], level: str
) -> None:
    words = (f"ppo.ratio_level={level}", "ppo.termination.n=2", "ppo.clip_low=0.02", "ppo.clip_high=0.02")
    found = []
    for size in ("null", "1", "3", "9"):
        models = make()
        config = settings(*words, f"ppo.microbatch_size={size}", "ppo.value_clip=0.01")
        rollout = models.complete(responses_of(PAIRS), config)
        moved(models.policy, 0.02)
        moved(models.critic, 0.02)
        found.append((models.update(rollout, config), models.gradients))
    metrics, gradients = found[0]
    assert 0 < metrics["policy_clip_fraction"] < 1
    assert 0 < metrics["value_clip_fraction"] < 1
    for other_metrics, other_gradients in found[1:]:
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        for one, other in zip(gradients, other_gradients, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)


def test_doubling_the_padding_changes_no_metric(make: Callable[..., Models]) -> None:
    found = []
    for extra in (0, 12):
        models = make()
        config = settings("ppo.termination.n=2", "ppo.minibatches=2", "ppo.ppo_epochs=2", "ppo.clip_low=0.001")
        rollout = models.complete(responses_of(PAIRS, extra=extra), config)
        metrics = rollout_metrics(rollout, 0.1)
        metrics.update(models.update(rollout, config))
        found.append(metrics)
    assert found[0].keys() == found[1].keys()
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)


def test_rollout_metrics_by_hand(make: Callable[..., Models]) -> None:
    """Lengths 3, 5, 1, 4, macro actions of 2, one response truncated."""
    rollout = make().complete(responses_of(PAIRS), settings("ppo.termination.n=2"))
    real = rollout.response_mask
    found = rollout_metrics(rollout, 0.125)
    assert found["response_length"] == 13 / 4
    assert found["macro_length"] == pytest.approx(13 / (2 + 3 + 1 + 2))
    assert found["stopped_share"] == 0.75
    assert found["kl_coef"] == 0.125
    assert found["score"] == pytest.approx(rollout.scores.mean().item())
    assert found["score_std"] == pytest.approx(rollout.scores.std(correction=0).item())
    assert found["kl"] == pytest.approx((rollout.logprobs - rollout.ref_logprobs)[real].sum().item() / 4, abs=1e-5)
    for name, column in (("entropy", rollout.entropy), ("value", rollout.values), ("return", rollout.returns)):
        assert found[name] == pytest.approx(column[real].mean().item(), abs=1e-5)


def test_an_empty_response_is_not_counted_by_the_update(make: Callable[..., Models]) -> None:
    """Finite, and the loss and gradient of the batch without it."""
    found = []
    for pairs in (PAIRS[:2], [*PAIRS[:2], ([1, 40], [])]):
        models = make()
        config = settings("ppo.termination.rule=token")
        metrics = models.update(models.complete(responses_of(pairs), config), config)
        found.append((metrics, models.gradients))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4, abs=1e-5)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)


def test_a_batch_of_nothing_changes_nothing(make: Callable[..., Models]) -> None:
    models, config = make(), settings()
    before = [parameter.clone() for parameter in models.policy.parameters()]
    responses = responses_of([([1, 40], []), ([1], [])])
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    empty = replace(responses, response_ids=nothing.long(), response_mask=nothing, action_mask=nothing)
    metrics = models.update(models.complete(empty, config), config)
    assert all(math.isfinite(value) for value in metrics.values())
    for one, other in zip(before, models.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_gradient_is_that_of_clipped_ppo(make: Callable[..., Models]) -> None:
    """By plain PyTorch over the rows one by one: the mean over tokens of max(-A rho, -A clip(rho)), and half the
    larger of the two squared value errors."""
    models = make()
    config = settings("ppo.termination.rule=token", "ppo.value_clip=0.05", "ppo.clip_low=0.05", "ppo.clip_high=0.1")
    rollout = models.complete(responses_of(PAIRS), config)
    moved(models.policy, 0.02)
    moved(models.critic, 0.02)
    policy_total: Any = 0.0
    value_total: Any = 0.0
    for i, (prompt, response) in enumerate(PAIRS):
        part = rollout[torch.tensor([i])]
        n, ids = len(response), torch.tensor([prompt + response])
        logits = models.policy(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        ratio = (logits.gather(-1, torch.tensor(response)[:, None])[:, 0] - part.logprobs[0, :n]).exp()
        a = part.advantages[0, :n]
        policy_total = policy_total + torch.maximum(-a * ratio, -a * ratio.clamp(0.95, 1.1)).sum()
        hidden = models.critic.base_model(input_ids=ids).last_hidden_state
        values = models.critic.score(hidden)[0, len(prompt) - 1 : -1, 0]
        old, target = part.values[0, :n], part.returns[0, :n]
        clipped = old + (values - old).clamp(-0.05, 0.05)
        value_total = value_total + 0.5 * torch.maximum((values - target) ** 2, (clipped - target) ** 2).sum()
    tokens = sum(len(response) for _, response in PAIRS)
    (policy_total / tokens).backward()
    (value_total / tokens).backward()
    expected = [parameter.grad.clone() for optimizer in models.optimizers for parameter in optimizer.parameters]
    for optimizer in models.optimizers:
        optimizer.adamw.zero_grad(set_to_none=True)
    metrics = models.update(rollout, config)
    assert metrics["policy_loss"] == pytest.approx(policy_total.item() / tokens, abs=1e-5)
    assert metrics["value_loss"] == pytest.approx(value_total.item() / tokens, abs=1e-5)
    for one, other in zip(expected, models.gradients, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)


def test_the_update_divides_logits_by_the_temperature(make: Callable[..., Models]) -> None:
    for temperature in (0.5, 2.0):
        models, config = make(rate=float(STILL)), settings(f"ppo.rollout.temperature={temperature}")
        metrics = models.update(models.complete(responses_of(PAIRS), config), config)
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_seed_of_the_order_decides_the_update(make: Callable[..., Models]) -> None:
    found = []
    for seed in (0, 0, 1):
        models, config = make(), settings("ppo.minibatches=2", "ppo.ppo_epochs=2")
        found.append(models.update(models.complete(responses_of(PAIRS), config), config, seed=seed))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_units_are_counted() -> None:
    ids = torch.tensor([[0, 0, 1, -1], [-1, -1, -1, -1], [0, 1, 2, 3]], dtype=torch.int32)
    assert [unit_count(ids, unit).item() for unit in ("tokens", "macros", "sequences")] == [7, 6, 2]


def test_every_epoch_of_prompts_is_a_fresh_permutation() -> None:
    """Full batches only: 11 prompts, batches of 4, two of them an epoch."""
    config = load_config(None, ["ppo.rollout.batch_size=4", "ppo.iterations=7"]).ppo
    batches = list(prompt_batches(11, config, seed=3))
    assert [len(batch) for batch in batches] == [4] * 7
    for start in range(0, 6, 2):
        assert len({*batches[start], *batches[start + 1]}) == 8
    assert len({tuple(batch) for batch in batches}) == 7
    assert batches == list(prompt_batches(11, config, seed=3))
    assert batches != list(prompt_batches(11, config, seed=4))
    exact = load_config(None, ["ppo.rollout.batch_size=11", "ppo.iterations=5"]).ppo
    assert [sorted(batch) for batch in prompt_batches(11, exact, seed=0)] == [list(range(11))] * 5


# Whole runs

MEASURED = {
    "score", "score_std", "kl", "kl_coef", "response_length", "stopped_share", "entropy", "value", "return",
    "macro_length", "policy_loss", "value_loss", "policy_clip_fraction", "value_clip_fraction", "ratio_mean",
    "ratio_max", "approx_kl", "policy_grad_norm", "critic_grad_norm", "policy_learning_rate", "critic_learning_rate",
    "time/generate", "time/score", "time/update", "tokens_per_second",
}  # fmt: skip
EVALUATED = {"eval/score", "eval/kl", "eval/response_length", "eval/stopped_share"}


def test_a_run_from_files_to_folder(tmp_path: Path, words: list[str], tiny_tokenizer: Any) -> None:
    final = run_ppo(resolved(tmp_path, *words))
    run = final.parent
    assert status(run) == {"state": "finished", "stage": "ppo", "step": 2, "total_steps": 2, "message": ""}
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0].keys() >= EVALUATED
    for line in lines[1:]:
        assert line.keys() >= MEASURED | EVALUATED
        assert all(math.isfinite(line[name]) for name in MEASURED | EVALUATED)

    evaluations = read_jsonl(run / "evaluations.jsonl")
    assert [entry["step"] for entry in evaluations] == [0, 1, 2]
    for line, entry in zip(lines, evaluations, strict=True):
        assert len(entry["scores"]) == len(entry["kl"]) == len(entry["lengths"]) == 4
        assert line["eval/score"] == pytest.approx(sum(entry["scores"]) / 4, abs=1e-5)
        assert line["eval/kl"] == pytest.approx(sum(entry["kl"]) / 4, abs=1e-5)
        assert line["eval/response_length"] == pytest.approx(sum(entry["lengths"]) / 4)
        assert sum(int(length) * count for length, count in entry["macro_lengths"].items()) == sum(entry["lengths"])
        assert entry["macro_lengths"].keys() <= {"1", "2"}
    assert evaluations[0]["kl"] == pytest.approx([0.0] * 4, abs=1e-4)

    samples = read_jsonl(run / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0, 0, 1, 1, 2, 2]
    for i, sample in enumerate(samples):
        row = ROWS[i % 2]
        assert (sample["prompt"], sample["reference"]) == (row["prompt"], row["response"])
        assert len(sample["tokens"]) == len(sample["macro_ids"]) == evaluations[i // 2]["lengths"][i % 2]
        assert sample["macro_ids"] == [t // 2 for t in range(len(sample["tokens"]))]
        assert isinstance(sample["response"], str)
        assert sample["score"] == evaluations[i // 2]["scores"][i % 2]
        assert sample["kl"] == evaluations[i // 2]["kl"][i % 2]

    found = read_run("ppo", run)
    assert found.problems == []
    assert len(found.samples) == 6
    assert leftovers(tmp_path) == []
    policy = AutoModelForCausalLM.from_pretrained(final)
    assert policy(input_ids=torch.tensor([[1, 2]])).logits.isfinite().all()
    assert AutoTokenizer.from_pretrained(final)("a")["input_ids"] == tiny_tokenizer("a")["input_ids"]
    load_reward_model(ModelConfig(path=str(run / "critic")), key="critic", device=CPU)


def test_one_token_macro_actions_are_token_ppo_to_the_bit(tmp_path: Path, words: list[str]) -> None:
    found = []
    for name, rule in (
        ("a", ["ppo.termination.rule=token"]),
        ("b", ["ppo.termination.rule=fixed", "ppo.termination.n=1"]),
    ):
        run = run_ppo(resolved(tmp_path, *words, *rule, f"ppo.run_folder={tmp_path / name}")).parent
        found.append(
            (
                without_times(read_jsonl(run / "metrics.jsonl")),
                read_jsonl(run / "evaluations.jsonl"),
                read_jsonl(run / "samples.jsonl"),
                (run / "final" / "model.safetensors").read_bytes(),
            )
        )
    assert found[0] == found[1]


def test_the_seed_decides_and_evaluations_disturb_nothing(tmp_path: Path, words: list[str]) -> None:
    """Held-out prompts are answered under the same noise whatever the seed, so that runs compare."""

    def metrics(name: str, *more: str) -> list[dict[str, Any]]:
        run = run_ppo(resolved(tmp_path, *words, f"ppo.run_folder={tmp_path / name}", *more)).parent
        return without_times(read_jsonl(run / "metrics.jsonl"))

    first, again, other = metrics("a", "seed=0"), metrics("b", "seed=0"), metrics("c", "seed=1")
    rarely = metrics("d", "seed=0", "ppo.eval_every=50", "ppo.samples_per_eval=0", "ppo.rollout_table=1")
    assert first == again
    assert first[0] == other[0]
    assert first[1]["score"] != other[1]["score"]

    def trained(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines]

    assert trained(rarely) == trained(first)


def test_nothing_drops_out_and_the_first_ratio_is_one(tmp_path: Path, tiny_tokenizer: Any, words: list[str]) -> None:
    """With models whose own dropout is 0.5 and a rate that moves nothing: ratio 1, no clipping, no KL, in any step."""
    noisy = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    policy = save_policy(tmp_path / "policy", tiny_tokenizer, **noisy)
    scorer = save_scorer(tmp_path / "scorer", tiny_tokenizer, **noisy)
    run = run_ppo(
        resolved(
            tmp_path,
            *words,
            f"ppo.model.path={policy}",
            f"ppo.reward_model.path={scorer}",
            f"ppo.policy_optimizer.learning_rate={STILL}",
            f"ppo.critic_optimizer.learning_rate={STILL}",
            "ppo.microbatch_size=3",
        )
    ).parent
    for line in read_jsonl(run / "metrics.jsonl")[1:]:
        assert line["kl"] == pytest.approx(0.0, abs=1e-5)
        assert line["approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert line["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert line["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert line["policy_clip_fraction"] == line["value_clip_fraction"] == 0.0


def test_the_reference_and_the_reward_model_never_move(
    tmp_path: Path,
    words: list[str],
    policies: dict[str, Path],
    scorers: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are the start and the reward stage's result to the last iteration, while policy and critic move."""
    kept: dict[str, list[list[Tensor]]] = {"policy": [], "reference": [], "critic": [], "reward_model": []}
    original = ppo.complete

    def watched(responses: Responses, **named: Any) -> Rollout:
        seen = {**named, "reward_model": named["rewards"].critic_start}
        for name, states in kept.items():
            states.append([parameter.detach().clone() for parameter in seen[name].parameters()])
        return original(responses, **named)

    monkeypatch.setattr(ppo, "complete", watched)
    run_ppo(resolved(tmp_path, *words, "ppo.iterations=3"))
    start = list(load_policy(ModelConfig(path=str(policies["gpt2"])), key="x", device=CPU).parameters())
    scorer = list(load_reward_model(ModelConfig(path=str(scorers["gpt2"])), key="x", device=CPU).parameters())

    def same(one: list[Any], other: list[Any]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    assert all(same(state, start) for state in kept["reference"])
    assert all(same(state, scorer) for state in kept["reward_model"])
    for name, begin in (("policy", start), ("critic", scorer)):
        assert same(kept[name][0], begin)
        assert not same(kept[name][1], begin)
        assert not same(kept[name][2], kept[name][1])


def test_every_iteration_draws_its_own_noise(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    original = ppo.generate

    def watched(*args: Any, seed: int, **named: Any) -> Responses:
        seeds.append(seed)
        return original(*args, seed=seed, **named)

    monkeypatch.setattr(ppo, "generate", watched)
    run_ppo(resolved(tmp_path, *words, "ppo.iterations=4"))
    assert len(set(seeds)) == len(seeds) == 4


def test_the_schedule_counts_optimiser_steps(tmp_path: Path, words: list[str]) -> None:
    """3 iterations of 2 epochs x 2 minibatches: 12 steps, 4 between two lines."""
    schedule = ("ppo.iterations=3", "ppo.policy_optimizer.schedule=linear", "ppo.critic_optimizer.schedule=cosine")
    run = run_ppo(resolved(tmp_path, *words, *schedule)).parent
    lines = read_jsonl(run / "metrics.jsonl")[1:]
    assert [line["policy_learning_rate"] for line in lines] == pytest.approx([1e-3, 1e-3 * 8 / 12, 1e-3 * 4 / 12])
    cosine = [1e-3 * (1 + math.cos(math.pi * step / 12)) / 2 for step in (0, 4, 8)]
    assert [line["critic_learning_rate"] for line in lines] == pytest.approx(cosine)


def test_the_adaptive_coefficient_follows_the_kl(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every batch: coefficient *= 1 + clip(kl / target - 1, +-.2) * responses / horizon, kl the mean over responses
    of their sums over tokens, as it is reported."""
    seen: list[tuple[float, int]] = []
    original = ppo.KLController.update

    def watched(self: Any, kl: float, responses: int) -> None:
        seen.append((kl, responses))
        original(self, kl, responses)

    monkeypatch.setattr(ppo.KLController, "update", watched)
    run = run_ppo(
        resolved(tmp_path, *words, "ppo.iterations=3", "ppo.kl_coef=0.15", "ppo.kl_target=0.05", "ppo.kl_horizon=100")
    ).parent
    lines = read_jsonl(run / "metrics.jsonl")[1:]
    assert seen == [(line["kl"], 8) for line in lines]
    expected = 0.15
    for line in lines:
        assert line["kl_coef"] == pytest.approx(expected, rel=1e-6)
        expected *= 1 + min(0.2, max(-0.2, line["kl"] / 0.05 - 1)) * 8 / 100
    assert lines[1]["kl_coef"] == pytest.approx(0.15 * (1 - 0.2 * 0.08))


def test_the_batch_arithmetic_is_told(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run_ppo(resolved(tmp_path, *words, "ppo.microbatch_size=3", "ppo.iterations=1", "ppo.ppo_epochs=3"))
    out = " ".join(capsys.readouterr().out.split())
    assert "12 prompts, 4 held out" in out
    assert "1 iterations of 8 responses, each 6 optimiser steps of 4 responses, in backward passes of 3" in out


def test_the_rollout_table_shows_every_token(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_ppo(resolved(tmp_path, *words, "ppo.iterations=1", "ppo.rollout_table=2"))
    out = capsys.readouterr().out
    assert out.count("response 0, score") == out.count("response 1, score") == 1
    assert "response 2, score" not in out
    for name in ("token", "macro", "logp", "ref logp", "KL", "reward", "value", "advantage", "return"):
        assert name in out


def test_messages_as_prompts(tmp_path: Path, tiny_tokenizer: Any, words: list[str]) -> None:
    """With a chat template; the sample shows them."""
    folder = save_policy(tmp_path / "chat", tiny_tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    chat = (f"ppo.data.train={file}", f"ppo.data.validation={file}", "ppo.data.chat_template=true")
    run = run_ppo(resolved(tmp_path, *words, *chat, f"ppo.model.path={folder}")).parent
    sample = read_jsonl(run / "samples.jsonl")[0]
    assert json.loads(sample["prompt"]) == rows[0]["prompt"]
    assert sample["reference"] is None


def test_without_held_out_prompts_nothing_is_evaluated(tmp_path: Path, words: list[str]) -> None:
    for name, word in (("a", "ppo.eval_rows=0"), ("b", "ppo.data.validation_fraction=0")):
        more = ["ppo.data.validation=null", word, "ppo.iterations=1", f"ppo.run_folder={tmp_path / name}"]
        run = run_ppo(resolved(tmp_path, *words, *more)).parent
        lines = read_jsonl(run / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1]
        assert not lines[0].keys() & EVALUATED


def test_a_llama_policy_with_a_llama_reward_model(
    tmp_path: Path, words: list[str], policies: dict[str, Path], scorers: dict[str, Path]
) -> None:
    models = (f"ppo.model.path={policies['llama']}", f"ppo.reward_model.path={scorers['llama']}")
    final = run_ppo(resolved(tmp_path, *words, *models, "ppo.critic_head=zero", "ppo.kl_coef=0"))
    assert status(final.parent)["state"] == "finished"
    assert read_jsonl(final.parent / "metrics.jsonl")[1]["value"] == pytest.approx(0.0, abs=1e-6)


def last_token_scorer(folder: Path, tokenizer: Any, good: list[int]) -> Path:
    """Scores +-1: whether the last real token is a good one. The blocks do nothing; the head reads the embedding."""
    save_scorer(folder, tokenizer)
    model = load_reward_model(ModelConfig(path=str(folder)), key="x", device=CPU)
    direction = torch.tensor([1.0, -1.0] * 8)
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.zero_()
        model.transformer.wte.weight.copy_(-direction.expand_as(model.transformer.wte.weight))
        model.transformer.wte.weight[good] = direction
        nn.init.ones_(model.transformer.ln_f.weight)
        nn.init.zeros_(model.transformer.ln_f.bias)
        model.score.weight.copy_(direction / 16)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("n", [1, 2])
def test_it_learns_an_exact_reward(tmp_path: Path, tiny_tokenizer: Any, words: list[str], n: int) -> None:
    """+1 if the last of four tokens is one of sixty, else -1: from a fifth of responses to most of them, with token
    and with macro actions, while a KL penalty holds the policy near its start."""
    policy = save_policy(tmp_path / "policy", tiny_tokenizer, initializer_range=0.02)
    scorer = last_token_scorer(tmp_path / "scorer", tiny_tokenizer, list(range(100, 160)))
    run = run_ppo(
        resolved(
            tmp_path,
            *words,
            f"ppo.model.path={policy}",
            f"ppo.reward_model.path={scorer}",
            f"ppo.termination.n={n}",
            "ppo.data.validation=null",
            "ppo.data.validation_fraction=0",
            "ppo.rollout.batch_size=12",
            "ppo.rollout.max_new_tokens=4",
            "ppo.rollout.stop_token_ids=[299]",
            "ppo.iterations=60",
            "ppo.policy_optimizer.learning_rate=1e-2",
            "ppo.critic_optimizer.learning_rate=1e-2",
            "ppo.kl_coef=0.01",
        )
    ).parent
    scores = [line["score"] for line in read_jsonl(run / "metrics.jsonl")]
    assert sum(scores[:3]) / 3 < 0.0
    assert sum(scores[-10:]) / 10 > 0.7


# Mistakes


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ppo.model.path=/no/such/model", r"/no/such/model"),
        ("ppo.model.path=${sft.run_folder}/final", r"`ppo.model.path`.*run the stage that writes it first"),
        ("ppo.reward_model.path=${reward.run_folder}/final", r"`ppo.reward_model.path`.*run the stage that writes it"),
        ("ppo.reward_model.path=${ppo.model.path}", r"`ppo.reward_model`: .* has no reward head"),
        ("ppo.data.train=null", r"`data.train` is not set"),
        ("ppo.data.prompt_field=question", r"no field `question`"),
        ("ppo.rollout.batch_size=13", r"12 prompts are fewer than ppo.rollout.batch_size=13"),
        ("ppo.rollout.top_k=50", r"top_k is 50"),
        ("ppo.rollout.top_p=0.9", r"top_p is 0.9"),
        ("ppo.rollout.temperature=0", r"`ppo.rollout.temperature` is 0"),
        ("ppo.rollout.max_new_tokens=0", r"`ppo.rollout.max_new_tokens` is 0"),
        ("ppo.rollout.max_new_tokens=60", r"`ppo.model`: .*64 positions"),
        ("ppo.termination.rule=fixd", r"`ppo.termination.rule` is 'fixd'.*`fixed`"),
        ("ppo.termination.n=0", r"`ppo.termination.n` is 0"),
        ("ppo.iterations=0", r"`ppo.iterations` is 0"),
        ("ppo.ppo_epochs=0", r"`ppo.ppo_epochs` is 0"),
        ("ppo.minibatches=0", r"`ppo.minibatches` is 0"),
        ("ppo.minibatches=9", r"`ppo.minibatches` is 9, more than the 8 responses"),
        ("ppo.microbatch_size=0", r"`ppo.microbatch_size`"),
        ("ppo.eval_every=0", r"`ppo.eval_every` is 0"),
        ("ppo.eval_rows=-1", r"`ppo.eval_rows` is -1"),
        ("ppo.samples_per_eval=-1", r"`ppo.samples_per_eval` is -1"),
        ("ppo.rollout_table=-1", r"`ppo.rollout_table` is -1"),
        ("ppo.kl_coef=-1", r"`ppo.kl_coef` is -1"),
        ("ppo.kl_target=0", r"`ppo.kl_target` is 0"),
        ("ppo.kl_estimator=k4", r"`ppo.kl_estimator` is 'k4'"),
        ("ppo.ratio_level=marco", r"`ppo.ratio_level` is 'marco'.*`macro`"),
        ("ppo.value_level=tokn", r"`ppo.value_level` is 'tokn'.*`token`"),
        ("ppo.discount_per=tokn", r"`ppo.discount_per` is 'tokn'.*`token`"),
        ("ppo.normalize_by=token", r"`ppo.normalize_by` is 'token'.*`tokens`"),
        ("ppo.missing_stop_mode=sett", r"`ppo.missing_stop_mode` is 'sett'.*`set`"),
        ("ppo.critic_head=zeros", r"`ppo.critic_head` is 'zeros'.*`zero`"),
        ("ppo.reward_weights=summ", r"`ppo.reward_weights` is 'summ'.*`sum`"),
        ("ppo.value_weights=men", r"`ppo.value_weights` is 'men'.*`mean`"),
        ("ppo.value_weights=sum", r"`ppo.value_weights` is 'sum'"),
        ("ppo.clip_low=-0.1", r"`ppo.clip_low` is -0.1"),
        ("ppo.clip_high=-0.1", r"`ppo.clip_high` is -0.1"),
        ("ppo.dual_clip=1.1", r"`ppo.dual_clip` is 1.1"),
        ("ppo.value_clip=-1", r"`ppo.value_clip` is -1"),
        ("ppo.score_clip=-1", r"`ppo.score_clip` is -1"),
        ("ppo.gamma=1.5", r"`ppo.gamma` is 1.5"),
        ("ppo.lam=-0.5", r"`ppo.lam` is -0.5"),
        ("ppo.policy_optimizer.eps=0", r"`ppo.policy_optimizer.eps` is 0"),
        ("ppo.critic_optimizer.schedule=lin", r"`ppo.critic_optimizer.schedule` is 'lin'"),
    ],
)
def test_a_mistake_leaves_no_run_folder(tmp_path: Path, words: list[str], word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_ppo(resolved(tmp_path, *words, word))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("weights", ["mean", "position", "position_reversed", "first"])
def test_weights_that_shrink_or_lose_the_score_are_refused(tmp_path: Path, words: list[str], weights: str) -> None:
    """Averaging the rewards of a macro action of n tokens divides the score by n too."""
    with pytest.raises(UserError, match=rf"`ppo.reward_weights` is '{weights}'.*score"):
        run_ppo(resolved(tmp_path, *words, f"ppo.reward_weights={weights}"))
    assert list(tmp_path.iterdir()) == []


def test_a_reward_model_with_another_vocabulary_is_refused(
    tmp_path: Path, tiny_tokenizer: Any, words: list[str]
) -> None:
    scorer = save_scorer(tmp_path / "scorer", tiny_tokenizer, vocab_size=310)
    with pytest.raises(UserError, match=r"`ppo.reward_model`: its vocabulary has 310 tokens"):
        run_ppo(resolved(tmp_path, *words, f"ppo.reward_model.path={scorer}"))
    assert [path.name for path in tmp_path.iterdir()] == ["scorer"]


def test_a_reward_model_with_another_tokenizer_is_refused(
    tmp_path: Path, tiny_tokenizer: Any, words: list[str]
) -> None:
    """As many tokens, but the same text has other ids."""
    from marlhf.data import train_tokenizer

    text = "zebra zigzag zoo quiz quartz jazz fuzzy buzz " * 4
    other = train_tokenizer([text, "completely different words for merging " * 5], vocab_size=300)
    scorer = save_scorer(tmp_path / "scorer", other, vocab_size=len(tiny_tokenizer))
    with pytest.raises(UserError, match=r"`ppo.reward_model`: .*tokenizer"):
        run_ppo(resolved(tmp_path, *words, f"ppo.reward_model.path={scorer}"))
    assert [path.name for path in tmp_path.iterdir()] == ["scorer"]


def test_a_reward_model_with_fewer_positions_is_refused(tmp_path: Path, tiny_tokenizer: Any, words: list[str]) -> None:
    scorer = save_scorer(tmp_path / "scorer", tiny_tokenizer, n_positions=8)
    with pytest.raises(UserError, match=r"`ppo.reward_model`: .*8 positions"):
        run_ppo(resolved(tmp_path, *words, f"ppo.reward_model.path={scorer}"))
    assert [path.name for path in tmp_path.iterdir()] == ["scorer"]


def test_a_run_does_not_overwrite_another(tmp_path: Path, words: list[str]) -> None:
    config = resolved(tmp_path, *words, "ppo.iterations=1")
    run_ppo(config)
    with pytest.raises(UserError, match=r"`ppo.run_folder`: .* is not empty"):
        run_ppo(config)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_where_a_run_stopped_is_recorded(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """In the second iteration: the first one's line stands, and there is no half-written policy."""
    calls = []
    original = ppo.update

    def broken(*args: Any) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return original(*args)

    monkeypatch.setattr(ppo, "update", broken)
    config = resolved(tmp_path, *words)
    with pytest.raises(type(error)):
        run_ppo(config)
    run = Path(config.ppo.run_folder)
    assert status(run)["state"] == ("failed" if isinstance(error, RuntimeError) else "interrupted")
    assert status(run)["step"] == 1
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == [0, 1]
    assert not (run / "final").exists()
    assert not (run / "critic").exists()
    assert leftovers(tmp_path) == []


def test_an_interruption_while_the_policy_is_saved_leaves_no_half(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = GPT2LMHeadModel.save_pretrained

    def interrupted(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(GPT2LMHeadModel, "save_pretrained", interrupted)
    config = resolved(tmp_path, *words, "ppo.iterations=1")
    with pytest.raises(KeyboardInterrupt):
        run_ppo(config)
    run = Path(config.ppo.run_folder)
    assert status(run)["state"] == "interrupted"
    assert "final/ was not written" in status(run)["message"]
    assert not (run / "final").exists()
    assert leftovers(tmp_path) == []


def test_the_update_uses_the_values_and_logprobs_of_the_models(make: Callable[..., Models]) -> None:
    """What a rollout holds is what a fresh forward of its own models gives."""
    models, config = make(), settings()
    rollout = models.complete(responses_of(PAIRS), config)
    torch.testing.assert_close(response_logprobs(models.policy, *rollout.parts())[0], rollout.logprobs)
    torch.testing.assert_close(response_logprobs(models.reference, *rollout.parts())[0], rollout.ref_logprobs)
    torch.testing.assert_close(response_values(models.critic, *rollout.parts()), rollout.values)


def test_lengths_of_macro_actions_are_counted() -> None:
    ids = torch.tensor([[0, 0, 1, -1], [-1, -1, -1, -1], [0, -1, 0, 0], [0, 1, 2, 3]], dtype=torch.int32)
    assert evaluate.macro_length_counts(ids) == {"1": 5, "2": 1, "3": 1}
