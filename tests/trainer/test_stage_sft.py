"""Supervised fine-tuning from files to a folder that transformers loads."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from marlhf.config import Config, DataConfig, ModelConfig, OptimizerConfig, SFTConfig
from marlhf.data import EncodedRow, encode_rows, load_tokenizer
from marlhf.engine import Optimizer
from marlhf.errors import UserError
from marlhf.models import load_policy
from marlhf.report.reading import read_run
from marlhf.stages import sft
from marlhf.stages.sft import run_sft, train_step
from tests.trainer.tiny import ROWS, leftovers, read_jsonl, resolved, save_policy, status, without_times, write_jsonl

CPU = torch.device("cpu")


@pytest.fixture
def words(policies: dict[str, Path], row_file: Path) -> list[str]:
    """A run of three steps over twelve rows."""
    return [
        f"sft.model.path={policies['gpt2']}",
        f"sft.data.train={row_file}",
        "sft.data.validation_fraction=0.25",
        "sft.data.prompt_suffix='\\n'",
        "sft.batch_size=4",
        "sft.optimizer.learning_rate=1e-3",
    ]


def rows_of(folder: Path, rows: list[dict[str, str]] = ROWS) -> list[EncodedRow]:
    return encode_rows(rows, load_tokenizer(str(folder)), DataConfig(), responses=("response",))[0]


def own_loss(model: Any, rows: list[EncodedRow], *, prompts: bool = False) -> float:
    """Mean negative log-likelihood of every response token, row by row with transformers alone."""
    total = count = 0.0
    for row in rows:
        ids = row.prompt_ids + row.response_ids["response"]
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        first = 1 if prompts else len(row.prompt_ids)
        for t in range(first, len(ids)):
            total -= logprobs[t - 1, ids[t]].item()
            count += 1
    return total / count


def test_a_run_from_file_to_folder(tmp_path: Path, words: list[str]) -> None:
    final = run_sft(resolved(tmp_path, *words))
    run = final.parent
    assert final == tmp_path / "runs" / "sft" / "final"
    assert status(run) == {"state": "finished", "stage": "sft", "step": 3, "total_steps": 3, "message": ""}
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert math.isfinite(line["loss"])
        assert line["learning_rate"] == 1e-3
        assert line["grad_norm"] > 0
    assert "eval/loss" in lines[-1]
    assert read_run("sft", run).problems == []
    assert leftovers(tmp_path) == []
    model = AutoModelForCausalLM.from_pretrained(final)
    start = AutoModelForCausalLM.from_pretrained(words[0].partition("=")[2])
    assert any(not torch.equal(one, other) for one, other in zip(model.parameters(), start.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(final).eos_token_id == 2


def test_the_same_seed_gives_the_same_run(tmp_path: Path, words: list[str]) -> None:
    """Dropout, which SFT keeps, included; another seed orders the rows otherwise."""
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = run_sft(resolved(tmp_path, *words, f"seed={seed}", f"sft.run_folder={tmp_path / name}")).parent
        found.append(without_times(read_jsonl(run / "metrics.jsonl")))
    assert found[0] == found[1]
    assert found[0][0]["loss"] != found[2][0]["loss"]


def test_it_learns_the_rows_by_heart(tmp_path: Path, words: list[str], row_file: Path) -> None:
    run = run_sft(
        resolved(
            tmp_path,
            *words,
            "sft.data.validation_fraction=0",
            f"sft.data.validation={row_file}",
            "sft.data.limit=4",
            "sft.max_steps=60",
            "sft.optimizer.learning_rate=1e-2",
        )
    ).parent
    losses = [line["loss"] for line in read_jsonl(run / "metrics.jsonl")]
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("prompts", [False, True])
def test_the_first_loss_is_the_mean_over_response_tokens(
    tmp_path: Path, policies: dict[str, Path], prompts: bool
) -> None:
    """The stop token among them; padding and, by default, the prompt are left out."""
    folder = policies["llama"]
    rows = rows_of(folder)[:5]
    model = load_policy(ModelConfig(path=str(folder)), key="sft.model", device=CPU).eval()
    expected = own_loss(model, rows, prompts=prompts)
    for size in (None, 1, 2, 3):
        config = SFTConfig(microbatch_size=size, train_on_prompt=prompts)
        again = load_policy(ModelConfig(path=str(folder)), key="sft.model", device=CPU)
        optimizer = Optimizer(again, OptimizerConfig(), total_steps=1)
        loss, _ = train_step(again, optimizer, rows, config, 0)
        assert loss == pytest.approx(expected, abs=1e-5)
    assert sft.evaluate(model, rows, SFTConfig(batch_size=2, train_on_prompt=prompts), 0) == pytest.approx(
        expected, abs=1e-5
    )


def test_the_split_into_microbatches_changes_no_gradient(policies: dict[str, Path]) -> None:
    rows = rows_of(policies["gpt2"])[:7]
    gradients = []
    for size in (None, 1, 3):
        model = load_policy(ModelConfig(path=str(policies["gpt2"])), key="sft.model", device=CPU)
        optimizer = Optimizer(model, OptimizerConfig(max_grad_norm=1e9), total_steps=1)
        optimizer.adamw.register_step_pre_hook(
            lambda *_, m=model: gradients.append([parameter.grad.clone() for parameter in m.parameters()])
        )
        train_step(model, optimizer, rows, SFTConfig(microbatch_size=size), 0)
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


def test_ten_more_pads_leave_the_loss_unchanged(policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the pad token is the stop token, which is trained on all the same."""
    rows = rows_of(policies["gpt2"])[:3]
    model = load_policy(ModelConfig(path=str(policies["gpt2"])), key="sft.model", device=CPU).eval()
    expected = own_loss(model, rows)
    original = sft.sft_batch

    def wider(*args: Any, pad_id: int, **settings: Any) -> Any:
        batch = original(*args, pad_id=pad_id, **settings)
        grow = torch.nn.functional.pad
        return type(batch)(
            grow(batch.input_ids, (0, 10), value=pad_id),
            grow(batch.attention_mask, (0, 10)),
            grow(batch.labels, (0, 10), value=-100),
        )

    for pad in (0, 2):
        assert sft.evaluate(model, rows, SFTConfig(), pad) == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr(sft, "sft_batch", wider)
    for pad in (0, 2):
        assert sft.evaluate(model, rows, SFTConfig(), pad) == pytest.approx(expected, abs=1e-5)


