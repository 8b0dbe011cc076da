"""Sizes and hyper-parameters of the demo, chosen on its validation split."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """How large the demo's models are and how long each stage runs."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    prompt_tokens: int
    response_tokens: int
    train_rows: int | None
    sft_steps: int
    sft_batch: int
    pairs: int
    """Pairs for both reward models together; each sees its own half."""
    reward_steps: int
    reward_batch: int
    ppo_iterations: int
    ppo_batch: int
    eval_rows: int
    test_rows: int


SETTINGS = {
    "full": Settings(
        layers=3,
        width=128,
        heads=4,
        vocabulary=4096,
        prompt_tokens=24,
        response_tokens=24,
        train_rows=None,
        sft_steps=660,
        sft_batch=32,
        pairs=17_280,
        reward_steps=360,
        reward_batch=24,
        ppo_iterations=15,
        ppo_batch=64,
        eval_rows=96,
        test_rows=384,
    ),
    # Tries the plumbing; nothing is learned.
    "tiny": Settings(
        layers=1,
        width=32,
        heads=2,
        vocabulary=512,
        prompt_tokens=24,
        response_tokens=12,
        train_rows=600,
        sft_steps=20,
        sft_batch=16,
        pairs=400,
        reward_steps=10,
        reward_batch=8,
        ppo_iterations=2,
        ppo_batch=8,
        eval_rows=16,
        test_rows=24,
    ),
}

MACRO_ACTION_TOKENS = 5


def demo_config(folder: str, settings: Settings, *, seed: int) -> dict[str, object]:
    """The demo's configuration, as a user would write it in YAML."""
    lengths = {
        "max_prompt_tokens": settings.prompt_tokens,
        "max_response_tokens": settings.response_tokens,
        "on_long_prompt": "truncate",
        "prompt_suffix": "\n",
    }
    rows = {"train": f"{folder}/data/train.jsonl", "validation": f"{folder}/data/validation.jsonl", **lengths}
    pairs = {"train": f"{folder}/data/pairs_train.jsonl", "validation": f"{folder}/data/pairs_validation.jsonl"}
    rollout = {"batch_size": settings.ppo_batch, "max_new_tokens": settings.response_tokens}
    return {
        "run_folder": folder,
        "seed": seed,
        "sft": {
            "model": {"path": f"{folder}/start"},
            "data": rows,
            "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": settings.sft_steps // 20},
            "max_steps": settings.sft_steps,
            "batch_size": settings.sft_batch,
            "microbatch_size": max(1, settings.sft_batch // 2),
            "eval_every": max(1, settings.sft_steps // 4),
            "eval_rows": 4 * settings.eval_rows,
        },
        "reward": {
            "data": {**pairs, **lengths},
            "optimizer": {"learning_rate": 1e-3, "schedule": "linear", "warmup_steps": settings.reward_steps // 20},
            "max_steps": settings.reward_steps,
            "batch_size": settings.reward_batch,
            "microbatch_size": max(1, settings.reward_batch // 2),
            "center_coef": 0.03,
            "eval_every": max(1, settings.reward_steps // 2),
            "eval_rows": 4 * settings.eval_rows,
        },
        "ppo": {
            # Encoding all rows takes longer than an iteration, and few of them become prompts.
            "data": {**rows, "limit": 4 * settings.ppo_iterations * settings.ppo_batch},
            "rollout": rollout,
            "termination": {"rule": "fixed", "n": MACRO_ACTION_TOKENS},
            "policy_optimizer": {"learning_rate": 6e-4},
            "critic_optimizer": {"learning_rate": 1e-3},
            "critic_head": "zero",
            "iterations": settings.ppo_iterations,
            "microbatch_size": max(1, settings.ppo_batch // 4),
            "kl_coef": 0.05,
            "score_standardize": True,
            "missing_stop_penalty": 1.0,
            "eval_every": max(1, settings.ppo_iterations // 3),
            "eval_rows": settings.eval_rows,
        },
    }
