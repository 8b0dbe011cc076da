"""PPO and macro-action PPO: one loop, which the termination rule turns into either.

With `termination.rule: token` every token is an action (Schulman et al., arXiv 1707.06347); with `fixed` the
values, advantages and returns are those of macro actions of n tokens (Chai et al., arXiv 2410.02743). An estimator
without a critic leaves out everything that concerns one.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from marlhf.advantages import needs_critic
from marlhf.checkpoint import Checkpoints, Start, find_start, rows_identity, weights_identity
from marlhf.config import Config, PPOConfig
from marlhf.data import encode_rows, epochs, load_rows, load_tokenizer
from marlhf.engine import Optimizer, freeze, next_seed, prepare, rollout_generator
from marlhf.errors import DataError
from marlhf.models import check_head, load_critic, load_policy, load_reward_model, response_logprobs, response_values
from marlhf.models.loading import check_fits, save_model
from marlhf.progress import Clock, Profile, console, loops
from marlhf.rewards import KLController, Rewards, critic_origin, k2_loss, load_rewards
from marlhf.rollout import Rollout, complete, generate, sampling_kl, scored_temperature, stop_ids
from marlhf.run_folder import RunFolder
from marlhf.sampling import check_recorded
from marlhf.stages.evaluate import evaluate_policy, print_rollout
from marlhf.stages.ppo_checks import check_ppo, describe
from marlhf.stages.ppo_metrics import UpdateMetrics, level_unit, rollout_metrics, unit_count
from marlhf_kernels import macro_policy_loss, macro_value_loss


def run_ppo(config: Config) -> Path:
    """Trains `ppo.model` for `ppo.rewards` and returns the folder of the trained policy."""
    ppo = config.ppo
    check_ppo(ppo, preset=config.preset)
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
    freeze(reference.parameters())
    check_recorded([row.row for row in train], config=ppo.rollout, vocabulary=len(tokenizer), stops=stops)
    rows = [row.row for row in train + validation]
    rewards = load_rewards(ppo, policy=policy, tokenizer=tokenizer, rows=rows, longest=longest, device=device)
    critic = start_critic(rewards, start, config, device)
    describe(ppo, prompts=len(train), held_out=len(validation), counts=counts)

    kl = KLController(ppo.kl_coef, target=ppo.kl_target, horizon=ppo.kl_horizon)
    seeds = rollout_generator(config.seed)
    cuts = rollout_generator(config.seed + 1)
    order = torch.Generator().manual_seed(config.seed)
    steps = ppo.iterations * ppo.ppo_epochs * ppo.minibatches
    optimizers = {"policy": Optimizer(policy, ppo.policy_optimizer, total_steps=steps)}
    if critic is not None:
        optimizers["critic"] = Optimizer(critic, ppo.critic_optimizer, total_steps=steps)
    batches = prompt_batches(len(train), ppo, seed=config.seed)
    models = {"policy": policy, "reference": reference, "critic": critic, "rewards": rewards}

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
            models={"policy": policy, **({} if critic is None else {"critic": critic})},
            state={"kl": kl, **{f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()}},
            generators={"sampling": seeds, "order": order, "cuts": cuts},
            identity={
                "prompts": rows_identity(train),
                "reference weights": weights_identity(reference),
                **rewards.identity,
            },
        )
        checkpoints.restore(start)
        if validation and start.step == 0:
            run.log(0, evaluate_policy(run, validation, tokenizer, config, step=0, **models))
        loop = shown.start(f"PPO, termination {ppo.termination.rule}", ppo.iterations, "iterations", done=start.step)
        profile = Profile()
        for iteration, indices in enumerate(islice(batches, start.step, None), start=start.step + 1):
            clock = Clock(device)

            # 1. Sample the responses, those to one prompt side by side.
            prompts = [train[i].prompt_ids for i in indices for _ in range(ppo.samples_per_prompt)]
            rows = [train[i].row for i in indices for _ in range(ppo.samples_per_prompt)]
            responses = generate(
                policy.eval(), prompts, ppo.rollout, stops=stops, pad_id=pad_id, seed=next_seed(seeds), rows=rows
            )
            clock.lap("generate")

            # 2. Score, recompute log-probabilities, cut into macro actions, compute advantages and returns.
            rollout = complete(responses, config=ppo, kl_coef=kl.coefficient, rows=rows, cuts=cuts, **models)
            clock.lap("score")

            # 3. Update policy and critic: every minibatch is one optimiser step of each.
            metrics = rollout_metrics(rollout, kl.coefficient, sources=rewards.names)
            if ppo.rollout.allow_mismatched_sampling:
                metrics["sampling_kl"] = sampling_kl(policy, rollout, ppo.rollout, size=ppo.microbatch_size)
            keep = partial(run.skipped, iteration)
            metrics.update(update(rollout, policy, critic, optimizers, ppo, order, keep))
            clock.lap("update")

            # 4. Move the KL coefficient, evaluate now and then, log.
            kl.update(metrics["kl"], len(prompts))
            if validation and (iteration % ppo.eval_every == 0 or iteration == ppo.iterations):
                metrics.update(evaluate_policy(run, validation, tokenizer, config, step=iteration, **models))
                clock.lap("evaluate")
            metrics.update(clock.metrics(tokens=int(rollout.lengths.sum())))
            run.log(iteration, metrics)
            checkpoints.after(iteration, metrics)
            profile.add(metrics)
            print_rollout(rollout, tokenizer, rows=ppo.rollout_table)
            loop.advance(f"score {metrics['score']:.2f}, KL {metrics['kl']:.2f}")

        console.print(f"ppo: {profile}", highlight=False, markup=False)

        # 5. The trained policy, as transformers alone can load it, and the critic beside it.
        if critic is not None:
            save_model(critic, tokenizer, run.path / "critic")
        save_model(policy, tokenizer, run.final)
    return run.final


def start_critic(rewards: Rewards, start: Start, config: Config, device: torch.device) -> Any | None:
    """A copy of the reward model, or of the policy under a fresh head where no reward model reads its tokens; on
    resume the checkpoint's. None for an estimator without a critic."""
    ppo = config.ppo
    if not needs_critic(ppo):
        return None
    if start.checkpoint is not None:
        return load_reward_model(start.model(critic_origin(ppo), "critic"), key="ppo.run_folder", device=device)
    first = rewards.critic_start
    if first is None:
        first = load_reward_model(ppo.model, key="ppo.model", device=device, fresh_head=True, seed=config.seed)
    return load_critic(first, head=ppo.critic_head)


