"""User code by import path: `package.module:function` or `path/to/file.py:function`.

Modules are also looked for in the working directory, after all others. Files may import those and their neighbours; a
file is run once per process.
A reward function may be named in other ways too. They are told apart here, so that a worker loads no configuration.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollmesh.mesh.errors import RollmeshError

WITH_OPTION = ("json_schema", "json_schema_fraction", "regex")
"""Scorers that take an option, as in `regex:PATTERN`."""
WITH_ARGUMENTS = re.compile(r"(.+?:[\w./@-]+)\((.*)\)", re.DOTALL)
"""A path, and the arguments in its parentheses."""
_REWARD_MODEL = "model:"


def load_callable(path: str, what: str, raises: type[RollmeshError]) -> Callable[..., Any]:
    """The function that a path names; arguments and errors as of `load_attribute`."""
    module, attribute = _module_of(path, what, raises)
    function = getattr(module, attribute, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise raises(f"{what} {path}: no function {attribute!r} there", hint=_nearest(attribute, defined))
    loaded: Callable[..., Any] = function
    return loaded


def load_attribute(path: str, what: str, raises: type[RollmeshError]) -> Any:
    """The object that a path names.

    Args:
        path: as above.
        what: what the function is for, for messages.
        raises: the error's type.

    Raises:
        RollmeshError: of type `raises`: no such file, module or object, or the module fails on import.
    """
    module, attribute = _module_of(path, what, raises)
    if not hasattr(module, attribute):
        defined = [key for key in vars(module) if not key.startswith("_")]
        raise raises(f"{what} {path}: no {attribute!r} there", hint=_nearest(attribute, defined))
    return getattr(module, attribute)


def _module_of(path: str, what: str, raises: type[RollmeshError]) -> tuple[ModuleType, str]:
    """The module of a path, and the name of the object there."""
    location, _, attribute = path.rpartition(":")
    if not location or not attribute:
        raise raises(f"{what} {path}: it names no function", hint="write `file.py:function` or `module:function`")
    if location.endswith(".py") and not Path(location).is_file():
        raise raises(
            f"{what} {path}: no file {location}", hint=f"paths are relative to the working directory {Path.cwd()}"
        )
    try:
        module = _from_file(Path(location)) if location.endswith(".py") else _from_module(location)
    except BaseException as error:  # a user's module may raise anything while it is imported, SystemExit included
        if not raised_by_user(error):
            raise
        raise raises(
            f"{what} {path}: importing it raised {type(error).__name__}: {error}",
            hint="it must import in the environment of the service that runs it",
        ) from error
    return module, attribute


def raised_by_user(error: BaseException) -> bool:
    """False for Ctrl-C, which Python raises in whatever the main thread runs; True for all other errors of users' code.

    A process that handles SIGINT in another way gets no such error, so that the code itself has raised it.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return True
    return signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(known)) or 'none'}"


def _from_module(name: str) -> ModuleType:
    _search(Path.cwd())
    return importlib.import_module(name)


def _search(*folders: Path) -> None:
    sys.path.extend(str(folder) for folder in dict.fromkeys(folders) if str(folder) not in sys.path)


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"rollmesh_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    _search(path.parent, Path.cwd())
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def label(use: str) -> str:
    """The short name of a function: `function` of `file.py:function`, `regex` of `regex:PATTERN`."""
    if use.startswith(_REWARD_MODEL):
        return "reward_model"
    scorer, colon, _ = use.partition(":")
    if colon and scorer in WITH_OPTION:
        return scorer
    # The owner of an environment `owner/name` is left out: a slash stands between a part and its components.
    return WITH_ARGUMENTS.sub(r"\1", use).rpartition(":")[2].rpartition("/")[2]
