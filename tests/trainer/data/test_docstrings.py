import ast
import gzip
import inspect
import json
import logging
import platform
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from marlhf.data import docstring_parser, docstrings, read_docstrings
from marlhf.data.docstring_parser import read_source, split_name
from marlhf.data.docstrings import Source, installed_sources, split_of
from marlhf.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MARLHF_CACHE", str(folder))
    return folder


def package(folder: Path, files: dict[str, str], version: str = "1") -> dict[str, Source]:
    """A package `pack` in `folder`, as `read_docstrings` takes it."""
    for name, text in files.items():
        path = folder / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return {"pack": Source(folder / "pack", version)}


def functions(count: int, start: int = 0) -> str:
    """Source of so many functions whose prompts and responses are all distinct."""
    return "".join(
        f'def function_{i}(left, right):\n    """Return the sum number {i} of both."""\n'
        for i in range(start, start + count)
    )


# Names.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MaskedArray", "Masked Array"),
        ("__truediv__", "truediv"),
        ("get_HTTPServer_url", "get HTTP Server url"),
        ("GPT2Model", "GPT2 Model"),
        ("conv2d", "conv2d"),
        ("x", "x"),
        ("_", ""),
        ("größeNull", "größe Null"),
    ],
)
def test_names_become_words(name: str, words: str) -> None:
    assert split_name(name) == words


def found(source: str) -> list[tuple[str, str, str, str]]:
    return read_source(textwrap.dedent(source).encode())


def test_functions_and_methods_with_their_arguments() -> None:
    assert found(
        '''
        class MaskedArray:
            def __truediv__(self, other):
                """Divide other into self."""
            @classmethod
            def from_list(cls, theItems, /, *rest, keep_mask=False, **options):
                """Build one
                from   a list."""
            class _Inner:
                async def get(self): "Get it."

        def one(self_ish, b): """One."""
        '''
    ) == [
        ("MaskedArray.__truediv__", "Masked Array. truediv (other)", "Divide other into self.", ""),
        (
            "MaskedArray.from_list",
            "Masked Array. from list (the Items, rest, keep mask, options)",
            "Build one from a list.",
            "",
        ),
        ("MaskedArray._Inner.get", "Masked Array. Inner. get ()", "Get it.", ""),
        ("one", "one (self ish, b)", "One.", ""),
    ]


def test_what_is_not_read() -> None:
    assert not found(
        '''
        class C:
            """A class."""
            def __init__(self): """Make one."""
        def undocumented(): return """not a docstring"""
        def formatted(x): f"""not a docstring {x}"""
        def _(): """No name."""
        def outer():
            def inner(): """Inside a function."""
        lambda: """not a function statement"""
        '''
    )


def test_definitions_under_conditions_belong_to_what_is_around_them() -> None:
    source = """
        if True:
            def a(): "In if."
        else:
            def b(): "In else."
        try:
            def c(): "In try."
        except E:
            class D:
                def d(self): "In handler."
        finally:
            with x:
                for y in z:
                    def e(): "Deep."
        """
    assert [entry[:2] for entry in found(source)] == [
        ("a", "a ()"),
        ("b", "b ()"),
        ("c", "c ()"),
        ("D.d", "D. d ()"),
        ("e", "e ()"),
    ]


def test_docstring_is_cut_at_its_first_paragraph() -> None:
    [(_, _, first, rest)] = found(
        '''
        def f():
            """
            First line
              and second.
            \t
            Then the rest:

                with its shape.
            """
        '''
    )
    assert first == "First line and second."
    assert rest == "Then the rest:\n\n    with its shape."


def test_other_peoples_warnings_stay_silent(recwarn: pytest.WarningsRecorder) -> None:
    assert found('def f():\n    "Bad \\d escape."\n    return 1 is 1\n')
    assert not recwarn.list


# Rows.


def test_rows_of_both_families(tmp_path: Path) -> None:
    source = '''
        class HTTPServer:
            def send_all(self, someData):
                """Send all of the data.

                Nothing is
                kept back.
                """
        def short(): """Too short."""
        def exact(): """Twelve chars"""
        def long():
            """%s"""
        ''' % ("x" * 101)
    sources = package(tmp_path, {"net/__init__.py": source, "top.py": functions(1)})
    rows = all_rows(read_docstrings("names", sources=sources, workers=0))
    assert {(row["prompt"], row["response"], row["function"]) for row in rows} == {
        ("HTTP Server. send all (some Data)", "Send all of the data.", "pack.net.HTTPServer.send_all"),
        ("exact ()", "Twelve chars", "pack.net.exact"),
        ("function 0 (left, right)", "Return the sum number 0 of both.", "pack.top.function_0"),
    }
    [row] = all_rows(read_docstrings("bodies", sources=sources, workers=0))
    assert (row["prompt"], row["response"]) == ("Nothing is\nkept back.", "Send all of the data.")


def all_rows(splits: docstrings.Splits) -> list[dict[str, str]]:
    return [*splits.train, *splits.validation, *splits.test]


