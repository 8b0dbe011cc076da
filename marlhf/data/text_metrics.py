"""What generated texts look like, in numbers that need no model."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L: F1 of the longest common subsequence of words, in [0, 1].

    With L the length of that subsequence, F1 is the harmonic mean of L / words of the prediction and L / words
    of the reference (Lin, 2004). Words are runs of letters a-z and digits in lower case, not stemmed, as the
    `rouge-score` package takes them; 0 where either text has none.
    """
    return float(_rouge_scorer().score(reference, prediction)["rougeL"].fmeasure)


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Distinct n-grams of words over all n-grams, pooled over the texts (Li et al., 2016); 0 if there are none.

    Words are separated by white space. Low values say that the texts resemble each other.
    """
    grams = [gram for text in texts for gram in _ngrams(text, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repeated_ngram_share(texts: Sequence[str], n: int = 3) -> float:
    """The share of n-grams of words that already occurred earlier in the same text, pooled over the texts.

    0 if there are no n-grams. High values say that single texts go in circles.
    """
    repeated = total = 0
    for text in texts:
        grams = list(_ngrams(text, n))
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else 0.0


def _ngrams(text: str, n: int) -> Iterator[tuple[str, ...]]:
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    words = text.split()
    return (tuple(words[start : start + n]) for start in range(len(words) - n + 1))


@lru_cache(maxsize=1)
def _rouge_scorer() -> Any:
    # Imported late: the package loads NLTK, which takes longer than all of this one.
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)
