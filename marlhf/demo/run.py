"""The demo's stages in order."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import GPT2Config, GPT2LMHeadModel

from marlhf.config import Config, ModelConfig, load_config, one_of
from marlhf.data import encode_rows, load_tokenizer, make_pairs, read_docstrings, train_tokenizer
from marlhf.demo.children import Job, run_side_by_side
from marlhf.demo.results import write_results
from marlhf.demo.settings import SETTINGS, Settings, demo_config
from marlhf.engine import prepare
from marlhf.files import write_text_atomically
from marlhf.models import load_policy, save_model
from marlhf.progress import console, loops
from marlhf.rollout import generate, stop_ids
from marlhf.run_folder import check_free
from marlhf.stages.sft import run_sft

Row = dict[str, Any]

# One pair in so many has the SFT model's own sample as the rejected response.
SAMPLED_PART = 6
SAMPLING_BATCH = 256
# The rest of the pairs; twice as many of the kind that is hardest to learn.
OTHER_KINDS = {"other": 2.0, "shuffled": 1.0, "truncated": 1.0}


def run_demo(folder: Path, *, seed: int = 0, scale: str = "full") -> Path:
    """SFT, reward models, PPO and macro-action PPO on docstrings; returns the path of the report page.

    Everything goes to `folder`, which must be empty or absent. Nothing is downloaded.
    """
    settings = SETTINGS[one_of(scale, list(SETTINGS), key="--scale")]
    check_free(folder, key="--folder")
    sections = Sections()

    sections.start("Docstrings")
    splits = write_rows(folder, settings)
    yaml = folder / "demo.yaml"
    write_text_atomically(yaml, OmegaConf.to_yaml(OmegaConf.create(demo_config(str(folder), settings, seed=seed))))
    config = load_config(yaml)
    device = prepare(config)
    write_start(folder / "start", splits["train"], settings)

    sections.start("Supervised fine-tuning")
    run_sft(config)

    sections.start("Preference pairs")
    write_pairs(folder, splits, config, settings, device)

    sections.start("Reward models")
    steps = settings.reward_steps
    half_b = f"reward.data.train={folder}/data/pairs_train_b.jsonl"
    run_side_by_side(
        [
            Job("reward model", "reward", folder / "reward", (), steps, "accuracy"),
            Job(
                "unseen reward model",
                "reward",
                folder / "reward_unseen",
                (f"reward.run_folder={folder}/reward_unseen", half_b, f"seed={seed + 1}"),
                steps,
                "accuracy",
            ),
            Job(
                "copy without prompts",
                "reward",
                folder / "reward_no_prompt",
                (f"reward.run_folder={folder}/reward_no_prompt", "reward.see_prompt=false"),
                steps,
                "accuracy",
            ),
        ],
        config=yaml,
        logs=folder / "logs",
        at_once=3,
    )

    sections.start("PPO and macro-action PPO, side by side")
    iterations = settings.ppo_iterations
    run_side_by_side(
        [
            Job(
                "token PPO",
                "ppo",
                folder / "ppo_token",
                (f"ppo.run_folder={folder}/ppo_token", "ppo.termination.rule=token"),
                iterations,
                "score",
            ),
            Job(
                "macro-action PPO",
                "ppo",
                folder / "ppo_macro",
                (f"ppo.run_folder={folder}/ppo_macro",),
                iterations,
                "score",
            ),
        ],
        config=yaml,
        logs=folder / "logs",
        at_once=min(2, torch.get_num_threads()),
    )

    sections.start("Test split")
    report = write_results(folder, config, splits["test"][: settings.test_rows], device, sections.seconds)
    console.print(f"Report: {report}", highlight=False, markup=False, soft_wrap=True)
    return report


class Sections:
    """Prints where the demo is, and keeps each section's wall time."""

    def __init__(self) -> None:
        self._begun: list[tuple[str, float]] = []

    def start(self, name: str) -> None:
        """Ends the section before, if any, and begins another."""
        self._begun.append((name, time.monotonic()))
        elapsed = self._begun[-1][1] - self._begun[0][1]
        console.rule(f"{len(self._begun)}. {name} (at {elapsed:.0f} s)", align="left")

    def seconds(self) -> dict[str, float]:
        """Seconds of each section, the last one up to now."""
        ends = [begin for _, begin in self._begun[1:]] + [time.monotonic()]
        return {name: end - begin for (name, begin), end in zip(self._begun, ends, strict=True)}


