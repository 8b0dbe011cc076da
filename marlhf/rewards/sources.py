"""Where rewards come from: reward models and the user's own Python functions, with weights."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from marlhf.checkpoint import weights_identity
from marlhf.config import DataConfig, ModelConfig, PPOConfig, RewardSourceConfig, one_of, require
from marlhf.data import encode_prompt, encode_response, left_pad, load_tokenizer, right_pad
from marlhf.engine import freeze
from marlhf.errors import ConfigError, UserError
from marlhf.models import load_reward_model
from marlhf.models.loading import check_fits, check_model, check_same_vocabulary
from marlhf.responses import Responses
from marlhf.rewards.scores import scores_of_responses
from marlhf.user_code import load_function

Row = Mapping[str, Any]
LEVELS = ("response", "token", "macro")


@dataclass(frozen=True)
class Scores:
    """What the sources say of a batch of responses."""

    per_response: Tensor  # [B] weighted sum of the sources that score whole responses
    token_rewards: Tensor | None  # [B, T] weighted sum of those that reward tokens or macro actions
    by_source: Tensor  # [B, S] what each source gives a response in all, without its weight


class RewardSource(Protocol):
    """`score` gives `[B]`, or `[B, T]` where tokens are rewarded one by one."""

    name: str
    weight: float

    @property
    def identity(self) -> str: ...

    def score(
        self, responses: Responses, rows: Sequence[Row], macro_ids: Tensor, microbatch_size: int | None
    ) -> Tensor: ...


class Rewards:
    """All sources of a run."""

    def __init__(self, sources: Sequence[RewardSource]) -> None:
        self.sources = list(sources)

    @property
    def names(self) -> list[str]:
        """The sources' names, in order."""
        return [source.name for source in self.sources]

    @property
    def identity(self) -> dict[str, str]:
        """What must be as it was when a run is resumed: each model's weights, each function's file."""
        return {f"rewards of {source.name}": source.identity for source in self.sources}

    @property
    def critic_start(self) -> Any | None:
        """The first reward model that reads the policy's tokens, which a critic can start from."""
        models = (source for source in self.sources if isinstance(source, ModelReward) and source.reader is None)
        return next((source.model for source in models), None)

    @torch.no_grad()
    def __call__(
        self, responses: Responses, *, rows: Sequence[Row], macro_ids: Tensor, microbatch_size: int | None = None
    ) -> Scores:
        """Scores responses; `rows` are the data rows of their prompts, one per response."""
        per_response = torch.zeros(responses.truncated.shape, device=responses.truncated.device)
        token_rewards = None
        by_source = []
        for source in self.sources:
            found = source.score(responses, rows, macro_ids, microbatch_size)
            if found.dim() == 1:
                per_response = per_response + source.weight * found
            else:
                token_rewards = source.weight * found + (0.0 if token_rewards is None else token_rewards)
            by_source.append(found if found.dim() == 1 else found.sum(dim=1))
        return Scores(per_response, token_rewards, torch.stack(by_source, dim=1))


class ModelReward:
    """A reward model's centred score. With a `reader` the text is encoded again for the model's own tokenizer."""

    def __init__(
        self,
        model: Any,
        *,
        name: str = "model",
        weight: float = 1.0,
        standardize: bool = False,
        reader: "Reader | None" = None,
    ) -> None:
        self.model = model
        self.name = name
        self.weight = weight
        self.standardize = standardize
        self.reader = reader

    @property
    def identity(self) -> str:
        """A hash over the weights."""
        return weights_identity(self.model)

    def score(
        self, responses: Responses, rows: Sequence[Row], macro_ids: Tensor, microbatch_size: int | None
    ) -> Tensor:
        """Centred scores `[B]`, read at each row's last real token."""
        read = responses if self.reader is None else self.reader.read(responses, rows)
        scores = torch.zeros(responses.truncated.shape, device=responses.truncated.device)
        for part_rows, part in read.microbatches(microbatch_size):
            scores[part_rows] = scores_of_responses(self.model, *part.parts(), standardize=self.standardize)
        return scores


