"""A delta: the lossless difference between two buckets of equal layout.

Works on bits: whatever its dtype, an element is an unsigned integer of its width (1, 2, 4 or 8 bytes). The difference
is taken modulo 2^width and folded: 0, -1, 1, -2 ... become 0, 1, 2, 3 ... So NaN, -0.0 and infinities come out as they
went in, and the small steps of an optimizer become small numbers. A bucket is a version byte, then the blocks of each
tensor in order, of at most `BLOCK` elements. A block has one of four forms, by the share of it that changed:

    unchanged   kind 0
    dense       kind 1, one stream per byte plane
    steps       kind 2, count (u32), length of the steps (u32), stream of steps, one stream per byte plane
    bitmap      kind 3, count (u32), stream of bits (changed or not, lowest first), one stream per byte plane

A step is the distance from the changed element before (255: advance by 255, the step is not over). The byte planes hold
the folded differences: all lowest bytes first, and so on; of all elements where dense, else of the changed ones. A
stream is its stored length (u32) and its bytes: none (all zero), as many as it holds (plain), or a zstd frame. The
layout itself does not travel: both sides know it. Integers are little-endian.

Invariants: `apply_bucket` turns the base into exactly the new bucket that `encode_bucket` was given. A malformed delta
ends in a WeightsError. It writes only inside the tensors of its target, and allocates no more than a small multiple of
a block. A wrong base is not noticed here, but by the digests of the result.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights.digest import Buffer
from rollmesh.mesh.weights.layout import DTYPE_BYTES
from rollmesh.protos import weights_pb2

# Elements of a block: what is in work at a time stays in the processor's caches.
BLOCK = 1 << 20
_FORMAT = 1
_UNCHANGED, _DENSE, _STEPS, _BITMAP = 0, 1, 2, 3
# Shares of the elements that have changed. From the first one on, a bit for each costs no more than steps and is made
# faster. From the second one on, saying which ones costs more than it saves.
_BITMAP_FROM, _DENSE_FROM = 0.2, 0.65
_LONG = 255
# The streams are noise over few symbols: what entropy coding makes of them counts, and matches are few. Looking for
# long ones in a tiny table is twice as fast as level 1, and the frames are smaller.
_COMPRESSION = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=20
)
_U32 = struct.Struct("<I")

Words: TypeAlias = NDArray[np.unsignedinteger]
Bytes: TypeAlias = NDArray[np.uint8]


class Span(NamedTuple):
    """One tensor's place in a bucket.

    Attributes:
        offset, nbytes: where its bytes lie.
        width: bytes of an element.
    """

    offset: int
    nbytes: int
    width: int


def spans_of(tensors: Iterable[weights_pb2.TensorEntry], buckets: int) -> list[list[Span]]:
    """The tensors of each bucket, in order; those without bytes (empty, tied) are left out.

    Args:
        tensors: of a manifest that was checked.
        buckets: how many it has.
    """
    spans: list[list[Span]] = [[] for _ in range(buckets)]
    for tensor in tensors:
        if tensor.nbytes and not tensor.tied_to:
            spans[tensor.bucket].append(Span(tensor.offset, tensor.nbytes, DTYPE_BYTES[tensor.dtype]))
    return spans


def encode_bucket(old: Buffer, new: Buffer, spans: Sequence[Span]) -> bytes:
    """Encodes the delta from `old` to `new`.

    Args:
        old, new: the bytes of both buckets, of equal length.
        spans: the tensors in them. Bytes outside do not travel.
    """
    parts: list[bytes] = [bytes([_FORMAT])]
    compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION)
    for span in spans:
        before, after = _words(old, span), _words(new, span)
        for start in range(0, len(before), BLOCK):
            _encode_block(parts, compressor, before[start : start + BLOCK], after[start : start + BLOCK])
    return b"".join(parts)


def apply_bucket(delta: Buffer, target: memoryview, spans: Sequence[Span]) -> None:
    """Turns the base into the new bucket, in place.

    Args:
        delta: from `encode_bucket`, over the same spans.
        target: the base bucket's bytes, writable. After an error it is neither the one nor the other.
        spans: the tensors in it.

    Raises:
        WeightsError: the delta is malformed, or belongs to another layout.
    """
    reader = _Reader(delta)
    if (found := reader.byte()) != _FORMAT:
        raise WeightsError(f"weight delta of format {found}, this is {_FORMAT}", hint="run one release everywhere")
    for span in spans:
        words = _words(target, span)
        for start in range(0, len(words), BLOCK):
            _apply_block(reader, words[start : start + BLOCK])
    reader.end()


# ---------------------------------------------------------------------------------------------------------- encoding


def _encode_block(parts: list[bytes], compressor: zstandard.ZstdCompressor, old: Words, new: Words) -> None:
    changed = old != new
    count = np.count_nonzero(changed)
    if not count:
        parts.append(bytes([_UNCHANGED]))
    elif count >= _DENSE_FROM * old.size:
        parts.append(bytes([_DENSE]))
        _put_planes(parts, compressor, _fold(new - old))
    elif count >= _BITMAP_FROM * old.size:
        parts.append(bytes([_BITMAP]) + _U32.pack(count))
        _put(parts, compressor, np.packbits(changed, bitorder="little"))
        _put_planes(parts, compressor, _fold((new - old)[np.flatnonzero(changed)]))
    else:
        where = np.flatnonzero(changed)
        steps = _steps(where)
        parts.append(bytes([_STEPS]) + _U32.pack(count) + _U32.pack(steps.size))
        _put(parts, compressor, steps)
        _put_planes(parts, compressor, _fold(new[where] - old[where]))


def _steps(where: NDArray[np.intp]) -> Bytes:
    """Distances between increasing positions (from -1 on) as bytes."""
    gaps = np.diff(where, prepend=-1)
    if gaps.max() < _LONG:
        return gaps.astype(np.uint8)
    turns = gaps // _LONG
    steps = np.full(gaps.size + int(turns.sum()), _LONG, np.uint8)
    steps[np.cumsum(turns + 1) - 1] = gaps - turns * _LONG
    return steps


def _fold(difference: Words) -> Words:
    """Signed numbers by their size: 0, -1, 1, -2 ... become 0, 1, 2, 3 ..."""
    bits = difference.dtype.itemsize * 8
    sign = (difference.view(f"<i{difference.dtype.itemsize}") >> (bits - 1)).view(difference.dtype)
    folded: Words = (difference << difference.dtype.type(1)) ^ sign
    return folded


def _put_planes(parts: list[bytes], compressor: zstandard.ZstdCompressor, folded: Words) -> None:
    planes = folded.view(np.uint8).reshape(folded.size, -1)
    for index in range(planes.shape[1]):
        _put(parts, compressor, np.ascontiguousarray(planes[:, index]))


def _put(parts: list[bytes], compressor: zstandard.ZstdCompressor, stream: Bytes) -> None:
    if not stream.any():
        parts.append(_U32.pack(0))
        return
    frame = compressor.compress(stream.data)
    if len(frame) >= stream.size:
        frame = stream.tobytes()
    parts.append(_U32.pack(len(frame)))
    parts.append(frame)


# ---------------------------------------------------------------------------------------------------------- decoding


def _apply_block(reader: _Reader, words: Words) -> None:
    kind = reader.byte()
    if kind == _UNCHANGED:
        return
    if kind == _DENSE:
        words += _unfold(reader.planes(words.size, words.dtype))
        return
    if kind not in (_STEPS, _BITMAP):
        raise WeightsError(f"weight delta is malformed: block of kind {kind}")
    count = reader.number()
    if not 0 < count <= words.size:
        raise WeightsError(f"weight delta is malformed: {count} changes among {words.size} elements")
    if kind == _BITMAP:
        where = _positions_of_bits(reader.stream(-(-words.size // 8)), count, words.size)
    else:
        length = reader.number()
        if not count <= length <= count + words.size // _LONG + 1:
            raise WeightsError(f"weight delta is malformed: {count} changes in {length} steps")
        where = _positions_of_steps(reader.stream(length), count, words.size)
    words[where] += _unfold(reader.planes(count, words.dtype))


def _positions_of_bits(bits: Bytes, count: int, size: int) -> NDArray[np.intp]:
    where: NDArray[np.intp] = np.flatnonzero(np.unpackbits(bits, count=size, bitorder="little").view(np.bool_))
    if where.size != count:
        raise WeightsError(f"weight delta is malformed: {where.size} changes are marked, {count} announced")
    return where


def _positions_of_steps(steps: Bytes, count: int, size: int) -> NDArray[np.intp]:
    """Positions, within bounds, from distances."""
    reached = np.cumsum(steps, dtype=np.intp)
    ends = steps != _LONG
    if np.count_nonzero(ends) != count:
        raise WeightsError(f"weight delta is malformed: its steps do not lead to {count} elements")
    reached -= 1
    where: NDArray[np.intp] = reached if count == steps.size else reached[ends]
    if where[0] < 0 or where[-1] >= size:
        raise WeightsError("weight delta is malformed: it changes elements outside of its tensor")
    return where


def _unfold(folded: Words) -> Words:
    one = folded.dtype.type(1)
    difference: Words = (folded >> one) ^ (folded.dtype.type(0) - (folded & one))
    return difference


class _Reader:
    """Reads a delta from front to back; everything it gives has the length that was asked for."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")
        self._at = 0
        self._decompressor = zstandard.ZstdDecompressor()

    def byte(self) -> int:
        return self._read(1)[0]

    def number(self) -> int:
        value: int = _U32.unpack(self._read(_U32.size))[0]
        return value

    def planes(self, count: int, dtype: np.dtype[np.unsignedinteger]) -> Words:
        """`count` words from their byte planes."""
        words: Words = np.zeros(count, dtype)
        for index in range(dtype.itemsize):
            stored = self._stored()
            if not stored:
                continue
            plane = self._open(stored, count).astype(dtype)
            words |= plane << dtype.type(8 * index)
        return words

    def stream(self, length: int) -> Bytes:
        """A stream of `length` bytes."""
        stored = self._stored()
        return self._open(stored, length) if stored else np.zeros(length, np.uint8)

    def end(self) -> None:
        if self._at != len(self._data):
            raise WeightsError(f"weight delta is malformed: {len(self._data) - self._at} bytes are left over")

    def _stored(self) -> memoryview:
        return self._read(self.number())

    def _open(self, stored: memoryview, length: int) -> Bytes:
        if len(stored) == length:
            return np.frombuffer(stored, np.uint8)
        try:
            # A frame says how much it holds; what it says is what opening it allocates.
            if zstandard.frame_content_size(stored) != length:
                raise WeightsError(f"weight delta is malformed: a stream does not hold {length} bytes")
            opened = self._decompressor.decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise WeightsError(f"weight delta is malformed: {error}") from error
        if len(opened) != length:
            raise WeightsError(f"weight delta is malformed: a stream holds {len(opened)} bytes instead of {length}")
        return np.frombuffer(opened, np.uint8)

    def _read(self, length: int) -> memoryview:
        end = self._at + length
        if end > len(self._data):
            raise WeightsError(f"weight delta is malformed: it ends after {len(self._data)} bytes")
        part = self._data[self._at : end]
        self._at = end
        return part


def _words(data: Buffer, span: Span) -> Words:
    if span.offset + span.nbytes > len(data):
        raise WeightsError(f"a tensor ends at byte {span.offset + span.nbytes} of a bucket of {len(data)}")
    words: Words = np.frombuffer(data, f"<u{span.width}", span.nbytes // span.width, span.offset)
    return words
