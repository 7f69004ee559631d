"""Answers to items of many kinds: ordinary ones, odd ones, unreadable ones, many at once."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.findings import Severity
from rollmesh.reward_service.conformance.session import Session, changed_totals
from rollmesh.reward_service.conformance.transport import CallError

SAMPLES, ODD, TRUTH, FIELDS, IDS, BATCH = (
    "answers.samples",
    "answers.odd",
    "answers.unreadable-truth",
    "answers.all-fields",
    "answers.wants-ids",
    "answers.big-batch",
)
_LONG_TEXT = 64 * 1024
_BIG_BATCH = 256
_ODD = {
    "unicode": "naïve 数学 🧮🧮🧮🧮 \u202e\u0000 é",
    "empty response": "",
    "long response": "12 " * (_LONG_TEXT // 3),
}


async def samples(session: Session) -> tuple[dict[str, int], CallError | None]:
    """The sample items; counts of their outcomes, or the failure of the call."""
    items = session.samples[: session.most(len(session.samples))]
    answer = await session.call(items, probe=SAMPLES)
    outcomes = [result.WhichOneof("outcome") for result in answer.results]
    if not answer.failure:
        _judge_outcomes(session, answer.results)
        session.pair = _pair(items, answer.totals)
    return {name: outcomes.count(name) for name in ("scored", "unscorable", "error")}, answer.failure


def _judge_outcomes(session: Session, results: Sequence[reward_pb2.ScoreResult]) -> None:
    """Reports what the contract allows and a user would not want."""
    errors = [result.error for result in results if result.HasField("error")]
    if errors:
        codes = ", ".join(sorted({error.code or "(no code)" for error in errors}))
        severity: Severity = "error" if len(errors) == len(results) else "warning"
        message = f"{len(errors)} of {len(results)} ended in error ({codes}), such as: {errors[0].message}"
        session.find(severity, SAMPLES, message, "if it knows other data only, give a sample file")
    totals = [result.scored.total for result in results if result.HasField("scored")]
    if len(totals) > 1 and not any(totals):
        remedy = "a failure is an `error`; normal for a reward that does not use ground_truth"
        session.find("warning", SAMPLES, "all scores are 0.0, right responses too: failures in disguise?", remedy)
    elif len(totals) > 1 and len(set(totals)) == 1:
        message = f"all scores are {totals[0]:g}; a group without differences teaches nothing"
        session.find("note", SAMPLES, message, "give a sample file with responses of different quality")


def _pair(
    items: Sequence[reward_pb2.ScoreItem], totals: dict[str, float]
) -> tuple[reward_pb2.ScoreItem, reward_pb2.ScoreItem] | None:
    """Two items of one group with different scores, the better one first."""
    for one in items:
        for other in items:
            alike = one.group_id == other.group_id and one.ground_truth_json == other.ground_truth_json
            if alike and totals.get(one.item_id, 0.0) > totals.get(other.item_id, float("inf")):
                return one, other
    return None


async def odd(session: Session) -> None:
    """Texts that are legal and rare."""
    like = session.samples[0]
    for name, response in _ODD.items():
        await session.call([session.made(like, f"{name} ✓", response)], probe=ODD)


async def unreadable_truth(session: Session) -> None:
    """An item whose ground truth is no JSON, or missing, fails alone and is no zero."""
    for name, text in (("malformed", "{not json"), ("missing", "")):
        whole = session.made(session.samples[0], f"{name}/whole", "42")
        broken = session.made(session.samples[0], f"{name}/broken", "42")
        broken.ground_truth_json = text
        answer = await session.call([whole, broken][-session.most(2) :], probe=TRUTH)
        if answer.totals.get(broken.item_id) == 0:
            message = f"{name} ground truth was scored 0.0: is that a failure in disguise? A model is punished for it"
            session.find("warning", TRUTH, message, "answer `error`, or `unscorable` if there is no right score")


async def all_fields(session: Session) -> None:
    """An item with every field of the contract is scored as one without."""
    like = session.samples[0]
    plain = session.made(like, "plain", like.response)
    full = session.made(like, "full", like.response, group="full")
    full.MergeFrom(
        reward_pb2.ScoreItem(
            run="check",
            trajectory_id="check/1",
            attempt=1,
            policy_version=1 << 40,
            finish_reason="stop",
            images=[reward_pb2.ImageReference(uri="images/1.png", sha256=bytes(32))],
            spans=[reward_pb2.Span(begin=0, end=len(like.response), kind="turn")] if like.response else [],
            content_key=bytes(range(32)),
            turn_count=1,
        )
    )
    before = await session.call([plain], probe=FIELDS)
    after = await session.call([full], probe=FIELDS)
    if before.totals and not after.totals and not after.failure:
        outcome = after.results[0].WhichOneof("outcome") if after.results else "nothing"
        session.find("error", FIELDS, f"an item with all fields ended as {outcome}", "ignore fields you do not need")


async def wants_ids(session: Session) -> None:
    """A server that wants no ids scores the same with and without them."""
    if not session.info.HasField("wants_ids") or session.info.wants_ids:
        session.skipped[IDS] = "Info does not say wants_ids: false"
        return
    items = session.samples[: session.most(len(session.samples))]
    without = (await session.call(items, probe=IDS)).totals
    try:
        response = await session.transport.score(reward_pb2.ScoreRequest(items=items), session.timeout_s)
    except CallError:
        return  # The probes of the same items without ids tell more.
    ids = {result.item_id: result.scored.total for result in response.results if result.HasField("scored")}
    changed = changed_totals(without, ids)
    if (changed or without.keys() != ids.keys()) and session.is_repeatable:
        message = f"Info says wants_ids: false, and {len(changed) or 'some'} outcomes are others with response_ids"
        session.find("error", IDS, message, "say wants_ids: true, or do not read them")


async def big_batch(session: Session) -> None:
    """As many items as callers like to send."""
    await session.call(session.many(session.most(_BIG_BATCH), "big"), probe=BATCH)
