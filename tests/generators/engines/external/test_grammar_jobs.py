"""A response under a grammar is drawn again where an external engine was interrupted at it."""

from __future__ import annotations

from rollmesh.generators.engines.external.backend import DecodeChunk
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.request_state import RequestState
from rollmesh.generators.engines.external.version_labels import VersionLabels
from rollmesh.generators.engines.types import GenerationRequest, SamplingParams
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines.external.driven_harness import LIMITS, tokenizer

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def test_an_interrupted_response_under_a_grammar_begins_again() -> None:
    sampling = SamplingParams(max_tokens=20, seed=5, grammar='start: "a"')
    response = RequestState(GenerationRequest("a", [3], sampling), ModelInfo(LIMITS, tokenizer()))
    labels = VersionLabels()
    first = response.next_job("first")
    labels.add(V1)
    response.add(DecodeChunk([5, 6], [-1.0, -1.0], [(2, "1.1")]), labels)
    second = response.next_job("second")
    assert (list(second.token_ids), second.sampling) == (list(first.token_ids), first.sampling)
    labels.add(V2)
    response.add(DecodeChunk([7], [-0.5], [(1, "1.2")]), labels)
    response.finish = "stop"
    sampled = response.result().sampled
    assert (sampled.response_ids.tolist(), sampled.versions.runs) == ([7], ((1, V2),))
