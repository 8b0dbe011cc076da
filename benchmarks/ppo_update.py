"""How much of a PPO update our ops take, on each backend: the demo's models and batch, nothing sampled.

`python -m benchmarks.ppo_update [--csv RUN.csv]` alternates the backends in one process. An update is what
`marlhf ppo` does after it has sampled: log-probabilities, values and scores of the responses, advantages, and the
optimiser steps of policy and critic.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

import marlhf_kernels
from benchmarks import machine, results
from benchmarks.results import Row, with_times
from marlhf.config import PPOConfig, TerminationConfig
from marlhf.demo.settings import MACRO_ACTION_TOKENS, SETTINGS, Settings
from marlhf.engine import Optimizer
from marlhf.models import load_critic
from marlhf.responses import Responses
from marlhf.rewards import Rewards
from marlhf.rewards.sources import ModelReward
from marlhf.rollout import complete
from marlhf.stages.ppo import update
from marlhf_kernels.ops import _registry

ALTERNATIONS = 20
IN_OPS, WHOLE = "time in ops", "whole update"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of our ops inside a PPO update of the demo's size.")
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", choices=tuple(SETTINGS), default="full")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure(SETTINGS[arguments.sizes], ALTERNATIONS if arguments.sizes == "full" else 2)
    print("\nPPO update")
    for row in rows:
        print(f"  {row.options:14} {row.who:18} {row.p50_us or 0:12,.0f} us in the middle  {row.reason}")
    if arguments.csv is not None:
        results.write(arguments.csv, rows, append=True)


def measure(settings: Settings, alternations: int) -> list[Row]:
    """Two rows for each backend that runs here: time in ops, and the whole update."""
    names = [name for name, status in marlhf_kernels.backends().items() if status.available and name != "gpu"]
    run = demo_update(settings)
    seconds: dict[tuple[str, str], list[float]] = {(name, what): [] for name in names for what in (IN_OPS, WHOLE)}
    for turn in range(-1, alternations):
        for name in names if turn % 2 else reversed(names):
            with op_clock() as spent, on_backend(name):
                start = time.perf_counter()
                run()
                whole = time.perf_counter() - start
            if turn >= 0:  # the first is to warm up
                seconds[name, IN_OPS].append(sum(spent))
                seconds[name, WHOLE].append(whole)
    blank = Row(
        op="ppo_update",
        options="",
        mode="full",
        metric="call",
        provider="marlhf",
        backend="",
        shape=f"demo-{settings.ppo_batch}x{settings.response_tokens}",
        sizes=f"B={settings.ppo_batch} T={settings.response_tokens} V={settings.vocabulary}",
        dtype="float32",
        threads=torch.get_num_threads(),
        **machine.facts(torch.device("cpu")),
    )
    rows = []
    for (name, what), times in seconds.items():
        row = replace(blank, backend=name, options=what)
        if name != "reference":
            middle = median_ratio(seconds["reference", what], times)
            row = replace(row, reason=f"median of {len(times)} ratios of the reference to this: {middle:.3g}")
        rows.append(with_times(row, [[t] for t in times]))
    return rows


def median_ratio(old: Sequence[float], new: Sequence[float]) -> float:
    """Of times taken in pairs."""
    return statistics.median(a / b for a, b in zip(old, new, strict=True))


def demo_update(settings: Settings) -> Callable[[], None]:
    """A function that does one update, over the same responses of random tokens each time."""
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "vocab_size": settings.vocabulary,
        "n_positions": settings.prompt_tokens + settings.response_tokens,
        "n_embd": settings.width,
        "n_layer": settings.layers,
        "n_head": settings.heads,
        "pad_token_id": 0,
    }
    policy, reference = GPT2LMHeadModel(GPT2Config(**size)), GPT2LMHeadModel(GPT2Config(**size)).eval()
    reward_model = GPT2ForSequenceClassification(GPT2Config(**size, num_labels=1)).eval()
    config = PPOConfig(
        termination=TerminationConfig(rule="fixed", n=MACRO_ACTION_TOKENS),
        microbatch_size=max(1, settings.ppo_batch // 4),
    )
    critic = load_critic(reward_model, head="zero")
    steps = 10_000
    optimizers = {
        "policy": Optimizer(policy, config.policy_optimizer, total_steps=steps),
        "critic": Optimizer(critic, config.critic_optimizer, total_steps=steps),
    }
    responses = random_responses(settings)

    def run() -> None:
        rollout = complete(
            responses,
            policy=policy.eval(),
            reference=reference,
            critic=critic,
            rewards=Rewards([ModelReward(reward_model)]),
            config=config,
            kl_coef=config.kl_coef,
        )
        order = torch.Generator().manual_seed(0)
        update(rollout, policy, critic, optimizers, config, order)

    return run


def random_responses(settings: Settings) -> Responses:
    """Full prompts, and responses of half to all of the tokens that the demo allows."""
    rows, length = settings.ppo_batch, settings.response_tokens
    lengths = torch.randint(length // 2, length + 1, (rows, 1))
    mask = torch.arange(length) < lengths
    return Responses(
        prompt_ids=torch.randint(1, settings.vocabulary, (rows, settings.prompt_tokens)),
        prompt_mask=torch.ones(rows, settings.prompt_tokens, dtype=torch.bool),
        response_ids=torch.randint(1, settings.vocabulary, (rows, length)).masked_fill(~mask, 0),
        response_mask=mask,
        truncated=torch.zeros(rows, dtype=torch.bool),
        action_mask=mask,
    )


@contextlib.contextmanager
def op_clock() -> Iterator[list[float]]:
    """Inside, the seconds of every kernel call, forward and backward, are added to the list."""
    spent: list[float] = []
    select = _registry.select
    depth = 0

    def timed_select(op: str, args: Sequence[Any]) -> Callable[..., Any]:
        kernel = select(op, args)

        def timed(*arguments: Any) -> Any:
            nonlocal depth
            depth += 1
            start = time.perf_counter()
            try:
                return kernel(*arguments)
            finally:
                depth -= 1
                if depth == 0:  # an op inside of another is in its time already
                    spent.append(time.perf_counter() - start)

        return timed

    _registry.select = timed_select
    try:
        yield spent
    finally:
        _registry.select = select


@contextlib.contextmanager
def on_backend(name: str) -> Iterator[None]:
    """The reference for all ops; else that backend where it has the op, as a user gets it."""
    if name == "reference":
        with marlhf_kernels.use_backend(name):
            yield
    else:
        yield


if __name__ == "__main__":
    main()
