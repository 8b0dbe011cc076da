"""A tokenizer, models and data files that tests read and never write to."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from marlhf.data import train_tokenizer
from tests.trainer.tiny import FAMILIES, PAIRS, ROWS, TEXTS, save_policy, save_scorer, write_jsonl


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Ids: <pad> 0, <bos> 1, <eos> 2; puts BOS in front."""
    return train_tokenizer([f"{prompt}\n{response}" for prompt, response in TEXTS], vocab_size=300)


@pytest.fixture(scope="session")
def policies(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of causal language models by family."""
    root = tmp_path_factory.mktemp("policies")
    return {family: save_policy(root / family, tiny_tokenizer, family=family) for family in FAMILIES}


@pytest.fixture(scope="session")
def scorers(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of reward models by family."""
    root = tmp_path_factory.mktemp("scorers")
    return {family: save_scorer(root / family, tiny_tokenizer, family=family) for family in FAMILIES}


@pytest.fixture(scope="session")
def row_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", ROWS)


@pytest.fixture(scope="session")
def pair_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "pairs.jsonl", PAIRS)
