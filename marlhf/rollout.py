"""Rollouts: sample responses, score them, cut them into macro actions, and compute their advantages.

Everything is aligned to response tokens: entry t of every `[B, T]` tensor speaks of the same token t.
Prompts are left-padded to P tokens and responses right-padded to T.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, TopKLogitsWarper, TopPLogitsWarper

from marlhf.advantages import estimate, whitens
from marlhf.config import PPOConfig, RolloutConfig
from marlhf.data import left_pad, position_ids
from marlhf.errors import ConfigError, DivergedError
from marlhf.models import response_logprobs, response_values, sequence_scores
from marlhf.responses import Responses
from marlhf.rewards import Rewards, penalise_length, penalise_missing_stop
from marlhf.sampling import buckets, external_responses, load_engine
from marlhf.termination import Seen, macro_ids
from marlhf_kernels import kl_penalized_rewards, masked_whiten


@dataclass
class Rollout(Responses):
    """Responses with everything that an update needs, and the KL-penalised rewards they came from."""

    scores: Tensor  # [B] all that rewards add up to, before clipping and before the KL penalty
    source_scores: Tensor  # [B, S] what each source of rewards gave, without its weight
    logprobs: Tensor  # [B, T] under the policy that sampled, by the training forward
    ref_logprobs: Tensor  # [B, T] under the reference
    entropy: Tensor  # [B, T]
    values: Tensor  # [B, T]
    macro_ids: Tensor  # [B, T] int32
    rewards: Tensor  # [B, T]
    kl: Tensor  # [B, T] by the chosen estimator
    advantages: Tensor  # [B, T] after whitening
    returns: Tensor  # [B, T]

    def _trimmed(self, name: str, skipped: int, length: int) -> Tensor:
        return self.source_scores if name == "source_scores" else super()._trimmed(name, skipped, length)


def check_rollout(config: RolloutConfig, *, key: str, scored: bool) -> None:
    """ConfigError for settings that cannot work, before any model is loaded.

    `scored` rollouts are trained on: the law that is sampled must be the law whose log-probabilities are
    used, so temperature must be above 0 and top-k and top-p must be off.
    """
    for name in ("batch_size", "max_new_tokens"):
        if getattr(config, name) < 1:
            raise ConfigError(f"`{key}.{name}` is {getattr(config, name)}; it must be at least 1")
    load_engine(config.engine, key=f"{key}.engine")
    if config.generation_batch_size is not None and config.generation_batch_size < 1:
        raise ConfigError(f"`{key}.generation_batch_size` must be at least 1, or null for all at once")
    if scored and not 0 < config.temperature < math.inf:
        raise ConfigError(
            f"`{key}.temperature` is {config.temperature}; PPO samples from and scores softmax(logits / temperature), "
            "so it must be above 0"
        )
    if not 0 <= config.temperature < math.inf:
        raise ConfigError(
            f"`{key}.temperature` is {config.temperature}; it must be above 0, or 0 for the likeliest token"
        )
    if scored and not config.allow_mismatched_sampling and (config.top_k != 0 or config.top_p != 1.0):
        raise ConfigError(
            f"`{key}`: top_k is {config.top_k} and top_p is {config.top_p}, which sample another distribution "
            "than the one PPO scores; set top_k=0 and top_p=1.0"
        )
    if config.top_k < 0:
        raise ConfigError(f"`{key}.top_k` is {config.top_k}; it must be at least 1, or 0 for all tokens")
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"`{key}.top_p` is {config.top_p}; it must be above 0 and at most 1")


def scored_temperature(config: RolloutConfig) -> float:
    """The temperature of the law whose log-probabilities are computed: the sampled one, unless they may differ."""
    return 1.0 if config.allow_mismatched_sampling else config.temperature


def stop_ids(tokenizer: Any, config: RolloutConfig) -> list[int]:
    """The token ids that end a response."""
    if config.stop_token_ids is not None:
        outside = [token for token in config.stop_token_ids if not 0 <= token < len(tokenizer)]
        if outside or not config.stop_token_ids:
            raise ConfigError(
                f"`rollout.stop_token_ids` is {list(config.stop_token_ids)}; write token ids below the vocabulary's "
                f"{len(tokenizer)}, or null for the tokenizer's end-of-sequence token"
            )
        return list(config.stop_token_ids)
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end-of-sequence token; set rollout.stop_token_ids")
    return [tokenizer.eos_token_id]


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: RolloutConfig,
    *,
    stops: Sequence[int],
    pad_id: int,
    seed: int,
    rows: Sequence[Mapping[str, Any]] = (),
) -> Responses:
    """Samples one response per prompt, with transformers' generator or with the engine that `config` names.

    `rows` are the prompts' data rows, which an engine of the user's own may look at. Every sampling setting is
    given explicitly, so a model's saved generation defaults (top-k 50, repetition penalties) have no say.
    Temperature 0 takes the most likely token. The result depends on `seed` and on the model and prompts alone; the
    global random state is left as it was.
    """
    engine = load_engine(config.engine, key="rollout.engine")
    if engine is not None:
        return external_responses(engine, model, prompts, config, stops=stops, pad_id=pad_id, seed=seed, rows=rows)
    device = next(model.parameters()).device
    sampling = (
        {"do_sample": True, "temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        if config.temperature > 0
        else {"do_sample": False}
    )
    settings = GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        eos_token_id=list(stops),
        pad_token_id=pad_id,
        bos_token_id=None,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        use_cache=True,
        **sampling,
    )
    saved_defaults = model.generation_config
    parts = buckets(prompts, config.generation_batch_size)
    generated: list[Tensor] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            model.generation_config = settings
            for part in parts:
                ids, mask = left_pad([list(prompts[i]) for i in part], pad_id)
                output = _sample(model, ids.to(device), mask.to(device).long(), settings)
                generated.append(output[:, ids.shape[1] :])
        finally:
            model.generation_config = saved_defaults
    width = max(output.shape[1] for output in generated)
    ids = torch.full((len(prompts), width), pad_id, device=device)
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    for part, output in zip(parts, generated, strict=True):
        ids[part, : output.shape[1]] = output
        lengths[part] = output.shape[1]
    prompt_ids, prompt_mask = left_pad([list(prompt) for prompt in prompts], pad_id)
    return cut_after_stop(prompt_ids.to(device), prompt_mask.to(device), ids, lengths, stops=stops, pad_id=pad_id)


def _sample(model: Any, ids: Tensor, mask: Tensor, settings: GenerationConfig) -> Tensor:
    try:
        return model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise DivergedError(
            "the policy's probabilities are not finite: its weights diverged. Lower the learning rate"
        ) from error


def cut_after_stop(
    prompt_ids: Tensor, prompt_mask: Tensor, ids: Tensor, lengths: Tensor, *, stops: Sequence[int], pad_id: int
) -> Responses:
    """Cuts each row of `ids [B, T]` after its first stop token, which is kept.

    `lengths [B]` says how many of a row's tokens were generated; what stands behind is padding. A row
    without a stop token is `truncated` and keeps all its tokens.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)
    generated = positions < lengths[:, None]
    is_stop = torch.isin(ids, torch.tensor(list(stops), device=ids.device)) & generated
    stops_before = is_stop.cumsum(dim=1) - is_stop.long()
    mask = generated & (stops_before == 0)
    width = max(1, int(mask.sum(dim=1).max())) if mask.numel() else ids.shape[1]
    mask = mask[:, :width]
    return Responses(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=ids[:, :width].masked_fill(~mask, pad_id),
        response_mask=mask,
        truncated=~is_stop.any(dim=1),
        action_mask=mask,
    )


