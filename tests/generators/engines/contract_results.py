"""The contract of inference engines for an ordinary request: form of results, draws, log-probs, ends, probes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollmesh.mesh.errors import WeightsError
from tests.generators.engines.harness import PROMPT, V1, V2, EngineHarness, request


class RefillContract:
    """Part of `ResultContract`: steps of all sizes."""

    def test_many_lengths_through_few_slots(self, harness: EngineHarness) -> None:
        """Slots are refilled; every response has its own length and the log-probs of an independent forward pass."""
        weights = harness.random_weights(1)
        harness.update(V1, weights)
        draws = np.random.default_rng(0)
        requests = []
        for index in range(2 * harness.slots):
            prompt = draws.integers(3, harness.vocabulary, size=draws.integers(1, 20)).tolist()
            for member in range(2):
                length = int(draws.integers(1, 25))
                requests.append(request(f"{index}.{member}", prompt, max_tokens=length, seed=index + 100 * member + 1))
        surprise, entropy = [], []
        for asked, result in zip(requests, harness.run(requests), strict=True):
            ids = result.sampled.response_ids.tolist()
            ended = ids[-1] == harness.eos
            assert result.finish_reason == ("stop" if ended else "length")
            assert ended or len(ids) == asked.sampling.max_tokens
            every = torch.log_softmax(harness.logits(weights, [*asked.prompt_ids, *ids])[-len(ids) - 1 : -1], -1)
            expected = every.gather(1, torch.tensor(ids)[:, None])[:, 0]
            np.testing.assert_allclose(result.sampled.log_probs, expected, atol=harness.tolerance)
            entropy += (-(every.exp() * every).sum(-1)).tolist()
            surprise += (-result.sampled.log_probs).tolist()
        # Over so many tokens the mean of -log p is the mean entropy, unless draws do not follow p.
        assert abs(np.mean(surprise) - np.mean(entropy)) < 5 * np.std(surprise) / len(surprise) ** 0.5
        assert harness.engine.drain(harness.deadline_s)
        status = harness.engine.status()
        assert (status.active, status.queued) == (0, 0)
        assert status.tokens_generated == sum(
            len(result.sampled.response_ids) for result in harness.collector.results.values()
        )


class ResultContract(RefillContract):
    """Part of `EngineContract`."""

    def test_result_form(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.random_weights(0))
        [result] = harness.run([request("a", max_tokens=5)])
        assert result.sampled.response_ids.dtype == np.int32
        assert result.sampled.log_probs.dtype == np.float32
        assert result.sampled.response_ids.shape == result.sampled.log_probs.shape == (len(result.sampled.versions),)
        assert (result.sampled.log_probs <= 0).all()
        assert result.sampled.versions.versions == (V1,)
        assert result.sampled.response_mask.all()

    def test_tokens_for_groups_are_counted_apart(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.random_weights(1))
        ours = request("ours", max_tokens=5, seed=1)
        results = harness.run([ours, replace(request("theirs", max_tokens=9, seed=2), outside=True)])
        status = harness.engine.status()
        assert status.tokens_for_groups == len(results[0].sampled.response_ids)
        assert status.tokens_generated == sum(len(result.sampled.response_ids) for result in results)

    @pytest.mark.parametrize(
        ("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.6, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (1.3, 20, 0.9)]
    )
    def test_log_probs_are_of_the_distribution_drawn_from(
        self, harness: EngineHarness, temperature: float, top_k: int, top_p: float
    ) -> None:
        weights = harness.random_weights(3)
        harness.update(V1, weights)
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_tokens": 10}
        results = harness.run([request(str(index), seed=index + 1, **sampling) for index in range(4)])
        for result in results:
            ids = result.sampled.response_ids.tolist()
            logits = harness.logits(weights, [*PROMPT, *ids])[-len(ids) - 1 : -1]
            for row, token, found in zip(logits, ids, result.sampled.log_probs.tolist(), strict=True):
                # Rounding may put the last token of a nucleus on either side of its border.
                expected = [
                    _filtered(row / temperature, top_k, top_p + slack, joint=harness.joint_filters)[token]
                    for slack in (-1e-4, 0, 1e-4)
                ]
                assert min(abs(found - value) for value in expected) < harness.tolerance, (found, expected)

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
        assert (
            greedy.sampled.response_ids.tolist()
            == single.sampled.response_ids.tolist()
            == nucleus.sampled.response_ids.tolist()
        )
        np.testing.assert_allclose(single.sampled.log_probs, 0, atol=1e-6)
        np.testing.assert_allclose(nucleus.sampled.log_probs, 0, atol=1e-6)
        harness.check_log_probs(greedy, weights, PROMPT)

    def test_members_of_a_group_differ(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.random_weights(2))
        asked = [request(str(index), max_tokens=20) for index in range(6)]
        asked += [request(f"seed{index}", max_tokens=20, seed=index + 1) for index in range(6)]
        together = harness.run(asked)
        for results in (together[:6], together[6:]):
            assert len({tuple(result.sampled.response_ids.tolist()) for result in results}) == 6

    def test_draws_depend_on_the_seed_alone(self, harness: EngineHarness) -> None:
        if not harness.seeded:
            pytest.skip("this engine promises nothing for seeds")
        harness.update(V1, harness.random_weights(2))
        [alone] = harness.run([request("alone", max_tokens=20, seed=5)])
        others = [request(f"other{index}", [9] * (index + 1), max_tokens=15) for index in range(2 * harness.slots)]
        results = harness.run([*others, request("again", max_tokens=20, seed=5)])
        assert results[-1].sampled.response_ids.tolist() == alone.sampled.response_ids.tolist()

    def test_end_token(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(harness.eos))
        [result] = harness.run([request("a", max_tokens=9)])
        assert (result.sampled.response_ids.tolist(), result.finish_reason) == ([harness.eos], "stop")
        assert len(result.sampled.log_probs) == len(result.sampled.versions) == 1

    def test_stop_strings(self, harness: EngineHarness) -> None:
        """A response ends with the token that completes the first match, wherever that lies on token borders."""
        harness.update(V1, harness.random_weights(2))
        [free] = harness.run([request("free", max_tokens=30, temperature=0.0)])
        ids = free.sampled.response_ids.tolist()
        texts = [harness.text(ids[: end + 1]) for end in range(len(ids))]
        whole = texts[-1]
        stops = [whole[begin : begin + width] for begin in range(4, len(whole) - 4, 9) for width in (1, 3)]
        stops = [stop for stop in dict.fromkeys(stops) if stop.isascii()][:8]
        assert stops
        requests = [request(stop, max_tokens=30, temperature=0.0, stop=("never there at all", stop)) for stop in stops]
        for stop, result in zip(stops, harness.run(requests), strict=True):
            first = next(end for end, text in enumerate(texts) if stop in text)
            assert result.sampled.response_ids.tolist() == ids[: first + 1], repr(stop)
            assert result.finish_reason == "stop"
            np.testing.assert_allclose(
                result.sampled.log_probs, free.sampled.log_probs[: first + 1], atol=harness.tolerance
            )

    def test_the_context_bounds_a_response(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        prompt = [3] * (harness.context - 2)
        [result] = harness.run([request("a", prompt, max_tokens=100)])
        assert (len(result.sampled.response_ids), result.finish_reason) == (2, "length")

    def test_a_probe_tells_what_is_served(self, harness: EngineHarness) -> None:
        """Also while sequences run, which continue; what it found stays as it was through later swaps."""
        first, second = harness.random_weights(6), harness.random_weights(7)
        with pytest.raises(WeightsError, match="no weights"):
            harness.engine.probe(PROMPT).result(harness.deadline_s)
        harness.update(V1, first)
        harness.engine.submit([request("beside", max_tokens=harness.long, seed=3)])
        ids = [*PROMPT, 9, 8, 7]
        found = harness.engine.probe(ids).result(harness.deadline_s)
        [beside] = harness.collector.wait(["beside"])
        harness.check_log_probs(beside, first, PROMPT)
        harness.update(V2, second)
        after = harness.engine.probe(ids).result(harness.deadline_s)
        for probe, version, weights in ((found, V1, first), (after, V2, second)):
            assert (probe.version, probe.digest) == (version, str(version))
            assert probe.log_probs.dtype == np.float32
            np.testing.assert_allclose(probe.log_probs, harness.log_probs(weights, ids), atol=harness.tolerance)
            if probe.tensors is not None:
                assert all(torch.equal(probe.tensors[name].cpu(), tensor) for name, tensor in weights.items())


def _filtered(logits: torch.Tensor, top_k: int, top_p: float, *, joint: bool) -> torch.Tensor:
    """Log-probs after top-k, then the smallest nucleus of mass `top_p` of what is left, or (joint) of all."""
    ordered, order = logits.double().sort(descending=True)
    probs = torch.softmax(ordered, -1)
    if top_k:
        ordered[top_k:] = -torch.inf
        probs = probs if joint else torch.softmax(ordered, -1)
    if top_p < 0.999:
        ordered[1:][(probs.cumsum(-1) - probs)[1:] >= top_p] = -torch.inf
    return torch.log_softmax(torch.empty_like(ordered).scatter_(0, order, ordered), -1)
