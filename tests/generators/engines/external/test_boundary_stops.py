"""Stop strings that begin before a job and end in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rollmesh.generators.engines.external.backend import DecodeChunk
from rollmesh.generators.engines.external.boundary_stops import boundary_matcher
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.request_state import RequestState
from rollmesh.generators.engines.external.version_labels import VersionLabels
from rollmesh.generators.engines.types import GenerationRequest, SamplingParams
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from tests.generators.engines.external.driven_harness import LIMITS, tokenizer

V1 = PolicyVersion(1, 1)
# Characters of one to four bytes, most of them several tokens each.
_TEXT = st.text("ab né東🙂", min_size=2, max_size=24)


def _response(ids: list[int], stop: str) -> RequestState:
    prefix = Trajectory.sampled(np.array(ids, np.int32), np.zeros(len(ids), np.float32), VersionRuns(((len(ids), V1),)))
    asked = GenerationRequest("a", [3], SamplingParams(max_tokens=200, stop=(stop,)), prefix=prefix)
    return RequestState(asked, ModelInfo(LIMITS, tokenizer()))


@example(text="né", split=2, begin=1, width=1, stride=1)
@example(text="a東b", split=2, begin=1, width=2, stride=3)
@given(
    text=_TEXT, split=st.integers(1, 60), begin=st.integers(0, 23), width=st.integers(1, 6), stride=st.integers(1, 4)
)
def test_a_match_is_found_where_the_job_alone_cannot(
    text: str, split: int, begin: int, width: int, stride: int
) -> None:
    """For any text and any place at which the job begins: at the token that completes it, and never before."""
    codec = tokenizer()
    ids = codec.encode(text)
    begin %= len(text)
    stop = text[begin : begin + width]
    # The job begins at or before the token that completes the first match.
    first = next(end for end in range(len(ids) + 1) if stop in codec.decode(ids[:end]))
    assume(first > 1)
    split = 1 + split % (first - 1)
    ends = [end for end in range(len(ids) + 1) if stop in codec.decode(ids[:end])]
    response = _response(ids[:split], stop)
    assert response.finish_reason() is None
    labels = VersionLabels()
    labels.add(V1)
    response.next_job("job")
    taken = split
    for start in range(split, len(ids), stride):
        new = ids[start : start + stride]
        taken += response.add(DecodeChunk(new, [-1.0] * len(new), [(len(new), "1.1")]), labels)
        if response.finish is not None:
            break
    begins_before = stop not in codec.decode(ids[split : ends[0]])
    if begins_before:
        assert response.finish == "stop"
    if response.finish is not None:
        assert taken == len(response.ids) == ends[0]
        assert response.result().sampled.versions.runs == ((taken, V1),)


def test_it_is_looked_for_only_as_long_as_it_can_have_begun_before() -> None:
    codec = tokenizer()
    before, after = codec.encode("the quick brown"), codec.encode(" fox jumps over the lazy dog")
    watch = boundary_matcher(codec, ["foxes", "hen"], before)
    assert watch is not None
    pushed = 0
    while not watch.is_past_boundary:
        assert watch.first_match([after[pushed]]) is None
        pushed += 1
    assert 4 <= len(codec.decode(after[:pushed])) < 10
    assert boundary_matcher(codec, ["x", "y"], before) is None


@pytest.mark.parametrize("masked", [True, False])
def test_turns_before_the_last_do_not_count(masked: bool) -> None:
    """A stop string in front of a tool's output was the end of another turn."""
    codec = tokenizer()
    ids = [*codec.encode("over"), *codec.encode(" dog")]
    mask = np.ones(len(ids), np.uint8)
    mask[-1] = 0 if masked else 1
    sampled = Trajectory(np.array(ids, np.int32), np.zeros(len(ids), np.float32), mask, VersionRuns(((len(ids), V1),)))
    asked = GenerationRequest("a", [3], SamplingParams(max_tokens=200, stop=("over",)), prefix=sampled)
    assert RequestState(asked, ModelInfo(LIMITS, codec)).finish_reason() == (None if masked else "stop")
