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
from rollmesh.reward_service.composition.part import Entry, Part

Function = Callable[..., Any]
Functions = Sequence[Entry]


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
    """Parts and parts by source, in which each name of `BUILDERS` is its function.

    Args:
        reward: of the run.
        functions, by_data_source: as of `reward_service.scoring.engine`.

    Raises:
        ConfigError: a scorer's section lacks something, or names a file that cannot be read.
        RewardError: a scorer cannot be built.
    """
    built: dict[str, Function] = {}

    def put_in(entry: Entry) -> Part:
        part = Part.of(entry)
        if not isinstance(part.use, str) or part.use not in BUILDERS:
            return part
        if part.use not in built:
            built[part.use] = BUILDERS[part.use](reward)
        return part.with_use(built[part.use])

    return list(map(put_in, functions)), {source: list(map(put_in, own)) for source, own in by_data_source.items()}
