"""Requests of agent frameworks are taken as they come, and continue the answers that were given."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollmesh.generators.openai_server.conversations.known_answers import AnswerPlace, KnownAnswers
from rollmesh.generators.openai_server.conversations.messages import normalize
from rollmesh.generators.openai_server.requests import ChatRequest, parse
from rollmesh.mesh.trajectory.branches import Cause
from tests.generators.openai_server.conversations.test_meaning import Turn
from tests.generators.openai_server.framework_requests import REQUESTS, Recorded


def request_of(recorded: Recorded) -> ChatRequest:
    request = parse("chat", {"model": "m", **recorded.body}, training=True)
    assert isinstance(request, ChatRequest)
    return request


@pytest.mark.parametrize("recorded", REQUESTS.values(), ids=REQUESTS)
def test_its_fields_are_honoured(recorded: Recorded) -> None:
    request = request_of(recorded)
    assert tuple(tool["function"]["name"] for tool in request.forced_tools) == recorded.calls
    assert (request.answer_schema is not None) == recorded.schema
    assert tuple(request.forced()) == recorded.forced
    assert request.include_usage == ("stream_options" in recorded.body)
    assert request.stops == tuple(recorded.body.get("stop", ()))


def followed(recorded: Recorded, back: list[Any]) -> tuple[int, Cause | None]:
    """Messages up to the last answer that is known, and the cause of a branch."""
    request, known = request_of(recorded), KnownAnswers[Turn]()
    messages = [normalize(message) for message in back]
    answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for number, (index, answer) in enumerate(zip(answered, recorded.answers, strict=True)):
        before = known.follow(messages[:index], request.tools or []).conversation
        text = (answer["content"] or "") if request.stops else ""
        place = AnswerPlace.of(before, normalize(answer), request.tools or [], text, request.stops)
        known.add(Turn(number), place)
    found = known.follow(messages, request.tools or [])
    assert found.answer is None or found.answer.turn.call == len(answered) - 1 or found.cause is not None
    return found.length, found.cause


OF_TURNS = {name: recorded for name, recorded in REQUESTS.items() if recorded.answers}


@pytest.mark.parametrize("recorded", OF_TURNS.values(), ids=OF_TURNS)
def test_it_continues_every_answer(recorded: Recorded) -> None:
    messages = recorded.body["messages"]
    assert followed(recorded, messages) == (len(messages) - 1, None)
    # The same with another answer is seen.
    other = copy.deepcopy(messages)
    other[-2] = {"role": "assistant", "content": "Something else."}
    assert followed(recorded, other) == (len(messages) - 3, Cause.REWRITTEN)
