"""ScoreStream: results as they come, and the stream's end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.judgement import faults_of_answer
from rollmesh.reward_service.conformance.session import Session, changed_totals
from rollmesh.reward_service.conformance.transport import CallError, Stream

ANSWERS, EARLY, SLOW, CANCEL, TIMEOUT, VANISH = (
    "stream.answers",
    "stream.early",
    "stream.slow-item",
    "stream.cancel",
    "stream.timeout",
    "stream.vanish",
)
_ENDS = "end the stream when the caller has closed its side and each item has its result"
# An item is slow that takes so many seconds, and so many times as long as most others.
_SLOW_S, _SLOWER, _ROUNDS = 0.3, 5, 3


def _open(session: Session, probe: str, *, two_way: bool = False) -> Stream | None:
    """A stream, where there are any of the kind."""
    if not session.info.streams:
        session.skipped[probe] = "Info does not say streams"
        return None
    if two_way and not session.transport.two_way:
        session.skipped[probe] = "over HTTP a stream has all its items at once"
        return None
    return session.transport.stream(session.timeout_s)


async def _send(stream: Stream, items: Sequence[reward_pb2.ScoreItem], timeout_ms: int = 0) -> None:
    for item in items:
        await stream.send(reward_pb2.ScoreStreamRequest(item=item, timeout_ms=timeout_ms))


async def _finish(
    session: Session, probe: str, stream: Stream, items: Sequence[reward_pb2.ScoreItem], timeout_ms: int = 0
) -> list[reward_pb2.ScoreResult] | None:
    """Sends items, closes, and reads to the end; results in their order, or None where the stream failed."""
    found: list[reward_pb2.ScoreResult] = []
    try:
        await _send(stream, items, timeout_ms)
        await stream.close()
        async for result in stream.results():
            found.append(result)  # noqa: PERF401 - a stream that fails has sent some
    except CallError as error:
        missing = len(items) - len(found)
        words = f"with {missing} of {len(items)} results missing" if missing else "after the last result"
        session.find("error", probe, f"the stream ended as {error}, {words}", _ENDS)
        return None
    return found


def _judge(
    session: Session,
    probe: str,
    items: Sequence[reward_pb2.ScoreItem],
    results: Sequence[reward_pb2.ScoreResult],
) -> None:
    for severity, message, remedy in faults_of_answer(items, results):
        session.find(severity, probe, message, remedy)


async def answers(session: Session) -> None:
    """The sample items get the scores that Score gives them."""
    if (stream := _open(session, ANSWERS)) is None:
        return
    items = session.samples[: session.most(len(session.samples))]
    found = await _finish(session, ANSWERS, stream, items)
    if found is None:
        return
    _judge(session, ANSWERS, items, found)
    unary = (await session.call(items)).totals
    streamed = {result.item_id: result.scored.total for result in found if result.HasField("scored")}
    changed = changed_totals(unary, streamed)
    if changed and session.is_repeatable and not session.info.needs_group:
        key = min(changed)
        message = f"{key!r} got {unary[key]:g} by Score and {streamed[key]:g} by ScoreStream"
        session.find("error", ANSWERS, message, "score in one place, whatever the call")


async def early(session: Session) -> None:
    """A result comes while the caller's side is open."""
    if (stream := _open(session, EARLY, two_way=True)) is None:
        return
    if session.info.needs_group:
        session.skipped[EARLY] = "Info says needs_group"
        stream.cancel()
        return
    try:
        await _send(stream, session.many(1, "early"))
        results = stream.results()
        await asyncio.wait_for(anext(results), session.timeout_s / 2)
    except TimeoutError:
        message = f"no result within {session.timeout_s / 2:g} s while the caller's side is open"
        session.find("error", EARLY, message, "answer each item when it is done, not when the caller closes")
    except (CallError, StopAsyncIteration) as error:
        session.find("error", EARLY, f"the stream ended while the caller's side is open: {error}", _ENDS)
    finally:
        stream.cancel()


async def slow_item(session: Session) -> None:
    """A slow item, sent first, holds no other."""
    if not session.info.streams:
        session.skipped[SLOW] = "Info does not say streams"
        return
    seconds = [(await session.call([item])).seconds for item in session.samples]
    usual = sorted(seconds)[len(seconds) // 2]
    slowest = max(seconds)
    if len(seconds) < 3 or slowest < max(_SLOW_S, _SLOWER * usual):
        session.skipped[SLOW] = "no sample item is much slower than the others; a sample file may have one"
        return
    slow = session.samples[seconds.index(slowest)]
    quick = [item for item, took in zip(session.samples, seconds, strict=True) if took < slowest / 2]
    for _ in range(_ROUNDS):
        found = await _finish(session, SLOW, session.transport.stream(session.timeout_s), [slow, *quick])
        if found is None:
            return
        order = [result.item_id for result in found]
        if slow.item_id not in order or order.index(slow.item_id) >= len(quick) / 2:
            return
    message = f"{slow.item_id!r} takes {slowest:.2f} s, and the results of quick items waited for it"
    session.find("error", SLOW, message, "work on items side by side, and answer each when it is done")


async def cancel(session: Session) -> None:
    """A cancelled item has one result, a cancel of nothing none."""
    if (stream := _open(session, CANCEL, two_way=True)) is None:
        return
    items = session.many(2, "cancel")
    try:
        await stream.send(reward_pb2.ScoreStreamRequest(cancel=f"{session.nonce}/nothing"))
        await _send(stream, items[:1])
        await stream.send(reward_pb2.ScoreStreamRequest(cancel=items[0].item_id))
    except CallError as error:
        session.find("error", CANCEL, f"the stream ended at a cancel: {error}", "ignore a cancel of an unknown item")
        return
    found = await _finish(session, CANCEL, stream, items[1:])
    if found is not None:
        _judge(session, CANCEL, items, found)


async def timeout(session: Session) -> None:
    """Items with a millisecond to live have results, late or not."""
    if (stream := _open(session, TIMEOUT, two_way=True)) is None:
        return
    items = session.many(8, "timeout")
    found = await _finish(session, TIMEOUT, stream, items, timeout_ms=1)
    if found is not None:
        # Nothing has to be begun in so short a time.
        waiting = {result.item_id for result in found if result.error.code == "not_begun"}
        begun = [result for result in found if result.item_id not in waiting]
        _judge(session, TIMEOUT, [item for item in items if item.item_id not in waiting], begun)


async def vanish(session: Session) -> None:
    """A caller that is gone leaves a server that scores."""
    if (stream := _open(session, VANISH)) is None:
        return
    try:
        await _send(stream, session.many(64, "vanish"))
        if not session.transport.two_way:
            # Nothing has been sent before.
            await stream.close()
    except CallError as error:
        session.find("error", VANISH, f"the stream ended while items were sent: {error}", _ENDS)
    stream.cancel()
    answer = await session.call(session.many(1, "afterwards"))
    if answer.failure:
        session.find("error", VANISH, f"after a stream whose caller is gone: {answer.failure}", "end its work")
