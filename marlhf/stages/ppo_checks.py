"""What a PPO configuration may say, checked and told before any work starts."""

import math

from marlhf.advantages import ESTIMATORS, GROUPED, needs_critic
from marlhf.checkpoint import check_checkpoints
from marlhf.config import PPOConfig, one_of
from marlhf.engine import check_optimizer
from marlhf.errors import ConfigError
from marlhf.models.loading import check_model
from marlhf.progress import console
from marlhf.rewards import KLController, check_rewards
from marlhf.rollout import check_rollout
from marlhf.termination import check_termination

# How rewards and values of one macro action become one number.
SUMS = ("sum", "discounted_sum", "last")
AVERAGES = ("mean", "first", "last", "position", "position_reversed")


def check_ppo(config: PPOConfig, *, preset: str | None = None) -> None:
    """ConfigError for what cannot work, before any model is loaded."""
    check_checkpoints(config.checkpoints, key="ppo.checkpoints")
    check_rollout(config.rollout, key="ppo.rollout", scored=True)
    check_termination(config.termination, key="ppo.termination")
    check_optimizer(config.policy_optimizer, key="ppo.policy_optimizer")
    check_optimizer(config.critic_optimizer, key="ppo.critic_optimizer")
    check_model(config.model, key="ppo.model")
    check_rewards(config)
    check_estimator(config)
    if config.rollout.allow_mismatched_sampling and preset != "released_code":
        raise ConfigError(
            "`ppo.rollout.allow_mismatched_sampling` is set, which makes every ratio wrong; only "
            "`preset: released_code` has it, to reproduce what that code does"
        )
    for name in ("iterations", "ppo_epochs", "minibatches", "eval_every"):
        if getattr(config, name) < 1:
            raise ConfigError(f"`ppo.{name}` is {getattr(config, name)}; it must be at least 1")
    for name in ("eval_rows", "samples_per_eval", "rollout_table"):
        if getattr(config, name) < 0:
            raise ConfigError(f"`ppo.{name}` is {getattr(config, name)}; it must be at least 0")
    responses = config.rollout.batch_size * config.samples_per_prompt
    if config.minibatches > responses:
        raise ConfigError(
            f"`ppo.minibatches` is {config.minibatches}, more than the {responses} responses of a rollout batch"
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
    if config.reward_weights not in SUMS and not config.termination.isolate_last:
        raise ConfigError(
            f"`ppo.reward_weights` is {config.reward_weights!r}, but the score is paid on the last token of a macro "
            f"action, which an average divides or leaves out; use one of {', '.join(SUMS)}, or set "
            "ppo.termination.isolate_last=true, which makes that token a macro action of its own"
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
    for name in ("kl_loss_coef", "entropy_coef", "length_penalty"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"`ppo.{name}` is {value}; it must be at least 0")
    if config.length_penalty_from < 0:
        raise ConfigError(f"`ppo.length_penalty_from` is {config.length_penalty_from}; it must be at least 0")
    if config.max_kl is not None and not config.max_kl > 0:
        raise ConfigError(f"`ppo.max_kl` is {config.max_kl}; it must be above 0, or null for no limit")
    if config.dual_clip is not None and not config.dual_clip > 1 + config.clip_high:
        raise ConfigError(f"`ppo.dual_clip` is {config.dual_clip}; it must be above 1 + clip_high, or null")
    KLController(config.kl_coef, target=config.kl_target, horizon=config.kl_horizon)


def check_estimator(config: PPOConfig) -> None:
    """ConfigError for an estimator whose settings contradict it."""
    one_of(config.estimator, ESTIMATORS, key="ppo.estimator")
    least = 2 if config.estimator in GROUPED else 1
    if config.samples_per_prompt < least:
        why = f": {config.estimator} compares responses to one prompt" if least == 2 else ""
        raise ConfigError(f"`ppo.samples_per_prompt` is {config.samples_per_prompt}; it must be at least {least}{why}")
    if config.estimator in GROUPED and config.gamma != 1:
        raise ConfigError(
            f"`ppo.gamma` is {config.gamma}, but {config.estimator} adds up the rewards of a response undiscounted; "
            "set it to 1"
        )
    if config.bootstrap_truncated and not needs_critic(config):
        raise ConfigError(
            f"`ppo.bootstrap_truncated` takes the critic's value, and `ppo.estimator: {config.estimator}` has no critic"
        )


def describe(config: PPOConfig, *, prompts: int, held_out: int, counts: dict[str, int]) -> None:
    """Prints what was read and the batch arithmetic."""
    batch = config.rollout.batch_size * config.samples_per_prompt
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
    if config.rollout.allow_mismatched_sampling:
        console.print(
            "  warning: responses are sampled from another law than the one that is scored, so no ratio is right; "
            "sampling_kl in the metrics is how far apart the two are",
            highlight=False,
            markup=False,
        )
