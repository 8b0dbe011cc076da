"""The two example files learn, are one algorithm, and differ by few lines."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
NAMES = ("token_ppo", "macro_action_ppo")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name: str) -> None:
    """From what chance scores to most of the letters in order."""
    scores = [score for score, _, _ in load(name).train(iterations=20)]
    assert scores[0] < 0.15
    assert scores[-1] > 0.7


def test_the_score_is_the_rule() -> None:
    """ABCA + STOP: two letters in order; HAB: the alphabet is a circle; nothing counts after STOP."""
    example = load("token_ppo")
    tokens = example.torch.tensor([[1, 2, 3, 1, 0, 1, 2], [8, 1, 2, 0, 3, 4, 5]])
    stops = (tokens == example.STOP).long()
    scores = example.score(tokens, stops.cumsum(1) - stops == 0)
    assert (scores * (example.LENGTH - 1)).tolist() == pytest.approx([2, 2])


def test_macro_actions_of_one_token_are_the_token_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss by loss and score by score; with longer macro actions the numbers are others."""
    token, macro = (load(name) for name in NAMES)
    expected = token.train(iterations=3, seed=1)
    monkeypatch.setattr(macro, "N", 1)
    same = macro.train(iterations=3, seed=1)
    for one, other in zip(expected, same, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    monkeypatch.setattr(macro, "N", 3)
    longer = macro.train(iterations=1, seed=1)[0]
    assert longer[0] == pytest.approx(expected[0][0])
    assert abs(longer[1] - expected[0][1]) > 1e-3


def test_at_most_ten_lines_change() -> None:
    token, macro = ((FOLDER / f"{name}.py").read_text().splitlines() for name in NAMES)
    changed = [line for line in difflib.ndiff(token, macro) if line[0] in "+-"]
    assert 0 < sum(line[0] == "+" for line in changed) <= 10
    assert 0 < sum(line[0] == "-" for line in changed) <= 10
