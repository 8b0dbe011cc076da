"""Models of a few thousand random weights, saved the way a user's own lie on disk, and what reads runs back."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from marlhf.config import Config, load_config

POSITIONS = 64
FAMILIES = ("gpt2", "llama")

TEXTS = [
    ("open file (path)", "Return a file object for the path."),
    ("sum values (values, start)", "Add all values to the start."),
    ("close", "Close the file and return nothing."),
    ("read lines (file, limit)", "Read at most limit lines of the file."),
    ("write (file, text)", "Write the text and return its length."),
    ("sort (values, key)", "Sort the values in place."),
    ("count words (text)", "Count the words of a text."),
    ("make folder (path)", "Make the folder that the path names."),
    ("split (text, separator)", "Split the text at every separator."),
    ("join (parts)", "Join the parts to one text."),
    ("is empty (values)", "Say whether there are no values."),
    ("first (values)", "Return the first of the values."),
]
ROWS = [{"prompt": prompt, "response": response} for prompt, response in TEXTS]
PAIRS = [
    {
        "prompt": prompt,
        "chosen": response,
        "rejected": TEXTS[(i + 1) % len(TEXTS)][1] if i % 2 else response[::-1],
        "kind": "other" if i % 2 else "reversed",
    }
    for i, (prompt, response) in enumerate(TEXTS)
]


def model_config(family: str, tokenizer: Any, **changes: Any) -> GPT2Config | LlamaConfig:
    """A configuration of 16 hidden units; weights are drawn wide, so that every token and position matters."""
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings: dict[str, Any] = {"vocab_size": len(tokenizer), "initializer_range": 0.3, **special}
    if family == "gpt2":
        settings.update(n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2)
        return GPT2Config(**{**settings, **changes})
    settings.update(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
    )
    return LlamaConfig(**{**settings, **changes})


def save_policy(folder: Path, tokenizer: Any, *, family: str = "gpt2", seed: int = 0, **changes: Any) -> Path:
    """A causal language model and its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = model_config(family, tokenizer, **changes)
        model = GPT2LMHeadModel(config) if family == "gpt2" else LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_scorer(folder: Path, tokenizer: Any, *, family: str = "gpt2", seed: int = 1, **changes: Any) -> Path:
    """A model with one score, as a finished reward stage leaves it; `changes` may name `reward_mean` too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = model_config(family, tokenizer, **{"num_labels": 1, "reward_mean": 0.0, "reward_std": 1.0, **changes})
        model = (GPT2ForSequenceClassification if family == "gpt2" else LlamaForSequenceClassification)(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every line; one that is no JSON object is an error."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(isinstance(row, dict) for row in rows)
    return rows


def leftovers(folder: Path) -> list[str]:
    """Temporary files and folders anywhere below `folder`."""
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith((".tmp", ".old", ".part"))
    )


def resolved(root: Path, *words: str) -> Config:
    """The configuration of a run below `root` on the CPU, as the command line would resolve these words."""
    return load_config(None, [f"run_folder={root}/runs", "device=cpu", *words])


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text(encoding="utf-8"))


def without_times(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` without what a clock decides."""
    clocks = ("seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in clocks and not k.startswith("time/")} for line in lines]
