"""Measuring a policy, writing its responses, and showing them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from marlhf.config import DataConfig, ModelConfig, RolloutConfig
from marlhf.data import EncodedRow, encode_rows, load_tokenizer
from marlhf.errors import UserError
from marlhf.models import load_policy, load_reward_model, sequence_scores
from marlhf.responses import Responses
from marlhf.rewards import ModelReward, Rewards
from marlhf.stages.evaluate import Evaluation, measure, run_evaluate, run_generate, token_texts
from tests.trainer.test_rollout import moved
from tests.trainer.tiny import ROWS, leftovers, read_jsonl, resolved, save_policy, save_scorer, write_jsonl

CPU = torch.device("cpu")


@pytest.fixture
def words(policies: dict[str, Path], scorers: dict[str, Path], row_file: Path) -> list[str]:
    return [
        f"ppo.run_folder={policies['gpt2'].parent}/none",
        f"generate.model.path={policies['gpt2']}",
        f"generate.data.train={row_file}",
        "generate.rollout.batch_size=5",
        "generate.rollout.max_new_tokens=6",
        f"evaluate.model.path={policies['gpt2']}",
        f"evaluate.reference.path={policies['gpt2']}",
        f"evaluate.reward_model.path={scorers['gpt2']}",
        f"evaluate.data.train={row_file}",
        f"evaluate.data.validation={row_file}",
        "evaluate.rollout.batch_size=5",
        "evaluate.rollout.max_new_tokens=6",
    ]


def rows_of(folder: Path) -> list[EncodedRow]:
    return encode_rows(ROWS, load_tokenizer(str(folder)), DataConfig(), responses=())[0]


# Measuring


def evaluation(scores: torch.Tensor) -> Evaluation:
    n = len(scores)
    mask = torch.ones(n, 3, dtype=torch.bool)
    ids = torch.ones(n, 3, dtype=torch.long)
    truncated = torch.arange(n) < 3
    zeros = torch.zeros(n, 3)
    return Evaluation(Responses(ids, mask, ids, mask, truncated, mask), scores, scores + 1, zeros, zeros, ids)


def test_means_count_each_row_once() -> None:
    """Rows 0 .. 8 -> 4.0."""
    found = evaluation(torch.arange(9.0)).summary()
    assert found == {"score": 4.0, "kl": 5.0, "response_length": 3.0, "stopped_share": pytest.approx(6 / 9)}


@pytest.mark.parametrize("batch_size", [1, 2, 9, 64])
def test_every_row_is_measured_in_its_place(
    policies: dict[str, Path], scorers: dict[str, Path], batch_size: int
) -> None:
    """Nine rows, whatever the batch: score and KL of row i are those of its own prompt and response alone."""
    start = ModelConfig(path=str(policies["gpt2"]))
    policy = load_policy(start, key="x", device=CPU)
    reference = moved(load_policy(start, key="x", device=CPU))
    reward_model = load_reward_model(ModelConfig(path=str(scorers["gpt2"])), key="x", device=CPU)
    reward_model.config.reward_std = 2.0
    rows = rows_of(policies["gpt2"])[:9]
    rollout = RolloutConfig(batch_size=batch_size, max_new_tokens=6, temperature=0.5)
    found = measure(
        rows,
        policy=policy,
        reference=reference,
        rewards=Rewards([ModelReward(reward_model, standardize=True)]),
        rollout=rollout,
        stops=[2],
        pad_id=0,
    )
    assert found.scores.shape == found.kl.shape == (9,)
    for i, row in enumerate(rows):
        response = found.responses.response_ids[i][found.responses.response_mask[i]].tolist()
        ids = torch.tensor([row.prompt_ids + response])
        score = sequence_scores(reward_model, ids, torch.ones_like(ids, dtype=torch.bool))[0] / 2
        torch.testing.assert_close(found.scores[i], score, rtol=0, atol=1e-5)
        totals = []
        for model in (policy, reference):
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.5
            totals.append(logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).sum())
        torch.testing.assert_close(found.kl[i], totals[0] - totals[1], rtol=0, atol=1e-4)


def test_evaluations_meet_equal_noise(policies: dict[str, Path], scorers: dict[str, Path]) -> None:
    policy = load_policy(ModelConfig(path=str(policies["gpt2"])), key="x", device=CPU)
    reward_model = load_reward_model(ModelConfig(path=str(scorers["gpt2"])), key="x", device=CPU)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        result = measure(
            rows_of(policies["gpt2"]),
            policy=policy,
            reference=policy,
            rewards=Rewards([ModelReward(reward_model)]),
            rollout=RolloutConfig(max_new_tokens=6),
            stops=[2],
            pad_id=0,
        )
        assert not result.kl.any()
        found.append(result.responses.response_ids)
    assert torch.equal(*found)


# The texts of tokens


def test_tokens_add_up_to_the_text(tiny_tokenizer: Any) -> None:
    """Also where one character is several tokens; the last of them shows it."""
    for text in ("Return the value.", "naïve 東京 🦊 end", "", "  two  spaces", "<eos> spelt out"):
        ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
        texts = token_texts(tiny_tokenizer, ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == tiny_tokenizer.decode(ids)
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts)


def test_bytes_that_are_no_text_keep_their_place(tiny_tokenizer: Any) -> None:
    fox = tiny_tokenizer("🦊", add_special_tokens=False)["input_ids"]
    word = tiny_tokenizer("end", add_special_tokens=False)["input_ids"]
    ids = [*fox[:2], *word]
    texts = token_texts(tiny_tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tiny_tokenizer.decode(ids)
    assert len(token_texts(tiny_tokenizer, fox[:2])) == 2


# generate


def test_responses_stand_beside_their_rows(tmp_path: Path, words: list[str]) -> None:
    """One line per row, in the order of the file, its own columns kept."""
    output = run_generate(resolved(tmp_path, *words))
    assert output == tmp_path / "runs" / "generated.jsonl"
    lines = read_jsonl(output)
    assert [line["prompt"] for line in lines] == [row["prompt"] for row in ROWS]
    for line in lines:
        assert line.keys() == {"prompt", "response", "truncated"}
        assert isinstance(line["response"], str)
        assert isinstance(line["truncated"], bool)
    assert leftovers(tmp_path) == []


def test_greedy_responses_do_not_depend_on_seed_or_batch(tmp_path: Path, words: list[str]) -> None:
    found = []
    for name, more in (("a", ["seed=0"]), ("b", ["seed=1", "generate.rollout.batch_size=12"])):
        config = resolved(
            tmp_path, *words, *more, "generate.rollout.temperature=0", f"generate.output={tmp_path / name}"
        )
        found.append(read_jsonl(run_generate(config)))
    assert found[0] == found[1]


def test_the_seed_decides_what_is_sampled(tmp_path: Path, words: list[str]) -> None:
    found = []
    for seed in (0, 0, 1):
        config = resolved(
            tmp_path, *words, f"seed={seed}", "generate.rollout.top_k=50", f"generate.output={tmp_path / 'a'}"
        )
        found.append(read_jsonl(run_generate(config)))
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("generate.model.path=${ppo.run_folder}/final", r"`generate.model.path`.*run the stage that writes it first"),
        ("generate.data.train=null", r"`data.train` is not set"),
        ("generate.data.prompt_field=question", r"no field `question`"),
        ("generate.rollout.max_new_tokens=60", r"`generate.model`: .*64 positions"),
        ("generate.rollout.temperature=-1", r"`generate.rollout.temperature` is -1"),
        ("generate.data.max_prompt_tokens=1", r"longer than data.max_prompt_tokens=1"),
    ],
)
def test_a_mistake_writes_no_responses(tmp_path: Path, words: list[str], word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_generate(resolved(tmp_path, *words, word))
    assert list(tmp_path.iterdir()) == []


def test_all_prompts_may_be_dropped(tmp_path: Path, words: list[str]) -> None:
    for section, run in (("generate", run_generate), ("evaluate", run_evaluate)):
        short = (f"{section}.data.max_prompt_tokens=1", f"{section}.data.on_long_prompt=drop")
        with pytest.raises(UserError, match=f"{section}: no prompt is left"):
            run(resolved(tmp_path, *words, *short))
    assert list(tmp_path.iterdir()) == []


# evaluate


def test_means_and_their_interval(tmp_path: Path, words: list[str], policies: dict[str, Path]) -> None:
    output = run_evaluate(resolved(tmp_path, *words))
    assert output == tmp_path / "runs" / "evaluation.json"
    found = json.loads(output.read_text())
    assert found["rows"] == 12
    assert found["kl"] == pytest.approx(0.0, abs=1e-5)
    assert 1 <= found["response_length"] <= 6
    assert 0 <= found["stopped_share"] <= 1
    assert found["score_half_width_95"] > 0
    assert leftovers(tmp_path) == []
    # Again with one row: no interval, and no NaN in the file.
    one = write_jsonl(tmp_path / "one.jsonl", ROWS[:1])
    output = run_evaluate(resolved(tmp_path, *words, f"evaluate.data.validation={one}"))
    assert json.loads(output.read_text())["score_half_width_95"] is None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("evaluate.model.path=${ppo.run_folder}/final", r"`evaluate.model.path`.*run the stage that writes it first"),
        ("evaluate.reward_model.path=${evaluate.model.path}", r"`evaluate.reward_model`: .* has no reward head"),
        ("evaluate.reference.path=''", r"`evaluate.reference.path` is not set"),
        ("evaluate.data.train=null", r"`data.train` is not set"),
        ("evaluate.rollout.max_new_tokens=60", r"`evaluate.model`: .*64 positions"),
        ("evaluate.rollout.top_p=2", r"`evaluate.rollout.top_p` is 2"),
    ],
)
def test_a_mistake_writes_no_evaluation(tmp_path: Path, words: list[str], word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_evaluate(resolved(tmp_path, *words, word))
    assert list(tmp_path.iterdir()) == []


def test_models_that_do_not_fit_each_other_are_refused(tmp_path: Path, tiny_tokenizer: Any, words: list[str]) -> None:
    scorer = save_scorer(tmp_path / "scorer", tiny_tokenizer, vocab_size=310)
    with pytest.raises(UserError, match=r"`evaluate.reward_model`: its vocabulary has 310 tokens"):
        run_evaluate(resolved(tmp_path, *words, f"evaluate.reward_model.path={scorer}"))
    reference = save_policy(tmp_path / "reference", tiny_tokenizer, vocab_size=290)
    with pytest.raises(UserError, match=r"`evaluate.reference`: "):
        run_evaluate(resolved(tmp_path, *words, f"evaluate.reference.path={reference}"))


def test_a_model_is_sampled_where_training_reads_recorded_responses(tmp_path: Path, words: list[str]) -> None:
    found = []
    for name in ("hf", "jsonl"):
        output = tmp_path / name
        run_generate(resolved(tmp_path, *words, f"generate.rollout.engine={name}", f"generate.output={output}"))
        found.append(read_jsonl(output))
    assert found[0] == found[1]
    assert len(found[0]) == len(ROWS)


def test_responses_come_from_the_engine_that_is_named(tmp_path: Path, words: list[str]) -> None:
    """Which sees the rows."""
    engine = tmp_path / "engine.py"
    engine.write_text(
        "def sample(prompts, *, rows, stop_token_ids, **_):\n"
        "    ids = [[40 + len(row['prompt']), *stop_token_ids] for row in rows]\n"
        "    return ids, [2] * len(ids), [True] * len(ids)\n"
    )
    output = tmp_path / "out.jsonl"
    run_generate(resolved(tmp_path, *words, f"generate.rollout.engine={engine}:sample", f"generate.output={output}"))
    tokenizer = load_tokenizer(next(word for word in words if "model.path" in word).partition("=")[2])
    for line in read_jsonl(output):
        assert line["response"] == tokenizer.decode([40 + len(line["prompt"])])
        assert not line["truncated"]
