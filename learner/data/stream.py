"""The stream of prompt tasks after a cursor, tokenised window by window.

Invariants: the tasks after ordinal `o` depend on nothing but the dataset, the seed and `o`. A refused row keeps its
ordinal, so skipping one moves no other.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rollmesh.learner.data.order import Order
from rollmesh.learner.data.prompts import PromptEncoder, RefusedRow, TaskShape
from rollmesh.learner.data.records import RowSource
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.image_files import ImageFiles
from rollmesh.protos import trajectory_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskWindow:
    """A run of consecutive ordinals.

    Attributes:
        tasks: the usable ones, in increasing order of ordinals.
        last_ordinal: last ordinal looked at: the cursor for the next window.
        end: no ordinal comes after it.
    """

    tasks: list[trajectory_pb2.PromptTask]
    last_ordinal: int
    end: bool


class PromptStream:
    """Prompt tasks of a training set.

    Args:
        source: the rows.
        order: which row has which ordinal.
        encoder: makes tasks of rows.
        shape: group size and sampling parameters.
        on_refused: skip rows that cannot be rolled out (and count them), or refuse them with a DataError.
        images: where those of tasks are written, for who trains on them; None: they are not trained on.
    """

    def __init__(
        self,
        source: RowSource[Row],
        order: Order,
        encoder: PromptEncoder,
        shape: TaskShape,
        *,
        on_refused: Literal["skip", "refuse"],
        images: ImageFiles | None = None,
    ) -> None:
        self._source = source
        self._order = order
        self._encoder = encoder
        self._shape = shape
        self._on_refused = on_refused
        self._images = images
        self.refused: Counter[str] = Counter()
        """Rows refused so far, by reason."""

    @property
    def last_ordinal(self) -> int | None:
        """The last ordinal of the data; None: there is no end of them."""
        return self._order.last_ordinal

    def check(self, chunk: int = 1024) -> None:
        """Checks every row now where none may be skipped, so that a run is refused at its start.

        Raises:
            DataError: the first row that cannot be rolled out.
        """
        if self._on_refused == "refuse":
            for start in range(0, len(self._source), chunk):
                indices = range(start, min(start + chunk, len(self._source)))
                for index, row in zip(indices, self._source.rows(indices), strict=True):
                    self._accept(self._encoder.encode(row, self._shape, number=index, task_id="check", ordinal=1))

    def after(self, ordinal: int, count: int) -> TaskWindow:
        """At least one and at most `count` tasks after `ordinal` (fewer only at the end of the data).

        Raises:
            DataError: a refused row where rows may not be skipped, or a whole epoch of refused rows.
            StoreError: images cannot be written.
        """
        tasks: list[trajectory_pb2.PromptTask] = []
        cursor, end, barren = ordinal, self._ends_at(ordinal), 0
        while len(tasks) < count and not end:
            chunk = self._ordinals(cursor, count - len(tasks))
            found = self._encode(chunk)
            tasks.extend(found)
            barren = 0 if found else barren + len(chunk)
            if barren >= self._order.rows:
                why = ", ".join(f"{rows} x {reason.replace('_', ' ')}" for reason, rows in self.refused.items())
                raise DataError(
                    f"no prompt of the dataset can be rolled out: {why}",
                    hint="raise rollout.max_prompt_tokens, or look at data.prompt_key",
                )
            cursor = chunk[-1]
            end = self._ends_at(cursor)
        return TaskWindow(tasks, cursor, end)

    def _ends_at(self, ordinal: int) -> bool:
        return self._order.last_ordinal is not None and ordinal >= self._order.last_ordinal

    def _ordinals(self, cursor: int, count: int) -> Sequence[int]:
        last = cursor + count
        if self._order.last_ordinal is not None:
            last = min(last, self._order.last_ordinal)
        return range(cursor + 1, last + 1)

    def _encode(self, ordinals: Sequence[int]) -> list[trajectory_pb2.PromptTask]:
        places = [self._order.locate(ordinal) for ordinal in ordinals]
        rows = self._source.rows([row for _, row in places])
        tasks = []
        for ordinal, (epoch, index), row in zip(ordinals, places, rows, strict=True):
            name = f"{epoch}-{index}"
            encoded = self._encoder.encode(row, self._shape, number=index, task_id=name, ordinal=ordinal)
            if (task := self._accept(encoded)) is not None:
                if self._images is not None:
                    task.image_digests.extend(self._images.write(task.images))
                tasks.append(task)
        return tasks

    def _accept(self, encoded: trajectory_pb2.PromptTask | RefusedRow) -> trajectory_pb2.PromptTask | None:
        if not isinstance(encoded, RefusedRow):
            return encoded
        refused = encoded
        if self._on_refused == "refuse":
            raise DataError(
                f"{refused.origin}: {refused.reason.replace('_', ' ')} ({refused.tokens} tokens)",
                hint="raise rollout.max_prompt_tokens, or set data.on_long_prompt: skip",
            )
        self.refused[refused.reason] += 1
        log.info("prompt skipped", extra={"row": refused.origin, "reason": refused.reason, "tokens": refused.tokens})
        return None
