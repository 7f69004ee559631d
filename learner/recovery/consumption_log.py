"""The consumption log: which groups each optimizer step used, append-only, next to the checkpoints.

Invariant: a line is on disk (fsync) after the claim that it records and before the optimizer step that uses the groups.
So a group that was trained is in the log, even where Redis has lost acknowledged state. Trained on the surviving
lineage are the lines of each incarnation below the version at which its successor resumed. A line without its step,
because the learner died, lies at or above that version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rollmesh.mesh.errors import DataError

LOG_NAME = "consumption.jsonl"
"""Name of the log in the run folder."""


class UsedGroup(NamedTuple):
    """A group in a batch.

    Attributes:
        group_id: the group.
        members: those that were trained.
        ordinal: of its prompt task.
        use: 1 for its first use on the surviving lineage; (group id, use) is trained at most once.
    """

    group_id: str
    members: Sequence[int]
    ordinal: int
    use: int


@dataclass(frozen=True, slots=True)
class StepUse:
    """A line of the log: the groups of one step.

    Attributes:
        incarnation: learner that used the groups.
        train_version: version that was trained; the step made `train_version + 1`.
        resumed_at: version at which this incarnation began.
        claimed_ns: Unix time of the claim.
        groups: in the order of the batch.
    """

    incarnation: int
    train_version: int
    resumed_at: int
    claimed_ns: int
    groups: Sequence[UsedGroup]


class ConsumptionLog:
    """Appends lines to `path`; a torn last line of a killed learner is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: bytes that the disk has refused are not written again when the log is closed.
        self._file = path.open("ab", buffering=0)
        _cut_torn_line(path)

    def append(self, use: StepUse) -> None:
        """Writes one line and waits until it is on disk.

        Raises:
            DataError: the disk refuses.
        """
        line = {
            "incarnation": use.incarnation,
            "train_version": use.train_version,
            "resumed_at": use.resumed_at,
            "claimed_ns": use.claimed_ns,
            "groups": [[g.group_id, list(g.members), g.ordinal, g.use] for g in use.groups],
        }
        try:
            rest = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DataError(
                f"cannot write {self._path}: {error.strerror}", hint="free space, or set run.dir"
            ) from error

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> Iterator[StepUse]:
    """The complete lines of a log, oldest first.

    Raises:
        DataError: a line in the middle of the log is not readable.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
                groups = [
                    UsedGroup(str(group_id), [int(m) for m in members], int(ordinal), int(use))
                    for group_id, members, ordinal, use in entry["groups"]
                ]
                yield StepUse(
                    int(entry["incarnation"]),
                    int(entry["train_version"]),
                    int(entry["resumed_at"]),
                    int(entry["claimed_ns"]),
                    groups,
                )
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}, line {number} is damaged: {error}") from error


def surviving_uses(uses: Sequence[StepUse], takeovers: Mapping[int, int] | None = None) -> list[StepUse]:
    """The uses with training in the newest incarnation's weights, in the order of their versions.

    Args:
        uses: all lines.
        takeovers: the versions from which incarnations continued, where they have no line yet.

    A repeated line of the same step (a claim that was tried again with other groups) is superseded by the last.
    """
    resumed = {**(takeovers or {}), **{use.incarnation: use.resumed_at for use in uses}}
    last = {(use.incarnation, use.train_version): use for use in uses}
    return [
        use
        for (incarnation, version), use in sorted(last.items())
        if all(version < at for later, at in resumed.items() if later > incarnation)
    ]


def _cut_torn_line(path: Path) -> None:
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
