"""The reward model: a scalar head trained so that chosen responses score above rejected ones."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from marlhf.checkpoint import Checkpoints, check_checkpoints, find_start, rows_identity
from marlhf.config import Config, RewardConfig, one_of
from marlhf.data import (
    EncodedRow,
    PairBatch,
    drop_equal_pairs,
    encode_rows,
    epochs,
    load_rows,
    load_tokenizer,
    pair_batch,
)
from marlhf.engine import Optimizer, check_optimizer, prepare
from marlhf.errors import ConfigError
from marlhf.models import last_positions, load_reward_model, position_scores, save_model, sequence_scores
from marlhf.models.loading import check_fits, check_model
from marlhf.progress import loops
from marlhf.run_folder import RunFolder
from marlhf.stages.batches import check_batches, describe_batches, longest, microbatches, step_count


def pair_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Bradley-Terry loss `-log sigmoid(chosen - rejected)`, summed over pairs; finite at any difference."""
    return -logsigmoid(chosen - rejected).sum()


def divergence_loss(chosen: Tensor, rejected: Tensor, compared: Tensor) -> Tensor:
    """Mean over each pair's `compared [B, L]` positions of `-log sigmoid(chosen - rejected)`, summed over pairs.

    chosen, rejected: scores `[B, L]` at every position. The loss of DeepSpeed-Chat's reward model, which the released
    code of MA-RLHF trains with.
    """
    losses = -logsigmoid(chosen - rejected).masked_fill(~compared, 0.0)
    return (losses.sum(dim=1) / compared.sum(dim=1).clamp(min=1)).sum()


def compared_positions(batch: PairBatch) -> Tensor:
    """True `[B, L]` from the first position in which a pair differs to the end of the longer one."""
    (chosen, rejected), (mask, other_mask) = batch.input_ids.chunk(2), batch.attention_mask.chunk(2)
    differ = (chosen != rejected) | (mask != other_mask)
    return (differ.cumsum(dim=1) > 0) & (mask | other_mask)


def run_reward(config: Config) -> Path:
    """Trains a reward model on `reward.data` and returns its folder.

    The mean and deviation of the scores of chosen responses are saved in the model's configuration as
    `reward_mean` and `reward_std`; PPO subtracts the mean, so that a reference response scores 0.
    """
    reward = config.reward
    check_batches(reward, key="reward")
    check_optimizer(reward.optimizer, key="reward.optimizer")
    one_of(reward.loss, ("last", "divergence"), key="reward.loss")
    if reward.center_coef < 0:
        raise ConfigError(f"`reward.center_coef` is {reward.center_coef}; it must not be negative")
    check_checkpoints(reward.checkpoints, key="reward.checkpoints")
    start = find_start(config, "reward")
    check_model(reward.model, key="reward.model")
    device = prepare(config)
    tokenizer = load_tokenizer(reward.model.path, trust_remote_code=reward.model.trust_remote_code)
    train_rows, validation_rows = load_rows(reward.data, fields=("prompt", "chosen", "rejected"))
    train, counts = encode_rows(train_rows, tokenizer, reward.data, responses=("chosen", "rejected"))
    validation, _ = encode_rows(
        validation_rows[: reward.eval_rows], tokenizer, reward.data, responses=("chosen", "rejected")
    )
    train, counts["dropped_equal_pair"] = drop_equal_pairs(train)
    validation, _ = drop_equal_pairs(validation)
    model = load_reward_model(
        start.model(reward.model, "model"),
        key="reward.model",
        device=device,
        fresh_head=start.checkpoint is None,
        seed=config.seed,
    )
    check_fits(model, tokenizer, key="reward.model", longest=longest(train, validation))
    total = step_count(len(train), reward)
    describe_batches("reward", rows=len(train), held_out=len(validation), counts=counts, stage=reward, total=total)

    with (
        RunFolder(
            reward.run_folder,
            config=config,
            stage="reward",
            total_steps=total,
            key="reward.run_folder",
            back_to=start.run,
        ) as run,
        loops() as shown,
    ):
        optimizer = Optimizer(model, reward.optimizer, total_steps=total)
        checkpoints = Checkpoints(
            run,
            reward.checkpoints,
            tokenizer=tokenizer,
            models={"model": model},
            state={"optimizer": optimizer},
            identity={"training rows": rows_identity(train)},
        )
        checkpoints.restore(start)
        loop = shown.start("Reward model", total, done=start.step)
        order = epochs(
            len(train), reward.batch_size, seed=config.seed, max_steps=reward.max_steps, epochs=reward.epochs
        )
        for step, indices in enumerate(islice(order, start.step, None), start=start.step + 1):
            # 1. One optimiser step over the batch's pairs.
            rows = [train[i] for i in indices]
            skipped = optimizer.skipped
            metrics = train_step(model, optimizer, rows, reward, tokenizer.pad_token_id)
            metrics["skipped_steps"] = optimizer.skipped
            if optimizer.skipped > skipped:
                run.skipped(step, {"rows": [row.row for row in rows]})

            # 2. Log, with accuracy on held-out pairs now and then.
            if validation and (step % reward.eval_every == 0 or step == total):
                metrics.update(evaluate(model, validation, reward, tokenizer.pad_token_id))
            run.log(step, metrics)
            checkpoints.after(step, metrics)
            held_out = f", held-out {metrics['eval/accuracy']:.2f}" if "eval/accuracy" in metrics else ""
            loop.advance(f"training loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.2f}{held_out}")

        # 3. Centre the scores on reference responses, and save both with the weights.
        centre(model, validation or train, reward, tokenizer.pad_token_id)
        save_model(model, tokenizer, run.final)
    return run.final


