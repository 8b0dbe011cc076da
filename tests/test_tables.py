"""The tables of the tests' README files: every test that they name is there."""

import importlib
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TEST = re.compile(r"`([\w/]+)\.py::(test_\w+)`")
GPU = "with the GPU backend"
HEADS = {
    "kernels": ["| property | tests |", "| fault | tests |"],
    "trainer": ["| property | tests |"],
}


def lines(folder: str) -> list[str]:
    return (HERE / folder / "README.md").read_text(encoding="utf-8").splitlines()


ROWS = [
    (folder, line)
    for folder, heads in HEADS.items()
    for line in lines(folder)
    if line.startswith("| ") and line not in heads
]


@pytest.mark.parametrize(("folder", "least"), [("kernels", 60), ("trainer", 30)])
def test_the_tables_are_found(folder: str, least: int) -> None:
    for head in HEADS[folder]:
        assert head in lines(folder)
    assert sum(row[0] == folder for row in ROWS) > least


@pytest.mark.parametrize(("folder", "row"), ROWS, ids=[row.split("|")[1].strip() for _, row in ROWS])
def test_row(folder: str, row: str) -> None:
    """A row names tests, all of which are there, or says where its test has to be."""
    _, _, tests, _ = row.split("|")
    named = TEST.findall(tests)
    assert named or GPU in tests
    rest = TEST.sub("", tests).strip(" ;")
    assert not rest or rest.endswith(GPU), rest
    for path, name in named:
        module = path.replace("/", ".") if "/" in path else f"tests.{folder}.{path}"
        assert callable(getattr(importlib.import_module(module), name, None)), f"{path}.py::{name}"
