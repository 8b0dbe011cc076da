"""A small tokenizer, and others made from it that differ in who adds which special token."""

import copy

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from marlhf.data import train_tokenizer

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a dog and a fox share one brown box of quick snacks",
    "return the number of boxes that the fox has seen",
    "Write a value to the file, and return nothing.",
]

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TEMPLATE_WITH_BOS = "{{ bos_token }}" + TEMPLATE


@pytest.fixture(scope="session")
def trained() -> PreTrainedTokenizerFast:
    return train_tokenizer(SENTENCES * 3, vocab_size=320)


@pytest.fixture
def tokenizer(trained: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Puts BOS in front; ids: <pad> 0, <bos> 1, <eos> 2."""
    return copy.deepcopy(trained)


@pytest.fixture
def bare_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Adds nothing by itself, as many chat models' tokenizers do."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return tokenizer


@pytest.fixture
def closing_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Adds both BOS and EOS to every text."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A $B <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return tokenizer
