"""Prompts and responses from the docstrings of installed code: real text, nothing downloaded.

Two families of rows:

- `names`: a function's qualified name and argument names, split into words, is the prompt
  (`Masked Array. truediv (other)`); the first paragraph of its docstring is the response.
- `bodies`: the rest of the docstring is the prompt, its first paragraph the response.
"""

import gzip
import hashlib
import json
import logging
import os
import platform
import queue
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from marlhf.config import one_of
from marlhf.data import docstring_parser
from marlhf.errors import DataError

FAMILIES = ("names", "bodies")
PACKAGES = ("torch", "numpy", "transformers", "sympy")
"""Read beside the standard library, where installed."""

STANDARD_LIBRARY = "python"
RESPONSE_CHARACTERS = (12, 100)
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"})
_READER_VERSION = 1
"""Part of the cache key: raise it when a change to the reader changes the rows."""

_SPLIT_SHARES = (("train", 90), ("validation", 5), ("test", 5))
_NOT_A_WORD = re.compile(r"[\W_]+")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splits:
    """Rows with the keys `prompt`, `response` and `function`; no response stands in two splits.

    The rows of a split are in the order of a hash, so that its first rows are a sample of all packages.
    `counts` says what was read (`files`, `unparsed_files`, `functions`), kept (`pairs`, and each split) and
    left out (`duplicates`). `versions` names the packages that were read, `missing` those not installed.
    """

    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    test: list[dict[str, Any]]
    counts: dict[str, int]
    versions: dict[str, str]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A folder of Python files, with the version that stands in the cache key."""

    folder: Path
    version: str


def read_docstrings(
    family: str,
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: int = 2,
    sources: Mapping[str, Source] | None = None,
) -> Splits:
    """Reads the rows of a family (`names` or `bodies`), from the cache where it has them.

    progress: called with (files read, files in all) after each file; not called when the cache has the rows.
    workers: processes that parse; 0 parses in this one.
    sources: folders by package name; None: the standard library and those of `PACKAGES` that are installed.

    The cache lies in `cache_folder()`. Raises ConfigError for an unknown family, and DataError if there are no
    rows at all.
    """
    one_of(family, FAMILIES, key="family")
    missing: tuple[str, ...] = ()
    if sources is None:
        sources = installed_sources()
        missing = tuple(name for name in PACKAGES if name not in sources)
        if missing:
            _log.warning("not installed, so their docstrings are left out: %s", ", ".join(missing))
    files = {name: _python_files(source.folder) for name, source in sources.items()}
    cache_file = cache_folder() / f"docstrings-{family}-{_content_key(family, sources, files)}.json.gz"
    cached = _read_cache(cache_file)
    if cached is None:
        cached = _build(family, sources, files, progress, workers)
        _write_cache(cache_file, cached)
    return Splits(
        train=cached["train"],
        validation=cached["validation"],
        test=cached["test"],
        counts=cached["counts"],
        versions={name: source.version for name, source in sources.items()},
        missing=missing,
    )


def cache_folder() -> Path:
    """`$MARLHF_CACHE`, else `marlhf` in the user's cache folder."""
    if chosen := os.environ.get("MARLHF_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "marlhf"


def installed_sources() -> dict[str, Source]:
    """The standard library and the installed ones of `PACKAGES`, found without importing them."""
    found = {STANDARD_LIBRARY: Source(Path(sysconfig.get_path("stdlib")), platform.python_version())}
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            continue
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "unknown"
        found[name] = Source(Path(spec.submodule_search_locations[0]), version)
    return found


def _python_files(folder: Path) -> list[tuple[Path, int]]:
    """The folder's Python files and their sizes, in the order of their names, tests left out."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                path = Path(parent, name)
                if path.is_file():
                    found.append((path, path.stat().st_size))
    return sorted(found)


def _content_key(family: str, sources: Mapping[str, Source], files: Mapping[str, list[tuple[Path, int]]]) -> str:
    content = {
        "reader": [_READER_VERSION, family, RESPONSE_CHARACTERS, _SPLIT_SHARES],
        "python": platform.python_version(),
        "sources": {
            name: [
                source.version,
                [(str(path.relative_to(source.folder)), size) for path, size in files[name]],
            ]
            for name, source in sources.items()
        },
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]


def _build(
    family: str,
    sources: Mapping[str, Source],
    files: Mapping[str, list[tuple[Path, int]]],
    progress: Callable[[int, int], None] | None,
    workers: int,
) -> dict[str, Any]:
    paths = [path for found in files.values() for path, _ in found]
    modules = [
        _module_name(name, path.relative_to(sources[name].folder)) for name, found in files.items() for path, _ in found
    ]
    parsed = _parse(paths, progress, workers)
    counts = {"files": len(paths), "unparsed_files": 0, "functions": 0, "duplicates": 0, "pairs": 0}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for module, functions in zip(modules, parsed, strict=True):
        if functions is None:
            counts["unparsed_files"] += 1
            continue
        counts["functions"] += len(functions)
        for qualified_name, words, summary, rest in functions:
            prompt = words if family == "names" else rest
            if not prompt or not RESPONSE_CHARACTERS[0] <= len(summary) <= RESPONSE_CHARACTERS[1]:
                continue
            if not _is_text(prompt + summary):
                continue
            if (prompt, summary) in rows:
                counts["duplicates"] += 1
                continue
            rows[prompt, summary] = {
                "prompt": prompt,
                "response": summary,
                "function": f"{module}.{qualified_name}",
            }
    if not rows:
        folders = ", ".join(str(source.folder) for source in sources.values())
        raise DataError(f"no docstrings of {RESPONSE_CHARACTERS[0]}-{RESPONSE_CHARACTERS[1]} characters in {folders}")
    splits: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in _SPLIT_SHARES}
    for row in sorted(rows.values(), key=lambda row: _hash(f"{row['prompt']}\0{row['response']}")):
        splits[split_of(row["response"])].append(row)
    counts["pairs"] = len(rows)
    counts.update({name: len(split) for name, split in splits.items()})
    return {**splits, "counts": counts}


def split_of(response: str) -> str:
    """`train`, `validation` or `test`, by a hash of the response's words in lower case."""
    place = _hash(_NOT_A_WORD.sub(" ", response.casefold()).strip()) % 100
    for name, share in _SPLIT_SHARES:
        if place < share:
            return name
        place -= share
    raise AssertionError("the shares sum to 100")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _is_text(text: str) -> bool:
    """False for half surrogate pairs, which no tokenizer or file can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _module_name(package: str, path: Path) -> str:
    parts = [*(() if package == STANDARD_LIBRARY else (package,)), *path.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _parse(
    paths: list[Path], progress: Callable[[int, int], None] | None, workers: int
) -> list[list[tuple[str, str, str, str]] | None]:
    """What `docstring_parser.read_file` gives for each path, by `workers` child processes."""
    results: list[list[tuple[str, str, str, str]] | None] = [None] * len(paths)
    if workers == 0:
        for index, path in enumerate(paths):
            results[index] = docstring_parser.read_file(str(path))
            if progress:
                progress(index + 1, len(paths))
        return results

    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(paths)):
        waiting.put(index)
    done: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
    stopping = threading.Event()

    def feed_one_child() -> None:
        child: subprocess.Popen[str] | None = None
        try:
            while not stopping.is_set():
                try:
                    index = waiting.get_nowait()
                except queue.Empty:
                    return
                child = child or _start_child()
                answer = _ask(child, str(paths[index]))
                if answer is None:
                    # The parser died of this file, as it may of absurdly nested source: the next file gets
                    # a new one.
                    _end_child(child)
                    child = None
                else:
                    results[index] = json.loads(answer)
                done.put(index)
        except BaseException as error:
            done.put(error)
        finally:
            if child:
                _end_child(child)

    threads = [threading.Thread(target=feed_one_child, daemon=True) for _ in range(min(workers, len(paths)))]
    for thread in threads:
        thread.start()
    try:
        for count in range(len(paths)):
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            if progress:
                progress(count + 1, len(paths))
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    return results


def _start_child() -> "subprocess.Popen[str]":
    # Isolated from the user's PYTHON* variables and current folder, and run by path: importing the parser
    # as a member of this package would load torch in every child.
    return subprocess.Popen(
        [sys.executable, "-I", str(docstring_parser.__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="ascii",
    )


def _ask(child: "subprocess.Popen[str]", path: str) -> str | None:
    """The child's answer about a file, or None if it died."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(path) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    return child.stdout.readline() or None


def _end_child(child: "subprocess.Popen[str]") -> None:
    child.kill()
    child.communicate()


def _read_cache(path: Path) -> dict[str, Any] | None:
    """The cached rows; None if there are none or the file is damaged, which its checksum tells."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            cached = json.load(file)
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    names = [name for name, _ in _SPLIT_SHARES]
    complete = isinstance(cached, dict) and {*names, "counts"} <= cached.keys()
    return cast("dict[str, Any]", cached) if complete else None


def _write_cache(path: Path, content: dict[str, Any]) -> None:
    """Written beside and renamed, so that no reader ever sees half a file."""
    beside: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        with (
            os.fdopen(handle, "wb") as raw,
            gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=5, mtime=0) as file,
        ):
            file.write(json.dumps(content).encode())
        os.replace(beside, path)
    except OSError as error:
        _log.warning("the docstrings are not cached: %s", error)
    finally:
        if beside is not None and os.path.exists(beside):
            os.unlink(beside)
