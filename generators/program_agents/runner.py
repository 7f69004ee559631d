"""Episodes of agents that know OpenAI's API alone: each has a session at the endpoint, which records its samples.

Invariants:

- Every request ends in one `EpisodeResult`. Its response is the chain of calls that ends in the last one, token by
  token as they were sampled. It begins where the group's prompt ends.
- An agent fails, without a reward, if it raises, never calls the model, or begins a conversation with another prompt
  than the group's.
- An overdue episode ends with its tokens so far: its running call is cut, further ones are refused, then the agent is
  abandoned. So does an episode if its tokens are used up, a call is refused for that, and the agent then fails.

Everything here happens in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import EngineStatus, FinishReason, GenerationResult, PartialResponse
from rollmesh.generators.openai_server.completions import Completions
from rollmesh.generators.openai_server.conversations.sessions import SamplingPolicy, Session, Sessions
from rollmesh.generators.openai_server.conversations.turn_tree import Turn, TurnTree, branches, transcript
from rollmesh.generators.openai_server.endpoint import Endpoint
from rollmesh.generators.program_agents.process import (
    AgentError,
    CommandProgram,
    FunctionProgram,
    LaunchContext,
    Outcome,
    Program,
)
from rollmesh.generators.rollout.awake_clock import AwakeClock
from rollmesh.generators.rollout.response_source import EpisodeResult, MemberRequest
from rollmesh.mesh.config.rollout import AgentSection
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.branches import DROPPED, MANY, Cause, branches_text
from rollmesh.mesh.trajectory.episode_metrics import CALLS_CONSTRAINED
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.protos import trajectory_pb2

log = logging.getLogger(__name__)
# Seconds that an overdue agent gets to notice that its session is over.
_GRACE_S = 2.0
_LONGEST_S = 7 * 86400.0
_COUNTED = (
    "turns",
    "calls",
    "calls_aborted",
    "calls_sampling_ignored",
    CALLS_CONSTRAINED,
    "branches_dropped",
    DROPPED,
    "tokens_dropped",
    "timeouts",
)
# Turns from which the share of branches says something.
_ENOUGH_TURNS = 20


def program_of(section: AgentSection, at_once: int) -> Program:
    """The configured agent.

    Args:
        section: of kind `program`.
        at_once: plain functions or processes at the same time.

    Raises:
        ConfigError: there is no such function, program or variable.
    """
    if section.program is not None:
        return FunctionProgram(section.program, at_once)
    return CommandProgram(section.command, at_once, section.pass_env)


@dataclass(frozen=True, slots=True)
class _CallEnd:
    """The end of an agent's call.

    Attributes:
        outcome: of the agent.
        failure: why the episode says nothing about the policy; empty where all is well.
        overdue: its time was up.
    """

    outcome: Outcome = field(default_factory=Outcome)
    failure: str = ""
    overdue: bool = False


@dataclass(slots=True, eq=False)
class _Episode:
    """The episode of one member."""

    request: MemberRequest
    session: Session
    started: float
    task: asyncio.Task[_CallEnd] | None = None


class ProgramRunner:
    """Answers members by running an agent for each. `connect` comes before the first request.

    Args:
        engine: of the endpoint.
        completions, sessions: of the endpoint.
        program: the agent.
        base_url: where agents of this generator find the endpoint, without a path.
        model: name of the model.
        timeout_s: `rollout.agent.episode_timeout_s`.
        clock: for that time.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        completions: Completions,
        sessions: Sessions,
        program: Program,
        *,
        base_url: Callable[[], str],
        model: str,
        timeout_s: float,
        clock: AwakeClock,
    ) -> None:
        self._engine = engine
        self._completions = completions
        self._sessions = sessions
        self._program = program
        self._base_url = base_url
        self._model = model
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_results: Callable[[list[GenerationResult]], None]
        self._loop = asyncio.get_running_loop()
        self._episodes: dict[str, _Episode] = {}
        self._closed = False
        self._stats: Counter[str] = Counter()
        self._branches: Counter[Cause] = Counter()
        self._warned: set[str] = set()

    def connect(self, on_results: Callable[[list[GenerationResult]], None]) -> None:
        """Sets the callback for results, which runs in the event loop's thread."""
        self._on_results = on_results

    @property
    def stats(self) -> dict[str, float]:
        """Counts since the start, by name."""
        return {name: float(self._stats[name]) for name in ("episodes", "episodes_failed", *_COUNTED)}

    # --------------------------------------------------------------------------------------- the response source

    def submit(self, requests: Sequence[MemberRequest]) -> None:
        """Starts an episode for each.

        Raises:
            PayloadError: a prompt or a budget is missing; no episode has started.
        """
        for request in requests:
            if not len(request.prompt_ids):
                raise PayloadError("prompt_ids", "a prompt has at least one token")
            if request.sampling.max_tokens < 1:
                raise PayloadError("sampling.max_tokens", "must be at least 1")
        for request in requests:
            policy = SamplingPolicy(tuple(request.prompt_ids), request.sampling, request.pinned, request.prefix)
            episode = _Episode(request, self._sessions.open_training(policy), time.monotonic())
            self._episodes[request.request_id] = episode
            episode.task = self._loop.create_task(self._run(episode), name=f"episode-{request.request_id}")
            episode.task.add_done_callback(partial(self._on_ended, episode))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends episodes early; each still gets its result."""
        for name in request_ids:
            episode = self._episodes.get(name)
            if episode is not None and episode.task is not None:
                episode.task.cancel()

    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        """Copies the tokens of running episodes."""
        return asyncio.run_coroutine_threadsafe(self._progress(dict(at_least)), self._loop)

    def status(self) -> EngineStatus:
        """Status of the engine."""
        return self._engine.status()

    async def close(self) -> None:
        """Ends all episodes without a result."""
        self._closed = True
        tasks = [episode.task for episode in self._episodes.values() if episode.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._program.close()

    # ------------------------------------------------------------------------------------------------ an episode

    async def _run(self, episode: _Episode) -> _CallEnd:
        session = episode.session
        try:
            return await self._call(session, episode.request)
        except AgentError as error:
            # That an agent does not survive the end of its tokens is the policy's doing.
            return _CallEnd(failure="" if session.counts["no_room"] and session.record.turns else str(error))

    def _on_ended(self, episode: _Episode, task: asyncio.Task[_CallEnd]) -> None:
        """Makes the result of an episode, also of one that was aborted before it had begun."""
        name = episode.request.request_id
        self._completions.abort(episode.session)
        self._sessions.forget(episode.session)
        del self._episodes[name]
        if self._closed:
            return
        try:
            end = _CallEnd() if task.cancelled() else task.result()
            result = self._result(episode, end, aborted=task.cancelled())
        except Exception as error:  # reported as a failure of this episode: the others continue
            log.exception("an episode failed")
            result = EpisodeResult.empty(name, failure=f"{type(error).__name__}: {error}")
        self._stats["episodes"] += 1
        self._stats["episodes_failed"] += bool(result.failure)
        for name in _COUNTED:
            self._stats[name] += int(result.stats.get(name, 0))
        for cause in Cause:
            self._branches[cause] += int(result.stats.get(cause.metric, 0))
        self._warn(episode.session)
        self._on_results([result])

    def _warn(self, session: Session) -> None:
        """Logs once that many turns will not be trained, and once that a model cannot know of tools."""
        turns, dropped = self._stats["turns"], self._stats[DROPPED]
        texts = {}
        if turns + dropped >= _ENOUGH_TURNS and dropped > MANY * (turns + dropped):
            texts["branches"] = branches_text(turns, self._branches)
        if session.hidden_tools:
            names = ", ".join(sorted(session.hidden_tools))
            texts["tools"] = (
                f"a conversation's prompt does not show {names}, which a later call offers: the model cannot know of "
                "it; see docs/endpoint.md#branches"
            )
        for kind in texts.keys() - self._warned:
            self._warned.add(kind)
            log.warning("%s", texts[kind])

    async def _call(self, session: Session, request: MemberRequest) -> _CallEnd:
        context = LaunchContext(f"{self._base_url()}/sessions/{session.name}/v1", session.key, self._model)
        # Its own limit takes the generator's sleep for the agent's time: ours ends it before.
        work = asyncio.ensure_future(self._program(task_of(request), context, _LONGEST_S))
        timer = asyncio.ensure_future(self._clock.sleep(self._timeout_s))
        try:
            await asyncio.wait({work, timer}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return _CallEnd(work.result())
            # The running call is recorded with its tokens so far; then the agent learns that its session is over.
            session.over = True
            self._completions.abort(session)
            # It may have waited for its turn until now: its own time may end much later.
            await asyncio.wait({work}, timeout=2 * _GRACE_S)
        finally:
            timer.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
        log.info("an agent's episode was ended after %.0f s", self._timeout_s)
        said_in_time = not work.cancelled() and work.exception() is None
        return _CallEnd(work.result() if said_in_time else Outcome(), overdue=True)

    def _result(self, episode: _Episode, end: _CallEnd, *, aborted: bool) -> EpisodeResult:
        request, record = episode.request, episode.session.record
        failure = end.failure
        chain = record.chain()
        response = transcript(chain, request.prompt_ids) if chain else None
        tokens = response.sampled() if response is not None else None
        if not failure and not aborted:
            failure = _missing_reason(request, chain) if tokens is None else ""
        if response is None or tokens is None:
            tokens = Trajectory.empty()
        finish: FinishReason = chain[-1].finish if chain else "stop"
        cut = end.overdue or finish == "aborted" or episode.session.counts["no_room"] > 0
        finish = "length" if cut else finish
        answer = record.last_text if end.outcome.answer is None and chain else end.outcome.answer
        return EpisodeResult(
            request_id=request.request_id,
            sampled=tokens,
            finish_reason="aborted" if aborted else finish,
            side=response.side() if response is not None else {},
            rewards=end.outcome.rewards,
            failure=failure,
            stats=_stats(episode.session, record, chain, overdue=end.overdue),
            final_text=answer,
            messages=record.messages,
        )

    # --------------------------------------------------------------------------------------------------- progress

    async def _progress(self, at_least: Mapping[str, int]) -> list[PartialResponse]:
        latest: dict[str, str] = {}
        for name in at_least:
            episode = self._episodes.get(name)
            running = episode.session.running if episode is not None else {}
            if running:
                latest[name] = max(running, key=lambda key: (running[key].call, -running[key].choice))
        parts: dict[str, Trajectory] = {}
        if latest:
            copies = await asyncio.wrap_future(self._engine.progress(dict.fromkeys(latest.values(), 1)))
            parts = {part.request_id: part.sampled for part in copies}
        responses = []
        for name, least in at_least.items():
            episode = self._episodes.get(name)
            tokens = _partial_trajectory(episode, latest.get(name, ""), parts, least) if episode is not None else None
            if episode is not None and tokens is not None:
                responses.append(PartialResponse(name, tokens, time.monotonic() - episode.started))
        return responses


def _partial_trajectory(
    episode: _Episode, running: str, parts: Mapping[str, Trajectory], least: int
) -> Trajectory | None:
    """The tokens of an episode, up to the running call where that has tokens, else up to the last one.

    None: they do not begin with the group's prompt, or there are fewer than `least`.
    """
    session, prompt_ids = episode.session, episode.request.prompt_ids
    begun = session.running.get(running)
    turn: Turn | None = session.record.last()
    if begun is not None and begun.position is not None and running in parts:
        turn = Turn(begun.call, begun.choice, begun.position, parts[running], "aborted")
    if turn is None or turn.length - len(prompt_ids) < least:
        return None
    response = transcript(turn.chain(), prompt_ids)
    return response.sampled() if response is not None else None


def _missing_reason(request: MemberRequest, chain: Sequence[Turn]) -> str:
    if not chain:
        return "the agent never called the model"
    expected = list(request.prompt_ids)[:8]
    begin = chain[0].position.new_ids[: len(expected)].tolist()
    return (
        f"the agent's conversation begins with tokens {begin} ..., the group's prompt is {expected} ...: it has to "
        "begin as the model's chat template does"
    )


def _stats(session: Session, record: TurnTree, chain: Sequence[Turn], *, overdue: bool) -> dict[str, float]:
    dropped = record.dropped(chain)
    causes = session.causes_of(dropped)
    return {
        "turns": len(chain),
        "calls": session.calls,
        "calls_aborted": session.counts["aborted"],
        "calls_sampling_ignored": session.counts["forced"],
        CALLS_CONSTRAINED: session.counts[CALLS_CONSTRAINED],
        "branches_dropped": branches(dropped),
        DROPPED: len(dropped),
        **{cause.metric: causes[cause] for cause in Cause},
        "tokens_dropped": sum(len(turn.sampled) for turn in dropped),
        "timeouts": float(overdue),
    }


def task_of(request: MemberRequest) -> dict[str, Any]:
    """An agent's view of its task, as JSON would hold it."""
    task: trajectory_pb2.PromptTask = request.task
    messages = json.loads(task.messages_json) if task.messages_json else None
    return {
        "task_id": task.task_id,
        "prompt": messages if messages is not None else task.prompt_text,
        "messages": messages if messages is not None else [{"role": "user", "content": task.prompt_text}],
        "data_source": task.data_source,
        "ground_truth": json.loads(task.ground_truth_json) if task.ground_truth_json else None,
        "extra_info": json.loads(task.extra_info_json) if task.extra_info_json else {},
        "member": request.member,
    }


def open_runner(section: AgentSection, endpoint: Endpoint, clock: AwakeClock) -> ProgramRunner:
    """The runner of agents that find the model at an endpoint.

    Args:
        section: of kind `program`.
        endpoint: of the generator.
        clock: for the time that an episode may take.

    Raises:
        ConfigError: there is no such function, program or variable.
    """
    return ProgramRunner(
        endpoint.engine,
        endpoint.completions,
        endpoint.sessions,
        program_of(section, endpoint.max_running),
        base_url=lambda: endpoint.server.agents_url,
        model=endpoint.model,
        timeout_s=section.episode_timeout_s,
        clock=clock,
    )
