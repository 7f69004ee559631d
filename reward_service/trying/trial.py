"""Scores rows with the scorer of a run, several groups at a time, and gives their outcomes in the order of the rows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice

from rollmesh.reward_service.client.client import RewardScorer
from rollmesh.reward_service.samples import SampleRow
from rollmesh.reward_service.trying.tried import Tried

# Groups that are scored at a time.
_AT_ONCE = 32


async def try_rows(
    scorer: RewardScorer, rows: Iterable[SampleRow], *, limit: int | None = None
) -> AsyncIterator[Tried]:
    """The outcome of each response, in the order of the rows.

    Args:
        scorer: that has been started.
        rows: consecutive ones of one name are one group.
        limit: most responses; None: all.

    Raises:
        DataError: a row cannot be read.
    """
    groups = _groups(rows, limit)
    running: deque[asyncio.Task[list[Tried]]] = deque()
    try:
        while True:
            # Rows are read from a disk that may be slow.
            for group in await asyncio.to_thread(lambda: list(islice(groups, _AT_ONCE - len(running)))):
                running.append(asyncio.create_task(_score(scorer, group)))
            if not running:
                return
            for tried in await running.popleft():
                yield tried
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _score(scorer: RewardScorer, group: list[SampleRow]) -> list[Tried]:
    items = [item for row in group for item in row.items()]
    for place, item in enumerate(items):
        # A run that was continued may have kept a response twice.
        item.item_id = f"{item.item_id}#{place}"
    began = time.monotonic()
    results = await scorer.score(items)
    seconds = time.monotonic() - began
    places = [(row, place) for row in group for place in range(len(row.responses))]
    return [
        Tried.of(
            result,
            name=row.name,
            member=row.members[place],
            seconds=seconds,
            recorded=row.recorded[place],
            step=row.step,
            data_source=row.data_source,
        )
        for (row, place), result in zip(places, results, strict=True)
    ]


def _groups(rows: Iterable[SampleRow], limit: int | None) -> Iterator[list[SampleRow]]:
    """Consecutive rows of one name, up to a number of responses."""
    group: list[SampleRow] = []
    left = limit
    for row in rows:
        if not row.responses:
            continue
        cut = row if left is None else row.first(left)
        if group and group[0].name != row.name:
            yield group
            group = []
        if left is not None:
            left -= len(cut.responses)
        if cut.responses:
            group.append(cut)
        if left == 0:
            break
    if group:
        yield group
