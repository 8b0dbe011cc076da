"""Rules by name; the macro actions themselves are tested with the kernels."""

import pytest
import torch
from torch import Tensor

from marlhf.config import TerminationConfig
from marlhf.errors import ConfigError
from marlhf.termination import Seen, check_termination, macro_ids

MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1]], dtype=torch.bool)


def ids_of(config: TerminationConfig, mask: Tensor, *, ref: Tensor | None = None, seed: int = 0) -> Tensor:
    """Under a rule, every hole before a row's last action being someone else's token."""
    real = mask.flip(1).cumsum(1).flip(1) > 0
    generator = torch.Generator().manual_seed(seed)
    return macro_ids(config, Seen(mask, real, torch.zeros(mask.shape) if ref is None else ref, generator))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TerminationConfig("token"), [[0, 1, 2, 3, 4, -1], [0, -1, -1, -1, -1, -1], [-1] * 6, [0, 1, -1, 2, 3, 4]]),
        (TerminationConfig("fixed", 2), [[0, 0, 1, 1, 2, -1], [0, -1, -1, -1, -1, -1], [-1] * 6, [0, 0, -1, 1, 1, 2]]),
        (TerminationConfig("fixed", 9), [[0, 0, 0, 0, 0, -1], [0, -1, -1, -1, -1, -1], [-1] * 6, [0, 0, -1, 0, 0, 0]]),
        (TerminationConfig("whole"), [[0, 0, 0, 0, 0, -1], [0, -1, -1, -1, -1, -1], [-1] * 6, [0, 0, -1, 0, 0, 0]]),
        (TerminationConfig("turn"), [[0, 0, 0, 0, 0, -1], [0, -1, -1, -1, -1, -1], [-1] * 6, [0, 0, -1, 1, 1, 1]]),
        (
            TerminationConfig("whole", isolate_last=True),
            [[0, 0, 0, 0, 1, -1], [0, -1, -1, -1, -1, -1], [-1] * 6, [0, 0, -1, 0, 0, 1]],
        ),
    ],
)
def test_rules_by_hand(config: TerminationConfig, expected: list[list[int]]) -> None:
    check_termination(config, key="ppo.termination")
    got = ids_of(config, MASK)
    assert got.dtype == torch.int32
    assert got.tolist() == expected


def test_one_token_each_is_the_token_rule() -> None:
    assert torch.equal(ids_of(TerminationConfig("fixed", 1), MASK), ids_of(TerminationConfig("token"), MASK))


def test_the_defaults_are_macro_actions_of_five() -> None:
    mask = torch.ones(1, 12, dtype=torch.bool)
    assert ids_of(TerminationConfig(), mask).tolist() == [[0] * 5 + [1] * 5 + [2] * 2]


def test_rules_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"`ppo.termination.rule` is 'fixd'; known: .*Did you mean `fixed`"):
        check_termination(TerminationConfig("fixd"), key="ppo.termination")
    for n in (0, -3):
        with pytest.raises(ConfigError, match=r"`ppo.termination.n` is"):
            check_termination(TerminationConfig("fixed", n), key="ppo.termination")
    check_termination(TerminationConfig("token", 0), key="ppo.termination")


def test_randomized_lengths_are_a_shuffle_of_the_deck_for_each_row() -> None:
    """2, 3, 5, 10, each three times, in an order of the row's own; what is left is one macro action."""
    mask = torch.ones(6, 70, dtype=torch.bool)
    found = ids_of(TerminationConfig("randomized"), mask)
    orders = []
    for row in found:
        lengths = torch.bincount(row.long()).tolist()
        assert sorted(lengths[:-1]) == sorted([2, 3, 5, 10] * 3)
        assert lengths[-1] == 10
        orders.append(tuple(lengths))
    assert len(set(orders)) == 6
    assert torch.equal(found, ids_of(TerminationConfig("randomized"), mask))
    assert not torch.equal(found, ids_of(TerminationConfig("randomized"), mask, seed=1))
    ones = ids_of(TerminationConfig("randomized", lengths=[1], repeats=2), mask)
    assert ones.tolist() == [[0, 1] + [2] * 68] * 6


def test_perplexity_reads_the_reference() -> None:
    """Negative log-likelihoods 2, 1, 1.6, 3, 2 and 2. Running mean: 1.6 is above (2 + 1) / 2, then 3 is above 1.6, and
    2 is not above 3 nor above (3 + 2) / 2. Neighbour: 1.6 is above 1 and 3 above 1.6."""
    mask = torch.ones(1, 6, dtype=torch.bool)
    ref = -torch.tensor([[2.0, 1.0, 1.6, 3.0, 2.0, 2.0]])
    assert ids_of(TerminationConfig("perplexity"), mask, ref=ref).tolist() == [[0, 0, 1, 2, 2, 2]]
    neighbour = TerminationConfig("perplexity", perplexity_rule="neighbour")
    assert ids_of(neighbour, mask, ref=-torch.tensor([[1.0, 2.0, 1.0, 1.4, 1.4, 1.1]])).tolist() == [[0, 1, 1, 2, 2, 2]]


def test_numbers_that_cannot_be() -> None:
    for config, message in (
        (TerminationConfig("randomized", lengths=[]), r"`t.lengths` is \[\]"),
        (TerminationConfig("randomized", lengths=[2, 0]), r"`t.lengths` is \[2, 0\]"),
        (TerminationConfig("randomized", repeats=0), r"`t.repeats` is 0"),
        (TerminationConfig(perplexity_rule="neighbor"), r"`t.perplexity_rule` is 'neighbor'.*`neighbour`"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_termination(config, key="t")
