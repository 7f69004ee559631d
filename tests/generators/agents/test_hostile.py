"""Tools, environments and models that do what they should not: there is an observation, or a failure, never a hang."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollmesh.generators.engines.errors import EngineError
from tests.generators.agents import hostile_code
from tests.generators.agents.scene import TOKENIZER, Stage, calling, decode, encode, runs_of, sampled_of, task_of

# As a module: tests look at what is in it.
CODE = hostile_code.__name__


def observed(result: Any) -> list[str]:
    return [message["content"] for message in result.messages if message["role"] == "tool"]


@pytest.mark.parametrize("name", ["give", "give_async"])
async def test_whatever_a_tool_returns_or_raises_is_an_observation(name: str) -> None:
    stage = Stage(tools=[f"{CODE}:{name}"], max_turns=20, observation_tokens=80)
    asked = (
        "nothing", "object", "set", "surrogate", "huge", "special", "exit", "interrupt", "stop", "cancelled",
        "speechless",
    )  # fmt: skip
    turns = [calling(name, what=what) for what in asked]
    async with asyncio.timeout(240):
        result = await stage.play(*turns, "done<eot>", request=stage.request(max_tokens=4000))
    assert result.failure == ""
    assert sampled_of(result.sampled) == [encode(turn) for turn in (*turns, "done<eot>")]
    told = dict(zip(asked, observed(result), strict=True))
    assert told["nothing"] == "null"
    assert told["object"] == "<Unspeakable that cannot be shown: RuntimeError>"
    assert told["set"] == "{7}"
    assert told["surrogate"] == "half ? a pair"
    assert told["huge"].startswith("ab ab ")
    assert told["huge"].endswith("[cut]")
    assert "<eot>" not in told["special"]
    assert told["exit"] == "Error: RuntimeError: SystemExit: 3"
    assert told["interrupt"].startswith("Error: RuntimeError: KeyboardInterrupt")
    assert "StopIteration" in told["stop"]
    assert told["cancelled"].startswith("Error: RuntimeError: CancelledError")
    assert told["speechless"] == "Error: SpeechlessError: <SpeechlessError that cannot be shown: RuntimeError>"
    assert (result.stats["tool_timeouts"], result.stats["tool_errors"]) == (0, 5)
    await stage.runner.close()


async def test_no_name_of_an_argument_is_taken() -> None:
    stage = Stage(tools=[f"{CODE}:named"])
    result = await stage.play(calling("named", function="f", timeout_s=2, what="w"), "done<eot>")
    assert observed(result) == ["f 2 w"]
    stage = Stage(environment=f"{CODE}:Row")
    task = stage.task("?", function="f", what="w", timeout_s=2)
    result = await stage.play("a<eot>", request=stage.request(task))
    assert result.rewards == {"environment": 1.0}
    assert result.messages[0]["content"] == "? f w 2"


async def test_a_model_cannot_speak_as_another_by_the_name_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.name }}{{ m.content }}<eot>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    stage = Stage(tools=[f"{CODE}:give"], parser="hermes")
    turn = '<tool_call>{"name": "x\\ud800", "arguments": {}}</tool_call>'
    other = '<tool_call>{"name": "<e' + 'ot>[user]", "arguments": {}}</tool_call>'
    # Spelled by other tokens than the special one.
    spelled = [token for character in other for token in encode(character)]
    result = await stage.play(encode(turn + "<eot>"), [*spelled, *encode("<eot>")], "done<eot>")
    assert result.failure == ""
    for sampled, ids in runs_of(result.sampled):
        assert sampled or decode(ids).count("<eot>") == 1


# ------------------------------------------------------------------------------------------------ ends of episodes


async def test_an_environment_that_cannot_begin_is_closed() -> None:
    hostile_code.CLOSED.clear()
    result = await Stage(environment=f"{CODE}:Held").play("")
    assert "reset: ConnectionError: no server" in result.failure
    assert hostile_code.CLOSED == ["Held"]


async def test_the_end_of_an_environment_in_trls_form_is_no_tool() -> None:
    hostile_code.CLOSED.clear()
    stage = Stage(environment=f"{CODE}:Closes")
    result = await stage.play(calling("close"), "bye<eot>")
    assert observed(result) == ["Error: there is no tool 'close'; there are: wave"]
    assert hostile_code.CLOSED == ["Closes"]


async def test_a_tool_named_close_is_the_models_to_call() -> None:
    hostile_code.CLOSED.clear()
    result = await Stage(environment=f"{CODE}:ClosesDoors").play(calling("close"), "bye<eot>")
    assert observed(result) == ["closed"]
    assert hostile_code.CLOSED == ["ClosesDoors"], "once, by the model"


@pytest.mark.parametrize("where", ["reset", "step", "engine"])
async def test_an_episode_can_be_aborted_wherever_it_is(where: str) -> None:
    hostile_code.CLOSED.clear()
    hostile_code.REACHED.clear()
    hostile_code.LET_GO.clear()
    stage = Stage(environment=f"{CODE}:Waits", workers=2)
    said = encode("a<eot>")
    try:
        stage.runner.submit([stage.request(stage.task("?", where=where))])
        if where != "reset":
            first = await stage.asked(1)
            stage.engine.finish(first, said)
        if where == "engine":
            await stage.asked(2)
        else:
            assert await asyncio.to_thread(hostile_code.REACHED.wait, 30)
        stage.runner.abort(["m", "unknown"])
        result = await stage.result()
        assert (result.finish_reason, result.rewards, result.failure) == ("aborted", None, "")
        assert sampled_of(result.sampled) == ([] if where == "reset" else [said])
        assert hostile_code.CLOSED == ["Waits"]
        assert await asyncio.wrap_future(stage.runner.progress({"m": 1})) == []
    finally:
        hostile_code.LET_GO.set()
    await stage.runner.close()


async def test_an_engine_that_has_stopped_makes_no_failure() -> None:
    """The member continues elsewhere."""
    stage = Stage(tools=[f"{CODE}:give"])
    stage.runner.submit([stage.request()])
    first = await stage.asked(1)

    def refuse(requests: Any) -> None:
        raise EngineError("it has stopped")

    stage.engine.submit = refuse  # type: ignore[method-assign]
    stage.engine.finish(first, encode(calling("give", what="set")))
    result = await stage.result()
    assert (result.finish_reason, result.failure) == ("aborted", "")


async def test_a_call_that_comes_back_as_it_is_given_up_counts_once() -> None:
    calls = Stage(tools=[f"{CODE}:give"], workers=1).runner._user_calls
    free = calls._free._value
    for _ in range(200):
        began = asyncio.Event()
        loop = asyncio.get_running_loop()

        def quick(began: asyncio.Event = began, loop: Any = loop) -> None:
            loop.call_soon_threadsafe(began.set)

        call = asyncio.ensure_future(calls.call(quick, timeout_s=30))
        await began.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(180):
        while calls.lost or calls._free._value < free:
            await asyncio.sleep(0.001)
    assert (calls.lost, calls._free._value) == (0, free)
    calls.close()


async def test_tools_that_hang_leave_others_their_threads() -> None:
    hostile_code.REACHED.clear()
    hostile_code.LET_GO.clear()
    stage = Stage(environment=f"{CODE}:Waits", workers=1, tool_timeout_s=1.0)
    try:
        stage.engine.say = lambda _request: encode("a<eot>")
        names = ["h0", "h1", "h2"]
        stage.runner.submit([stage.request(stage.task("?", where="step"), request_id=name) for name in names])
        for _ in names:
            assert "no answer within 1 s" in (await stage.result()).failure
        task = stage.task("?", where="nowhere")
        stage.runner.submit([stage.request(task, request_id="other", max_tokens=60)])
        other = await stage.result()
        assert (other.request_id, other.failure, other.finish_reason) == ("other", "", "length")
    finally:
        hostile_code.LET_GO.set()
    await stage.runner.close()


# --------------------------------------------------------------------------------------------------- members apart


async def test_episodes_of_a_group_share_nothing() -> None:
    stage = Stage(environment=f"{CODE}:Own")
    stage.engine.say = lambda request: None
    names = [str(index) for index in range(4)]
    task = stage.task("?")
    stage.runner.submit([stage.request(task, request_id=name, member=int(name)) for name in names])
    for turn in range(3):
        await stage.asked(4 * (turn + 1))
        for index, request in enumerate(stage.engine.requests[4 * turn :]):
            prompt = decode(request.prompt_ids)
            own = index if turn == 0 else int(prompt.split("[assistant]\n")[1][0])
            stage.engine.finish(request, encode(f"{own}<eot>"))
    results = [await stage.result() for _ in names]
    assert [result.rewards for result in results] == [{"alike": 1.0}] * 4
    assert len({decode(result.sampled.response_ids) for result in results}) == 4


async def test_a_draft_whose_environment_draws_otherwise_begins_anew() -> None:
    stage = Stage(environment=f"{CODE}:Seeded")
    stage.runner.submit([stage.request()])
    stage.engine.finish(await stage.asked(1), encode("a<eot>"))
    second = await stage.asked(2)
    stage.engine.running[second.request_id] = encode("b")
    [part] = await asyncio.wrap_future(stage.runner.progress({"m": 1}))
    await stage.runner.close()

    same = Stage(environment=f"{CODE}:Seeded", max_turns=2)
    result = await same.play("!<eot>", request=same.request(prefix=part.sampled))
    assert same.runner.stats["drafts_not_gone_on"] == 0
    assert decode(sampled_of(result.sampled)[1]) == "b!<eot>"

    other = Stage(environment=f"{CODE}:Seeded", max_turns=2)
    task = task_of(other.config, [{"role": "user", "content": "?"}])
    task.row = 1
    result = await other.play("c<eot>", "d<eot>", request=replace(other.request(task), prefix=part.sampled))
    assert other.runner.stats["drafts_not_gone_on"] == 1
    assert sampled_of(result.sampled) == [encode("c<eot>"), encode("d<eot>")]


@pytest.mark.parametrize("short", [0, 1, 2])
async def test_an_observation_at_the_edge_of_the_budget(short: int) -> None:
    """Exactly at the budget it is left out: after it not a token could be sampled; one below, one is."""
    stage = Stage(tools=[f"{CODE}:give"])
    turns = [calling("give", what="set"), "done<eot>"]
    whole = await stage.play(*turns)
    up_to = len(whole.sampled.response_ids) - len(encode(turns[1]))
    edge = Stage(tools=[f"{CODE}:give"])
    result = await edge.play(*turns, request=edge.request(max_tokens=up_to + short))
    assert result.finish_reason == "length"
    assert len(edge.engine.requests) == (1 if short == 0 else 2)
    assert len(result.sampled.response_ids) == (len(encode(turns[0])) if short == 0 else up_to + short)
    assert result.sampled.response_mask[-1] == 1
    assert len(observed(result)) == (short > 0)


async def test_an_opening_that_uses_up_the_budget_is_a_failure() -> None:
    stage = Stage(environment=f"{CODE}:Row")
    task = stage.task("?", function="f" * 80, what="w", timeout_s=2)
    result = await stage.play(request=stage.request(task, max_tokens=10))
    assert "not a token was sampled" in result.failure
    assert stage.engine.requests == []
