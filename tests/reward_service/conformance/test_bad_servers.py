"""Each bad behaviour is found by its probe, in words that say what to do."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from aiohttp import web
from google.protobuf import json_format
from grpc_health.v1 import health_pb2

from rollmesh.protos import reward_pb2
from rollmesh.reward_service import samples
from rollmesh.reward_service.conformance.findings import Report
from tests.reward_service.conformance.servers import Results, Server, right

Info = reward_pb2.InfoResponse


def found(report: Report, probe: str, severity: str, words: str) -> bool:
    """True if there is such a finding, with a remedy."""
    return any(
        (finding.probe, finding.severity) == (probe, severity)
        and words in finding.message + finding.remedy
        and finding.remedy
        for finding in report.findings
    )


class Nan(Server):
    def one(self, item: Any) -> Any:
        result = right(item)
        result.scored.total = math.nan
        return result


class Renames(Server):
    def one(self, item: Any) -> Any:
        return reward_pb2.ScoreResult(item_id=item.item_id.upper() + "!", scored=reward_pb2.Scored(total=1))


class ShortTokens(Server):
    def one(self, item: Any) -> Any:
        result = right(item)
        result.scored.per_token.extend([1.0] * (len(item.response_ids) + 1))
        return result


class Twice(Server):
    async def all(self, items: Any) -> Results:
        return [result for item in items for result in (right(item), right(item))]


class Utf16Spans(Server):
    def one(self, item: Any) -> Any:
        result = right(item)
        if item.response:
            end = len(item.response.encode("utf-16-le")) // 2
            result.scored.spans.add(begin=0, end=end, value=1.0)
        return result


class AlwaysZero(Server):
    def one(self, item: Any) -> Any:
        return reward_pb2.ScoreResult(item_id=item.item_id, scored=reward_pb2.Scored(total=0))


class Fails(Server):
    error = reward_pb2.Error(message="judge away")

    def one(self, item: Any) -> Any:
        return reward_pb2.ScoreResult(item_id=item.item_id, error=self.error)


class NotBegunForEver(Fails):
    error = reward_pb2.Error(code="not_begun", message="no room")


class PausesInVain(Fails):
    error = reward_pb2.Error(code="busy", message="no room", retry_after_ms=1000)


class PausesForHours(Fails):
    error = reward_pb2.Error(code="busy", message="no room", retryable=True, retry_after_ms=3_600_000)


class FragileCalls(Server):
    def one(self, item: Any) -> Any:
        if item.ground_truth_json in ("", "{not json"):
            raise ValueError("no truth")
        return right(item)


class StumblesOverFields(Server):
    def one(self, item: Any) -> Any:
        if item.run:
            return reward_pb2.ScoreResult(item_id=item.item_id, error=reward_pb2.Error(code="x", message="a run?"))
        return right(item)


class ReadsIds(Server):
    info = Info(wants_ids=False)

    def one(self, item: Any) -> Any:
        result = right(item)
        result.scored.total += len(item.response_ids)
        return result


class CachesById(Server):
    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def one(self, item: Any) -> Any:
        return self.kept.setdefault(item.item_id, right(item))


class Random(Server):
    info = Info()

    def __init__(self) -> None:
        self.chance = random.Random(7)

    def one(self, item: Any) -> Any:
        return reward_pb2.ScoreResult(item_id=item.item_id, scored=reward_pb2.Scored(total=self.chance.random()))


class RandomAndClaimsNot(Random):
    info = Info(deterministic=True)


class ById(Server):
    def one(self, item: Any) -> Any:
        result = right(item)
        result.scored.total += hashlib.sha256(item.item_id.encode()).digest()[0] / 256
        return result


class GroupMean(Server):
    async def all(self, items: Any) -> Results:
        results = [right(item) for item in items]
        groups: dict[str, list[float]] = {}
        for item, result in zip(items, results, strict=True):
            groups.setdefault(item.group_id, []).append(result.scored.total)
        for item, result in zip(items, results, strict=True):
            result.scored.total = sum(groups[item.group_id]) / len(groups[item.group_id])
        return results


class LessTheCallsMean(Server):
    async def all(self, items: Any) -> Results:
        results = [right(item) for item in items]
        mean = sum(result.scored.total for result in results) / max(1, len(results))
        for result in results:
            result.scored.total -= mean
        return results


class TakesTurns(Server):
    def __init__(self) -> None:
        self.turn = asyncio.Lock()

    async def all(self, items: Any) -> Results:
        async with self.turn:
            await asyncio.sleep(0.05)
            return [right(item) for item in items]


class WorksForNoOne(Server):
    """A batch takes a while, whatever becomes of its call, and all else waits for it."""

    info = Info(max_items=16)

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.work: set[Any] = set()

    async def all(self, items: Any) -> Results:
        async def work() -> None:
            async with self.turn:
                await asyncio.sleep(0.25 if len(items) > 8 else 0)

        task = asyncio.create_task(work())
        self.work.add(task)
        await asyncio.shield(task)
        return [right(item) for item in items]


class SmallMessages(Server):
    max_message = 4 << 20


class BreaksOnLarge(Server):
    def one(self, item: Any) -> Any:
        if len(item.response) > 500_000:
            raise MemoryError
        return right(item)


class BreaksInStorms(Server):
    def __init__(self) -> None:
        self.calls = 0

    async def all(self, items: Any) -> Results:
        self.calls += 1
        try:
            if self.calls > 16:
                raise RuntimeError("pool exhausted")
            await asyncio.sleep(0.02)
            return [right(item) for item in items]
        finally:
            self.calls -= 1


class MixesCalls(Server):
    """Keeps the items of a call where the next one finds them."""

    async def all(self, items: Any) -> Results:
        self.items = items
        await asyncio.sleep(0.01)
        return [right(item) for item in self.items]


@pytest.mark.parametrize(
    ("server", "probe", "severity", "words"),
    [
        (Nan, "answers.samples", "error", "nan: 8 of 8 items"),
        (Renames, "answers.samples", "error", "8 results for unknown items"),
        (Renames, "answers.samples", "error", "missing_result: 8 of 8 items"),
        (ShortTokens, "answers.samples", "error", "one value per entry of response_ids"),
        (Twice, "answers.samples", "error", "duplicate_result"),
        (Utf16Spans, "answers.odd", "error", "not bytes or UTF-16 units"),
        (AlwaysZero, "answers.samples", "warning", "all scores are 0.0"),
        (AlwaysZero, "answers.unreadable-truth", "warning", "failure in disguise"),
        (Fails, "answers.samples", "error", "8 of 8 ended in error"),
        (Fails, "answers.samples", "warning", "without a code"),
        (NotBegunForEver, "answers.samples", "error", "not_begun"),
        (PausesInVain, "answers.samples", "warning", "retry_after_ms of an error that is not retryable"),
        (PausesForHours, "answers.samples", "warning", "3600 s"),
        (FragileCalls, "answers.unreadable-truth", "error", "one bad item must not fail the call"),
        (StumblesOverFields, "answers.all-fields", "error", "ended as error"),
        (ReadsIds, "answers.wants-ids", "error", "outcomes are others with response_ids"),
        (CachesById, "identity.same-id", "error", "never keep scores by item_id"),
        (Random, "identity.random", "warning", "no difference beyond chance"),
        (Random, "identity.repeat", "note", "scores changed"),
        (RandomAndClaimsNot, "identity.repeat", "error", "its Info says"),
        (ById, "identity.equal-content", "error", "equal items under different ids"),
        (GroupMean, "identity.group-mean", "error", "the same within a group"),
        (LessTheCallsMean, "identity.alone", "error", "another group in the call"),
        (TakesTurns, "calls.parallel", "warning", "they take turns"),
        (WorksForNoOne, "calls.deadline", "warning", "was not answered by then"),
        (WorksForNoOne, "calls.deadline", "warning", "continued to work"),
        (WorksForNoOne, "calls.cancel", "warning", "had to wait for their work"),
        (SmallMessages, "calls.large", "warning", "Info.max_bytes"),
        (BreaksOnLarge, "calls.large", "error", "a message of 64 MiB ended as UNKNOWN"),
        (BreaksInStorms, "calls.storm", "error", "calls at once failed"),
        (MixesCalls, "calls.storm", "error", "answered for other items"),
    ],
)
async def test_each_bad_behaviour(
    serving: Any,
    checked: Any,
    server: type[Server],
    probe: str,
    severity: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollmesh.reward_service.conformance.probes.load._QUICK_BATCH_S", 0.2)
    monkeypatch.setattr("rollmesh.reward_service.conformance.probes.load._AT_ONCE", 3)
    report = await checked(await serving(server()), probe)
    assert found(report, probe, severity, words), report.findings
    assert len(set(report.findings)) == len(report.findings), "each is said once"


async def test_totals_that_are_no_numbers_are_told_once_and_not_compared(serving: Any, checked: Any) -> None:
    report = await checked(await serving(Nan()), "identity.")
    assert len(set(report.findings)) == len(report.findings)
    assert not any(finding.probe == "identity.group-mean" and "alone" in finding.message for finding in report.findings)


class WaitsForTheEnd(Server):
    async def ScoreStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        for result in [right(request.item) async for request in requests if request.HasField("item")]:
            yield result


class OneByOne(Server):
    def delay_s(self, item: Any) -> float:
        return 0.4 if item.response == "slow" else 0.0

    async def all(self, items: Any) -> Results:
        await asyncio.sleep(max(map(self.delay_s, items)))
        return [right(item) for item in items]

    async def ScoreStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request.HasField("item"):
                yield (await self.all([request.item]))[0]


class OtherScores(Server):
    async def ScoreStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request.HasField("item"):
                result = right(request.item)
                result.scored.total += 1
                yield result


class NeverEnds(Server):
    async def ScoreStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request.HasField("item"):
                yield right(request.item)
        await asyncio.sleep(3600)


class DiesOfCancels(Server):
    async def ScoreStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield right({"item": request.item}[request.WhichOneof("request")])


class ForgetsTheLate(Server):
    async def ScoreStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request.HasField("item") and not request.timeout_ms:
                yield right(request.item)


@pytest.mark.parametrize(
    ("server", "probe", "words", "timeout_s"),
    [
        (WaitsForTheEnd, "stream.early", "not when the caller closes", 1),
        (OtherScores, "stream.answers", "by Score and", 60),
        (NeverEnds, "stream.answers", "after the last result", 2),
        (DiesOfCancels, "stream.cancel", "the stream ended", 60),
        (ForgetsTheLate, "stream.timeout", "missing_result: 8 of 8", 60),
    ],
)
async def test_each_bad_stream(
    serving: Any, checked: Any, server: type[Server], probe: str, words: str, timeout_s: float
) -> None:
    report = await checked(await serving(server()), probe, timeout_s=timeout_s)
    assert found(report, probe, "error", words), report.findings


async def test_a_slow_item_that_holds_others(serving: Any, checked: Any) -> None:
    rows = [*samples.builtin_items(), samples.item("slow", "slow", '"42"', group_id="slow")]
    report = await checked(await serving(OneByOne()), "stream.slow-item", samples=rows)
    assert found(report, "stream.slow-item", "error", "waited for it"), report.findings
    good = type("SideBySide", (OneByOne,), {"ScoreStream": Server.ScoreStream})
    report = await checked(await serving(good()), "stream.slow-item", samples=rows)
    assert not report.findings
    assert "stream.slow-item" not in report.skipped


async def test_health_that_is_missing_or_bad(serving: Any, checked: Any) -> None:
    silent, unwell = Server(), Server()
    silent.status, unwell.status = None, health_pb2.HealthCheckResponse.NOT_SERVING
    assert found(await checked(await serving(silent), "reach"), "reach.health", "warning", "no health service")
    assert found(await checked(await serving(unwell), "reach"), "reach.health", "warning", "does not say SERVING")


async def test_a_server_that_hangs_is_not_asked_on(serving: Any, checked: Any) -> None:
    class Hangs(Server):
        calls = 0

        async def all(self, items: Any) -> Results:
            Hangs.calls += 1
            await asyncio.sleep(3600)
            return []

    report = await checked(await serving(Hangs()), timeout_s=0.2)
    assert found(report, "answers.samples", "error", "DEADLINE_EXCEEDED")
    assert Hangs.calls == 2


async def test_something_else_at_the_address(checked: Any) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    report = await checked(f"grpc://127.0.0.1:{port}", timeout_s=30)
    await server.stop(0)
    assert found(report, "answers.samples", "error", "is it compiled from reward.proto")


class Guarded(Server):
    def __init__(self, keys: list[str], status: grpc.StatusCode = grpc.StatusCode.UNAUTHENTICATED) -> None:
        self.keys, self.refusal = keys, status

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        if dict(context.invocation_metadata()).get("authorization", "").removeprefix("Bearer ") not in self.keys:
            await context.abort(self.refusal, "no")
        return await super().Score(request, context)


async def test_keys(serving: Any, checked: Any) -> None:
    good = await checked(await serving(Guarded(["secret"])), "reach", key="secret")
    assert not good.findings
    assert "reach.key" not in good.skipped
    without = await checked(await serving(Guarded(["secret"])), "reach")
    assert found(without, "answers.samples", "error", "give its key")
    lax = await checked(await serving(Guarded(["secret", ""])), "reach", key="secret")
    assert found(lax, "reach.key", "error", "without its key was answered")
    odd = await checked(await serving(Guarded(["secret"], grpc.StatusCode.INTERNAL)), "reach", key="secret")
    assert found(odd, "reach.key", "warning", "UNAUTHENTICATED")


async def test_golden_packs(serving: Any, checked: Any) -> None:
    address = await serving(Server())
    asked = await checked(address, "known", packs=["gsm8k", "exact_match"])
    assert found(asked, "known.gsm8k", "error", "of 12 answers were scored otherwise")
    assert asked.figures["known_answers"]["exact_match"] == {"right": 6, "of": 6}
    claims = Server()
    claims.info = Info(scorers={"gsm8k": "1"})
    assert found(await checked(await serving(claims), "known"), "known.gsm8k", "note", "scored otherwise")


Rows = Callable[[web.StreamResponse, list[bytes]], Awaitable[None]]


async def _all(response: web.StreamResponse, rows: list[bytes]) -> None:
    await response.write(b"".join(rows))


async def _without_the_last(response: web.StreamResponse, rows: list[bytes]) -> None:
    await _all(response, rows[:-1])


async def _cut(response: web.StreamResponse, rows: list[bytes]) -> None:
    await _all(response, rows[:-1])
    request = response._req
    assert request is not None
    assert request.transport is not None
    request.transport.close()


async def _one_list(response: web.StreamResponse, rows: list[bytes]) -> None:
    await response.write(b"[" + b",".join(row.strip() for row in rows) + b"]")


async def _other_scores(response: web.StreamResponse, rows: list[bytes]) -> None:
    await _all(response, [row.replace(b'"total": 1.0', b'"total": 0.5') for row in rows])


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (_all, ""),
        (_without_the_last, "missing_result"),
        (_cut, "the stream ended as"),
        (_one_list, "what came is no ScoreResult"),
        (_other_scores, "by ScoreStream"),
    ],
)
async def test_bad_streams_over_http(end: Rows, words: str, checked: Any, scripted_http: Any) -> None:
    info = {"name": "rows", "streams": True, "deterministic": True}

    async def answer(request: web.BaseRequest, body: Any) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response(info)
        asked = json_format.ParseDict(body, reward_pb2.ScoreRequest())
        results = [json_format.MessageToDict(right(item), preserving_proto_field_name=True) for item in asked.items]
        if "stream" not in request.query:
            return web.json_response({"results": results})
        response = web.StreamResponse()
        await response.prepare(request)
        await end(response, [json.dumps(result).encode() + b"\n" for result in results])
        return response

    report = await checked(await scripted_http(answer), "answers.samples", "stream.answers")
    assert found(report, "stream.answers", "error", words) if words else not report.findings, report.findings