def test_equal_rows_are_kept_once_and_everything_is_counted(tmp_path: Path) -> None:
    sources = package(
        tmp_path,
        {
            "a.py": functions(5),
            "b.py": functions(7),
            "broken.py": "def f(:\n",
            "binary.py": "\0",
            "tests/test_a.py": functions(9, start=100),
            "notes.txt": functions(9, start=200),
        },
    )
    (tmp_path / "pack" / "dangling.py").symlink_to(tmp_path / "nowhere")
    splits = read_docstrings("names", sources=sources, workers=0)
    assert len(all_rows(splits)) == 7
    assert splits.counts == {
        "files": 4,
        "unparsed_files": 2,
        "functions": 12,
        "duplicates": 5,
        "pairs": 7,
        "train": len(splits.train),
        "validation": len(splits.validation),
        "test": len(splits.test),
    }
    assert splits.versions == {"pack": "1"}


def test_no_response_stands_in_two_splits(tmp_path: Path) -> None:
    # Each response twice, in two ways of writing it, under different names.
    source = "".join(
        f'def first_{i}(): """Return the sum number {i}."""\ndef second_{i}(): """Return the  SUM, number {i}"""\n'
        for i in range(1500)
    )
    splits = read_docstrings("names", sources=package(tmp_path, {"a.py": source}), workers=0)
    words = [
        {row["response"].lower().replace(",", "").rstrip(".") for row in rows}
        for rows in (splits.train, splits.validation, splits.test)
    ]
    assert sum(map(len, words)) == 1500
    assert not words[0] & words[1]
    assert not words[0] & words[2]
    assert not words[1] & words[2]
    assert [len(rows) / 3000 for rows in (splits.train, splits.validation, splits.test)] == pytest.approx(
        [0.9, 0.05, 0.05], abs=0.02
    )


def test_the_split_of_a_response_never_moves() -> None:
    assert split_of("Return the sum.") == split_of("return THE sum") == "train"
    places = {name: [i for i in range(60) if split_of(f"Row {i}.") == name] for name in ("validation", "test")}
    assert places == {"validation": [12, 18, 53, 57], "test": [9, 23, 47, 49, 59]}


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    source = 'def f(): "Return half of it: \\ud800."\n' + functions(1)
    [row] = all_rows(read_docstrings("names", sources=package(tmp_path, {"a.py": source}), workers=0))
    assert row["function"] == "pack.a.function_0"


def test_nothing_found_is_an_error_and_is_not_cached(tmp_path: Path, cache: Path) -> None:
    sources = package(tmp_path, {"a.py": "x = 1\n"})
    with pytest.raises(DataError, match=f"no docstrings of 12-100 characters in {tmp_path}/pack"):
        read_docstrings("names", sources=sources, workers=0)
    assert not cache.exists()


def test_unknown_family() -> None:
    with pytest.raises(ConfigError, match=r"known: names, bodies.*Did you mean `names`"):
        read_docstrings("name")


# Child processes.


def test_children_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"m{i}.py": functions(3, start=3 * i) for i in range(40)} | {"broken.py": "("}
    sources = package(tmp_path, files)
    alone = read_docstrings("names", sources=sources, workers=0)
    monkeypatch.setenv("MARLHF_CACHE", str(tmp_path / "second"))
    seen: list[tuple[int, int]] = []
    together = read_docstrings("names", sources=sources, workers=3, progress=lambda *counts: seen.append(counts))
    assert together == alone
    assert together.counts["pairs"] == 120
    assert seen == [(i, 41) for i in range(1, 42)]


def test_a_file_that_kills_its_child_costs_that_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = tmp_path / "dying_parser.py"
    parser.write_text(
        inspect.getsource(docstring_parser)
        .replace("def main() -> None:\n", "def main() -> None:\n    import os\n")
        .replace(
            "    for line in sys.stdin:\n",
            "    for line in sys.stdin:\n        'poison' in line and os._exit(9)\n",
        )
    )
    monkeypatch.setattr(docstring_parser, "__file__", str(parser))
    files = {f"m{i}.py": functions(1, start=i) for i in range(10)} | {"m5_poison.py": functions(1, start=50)}
    splits = read_docstrings("names", sources=package(tmp_path, files), workers=2)
    assert splits.counts["unparsed_files"] == 1
    assert splits.counts["pairs"] == 10


def test_an_interruption_leaves_no_child_and_no_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    start = docstrings._start_child
    monkeypatch.setattr(docstrings, "_start_child", lambda: started.append(start()) or started[-1])
    sources = package(tmp_path, {f"m{i}.py": functions(1, start=i) for i in range(2000)})

    def interrupt(done: int, total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_docstrings("names", sources=sources, workers=2, progress=interrupt)
    assert 1 <= len(started) <= 2
    assert all(child.poll() is not None for child in started)
    assert not cache.exists()


def test_the_child_starts_without_this_package() -> None:
    """It is run by path in isolation: importing torch in every child would cost more than the parsing."""
    imports = {
        name.name.partition(".")[0]
        for node in ast.walk(ast.parse(inspect.getsource(docstring_parser)))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else node.names)
    }
    assert imports <= set(sys.stdlib_module_names)


