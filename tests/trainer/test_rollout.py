"""Responses are sampled from the law that is scored, cut after their stop token, and scored as they stand."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from marlhf.config import ModelConfig, PPOConfig, RolloutConfig, load_config
from marlhf.data import left_pad, right_pad
from marlhf.errors import ConfigError
from marlhf.models import load_critic, load_policy, load_reward_model, response_logprobs, sequence_scores
from marlhf.responses import Responses
from marlhf.rewards import ModelReward, Rewards
from marlhf.rollout import Rollout, check_rollout, complete, cut_after_stop, generate, stop_ids
from tests.trainer.tiny import FAMILIES

CPU = torch.device("cpu")
PROMPTS = [[1, 40, 77, 130], [1, 50], [1, 60, 70, 80, 90, 100, 110], [1]]


@pytest.fixture
def policy(policies: dict[str, Path]) -> Any:
    return load_policy(ModelConfig(path=str(policies["gpt2"])), key="ppo.model", device=CPU).eval()


@pytest.fixture
def models(policies: dict[str, Path], scorers: dict[str, Path]) -> dict[str, Any]:
    """As PPO holds them; the reference is a copy of the policy."""
    start = ModelConfig(path=str(policies["gpt2"]))
    scorer = load_reward_model(ModelConfig(path=str(scorers["gpt2"])), key="ppo.reward_model", device=CPU)
    return {
        "policy": load_policy(start, key="ppo.model", device=CPU).eval(),
        "reference": load_policy(start, key="ppo.model", device=CPU).eval(),
        "critic": load_critic(scorer, head="reward"),
        "rewards": Rewards([ModelReward(scorer.eval())]),
    }


def moved(model: Any, by: float = 0.05) -> Any:
    """The same model a step away."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return model


def sample(
    model: Any, prompts: list[list[int]] = PROMPTS, *, seed: int = 0, stops: tuple[int, ...] = (2,), **changes: Any
):
    config = RolloutConfig(**{"max_new_tokens": 12, **changes})
    return generate(model, prompts, config, stops=stops, pad_id=0, seed=seed)


def responses_of(
    pairs: list[tuple[list[int], list[int]]], *, stops: tuple[int, ...] = (2,), extra: int = 0
) -> Responses:
    """Given prompts and responses as rollouts hold them, with `extra` columns of padding on either side."""
    grow = nn.functional.pad
    prompt_ids, prompt_mask = left_pad([prompt for prompt, _ in pairs], 0)
    ids, mask = right_pad([response for _, response in pairs], 0)
    return Responses(
        grow(prompt_ids, (extra, 0)),
        grow(prompt_mask, (extra, 0)),
        grow(ids, (0, extra)),
        grow(mask, (0, extra)),
        torch.tensor([not set(stops) & set(response) for _, response in pairs]),
        grow(mask, (0, extra)),
    )


PAIRS = [
    (PROMPTS[0], [90, 12, 2]),
    (PROMPTS[1], [50, 60, 70, 80, 95]),
    (PROMPTS[2], [2]),
    (PROMPTS[3], [33, 44, 55, 2]),
]


def ppo(*words: str) -> PPOConfig:
    return load_config(None, words).ppo


def tensors(rollout: Responses) -> dict[str, Tensor]:
    return {entry.name: getattr(rollout, entry.name) for entry in fields(rollout)}


# Cutting


def cut(ids: list[list[int]], *, stops: tuple[int, ...] = (2,), pad: int = 0, lengths: list[int] | None = None):
    rows = torch.tensor(ids)
    prompts, mask = left_pad([[1]] * len(ids), pad)
    generated = torch.tensor(lengths or [len(row) for row in ids])
    return cut_after_stop(prompts, mask, rows, generated, stops=stops, pad_id=pad)


def test_a_response_ends_with_its_first_stop_token() -> None:
    """Which is kept; without one the response is truncated and nothing of it is overwritten."""
    got = cut([[5, 2, 7, 2, 0], [5, 6, 7, 8, 9], [2, 2, 2, 2, 2]])
    assert got.response_mask.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert got.response_ids.tolist() == [[5, 2, 0, 0, 0], [5, 6, 7, 8, 9], [2, 0, 0, 0, 0]]
    assert got.truncated.tolist() == [False, True, False]
    assert got.lengths.tolist() == [2, 5, 1]


