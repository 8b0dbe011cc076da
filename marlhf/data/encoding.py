"""Prompts and responses as token ids: one BOS in front, one EOS behind, lengths within their limits.

Prompt and response become tokens each by itself, as they do in a rollout, where the response's tokens come
from the policy: the ids of a row for SFT or the reward model are those that a rollout of that text has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from marlhf.config import DataConfig, one_of
from marlhf.errors import ConfigError, DataError

Prompt = str | list[dict[str, str]]

ON_LONG_PROMPT = ("error", "drop", "truncate")
_SHOWN_FAULTS = 5


@dataclass(frozen=True)
class EncodedRow:
    """The token ids of a row.

    prompt_ids: begin with the tokens that the tokenizer or template puts in front, usually one BOS;
    prefix_length says how many these are.
    response_ids: by field name; each ends in EOS unless it was cut.
    row: what was encoded, all its columns.
    """

    prompt_ids: list[int]
    response_ids: dict[str, list[int]]
    row: dict[str, Any] = field(repr=False)
    prefix_length: int = 0


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, config: DataConfig) -> list[int]:
    """The ids of a prompt, of any length.

    A text is followed by `prompt_suffix`. With `chat_template`, a text is one user message, and the template
    ends with what opens the assistant's turn. If the tokenizer puts a BOS in front of texts, or the template
    writes one, there is exactly one; nothing stands behind the prompt.

    Raises ConfigError if the tokenizer has no chat template and `chat_template` is set, and DataError if the
    template refuses the messages.
    """
    _check_config(tokenizer, config)
    text = _prompt_text(tokenizer, prompt, config)
    return _with_prefix(_encode(tokenizer, [text], template=config.chat_template)[0], _prefix(tokenizer))


def encode_response(tokenizer: PreTrainedTokenizerBase, response: str, *, stop: bool = True) -> list[int]:
    """The ids of a response, without BOS; with `stop`, EOS is the last one and stands nowhere before.

    A text that itself holds the EOS token ends there, where generation would have ended.
    """
    ids = _encode(tokenizer, [response], template=False)[0]
    return _stopped(ids, _eos(tokenizer)) if stop else ids


def encode_rows(
    rows: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    responses: Sequence[str],
) -> tuple[list[EncodedRow], dict[str, int]]:
    """Encodes the prompt and the named response fields of every row, in order.

    responses: `("response",)`, `("chosen", "rejected")` or `()`.

    A prompt over `max_prompt_tokens` is an error, drops its row, or loses its beginning, as `on_long_prompt`
    says; what the tokenizer puts in front is kept. A response over `max_response_tokens` is cut, so that it
    has no EOS. The second result counts these: `dropped_long_prompt`, `truncated_prompt` and
    `truncated_response` (responses, not rows).

    Raises ConfigError for limits below 1, and DataError that lists rows with too long or empty prompts.
    """
    _check_config(tokenizer, config)
    counts = {"dropped_long_prompt": 0, "truncated_prompt": 0, "truncated_response": 0}
    if not rows:
        return [], counts
    prefix = _prefix(tokenizer)
    prompts = []
    for number, row in enumerate(rows, start=1):
        try:
            prompts.append(_prompt_text(tokenizer, row["prompt"], config))
        except DataError as error:
            raise DataError(f"{_name(number, row)}: {error}") from error
    encoded_prompts = _encode(tokenizer, prompts, template=config.chat_template)
    encoded_responses = {name: _encode(tokenizer, [row[name] for row in rows], template=False) for name in responses}
    eos = _eos(tokenizer) if responses else -1

    encoded = []
    empty: list[str] = []
    too_long: list[str] = []
    for index, row in enumerate(rows):
        prompt_ids = _with_prefix(encoded_prompts[index], prefix)
        prefix_length = _prefix_length(prompt_ids, prefix, tokenizer)
        if not prompt_ids:
            empty.append(_name(index + 1, row))
            continue
        if len(prompt_ids) > config.max_prompt_tokens:
            if config.on_long_prompt == "drop":
                counts["dropped_long_prompt"] += 1
                continue
            if config.on_long_prompt == "error":
                too_long.append(f"{_name(index + 1, row)}: {len(prompt_ids)} tokens")
                continue
            counts["truncated_prompt"] += 1
            kept = prompt_ids[: min(prefix_length, config.max_prompt_tokens)]
            prompt_ids = kept + prompt_ids[len(prompt_ids) - (config.max_prompt_tokens - len(kept)) :]
        response_ids = {}
        for name in responses:
            ids = _stopped(encoded_responses[name][index], eos)
            if len(ids) > config.max_response_tokens:
                counts["truncated_response"] += 1
                ids = ids[: config.max_response_tokens]
            response_ids[name] = ids
        encoded.append(EncodedRow(prompt_ids, response_ids, row, prefix_length))
    if empty:
        raise DataError(
            f"{len(empty)} of {len(rows)} prompts have no tokens, and the tokenizer puts no BOS in front:"
            f"{_listed(empty)}"
        )
    if too_long:
        raise DataError(
            f"{len(too_long)} of {len(rows)} prompts are longer than data.max_prompt_tokens="
            f"{config.max_prompt_tokens}; raise it, or set data.on_long_prompt to drop or truncate:"
            f"{_listed(too_long)}"
        )
    return encoded, counts


def _check_config(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
    one_of(config.on_long_prompt, ON_LONG_PROMPT, key="data.on_long_prompt")
    for key in ("max_prompt_tokens", "max_response_tokens"):
        if getattr(config, key) < 1:
            raise ConfigError(f"`data.{key}` is {getattr(config, key)}; it must be at least 1")
    if config.chat_template and not tokenizer.chat_template:
        raise ConfigError(
            "`data.chat_template` is set but the tokenizer has no chat template: set it to false, or use a "
            "tokenizer with one"
        )
    if config.chat_template and config.prompt_suffix:
        raise ConfigError(
            "`data.prompt_suffix` and `data.chat_template` are both set: the template decides how a prompt ends"
        )


def _prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, config: DataConfig) -> str:
    if not config.chat_template:
        if not isinstance(prompt, str):
            raise DataError("the prompt is a list of messages; set data.chat_template=true")
        return prompt + config.prompt_suffix
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:
        raise DataError(f"the chat template refuses the messages: {error}") from error


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, template: bool) -> list[list[int]]:
    """The ids of texts, nothing added; special tokens that a template wrote are recognised as such."""
    options: dict[str, Any] = {"split_special_tokens": False} if template else {}
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
        **options,
    )
    return cast("list[list[int]]", encoded["input_ids"])


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts in front of every text; what it may put behind is of no use here."""
    probe = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(probe) + 1):
        if whole[start : start + len(probe)] == probe:
            return list(whole[:start])
    return []


def _with_prefix(ids: list[int], prefix: list[int]) -> list[int]:
    """The ids behind exactly one prefix, whether or not the text came with one or more."""
    while prefix and ids[: len(prefix)] == prefix:
        ids = ids[len(prefix) :]
    return prefix + ids


def _prefix_length(prompt_ids: list[int], prefix: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    if prefix:
        return len(prefix)
    # The tokenizer adds nothing, but a template may have written the BOS.
    bos = tokenizer.bos_token_id
    return int(bos is not None and prompt_ids[:1] == [bos])


def _eos(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end-of-sequence token, so no response could ever end")
    return int(tokenizer.eos_token_id)


def _stopped(ids: list[int], eos: int) -> list[int]:
    return [*(ids[: ids.index(eos)] if eos in ids else ids), eos]


def _name(number: int, row: dict[str, Any]) -> str:
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    short = text if len(text) <= 40 else text[:37] + "..."
    return f"row {number} ({short!r})"


def _listed(faults: list[str]) -> str:
    more = f"\n  ... and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
    return "".join(f"\n  {fault}" for fault in faults[:_SHOWN_FAULTS]) + more