@torch.no_grad()
def complete(
    responses: Responses,
    *,
    policy: Any,
    reference: Any,
    critic: Any | None,
    rewards: Rewards,
    config: PPOConfig,
    kl_coef: float,
    rows: Sequence[Mapping[str, Any]] = (),
    cuts: torch.Generator | None = None,
) -> Rollout:
    """Scores responses, recomputes log-probabilities, and computes macro actions, advantages and returns.

    `rows` are the data rows of the prompts, one per response, for rewards that read them; `cuts` is where the
    `randomized` rule draws from. Without a critic, values and returns are 0.
    """
    temperature = scored_temperature(config.rollout)
    logprobs, ref_logprobs, entropy, values = torch.zeros(
        4, *responses.response_mask.shape, device=responses.truncated.device
    )
    ends = (
        torch.zeros(responses.truncated.shape, device=responses.truncated.device)
        if config.bootstrap_truncated
        else None
    )
    for part_rows, part in responses.microbatches(config.microbatch_size):
        columns = slice(part.response_mask.shape[1])
        logprobs[part_rows, columns], part_entropy = response_logprobs(
            policy, *part.parts(), actions=part.action_mask, temperature=temperature, return_entropy=True
        )
        assert part_entropy is not None
        entropy[part_rows, columns] = part_entropy
        ref_logprobs[part_rows, columns], _ = response_logprobs(
            reference, *part.parts(), actions=part.action_mask, temperature=temperature
        )
        if critic is not None:
            values[part_rows, columns] = response_values(critic, *part.parts()).masked_fill(~part.action_mask, 0.0)
        if critic is not None and ends is not None:
            ends[part_rows] = end_values(critic, part)
    ids = macro_ids(
        config.termination,
        Seen(responses.action_mask, responses.response_mask, ref_logprobs, cuts or torch.Generator()),
    )
    found = rewards(responses, rows=rows, macro_ids=ids, microbatch_size=config.microbatch_size)
    scores = penalise_missing_stop(
        found.per_response, responses.truncated, penalty=config.missing_stop_penalty, mode=config.missing_stop_mode
    )
    lengths = responses.action_mask.sum(dim=1)
    scores = penalise_length(scores, lengths, penalty=config.length_penalty, start=config.length_penalty_from)
    if config.score_whiten:
        scores = masked_whiten(scores, lengths > 0)
    token_rewards, kl = kl_penalized_rewards(
        scores,
        logprobs,
        ref_logprobs,
        ids,
        kl_coef=torch.tensor(kl_coef),
        kl_estimator=config.kl_estimator,
        score_clip=config.score_clip,
    )
    if found.token_rewards is not None:
        token_rewards = token_rewards + found.token_rewards
        scores = scores + found.token_rewards.sum(dim=1)
    advantages, returns = estimate(token_rewards, values, ids, config=config, bootstrap_values=ends)
    if whitens(config):
        advantages = masked_whiten(advantages, ids >= 0)
    return Rollout(
        **{entry.name: getattr(responses, entry.name) for entry in fields(responses)},
        scores=scores,
        source_scores=found.by_source,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
        values=values,
        macro_ids=ids,
        rewards=token_rewards,
        kl=kl,
        advantages=advantages,
        returns=returns,
    )


