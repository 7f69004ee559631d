"""The trajectory payload: round trips, and every malformed part is named."""

import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import PayloadError
from mesh.trajectory import Trajectory, decode, encode, inspect
from mesh.versions import PolicyVersion, VersionRuns

versions = st.builds(PolicyVersion, st.integers(1, 9), st.integers(0, 1 << 40))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    count = draw(st.integers(1, 60))
    ids = draw(st.lists(st.integers(0, (1 << 31) - 1), min_size=count, max_size=count))
    log_probs = draw(st.lists(st.floats(-1e4, 0, width=32), min_size=count, max_size=count))
    mask = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    stamps = draw(st.lists(versions, min_size=count, max_size=count))
    return Trajectory(
        np.array(ids, "<i4"), np.array(log_probs, "<f4"), np.array(mask, "u1"), VersionRuns.from_tokens(stamps)
    )


@given(trajectories())
def test_round_trip_is_exact(trajectory: Trajectory) -> None:
    payload = encode(trajectory)
    back = decode(payload)
    assert back.response_ids.tobytes() == trajectory.response_ids.tobytes()
    assert back.log_probs.tobytes() == trajectory.log_probs.tobytes()
    assert back.response_mask.tolist() == trajectory.response_mask.tolist()
    assert list(back.versions) == list(trajectory.versions)
    assert inspect(payload).response_tokens == len(trajectory.response_ids)
    assert encode(back) == payload


def _payload(header: dict, arrays: bytes = b"\0" * 16) -> bytes:
    packed = msgpack.packb(header)
    return struct.pack("<4sI", b"RMT1", len(packed)) + packed + arrays


IDS, LOG_PROBS = ["response_ids", "int32", 2], ["log_probs", "float32", 2]
GOOD = {
    "arrays": [IDS, LOG_PROBS],
    "versions": [[2, 1, 0]],
    "mask": [[2, 1]],
}


def test_the_good_header_is_good() -> None:
    assert decode(_payload(GOOD)).response_ids.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b"", "payload"),
        (b"XXXX" + b"\0" * 20, "payload.magic"),
        (b"RMT1" + struct.pack("<I", 1 << 30), "payload.header"),
        (struct.pack("<4sI", b"RMT1", 1) + b"\xc1", "payload.header"),
        (_payload([1]), "payload.header"),  # type: ignore[arg-type]  # on purpose
        (
            _payload({**GOOD, "arrays": [["response_ids", "int64", 2], LOG_PROBS]}),
            "response_ids.dtype",
        ),
        (_payload({**GOOD, "arrays": [IDS, ["log_probs", "float32", 3]]}), "arrays"),
        (
            _payload({**GOOD, "arrays": [["response_ids", "int32", 0], ["log_probs", "float32", 0]]}),
            "response_ids.count",
        ),
        (
            _payload({**GOOD, "arrays": [LOG_PROBS, IDS]}),
            "arrays.response_ids",
        ),
        (_payload(GOOD, b"\0" * 15), "payload"),
        (_payload({**GOOD, "versions": [[1, 1, 0]]}), "versions"),
        (_payload({**GOOD, "versions": [[2, 1, -1]]}), "versions[0]"),
        (_payload({**GOOD, "versions": 3}), "versions"),
        (_payload({**GOOD, "mask": [[1, 1]]}), "mask"),
        (_payload({**GOOD, "mask": [[2, 7]]}), "mask[0]"),
    ],
)
def test_a_malformed_payload_is_refused_by_field(payload: bytes, field: str) -> None:
    with pytest.raises(PayloadError) as caught:
        decode(payload)
    assert field in caught.value.field


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        decode(data)
    except PayloadError as error:
        assert error.field


def test_lengths_must_agree_when_encoding() -> None:
    runs = VersionRuns.from_tokens([PolicyVersion(1, 0)] * 2)
    with pytest.raises(PayloadError, match="log_probs"):
        encode(Trajectory(np.zeros(2, "<i4"), np.zeros(3, "<f4"), np.ones(2, "u1"), runs))


def test_oldest_and_newest() -> None:
    runs = VersionRuns.from_tokens([PolicyVersion(1, 7), PolicyVersion(1, 8), PolicyVersion(2, 6)])
    assert runs.oldest == PolicyVersion(2, 6)
    assert runs.newest == PolicyVersion(2, 6)
