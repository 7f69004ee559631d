"""Registries: what can be named in a configuration.

Three kinds of things have names: advantage functions, policy losses and algorithms. The keyword-only arguments of an
advantage function or a policy loss are its settings, so one decorated function is a complete extension::

    @register_policy_loss("mine")
    def mine(log_probs, anchor_log_probs, tokens, *, sharpness: float = 2.0): ...

Instead of a registered name, `package.module:attribute` or `path/to/file.py:attribute` names something of the user's.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from learner.algorithms.base import Algorithm
from learner.algorithms.imports import import_attribute
from learner.algorithms.metrics import Metrics
from learner.algorithms.settings import Component, SettingsError, convert
from learner.algorithms.types import Group, MemberAdvantages, TokenBatch

AdvantageFunction = Callable[[Group], MemberAdvantages]
"""Complete group -> advantages of its members."""


class PolicyLoss(Protocol):
    """A surrogate objective per token."""

    def __call__(self, log_probs: Tensor, anchor_log_probs: Tensor, tokens: TokenBatch, /) -> tuple[Tensor, Metrics]:
        """Gives the loss per token, float32 [R], before weights and aggregation, and metrics (sums over tokens).

        Args:
            log_probs: float32 [R], current policy, with gradient.
            anchor_log_probs: float32 [R], the policy that anchors the ratio, without gradient.
            tokens: the same tokens' data.
        """
        ...


T = TypeVar("T", bound=Callable[..., Any])
Bound = TypeVar("Bound", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Named things of one kind; names are unique."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters its object under `name`.

        Raises:
            ValueError: where the name is taken.
        """

        def enter(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self._kind} {name!r} is registered already")
            self._entries[name] = entry
            return entry

        return enter

    @property
    def names(self) -> list[str]:
        """Registered names, sorted."""
        return sorted(self._entries)

    def get(self, name: str, path: str) -> T:
        """Finds by registered name or import path.

        Args:
            name: what the configuration says.
            path: the setting that says it, for errors.

        Raises:
            SettingsError: unknown name, or nothing at the import path.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return typing.cast(T, import_attribute(name, path))
        near = difflib.get_close_matches(name, self._entries, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "or give module:attribute or file.py:attribute"
        raise SettingsError(path, f"unknown {self._kind} {name!r}; known: {', '.join(self.names)}", hint=hint)


def bind(function: Bound, params: Mapping[str, Any], path: str) -> Bound:
    """Binds settings to the keyword-only arguments of a function.

    Args:
        function: an advantage function or a policy loss.
        params: argument name -> value from the configuration.
        path: prefix of names in errors.

    Raises:
        SettingsError: unknown or missing argument, or a value of the wrong type.
    """
    signature = inspect.signature(function).parameters.values()
    keywords = {p.name: p for p in signature if p.kind is inspect.Parameter.KEYWORD_ONLY}
    hints = typing.get_type_hints(function)
    bound: dict[str, Any] = {}
    for key, value in params.items():
        if key not in keywords:
            raise SettingsError(f"{path}.{key}", "unknown setting", hint=f"known: {', '.join(keywords) or 'none'}")
        bound[key] = convert(hints.get(key, Any), value, f"{path}.{key}")
    for key, parameter in keywords.items():
        if parameter.default is inspect.Parameter.empty and key not in bound:
            raise SettingsError(f"{path}.{key}", "is required")
    return typing.cast(Bound, functools.partial(function, **bound))


ADVANTAGES: Registry[Callable[..., MemberAdvantages]] = Registry("advantage")
POLICY_LOSSES: Registry[Callable[..., tuple[Tensor, Metrics]]] = Registry("policy loss")
ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm")

register_advantage = ADVANTAGES.register
register_policy_loss = POLICY_LOSSES.register
register_algorithm = ALGORITHMS.register


def build_advantage(component: Component, path: str = "advantage") -> AdvantageFunction:
    """The advantage function of a component, with its settings bound."""
    return bind(ADVANTAGES.get(component.name, path), component.params, path)


def build_policy_loss(component: Component, path: str = "loss") -> PolicyLoss:
    """The policy loss of a component, with its settings bound."""
    return bind(POLICY_LOSSES.get(component.name, path), component.params, path)
