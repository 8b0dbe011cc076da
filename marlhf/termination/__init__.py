"""Termination rules: where one macro action ends and the next begins, by the name that a config uses."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from marlhf.config import TerminationConfig, one_of
from marlhf.errors import ConfigError
from marlhf_kernels import segmentation


@dataclass(frozen=True)
class Seen:
    """What a rule may look at."""

    action_mask: Tensor  # [B, T] bool: tokens that the policy wrote
    response_mask: Tensor  # [B, T] bool: all tokens of the response
    ref_logprobs: Tensor  # [B, T]
    generator: torch.Generator


RULES: dict[str, Callable[[TerminationConfig, Seen], Tensor]] = {
    "fixed": lambda config, seen: segmentation.fixed_ngram(seen.action_mask, config.n),
    "token": lambda config, seen: segmentation.token(seen.action_mask),
    "whole": lambda config, seen: segmentation.whole(seen.action_mask),
    "randomized": lambda config, seen: segmentation.randomized_ngram(
        seen.action_mask, lengths=list(config.lengths), repeats=config.repeats, generator=seen.generator
    ),
    "perplexity": lambda config, seen: segmentation.perplexity(
        seen.action_mask, seen.ref_logprobs, rule=config.perplexity_rule
    ),
    "turn": lambda config, seen: segmentation.from_ends(seen.action_mask, turn_ends(seen)),
}


def check_termination(config: TerminationConfig, *, key: str) -> None:
    """ConfigError for an unknown rule, naming the nearest known one, or numbers that cannot be."""
    one_of(config.rule, list(RULES), key=f"{key}.rule")
    if config.rule == "fixed" and config.n < 1:
        raise ConfigError(f"`{key}.n` is {config.n}; a macro action has at least 1 token")
    if config.rule == "randomized":
        if not config.lengths or min(config.lengths) < 1:
            raise ConfigError(f"`{key}.lengths` is {list(config.lengths)}; write one or more lengths of at least 1")
        if config.repeats < 1:
            raise ConfigError(f"`{key}.repeats` is {config.repeats}; it must be at least 1")
    one_of(config.perplexity_rule, ("running_mean", "neighbour"), key=f"{key}.perplexity_rule")


def turn_ends(seen: Seen) -> Tensor:
    """Flags `[B, T]` on tokens of the policy that a token of someone else follows."""
    others = seen.response_mask & ~seen.action_mask
    return seen.action_mask & torch.nn.functional.pad(others[:, 1:], (0, 1))


def macro_ids(config: TerminationConfig, seen: Seen) -> Tensor:
    """Macro-action index `[B, T]`, int32, of every token that the policy wrote; -1 elsewhere.

    `randomized` takes one shuffle per row from `seen.generator`; no other rule touches it.
    """
    ids = RULES[config.rule](config, seen)
    return segmentation.isolate_last(ids) if config.isolate_last else ids
