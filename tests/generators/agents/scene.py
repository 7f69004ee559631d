"""A tokenizer with chat templates of several kinds, an engine that says what it is told to, and episodes over them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rollmesh.generators.agents import build_runner
from rollmesh.generators.agents.chat_template import ChatRenderer
from rollmesh.generators.agents.runner import AgentRunner
from rollmesh.generators.engines.types import (
    EngineStatus,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    SamplingParams,
)
from rollmesh.generators.rollout.awake_clock import AwakeClock
from rollmesh.generators.rollout.response_source import EpisodeResult, MemberRequest
from rollmesh.learner.data.prompts import AgentPrompts, PromptEncoder, TaskShape
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import trajectory_pb2
from tests.generators.engines.tiny import EOS, EOS_2, train_tokenizer

HERE = "tests/generators/agents/user_code.py"
V0 = PolicyVersion(1, 0)
ENDS = frozenset({EOS, EOS_2})

_TOOLS = "{% if tools %}tools: {{ tools | tojson }}<eot>\n{% endif %}"
_CALLS = (
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
)
_ROLES = "{% for message in messages %}[{{ message.role }}]\n{{ message.content }}" + _CALLS + "<eot>\n{% endfor %}"
# The manners of well-known templates, in short.
TEMPLATES = {
    "plain": _TOOLS + _ROLES + "{% if add_generation_prompt %}[assistant]\n{% endif %}",
    # An empty thought opens every turn.
    "thoughts": _TOOLS + _ROLES + "{% if add_generation_prompt %}[assistant]\n<think>\n\n</think>\n\n{% endif %}",
    # Roles must alternate, tool results are JSON, a turn ends with the end of text.
    "strict": (
        "{% set ns = namespace(index=0) %}{% for message in messages %}"
        "{% if message.role in ('user', 'assistant') %}"
        "{% if (message.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "{% set ns.index = ns.index + 1 %}{% endif %}"
        "{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
        "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ {'content': message.content} | tojson }}[/TOOL_RESULTS]"
        "{% else %} {{ message.content }}<eos>{% endif %}{% endfor %}"
    ),
    # Results of tools are taken only after a call.
    "calls": _TOOLS
    + "{% set ns = namespace(called=false) %}{% for message in messages %}"
    + "{% if message.role == 'tool' and not ns.called %}{{ raise_exception('no call before') }}{% endif %}"
    + "{% if message.role == 'assistant' %}{% set ns.called = message.tool_calls is defined %}{% endif %}"
    + "[{{ message.role }}]\n{{ message.content }}"
    + _CALLS
    + "<eot>\n{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}",
}
TOKENIZER = train_tokenizer()
TOKENIZER.chat_template = TEMPLATES["plain"]


def tokenizer_with(template: str) -> Any:
    """The tokenizer with another template."""
    other = train_tokenizer()
    other.chat_template = TEMPLATES[template]
    return other


def encode(text: str) -> list[int]:
    """Canonical tokens of a text, special ones included."""
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def decode(ids: Iterable[int]) -> str:
    """Text with special tokens."""
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def calling(name: str, **arguments: Any) -> str:
    """A turn that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><eot>"


def settings(**agent: Any) -> Config:
    """A run's configuration with agents."""
    values = {
        "model": {"path": "none"},
        "data": {"train": "none.jsonl"},
        "rollout": {"agent": agent, "max_prompt_tokens": 4096, "max_response_tokens": 400},
    }
    return load_config(values, [])


def task_of(config: Config, messages: Sequence[Mapping[str, Any]], **extra: Any) -> trajectory_pb2.PromptTask:
    """The task that the learner makes of a row."""
    encoder = PromptEncoder(
        TOKENIZER, max_prompt_tokens=4096, template_kwargs={}, agent=AgentPrompts.of(config.rollout.agent)
    )
    row = Row([dict(message) for message in messages], "test", "7", extra)
    task = encoder.encode(row, TaskShape(n=1, temperature=1.0, max_tokens=400), number=0, task_id="t", ordinal=1)
    assert isinstance(task, trajectory_pb2.PromptTask), task
    return task


