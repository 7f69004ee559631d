"""The contract of inference engines when weights change while sequences run."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from rollmesh.generators.engines.types import GenerationResult, SwapTimings
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines.harness import (
    PROMPT,
    V1,
    V2,
    V3,
    EngineHarness,
    Weights,
    behind,
    constant_prefix,
    request,
)


class PartsContract:
    """Part of `SwapContract`: the versions of a response's parts, whatever the engine does with their keys."""

    def test_each_part_of_a_response_keeps_its_versions(self, harness: EngineHarness) -> None:
        """A prefix of versions that this engine never had, and a swap while the rest is sampled."""
        emitted = {V1: 10, V2: 11, V3: 12}
        harness.update(V2, harness.constant_weights(11))
        before = harness.freeze(
            [
                behind("same", constant_prefix(11, 5, V2), max_tokens=harness.long),
                behind("older", constant_prefix(10, 9, V1), max_tokens=harness.long),
            ],
            known=2,
        )
        assert before["older"].sampled.versions.runs[0] == (9, V1)
        assert harness.update(V3, harness.constant_weights(12)).in_flight == 2
        harness.resume()
        same, older = harness.collector.wait(["same", "older"])
        drawn = {"same": harness.drawn(before["same"], same), "older": harness.drawn(before["older"], older)}
        assert same.sampled.versions.runs == ((drawn["same"], V2), (harness.long - drawn["same"], V3))
        assert older.sampled.versions.runs == ((9, V1), (drawn["older"] - 9, V2), (harness.long - drawn["older"], V3))
        for result in (same, older):
            assert result.sampled.response_ids.tolist() == [emitted[version] for version in result.sampled.versions]
            assert result.finish_reason == "length"
        assert set(older.sampled.log_probs[:9].tolist()) == {-7.25}
        assert (older.sampled.log_probs[9:] > -0.1).all()


class NewKeysContract(PartsContract):
    """For an engine with another policy than `keep`."""

    def test_tokens_behind_a_swap_are_of_the_new_weights_alone(self, harness: EngineHarness) -> None:
        """Their log-probs are those of one pass of the new weights over the whole, the first tokens included."""
        harness.update(V1, harness.random_weights(4))
        names = [str(index) for index in range(2)]
        before = harness.freeze([request(name, max_tokens=harness.long) for name in names], tokens=10, known=2)
        weights = harness.random_weights(5)
        harness.update(V2, weights)
        harness.resume()
        for result in harness.collector.wait(names):
            drawn, ids = harness.drawn(before[result.request_id], result), result.sampled.response_ids.tolist()
            expected = harness.log_probs(weights, [*PROMPT, *ids])[-len(ids) :]
            assert 0 < drawn < harness.long == len(ids)
            np.testing.assert_allclose(result.sampled.log_probs[drawn:], expected[drawn:], atol=harness.tolerance)


