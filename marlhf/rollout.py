"""Rollouts: sample responses, score them, cut them into macro actions, and compute their advantages.

Everything is aligned to response tokens: entry t of every `[B, T]` tensor speaks of the same token t.
Prompts are left-padded to P tokens and responses right-padded to T.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig

from marlhf.config import PPOConfig, RolloutConfig
from marlhf.data import left_pad
from marlhf.errors import ConfigError, DivergedError
from marlhf.models import response_logprobs, response_values
from marlhf.rewards import penalise_missing_stop, scores_of_responses
from marlhf.termination import macro_ids
from marlhf_kernels import masked_whiten, rollout_advantages

Batch = TypeVar("Batch", bound="Responses")


@dataclass
class Responses:
    """Sampled responses, stop token included where there is one."""

    prompt_ids: Tensor  # [B, P] int64
    prompt_mask: Tensor  # [B, P] bool
    response_ids: Tensor  # [B, T] int64
    response_mask: Tensor  # [B, T] bool, from lengths
    truncated: Tensor  # [B] bool: no stop token was seen

    @property
    def lengths(self) -> Tensor:
        """Tokens in each response, `[B]`."""
        return self.response_mask.sum(dim=1)

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the models read: prompt ids and mask, response ids and mask."""
        return self.prompt_ids, self.prompt_mask, self.response_ids, self.response_mask

    def __getitem__(self: Batch, rows: Tensor | slice) -> Batch:
        return type(self)(**{entry.name: getattr(self, entry.name)[rows] for entry in fields(self)})

    def as_lists(self) -> dict[str, object]:
        """Every tensor as nested lists, for a person to look at."""
        return {entry.name: getattr(self, entry.name).tolist() for entry in fields(self)}

    def microbatches(self: Batch, size: int | None) -> Iterator[tuple[Tensor, Batch]]:
        """Row numbers and rows in parts of at most `size`, without the columns that are padding in a whole part.

        Rows of like length go together, so that little padding is left; None: all rows in one part. Lengths
        are read on the host once.
        """
        prompts, responses = self.prompt_mask.sum(dim=1), self.lengths
        order = (prompts + responses).argsort(stable=True)
        for rows in order.split(size or max(1, order.shape[0])):
            part = self[rows]
            if rows.numel():
                width = part.prompt_mask.shape[1] - int(prompts[rows].max())
                length = max(1, int(responses[rows].max()))
                part = type(part)(**{entry.name: part._trimmed(entry.name, width, length) for entry in fields(part)})
            yield rows, part

    def _trimmed(self, name: str, skipped: int, length: int) -> Tensor:
        column: Tensor = getattr(self, name)
        if column.dim() == 1:
            return column
        return column[:, skipped:] if name in ("prompt_ids", "prompt_mask") else column[:, :length]


@dataclass
class Rollout(Responses):
    """Responses with everything that an update needs, and the KL-penalised rewards they came from."""

    scores: Tensor  # [B] centred, before clipping and before the KL penalty
    logprobs: Tensor  # [B, T] under the policy that sampled, by the training forward
    ref_logprobs: Tensor  # [B, T] under the reference
    entropy: Tensor  # [B, T]
    values: Tensor  # [B, T]
    macro_ids: Tensor  # [B, T] int32
    rewards: Tensor  # [B, T]
    kl: Tensor  # [B, T] by the chosen estimator
    advantages: Tensor  # [B, T] after whitening
    returns: Tensor  # [B, T]


