"""The contract of inference engines at an end: of a request before its time, of all work, of the engine."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.types import GenerationResult, PartialResponse
from tests.generators.engines.harness import PROMPT, V1, V2, EngineHarness, request


class LifeContract:
    """Part of `EngineContract`."""

    def test_abort(self, harness: EngineHarness) -> None:
        """Running and queued requests end as aborted, once, however often they are named; others continue."""
        harness.update(V1, harness.constant_weights(10))
        fillers = [request(f"filler{index}", [5], max_tokens=harness.long - 1) for index in range(harness.slots - 1)]
        asked = [
            request("running", max_tokens=harness.long),
            *fillers,
            *[request(f"line{index}", max_tokens=10) for index in range(harness.slots)],
            request("queued", max_tokens=harness.long),
        ]
        before = harness.freeze(asked)
        harness.engine.abort(["unknown", "running", "queued", "queued", "running"])
        harness.resume()
        results = {item.request_id: harness.collector.wait([item.request_id])[0] for item in asked}
        running, queued = results.pop("running"), results.pop("queued")
        assert (running.finish_reason, queued.finish_reason) == ("aborted", "aborted")
        assert running.sampled.response_ids.tolist() == [10] * len(running.sampled.versions)
        assert len(before["running"].sampled) <= len(running.sampled.response_ids) < harness.long
        assert len(queued.sampled.response_ids) == len(queued.sampled.versions) == 0
        assert {result.finish_reason for result in results.values()} == {"length"}
        assert {len(result.sampled.response_ids) for result in results.values()} == {10, harness.long - 1}

    def test_drain_and_stop(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        harness.engine.submit([request("a", max_tokens=5)])
        assert harness.engine.drain(harness.deadline_s)
        assert "a" in harness.collector.results
        waiting = [request(f"b{index}", max_tokens=harness.long) for index in range(3 * harness.slots)]
        harness.freeze(waiting)
        assert not harness.engine.drain(0)
        harness.engine.stop()
        results = harness.collector.wait([item.request_id for item in waiting])
        # An engine may take them in another order: others may have ended before the first began.
        cut = [result for result in results if len(result.sampled.response_ids) < harness.long]
        assert {result.finish_reason for result in cut} == {"aborted"}
        assert {result.finish_reason for result in results} <= {"aborted", "length"}
        assert 3 <= len(results[0].sampled.response_ids) < harness.long
        assert len(results[-1].sampled.response_ids) == 0
        with pytest.raises(EngineError):
            harness.engine.submit([request("late")])
        with pytest.raises(EngineError):
            harness.engine.update_weights(V2, [], "")
        with pytest.raises(EngineError):
            harness.engine.progress({})
        with pytest.raises(EngineError):
            harness.engine.probe(PROMPT)
        harness.engine.abort(["b0"])
        harness.engine.stop()

    def test_answers_whatever_it_does(self, harness: EngineHarness) -> None:
        """Without weights, decoding, standing still and asleep."""
        harness.engine.ping().result(harness.deadline_s)
        harness.update(V1, harness.constant_weights(10))
        harness.engine.submit([request("a", max_tokens=harness.long)])
        harness.engine.ping().result(harness.deadline_s)
        harness.engine.pause().result(harness.deadline_s)
        harness.engine.ping().result(harness.deadline_s)
        harness.engine.sleep().result(harness.deadline_s)
        harness.engine.ping().result(harness.deadline_s)
        harness.wake()
        harness.collector.wait(["a"])
        harness.engine.stop()
        with pytest.raises(EngineError):
            harness.engine.ping()

    def test_a_stop_refuses_the_swap_that_waits(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        harness.freeze([request("pinned", max_tokens=harness.long, pinned=True)])
        swap = harness.engine.update_weights(V2, harness.constant_weights(11).items(), "")
        harness.engine.stop()
        with pytest.raises(EngineError):
            swap.result(harness.deadline_s)
        [result] = harness.collector.wait(["pinned"])
        assert result.sampled.versions.versions == (V1,)

    def test_a_failing_callback_is_a_reported_failure(self, harness: EngineHarness) -> None:
        asked: list[Future[list[PartialResponse]]] = []

        def explode(_: list[GenerationResult]) -> None:
            asked.append(harness.engine.progress({"a": 1}))
            raise RuntimeError("callback went wrong")

        harness.update(V1, harness.constant_weights(10))
        harness.collector.hook = explode
        harness.engine.submit([request("a", max_tokens=2)])
        assert "callback went wrong" in str(harness.collector.wait_failure())
        assert "callback went wrong" in (harness.engine.status().failure or "")
        with pytest.raises(EngineError, match="callback went wrong"):
            asked[0].result(harness.deadline_s)
        with pytest.raises(EngineError):
            harness.engine.submit([request("b")])
