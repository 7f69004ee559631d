"""SGLang whose server ends while it sleeps, and another one starts when it wakes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.interface import EngineListener, InferenceEngine
from rollmesh.generators.engines.types import SleepLevel, WakeStep
from tests.generators.engines.harness import V1, V2, ModelHarness, request
from tests.generators.engines.sglang.server import START_S, settings
from tests.generators.engines.tiny import ContractModel

# With a server that stands for SGLang in `test_server_process`, with another engine in `test_vllm_restarts`.
pytestmark = [pytest.mark.engine("sglang"), pytest.mark.exhaustive]
log = logging.getLogger(__name__)


class RestartedSglang(ModelHarness):
    """An engine with a server of its own."""

    deadline_s = START_S

    def build(self, listener: EngineListener) -> InferenceEngine:
        # Other tests of this process have a server too.
        self.others = _servers()
        return create_engine("sglang", self.model.folder, replace(settings(), release="process"), listener)

    def fail_at(self, token: int) -> None:
        raise NotImplementedError


@pytest.fixture
def harness(contract_model: ContractModel) -> Iterator[RestartedSglang]:
    harness = RestartedSglang(contract_model)
    yield harness
    harness.close()


def test_responses_continue_in_another_server(harness: RestartedSglang) -> None:
    engine, deadline_s = harness.engine, harness.deadline_s
    harness.update(V1, harness.constant_weights(10))
    engine.submit([request("a", max_tokens=harness.long, stream=True)])
    harness.collector.wait_streamed({"a": 3})
    assert _servers() - harness.others
    report = engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(deadline_s)
    log.info("slept in %.1f s, %d MiB freed", report.seconds, report.freed_bytes >> 20)
    assert report.freed_bytes > 500 << 20
    assert not _servers() - harness.others
    assert engine.process_state() is None
    begin = time.monotonic()
    engine.wake(WakeStep.WEIGHTS).result(deadline_s)
    log.info("another server after %.1f s", time.monotonic() - begin)
    harness.update(V2, harness.constant_weights(11))
    harness.wake()
    [result] = harness.collector.wait(["a"])
    (drawn, first), (rest, second) = result.sampled.versions.runs
    assert (first, second, drawn + rest) == (V1, V2, harness.long)
    assert result.sampled.response_ids.tolist() == [10] * drawn + [11] * rest


def _servers() -> set[int]:
    """Processes of servers that were started here."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "sglang" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found
