"""Rewards of the package `verifiers`: an installed environment, or an object of a module or file.

The rewards of an environment come from its rubric (versions 0.1.x), or from the methods of its tasks (`verifiers.v1`,
the only API since 0.2). The loaded object decides which of the two. The package is imported for this alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.user_code import load_attribute, raised_by_user
from rollmesh.reward_service.adapters.verifiers_rubrics import RubricReward
from rollmesh.reward_service.adapters.verifiers_tasks import TaskReward
from rollmesh.reward_service.function_spec import VERIFIERS


def load_verifiers(target: str, arguments: Mapping[str, Any]) -> RubricReward | TaskReward:
    """The reward that a name stands for.

    Args:
        target: `ENVIRONMENT`, `module:object` or `file.py:object`; the object is a rubric, an environment with one, a
            task class, or a function that returns one of these.
        arguments: of the environment or the function.

    Raises:
        RewardError: it is not there, fails while it is loaded, or has no rewards.
    """
    what = f"{VERIFIERS}{target}"
    try:
        found = _named(target, arguments) if ":" in target else _environment(target, arguments)
    except RewardError:
        raise
    except BaseException as error:  # users' modules may raise anything
        if not raised_by_user(error):
            raise
        raise RewardError(
            f"reward function {what}: loading it raised {type(error).__name__}: {error}",
            hint="verifiers and the environment have to be installed where rewards are computed (reward.python)",
        ) from error
    return _reward(found, what)


def _named(target: str, arguments: Mapping[str, Any]) -> Any:
    found = load_attribute(target, f"reward function {VERIFIERS}", RewardError)
    is_factory = callable(found) and not isinstance(found, type) and not _has_rubric(found)
    if arguments and not is_factory:
        raise RewardError(f"reward function {VERIFIERS}{target} is no function", hint="leave its arguments out")
    return found(**arguments) if is_factory else found


def _environment(name: str, arguments: Mapping[str, Any]) -> Any:
    package = importlib.import_module("verifiers")
    if hasattr(package, "load_environment"):
        return package.load_environment(name, **arguments)
    tasks = importlib.import_module("verifiers.v1")
    config = tasks.taskset_config_type(name).model_validate({"id": name, **arguments})
    return tasks.load_taskset(config)


def _has_rubric(found: Any) -> bool:
    return hasattr(found, "rubric") or hasattr(found, "funcs")


def _reward(found: Any, what: str) -> RubricReward | TaskReward:
    if _has_rubric(found):
        return RubricReward(
            getattr(found, "rubric", found), chat=getattr(found, "message_type", "chat") != "completion"
        )
    if isinstance(found, type) and hasattr(found, "data_type"):
        return TaskReward(found, None)
    if hasattr(type(found), "task_type"):
        return TaskReward(type(found).task_type(), getattr(found.config, "task", None))
    raise RewardError(
        f"reward function {what}: {type(found).__name__} has no rewards",
        hint="name an environment, a rubric, a task class, or a function that returns one",
    )
