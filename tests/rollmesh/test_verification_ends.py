"""A learner that goes while generators are compared: the verdict says so."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.learner.weights import PublishRules, WeightPublisher, WeightsService
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import membership_pb2, weights_pb2_grpc
from rollmesh.verification.compare import _announcements, _GeneratorComparison
from rollmesh.verification.published_weights import PublishedModel
from rollmesh.verification.verdict import GeneratorAnswer
from tests.generators.weights.transports.world import tensors

SECURITY = SecuritySection()
DEADLINE_S = 240.0


async def test_announcements_that_break_off_are_part_of_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask(*_: object) -> GeneratorAnswer:
        return GeneratorAnswer("gen-1", PolicyVersion(1, 9), "announced", "found", "", [], [])

    monkeypatch.setattr(_GeneratorComparison, "_ask", ask)
    publisher = WeightPublisher("run", {}, PublishRules(transport="grpc"))
    publisher.publish(PolicyVersion(1, 0), tensors(0).items(), "float32")
    server = new_server(SECURITY)
    weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(publisher), server)
    port = bind(server, "127.0.0.1", 0, SECURITY)
    await server.start()
    published = PublishedModel(f"127.0.0.1:{port}", SECURITY, timeout_s=DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S), _announcements(published, DEADLINE_S) as announced:
        following = _GeneratorComparison(published, announced, [1, 2], None, SECURITY)
        member = membership_pb2.Member(member_id="gen-1")
        verdict = await following._compare(member, 1.0)
        assert verdict.outcome == "not compared"
        assert verdict.why == "it serves 1:9, which was not announced to this command; the learner is at 1:0"
        await server.stop(0)
        while not announced.ended:
            await asyncio.sleep(0.01)
        assert "; the learner announces no more versions" in (await following._compare(member, 1.0)).why
    await published.close()
    publisher.close()
