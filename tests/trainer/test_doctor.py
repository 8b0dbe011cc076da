"""The doctor finds nothing on a sound configuration, and names what is wrong on a broken one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from marlhf import doctor, rollout
from marlhf.doctor import CHECKS, run_doctor
from marlhf.models import loading
from marlhf.responses import Responses
from tests.trainer.tiny import resolved, save_policy, save_scorer


@pytest.fixture
def words(
    policies: dict[str, Path], scorers: dict[str, Path], row_file: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    # A narrow terminal would break the cells up.
    monkeypatch.setattr(doctor, "console", Console(width=200))
    return [
        f"ppo.model.path={policies['gpt2']}",
        f"ppo.reward_model.path={scorers['gpt2']}",
        f"ppo.data.train={row_file}",
        "ppo.rollout.batch_size=8",
        "ppo.rollout.max_new_tokens=12",
        "ppo.termination.n=2",
    ]


def wrong(tmp_path: Path, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """The names of the checks that failed, and everything that was printed, on one line."""
    capsys.readouterr()
    well = run_doctor(resolved(tmp_path, *words))
    out = capsys.readouterr().out
    last = out.strip().splitlines()[-1]
    assert well == (last == "all is well")
    for name in CHECKS:
        assert name.split()[0] in out
    named = [name for name in CHECKS if name in out[out.index("\nwrong:") :]] if "\nwrong:" in out else []
    return named, " ".join(out.replace("│", " ").split())


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["ppo.termination.rule=whole", "ppo.minibatches=1"],
        ["ppo.rollout.temperature=0.5"],
        ["ppo.estimator=rloo", "ppo.samples_per_prompt=2"],
    ],
)
def test_a_sound_configuration_is_well(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert wrong(tmp_path, [*words, *more], capsys)[0] == []
    assert list(tmp_path.iterdir()) == []


def test_a_pad_that_is_the_stop_token_is_well(
    tmp_path: Path, words: list[str], tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pad_is_eos(tmp_path, tiny_tokenizer)
    assert wrong(tmp_path, [*words, f"ppo.model.path={folder}"], capsys)[0] == []


def pad_is_eos(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = save_policy(tmp_path / "padded", tokenizer)
    again = PreTrainedTokenizerFast.from_pretrained(folder)
    again.pad_token = again.eos_token
    again.save_pretrained(folder)
    return folder


def test_masks_by_token_where_pad_is_eos(
    tmp_path: Path,
    words: list[str],
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`ids != pad` loses the stop token, and with it where the reward is paid."""
    original = rollout.cut_after_stop

    def by_token(*args: Tensor, stops: Sequence[int], pad_id: int) -> Responses:
        found = original(*args, stops=stops, pad_id=pad_id)
        found.response_mask = found.action_mask = found.response_ids != pad_id
        return found

    monkeypatch.setattr(rollout, "cut_after_stop", by_token)
    folder = pad_is_eos(tmp_path, tiny_tokenizer)
    # Every response stops somewhere: any token of the first half of the vocabulary is a stop token too.
    named, _ = wrong(tmp_path, [*words, f"ppo.model.path={folder}", "ppo.rollout.max_new_tokens=40"], capsys)
    assert named == ["masks from lengths"]


def test_top_k_sampling(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    named, out = wrong(tmp_path, [*words, "ppo.rollout.top_k=50"], capsys)
    assert "settings" in named
    assert "top_k is 50" in out


@pytest.mark.parametrize("change", ["ppo.rollout.top_k=50", "ppo.rollout.temperature=0.7"])
def test_another_law_is_seen_in_what_was_sampled(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """Where the preset lets it pass: the number is some standard errors."""
    more = ["preset=released_code", "ppo.rollout.allow_mismatched_sampling=true", change]
    named, _ = wrong(tmp_path, [*words, *more, "ppo.rollout.max_new_tokens=30"], capsys)
    assert "sampled law is scored law" in named


def test_a_reward_model_with_another_vocabulary(
    tmp_path: Path, words: list[str], tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = save_scorer(tmp_path / "scorer", tiny_tokenizer, vocab_size=310)
    named, out = wrong(tmp_path, [*words, f"ppo.reward_model.path={scorer}"], capsys)
    assert "vocabulary and heads" in named
    assert "310 tokens" in out


def test_dropout_that_was_left_on(
    tmp_path: Path,
    words: list[str],
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loading, "disable_dropout", lambda model: None)
    folder = save_policy(tmp_path / "policy", tiny_tokenizer, resid_pdrop=0.3)
    named, _ = wrong(tmp_path, [*words, f"ppo.model.path={folder}"], capsys)
    assert named == ["dropout off", "ratio 1 at step 0"]


def test_a_missing_head(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    named, out = wrong(tmp_path, [*words, "ppo.reward_model.path=${ppo.model.path}"], capsys)
    assert "vocabulary and heads" in named
    assert "has no reward head" in out


def test_a_second_bos(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a template and the tokenizer each put one in front."""
    original = doctor.encode_rows

    def doubled(*args: Any, **named: Any) -> Any:
        rows, counts = original(*args, **named)
        for row in rows[::2]:
            row.prompt_ids.insert(0, 1)
        return rows, counts

    monkeypatch.setattr(doctor, "encode_rows", doubled)
    named, out = wrong(tmp_path, words, capsys)
    assert named == ["BOS and EOS"]
    assert "6 with another number of BOS than 1" in out


def test_a_policy_that_is_not_its_reference(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[Any] = []
    original = doctor.load_policy

    def moved(*args: Any, **named: Any) -> Any:
        model = original(*args, **named)
        loaded.append(model)
        if len(loaded) == 2:
            with torch.no_grad():
                model.transformer.wte.weight.mul_(1.1)
        return model

    monkeypatch.setattr(doctor, "load_policy", moved)
    assert wrong(tmp_path, words, capsys)[0] == ["KL 0 at step 0"]


def test_too_few_prompts(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    named, out = wrong(tmp_path, [*words, "ppo.rollout.batch_size=14"], capsys)
    assert named == ["prompts"]
    assert "at least 14" in out
