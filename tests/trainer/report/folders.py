"""Run folders as a run writes them, small enough to check by hand."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1> \0 \x1b[31m \u2028 \ud800 "
    "\u202egnp\u202c & &lt;b&gt; %{x} {{7*7}} <b>bold</b> $x^2$"
)
"""What a model or a user may write, each part against another reader of the text."""

SHOWN = (
    "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1> [U+0000] [U+001B][31m [U+2028] \ufffd "
    "[U+202E]gnp[U+202C] & &lt;b&gt; %{x} {{7*7}} <b>bold</b> $x^2$"
)
"""The same as a reader of the page sees it."""


def write_lines(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_run(
    folder: Path,
    *,
    status: Mapping[str, Any] | None = None,
    config: str | None = "seed: 0\n",
    metrics: Sequence[Mapping[str, Any]] = (),
    evaluations: Sequence[Mapping[str, Any]] = (),
    samples: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Writes the files that are given; an empty sequence writes no file."""
    folder.mkdir(parents=True)
    if status is not None:
        (folder / "status.json").write_text(json.dumps(status), encoding="utf-8")
    if config is not None:
        (folder / "config.yaml").write_text(config, encoding="utf-8")
    for name, lines in (("metrics", metrics), ("evaluations", evaluations), ("samples", samples)):
        if lines:
            write_lines(folder / f"{name}.jsonl", lines)
    return folder


def ppo_metrics(offset: float = 0.0) -> list[dict[str, Any]]:
    """Six iterations, evaluated at 0, 3 and 6; the value loss of iteration 4 was not finite."""
    lines: list[dict[str, Any]] = [{"stage": "ppo", "step": 0, "seconds": 0.5, **_held_out(0, offset)}]
    for step in range(1, 7):
        lines.append(
            {
                "stage": "ppo",
                "step": step,
                "seconds": 2.0 * step,
                "score": offset + 0.1 * step,
                "score_std": 0.5,
                "kl": 0.3 * step + offset,
                "kl_coef": 0.05,
                "response_length": 12.0 + step % 3 + offset,
                "stopped_share": 0.9 + 0.01 * step,
                "entropy": 2.0 - 0.05 * step,
                "policy_loss": -0.01 * step,
                "value_loss": None if step == 4 else 1.0 / step,
                "policy_clip_fraction": 0.02 * step,
                "value_clip_fraction": 0.03 * step,
                "approx_kl": 0.001 * step,
                "ratio_max": 1.0 + 0.1 * step,
                "policy_grad_norm": 1.0 + step,
                "critic_grad_norm": 2.0 + step,
                "policy_learning_rate": 1e-6 * (7 - step),
                "macro_length": 4.5,
                "tokens_per_second": 100.0 + step,
                "time/generate": 1.0,
                "time/update": 0.5 + 0.1 * step,
                **({"time/evaluate": 3.0, **_held_out(step, offset)} if step % 3 == 0 else {}),
            }
        )
    return lines


def _held_out(step: int, offset: float) -> dict[str, float]:
    return {
        "eval/score": offset + 0.09 * step,
        "eval/kl": 0.25 * step + offset,
        "eval/response_length": 12.5 + 0.1 * step,
        "eval/stopped_share": 0.91 + 0.001 * step,
    }


def ppo_samples(response: str = "Join the paths") -> list[dict[str, Any]]:
    """Two prompts at iterations 0, 3 and 6; macro actions of two tokens."""
    return [
        {
            "step": step,
            "prompt": prompt,
            "response": f"{response} {step}",
            "tokens": [*response.split(" "), str(step)],
            "macro_ids": [position // 2 for position in range(len(response.split(" ")) + 1)],
            "score": step + 0.5,
            "kl": float(step),
            "reference": "Join paths.",
        }
        for step in (0, 3, 6)
        for prompt in ("os path join (a, p)", "os path split (p)")
    ]


def ppo_evaluations(offset: float = 0.0) -> list[dict[str, Any]]:
    """Scores at 0, 3 and 6, and macro actions of one and of five tokens."""
    return [
        {
            "step": step,
            "scores": [offset + 0.1 * place + step for place in range(20)],
            "kl": [0.1 * step] * 20,
            "lengths": [16] * 20,
            "macro_lengths": {"5": 60, "1": 20},
        }
        for step in (0, 3, 6)
    ]


def write_ppo(folder: Path, offset: float = 0.0, *, config: str = "ppo:\n  termination: {rule: fixed, n: 5}\n") -> Path:
    """A finished PPO run with all its files."""
    return write_run(
        folder,
        status={"state": "finished", "stage": "ppo", "step": 6, "total_steps": 6, "message": ""},
        config=config,
        metrics=ppo_metrics(offset),
        evaluations=ppo_evaluations(offset),
        samples=ppo_samples(),
    )


def write_reward(folder: Path) -> Path:
    """A finished reward-model run: 80 training steps, more than get a marker each, and evaluations at 40 and 80."""
    lines: list[dict[str, Any]] = [
        {
            "stage": "reward",
            "step": step,
            "seconds": float(step),
            "loss": 1.0 / step,
            "accuracy": step / 100,
            "learning_rate": 1e-3 / step,
            "grad_norm": 1.0 + step % 5,
        }
        for step in range(1, 81)
    ]
    for step, shuffled in ((40, 0.8), (80, 0.95)):
        lines[step - 1].update(
            {"eval/loss": 0.5, "eval/accuracy": 0.7 + step / 1000, "eval/accuracy/shuffled": shuffled}
        )
    lines[-1]["eval/accuracy/truncated"] = 0.6
    status = {"state": "finished", "stage": "reward", "step": 80, "total_steps": 80, "message": ""}
    return write_run(folder, status=status, metrics=lines)


def write_sft(folder: Path) -> Path:
    """An SFT run that was interrupted after its first step."""
    return write_run(
        folder,
        status={
            "state": "interrupted",
            "stage": "sft",
            "step": 1,
            "total_steps": 40,
            "message": "stopped on request",
        },
        metrics=[{"stage": "sft", "step": 1, "seconds": 0.2, "loss": 2.5, "learning_rate": 1e-3, "grad_norm": 0.5}],
    )
