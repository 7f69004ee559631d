"""The functions of a configuration, with its judge where they name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers.judge import NAME, NEEDS
from rollmesh.mesh.errors import ConfigError

Functions = Sequence[str | Callable[..., Any]]


def with_judge(
    reward: RewardSection, functions: Functions, by_data_source: Mapping[str, Functions]
) -> tuple[Functions, Mapping[str, Functions]]:
    """Functions and functions by source, in which the name `judge` is one function for all.

    Args:
        reward: of the run, for the judge.
        functions, by_data_source: as of `reward_service.scoring.engine`.

    Raises:
        ConfigError: the judge has no endpoint or model, or its key or authority cannot be read.
        RewardError: the judge's template cannot be used.
    """
    if not any(NAME in names for names in (functions, *by_data_source.values())):
        return functions, by_data_source
    if reward.judge.base_url is None or reward.judge.model is None:
        raise ConfigError(NEEDS, hint="see docs/judge.md")
    # Only here: few runs need a client of HTTP.
    from rollmesh.reward_service.judge.judge import Judge

    judge = Judge(reward.judge, call_timeout_s=reward.scorer_timeout_s)

    def named(names: Functions) -> Functions:
        return [judge if name == NAME else name for name in names]

    return named(functions), {source: named(names) for source, names in by_data_source.items()}
