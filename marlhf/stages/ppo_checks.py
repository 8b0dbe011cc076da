"""What a PPO configuration may say, checked and told before any work starts."""

import math

from marlhf.checkpoint import check_checkpoints
from marlhf.config import PPOConfig, one_of
from marlhf.engine import check_optimizer
from marlhf.errors import ConfigError
from marlhf.models.loading import check_model
from marlhf.progress import console
from marlhf.rewards import KLController
from marlhf.rollout import check_rollout
from marlhf.termination import check_termination

# How rewards and values of one macro action become one number.
SUMS = ("sum", "discounted_sum", "last")
AVERAGES = ("mean", "first", "last", "position", "position_reversed")


def check_ppo(config: PPOConfig) -> None:
    """ConfigError for what cannot work, before any model is loaded."""
    check_checkpoints(config.checkpoints, key="ppo.checkpoints")
    check_rollout(config.rollout, key="ppo.rollout", scored=True)
    check_termination(config.termination, key="ppo.termination")
    check_optimizer(config.policy_optimizer, key="ppo.policy_optimizer")
    check_optimizer(config.critic_optimizer, key="ppo.critic_optimizer")
    check_model(config.model, key="ppo.model")
    check_model(config.reward_model, key="ppo.reward_model")
    for name in ("iterations", "ppo_epochs", "minibatches", "eval_every"):
        if getattr(config, name) < 1:
            raise ConfigError(f"`ppo.{name}` is {getattr(config, name)}; it must be at least 1")
    for name in ("eval_rows", "samples_per_eval", "rollout_table"):
        if getattr(config, name) < 0:
            raise ConfigError(f"`ppo.{name}` is {getattr(config, name)}; it must be at least 0")
    if config.minibatches > config.rollout.batch_size:
        raise ConfigError(
            f"`ppo.minibatches` is {config.minibatches}, more than the {config.rollout.batch_size} prompts of a "
            "rollout batch"
        )
    if config.microbatch_size is not None and config.microbatch_size < 1:
        raise ConfigError("`ppo.microbatch_size` must be at least 1, or null for the whole minibatch")
    one_of(config.kl_estimator, ("k1", "k2", "k3"), key="ppo.kl_estimator")
    one_of(config.ratio_level, ("token", "macro", "macro_mean"), key="ppo.ratio_level")
    one_of(config.value_level, ("token", "macro"), key="ppo.value_level")
    one_of(config.discount_per, ("macro", "token"), key="ppo.discount_per")
    one_of(config.missing_stop_mode, ("subtract", "set"), key="ppo.missing_stop_mode")
    one_of(config.critic_head, ("reward", "zero"), key="ppo.critic_head")
    if config.normalize_by is not None:
        one_of(config.normalize_by, ("tokens", "macros", "sequences"), key="ppo.normalize_by")
    one_of(config.value_weights, AVERAGES, key="ppo.value_weights")
    one_of(config.reward_weights, (*SUMS, *AVERAGES), key="ppo.reward_weights")
    if config.reward_weights not in SUMS:
        raise ConfigError(
            f"`ppo.reward_weights` is {config.reward_weights!r}, but the score is paid on the last token of a macro "
            f"action, which an average divides or leaves out; use one of {', '.join(SUMS)}"
        )
    for name in ("gamma", "lam"):
        if not 0 <= getattr(config, name) <= 1:
            raise ConfigError(f"`ppo.{name}` is {getattr(config, name)}; it must be from 0 to 1")
    for name in ("clip_low", "clip_high", "value_clip"):
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ConfigError(f"`ppo.{name}` is {value}; it must be at least 0")
    if config.score_clip is not None and not config.score_clip > 0:
        raise ConfigError(f"`ppo.score_clip` is {config.score_clip}; it must be above 0, or null for no clipping")
    if config.missing_stop_penalty is not None and not 0 <= config.missing_stop_penalty < math.inf:
        raise ConfigError(
            f"`ppo.missing_stop_penalty` is {config.missing_stop_penalty}; it must be at least 0, or null for none"
        )
    if config.dual_clip is not None and not config.dual_clip > 1 + config.clip_high:
        raise ConfigError(f"`ppo.dual_clip` is {config.dual_clip}; it must be above 1 + clip_high, or null")
    KLController(config.kl_coef, target=config.kl_target, horizon=config.kl_horizon)


def describe(config: PPOConfig, *, prompts: int, held_out: int, counts: dict[str, int]) -> None:
    """Prints what was read and the batch arithmetic."""
    batch = config.rollout.batch_size
    minibatch = -(-batch // config.minibatches)
    micro = min(minibatch, config.microbatch_size or minibatch)
    console.print(
        f"ppo: {prompts:,} prompts, {held_out:,} held out; {config.iterations} iterations of {batch} responses, each "
        f"{config.ppo_epochs * config.minibatches} optimiser steps of {minibatch} responses, in backward passes of "
        f"{micro}",
        highlight=False,
        markup=False,
    )
    for what, count in counts.items():
        if count:
            console.print(f"  {what.replace('_', ' ')}: {count:,}", highlight=False, markup=False)
