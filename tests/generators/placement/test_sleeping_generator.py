"""A generator that shares devices, against the real buffer and real weights: it sleeps and wakes over gRPC."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from rollmesh.buffer.server.lease_roll_call import RollCall
from rollmesh.generators.engines.hf.engine import HfEngine
from rollmesh.generators.engines.types import ServedWeights
from rollmesh.generators.placement import device_turns
from rollmesh.generators.rollout.drafts import DraftUploader
from rollmesh.mesh.errors import ConfigError, FencedError, StoreError, SwapError, WeightsError
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.mesh.trajectory.payload_codec import decode
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, generator_pb2, generator_pb2_grpc, trajectory_pb2
from tests.generators.pacing import Pace
from tests.generators.test_service import prompt_of
from tests.generators.world import TOKENIZER, Learner, eventually, log_probs, mesh

Control = generator_pb2_grpc.GeneratorControlStub
_LONG, _BOUND = 60, 20
_TIMEOUT_S = 240.0


async def sleep(control: Control, level: str, incarnation: int = 1) -> generator_pb2.SleepResponse:
    request = generator_pb2.SleepRequest(
        incarnation=incarnation, level=generator_pb2.SleepLevel.Value(f"SLEEP_LEVEL_{level}")
    )
    response: generator_pb2.SleepResponse = await control.Sleep(request, timeout=_TIMEOUT_S)
    return response


async def wake(
    control: Control,
    step: str,
    version: int,
    incarnation: int = 1,
    timeout_s: float = _TIMEOUT_S,
    *,
    others_generate: bool = False,
) -> generator_pb2.WakeResponse:
    request = generator_pb2.WakeRequest(
        incarnation=incarnation,
        step=generator_pb2.WakeStep.Value(f"WAKE_STEP_{step}"),
        policy=PolicyVersion(incarnation, version).to_proto(),
        others_generate=others_generate,
    )
    response: generator_pb2.WakeResponse = await control.Wake(request, timeout=timeout_s)
    return response


async def status_of(control: Control) -> generator_pb2.GeneratorStatusResponse:
    response: generator_pb2.GeneratorStatusResponse = await control.Status(
        generator_pb2.GeneratorStatusRequest(), timeout=30
    )
    return response


async def test_responses_continue_after_a_turn_of_the_learner(
    tmp_path: Path, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its start, asleep and without an engine, over two turns; every call comes twice, and some at once."""
    pace.tokens = _BOUND
    named: list[int] = []
    record = RollCall.record_request

    def heard(roll_call: RollCall, request: buffer_pb2.AdmitRequest) -> None:
        if request.HasField("inventory"):
            named.append(len(request.inventory.leases))
        record(roll_call, request)

    monkeypatch.setattr(RollCall, "record_request", heard)
    options: dict[str, Any] = {"rollout__max_response_tokens": _LONG, "rollout__slots": 8, "buffer__lease_s": 4.0}
    async with mesh(tmp_path, endless=True, weights__kv="recompute", **options) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(2)
        task, _ = world.generator("gen-1", shares_devices=True)
        control = await world.control("gen-1")

        async def waits() -> bool:
            return "asleep until" in (await status_of(control)).waiting_reason

        await eventually(waits)
        status = await status_of(control)
        assert status.shares_devices
        assert status.sleeping == generator_pb2.SLEEP_LEVEL_WITHOUT_WEIGHTS
        assert (await world.members())["gen-1"].gauges["shares_devices"] == 1.0
        assert (await sleep(control, "WITHOUT_WEIGHTS", incarnation=0)).freed_bytes == 0, "of a learner that starts"
        with pytest.raises(grpc.aio.AioRpcError, match="asleep until"):
            await control.Probe(generator_pb2.ProbeRequest(token_ids=[3, 4]), timeout=180)
        with pytest.raises(grpc.aio.AioRpcError, match="level: none is given"):
            await sleep(control, "UNSPECIFIED")
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await wake(control, "GENERATING", 0, timeout_s=0.05)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED, "the work goes on"
        both = await asyncio.gather(wake(control, "MEMORY", 0), wake(control, "GENERATING", 0))
        assert both[1].verified_by == "digest"
        assert (await status_of(control)).serving == PolicyVersion(1, 0).to_proto()
        await world.holds(control, 2)

        await asyncio.gather(sleep(control, "FROZEN"), sleep(control, "FROZEN"))
        drafts = await world.drafts()
        assert len(drafts) == 8, "of every member"
        await sleep(control, "WITHOUT_WEIGHTS")
        await sleep(control, "WITHOUT_WEIGHTS")
        status = await status_of(control)
        assert (status.groups_held, status.active_sequences) == (2, 0)
        assert status.sleeping == generator_pb2.SLEEP_LEVEL_WITHOUT_WEIGHTS
        assert status.waiting_reason == "asleep while the learner trains"
        with monkeypatch.context() as patched:
            patched.setattr(device_turns, "_SILENT_S", 0.0)
            silent = (await status_of(control)).waiting_reason
        assert silent == "asleep while the learner trains; it has not called for 0 min"

        await learner.seed(1)
        await learner.publish(1)
        named.clear()

        async def named_twice() -> bool:
            """Its leases were prolonged after it had fallen asleep."""
            return named.count(2) >= 2

        await eventually(named_twice)
        ledger = await learner.client.ledger("train")
        assert (ledger.counters.generating, ledger.counters.pending) == (2, 1), "its leases are held, its credits 0"
        assert (await status_of(control)).swaps == 1, "it fetches nothing asleep"

        with pytest.raises(grpc.aio.AioRpcError) as old:
            await wake(control, "MEMORY", 0, incarnation=0)
        assert isinstance(to_rollmesh_error(old.value, ""), FencedError)
        for step in ("MEMORY", "WEIGHTS", "VERIFIED", "VERIFIED"):
            woken = await wake(control, step, 1)
            assert (await status_of(control)).sleeping != generator_pb2.SLEEP_LEVEL_UNSPECIFIED
        assert woken.verified_by == "digest"
        assert (await status_of(control)).serving == PolicyVersion(1, 1).to_proto()
        await sleep(control, "WITHOUT_WEIGHTS")
        await wake(control, "GENERATING", 1)
        await wake(control, "GENERATING", 1)
        pace.tokens = None
        batch = await learner.sample(3, 1)
        models = [world.model(version) for version in range(2)]
        continued = 0
        for group in batch:
            assert group.attempt == 1
            for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
                found = decode(payload)
                response = found.response_ids.tolist()
                assert len(response) == _LONG
                draft = drafts.get((group.group_id, meta.member))
                if draft is None:
                    assert found.versions.runs == ((_LONG, PolicyVersion(1, 1)),)
                    continue
                count = len(draft.response_ids)
                continued += 1
                assert response[:count] == draft.response_ids.tolist()
                assert found.versions.runs == ((count, PolicyVersion(1, 0)), (_LONG - count, PolicyVersion(1, 1)))
                after = log_probs(models[1], prompt_of(group), response)
                np.testing.assert_allclose(found.log_probs[count:], after[count:], atol=1e-4)
        assert continued == 8
        assert not (await learner.client.ledger("train")).discrepancies
        assert not task.done()


