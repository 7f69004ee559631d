"""Requests of the unmodified `openai` package, answered by a real engine."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from rollmesh.generators.engines.types import SleepLevel, TokenEvent
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from tests.generators.openai_server.world import EOS, TOOL, Serving, soon

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the quick fox"}]
IDS: Any = {"return_token_ids": True}


@pytest.fixture
def client(serving: Serving) -> OpenAI:
    return OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)


def log_probs(serving: Serving, prompt: list[int], ids: list[int]) -> list[float]:
    before = [prompt[-1], *ids[:-1]]
    return [float(serving.log_chances[last, following]) for last, following in zip(before, ids, strict=True)]


def test_a_chat_is_rendered_sampled_and_counted(serving: Serving, client: OpenAI) -> None:
    before = serving.figure("tokens_total", kind="sampled")
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=20, logprobs=True, top_logprobs=1, seed=3, extra_body=IDS
    )
    [choice] = answer.choices
    ids, prompt = choice.token_ids, choice.prompt_token_ids  # type: ignore[attr-defined]
    rendered = serving.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert prompt == serving.tokenizer.encode(rendered, add_special_tokens=False)
    assert choice.message.content == serving.tokenizer.decode(ids, skip_special_tokens=True)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    found = [token.logprob for token in choice.logprobs.content]
    assert found == pytest.approx(log_probs(serving, prompt, ids), abs=1e-3)
    assert [token.top_logprobs[0].logprob for token in choice.logprobs.content] == found
    assert (choice.finish_reason == "stop") == (ids[-1] == EOS)
    assert answer.system_fingerprint == "1:0"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(ids))
    assert serving.figure("tokens_total", kind="sampled") == before + len(ids)


def test_sampling_parameters_decide(serving: Serving, client: OpenAI) -> None:
    def ids(**parameters: Any) -> list[int]:
        [choice] = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=12, extra_body=IDS, **parameters
        ).choices
        return choice.token_ids  # type: ignore[attr-defined, no-any-return]

    greedy = ids(temperature=0)
    assert greedy == ids(temperature=0) == ids(top_p=1e-6)
    last = serving.tokenizer.convert_tokens_to_ids("<assistant>")
    assert greedy[0] == int(serving.log_chances[last].argmax())
    assert ids(seed=5) == ids(seed=5)
    assert ids(seed=5) != ids(seed=6)
    counts = Counter(
        choice.token_ids[0]  # type: ignore[attr-defined]
        for choice in client.chat.completions.create(
            model="tiny", messages=HELLO, n=64, max_tokens=1, extra_body={**IDS, "top_k": 2}
        ).choices
    )
    assert set(counts) == set(serving.log_chances[last].topk(2).indices.tolist())


def test_a_stop_string_ends_the_text_before_it(serving: Serving, client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="the", temperature=0, max_tokens=30).choices[0].text
    stop = next(part for part in whole[5:] if part.isprintable() and part.isascii())
    [choice] = client.completions.create(
        model="tiny", prompt="the", temperature=0, max_tokens=30, stop=[stop], extra_body=IDS
    ).choices
    assert choice.finish_reason == "stop"
    assert choice.text == whole[: whole.index(stop)]
    streamed = client.completions.create(
        model="tiny", prompt="the", temperature=0, max_tokens=30, stop=[stop], stream=True
    )
    assert "".join(part.choices[0].text for part in streamed) == choice.text
    assert stop in serving.tokenizer.decode(choice.token_ids)  # type: ignore[attr-defined]


async def test_streams_say_what_whole_answers_say(serving: Serving) -> None:
    client = AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none")
    common: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "seed": 11, "n": 2, "logprobs": True}
    whole, stream = await asyncio.gather(
        client.chat.completions.create(**common, extra_body=IDS),
        client.chat.completions.create(**common, extra_body=IDS, stream=True, stream_options={"include_usage": True}),
    )
    texts, ids, values, ends, chunks = ["", ""], [[], []], [[], []], {}, 0
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            if choice.logprobs is not None:
                values[choice.index] += [token.logprob for token in choice.logprobs.content or []]
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
            chunks += bool(choice.delta.content)
    assert texts == [choice.message.content for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]  # type: ignore[attr-defined]
    assert [len(part) for part in values] == [len(part) for part in ids]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage
    assert chunks > 4, "text comes as it is sampled"


def test_calls_of_tools_are_found(serving: Serving, client: OpenAI) -> None:
    tools: Any = [TOOL]
    answer = client.chat.completions.create(model="tiny", messages=HELLO, tools=tools)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 3}')
    assert choice.message.content is None
    # The stream helper of the package puts the pieces together.
    with client.chat.completions.stream(model="tiny", messages=HELLO, tools=tools) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    none = client.chat.completions.create(model="tiny", messages=HELLO, tools=tools, tool_choice="none", max_tokens=4)
    assert none.choices[0].message.tool_calls is None


def test_text_completions_take_text_and_tokens(serving: Serving, client: OpenAI) -> None:
    ids = serving.tokenizer.encode("the quick")
    answers = [
        client.completions.create(model="tiny", prompt=prompt, seed=4, logprobs=1, n=2).choices
        for prompt in ("the quick", ids)
    ]
    assert [choice.text for choice in answers[0]] == [choice.text for choice in answers[1]]
    many = client.completions.create(model="tiny", prompt=["the", "the quick"], temperature=0, max_tokens=3)
    assert [choice.index for choice in many.choices] == [0, 1]
    logprobs = answers[0][0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) <= 16
    assert all(math.isfinite(value) for value in logprobs.token_logprobs if value is not None)


def test_tokens_say_where_in_the_text_they_stand_streamed_or_not(serving: Serving, client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "the", "seed": 4, "logprobs": 0, "n": 2}
    streams: dict[int, tuple[list[str], list[int]]] = {0: ([], []), 1: ([], [])}
    for chunk in client.completions.create(**asked, stream=True):
        for part in chunk.choices:
            if part.logprobs is not None:
                streams[part.index][0].extend(part.logprobs.tokens or [])
                streams[part.index][1].extend(part.logprobs.text_offset or [])
    for choice in client.completions.create(**asked).choices:
        assert choice.logprobs is not None
        tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset
        assert streams[choice.index] == (tokens, offsets)
        assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]


async def test_a_client_that_leaves_aborts_its_answer(serving: Serving) -> None:
    client = AsyncOpenAI(base_url=f"{serving.url}/sessions/left/v1", api_key="none", max_retries=0)
    sessions = serving.endpoint.sessions
    serving.engine.pause().result(180)
    try:
        whole = client.chat.completions.create(model="tiny", messages=HELLO)
        streamed = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        calls = [asyncio.ensure_future(whole), asyncio.ensure_future(streamed)]
        await soon(lambda: (found := sessions.find("left")) is not None and len(found.running) == 2)
        (await calls[1]).response  # noqa: B018 - its headers are there
        calls[0].cancel()
        await (await calls[1]).close()
        found = sessions.find("left")
        assert found is not None
        await soon(lambda: found.counts["aborted"] == 2 and not found.running)
    finally:
        serving.engine.resume().result(180)
    await soon(lambda: serving.engine.status().active + serving.engine.status().queued == 0)
    assert not found.record.turns


async def test_a_client_that_left_before_its_next_token_is_no_error(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """A write before any client knows of it fails: that is told in one message, without a trace."""
    client = AsyncOpenAI(base_url=f"{serving.url}/sessions/cut/v1", api_key="none", max_retries=0)
    server, sessions = serving.endpoint.server, serving.endpoint.sessions
    serving.engine.pause().result(180)
    try:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        found = sessions.find("cut")
        assert found is not None
        await soon(lambda: len(found.running) == 1)
        [name] = found.running
        token = Trajectory.sampled(
            np.array([5], np.int32), np.zeros(1, np.float32), VersionRuns(((1, PolicyVersion(1, 0)),))
        )

        async def cut() -> None:
            serving.endpoint.accept_tokens([TokenEvent(name, token)])
            for connection in server._runners[-1].server.connections:  # type: ignore[union-attr] # it listens
                assert connection.transport is not None
                connection.transport.close()

        caplog.set_level(logging.INFO)
        serving.run(cut)
        await soon(lambda: not found.running)
        await stream.close()
    finally:
        serving.engine.resume().result(180)
    await soon(lambda: "left" in caplog.text)
    assert [record.levelname for record in caplog.records if "left" in record.message] == ["INFO"]
    assert all(record.levelno < logging.WARNING and not record.exc_info for record in caplog.records)


def test_a_call_waits_while_the_engine_sleeps(serving: Serving, client: OpenAI) -> None:
    """Its weights are gone for the turn of a learner, and come again."""
    engine = serving.engine
    engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(180)
    try:
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.completions.create, model="tiny", prompt="the", max_tokens=3)
            while not call.done() and not engine.status().queued:
                time.sleep(0.01)
            engine.wake().result(180)
            serving.swap(0)
            engine.resume().result(180)
            assert call.result(240).choices
    finally:
        engine.wake().result(180)
        if engine.status().serving is None:
            serving.swap(0)
        engine.resume().result(180)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "rollmesh"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
