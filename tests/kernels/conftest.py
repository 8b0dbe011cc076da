"""Every kernel test runs with poisoned uninitialised memory, and with a quick interpreter where it is on."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_lucky_zeros(poisoned_empty: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        # Needs Triton, which nothing else here does.
        from tests.cases.interpreter import quicken

        quicken(monkeypatch)