async def test_a_generator_that_ends_asleep_gives_its_groups_back(tmp_path: Path, pace: Pace) -> None:
    """At once and in order, with what it has sampled of them."""
    pace.tokens = _BOUND
    options: dict[str, Any] = {"buffer__lease_s": 60.0, "buffer__reconnect_grace_s": 59.0}
    async with mesh(tmp_path, endless=True, rollout__max_response_tokens=_LONG, **options) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(2)
        task, _ = world.generator("gen-1", shares_devices=True)
        control = await world.control("gen-1")
        await wake(control, "GENERATING", 0)
        await world.holds(control, 2)
        await sleep(control, "WITHOUT_WEIGHTS")
        manual = asyncio.ensure_future(
            control.Generate(
                generator_pb2.GenerateRequest(
                    prompt="12+30=", sampling=trajectory_pb2.SamplingParams(temperature=0.0, max_tokens=7)
                ),
                timeout=_TIMEOUT_S,
            )
        )
        await control.Drain(generator_pb2.DrainRequest(timeout_ms=60_000), timeout=180)
        assert await asyncio.wait_for(task, 120) == 0
        assert (await manual).finish_reason == trajectory_pb2.FINISH_REASON_ABORTED, "it has waited"
        grants = await world.grants(2)
        assert {len(grant.drafts) for grant in grants} == {4}
        # One that has not been woken yet ends at once too.
        other, _ = world.generator("gen-2", shares_devices=True)
        control = await world.control("gen-2")
        await control.Drain(generator_pb2.DrainRequest(timeout_ms=60_000), timeout=180)
        assert await asyncio.wait_for(other, 120) == 0


def tasks_of(learner: Learner, count: int) -> list[trajectory_pb2.PromptTask]:
    """Tasks that version 0 alone may answer."""
    tasks = learner.tasks(count, max_tokens=_LONG)
    for task in tasks:
        task.pinned.CopyFrom(PolicyVersion(1, 0).to_proto())
    return tasks


