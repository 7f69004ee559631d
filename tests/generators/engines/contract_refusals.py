"""Requests that every inference engine must refuse, by name, with nothing changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollmesh.mesh.errors import PayloadError, WeightsError
from rollmesh.mesh.trajectory.versions import VersionRuns
from tests.generators.engines.harness import V1, V2, EngineHarness, behind, constant_prefix, request


class RefusalContract:
    """Part of `EngineContract`."""

    def test_bad_requests_are_refused_by_name(self, harness: EngineHarness) -> None:
        harness.update(V1, harness.constant_weights(10))
        cases = [
            (request("a", [3] * harness.context), "prompt_ids", str(harness.context)),
            (request("a", []), "prompt_ids", "empty"),
            (request("a", [harness.vocabulary]), "prompt_ids", str(harness.vocabulary)),
            (request("a", [-1]), "prompt_ids", "-1"),
            (request("a", temperature=-1.0), "sampling.temperature", "-1"),
            (request("a", temperature=1e-3), "sampling.temperature", "0.001"),
            (request("a", top_p=0.0), "sampling.top_p", "0"),
            (request("a", top_k=-1), "sampling.top_k", "-1"),
            (request("a", top_k=2**31), "sampling.top_k", str(2**31)),
            (request("a", top_k=2**63), "sampling.top_k", str(2**63)),
            (request("a", max_tokens=0), "sampling.max_tokens", "0"),
            (request("a", max_tokens=2**31), "sampling.max_tokens", str(2**31)),
            (request("a", seed=2**63), "sampling.seed", str(2**63)),
            (request("a", stop=("",)), "sampling.stop", "empty"),
            (replace(request("a"), images=(b"\x89PNG",)), "images", "text"),
        ]
        for bad, field, said in cases:
            with pytest.raises(PayloadError) as caught:
                harness.engine.submit([request("good", max_tokens=1), bad])
            assert caught.value.field == field
            assert said in str(caught.value)
        with pytest.raises(PayloadError):
            harness.engine.submit([request("twice"), request("twice")])
        [result] = harness.run([request("good", max_tokens=2)])
        assert result.sampled.response_ids.tolist() == [10, 10]

    def test_bad_prefixes_are_refused(self, harness: EngineHarness) -> None:
        good = constant_prefix(10, 3, V1)
        cases = [
            (behind("a", constant_prefix(10, 0, V1)), "no tokens"),
            (behind("a", replace(good, log_probs=good.log_probs[1:])), "2 log-probs"),
            (behind("a", replace(good, versions=VersionRuns(((4, V1),)))), "4 versions"),
            (behind("a", replace(good, response_mask=np.ones(2, np.uint8))), "mask over 2"),
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

    def test_bad_probes_are_refused(self, harness: EngineHarness) -> None:
        for bad, said in (([3], "1 tokens"), ([3] * (harness.context + 1), str(harness.context)), ([-1, 3], "-1")):
            with pytest.raises(PayloadError, match=said):
                harness.engine.probe(bad)

    @pytest.mark.parametrize("pinned", [False, True])
    def test_a_request_at_which_the_engine_fails_ends_alone(self, harness: EngineHarness, pinned: bool) -> None:
        """Whatever else runs, waits or was submitted with it is answered as if it had not been there."""
        harness.update(V1, harness.constant_weights(10))
        harness.fail_at(9)
        harness.freeze([request("running", max_tokens=harness.long)])
        together = [
            request("beside", [3, 4], max_tokens=7),
            request("bad", [3, 9], max_tokens=7, pinned=pinned),
            request("behind", [4, 5, 6], max_tokens=7),
            request("worse", [9, 4, 5], max_tokens=7, pinned=pinned),
        ]
        harness.engine.submit(together)
        harness.resume()
        for name in ("bad", "worse"):
            [result] = harness.collector.wait([name])
            assert (result.finish_reason, len(result.sampled.response_ids)) == ("aborted", 0)
            assert result.refusal
        for name, tokens in (("running", harness.long), ("beside", 7), ("behind", 7)):
            [result] = harness.collector.wait([name])
            assert (result.finish_reason, result.refusal) == ("length", "")
            assert result.sampled.response_ids.tolist() == [10] * tokens
        # Nor does it hold up a swap, or what comes after it.
        harness.update(V2, harness.constant_weights(11))
        [result] = harness.run([request("later", max_tokens=3)])
        assert result.sampled.response_ids.tolist() == [11] * 3
        assert harness.collector.failure is None

    def test_bad_weights_change_nothing(self, harness: EngineHarness) -> None:
        """Nor for a response in the middle of which they came."""
        good = harness.constant_weights(10)
        harness.update(V1, good)
        first = next(iter(good))
        bad_sets = [
            {name: tensor for name, tensor in harness.constant_weights(11).items() if "layernorm" not in name},
            {**harness.constant_weights(11), "no.such.tensor": torch.zeros(1)},
            {**harness.constant_weights(11), first: torch.zeros(1, 1)},
        ]
        harness.freeze([request("across", max_tokens=harness.long)])
        for bad in bad_sets:
            future = harness.engine.update_weights(V2, bad.items(), "")
            with pytest.raises(WeightsError):
                future.result(harness.deadline_s)
        harness.resume()
        for result in [*harness.collector.wait(["across"]), *harness.run([request("a", max_tokens=4)])]:
            assert set(result.sampled.response_ids.tolist()) == {10}
            assert result.sampled.versions.versions == (V1,)
        status = harness.engine.status()
        assert (status.serving, status.digest, status.swaps) == (V1, str(V1), 1)
