"""The demo: the whole pipeline on the docstrings of the code that is installed here, in minutes on a CPU."""

from marlhf.demo.run import run_demo

__all__ = ["run_demo"]
