"""Many calls, large calls, calls that end early, and how fast it is.

A machine under load makes a good server slow. So times are only compared with times of the same server, with wide
margins, and several rounds have to agree before there is a finding.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.session import Answer, Session
from rollmesh.reward_service.conformance.transport import MAX_MESSAGE

SINGLE, PARALLEL, DEADLINE, CANCEL, LARGE, STORM = (
    "calls.single",
    "calls.parallel",
    "calls.deadline",
    "calls.cancel",
    "calls.large",
    "calls.storm",
)
RATES = "figures.items-per-s"
_ROUNDS = 3
# Calls quicker than this may take turns, and need no proof that they end early.
_QUICK_CALL_S, _QUICK_BATCH_S = 0.03, 1.0
_AT_ONCE = 8
# Share of the time that as many calls would take one after the other.
_SERIAL = 0.75
_STORM, _TRIES = 64, 3
_BATCHES = (1, 64, 512)
_REPETITIONS, _RATE_S = 3, 1.0
# Bytes of a message that are not texts, generously.
_FRAME = 256 << 10


async def single(session: Session) -> None:
    """One item in a call, several times: the measure of the other times."""
    seconds = []
    for n in range(5):
        answer = await session.call(session.many(1, f"single{n}"), probe=SINGLE if n == 0 else "")
        if answer.failure:
            return
        seconds.append(answer.seconds)
    session.seconds = statistics.median(seconds)
    session.figures["call_s"] = round(session.seconds, 6)


async def parallel(session: Session) -> None:
    """Calls at once do not wait for each other."""
    if session.info.max_concurrency == 1:
        session.skipped[PARALLEL] = "Info says max_concurrency: 1"
        return
    count = min(_AT_ONCE, session.info.max_concurrency or _AT_ONCE)
    ratios = []
    for turn in range(_ROUNDS):
        one = statistics.median([(await session.call(session.many(1, f"one{turn}{n}"))).seconds for n in range(3)])
        began = time.monotonic()
        calls = [session.call(session.many(1, f"many{turn}/{n}")) for n in range(count)]
        answers = await asyncio.gather(*calls)
        took = time.monotonic() - began
        if one < _QUICK_CALL_S or took < _SERIAL * count * one or any(answer.failure for answer in answers):
            return
        ratios.append(took / one)
    message = f"{count} calls at once take {statistics.median(ratios):.1f} times as long as one: they take turns"
    session.find("warning", PARALLEL, message, "work on calls side by side, or say Info.max_concurrency: 1")


async def deadline(session: Session) -> None:
    """A call that cannot be done in time is answered all the same, and not worked on afterwards."""
    items, whole = await _slow_batch(session, DEADLINE)
    if not whole:
        return
    late = 0
    for turn in range(_ROUNDS):
        answer = await session.call(items, whole / 2)
        if not answer.failure or answer.failure.kind != "deadline":
            return
        late += await _is_late(session, whole / 3, f"deadline{turn}")
    message = f"a call with {whole / 2:.2f} s to live was not answered by then"
    session.find("warning", DEADLINE, message, "answer items that would be late with `error` (code timeout)")
    if late == _ROUNDS:
        message = "the server continued to work on calls whose deadline had passed"
        session.find("warning", DEADLINE, message, "stop when the call has ended: its context tells you")


async def cancel(session: Session) -> None:
    """A call that its caller has given up is not worked on."""
    items, whole = await _slow_batch(session, CANCEL)
    if not whole:
        return
    for turn in range(_ROUNDS):
        calls = [asyncio.create_task(session.call(items)) for _ in range(_AT_ONCE)]
        await asyncio.sleep(whole / 4)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        if not await _is_late(session, whole, f"cancel{turn}"):
            return
    message = f"after {_AT_ONCE} cancelled calls, the next one had to wait for their work"
    session.find("warning", CANCEL, message, "stop when the call has ended: its context tells you")


async def _slow_batch(session: Session, probe: str) -> tuple[list[reward_pb2.ScoreItem], float]:
    """A batch with its time in seconds; 0 for a server that is quick with it, or fails."""
    items = session.many(session.most(256), probe)
    answers = [await session.call(items) for _ in range(3)]
    whole = min(answer.seconds for answer in answers)
    if whole < _QUICK_BATCH_S or any(answer.failure for answer in answers):
        session.skipped[probe] = f"a batch of {len(items)} takes less than {_QUICK_BATCH_S:g} s"
        return items, 0.0
    return items, whole


async def _is_late(session: Session, beyond_s: float, name: str) -> bool:
    """True if a call with one item has to wait for something, by that many seconds or more."""
    answer = await session.call(session.many(1, name))
    return answer.failure is not None or answer.seconds > max(beyond_s, 5 * session.seconds)


async def large(session: Session) -> None:
    """A message as large as callers send, and life after it."""
    bound = min(session.info.max_bytes or MAX_MESSAGE, MAX_MESSAGE) - _FRAME
    count = session.most(64)
    if bound < count:
        session.skipped[LARGE] = f"Info says max_bytes: {session.info.max_bytes}"
        return
    items = session.many(count, "large")
    for item in items:
        item.response = "x" * (bound // count)
        del item.response_ids[:]
    answer = await session.call(items)
    size = f"a message of {bound / (1 << 20):.0f} MiB"
    if answer.failure and answer.failure.kind == "exhausted":
        remedy = "raise its limit (gRPC's own is 4 MiB), or state the limit as Info.max_bytes"
        session.find("warning", LARGE, f"{size} was refused: {answer.failure}", remedy)
    elif answer.failure and answer.failure.kind != "deadline":
        message = f"{size} ended as {answer.failure}"
        session.find("error", LARGE, message, "refuse what is too large: RESOURCE_EXHAUSTED, HTTP 413")
    await _lives(session, LARGE, size)


async def storm(session: Session) -> None:
    """Many calls at once, each repeated while it is in progress, as callers do who get no answer."""
    calls = [session.many(session.most(8), f"storm{n}") for n in range(_STORM)]
    limit = min(session.timeout_s, max(1.0, 20 * session.seconds))
    answers = await asyncio.gather(*(session.call(items, limit) for items in calls * _TRIES))
    broken = [a.failure for a in answers if a.failure and a.failure.kind not in ("deadline", "busy", "exhausted")]
    if broken:
        message = f"{len(broken)} of {len(answers)} calls at once failed, such as: {broken[0]}"
        session.find(
            "error",
            STORM,
            message,
            "refuse what you have no room for: RESOURCE_EXHAUSTED, HTTP 429; let connections queue",
        )
    mixed = [a for items, a in zip(calls * _TRIES, answers, strict=True) if not _is_whole(items, a)]
    if mixed:
        message = f"{len(mixed)} of {len(answers)} calls at once were answered for other items"
        session.find("error", STORM, message, "keep nothing of a call where another one finds it")
    await _lives(session, STORM, f"{len(answers)} calls at once")


def _is_whole(items: Sequence[reward_pb2.ScoreItem], answer: Answer) -> bool:
    return answer.failure is not None or {r.item_id for r in answer.results} == {item.item_id for item in items}


async def _lives(session: Session, probe: str, after: str) -> None:
    answer = await session.call(session.many(1, f"{probe}/alive"))
    if answer.failure:
        session.find("error", probe, f"after {after} it answers no more: {answer.failure}", "survive what callers send")


async def rates(session: Session) -> None:
    """Items per second by items in a call; no finding, a figure."""
    if not session.seconds:
        session.skipped[RATES] = "a single item was not scored"
        return
    found = {}
    for size in _BATCHES:
        rate = await _rate(session, size)
        if rate is None:
            session.skipped[RATES] = f"{size} items take longer than a call may"
            break
        found[str(size)] = round(rate, 1)
    session.figures["items_per_s"] = found


async def _rate(session: Session, size: int) -> float | None:
    """Median of items per second over some repetitions; None where one fails."""
    measured: list[float] = []
    until = time.monotonic() + _RATE_S
    # At least one, and all that fit.
    for turn in range(_REPETITIONS):
        items = session.many(size, f"rate{size}/{turn}")
        step = session.most(size)
        parts = [items[first : first + step] for first in range(0, size, step)]
        began = time.monotonic()
        answers = await asyncio.gather(*map(session.call, parts))
        if any(answer.failure for answer in answers):
            return None
        measured.append(size / (time.monotonic() - began))
        if time.monotonic() > until:
            break
    return statistics.median(measured)
