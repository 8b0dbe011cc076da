"""The mutation run itself: what it changes, that the change takes effect, and what it reports."""

import json
from pathlib import Path
from types import ModuleType

import pytest

import marlhf_kernels as mk
from marlhf_kernels.reference import logprobs
from tests.kernels import test_token_logprobs
from tests.mutation import __main__ as mutation
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import mutants_of
from tests.mutation.worker import put_in

SOURCE = """
LIMIT = 2.0

def f(a, b):
    '''Docstring 1.'''
    if a < b:
        raise ValueError(a + 1)
    return -a * min(b, LIMIT)
"""


def test_what_is_changed():
    """Every change of a small module; docstrings and the words of errors stay."""
    changes = {(m.function, m.kind, m.before, m.after) for m in mutants_of("small", SOURCE)}
    product = "-a * min(b, LIMIT)"
    assert changes == {
        ("<module>", "constant", "2.0", "4.0"),
        ("f", "comparison", "a < b", "a <= b"),
        ("f", "comparison", "a < b", "a >= b"),
        ("f", "operator", product, "-a / min(b, LIMIT)"),
        ("f", "dropped term", product, "-a"),
        ("f", "dropped term", product, "min(b, LIMIT)"),
        ("f", "sign", "-a", "a"),
        ("f", "bound", "min(b, LIMIT)", "max(b, LIMIT)"),
    }


def test_a_change_takes_effect_where_the_function_is_known_already():
    """Whoever imported the function sees the changed one, and the changed constant."""
    module = ModuleType("small")
    module.__file__ = "small.py"
    exec(SOURCE, vars(module))
    known = module.f
    put_in(module, SOURCE.replace("-a", "a").replace("2.0", "7.0"))
    assert known(9, 8) == 63
    put_in(module, SOURCE)
    assert known(9, 8) == -18


def test_the_suite_notices_a_dropped_target():
    """The gradient of logits without the 1 at the label: a test that held the code against itself would stay green."""
    source = Path(logprobs.__file__).read_text(encoding="utf-8")
    before, after = "torch.where(self.here, g, 0)", "torch.where(self.here, 0, g)"
    (mutant,) = [m for m in mutants_of("logprobs", source) if (m.before, m.after) == (before, after)]
    with mk.use_backend("reference"):
        put_in(logprobs, mutant.source)
        try:
            with pytest.raises(AssertionError):
                test_token_logprobs.test_gradient_by_hand()
        finally:
            put_in(logprobs, source)
        test_token_logprobs.test_gradient_by_hand()


def test_explanations_are_of_mutants_that_are_there():
    """None is left of code that has changed."""
    keys = {mutant.key for mutant in mutation.all_mutants(list(mutation.TESTS))}
    assert set(EQUIVALENT) <= keys


def test_the_report_counts_what_nobody_explains(tmp_path, monkeypatch):
    """A survivor is counted and listed as unexplained until it has a reason."""
    mutants = mutation.all_mutants(["whiten"])[:4]
    results = {
        mutation.label_of(mutant): {"result": result, "cpu": 30.0, "why": "call: assert 1 == 2"}
        for mutant, result in zip(mutants, ("killed", "survived", "survived", "timeout"), strict=True)
    }
    monkeypatch.setattr(mutation, "EQUIVALENT", {mutants[1].key: "for a reason"})
    report = tmp_path / "report.md"
    assert mutation.write_report(mutants, results, report) == 1
    text = report.read_text(encoding="utf-8")
    assert "| whiten | 4 | 1 | 0 | 1 | 1 | 1 | 0 |" in text
    assert "2.0 minutes" in text
    assert "Of the killed, 1 fell to\na comparison and 0 to an exception" in text
    assert "for a reason" in text
    assert text.count("NOT EXPLAINED") == 1


def test_what_is_kept(tmp_path, monkeypatch):
    """A survivor's result ends with any change of the tests, a killed one's with the test that killed it."""
    now = mutation.fingerprint(mutation.ROOT)
    killer = "tests/kernels/test_whiten.py::test_by_hand[reference-False-expected0]"
    lines = [
        {"key": "a", "hash": "h", "result": "survived", "by": "", "tests": now},
        {"key": "b", "hash": "h", "result": "survived", "by": "", "tests": "of yesterday"},
        {"key": "c", "hash": "h", "result": "killed", "by": killer, "tests": "of yesterday"},
        {"key": "d", "hash": "h", "result": "killed", "by": killer.replace("by_hand", "by_foot"), "tests": now},
    ]
    state = tmp_path / "state.jsonl"
    state.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.setattr(mutation, "STATE", state)
    assert [key for _, key in mutation.known_results()] == ["a", "c"]
