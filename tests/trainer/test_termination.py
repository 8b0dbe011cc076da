"""Rules by name; the macro actions themselves are tested with the kernels."""

import pytest
import torch

from marlhf.config import TerminationConfig
from marlhf.errors import ConfigError
from marlhf.termination import check_termination, macro_ids

MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TerminationConfig("token"), [[0, 1, 2, 3, 4, -1], [0, -1, -1, -1, -1, -1], [-1] * 6, [0, 1, -1, 2, 3, 4]]),
        (TerminationConfig("fixed", 2), [[0, 0, 1, 1, 2, -1], [0, -1, -1, -1, -1, -1], [-1] * 6, [0, 0, -1, 1, 1, 2]]),
        (TerminationConfig("fixed", 9), [[0, 0, 0, 0, 0, -1], [0, -1, -1, -1, -1, -1], [-1] * 6, [0, 0, -1, 0, 0, 0]]),
        (TerminationConfig("whole"), [[0, 0, 0, 0, 0, -1], [0, -1, -1, -1, -1, -1], [-1] * 6, [0, 0, -1, 0, 0, 0]]),
    ],
)
def test_rules_by_hand(config: TerminationConfig, expected: list[list[int]]) -> None:
    check_termination(config, key="ppo.termination")
    got = macro_ids(config, MASK)
    assert got.dtype == torch.int32
    assert got.tolist() == expected


def test_one_token_each_is_the_token_rule() -> None:
    assert torch.equal(macro_ids(TerminationConfig("fixed", 1), MASK), macro_ids(TerminationConfig("token"), MASK))


def test_the_defaults_are_macro_actions_of_five() -> None:
    mask = torch.ones(1, 12, dtype=torch.bool)
    assert macro_ids(TerminationConfig(), mask).tolist() == [[0] * 5 + [1] * 5 + [2] * 2]


def test_rules_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"`ppo.termination.rule` is 'fixd'; known: .*Did you mean `fixed`"):
        check_termination(TerminationConfig("fixd"), key="ppo.termination")
    for n in (0, -3):
        with pytest.raises(ConfigError, match=r"`ppo.termination.n` is"):
            check_termination(TerminationConfig("fixed", n), key="ppo.termination")
    check_termination(TerminationConfig("token", 0), key="ppo.termination")
