"""Malformed members are refused with the field named, and what is around them is stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollmesh.buffer.client.client import PendingWrite
from rollmesh.buffer.server.member_validation import check_write
from rollmesh.buffer.store.records import Write
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory
from tests.buffer.mesh_fixture import make_failure, make_write

GRANT = pb.GroupGrant(group_id="train-1", lease_id="a1", attempt=1)
VERSIONS = [PolicyVersion(1, 3), PolicyVersion(1, 4)]


def check(write: PendingWrite) -> Write:
    return check_write(write.head, write.payload)


def changed(change: Callable[[PendingWrite], None]) -> PendingWrite:
    write = make_write(GRANT, 0, VERSIONS)
    change(write)
    return write


def test_a_sound_member_carries_its_versions() -> None:
    checked = check(make_write(GRANT, 1, VERSIONS))
    assert (checked.member, checked.scored, checked.ranges) == (1, True, "1:3:4")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("group_id", lambda w: w.head.ClearField("group_id")),
        ("meta.outcome", lambda w: w.head.meta.ClearField("outcome")),
        ("payload", lambda w: setattr(w, "payload", b"")),
        ("payload.magic", lambda w: setattr(w, "payload", b"XXXX" + w.payload[4:])),
        ("payload", lambda w: setattr(w, "payload", w.payload[:-4])),
        ("arrays.log_probs.dtype", lambda w: setattr(w, "payload", w.payload.replace(b"float32", b"float64"))),
        ("meta.response_tokens", lambda w: setattr(w.head.meta, "response_tokens", 7)),
        ("meta.prompt_tokens", lambda w: setattr(w.head.meta, "prompt_tokens", 0)),
        ("meta.reward", lambda w: setattr(w.head.meta, "reward", float("nan"))),
        ("meta.components.style", lambda w: w.head.meta.components.update({"style": float("inf")})),
        ("meta.oldest", lambda w: setattr(w.head.meta.oldest, "version", 9)),
        ("meta.newest", lambda w: setattr(w.head.meta.newest, "version", 9)),
    ],
)
def test_the_wrong_field_is_named(field: str, change: Callable[[PendingWrite], None]) -> None:
    with pytest.raises(PayloadError) as caught:
        check(changed(change))
    assert caught.value.field == field


def test_an_unscored_member_has_no_payload() -> None:
    write = make_failure(GRANT, 0)
    assert not check(write).scored
    write.payload = b"x"
    with pytest.raises(PayloadError, match="payload"):
        check(write)
    assert write.head.meta.outcome == trajectory.OUTCOME_ERROR
