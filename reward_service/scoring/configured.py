"""The engine of a configuration."""

from __future__ import annotations

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.runtime.threads import reward_workers
from rollmesh.reward_service.cache.cache import ScoreCache
from rollmesh.reward_service.configured import Functions, with_configured
from rollmesh.reward_service.late.rewards import LateRewards
from rollmesh.reward_service.routing import split_routes
from rollmesh.reward_service.scoring.engine import ScoringEngine


def configured_engine(
    reward: RewardSection, functions: Functions | None = None, *, workers: int | None = None, keeps: bool = True
) -> ScoringEngine:
    """The engine for all sources that are not those of endpoints.

    Args:
        reward: of the run.
        functions: take the place of `reward.functions`.
        workers: takes the place of `reward.workers`.
        keeps: scores are kept, as the configuration says; false: never, so that each call shows its time.

    Raises:
        ConfigError: a route, a scorer's section or the cache cannot be used.
        RewardError: as `ScoringEngine`, a scorer cannot be built, or the store of late rewards cannot be opened.
    """
    computing, waiting = reward_workers(reward.workers if workers is None else workers)
    local, _ = split_routes(reward.by_data_source)
    return ScoringEngine(
        *with_configured(reward, reward.functions if functions is None else functions, local),
        normalize=reward.normalize,
        cache=ScoreCache(reward.cache) if keeps and reward.cache.max_bytes else None,
        late=LateRewards(reward.late),
        attempts=reward.attempts,
        workers=computing,
        waiting_workers=waiting,
        call_timeout_s=reward.scorer_timeout_s,
    )
