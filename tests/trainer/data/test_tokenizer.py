import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from marlhf.data import load_tokenizer, train_tokenizer
from marlhf.errors import ConfigError, UserError

from .conftest import SENTENCES, TEMPLATE

TRAINED = train_tokenizer(SENTENCES * 3, vocab_size=320)
# Texts around the special tokens' own spelling and around white space, which clean-up steps like to touch.
TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from(["<bos>", "<eos>", "<pad>", " ", "\n", "fox", " .", " n't", "é", "\u200d", "😀"])).map(
        "".join
    ),
)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_any_text_decodes_to_itself(text: str) -> None:
    ids = TRAINED(text)["input_ids"]
    assert ids[0] == 1
    assert TRAINED.decode(ids, skip_special_tokens=True) == text
    assert not {0, 1, 2} & set(ids[1:])


def test_special_tokens_have_their_own_ids() -> None:
    assert (TRAINED.pad_token_id, TRAINED.bos_token_id, TRAINED.eos_token_id) == (0, 1, 2)


def test_merges_are_learned_and_the_size_is_an_upper_bound() -> None:
    assert len(train_tokenizer(SENTENCES * 3, vocab_size=280)) == 280
    assert 259 < len(train_tokenizer(["ab ab"], vocab_size=4096)) < 270
    assert len(TRAINED("the fox", add_special_tokens=False)["input_ids"]) < len("the fox")


def test_same_texts_give_the_same_tokenizer() -> None:
    again = train_tokenizer(SENTENCES * 3, vocab_size=320)
    assert again.backend_tokenizer.to_str() == TRAINED.backend_tokenizer.to_str()
    other = train_tokenizer(["zebra zebra " * 9], vocab_size=320)
    assert other.backend_tokenizer.to_str() != TRAINED.backend_tokenizer.to_str()


def test_saved_folder_loads_equal_with_transformers_alone(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(SENTENCES * 3, vocab_size=320, chat_template=TEMPLATE)
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
        assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)
        assert loaded.chat_template == TEMPLATE
        text = "odd <bos> text , with <eos>\n"
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text


def test_vocabulary_below_the_alphabet_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 259 tokens, not 100"):
        train_tokenizer(SENTENCES, vocab_size=100)


def test_missing_pad_becomes_eos(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    saved = json.loads(settings_file.read_text())
    del saved["pad_token"]
    settings_file.write_text(json.dumps(saved))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id == 2


def test_missing_eos_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    saved = json.loads(settings_file.read_text())
    del saved["eos_token"]
    settings_file.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"no end-of-sequence token.*set eos_token in its tokenizer_config\.json"):
        load_tokenizer(str(tmp_path))


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=r"holds no tokenizer \(none of tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_damaged_tokenizer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=f"cannot load the tokenizer of {tmp_path}: "):
        load_tokenizer(str(tmp_path))


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        load_tokenizer(str(tmp_path / "nothing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; a tokenizer is loaded from the folder"):
        load_tokenizer(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="path is not set"):
        load_tokenizer("")


def test_unknown_model_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no connection\nand a long tail")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(UserError) as caught:
        load_tokenizer("someone/model")
    assert str(caught.value) == (
        "cannot load the tokenizer of someone/model: there is no such folder, nor could a model of that name be "
        "loaded: no connection"
    )
