"""What numbers of a request may be: exact in Redis' scripts, where they are doubles, and small enough to work on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mesh.errors import PayloadError
from mesh.images import MAX_IMAGE_BYTES
from mesh.versions import checked_version
from protos import buffer_pb2 as pb
from protos import trajectory_pb2 as trajectory

# Members of a group: its script touches each of them.
MAX_MEMBERS = 4096
# Numbers of prompts and groups: scripts write them into texts, with 14 digits, and groups leap ahead of them.
MAX_ORDINAL = 10**13
# Names that become parts of keys and of packed lists.
_ID_BYTES = 256


def check_tasks(
    tasks: Iterable[trajectory.PromptTask], reserve: Callable[[trajectory.PromptTask], int], max_bytes: int
) -> None:
    """Refuses prompt tasks that cannot be stored, or never admitted.

    Args:
        tasks: to be seeded.
        reserve: payload bytes that a task's group may need.
        max_bytes: the byte budget.

    Raises:
        PayloadError: naming the field.
    """
    for index, task in enumerate(tasks):
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
        if not 1 <= task.ordinal <= MAX_ORDINAL:
            raise PayloadError(f"{where}.ordinal", f"counts from 1 to {MAX_ORDINAL}, got {task.ordinal}")
        if reserve(task) > max_bytes:
            raise PayloadError(
                f"{where}.sampling.max_tokens",
                f"{task.n} responses of {task.sampling.max_tokens} tokens may need {reserve(task)} bytes, the buffer "
                f"holds {max_bytes}",
                hint="raise buffer.max_bytes, or lower rollout.max_response_tokens",
            )
        check_policy(f"{where}.pinned", task.pinned)


def check_policy(field: str, policy: trajectory.PolicyVersion) -> None:
    """Refuses a policy version that no run reaches.

    Raises:
        PayloadError: naming the field.
    """
    checked_version(f"{field}.incarnation", policy.incarnation)
    checked_version(f"{field}.version", policy.version)


def check_reassertion(request: pb.ReassertRequest) -> None:
    """Refuses numbers that no run reaches.

    Raises:
        PayloadError: naming the field.
    """
    checked_version("incarnation", request.incarnation)
    checked_version("version", request.version)
    checked_version("committed", request.committed)
    for index, takeover in enumerate(request.takeovers):
        checked_version(f"takeovers[{index}].incarnation", takeover.incarnation)
        checked_version(f"takeovers[{index}].resumed_at", takeover.resumed_at)
    for index, use in enumerate(request.uses):
        number = use.group_id.rpartition("-")[2]
        if not (number.isascii() and number.isdecimal() and int(number) <= MAX_ORDINAL):
            raise PayloadError(f"uses[{index}].group_id", f"{use.group_id[:40]!r} is no group id")
        checked_version(f"uses[{index}].train_version", use.train_version)
        if use.ordinal > MAX_ORDINAL:
            raise PayloadError(f"uses[{index}].ordinal", f"counts to {MAX_ORDINAL}, got {use.ordinal}")


def check_id(field: str, value: str) -> None:
    """Refuses a name that cannot be part of a key.

    Raises:
        PayloadError: empty, too long, or with characters that separate.
    """
    if not value or len(value) > _ID_BYTES or any(c in value for c in "| ,\n\x00"):
        raise PayloadError(field, f"not a name: {value[:40]!r}")
