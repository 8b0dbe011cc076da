"""Supervised fine-tuning: the policy's start and, frozen, PPO's reference."""

from itertools import islice
from pathlib import Path
from typing import Any

import torch

from marlhf.checkpoint import Checkpoints, check_checkpoints, find_start, rows_identity
from marlhf.config import Config, SFTConfig
from marlhf.data import EncodedRow, encode_rows, epochs, load_rows, load_tokenizer, sft_batch
from marlhf.engine import Optimizer, check_optimizer, prepare
from marlhf.models import check_head, load_policy, save_model, token_nll
from marlhf.models.loading import check_fits, check_model
from marlhf.progress import loops
from marlhf.run_folder import RunFolder
from marlhf.stages.batches import check_batches, describe_batches, longest, microbatches, step_count


def run_sft(config: Config) -> Path:
    """Fine-tunes `sft.model` on `sft.data` and returns the folder of the trained model.

    The loss is the mean negative log-likelihood of the trained tokens over the whole optimiser step,
    whatever the microbatch size.
    """
    sft = config.sft
    check_batches(sft, key="sft")
    check_optimizer(sft.optimizer, key="sft.optimizer")
    check_checkpoints(sft.checkpoints, key="sft.checkpoints")
    start = find_start(config, "sft")
    check_model(sft.model, key="sft.model")
    device = prepare(config)
    tokenizer = load_tokenizer(sft.model.path, trust_remote_code=sft.model.trust_remote_code)
    train_rows, validation_rows = load_rows(sft.data, fields=("prompt", "response"))
    train, counts = encode_rows(train_rows, tokenizer, sft.data, responses=("response",))
    validation, _ = encode_rows(validation_rows[: sft.eval_rows], tokenizer, sft.data, responses=("response",))
    model = load_policy(start.model(sft.model, "model"), key="sft.model", device=device, dropout=True)
    check_head(model.eval(), key="sft.model")
    check_fits(model, tokenizer, key="sft.model", longest=longest(train, validation))
    total = step_count(len(train), sft)
    describe_batches("sft", rows=len(train), held_out=len(validation), counts=counts, stage=sft, total=total)

    with (
        RunFolder(
            sft.run_folder,
            config=config,
            stage="sft",
            total_steps=total,
            key="sft.run_folder",
            back_to=start.run,
        ) as run,
        loops() as shown,
    ):
        optimizer = Optimizer(model, sft.optimizer, total_steps=total)
        checkpoints = Checkpoints(
            run,
            sft.checkpoints,
            tokenizer=tokenizer,
            models={"model": model},
            state={"optimizer": optimizer},
            identity={"training rows": rows_identity(train)},
        )
        checkpoints.restore(start)
        loop = shown.start("SFT", total, done=start.step)
        order = epochs(len(train), sft.batch_size, seed=config.seed, max_steps=sft.max_steps, epochs=sft.epochs)
        for step, indices in enumerate(islice(order, start.step, None), start=start.step + 1):
            # 1. One optimiser step over the batch: every microbatch is divided by the batch's token count.
            model.train()
            rows = [train[i] for i in indices]
            skipped = optimizer.skipped
            loss, rate = train_step(model, optimizer, rows, sft, tokenizer.pad_token_id)
            if optimizer.skipped > skipped:
                run.skipped(step, {"rows": [row.row for row in rows]})

            # 2. Log, and look at the held-out rows now and then.
            metrics = {"loss": loss, "learning_rate": rate[0], "grad_norm": rate[1], "skipped_steps": optimizer.skipped}
            if validation and (step % sft.eval_every == 0 or step == total):
                metrics["eval/loss"] = evaluate(model, validation, sft, tokenizer.pad_token_id)
            run.log(step, metrics)
            checkpoints.after(step, metrics)
            held_out = f", held-out {metrics['eval/loss']:.3f}" if "eval/loss" in metrics else ""
            loop.advance(f"training loss {loss:.3f}{held_out}")

        # 3. The weights, as transformers alone can load them.
        save_model(model, tokenizer, run.final)
    return run.final


def train_step(
    model: Any, optimizer: Optimizer, rows: list[EncodedRow], config: SFTConfig, pad_id: int
) -> tuple[float, tuple[float, float]]:
    """One optimiser step; returns the mean loss per token, and the learning rate and gradient norm of the step."""
    device = next(model.parameters()).device
    batches = [
        sft_batch(part, pad_id=pad_id, train_on_prompt=config.train_on_prompt)
        for part in microbatches(rows, config.microbatch_size)
    ]
    tokens = max(1, sum(int((batch.labels[:, 1:] >= 0).sum()) for batch in batches))
    total = torch.zeros((), device=device)
    for batch in batches:
        nll, _ = token_nll(model, batch.input_ids.to(device), batch.attention_mask.to(device), batch.labels.to(device))
        (nll / tokens).backward()
        total += nll.detach()
    learning_rate = optimizer.learning_rate
    grad_norm = optimizer.step()
    return (total / tokens).item(), (learning_rate, grad_norm.item())


@torch.no_grad()
def evaluate(model: Any, rows: list[EncodedRow], config: SFTConfig, pad_id: int) -> float:
    """Mean negative log-likelihood per token of held-out rows."""
    model.eval()
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    for part in microbatches(rows, config.microbatch_size or config.batch_size):
        batch = sft_batch(part, pad_id=pad_id, train_on_prompt=config.train_on_prompt)
        nll, count = token_nll(
            model, batch.input_ids.to(device), batch.attention_mask.to(device), batch.labels.to(device)
        )
        total, tokens = total + nll.item(), tokens + count
    return total / max(1, tokens)
