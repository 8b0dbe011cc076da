"""Measuring a policy on held-out prompts, and showing what it wrote."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from marlhf.config import Config, RolloutConfig, TerminationConfig
from marlhf.data import EncodedRow, encode_rows, load_rows, load_tokenizer
from marlhf.engine import prepare
from marlhf.errors import DataError
from marlhf.files import write_json, write_text_atomically
from marlhf.models import load_policy, load_reward_model, response_logprobs
from marlhf.models.loading import check_fits, check_model, check_same_vocabulary
from marlhf.progress import console
from marlhf.responses import Responses
from marlhf.rewards import ModelReward, Rewards
from marlhf.rollout import Rollout, check_rollout, generate, scored_temperature, stop_ids
from marlhf.run_folder import RunFolder
from marlhf.termination import Seen, macro_ids

# Evaluations sample with this seed, whatever the run's seed, so that policies are compared on equal noise.
EVALUATION_SEED = 20_240_101
ROLLOUT_TABLE_WIDTH = 110


@dataclass
class Evaluation:
    """One sampled response per held-out prompt, and its numbers."""

    responses: Responses
    scores: Tensor  # [B] centred, and standardised where asked for
    kl: Tensor  # [B] sum over tokens of logp - reference logp
    logprobs: Tensor  # [B, T]
    ref_logprobs: Tensor  # [B, T]
    macro_ids: Tensor  # [B, T]

    def summary(self) -> dict[str, float]:
        """Means over responses."""
        return {
            "score": self.scores.mean().item(),
            "kl": self.kl.mean().item(),
            "response_length": self.responses.lengths.float().mean().item(),
            "stopped_share": 1.0 - self.responses.truncated.float().mean().item(),
        }


def own_samples(rollout: RolloutConfig) -> RolloutConfig:
    """Recorded responses would say nothing of a model: where training reads them, it is sampled with `hf`."""
    return replace(rollout, engine="hf") if rollout.engine == "jsonl" else rollout


@torch.no_grad()
def measure(
    rows: list[EncodedRow],
    *,
    policy: Any,
    reference: Any,
    rewards: Rewards,
    rollout: RolloutConfig,
    stops: list[int],
    pad_id: int,
    termination: TerminationConfig | None = None,
) -> Evaluation:
    """Samples one response per row and computes score and KL to the reference.

    Without a termination rule the response is one macro action.
    """
    rollout = own_samples(rollout)
    data = [row.row for row in rows]
    responses = generate(
        policy.eval(),
        [row.prompt_ids for row in rows],
        rollout,
        stops=stops,
        pad_id=pad_id,
        seed=EVALUATION_SEED,
        rows=data,
    )
    logprobs, ref_logprobs = torch.zeros(2, *responses.response_mask.shape, device=responses.truncated.device)
    temperature = scored_temperature(rollout) or 1.0
    for part_rows, part in responses.microbatches(rollout.batch_size):
        columns = slice(part.response_mask.shape[1])
        for model, column in ((policy, logprobs), (reference, ref_logprobs)):
            column[part_rows, columns], _ = response_logprobs(
                model, *part.parts(), actions=part.action_mask, temperature=temperature
            )
    cuts = torch.Generator().manual_seed(EVALUATION_SEED)
    ids = macro_ids(
        termination or TerminationConfig("whole"),
        Seen(responses.action_mask, responses.response_mask, ref_logprobs, cuts),
    )
    found = rewards(responses, rows=data, macro_ids=ids, microbatch_size=rollout.batch_size)
    scores = found.per_response
    if found.token_rewards is not None:
        scores = scores + found.token_rewards.sum(dim=1)
    return Evaluation(responses, scores, (logprobs - ref_logprobs).sum(dim=1), logprobs, ref_logprobs, ids)


def evaluate_policy(
    run: RunFolder,
    rows: list[EncodedRow],
    tokenizer: Any,
    config: Config,
    *,
    step: int,
    policy: Any,
    reference: Any,
    critic: Any | None,
    rewards: Rewards,
) -> dict[str, float]:
    """Evaluates during PPO: writes per-response numbers and samples, returns means named `eval/...`."""
    ppo = config.ppo
    found = measure(
        rows,
        policy=policy,
        reference=reference,
        rewards=rewards,
        rollout=ppo.rollout,
        stops=stop_ids(tokenizer, ppo.rollout),
        pad_id=tokenizer.pad_token_id,
        termination=ppo.termination,
    )
    run.evaluation(
        {
            "step": step,
            "scores": found.scores.tolist(),
            "kl": found.kl.tolist(),
            "lengths": found.responses.lengths.tolist(),
            "macro_lengths": macro_length_counts(found.macro_ids),
        }
    )
    for i in range(min(ppo.samples_per_eval, len(rows))):
        run.sample(sample_record(found, tokenizer, rows[i], i, step=step))
    return {f"eval/{name}": value for name, value in found.summary().items()}


def macro_length_counts(ids: Tensor) -> dict[str, int]:
    """How many macro actions there are of each length."""
    counts: dict[str, int] = {}
    for row in ids:
        real = row[row >= 0]
        if real.numel():
            for length in torch.bincount(real.long()).tolist():
                counts[str(length)] = counts.get(str(length), 0) + 1
    return dict(sorted(counts.items(), key=lambda entry: int(entry[0])))


def sample_record(found: Evaluation, tokenizer: Any, row: EncodedRow, index: int, *, step: int) -> dict[str, object]:
    """One line of `samples.jsonl`."""
    mask = found.responses.response_mask[index]
    tokens = found.responses.response_ids[index][mask].tolist()
    reference = row.row.get("response")
    return {
        "step": step,
        "prompt": row.row["prompt"] if isinstance(row.row["prompt"], str) else json.dumps(row.row["prompt"]),
        "response": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": token_texts(tokenizer, tokens),
        "macro_ids": found.macro_ids[index][mask].tolist(),
        "score": found.scores[index].item(),
        "kl": found.kl[index].item(),
        "reference": reference if isinstance(reference, str) else None,
    }


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; of a character made of several tokens, the last one shows it.

    Decoding token by token would lose leading spaces under some tokenizers.
    """
    texts: list[str] = []
    shown = ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        whole = text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}")
        texts.append(text[len(shown) :] if whole else "")
        shown = text if whole else shown
    return texts