def train_step(
    model: Any, optimizer: Optimizer, rows: list[EncodedRow], config: RewardConfig, pad_id: int
) -> dict[str, float]:
    """One optimiser step over the mean loss of the batch's pairs, whatever the microbatch size.

    The loss that is returned is the pair loss without the centring term.
    """
    total_loss, total_right = 0.0, 0.0
    for part in microbatches(rows, config.microbatch_size):
        loss, chosen, rejected = scored_pairs(model, part, config, pad_id)
        centring = config.center_coef * (chosen + rejected).square().sum()
        ((loss + centring) / len(rows)).backward()
        total_loss += loss.item()
        total_right += float((chosen > rejected).sum())
    learning_rate = optimizer.learning_rate
    grad_norm = optimizer.step()
    return {
        "loss": total_loss / len(rows),
        "accuracy": total_right / len(rows),
        "learning_rate": learning_rate,
        "grad_norm": grad_norm.item(),
    }


def scored_pairs(
    model: Any, rows: Sequence[EncodedRow], config: RewardConfig, pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs' loss, summed, and the uncentred scores `[B]` of the chosen and of the rejected responses."""
    if config.loss == "last":
        chosen, rejected = pair_scores(model, rows, config, pad_id)
        return pair_loss(chosen, rejected), chosen, rejected
    device = next(model.parameters()).device
    batch = pair_batch(rows, pad_id=pad_id, see_prompt=config.see_prompt)
    batch = PairBatch(batch.input_ids.to(device), batch.attention_mask.to(device))
    scores = position_scores(model, batch.input_ids, batch.attention_mask)
    last = scores.gather(1, last_positions(batch.attention_mask)[:, None]).squeeze(1)
    chosen, rejected = scores.chunk(2)
    loss = divergence_loss(chosen, rejected, compared_positions(batch))
    return loss, last[: len(rows)], last[len(rows) :]


def pair_scores(model: Any, rows: Sequence[EncodedRow], config: RewardConfig, pad_id: int) -> tuple[Tensor, Tensor]:
    """Uncentred scores `[B]` of the chosen and of the rejected responses."""
    device = next(model.parameters()).device
    batch = pair_batch(rows, pad_id=pad_id, see_prompt=config.see_prompt)
    scores = sequence_scores(model, batch.input_ids.to(device), batch.attention_mask.to(device), centred=False)
    return scores[: len(rows)], scores[len(rows) :]


@torch.no_grad()
def evaluate(model: Any, rows: list[EncodedRow], config: RewardConfig, pad_id: int) -> dict[str, float]:
    """Loss and accuracy on held-out pairs, accuracy also per kind of pair where rows name one."""
    loss = 0.0
    right: dict[str, list[float]] = {}
    for part in microbatches(rows, config.microbatch_size or config.batch_size):
        pair_losses, chosen, rejected = scored_pairs(model, part, config, pad_id)
        loss += pair_losses.item()
        for row, correct in zip(part, (chosen > rejected).tolist(), strict=True):
            right.setdefault("", []).append(float(correct))
            if config.kind_field in row.row:
                right.setdefault(f"/{row.row[config.kind_field]}", []).append(float(correct))
    accuracies = {f"eval/accuracy{kind}": sum(values) / len(values) for kind, values in right.items()}
    return {"eval/loss": loss / len(rows), **accuracies}


@torch.no_grad()
def centre(model: Any, rows: list[EncodedRow], config: RewardConfig, pad_id: int) -> None:
    """Stores mean and deviation of the chosen responses' scores in the model's configuration."""
    scores = torch.cat(
        [
            pair_scores(model, part, config, pad_id)[0]
            for part in microbatches(rows, config.microbatch_size or config.batch_size)
        ]
    )
    model.config.reward_mean = scores.mean().item()
    model.config.reward_std = max(scores.std(correction=0).item(), 1e-6)
