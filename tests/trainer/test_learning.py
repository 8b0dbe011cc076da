"""Learning that cannot be faked: an exact reward on prompts never trained on, and controls that must not learn."""

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from marlhf.rollout import Rollout
from marlhf.stages import ppo
from marlhf.stages.ppo import run_ppo
from tests.trainer.tiny import read_jsonl, resolved, save_policy, write_jsonl

WORDS = ["red", "green", "blue", "cyan", "pink", "gold"]
HELD_OUT = [(WORDS[i], WORDS[(i + 2) % len(WORDS)]) for i in range(len(WORDS))]
SHARE = '''
"""The share of a prompt's words that stand in the response."""


def share(prompts, responses, rows):
    return [
        len(set(prompt.split()) & set(response.split())) / len(set(prompt.split()))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
'''


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A policy that knows six words and says them at random; prompts of two words, six of thirty held out."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    policy = save_policy(tmp_path / "policy", tokenizer, initializer_range=0.05, n_embd=32)
    function = tmp_path / "share.py"
    function.write_text(SHARE, encoding="utf-8")
    pairs = list(permutations(WORDS, 2))
    train = [{"prompt": " ".join(pair)} for pair in pairs if pair not in HELD_OUT]
    return [
        f"ppo.model.path={policy}",
        f"ppo.rewards=[{{kind: function, file: {function}, name: share}}]",
        f"ppo.data.train={write_jsonl(tmp_path / 'train.jsonl', train)}",
        f"ppo.data.validation={write_jsonl(tmp_path / 'held.jsonl', [{'prompt': ' '.join(p)} for p in HELD_OUT] * 20)}",
        "ppo.eval_rows=120",
        "ppo.eval_every=1000",
        "ppo.rollout.batch_size=12",
        "ppo.samples_per_prompt=4",
        "ppo.rollout.max_new_tokens=2",
        "ppo.iterations=60",
        "ppo.termination.n=2",
        "ppo.policy_optimizer.learning_rate=5e-3",
        "ppo.critic_optimizer.learning_rate=5e-3",
        "ppo.kl_coef=0.001",
    ]


def held_out_scores(tmp_path: Path, words: list[str], *more: str) -> tuple[float, float]:
    """Before training and after it."""
    lines = read_jsonl(run_ppo(resolved(tmp_path, *words, *more)).parent / "metrics.jsonl")
    return lines[0]["eval/score"], lines[-1]["eval/score"]


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Rollout], torch.Tensor]) -> None:
    """Runs train on advantages that a control has spoilt."""
    original = ppo.complete

    def spoilt(*args: Any, **named: Any) -> Rollout:
        rollout = original(*args, **named)
        rollout.advantages = change(rollout)
        return rollout

    monkeypatch.setattr(ppo, "complete", spoilt)


def shuffled(rollout: Rollout) -> torch.Tensor:
    """The same advantages on other tokens of the batch."""
    generator = torch.Generator().manual_seed(int(rollout.response_ids.sum()))
    real = rollout.advantages[rollout.action_mask]
    advantages = rollout.advantages.clone()
    advantages[rollout.action_mask] = real[torch.randperm(len(real), generator=generator)]
    return advantages


ESTIMATORS = ("gae", "rloo", "grpo", "reinforce")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "rule"),
    [
        ("gae", "token"),
        ("gae", "fixed"),
        ("reinforce", "token"),
        ("reinforce", "fixed"),
        ("rloo", "fixed"),
        ("grpo", "fixed"),
    ],
)
def test_every_estimator_raises_the_held_out_score(tmp_path: Path, words: list[str], estimator: str, rule: str) -> None:
    """A policy that does not read the prompt scores 1/3 at best with two different words; copying it scores 1.

    `rloo` and `grpo` give every token of a response one advantage, so the rule changes nothing for them here.
    """
    before, after = held_out_scores(tmp_path, words, f"ppo.estimator={estimator}", f"ppo.termination.rule={rule}")
    assert before < 0.3
    assert after > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("control", [lambda rollout: -rollout.advantages, shuffled], ids=["negated", "shuffled"])
def test_spoilt_advantages_teach_nothing(
    tmp_path: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    estimator: str,
    control: Callable[[Rollout], torch.Tensor],
) -> None:
    changed(monkeypatch, control)
    before, after = held_out_scores(tmp_path, words, f"ppo.estimator={estimator}")
    assert after < before + 0.1
