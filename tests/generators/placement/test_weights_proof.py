"""Weights that are not those published are found before anything is generated with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollmesh.generators.engines.types import ServedWeights
from rollmesh.generators.placement.weights_proof import ProbeTokens, check_log_probs, check_tensors
from rollmesh.generators.weights.announced_weights import AnnouncedWeights
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import generator_pb2
from tests.generators.weights.test_served_digest import published

V1 = PolicyVersion(1, 1)


async def test_tensors_are_compared_byte_by_byte_where_they_can_be(tmp_path: Path) -> None:
    manifest, tensors = published(tmp_path, "float32")
    assert await check_tensors(ServedWeights(V1, "", tensors), AnnouncedWeights(manifest))
    assert not await check_tensors(ServedWeights(V1, "", None), AnnouncedWeights(manifest)), "in a form of its own"
    assert not await check_tensors(ServedWeights(V1, "", tensors), None), "changed meanwhile"
    tensors["norm"] = tensors["norm"] + 1e-6
    with pytest.raises(WeightsError, match=r"1 tensors differ \(norm\)"):
        await check_tensors(ServedWeights(V1, "", tensors), AnnouncedWeights(manifest))


@pytest.mark.parametrize(("dtype", "well", "wrong"), [("float32", 1e-4, 0.02), ("bfloat16", 0.05, 0.5)])
def test_log_probs_may_differ_by_rounding_alone(dtype: str, well: float, wrong: float) -> None:
    probe = ProbeTokens(V1, [1, 2, 3], [-1.0, -2.0])
    check_log_probs(np.array([-1.0 + well, -2.0 - well], np.float32), probe, dtype)
    for found in ([-1.0 + wrong, -2.0 - wrong], [float("nan"), -2.0]):
        with pytest.raises(WeightsError, match="other log-probs than the learner"):
            check_log_probs(np.array(found, np.float32), probe, dtype)


def test_a_request_without_a_whole_probe_has_none() -> None:
    assert ProbeTokens.of(generator_pb2.WakeRequest(probe_ids=[1, 2], probe_log_probs=[])) is None
    request = generator_pb2.WakeRequest(policy=V1.to_proto(), probe_ids=[1, 2], probe_log_probs=[-0.5])
    assert ProbeTokens.of(request) == ProbeTokens(V1, [1, 2], [-0.5])
