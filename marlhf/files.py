"""Writing a whole file or folder, or none: beside its final name first, then renamed.

Errors of the disk become a UserError that names the path.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from marlhf.errors import UserError


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Replaces a file's content, making missing parent folders: readers see the old content or the new one."""
    if path.is_dir():
        raise UserError(f"{path}: this is a folder; name a file to write")
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(content)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """The same for text, as UTF-8."""
    write_bytes_atomically(path, text.encode("utf-8", errors="backslashreplace"))


def write_json(path: Path, value: object) -> None:
    """The same for JSON; NaN and infinities become null."""
    write_text_atomically(path, json.dumps(finite(value), ensure_ascii=False, indent=1) + "\n")


def write_folder_atomically(path: Path, fill: Callable[[Path], None]) -> None:
    """Calls `fill` with a new folder beside `path` and renames it to `path` once it is complete."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
    with _writing(path):
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            fill(beside)
            if path.exists():
                os.replace(path, replaced)
            os.replace(beside, path)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)


def discard_unfinished(folder: Path) -> None:
    """Removes what a process that was killed had begun to write beside files and folders of `folder`."""
    for pattern in (".*.tmp", ".*.old"):
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def finite(value: object) -> object:
    """A value as JSON can hold it: tensors of one number become numbers, NaN and infinities None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if hasattr(value, "item"):
        return finite(cast(Any, value).item())
    return value


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
