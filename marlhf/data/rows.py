"""Rows of a JSONL file, a Hugging Face data set or the built-in docstrings, checked before work starts."""

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marlhf.config import DataConfig, one_of
from marlhf.data.docstrings import read_docstrings
from marlhf.errors import ConfigError, DataError

Row = dict[str, Any]

SOURCES = ("jsonl", "huggingface", "docstring_names", "docstring_bodies")
FIELDS = ("prompt", "response", "chosen", "rejected")
_SHOWN_FAULTS = 5
_OTHER_NAMES = {
    "prompt": ("instruction", "question", "query", "input", "document", "messages", "text"),
    "response": ("output", "completion", "answer", "summary", "target", "label"),
    "chosen": ("preferred", "accepted", "better", "winner"),
    "rejected": ("dispreferred", "worse", "loser"),
}
"""What data sets call the canonical fields, so that an error can propose the mapping."""


def load_rows(config: DataConfig, *, fields: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """The (training, validation) rows that a stage needs, under canonical field names.

    fields: those that every row must have, of `prompt`, `response`, `chosen` and `rejected`. The columns are
    found through `prompt_field` and its siblings; other columns are kept as they are. A prompt is text, or
    with `chat_template` also a list of {"role", "content"} messages; the others are text that is not blank.

    Without validation rows of its own, a source gives up about `validation_fraction` of its rows: a row's
    side depends on nothing but a hash of its prompt, so that no stage trains on a prompt that another one
    holds out. At a fraction above 0, two rows or more leave at least one on each side.

    Raises ConfigError for a contradiction in `config`, and DataError naming file and line for rows that
    cannot be used.
    """
    one_of(config.source, SOURCES, key="data.source")
    for name in fields:
        one_of(name, FIELDS, key="fields")
    if not 0 <= config.validation_fraction < 1:
        raise ConfigError(
            f"`data.validation_fraction` is {config.validation_fraction}; it must be at least 0 and below 1"
        )
    if config.limit is not None and config.limit < 1:
        raise ConfigError(f"`data.limit` is {config.limit}; it must be at least 1, or null to read everything")

    # Checked first: whatever is wrong with it must show before the training rows are read.
    validation = None
    if config.validation is not None:
        validation = _check(_read_jsonl(config.validation), config, fields, config.validation)
    if config.source.startswith("docstring_"):
        splits = read_docstrings(_docstring_family(config, fields))
        train = splits.train[: config.limit]
        return train, splits.validation if validation is None else validation
    if not config.train:
        what = "a JSONL file" if config.source == "jsonl" else "a data set's name or folder"
        raise ConfigError(f"`data.train` is not set: give it {what}")
    if config.source == "jsonl":
        train = _check(_read_jsonl(config.train, config.limit), config, fields, config.train)
    else:
        place = f"{config.train}[{config.train_split}]"
        train = _check(_read_huggingface(config, config.train_split, config.limit), config, fields, place)
        if validation is None and config.validation_split is not None:
            place = f"{config.train}[{config.validation_split}]"
            validation = _check(_read_huggingface(config, config.validation_split), config, fields, place)
    if validation is None:
        return _hold_out(train, config.validation_fraction)
    return train, validation


def _docstring_family(config: DataConfig, fields: Sequence[str]) -> str:
    unknown = [name for name in fields if name not in ("prompt", "response")]
    if unknown:
        raise ConfigError(
            f"`data.source` is {config.source!r}, which has prompts and responses but no "
            f"{' or '.join(unknown)}: write pairs to a JSONL file, and set data.source=jsonl and data.train"
        )
    return config.source.removeprefix("docstring_")


@dataclass
class _Faults:
    """The first faults of a source, and how many there are in all."""

    first: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, place: str, what: str) -> None:
        self.count += 1
        if len(self.first) < _SHOWN_FAULTS:
            self.first.append(f"{place}: {what}")

    def raise_if_any(self, source: str, rows: int) -> None:
        if not self.count:
            return
        if self.count == 1 and rows == 1:
            raise DataError(self.first[0])
        more = self.count - len(self.first)
        tail = f"\n  ... and {more} more" if more else ""
        listed = "".join(f"\n  {fault}" for fault in self.first)
        raise DataError(f"{source}: {self.count} of {rows} rows cannot be used{listed}{tail}")


@dataclass(frozen=True)
class _Fault:
    """Stands in place of a row that could not be read."""

    what: str


def _check(
    located: Iterable[tuple[str, Row | _Fault]], config: DataConfig, fields: Sequence[str], source: str
) -> list[Row]:
    """Rows under canonical names; DataError with the first faults, or if there are no rows."""
    columns = {
        "prompt": config.prompt_field,
        "response": config.response_field,
        "chosen": config.chosen_field,
        "rejected": config.rejected_field,
    }
    faults = _Faults()
    rows = []
    count = 0
    for place, row in located:
        count += 1
        fault = row.what if isinstance(row, _Fault) else _first_fault(row, columns, fields, config)
        if fault is not None:
            faults.add(place, fault)
        elif isinstance(row, dict):
            rows.append(_canonical(row, columns))
    faults.raise_if_any(source, count)
    if not rows:
        raise DataError(f"{source}: there are no rows in it")
    return rows


def _canonical(row: Row, columns: dict[str, str]) -> Row:
    taken = {column: name for name, column in columns.items() if column in row}
    named = {key: value for key, value in row.items() if key not in taken}
    for name, column in columns.items():
        if column in row:
            named[name] = row[column]
    return named


