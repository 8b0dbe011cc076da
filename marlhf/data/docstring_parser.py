"""Functions and their docstrings in Python source files, read with `ast`: nothing is imported or run.

`docstrings.py` runs this file as a program, once per core, so it uses the standard library alone and starts
in milliseconds: one path a line comes in on stdin, one line of JSON per path goes out on stdout.
"""

import ast
import gc
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator

# Between a lower-case letter or digit and a capital, and before the last capital of an acronym:
# MaskedArray -> Masked Array, HTTPServer -> HTTP Server.
_WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_PARAGRAPH_BORDER = re.compile(r"\n\s*\n")
_RECEIVERS = ("self", "cls", "mcs", "mcls")


def split_name(name: str) -> str:
    """An identifier as words: `MaskedArray` -> `Masked Array`, `__true_div__` -> `true div`."""
    return " ".join(_WORD_BORDER.sub(" ", part) for part in name.split("_") if part)


def read_source(source: bytes) -> list[tuple[str, str, str, str]]:
    """The documented functions and methods of one module, in the order of the file.

    Returns (qualified name, that name and the arguments' names as words, first paragraph of the docstring
    with its white space folded, rest of the docstring) for each. Functions inside functions, `__init__`,
    and names without a letter, such as `_`, are left out.

    Raises SyntaxError, ValueError, RecursionError or MemoryError for a source that does not parse.
    """
    with warnings.catch_warnings():
        # Other people's invalid escapes and deprecated syntax are not this user's concern.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    found = []
    for owners, function in _functions(tree.body, ()):
        docstring = ast.get_docstring(function, clean=False)
        words = split_name(function.name)
        if docstring is None or function.name == "__init__" or not words:
            continue
        first, *rest = _PARAGRAPH_BORDER.split(inspect.cleandoc(docstring), maxsplit=1)
        path = ". ".join([*(split_name(owner) for owner in owners), words])
        arguments = ", ".join(split_name(name) or name for name in _argument_names(function))
        found.append(
            (
                ".".join([*owners, function.name]),
                f"{path} ({arguments})",
                " ".join(first.split()),
                rest[0].strip() if rest else "",
            )
        )
    return found


def _functions(
    body: list[ast.stmt], owners: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef | ast.AsyncFunctionDef]]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield owners, statement
        elif isinstance(statement, ast.ClassDef):
            yield from _functions(statement.body, (*owners, statement.name))
        else:
            # Definitions under `if`, `try` and `with` belong to the module or class around them.
            for name in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, name, ()):
                    yield from _functions(inner.body if isinstance(inner, ast.ExceptHandler) else [inner], owners)


def _argument_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    if names and names[0] in _RECEIVERS:
        names = names[1:]
    if given.vararg:
        names.append(given.vararg.arg)
    names += [argument.arg for argument in given.kwonlyargs]
    if given.kwarg:
        names.append(given.kwarg.arg)
    return names


def read_file(path: str) -> list[tuple[str, str, str, str]] | None:
    """`read_source` of a file; None if it cannot be read or does not parse."""
    try:
        with open(path, "rb") as file:
            return read_source(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def main() -> None:
    # A syntax tree is a million small objects that reference counting alone frees; looking for cycles among
    # them would double the time.
    gc.disable()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(read_file(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