def test_several_stop_tokens() -> None:
    got = cut([[5, 9, 2, 6], [5, 6, 2, 9], [5, 6, 7, 8]], stops=(2, 9))
    assert got.lengths.tolist() == [2, 3, 4]
    assert got.truncated.tolist() == [False, False, True]
    assert got.response_ids.tolist() == [[5, 9, 0, 0], [5, 6, 2, 0], [5, 6, 7, 8]]


def test_pad_may_be_the_stop_token() -> None:
    """Lengths decide what is real: the row of a shorter batch is truncated although its padding spells a stop."""
    got = cut([[5, 2, 2, 2], [5, 6, 2, 2], [5, 6, 7, 2]], pad=2, lengths=[4, 2, 4])
    assert got.lengths.tolist() == [2, 2, 4]
    assert got.truncated.tolist() == [False, True, False]


def test_a_pad_token_that_was_sampled_is_real() -> None:
    got = cut([[5, 0, 0, 6], [0, 0, 2, 0]])
    assert got.lengths.tolist() == [4, 3]
    assert got.truncated.tolist() == [True, False]


def test_columns_beyond_the_longest_response_are_dropped() -> None:
    got = cut([[5, 2, 0, 0], [2, 0, 0, 0]])
    assert got.response_ids.shape == got.response_mask.shape == (2, 2)


# Sampling


def test_responses_stand_behind_their_prompts(policy: Any) -> None:
    got = sample(policy)
    assert got.prompt_ids.shape == got.prompt_mask.shape == (4, 7)
    for i, prompt in enumerate(PROMPTS):
        assert got.prompt_ids[i][got.prompt_mask[i]].tolist() == prompt
        assert got.prompt_mask[i].tolist() == [False] * (7 - len(prompt)) + [True] * len(prompt)
        tokens = got.response_ids[i][got.response_mask[i]].tolist()
        assert 2 not in tokens[:-1]
        assert bool(got.truncated[i]) == (tokens[-1] != 2)
        assert bool(got.truncated[i]) <= (len(tokens) == 12)
    assert got.response_mask.dtype == got.prompt_mask.dtype == got.truncated.dtype == torch.bool