async def test_pinned_groups_are_given_back_and_a_generator_of_its_own_devices_refuses(
    tmp_path: Path, pace: Pace
) -> None:
    pace.tokens = _BOUND
    async with mesh(tmp_path, endless=True, rollout__max_response_tokens=_LONG) as world:
        learner = await world.learner()
        await learner.publish(0)
        world.generator("gen-1", shares_devices=True)
        control = await world.control("gen-1")
        await wake(control, "GENERATING", 0)
        await learner.client.seed("eval", learner.incarnation, tasks_of(learner, 2))
        await world.holds(control, 2)
        await sleep(control, "WITHOUT_WEIGHTS")
        pace.tokens = None
        await wake(control, "GENERATING", 0)
        stream = learner.client.sample("eval", learner.incarnation)
        stream.request(2, 0)
        groups: list[buffer_pb2.LeasedGroup] = []
        while len(groups) < 2:
            update = await stream.next(_TIMEOUT_S)
            assert update is not None, stream.waiting_reason
            groups += learner.taken(update)
        await stream.close()
        assert {group.attempt for group in groups} == {2}, "they were given back, and granted again"
        pace.tokens = _BOUND
        await learner.client.seed("eval", learner.incarnation, tasks_of(learner, 2))
        await world.holds(control, 2)
        await sleep(control, "FROZEN")
        await learner.publish(1)
        await wake(control, "GENERATING", 1)
        assert (await status_of(control)).serving == PolicyVersion(1, 1).to_proto(), "new weights wait for none of them"
        world.generator("gen-2", shares_devices=False)
        control = await world.control("gen-2")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await sleep(control, "FROZEN")
        assert isinstance(to_rollmesh_error(refused.value, ""), ConfigError)
        assert not (await status_of(control)).shares_devices


async def test_weights_that_are_not_those_published_are_dropped_and_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their bytes, and in an engine that packs them by log-probs, before anything is generated."""
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(4)
        world.generator("gen-1", shares_devices=True)
        control = await world.control("gen-1")
        with monkeypatch.context() as patch:
            patch.setattr("rollmesh.generators.weights.served_digest.digest_of", lambda _: "damaged")
            await wake(control, "WEIGHTS", 0)
            with pytest.raises(grpc.aio.AioRpcError) as wrong:
                await wake(control, "VERIFIED", 0)
            assert isinstance(to_rollmesh_error(wrong.value, ""), WeightsError)
        status = await status_of(control)
        assert (status.swaps, status.sleeping) == (1, generator_pb2.SLEEP_LEVEL_WITHOUT_WEIGHTS)
        assert not status.HasField("serving")

        weights = HfEngine.weights

        def packed(engine: HfEngine) -> Future[ServedWeights]:
            served = weights(engine).result(_TIMEOUT_S)
            answer: Future[ServedWeights] = Future()
            answer.set_result(ServedWeights(served.version, served.digest, None))
            return answer

        monkeypatch.setattr(HfEngine, "weights", packed)
        ids = TOKENIZER.encode("12+30=42")
        right = log_probs(world.model(0), ids[:1], ids[1:])
        request = generator_pb2.WakeRequest(
            incarnation=1,
            step=generator_pb2.WAKE_STEP_VERIFIED,
            policy=PolicyVersion(1, 0).to_proto(),
            probe_ids=ids,
            probe_log_probs=(right + 1.0).tolist(),
        )
        assert (await control.Wake(request, timeout=_TIMEOUT_S)).verified_by == ""
        with pytest.raises(grpc.aio.AioRpcError) as wrong:
            await wake(control, "GENERATING", 0)
        assert isinstance(to_rollmesh_error(wrong.value, ""), WeightsError)
        status = await status_of(control)
        assert (status.tokens_generated, status.groups_held, status.swaps) == (0, 0, 2)
        del request.probe_log_probs[:]
        request.probe_log_probs.extend(right.tolist())
        await control.Wake(request, timeout=_TIMEOUT_S)
        assert (await wake(control, "GENERATING", 0)).verified_by == "log_probs"
        assert (await status_of(control)).swaps == 3
        assert len(await learner.sample(4, 0)) == 4


async def test_another_generator_continues_the_drafts_of_one_that_was_killed_asleep(tmp_path: Path) -> None:
    options: dict[str, Any] = {"placement__mode": "collocated", "rollout__max_response_tokens": _LONG}
    async with mesh(tmp_path, endless=True, **options) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(2)
        process = await world.process("gen-1", bound=_BOUND)
        control = await world.control("gen-1")
        await wake(control, "GENERATING", 0)
        await world.holds(control, 2)
        await sleep(control, "FROZEN")
        assert (await sleep(control, "WITHOUT_KV_CACHE")).freed_bytes >= 0
        assert (await status_of(control)).sleeping == generator_pb2.SLEEP_LEVEL_WITHOUT_KV_CACHE
        drafts = await world.drafts()
        assert len(drafts) == 8
        asleep = await sleep(control, "WITHOUT_WEIGHTS")
        assert asleep.freed_bytes < psutil.Process(process.pid).memory_info().rss
        process.kill()
        await process.wait()
        world.generator("gen-2")
        control = await world.control("gen-2")
        assert (await status_of(control)).shares_devices, "as the configuration says"
        await wake(control, "GENERATING", 0)
        for group in await learner.sample(2, 0):
            assert {meta.generator for meta in group.members} == {"gen-2"}
            for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
                draft = drafts[group.group_id, meta.member].response_ids.tolist()
                assert decode(payload).response_ids[: len(draft)].tolist() == draft
        assert not (await learner.client.ledger("train")).discrepancies


async def test_another_generator_continues_the_groups_of_one_that_does_not_wake(
    tmp_path: Path, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are wrong, or it is late. It lives, and its leases would be held."""
    pace.tokens = _BOUND
    options: dict[str, Any] = {"rollout__max_response_tokens": _LONG, "buffer__lease_s": 60.0}
    async with mesh(tmp_path, endless=True, **options) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(2)
        for name in ("gen-1", "gen-2"):
            world.generator(name, shares_devices=True)
        first, second = await world.control("gen-1"), await world.control("gen-2")
        await wake(first, "GENERATING", 0)
        await world.holds(first, 2)
        await sleep(first, "WITHOUT_WEIGHTS")
        drafts = await world.drafts()
        await wake(first, "MEMORY", 0)
        await sleep(first, "WITHOUT_WEIGHTS")
        assert (await status_of(first)).groups_held == 2, "all sleep again"
        with monkeypatch.context() as patch:
            patch.setattr("rollmesh.generators.weights.served_digest.digest_of", lambda _: "damaged")
            with pytest.raises(grpc.aio.AioRpcError, match="is not the one published"):
                await wake(first, "GENERATING", 0)
        assert (await status_of(first)).groups_held == 0
        await wake(second, "GENERATING", 0)
        await world.holds(second, 2)
        await sleep(second, "FROZEN")
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await wake(second, "GENERATING", 7, timeout_s=0.05)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await status_of(second)).groups_held == 2, "its caller may come again"
        pace.tokens = None
        await wake(first, "GENERATING", 0)
        await wake(second, "MEMORY", 0, others_generate=True)
        for group in await learner.sample(2, 0):
            assert {meta.generator for meta in group.members} == {"gen-1"}
            for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
                draft = drafts[group.group_id, meta.member].response_ids.tolist()
                assert decode(payload).response_ids[: len(draft)].tolist() == draft
        assert not (await learner.client.ledger("train")).discrepancies


