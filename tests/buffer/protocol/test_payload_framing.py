"""Payloads next to the parsed part of a message: wherever they stand, they are read as they were written."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.buffer.client.sample_stream import _received_groups
from rollmesh.buffer.protocol.framing import field_header
from rollmesh.buffer.protocol.payload_framing import join_message, split_parser, split_payloads
from rollmesh.mesh.errors import PayloadError
from rollmesh.protos import buffer_pb2 as pb

NUMBER = pb.WriteRequest.DESCRIPTOR.fields_by_name["payloads"].number
parse = split_parser(pb.WriteRequest, "payloads")


def request(payloads: list[bytes]) -> pb.WriteRequest:
    writes = [pb.MemberWrite(group_id="g", payload_bytes=len(payload)) for payload in payloads]
    return pb.WriteRequest(table="train", sequence=7, writes=writes)


@given(st.lists(st.binary(max_size=20_000), max_size=5))
def test_what_is_joined_is_the_message_and_comes_apart(payloads: list[bytes]) -> None:
    head = request(payloads)
    data = join_message(NUMBER, payloads, [head.SerializeToString()])
    whole = pb.WriteRequest(payloads=b"".join(payloads))
    whole.MergeFrom(head)
    assert pb.WriteRequest.FromString(data) == whole
    for written in (data, whole.SerializeToString()):
        parts = parse(written)
        assert [
            bytes(p) for p in split_payloads(parts.payloads, [w.payload_bytes for w in parts.message.writes])
        ] == payloads
        parts.message.ClearField("payloads")
        assert parts.message == head


@given(st.binary(max_size=200), st.binary(max_size=40))
def test_any_bytes_are_understood_as_protobuf_does_or_refused_by_it(payloads: bytes, rest: bytes) -> None:
    for data in (rest, field_header(NUMBER, len(payloads)) + payloads + rest):
        try:
            expected = pb.WriteRequest.FromString(data)
        except DecodeError:
            with pytest.raises(DecodeError):
                parse(data)
            continue
        parts = parse(data)
        assert bytes(parts.payloads) == expected.payloads
        parts.message.ClearField("payloads")
        expected.ClearField("payloads")
        assert parts.message.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


@pytest.mark.parametrize("wrong", [[3, 3], [3, 1], []])
def test_lengths_that_do_not_add_up_are_refused(wrong: list[int]) -> None:
    assert [bytes(part) for part in split_payloads(memoryview(b"abcde"), [3, 0, 2])] == [b"abc", b"", b"de"]
    with pytest.raises(PayloadError, match="payload_bytes"):
        split_payloads(memoryview(b"abcde"), wrong)


def test_groups_whose_payloads_cannot_be_told_apart_come_without(caplog: pytest.LogCaptureFixture) -> None:
    groups = [
        pb.LeasedGroup(group_id=name, payload_bytes=sizes) for name, sizes in (("a", [2, 0]), ("b", []), ("c", [1]))
    ]
    response = pb.SampleResponse(groups=groups)
    found = [
        (a.leased.group_id, [bytes(p) for p in a.payloads]) for a in _received_groups(response, memoryview(b"xyz"))
    ]
    assert found == [("a", [b"xy", b""]), ("b", []), ("c", [b"z"])]
    assert not caplog.records
    found = [(a.leased.group_id, list(a.payloads)) for a in _received_groups(response, memoryview(b"xyz!"))]
    assert found == [("a", []), ("b", []), ("c", [])]
    assert "cannot be assigned to them" in caplog.text