def test_the_seed_decides_and_the_global_state_is_untouched(policy: Any) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = sample(policy, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(7)
    assert torch.equal(sample(policy, seed=3).response_ids, first.response_ids)
    other = sample(policy, seed=4).response_ids
    assert other.shape != first.response_ids.shape or not torch.equal(other, first.response_ids)


def test_equal_prompts_get_different_noise(policy: Any) -> None:
    got = sample(policy, [PROMPTS[0]] * 4)
    rows = {tuple(ids[mask].tolist()) for ids, mask in zip(got.response_ids, got.response_mask, strict=True)}
    assert len(rows) == 4
    got = sample(policy, [PROMPTS[0]] * 4, generation_batch_size=1)
    rows = {tuple(ids[mask].tolist()) for ids, mask in zip(got.response_ids, got.response_mask, strict=True)}
    assert len(rows) == 4


def test_saved_generation_defaults_have_no_say(policy: Any) -> None:
    """top_k 1, a repetition penalty, a least length ...: whoever saved the model meant them for its users."""
    plain = sample(policy, seed=1)
    defaults = policy.generation_config
    for name, value in {
        "do_sample": False,
        "top_k": 1,
        "top_p": 0.1,
        "min_p": 0.9,
        "typical_p": 0.1,
        "temperature": 0.01,
        "repetition_penalty": 50.0,
        "no_repeat_ngram_size": 1,
        "num_beams": 3,
        "min_new_tokens": 12,
        "max_length": 2,
        "suppress_tokens": list(range(3, 290)),
        "begin_suppress_tokens": list(range(3, 290)),
        "bad_words_ids": [[token] for token in range(3, 290)],
        "forced_bos_token_id": 7,
        "forced_eos_token_id": 7,
        "eos_token_id": 90,
        "use_cache": False,
    }.items():
        setattr(defaults, name, value)
    got = sample(policy, seed=1)
    assert torch.equal(got.response_ids, plain.response_ids)
    assert torch.equal(got.response_mask, plain.response_mask)
    assert policy.generation_config is defaults


def test_generation_defaults_come_back_after_an_interruption(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    defaults = policy.generation_config
    torch.manual_seed(5)
    before = torch.get_rng_state()
    monkeypatch.setattr(policy, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sample(policy)
    assert policy.generation_config is defaults
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_what_is_sampled_is_what_is_scored(policy: Any, temperature: float) -> None:
    """Shares of 3,000 sampled tokens against softmax(logits / temperature), each within five standard errors."""
    n = 3000
    got = sample(policy, [PROMPTS[0]] * n, max_new_tokens=1, temperature=temperature)
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1] / temperature
    expected = logits.softmax(-1)
    shares = torch.bincount(got.response_ids[:, 0], minlength=len(expected)) / n
    errors = (expected * (1 - expected) / n).sqrt()
    assert ((shares - expected).abs() <= 5 * errors + 1 / n).all()
    # More of the vocabulary than the generator's default top_k of 50 would leave.
    rest = expected.sort().values[:-50].sum().item()
    assert shares[expected.argsort()[:-50]].sum().item() == pytest.approx(rest, abs=5 * (rest * (1 - rest) / n) ** 0.5)
    if temperature == 2.0:
        assert rest > 0.2


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_generation_equals_row_by_row(policies: dict[str, Path], family: str) -> None:
    """Left padding moves nothing: the most likely continuation of a prompt is that of the prompt alone."""
    model = load_policy(ModelConfig(path=str(policies[family])), key="ppo.model", device=CPU).eval()
    together = sample(model, temperature=0.0)
    in_parts = sample(model, temperature=0.0, generation_batch_size=3)
    for i, prompt in enumerate(PROMPTS):
        alone = sample(model, [prompt], temperature=0.0)
        expected = alone.response_ids[0][alone.response_mask[0]].tolist()
        for got in (together, in_parts):
            assert got.response_ids[i][got.response_mask[i]].tolist() == expected
            assert bool(got.truncated[i]) == bool(alone.truncated[0])
        ids = list(prompt)
        for token in expected:
            with torch.no_grad():
                assert policy_argmax(model, ids) == token
            ids.append(token)


def policy_argmax(model: Any, ids: list[int]) -> int:
    return int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())


def test_generation_stops_at_any_of_the_stop_tokens(policy: Any) -> None:
    free = sample(policy, [PROMPTS[0]], temperature=0.0)
    tokens = free.response_ids[0].tolist()
    stop = tokens[4]
    first = tokens.index(stop)
    got = sample(policy, [PROMPTS[0]], temperature=0.0, stops=(299, stop))
    assert got.response_ids[0].tolist() == tokens[: first + 1]
    assert not got.truncated.item()


def test_all_prompts_may_stop_at_once(policy: Any) -> None:
    stops = tuple(range(300))
    got = sample(policy, stops=stops)
    assert got.response_ids.shape == (4, 1)
    assert not got.truncated.any()


def test_which_tokens_stop(tiny_tokenizer: Any) -> None:
    assert stop_ids(tiny_tokenizer, RolloutConfig()) == [tiny_tokenizer.eos_token_id]
    assert stop_ids(tiny_tokenizer, RolloutConfig(stop_token_ids=[7, 9])) == [7, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 50}, r"top_k is 50 .*sample another distribution than the one PPO scores"),
        ({"top_p": 0.9}, r"top_p is 0.9"),
        ({"top_k": -1}, "top_k"),
        ({"temperature": 0.0}, r"`ppo.rollout.temperature` is 0.0"),
        ({"temperature": -1.0}, r"`ppo.rollout.temperature` is -1.0"),
        ({"temperature": float("nan")}, r"`ppo.rollout.temperature` is nan"),
        ({"temperature": float("inf")}, r"`ppo.rollout.temperature` is inf"),
        ({"batch_size": 0}, r"`ppo.rollout.batch_size` is 0"),
        ({"max_new_tokens": 0}, r"`ppo.rollout.max_new_tokens` is 0"),
        ({"generation_batch_size": 0}, r"`ppo.rollout.generation_batch_size`"),
    ],
)
def test_rollouts_that_cannot_be_trained_on_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rollout(RolloutConfig(**changes), key="ppo.rollout", scored=True)


