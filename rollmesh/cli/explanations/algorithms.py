"""An algorithm's settings, spelled out: every value, and whether preset, configuration or default gave it.

The only part of the command that needs torch; imported where a command asks for it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollmesh.learner.algorithms.dataflows.policy_gradient import PolicyGradient
from rollmesh.learner.algorithms.docs_reference import read_documentation
from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.registry import ADVANTAGES, ALGORITHMS, POLICY_LOSSES, Registry, keyword_settings
from rollmesh.learner.algorithms.settings import Component, Settings, merge
from rollmesh.learner.algorithms.types import ModelRole
from rollmesh.learner.builders import build_algorithm
from rollmesh.learner.notices import notices
from rollmesh.mesh.config.models import Config

_REGISTRIES: dict[str, Registry[Any]] = {"advantage": ADVANTAGES, "loss": POLICY_LOSSES}


def list_algorithms() -> Iterator[str]:
    """Every registered name with its summary, one per line."""
    width = max(map(len, ALGORITHMS.names))
    for name in ALGORITHMS.names:
        yield f"{name.ljust(width)}  {read_documentation(ALGORITHMS.get(name, 'algorithm').target).summary}"


def explain_algorithm(config: Config) -> Iterator[str]:
    """Settings and needs of a run's algorithm, one per line.

    Raises:
        ConfigError: a setting is unknown or wrong, or a need cannot be met.
    """
    algorithm = build_algorithm(config)
    yield f"algorithm: {config.algorithm.name}, {read_documentation(type(algorithm)).summary}"
    rows = list(expanded_settings(algorithm.settings))
    sources = [_source(path, algorithm.defaults, config.algorithm.params) for path, _ in rows]
    shown = [f"{'.'.join(path)} = {_text(value)}" for path, value in rows]
    width = min(48, max(map(len, shown), default=0))
    for line, source in zip(shown, sources, strict=True):
        yield f"  {line.ljust(width)}  {source}"
    yield from _needs(config, algorithm)
    yield from notices(config, algorithm)


def expanded_settings(settings: Settings, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of every setting, those of named parts included."""
    for field in dataclasses.fields(settings):
        value, here = getattr(settings, field.name), (*path, field.name)
        if isinstance(value, Settings):
            yield from expanded_settings(value, here)
        elif isinstance(value, Component):
            yield here, value.name
            yield from part_settings(value, here)
        else:
            yield here, value


def part_settings(component: Component, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The settings of an estimator or a loss: its keyword-only arguments."""
    values = dict(component.params)
    registry = _REGISTRIES.get(path[-1])
    if registry is not None:
        values = keyword_settings(registry.get(component.name, ".".join(path)).target, values)
    yield from (((*path, name), value) for name, value in values.items())


def _source(path: tuple[str, ...], preset: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    if _sets(given, path):
        return "configuration"
    return "preset" if _sets(merge(preset, given), path) else "default"


def _sets(values: Any, path: tuple[str, ...]) -> bool:
    """True where settings in the form of the configuration have a value at a path; a bare string is a part's name."""
    for depth, key in enumerate(path):
        if not isinstance(values, Mapping) or key not in values:
            return False
        values = values[key]
        if depth == len(path) - 1 and isinstance(values, Mapping) and path[-1] in _REGISTRIES:
            return "name" in values
    return True


def _needs(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """The models and data that the mesh provides for the algorithm."""
    needs, n = algorithm.needs, config.rollout.n
    for role in needs.roles:
        yield f"role {role.name}: {_role(config, role)}"
    passes = ["the actor"] if isinstance(algorithm, PolicyGradient) and algorithm.infers_policy else []
    passes += [f"the role {role.name}" for role in needs.roles]
    yield f"forward passes over a batch before its first optimizer step: {', '.join(passes) or 'none'}"
    greedy = ", and one decoded greedily, scored and not trained" if needs.greedy_baseline else ""
    yield f"group: {n} sampled responses (the algorithm needs {needs.group_size} or more){greedy}"
    if needs.components:
        yield f"reward components: {', '.join(needs.components)}"
    if needs.entropy_gradient:
        yield "the entropy is differentiated with the loss"
    if needs.selection:
        yield "forward passes before every optimizer step: the actor's, to select tokens over the whole minibatch"


def _role(config: Config, role: ModelRole) -> str:
    section = config.learner.roles.get(role.name)
    path = section.path if section is not None else None
    model = path or f"{config.model.path} (the actor's initial weights; learner.roles.{role.name}.path changes it)"
    optimizer = (section.optimizer if section is not None else None) or config.learner.optimizer
    training = f"trained, lr {optimizer.lr:g}" if role.trained else "not trained"
    apart = ", in processes of its own" if config.learner.is_apart(role.name) else ""
    engine = f"{config.learner.describe_engine(role.name)}{apart}"
    return f"{role.kind.replace('_', ' ')}, {training}, {engine}, from {model}"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)
