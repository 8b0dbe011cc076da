"""The sizes that benchmarks run at, by name."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = {"gpt2": 50_257, "llama3": 128_256, "qwen": 151_936, "gemma2": 256_000}
HIDDEN = {"gpt2": 768, "llama3": 4096, "qwen": 3584, "gemma2": 2304}
"""Of GPT-2 small, Llama-3 8B, Qwen2.5 7B and Gemma-2 2B."""


@dataclass(frozen=True)
class Shape:
    """A name and the sizes behind it."""

    name: str
    sizes: tuple[tuple[str, int], ...]

    def __getitem__(self, letter: str) -> int:
        return dict(self.sizes)[letter]

    def __str__(self) -> str:
        return " ".join(f"{letter}={size}" for letter, size in self.sizes)


def logits_shape(model: str, rows: int) -> Shape:
    """Rows of logits over the vocabulary of `model`."""
    return Shape(f"{model}-{rows}", (("N", rows), ("V", VOCABULARY[model])))


def linear_shape(model: str, rows: int, hidden: int | None = None) -> Shape:
    """Rows of hidden states in front of the head of `model`, of its own width or of the one given."""
    width = HIDDEN[model] if hidden is None else hidden
    return Shape(f"{model}-{rows}-h{width}", (("N", rows), ("H", width), ("V", VOCABULARY[model])))


def token_shape(batch: int, tokens: int) -> Shape:
    """A batch of responses."""
    return Shape(f"{batch}x{tokens}", (("B", batch), ("T", tokens)))