def print_rollout(rollout: Rollout, tokenizer: Any, *, rows: int) -> None:
    """Prints the first `rows` responses token by token with everything that was computed for them."""
    for i in range(min(rows, rollout.response_ids.shape[0])):
        table = Table(
            title=f"response {i}, score {rollout.scores[i].item():.3f}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for name in ("token", "macro", "logp", "ref logp", "KL", "reward", "value", "advantage", "return"):
            table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
        columns = (
            rollout.logprobs,
            rollout.ref_logprobs,
            rollout.kl,
            rollout.rewards,
            rollout.values,
            rollout.advantages,
            rollout.returns,
        )
        length = int(rollout.lengths[i])
        for t, text in enumerate(token_texts(tokenizer, rollout.response_ids[i, :length].tolist())):
            table.add_row(
                escape(ascii(text)[1:-1]),
                str(rollout.macro_ids[i, t].item()),
                *(f"{column[i, t].item():.3f}" for column in columns),
            )
        # Numbers are never cut, however narrow a pipe says it is.
        console.print(table, width=max(console.width, ROLLOUT_TABLE_WIDTH), crop=False, soft_wrap=True)


def run_generate(config: Config) -> Path:
    """Writes one response of `generate.model` per prompt of `generate.data` to a JSONL file."""
    stage = config.generate
    check_rollout(stage.rollout, key="generate.rollout", scored=False)
    check_model(stage.model, key="generate.model")
    device = prepare(config)
    tokenizer = load_tokenizer(stage.model.path, trust_remote_code=stage.model.trust_remote_code)
    # Every row gets its response, in the order of the file.
    rows, held_out = load_rows(replace(stage.data, validation_fraction=0.0), fields=("prompt",))
    rows += held_out
    encoded, _ = encode_rows(rows, tokenizer, stage.data, responses=())
    if not encoded:
        raise DataError("generate: no prompt is left; see data.on_long_prompt")
    model = load_policy(stage.model, key="generate.model", device=device).eval()
    longest = max(len(row.prompt_ids) for row in encoded) + stage.rollout.max_new_tokens
    check_fits(model, tokenizer, key="generate.model", longest=longest)
    lines = []
    for start in range(0, len(encoded), stage.rollout.batch_size):
        part = encoded[start : start + stage.rollout.batch_size]
        responses = generate(
            model,
            [row.prompt_ids for row in part],
            own_samples(stage.rollout),
            stops=stop_ids(tokenizer, stage.rollout),
            pad_id=tokenizer.pad_token_id,
            seed=config.seed + start,
            rows=[row.row for row in part],
        )
        for i, row in enumerate(part):
            tokens = responses.response_ids[i][responses.response_mask[i]].tolist()
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            record = {**row.row, "response": text, "truncated": bool(responses.truncated[i])}
            lines.append(json.dumps(record, ensure_ascii=False))
    output = Path(stage.output)
    write_text_atomically(output, "\n".join(lines) + "\n")
    console.print(f"{len(lines)} responses written to {output}", highlight=False, markup=False, soft_wrap=True)
    return output


def run_evaluate(config: Config) -> Path:
    """Measures `evaluate.model` on held-out prompts and writes the means over responses to a JSON file.

    `score` is under the reward model, centred on the responses it was trained to prefer, with the half-width of
    its 95% interval; `kl` is the summed log-probability ratio to `evaluate.reference`, in nats per response.
    """
    stage = config.evaluate
    check_rollout(stage.rollout, key="evaluate.rollout", scored=False)
    for name in ("model", "reference", "reward_model"):
        check_model(getattr(stage, name), key=f"evaluate.{name}")
    device = prepare(config)
    tokenizer = load_tokenizer(stage.model.path, trust_remote_code=stage.model.trust_remote_code)
    train_rows, validation_rows = load_rows(stage.data, fields=("prompt",))
    rows, _ = encode_rows(validation_rows or train_rows, tokenizer, stage.data, responses=())
    if not rows:
        raise DataError("evaluate: no prompt is left; see data.on_long_prompt")
    policy = load_policy(stage.model, key="evaluate.model", device=device)
    reference = load_policy(stage.reference, key="evaluate.reference", device=device)
    reward_model = load_reward_model(stage.reward_model, key="evaluate.reward_model", device=device)
    check_same_vocabulary(policy, reward_model, tokenizer, stage.reward_model, key="evaluate.reward_model")
    longest = max(len(row.prompt_ids) for row in rows) + stage.rollout.max_new_tokens
    for name, model in (("model", policy), ("reference", reference), ("reward_model", reward_model)):
        check_fits(model, tokenizer, key=f"evaluate.{name}", longest=longest)
    which = "those held out" if validation_rows else "none held out"
    console.print(f"evaluate: {len(rows)} of {len(train_rows) + len(validation_rows)} rows, {which}")
    found = measure(
        rows,
        policy=policy,
        reference=reference,
        rewards=Rewards([ModelReward(reward_model)]),
        rollout=stage.rollout,
        stops=stop_ids(tokenizer, stage.rollout),
        pad_id=tokenizer.pad_token_id,
    )
    n = len(rows)
    result = {
        "rows": n,
        **found.summary(),
        "score_half_width_95": 1.96 * found.scores.std(correction=1).item() / n**0.5 if n > 1 else None,
    }
    output = Path(stage.output)
    write_json(output, result)
    console.print(json.dumps(result, indent=1), highlight=False, markup=False)
    return output
