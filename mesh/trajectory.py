"""The trajectory payload: what a generator stores and a learner trains on, byte for byte.

Layout (all little-endian)::

    b"RMT1" | uint32 header length | msgpack header | raw arrays, one behind the other

The header is a map: `arrays` = [[name, dtype, count], ...] in the order of the raw bytes, `versions` = runs over the
response tokens, `mask` = runs [[length, 0 or 1], ...] over the response tokens. Arrays: `response_ids` int32,
`log_probs` float32 (natural log, of the sampled token under the distribution it was sampled from); both have one
entry per response token. Tokens with mask 0 (tool output, later turns' prompts) are not trained; their log-prob is 0.
The prompt is not in here: it is stored once per group.

The buffer checks a payload with `inspect` (header and sizes only) and never parses the arrays.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from mesh.errors import PayloadError
from mesh.versions import VersionRuns

MAGIC = b"RMT1"
_PREFIX = struct.Struct("<4sI")
_MAX_HEADER_BYTES = 1 << 20
# Required arrays and their dtypes; both have one entry per response token.
ARRAYS: dict[str, str] = {"response_ids": "int32", "log_probs": "float32"}


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One response.

    Attributes:
        response_ids: int32 [T].
        log_probs: float32 [T], behaviour log-probs (nats); 0 where `response_mask` is 0.
        response_mask: uint8 [T], 1 = sampled by the policy.
        versions: the policy version of every token (masked ones carry their turn's).
    """

    response_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    response_mask: NDArray[np.uint8]
    versions: VersionRuns


@dataclass(frozen=True, slots=True)
class PayloadInfo:
    """What `inspect` finds without touching the arrays."""

    response_tokens: int
    versions: VersionRuns
    mask_runs: tuple[tuple[int, int], ...]


def encode(trajectory: Trajectory) -> bytes:
    """Packs a trajectory.

    Raises:
        PayloadError: where lengths disagree.
    """
    count = len(trajectory.response_ids)
    for field in ("log_probs", "response_mask", "versions"):
        if len(getattr(trajectory, field)) != count:
            raise PayloadError(field, f"{len(getattr(trajectory, field))} entries for {count} response tokens")
    header = msgpack.packb(
        {
            "arrays": [[name, dtype, count] for name, dtype in ARRAYS.items()],
            "versions": trajectory.versions.to_wire(),
            "mask": _runs(trajectory.response_mask),
        }
    )
    return b"".join(
        (
            _PREFIX.pack(MAGIC, len(header)),
            header,
            np.ascontiguousarray(trajectory.response_ids, dtype="<i4").tobytes(),
            np.ascontiguousarray(trajectory.log_probs, dtype="<f4").tobytes(),
        )
    )


def inspect(payload: bytes) -> PayloadInfo:
    """Checks a payload's header and sizes.

    Raises:
        PayloadError: naming the field that is wrong.
    """
    return _parse(payload)[0]


def decode(payload: bytes) -> Trajectory:
    """Unpacks a payload; the arrays are views of its bytes.

    Raises:
        PayloadError: naming the field that is wrong.
    """
    info, start = _parse(payload)
    count = info.response_tokens
    mask = np.repeat(
        np.array([value for _, value in info.mask_runs], dtype=np.uint8),
        np.array([length for length, _ in info.mask_runs], dtype=np.int64),
    )
    return Trajectory(
        response_ids=np.frombuffer(payload, dtype="<i4", count=count, offset=start),
        log_probs=np.frombuffer(payload, dtype="<f4", count=count, offset=start + 4 * count),
        response_mask=mask,
        versions=info.versions,
    )


def _runs(mask: NDArray[np.uint8]) -> list[list[int]]:
    if len(mask) == 0:
        return []
    if mask.all():  # single-turn responses, by far the most
        return [[len(mask), 1]]
    edges = np.flatnonzero(np.diff(mask)) + 1
    bounds = [0, *edges.tolist(), len(mask)]
    return [[end - begin, int(mask[begin])] for begin, end in itertools.pairwise(bounds)]


def _parse(payload: bytes) -> tuple[PayloadInfo, int]:
    if len(payload) < _PREFIX.size:
        raise PayloadError("payload", f"{len(payload)} bytes are too few for a trajectory")
    magic, header_bytes = _PREFIX.unpack_from(payload)
    if magic != MAGIC:
        raise PayloadError("payload.magic", f"expected {MAGIC!r}, got {magic!r}")
    start = _PREFIX.size + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or start > len(payload):
        raise PayloadError("payload.header", f"header of {header_bytes} bytes in a payload of {len(payload)}")
    try:
        header: Any = msgpack.unpackb(payload[_PREFIX.size : start])
    except (ValueError, msgpack.UnpackException) as error:
        raise PayloadError("payload.header", f"not msgpack: {error}") from error
    if not isinstance(header, dict):
        raise PayloadError("payload.header", "expected a map")
    count = _check_arrays(header.get("arrays"))
    if len(payload) != start + 8 * count:
        raise PayloadError("payload", f"{len(payload) - start} bytes of arrays, {8 * count} declared")
    wire_versions = header.get("versions")
    if not isinstance(wire_versions, list):
        raise PayloadError("versions", "expected a list of runs")
    versions = VersionRuns.from_wire(wire_versions)
    if len(versions) != count:
        raise PayloadError("versions", f"runs cover {len(versions)} of {count} response tokens")
    mask_runs = _check_mask(header.get("mask"), count)
    return PayloadInfo(count, versions, mask_runs), start


def _check_arrays(declared: Any) -> int:
    if not isinstance(declared, list) or len(declared) != len(ARRAYS):
        raise PayloadError("arrays", f"expected {list(ARRAYS)}, got {declared!r}")
    counts = set()
    for item, (name, dtype) in zip(declared, ARRAYS.items(), strict=True):
        if not isinstance(item, list) or len(item) != 3 or item[0] != name:
            raise PayloadError(f"arrays.{name}", f"expected [{name!r}, {dtype!r}, count], got {item!r}")
        if item[1] != dtype:
            raise PayloadError(f"arrays.{name}.dtype", f"expected {dtype}, got {item[1]!r}")
        if type(item[2]) is not int or item[2] < 1:
            raise PayloadError(f"arrays.{name}.count", f"expected at least one token, got {item[2]!r}")
        counts.add(item[2])
    if len(counts) != 1:
        raise PayloadError("arrays", f"lengths differ: {sorted(counts)}")
    return int(counts.pop())


def _check_mask(wire: Any, count: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(wire, list):
        raise PayloadError("mask", "expected a list of runs")
    runs = []
    for index, item in enumerate(wire):
        good = isinstance(item, list) and len(item) == 2 and all(type(x) is int for x in item)
        if not good or item[0] < 1 or item[1] not in (0, 1):
            raise PayloadError(f"mask[{index}]", f"expected [length >= 1, 0 or 1], got {item!r}")
        runs.append((item[0], item[1]))
    if sum(length for length, _ in runs) != count:
        raise PayloadError("mask", f"runs cover {sum(length for length, _ in runs)} of {count} response tokens")
    return tuple(runs)
