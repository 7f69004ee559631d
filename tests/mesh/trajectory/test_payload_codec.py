"""The trajectory payload: round trips, and every malformed part is named."""

import struct

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.payload_codec import MAX_TOKENS, Codec, Trajectory, decode, encode, head_of, inspect
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns

codecs: st.SearchStrategy[Codec] = st.sampled_from(["none", "zstd"])
versions = st.builds(PolicyVersion, st.integers(1, 9), st.integers(0, (1 << 31) - 1))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    count = draw(st.integers(1, 60))
    ids = draw(st.lists(st.integers(0, (1 << 31) - 1), min_size=count, max_size=count))
    log_probs = draw(st.lists(st.floats(-1e4, 0, width=32), min_size=count, max_size=count))
    mask = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    stamps = draw(st.lists(versions, min_size=count, max_size=count))
    rewards = draw(st.none() | st.lists(st.floats(-1e4, 1e4, width=32), min_size=count, max_size=count))
    return Trajectory(
        np.array(ids, "<i4"),
        np.array(log_probs, "<f4"),
        np.array(mask, "u1"),
        VersionRuns.merged((1, version) for version in stamps),
        None if rewards is None else np.array(rewards, "<f4"),
    )


@settings(max_examples=20)
@given(trajectories(), codecs, st.sampled_from([1, 3]))
def test_round_trip_is_exact(trajectory: Trajectory, codec: Codec, level: int) -> None:
    payload = encode(trajectory, codec=codec, level=level)
    back = decode(payload, tokens=len(trajectory.response_ids))
    assert _same(back, trajectory)
    info = inspect(payload)
    assert info.response_tokens == len(trajectory.response_ids)
    assert inspect(head_of(payload), len(payload)) == info
    assert encode(back, codec=codec, level=level) == payload


def _same(one: Trajectory, other: Trajectory) -> bool:
    if (one.token_rewards is None) != (other.token_rewards is None):
        return False
    arrays = ["response_ids", "log_probs", "response_mask"]
    arrays += ["token_rewards"] if one.token_rewards is not None else []
    return list(one.versions) == list(other.versions) and all(
        getattr(one, name).dtype == getattr(other, name).dtype
        and getattr(one, name).tobytes() == getattr(other, name).tobytes()
        for name in arrays
    )


@settings(max_examples=20)
@given(trajectories(), codecs, st.data())
def test_a_truncated_or_longer_payload_is_refused(trajectory: Trajectory, codec: Codec, data: st.DataObject) -> None:
    payload = encode(trajectory, codec=codec)
    cut = payload[: data.draw(st.integers(0, len(payload) - 1))]
    longer = payload + data.draw(st.binary(min_size=1, max_size=9))
    for wrong in (cut, longer):
        for check in (inspect, decode):
            with pytest.raises(PayloadError):
                check(wrong)
    with pytest.raises(PayloadError):
        inspect(head_of(payload), len(payload) - 1)
    with pytest.raises(PayloadError):
        inspect(head_of(payload)[:-1], len(payload))
    with pytest.raises(PayloadError):
        inspect(head_of(payload) + b"x", len(payload))


