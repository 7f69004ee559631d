"""The trajectory payload, which a generator stores and a learner trains on, byte for byte.

Layout (all little-endian)::

    b"RMT1" | uint32 header length | msgpack header | raw arrays, concatenated

The header is a map:

- `tokens`: number of response tokens;
- `arrays`: [[name, dtype], ...] in the order of the raw bytes;
- `versions`: runs over the tokens as uint32 triples (length, incarnation, version);
- `mask`: lengths of runs over the tokens as uint32, of mask 1 and 0 in turn; only the first may be 0.

Arrays: `response_ids` int32, `log_probs` float32 (natural log, of the sampled token under the distribution it was
sampled from); both have one entry per token. `token_rewards` float32 is there only where tokens have rewards of their
own. Tokens with mask 0 (tool output, later turns' prompts) are not trained;
their log-prob is 0. The prompt is stored elsewhere, once per group.

With `codec` = "zstd" in the header each array is a compressed frame instead (`mesh.trajectory.compression`), and
`stored` has their sizes in bytes. The header itself is never compressed. Payloads are packed where they are made and
opened where they are trained on; in between they are the same bytes. The buffer checks a payload with `inspect` (header
and sizes, also those that frames state) and never parses or decompresses the arrays. If one is uploaded in pieces, the
buffer sees its head (magic and header) alone.

Bounds: at most `MAX_TOKENS` tokens; a frame is opened only if it states exactly the size that the tokens need.
"""

from __future__ import annotations

import itertools
import operator
import struct
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.compression import check_frame, compress, decompress
from rollmesh.mesh.trajectory.versions import VersionRuns