def test_responses_that_are_only_shown_may_be_sampled_otherwise() -> None:
    for changes in ({"top_k": 50}, {"top_p": 0.9}, {"temperature": 0.0}):
        check_rollout(RolloutConfig(**changes), key="generate.rollout", scored=False)
    for changes in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}):
        with pytest.raises(ConfigError, match=r"generate.rollout"):
            check_rollout(RolloutConfig(**changes), key="generate.rollout", scored=False)


# Completing


def test_at_the_first_step_the_ratio_is_one_and_the_kl_zero(models: dict[str, Any]) -> None:
    """Old log-probabilities are those of the training forward; in train mode, in parts and with other padding."""
    responses = sample(models["policy"], PROMPTS * 2)
    rollout = complete(responses, config=ppo("ppo.microbatch_size=3"), kl_coef=0.05, **models)
    assert rollout.kl.abs().max().item() < 1e-5
    models["policy"].train()
    again, _ = response_logprobs(models["policy"], *rollout.parts())
    ratio = (again - rollout.logprobs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_all_logprobs_are_divided_by_the_temperature(models: dict[str, Any], temperature: float) -> None:
    moved(models["reference"])
    rollout = complete(
        responses_of(PAIRS), config=ppo(f"ppo.rollout.temperature={temperature}"), kl_coef=0.05, **models
    )
    for name, found in (("policy", rollout.logprobs), ("reference", rollout.ref_logprobs)):
        for i, (prompt, response) in enumerate(PAIRS):
            with torch.no_grad():
                logits = models[name](input_ids=torch.tensor([prompt + response])).logits[0] / temperature
            own = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
            torch.testing.assert_close(found[i, : len(response)], own, rtol=0, atol=1e-5)
    torch.testing.assert_close(rollout.kl, rollout.logprobs - rollout.ref_logprobs)


def test_the_reward_model_sees_prompt_and_cut_response(models: dict[str, Any]) -> None:
    """Each row's score is that of its ids alone, less the constant that was saved with the model."""
    models["rewards"].critic_start.config.reward_mean = 0.25
    rollout = complete(responses_of(PAIRS), config=ppo(), kl_coef=0.0, **models)
    for i, (prompt, response) in enumerate(PAIRS):
        ids = torch.tensor([prompt + response])
        raw = sequence_scores(
            models["rewards"].critic_start, ids, torch.ones_like(ids, dtype=torch.bool), centred=False
        )
        torch.testing.assert_close(rollout.scores[i], raw[0] - 0.25, rtol=0, atol=1e-5)


def test_the_score_is_paid_on_the_last_token(models: dict[str, Any]) -> None:
    """Response [a, b, EOS, PAD, PAD], score 1, no KL: rewards [0, 0, 1, 0, 0]."""
    responses = responses_of(PAIRS[:2])
    scorer = models["rewards"].critic_start
    first = complete(responses, config=ppo(), kl_coef=0.05, **models).scores[0].item()
    scorer.config.reward_mean = first - 1.0
    rollout = complete(responses, config=ppo(), kl_coef=0.05, **models)
    assert rollout.rewards[0].tolist() == pytest.approx([0, 0, 1, 0, 0], abs=1e-5)


def test_the_kl_is_paid_on_every_token(models: dict[str, Any]) -> None:
    moved(models["reference"])
    for estimator in ("k1", "k2", "k3"):
        config = ppo(f"ppo.kl_estimator={estimator}")
        rollout = complete(responses_of(PAIRS), config=config, kl_coef=0.3, **models)
        d = rollout.logprobs - rollout.ref_logprobs
        kl = {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[estimator]
        torch.testing.assert_close(rollout.kl, kl * rollout.response_mask, rtol=1e-5, atol=1e-6)
        expected = -0.3 * rollout.kl
        for i, length in enumerate(rollout.lengths.tolist()):
            expected[i, length - 1] += rollout.scores[i]
        torch.testing.assert_close(rollout.rewards, expected)


def test_an_empty_response_is_worth_nothing(models: dict[str, Any]) -> None:
    """All zeros and finite, whatever its score."""
    moved(models["reference"])
    rollout = complete(responses_of([*PAIRS, (PROMPTS[0], [])]), config=ppo(), kl_coef=0.1, **models)
    for name in ("rewards", "kl", "advantages", "returns", "values", "logprobs", "entropy"):
        assert not getattr(rollout, name)[-1].any(), name
        assert getattr(rollout, name).isfinite().all(), name
    assert (rollout.macro_ids[-1] == -1).all()
    without = complete(responses_of(PAIRS), config=ppo(), kl_coef=0.1, **models)
    torch.testing.assert_close(rollout.advantages[:-1], without.advantages, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), [0.5, 0.5]),
        (("ppo.missing_stop_penalty=1",), [0.5, -0.5]),
        (("ppo.missing_stop_penalty=1", "ppo.missing_stop_mode=set"), [0.5, -1.0]),
    ],
)
def test_a_missing_stop_token_may_cost_something(
    models: dict[str, Any], words: tuple[str, ...], expected: list[float]
) -> None:
    """`subtract` lowers the score, `set` replaces it; the response that stopped keeps its own."""
    responses = responses_of([(PROMPTS[0], [90, 12, 2]), (PROMPTS[0], [90, 12, 2])])
    responses.truncated = torch.tensor([False, True])
    score = complete(responses, config=ppo(), kl_coef=0.0, **models).scores[0].item()
    models["rewards"].critic_start.config.reward_mean = score - 0.5
    rollout = complete(responses, config=ppo(*words), kl_coef=0.0, **models)
    assert rollout.scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert rollout.rewards[:, 2].tolist() == pytest.approx(expected, abs=1e-5)