@settings(max_examples=20)
@given(trajectories(), codecs, st.data())
def test_a_flipped_bit_in_the_head_never_crashes(trajectory: Trajectory, codec: Codec, data: st.DataObject) -> None:
    payload = bytearray(encode(trajectory, codec=codec))
    head = len(head_of(bytes(payload)))
    payload[data.draw(st.integers(0, head - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        back = decode(bytes(payload))
    except PayloadError as error:
        assert error.field
        return
    # Still a sound trajectory, of the same arrays: only the runs can differ.
    assert len(back.response_mask) == len(back.versions) == len(trajectory.response_ids)
    assert back.response_ids.tobytes() == trajectory.response_ids.tobytes()


@settings(max_examples=20)
@given(trajectories(), st.data())
def test_a_flipped_bit_in_compressed_arrays_is_found(trajectory: Trajectory, data: st.DataObject) -> None:
    payload = bytearray(encode(trajectory, codec="zstd"))
    at = data.draw(st.integers(len(head_of(bytes(payload))), len(payload) - 1))
    payload[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert _same(decode(bytes(payload)), trajectory)
    except PayloadError as error:
        assert error.field.startswith("arrays.")


def _frame(content: bytes, **options: bool) -> bytes:
    compressor = zstandard.ZstdCompressor(**{"write_checksum": True, **options})
    return compressor.compress(content)


def _compressed(*frames: bytes, count: int = 2) -> bytes:
    header = {
        "tokens": count,
        "arrays": [["response_ids", "int32"], ["log_probs", "float32"]],
        "versions": struct.pack("<III", count, 1, 0),
        "mask": struct.pack("<I", count),
        "codec": "zstd",
        "stored": [len(frame) for frame in frames],
    }
    return _payload(header, b"".join(frames))


def test_nothing_is_decompressed_into_more_than_the_tokens_need() -> None:
    good = _frame(bytes(8))
    assert decode(_compressed(good, good)).response_ids.tolist() == [0, 0]
    bomb = _frame(bytes(64 << 20))
    assert len(bomb) < 10_000
    unsized = _frame(bytes(8), write_content_size=False)
    unchecked = _frame(bytes(8), write_checksum=False)
    for bad in (bomb, unsized, unchecked, _frame(bytes(4)), b"no frame at all", good[:3]):
        for frames in ((bad, good), (good, bad)):
            for check in (inspect, decode):
                with pytest.raises(PayloadError, match="arrays"):
                    check(_compressed(*frames))
    # A frame that states the right size and holds more.
    small = _frame(bytes(200), write_checksum=True)
    parameters = zstandard.get_frame_parameters(small)
    assert parameters.content_size == 200
    lying = small.replace(bytes([200]), bytes([8]), 1)
    assert zstandard.get_frame_parameters(lying).content_size == 8
    with pytest.raises(PayloadError, match="damaged"):
        decode(_compressed(good, lying))
    # Two frames in the place of one.
    with pytest.raises(PayloadError, match="damaged"):
        decode(_compressed(good, good + good))
    with pytest.raises(PayloadError, match="tokens"):
        decode(_compressed(good, good, count=MAX_TOKENS + 1))
    with pytest.raises(PayloadError, match="expected 3"):
        decode(_compressed(bomb, bomb, count=16 << 20), tokens=3)


def test_compression_pays() -> None:
    rng = np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.2, 16_384), 150_000).astype(np.int32)
    log_probs = -rng.exponential(0.5, 16_384).astype(np.float32)
    runs = VersionRuns(((16_384, PolicyVersion(1, 0)),))
    trajectory = Trajectory(ids, log_probs, np.ones(16_384, np.uint8), runs)
    assert len(encode(trajectory, codec="zstd")) < 0.75 * len(encode(trajectory))


def _payload(header: dict, arrays: bytes = b"\0" * 16) -> bytes:
    packed = msgpack.packb(header)
    return struct.pack("<4sI", b"RMT1", len(packed)) + packed + arrays


IDS, LOG_PROBS = ["response_ids", "int32"], ["log_probs", "float32"]
GOOD = {
    "tokens": 2,
    "arrays": [IDS, LOG_PROBS],
    "versions": struct.pack("<III", 2, 1, 0),
    "mask": struct.pack("<I", 2),
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
        (_payload({**GOOD, "tokens": 0}), "tokens"),
        (_payload({**GOOD, "tokens": True}), "tokens"),
        (_payload({**GOOD, "tokens": 2.0}), "tokens"),
        (_payload({**GOOD, "tokens": "2"}), "tokens"),
        (_payload({**GOOD, "tokens": 3}), "payload"),
        (_payload({k: v for k, v in GOOD.items() if k != "arrays"}), "arrays"),
        (_payload({**GOOD, "arrays": [IDS]}), "arrays"),
        (_payload({**GOOD, "arrays": [["response_ids", "int64"], LOG_PROBS]}), "arrays.response_ids.dtype"),
        (_payload({**GOOD, "arrays": [IDS, [*LOG_PROBS, 2]]}), "arrays.log_probs"),
        (_payload({**GOOD, "arrays": [LOG_PROBS, IDS]}), "arrays.response_ids"),
        (_payload(GOOD, b"\0" * 15), "payload"),
        (_payload({**GOOD, "versions": struct.pack("<III", 1, 1, 0)}), "versions"),
        (_payload({**GOOD, "versions": struct.pack("<6I", 2, 1, 0, 0, 1, 1)}), "versions[1]"),
        (_payload({**GOOD, "versions": struct.pack("<III", 2, 1, 1 << 31)}), "versions[0]"),
        (_payload({**GOOD, "versions": struct.pack("<III", 2, 1 << 31, 0)}), "versions[0]"),
        (_payload({**GOOD, "versions": bytes(11)}), "versions"),
        (_payload({**GOOD, "versions": [[2, 1, 0]]}), "versions"),
        (_payload({**GOOD, "versions": 3}), "versions"),
        (_payload({**GOOD, "mask": struct.pack("<I", 1)}), "mask"),
        (_payload({**GOOD, "mask": struct.pack("<4I", 1, 0, 0, 1)}), "mask[1]"),
        (_payload({**GOOD, "mask": bytes(3)}), "mask"),
        (_payload({**GOOD, "mask": [[2, 1]]}), "mask"),
        (_payload({**GOOD, "mask": 2}), "mask"),
        (_payload({**GOOD, "codec": "gzip"}), "codec"),
        (_payload({**GOOD, "codec": ["zstd"]}), "codec"),
        (_payload({**GOOD, "stored": [8, 8]}), "stored"),
        (_payload({**GOOD, "codec": "zstd"}), "stored"),
        (_payload({**GOOD, "codec": "zstd", "stored": [16]}), "stored"),
        (_payload({**GOOD, "codec": "zstd", "stored": [16, 0]}), "stored"),
        (_payload({**GOOD, "codec": "zstd", "stored": [8, "8"]}), "stored"),
        (_payload({**GOOD, "codec": "zstd", "stored": [8, 9]}), "payload"),
    ],
)
def test_a_malformed_payload_is_refused_by_field(payload: bytes, field: str) -> None:
    with pytest.raises(PayloadError) as caught:
        decode(payload)
    assert caught.value.field == field


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        decode(data)
    except PayloadError as error:
        assert error.field


def test_lengths_must_agree_when_encoding() -> None:
    runs = VersionRuns(((2, PolicyVersion(1, 0)),))
    with pytest.raises(PayloadError, match="log_probs"):
        encode(Trajectory(np.zeros(2, "<i4"), np.zeros(3, "<f4"), np.ones(2, "u1"), runs))


def test_versions_that_do_not_fit_are_refused_when_encoding() -> None:
    runs = VersionRuns(((2, PolicyVersion(1, 1 << 32)),))
    with pytest.raises(PayloadError, match="versions"):
        encode(Trajectory(np.zeros(2, "<i4"), np.zeros(2, "<f4"), np.ones(2, "u1"), runs))


def test_masks_are_runs_in_turn() -> None:
    for mask in ([1, 1, 1], [0, 0, 1], [0, 1, 0], [1, 0, 0]):
        runs = VersionRuns(((3, PolicyVersion(1, 0)),))
        payload = encode(Trajectory(np.zeros(3, "<i4"), np.zeros(3, "<f4"), np.array(mask, "u1"), runs))
        assert decode(payload).response_mask.tolist() == mask
        assert inspect(payload).mask[0] == mask.index(0) if 0 in mask else 3


def test_oldest_and_newest() -> None:
    runs = VersionRuns(((1, PolicyVersion(1, 7)), (1, PolicyVersion(1, 8)), (1, PolicyVersion(2, 6))))
    assert runs.oldest == PolicyVersion(2, 6)
    assert runs.newest == PolicyVersion(2, 6)
