import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from marlhf.config import DataConfig
from marlhf.data import Splits, load_rows, rows
from marlhf.errors import ConfigError, DataError

PAIR = ("prompt", "response")


def write(path: Path, lines: Sequence[Any]) -> str:
    """Dictionaries become JSON, text stands as it is."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def many(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "response": f"r{i}"} for i in range(count)]


def refused(match: str, *, fields: Sequence[str] = PAIR, **config: Any) -> str:
    """The message with which the rows are refused; `match` must occur in it literally."""
    with pytest.raises((DataError, ConfigError), match=re.escape(match)) as caught:
        load_rows(DataConfig(**config), fields=fields)
    return str(caught.value)


# What is read.


def test_train_and_validation_files_in_their_order(tmp_path: Path) -> None:
    train = write(tmp_path / "t.jsonl", [*many(3), ""])
    validation = write(tmp_path / "v.jsonl", [{"prompt": "", "response": "r", "id": 7}])
    found = load_rows(DataConfig(train=train, validation=validation), fields=PAIR)
    assert found == (many(3), [{"prompt": "", "response": "r", "id": 7}])


def test_fields_are_mapped_and_other_columns_kept(tmp_path: Path) -> None:
    row = {"instruction": "i", "good": "g", "bad": "b", "kind": "k", "prompt": "another"}
    path = write(tmp_path / "t.jsonl", [row])
    config = DataConfig(train=path, prompt_field="instruction", chosen_field="good", rejected_field="bad")
    train, _ = load_rows(config, fields=("prompt", "chosen", "rejected"))
    assert train == [{"prompt": "i", "chosen": "g", "rejected": "b", "kind": "k"}]


def test_fields_that_are_not_asked_for_are_mapped_but_not_required(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"prompt": "p", "summary": "s"}, {"prompt": "q"}])
    config = DataConfig(train=path, response_field="summary", validation_fraction=0)
    assert load_rows(config, fields=("prompt",))[0] == [{"prompt": "p", "response": "s"}, {"prompt": "q"}]


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p", "response": "r"}\r\n\r\n{"prompt": "q", "response": "r"}\r\n')
    train, _ = load_rows(DataConfig(train=str(path), validation_fraction=0), fields=PAIR)
    assert [row["prompt"] for row in train] == ["p", "q"]


def test_messages_with_a_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "t.jsonl", [{"prompt": messages}, {"prompt": "text"}])
    train, _ = load_rows(DataConfig(train=path, chat_template=True, validation_fraction=0), fields=("prompt",))
    assert train == [{"prompt": messages}, {"prompt": "text"}]


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [*many(4), "{"])
    train, validation = load_rows(DataConfig(train=path, limit=4), fields=PAIR)
    assert len(train) + len(validation) == 4


# What is held out.


def test_held_out_rows_stay_held_out_when_rows_are_added_moved_and_renamed(tmp_path: Path) -> None:
    everything = many(2000)
    first = load_rows(DataConfig(train=write(tmp_path / "a.jsonl", everything[:1000])), fields=PAIR)
    moved = load_rows(DataConfig(train=write(tmp_path / "b.jsonl", everything[::-1])), fields=PAIR)
    assert 20 < len(first[1]) < 90
    assert 60 < len(moved[1]) < 140
    assert {row["prompt"] for row in first[0]} < {row["prompt"] for row in moved[0]}
    assert {row["prompt"] for row in first[1]} < {row["prompt"] for row in moved[1]}

    pairs = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "x"} for row in everything]
    path = write(tmp_path / "c.jsonl", pairs)
    reward = load_rows(DataConfig(train=path), fields=("prompt", "chosen", "rejected"))
    assert {row["prompt"] for row in reward[1]} == {row["prompt"] for row in moved[1]}


def test_equal_rows_are_on_one_side(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", many(300) + many(300))
    train, validation = load_rows(DataConfig(train=path), fields=PAIR)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in validation}


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("count", [2, 3])
def test_neither_side_is_empty(tmp_path: Path, count: int, fraction: float) -> None:
    path = write(tmp_path / "t.jsonl", many(count))
    train, validation = load_rows(DataConfig(train=path, validation_fraction=fraction), fields=PAIR)
    assert train
    assert validation
    assert len(train) + len(validation) == count


def test_a_single_row_is_trained_on_and_copies_of_it_are_shared_out(tmp_path: Path) -> None:
    config = DataConfig(train=write(tmp_path / "t.jsonl", many(1)))
    assert load_rows(config, fields=PAIR) == (many(1), [])
    config = DataConfig(train=write(tmp_path / "t.jsonl", many(1) * 3))
    assert load_rows(config, fields=PAIR) == (many(1) * 2, many(1))


def test_fraction_0_holds_nothing_out(tmp_path: Path) -> None:
    config = DataConfig(train=write(tmp_path / "t.jsonl", many(50)), validation_fraction=0)
    assert load_rows(config, fields=PAIR) == (many(50), [])


# What is refused.


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "p" "response": "r"}', "not valid JSON: Expecting ',' delimiter at column 16"),
        ("{", "JSONL holds one whole object on every line"),
        ("[" * 100_000, "not valid JSON: maximum recursion depth"),
        ('["p", "r"]', 'a list, not an object such as {"prompt": "..."}'),
        ("null", "null, not an object"),
        ({"response": "r"}, "no field `prompt`; the row has response"),
        ({}, "no field `prompt`; the row has no fields"),
        ({"promt": "p"}, "the row has promt; if `promt` is meant, set data.prompt_field=promt"),
        ({"instruction": "p"}, "if `instruction` is meant, set data.prompt_field=instruction"),
        ({"prompt": "p", "output": "r"}, "no field `response`; the row has prompt, output; if `output` is meant"),
        ({"prompt": 3, "response": "r"}, "`prompt` is a number, not text"),
        ({"prompt": None, "response": "r"}, "`prompt` is null, not text"),
        ({"prompt": "p", "response": ["r"]}, "`response` is a list, not text"),
        ({"prompt": "p", "response": {"text": "r"}}, "`response` is an object, not text"),
        ({"prompt": "p", "response": ""}, "`response` is empty"),
        ({"prompt": "p", "response": " \n"}, "`response` is empty"),
        ({"prompt": [{"role": "user", "content": "u"}], "response": "r"}, "set data.chat_template=true"),
        ('{"prompt": "\\ud800", "response": "r"}', "`prompt` has half of a surrogate pair in it"),
    ],
)
def test_faulty_line(tmp_path: Path, line: object, fault: str) -> None:
    path = write(tmp_path / "t.jsonl", [*many(2), "", line, *many(1)])
    message = refused(fault, train=path)
    assert message.startswith(f"{path}: 1 of 4 rows cannot be used\n  {path}:4: ")
    validation = write(tmp_path / "v.jsonl", [line])
    good = write(tmp_path / "g.jsonl", many(3))
    assert refused(fault, train=good, validation=validation).startswith(f"{validation}:1: ")


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "`prompt` is an empty list of messages"),
        (["u"], '`prompt` has no "role" and "content" in message 1'),
        ([{"role": "user", "content": "u"}, {"role": "user"}], 'has no "role" and "content" in message 2'),
        ([{"role": "user", "content": ["u"]}], '`prompt` message 1: "content" is a list, not text'),
        (
            [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
            "ends with the assistant's message, which is the response",
        ),
    ],
)
def test_faulty_messages(tmp_path: Path, messages: object, fault: str) -> None:
    path = write(tmp_path / "t.jsonl", [{"prompt": messages}])
    refused(fault, fields=("prompt",), train=path, chat_template=True)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"prompt": "p", "response": "r"}\n{"prompt": "\xff", "response": "r"}\n')
    refused(f"{path}:2: not valid UTF-8 at byte 13 of the line", train=str(path))


def test_the_first_five_faults_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [*many(3), *(["{"] * 8)])
    message = refused("8 of 11 rows cannot be used", train=path)
    assert [int(line) for line in re.findall(r"t\.jsonl:(\d+):", message)] == [4, 5, 6, 7, 8]
    assert message.endswith("\n  ... and 3 more")


def test_files_without_rows(tmp_path: Path) -> None:
    refused("the file is empty", train=write(tmp_path / "t.jsonl", []))
    refused("there are no rows in it", train=write(tmp_path / "t.jsonl", ["", " "]))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", many(2))
    refused(f"there is no such file. Did you mean {tmp_path}/train.jsonl?", train=str(tmp_path / "trian.jsonl"))
    refused(f"is a folder; name the JSONL file in it. Did you mean {tmp_path}/train.jsonl?", train=str(tmp_path))
    refused(f"there is no such file, nor a folder {tmp_path}/no", train=str(tmp_path / "no" / "t.jsonl"))
    refused("`data.train` is not set: give it a JSONL file")


def test_validation_is_checked_before_training_rows_are_read(tmp_path: Path) -> None:
    refused("v.jsonl: there is no such file", train=str(tmp_path / "t.jsonl"), validation=str(tmp_path / "v.jsonl"))


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", many(2))
    refused("Did you mean `jsonl`?", train=path, source="json")
    refused("`data.limit` is 0; it must be at least 1", train=path, limit=0)
    refused("`data.validation_fraction` is 1.0", train=path, validation_fraction=1.0)
    refused("`data.validation_fraction` is -0.1", train=path, validation_fraction=-0.1)


# Docstrings.


@pytest.fixture
def docstrings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def read(family: str) -> Splits:
        asked.append(family)
        return Splits(many(8), many(2), many(3), {}, {}, ())

    monkeypatch.setattr(rows, "read_docstrings", read)
    return asked


def test_docstrings_bring_their_own_split(docstrings: list[str]) -> None:
    assert load_rows(DataConfig(source="docstring_names"), fields=PAIR) == (many(8), many(2))
    assert load_rows(DataConfig(source="docstring_bodies", limit=3), fields=("prompt",)) == (many(3), many(2))
    assert docstrings == ["names", "bodies"]


def test_docstrings_have_no_pairs(docstrings: list[str]) -> None:
    message = refused("no chosen or rejected", fields=("prompt", "chosen", "rejected"), source="docstring_names")
    assert "write pairs to a JSONL file, and set data.source=jsonl and data.train" in message
    assert not docstrings


# Hugging Face data sets.


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


def test_folder_of_data_files(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", many(9))
    write(tmp_path / "test.jsonl", many(2))
    config = DataConfig(source="huggingface", train=str(tmp_path), validation_split="test", limit=5)
    assert load_rows(config, fields=PAIR) == (many(5), many(2))


def test_saved_data_sets(tmp_path: Path) -> None:
    both = datasets.DatasetDict({name: datasets.Dataset.from_list(many(4)) for name in ("train", "test")})
    both.save_to_disk(tmp_path / "both")
    config = DataConfig(source="huggingface", train=str(tmp_path / "both"), validation_split="test")
    assert load_rows(config, fields=PAIR) == (many(4), many(4))
    config.train_split = "trian"
    with pytest.raises(DataError, match="has no split `trian`; it has train, test"):
        load_rows(config, fields=PAIR)

    datasets.Dataset.from_list(many(4)).save_to_disk(tmp_path / "one")
    config = DataConfig(source="huggingface", train=str(tmp_path / "one"), validation_fraction=0)
    assert load_rows(config, fields=PAIR) == (many(4), [])


def test_faults_name_split_and_row(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [*many(2), {"prompt": "p", "response": ""}])
    refused(f"{tmp_path}[train] row 2: `response` is empty", source="huggingface", train=str(tmp_path))


def test_data_sets_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("`data.train` is not set: give it a data set's name or folder", source="huggingface")
    refused("there is no folder of that name", source="huggingface", train=str(tmp_path / "nothing" / "here"))
    write(tmp_path / "train.jsonl", many(2))
    message = refused("cannot load the data set", source="huggingface", train=str(tmp_path), train_split="trian")
    assert "trian" in message
    assert "train" in message.replace("trian", "")

    def offline(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no connection\nand a long tail")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    message = refused("cannot load the data set someone/data", source="huggingface", train="someone/data")
    assert message.endswith("there is no folder of that name, nor could one be downloaded: no connection")