class Reader:
    """Encodes prompts and responses again with a reward model's own tokenizer, as its training rows were."""

    def __init__(self, own: Any, policy_tokenizer: Any, data: DataConfig, *, positions: int | None, key: str) -> None:
        self.own = own
        self.policy_tokenizer = policy_tokenizer
        self.data = data
        self.positions = positions
        self.key = key

    def read(self, responses: Responses, rows: Sequence[Row]) -> Responses:
        """The same texts as this tokenizer's ids; a response that stopped ends in this tokenizer's EOS."""
        prompts = [encode_prompt(self.own, row["prompt"], self.data) for row in rows]
        texts = response_texts(responses, self.policy_tokenizer)
        stopped = (~responses.truncated).tolist()
        encoded = [encode_response(self.own, text, stop=stop) for text, stop in zip(texts, stopped, strict=True)]
        longest = max((len(prompt) + len(ids) for prompt, ids in zip(prompts, encoded, strict=True)), default=0)
        if self.positions is not None and longest > self.positions:
            raise UserError(
                f"`{self.key}`: a prompt with its response takes {longest} of its own tokens, but the model has "
                f"{self.positions} positions; lower rollout.max_new_tokens or data.max_prompt_tokens"
            )
        device = responses.truncated.device
        prompt_ids, prompt_mask = (x.to(device) for x in left_pad(prompts, self.own.pad_token_id))
        ids, mask = (x.to(device) for x in right_pad(encoded, self.own.pad_token_id))
        return Responses(prompt_ids, prompt_mask, ids, mask, responses.truncated, mask)


class FunctionReward:
    """A function `f(prompts, responses, rows) -> scores` of the user's own.

    prompts: the rows' prompts, texts or lists of messages. responses: texts without special tokens. rows: the data
    rows, to which `response_ids`, `macro_ids` (one per token, -1 for a token that is no action) and `truncated` are
    added. scores: one number per response; with `per: token` or `per: macro` a list of numbers for each response,
    one per token that the policy wrote, or one per macro action, which is paid on the macro action's last token.
    """

    def __init__(
        self, function: Callable[..., Any], *, where: str, name: str, weight: float, per: str, tokenizer: Any
    ) -> None:
        self.function = function
        self.where = where
        self.name = name
        self.weight = weight
        self.per = per
        self.tokenizer = tokenizer

    @property
    def identity(self) -> str:
        """A hash of the file that the function is in."""
        file = Path(self.where.rpartition(":")[0])
        return f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"

    def score(
        self, responses: Responses, rows: Sequence[Row], macro_ids: Tensor, microbatch_size: int | None
    ) -> Tensor:
        """`[B]`, or `[B, T]` with `per: token` and `per: macro`; UserError naming the function for what is neither."""
        described = []
        for i, row in enumerate(rows):
            length = int(responses.lengths[i])
            described.append(
                {
                    **row,
                    "response_ids": responses.response_ids[i, :length].tolist(),
                    "macro_ids": macro_ids[i, :length].tolist(),
                    "truncated": bool(responses.truncated[i]),
                }
            )
        prompts = [row["prompt"] for row in described]
        try:
            result = self.function(prompts, response_texts(responses, self.tokenizer), described)
        except Exception as error:  # whatever the user's own code raises
            raise UserError(f"the reward function {self.where} raised {type(error).__name__}: {error}") from error
        listed = self._listed(result, len(rows))
        device = responses.truncated.device
        if self.per == "response":
            return torch.tensor([self._number(value, i) for i, value in enumerate(listed)], device=device)
        rewards = torch.zeros(macro_ids.shape, device=device)
        for i, values in enumerate(listed):
            paid = self._paid(macro_ids[i])
            numbers = [self._number(value, i) for value in self._listed(values, paid.numel(), i)]
            rewards[i, paid] = torch.tensor(numbers, device=device)
        return rewards

    def _paid(self, ids: Tensor) -> Tensor:
        """The positions that rewards stand for, in order."""
        actions = (ids >= 0).nonzero().squeeze(1)
        if self.per == "token" or not actions.numel():
            return actions
        following = torch.cat([ids[actions][1:], ids.new_full((1,), -1)])
        return actions[ids[actions] != following]

    def _listed(self, values: Any, count: int, row: int | None = None) -> list[Any]:
        values = values.tolist() if hasattr(values, "tolist") else values
        what = f"{count} scores" if row is None else f"{count} rewards for response {row}, one per {self.per}"
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise UserError(
                f"the reward function {self.where} gave a {type(values).__name__}; it must give {what} in a list"
            )
        if len(values) != count:
            raise UserError(f"the reward function {self.where} gave {len(values)} numbers; it must give {what}")
        return list(values)

    def _number(self, value: Any, row: int) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the reward function {self.where} gave {value!r} for response {row}, which is no number"
            ) from error
        if not math.isfinite(number):
            raise UserError(f"the reward function {self.where} gave {number} for response {row}; scores are finite")
        return number


