"""Deltas of buckets: bit for bit, whatever the dtype and however much changed, and safe against damage."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights import delta
from rollmesh.mesh.weights.delta import Span, apply_bucket, encode_bucket, spans_of
from rollmesh.mesh.weights.layout import DTYPE_BYTES, aligned
from rollmesh.protos import weights_pb2


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK", 1000)


def lay(sizes: list[tuple[int, int]]) -> tuple[list[Span], int]:
    """Spans for (elements, width), and the bucket's length."""
    spans, end = [], 0
    for elements, width in sizes:
        start = aligned(end)
        end = start + elements * width
        spans.append(Span(start, elements * width, width))
    return spans, end


def applied(encoded: bytes, base: bytes, spans: list[Span]) -> bytes:
    target = bytearray(base)
    apply_bucket(encoded, memoryview(target), spans)
    return bytes(target)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2500), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=5),
    st.floats(0, 1),
    st.sampled_from([1, 3, 2**7, 2**15, 2**63 - 1]),
    st.integers(0, 2**32 - 1),
)
def test_what_went_in_comes_out(sizes: list[tuple[int, int]], share: float, reach: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spans, length = lay(sizes)
    old = np.zeros(length, np.uint8)
    new = np.zeros(length, np.uint8)
    for span in spans:
        elements = span.nbytes // span.width
        before = rng.integers(0, 2 ** (8 * span.width) - 1, elements, f"<u{span.width}", endpoint=True)
        step = rng.integers(-reach, reach, elements, np.int64, endpoint=True).astype(before.dtype)
        after = np.where(rng.random(elements) < share, before + step, before)
        old[span.offset : span.offset + span.nbytes] = before.view(np.uint8)
        new[span.offset : span.offset + span.nbytes] = after.view(np.uint8)
    encoded = encode_bucket(old.data, new.data, spans)
    assert applied(encoded, old.tobytes(), spans) == new.tobytes()
    # Whatever the weights do, it is never much more than the bytes themselves.
    blocks = sum(-(-span.nbytes // span.width // 1000) for span in spans)
    assert len(encoded) <= length + 1 + 33 * blocks


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", [name for name in DTYPE_BYTES if name.startswith(("float", "bfloat"))])
def test_special_values_keep_their_bits(name: str) -> None:
    dtype = getattr(torch, name)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e-7, -1e-7])
    old = special.repeat(40).to(dtype)
    new = special.repeat(40).roll(1).to(dtype)
    spans = [Span(0, old.numel() * DTYPE_BYTES[name], DTYPE_BYTES[name])]
    assert applied(encode_bucket(bits(old), bits(new), spans), bits(old), spans) == bits(new)
    payload = bytes(reversed(bits(old)))  # NaN with every kind of payload, signalling ones included
    assert applied(encode_bucket(bits(old), payload, spans), bits(old), spans) == payload


def test_the_form_follows_what_changed() -> None:
    rng = np.random.default_rng(0)
    spans, length = lay([(10_000, 2)])
    old = rng.integers(0, 2**16, 10_000, "<u2")

    def size(share: float, reach: int) -> int:
        step = rng.integers(1, reach, 10_000, endpoint=True).astype("<u2")
        new = np.where(rng.random(10_000) < share, old + step, old)
        return len(encode_bucket(old.tobytes(), new.tobytes(), spans))

    assert size(0.0, 1) == 1 + 10
    assert 200 < size(0.01, 1) < 0.03 * length
    assert size(0.3, 1) < 0.12 * length
    assert size(1.0, 3) < 0.2 * length
    assert length < size(1.0, 2**16 - 1) < 1.01 * length


def test_tensors_without_bytes_have_no_place() -> None:
    tensors = [
        weights_pb2.TensorEntry(name="a", dtype="bfloat16", shape=[3], offset=64, nbytes=6, bucket=1),
        weights_pb2.TensorEntry(name="b", dtype="bfloat16", shape=[3], tied_to="a"),
        weights_pb2.TensorEntry(name="c", dtype="float32", shape=[0], bucket=0),
        weights_pb2.TensorEntry(name="d", dtype="float8_e4m3fn", shape=[5], nbytes=5, bucket=0),
    ]
    assert spans_of(tensors, 3) == [[Span(0, 5, 1)], [Span(64, 6, 2)], []]


def example() -> tuple[bytes, bytes, list[Span]]:
    rng = np.random.default_rng(1)
    spans, length = lay([(2500, 2), (300, 4), (40, 1)])
    old = rng.integers(0, 256, length, np.uint8)
    new = old.copy()
    for span in spans:
        words = new[span.offset : span.offset + span.nbytes].view(f"<u{span.width}")
        changed = rng.random(words.size) < {2: 0.05, 4: 0.3, 1: 0.9}[span.width]
        words[changed] += 1
    return old.tobytes(), encode_bucket(old.data, new.data, spans), spans


@settings(max_examples=100)
@given(st.data())
def test_damage_ends_in_an_error_or_in_other_weights_and_stays_inside(data: st.DataObject) -> None:
    old, good, spans = example()
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    cut = damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged
    frame = bytearray(64) + bytearray(old) + bytearray(64)
    with contextlib.suppress(WeightsError):
        apply_bucket(bytes(cut), memoryview(frame)[64:-64], spans)
    covered = {at for span in spans for at in range(span.offset, span.offset + span.nbytes)}
    assert all(frame[64 + at] == old[at] for at in range(len(old)) if at not in covered)
    assert not any(frame[:64])
    assert not any(frame[-64:])


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    old, _, spans = example()
    with pytest.raises(WeightsError):
        apply_bucket(b"\x01\x01" + noise[:100] + b"\xff" * 9, memoryview(bytearray(old)), spans)


ONE = [Span(0, 200, 2)]


def by_steps(count: int, steps: bytes, planes: bytes = b"\0" * 8) -> bytes:
    return b"\x01\x02" + struct.pack("<III", count, len(steps), len(steps)) + steps + planes


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (b"", "ends after 0"),
        (b"\x02", "format 2"),
        (b"\x01\x07", "kind 7"),
        (b"\x01\x00\x00", "1 bytes are left over"),
        (by_steps(0, b""), "0 changes"),
        (by_steps(101, b"\x01" * 101), "101 changes"),
        (by_steps(1, b"\xff\xff\x01"), "in 3 steps"),
        (by_steps(2, b"\xff\x01"), "do not lead to 2"),
        (by_steps(1, b"\x65"), "outside of its tensor"),
        (by_steps(2, b"\x00\x01"), "outside of its tensor"),
        (by_steps(1, b"\x01", struct.pack("<I", 2**32 - 1)), "ends after"),
        (b"\x01\x01" + struct.pack("<I", 4) + b"zstd", "malformed"),
        (b"\x01\x03" + struct.pack("<I", 101), "101 changes"),
        (b"\x01\x03" + struct.pack("<II", 7, 13) + b"\xff" + b"\0" * 12, "8 changes are marked, 7 announced"),
        (b"\x01\x03" + struct.pack("<II", 4, 13) + b"\0" * 12 + b"\xf0", "0 changes are marked, 4 announced"),
    ],
)
def test_each_malformation_is_named(encoded: bytes, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        apply_bucket(encoded, memoryview(bytearray(200)), ONE)


def test_a_frame_that_says_too_much_is_not_opened() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(WeightsError, match="does not hold 100 bytes"):
        apply_bucket(b"\x01\x01" + struct.pack("<I", len(bomb)) + bomb, memoryview(bytearray(200)), ONE)
    # Without a stated size nothing is known before it is opened.
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(range(100)) * 10)
    with pytest.raises(WeightsError, match="does not hold 100 bytes"):
        apply_bucket(b"\x01\x01" + struct.pack("<I", len(silent)) + silent, memoryview(bytearray(200)), ONE)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(WeightsError, match="ends at byte 200"):
        apply_bucket(b"\x01\x00", memoryview(bytearray(199)), ONE)


def test_two_hundred_steps_of_adamw_arrive_bit_for_bit() -> None:
    torch.manual_seed(0)
    master = torch.nn.Parameter(torch.randn(4096) * 0.02)
    optimizer = torch.optim.AdamW([master], lr=1e-5)
    spans = [Span(0, 8192, 2)]
    sent = held = bits(master.detach().bfloat16())
    for _ in range(200):
        master.grad = torch.randn(4096)
        optimizer.step()
        now = bits(master.detach().bfloat16())
        held = applied(encode_bucket(sent, now, spans), held, spans)
        sent = now
        assert held == now
