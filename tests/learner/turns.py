"""Turns of a whole worker on two ranks, and log-probs that it gives; called on every rank by `test_roles_memory`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.distributed import roles_memory
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.distributed.rank_group import RankGroup, run_follower
from rollmesh.learner.distributed.worker import Worker
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.liveness.rank_watch import RankId, RankWatch
from rollmesh.mesh.config.learner import DistributedSection
from rollmesh.mesh.errors import SwapError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.testing.worlds import Harness
from tests.learner.dataflow import OPTIMIZER, Plain, Probe, make_groups, make_plan, make_worker, weights
from tests.learner.engines.models import make_spec
from tests.learner.failing_ranks import files_up_to

SEQUENCE = np.array([3, 9, 4, 27, 11, 5, 8], dtype=np.int32)
"""The sequence of which log-probs are asked."""


def log_probs(harness: Harness, model: Path, folder: Path) -> NDArray[np.float32]:
    """Those of one rank's worker of the policy alone."""
    engine = harness.make(make_spec(model))
    return make_worker(Plain(), {"actor": engine}, [], folder).log_probs(SEQUENCE)


def take_turns(harness: Harness, model: Path, folder: Path) -> dict[str, Any]:
    """Trains two batches with everything away in between, and two on engines that stay; gives what rank 0 has seen."""
    untouched, turning = (Probe(), Probe())
    resident = _engines(harness, model, untouched, None)
    engines = _engines(harness, model, turning, folder / "resting")
    staying = make_worker(untouched, resident, make_groups(), folder / "untouched", token_budget=40)
    worker = make_worker(turning, engines, make_groups(), folder / "turning", token_budget=40)
    for _ in range(2):
        staying.prepare(_plan(staying))
        staying.train(lambda: None)
    seen: dict[str, Any] = {}
    # There is room for all.
    worker.memory.offload_nonresident()
    assert not any(size for engine in engines.values() for size in engine.resting_bytes.values())
    channel = RankChannel(DistributedSection())
    # Room for the actor alone.
    with patch.object(roles_memory, "_free_bytes", lambda _: 1):
        _led(worker, channel, lambda ranks: seen.update(_turn(ranks, worker, engines)))
    seen["resting"] = _resting(engines)
    with files_up_to(100) if dist.get_rank() else files_up_to(-1):
        _led(worker, channel, lambda ranks: seen.update(refused=_refused(ranks.offload)))
    # The way back fails too, on one rank and for one role.
    stuck = patch.object(engines["critic"], "onload", side_effect=MemoryError("no room")) if dist.get_rank() else None
    with files_up_to(100 if stuck else -1), stuck or nullcontext():
        _led(worker, channel, lambda ranks: seen.update(stuck=_stuck(ranks)))
    _led(worker, channel, lambda ranks: seen.update(back=_away_and_back(ranks, engines)))
    seen["weights"] = [
        {role: weights(engine) for role, engine in each.items() if engine.trained} for each in (resident, engines)
    ]
    for each in (staying, worker):
        each.close()
    return seen


def _engines(harness: Harness, model: Path, algorithm: Algorithm, folder: Path | None) -> dict[str, Engine]:
    kinds: dict[str, Any] = {"actor": ("language_model", True)}
    kinds |= {role.name: (role.kind, role.trained) for role in algorithm.needs.roles}
    return {
        role: harness.make(make_spec(model, optimizer=OPTIMIZER if trained else None, rest_folder=folder), kind)
        for role, (kind, trained) in kinds.items()
    }


def _plan(worker: Worker) -> Any:
    return make_plan(make_groups(), token_budget=40, dp_sizes=worker.dp_sizes)


def _led(worker: Worker, channel: RankChannel, lead: Callable[[RankGroup], None]) -> None:
    """Rank 0 leads, the others follow."""
    watch = RankWatch(None, RankId(dist.get_rank(), dist.get_world_size()), silent_s=1.0)
    if dist.get_rank():
        run_follower(worker, channel, watch)
        return
    ranks = RankGroup(worker, channel, watch)
    lead(ranks)
    ranks.shutdown()


def _resting(engines: Mapping[str, Engine]) -> dict[str, list[str]]:
    """Names of the parts on the host, by role."""
    return {role: sorted(name for name, size in e.resting_bytes.items() if size) for role, e in engines.items()}


def _away_and_back(ranks: RankGroup, engines: Mapping[str, Engine]) -> tuple[dict[str, list[str]], ...]:
    ranks.offload()
    away = _resting(engines)
    ranks.onload()
    return away, _resting(engines)


def _turn(ranks: RankGroup, worker: Worker, engines: Mapping[str, Engine]) -> dict[str, Any]:
    ranks.prepare(_plan(worker))
    ranks.train(lambda: True)
    before = ranks.log_probs(SEQUENCE)
    freed = ranks.offload().freed_bytes
    away = _resting(engines)
    calls: list[Callable[[], object]] = [
        lambda: ranks.train(lambda: True),
        lambda: ranks.begin_checkpoint(PolicyVersion(1, 1), {}),
        lambda: ranks.load(Path("none")),
        lambda: ranks.log_probs(SEQUENCE),
    ]
    # A batch is prepared while others have the devices.
    ranks.prepare(_plan(worker))
    refused = [_refused(call) for call in calls]
    ranks.onload()
    after = ranks.log_probs(SEQUENCE)
    ranks.train(lambda: True)
    return {"freed": freed, "away": away, "while away": refused, "log_probs": (before, after)}


def _stuck(ranks: RankGroup) -> list[str]:
    return [_refused(ranks.offload), _refused(lambda: ranks.log_probs(SEQUENCE))]


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, SwapError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
