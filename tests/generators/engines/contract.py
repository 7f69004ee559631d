"""What every inference engine must do, whatever runs inside: a suite to inherit from.

A subclass provides the fixture `harness` (an `EngineHarness`) and may narrow nothing. Tests wait for events with
deadlines; none sleeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from generators.engines.base import (
    EngineError,
    GenerationResult,
    PartialResponse,
    SwapTimings,
)
from mesh.errors import PayloadError, WeightsError
from mesh.versions import PolicyVersion
from tests.generators.engines.contract_prefixes import PrefixContract
from tests.generators.engines.harness import (
    DEADLINE_S,
    PROMPT,
    V1,
    V2,
    V3,
    EngineHarness,
    behind,
    constant_prefix,
    request,
)


class EngineContract(PrefixContract):
    """The tests."""

    @pytest.fixture
    def harness(self) -> Iterator[EngineHarness]:
        raise NotImplementedError

    def test_requests_wait_for_the_first_weights(self, harness: EngineHarness) -> None:
        harness.engine.submit([request("early", max_tokens=3)])
        status = harness.engine.status()
        assert (status.serving, status.queued, status.active) == (None, 1, 0)
        harness.update(V1, harness.constant_weights(7))
        [result] = harness.collector.wait(["early"])
        assert result.response_ids.tolist() == [7, 7, 7]
        assert result.finish_reason == "length"
        assert list(result.versions) == [V1] * 3

    def test_result_form(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.random_weights(0))
        [result] = harness.run([request("a", max_tokens=5)])
        assert result.response_ids.dtype == np.int32
        assert result.log_probs.dtype == np.float32
        assert result.response_ids.shape == result.log_probs.shape == (len(result.versions),)
        assert (result.log_probs <= 0).all()

    def test_many_lengths_through_few_slots(self, harness: EngineHarness) -> None:
        """Slots are refilled; every response has its own length and the log-probs of an independent forward pass."""
        weights = harness.random_weights(1)
        harness.update(V1, weights)
        draws = np.random.default_rng(0)
        requests = []
        for index in range(4 * harness.slots):
            prompt = draws.integers(3, harness.vocabulary, size=draws.integers(1, 20)).tolist()
            for member in range(2):
                length = int(draws.integers(1, 30))
                requests.append(request(f"{index}.{member}", prompt, max_tokens=length, seed=index + 100 * member + 1))
        for asked, result in zip(requests, harness.run(requests), strict=True):
            ids = result.response_ids.tolist()
            assert len(ids) == asked.sampling.max_tokens or ids[-1] == harness.eos
            expected = harness.log_probs(weights, [*asked.prompt_ids, *ids])[-len(ids) :]
            np.testing.assert_allclose(result.log_probs, expected.numpy(), atol=1e-4)
        assert harness.engine.drain(DEADLINE_S)
        status = harness.engine.status()
        assert (status.active, status.queued) == (0, 0)
        assert status.tokens_generated == sum(len(result.response_ids) for result in harness.collector.results.values())

    def test_draws_do_not_depend_on_neighbours(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.random_weights(2))
        [alone] = harness.run([request("alone", max_tokens=20, seed=5)])
        others = [request(f"other{index}", [9] * (index + 1), max_tokens=25) for index in range(2 * harness.slots)]
        results = harness.run([*others, request("again", max_tokens=20, seed=5)])
        assert results[-1].response_ids.tolist() == alone.response_ids.tolist()

    def test_members_of_a_group_differ(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.random_weights(2))
        members = harness.run([request(str(index), max_tokens=20) for index in range(6)])
        assert len({tuple(result.response_ids.tolist()) for result in members}) == 6

    def test_end_token(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(harness.eos))
        [result] = harness.run([request("a", max_tokens=9)])
        assert (result.response_ids.tolist(), result.finish_reason) == ([harness.eos], "stop")

    def test_every_token_carries_the_version_that_produced_it(self, harness: EngineHarness) -> None:
        """Each version emits a constant token of its own, and is swapped in while sequences run."""
        emitted = {V1: 10, V2: 11, V3: 12}
        harness.update(V1, harness.constant_weights(emitted[V1]))
        swaps: list[Future[SwapTimings]] = []

        def swap_after_results(_: list[GenerationResult]) -> None:
            # Runs in the engine's thread, so that each swap falls between the two steps that follow a known event.
            for version in (V2, V3)[len(swaps) : len(swaps) + 1]:
                weights = harness.constant_weights(emitted[version])
                swaps.append(harness.engine.update_weights(version, weights.items(), "in flight"))

        harness.collector.hook = swap_after_results
        requests = [
            request(str(index), max_tokens=length) for index, length in enumerate([5, 9, 40, 40, 17, 3, 60, 60, 60, 33])
        ]
        results = harness.run(requests)
        seen = set()
        for asked, result in zip(requests, results, strict=True):
            assert len(result.response_ids) == asked.sampling.max_tokens
            assert [emitted[version] for version in result.versions] == result.response_ids.tolist()
            seen.update(result.versions)
        assert seen == set(emitted)
        assert any(len(result.versions.runs) > 1 for result in results), "no sequence lived through a swap"
        assert [swap.result(DEADLINE_S).version for swap in swaps] == [V2, V3]
        assert swaps[0].result().in_flight > 0
        assert swaps[0].result().pause_us > 0
        status = harness.engine.status()
        assert (status.serving, status.digest, status.swaps) == (V3, "in flight", 3)

    def test_swap_after_swap_loses_nothing(self, harness: EngineHarness) -> None:
        """Each result brings the next version: every response keeps its length and says which version drew what."""
        emitted = {PolicyVersion(1, number): 10 + number for number in range(1, 60)}
        waiting = [version for version in emitted if version != V1]
        harness.update(V1, harness.constant_weights(emitted[V1]))
        swaps: list[Future[SwapTimings]] = []

        def swap(_: list[GenerationResult]) -> None:
            version = waiting.pop(0)
            weights = harness.constant_weights(emitted[version])
            swaps.append(harness.engine.update_weights(version, weights.items(), ""))

        harness.collector.hook = swap
        requests = [request(str(index), max_tokens=5 + 7 * index % 60) for index in range(4 * harness.slots)]
        results = harness.run(requests)
        for asked, result in zip(requests, results, strict=True):
            assert len(result.response_ids) == len(result.log_probs) == asked.sampling.max_tokens
            assert [emitted[version] for version in result.versions] == result.response_ids.tolist()
            assert result.finish_reason == "length"
        assert max(len(result.versions.runs) for result in results) > 3
        assert harness.engine.drain(DEADLINE_S)
        assert sum(swap.result(DEADLINE_S).in_flight > 0 for swap in swaps) > 3
        tokens = sum(len(result.response_ids) for result in results)
        assert harness.engine.status().tokens_generated == tokens, "tokens were sampled twice"

    def test_a_stop_string_is_found_across_a_swap(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        swaps: list[Future[SwapTimings]] = []

        def swap_once(_: list[GenerationResult]) -> None:
            if not swaps:
                swaps.append(harness.engine.update_weights(V2, harness.constant_weights(11).items(), ""))

        harness.collector.hook = swap_once
        stop = (harness.text([10, 11]),)
        _, crossing = harness.run([request("filler", max_tokens=6), request("crossing", max_tokens=200, stop=stop)])
        assert crossing.finish_reason == "stop"
        assert crossing.response_ids.tolist() == [10] * (len(crossing.response_ids) - 1) + [11]
        assert crossing.versions.runs == ((len(crossing.response_ids) - 1, V1), (1, V2))

    def test_a_resumed_learner_rolls_the_engine_back(self, harness: EngineHarness) -> None:
        """A lower version under a higher incarnation replaces what is in service, in flight as any other."""
        ahead, resumed = PolicyVersion(1, 9), PolicyVersion(2, 4)
        harness.update(ahead, harness.constant_weights(10))
        swaps: list[Future[SwapTimings]] = []

        def roll_back(_: list[GenerationResult]) -> None:
            if not swaps:
                swaps.append(harness.engine.update_weights(resumed, harness.constant_weights(11).items(), "resumed"))

        harness.collector.hook = roll_back
        _, result = harness.run([request("filler", max_tokens=5), request("long", max_tokens=100)])
        assert [version for _, version in result.versions.runs] == [ahead, resumed]
        assert [{ahead: 10, resumed: 11}[version] for version in result.versions] == result.response_ids.tolist()
        status = harness.engine.status()
        assert (status.serving, status.digest) == (resumed, "resumed")

    def test_a_swap_that_waits_can_be_called_off(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        asked = []

        def ask(_: object) -> None:
            harness.collector.hook = None
            future = harness.engine.update_weights(V2, harness.constant_weights(11).items(), "off")
            asked.append(future.cancel())

        harness.collector.hook = ask
        first, pinned = request("first", max_tokens=3), request("pinned", max_tokens=40, pinned=True)
        for result in harness.run([first, pinned, request("later", max_tokens=60)]):
            assert set(result.response_ids.tolist()) == {10}
        assert asked == [True]
        assert harness.engine.status().serving == V1
        harness.update(V3, harness.constant_weights(12))
        assert harness.run([request("last", max_tokens=2)])[0].response_ids.tolist() == [12, 12]

    def test_pinned_requests_finish_before_a_swap(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        swaps: list[Future[SwapTimings]] = []

        def swap_once(_: list[GenerationResult]) -> None:
            if not swaps:
                swaps.append(harness.engine.update_weights(V2, harness.constant_weights(11).items(), ""))

        harness.collector.hook = swap_once
        count = 2 * harness.slots
        pinned = [request(f"pinned{index}", max_tokens=12, pinned=True) for index in range(count)]
        free = [request(f"free{index}", max_tokens=3 + index) for index in range(count)]
        mixed = [item for pair in zip(free, pinned, strict=True) for item in pair]
        results = {result.request_id: result for result in harness.run(mixed)}
        for item in pinned:
            assert list(results[item.request_id].versions) == [V1] * 12
        assert V2 in {version for item in free for version in results[item.request_id].versions}
        for result in results.values():
            assert [{V1: 10, V2: 11}[version] for version in result.versions] == result.response_ids.tolist()
        assert swaps[0].result(DEADLINE_S).version == V2

    def test_bad_weights_change_nothing(self, harness: EngineHarness) -> None:
        good = harness.constant_weights(10)
        harness.update(V1, good)
        first = next(iter(good))
        bad_sets = [
            {name: tensor for name, tensor in harness.constant_weights(11).items() if "layernorm" not in name},
            {**harness.constant_weights(11), "no.such.tensor": torch.zeros(1)},
            {**harness.constant_weights(11), first: torch.zeros(1, 1)},
        ]
        for bad in bad_sets:
            future = harness.engine.update_weights(V2, bad.items(), "")
            with pytest.raises(WeightsError):
                future.result(DEADLINE_S)
        [result] = harness.run([request("a", max_tokens=4)])
        assert result.response_ids.tolist() == [10] * 4
        assert list(result.versions) == [V1] * 4

    def test_bad_requests_are_refused_by_name(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        cases = [
            (request("a", [3] * harness.context), "prompt_ids", str(harness.context)),
            (request("a", []), "prompt_ids", "empty"),
            (request("a", [harness.vocabulary]), "prompt_ids", str(harness.vocabulary)),
            (request("a", [-1]), "prompt_ids", "-1"),
            (request("a", temperature=-1.0), "sampling.temperature", "-1"),
            (request("a", top_p=0.0), "sampling.top_p", "0"),
            (request("a", top_k=-1), "sampling.top_k", "-1"),
            (request("a", max_tokens=0), "sampling.max_tokens", "0"),
            (request("a", stop=("",)), "sampling.stop", "empty"),
        ]
        for bad, field, said in cases:
            with pytest.raises(PayloadError) as caught:
                harness.engine.submit([request("good", max_tokens=1), bad])
            assert caught.value.field == field
            assert said in str(caught.value)
        with pytest.raises(PayloadError):
            harness.engine.submit([request("twice"), request("twice")])
        [result] = harness.run([request("good", max_tokens=2)])
        assert result.response_ids.tolist() == [10, 10]

    def test_the_context_bounds_a_response(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        prompt = [3] * (harness.context - 2)
        [result] = harness.run([request("a", prompt, max_tokens=100)])
        assert (len(result.response_ids), result.finish_reason) == (2, "length")

    def test_abort(self, harness: EngineHarness) -> None:
        """Running and queued requests end as aborted; others go on."""
        harness.update(V1, harness.constant_weights(10))
        long = harness.context - 10

        def abort_rest(_: list[GenerationResult]) -> None:
            harness.collector.hook = None
            harness.engine.abort(["unknown", "running", "queued"])

        harness.collector.hook = abort_rest
        fillers = [request(f"filler{index}", [5], max_tokens=long) for index in range(harness.slots - 2)]
        asked = [
            request("first", max_tokens=5),
            request("running", max_tokens=long),
            *fillers,
            *[request(f"line{index}", max_tokens=long) for index in range(2)],
            request("queued", max_tokens=long),
        ]
        results = {result.request_id: result for result in harness.run(asked)}
        assert results["running"].finish_reason == "aborted"
        assert results["running"].response_ids.tolist() == [10] * len(results["running"].versions)
        assert 5 <= len(results["running"].response_ids) < long
        assert results["queued"].finish_reason == "aborted"
        assert len(results["queued"].response_ids) == len(results["queued"].versions) == 0
        assert {results[item.request_id].finish_reason for item in fillers} == {"length"}

    # --- snapshots ---

    def test_progress_is_the_beginning_of_the_response(self, harness: EngineHarness) -> None:
        """Copies of what runs, as it is between two steps; the responses go on undisturbed."""
        harness.update(V1, harness.random_weights(5))
        asked: list[Future[list[PartialResponse]]] = []

        def ask(_: list[GenerationResult]) -> None:
            harness.collector.hook = None
            known = dict.fromkeys(("filler", "long", "behind", "queued", "unknown"), 1)
            asked.append(harness.engine.progress(known))
            asked.append(harness.engine.progress({"long": 1000, "behind": 9}))

        harness.collector.hook = ask
        sampling = {"max_tokens": harness.context - 10, "temperature": 5.0}
        prefix = constant_prefix(10, 4, V2)
        requests = [
            request("filler", max_tokens=6),
            request("long", **sampling),
            behind("behind", prefix, **sampling),
            *[request(f"line{index}", **sampling) for index in range(harness.slots - 3)],
            request("next", **sampling),
            request("queued", **sampling),
        ]
        harness.engine.submit(requests)
        harness.collector.wait(["filler"])
        found = {part.request_id: part for part in asked[0].result(DEADLINE_S)}
        assert found.keys() == {"long", "behind"}, "neither what has ended nor what waits"
        assert [part.request_id for part in asked[1].result(DEADLINE_S)] == ["behind"], "the other one is too short"
        results = harness.collector.wait(["long", "behind"])
        for result, drawn, brought in zip(results, (6, 6), (0, 4), strict=True):
            part = found[result.request_id].sampled
            assert len(part) == len(part.log_probs) == len(part.versions) >= drawn + brought
            assert part.response_ids.tolist() == result.response_ids[: len(part)].tolist()
            np.testing.assert_array_equal(part.log_probs, result.log_probs[: len(part)])
            assert list(part.versions) == [V2] * brought + [V1] * (len(part) - brought)
            assert len(part) < len(result.response_ids)
            assert 0 < found[result.request_id].running_s < DEADLINE_S

    def test_progress_of_an_idle_engine_is_nothing(self, harness: EngineHarness) -> None:
        harness.engine.submit([request("a")])
        assert harness.engine.progress({"a": 0}).result(DEADLINE_S) == []

    # --- probes ---

    def test_a_probe_tells_what_is_served(self, harness: EngineHarness) -> None:
        """Also while sequences run, which go on undisturbed; what it found stays as it was through later swaps."""
        first, second = harness.random_weights(6), harness.random_weights(7)
        with pytest.raises(WeightsError, match="no weights"):
            harness.engine.probe(PROMPT).result(DEADLINE_S)
        harness.update(V1, first)
        sampling = {"max_tokens": 80, "seed": 3}
        [alone] = harness.run([request("alone", **sampling)])
        harness.engine.submit([request("beside", **sampling)])
        ids = [*PROMPT, 9, 8, 7]
        found = harness.engine.probe(ids).result(DEADLINE_S)
        [beside] = harness.collector.wait(["beside"])
        assert beside.response_ids.tolist() == alone.response_ids.tolist()
        harness.update(V2, second)
        after = harness.engine.probe(ids).result(DEADLINE_S)
        for probe, version, weights in ((found, V1, first), (after, V2, second)):
            assert (probe.version, probe.digest) == (version, str(version))
            assert probe.log_probs.dtype == np.float32
            np.testing.assert_allclose(probe.log_probs, harness.log_probs(weights, ids).numpy(), atol=1e-4)
            if probe.tensors is not None:
                assert all(torch.equal(probe.tensors[name].cpu(), tensor) for name, tensor in weights.items())

    def test_bad_probes_are_refused(self, harness: EngineHarness) -> None:
        for bad, said in (([3], "1 tokens"), ([3] * (harness.context + 1), str(harness.context)), ([-1, 3], "-1")):
            with pytest.raises(PayloadError, match=said):
                harness.engine.probe(bad)

    def test_greedy_and_filters_keep_to_the_most_likely(self, harness: EngineHarness) -> None:
        """top_k 1 draws what greedy draws, with certainty; greedy log-probs are those of temperature 1."""
        weights = harness.random_weights(3)
        harness.update(V1, weights)
        greedy, single, nucleus = harness.run(
            [
                request("greedy", max_tokens=12, temperature=0.0),
                request("single", max_tokens=12, top_k=1),
                request("nucleus", max_tokens=12, top_p=1e-6),
            ]
        )
        assert greedy.response_ids.tolist() == single.response_ids.tolist() == nucleus.response_ids.tolist()
        np.testing.assert_allclose(single.log_probs, 0, atol=1e-6)
        np.testing.assert_allclose(nucleus.log_probs, 0, atol=1e-6)
        expected = harness.log_probs(weights, [*PROMPT, *greedy.response_ids.tolist()])[-12:]
        np.testing.assert_allclose(greedy.log_probs, expected.numpy(), atol=1e-4)

    def test_drain_and_stop(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        harness.engine.submit([request("a", max_tokens=5)])
        assert harness.engine.drain(DEADLINE_S)
        assert "a" in harness.collector.results
        harness.engine.submit([request(f"b{index}", max_tokens=harness.context - 10) for index in range(30)])
        harness.engine.stop()
        results = harness.collector.wait([f"b{index}" for index in range(30)])
        assert "aborted" in {result.finish_reason for result in results}
        with pytest.raises(EngineError):
            harness.engine.submit([request("late")])
        with pytest.raises(EngineError):
            harness.engine.update_weights(V2, [], "")
        with pytest.raises(EngineError):
            harness.engine.progress({})
        with pytest.raises(EngineError):
            harness.engine.probe(PROMPT)
        harness.engine.stop()

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
            asked[0].result(DEADLINE_S)
        with pytest.raises(EngineError):
            harness.engine.submit([request("b")])
