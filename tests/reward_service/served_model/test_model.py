"""A model's process from its owner's side: batches over callers, ends, silence, engines that are away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.outcomes import NOT_BEGUN, Failed
from rollmesh.reward_service.served_model import connection
from rollmesh.reward_service.served_model.messages import ModelOptions
from rollmesh.reward_service.served_model.model import Answer, ServedModel
from tests.reward_service.served_model.conftest import Clock

# Nothing takes as long unless it hangs.
LONG_S = 240.0
# The time of a call that ends because the test turns the clock.
ENDLESS_S = 1e6
Start = Callable[..., Awaitable[ServedModel]]


@pytest_asyncio.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts the stub: `await start(call_timeout_s=..., **options)`."""
    stub = connection._PROGRAM.replace(
        "rollmesh.reward_service.served_model.program", "tests.reward_service.served_model.stub"
    )
    monkeypatch.setattr(connection, "_PROGRAM", stub)
    started = []

    async def begin(call_timeout_s: float = LONG_S, folder: str = "good", **options: float) -> ServedModel:
        model = ServedModel("stub", ModelOptions("response", folder, **options), call_timeout_s=call_timeout_s)  # type: ignore[arg-type]
        started.append(model)
        async with asyncio.timeout(LONG_S):
            await model.start()
        return model

    yield begin
    async with asyncio.timeout(LONG_S):
        for model in started:
            await model.close()


async def ask(model: ServedModel, *responses: str) -> list[Answer]:
    async with asyncio.timeout(LONG_S):
        return await model.ask([("", response, []) for response in responses])


async def until_answered(model: ServedModel, *responses: str) -> list[Answer]:
    """Asks again what was not begun, as callers do."""
    found: dict[str, Answer] = {}
    while left := [response for response in responses if response not in found]:
        answers = await ask(model, *left)
        found |= {
            response: answer
            for response, answer in zip(left, answers, strict=True)
            if not (isinstance(answer, Failed) and answer.code == NOT_BEGUN)
        }
    return [found[response] for response in responses]


@pytest.mark.asyncio
async def test_callers_share_batches_and_get_their_own_values(start: Start) -> None:
    model = await start(max_wait_s=LONG_S, max_tokens=40)
    # Nothing else ends the wait: ten times four tokens fill the batch with the last caller's.
    groups = await asyncio.gather(*(ask(model, "bcde", "edcb") for _ in range(5)))
    assert groups == [[[4.0, 10.0], [4.0, 10.0]]] * 5


@pytest.mark.asyncio
async def test_what_the_engine_refuses_fails_alone(start: Start) -> None:
    model = await start()
    answers = await ask(model, "bb", "rr", "bbb", "b" * 101, "x" * 10_000, "")
    assert [answer if isinstance(answer, list) else answer.code for answer in answers] == [
        answers[0],
        "model_refused",
        answers[2],
        "too_long",
        "too_long",
        "bad_input",
    ]
    assert isinstance(answers[0], list)
    assert isinstance(answers[2], list)


@pytest.mark.asyncio
async def test_a_text_that_breaks_the_process_fails_alone_and_others_lose_nothing(start: Start) -> None:
    model = await start()
    good, poison, other = await until_answered(model, "bb", "pp", "bbb")
    assert isinstance(good, list)
    assert isinstance(other, list)
    assert isinstance(poison, Failed)
    assert (poison.code, poison.retryable) == ("crashed", True)


async def end_silence(model: ServedModel, clock: Clock, letter: str) -> None:
    """Lets each process be silent for too long that hangs with such a text; others ask meanwhile.

    Messages come in order: once its owner knows that such a text is begun, nothing else comes.
    """
    ended: int | None = None
    others: list[asyncio.Task[list[Answer]]] = []
    try:
        while True:
            await asyncio.sleep(0.01)
            texts = {key: job for key, job in dict(model._jobs).items() if letter in job.text[1]}
            begun = texts.keys() & model._begun.keys() or model._reading in {job.digest for job in texts.values()}
            if begun and model.pid not in (None, ended):
                ended = model.pid
                # Its own loop has noted the time too, not the beginning alone.
                await asyncio.wrap_future(model._own_loop().submit(asyncio.sleep(0)))
                clock.advance(0.3 * ENDLESS_S)
                count = model._count
                others.append(asyncio.create_task(until_answered(model, "b" * (3 + len(others)))))
                while model._count == count or (letter == "h" and model._unheard_since is not None):
                    await asyncio.sleep(0.01)
                clock.advance(0.3 * ENDLESS_S)
    finally:
        answers = await asyncio.gather(*others)
        assert answers
        assert all(isinstance(answer, list) for each in answers for answer in each)


@pytest.mark.asyncio
async def test_a_frozen_process_is_replaced_and_so_is_one_that_reads_or_computes_without_end(
    start: Start, clock: Clock
) -> None:
    model = await start(call_timeout_s=ENDLESS_S)
    assert model.pid is not None
    os.kill(model.pid, signal.SIGSTOP)
    asking = asyncio.create_task(until_answered(model, "bb"))
    async with asyncio.timeout(LONG_S):
        while model._unheard_since is None:
            await asyncio.sleep(0.01)
    clock.advance(0.5 * ENDLESS_S)
    assert isinstance((await asking)[0], list)
    assert model.restarts == 1
    for letter in "hx":
        silence = asyncio.create_task(end_silence(model, clock, letter))
        hanging, good = await until_answered(model, 2 * letter, "bb")
        assert isinstance(good, list)
        assert isinstance(hanging, Failed)
        assert hanging.code == "crashed"
        assert "no answer for" in hanging.message
        silence.cancel()
        with pytest.raises(asyncio.CancelledError):
            await silence
    assert model.restarts == 5, "once frozen, and each text with others and alone"


@pytest.mark.asyncio
async def test_an_engine_that_is_away_is_waited_for(start: Start) -> None:
    model = await start(call_timeout_s=2.0)
    waiting = asyncio.create_task(ask(model, "aa"))
    async with asyncio.timeout(LONG_S):
        while not (wait := model.present_wait()):
            await asyncio.sleep(0.01)
    assert wait.reason == "stub: it is away"
    (answer,) = await waiting
    assert isinstance(answer, Failed)
    assert (answer.code, answer.message) == (NOT_BEGUN, "not begun yet: stub: it is away")


@pytest.mark.asyncio
async def test_a_model_that_cannot_be_loaded_is_refused_with_its_hint(start: Start) -> None:
    with pytest.raises(RewardError, match="no model") as refused:
        await start(folder="bad")
    assert refused.value.hint == "another folder"
