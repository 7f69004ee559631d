"""Particulars of vLLM at a swap, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch

from rollmesh.generators.engine_watch import watch
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.backend import DecodeJob
from rollmesh.generators.engines.types import SamplingParams
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.liveness.freeze_detector import ThreadState
from rollmesh.mesh.liveness.process_ends import survivors
from tests.generators.engines.harness import V1, V2, request
from tests.generators.engines.tiny import ContractModel

if TYPE_CHECKING:
    from tests.generators.engines.vllm.shared import SharedVllm, VllmHarness

pytestmark = [pytest.mark.engine("vllm")]
# More than one block of vLLM's KV cache, which is what is shared.
LONG = [3 + index % 200 for index in range(150)]


@pytest.fixture
def harness(contract_model: ContractModel, vllm: SharedVllm) -> Iterator[VllmHarness]:
    from tests.generators.engines.vllm.shared import VllmHarness

    harness = VllmHarness(contract_model, vllm)
    yield harness
    harness.close()


def prefix_hits(shared: SharedVllm, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that vLLM finds in its prefix cache from here on, one entry per step that found some."""
    metrics, hits = shared.backend._metrics, []
    record = metrics.record

    def watch(engine: int, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None and scheduler.prefix_cache_stats.hits:
            hits.append(scheduler.prefix_cache_stats.hits)
        record(engine, scheduler, iteration)

    monkeypatch.setattr(metrics, "record", watch)
    return hits


def test_no_prefix_of_former_weights_is_found(harness: VllmHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after a swap, nor after one during which a request with that prefix runs."""
    hits = prefix_hits(harness.shared, monkeypatch)
    old, new = harness.random_weights(1), harness.random_weights(2)
    harness.update(V1, old)
    for name in ("first", "again"):
        harness.check_log_probs(harness.run([request(name, LONG, max_tokens=9)])[0], old, LONG)
    assert hits == [128], "one block of 128 tokens, found once"
    harness.freeze([request("runs", LONG, max_tokens=harness.long)])
    hits.clear()
    harness.update(V2, new)
    harness.resume()
    for name in ("new", "new again"):
        harness.check_log_probs(harness.run([request(name, LONG, max_tokens=9)])[0], new, LONG)
    assert hits == [128], "found once, and made by the new weights"
    [across] = harness.collector.wait(["runs"])
    assert across.sampled.versions.versions in ((V1, V2), (V1,))
    np.testing.assert_allclose(
        harness.engine.probe(LONG).result(harness.deadline_s).log_probs, harness.log_probs(new, LONG), atol=1e-3
    )


def test_memory_that_cannot_be_mapped_changes_nothing(harness: VllmHarness) -> None:
    """The workers find it out; the former weights are in service, whole."""
    shared, old = harness.shared, harness.random_weights(3)
    harness.update(V1, old)
    staged = shared.backend.stage(harness.random_weights(4).items())
    staged.layout = replace(staged.layout, path="/proc/self/fd/100000")
    shared.run(shared.backend.pause())
    with pytest.raises(WeightsError, match="cannot be mapped"):
        shared.run(shared.backend.load(staged, "9.9", recompute=False))
    shared.run(shared.backend.resume())
    [result] = harness.run([request("a", max_tokens=20)])
    assert result.sampled.versions.versions == (V1,)
    harness.check_log_probs(result, old, [3, 4, 5, 6])


def test_a_load_that_fails_halfway_is_taken_back(harness: VllmHarness) -> None:
    """Some layers are new by then, one is not complete, others are old."""
    old, new = harness.random_weights(3), harness.random_weights(4)
    harness.update(V1, old)
    [runs, *_] = harness.freeze([request("runs", max_tokens=harness.long)]).values()
    backend = harness.shared.backend
    bad = backend._weights._checkpoint.to_checkpoint(new.items())
    bad["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(WeightsError, match="could not load"):
        harness.shared.run(backend.load(backend._sender.stage(bad), "9.9", recompute=False))
    harness.resume()
    [result] = harness.collector.wait(["runs"])
    assert len(runs.sampled) < len(result.sampled.response_ids)
    assert result.sampled.versions.versions == (V1,)
    harness.check_log_probs(result, old, [3, 4, 5, 6])
    harness.update(V2, new)
    harness.check_log_probs(harness.run([request("new", max_tokens=20)])[0], new, [3, 4, 5, 6])


def test_a_job_that_is_aborted_amid_a_swap_is_not_submitted_again(
    harness: VllmHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine would ever end it: it would decode to its last token in a place that is taken for free."""
    harness.update(V1, harness.random_weights(1))
    shared, backend = harness.shared, harness.shared.backend
    core = backend._engine.llm.engine_core
    add, added, chunks = core.add_request_async, [], []

    async def add_and_abort(asked: Any) -> None:
        added.append(asked.request_id.partition("-")[0])
        await add(asked)
        if len(added) == 1:
            await backend.abort(["job3"])

    async def run() -> None:
        await backend.pause()
        jobs = [DecodeJob(f"job{index}", [3 + index], SamplingParams(max_tokens=5)) for index in range(4)]
        running = [asyncio.create_task(backend.generate(job, chunks.append)) for job in jobs]
        while len(backend._jobs._outputs._streams) < len(jobs):
            await asyncio.sleep(0)
        monkeypatch.setattr(core, "add_request_async", add_and_abort)
        await backend.load(backend.stage(harness.random_weights(2).items()), "9.9", recompute=False)
        await backend.resume()
        await asyncio.gather(*running)

    shared.run(run())
    assert added == ["job0", "job1", "job2"]
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["aborted", "length", "length", "length"]
    assert {label for chunk in chunks for _, label in chunk.versions} == {"9.9"}


def test_a_probe_that_vllm_refuses_fails_alone(harness: VllmHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams as VllmSampling

    from rollmesh.generators.engines.vllm.jobs import sampling

    harness.update(V1, harness.constant_weights(10))
    monkeypatch.setattr(sampling, "scoring", lambda _: VllmSampling(prompt_logprobs=10**6))
    with pytest.raises(EngineError, match="does not score these tokens"):
        harness.engine.probe(LONG).result(harness.deadline_s)
    assert harness.run([request("a", max_tokens=3)])[0].sampled.response_ids.tolist() == [10] * 3


def test_workers_say_what_they_hold(harness: VllmHarness) -> None:
    """On a CPU nothing that they could give back."""
    assert harness.shared.run(harness.shared.backend._memory.held_bytes()) == 0


def test_nothing_is_lost_across_swaps(harness: VllmHarness) -> None:
    harness.update(V1, harness.constant_weights(10))
    asked = [request(str(index), [5 + index], max_tokens=40) for index in range(12)]
    harness.freeze(asked)
    harness.update(V2, harness.constant_weights(11))
    harness.resume()
    both = 0
    for result in harness.collector.wait([item.request_id for item in asked]):
        assert [
            10 if version == V1 else 11 for version in result.sampled.versions
        ] == result.sampled.response_ids.tolist()
        assert len(result.sampled.response_ids) == 40
        both += len(result.sampled.versions.runs) == 2
    assert both >= 1


def test_an_engine_core_that_is_stopped_and_continued_goes_on(harness: VllmHarness) -> None:
    """It owes its answer for as long as it is stopped; the tokens are the same."""
    weights = harness.random_weights(1)
    harness.update(V1, weights)
    asked = request("a", LONG[:60], max_tokens=harness.long, temperature=0.0)
    [undisturbed] = harness.run([asked])
    core = psutil.Process(harness.shared.backend._process._tree.pids[0])
    with harness.slowly(3):
        harness.collector.when_streamed({"b": 3}, core.suspend)
        harness.engine.submit([replace(asked, request_id="b", stream=True)])
        harness.collector.wait_streamed({"b": 3})

    async def watched() -> None:
        async with asyncio.timeout(harness.deadline_s):
            while (sight := harness.engine.process_state()) is None or sight.state is not ThreadState.STOPPED:
                await asyncio.sleep(0.01)
        watching = asyncio.create_task(watch(harness.engine, 30.0))
        answer = asyncio.wrap_future(harness.engine.ping())
        assert not (await asyncio.wait({watching, answer}, timeout=2.0))[0]
        core.resume()
        await asyncio.wait_for(answer, harness.deadline_s)
        assert not watching.done()
        watching.cancel()

    asyncio.run(watched())
    [result] = harness.collector.wait(["b"])
    assert result.sampled.response_ids.tolist() == undisturbed.sampled.response_ids.tolist()


def test_a_killed_engine_core_is_a_reported_failure(harness: VllmHarness) -> None:
    """The last of this session's vLLM: nothing is left of it."""
    harness.update(V1, harness.constant_weights(10))
    harness.freeze([request("a", max_tokens=harness.long)])
    members = harness.shared.backend._process._tree.pids
    assert members
    os.kill(members[0], signal.SIGKILL)
    failure = harness.collector.wait_failure()
    assert "exit code -9" in str(failure)
    assert "exit code -9" in (harness.engine.status().failure or "")
    harness.shared.close()
    assert survivors(members, 60) == set()
