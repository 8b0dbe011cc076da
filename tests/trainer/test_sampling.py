"""The seam behind which responses are sampled: what an engine is asked, and what of its answers is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from marlhf.config import ModelConfig, RolloutConfig
from marlhf.errors import ConfigError, DataError, UserError
from marlhf.models import load_policy
from marlhf.rollout import check_rollout, generate
from marlhf.sampling import buckets, check_recorded, checked, load_engine
from marlhf.user_code import load_function

CPU = torch.device("cpu")
PROMPTS = [[1, 40, 77, 130], [1, 50], [1, 60, 70, 80, 90, 100, 110], [1]]
ENGINE = """
calls = []


def sample(prompts, **options):
    calls.append((prompts, options))
    ids = [[len(prompt) + 10, 9, 2] if len(prompt) > 1 else [] for prompt in prompts]
    return ids, [len(row) for row in ids], [bool(row) for row in ids]


def padded(prompts, **options):
    import torch

    ids = torch.zeros(len(prompts), 5, dtype=torch.long)
    ids[:, 0] = torch.tensor([len(prompt) + 10 for prompt in prompts])
    ids[:, 1] = 2
    return ids, torch.full((len(prompts),), 2), torch.ones(len(prompts), dtype=torch.bool)


def with_a_tool(prompts, **options):
    n = len(prompts)
    return [[7, 2, 8, 9, 2]] * n, [5] * n, [True] * n, [["assistant", "assistant", "tool", "user", "assistant"]] * n