def test_a_tokenizer_without_a_pad_token(tmp_path: Path, tiny_tokenizer: Any, words: list[str]) -> None:
    """pad == eos: the first loss is the one with a pad token of its own, and the run ends as ever."""
    start = save_policy(tmp_path / "start", tiny_tokenizer, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    other = save_policy(tmp_path / "other", tiny_tokenizer, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(other)
    assert load_tokenizer(str(other)).pad_token_id == 2
    losses = []
    for folder in (start, other):
        run = run_sft(resolved(tmp_path, *words, f"sft.model.path={folder}", f"sft.run_folder={folder}-run")).parent
        losses.append([line["loss"] for line in read_jsonl(run / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_mean_over_rows_counts_each_once(policies: dict[str, Path]) -> None:
    """Nine rows in batches of two: the mean over all their tokens."""
    rows = rows_of(policies["gpt2"])[:9]
    model = load_policy(ModelConfig(path=str(policies["gpt2"])), key="sft.model", device=CPU).eval()
    for size in (1, 2, 4, 9):
        assert sft.evaluate(model, rows, SFTConfig(batch_size=size), 0) == pytest.approx(
            own_loss(model, rows), abs=1e-5
        )


def test_dropout_is_on_while_training_and_off_while_evaluating(
    tmp_path: Path, tiny_tokenizer: Any, words: list[str]
) -> None:
    start = save_policy(tmp_path / "start", tiny_tokenizer, resid_pdrop=0.5, embd_pdrop=0.5)
    tiny_step = "sft.optimizer.learning_rate=1e-30"
    run = run_sft(
        resolved(tmp_path, *words, f"sft.model.path={start}", tiny_step, "sft.epochs=2", "sft.eval_every=1")
    ).parent
    lines = read_jsonl(run / "metrics.jsonl")
    assert len({line["eval/loss"] for line in lines}) == 1
    assert len({round(line["loss"], 3) for line in lines}) == len(lines)


def test_epochs_steps_and_the_schedule(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Nine rows left to train on, four a step: three steps an epoch; `max_steps` ends a run within one."""
    linear = "sft.optimizer.schedule=linear"
    run = run_sft(resolved(tmp_path, *words, "sft.epochs=2", linear, "sft.microbatch_size=3")).parent
    lines = read_jsonl(run / "metrics.jsonl")
    total = len(lines)
    rows = 12 - int(capsys.readouterr().out.split(" held out")[0].split()[-1])
    assert total == 2 * -(-rows // 4)
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-3 * (1 - k / total) for k in range(total)])
    run = run_sft(resolved(tmp_path, *words, "sft.max_steps=5", f"sft.run_folder={tmp_path / 'other'}")).parent
    assert len(read_jsonl(run / "metrics.jsonl")) == status(run)["step"] == 5


def test_the_batch_arithmetic_is_told(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run_sft(resolved(tmp_path, *words, "sft.microbatch_size=3", "sft.max_steps=2", "sft.data.max_response_tokens=6"))
    out = " ".join(capsys.readouterr().out.split())
    assert "2 optimiser steps of 4 rows" in out
    assert "2 backward passes" in out
    assert "truncated response" in out


def test_every_epoch_sees_every_row_once_in_a_fresh_order(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    original = sft.train_step

    def watched(model: Any, optimizer: Any, rows: list[EncodedRow], *rest: Any) -> Any:
        seen.extend(row.row["prompt"] for row in rows)
        return original(model, optimizer, rows, *rest)

    monkeypatch.setattr(sft, "train_step", watched)
    run_sft(resolved(tmp_path, *words, "sft.epochs=3", "sft.data.validation_fraction=0"))
    epochs = [seen[start : start + 12] for start in range(0, 36, 12)]
    assert all(sorted(epoch) == sorted(row["prompt"] for row in ROWS) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


# Mistakes


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sft.model.path=''", r"`sft.model.path` is not set"),
        ("sft.model.path=/no/such/model", r"/no/such/model"),
        ("sft.data.train=null", r"`data.train` is not set"),
        ("sft.data.train=/no/such/rows.jsonl", r"/no/such/rows.jsonl: there is no such file"),
        ("sft.data.response_field=completion", r"no field `completion`"),
        (
            "sft.data.max_prompt_tokens=3",
            r"12 of 12 prompts are longer than data.max_prompt_tokens=3|prompts are longer",
        ),
        ("sft.data.source=jsnl", r"'jsnl'.*`jsonl`"),
        ("sft.batch_size=0", r"`sft.batch_size` is 0"),
        ("sft.microbatch_size=0", r"`sft.microbatch_size` is 0"),
        ("sft.epochs=0", r"`sft.epochs` is 0"),
        ("sft.max_steps=0", r"`sft.max_steps` is 0"),
        ("sft.eval_every=0", r"`sft.eval_every` is 0"),
        ("sft.eval_rows=-1", r"`sft.eval_rows` is -1"),
        ("sft.optimizer.schedule=cosin", r"`sft.optimizer.schedule` is 'cosin'"),
        ("device=cuda:x", r"`device`"),
        ("threads=0", r"`threads` is 0"),
    ],
)
def test_a_mistake_leaves_no_run_folder(tmp_path: Path, words: list[str], word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_sft(resolved(tmp_path, *words, word))
    assert list(tmp_path.iterdir()) == []


def test_a_broken_line_is_named_and_leaves_no_run_folder(tmp_path: Path, words: list[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a", "resp\n')
    with pytest.raises(UserError, match=r"rows.jsonl:2"):
        run_sft(resolved(tmp_path, *words, f"sft.data.train={rows}"))
    rows.write_text("")
    with pytest.raises(UserError, match=r"rows.jsonl: the file is empty"):
        run_sft(resolved(tmp_path, *words, f"sft.data.train={rows}"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_run_does_not_overwrite_another(tmp_path: Path, words: list[str]) -> None:
    config = resolved(tmp_path, *words, "sft.max_steps=1")
    final = run_sft(config)
    before = {path: path.stat().st_mtime_ns for path in final.parent.rglob("*")}
    with pytest.raises(UserError, match=r"`sft.run_folder`: .* is not empty"):
        run_sft(config)
    assert {path: path.stat().st_mtime_ns for path in final.parent.rglob("*")} == before


def test_rows_longer_than_the_model_are_refused_at_the_start(tmp_path: Path, words: list[str]) -> None:
    """GPT-2 has a position for each of its 64 tokens and none beyond."""
    rows = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "a", "response": "x y z " * 60}])
    config = resolved(tmp_path, *words, f"sft.data.train={rows}", "sft.data.validation_fraction=0")
    with pytest.raises(UserError, match=r"`sft.model`: .*64 positions"):
        run_sft(config)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tmp_path: Path, tiny_tokenizer: Any, words: list[str]
) -> None:
    start = save_policy(tmp_path / "start", tiny_tokenizer, vocab_size=290)
    with pytest.raises(UserError, match=r"`sft.model`: .*300 tokens.*290"):
        run_sft(resolved(tmp_path, *words, f"sft.model.path={start}"))
    assert [path.name for path in tmp_path.iterdir()] == ["start"]


def test_held_out_rows_may_all_be_dropped(tmp_path: Path, words: list[str]) -> None:
    """Then nothing is evaluated; without a training row there is nothing to do."""
    longer = write_jsonl(tmp_path / "longer.jsonl", [{"prompt": "a b c d e f g h i j k l", "response": "b"}])
    short = ("sft.data.max_prompt_tokens=4", "sft.data.on_long_prompt=drop", "sft.max_steps=1")
    one = write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a", "response": "b"}])
    files = (f"sft.data.train={one}", f"sft.data.validation={longer}")
    run = run_sft(resolved(tmp_path, *words, *files, *short)).parent
    assert "eval/loss" not in read_jsonl(run / "metrics.jsonl")[-1]
    with pytest.raises(UserError, match="no training row is left"):
        run_sft(resolved(tmp_path / "b", *words, f"sft.data.train={longer}", *short))
    assert not (tmp_path / "b").exists()


def test_a_step_that_is_not_finite_is_skipped_and_its_batch_kept(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = sft.token_nll

    def broken(*args: Any) -> tuple[Tensor, int]:
        nll, count = original(*args)
        calls.append(count)
        return (nll * math.nan if len(calls) == 2 else nll), count

    monkeypatch.setattr(sft, "token_nll", broken)
    run = run_sft(resolved(tmp_path, *words, "sft.max_steps=3", "sft.eval_every=3")).parent
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1]
    assert lines[1]["loss"] is None
    assert lines[1]["grad_norm"] is None
    [kept] = (run / "skipped").iterdir()
    assert kept.name == "step_000002_1.json"
    rows = json.loads(kept.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 4
    assert all(row in ROWS for row in rows)


def test_a_failure_in_the_loop_is_recorded(tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sft, "train_step", broken)
    config: Config = resolved(tmp_path, *words)
    with pytest.raises(RuntimeError, match="out of memory"):
        run_sft(config)
    run = Path(config.sft.run_folder)
    assert status(run)["state"] == "failed"
    assert "out of memory" in status(run)["message"]
    assert not (run / "final").exists()