def end_values(critic: Any, responses: Responses) -> Tensor:
    """Values `[B]` after the last token of truncated responses; 0 where a response stopped."""
    ids = torch.cat([responses.prompt_ids, responses.response_ids], dim=1)
    mask = torch.cat([responses.prompt_mask, responses.response_mask], dim=1)
    return sequence_scores(critic, ids, mask, centred=False).masked_fill(~responses.truncated, 0.0)


@torch.no_grad()
def sampling_kl(policy: Any, rollout: Rollout, config: RolloutConfig, *, size: int | None) -> float:
    """Mean over tokens of the KL, in nats, of the law that was sampled (temperature, top-k, top-p) from the scored."""
    total = torch.zeros((), device=rollout.scores.device)
    for _, part in rollout.microbatches(size):
        ids = torch.cat([part.prompt_ids, part.response_ids], dim=1)
        mask = torch.cat([part.prompt_mask, part.response_mask], dim=1)
        logits = policy(input_ids=ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=False).logits
        first = part.prompt_ids.shape[1] - 1
        logits = logits[:, first : first + part.response_ids.shape[1]][part.action_mask].float()
        sampled = logits / config.temperature
        if config.top_k:
            sampled = TopKLogitsWarper(config.top_k)(ids, sampled)
        if config.top_p < 1:
            sampled = TopPLogitsWarper(config.top_p)(ids, sampled)
        law = sampled.log_softmax(-1)
        scored = (logits / scored_temperature(config)).log_softmax(-1)
        total += (law.exp() * (law - scored).masked_fill(law == -math.inf, 0.0)).sum()
    return (total / rollout.action_mask.sum().clamp(min=1)).item()
