"""Every kernel test runs with poisoned uninitialised memory."""

import pytest


@pytest.fixture(autouse=True)
def _no_lucky_zeros(poisoned_empty: None) -> None:
    pass
