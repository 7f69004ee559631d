"""The contract of inference engines for pauses, and for the release of their memory."""

from __future__ import annotations

import pytest

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.types import SleepLevel, WakeStep
from rollmesh.mesh.errors import WeightsError
from tests.generators.engines.harness import PROMPT, V1, V2, V3, EngineHarness, request


class PauseContract:
    """Part of `EngineContract`."""

    def test_nothing_is_sampled_while_paused(self, harness: EngineHarness) -> None:
        """Whatever would be sampled after the swaps would carry their versions."""
        harness.update(V1, harness.constant_weights(10))
        before = harness.freeze([request("a", max_tokens=harness.long)])
        harness.engine.submit([request("new", max_tokens=5)])
        for version, token in ((V2, 11), (V3, 12)):
            harness.update(version, harness.constant_weights(token))
            assert harness.engine.status().state == "paused"
            now = harness.progress(["a", "new"], 0)
            assert now.keys() == {"a"}, "what never had a slot is not running"
            assert now["a"].sampled.versions.versions == (V1,)
        harness.engine.pause().result(harness.deadline_s)
        harness.resume()
        running, new = harness.collector.wait(["a", "new"])
        drawn = harness.drawn(before["a"], running)
        assert running.sampled.versions.runs == ((drawn, V1), (harness.long - drawn, V3)), "V2 came and went"
        assert new.sampled.versions.runs == ((5, V3),)
        assert harness.engine.status().state == "running"
        harness.resume()
        assert len(harness.run([request("later", max_tokens=2)])[0].sampled.response_ids) == 2

    def test_requests_end_and_probes_are_answered_while_paused(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        before = harness.freeze([request("runs", max_tokens=harness.long)])
        harness.engine.submit([request("waits")])
        harness.engine.abort(["runs", "waits"])
        runs, waits = harness.collector.wait(["runs", "waits"])
        assert len(runs.sampled.response_ids) >= len(before["runs"].sampled)
        assert len(waits.sampled.response_ids) == 0
        assert {runs.finish_reason, waits.finish_reason} == {"aborted"}
        assert harness.engine.probe(PROMPT).result(harness.deadline_s).version == V1
        assert harness.engine.drain(harness.deadline_s)

    def test_sleep_keeps_tokens_and_weights(self, harness: EngineHarness) -> None:
        """Responses that ran continue as if their tokens had been brought along, as new keys of the same weights make
        it.
        """
        weights = harness.random_weights(8)
        harness.update(V1, weights)
        asked = [
            request(str(index), [5 + index], max_tokens=harness.long, temperature=2.0) for index in range(harness.slots)
        ]
        before = harness.freeze(asked)
        report = harness.engine.sleep().result(harness.deadline_s)
        assert report.freed_bytes > 0 or not harness.sleep_frees
        assert report.seconds > 0
        status = harness.engine.status()
        assert (status.state, status.serving) == ("asleep", V1)
        with pytest.raises(EngineError, match="asleep"):
            harness.engine.resume().result(harness.deadline_s)
        with pytest.raises(EngineError, match="asleep"):
            harness.engine.probe(PROMPT).result(harness.deadline_s)
        harness.engine.submit([request("new", max_tokens=5)])
        asleep = harness.progress([item.request_id for item in asked])
        assert {name: len(part.sampled) for name, part in asleep.items()} == {
            name: len(part.sampled) for name, part in before.items()
        }
        harness.wake()
        names = [item.request_id for item in asked]
        for item, result in zip(asked, harness.collector.wait(names), strict=True):
            if result.request_id in before:
                part = before[result.request_id].sampled
                assert result.sampled.response_ids[: len(part)].tolist() == part.response_ids.tolist()
            assert result.sampled.versions.versions == (V1,)
            harness.check_log_probs(result, weights, item.prompt_ids, temperature=2.0)
        assert len(harness.collector.wait(["new"])[0].sampled.response_ids) == 5
        assert harness.engine.status().state == "running"
        [again] = harness.run([request("again", max_tokens=20)])
        harness.check_log_probs(again, weights, PROMPT)

    @pytest.mark.parametrize("first", ["wake", "update"])
    def test_sleep_without_weights_goes_on_with_the_next(self, harness: EngineHarness, first: str) -> None:
        if not harness.drops_weights:
            pytest.skip("this engine keeps its weights")
        harness.update(V1, harness.constant_weights(10))
        asked = [request("a", max_tokens=harness.long), request("pinned", max_tokens=harness.long, pinned=True)]
        drawn = len(harness.freeze(asked)["a"].sampled)
        report = harness.engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(harness.deadline_s)
        assert report.freed_bytes > 0 or not harness.sleep_frees
        status = harness.engine.status()
        assert (status.state, status.serving, status.digest) == ("asleep", None, "")
        [pinned] = harness.collector.wait(["pinned"])
        assert pinned.finish_reason == "aborted", "nobody can answer it any more"
        with pytest.raises(WeightsError, match="no weights"):
            harness.engine.probe(PROMPT).result(harness.deadline_s)
        if first == "wake":
            harness.wake()
            assert harness.progress(["a"])["a"].sampled.versions.runs == ((drawn, V1),)
            harness.update(V2, harness.constant_weights(11))
        else:
            harness.update(V2, harness.constant_weights(11))
            assert harness.engine.status().serving == V2
            harness.wake()
        [result] = harness.collector.wait(["a"])
        assert result.sampled.versions.runs == ((drawn, V1), (harness.long - drawn, V2))
        assert result.sampled.response_ids.tolist() == [10] * drawn + [11] * (harness.long - drawn)

    def test_weights_come_and_requests_end_while_asleep(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        asked = [request(name, max_tokens=harness.long) for name in ("a", "b")]
        drawn = len(harness.freeze(asked)["a"].sampled)
        harness.engine.sleep().result(harness.deadline_s)
        assert harness.engine.sleep().result(harness.deadline_s).freed_bytes == 0, "twice is as good as once"
        harness.engine.abort(["b"])
        [aborted] = harness.collector.wait(["b"])
        assert aborted.finish_reason == "aborted"
        assert set(aborted.sampled.response_ids.tolist()) <= {10}
        harness.update(V2, harness.constant_weights(11))
        assert harness.engine.status().state == "asleep"
        assert not harness.engine.drain(0), "it waits to be woken"
        harness.engine.wake().result(harness.deadline_s)
        assert harness.engine.status().state == "paused"
        assert harness.engine.weights().result(harness.deadline_s).version == V2
        harness.wake()
        [result] = harness.collector.wait(["a"])
        assert result.sampled.versions.runs == ((drawn, V1), (harness.long - drawn, V2))
        assert result.sampled.response_ids.tolist() == [10] * drawn + [11] * (harness.long - drawn)

    def test_it_wakes_step_by_step_and_may_sleep_again_at_each(self, harness: EngineHarness) -> None:
        if not harness.drops_weights:
            pytest.skip("this engine keeps its weights")
        engine, deadline_s = harness.engine, harness.deadline_s
        harness.update(V1, harness.constant_weights(10))
        drawn = len(harness.freeze([request("a", max_tokens=harness.long)])["a"].sampled)
        engine.sleep().result(deadline_s)
        engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(deadline_s)
        assert engine.status().serving is None, "deeper than before"
        with pytest.raises(WeightsError, match="no weights"):
            engine.weights().result(deadline_s)
        engine.wake(WakeStep.WEIGHTS).result(deadline_s)
        assert engine.status().state == "asleep"
        with pytest.raises(EngineError, match="asleep"):
            engine.resume().result(deadline_s)
        harness.update(V2, harness.constant_weights(11))
        found = engine.weights().result(deadline_s)
        assert (found.version, found.digest) == (V2, str(V2))
        engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(deadline_s)
        assert engine.status().serving is None, "it had come halfway"
        engine.wake(WakeStep.WEIGHTS).result(deadline_s)
        harness.update(V3, harness.constant_weights(12))
        harness.wake()
        [result] = harness.collector.wait(["a"])
        assert result.sampled.versions.runs == ((drawn, V1), (harness.long - drawn, V3))

    @pytest.mark.parametrize("how", ["pause", "sleep"])
    def test_a_stop_ends_what_stands_still(self, harness: EngineHarness, how: str) -> None:
        harness.update(V1, harness.constant_weights(10))
        before = harness.freeze([request("a", max_tokens=harness.long)])
        if how == "sleep":
            harness.engine.sleep().result(harness.deadline_s)
        harness.engine.stop()
        [result] = harness.collector.wait(["a"])
        assert result.finish_reason == "aborted"
        assert len(result.sampled.response_ids) >= len(before["a"].sampled)
        for ask in (harness.engine.pause, harness.engine.resume, harness.engine.sleep, harness.engine.wake):
            with pytest.raises(EngineError):
                ask()
