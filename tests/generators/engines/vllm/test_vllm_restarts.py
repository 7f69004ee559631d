"""A generator whose vLLM ends while the learner has the devices, and starts again after that."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from rollmesh.generators.engine_watch import FrozenEngineError
from rollmesh.mesh.trajectory.payload_codec import decode
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines.vllm.step_gate import StepGate
from tests.generators.placement.test_sleeping_generator import sleep, wake
from tests.generators.world import mesh

log = logging.getLogger(__name__)
# A response has 16 tokens on average: all slots are amid one when the engine stands still.
_GROUPS, _TOKENS = 6, 20
_START_S = 300.0
_LOGGER = "rollmesh.generators.engines.vllm.weight_loading"


async def test_responses_continue_in_new_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A generator takes the root's handlers away: it configures the log of its process.
    monkeypatch.setattr(logging.getLogger(_LOGGER), "handlers", [caplog.handler])
    options: dict[str, Any] = {
        "rollout__engine": "vllm",
        "rollout__slots": 4,
        # All of them may be sampled under the first version.
        "learner__batch__groups": _GROUPS,
        "rollout__max_response_tokens": 200,
        "rollout__vllm__kv_cache_gib": 0.125,
        "rollout__vllm__start_timeout_s": _START_S,
        "resources__frozen_after_s": 4.0,
        "logging__level": "info",
    }
    async with mesh(tmp_path, head_dim=32, **options) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(_GROUPS)
        others = set(psutil.Process().children(recursive=True))
        task, _ = world.generator("gen-1", shares_devices=True)
        control = await world.control("gen-1")
        with StepGate().at_most(_TOKENS):
            await wake(control, "GENERATING", 0, timeout_s=_START_S)
            await world.holds(control)
            cores = [core for core in _cores() if core not in others]
            assert cores
            await sleep(control, "FROZEN")
        asleep = await sleep(control, "WITHOUT_WEIGHTS")
        assert asleep.freed_bytes > 400 << 20
        assert not any(core.is_running() for core in cores)
        drafts = await world.drafts()
        assert drafts
        await learner.publish(1)
        woken = await wake(control, "VERIFIED", 1, timeout_s=_START_S)
        assert woken.verified_by == "", "its tensors are packed"
        await wake(control, "GENERATING", 1, timeout_s=_START_S)
        continued = 0
        for group in await learner.sample(_GROUPS, 1):
            assert group.attempt == 1
            for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
                draft = drafts.get((group.group_id, meta.member))
                if draft is not None:
                    found, count = decode(payload), len(draft.response_ids)
                    assert found.response_ids[:count].tolist() == draft.response_ids.tolist()
                    assert found.versions.runs[0] == (count, PolicyVersion(1, 0))
                    assert {version for _, version in found.versions.runs[1:]} == {PolicyVersion(1, 1)}
                    continued += 1
        assert continued == len(drafts)
        assert caplog.text.count("weights come through the learner's own file") == 2
        log.info("asleep: %s", asleep)
        await sleep(control, "WITHOUT_WEIGHTS")
        waking = asyncio.ensure_future(wake(control, "MEMORY", 1, timeout_s=_START_S))
        while not (starting := [core for core in _cores() if core not in others]):
            await asyncio.sleep(0.02)
        starting[0].suspend()
        # Not after `_START_S`: one that is stopped amid its start is found too.
        with pytest.raises(FrozenEngineError, match="stopped by a signal"):
            await asyncio.wait_for(task, 240)
        with pytest.raises(grpc.aio.AioRpcError):
            await waking
        assert not starting[0].is_running()


def _cores() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
