"""Digests of weights: xxh3-128, hex. They find damage and mix-ups; they are no defence against an attacker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import xxhash

from rollmesh.protos import weights_pb2

Buffer: TypeAlias = bytes | bytearray | memoryview

# An incremental xxh3-128: `update(buffer)`, `hexdigest()`.
Digest = xxhash.xxh3_128


def digest_of(data: Buffer) -> str:
    """xxh3-128 of the bytes, hex (32 characters)."""
    return xxhash.xxh3_128_hexdigest(data)


def manifest_digest(tensors: Iterable[weights_pb2.TensorEntry]) -> str:
    """xxh3-128 over names, dtypes, shapes, ties and digests in order: identifies the weights, not their places.

    Two versions with equal weights have equal digests, whatever run, bucket size or transport they belong to.
    """
    lines = (f"{t.name}\n{t.dtype}\n{','.join(map(str, t.shape))}\n{t.tied_to}\n{t.digest}\n" for t in tensors)
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())