def update(
    rollout: Rollout,
    policy: Any,
    critic: Any | None,
    optimizers: Mapping[str, Optimizer],
    config: PPOConfig,
    order: torch.Generator,
    keep_skipped: Callable[[dict[str, object]], None] | None = None,
) -> dict[str, float]:
    """`ppo_epochs * minibatches` optimiser steps over one rollout, fewer past `max_kl`; returns their metrics.

    Losses are divided by the count of the whole minibatch, so its split into microbatches changes nothing.
    `optimizers` are the policy's and, where there is a critic, the critic's. `keep_skipped` is given each minibatch
    whose step one of them skipped.
    """
    policy_unit, value_unit = level_unit(config.ratio_level), level_unit(config.value_level)
    metrics = UpdateMetrics()
    rates = {f"{name}_learning_rate": optimizer.learning_rate for name, optimizer in optimizers.items()}
    policy.train()
    if critic is not None:
        critic.train()
    for minibatch in minibatches(rollout, config, order):
        ids = rollout.macro_ids[minibatch]
        tokens = unit_count(ids, "tokens")
        policy_count = unit_count(ids, config.normalize_by or policy_unit)
        value_count = unit_count(ids, value_unit)
        found = []
        for _, batch in rollout[minibatch].microbatches(config.microbatch_size):
            logprobs, entropy = response_logprobs(
                policy,
                *batch.parts(),
                actions=batch.action_mask,
                temperature=scored_temperature(config.rollout),
                return_entropy=config.entropy_coef > 0,
            )
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
            losses = {"policy_loss": policy_loss.loss}
            loss = policy_loss.loss
            if config.kl_loss_coef > 0:
                losses["kl_loss"] = k2_loss(logprobs, batch.ref_logprobs, batch.action_mask, normalizer=tokens)
                loss = loss + config.kl_loss_coef * losses["kl_loss"]
            if entropy is not None:
                loss = loss - config.entropy_coef * entropy.sum() / tokens.clamp(min=1)
            loss.backward()
            value_loss = None
            if critic is not None:
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
                losses["value_loss"] = value_loss.loss
            found.append((batch.macro_ids, losses, policy_loss, value_loss))

        if config.max_kl is not None and mean_kl(found, tokens) > config.max_kl:
            for optimizer in optimizers.values():
                optimizer.adamw.zero_grad(set_to_none=True)
            break
        for ids, losses, policy_loss, value_loss in found:
            metrics.per_step(**losses)
            metrics.mean(
                unit_count(ids, policy_unit),
                policy_clip_fraction=policy_loss.clip_fraction,
                ratio_mean=policy_loss.ratio_mean,
            )
            metrics.mean(unit_count(ids, "tokens"), approx_kl=policy_loss.approx_kl)
            metrics.largest(ratio_max=policy_loss.ratio_max)
            if value_loss is not None:
                metrics.mean(unit_count(ids, value_unit), value_clip_fraction=value_loss.clip_fraction)
        skipped = skipped_steps(optimizers)
        metrics.per_step(**{f"{name}_grad_norm": optimizer.step() for name, optimizer in optimizers.items()})
        metrics.steps += 1
        if skipped_steps(optimizers) != skipped and keep_skipped is not None:
            keep_skipped(rollout[minibatch].as_lists())
    if config.max_kl is not None:
        rates["optimizer_steps"] = float(metrics.steps)
    return {**metrics.result(), **rates, **skipped_steps(optimizers)}


def skipped_steps(optimizers: Mapping[str, Optimizer]) -> dict[str, float]:
    """How many steps each optimiser skipped in the whole run, by metric."""
    return {f"{name}_skipped_steps": float(optimizer.skipped) for name, optimizer in optimizers.items()}


def minibatches(rollout: Rollout, config: PPOConfig, order: torch.Generator) -> Iterator[torch.Tensor]:
    """The rows of each optimiser step: a fresh permutation of the rollout each epoch."""
    rows = rollout.scores.shape[0]
    for _ in range(config.ppo_epochs):
        yield from torch.randperm(rows, generator=order).to(rollout.scores.device).tensor_split(config.minibatches)


def mean_kl(found: list[Any], tokens: torch.Tensor) -> float:
    """The mean over a minibatch's tokens of its microbatches' `approx_kl`."""
    parts = [policy_loss.approx_kl * unit_count(ids, "tokens") for ids, _, policy_loss, _ in found]
    return (torch.stack(parts).sum() / tokens.clamp(min=1)).item()


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
