"""From the names in the configuration to reward functions.

A name is a built-in scorer, `package.module:function`, or `path/file.py:function`. Modules are also looked for in
the working directory, files may import their neighbours.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mesh.errors import RewardError
from reward_service.functions import RewardFunction, adapt, from_scorer
from reward_service.scorers import SCORERS

FunctionSpec = str | Callable[..., Any]


def load_functions(specs: Iterable[FunctionSpec]) -> tuple[RewardFunction, ...]:
    """Loads several functions; names that coincide are told apart by their full spelling.

    Raises:
        RewardError: an unknown name, a file or function that is missing, or a signature that does not fit.
    """
    listed = list(specs)
    labels = [_label(spec) for spec in listed]
    return tuple(
        load_function(spec, name=label if labels.count(label) == 1 else f"{spec}#{index}")
        for index, (spec, label) in enumerate(zip(listed, labels, strict=True))
    )


def load_function(spec: FunctionSpec, *, name: str | None = None) -> RewardFunction:
    """Loads one function.

    Args:
        spec: a name as above, or the function itself.
        name: what components and errors call it; by default the function's own name.

    Raises:
        RewardError: as `load_functions`.
    """
    if not isinstance(spec, str):
        return adapt(name or _label(spec), spec)
    if ":" not in spec:
        return from_scorer(name or spec, _registered(spec))
    location, _, attribute = spec.rpartition(":")
    module = _from_file(Path(location), spec) if location.endswith(".py") else _from_module(location, spec)
    function = getattr(module, attribute, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RewardError(f"reward function {spec}: no function {attribute!r} there", hint=_nearest(attribute, defined))
    return adapt(name or attribute, function)


def _label(spec: FunctionSpec) -> str:
    if isinstance(spec, str):
        return spec.rpartition(":")[2]
    return str(getattr(spec, "__name__", type(spec).__name__))


def _registered(name: str) -> Any:
    if name not in SCORERS:
        raise RewardError(f"unknown reward function {name!r}", hint=_nearest(name, list(SCORERS)))
    return SCORERS[name]


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there are: {', '.join(sorted(known)) or 'none'}; own functions are `module:function` or `file.py:function`"


def _from_module(name: str, spec: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _import_failed(spec, error) from error


def _from_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise RewardError(
            f"reward function {spec}: no file {path}", hint=f"paths are relative to the working directory {Path.cwd()}"
        )
    path = path.resolve()
    module_name = f"rollmesh_reward_{path.stem}_{abs(hash(str(path))):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise RewardError(f"reward function {spec}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and the like look their module up while it runs
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise _import_failed(spec, error) from error
    return module


def _import_failed(spec: str, error: Exception) -> RewardError:
    return RewardError(
        f"reward function {spec}: importing it raised {type(error).__name__}: {error}",
        hint="it must import in the environment of the reward service",
    )
