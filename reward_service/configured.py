"""Scorers with a section of the configuration: their names, and what each becomes in a process that scores.

A name stands for one function in all sources, so that limits and budgets count for the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers import code, judge
from rollmesh.mesh.errors import ConfigError
from rollmesh.reward_service.scorers import auto

Function = Callable[..., Any]
Functions = Sequence[str | Function]


def _judge(reward: RewardSection) -> Function:
    if reward.judge.base_url is None or reward.judge.model is None:
        raise ConfigError(judge.NEEDS, hint="see docs/judge.md")
    # Only here: few runs need a client of HTTP.
    from rollmesh.reward_service.judge.judge import Judge

    return Judge(reward.judge, call_timeout_s=reward.scorer_timeout_s)


def _code(name: str) -> Callable[[RewardSection], Function]:
    def build(reward: RewardSection) -> Function:
        from rollmesh.reward_service.code.scorer import Code

        return Code(reward, name, fraction=name == "code_fraction")

    return build


def _automatic_code(reward: RewardSection) -> Function:
    from rollmesh.reward_service.code.automatic import AutomaticCode

    return AutomaticCode(reward)


BUILDERS: Mapping[str, Callable[[RewardSection], Function]] = MappingProxyType(
    {**{name: _code(name) for name in code.NAMES}, judge.NAME: _judge}
)
"""Name -> builder of its function, from the section of rewards. A builder imports what only its scorer needs."""


def with_configured(
    reward: RewardSection, functions: Functions, by_data_source: Mapping[str, Functions]
) -> tuple[Functions, Mapping[str, Functions]]:
    """Functions and functions by source, in which each name of `BUILDERS` is its function.

    Where `auto` stands for a source of programs, it is the function that runs them.

    Args:
        reward: of the run.
        functions, by_data_source: as of `reward_service.scoring.engine`.

    Raises:
        ConfigError: a scorer's section lacks something, or names a file that cannot be read.
        RewardError: a scorer cannot be built.
    """
    built: dict[str, Function] = {}

    def function(name: str | Function, source: str | None) -> str | Function:
        if not isinstance(name, str):
            return name
        build = _automatic_code if name == "auto" and source in auto.CODE_SOURCES else BUILDERS.get(name)
        if build is not None and name not in built:
            built[name] = build(reward)
        return name if build is None else built[name]

    def put_in(names: Functions, source: str | None = None) -> Functions:
        return [function(name, source) for name in names]

    sources = dict.fromkeys(auto.CODE_SOURCES, functions) if "auto" in functions else {}
    chosen = {source: put_in(names, source) for source, names in {**sources, **by_data_source}.items()}
    return put_in(functions), chosen
