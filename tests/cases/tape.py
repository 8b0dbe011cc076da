"""Reverse-mode derivatives of scalar Python code, so that oracle losses have exact gradients.

A `Number` is a float that remembers which numbers it was made of and with which local derivative.
Comparisons look at the values only: which branch was taken decides the derivative, as on paper.
"""

from __future__ import annotations

import math


class Number:
    """A float with the local derivatives of the step that made it."""

    __slots__ = ("grad", "parents", "value")

    def __init__(self, value: float, parents: tuple[tuple[Number, float], ...] = ()) -> None:
        self.value = float(value)
        self.parents = parents
        self.grad = 0.0

    def __add__(self, other: Number | float) -> Number:
        if isinstance(other, Number):
            return Number(self.value + other.value, ((self, 1.0), (other, 1.0)))
        return Number(self.value + other, ((self, 1.0),))

    __radd__ = __add__

    def __neg__(self) -> Number:
        return Number(-self.value, ((self, -1.0),))

    def __sub__(self, other: Number | float) -> Number:
        return self + (-other)

    def __rsub__(self, other: float) -> Number:
        return (-self) + other

    def __mul__(self, other: Number | float) -> Number:
        if isinstance(other, Number):
            return Number(self.value * other.value, ((self, other.value), (other, self.value)))
        return Number(self.value * other, ((self, float(other)),))

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> Number:
        return Number(self.value / other, ((self, 1.0 / other),))

    def __repr__(self) -> str:
        return f"Number({self.value})"


def value_of(x: Number | float) -> float:
    """The float inside `x`."""
    return x.value if isinstance(x, Number) else float(x)


def exp(x: Number | float) -> Number | float:
    """e^x; inf where a float64 overflows."""
    v = value_of(x)
    e = math.inf if v > 709.0 else math.exp(v)
    return Number(e, ((x, e),)) if isinstance(x, Number) else e


def gradients(output: Number | float, inputs: list[Number]) -> list[float]:
    """d output / d input for every input, by one sweep over the numbers in reverse order of making."""
    order: list[Number] = []
    if isinstance(output, Number):
        seen: set[int] = set()
        stack: list[tuple[Number, bool]] = [(output, False)]
        while stack:
            node, expanded = stack.pop()
            if expanded:
                order.append(node)
                continue
            if id(node) in seen:
                continue
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((parent, False) for parent, _ in node.parents)
        for node in order:
            node.grad = 0.0
        output.grad = 1.0
        for node in reversed(order):
            for parent, local in node.parents:
                parent.grad += local * node.grad
        reached = seen
    else:
        reached = set()
    return [x.grad if id(x) in reached else 0.0 for x in inputs]