async def test_a_turn_that_is_taken_back_while_the_weights_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may never come. The call that waits for them ends, and the generator sleeps, without any call too."""
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        await learner.publish(0)
        world.generator("gen-1", shares_devices=True)
        control = await world.control("gen-1")
        waits = asyncio.ensure_future(wake(control, "GENERATING", 7))

        async def loads() -> bool:
            reason = (await status_of(control)).waiting_reason
            assert reason != "wakes up: "
            return reason.startswith("wakes up: ")

        await eventually(loads)
        await learner.swapped(1)
        await sleep(control, "WITHOUT_WEIGHTS")
        with pytest.raises(grpc.aio.AioRpcError) as turned:
            await waits
        assert isinstance(to_rollmesh_error(turned.value, ""), SwapError)
        waits = asyncio.ensure_future(wake(control, "GENERATING", 7))
        await eventually(loads)
        await wake(control, "GENERATING", 0)
        with pytest.raises(grpc.aio.AioRpcError, match="an earlier version"):
            await waits
        assert (await status_of(control)).waiting_reason != "asleep while the learner trains"

        await sleep(control, "FROZEN")
        monkeypatch.setattr("rollmesh.generators.placement.callers.ABANDONED_S", 0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            await wake(control, "GENERATING", 7, timeout_s=0.05)

        async def gave_up() -> bool:
            return (await status_of(control)).waiting_reason == "asleep: no call waits for version 1:7 any more"

        await eventually(gave_up)
        assert (await status_of(control)).sleeping == generator_pb2.SLEEP_LEVEL_FROZEN
        with pytest.raises(grpc.aio.AioRpcError, match="has not named incarnation 9 yet"):
            await wake(control, "GENERATING", 0, incarnation=9)
        await wake(control, "GENERATING", 0)
        with monkeypatch.context() as patch:
            patch.setattr(DraftUploader, "write_all", _refused)
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError, match="no store"):
                    await sleep(control, "FROZEN")
        await wake(control, "GENERATING", 0)

        async def counted() -> bool:
            gauges = (await world.members())["gen-1"].gauges
            return (gauges["sleeps"], gauges["wakes"]) == (2.0, 3.0)

        await eventually(counted)


async def _refused(_: object) -> None:
    raise StoreError("no store")