def response_texts(responses: Responses, tokenizer: Any) -> list[str]:
    """The responses as text, special tokens left out."""
    rows = zip(responses.response_ids, responses.response_mask, strict=True)
    return [tokenizer.decode(ids[mask].tolist(), skip_special_tokens=True) for ids, mask in rows]


def reward_configs(ppo: PPOConfig) -> list[tuple[str, RewardSourceConfig]]:
    """The configured sources by key; without `ppo.rewards` it is `ppo.reward_model` alone."""
    if ppo.rewards:
        return [(f"ppo.rewards[{i}]", source) for i, source in enumerate(ppo.rewards)]
    return [("ppo.reward_model", RewardSourceConfig(**vars(ppo.reward_model)))]


def critic_origin(ppo: PPOConfig) -> ModelConfig:
    """What a critic is loaded from: the first reward model that reads the policy's tokens, else the policy's start."""
    sources = (source for _, source in reward_configs(ppo) if source.kind == "model" and not source.retokenize)
    return next(sources, ppo.model)


def check_rewards(ppo: PPOConfig) -> None:
    """ConfigError for sources that cannot work, before any model is loaded."""
    names = []
    for key, source in reward_configs(ppo):
        one_of(source.kind, ("model", "function"), key=f"{key}.kind")
        one_of(source.per, LEVELS, key=f"{key}.per")
        if not math.isfinite(source.weight):
            raise ConfigError(f"`{key}.weight` is {source.weight}; it must be a finite number")
        if source.kind == "model":
            check_model(source, key=key)
            if source.per != "response":
                raise ConfigError(f"`{key}.per` is {source.per!r}, but a reward model scores whole responses")
        else:
            require(source.file, key=f"{key}.file", hint="a Python file")
            require(source.name, key=f"{key}.name", hint="the function in it")
        names.append(_source_name(key, source))
    if len(set(names)) < len(names):
        raise ConfigError(f"`ppo.rewards`: two sources have one name ({', '.join(names)}); set `name`")


def load_rewards(
    ppo: PPOConfig, *, policy: Any, tokenizer: Any, rows: Sequence[Row], longest: int, device: torch.device
) -> Rewards:
    """Loads every source, and checks that each reward model can read what rollouts will hold.

    `longest` is the longest prompt of `rows` with its response, in the policy's tokens.
    """
    sources: list[RewardSource] = []
    for key, source in reward_configs(ppo):
        if source.kind == "function":
            sources.append(
                FunctionReward(
                    load_function(source.file, source.name, key=key),
                    where=f"{source.file}:{source.name}",
                    name=source.name,
                    weight=source.weight,
                    per=source.per,
                    tokenizer=tokenizer,
                )
            )
            continue
        model = load_reward_model(source, key=key, device=device).eval()
        reader = None
        if source.retokenize:
            own = load_tokenizer(source.path, trust_remote_code=source.trust_remote_code)
            positions = getattr(model.config, "max_position_embeddings", None)
            reader = Reader(own, tokenizer, ppo.data, positions=positions, key=key)
            prompts = max((len(encode_prompt(own, row["prompt"], ppo.data)) for row in rows), default=0)
            check_fits(model, own, key=key, longest=prompts + ppo.rollout.max_new_tokens)
        else:
            check_same_vocabulary(policy, model, tokenizer, source, key=key)
            check_fits(model, tokenizer, key=key, longest=longest)
        if ppo.score_standardize and not hasattr(model.config, "reward_std"):
            raise ConfigError(
                f"`ppo.score_standardize` is set, but {source.path} was saved without the deviation of its "
                "scores (`marlhf reward` saves it)"
            )
        freeze(model.parameters())
        name = _source_name(key, source)
        sources.append(
            ModelReward(model, name=name, weight=source.weight, standardize=ppo.score_standardize, reader=reader)
        )
    return Rewards(sources)


def _source_name(key: str, source: RewardSourceConfig) -> str:
    return source.name or key.removeprefix("ppo.")
