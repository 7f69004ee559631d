"""The engine of a configuration."""

from __future__ import annotations

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.runtime.threads import reward_workers
from rollmesh.reward_service.cache.cache import ScoreCache
from rollmesh.reward_service.configured import Functions, with_configured
from rollmesh.reward_service.routing import split_routes
from rollmesh.reward_service.scoring.engine import ScoringEngine


def configured_engine(
    reward: RewardSection, functions: Functions | None = None, *, workers: int | None = None
) -> ScoringEngine:
    """The engine for all sources that are not those of endpoints.

    Args:
        reward: of the run.
        functions: take the place of `reward.functions`.
        workers: takes the place of `reward.workers`.

    Raises:
        ConfigError: a route, a scorer's section or the cache cannot be used.
        RewardError: as `ScoringEngine`, or a scorer cannot be built.
    """
    computing, waiting = reward_workers(reward.workers if workers is None else workers)
    local, _ = split_routes(reward.by_data_source)
    return ScoringEngine(
        *with_configured(reward, reward.functions if functions is None else functions, local),
        normalize=reward.normalize,
        cache=ScoreCache(reward.cache) if reward.cache.max_bytes else None,
        attempts=reward.attempts,
        workers=computing,
        waiting_workers=waiting,
        call_timeout_s=reward.scorer_timeout_s,
    )