def _first_fault(row: Row, columns: dict[str, str], fields: Sequence[str], config: DataConfig) -> str | None:
    for name in fields:
        column = columns[name]
        if column not in row:
            return _missing(row, name, column)
        value = row[column]
        fault = _text_fault(value)
        if fault is None:
            if name != "prompt" and not value.strip():
                return f"`{column}` is empty"
            continue
        if name == "prompt" and isinstance(value, list):
            if not config.chat_template:
                return f"`{column}` is a list; set data.chat_template=true if it holds messages"
            fault = _messages_fault(value)
            if fault is None:
                continue
        return f"`{column}` {fault}"
    return None


def _missing(row: Row, name: str, column: str) -> str:
    keys = [str(key) for key in row]
    known = next((other for other in _OTHER_NAMES[name] if other in keys), None)
    near = known or next(iter(difflib.get_close_matches(column, keys, n=1, cutoff=0.6)), None)
    hint = f"; if `{near}` is meant, set data.{name}_field={near}" if near else ""
    return f"no field `{column}`; the row has {', '.join(keys) or 'no fields'}{hint}"


def _text_fault(value: object) -> str | None:
    if not isinstance(value, str):
        return f"is {_kind(value)}, not text"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair in it, which is no character"
    return None


def _messages_fault(messages: list[Any]) -> str | None:
    if not messages:
        return "is an empty list of messages"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f'has no "role" and "content" in message {number}'
        for key in ("role", "content"):
            if fault := _text_fault(message[key]):
                return f'message {number}: "{key}" {fault}'
    if messages[-1]["role"] == "assistant":
        return "ends with the assistant's message, which is the response; a prompt ends before it"
    return None


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def _read_jsonl(path: str, limit: int | None = None) -> Iterator[tuple[str, Row | _Fault]]:
    """(`file:line`, row) for each line that is not blank; at most `limit` of them."""
    file = Path(path)
    if file.is_dir():
        raise DataError(f"{path} is a folder; name the JSONL file in it{_nearest_file(file, '')}")
    if not file.is_file():
        raise DataError(f"{path}: there is no such file{_nearest_file(file.parent, file.name)}")
    if file.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    try:
        with file.open("rb") as lines:
            count = 0
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                if limit is not None and count == limit:
                    return
                count += 1
                yield f"{path}:{number}", _parse_line(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _nearest_file(folder: Path, name: str) -> str:
    if not folder.is_dir():
        return f", nor a folder {folder}"
    there = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    close = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
    close = close or [entry for entry in there if entry.endswith((".jsonl", ".json"))][:1]
    return f". Did you mean {folder / close[0]}?" if close else ""


def _parse_line(line: bytes) -> Row | _Fault:
    try:
        # A byte-order mark can only stand at the beginning of a file, but nowhere is it part of JSON.
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _Fault(f"not valid UTF-8 at byte {error.start + 1} of the line")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; JSONL holds one whole object on every line" if text.strip() in ("[", "{", "]", "}") else ""
        return _Fault(f"not valid JSON: {error.msg} at column {error.colno}{hint}")
    except (RecursionError, ValueError) as error:
        return _Fault(f"not valid JSON: {error}")
    if not isinstance(row, dict):
        return _Fault(f'{_kind(row)}, not an object such as {{"prompt": "..."}}')
    return row


def _read_huggingface(config: DataConfig, split: str, limit: int | None = None) -> Iterator[tuple[str, Row | _Fault]]:
    """(`name[split] row i`, row) for each row of a split, counted from 0 as `datasets` does."""
    from datasets import Dataset

    name = config.train or ""
    data = _load_split(name, config.subset, split)
    if not isinstance(data, Dataset):
        raise DataError(f"{name}[{split}] is not a table of rows but a {type(data).__name__}")
    for index, row in enumerate(data):
        if index == limit:
            return
        yield f"{name}[{split}] row {index}", dict(row)


def _load_split(name: str, subset: str | None, split: str) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    folder = Path(name)
    try:
        if not any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            return load_dataset(name, subset, split=split)
        # A folder that `save_to_disk` wrote; one of a single data set has no splits.
        stored = load_from_disk(name)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "" if folder.is_dir() else "there is no folder of that name, nor could one be downloaded: "
        raise DataError(f"cannot load the data set {name}: {where}{reason}") from error
    if not isinstance(stored, DatasetDict):
        return stored
    if split not in stored:
        raise DataError(f"{name} has no split `{split}`; it has {', '.join(stored)}")
    return stored[split]


def _hold_out(rows: list[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    if len(rows) < 2 or fraction == 0:
        return rows, []
    places = [_place(row) for row in rows]
    distinct = sorted(set(places))
    if len(distinct) == 1:
        return rows[1:], rows[:1]
    # The limit stands at least above the lowest place and at most below the highest, so that neither side is
    # empty; equal rows have equal places and stay together.
    limit = min(max(fraction, distinct[1]), distinct[-1])
    return (
        [row for row, place in zip(rows, places, strict=True) if place >= limit],
        [row for row, place in zip(rows, places, strict=True) if place < limit],
    )


def _place(row: Row) -> float:
    """Where in [0, 1) a row stands by its prompt."""
    text = json.dumps(row.get("prompt"), sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
