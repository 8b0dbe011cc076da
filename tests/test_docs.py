"""The documentation is true: its code runs, its errors are the ones raised, its names and links exist."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import marlhf_kernels

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPS = ROOT / "docs" / "ops"
TUTORIAL = ROOT / "docs" / "macro-actions-in-your-loop.md"
OP_PAGES = [page for page in PAGES if page.parent == OPS and page.name != "README.md"]

# ```python runs, ```python raises=Name raises with the message of the ```text block after it, ```py is a signature.
KINDS = ("python", "py", "text", "diff", "bash", "yaml")
FENCE = re.compile(r"^```(?P<info>.*)\n(?P<body>(?:.*\n)*?)^```$", re.MULTILINE)
RAISES = re.compile(r"python raises=(\w+)")
MATHS = re.compile(r"\$\$(.*?)\$\$|\$(?!\$)([^$\n]+)\$", re.DOTALL)


def public_functions() -> dict[str, inspect.Signature]:
    """Every public function by the name it has on its page."""
    found = {name: getattr(marlhf_kernels, name) for name in marlhf_kernels.__all__}
    builders = marlhf_kernels.segmentation
    found |= {f"segmentation.{name}": getattr(builders, name) for name in builders.__all__}
    return {name: inspect.signature(f) for name, f in found.items() if inspect.isfunction(f)}


FUNCTIONS = public_functions()
PARAMETERS = {name for signature in FUNCTIONS.values() for name in signature.parameters}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page and the line that its body starts on."""

    info: str
    body: str
    line: int


def blocks_of(text: str) -> list[Block]:
    return [Block(m["info"], m["body"], text.count("\n", 0, m.start("body")) + 1) for m in FENCE.finditer(text)]


def prose_of(text: str) -> str:
    return FENCE.sub("", text)


def run(block: Block, name: str) -> None:
    """Execute a block in a namespace of its own; a traceback shows the page's line."""
    exec(compile("\n" * (block.line - 1) + block.body, name, "exec"), {"__name__": "__docs__"})


def check_raises(block: Block, message: Block, name: str) -> None:
    """The block raises the type that its info string names, with this message, line breaks aside."""
    match = RAISES.fullmatch(block.info)
    assert match is not None, f"{name}:{block.line}: {block.info}"
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run(block, name)
    assert type(caught.value).__name__ == match[1]
    assert " ".join(str(caught.value).split()) == " ".join(message.body.split())


def run_page(text: str, name: str) -> int:
    """Run every block of a page that is meant to. Returns how many there were."""
    blocks = blocks_of(text)
    assert text.count("```") == 2 * len(blocks), f"{name}: a fence is not closed, or not at the start of a line"
    count = 0
    for i, block in enumerate(blocks):
        kind = block.info.partition(" ")[0]
        assert kind in KINDS, f"{name}:{block.line}: a block of kind {block.info!r}"
        if kind != "python":
            assert block.info == kind, f"{name}:{block.line}"
            continue
        count += 1
        if block.info == "python":
            run(block, name)
        else:
            follower = blocks[i + 1 : i + 2]
            assert [b.info for b in follower] == ["text"], f"{name}:{block.line}: no message follows"
            check_raises(block, follower[0], name)
    return count


def signature_text(parameters: list[tuple[str, bool, str | None]]) -> str:
    """Names, defaults and where keyword-only begins, in one spelling."""
    words, starred = [], False
    for name, keyword_only, default in parameters:
        if keyword_only and not starred:
            words.append("*")
            starred = True
        words.append(name if default is None else f"{name}={default}")
    return ", ".join(words)


def real_signature(signature: inspect.Signature) -> str:
    return signature_text(
        [
            (p.name, p.kind is p.KEYWORD_ONLY, None if p.default is p.empty else repr(p.default))
            for p in signature.parameters.values()
        ]
    )


def shown_signatures(text: str) -> dict[str, str]:
    """Function -> signature, from the py blocks of a page."""
    found = {}
    for block in blocks_of(text):
        if block.info == "py":
            match = re.fullmatch(r"([\w.]+)(\(.*\))\s*", block.body, re.DOTALL)
            assert match is not None, block.body
            (function,) = ast.parse(f"def f{match[2]}: ...").body
            assert isinstance(function, ast.FunctionDef)
            args = function.args
            defaults = [None] * (len(args.args) - len(args.defaults)) + [ast.unparse(d) for d in args.defaults]
            found[match[1]] = signature_text(
                [(a.arg, False, d) for a, d in zip(args.args, defaults, strict=True)]
                + [
                    (a.arg, True, None if d is None else ast.unparse(d))
                    for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
                ]
            )
    return found


def table_names(text: str) -> list[str]:
    """What stands in code font in the first column of the tables that are headed `argument`."""
    names = []
    for table in re.findall(r"^\| argument .*\n\|[-| ]+\n((?:\|.*\n)+)", prose_of(text), re.MULTILINE):
        for row in table.splitlines():
            names += re.findall(r"`([^`]+)`", row.split("|")[1])
    return names