def check_rollout(config: RolloutConfig, *, key: str, scored: bool) -> None:
    """ConfigError for settings that cannot work, before any model is loaded.

    `scored` rollouts are trained on: the law that is sampled must be the law whose log-probabilities are
    used, so temperature must be above 0 and top-k and top-p must be off.
    """
    for name in ("batch_size", "max_new_tokens"):
        if getattr(config, name) < 1:
            raise ConfigError(f"`{key}.{name}` is {getattr(config, name)}; it must be at least 1")
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
    if scored and (config.top_k != 0 or config.top_p != 1.0):
        raise ConfigError(
            f"`{key}`: top_k is {config.top_k} and top_p is {config.top_p}, which sample another distribution "
            "than the one PPO scores; set top_k=0 and top_p=1.0"
        )
    if config.top_k < 0:
        raise ConfigError(f"`{key}.top_k` is {config.top_k}; it must be at least 1, or 0 for all tokens")
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"`{key}.top_p` is {config.top_p}; it must be above 0 and at most 1")


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
) -> Responses:
    """Samples one response per prompt with transformers' generator.

    Every sampling setting is given explicitly, so a model's saved generation defaults (top-k 50, repetition
    penalties) have no say. Temperature 0 takes the most likely token. The result depends on `seed` and on
    the model and prompts alone; the global random state is left as it was.
    """
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
    size = config.generation_batch_size or len(prompts)
    generated: list[Tensor] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            model.generation_config = settings
            for start in range(0, len(prompts), size):
                ids, mask = left_pad([list(prompt) for prompt in prompts[start : start + size]], pad_id)
                output = _sample(model, ids.to(device), mask.to(device).long(), settings)
                generated.append(output[:, ids.shape[1] :])
        finally:
            model.generation_config = saved_defaults
    width = max(part.shape[1] for part in generated)
    ids = torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=pad_id) for part in generated])
    prompt_ids, prompt_mask = left_pad([list(prompt) for prompt in prompts], pad_id)
    lengths = torch.cat([torch.full((part.shape[0],), part.shape[1]) for part in generated]).to(device)
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
    )


@torch.no_grad()
def complete(
    responses: Responses,
    *,
    policy: Any,
    reference: Any,
    critic: Any,
    reward_model: Any,
    config: PPOConfig,
    kl_coef: float,
) -> Rollout:
    """Scores responses, recomputes log-probabilities, and computes macro actions, advantages and returns."""
    temperature = config.rollout.temperature
    logprobs, ref_logprobs, entropy, values = torch.zeros(
        4, *responses.response_mask.shape, device=responses.truncated.device
    )
    scores = torch.zeros(responses.truncated.shape, device=responses.truncated.device)
    for rows, part in responses.microbatches(config.microbatch_size):
        columns = slice(part.response_mask.shape[1])
        logprobs[rows, columns], part_entropy = response_logprobs(
            policy, *part.parts(), temperature=temperature, return_entropy=True
        )
        assert part_entropy is not None
        entropy[rows, columns] = part_entropy
        ref_logprobs[rows, columns], _ = response_logprobs(reference, *part.parts(), temperature=temperature)
        values[rows, columns] = response_values(critic, *part.parts())
        scores[rows] = scores_of_responses(reward_model, *part.parts(), standardize=config.score_standardize)
    scores = penalise_missing_stop(
        scores, responses.truncated, penalty=config.missing_stop_penalty, mode=config.missing_stop_mode
    )
    ids = macro_ids(config.termination, responses.response_mask)
    result = rollout_advantages(
        scores,
        logprobs,
        ref_logprobs,
        values,
        ids,
        kl_coef=torch.tensor(kl_coef),
        kl_estimator=config.kl_estimator,
        score_clip=config.score_clip,
        gamma=config.gamma,
        lam=config.lam,
        reward_weights=config.reward_weights,
        value_weights=config.value_weights,
        discount_per=config.discount_per,
    )
    advantages = result.advantages
    if config.whiten_advantages:
        advantages = masked_whiten(advantages, responses.response_mask)
    return Rollout(
        **{entry.name: getattr(responses, entry.name) for entry in fields(responses)},
        scores=scores,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
        values=values,
        macro_ids=ids,
        rewards=result.rewards,
        kl=result.kl,
        advantages=advantages,
        returns=result.returns,
    )
