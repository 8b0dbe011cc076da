"""Survivors of the mutation run that no input can tell from the original, each with the reason."""

EQUIVALENT: dict[str, str] = {}
