"""`python -m marlhf` is the `marlhf` command."""

from marlhf.cli import main

main()
