"""Content keys: equal for equal content alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.trajectory.content_key import SIZE, content_key
from rollmesh.protos import reward_pb2

_TEXTS = ("data_source", "prompt", "response", "ground_truth_json", "extra_info_json", "messages_json")
_TEXT = st.text(alphabet="ab\0é", max_size=3)
_ITEMS = st.builds(
    lambda texts, images: reward_pb2.ScoreItem(
        **texts, images=[reward_pb2.ImageReference(uri=uri, sha256=digest) for uri, digest in images]
    ),
    st.fixed_dictionaries(dict.fromkeys(_TEXTS, _TEXT)),
    st.lists(st.tuples(_TEXT, st.binary(max_size=2)), max_size=2),
)


@given(_ITEMS, _ITEMS)
def test_keys_are_equal_where_contents_are(one: reward_pb2.ScoreItem, other: reward_pb2.ScoreItem) -> None:
    assert (content_key(one) == content_key(other)) == (one == other)
    assert len(content_key(one)) == SIZE


@given(_ITEMS)
def test_what_is_no_content_does_not_count(item: reward_pb2.ScoreItem) -> None:
    other = reward_pb2.ScoreItem(
        item_id="1", group_id="g", run="r", trajectory_id="t", attempt=2, policy_version=3, content_key=b"theirs",
        finish_reason="stop", response_ids=[1], token_ends=[1], spans=[reward_pb2.Span(begin=0, end=1)],
    )  # fmt: skip
    other.MergeFrom(item)
    assert content_key(other) == content_key(item)


def test_a_key_is_the_same_in_each_version() -> None:
    item = reward_pb2.ScoreItem(data_source="arithmetic", prompt="1+1=", response="2", ground_truth_json='"2"')
    assert content_key(item).hex() == "5497a88b2b0384bd8aba9dd194b47f1f8bc60e2140bbca6c310b6dda5d7e597e"