def test_scores_may_be_standardised_and_clipped(models: dict[str, Any]) -> None:
    plain = complete(responses_of(PAIRS), config=ppo(), kl_coef=0.0, **models)
    models["rewards"].critic_start.config.reward_std = 4.0
    models["rewards"].sources[0].standardize = True
    divided = complete(responses_of(PAIRS), config=ppo(), kl_coef=0.0, **models)
    torch.testing.assert_close(divided.scores, plain.scores / 4)
    models["rewards"].sources[0].standardize = False
    clipped = complete(responses_of(PAIRS), config=ppo("ppo.score_clip=0.1"), kl_coef=0.0, **models)
    torch.testing.assert_close(clipped.scores, plain.scores)
    torch.testing.assert_close(clipped.rewards.sum(dim=1), plain.scores.clamp(-0.1, 0.1))


def test_returns_are_computed_before_whitening(models: dict[str, Any]) -> None:
    """Advantages are whitened over all real tokens of the batch; returns are raw advantages plus values."""
    moved(models["reference"])
    words = ("ppo.termination.rule=token",)
    raw = complete(responses_of(PAIRS), config=ppo(*words, "ppo.whiten_advantages=false"), kl_coef=0.1, **models)
    white = complete(responses_of(PAIRS), config=ppo(*words), kl_coef=0.1, **models)
    torch.testing.assert_close(raw.returns, raw.advantages + raw.values)
    assert torch.equal(white.returns, raw.returns)
    real = white.advantages[white.response_mask]
    assert real.mean().item() == pytest.approx(0, abs=1e-6)
    assert real.var(correction=0).item() == pytest.approx(1, abs=1e-4)
    before = raw.advantages[raw.response_mask]
    torch.testing.assert_close(real, (before - before.mean()) / before.std(correction=0), rtol=1e-4, atol=1e-5)
    assert not white.advantages[~white.response_mask].any()


def test_token_advantages_by_the_recurrence(models: dict[str, Any]) -> None:
    """A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1} with nothing after the last token."""
    moved(models["reference"])
    words = ("ppo.termination.rule=token", "ppo.whiten_advantages=false", "ppo.gamma=0.9", "ppo.lam=0.8")
    rollout = complete(responses_of(PAIRS), config=ppo(*words), kl_coef=0.1, **models)
    for i, length in enumerate(rollout.lengths.tolist()):
        advantage = following = 0.0
        for t in reversed(range(length)):
            value = rollout.values[i, t].item()
            advantage = rollout.rewards[i, t].item() + 0.9 * following - value + 0.9 * 0.8 * advantage
            following = value
            assert rollout.advantages[i, t].item() == pytest.approx(advantage, abs=1e-5)


