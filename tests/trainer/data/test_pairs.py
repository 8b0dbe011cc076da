from collections import Counter
from typing import Any

import pytest

from marlhf.data import EncodedRow, drop_equal_pairs, make_pairs

ROWS = [
    {"prompt": f"name {i}", "response": " ".join(f"w{i}x{j}" for j in range(2 + i % 12)), "function": "f"}
    for i in range(600)
]
SAMPLES = [f"sampled {i}" for i in range(600)]


def of_kind(kind: str, rows: list[dict[str, Any]] = ROWS, **more: Any) -> list[dict[str, str]]:
    pairs = make_pairs(rows, seed=1, weights={kind: 1}, **more)
    assert {pair["kind"] for pair in pairs} <= {kind}
    return pairs


def test_one_pair_per_row_in_their_order_and_never_equal() -> None:
    pairs = make_pairs(ROWS, seed=0, samples=SAMPLES)
    assert [(pair["prompt"], pair["chosen"]) for pair in pairs] == [(row["prompt"], row["response"]) for row in ROWS]
    assert all(pair.keys() == {"prompt", "chosen", "rejected", "kind"} for pair in pairs)
    assert all(pair["chosen"] != pair["rejected"] for pair in pairs)


@pytest.mark.parametrize(
    ("weights", "samples", "expected"),
    [
        (None, SAMPLES, {"other": 300, "shuffled": 100, "truncated": 100, "sample": 100}),
        (None, None, {"other": 360, "shuffled": 120, "truncated": 120}),
        ({"other": 1, "sample": 3}, SAMPLES, {"other": 150, "sample": 450}),
        ({"truncated": 0.1, "shuffled": 0.2, "other": 0}, SAMPLES, {"truncated": 200, "shuffled": 400}),
    ],
)
def test_kinds_have_the_shares_asked_for(
    weights: dict[str, float] | None, samples: list[str] | None, expected: dict[str, int]
) -> None:
    found = Counter(pair["kind"] for pair in make_pairs(ROWS, seed=5, samples=samples, weights=weights))
    assert found.keys() == expected.keys()
    assert all(abs(found[kind] - count) <= 1 for kind, count in expected.items())


def test_a_kind_that_rows_do_not_allow_is_made_up_for_by_others() -> None:
    rows = [*ROWS[:100], *({"prompt": f"one {i}", "response": f"word{i}"} for i in range(100))]
    pairs = make_pairs(rows, seed=0, weights={"other": 1, "shuffled": 1})
    found = Counter(pair["kind"] for pair in pairs)
    assert len(pairs) == 200
    assert found["other"] == pytest.approx(100, abs=8)
    assert all(pair["kind"] == "other" for pair in pairs[100:])


def test_the_seed_decides() -> None:
    first = make_pairs(ROWS, seed=0, samples=SAMPLES)
    assert first == make_pairs(ROWS, seed=0, samples=SAMPLES)
    assert first != make_pairs(ROWS, seed=1, samples=SAMPLES)


def test_other_is_another_prompts_response() -> None:
    responses = {row["response"]: row["prompt"] for row in ROWS}
    pairs = of_kind("other")
    assert all(responses[pair["rejected"]] != pair["prompt"] for pair in pairs)
    # Which row is taken is not tied to the row's place.
    distances = Counter(int(responses[pair["rejected"]][5:]) - i for i, pair in enumerate(pairs))
    assert max(distances.values()) < 20


def test_other_never_takes_an_equal_prompts_or_an_equal_response() -> None:
    rows = [
        {"prompt": "p", "response": "a b"},
        {"prompt": "p", "response": "c d"},
        {"prompt": "q", "response": "a  b"},
        {"prompt": "r", "response": "e f"},
    ]
    for seed in range(20):
        pairs = make_pairs(rows, seed=seed, weights={"other": 1})
        assert pairs[0]["rejected"] == "e f"
        assert pairs[1]["rejected"] in ("a  b", "e f")
        assert pairs[2]["rejected"] in ("c d", "e f")
    assert make_pairs(rows[:2], seed=0, weights={"other": 1}) == []


def test_shuffled_has_the_same_words_in_another_order() -> None:
    pairs = of_kind("shuffled")
    assert len(pairs) == len(ROWS)
    for pair in pairs:
        assert sorted(pair["rejected"].split()) == sorted(pair["chosen"].split())
        assert pair["rejected"] != pair["chosen"]


def test_shuffled_keeps_the_white_space_and_refuses_what_has_one_order() -> None:
    rows = [{"prompt": "p", "response": text} for text in ("a\n  b", "a a", "a", "a b a")]
    pairs = of_kind("shuffled", rows)
    assert [pair["chosen"] for pair in pairs] == ["a\n  b", "a b a"]
    assert pairs[0]["rejected"] == "b\n  a"
    assert pairs[1]["rejected"] in ("a a b", "b a a")


def test_truncated_is_the_first_30_to_70_percent_of_the_words() -> None:
    shares = []
    for pair in of_kind("truncated"):
        chosen, rejected = pair["chosen"].split(), pair["rejected"].split()
        assert chosen[: len(rejected)] == rejected
        assert 0.3 <= len(rejected) / len(chosen) <= 0.7
        shares.append(len(rejected) / len(chosen))
    assert min(shares) < 0.35
    assert max(shares) > 0.65


def test_truncated_keeps_the_text_as_it_stands_and_refuses_single_words() -> None:
    rows = [{"prompt": "p", "response": text} for text in (" a\nb c\t d", "word")]
    [pair] = of_kind("truncated", rows)
    assert pair["rejected"] == " a\nb"


def test_sample_is_the_rows_own_and_not_blank_or_equal() -> None:
    samples = [*SAMPLES[:3], " ", f" {ROWS[4]['response']}\n", *SAMPLES[5:]]
    pairs = of_kind("sample", samples=samples)
    kept = [i for i in range(600) if i not in (3, 4)]
    assert [(pair["prompt"], pair["rejected"]) for pair in pairs] == [(f"name {i}", f"sampled {i}") for i in kept]


def test_no_rows_no_pairs() -> None:
    assert make_pairs([], seed=0, samples=[]) == []


@pytest.mark.parametrize(
    ("weights", "samples", "match"),
    [
        ({"others": 1}, None, "unknown kinds others; known: other, shuffled, truncated, sample"),
        ({"other": -1, "shuffled": 2}, None, "must not be negative"),
        ({"other": 0}, None, "one must be above 0"),
        ({}, None, "one must be above 0"),
        ({"sample": 1}, None, "need samples"),
        (None, ["a"], "1 samples for 600 rows"),
    ],
)
def test_arguments_that_cannot_be(weights: dict[str, float] | None, samples: list[str] | None, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_pairs(ROWS, seed=0, samples=samples, weights=weights)


def test_pairs_that_are_equal_after_cutting_are_dropped_and_counted() -> None:
    pairs = [([5, 6], [5, 6]), ([5, 6], [5, 7]), ([5], [5, 2]), ([2], [2])]
    rows = [EncodedRow([1, i], {"chosen": a, "rejected": b}, {}) for i, (a, b) in enumerate(pairs)]
    assert drop_equal_pairs(rows) == ([rows[1], rows[2]], 2)
    assert drop_equal_pairs([]) == ([], 0)