MAGIC = b"RMT1"
_PREFIX = struct.Struct("<4sI")
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 20
# Far above any response; bounds what a payload can make its reader allocate.
MAX_TOKENS = 1 << 26
Codec = Literal["none", "zstd"]
# Required arrays and their dtypes, and one more that may follow them; all have one entry per response token.
ARRAYS: dict[str, str] = {"response_ids": "int32", "log_probs": "float32"}
_REWARDS = "token_rewards"
_DECLARED = [[name, dtype] for name, dtype in ARRAYS.items()]
_DECLARED_WITH_REWARDS = [*_DECLARED, [_REWARDS, "float32"]]
# As they are stored.
_STORED = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4")}
_MASKED, _SAMPLED = b"\0", b"\1"


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The tokens of one response, or of a part of one.

    Attributes:
        response_ids: int32 [T].
        log_probs: float32 [T], behaviour log-probs (nats): of each token under the distribution it was sampled from,
            after temperature, top-k and top-p. Greedy tokens: under the temperature-1 distribution; 0 where
            `response_mask` is 0.
        response_mask: uint8 [T], 1 = sampled by the policy, 0 = not (a tool's output).
        versions: the policy version of every token (masked ones carry their turn's).
        token_rewards: float32 [T], rewards of tokens in addition to the response's; None: there are none.
    """

    response_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    response_mask: NDArray[np.uint8]
    versions: VersionRuns
    token_rewards: NDArray[np.float32] | None = None

    @classmethod
    def sampled(
        cls, response_ids: NDArray[np.int32], log_probs: NDArray[np.float32], versions: VersionRuns
    ) -> Trajectory:
        """Tokens that the policy sampled, all of them."""
        return cls(response_ids, log_probs, np.ones(len(response_ids), np.uint8), versions)

    @classmethod
    def empty(cls) -> Trajectory:
        """Arrays without tokens."""
        return cls.sampled(np.zeros(0, np.int32), np.zeros(0, np.float32), VersionRuns(()))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.response_ids)

    def part(self, start: int, stop: int) -> Trajectory:
        """Tokens `start` to `stop`, as views."""
        span = slice(start, stop)
        return Trajectory(
            self.response_ids[span],
            self.log_probs[span],
            self.response_mask[span],
            self.versions.part(start, stop),
            None if self.token_rewards is None else self.token_rewards[span],
        )

    @property
    def turns(self) -> list[tuple[int, int]]:
        """The first token of each turn, and the one after its last: of each run of sampled tokens."""
        edges = np.flatnonzero(np.diff(self.response_mask != 0, prepend=False, append=False)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    @property
    def last_turn(self) -> NDArray[np.int32]:
        """Ids of the tokens after the last masked one: an end token or a stop string counts only there."""
        masked = np.flatnonzero(self.response_mask == 0)
        return self.response_ids[int(masked[-1]) + 1 :] if len(masked) else self.response_ids


class PayloadInfo(NamedTuple):
    """Facts that `inspect` finds without touching the arrays: `mask` has lengths of runs of 1 and 0 in turn."""

    response_tokens: int
    versions: VersionRuns
    mask: tuple[int, ...]


class _Layout(NamedTuple):
    """The places of the arrays: the head ends at `start`; `stored` has the bytes of each frame, none where plain."""

    info: PayloadInfo
    start: int
    arrays: list[list[str]]
    stored: list[int] | None


def encode(trajectory: Trajectory, *, codec: Codec = "none", level: int = 1) -> bytes:
    """Packs a trajectory.

    Args:
        trajectory: one response.
        codec: `none`, or `zstd` for compressed arrays.
        level: of zstd, 1 (fast) to 19.

    Raises:
        PayloadError: where lengths disagree.
    """
    count = len(trajectory.response_ids)
    rewarded = trajectory.token_rewards is not None
    for field in ("log_probs", "response_mask", "versions", *([_REWARDS] if rewarded else [])):
        if len(getattr(trajectory, field)) != count:
            raise PayloadError(field, f"{len(getattr(trajectory, field))} entries for {count} response tokens")
    header: dict[str, Any] = {
        "tokens": count,
        "arrays": _DECLARED_WITH_REWARDS if rewarded else _DECLARED,
        "versions": trajectory.versions.to_wire(),
        "mask": _mask_to_wire(trajectory.response_mask),
    }
    arrays: list[Any] = [
        np.ascontiguousarray(getattr(trajectory, name), dtype=_STORED[dtype]) for name, dtype in header["arrays"]
    ]
    if codec == "zstd" and count:
        arrays = compress(arrays, level)
        header |= {"codec": codec, "stored": [len(frame) for frame in arrays]}
    packed = msgpack.packb(header)
    return b"".join((_PREFIX.pack(MAGIC, len(packed)), packed, *arrays))


def head_of(payload: bytes) -> bytes:
    """Magic and header of a payload: all that `inspect` needs in addition to its size.

    Raises:
        PayloadError: it has no head.
    """
    return payload[: _head_bytes(payload)]


def inspect(payload: bytes, total: int | None = None) -> PayloadInfo:
    """Checks a payload's header and sizes.

    Args:
        payload: all of it, or its head where `total` is given.
        total: bytes of the whole payload, of which `payload` is the head alone.

    Raises:
        PayloadError: naming the field that is wrong.
    """
    layout = _parse(payload, len(payload) if total is None else total)
    if total is not None:
        if layout.start != len(payload):
            raise PayloadError("payload", f"{len(payload)} bytes, but the head has {layout.start}")
    elif layout.stored is not None:
        for (name, _), frame in zip(layout.arrays, _frames(payload, layout), strict=True):
            check_frame(name, frame, layout.info.response_tokens)
    return layout.info


def decode(payload: bytes | memoryview, *, tokens: int | None = None) -> Trajectory:
    """Unpacks a payload; the arrays are views of its bytes unless they were compressed.

    Args:
        payload: as `encode` made it.
        tokens: response tokens that it must have, where the caller knows; checked before anything is decompressed.

    Raises:
        PayloadError: naming the field that is wrong.
    """
    layout = _parse(payload, len(payload))
    info, start = layout.info, layout.start
    if tokens is not None and tokens != info.response_tokens:
        raise PayloadError("response_tokens", f"expected {tokens}, the payload has {info.response_tokens}")
    count = info.response_tokens
    mask = np.frombuffer(bytearray().join(map(operator.mul, itertools.cycle((_SAMPLED, _MASKED)), info.mask)), np.uint8)
    arrays: dict[str, Any]
    if layout.stored is None:
        arrays = {
            name: np.frombuffer(payload, _STORED[dtype], count, start + 4 * count * place)
            for place, (name, dtype) in enumerate(layout.arrays)
        }
    else:
        arrays = {
            name: decompress(name, frame, count, _STORED[dtype].str)
            for (name, dtype), frame in zip(layout.arrays, _frames(payload, layout), strict=True)
        }
    return Trajectory(**arrays, response_mask=mask, versions=info.versions)


def _mask_to_wire(mask: NDArray[np.uint8]) -> bytes:
    if _MASKED not in mask.tobytes():  # single-turn responses, by far the most
        return _LENGTH.pack(len(mask)) if len(mask) else b""
    values = (mask != 0).tobytes()
    lengths: list[int] = []
    begin = 0
    for following in itertools.cycle((_MASKED, _SAMPLED)):
        end = values.find(following, begin)
        if end < 0:
            break
        lengths.append(end - begin)
        begin = end
    return struct.pack(f"<{len(lengths) + 1}I", *lengths, len(values) - begin)


def _frames(payload: bytes | memoryview, layout: _Layout) -> list[memoryview]:
    assert layout.stored is not None, "the arrays are not compressed"
    view = memoryview(payload)
    ends = list(itertools.accumulate(layout.stored, initial=layout.start))
    return [view[begin:end] for begin, end in itertools.pairwise(ends)]


def _head_bytes(payload: bytes | memoryview) -> int:
    if len(payload) < _PREFIX.size:
        raise PayloadError("payload", f"{len(payload)} bytes are too few for a trajectory")
    magic, header_bytes = _PREFIX.unpack_from(payload)
    if magic != MAGIC:
        raise PayloadError("payload.magic", f"expected {MAGIC!r}, got {magic!r}")
    start: int = _PREFIX.size + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or start > len(payload):
        raise PayloadError("payload.header", f"header of {header_bytes} bytes in a payload of {len(payload)}")
    return start


def _parse(payload: bytes | memoryview, total: int) -> _Layout:
    start = _head_bytes(payload)
    try:
        header: Any = msgpack.unpackb(payload[_PREFIX.size : start])
    except (ValueError, msgpack.UnpackException) as error:
        raise PayloadError("payload.header", f"not msgpack: {error}") from error
    if not isinstance(header, dict):
        raise PayloadError("payload.header", "expected a map")
    count = header.get("tokens")
    if type(count) is not int or not 1 <= count <= MAX_TOKENS:
        raise PayloadError("tokens", f"expected 1 to {MAX_TOKENS}, got {count!r}")
    arrays = header.get("arrays")
    if arrays not in (_DECLARED, _DECLARED_WITH_REWARDS):
        raise _other_arrays(arrays)
    stored = _check_codec(header.get("codec", "none"), header.get("stored"), [name for name, _ in arrays])
    declared = 4 * len(arrays) * count if stored is None else sum(stored)
    if total != start + declared:
        raise PayloadError("payload", f"{total - start} bytes of arrays, {declared} declared")
    versions = VersionRuns.from_wire(header.get("versions"), count)
    return _Layout(PayloadInfo(count, versions, _check_mask(header.get("mask"), count)), start, arrays, stored)


def _check_codec(codec: Any, stored: Any, names: list[str]) -> list[int] | None:
    if codec == "none":
        if stored is not None:
            raise PayloadError("stored", "expected none without a codec")
        return None
    if codec != "zstd":
        raise PayloadError("codec", f"expected none or zstd, got {codec!r}")
    good = isinstance(stored, list) and len(stored) == len(names)
    if not good or not all(type(size) is int and size > 0 for size in stored):
        raise PayloadError("stored", f"expected the bytes of {names}, got {stored!r}")
    return list(stored)


def _other_arrays(declared: Any) -> PayloadError:
    """The error message for arrays that are not the expected ones."""
    if not isinstance(declared, list) or len(declared) != len(ARRAYS):
        return PayloadError("arrays", f"expected {_DECLARED}, got {declared!r}")
    for item, (name, dtype) in zip(declared, ARRAYS.items(), strict=True):
        if not isinstance(item, list) or len(item) != 2 or item[0] != name:
            return PayloadError(f"arrays.{name}", f"expected {[name, dtype]}, got {item!r}")
        if item[1] != dtype:
            return PayloadError(f"arrays.{name}.dtype", f"expected {dtype}, got {item[1]!r}")
    return PayloadError("arrays", f"expected {_DECLARED}, got {declared!r}")


def _check_mask(wire: Any, count: int) -> tuple[int, ...]:
    try:
        lengths = struct.unpack(f"<{len(wire) // 4}I", wire)
    except (TypeError, struct.error) as error:
        raise PayloadError("mask", f"expected lengths of runs as uint32: {error}") from error
    if 0 in lengths[1:]:
        raise PayloadError(f"mask[{lengths.index(0, 1)}]", "a run of no tokens")
    if sum(lengths) != count:
        raise PayloadError("mask", f"runs cover {sum(lengths)} of {count} response tokens")
    return lengths