"""


@pytest.fixture
def policy(policies: dict[str, Path]) -> Any:
    return load_policy(ModelConfig(path=str(policies["gpt2"])), key="ppo.model", device=CPU).eval()


@pytest.fixture
def engine(tmp_path: Path) -> str:
    file = tmp_path / "engine.py"
    file.write_text(ENGINE, encoding="utf-8")
    return str(file)


def sample(policy: Any, engine: str, **changes: Any) -> Any:
    config = RolloutConfig(engine=engine, **{"max_new_tokens": 6, "temperature": 0.5, **changes})
    rows = [{"prompt": str(i)} for i in range(4)]
    return generate(policy, PROMPTS, config, stops=[2], pad_id=0, seed=5, rows=rows)


@pytest.mark.parametrize("size", [None, 2, 3])
def test_an_engine_is_asked_in_buckets_and_answers_in_place(policy: Any, engine: str, size: int | None) -> None:
    got = sample(policy, f"{engine}:sample", generation_batch_size=size)
    assert got.response_ids.tolist() == [[14, 9, 2], [12, 9, 2], [17, 9, 2], [0, 0, 0]]
    assert got.response_mask.int().tolist() == got.action_mask.int().tolist() == [[1, 1, 1]] * 3 + [[0, 0, 0]]
    assert got.truncated.tolist() == [False, False, False, True]
    for i, prompt in enumerate(PROMPTS):
        assert got.prompt_ids[i][got.prompt_mask[i]].tolist() == prompt
    seen = load_function(engine, "sample", key="x").__globals__["calls"]
    assert [len(prompts) for prompts, _ in seen] == {None: [4], 2: [2, 2], 3: [3, 1]}[size]
    for prompts, options in seen:
        assert [row["prompt"] for row in options["rows"]] == [str(PROMPTS.index(prompt)) for prompt in prompts]
        assert options["model"] is policy
        assert (options["max_new_tokens"], options["temperature"], options["stop_token_ids"]) == (6, 0.5, [2])
    assert len({options["seed"] for _, options in seen}) == len(seen)


def test_prompts_of_like_length_are_sampled_together() -> None:
    assert buckets(PROMPTS, None) == buckets(PROMPTS, 4) == [[0, 1, 2, 3]]
    assert buckets(PROMPTS, 2) == [[3, 1], [0, 2]]
    assert buckets(PROMPTS, 3) == [[3, 1, 0], [2]]


def test_ids_may_come_padded(policy: Any, engine: str) -> None:
    got = sample(policy, f"{engine}:padded")
    assert got.response_ids.tolist() == [[14, 2], [12, 2], [17, 2], [11, 2]]


def test_the_tokens_of_others_are_no_actions(policy: Any, engine: str) -> None:
    got = sample(policy, f"{engine}:with_a_tool")
    assert got.response_mask.all()
    assert got.action_mask.int().tolist() == [[1, 1, 0, 0, 1]] * 4
    assert not got.truncated.any()


def test_recorded_responses_are_those_of_the_rows(policy: Any) -> None:
    rows = [
        {"response_ids": [7, 2, 8, 9], "roles": ["assistant", "assistant", "tool", "assistant"]},
        {"response_ids": [5, 2]},
        {"response_ids": [5, 2], "stopped": False},
        {"response_ids": [6]},
    ]
    config = RolloutConfig(engine="jsonl", max_new_tokens=6)
    got = generate(policy, PROMPTS, config, stops=[2], pad_id=0, seed=5, rows=rows)
    assert got.response_ids.tolist() == [[7, 2, 8, 9], [5, 2, 0, 0], [5, 2, 0, 0], [6, 0, 0, 0]]
    assert got.action_mask.int().tolist() == [[1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert got.truncated.tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([[5, 2]], [2]), r"returns \(ids, lengths, stopped\)"),
        (([[5, 2], [5]], [2], [True]), r"ids has 2 entries for 1 prompts"),
        (([[5, 2]], [2], [True, True]), r"stopped has 2 entries"),
        (([[5, 2]], [3], [True]), r"length 3 of response 0, which has 2 ids"),
        (([[5] * 9], [9], [False]), r"length 9 .* may have 6 at most"),
        (([[300, 2]], [2], [True]), r"token id 300 in response 0; the vocabulary has 300"),
        (([[-1, 2]], [2], [True]), r"token id -1"),
        (([[2, 5]], [2], [False]), r"goes on after a stop token"),
        (([[5, 6]], [2], [True]), r"stopped is True"),
        (([[5, 2]], [2], [False]), r"stopped is False"),
        (([[5, 2]], [2], [True], [["assistant"]]), r"1 roles for the 2 tokens"),
        (([[5, 2]], [2], [True], [["assistant", "system"]]), r"role 'system' .*assistant, tool, user"),
    ],
)
def test_answers_that_cannot_be_used(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(given, 1, longest=6, vocabulary=300, stops=[2])


def test_an_engine_that_answers_wrongly_is_named(policy: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def sample(prompts, **_):\n    return [], [], []\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"bad.py:sample\) .*ids has 0 entries for 4 prompts"):
        sample(policy, f"{file}:sample")
    file = tmp_path / "down.py"
    file.write_text("def sample(prompts, **_):\n    raise ConnectionError('refused')\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"down.py:sample\) raised ConnectionError: refused"):
        sample(policy, f"{file}:sample")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm", r"`ppo.rollout.engine` is 'vllm'; write hf, jsonl, module:function"),
        (":sample", r"is ':sample'"),
        ("no_such_module_here:sample", r"no_such_module_here cannot be loaded: ModuleNotFoundError"),
        ("json:no_such_function", r"json has no function `no_such_function`"),
        ("/no/such/engine.py:sample", r"there is no file /no/such/engine.py"),
    ],
)
def test_engines_that_do_not_exist_are_told_at_the_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rollout(RolloutConfig(engine=name), key="ppo.rollout", scored=True)
    assert load_engine("hf", key="x") is None


def test_a_file_that_fails_is_named_and_may_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import this_is_nowhere\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"`x`: .*mine.py cannot be loaded: ModuleNotFoundError"):
        load_function(str(file), "f", key="x")
    file.write_text("def f():\n    return 3\n", encoding="utf-8")
    assert load_function(str(file), "f", key="x")() == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p"}, r"row 2 \('p'\): .*no list `response_ids`"),
        ({"prompt": "p", "response_ids": [5, "x"]}, r"row 2"),
        ({"prompt": "p", "response_ids": [5, 999]}, r"row 2 .*token id 999"),
        ({"prompt": "p", "response_ids": [5, 6, 7, 8, 9, 10, 11]}, r"row 2 .*may have 6 at most"),
        ({"prompt": "p", "response_ids": [5, 2], "roles": ["assistant"]}, r"row 2 .*1 roles for the 2 tokens"),
        ({"prompt": "p", "response_ids": [5, 2], "roles": ["tool", "user"]}, r"row 2 .*nothing to learn from"),
    ],
)
def test_rows_whose_recorded_response_cannot_be_used(row: dict[str, Any], message: str) -> None:
    rows = [{"prompt": "a", "response_ids": [5, 2]}, row]
    with pytest.raises(DataError, match=message):
        check_recorded(rows, config=RolloutConfig(engine="jsonl", max_new_tokens=6), vocabulary=300, stops=[2])
    check_recorded(rows, config=RolloutConfig(max_new_tokens=6), vocabulary=300, stops=[2])
