"""Checks a reward server's answers against the contract: the checks of `rollmesh reward check grpc://host:port`.

Every probe is a real Score call. A finding states the observation, the contract and the severity: an `error` breaks
runs, a `warning` deserves a look, a `note` is for information.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.protos import reward_pb2, reward_pb2_grpc
from rollmesh.reward_service.client.channels import foreign_channels, mesh_channels
from rollmesh.reward_service.client.validation import match_answer
from rollmesh.reward_service.samples import builtin_items, item, items_from_file

Severity = Literal["error", "warning", "note"]
_BIG_BATCH = 256
_LONG_TEXT = 64 * 1024
# A server this quick with a big batch needs no proof that it minds deadlines, in seconds.
_QUICK_S = 0.2

_MEANING = {
    "missing_result": "each item needs one result with its item_id, also when scoring fails (`error`)",
    "duplicate_result": "each item needs exactly one result",
    "no_outcome": "set one of scored, unscorable, error",
    "nan": "totals, components and per-token values must be finite; a failed computation is an `error`",
    "per_token_length": "per_token must be empty or have one value per entry of response_ids",
}
_STATUS_MEANING = {
    grpc.StatusCode.UNIMPLEMENTED: "no rollmesh.v1.Reward service there; is it compiled from reward.proto?",
    grpc.StatusCode.DEADLINE_EXCEEDED: "it did not answer in time; answer late items with `error`",
    grpc.StatusCode.UNAVAILABLE: "the connection was lost during the call; did the server crash?",
    grpc.StatusCode.UNKNOWN: "the handler raised; one bad item must not fail the call: answer it with `error`",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the message is too large for it; raise its limit or set Info.max_items",
    grpc.StatusCode.UNAUTHENTICATED: "it requires a token; services with the mesh's token join the mesh instead",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """An observation: `probe` names the call that led to it."""

    severity: Severity
    probe: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity:<8}{self.probe}: {self.message}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All findings at one address.

    Attributes:
        server: what Info said; empty without Info.
        scored, unscorable, failed: outcomes of the sample items.
        seconds_per_call: of the sample call; 0 when it failed.
    """

    address: str
    findings: Sequence[Finding]
    server: str = ""
    scored: int = 0
    unscorable: int = 0
    failed: int = 0
    seconds_per_call: float = 0.0

    @property
    def ok(self) -> bool:
        """True if runs can use the server."""
        return not any(finding.severity == "error" for finding in self.findings)

    def lines(self) -> list[str]:
        """The report for a person."""
        head = f"{self.address}{f' ({self.server})' if self.server else ''}"
        counts = f"{self.scored} scored, {self.unscorable} unscorable, {self.failed} in error"
        body = [f"{head}: {counts}, {self.seconds_per_call * 1000:.1f} ms"] if self.seconds_per_call else [head]
        body += [str(finding) for finding in self.findings]
        return [*body, "usable: the answers keep the contract" if self.ok else "not usable: see the errors above"]


async def check_endpoint(
    address: str,
    *,
    timeout_s: float = 10.0,
    sample_file: Path | None = None,
    security: SecuritySection | None = None,
) -> CheckReport:
    """Checks a server.

    Args:
        address: `grpc://host:port`.
        timeout_s: deadline of each call in seconds.
        sample_file: JSONL or Parquet with verl's fields to take items from; none: built-in arithmetic.
        security: token and TLS of this very server; none are sent or shown without it.

    Raises:
        ConfigError: a malformed address.
        DataError: a sample file that cannot be used.
    """
    samples = builtin_items() if sample_file is None else items_from_file(sample_file)
    security = security or SecuritySection()
    connect = mesh_channels if security.token_file or security.tls_cert else foreign_channels
    channel = connect(security)(address)
    try:
        return await _Check(channel, address, timeout_s).run(samples)
    finally:
        await channel.close()


@dataclass(slots=True)
class _Probed:
    """The answer to a Score call; empty results where the call failed."""

    results: list[reward_pb2.ScoreResult] = field(default_factory=list)
    seconds: float = 0.0
    status: grpc.StatusCode | None = None


