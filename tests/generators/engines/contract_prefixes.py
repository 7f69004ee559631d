"""The contract of inference engines for tokens that a request brings along."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollmesh.mesh.trajectory.payload_codec import Trajectory
from tests.generators.engines.harness import (
    V1,
    V2,
    EngineHarness,
    behind,
    constant_prefix,
    prefix_of,
    request,
)


class PrefixContract:
    """Part of `EngineContract`."""

    def test_a_response_goes_on_behind_its_prefix(self, harness: EngineHarness) -> None:
        """Its first tokens stay as they came; the others have the log-probs of one forward pass over the whole."""
        weights = harness.random_weights(4)
        harness.update(V1, weights)
        draws = np.random.default_rng(1)
        requests = []
        for index in range(harness.slots):
            prompt = draws.integers(3, harness.vocabulary, size=draws.integers(1, 20)).tolist()
            requests.append(request(str(index), prompt, max_tokens=int(draws.integers(8, 24)), seed=index + 1))
        again = []
        for asked, result in zip(requests, harness.run(requests), strict=True):
            count = (
                int(draws.integers(1, len(result.sampled.response_ids))) if len(result.sampled.response_ids) > 1 else 0
            )
            name = f"{asked.request_id}+"
            if count:
                again.append(replace(asked, request_id=name, prefix=prefix_of(result, count)))
                again.append(replace(asked, request_id=f"{name}fresh"))
        assert len(again) > harness.slots
        for asked, result in zip(again, harness.run(again), strict=True):
            ids, prefix = result.sampled.response_ids.tolist(), asked.prefix
            assert len(result.sampled.versions) == len(ids) == len(result.sampled.log_probs)
            assert result.sampled.versions.runs == ((len(ids), V1),)
            assert len(ids) == asked.sampling.max_tokens or ids[-1] == harness.eos
            harness.check_log_probs(result, weights, asked.prompt_ids)
            if prefix is not None:
                assert ids[: len(prefix)] == prefix.response_ids.tolist()
                np.testing.assert_array_equal(result.sampled.log_probs[: len(prefix)], prefix.log_probs)
                assert len(ids) > len(prefix)

    def test_draws_behind_a_prefix_are_not_those_of_its_first_tokens(self, harness: EngineHarness) -> None:
        """Over a uniform distribution, of all but the end token, equal draws would give equal tokens."""
        harness.update(V1, harness.uniform_weights())
        [first] = harness.run([request("a", max_tokens=30, seed=11)])
        [second] = harness.run([behind("b", prefix_of(first, 15), max_tokens=30, seed=11)])
        same = first.sampled.response_ids[:15] == second.sampled.response_ids[15:30]
        assert same.mean() < 0.5

    def test_a_complete_prefix_ends_at_once(self, harness: EngineHarness) -> None:
        """Nothing is to be sampled, so not even weights are waited for."""
        stop = harness.text([10, 11])
        prompt = [3] * (harness.context - 2)
        prefixes = {
            "ended": constant_prefix(harness.eos, 1, V1),
            "full": constant_prefix(10, 6, V1),
            "context": constant_prefix(10, 2, V1),
            "stopped": replace(constant_prefix(10, 3, V1), response_ids=np.array([9, 10, 11], np.int32)),
        }
        results = harness.run(
            [
                behind("ended", prefixes["ended"], max_tokens=9),
                behind("full", prefixes["full"], max_tokens=6),
                behind("context", prefixes["context"], prompt, max_tokens=9),
                behind("stopped", prefixes["stopped"], max_tokens=9, stop=(stop,)),
            ]
        )
        assert [result.finish_reason for result in results] == ["stop", "length", "length", "stop"]
        for result in results:
            prefix = prefixes[result.request_id]
            assert result.sampled.response_ids.tolist() == prefix.response_ids.tolist()
            np.testing.assert_array_equal(result.sampled.log_probs, prefix.log_probs)
            assert result.sampled.versions == prefix.versions
        assert harness.engine.drain(harness.deadline_s)
        assert harness.engine.status().tokens_generated == 0

    def test_the_bounds_hold_for_the_whole_response(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        prefix = constant_prefix(10, 3, V1)
        tight = [3] * (harness.context - 5)
        budget, context = harness.run([behind("a", prefix, max_tokens=7), behind("b", prefix, tight, max_tokens=99)])
        assert (len(budget.sampled.response_ids), budget.finish_reason) == (7, "length")
        assert (len(context.sampled.response_ids), context.finish_reason) == (5, "length")
        harness.update(V2, harness.constant_weights(harness.eos))
        [ended] = harness.run([behind("c", prefix, max_tokens=7)])
        assert (ended.sampled.response_ids.tolist(), ended.finish_reason) == ([10, 10, 10, harness.eos], "stop")

    def test_a_stop_string_straddles_prefix_and_new_tokens(self, harness: EngineHarness) -> None:
        harness.update(V2, harness.constant_weights(11))
        prefix = constant_prefix(10, 3, V1)
        stop = (harness.text([10, 11]),)
        across, later = harness.run(
            [
                behind("across", prefix, max_tokens=9, stop=stop),
                behind("later", prefix, max_tokens=9, stop=(harness.text([11, 11, 11]),)),
            ]
        )
        assert (across.sampled.response_ids.tolist(), across.finish_reason) == ([10, 10, 10, 11], "stop")
        assert across.sampled.versions.runs == ((3, V1), (1, V2))
        assert (later.sampled.response_ids.tolist(), later.finish_reason) == ([10] * 3 + [11] * 3, "stop")

    def test_tokens_that_were_not_sampled_stay_masked_and_end_nothing(self, harness: EngineHarness) -> None:
        """A tool's output may hold what would end a response of the model's own."""
        harness.update(V2, harness.constant_weights(11))
        ids = np.array([10, harness.eos, 9, 10, 11, harness.eos], np.int32)
        mask = np.array([1, 1, 0, 0, 0, 0], np.uint8)
        prefix = Trajectory(ids, np.zeros(6, np.float32), mask, constant_prefix(10, 6, V1).versions)
        [result] = harness.run([behind("a", prefix, max_tokens=9, stop=(harness.text([10, 11]),))])
        assert result.sampled.response_ids.tolist() == [*ids.tolist(), 11, 11, 11]
        assert result.sampled.response_mask.tolist() == [*mask.tolist(), 1, 1, 1]
        assert result.sampled.versions.runs == ((6, V1), (3, V2))
        assert result.finish_reason == "length"

    def test_an_aborted_response_keeps_its_prefix(self, harness: EngineHarness) -> None:
        """While it waits, and once it runs."""
        prefix = constant_prefix(10, 3, V1)
        harness.engine.submit([behind("waits", prefix)])
        harness.engine.abort(["waits"])
        [waits] = harness.collector.wait(["waits"])
        assert (waits.sampled.response_ids.tolist(), waits.finish_reason) == ([10] * 3, "aborted")
        harness.update(V2, harness.constant_weights(11))
        before = harness.freeze([behind("runs", prefix, max_tokens=harness.long)])
        harness.engine.abort(["runs"])
        harness.resume()
        [runs] = harness.collector.wait(["runs"])
        assert runs.finish_reason == "aborted"
        assert runs.sampled.response_ids[:4].tolist() == [10, 10, 10, 11]
        assert runs.sampled.versions.runs[0] == (3, V1)
        assert len(before["runs"].sampled) <= len(runs.sampled.response_ids) < harness.long
