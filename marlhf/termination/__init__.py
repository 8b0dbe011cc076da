"""Termination rules: where one macro action ends and the next begins, by the name that a config uses."""

from collections.abc import Callable

from torch import Tensor

from marlhf.config import TerminationConfig, one_of
from marlhf.errors import ConfigError
from marlhf_kernels import segmentation

RULES: dict[str, Callable[[TerminationConfig, Tensor], Tensor]] = {
    "fixed": lambda config, mask: segmentation.fixed_ngram(mask, config.n),
    "token": lambda config, mask: segmentation.token(mask),
    "whole": lambda config, mask: segmentation.whole(mask),
}


def check_termination(config: TerminationConfig, *, key: str) -> None:
    """ConfigError for an unknown rule, naming the nearest known one, or an n that cannot be."""
    one_of(config.rule, list(RULES), key=f"{key}.rule")
    if config.rule == "fixed" and config.n < 1:
        raise ConfigError(f"`{key}.n` is {config.n}; a macro action has at least 1 token")


def macro_ids(config: TerminationConfig, response_mask: Tensor) -> Tensor:
    """Macro-action index `[B, T]`, int32, of every response token; -1 where the mask is False."""
    return RULES[config.rule](config, response_mask)
