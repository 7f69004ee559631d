"""Episodes: masks, budgets, tools, environments, time limits, drafts; the model's part is scripted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.generators.engines.types import GenerationResult
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from tests.generators.agents import user_code
from tests.generators.agents.scene import (
    HERE,
    TEMPLATES,
    TOKENIZER,
    V0,
    Stage,
    calling,
    decode,
    encode,
    runs_of,
    sampled_of,
)
from tests.generators.agents.scene import (
    settings as run_of,
)
from tests.generators.engines.tiny import EOS, EOS_2

ADD = f"{HERE}:add"
V1 = PolicyVersion(1, 1)
_OF_TOOLS = {True: "{% if tools %}", False: "{% if false and tools %}"}


async def test_a_tool_is_called_and_its_answer_is_masked() -> None:
    stage = Stage(tools=[ADD])
    turns = [calling("add", a=20, b=22), "It is 42.<eot>"]
    result = await stage.play(*turns)
    assert sampled_of(result.sampled) == [encode(turn) for turn in turns]
    [_, (sampled, between), _] = runs_of(result.sampled)
    assert not sampled
    assert decode(between) == "\n[tool]\n42<eot>\n[assistant]\n"
    assert result.finish_reason == "stop"
    assert not result.sampled.log_probs[result.sampled.response_mask == 0].any()
    assert result.sampled.log_probs[result.sampled.response_mask == 1].all()
    assert result.sampled.versions == VersionRuns(((len(result.sampled.response_ids), V0),))
    assert result.final_text == "It is 42."
    assert [message["role"] for message in result.messages] == ["user", "assistant", "tool", "assistant"]
    assert result.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 20, "b": 22}}
    assert result.messages[2]["content"] == "42"
    assert {name: result.stats[name] for name in ("turns", "tool_calls", "tool_errors")} == {
        "turns": 2,
        "tool_calls": 1,
        "tool_errors": 0,
    }
    assert result.rewards is None
    assert result.failure == ""


async def test_the_prompt_shows_the_tools_and_the_model_sees_what_is_stored() -> None:
    stage = Stage(tools=[ADD])
    task = stage.task("20+22?")
    assert '"Adds two numbers."' in task.prompt_text
    result = await stage.play(calling("add", a=20, b=22), "42<eot>", request=stage.request(task))
    prompt = np.frombuffer(task.prompt_ids, "<i4").tolist()
    whole = prompt + result.sampled.response_ids.tolist()
    for request in stage.engine.requests:
        assert list(request.prompt_ids) == whole[: len(request.prompt_ids)]
    assert [len(request.prompt_ids) for request in stage.engine.requests] == [
        len(prompt),
        len(whole) - len(encode("42<eot>")),
    ]


@settings(max_examples=40)
@given(
    turns=st.lists(
        st.tuples(st.lists(st.integers(3, 299), max_size=10), st.sampled_from([None, EOS, EOS_2])),
        min_size=1,
        max_size=4,
    )
)
def test_what_was_sampled_stands_unchanged(turns: list[tuple[list[int], int | None]]) -> None:
    """Whatever tokens, also such as no text is tokenised to, with and without an end token."""
    said = [[*ids, end] if end is not None else [*ids, 7] * 20 for ids, end in turns]

    async def played() -> tuple[GenerationResult, list[list[int]]]:
        stage = Stage(environment=f"{HERE}:Gym", max_turns=len(said), turn_tokens=20)
        result = await stage.play(*said)
        return result, [list(request.prompt_ids) for request in stage.engine.requests]

    result, prompts = asyncio.run(played())
    found = sampled_of(result.sampled)
    assert found == [ids[:20] for ids in said]
    base = len(prompts[0]) - len(runs_of(result.sampled)[0][1])
    whole = prompts[0][:base] + result.sampled.response_ids.tolist()
    for prompt, ids in zip(prompts, found, strict=False):
        assert whole[: len(prompt)] == prompt
        assert whole[len(prompt) :][: len(ids)] == ids


async def test_a_turn_full_of_calls_is_not_answered_for_each() -> None:
    stage = Stage(tools=[ADD])
    turn = "\n".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {n}}}}}</tool_call>' for n in range(20))
    result = await stage.play(f"{turn}<eot>", "done<eot>", request=stage.request(max_tokens=9000))
    first, second = stage.engine.requests
    assert (first.earlier, second.earlier) == (0, len(second.prompt_ids) - len(first.prompt_ids))
    told = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert told == [*(str(n + 1) for n in range(16)), "Error: too many calls in one turn"]


async def test_calls_that_cannot_be_read_or_run_are_told() -> None:
    stage = Stage(tools=[ADD, f"{HERE}:fail", f"{HERE}:shout"])
    turns = [
        "<tool_call>add(1)</tool_call><eot>",
        calling("sub", a=1),
        calling("add", a="x", c=2),
        calling("fail", text="no luck" + "!" * 700),
        calling("shout", text="hey") + calling("add", a="3"),
        "done<eot>",
    ]
    turns[4] = turns[4].replace("<eot><tool", "\n<tool")
    result = await stage.play(*turns, request=stage.request(max_tokens=4000))
    told = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert "cannot be read: not valid JSON" in told[0]
    assert "there is no tool 'sub'; there are: add, fail, shout" in told[1]
    assert "a: Input should be a valid integer" in told[2]
    assert "c: Extra inputs are not permitted" in told[2]
    assert told[3].startswith("Error: ValueError: no luck!")
    assert len(told[3]) < 600
    assert told[4:] == ["HEY", "4"]
    assert (result.stats["tool_calls"], result.stats["tool_errors"]) == (6, 4)


async def test_tools_that_take_too_long_are_given_up() -> None:
    stage = Stage(tools=[f"{HERE}:block", f"{HERE}:block_loop"], tool_timeout_s=0.1, workers=1)
    begin = asyncio.get_running_loop().time()
    try:
        result = await stage.play(calling("block"), calling("block"), calling("block_loop"), "well<eot>")
        assert asyncio.get_running_loop().time() - begin < 200
        told = [message["content"] for message in result.messages if message["role"] == "tool"]
        assert told == ["Error: no answer within 0.1 s"] * 3
        assert result.stats["tool_timeouts"] == 3
        assert stage.runner.stats["calls_hanging"] == 2
    finally:
        user_code.LET_GO.set()
    await stage.runner.close()


# ------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("budget", range(1, 60))
async def test_the_budget_bounds_all_tokens(budget: int) -> None:
    stage = Stage(tools=[ADD])
    turns = [encode(turn) for turn in (calling("add", a=1, b=2), calling("add", a=3, b=4), "7<eot>")]
    result = await stage.play(*turns, request=stage.request(max_tokens=budget))
    assert 1 <= len(result.sampled.response_ids) <= budget
    assert result.finish_reason == "length"
    assert result.sampled.response_mask[-1] == 1
    for found, said in zip(sampled_of(result.sampled), turns, strict=False):
        assert found == said[: len(found)]


async def test_turns_are_bounded_in_number_and_length() -> None:
    stage = Stage(tools=[ADD], max_turns=2)
    result = await stage.play(*[calling("add", a=1)] * 2)
    assert (result.finish_reason, result.stats["turns"], result.stats["tool_calls"]) == ("length", 2, 1)
    stage = Stage(tools=[ADD], turn_tokens=4)
    result = await stage.play("a long answer<eot>")
    assert (result.finish_reason, len(result.sampled.response_ids)) == ("length", 4)


async def test_observations_are_bounded() -> None:
    stage = Stage(tools=[f"{HERE}:shout"], observation_tokens=20)
    result = await stage.play(calling("shout", text="ab" * 60), "ok<eot>")
    [message] = [message for message in result.messages if message["role"] == "tool"]
    assert message["content"].endswith("[cut]")
    assert len(encode(message["content"])) <= 20


async def test_an_episode_that_takes_too_long_is_ended_as_it_is() -> None:
    stage = Stage(environment=f"{HERE}:Countdown", episode_timeout_s=0.1)
    stage.clock.stop()
    stage.runner.submit([stage.request()])
    first = await stage.asked(1)
    stage.engine.finish(first, encode("2<eot>"))
    second = await stage.asked(2)
    stage.engine.running[second.request_id] = encode("hm")
    stage.clock.go()
    result = await stage.result()
    assert sampled_of(result.sampled) == [encode("2<eot>"), encode("hm")]
    assert (result.finish_reason, result.rewards, result.failure) == ("length", {"environment": 1.0}, "")


# -------------------------------------------------------------------------------------------------- environments


async def test_an_environment_of_the_own_form() -> None:
    stage = Stage(environment=f"{HERE}:Countdown")
    task = stage.task("Count.", start=3)
    assert task.prompt_text == "[user]\nCount."
    result = await stage.play("3<eot>", "7<eot>", "1<eot>", request=stage.request(task))
    assert decode(result.sampled.response_ids) == (
        " Start at 3.<eot>\n[assistant]\n3<eot>\n[user]\nnext: 2<eot>\n[assistant]\n7<eot>\n[user]\nnext: 1<eot>\n"
        "[assistant]\n1<eot>"
    )
    assert [sampled for sampled, _ in runs_of(result.sampled)] == [False, True, False, True, False, True]
    assert result.sampled.versions == VersionRuns(((len(result.sampled.response_ids), V0),))
    assert (result.finish_reason, result.rewards) == ("stop", {"environment": 2.0})
    assert result.step_rewards == [1.0, 0.0, 1.0]
    assert result.messages[0]["content"] == "Count. Start at 3."


async def test_gymnasiums_returns_async_methods_and_components() -> None:
    stage = Stage(environment=f"{HERE}:Gym")
    result = await stage.play("a<eot>", "the end<eot>")
    assert (result.finish_reason, result.rewards) == ("stop", {"length": 1.0, "seed": 1.0})
    assert not result.step_rewards, "they do not add up to the reward"


async def test_an_environment_in_trls_form() -> None:
    stage = Stage(environment=f"{HERE}:Counter", tools=[ADD])
    task = stage.task("Count. ", target=5)
    assert '"name": "increment"' in task.prompt_text
    assert "_helper" not in task.prompt_text
    turns = [calling("increment", by=2), calling("increment", by=-1), calling("increment", by=3), "There.<eot>"]
    result = await stage.play(*turns, request=stage.request(task))
    assert result.messages[0]["content"] == "Count. Reach 5."
    assert [m["content"] for m in result.messages if m["role"] == "tool"] == ["2", "Error: ValueError: only up", "5"]
    assert (result.finish_reason, result.rewards) == ("stop", {"environment": 1.0})
    scored = Stage(environment=f"{HERE}:Scored")
    assert (await scored.play("hi<eot>")).rewards == {"environment": 0.25}


async def test_a_turn_that_is_cut_without_a_call_ends_an_environment_in_trls_form_by_its_length() -> None:
    stage = Stage(environment=f"{HERE}:Counter", turn_tokens=4)
    result = await stage.play("I think that I shall begin now")
    assert len(sampled_of(result.sampled)[0]) == 4
    assert (result.finish_reason, result.rewards) == ("length", {"environment": 0.0})


async def test_nothing_is_called_of_an_environment_behind_a_method_that_hangs() -> None:
    user_code.REACHED.clear()
    user_code.LET_GO.clear()
    user_code.Slow.counted = 0
    stage = Stage(environment="tests.generators.agents.user_code:Slow", tool_timeout_s=1.0)
    turn = calling("count").removesuffix("<eot>")
    hangs = calling("hang").removesuffix("<eot>")
    try:
        result = await stage.play(f"{turn}{hangs}{turn}<eot>")
    finally:
        user_code.LET_GO.set()
    assert "a method did not end in time" in result.failure
    assert result.rewards is None
    assert user_code.Slow.counted == 1
    assert (result.stats["tool_calls"], result.stats["tool_timeouts"]) == (2, 1)


async def test_the_last_action_counts() -> None:
    stage = Stage(environment=f"{HERE}:Counter", max_turns=1)
    result = await stage.play(calling("increment", by=3))
    assert (result.finish_reason, result.rewards) == ("length", {"environment": 1.0})


@pytest.mark.parametrize(
    ("name", "turn", "why"),
    [("Countdown", "break<eot>", "step: RuntimeError: the game has crashed"), ("Broken", "", "reset: ConnectionError")],
)
async def test_an_environment_that_breaks_is_a_failure(name: str, turn: str, why: str) -> None:
    result = await Stage(environment=f"{HERE}:{name}").play(turn)
    assert why in result.failure
    assert result.rewards is None
    assert result.finish_reason != "aborted"


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        ({"tools": [f"{HERE}:no_hints"]}, "no_hints"),
        ({"tools": [ADD, ADD]}, "two tools"),
        ({"environment": f"{HERE}:Countdown", "tools": [ADD]}, "cannot have tools"),
        ({"environment": f"{HERE}:REACHED"}, "no function"),
        ({"tools": [HERE]}, "names no function .write `file.py:function`"),
        ({"environment": f"{HERE}:Any"}, "raised|reset"),
    ],
)
async def test_what_cannot_be_an_agent_is_refused(agent: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Stage(**agent)


# -------------------------------------------------------------------------------------------- drafts and versions


async def test_versions_may_advance_between_turns() -> None:
    stage = Stage(tools=[ADD])
    stage.runner.submit([stage.request()])
    call, answer = encode(calling("add", a=1)), encode("2<eot>")
    stage.engine.finish(await stage.asked(1), call)
    second = await stage.asked(2)
    stage.engine.version = V1
    stage.engine.finish(second, answer)
    result = await stage.result()
    # A masked token bears the version of the turn before.
    assert result.sampled.versions == VersionRuns(
        ((len(result.sampled.response_ids) - len(answer), V0), (len(answer), V1))
    )


async def draft_of(stage: Stage) -> Trajectory:
    """After a whole turn and two tokens of the next."""
    stage.runner.submit([stage.request(stage.task("Count.", start=2) if "Count" in str(stage.config) else None)])
    first = "2<eot>" if stage.config.rollout.agent.environment else calling("add", a=1)
    stage.engine.finish(await stage.asked(1), encode(first))
    second = await stage.asked(2)
    stage.engine.running[second.request_id] = encode("12")
    [part] = await asyncio.wrap_future(stage.runner.progress({"m": 1, "unknown": 1}))
    assert await asyncio.wrap_future(stage.runner.progress({"m": len(part.sampled) + 1})) == []
    stage.runner.abort(["m"])
    assert (await stage.result()).finish_reason == "aborted"
    assert second.request_id in stage.engine.aborted
    return part.sampled


@pytest.mark.parametrize("agent", [{"tools": [ADD]}, {"environment": f"{HERE}:Countdown"}])
async def test_a_draft_is_continued_elsewhere(agent: dict[str, Any]) -> None:
    draft = await draft_of(Stage(**agent))
    stage = Stage(**agent)
    stage.engine.version = V1
    request = replace(stage.request(stage.task("Count.", start=2) if "environment" in agent else None), prefix=draft)
    result = await stage.play("!<eot>", request=request)
    count = len(draft)
    assert result.sampled.response_ids[:count].tolist() == draft.response_ids.tolist()
    assert result.sampled.response_mask[:count].tolist() == draft.response_mask.tolist()
    assert result.sampled.log_probs[:count].tolist() == draft.log_probs.tolist()
    assert result.sampled.versions == VersionRuns(((count, V0), (len(result.sampled.response_ids) - count, V1)))
    # Only the last turn was asked for, and the engine was told what there is of it.
    [asked] = stage.engine.requests
    assert asked.prefix is not None
    assert decode(asked.prefix.response_ids) == "12"
    assert result.stats["turns"] == 2
    assert result.final_text == "12!"
    if "tools" in agent:
        assert [m["content"] for m in result.messages] == ["?", "", "2", "12!"]
    else:
        assert (result.rewards, result.step_rewards) == ({"environment": 1.0}, [1.0, 0.0])
        assert [m["content"] for m in result.messages] == ["Count. Start at 2.", "2", "next: 1", "12!"]


async def test_a_draft_that_ends_between_turns() -> None:
    stage = Stage(tools=[ADD])
    stage.runner.submit([stage.request()])
    stage.engine.finish(await stage.asked(1), encode(calling("add", a=1)))
    await stage.asked(2)
    [part] = await asyncio.wrap_future(stage.runner.progress({"m": 1}))
    assert part.sampled.response_mask[-1] == 0
    other = Stage(tools=[ADD])
    result = await other.play("2<eot>", request=other.request(prefix=part.sampled))
    assert other.engine.requests[0].prefix is None
    assert sampled_of(result.sampled) == [encode(calling("add", a=1)), encode("2<eot>")]
    await stage.runner.close()


async def test_an_environment_that_answers_otherwise_starts_anew() -> None:
    draft = await draft_of(Stage(environment=f"{HERE}:Moody"))
    stage = Stage(environment=f"{HERE}:Moody")
    result = await stage.play("2<eot>", "1<eot>", request=stage.request(prefix=draft))
    assert sampled_of(result.sampled) == [encode("2<eot>"), encode("1<eot>")]
    assert "Game 3" in decode(result.sampled.response_ids)
    assert result.rewards == {"environment": 2.0}
    assert stage.runner.stats["drafts_not_gone_on"] == 1


async def test_nothing_sampled_is_no_draft() -> None:
    stage = Stage(environment=f"{HERE}:Countdown")
    stage.runner.submit([stage.request()])
    await stage.asked(1)
    assert await asyncio.wrap_future(stage.runner.progress({"m": 1})) == []
    await stage.runner.close()


async def test_pinned_episodes_pin_every_turn() -> None:
    stage = Stage(tools=[ADD])
    await stage.play("2<eot>")
    await stage.play(calling("add", a=1), "2<eot>", request=stage.request(pinned=True))
    assert [request.pinned for request in stage.engine.requests] == [False, True, True]


async def test_members_that_begin_together_reach_the_engine_together() -> None:
    stage = Stage(tools=[ADD])
    batches: list[int] = []
    submit = stage.engine.submit
    stage.engine.submit = lambda requests: (batches.append(len(requests)), submit(requests))[1]  # type: ignore[method-assign]
    stage.engine.say = lambda _request: encode("2<eot>")
    stage.runner.submit([stage.request(request_id=str(index)) for index in range(4)])
    for _ in range(4):
        await stage.result()
    assert batches == [4]


async def test_what_the_engine_refuses_is_a_failure() -> None:
    stage = Stage(tools=[ADD])
    result = await stage.play(request=stage.request(prompt_ids=[5] * 3001))
    assert "generation refused: prompt_ids: too long" in result.failure


async def test_turns_draw_differently() -> None:
    stage = Stage(tools=[ADD])
    await stage.play(calling("add", a=1), "2<eot>")
    one, two = (request.sampling.seed for request in stage.engine.requests)
    assert 0 < one != two > 0


async def test_greedy_members_stay_greedy() -> None:
    stage = Stage(tools=[ADD])
    request = stage.request()
    request = replace(request, sampling=replace(request.sampling, temperature=0.0))
    await stage.play(calling("add", a=1), "2<eot>", request=request)
    assert [asked.sampling.temperature for asked in stage.engine.requests] == [0.0, 0.0]


async def test_a_turn_that_the_engine_refuses_late_is_a_failure() -> None:
    """As one that it refuses at once: given back, the episode would be granted, and refused, for ever."""
    stage = Stage(tools=[ADD])
    stage.runner.submit([stage.request()])
    asked = await stage.asked(1)
    nothing = GenerationResult(asked.request_id, Trajectory.empty(), "aborted", refusal="too odd")
    stage.engine.deliver([nothing])
    result = await stage.result()
    assert (result.finish_reason, "too odd" in result.failure) == ("stop", True)


async def test_side_data_is_of_the_turn_that_sampled() -> None:
    stage = Stage(tools=[ADD])
    stage.runner.submit([stage.request()])
    turns = [encode(calling("add", a=1)), encode("2<eot>")]
    for index, said in enumerate(turns):
        asked = await stage.asked(index + 1)
        rows = len(asked.prompt_ids) + len(said) - 1
        side = {"routed_experts": np.full((rows, 1, 1), index, np.uint8)}
        runs = VersionRuns(((len(said), V0),))
        sampled = Trajectory.sampled(np.array(said, np.int32), np.ones(len(said), np.float32), runs)
        stage.engine.deliver([GenerationResult(asked.request_id, sampled, "stop", side=side)])
    result = await stage.result()
    experts = result.side["routed_experts"][:, 0, 0]
    prompt = len(stage.engine.requests[0].prompt_ids)
    assert len(experts) == prompt + len(result.sampled.response_ids) - 1
    assert not experts[prompt - 1 : prompt - 1 + len(turns[0])].any()
    assert experts[-len(turns[1]) :].all()


def test_the_configuration_names_one_driver() -> None:
    assert run_of(tools=[ADD]).rollout.agent.kind == "tools"


def test_a_call_gets_no_longer_than_its_episode() -> None:
    assert run_of(tools=[ADD]).rollout.agent.call_timeout_s == 30
    assert run_of(tools=[ADD], episode_timeout_s=5.0).rollout.agent.call_timeout_s == 5
    with pytest.raises(ConfigError, match="tool_timeout_s"):
        run_of(tools=[ADD], episode_timeout_s=5.0, tool_timeout_s=6.0)


def test_a_program_may_fill_the_whole_context() -> None:
    assert run_of(tools=[ADD]).rollout.longest_response == 400
    assert run_of(program=ADD).rollout.longest_response == 4096 + 400 - 1


@pytest.mark.parametrize("shows", [True, False])
async def test_a_template_that_hides_the_tools_is_told_of(
    shows: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", TEMPLATES["plain"].replace("{% if tools %}", _OF_TOOLS[shows]))
    Stage(tools=[ADD])
    assert ("shows the model no tools" in caplog.text) != shows


async def test_calls_are_told_from_thoughts_by_what_each_prompt_has_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek's: thoughts are opened after a user's message, and not after a result."""
    opening = "{% if add_generation_prompt %}[assistant]\n"
    opened = TEMPLATES["plain"].replace(
        opening, opening + "{% if messages[-1].role == 'user' %}<think>\n{% endif %}", 1
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", opened)
    stage = Stage(tools=[ADD], parser="hermes")
    result = await stage.play(f"hm</think>{calling('add', a=1)}", calling("add", a=2), "done<eot>")
    assert [message["content"] for message in result.messages if message["role"] == "tool"] == ["2", "3"]
    result = await Stage(tools=[ADD], parser="hermes").play(f"maybe {calling('add', a=1)}")
    assert (result.stats["tool_calls"], result.finish_reason) == (0, "stop")
