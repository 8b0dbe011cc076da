"""Functions that a configuration names: they are the user's own code, loaded because the YAML says so."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from marlhf.errors import ConfigError


def load_function(where: str, name: str, *, key: str) -> Callable[..., Any]:
    """The function `name` of a Python file, or of an importable module if `where` does not end in `.py`.

    Raises ConfigError naming `key` if there is no such file, module or function, or if loading it fails.
    """
    try:
        module = _module_of_file(Path(where), key) if where.endswith(".py") else importlib.import_module(where)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's own file raises
        raise ConfigError(f"`{key}`: {where} cannot be loaded: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"`{key}`: {where} has no function `{name}`")
    return function  # type: ignore[no-any-return]


def _module_of_file(file: Path, key: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"`{key}`: there is no file {file}")
    name = f"marlhf_user_code:{file.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered while it runs, as an import would be: dataclasses look their module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
