"""Loads the reward functions that the configuration names.

A name is a built-in scorer, one with an option (`regex:PATTERN`, `json_schema:FILE`), `package.module:function`,
`path/file.py:function` (mesh.user_code), or `verifiers:ENVIRONMENT` (adapters.verifiers). The last three may have
arguments by keyword, literals of Python: `file.py:function(threshold=0.5)`. Scorers with a section of the
configuration, `model:FOLDER` among them, are functions already (`configured`).
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.user_code import WITH_ARGUMENTS, load_callable
from rollmesh.reward_service.function_spec import VERIFIERS, FunctionSpec, label_of
from rollmesh.reward_service.functions import RewardFunction, adapt, from_scorer
from rollmesh.reward_service.scorers import SCORERS, WITH_OPTION, takes_option


def is_path(spec: FunctionSpec) -> bool:
    """True if a function is named by its import path or option, so that any process can load it."""
    return isinstance(spec, str) and ":" in spec


def load_function(spec: FunctionSpec, *, name: str | None = None) -> RewardFunction:
    """Loads one function.

    Args:
        spec: a name as above, or the function itself.
        name: what components and errors call it; by default the function's own name.

    Raises:
        RewardError: an unknown name, a file or function that is missing, or a signature that does not fit.
    """
    if not isinstance(spec, str):
        return adapt(name or label_of(spec), spec)
    if not is_path(spec):
        return from_scorer(name or spec, _registered(spec))
    if takes_option(spec):
        scorer, _, option = spec.partition(":")
        return from_scorer(name or scorer, WITH_OPTION[scorer](option))
    if spec.lstrip().startswith("{"):
        raise RewardError(f"reward function {spec}: this is a text", hint="write the part as a mapping, without quotes")
    path, arguments = split_arguments(spec)
    if path.startswith(VERIFIERS):
        from rollmesh.reward_service.adapters.verifiers import load_verifiers

        return adapt(name or label_of(spec), load_verifiers(path.removeprefix(VERIFIERS), arguments))
    function = load_callable(path, "reward function", RewardError)
    return adapt(name or label_of(spec), _with_arguments(path, function, arguments) if arguments else function)


def _with_arguments(path: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """The function with some of its arguments fixed."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # `adapt` says what is wrong with it.
        return partial(function, **arguments)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for unknown in (argument for argument in arguments if argument not in parameters):
            near = difflib.get_close_matches(unknown, parameters, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(parameters)}"
            raise RewardError(f"reward function {path} has no argument {unknown!r}", hint=hint)
    return partial(function, **arguments)


def split_arguments(spec: str) -> tuple[str, dict[str, Any]]:
    """The path of a function, and its arguments.

    Raises:
        RewardError: they are no literals by keyword.
    """
    if (parts := WITH_ARGUMENTS.fullmatch(spec)) is None:
        return spec, {}
    try:
        call = ast.parse(f"f({parts[2]})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("arguments need names")
        return parts[1], {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError) as error:
        raise RewardError(
            f"reward function {spec}: its arguments cannot be read: {error}",
            hint="write file.py:function(name=value, ...), with numbers, strings, true or false as in Python",
        ) from error


def _registered(name: str) -> Any:
    if name not in SCORERS:
        if name.endswith(".py"):
            raise RewardError(
                f"unknown reward function {name!r}", hint=f"name the function in the file: {name}:FUNCTION"
            )
        # Only here: it loads the configuration, which no worker needs.
        from rollmesh.mesh.config.scorers import classifier, code, judge, process

        known = [*SCORERS, *code.NAMES, judge.NAME, classifier.NAME, process.NAME]
        raise RewardError(f"unknown reward function {name!r}", hint=_nearest(name, known))
    return SCORERS[name]


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return (
        f"known: {', '.join(sorted(known)) or 'none'}; your own functions are `module:function` or `file.py:function`"
    )
