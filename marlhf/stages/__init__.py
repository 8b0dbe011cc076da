"""The stages of a run, each one loop that reads top to bottom."""
