"""The source of the members' responses: an inference engine, or an agent that uses one.

Responses of one turn come straight from the engine. Those of several turns are episodes: the model's turns, and
between them the answers of tools or an environment (masked). Both look alike to the rollout loop: a request goes in,
and one result comes out. Drafts may be requested meanwhile. A request may bring the first tokens of its response, which
another generator may have sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from rollmesh.generators.engines.types import (
    EngineStatus,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
)
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.protos import trajectory_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRequest(GenerationRequest):
    """The request for one member of a group.

    Attributes:
        task: the owner of the response; an engine does not use it.
        member: index in the group.
    """

    task: trajectory_pb2.PromptTask
    member: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeResult(GenerationResult):
    """A response of several turns.

    Attributes:
        rewards: of the environment or the agent itself, by component; None where it gives none.
        step_rewards: those that add up to `rewards`, one for each turn; empty where they are not known.
        failure: why the episode says nothing about the policy (the environment broke); empty where all is well. It
            ends as an error, never as a reward of zero.
        stats: of the episode, for metrics: `turns`, `tool_calls`, `tool_errors`, `tool_seconds`, ...
        final_text: text of the model's last turn, special tokens left out: the `response` that rewards see.
            None: the whole response, decoded.
        messages: the whole conversation as chat messages, the prompt's first: `extra_info.messages` for rewards.
        tool_calls: each call's end as Unix time in nanoseconds, its seconds, and the kind of its outcome.
    """

    rewards: Mapping[str, float] | None = None
    step_rewards: Sequence[float] = ()
    failure: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)
    final_text: str | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    tool_calls: Sequence[tuple[int, float, str]] = ()

    @classmethod
    def empty(cls, name: str, *, failure: str = "", aborted: bool = False) -> Self:
        """The result of an episode of which no token is left.

        Args:
            name: request id of the member.
            failure: as above.
            aborted: it was ended from outside.
        """
        finish: FinishReason = "aborted" if aborted else "stop"
        return cls(request_id=name, sampled=Trajectory.empty(), finish_reason=finish, failure=failure)


def failure_of(result: GenerationResult) -> str:
    """The reason why a response is no sample of the policy; empty where it is one."""
    if isinstance(result, EpisodeResult) and result.failure:
        return f"episode failed: {result.failure}"
    if result.refusal:
        return f"generation refused: {result.refusal}"
    return "" if len(result.sampled) else "generation ended without a token"


class ResponseSource(Protocol):
    """The part of `InferenceEngine` that the rollout loop needs; results go to the engine's listener, or its like."""

    def submit(self, requests: Sequence[MemberRequest]) -> None:
        """Queues requests, all or none.

        Raises:
            PayloadError: a request cannot be served; names the field and the limit.
            EngineError: the engine is not running.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests early; each still gets its result."""
        ...

    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        """Copies the tokens of running responses."""
        ...

    def status(self) -> EngineStatus:
        """A snapshot."""
        ...
