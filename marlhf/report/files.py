"""Writing a whole file or none."""

import os
from pathlib import Path

from marlhf.errors import UserError


def write_whole(path: Path, content: bytes) -> None:
    """Writes beside `path`, then renames, so that a reader never sees half a file.

    Missing parent folders are made. Raises UserError if the place cannot be written.
    """
    if path.is_dir():
        raise UserError(f"{path}: this is a folder; name a file to write")
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(content)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
