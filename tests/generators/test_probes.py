"""Comparisons of the served weights with the announced ones are counted."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from rollmesh.generators.control_service import Probes
from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.metrics import GeneratorMetrics
from rollmesh.generators.weights.receiver import AnnouncedWeights
from rollmesh.mesh.trajectory.versions import PolicyVersion


async def test_each_outcome_is_a_series_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, found = GeneratorMetrics(), iter(["announced", "other", ""])

    def inspect(*_: object) -> SimpleNamespace:
        return SimpleNamespace(digest=next(found), not_comparable="", differing=[])

    def probe(_ids: object) -> Future[SimpleNamespace]:
        done: Future[SimpleNamespace] = Future()
        done.set_result(
            SimpleNamespace(version=PolicyVersion(1, 2), digest="announced", log_probs=np.zeros(1), tensors={})
        )
        return done

    monkeypatch.setattr("rollmesh.generators.weights.served_digest.inspect", inspect)
    engine = cast(InferenceEngine, SimpleNamespace(probe=probe))
    announced = iter([cast(AnnouncedWeights, object())] * 3 + [None])
    probes = Probes(engine, lambda _: next(announced), metrics.record_verification)
    name = "rollmesh_generator_weights_verifications_total"
    outcomes = ("agrees", "differs", "not_comparable")
    assert [metrics.registry.get_sample_value(name, {"outcome": outcome}) for outcome in outcomes] == [0, 0, 0]
    for _ in range(4):
        await probes.probe([1, 2])
    assert [metrics.registry.get_sample_value(name, {"outcome": outcome}) for outcome in outcomes] == [1, 1, 2]
