"""The result of an evaluation round, computed from its groups.

Invariants: a failed response never counts as a zero: the mean is over scored ones, and failures are counted separately.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmesh.buffer.client.client import ReceivedGroup
from rollmesh.learner.evaluation.metrics import pass_metrics, vote_of
from rollmesh.learner.evaluation.result_log import shorten_text
from rollmesh.learner.rollouts.group import is_scored
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.trajectory import payload_codec
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, trajectory_pb2

Decode = Callable[[list[int]], str]
_FINISH = {
    trajectory_pb2.FINISH_REASON_UNSPECIFIED: "",
    trajectory_pb2.FINISH_REASON_STOP: "stop",
    trajectory_pb2.FINISH_REASON_LENGTH: "length",
    trajectory_pb2.FINISH_REASON_ABORTED: "aborted",
}


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of a finished round.

    Attributes:
        policy: evaluated version.
        reward: mean over scored responses.
        by_source: the same per data source.
        scored, failed: responses.
        response_length: mean, in tokens.
        seconds: from seeding to the last response.
        metrics: mean@n, maj@n and pass@k, where there are several responses per prompt (`learner.evaluation.metrics`).
        rows: prompts with their responses and rewards, by row of the file.
        skipped: rounds of this learner so far that were left out because the one before still ran.
        measured_by: values under another name cannot be compared (`learner.evaluation.measurement_identity`).
    """

    policy: PolicyVersion
    reward: float
    by_source: dict[str, float]
    scored: int
    failed: int
    response_length: float
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0
    measured_by: str = ""

    def value(self, metric: str) -> float | None:
        """A metric by name: `reward`, `reward/<data source>`, `mean@8`, `pass@4`, ...; None for an unknown one."""
        whole, _, source = metric.partition("/")
        if whole != "reward":
            return self.metrics.get(metric)
        return self.by_source.get(source) if source else self.reward

    def summary(self) -> dict[str, Any]:
        """The result as JSON, without the rows."""
        return {
            "incarnation": self.policy.incarnation,
            "version": self.policy.version,
            "reward": self.reward,
            "by_source": self.by_source,
            "metrics": self.metrics,
            "scored": self.scored,
            "failed": self.failed,
            "response_length": self.response_length,
            "seconds": self.seconds,
            "measured_by": self.measured_by,
        }

    def record(self) -> dict[str, Any]:
        """The result as a metrics record."""
        return {
            "eval/reward": self.reward,
            "eval/version": self.policy.version,
            "eval/scored": self.scored,
            "eval/failed": self.failed,
            "eval/response_length/mean": self.response_length,
            "eval/seconds": self.seconds,
            "eval/skipped": self.skipped,
            "eval/measured_by": self.measured_by,
            **{f"eval/reward/{source}": value for source, value in self.by_source.items()},
            **{f"eval/{name}": value for name, value in self.metrics.items()},
        }


def summarize(
    policy: PolicyVersion,
    arrived: Sequence[ReceivedGroup],
    decode: Decode,
    *,
    asked: Sequence[trajectory_pb2.PromptTask],
    seconds: float,
    right_at: float,
) -> EvalResult:
    """The result of a round.

    Args:
        policy: evaluated version.
        arrived: the groups that have an outcome.
        decode: token ids to text.
        asked: the round's tasks.
        seconds: that it took.
        right_at: reward from which a response is right.

    Raises:
        RollmeshError: no response was scored, or one cannot be read.
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    scored: list[list[tuple[float, str]]] = []
    lengths: list[int] = []
    rows = []
    for leased, payloads in sorted(arrived, key=lambda group: group.leased.task.ordinal):
        texts = [
            decode(payload_codec.decode(payload).response_ids.tolist()) if len(payload) else unscored_text(meta, decode)
            for meta, payload in zip(leased.members, payloads, strict=True)
        ]
        answered = [(member, text) for member, text in zip(leased.members, texts, strict=True) if is_scored(member)]
        rewards[leased.task.data_source] += [member.reward for member, _ in answered]
        lengths += [member.response_tokens for member, _ in answered]
        scored.append([(member.reward, vote_of(text, read_answer(member))) for member, text in answered])
        rows.append(_shortened(prompt_record(leased, texts)))
    everything = [value for values in rewards.values() for value in values]
    if not everything:
        raise RollmeshError("no held-out response was scored", hint="`rollmesh ledger` says why they failed")
    return EvalResult(
        policy=policy,
        reward=sum(everything) / len(everything),
        by_source={source: sum(values) / len(values) for source, values in sorted(rewards.items()) if values},
        scored=len(everything),
        failed=sum(task.n for task in asked) - len(everything),
        response_length=sum(lengths) / len(lengths),
        seconds=seconds,
        metrics=pass_metrics(scored, n=max(task.n for task in asked), right_at=right_at),
        rows=rows,
    )


def unscored_text(member: trajectory_pb2.MemberMeta, decode: Decode) -> str:
    """The text of a response without a score, or the end of a long one; empty where nothing was sampled."""
    ids = list(member.unscored_ids)
    return f"{'... ' * (len(ids) < member.response_tokens)}{decode(ids)}" if ids else ""


def prompt_record(leased: buffer_pb2.LeasedGroup, texts: Sequence[str]) -> dict[str, Any]:
    """A prompt with its responses, for a file; a response without a score has the reason in its place.

    Args:
        leased: the group.
        texts: of its members, in their order.
    """
    task = leased.task
    responses = [
        {
            "text": text,
            "reward": member.reward if is_scored(member) else None,
            "reason": member.reason,
            "tokens": member.response_tokens,
            "finish": _FINISH[member.finish_reason],
            **({} if (answer := read_answer(member)) is None else {"answer": answer}),
        }
        for member, text in zip(leased.members, texts, strict=True)
    ]
    return {
        "row": task.row,
        "data_source": task.data_source,
        "prompt": task.prompt_text,
        "ground_truth": json.loads(task.ground_truth_json or "null"),
        "responses": responses,
    }


def read_answer(member: trajectory_pb2.MemberMeta) -> str | None:
    """The answer of a response as its scorer reads it; None if the scorer reads none."""
    return member.answer if member.HasField("answer") else None


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    responses = [{**response, "text": shorten_text(response["text"])} for response in record["responses"]]
    return {**record, "prompt": shorten_text(record["prompt"]), "responses": responses}
