"""A worker of coroutine functions, as a thread of this process."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollmesh.reward_service.functions import adapt
from rollmesh.reward_service.outcomes import Scored
from rollmesh.reward_service.workers import event_loop
from rollmesh.reward_service.workers.messages import DONE, unpack_answer, unpacker
from rollmesh.reward_service.workers.shared_page import SharedPage


def test_the_page_shows_the_coroutine_that_runs_and_none_while_all_wait(make_item: Any) -> None:
    page, descriptor = SharedPage.create()
    os.close(descriptor)
    shown: list[int | None] = []

    async def score(solution_str: str, ground_truth: Any) -> float:
        shown.append(page.unit)
        # The loop's own turn, between two of this coroutine.
        asyncio.get_running_loop().call_soon(lambda: shown.append(page.unit))
        await asyncio.sleep(0)
        shown.append(page.unit)
        return 1.0

    ours, theirs = socket.socketpair()
    first = [0, [[7, math.inf, [make_item().SerializeToString()]]]]
    with ThreadPoolExecutor(1) as thread, ours:
        served = thread.submit(event_loop.serve, theirs, page, [adapt("score", score)], 240.0, first)
        answers = unpacker()
        while (message := next(answers, None)) is None:
            answers.feed(ours.recv(1 << 16))
        ours.shutdown(socket.SHUT_RDWR)
        served.result()
    kind, ((unit, answer),) = message
    assert (kind, unit) == (DONE, 7)
    assert [type(outcome) for outcome in unpack_answer(answer)] == [Scored]
    assert shown == [7, None, 7]
    assert page.unit is None
    page.close()
