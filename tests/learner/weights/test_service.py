"""The stream that announces versions to a receiver."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rollmesh.learner.weights import PublishRules, WeightPublisher, WeightsService
from rollmesh.learner.weights.announcement_stream import AnnouncementStream
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2


async def test_a_receiver_that_has_the_newest_costs_nothing_until_there_is_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher = WeightPublisher("run", {}, PublishRules(transport="grpc"))
    stream: Any = WeightsService(publisher).Watch(weights_pb2.WatchRequest(member_id="gen-1"), None)
    asked, real = 0, AnnouncementStream.next

    def counted(self: AnnouncementStream) -> object:
        nonlocal asked
        asked += 1
        assert asked <= 4, "it asks without a pause"
        return real(self)

    monkeypatch.setattr(AnnouncementStream, "next", counted)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    publisher.publish(PolicyVersion(1, 0), [("w", torch.zeros(3))], "float32")
    assert (await first).policy.version == 0
    second = asyncio.ensure_future(anext(stream))
    for _ in range(100):
        await asyncio.sleep(0)
    assert asked == 3, "before there was a version, for it, and after it"
    publisher.publish(PolicyVersion(1, 1), [("w", torch.ones(3))], "float32")
    assert (await second).policy.version == 1
    assert asked == 4
    await stream.aclose()
    publisher.close()
