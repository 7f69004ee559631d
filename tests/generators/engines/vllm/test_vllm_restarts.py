"""vLLM whose processes end while it sleeps, and start again when it wakes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from rollmesh.generators.engines.interface import EngineListener, InferenceEngine
from rollmesh.generators.engines.process_memory import read_memory_use
from rollmesh.generators.engines.types import SleepLevel, WakeStep
from rollmesh.generators.engines.vllm.engine import VllmEngine
from tests.generators.engines.harness import V1, V2, ModelHarness, request
from tests.generators.engines.tiny import ContractModel
from tests.generators.engines.vllm.shared import START_S, settings

log = logging.getLogger(__name__)


class RestartedVllm(ModelHarness):
    """An engine with a vLLM of its own."""

    deadline_s = START_S

    def build(self, listener: EngineListener) -> InferenceEngine:
        chosen = replace(settings(self.slots), release="process")
        return VllmEngine.from_folder(self.model.folder, chosen, listener)

    def fail_at(self, token: int) -> None:
        raise NotImplementedError


@pytest.fixture
def harness(contract_model: ContractModel) -> Iterator[RestartedVllm]:
    harness = RestartedVllm(contract_model)
    yield harness
    harness.close()


def test_responses_continue_in_new_processes(harness: RestartedVllm) -> None:
    engine, deadline_s, drawn = harness.engine, harness.deadline_s, 0
    harness.update(V1, harness.constant_weights(10))
    asked = [request("a", max_tokens=harness.long), request("pinned", max_tokens=harness.long, pinned=True)]
    drawn = len(harness.freeze(asked)["a"].sampled)
    awake, before = read_memory_use(), {child.pid for child in psutil.Process().children(recursive=True)}
    report = engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(deadline_s)
    asleep = read_memory_use()
    log.info("slept in %.1f s: %d -> %d MiB", report.seconds, awake.own >> 20, asleep.own >> 20)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid in before]
    names = [" ".join(child.cmdline()) for child in left]
    # The tests fork engine cores from one process.
    assert all("resource_tracker" in name or "forkserver" in name for name in names), names
    assert report.freed_bytes > 500 << 20
    assert awake.own - asleep.own > 500 << 20
    engine.ping().result(deadline_s)
    assert engine.process_state() is None
    begin = time.monotonic()
    engine.wake(WakeStep.WEIGHTS).result(deadline_s)
    log.info("new processes after %.1f s", time.monotonic() - begin)
    harness.update(V2, harness.constant_weights(11))
    harness.wake()
    log.info("woke after %.1f s", time.monotonic() - begin)
    [result] = harness.collector.wait(["a"])
    assert result.sampled.versions.runs == ((drawn, V1), (harness.long - drawn, V2))
    assert harness.collector.wait(["pinned"])[0].finish_reason == "aborted"
    assert engine.process_state() is not None