# Cache.


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many files each real read parsed."""
    counts: list[int] = []
    parse = docstrings._parse

    def counted(paths, progress, workers):
        counts.append(len(paths))
        return parse(paths, progress, workers)

    monkeypatch.setattr(docstrings, "_parse", counted)
    return counts


def test_second_read_comes_from_the_cache(tmp_path: Path, cache: Path, reads: list[int]) -> None:
    sources = package(tmp_path, {"a.py": functions(30)})
    first = read_docstrings("names", sources=sources, workers=0)
    assert read_docstrings("names", sources=sources, workers=0) == first
    assert reads == [1]
    assert [path.name.endswith(".json.gz") for path in cache.iterdir()] == [True]


def test_cache_key_is_the_content(tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(family: str = "names", version: str = "1") -> None:
        read_docstrings(family, sources=package(tmp_path, {}, version), workers=0)

    long = 'def f(a):\n    """Return something of a.\n\n    More of it.\n    """\n'
    package(tmp_path, {"a.py": functions(3) + long})
    read()
    read(version="2")
    read("bodies")
    package(tmp_path, {"a.py": functions(4) + long})
    read()
    package(tmp_path, {"b.py": ""})
    read()
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    read()
    monkeypatch.setattr(docstrings, "_READER_VERSION", 99)
    read()
    assert len(reads) == 7
    read()
    assert len(reads) == 7


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other json", "not gzip"])
def test_damaged_cache_is_rebuilt(tmp_path: Path, cache: Path, reads: list[int], damage: str) -> None:
    sources = package(tmp_path, {"a.py": functions(30)})
    first = read_docstrings("names", sources=sources, workers=0)
    [file] = cache.iterdir()
    good = file.read_bytes()
    middle = len(good) // 2
    file.write_bytes(
        {
            "cut": good[:middle],
            "flipped": good[:middle] + bytes([good[middle] ^ 0xFF]) + good[middle + 1 :],
            "empty": b"",
            "other json": gzip.compress(json.dumps({"train": []}).encode()),
            "not gzip": b"{}",
        }[damage]
    )
    assert read_docstrings("names", sources=sources, workers=0) == first
    assert reads == [1, 1]
    assert file.read_bytes() == good
    assert [path.name for path in cache.iterdir()] == [file.name]


def test_cache_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MARLHF_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        splits = read_docstrings("names", sources=package(tmp_path, {"a.py": functions(3)}), workers=0)
    assert splits.counts["pairs"] == 3
    assert "the docstrings are not cached" in caplog.text


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert docstrings.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("MARLHF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert docstrings.cache_folder() == tmp_path / "xdg" / "marlhf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert docstrings.cache_folder() == tmp_path / ".cache" / "marlhf"


# What is installed.


def test_packages_are_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "explosive_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(docstrings, "PACKAGES", ("explosive_package", "numpy"))
    found = installed_sources()
    assert list(found) == ["python", "explosive_package", "numpy"]
    assert found["explosive_package"] == Source(folder, "unknown")
    assert found["numpy"] == Source(Path(np.__file__).parent, np.__version__)
    assert found["python"] == Source(Path(ast.__file__).parent, platform.python_version())


def test_packages_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(docstrings, "PACKAGES", ("numpy", "no_such_package_at_all"))
    assert set(installed_sources()) == {"python", "numpy"}
    monkeypatch.setattr(docstrings, "installed_sources", lambda: package(tmp_path, {"a.py": functions(2)}))
    with caplog.at_level(logging.WARNING):
        splits = read_docstrings("names", workers=0)
    assert splits.missing == ("numpy", "no_such_package_at_all")
    assert "not installed, so their docstrings are left out: numpy, no_such_package_at_all" in caplog.text


@pytest.mark.slow
def test_the_real_standard_library_and_packages() -> None:
    splits = read_docstrings("names")
    assert splits.counts["pairs"] > 20_000
    assert splits.counts["unparsed_files"] < 0.01 * splits.counts["files"]
    responses = [{row["response"] for row in rows} for rows in (splits.train, splits.validation, splits.test)]
    assert not responses[0] & responses[1]
    assert not responses[0] & responses[2]
    assert not responses[1] & responses[2]
    # What was read with `ast` is what Python itself says of the living functions.
    checked = 0
    for row in all_rows(splits):
        for module in (json, textwrap, ast, gzip, np.polynomial.chebyshev):
            owner, _, name = row["function"].rpartition(".")
            if owner == module.__name__ and hasattr(module, name):
                first = (inspect.getdoc(getattr(module, name)) or "").split("\n\n")[0]
                assert row["response"] == " ".join(first.split())
                checked += 1
    assert checked > 30
