"""Tokens in any split into events, across any updates: all is true, and told at once where it can be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.sglang.version_attribution import Event, EventReader, VersionAttributor

# Tokens that each of several versions, one after the other, has sampled; and how the tokens are split into events.
_HISTORIES = st.lists(st.integers(0, 6), min_size=1, max_size=5)
_SPLITS = st.lists(st.integers(1, 4), min_size=40, max_size=40)


def _event(begin: int, end: int, version: str, spans: list[dict[str, Any]] | None = None) -> Event:
    meta: dict[str, Any] = {"weight_version": version}
    if spans is not None:
        meta["weight_versions"] = spans
    return Event(list(range(begin, end)), [-float(i) for i in range(begin, end)], "length" if spans else None, "", meta)


def _spans(lengths: list[int]) -> list[dict[str, Any]]:
    """As the server gives them: versions without tokens are left out."""
    found, begin = [], 0
    for index, length in enumerate(lengths):
        if length:
            found.append({"version": f"v{index}", "start": begin, "end": begin + length})
        begin += length
    return found


def _told(
    attributor: VersionAttributor, lengths: list[int], splits: list[int], known_at: int
) -> list[tuple[int, str, int]]:
    """Runs a history through a stamper; (token, label, index of the event with which it was told) of each."""
    truth = [f"v{index}" for index, length in enumerate(lengths) for _ in range(length)]
    told: list[tuple[int, str, int]] = []
    begin, splits = 0, list(splits)
    event_index = 0
    while begin < len(truth):
        end = min(len(truth), begin + splits.pop())
        # An update has begun before its first token was sampled, and perhaps some time before that.
        attributor.saw_update = attributor.saw_update or truth[end - 1] != "v0" or begin >= known_at
        spans = _spans(lengths) if end == len(truth) else None
        ids, log_probs, runs = attributor.add(_event(begin, end, truth[end - 1], spans))
        labels = [label for length, label in runs for _ in range(length)]
        assert len(ids) == len(log_probs) == len(labels)
        assert log_probs == [-float(token) for token in ids]
        told += [(token, label, event_index) for token, label in zip(ids, labels, strict=True)]
        begin, event_index = end, event_index + 1
    return told


@given(lengths=_HISTORIES, splits=_SPLITS, known_at=st.integers(0, 30), one_front=st.booleans())
def test_every_token_is_told_once_in_order_with_its_version(
    lengths: list[int], splits: list[int], known_at: int, one_front: bool
) -> None:
    lengths[0] += 1
    told = _told(VersionAttributor("v0", one_front=one_front), lengths, splits, known_at)
    truth = [f"v{index}" for index, length in enumerate(lengths) for _ in range(length)]
    assert [(token, label) for token, label, _ in told] == list(enumerate(truth))


@given(lengths=_HISTORIES, splits=_SPLITS, lag=st.integers(0, 5))
def test_a_version_that_a_late_event_bears_does_not_mislead(lengths: list[int], splits: list[int], lag: int) -> None:
    """The news of an update may overtake tokens: then they bear a newer version than the one that sampled them."""
    lengths[0] += 1
    truth = [f"v{index}" for index, length in enumerate(lengths) for _ in range(length)]
    attributor, told, begin = VersionAttributor("v0", one_front=True), [], 0
    while begin < len(truth):
        end = min(len(truth), begin + splits.pop())
        attributor.saw_update = True
        borne = truth[min(len(truth) - 1, end - 1 + lag)]
        ids, _, runs = attributor.add(_event(begin, end, borne, _spans(lengths) if end == len(truth) else None))
        told += zip(ids, [label for length, label in runs for _ in range(length)], strict=True)
        begin = end
    assert told == list(enumerate(truth))


def test_an_event_that_may_hold_tokens_of_two_versions_is_held_back_and_all_behind_it() -> None:
    attributor = VersionAttributor("v0", one_front=True)
    assert attributor.add(_event(0, 3, "v0"))[2] == [(3, "v0")]
    attributor.saw_update = True
    assert attributor.add(_event(3, 5, "v0"))[2] == [(2, "v0")]
    assert attributor.add(_event(5, 7, "v1")) == ([], [], [])
    assert attributor.add(_event(7, 8, "v1")) == ([], [], [])
    assert (attributor.total, attributor.undecided[0]) == (8, [5, 6, 7])
    ids, _, runs = attributor.add(_event(8, 9, "v1", _spans([6, 3])))
    assert (ids, runs) == ([5, 6, 7, 8], [(1, "v0"), (3, "v1")])


def test_with_several_fronts_nothing_is_told_behind_an_update_until_the_end() -> None:
    attributor = VersionAttributor("v0", one_front=False)
    attributor.add(_event(0, 1, "v0"))
    attributor.saw_update = True
    assert attributor.add(_event(1, 2, "v0")) == ([], [], [])
    assert attributor.add(_event(2, 3, "v1")) == ([], [], [])
    assert attributor.add(_event(3, 4, "v1", _spans([2, 2])))[2] == [(1, "v0"), (2, "v1")]


@pytest.mark.parametrize(
    "spans",
    [
        [{"version": "v1", "start": 0, "end": 4}],
        [{"version": "v0", "start": 0, "end": 1}, {"version": "v1", "start": 1, "end": 4}],
        [{"version": "v0", "start": 0, "end": 3}],
        [{"version": "v0", "start": 0, "end": 2}, {"version": "v0", "start": 3, "end": 4}],
        [],
    ],
)
def test_spans_that_contradict_what_was_said_or_leave_tokens_out_are_an_error(spans: list[dict[str, Any]]) -> None:
    attributor = VersionAttributor("v0", one_front=True)
    attributor.add(_event(0, 3, "v0"))
    last = Event([3], [-3.0], "stop", "", {"weight_version": "v0", "weight_versions": spans})
    with pytest.raises(EngineError):
        attributor.add(last)


# --- events ---


def _data(ids: list[int], total: int, **meta: Any) -> dict[str, Any]:
    entries = [[-float(token), token, None] for token in ids]
    return {"output_ids": ids, "meta_info": {"completion_tokens": total, "output_token_logprobs": entries, **meta}}


@pytest.mark.parametrize("incremental", [True, False])
def test_events_are_read_by_the_count_of_their_tokens(incremental: bool) -> None:
    reader = EventReader(incremental=incremental, filtered=False)
    parts = [[5], [6, 7], []] if incremental else [[5], [5, 6, 7], [5, 6, 7]]
    events = [reader.read(_data(ids, total)) for ids, total in zip(parts, (1, 3, 3), strict=True)]
    assert [event.token_ids for event in events] == [[5], [6, 7], []]
    assert [event.log_probs for event in events] == [[-5.0], [-6.0, -7.0], []]
    assert [event.reason for event in events] == [None] * 3


def test_a_last_event_that_repeats_tokens_brings_none() -> None:
    reader = EventReader(incremental=True, filtered=False)
    reader.read(_data([5, 6], 2))
    last = reader.read(_data([5, 6], 2, finish_reason={"type": "abort", "message": "asked for"}))
    assert (last.token_ids, last.log_probs, last.reason, last.error) == ([], [], "abort", "")


def test_what_the_server_says_is_wrong_with_a_request_is_told() -> None:
    reader = EventReader(incremental=True, filtered=False)
    assert reader.read({"error": {"message": "too long"}}).error == "too long"
    reason = {"type": "abort", "message": "bad request", "status_code": 400}
    assert reader.read(_data([], 0, finish_reason=reason)).error == "bad request"
    token_without_log_prob = _data([7], 1, finish_reason=reason)
    token_without_log_prob["meta_info"]["output_token_logprobs"] = []
    assert reader.read(token_without_log_prob).error == "bad request"


def test_an_event_with_fewer_log_probs_than_tokens_is_an_error() -> None:
    data = _data([5, 6], 2)
    data["meta_info"]["output_token_logprobs"].pop()
    with pytest.raises(EngineError, match="log-probs"):
        EventReader(incremental=True, filtered=False).read(data)
