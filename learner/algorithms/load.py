"""Builds an algorithm from the name and settings in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.learner.algorithms import presets  # noqa: F401 - entering the registries
from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.registry import ALGORITHMS
from rollmesh.learner.algorithms.settings import Settings, SettingsError, merge, parse
from rollmesh.learner.algorithms.types import UpdatePlan


def load_algorithm(name: str, params: Mapping[str, Any], plan: UpdatePlan) -> Algorithm:
    """Builds an algorithm; bad settings show before the run starts.

    Args:
        name: registered name, `package.module:Class` or `file.py:Class`.
        params: its settings, over those of the preset.
        plan: what the run does with each batch.

    Raises:
        SettingsError: unknown name or setting, value out of range, contradiction with the plan.
    """
    algorithm_type, settings = read_settings(name, params)
    try:
        algorithm = algorithm_type(settings, plan)
    except SettingsError as error:
        if error.field.startswith("algorithm."):
            raise
        raise SettingsError(f"algorithm.{error.field}", error.message, hint=error.hint) from error
    if algorithm.needs.selection and algorithm_type.select is Algorithm.select:
        raise SettingsError(
            "algorithm.name", f"{name!r} needs a selection and selects nothing", hint="define `select`, see Algorithm"
        )
    return algorithm


def read_settings(name: str, params: Mapping[str, Any]) -> tuple[type[Algorithm], Settings]:
    """The class of an algorithm, and its settings: the preset's with the user's over them.

    Raises:
        SettingsError: unknown name or setting, value of the wrong type.
    """
    algorithm_type = ALGORITHMS.get(name, "algorithm.name").target
    if not (isinstance(algorithm_type, type) and issubclass(algorithm_type, Algorithm)):
        raise SettingsError(
            "algorithm.name", f"{name!r} is not a subclass of rollmesh.learner.algorithms.interface.Algorithm"
        )
    return algorithm_type, parse(algorithm_type.settings_type, merge(algorithm_type.defaults, params))
