"""Checks of numbers and heartbeats in requests; those of names and short texts lie in `mesh.request_fields`.

Numbers are exact in Redis' scripts, where they are doubles, and small enough to work on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rollmesh.buffer.protocol.limits import (
    GAUGE_CHARACTERS,
    MAX_GAUGES,
    MAX_MEMBERS,
    MAX_ORDINAL,
    MAX_TASK_BYTES,
)
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.request_fields import check_text
from rollmesh.mesh.text import WAITING_CHARACTERS
from rollmesh.mesh.trajectory.images import MAX_IMAGE_BYTES
from rollmesh.mesh.trajectory.versions import checked_version
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2 as membership
from rollmesh.protos import trajectory_pb2 as trajectory

_GROUP_ID = re.compile(r"(?:train|eval)-[0-9]{1,14}")
# Scripts count in doubles.
_MAX_NUMBER = 2**53 - 1


def check_tasks(tasks: Sequence[trajectory.PromptTask], reserves: Sequence[int], max_bytes: int) -> None:
    """Refuses prompt tasks that cannot be stored, or never admitted.

    Args:
        tasks: to be seeded.
        reserves: payload bytes that the group of each task may need at most.
        max_bytes: the byte budget.

    Raises:
        PayloadError: naming the field.
    """
    for index, (task, reserve) in enumerate(zip(tasks, reserves, strict=True)):
        where = f"tasks[{index}]"
        if not 1 <= task.n <= MAX_MEMBERS:
            raise PayloadError(f"{where}.n", f"must be at least 1 and at most {MAX_MEMBERS}, got {task.n}")
        if task.greedy >= task.n:
            raise PayloadError(f"{where}.greedy", f"leaves none of {task.n} members to be trained")
        if not task.prompt_ids or len(task.prompt_ids) % 4:
            raise PayloadError(f"{where}.prompt_ids", f"{len(task.prompt_ids)} bytes are not int32 ids")
        if (size := sum(map(len, task.images))) > MAX_IMAGE_BYTES:
            raise PayloadError(
                f"{where}.images",
                f"{size} bytes, a prompt's images may have {MAX_IMAGE_BYTES}",
                hint="scale them down, or store them as JPEG",
            )
        if (size := task.ByteSize()) > MAX_TASK_BYTES:
            raise PayloadError(
                where, f"{size} bytes, a prompt task may have {MAX_TASK_BYTES}", hint="shorten its texts"
            )
        if not 1 <= task.ordinal <= MAX_ORDINAL:
            raise PayloadError(f"{where}.ordinal", f"counts from 1 to {MAX_ORDINAL}, got {task.ordinal}")
        if reserve > max_bytes:
            raise PayloadError(
                f"{where}.sampling.max_tokens",
                f"{task.n} responses of {task.sampling.max_tokens} tokens may need {reserve} bytes, the buffer "
                f"holds {max_bytes}",
                hint="raise buffer.max_bytes, or lower rollout.max_response_tokens",
            )
        if task.HasField("pinned"):
            check_policy(f"{where}.pinned", task.pinned)


def check_policy(field: str, policy: trajectory.PolicyVersion) -> None:
    """Refuses a policy version that no run reaches.

    Raises:
        PayloadError: naming the field.
    """
    checked_version(f"{field}.incarnation", policy.incarnation)
    checked_version(f"{field}.version", policy.version)


def checked_number(field: str, value: int, *, least: int = 0) -> int:
    """A number that a script compares.

    Raises:
        PayloadError: it is too small, or not exact there.
    """
    if not least <= value <= _MAX_NUMBER:
        raise PayloadError(field, f"must be at least {least} and at most {_MAX_NUMBER}, got {value}")
    return value


def check_reassertion(request: pb.ReassertRequest) -> None:
    """Refuses numbers that no run reaches.

    Raises:
        PayloadError: naming the field.
    """
    checked_version("incarnation", request.incarnation)
    checked_version("version", request.version)
    checked_version("committed", request.committed)
    checked_number("doubt", request.doubt)
    for index, takeover in enumerate(request.takeovers):
        checked_version(f"takeovers[{index}].incarnation", takeover.incarnation)
        checked_version(f"takeovers[{index}].resumed_at", takeover.resumed_at)
    for index, use in enumerate(request.uses):
        check_group_id(f"uses[{index}].group_id", use.group_id)
        if int(use.group_id.rpartition("-")[2]) > MAX_ORDINAL:
            raise PayloadError(f"uses[{index}].group_id", f"{use.group_id}: counts to {MAX_ORDINAL}")
        checked_version(f"uses[{index}].train_version", use.train_version)
        if use.ordinal > MAX_ORDINAL:
            raise PayloadError(f"uses[{index}].ordinal", f"counts to {MAX_ORDINAL}, got {use.ordinal}")


def check_group_id(field: str, value: str) -> None:
    """Refuses text that is no group's id.

    Raises:
        PayloadError: anything but a table's name and a number.
    """
    if not _GROUP_ID.fullmatch(value):
        raise PayloadError(field, f"not a group id: {value[:40]!r}", hint="as in a grant or a lease")


def check_status(request: membership.HeartbeatRequest) -> None:
    """Refuses a heartbeat that says more than all members together could, or gauges that are no numbers.

    Raises:
        PayloadError: naming the field.
    """
    check_text("waiting_reason", request.waiting_reason, WAITING_CHARACTERS)
    check_text("endpoint", request.endpoint)
    if len(request.gauges) > MAX_GAUGES:
        raise PayloadError("gauges", f"{len(request.gauges)} of them, a member may have {MAX_GAUGES}")
    for name, value in request.gauges.items():
        check_text("gauges", name, GAUGE_CHARACTERS)
        if not math.isfinite(value):
            raise PayloadError(f"gauges.{name}", f"{value} is not a number", hint="leave it out")
