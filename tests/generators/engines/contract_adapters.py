"""Contract of engines that compute with adapters next to their base."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.generators.engines.external.served_adapters import MOST_ADAPTERS
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.adapter import factor_names
from rollmesh.mesh.weights.merging import merge
from tests.generators.engines.harness import PROMPT, ModelHarness, Weights, request

RANK = 4
_SCALE = 2.0
# A layer whose parts engines pack, and one that they do not.
_ADAPTED = ("q_proj.weight", "v_proj.weight", "up_proj.weight", "down_proj.weight")


class AdapterCase:
    """A base and its adapters, by seed."""

    def __init__(self, harness: ModelHarness, of_base: int = 1) -> None:
        self.base = harness.random_weights(of_base)
        self.digest = f"base {of_base}"

    def adapter(self, seed: int) -> AdapterWeights:
        """An adapter that changes the policy much."""
        generator = torch.Generator().manual_seed(seed)
        factors: Weights = {}
        for name, weight in self.base.items():
            if name.endswith(_ADAPTED):
                a, b = factor_names(name)
                factors[a] = 0.2 * torch.randn(RANK, weight.shape[1], generator=generator)
                factors[b] = 0.2 * torch.randn(weight.shape[0], RANK, generator=generator)
                if "down_proj" in name:
                    # Sequences do not end: see `ContractModel.random_weights`.
                    factors[b][0] = 0
        return AdapterWeights(self.base.items, self.digest, factors, _SCALE)

    def merged(self, seed: int) -> Weights:
        """The weights to which it amounts."""
        factors = self.adapter(seed).factors

        def effective(name: str, weight: torch.Tensor) -> torch.Tensor:
            a, b = factor_names(name)
            return merge(weight, factors[a], factors[b], _SCALE) if a in factors else weight

        return {name: effective(name, weight) for name, weight in self.base.items()}


class AdapterContract:
    """A subclass has the fixtures `harness` (`kv: keep`) and `interrupting` (`kv: interrupt`)."""

    @pytest.fixture
    def versions(self) -> Iterator[PolicyVersion]:
        """Versions that no other test has."""
        return (PolicyVersion(1, number) for number in range(1, 100))

    def update(self, harness: ModelHarness, version: PolicyVersion, weights: AdapterWeights) -> None:
        """Swaps an adapter in."""
        harness.engine.update_weights(version, weights, str(version)).result(harness.deadline_s)

    def test_an_engine_computes_the_merged_policy(
        self, harness: ModelHarness, versions: Iterator[PolicyVersion]
    ) -> None:
        case = AdapterCase(harness)
        for seed in range(2):
            version = next(versions)
            self.update(harness, version, case.adapter(seed))
            [found] = harness.run([request(f"of {seed}", max_tokens=12)])
            harness.check_log_probs(found, case.merged(seed), PROMPT)
            assert found.sampled.versions.versions == (version,)
            probe = harness.engine.probe(PROMPT).result(harness.deadline_s)
            assert (probe.version, probe.digest) == (version, str(version))
            np.testing.assert_allclose(probe.log_probs, harness.log_probs(case.merged(seed), PROMPT), atol=1e-3)
            assert np.abs(probe.log_probs - harness.log_probs(case.base, PROMPT)).max() > 0.05

    def test_a_response_finishes_under_its_own_version_next_to_another(
        self, harness: ModelHarness, versions: Iterator[PolicyVersion]
    ) -> None:
        case, first, second = AdapterCase(harness), next(versions), next(versions)
        self.update(harness, first, case.adapter(0))
        harness.freeze([request("old", max_tokens=harness.long)])
        self.update(harness, second, case.adapter(1))
        harness.engine.submit([request("new", max_tokens=12)])
        harness.resume()
        new, old = harness.collector.wait(["new", "old"])
        assert (old.sampled.versions.versions, new.sampled.versions.versions) == ((first,), (second,))
        harness.check_log_probs(old, case.merged(0), PROMPT)
        harness.check_log_probs(new, case.merged(1), PROMPT)

    def test_where_there_is_no_place_for_one_more_all_continue_under_the_newest(
        self, harness: ModelHarness, versions: Iterator[PolicyVersion]
    ) -> None:
        case = AdapterCase(harness)
        names, used, most = [], [], 2 * harness.long
        for seed in range(MOST_ADAPTERS + 1):
            used.append(next(versions))
            self.update(harness, used[-1], case.adapter(seed))
            if seed < MOST_ADAPTERS:
                names.append(f"of {seed}")
                # Those before it are not to end meanwhile.
                harness.freeze([request(names[-1], max_tokens=most)], again=True)
        harness.resume()
        for name, version, found in zip(names, used, harness.collector.wait(names), strict=False):
            assert found.sampled.versions.versions == (version, used[-1]), name

    def test_interrupted_responses_continue_under_the_newest(
        self, interrupting: ModelHarness, versions: Iterator[PolicyVersion]
    ) -> None:
        case, first, second = AdapterCase(interrupting), next(versions), next(versions)
        self.update(interrupting, first, case.adapter(0))
        before = interrupting.freeze([request("across", max_tokens=interrupting.long)])["across"]
        self.update(interrupting, second, case.adapter(1))
        interrupting.resume()
        [across] = interrupting.collector.wait(["across"])
        assert across.sampled.versions.versions == (first, second)
        kept = interrupting.drawn(before, across)
        ids = across.sampled.response_ids.tolist()
        expected = interrupting.log_probs(case.merged(1), [*PROMPT, *ids])[-len(ids) :]
        np.testing.assert_allclose(across.sampled.log_probs[kept:], expected[kept:], atol=interrupting.tolerance)

    def test_another_base_takes_the_place_of_the_first(
        self, harness: ModelHarness, versions: Iterator[PolicyVersion]
    ) -> None:
        for of_base in (1, 2):
            case = AdapterCase(harness, of_base)
            self.update(harness, next(versions), case.adapter(0))
            [found] = harness.run([request(f"on {of_base}", max_tokens=12)])
            harness.check_log_probs(found, case.merged(0), PROMPT)

    def test_an_adapter_that_the_engine_cannot_take_leaves_the_former_in_service(
        self, harness: ModelHarness, versions: Iterator[PolicyVersion]
    ) -> None:
        case, first, second = AdapterCase(harness), next(versions), next(versions)
        self.update(harness, first, case.adapter(0))
        good = case.adapter(1)
        unknown = {name.replace("up_proj", "sideways_proj"): tensor for name, tensor in good.factors.items()}
        bad = AdapterWeights(good.base, good.base_digest, unknown, good.scale)
        with pytest.raises(WeightsError):
            self.update(harness, second, bad)
        [found] = harness.run([request("after", max_tokens=12)])
        harness.check_log_probs(found, case.merged(0), PROMPT)
        assert found.sampled.versions.versions == (first,)
