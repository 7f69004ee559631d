"""Registries of everything that can be named in a configuration.

Three kinds of things have names: advantage estimators, policy losses and algorithms. The keyword-only arguments of an
estimator or a loss are its settings, so one decorated function is a complete extension::

    @register_policy_loss("mine")
    def mine(log_probs, anchor_log_probs, tokens, *, sharpness: float = 2.0): ...

Instead of a registered name, `package.module:attribute` or `path/to/file.py:attribute` names something of the user's.
Needs and promises of a function beyond its signature are arguments of the decorator; they hold for import paths too.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from rollmesh.learner.algorithms.imports import import_attribute
from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.settings import Component, SettingsError, convert
from rollmesh.learner.algorithms.types import Estimate, Rollouts, StepView, TokenBatch

AdvantageFunction = Callable[[Rollouts], Tensor | Estimate]
"""Whole batch -> advantages: a tensor has one per sequence [S], an `Estimate` one per token [R]."""

Requirement = Literal[
    "values", "baseline_rewards", "components", "sum_pi_squared", "proximal_log_probs", "reference_log_probs"
]
"""Optional fields of `Rollouts` that an estimator reads; the learner provides them."""

T = TypeVar("T", bound=Callable[..., Any])
Bound = TypeVar("Bound", bound=Callable[..., Any])


class PolicyLoss(Protocol):
    """A surrogate objective per token."""

    def __call__(self, log_probs: Tensor, anchor_log_probs: Tensor, tokens: TokenBatch, /) -> tuple[Tensor, Metrics]:
        """Gives the loss per token, [R], before weights and aggregation, and metrics (sums over tokens).

        Args:
            log_probs: [R], current policy, with gradient.
            anchor_log_probs: [R], the policy that anchors the ratio, without gradient.
            tokens: the same tokens' data.
        """
        ...


Selection = Callable[[StepView], Tensor]
"""Whole minibatch under the current policy -> value per token [R]."""


@dataclass(frozen=True, slots=True)
class AdvantageTraits:
    """Needs and promises of an estimator.

    Attributes:
        needs: fields of `Rollouts`.
        group_size: smallest group it makes sense for.
        silent_where_equal: members of a group of two or more with equal rewards have advantages of exactly 0,
            whatever the rest of the batch.
    """

    needs: Sequence[Requirement] = ()
    group_size: int = 1
    silent_where_equal: bool = False


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Promises and needs of a policy loss.

    Attributes:
        silent_without_advantage: loss and gradient of a token are 0 where its advantage is 0, for whole sequences.
        anchored: it reads the anchor log-probs: ratios to the proximal policy.
        on_ratio: its settings that change no gradient where that ratio is 1: clips, caps, gates, pulls to the anchor.
        select: called before every optimizer step; its settings are keyword-only arguments of the same names.
    """

    silent_without_advantage: bool = False
    anchored: bool = True
    on_ratio: Sequence[str] = ()
    select: Callable[..., Tensor] | None = None


@dataclass(frozen=True, slots=True)
class RegistryEntry(Generic[T]):
    """A registered thing and its traits."""

    name: str
    target: T
    traits: Any


class Registry(Generic[T]):
    """Named things of one kind; names are unique.

    Args:
        kind: for errors.
        traits: of things that come by import path without having been registered.
    """

    def __init__(self, kind: str, traits: Any = None) -> None:
        self._kind = kind
        self._traits = traits
        self._entries: dict[str, RegistryEntry[T]] = {}

    def register(self, name: str, traits: Any = None) -> Callable[[T], T]:
        """Decorator that enters its object under `name`.

        Raises:
            ValueError: where the name is taken.
        """

        def enter(target: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self._kind} {name!r} is registered already")
            self._entries[name] = RegistryEntry(name, target, self._traits if traits is None else traits)
            return target

        return enter

    @property
    def names(self) -> list[str]:
        """Registered names, sorted."""
        return sorted(self._entries)

    def get(self, name: str, path: str) -> RegistryEntry[T]:
        """Finds by registered name or import path.

        Args:
            name: from the configuration.
            path: the setting that says it, for errors.

        Raises:
            SettingsError: unknown name, or nothing at the import path.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            target = typing.cast(T, import_attribute(name, path))
            known = (entry for entry in self._entries.values() if entry.target is target)
            return next(known, RegistryEntry(name, target, self._traits))
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


ADVANTAGES: Registry[Callable[..., Tensor | Estimate]] = Registry("advantage", AdvantageTraits())
POLICY_LOSSES: Registry[Callable[..., tuple[Tensor, Metrics]]] = Registry("policy loss", LossTraits())
ALGORITHMS: Registry[type[Algorithm]] = Registry("algorithm")

register_algorithm = ALGORITHMS.register


def register_advantage(
    name: str, *, needs: Sequence[Requirement] = (), group_size: int = 1, silent_where_equal: bool = False
) -> Callable[[Bound], Bound]:
    """Decorator: enters an advantage estimator `(rollouts, *, settings) -> [S] | Estimate`.

    Args:
        name: for the configuration.
        needs: optional fields of `Rollouts` that it reads.
        group_size, silent_where_equal: see `AdvantageTraits`.
    """
    enter = ADVANTAGES.register(name, AdvantageTraits(tuple(needs), group_size, silent_where_equal))
    return typing.cast(Callable[[Bound], Bound], enter)


def register_policy_loss(
    name: str,
    *,
    silent_without_advantage: bool = False,
    anchored: bool = True,
    on_ratio: Sequence[str] = (),
    select: Callable[..., Tensor] | None = None,
) -> Callable[[Callable[..., tuple[Tensor, Metrics]]], Callable[..., tuple[Tensor, Metrics]]]:
    """Decorator: enters a policy loss `(log_probs, anchor_log_probs, tokens, *, settings) -> ([R], Metrics)`.

    Args:
        name: for the configuration.
        silent_without_advantage, anchored, on_ratio, select: see `LossTraits`.
    """
    return POLICY_LOSSES.register(name, LossTraits(silent_without_advantage, anchored, tuple(on_ratio), select))


def keyword_settings(function: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of an estimator or a loss: its keyword-only arguments with their defaults, `params` over them."""
    arguments = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in arguments if p.kind is inspect.Parameter.KEYWORD_ONLY} | dict(params)


def build_advantage(component: Component, path: str = "advantage") -> tuple[AdvantageFunction, AdvantageTraits]:
    """The estimator of a component, with its settings bound, and its needs."""
    entry = ADVANTAGES.get(component.name, path)
    return bind(entry.target, component.params, path), entry.traits


def build_policy_loss(component: Component, path: str = "loss") -> tuple[PolicyLoss, Selection | None, LossTraits]:
    """The policy loss of a component with its settings bound, its selection likewise, and its traits."""
    entry = POLICY_LOSSES.get(component.name, path)
    traits: LossTraits = entry.traits
    select = None
    if traits.select is not None:
        names = inspect.signature(traits.select).parameters
        select = bind(traits.select, {k: v for k, v in component.params.items() if k in names}, path)
    return bind(entry.target, component.params, path), select, traits
