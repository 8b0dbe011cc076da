import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from marlhf.config import DataConfig
from marlhf.data import EncodedRow, encode_prompt, encode_response, encode_rows
from marlhf.errors import ConfigError, DataError

from .conftest import TEMPLATE, TEMPLATE_WITH_BOS

BOS, EOS = 1, 2
KINDS_OF_TOKENIZER = ("tokenizer", "bare_tokenizer", "closing_tokenizer")


def plain(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of the text itself, by the tokenizers library alone."""
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def text_row(prompt: object, **responses: str) -> dict[str, Any]:
    return {"prompt": prompt, **responses}


# Prompts.


@pytest.mark.parametrize(
    ("kind", "prefix"), [("tokenizer", [BOS]), ("bare_tokenizer", []), ("closing_tokenizer", [BOS])]
)
def test_text_prompt_has_one_bos_if_the_tokenizer_puts_one_and_never_eos(
    request: pytest.FixtureRequest, kind: str, prefix: list[int]
) -> None:
    tokenizer = request.getfixturevalue(kind)
    ids = encode_prompt(tokenizer, "the fox", DataConfig(prompt_suffix="\n"))
    assert ids == prefix + plain(tokenizer, "the fox\n")
    [row], _ = encode_rows([text_row("the fox")], tokenizer, DataConfig(), responses=())
    assert row.prompt_ids == prefix + plain(tokenizer, "the fox")
    assert row.prefix_length == len(prefix)


def test_a_prompt_that_spells_out_its_bos_still_has_one(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.split_special_tokens = False
    assert encode_prompt(tokenizer, "<bos><bos>the fox", DataConfig()) == [BOS, *plain(tokenizer, "the fox")]


def test_special_words_in_a_prompt_stay_text(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode_prompt(tokenizer, "a <eos> <bos>", DataConfig())
    assert not {0, 1, 2} & set(ids[1:])
    assert tokenizer.decode(ids[1:]) == "a <eos> <bos>"


@pytest.mark.parametrize(
    ("kind", "template", "bos"),
    [
        ("tokenizer", TEMPLATE, 1),
        ("tokenizer", TEMPLATE_WITH_BOS, 1),
        ("closing_tokenizer", TEMPLATE, 1),
        ("closing_tokenizer", TEMPLATE_WITH_BOS, 1),
        ("bare_tokenizer", TEMPLATE, 0),
        ("bare_tokenizer", TEMPLATE_WITH_BOS, 1),
    ],
)
@pytest.mark.parametrize("prompt", ["the fox", [{"role": "user", "content": "the fox"}]])
def test_chat_template_has_one_bos_whoever_puts_it(
    request: pytest.FixtureRequest, kind: str, template: str, bos: int, prompt: Any
) -> None:
    tokenizer = request.getfixturevalue(kind)
    tokenizer.chat_template = template
    config = DataConfig(chat_template=True)
    ids = encode_prompt(tokenizer, prompt, config)
    assert ids.count(BOS) == bos
    assert ids[:bos] == [BOS] * bos
    # The template's own EOS behind the user's message is a token, and the assistant's turn is open.
    assert ids.count(EOS) == 1
    assert tokenizer.decode(ids[bos:]) == "[user] the fox<eos>\n[assistant] "
    [row], _ = encode_rows([text_row(prompt)], tokenizer, config, responses=())
    assert (row.prompt_ids, row.prefix_length) == (ids, bos)


def test_messages_of_several_roles_go_through_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TEMPLATE
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    ids = encode_prompt(tokenizer, prompt, DataConfig(chat_template=True))
    assert tokenizer.decode(ids[1:]) == "[system] be brief<eos>\n[user] hi<eos>\n[assistant] "


def test_template_settings_that_cannot_work(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        encode_prompt(tokenizer, "p", DataConfig(chat_template=True))
    with pytest.raises(DataError, match=r"list of messages; set data\.chat_template=true"):
        encode_prompt(tokenizer, [{"role": "user", "content": "u"}], DataConfig())
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(ConfigError, match="are both set: the template decides how a prompt ends"):
        encode_prompt(tokenizer, "p", DataConfig(chat_template=True, prompt_suffix="\n"))
    tokenizer.chat_template = "{{ raise_exception('only users may speak') }}"
    rows = [text_row([{"role": "system", "content": "be brief"}])]
    with pytest.raises(DataError, match=r"row 1 \('be brief'\): the chat template refuses .*only users may speak"):
        encode_rows(rows, tokenizer, DataConfig(chat_template=True), responses=())


# Responses.


@pytest.mark.parametrize("kind", KINDS_OF_TOKENIZER)
def test_response_has_no_bos_and_one_eos_at_its_end(request: pytest.FixtureRequest, kind: str) -> None:
    tokenizer = request.getfixturevalue(kind)
    ids = plain(tokenizer, "lazy dog")
    assert encode_response(tokenizer, "lazy dog") == [*ids, EOS]
    assert encode_response(tokenizer, "lazy dog", stop=False) == ids


def test_response_ends_at_the_first_eos_that_it_spells_out(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.split_special_tokens = False
    assert encode_response(tokenizer, "dog<eos>") == [*plain(tokenizer, "dog"), EOS]
    assert encode_response(tokenizer, "dog<eos>fox<eos>") == [*plain(tokenizer, "dog"), EOS]


def test_tokenizer_without_eos_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        encode_response(tokenizer, "dog")
    encode_rows([text_row("p")], tokenizer, DataConfig(), responses=())


@pytest.mark.parametrize("template", [None, TEMPLATE, TEMPLATE_WITH_BOS])
def test_a_row_has_the_ids_that_its_rollout_has(tokenizer: PreTrainedTokenizerFast, template: str | None) -> None:
    """A reward model reads prompt + response: that must be the prompt's ids, then the ids the policy wrote."""
    tokenizer.chat_template = template
    config = DataConfig(chat_template=template is not None, prompt_suffix="" if template else "\n")
    prompt = encode_prompt(tokenizer, "Write a value", config)
    written = [*plain(tokenizer, "return the number"), EOS]
    text = tokenizer.decode(written, skip_special_tokens=True)
    [row], _ = encode_rows([text_row("Write a value", response=text)], tokenizer, config, responses=("response",))
    assert row.prompt_ids + row.response_ids["response"] == prompt + written


# Rows.


def test_rows_in_order_with_every_named_response(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [text_row(f"box {i}", chosen=f"fox {i}", rejected=f"dog {i}", kind="k") for i in range(50)]
    encoded, counts = encode_rows(rows, tokenizer, DataConfig(), responses=("chosen", "rejected"))
    assert encoded == [
        EncodedRow(
            prompt_ids=[BOS, *plain(tokenizer, f"box {i}")],
            response_ids={
                "chosen": [*plain(tokenizer, f"fox {i}"), EOS],
                "rejected": [*plain(tokenizer, f"dog {i}"), EOS],
            },
            row=rows[i],
            prefix_length=1,
        )
        for i in range(50)
    ]
    assert counts == {"dropped_long_prompt": 0, "truncated_prompt": 0, "truncated_response": 0}
    assert encode_rows([], tokenizer, DataConfig(), responses=("chosen",)) == ([], counts)


def test_batch_equals_row_by_row(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [text_row("x " * (i % 7), response="fox dog " * (i % 5 + 1)) for i in range(40)]
    together, _ = encode_rows(rows, tokenizer, DataConfig(), responses=("response",))
    for row, encoded in zip(rows, together, strict=True):
        assert encoded.prompt_ids == encode_prompt(tokenizer, row["prompt"], DataConfig())
        assert encoded.response_ids["response"] == encode_response(tokenizer, row["response"])


LONG, SHORT = "zyx wvu", "z"


def long_and_short(
    tokenizer: PreTrainedTokenizerFast, rule: str, length: int
) -> tuple[list[EncodedRow], dict[str, int]]:
    config = DataConfig(max_prompt_tokens=length, on_long_prompt=rule)
    return encode_rows([text_row(SHORT), text_row(LONG), text_row(SHORT)], tokenizer, config, responses=())


def test_long_prompt_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    length = len(encode_prompt(tokenizer, LONG, DataConfig()))
    long_and_short(tokenizer, "error", length)
    with pytest.raises(DataError) as caught:
        long_and_short(tokenizer, "error", length - 1)
    assert str(caught.value) == (
        f"1 of 3 prompts are longer than data.max_prompt_tokens={length - 1}; raise it, or set data.on_long_prompt to "
        f"drop or truncate:\n  row 2 ('zyx wvu'): {length} tokens"
    )


def test_long_prompts_are_listed_up_to_five_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"(?s)7 of 7 prompts.*row 5 .*\.\.\. and 2 more") as caught:
        encode_rows([text_row("x" * 60)] * 7, tokenizer, DataConfig(max_prompt_tokens=3), responses=())
    assert len(re.findall(r"row \d \('x{37}\.\.\.'\): \d+ tokens", str(caught.value))) == 5


def test_long_prompt_drops_its_row(tokenizer: PreTrainedTokenizerFast) -> None:
    encoded, counts = long_and_short(tokenizer, "drop", 3)
    assert [row.row["prompt"] for row in encoded] == [SHORT, SHORT]
    assert counts == {"dropped_long_prompt": 1, "truncated_prompt": 0, "truncated_response": 0}


@pytest.mark.parametrize("length", [1, 2, 4])
def test_long_prompt_loses_its_beginning_but_not_bos(tokenizer: PreTrainedTokenizerFast, length: int) -> None:
    encoded, counts = long_and_short(tokenizer, "truncate", length)
    kept = plain(tokenizer, LONG)
    assert encoded[1].prompt_ids == [BOS, *kept[len(kept) - (length - 1) :]]
    assert counts["truncated_prompt"] == (3 if length == 1 else 1)


def test_long_prompt_without_bos_keeps_its_end(bare_tokenizer: PreTrainedTokenizerFast) -> None:
    encoded, _ = long_and_short(bare_tokenizer, "truncate", 3)
    assert encoded[1].prompt_ids == plain(bare_tokenizer, LONG)[-3:]


def test_long_response_is_cut_and_has_no_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = plain(tokenizer, "zyx wvu")
    rows = [text_row("p", chosen="zyx wvu", rejected="z")]
    for length, expected, cut in (
        (len(ids) + 1, [*ids, EOS], 0),
        (len(ids), ids, 1),
        (len(ids) - 2, ids[:-2], 1),
    ):
        config = DataConfig(max_response_tokens=length)
        [row], counts = encode_rows(rows, tokenizer, config, responses=("chosen", "rejected"))
        assert row.response_ids == {"chosen": expected, "rejected": [*plain(tokenizer, "z"), EOS]}
        assert counts["truncated_response"] == cut


def test_prompt_without_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    [row], _ = encode_rows([text_row("")], tokenizer, DataConfig(), responses=())
    assert row.prompt_ids == [BOS]


def test_prompt_without_tokens_or_bos_is_refused(bare_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match=r"1 of 2 prompts have no tokens, .*no BOS in front:\n  row 2 \(''\)"):
        encode_rows([text_row("p"), text_row("")], bare_tokenizer, DataConfig(), responses=())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"on_long_prompt": "cut"}, "`data.on_long_prompt` is 'cut'; known: error, drop, truncate"),
        ({"max_prompt_tokens": 0}, "`data.max_prompt_tokens` is 0; it must be at least 1"),
        ({"max_response_tokens": -1}, "`data.max_response_tokens` is -1; it must be at least 1"),
    ],
)
def test_settings_that_cannot_be(tokenizer: PreTrainedTokenizerFast, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(match)):
        encode_rows([], tokenizer, DataConfig(**settings), responses=())
