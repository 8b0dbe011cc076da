import pytest

from marlhf.data import distinct_n, repeated_ngram_share, rouge_l


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("The CAT, sat!", "the cat sat", 1.0),
        # "the ran" is the longest common subsequence: 2 of 3 words, 2 of 5 words.
        ("the dog ran", "the cat then ran away", 2 * (2 / 3) * (2 / 5) / (2 / 3 + 2 / 5)),
        ("sat cat the", "the cat sat", 1 / 3),
        ("dog", "the cat sat", 0.0),
        ("", "the cat sat", 0.0),
        ("the cat sat", "", 0.0),
        ("returns", "return", 0.0),
    ],
)
def test_rouge_l(prediction: str, reference: str, expected: float) -> None:
    assert rouge_l(prediction, reference) == pytest.approx(expected)
    assert rouge_l(reference, prediction) == pytest.approx(expected)


def test_distinct_n_pools_the_texts() -> None:
    assert distinct_n(["a b c", "a b d"], n=2) == 3 / 4
    assert distinct_n(["a b c", "a b d"], n=1) == 4 / 6
    assert distinct_n(["a b"] * 5) == 1 / 5
    # No bigram crosses from one text into the next, and a short text has none.
    assert distinct_n(["a b", "c", "", "d e"]) == 1.0
    assert distinct_n(["a", ""]) == 0.0
    assert distinct_n([]) == 0.0


def test_repeated_ngram_share_looks_inside_each_text() -> None:
    assert repeated_ngram_share(["a b a b a"], n=2) == 2 / 4
    assert repeated_ngram_share(["a b c", "a b c"], n=3) == 0.0
    assert repeated_ngram_share(["x x x x x", "a b c d e"], n=3) == 2 / 6
    assert repeated_ngram_share(["a b", ""]) == 0.0
    assert repeated_ngram_share([]) == 0.0


def test_n_must_be_positive() -> None:
    for metric in (distinct_n, repeated_ngram_share):
        with pytest.raises(ValueError, match="n must be at least 1, not 0"):
            metric(["a b"], n=0)