def keywords_in_prose(text: str) -> set[str]:
    """The `name` of every `name=...` in code font outside of blocks."""
    return set(re.findall(r"`(\w+)=[^`]*`", prose_of(text)))


def broken_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere: no such file, or no such heading in it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in headings(file.read_text() if path else text)):
            broken.append(target)
    return broken


def headings(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    lines = re.findall(r"^#+ (.+)$", prose_of(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path) -> None:
    text = page.read_text()
    count = run_page(text, str(page))
    if page.parent == OPS or page.name in ("README.md", TUTORIAL.name):
        assert count > 0


@pytest.mark.parametrize("page", OP_PAGES, ids=lambda page: page.stem)
def test_a_page_has_for_each_function_an_example_that_asserts_and_an_error(page: Path) -> None:
    text = page.read_text()
    assert shown_signatures(text)
    errors = [b for b in blocks_of(text) if RAISES.fullmatch(b.info)]
    assert errors
    examples = [b.body for b in blocks_of(text) if b.info == "python"]
    for body in examples:
        assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(body))), body
        assert 4 <= len(body.splitlines()) <= 20, body
    for name in shown_signatures(text):
        called = name.rpartition(".")[2]
        assert any(f"{called}(" in body for body in examples), f"no example calls {name}"


def test_every_public_function_has_its_signature_on_one_page() -> None:
    shown = [item for page in OP_PAGES for item in shown_signatures(page.read_text()).items()]
    assert len(FUNCTIONS) > 15
    assert sorted(shown) == sorted((name, real_signature(signature)) for name, signature in FUNCTIONS.items())


@pytest.mark.parametrize("page", OP_PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_hold_each_parameter_and_no_other(page: Path) -> None:
    text = page.read_text()
    parameters = {p for name in shown_signatures(text) for p in FUNCTIONS[name].parameters}
    names = table_names(text)
    assert set(names) == parameters
    if len(shown_signatures(text)) == 1:
        assert len(names) == len(parameters), "a parameter stands twice"
    assert keywords_in_prose(text) <= PARAMETERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", OP_PAGES, ids=lambda page: page.stem)
def test_mathematics_survives_markdown(page: Path) -> None:
    """Markdown takes the backslash from these before the formula is set."""
    for display, inline in MATHS.findall(prose_of(page.read_text())):
        formula = display or inline
        assert not re.search(r"\\[,;:!{}_#*]", formula), formula
        assert formula.count("{") == formula.count("}"), formula


def test_the_index_links_every_page() -> None:
    index = (OPS / "README.md").read_text()
    assert {page.name for page in OP_PAGES} == set(re.findall(r"\]\((\w+\.md)\)", index))


def test_the_tutorial_shows_the_whole_difference() -> None:
    token, macro = ((ROOT / "examples" / f"{name}_ppo.py").read_text() for name in ("token", "macro_action"))
    real = [
        line
        for line in difflib.unified_diff(token.splitlines(), macro.splitlines(), n=0, lineterm="")
        if not re.match(r"@@|\+\+\+|---", line)
    ]
    shown = [b.body.splitlines() for b in blocks_of(TUTORIAL.read_text()) if b.info == "diff"]
    assert real
    assert [line for block in shown for line in block if line[:1] in ("+", "-")] == real
    for block in shown:
        for sign, file in (("-", token), ("+", macro)):
            kept = "".join(line[1:] + "\n" for line in block if line[:1] in (sign, " "))
            assert kept in file, kept


GOOD = """# title
```python
assert 1 + 1 == 2
```
```python raises=ValueError
raise ValueError("one two")
```
```text
one
two
```
"""


def test_a_good_page_passes() -> None:
    assert run_page(GOOD, "page") == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("== 2", "== 3"),
        ("one\ntwo", "one\nthree"),
        ("raises=ValueError", "raises=TypeError"),
        ('raise ValueError("one two")', "pass"),
        ("```text", "```yaml"),
        ("```python\n", "```Python\n"),
        ("```python raises=ValueError", "```python raises"),
        ("assert 1 + 1 == 2\n```", "assert 1 + 1 == 2"),
        ("```python\n", " ```python\n"),
    ],
)
def test_a_false_page_does_not_pass(old: str, new: str) -> None:
    assert GOOD.count(old) >= 1
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_page(GOOD.replace(old, new), "page")


def test_what_the_checks_read() -> None:
    """Names, signatures and links are found where a page has them."""
    text = "# Two words\n```py\nf(x, *, y=1.0)\n```\n| argument | meaning |\n|---|---|\n| `x`, `y` | `z` |\n\n`w=3`\n"
    assert shown_signatures(text) == {"f": "x, *, y=1.0"}
    assert table_names(text) == ["x", "y"]
    assert keywords_in_prose(text) == {"w"}
    linked = text + "[a](#two-words) [b](#three) [c](no-such-file.md) [d](README.md)"
    assert broken_links(ROOT / "README.md", linked) == ["#three", "no-such-file.md"]
