"""What every inference engine must do with tokens that a request brings along."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from generators.engines.base import (
    GenerationResult,
    SwapTimings,
)
from mesh.errors import PayloadError
from mesh.versions import VersionRuns
from tests.generators.engines.harness import (
    DEADLINE_S,
    V1,
    V2,
    V3,
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
        for index in range(2 * harness.slots):
            prompt = draws.integers(3, harness.vocabulary, size=draws.integers(1, 20)).tolist()
            requests.append(request(str(index), prompt, max_tokens=int(draws.integers(8, 40)), seed=index + 1))
        again = []
        for asked, result in zip(requests, harness.run(requests), strict=True):
            count = int(draws.integers(1, len(result.response_ids))) if len(result.response_ids) > 1 else 0
            name = f"{asked.request_id}+"
            if count:
                again.append(replace(asked, request_id=name, prefix=prefix_of(result, count)))
                again.append(replace(asked, request_id=f"{name}fresh"))
        assert len(again) > harness.slots
        for asked, result in zip(again, harness.run(again), strict=True):
            ids, prefix = result.response_ids.tolist(), asked.prefix
            assert len(result.versions) == len(ids) == len(result.log_probs)
            assert result.versions.runs == ((len(ids), V1),)
            assert len(ids) == asked.sampling.max_tokens or ids[-1] == harness.eos
            expected = harness.log_probs(weights, [*asked.prompt_ids, *ids])[-len(ids) :]
            np.testing.assert_allclose(result.log_probs, expected.numpy(), atol=1e-4)
            if prefix is not None:
                assert ids[: len(prefix)] == prefix.response_ids.tolist()
                np.testing.assert_array_equal(result.log_probs[: len(prefix)], prefix.log_probs)
                assert len(ids) > len(prefix)

    def test_draws_behind_a_prefix_are_not_those_of_its_first_tokens(self, harness: EngineHarness) -> None:
        """Over a near-uniform distribution equal draws would give equal tokens."""
        weights = {name: torch.zeros_like(tensor) for name, tensor in harness.random_weights(0).items()}
        harness.update(V1, weights)
        [first] = harness.run([request("a", max_tokens=30, seed=11)])
        [second] = harness.run([behind("b", prefix_of(first, 15), max_tokens=30, seed=11)])
        same = first.response_ids[:15] == second.response_ids[15:30]
        assert same.mean() < 0.5

    def test_each_part_of_a_response_keeps_its_versions(self, harness: EngineHarness) -> None:
        """A prefix of versions that this engine never had, and a swap while the rest is sampled."""
        harness.update(V2, harness.constant_weights(11))
        swaps: list[Future[SwapTimings]] = []

        def swap_once(_: list[GenerationResult]) -> None:
            if not swaps:
                swaps.append(harness.engine.update_weights(V3, harness.constant_weights(12).items(), ""))

        harness.collector.hook = swap_once
        filler, same, older = harness.run(
            [
                request("filler", max_tokens=4),
                behind("same", constant_prefix(11, 5, V2), max_tokens=40),
                behind("older", constant_prefix(10, 9, V1), max_tokens=40),
            ]
        )
        assert swaps[0].result(DEADLINE_S).in_flight == 2
        assert filler.versions.runs[0][1] == V2
        drawn_by_v2 = same.response_ids.tolist().count(11) - 5
        assert 4 <= drawn_by_v2 < 35
        assert same.versions.runs == ((5 + drawn_by_v2, V2), (35 - drawn_by_v2, V3))
        assert older.versions.runs == ((9, V1), (drawn_by_v2, V2), (31 - drawn_by_v2, V3))
        assert older.response_ids.tolist() == [{V1: 10, V2: 11, V3: 12}[version] for version in older.versions]
        assert set(older.log_probs[:9].tolist()) == {-7.25}
        assert (older.log_probs[9:] > -0.1).all()
        assert same.finish_reason == older.finish_reason == "length"

    def test_a_complete_prefix_ends_at_once(self, harness: EngineHarness) -> None:
        """Nothing is to be sampled, so not even weights are waited for."""
        ended = constant_prefix(harness.eos, 1, V1)
        full = constant_prefix(10, 6, V1)
        context = constant_prefix(10, 2, V1)
        prompt = [3] * (harness.context - 2)
        results = harness.run(
            [
                behind("ended", ended, max_tokens=9),
                behind("full", full, max_tokens=6),
                behind("context", context, prompt, max_tokens=9),
            ]
        )
        assert [result.finish_reason for result in results] == ["stop", "length", "length"]
        for result, prefix in zip(results, (ended, full, context), strict=True):
            assert result.response_ids.tolist() == prefix.response_ids.tolist()
            np.testing.assert_array_equal(result.log_probs, prefix.log_probs)
            assert result.versions == prefix.versions
        assert harness.engine.drain(DEADLINE_S)
        assert harness.engine.status().tokens_generated == 0

    def test_the_bounds_hold_for_the_whole_response(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        prefix = constant_prefix(10, 3, V1)
        tight = [3] * (harness.context - 5)
        budget, context = harness.run([behind("a", prefix, max_tokens=7), behind("b", prefix, tight, max_tokens=99)])
        assert (len(budget.response_ids), budget.finish_reason) == (7, "length")
        assert (len(context.response_ids), context.finish_reason) == (5, "length")
        harness.update(V2, harness.constant_weights(harness.eos))
        [ended] = harness.run([behind("c", prefix, max_tokens=7)])
        assert (ended.response_ids.tolist(), ended.finish_reason) == ([10, 10, 10, harness.eos], "stop")

    def test_bad_prefixes_are_refused(self, harness: EngineHarness) -> None:
        good = constant_prefix(10, 3, V1)
        cases = [
            (behind("a", constant_prefix(10, 0, V1)), "no tokens"),
            (behind("a", replace(good, log_probs=good.log_probs[1:])), "2 log-probs"),
            (behind("a", replace(good, versions=VersionRuns(((4, V1),)))), "4 versions"),
            (behind("a", constant_prefix(harness.vocabulary, 3, V1)), str(harness.vocabulary)),
            (behind("a", good, max_tokens=2), "max_tokens 2"),
            (behind("a", good, [3] * (harness.context - 2)), "room for 2"),
            (behind("a", good, pinned=True), "pinned"),
        ]
        for bad, said in cases:
            with pytest.raises(PayloadError) as caught:
                harness.engine.submit([bad])
            assert caught.value.field == "prefix"
            assert said in str(caught.value)
        assert harness.engine.drain(0)

    def test_an_aborted_response_keeps_its_prefix(self, harness: EngineHarness) -> None:
        """While it waits, and once it runs."""
        prefix = constant_prefix(10, 3, V1)
        harness.engine.submit([behind("waits", prefix)])
        harness.engine.abort(["waits"])
        [waits] = harness.collector.wait(["waits"])
        assert (waits.response_ids.tolist(), waits.finish_reason) == ([10] * 3, "aborted")
        harness.update(V2, harness.constant_weights(11))

        def abort(_: list[GenerationResult]) -> None:
            harness.engine.abort(["runs"])

        harness.collector.hook = abort
        _, runs = harness.run([request("filler", max_tokens=5), behind("runs", prefix, max_tokens=200)])
        assert runs.finish_reason == "aborted"
        assert runs.response_ids[:4].tolist() == [10, 10, 10, 11]
        assert runs.versions.runs[0] == (3, V1)
