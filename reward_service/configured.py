"""Scorers with a section of the configuration: their names, and what each becomes in a process that scores.

A name stands for one function in all sources, so that limits and budgets count for the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers import judge
from rollmesh.mesh.errors import ConfigError

Function = Callable[..., Any]
Functions = Sequence[str | Function]


def _judge(reward: RewardSection) -> Function:
    if reward.judge.base_url is None or reward.judge.model is None:
        raise ConfigError(judge.NEEDS, hint="see docs/judge.md")
    # Only here: few runs need a client of HTTP.
    from rollmesh.reward_service.judge.judge import Judge

    return Judge(reward.judge, call_timeout_s=reward.scorer_timeout_s)


BUILDERS: Mapping[str, Callable[[RewardSection], Function]] = MappingProxyType({judge.NAME: _judge})
"""Name -> builder of its function, from the section of rewards. A builder imports what only its scorer needs."""


def with_configured(
    reward: RewardSection, functions: Functions, by_data_source: Mapping[str, Functions]
) -> tuple[Functions, Mapping[str, Functions]]:
    """Functions and functions by source, in which each name of `BUILDERS` is its function.

    Args:
        reward: of the run.
        functions, by_data_source: as of `reward_service.scoring.engine`.

    Raises:
        ConfigError: a scorer's section lacks something, or names a file that cannot be read.
        RewardError: a scorer cannot be built.
    """
    built: dict[str, Function] = {}

    def function(name: str | Function) -> str | Function:
        if not isinstance(name, str) or name not in BUILDERS:
            return name
        if name not in built:
            built[name] = BUILDERS[name](reward)
        return built[name]

    def put_in(names: Functions) -> Functions:
        return [function(name) for name in names]

    return put_in(functions), {source: put_in(names) for source, names in by_data_source.items()}