def test_macro_advantages_by_the_recurrence(models: dict[str, Any]) -> None:
    """The same over macro actions of 2 tokens: their rewards summed, their values averaged."""
    moved(models["reference"])
    words = ("ppo.termination.rule=fixed", "ppo.termination.n=2", "ppo.whiten_advantages=false", "ppo.lam=0.8")
    rollout = complete(responses_of(PAIRS), config=ppo(*words), kl_coef=0.1, **models)
    for i, length in enumerate(rollout.lengths.tolist()):
        advantage = following = 0.0
        assert rollout.macro_ids[i, :length].tolist() == [t // 2 for t in range(length)]
        assert (rollout.macro_ids[i, length:] == -1).all()
        for start in reversed(range(0, length, 2)):
            part = slice(start, min(start + 2, length))
            value = rollout.values[i, part].mean().item()
            advantage = rollout.rewards[i, part].sum().item() + following - value + 0.8 * advantage
            following = value
            assert rollout.advantages[i, part].tolist() == pytest.approx([advantage] * (part.stop - start), abs=1e-5)
            assert rollout.returns[i, part].tolist() == pytest.approx(
                [advantage + value] * (part.stop - start), abs=1e-5
            )


@pytest.mark.parametrize("words", [(), ("ppo.termination.rule=token",), ("ppo.value_weights=position",)])
def test_doubling_the_padding_changes_nothing(models: dict[str, Any], words: tuple[str, ...]) -> None:
    moved(models["reference"])
    tight = complete(responses_of(PAIRS), config=ppo(*words), kl_coef=0.1, **models)
    wide = complete(responses_of(PAIRS, extra=7), config=ppo(*words), kl_coef=0.1, **models)
    for name, one in tensors(tight).items():
        if name.startswith("prompt") or not one.is_floating_point():
            continue
        other = getattr(wide, name)
        if one.dim() == 2:
            assert not other[:, one.shape[1] :].any(), name
            other = other[:, : one.shape[1]]
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5, msg=name)


def test_the_split_into_microbatches_changes_nothing(models: dict[str, Any]) -> None:
    moved(models["reference"])
    whole = complete(responses_of(PAIRS), config=ppo(), kl_coef=0.1, **models)
    for size in (1, 3, 9):
        parts = complete(responses_of(PAIRS), config=ppo(f"ppo.microbatch_size={size}"), kl_coef=0.1, **models)
        for name, one in tensors(whole).items():
            torch.testing.assert_close(getattr(parts, name), one, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, None])
def test_microbatches_hold_every_row_once_and_no_needless_column(size: int | None, extra: int) -> None:
    responses = responses_of(PAIRS, extra=extra)
    seen: list[int] = []
    for rows, part in responses.microbatches(size):
        assert 1 <= len(rows) <= (size or 4)
        seen += rows.tolist()
        assert part.prompt_mask.any(dim=0).all()
        assert part.response_mask.any(dim=0).all()
        for i, row in enumerate(rows.tolist()):
            prompt, response = PAIRS[row]
            assert part.prompt_ids[i][part.prompt_mask[i]].tolist() == prompt
            assert part.response_ids[i][part.response_mask[i]].tolist() == response
            assert part.truncated[i] == responses.truncated[row]
    assert sorted(seen) == [0, 1, 2, 3]


def test_a_rollout_is_cut_by_rows_with_everything_in_it(models: dict[str, Any]) -> None:
    rollout = complete(responses_of(PAIRS), config=ppo(), kl_coef=0.1, **models)
    part = rollout[torch.tensor([2, 0])]
    assert isinstance(part, Rollout)
    for name, value in tensors(rollout).items():
        assert torch.equal(getattr(part, name), value[torch.tensor([2, 0])])
    assert rollout.lengths.tolist() == [3, 5, 1, 4]


def test_nothing_of_a_rollout_carries_a_graph(models: dict[str, Any]) -> None:
    rollout = complete(responses_of(PAIRS), config=ppo(), kl_coef=0.1, **models)
    assert not any(value.requires_grad for value in tensors(rollout).values())
