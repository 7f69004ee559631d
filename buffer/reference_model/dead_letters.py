"""Failed groups with their cause, and their prompts, which can be driven again.

Bounded: the oldest note makes room. A note keeps its prompt until it is driven again, except where the learner itself
took the task back. Driving a prompt again makes a new task of it, with a parent; each note once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rollmesh.buffer.reference_model.group_states import Group, Task

WITHDRAWN = "withdrawn"


@dataclass(slots=True)
class FailureNote:
    """A failed group. `kept`: its prompt is."""

    task: Task
    reason: str
    attempts: int
    causes: tuple[str, ...]
    kept: bool
    redriven: bool = False


class DeadLetters:
    """The notes of one table, oldest first.

    Args:
        limit: notes kept.
    """

    def __init__(self, limit: int) -> None:
        self.notes: OrderedDict[str, FailureNote] = OrderedDict()
        self._limit = limit

    def add(self, group: Group, reason: str) -> None:
        """Notes a failed group."""
        self.notes[group.group_id] = FailureNote(
            group.task,
            reason,
            group.attempts,
            tuple(group.causes),
            kept=reason != WITHDRAWN and group.task.n > 0,
        )
        while len(self.notes) > self._limit:
            self.notes.popitem(last=False)

    def redrive(self, group_ids: Iterable[str]) -> tuple[list[Task], list[str]]:
        """Tasks to be queued, and the groups without a kept prompt."""
        tasks, unknown = [], []
        for group_id in group_ids:
            note = self.notes.get(group_id)
            if note is None or not note.kept:
                unknown.append(group_id)
                continue
            note.kept, note.redriven = False, True
            tasks.append(replace(note.task, parent=group_id, refills=0))
        return tasks, unknown
