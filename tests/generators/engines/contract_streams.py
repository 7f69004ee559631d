"""The contract of inference engines for growing responses: events, and copies of those that run."""

from __future__ import annotations

import numpy as np

from rollmesh.generators.engines.types import GenerationResult
from tests.generators.engines.harness import (
    V1,
    V2,
    EngineHarness,
    behind,
    constant_prefix,
    joined,
    request,
)


def check_events(harness: EngineHarness, result: GenerationResult, brought: int = 0) -> None:
    """One after the other they are the result, but for what was brought; all came before it."""
    found = joined(harness.collector.events, result.request_id)
    assert harness.collector.streamed_at_end[result.request_id] == len(found)
    assert found.response_ids.tolist() == result.sampled.response_ids[brought:].tolist()
    np.testing.assert_array_equal(found.log_probs, result.sampled.log_probs[brought:])
    assert list(found.versions) == list(result.sampled.versions)[brought:]


class StreamContract:
    """Part of `EngineContract`."""

    def test_events_are_the_result(self, harness: EngineHarness) -> None:
        """Those of streamed requests; others have none."""
        harness.update(V1, harness.random_weights(5))
        requests = [
            request(str(index), [3 + index], stream=index % 3 != 0, max_tokens=1 + 2 * index, seed=index + 1)
            for index in range(2 * harness.slots)
        ]
        for asked, result in zip(requests, harness.run(requests), strict=True):
            if asked.stream:
                check_events(harness, result)
            else:
                assert asked.request_id not in harness.collector.streamed

    def test_events_come_while_the_response_grows(self, harness: EngineHarness) -> None:
        """With a prefix, across a swap and up to an abort; the prefix is not told again."""
        harness.update(V1, harness.constant_weights(10))
        prefix, most = constant_prefix(9, 4, V2), 2 * harness.long
        harness.freeze([behind("a", prefix, max_tokens=most), request("b", stream=True, max_tokens=harness.long)])
        assert "a" not in harness.collector.results
        harness.update(V2, harness.constant_weights(11))
        told = harness.collector.streamed["a"]
        # Stops it again, some tokens later.
        harness.collector.when_streamed({"a": told + 5}, lambda: harness.engine.abort(["a"]))
        with harness.slowly(harness.reveals + 5):
            harness.resume()
            [cut] = harness.collector.wait(["a"])
        [whole] = harness.collector.wait(["b"])
        assert (cut.finish_reason, whole.finish_reason) == ("aborted", "length")
        assert told + 5 <= len(cut.sampled.response_ids) - 4 < most - 4
        assert cut.sampled.versions.versions == (V2, V1, V2)
        check_events(harness, cut, brought=4)
        check_events(harness, whole)

    def test_a_stopped_response_streams_up_to_its_end(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        [stopped] = harness.run([request("a", stream=True, max_tokens=30, stop=(harness.text([10] * 7),))])
        assert len(stopped.sampled.response_ids) == 7
        check_events(harness, stopped)
        complete = constant_prefix(harness.eos, 1, V1)
        [nothing] = harness.run([behind("b", complete, stream=True)])
        assert nothing.finish_reason == "stop"
        assert "b" not in harness.collector.streamed

    def test_progress_is_the_beginning_of_the_response(self, harness: EngineHarness) -> None:
        """Copies of what runs; the responses continue undisturbed."""
        harness.update(V1, harness.random_weights(5))
        sampling = {"max_tokens": harness.long, "temperature": 2.0}
        prefix = constant_prefix(10, 4, V2)
        requests = [
            request("long", **sampling),
            behind("behind", prefix, **sampling),
            *[request(f"line{index}", **sampling) for index in range(harness.slots - 2)],
            request("queued", **sampling),
        ]
        found = harness.freeze(requests, tokens=6, known=2)
        assert {"long", "behind"} <= found.keys()
        assert len(found) <= harness.slots, "what has no slot is not running"
        shorter = min(len(found[name].sampled) for name in ("long", "behind"))
        longer = max(len(found[name].sampled) for name in ("long", "behind"))
        assert harness.progress(["unknown"]) == {}
        assert harness.progress(["long", "behind"], longer + 1) == {}
        assert len(harness.progress(["long", "behind"], longer)) == (1 if shorter < longer else 2)
        harness.resume()
        for result, brought in zip(harness.collector.wait(["long", "behind"]), (0, 4), strict=True):
            part = found[result.request_id].sampled
            assert len(part) == len(part.log_probs) == len(part.versions) > brought
            assert part.response_ids.tolist() == result.sampled.response_ids[: len(part)].tolist()
            np.testing.assert_array_equal(part.log_probs, result.sampled.log_probs[: len(part)])
            assert list(part.versions) == [V2] * brought + [V1] * (len(part) - brought)
            assert len(part) < len(result.sampled.response_ids)
            assert 0 < found[result.request_id].running_s < harness.deadline_s

    def test_progress_of_an_idle_engine_is_nothing(self, harness: EngineHarness) -> None:
        harness.engine.submit([request("a")])
        assert harness.progress(["a"], 0) == {}
