"""The content key of an item: equal for items to which a deterministic scorer of texts gives the same answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from rollmesh.protos import reward_pb2

SIZE = 32
"""Bytes of a key."""
_PERSON = b"rollmesh item 1"


def content_key(item: reward_pb2.ScoreItem) -> bytes:
    """The key of an item's content: data_source, prompt, response, ground truth, extra_info, images and messages.

    Ids, origin, tokens, spans and the caller's own `content_key` do not count. Two items that differ in what counts
    have different keys, whatever their texts hold: each field is hashed with its length.

    Returns:
        `SIZE` bytes, the same on every host and in every version of Python.
    """
    return digest(_fields(item), person=_PERSON)


def digest(fields: Iterable[bytes], *, person: bytes) -> bytes:
    """A hash of fields, each with its length, so that no two lists of fields are confused.

    Args:
        person: what is hashed, at most 16 bytes: hashes of different things never agree.
    """
    state = hashlib.blake2b(digest_size=SIZE, person=person)
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()


def _fields(item: reward_pb2.ScoreItem) -> Iterator[bytes]:
    yield item.data_source.encode()
    yield item.prompt.encode()
    yield item.response.encode()
    yield item.ground_truth_json.encode()
    yield item.extra_info_json.encode()
    yield item.messages_json.encode()
    for image in item.images:
        yield image.uri.encode()
        yield image.sha256
