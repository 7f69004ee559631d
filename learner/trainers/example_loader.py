"""Rows on their way into a batch: read and tokenized ahead, by all processes together.

Every process needs a whole batch to plan it. Each encodes its share of the rows and sends it to the others. So the time
of tokenizers does not grow with the number of processes. It passes in a thread, while the batch before trains.

Invariant: calls line up. Processes begin the same loads in the same order, and where one meets an error all raise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import msgpack
import numpy as np

from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.data.examples import Example, ExampleSource, sequence_from
from rollmesh.learner.engines.world import World, gather_bytes
from rollmesh.mesh.errors import DataError, StuckError

Examples = list[Example | None]
# Longest wait for a load at the end: where another process has failed, it may never come.
_CLOSE_S = 10.0


class ExampleLoader:
    """Loads examples in a thread of its own; making and closing it is collective.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = world.lend_group() if world.processes > 1 else None
        self._thread = ThreadPoolExecutor(1, "examples")
        self._last: Future[Examples] | None = None

    def begin(self, source: ExampleSource, rows: Sequence[int]) -> Future[Examples]:
        """Begins to load some rows; they come in that order, the same in every process."""
        self._last = self._thread.submit(self._load, source, rows)
        return self._last

    def take(self, loading: Future[Examples]) -> Examples:
        """Waits for a load.

        Raises:
            DataError: in every process, where a row has not the form that the trainer needs in one of them.
            StuckError: the rows do not come.
        """
        within_s = self._world.timeout.total_seconds()
        try:
            return loading.result(within_s)
        except TimeoutError:
            raise StuckError(
                f"the rows of the next batch are not read within {within_s:.0f} s",
                hint="see to the disk that holds data.train",
            ) from None

    def close(self) -> None:
        """Ends the thread, once its last load is over."""
        self._thread.shutdown(wait=False)
        idle = self._last is None or not wait([self._last], _CLOSE_S).not_done
        if self._group is not None and idle:
            self._world.take_back(self._group)

    def _load(self, source: ExampleSource, rows: Sequence[int]) -> Examples:
        if self._group is None:
            return list(source.rows(rows))
        processes = self._world.processes
        message = _message(source, rows[self._world.process :: processes])
        answers = [msgpack.unpackb(answer) for answer in gather_bytes(message, self._group)]
        for answer in answers:
            if isinstance(answer, dict):
                raise DataError(answer["message"], hint=answer["hint"])
        return [_unpacked(answers[place % processes][place // processes]) for place in range(len(rows))]


def _message(source: ExampleSource, rows: Sequence[int]) -> bytes:
    """Examples as msgpack, or the error by which they do not come."""
    answer: Any
    try:
        answer = [_packed(example) for example in source.rows(rows)]
    except DataError as error:
        answer = {"message": error.message, "hint": error.hint}
    except Exception as error:  # noqa: BLE001 - whatever it is, the other processes wait for this one
        answer = {"message": f"{type(error).__name__}: {error}", "hint": ""}
    packed: bytes = msgpack.packb(answer)
    return packed


def _packed(example: Example | None) -> Any:
    if example is None:
        return None
    return [[_bytes(sequence) for sequence in example.sequences], dict(example.values)]


def _bytes(sequence: TrainSequence) -> list[bytes]:
    if sequence.images is not None:
        raise DataError("sequences with images do not travel between processes", hint="train on them in one process")
    return [array.tobytes() for array in (sequence.prompt_ids, sequence.response_ids, sequence.response_mask)]


def _unpacked(packed: Any) -> Example | None:
    if packed is None:
        return None
    sequences = []
    for prompt, response, mask in packed[0]:
        prompt_ids, response_ids = (np.frombuffer(part, dtype=np.int32) for part in (prompt, response))
        sequences.append(sequence_from(prompt_ids, response_ids, np.frombuffer(mask, dtype=np.uint8)))
    return Example(tuple(sequences), {name: tuple(values) for name, values in packed[1].items()})