class _Check:
    """The probes, in order; findings collect in `findings`."""

    def __init__(self, channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
        self._channel = channel
        self._address = address
        self._timeout_s = timeout_s
        self._stub = reward_pb2_grpc.RewardStub(channel)
        self._findings: list[Finding] = []

    async def run(self, samples: Sequence[reward_pb2.ScoreItem]) -> CheckReport:
        if not await self._reachable():
            return CheckReport(self._address, self._findings)
        await self._health()
        server, max_items = await self._info()
        first = await self._probe("sample items", samples[: max_items or None])
        if first.status in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED):
            return CheckReport(self._address, self._findings, server)
        outcomes = [result.WhichOneof("outcome") for result in first.results]
        if not first.status:
            self._judge_outcomes(first.results)
            await self._repeat(first, samples[: max_items or None])
        await self._odd_inputs(samples[0])
        await self._broken_input(samples[0])
        await self._big_batch(samples[0], max_items)
        return CheckReport(
            self._address,
            self._findings,
            server,
            scored=outcomes.count("scored"),
            unscorable=outcomes.count("unscorable"),
            failed=outcomes.count("error"),
            seconds_per_call=first.seconds,
        )

    # ---------------------------------------------------------------------------------------- probes

    async def _reachable(self) -> bool:
        try:
            await asyncio.wait_for(self._channel.channel_ready(), self._timeout_s)
        except TimeoutError:
            self._find(
                "error",
                "connection",
                f"unreachable: nothing at {self._address} speaks gRPC within {self._timeout_s:g} s; "
                "is the server running, the port right, TLS the same on both sides?",
            )
            return False
        return True

    async def _health(self) -> None:
        stub: Any = health_pb2_grpc.HealthStub(self._channel)  # its types do not know the methods
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            missing = error.code() is grpc.StatusCode.UNIMPLEMENTED
            what = "no standard health service (grpc.health.v1); orchestrators cannot check that it is alive"
            self._find("warning", "health", what if missing else f"{error.code().name}: {error.details()}")
            return
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            self._find("warning", "health", f"the server says {name}")

    async def _info(self) -> tuple[str, int]:
        try:
            info = await self._stub.Info(reward_pb2.InfoRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            self._find("note", "info", f"no answer to Info ({error.code().name}); it is optional")
            return "", 0
        scorers = ", ".join(f"{name} {version}" for name, version in sorted(info.scorers.items()))
        server = f"{info.name} {info.version}".strip()
        return f"{server}{f': {scorers}' if scorers else ''}", int(info.max_items)

    async def _repeat(self, first: _Probed, samples: Sequence[reward_pb2.ScoreItem]) -> None:
        again = await self._probe("the same items in reverse", list(reversed(samples)))
        before = {result.item_id: result.scored.total for result in first.results if result.HasField("scored")}
        after = {result.item_id: result.scored.total for result in again.results if result.HasField("scored")}
        changed = [key for key in before.keys() & after.keys() if before[key] != after[key]]
        if changed:
            key = min(changed)
            self._find(
                "note",
                "the same items in reverse",
                f"{len(changed)} scores changed ({key!r}: {before[key]:g}, then {after[key]:g}); "
                "normal for a sampling judge, otherwise items are mixed up",
            )

    async def _odd_inputs(self, like: reward_pb2.ScoreItem) -> None:
        odd = {
            "unicode": "naïve 数学 🧮 \u202e\u0000 é",
            "empty response": "",
            "long response": "12 " * (_LONG_TEXT // 3),
            "single item": "42",
        }
        for probe, response in odd.items():
            await self._probe(probe, [_alike(like, f"{probe} ✓", response)])

    async def _broken_input(self, like: reward_pb2.ScoreItem) -> None:
        whole = _alike(like, "whole", "42")
        for probe, text in (("malformed ground truth", "{not json"), ("no ground truth", "")):
            broken = _alike(like, "broken", "42")
            broken.ground_truth_json = text
            probed = await self._probe(probe, [whole, broken])
            for result in probed.results:
                if result.item_id == "broken" and result.HasField("scored") and result.scored.total == 0:
                    self._find(
                        "warning",
                        probe,
                        "scored 0.0: is that a failure in disguise? A model would be punished for it; "
                        "answer `error`, or `unscorable` if there is no right score",
                    )

    async def _big_batch(self, like: reward_pb2.ScoreItem, max_items: int) -> None:
        count = min(max_items or _BIG_BATCH, _BIG_BATCH)
        items = [_alike(like, f"big/{index}", str(index), group_id=f"big{index // 8}") for index in range(count)]
        probe = f"batch of {count}"
        whole = await self._probe(probe, items)
        if whole.status or whole.seconds < _QUICK_S:
            return
        short = whole.seconds / 2
        began = time.monotonic()
        hurried = await self._call(items, short)
        if hurried.status is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return
        self._find(
            "warning",
            "deadline",
            f"a call with {short:.2f} s to live was not answered by then; answer items that would be late with "
            "`error` (code timeout), or the work on the whole request is lost",
        )
        await self._call(items[:1], self._timeout_s)
        if time.monotonic() - began > 0.9 * whole.seconds:
            self._find(
                "warning",
                "deadline",
                "deadline not honoured: the server continued to work on a call whose deadline had passed",
            )

    # ---------------------------------------------------------------------------------------- helpers

    async def _probe(self, probe: str, items: Sequence[reward_pb2.ScoreItem]) -> _Probed:
        """Calls Score and checks the answer against the contract."""
        probed = await self._call(items, self._timeout_s, probe)
        if probed.status:
            return probed
        matched = match_answer(items, reward_pb2.ScoreResponse(results=probed.results))
        if matched.unknown_ids:
            ids = ", ".join(map(repr, matched.unknown_ids[:3]))
            self._find("error", probe, f"{len(matched.unknown_ids)} results for unknown items ({ids}); echo item_id")
        own = {result.item_id: result for result in probed.results}
        faults: dict[str, list[reward_pb2.ScoreResult]] = {}
        for result in matched.results:
            if result.HasField("error") and result != own.get(result.item_id):
                faults.setdefault(result.error.code, []).append(result)
        for code, results in faults.items():
            example = results[0]
            self._find(
                "error",
                probe,
                f"{code}: {len(results)} of {len(items)} items, such as {example.item_id!r}: "
                f"{example.error.message}; {_MEANING[code]}",
            )
        return probed

    async def _call(self, items: Sequence[reward_pb2.ScoreItem], timeout_s: float, probe: str = "") -> _Probed:
        began = time.monotonic()
        try:
            response = await self._stub.Score(reward_pb2.ScoreRequest(items=items), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if probe:
                meaning = _STATUS_MEANING.get(error.code(), "the call failed as a whole")
                self._find("error", probe, f"{error.code().name}: {error.details()}; {meaning}")
            return _Probed(status=error.code(), seconds=time.monotonic() - began)
        return _Probed(list(response.results), time.monotonic() - began)

    def _judge_outcomes(self, results: Sequence[reward_pb2.ScoreResult]) -> None:
        """Reports findings from the outcomes of the sample items, beyond the contract."""
        probe = "sample items"
        errors = [result.error for result in results if result.HasField("error")]
        if errors:
            codes = ", ".join(sorted({error.code or "(no code)" for error in errors}))
            severity: Severity = "error" if len(errors) == len(results) else "warning"
            self._find(
                severity,
                probe,
                f"{len(errors)} of {len(results)} ended in error ({codes}), such as: {errors[0].message}; "
                "if it knows other data only, give a sample file",
            )
        if any(not error.code for error in errors):
            self._find("warning", probe, "an error without a code; codes are what runs count failures by")
        totals = [result.scored.total for result in results if result.HasField("scored")]
        if len(totals) > 1 and not any(totals):
            self._find(
                "warning",
                probe,
                "all scores are 0.0, right responses included: failures in disguise? "
                "(normal for a reward that does not use ground_truth)",
            )
        elif len(totals) > 1 and len(set(totals)) == 1:
            self._find("note", probe, f"all scores are {totals[0]:g}; a group without differences teaches nothing")

    def _find(self, severity: Severity, probe: str, message: str) -> None:
        self._findings.append(Finding(severity, probe, message))


def _alike(like: reward_pb2.ScoreItem, item_id: str, response: str, *, group_id: str = "check") -> reward_pb2.ScoreItem:
    """An item of the same source and truth with another response."""
    return item(
        item_id,
        response,
        like.ground_truth_json,
        group_id=group_id,
        data_source=like.data_source,
        prompt=like.prompt,
        extra_info_json=like.extra_info_json,
    )