def write_rows(folder: Path, settings: Settings) -> dict[str, list[Row]]:
    """Reads the docstrings and writes the three splits as JSONL, the way a user's own data would lie there."""
    with loops() as shown:
        loop = None

        def progress(done: int, total: int) -> None:
            nonlocal loop
            loop = loop or shown.start("Reading docstrings", total, "files")
            loop.advance(to=done)

        read = read_docstrings("names", progress=progress)
    limit = settings.train_rows
    splits = {
        "train": read.train[:limit],
        "validation": read.validation[: limit and limit // 4],
        "test": read.test[: limit and limit // 4],
    }
    for name, rows in splits.items():
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    sources = ", ".join(f"{name} {version}" for name, version in read.versions.items())
    sizes = ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items())
    console.print(f"{sizes} rows from {sources}", highlight=False, markup=False)
    return splits


def write_start(folder: Path, rows: Sequence[Row], settings: Settings) -> None:
    """A tokenizer trained on the rows and a GPT-2 with random weights, saved where SFT starts from."""
    tokenizer = train_tokenizer([f"{row['prompt']}\n{row['response']}" for row in rows], vocab_size=settings.vocabulary)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=settings.prompt_tokens + settings.response_tokens + 8,
            n_embd=settings.width,
            n_layer=settings.layers,
            n_head=settings.heads,
            # Each row is seen about once, so there is nothing for dropout to prevent.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    save_model(model, tokenizer, folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"byte-level BPE of {len(tokenizer):,} tokens; GPT-2 of {settings.layers} layers, {parameters / 1e6:.2f} M "
        "parameters, random weights",
        highlight=False,
        markup=False,
    )


def write_pairs(
    folder: Path,
    splits: Mapping[str, Sequence[Row]],
    config: Config,
    settings: Settings,
    device: torch.device,
) -> None:
    """Pairs of a real summary with a worse one; the two reward models get disjoint halves of the train rows."""
    final = f"{folder}/sft/final"
    tokenizer = load_tokenizer(final)
    policy = load_policy(ModelConfig(path=final), key="sft", device=device).eval()
    train = splits["train"][: settings.pairs]
    parts = {
        "train": train[: len(train) // 2],
        "train_b": train[len(train) // 2 :],
        "validation": splits["validation"],
        # Each test row twice, as another kind or with another partner: narrower intervals per kind.
        "test": [*splits["test"], *splits["test"]],
    }
    with loops() as shown:
        loop = shown.start("Sampling", sum(len(rows) // SAMPLED_PART for rows in parts.values()), "responses")
        for number, (name, rows) in enumerate(parts.items()):
            sampled, others = rows[: len(rows) // SAMPLED_PART], rows[len(rows) // SAMPLED_PART :]
            encoded, _ = encode_rows(sampled, tokenizer, config.sft.data, responses=())
            samples: list[str] = []
            for start in range(0, len(encoded), SAMPLING_BATCH):
                prompts = [row.prompt_ids for row in encoded[start : start + SAMPLING_BATCH]]
                responses = generate(
                    policy,
                    prompts,
                    config.ppo.rollout,
                    stops=stop_ids(tokenizer, config.ppo.rollout),
                    pad_id=tokenizer.pad_token_id,
                    seed=config.seed + 1_000_000 * number + start,
                )
                samples += tokenizer.batch_decode(responses.response_ids, skip_special_tokens=True)
                loop.advance(to=loop.done + len(prompts))
            pairs = make_pairs(sampled, seed=config.seed + number, samples=samples, weights={"sample": 1.0})
            pairs += make_pairs(others, seed=config.seed + number, weights=OTHER_KINDS)
            write_jsonl(folder / "data" / f"pairs_{name}.jsonl", pairs)


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object a line."""
    write_text_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
