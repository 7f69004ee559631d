"""Unmodified agents of the `openai` package as episodes: masks, rewards, failures, drafts."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openai  # noqa: F401 - loading it is no part of an episode's time
import psutil
import pytest
import torch

from rollmesh.generators.engines.types import GenerationResult, SamplingParams
from rollmesh.generators.program_agents.process import LaunchContext, Outcome, parse_last_line
from rollmesh.generators.program_agents.runner import ProgramRunner, open_runner, program_of
from rollmesh.generators.rollout.awake_clock import AwakeClock
from rollmesh.generators.rollout.response_source import EpisodeResult, MemberRequest
from rollmesh.mesh.config.rollout import AgentSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import trajectory_pb2
from tests.generators.openai_server.world import Serving, soon

AGENTS = Path(__file__).with_name("program_agents.py")
QUESTION = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    torch.set_num_threads(1)
    found = Serving(tmp_path_factory.mktemp("served"))
    found.swap(0)
    yield found
    found.close()


class Runs:
    """A runner and what comes out of it."""

    def __init__(self, serving: Serving, **agent: Any) -> None:
        self.serving = serving
        self.results: dict[str, EpisodeResult] = {}
        self.runner: ProgramRunner
        serving.run(lambda: self._make(AgentSection(**agent)))

    async def _make(self, section: AgentSection) -> None:
        self.runner = open_runner(section, self.serving.endpoint, AwakeClock())
        self.runner.connect(self._take)

    def _take(self, results: list[GenerationResult]) -> None:
        for result in results:
            assert isinstance(result, EpisodeResult)
            assert result.request_id not in self.results
            self.results[result.request_id] = result

    def request(self, name: str, member: int = 0, opening: str = "<system>", **more: Any) -> MemberRequest:
        task = trajectory_pb2.PromptTask(
            task_id="t1", prompt_text="the quick fox", messages_json=json.dumps(QUESTION), ground_truth_json='"42"'
        )
        sampling = SamplingParams(max_tokens=250, seed=more.pop("seed", 5), **more.pop("sampling", {}))
        ids = self.serving.tokenizer.encode(opening)
        return MemberRequest(request_id=name, prompt_ids=ids, sampling=sampling, task=task, member=member, **more)

    def submit(self, *requests: MemberRequest) -> None:
        self._within(lambda: self.runner.submit(requests))

    def abort(self, name: str) -> None:
        self._within(lambda: self.runner.abort([name]))

    def _within(self, what: Any) -> None:
        async def call() -> None:
            what()

        self.serving.run(call)

    async def result(self, name: str) -> EpisodeResult:
        await soon(lambda: name in self.results)
        return self.results[name]

    def close(self) -> None:
        self.serving.run(self.runner.close)


def stats(result: EpisodeResult) -> Mapping[str, float]:
    return {name: value for name, value in result.stats.items() if value}


def checked(serving: Serving, request: MemberRequest, result: EpisodeResult) -> list[int]:
    """The tokens of the whole conversation, each sampled one with the log-prob that its model gives it."""
    assert not result.failure
    ids = [*request.prompt_ids, *result.sampled.response_ids.tolist()]
    assert (
        len(result.sampled.versions)
        == len(result.sampled.response_mask)
        == len(result.sampled.log_probs)
        == len(result.sampled.response_ids)
    )
    chances = np.array([serving.log_chances[last, new] for last, new in itertools.pairwise(ids)])
    chances = chances[len(request.prompt_ids) - 1 :]
    np.testing.assert_allclose(
        result.sampled.log_probs[result.sampled.response_mask == 1],
        chances[result.sampled.response_mask == 1],
        rtol=2e-4,
        atol=1e-3,
    )
    assert not result.sampled.log_probs[result.sampled.response_mask == 0].any()
    return ids


async def test_a_plain_function_is_an_episode_of_two_turns(serving: Serving) -> None:
    runs = Runs(serving, program=f"{AGENTS}:two_turns")
    requests = [runs.request(f"m{member}", member, seed=member + 1) for member in range(3)]
    runs.submit(*requests)
    for member, request in enumerate(requests):
        result = await runs.result(request.request_id)
        ids = checked(serving, request, result)
        text = serving.tokenizer.decode(ids)
        assert text.startswith("<system>I am an agent.<eot><user>the quick fox<eot><assistant>")
        assert "<eot><user>again<eot><assistant>" in text or "<eos><user>again<eot><assistant>" in text
        assert result.rewards == {"reward": 0.5 + member}
        edges = np.flatnonzero(np.diff(result.sampled.response_mask))
        assert result.sampled.response_mask[0] == 0
        assert len(edges) == 3, "masked, said, masked, said"
        assert stats(result) == {"turns": 2, "calls": 2, "calls_sampling_ignored": 2}
        said = result.sampled.response_ids[edges[-1] + 1 :].tolist()
        assert result.final_text == serving.tokenizer.decode(said, skip_special_tokens=True)
        assert [message["role"] for message in result.messages] == ["system", "user", "assistant", "user", "assistant"]
    runs.close()


async def test_an_async_function_says_what_its_answer_is_and_worth(serving: Serving) -> None:
    runs = Runs(serving, program=f"{AGENTS}:one_turn")
    request = runs.request("a", opening="<user>")
    runs.submit(request)
    result = await runs.result("a")
    checked(serving, request, result)
    assert result.rewards == {"good": 1.0, "quick": 0.25}
    assert result.final_text == "truth 42"
    runs.close()


async def test_a_command_is_gone_with_all_it_has_started(serving: Serving) -> None:
    runs = Runs(serving, command=[sys.executable, str(AGENTS)])
    request = runs.request("a", opening="<user>")
    runs.submit(request)
    result = await runs.result("a")
    checked(serving, request, result)
    assert result.rewards is not None
    assert result.rewards["reward"] == 2.0
    left = int(result.rewards["pid"])
    assert await asyncio.to_thread(survivors, [left], 10) == set()
    runs.close()


async def test_what_has_left_a_commands_process_group_is_not_waited_for(serving: Serving) -> None:
    runs = Runs(serving, command=[sys.executable, str(AGENTS), "--away"])
    request = runs.request("a", opening="<user>")
    runs.submit(request)
    result = await runs.result("a")
    checked(serving, request, result)
    assert result.rewards is not None
    psutil.Process(int(result.rewards["pid"])).kill()
    assert result.rewards["reward"] == 2.0
    runs.close()


@pytest.mark.parametrize(
    ("agent", "opening", "reason"),
    [
        ({"program": f"{AGENTS}:breaks"}, "<user>", "the agent raised KeyError: 'tool'"),
        ({"program": f"{AGENTS}:exits_in_a_task"}, "<user>", "the agent raised RuntimeError: SystemExit: no key"),
        ({"program": f"{AGENTS}:huge"}, "<user>", "int), not a number"),
        ({"program": f"{AGENTS}:odd"}, "<user>", "Odd), not a number"),
        ({"program": f"{AGENTS}:silent"}, "<user>", "the agent never called the model"),
        ({"program": f"{AGENTS}:one_turn"}, "the", "has to begin as the model's chat template does"),
        ({"command": [sys.executable, "-c", "raise SystemExit('lost')"]}, "<user>", "ended with code 1: lost"),
        ({"command": [sys.executable, "-c", "{}['lost']"]}, "<user>", "ended with code 1: KeyError: 'lost'"),
        ({"command": [sys.executable, "-c", "print('lost'); exit(3)"]}, "<user>", "ended with code 3: lost"),
        ({"command": [sys.executable, "-c", "print('[' * 60000)"]}, "<user>", "the agent never called the model"),
    ],
)
async def test_what_breaks_is_a_failure_never_a_reward(
    serving: Serving, agent: dict[str, Any], opening: str, reason: str
) -> None:
    runs = Runs(serving, **agent)
    runs.submit(runs.request("a", opening=opening))
    assert reason in (await runs.result("a")).failure
    assert runs.runner.stats["episodes_failed"] == runs.runner.stats["episodes"] == 1
    runs.close()


async def test_a_command_that_cannot_be_started_is_a_failure(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "agent"
    file.write_text("#!/no/such/interpreter")
    file.chmod(0o755)
    runs = Runs(serving, command=[str(file)])
    runs.submit(runs.request("a", opening="<user>"))
    assert "cannot be started: No such file" in (await runs.result("a")).failure
    runs.close()


@pytest.mark.parametrize(
    "agent",
    [{"program": f"{AGENTS}:two_turn"}, {"program": f"{AGENTS}:command"}, {"command": ["no-such-agent"]}],
)
def test_an_agent_that_cannot_be_called_is_told_of_at_the_start(serving: Serving, agent: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.agent\.{next(iter(agent))}"):
        Runs(serving, **agent)


def test_a_command_gets_what_is_named_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("SEARCH_KEY", "wanted")
    show = "import json, os; print(json.dumps({'answer': json.dumps(dict(os.environ))}))"
    section = AgentSection(command=[sys.executable, "-c", show], pass_env=["SEARCH_KEY"])
    found = asyncio.run(program_of(section, 1)({}, LaunchContext("http://here", "key", "tiny"), 60.0))
    shown = json.loads(found.answer or "")
    assert shown["PATH"] == os.environ["PATH"]
    assert (shown["OPENAI_BASE_URL"], shown["OPENAI_API_KEY"], shown["SEARCH_KEY"]) == ("http://here", "key", "wanted")
    assert "WANDB_API_KEY" not in shown
    with pytest.raises(ConfigError, match="NOT_SET"):
        program_of(section.model_copy(update={"pass_env": ["PATH", "NOT_SET"]}), 1)
    with pytest.raises(ValueError, match="pass_env"):
        AgentSection(program="a:b", pass_env=["PATH"])


async def test_turns_that_will_not_be_trained_are_counted_by_reason_and_told_once(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs(serving, program=f"{AGENTS}:rewrites")
    for name in "abcdef":
        request = runs.request(name, opening="<user>")
        runs.submit(request)
        result = await runs.result(name)
        assert result.rewards == {"reward": 1.0}
        counted = {key: value for key, value in result.stats.items() if key.startswith("turns") and value}
        assert counted == {"turns": 1, "turns_dropped": 4, "turns_dropped_rewritten": 4}
    assert runs.runner.stats["turns_dropped"] == 24
    [told] = [record.getMessage() for record in caplog.records if "branches" in record.getMessage()]
    assert told.startswith("80 % of turns are branches, which are not trained: the client rewrites assistant messages")
    runs.close()


async def test_tools_that_a_conversation_does_not_show_are_named_once(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs(serving, program=f"{AGENTS}:grows")
    for name in "ab":
        runs.submit(runs.request(name, opening="<system>"))
        stats = (await runs.result(name)).stats
        assert (stats["turns"], stats["turns_dropped"]) == (2, 0)
    [told] = [record.getMessage() for record in caplog.records if "does not show" in record.getMessage()]
    assert told.startswith("a conversation's prompt does not show later, which a later call offers")
    runs.close()


async def test_an_overdue_episode_is_ended_as_it_is(serving: Serving) -> None:
    runs = Runs(serving, program=f"{AGENTS}:endless", tool_timeout_s=3.0, episode_timeout_s=3.0)
    request = runs.request("a", opening="<user>")
    runs.submit(request)
    result = await runs.result("a")
    checked(serving, request, result)
    assert result.finish_reason == "length"
    assert result.rewards is None
    assert result.stats["timeouts"] == 1
    # The last call may be amid its answer, or not have begun one.
    unfinished = result.stats["calls"] - 1 - result.stats["branches_dropped"]
    assert bool(result.stats["calls_aborted"]) <= unfinished <= 1
    runs.close()


@pytest.mark.parametrize("answers", [None, 2], ids=["tokens", "answers"])
async def test_an_agent_that_talks_until_its_tokens_or_answers_are_used_up_is_judged(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, answers: int | None
) -> None:
    if answers is not None:
        monkeypatch.setattr(serving.endpoint.sessions, "_answers", answers)
    runs = Runs(serving, program=f"{AGENTS}:talks_on")
    request = runs.request("a", opening="<user>")
    runs.submit(request)
    result = await runs.result("a")
    ids = checked(serving, request, result)
    assert result.finish_reason == "length"
    assert result.rewards is None
    assert result.stats["turns"] == (answers or result.stats["calls"] - 1) > 1
    assert len(ids) <= 251
    assert len(ids) > 200 or answers is not None
    runs.close()


async def test_an_episode_goes_on_from_its_draft(serving: Serving) -> None:
    runs = Runs(serving, program=f"{AGENTS}:two_turns")
    runs.submit(runs.request("whole"))
    whole = await runs.result("whole")
    cut = len(whole.sampled) - 2
    draft = whole.sampled.part(0, cut)
    request = runs.request("again", seed=99, prefix=draft)
    runs.submit(request)
    again = await runs.result("again")
    checked(serving, request, again)
    assert again.sampled.response_ids[:cut].tolist() == draft.response_ids.tolist()
    other = runs.request("other", seed=99)
    runs.submit(other)
    assert (await runs.result("other")).sampled.response_ids[:cut].tolist() != draft.response_ids.tolist()
    runs.close()


async def test_progress_holds_calls_that_are_running(serving: Serving) -> None:
    runs = Runs(serving, program=f"{AGENTS}:one_turn")
    before = serving.engine.status().tokens_generated
    serving.engine.pause().result(180)
    try:
        runs.submit(runs.request("a", opening="<user>"), runs.request("b", opening="<user>", member=1))
        await soon(lambda: serving.endpoint._calls.running == 2)
        assert await asyncio.wrap_future(runs.runner.progress({"a": 1, "b": 1})) == []
    finally:
        serving.engine.resume().result(180)
    found: dict[str, Trajectory] = {}
    while not {"a", "b"} <= set(runs.results):
        for part in await asyncio.wrap_future(runs.runner.progress({"a": 1, "b": 1, "unknown": 1})):
            found[part.request_id] = part.sampled
    assert serving.engine.status().tokens_generated > before
    for name, sampled in found.items():
        whole = runs.results[name]
        assert whole.sampled.response_ids[: len(sampled)].tolist() == sampled.response_ids.tolist()
        assert whole.sampled.response_mask[: len(sampled)].tolist() == sampled.response_mask.tolist()
    runs.close()


async def test_an_aborted_episode_still_has_a_result(serving: Serving) -> None:
    runs = Runs(serving, program=f"{AGENTS}:endless")
    runs.submit(runs.request("a", opening="<user>"))
    await soon(lambda: bool(runs.serving.endpoint.sessions) and runs.runner._episodes["a"].session.calls > 1)
    runs.abort("a")
    assert (await runs.result("a")).finish_reason == "aborted"
    await soon(lambda: serving.engine.status().active + serving.engine.status().queued == 0)
    runs.close()


async def test_an_episode_that_is_aborted_before_it_begins_still_has_a_result(serving: Serving) -> None:
    runs = Runs(serving, program=f"{AGENTS}:endless")
    request = runs.request("a", opening="<user>")

    def submit_and_abort() -> None:
        runs.runner.submit([request])
        runs.runner.abort(["a"])

    before = len(serving.endpoint.sessions)
    runs._within(submit_and_abort)
    result = await runs.result("a")
    assert (result.finish_reason, len(result.sampled.response_ids)) == ("aborted", 0)
    assert len(serving.endpoint.sessions) == before
    runs.close()


@pytest.mark.parametrize(
    ("printed", "outcome"),
    [
        ("\n", Outcome()),
        ("thinking\r\n42\r\n", Outcome(answer="42")),
        (' 10%\r 100%\r{"reward": 2, "answer": "a\u2028b"}\n', Outcome({"reward": 2.0}, "a\u2028b")),
        ("so\nx\u2029y\x85z", Outcome(answer="x\u2029y\x85z")),
    ],
)
def test_the_last_line_ends_where_lines_end_and_nowhere_else(printed: str, outcome: Outcome) -> None:
    assert parse_last_line(printed) == outcome


async def test_pinned_and_greedy_episodes(serving: Serving) -> None:
    runs = Runs(serving, program=f"{AGENTS}:one_turn")
    requests = [
        runs.request(name, opening="<user>", pinned=True, seed=seed, sampling={"temperature": 0.0})
        for name, seed in (("a", 1), ("b", 2))
    ]
    runs.submit(*requests)
    first, second = [await runs.result(request.request_id) for request in requests]
    checked(serving, requests[0], first)
    assert first.sampled.response_ids.tolist() == second.sampled.response_ids.tolist()
    assert first.sampled.versions.versions == (PolicyVersion(1, 0),)
    runs.close()
