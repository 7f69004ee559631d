"""The state that all probes of one check share: the transport, items, calls that are judged, findings."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.findings import Finding, Severity
from rollmesh.reward_service.conformance.judgement import faults_of_answer
from rollmesh.reward_service.conformance.transport import CallError, Kind, Transport
from rollmesh.reward_service.samples import item

_REMEDIES: dict[Kind, str] = {
    "deadline": "it did not answer in time; answer late items with `error` (code timeout)",
    "unavailable": "the connection was lost during the call; did the server crash?",
    "busy": "it refused the call; refuse only under load",
    "exhausted": "the message is too large for it; raise its limit, or state Info.max_items and Info.max_bytes",
    "unauthenticated": "it requires a credential: give its key, or the mesh's token if it is a member of a mesh",
    "denied": "the credential is not one that may score",
    "unimplemented": "no rollmesh.v1.Reward service there; is it compiled from reward.proto, the path right?",
    "invalid": "it refused the request; one bad item must not fail the call: answer it with `error`",
    "garbled": "answer with a ScoreResponse in the JSON form of protobuf",
    "failed": "the handler raised; one bad item must not fail the call: answer it with `error`",
}


# A model's scores are rounded otherwise in another batch.
_ROUNDING = 1e-4
# Seconds for which items are asked again that could not be begun, and between two tries.
_BEGIN_S, _PAUSE_S = 120.0, 0.2


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of the caller.

    Attributes:
        timeout_s: seconds that each call may take.
        packs: golden packs that have to come out right.
        restart: command that starts the server, which is then killed during a call; empty: it is not.
        only: prefixes of probe ids that are run; empty: all. Those that others build on are always run.
    """

    timeout_s: float = 10.0
    packs: Sequence[str] = ()
    restart: Sequence[str] = ()
    only: Sequence[str] = ()

    @classmethod
    def restarting(cls, command: str) -> Sequence[str]:
        """A command as its arguments."""
        return shlex.split(command)


@dataclass(slots=True)
class Answer:
    """The outcome of a Score call: results, or its failure."""

    results: Sequence[reward_pb2.ScoreResult] = ()
    seconds: float = 0.0
    failure: CallError | None = None

    @property
    def totals(self) -> dict[str, float]:
        """item_id -> total, of the items that were scored."""
        return {result.item_id: result.scored.total for result in self.results if result.HasField("scored")}


