"""Prometheus metrics of the judge, as declared, and their values."""

from __future__ import annotations

from rollmesh.mesh.telemetry.metric_spec import SpecFactory, Values
from rollmesh.reward_service.judge.accounts import Accounts

_REWARD = SpecFactory("reward")
METRICS = (
    _REWARD.counter("judge_requests", "Requests sent to the judge's endpoint, second ones of slow requests included"),
    _REWARD.counter("judge_answers", "Its answers: verdict, wrong, throttled, unavailable, refused", "outcome"),
    _REWARD.counter(
        "judge_votes", "Verdicts that were used, by origin: asked, or kept from an equal question", "origin"
    ),
    _REWARD.counter("judge_hedges", "Second requests for slow ones"),
    _REWARD.counter("judge_tokens", "Tokens used, by estimate where the endpoint does not count", "kind"),
    _REWARD.counter("judge_cost", "Their cost, by the prices of the configuration"),
    _REWARD.counter("judge_waits", "Questions that come again because there was no room for a request in time"),
    _REWARD.counter("judge_wait_seconds", "Time for which requests waited for their turn, of all together"),
    _REWARD.gauge("judge_share", "Part of the judge's limits that this process has; 0: the mesh has not given it one"),
)


def values(accounts: Accounts) -> Values:
    """The values of a process, by metric and labels."""
    counts = accounts.counts
    return {
        "judge_requests": {(): counts.requests},
        "judge_answers": {(outcome,): count for outcome, count in counts.answers.copy().items()},
        "judge_votes": {(origin,): count for origin, count in counts.votes.copy().items()},
        "judge_hedges": {(): counts.hedges},
        "judge_tokens": {("prompt",): counts.prompt_tokens, ("answer",): counts.answer_tokens},
        "judge_cost": {(): counts.cost},
        "judge_waits": {(): counts.waits},
        "judge_wait_seconds": {(): counts.wait_s},
        "judge_share": {(): accounts.share},
    }
