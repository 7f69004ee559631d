"""User code by import path: `package.module:attribute` or `path/to/file.py:attribute`.

The rules are those of `mesh.user_code`, which algorithms may not import. Modules are also looked for in the working
directory, after all others. Files may import those and their neighbours. A file is run once per process, also where
both have loaded it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rollmesh.learner.algorithms.settings import SettingsError


def import_attribute(location: str, path: str) -> Any:
    """Imports what `location` names; a file is executed once per process.

    Args:
        location: `package.module:attribute` or `file.py:attribute`.
        path: the setting that names it, for errors.

    Raises:
        SettingsError: no such module, file or attribute, or the module fails on import.
    """
    module_name, _, attribute = location.rpartition(":")
    if not module_name or not attribute:
        raise SettingsError(path, f"{location!r} has not the form module:attribute or file.py:attribute")
    try:
        module = _load_file(Path(module_name), path) if module_name.endswith(".py") else _load_module(module_name)
    except SettingsError:
        raise
    except Exception as error:  # the user's module may raise anything while it is imported
        raise SettingsError(path, f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise SettingsError(path, f"{module_name!r} has no attribute {attribute!r}")
    return getattr(module, attribute)


def _load_module(name: str) -> ModuleType:
    _search(Path.cwd())
    return importlib.import_module(name)


def _load_file(file: Path, path: str) -> ModuleType:
    file = file.expanduser().resolve()
    if not file.is_file():
        raise SettingsError(path, f"no such file: {file}")
    name = f"rollmesh_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    _search(file.parent, Path.cwd())
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingsError(path, f"cannot be imported as Python: {file}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and type hints of the file look their module up here while it executes.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search(*folders: Path) -> None:
    sys.path.extend(str(folder) for folder in dict.fromkeys(folders) if str(folder) not in sys.path)