class ScriptedEngine:
    """Answers requests as a function says; keeps them."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.say: Callable[[GenerationRequest], Sequence[int] | None] = lambda _request: None
        self.version = V0
        self.deliver: Callable[[list[GenerationResult]], None] = lambda _results: None
        self.running: dict[str, list[int]] = {}

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if any(len(request.prompt_ids) > 3000 for request in requests):
            raise PayloadError("prompt_ids", "too long")
        self.requests.extend(requests)
        for request in requests:
            said = self.say(request)
            if said is not None:
                self.finish(request, said)

    def finish(self, request: GenerationRequest, said: Sequence[int], reason: FinishReason | None = None) -> None:
        """Answers a request, after its prefix; cut where its budget ends."""
        before = request.prefix.response_ids.tolist() if request.prefix else []
        ids = [*before, *said][: request.sampling.max_tokens]
        if reason is None:
            reason = "stop" if ids and ids[-1] in ENDS else "length"
        versions = [*(request.prefix.versions if request.prefix else ()), *[self.version] * (len(ids) - len(before))]
        log_probs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        if request.prefix is not None:
            log_probs[: len(before)] = request.prefix.log_probs
        result = GenerationResult(
            request.request_id,
            Trajectory.sampled(
                np.array(ids, np.int32), log_probs, VersionRuns.merged((1, version) for version in versions)
            ),
            reason,
        )
        asyncio.get_running_loop().call_soon(lambda: self.deliver([result]))

    def abort(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            self.aborted.append(name)
            for request in self.requests:
                if request.request_id == name:
                    self.finish(request, self.running.get(name, []), "aborted")

    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        found: Future[list[PartialResponse]] = Future()
        parts = []
        for name in at_least:
            ids = self.running.get(name, [])
            if ids:
                tokens = Trajectory.sampled(
                    np.array(ids, np.int32), np.full(len(ids), -1, np.float32), VersionRuns(((len(ids), self.version),))
                )
                parts.append(PartialResponse(name, tokens, 1.0))
        found.set_result(parts)
        return found

    def status(self) -> EngineStatus:
        return EngineStatus(0, 0, 0, 0, self.version, "", None)


class _Text:
    """The methods of the model's tokenizer that a runner needs."""

    tokenizer = TOKENIZER
    end_ids = ENDS


class Stage:
    """A runner over a scripted engine."""

    def __init__(self, **agent: Any) -> None:
        self.config = settings(**agent)
        self.engine = ScriptedEngine()
        self.clock = AwakeClock()
        self.results: asyncio.Queue[EpisodeResult] = asyncio.Queue()
        self.runner: AgentRunner = build_runner(
            self.config,
            self.engine,  # type: ignore[arg-type]  # the part of an engine that it uses
            _Text(),  # type: ignore[arg-type]
            self.clock,
        )
        self.runner.connect(lambda ended: [self.results.put_nowait(result) for result in ended])  # type: ignore[func-returns-value,misc]
        self.engine.deliver = lambda results: self._take(results)

    def _take(self, results: list[GenerationResult]) -> None:
        assert self.runner.accept_results(results) == []

    def task(self, text: str = "?", **extra: Any) -> trajectory_pb2.PromptTask:
        return task_of(self.config, [{"role": "user", "content": text}], **extra)

    def request(self, task: trajectory_pb2.PromptTask | None = None, **fields: Any) -> MemberRequest:
        task = task if task is not None else self.task()
        budget = fields.pop("max_tokens", 400)
        return MemberRequest(
            **{
                "request_id": "m",
                "prompt_ids": np.frombuffer(task.prompt_ids, "<i4").tolist(),
                "sampling": SamplingParams(max_tokens=budget, seed=5),
                "task": task,
                "member": 0,
                **fields,
            }
        )

    async def play(self, *turns: str | Sequence[int], request: MemberRequest | None = None) -> EpisodeResult:
        """One episode in which the model says these turns, as text or as tokens."""
        waiting = [encode(turn) if isinstance(turn, str) else list(turn) for turn in turns]
        self.engine.say = lambda _request: waiting.pop(0)
        self.runner.submit([request or self.request()])
        return await self.result()

    async def result(self) -> EpisodeResult:
        async with asyncio.timeout(180):
            return await self.results.get()

    async def asked(self, count: int) -> GenerationRequest:
        """The request for turn `count` (from 1), once it has been asked for."""
        async with asyncio.timeout(180):
            while len(self.engine.requests) < count:
                await asyncio.sleep(0)
        return self.engine.requests[count - 1]


def sampled_of(tokens: Trajectory) -> list[list[int]]:
    """Token ids of the runs that were sampled."""
    return [ids for sampled, ids in runs_of(tokens) if sampled]


def runs_of(tokens: Trajectory) -> list[tuple[bool, list[int]]]:
    """(sampled, token ids), in order."""
    runs: list[tuple[bool, list[int]]] = []
    for token, bit in zip(tokens.response_ids.tolist(), tokens.response_mask.tolist(), strict=True):
        if not runs or runs[-1][0] != bool(bit):
            runs.append((bool(bit), []))
        runs[-1][1].append(token)
    return runs


def chat_with(template: str, **options: Any) -> ChatRenderer:
    """Over one of the templates."""
    return ChatRenderer(tokenizer_with(template), end_ids=ENDS, **options)
