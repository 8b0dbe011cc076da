"""PPO and macro-action PPO: one loop, which the termination rule turns into either.

With `termination.rule: token` every token is an action (Schulman et al., arXiv 1707.06347); with `fixed` the
values, advantages and returns are those of macro actions of n tokens (Chai et al., arXiv 2410.02743).
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from marlhf.checkpoint import Checkpoints, find_start, rows_identity, weights_identity
from marlhf.config import Config, PPOConfig
from marlhf.data import encode_rows, epochs, load_rows, load_tokenizer
from marlhf.engine import Optimizer, freeze, next_seed, prepare, rollout_generator
from marlhf.errors import ConfigError, DataError
from marlhf.models import check_head, load_critic, load_policy, load_reward_model, response_logprobs, response_values
from marlhf.models.loading import check_fits, check_same_vocabulary, save_model
from marlhf.progress import Clock, loops
from marlhf.rewards import KLController
from marlhf.rollout import Rollout, complete, generate, stop_ids
from marlhf.run_folder import RunFolder
from marlhf.stages.evaluate import evaluate_policy, print_rollout
from marlhf.stages.ppo_checks import check_ppo, describe
from marlhf.stages.ppo_metrics import UpdateMetrics, level_unit, rollout_metrics, unit_count
from marlhf_kernels import macro_policy_loss, macro_value_loss


def run_ppo(config: Config) -> Path:
    """Trains `ppo.model` against `ppo.reward_model` and returns the folder of the trained policy."""
    ppo = config.ppo
    check_ppo(ppo)
    start = find_start(config, "ppo")
    device = prepare(config)
    tokenizer = load_tokenizer(ppo.model.path, trust_remote_code=ppo.model.trust_remote_code)
    stops, pad_id = stop_ids(tokenizer, ppo.rollout), tokenizer.pad_token_id
    train_rows, validation_rows = load_rows(ppo.data, fields=("prompt",))
    train, counts = encode_rows(train_rows, tokenizer, ppo.data, responses=())
    validation, _ = encode_rows(validation_rows[: ppo.eval_rows], tokenizer, ppo.data, responses=())
    if len(train) < ppo.rollout.batch_size:
        dropped = counts["dropped_long_prompt"]
        why = f" ({dropped} were longer than ppo.data.max_prompt_tokens and dropped)" if dropped else ""
        raise DataError(
            f"ppo: {len(train)} prompts{why} are fewer than ppo.rollout.batch_size={ppo.rollout.batch_size} "
            f"({len(validation)} more are held out); lower the batch size"
        )
    policy = load_policy(start.model(ppo.model, "policy"), key="ppo.model", device=device)
    check_head(policy, key="ppo.model")
    longest = max(len(row.prompt_ids) for row in train + validation) + ppo.rollout.max_new_tokens
    check_fits(policy, tokenizer, key="ppo.model", longest=longest)
    reference = load_policy(ppo.model, key="ppo.model", device=device).eval()
    reward_model = load_reward_model(ppo.reward_model, key="ppo.reward_model", device=device).eval()
    check_same_vocabulary(policy, reward_model, tokenizer, ppo.reward_model, key="ppo.reward_model")
    check_fits(reward_model, tokenizer, key="ppo.reward_model", longest=longest)
    if ppo.score_standardize and not hasattr(reward_model.config, "reward_std"):
        raise ConfigError(
            f"`ppo.score_standardize` is set, but {ppo.reward_model.path} was saved without the deviation of its "
            "scores (`marlhf reward` saves it)"
        )
    if start.checkpoint is None:
        critic = load_critic(reward_model, head=ppo.critic_head)
    else:
        critic = load_reward_model(start.model(ppo.reward_model, "critic"), key="ppo.run_folder", device=device)
    freeze(reference.parameters())
    freeze(reward_model.parameters())
    describe(ppo, prompts=len(train), held_out=len(validation), counts=counts)

    kl = KLController(ppo.kl_coef, target=ppo.kl_target, horizon=ppo.kl_horizon)
    seeds = rollout_generator(config.seed)
    order = torch.Generator().manual_seed(config.seed)
    steps = ppo.iterations * ppo.ppo_epochs * ppo.minibatches
    policy_optimizer = Optimizer(policy, ppo.policy_optimizer, total_steps=steps)
    critic_optimizer = Optimizer(critic, ppo.critic_optimizer, total_steps=steps)
    batches = prompt_batches(len(train), ppo, seed=config.seed)
    models = {"policy": policy, "reference": reference, "critic": critic, "reward_model": reward_model}

    with (
        RunFolder(
            ppo.run_folder,
            config=config,
            stage="ppo",
            total_steps=ppo.iterations,
            key="ppo.run_folder",
            back_to=start.run,
        ) as run,
        loops() as shown,
    ):
        checkpoints = Checkpoints(
            run,
            ppo.checkpoints,
            tokenizer=tokenizer,
            models={"policy": policy, "critic": critic},
            state={"policy_optimizer": policy_optimizer, "critic_optimizer": critic_optimizer, "kl": kl},
            generators={"sampling": seeds, "order": order},
            identity={
                "prompts": rows_identity(train),
                "reference weights": weights_identity(reference),
                "reward model weights": weights_identity(reward_model),
            },
        )
        checkpoints.restore(start)
        if validation and start.step == 0:
            run.log(0, evaluate_policy(run, validation, tokenizer, config, step=0, **models))
        loop = shown.start(f"PPO, termination {ppo.termination.rule}", ppo.iterations, "iterations", done=start.step)
        for iteration, indices in enumerate(islice(batches, start.step, None), start=start.step + 1):
            clock = Clock(device)

            # 1. Sample one response per prompt.
            prompts = [train[i].prompt_ids for i in indices]
            responses = generate(policy.eval(), prompts, ppo.rollout, stops=stops, pad_id=pad_id, seed=next_seed(seeds))
            clock.lap("generate")

            # 2. Score, recompute log-probabilities, cut into macro actions, compute advantages and returns.
            rollout = complete(responses, config=ppo, kl_coef=kl.coefficient, **models)
            clock.lap("score")

            # 3. Update policy and critic: every minibatch is one optimiser step of each.
            metrics = rollout_metrics(rollout, kl.coefficient)
            keep = partial(run.skipped, iteration)
            metrics.update(
                update(rollout, policy.train(), critic.train(), policy_optimizer, critic_optimizer, ppo, order, keep)
            )
            clock.lap("update")

            # 4. Move the KL coefficient, evaluate now and then, log.
            kl.update(metrics["kl"], len(prompts))
            if validation and (iteration % ppo.eval_every == 0 or iteration == ppo.iterations):
                metrics.update(evaluate_policy(run, validation, tokenizer, config, step=iteration, **models))
                clock.lap("evaluate")
            metrics.update(clock.metrics(tokens=int(rollout.lengths.sum())))
            run.log(iteration, metrics)
            checkpoints.after(iteration, metrics)
            print_rollout(rollout, tokenizer, rows=ppo.rollout_table)
            loop.advance(f"score {metrics['score']:.2f}, KL {metrics['kl']:.2f}")

        # 5. The trained policy, as transformers alone can load it, and the critic beside it.
        save_model(critic, tokenizer, run.path / "critic")
        save_model(policy, tokenizer, run.final)
    return run.final


def update(
    rollout: Rollout,
    policy: Any,
    critic: Any,
    policy_optimizer: Optimizer,
    critic_optimizer: Optimizer,
    config: PPOConfig,
    order: torch.Generator,
    keep_skipped: Callable[[dict[str, object]], None] | None = None,
) -> dict[str, float]:
    """`ppo_epochs * minibatches` optimiser steps of policy and critic over one rollout; returns their metrics.

    Losses are divided by the count of the whole minibatch, so its split into microbatches changes nothing.
    `keep_skipped` is given each minibatch whose step one of the optimisers skipped.
    """
    policy_unit, value_unit = level_unit(config.ratio_level), level_unit(config.value_level)
    metrics = UpdateMetrics(steps=config.ppo_epochs * config.minibatches)
    rates = {
        "policy_learning_rate": policy_optimizer.learning_rate,
        "critic_learning_rate": critic_optimizer.learning_rate,
    }
    rows = rollout.scores.shape[0]
    for _ in range(config.ppo_epochs):
        for minibatch in (
            torch.randperm(rows, generator=order).to(rollout.scores.device).tensor_split(config.minibatches)
        ):
            ids = rollout.macro_ids[minibatch]
            policy_count = unit_count(ids, config.normalize_by or policy_unit)
            value_count = unit_count(ids, value_unit)
            for _, batch in rollout[minibatch].microbatches(config.microbatch_size):
                logprobs, _ = response_logprobs(policy, *batch.parts(), temperature=config.rollout.temperature)
                policy_loss = macro_policy_loss(
                    logprobs,
                    batch.logprobs,
                    batch.advantages,
                    batch.macro_ids,
                    clip_low=config.clip_low,
                    clip_high=config.clip_high,
                    dual_clip=config.dual_clip,
                    ratio_level=config.ratio_level,
                    normalize_by=config.normalize_by,
                    normalizer=policy_count,
                )
                policy_loss.loss.backward()
                value_loss = macro_value_loss(
                    response_values(critic, *batch.parts()),
                    batch.values,
                    batch.returns,
                    batch.macro_ids,
                    clip=config.value_clip,
                    level=config.value_level,
                    value_weights=config.value_weights,
                    normalizer=value_count,
                )
                value_loss.loss.backward()
                metrics.per_step(policy_loss=policy_loss.loss, value_loss=value_loss.loss)
                metrics.mean(
                    unit_count(batch.macro_ids, policy_unit),
                    policy_clip_fraction=policy_loss.clip_fraction,
                    ratio_mean=policy_loss.ratio_mean,
                )
                metrics.mean(unit_count(batch.macro_ids, value_unit), value_clip_fraction=value_loss.clip_fraction)
                metrics.mean(unit_count(batch.macro_ids, "tokens"), approx_kl=policy_loss.approx_kl)
                metrics.largest(ratio_max=policy_loss.ratio_max)
            skipped = policy_optimizer.skipped + critic_optimizer.skipped
            metrics.per_step(policy_grad_norm=policy_optimizer.step(), critic_grad_norm=critic_optimizer.step())
            if policy_optimizer.skipped + critic_optimizer.skipped > skipped and keep_skipped is not None:
                keep_skipped(rollout[minibatch].as_lists())
    skips = {
        "policy_skipped_steps": float(policy_optimizer.skipped),
        "critic_skipped_steps": float(critic_optimizer.skipped),
    }
    return {**metrics.result(), **rates, **skips}


def prompt_batches(rows: int, config: PPOConfig, *, seed: int) -> Iterator[list[int]]:
    """Full batches of prompt indices, a fresh permutation of the prompts each epoch."""
    given = 0
    # An epoch has at least one full batch and at most one partial one.
    for indices in epochs(rows, config.rollout.batch_size, seed=seed, max_steps=2 * config.iterations):
        if given == config.iterations:
            return
        if len(indices) == config.rollout.batch_size:
            given += 1
            yield indices
