"""Headers of versions on disk: whatever they say, nothing is read or written outside a bucket."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.safetensors_format import (
    LENGTH_BYTES,
    StoredTensor,
    header_length,
    metadata_of,
    parse_header,
)

POLICY = PolicyVersion(2, 7)


def header(begin: object = 0, end: object = 8, offset: object = 64) -> bytes:
    metadata = metadata_of(POLICY, "digest", {"w": offset})  # type: ignore[dict-item]  # wrong ones are tried
    return json.dumps({"__metadata__": metadata, "w": {"dtype": "F32", "data_offsets": [begin, end]}}).encode()


def test_tensors_are_where_the_header_says() -> None:
    text = header()
    assert parse_header(text, "digest", 100) == [StoredTensor(LENGTH_BYTES + len(text), 8, 64)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 93), "outside its bucket"),
        ((8, 0, 64), "outside its bucket"),
        ((0, 8, -1), "outside its bucket"),
        (("x", 8, 64), "cannot be read"),
        ((0, None, 64), "cannot be read"),
        ((0, float("inf"), 64), "cannot be read"),
        ((1 << 80, (1 << 80) + 8, 64), "outside any file"),
    ],
)
def test_what_lies_outside_is_refused(arguments: tuple[object, object, object], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        parse_header(header(*arguments), "digest", 100)


def test_another_version_is_refused() -> None:
    with pytest.raises(WeightsError, match="belongs to version 2:7"):
        parse_header(header(), "another", 100)


@given(st.binary(max_size=300))
def test_any_bytes_end_in_an_error(data: bytes) -> None:
    with pytest.raises(WeightsError):
        header_length(data[:LENGTH_BYTES])
        parse_header(data, "digest", 1 << 60)