@dataclass(slots=True)
class Session:
    """One check in progress.

    Attributes:
        info: what the server says of itself; empty without Info.
        pair: two responses to one prompt that it scores differently, the better one first; None until they are found.
        is_repeatable: the same items got the same scores; None until it is known.
        figures, skipped, findings: for the report.
        seconds: of one call with one item, the median of several; 0 until it is known.
    """

    transport: Transport
    samples: Sequence[reward_pb2.ScoreItem]
    options: Options
    info: reward_pb2.InfoResponse = field(default_factory=reward_pb2.InfoResponse)
    pair: tuple[reward_pb2.ScoreItem, reward_pb2.ScoreItem] | None = None
    is_repeatable: bool | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    # Other ids in each check: what the server keeps of an earlier one does not matter.
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def timeout_s(self) -> float:
        return self.options.timeout_s

    def find(self, severity: Severity, probe: str, message: str, remedy: str = "") -> None:
        """Adds a finding, once: several calls of a probe may show the same."""
        finding = Finding(severity, probe, message, remedy)
        if finding not in self.findings:
            self.findings.append(finding)

    def most(self, count: int) -> int:
        """As many items as one call may have, at most `count`."""
        return min(count, self.info.max_items or count)

    def made(
        self, like: reward_pb2.ScoreItem, item_id: str, response: str, *, group: str = "group"
    ) -> reward_pb2.ScoreItem:
        """An item of the same prompt, source and truth with another id, group and response."""
        return item(
            f"{self.nonce}/{item_id}",
            response,
            like.ground_truth_json,
            group_id=f"{self.nonce}/{group}",
            data_source=like.data_source,
            prompt=like.prompt,
            extra_info_json=like.extra_info_json,
        )

    def many(self, count: int, name: str) -> list[reward_pb2.ScoreItem]:
        """Items of unlike content, in groups of eight."""
        like = self.samples[0]
        return [self.made(like, f"{name}/{n}", f"{n} {name}", group=f"{name}/{n // 8}") for n in range(count)]

    async def call(
        self, items: Sequence[reward_pb2.ScoreItem], timeout_s: float | None = None, *, probe: str = ""
    ) -> Answer:
        """Calls Score.

        Args:
            items: with unique ids, within the server's limits.
            timeout_s: of the call; None: the caller's choice for all calls.
            probe: gets a finding for a call that fails, and for an answer that breaks the contract. Items that could
                not be begun are asked again then, as callers do. Empty: neither.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        try:
            response = await self.transport.score(reward_pb2.ScoreRequest(items=map(self._as_wished, items)), limit)
        except CallError as error:
            if probe:
                self.find("error", probe, str(error), _REMEDIES[error.kind])
            return Answer(seconds=time.monotonic() - began, failure=error)
        answer = Answer(response.results, time.monotonic() - began)
        if probe:
            answer.results = await self._until_begun(items, answer.results, limit)
            if waiting := _not_begun(answer.results):
                message = f"{len(waiting)} of {len(items)} items were not begun in {_BEGIN_S:g} s"
                self.find("error", probe, message, "callers ask again for as long as it takes: their run stands still")
            for severity, message, remedy in faults_of_answer(items, answer.results):
                self.find(severity, probe, message, remedy)
        return answer

    async def _until_begun(
        self, items: Sequence[reward_pb2.ScoreItem], results: Sequence[reward_pb2.ScoreResult], timeout_s: float
    ) -> Sequence[reward_pb2.ScoreResult]:
        """Results with those of items that could not be begun replaced by later ones, for a while."""
        until = time.monotonic() + _BEGIN_S
        while waiting := _not_begun(results):
            if time.monotonic() > until:
                break
            await asyncio.sleep(_PAUSE_S)
            request = reward_pb2.ScoreRequest(
                items=[self._as_wished(item) for item in items if item.item_id in waiting]
            )
            try:
                later = (await self.transport.score(request, timeout_s)).results
            except CallError:
                break
            results = [*(result for result in results if result.item_id not in waiting), *later]
        return results

    def _as_wished(self, asked: reward_pb2.ScoreItem) -> reward_pb2.ScoreItem:
        """An item with the fields that the server wants, as callers send it."""
        wants_ids = not self.info.HasField("wants_ids") or self.info.wants_ids
        wants_more = self.info.wants_offsets or self.info.wants_messages or self.info.wants_turns
        if wants_ids and not wants_more:
            return asked
        sent = reward_pb2.ScoreItem()
        sent.CopyFrom(asked)
        if not wants_ids:
            del sent.response_ids[:]
        if self.info.wants_offsets:
            sent.token_ends[:] = range(1, len(asked.response) + 1)
        if self.info.wants_turns:
            sent.turns[:] = [asked.response]
        if self.info.wants_messages:
            sent.messages_json = _messages(asked)
        return sent


def _not_begun(results: Sequence[reward_pb2.ScoreResult]) -> set[str]:
    """Ids of items that wait for their turn."""
    return {each.item_id for each in results if each.error.code == "not_begun" and each.error.retryable}


def _messages(asked: reward_pb2.ScoreItem) -> str:
    turns = [("user", asked.prompt), ("assistant", asked.response)]
    return json.dumps([{"role": role, "content": text} for role, text in turns])


def changed_totals(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Ids of the items in both whose totals differ by more than rounding."""
    return [
        key
        for key in before.keys() & after.keys()
        if not math.isclose(before[key], after[key], rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    ]