class SwapContract(PartsContract):
    """Part of `EngineContract`."""

    def test_every_token_carries_the_version_that_produced_it(self, harness: EngineHarness) -> None:
        """Each version emits a constant token of its own, and is swapped in while sequences run: nothing is lost."""
        first = PolicyVersion(1, 1)
        emitted = {first: 11}
        harness.update(first, harness.constant_weights(11))
        flow = _Flow(harness)
        swaps: list[SwapTimings] = []
        # On a busy machine all may be done before a swap: then there is another.
        while len(swaps) < 3 or not any(swap.in_flight for swap in swaps):
            version = PolicyVersion(1, len(emitted) + 1)
            emitted[version] = 10 + version.version
            swaps.append(flow.swap(version, harness.constant_weights(emitted[version])))
        later = list(emitted)[1:]
        results = flow.finish()
        seen = set()
        for length, result in zip(flow.lengths, results, strict=True):
            assert len(result.sampled.response_ids) == len(result.sampled.log_probs) == length
            assert [emitted[version] for version in result.sampled.versions] == result.sampled.response_ids.tolist()
            assert sorted(result.sampled.versions) == list(result.sampled.versions)
            assert result.finish_reason == "length"
            seen.update(result.sampled.versions)
        assert {first, later[-1]} <= seen
        assert any(len(result.sampled.versions.runs) > 1 for result in results), "no sequence lived through a swap"
        assert [swap.version for swap in swaps] == later
        assert all(swap.pause_us > 0 for swap in swaps)
        assert harness.engine.drain(harness.deadline_s)
        status = harness.engine.status()
        assert (status.serving, status.digest, status.swaps) == (later[-1], "in flight", len(emitted))
        assert status.tokens_generated == sum(flow.lengths), "tokens were sampled twice"

    def test_a_swap_falls_between_two_tokens(self, harness: EngineHarness) -> None:
        """Sampled tokens stay, with their version."""
        harness.update(V1, harness.constant_weights(10))
        requests = [request(str(index), max_tokens=harness.long) for index in range(harness.slots - 1)]
        before = harness.freeze(requests, tokens=10)
        timings = harness.update(V2, harness.constant_weights(11))
        assert 1 <= len(before) <= timings.in_flight <= len(requests)
        assert timings.in_flight == len(before) or harness.tells_late
        assert timings.digest == str(V2)
        assert harness.engine.status().state == "paused", "a swap does not resume"
        harness.resume()
        for result in harness.collector.wait([asked.request_id for asked in requests]):
            if (part := before.get(result.request_id)) is None:
                # It began last, and perhaps after the swap.
                assert [
                    {V1: 10, V2: 11}[version] for version in result.sampled.versions
                ] == result.sampled.response_ids.tolist()
                continue
            drawn = harness.drawn(part, result)
            assert result.sampled.versions.runs == ((drawn, V1), (harness.long - drawn, V2))
            assert result.sampled.response_ids.tolist() == [10] * drawn + [11] * (harness.long - drawn)

    def test_requests_wait_for_the_first_weights(self, harness: EngineHarness) -> None:
        harness.engine.submit([request("early", max_tokens=3)])
        status = harness.engine.status()
        assert (status.serving, status.queued, status.active) == (None, 1, 0)
        harness.update(V1, harness.constant_weights(7))
        [result] = harness.collector.wait(["early"])
        assert result.sampled.response_ids.tolist() == [7, 7, 7]
        assert result.finish_reason == "length"
        assert list(result.sampled.versions) == [V1] * 3

    def test_weights_that_have_not_changed_get_another_version(self, harness: EngineHarness) -> None:
        """Without a transfer, and without harm to what is running."""
        harness.update(V1, harness.constant_weights(10))
        harness.freeze([request("running", max_tokens=harness.long)], tokens=10)
        engine, digest = harness.engine, str(V1)
        before = engine.status()
        with pytest.raises(WeightsError, match="others are in service"):
            engine.update_weights(V2, None, "another").result(harness.deadline_s)
        assert engine.status().serving == V1
        assert engine.update_weights(V2, None, digest).result(harness.deadline_s).digest == digest
        after = engine.status()
        assert (after.serving, after.digest, after.swaps) == (V2, digest, before.swaps)
        harness.resume()
        engine.submit([request("new", max_tokens=3)])
        running, new = harness.collector.wait(["running", "new"])
        assert running.sampled.response_ids.tolist() == [10] * harness.long
        assert running.sampled.versions.runs[0][1] == V1
        assert new.sampled.versions.runs == ((3, V2),)
        harness.update(V3, harness.constant_weights(11))
        engine.submit([request("next", max_tokens=3)])
        assert harness.collector.wait(["next"])[0].sampled.versions.runs == ((3, V3),)

    def test_a_stop_string_is_found_across_a_swap(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        before = harness.freeze([request("crossing", max_tokens=harness.long, stop=(harness.text([10, 11]),))])
        harness.update(V2, harness.constant_weights(11))
        harness.resume()
        [crossing] = harness.collector.wait(["crossing"])
        drawn = harness.drawn(before["crossing"], crossing)
        assert crossing.finish_reason == "stop"
        assert crossing.sampled.response_ids.tolist() == [10] * drawn + [11]
        assert crossing.sampled.versions.runs == ((drawn, V1), (1, V2))

    def test_a_prefix_cache_is_not_shared_across_versions(self, harness: EngineHarness) -> None:
        """The same long prompt under one version and the next: its keys are those of the version that answers."""
        prompt = [3 + index % 40 for index in range(100)]
        for number, seed in ((1, 4), (2, 5), (3, 4)):
            weights = harness.random_weights(seed)
            harness.update(PolicyVersion(1, number), weights)
            asked = [request(f"{number}.{index}", prompt, max_tokens=6, seed=index + 1) for index in range(2)]
            for result in harness.run(asked):
                harness.check_log_probs(result, weights, prompt)

    def test_a_resumed_learner_rolls_the_engine_back(self, harness: EngineHarness) -> None:
        """A lower version under a higher incarnation replaces what is in service, in flight as any other."""
        ahead, resumed = PolicyVersion(1, 9), PolicyVersion(2, 4)
        harness.update(ahead, harness.constant_weights(10))
        before = harness.freeze([request("long", max_tokens=harness.long)])["long"]
        harness.engine.update_weights(resumed, harness.constant_weights(11).items(), "resumed").result(
            harness.deadline_s
        )
        harness.resume()
        [result] = harness.collector.wait(["long"])
        drawn = harness.drawn(before, result)
        assert result.sampled.versions.runs == ((drawn, ahead), (harness.long - drawn, resumed))
        assert result.sampled.response_ids.tolist() == [10] * drawn + [11] * (harness.long - drawn)
        status = harness.engine.status()
        assert (status.serving, status.digest) == (resumed, "resumed")

    def test_pinned_requests_finish_before_a_swap(self, harness: EngineHarness) -> None:
        """Running ones, and such as come while it waits; free ones do not start meanwhile."""
        harness.update(V1, harness.constant_weights(10))
        lengths = [harness.long] + [15] * (2 * harness.slots - 1)
        pinned = [request(f"pinned{i}", max_tokens=length, pinned=True) for i, length in enumerate(lengths)]
        free = [request(f"free{index}", max_tokens=20) for index in range(harness.slots)]
        mixed = [item for pair in zip(pinned, free, strict=False) for item in pair] + pinned[len(free) :]
        harness.freeze(mixed)
        swap = harness.engine.update_weights(V2, harness.constant_weights(11).items(), "")
        late = [request("late pinned", max_tokens=5, pinned=True), request("late free", max_tokens=5)]
        harness.engine.submit(late)
        harness.resume()
        results = harness.collector.wait([item.request_id for item in (*mixed, *late)])
        for asked, result in zip((*mixed, *late), results, strict=True):
            assert [
                {V1: 10, V2: 11}[version] for version in result.sampled.versions
            ] == result.sampled.response_ids.tolist()
            assert not asked.pinned or result.sampled.versions.versions == (V1,)
        assert swap.result(harness.deadline_s).version == V2
        assert results[-1].sampled.versions.versions == (V2,)

    def test_a_swap_that_waits_can_be_called_off(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        asked = [request("pinned", max_tokens=harness.long, pinned=True), request("free", max_tokens=60)]
        harness.freeze(asked)
        future = harness.engine.update_weights(V2, harness.constant_weights(11).items(), "off")
        assert future.cancel()
        harness.resume()
        for result in harness.collector.wait([item.request_id for item in asked]):
            assert set(result.sampled.response_ids.tolist()) == {10}
        assert harness.engine.status().serving == V1
        harness.update(V3, harness.constant_weights(12))
        assert harness.run([request("last", max_tokens=2)])[0].sampled.response_ids.tolist() == [12, 12]


class _Flow:
    """Keeps all slots of an engine at work, and some requests waiting, while weights are swapped."""

    def __init__(self, harness: EngineHarness) -> None:
        self._harness = harness
        self._draws = np.random.default_rng(0)
        self.lengths: list[int] = []
        self._top_up()

    def swap(self, version: PolicyVersion, weights: Weights) -> SwapTimings:
        """Swaps once further responses have come; the flow continues until it is done."""
        self._next_result()
        done: Future[SwapTimings] = self._harness.engine.update_weights(version, weights.items(), "in flight")
        while not done.done():
            self._next_result()
        return done.result()

    def finish(self) -> list[GenerationResult]:
        """The results, in the order of the requests."""
        return self._harness.collector.wait([str(index) for index in range(len(self.lengths))])

    def _next_result(self) -> None:
        if (count := len(self._harness.collector.results)) < len(self.lengths):
            self._harness.collector.wait_more(count)
        self._top_up()

    def _top_up(self) -> None:
        missing = 2 * self._harness.slots - (len(self.lengths) - len(self._harness.collector.results))
        lengths = self._draws.integers(15, 45, size=max(0, missing)).tolist()
        begin = len(self.lengths)
        self.lengths += lengths
        self._harness.engine.submit(
            [request(str(begin + index), PROMPT, max_tokens=length) for index, length in enumerate(lengths)]
        )
