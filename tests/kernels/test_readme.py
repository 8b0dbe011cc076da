"""README.md: every test that its tables name is there."""

import importlib
import re
from pathlib import Path

import pytest

README = Path(__file__).parent / "README.md"
TEST = re.compile(r"`([\w/]+)\.py::(test_\w+)`")
GPU = "with the GPU backend"
ROWS = [
    line
    for line in README.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| property |", "| fault |"))
]


def test_the_tables_are_found():
    """Both tables, and no empty one."""
    text = README.read_text(encoding="utf-8")
    for head in ("| property | tests |", "| fault | tests |"):
        assert text.count(head) == 1
    assert len(ROWS) > 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_row(row):
    """A row names tests, all of which are collected, or says where its test has to be."""
    _, _, tests, _ = row.split("|")
    named = TEST.findall(tests)
    assert named or GPU in tests
    rest = TEST.sub("", tests).strip(" ;")
    assert not rest or rest.endswith(GPU), rest
    for path, name in named:
        module = path.replace("/", ".") if "/" in path else f"tests.kernels.{path}"
        assert callable(getattr(importlib.import_module(module), name, None)), f"{path}.py::{name}"
