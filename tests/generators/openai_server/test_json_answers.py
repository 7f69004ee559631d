"""`response_format`: the model answers with JSON of a schema, whatever it would have said."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from rollmesh.generators.openai_server.answer_schema import answer_schema
from rollmesh.generators.openai_server.errors import ApiError
from rollmesh.generators.openai_server.requests import ChatRequest, parse
from rollmesh.generators.openai_server.template_codec import TemplateChatCodec
from rollmesh.mesh.trajectory.episode_metrics import CALLS_CONSTRAINED
from tests.generators.openai_server.test_call_grammar import accepts
from tests.generators.openai_server.test_sessions import ASK, client_of, trained
from tests.generators.openai_server.world import CALL, EOS, EOT, TOOL, Serving, chat_tokenizer


class Place(BaseModel):
    city: Literal["Paris", "Rome"]


class Trip(BaseModel):
    days: Literal[1, 2]
    place: Place


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema}}


@pytest.fixture
def client(serving: Serving) -> OpenAI:
    return OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("seed", range(2))
def test_an_answer_has_the_schema_in_one_piece_and_streamed(client: OpenAI, seed: int) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [ASK], "response_format": Trip, "seed": seed + 1}
    [choice] = client.chat.completions.parse(**asked).choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Trip)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed


def test_any_object_is_an_answer_where_no_schema_is_given(client: OpenAI) -> None:
    said = client.chat.completions.create(
        model="tiny", messages=[ASK], response_format={"type": "json_object"}, max_tokens=8
    )
    assert (said.choices[0].message.content or "").lstrip().startswith("{")


def test_an_answer_in_json_is_trained_and_continued(serving: Serving) -> None:
    session = trained(serving)
    client = client_of(serving, session)
    first = client.chat.completions.parse(model="tiny", messages=[ASK], response_format=Trip).choices[0].message
    back = {"role": "assistant", "content": Trip.model_validate_json(first.content or "").model_dump_json()}
    for said in (first, {"role": "assistant", "content": first.content}):
        client.chat.completions.create(model="tiny", messages=[ASK, said, ASK], max_tokens=4)
        assert len(session.record.chain()) == 2
    assert session.counts[CALLS_CONSTRAINED] == 1
    assert (session.record.chain()[0].sampled.log_probs <= 1e-6).all()
    assert np.isclose(session.record.chain()[0].sampled.log_probs, 0).any()
    if back["content"] != (first.content or "").strip():
        client.chat.completions.create(model="tiny", messages=[ASK, back, ASK], max_tokens=4)
        assert len(session.record.chain()) == 1, "another spelling is another answer"
    serving.endpoint.sessions.forget(session)


CODEC = TemplateChatCodec(chat_tokenizer(), end_ids=frozenset([EOS, EOT]))
TRIP = Trip.model_json_schema()
TOLD = '{"days": 1, "place": {"city": "Rome"}}'


def test_with_tools_an_answer_is_calls_or_json() -> None:
    # Another call than that which is one token.
    call = CALL.replace("2", "7")
    for tools, allowed, refused in (([TOOL], [TOLD, call], ["", "So: "]), ([], [TOLD], [call])):
        grammar = CODEC.call_grammar([], tools, many=True, schema=TRIP)
        assert all(accepts(grammar, text) for text in allowed)
        assert not any(accepts(grammar, text) for text in (*refused, TOLD[:-1], '{"days": 3}'))


def test_what_decides_about_the_answer() -> None:
    def of(**fields: Any) -> ChatRequest:
        body = {"model": "m", "messages": [ASK], "tools": [TOOL], "response_format": form(TRIP)}
        request = parse("chat", body | fields, training=True)
        assert isinstance(request, ChatRequest)
        return request

    assert (of().forced_tools, of().answer_schema, of().callable_tools) == ([], TRIP, [TOOL])
    assert of(tool_choice="required").forced_tools == [TOOL]
    assert of(tool_choice="none").callable_tools == []
    for nothing in (None, {"type": "text"}):
        assert not of(response_format=nothing).is_constrained
    assert answer_schema({"type": "json_object"}) == {"type": "object"}


@pytest.mark.parametrize(
    "given",
    ["json", [], {}, {"type": "grammar"}, {"type": "json_schema"}, {"type": "json_schema", "schema": {}},
     {"type": "json_schema", "json_schema": {"name": "a"}}, {"type": "json_schema", "json_schema": {"schema": "a"}}],
)  # fmt: skip
def test_another_form_is_refused_with_those_that_there_are(given: Any) -> None:
    with pytest.raises(
        ApiError, match=r'is \{"type": "text"\}, \{"type": "json_object"\}, or .*"json_schema"'
    ) as refused:
        answer_schema(given)
    assert refused.value.param == "response_format"


def test_what_has_no_grammar_is_refused_by_name(
    serving: Serving, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(response_format: Any, **more: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=[ASK], response_format=response_format, max_tokens=4, **more
        )

    with pytest.raises(openai.BadRequestError, match="response_format: the schema has no grammar"):
        ask(form({"type": "odd"}))
    with pytest.raises(openai.BadRequestError, match=r"guided_json.*use response_format, with a JSON schema"):
        ask(None, extra_body={"guided_json": TRIP})
    ask(form(TRIP))
    monkeypatch.setattr(serving.endpoint.completions.codec, "_parser", "pythonic")
    with pytest.raises(openai.BadRequestError, match="with response_format, tool_choice can only be `none`"):
        ask(form(TRIP), tools=[TOOL])
    ask(form(TRIP), tools=[TOOL], tool_choice="none")
    monkeypatch.setattr(type(serving.engine), "takes_grammars", False)
    with pytest.raises(
        openai.BadRequestError, match="response_format can only be `text`: the engine hf forces no JSON"
    ):
        ask(form(TRIP))
    ask({"type": "text"})


def test_thoughts_that_the_prompt_opens_are_no_json() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template += (
        "{% if add_generation_prompt %}<think>{{ '\n</think>' if enable_thinking is false else '\n' }}{% endif %}"
    )
    codec = TemplateChatCodec(tokenizer, end_ids=frozenset([EOS]))
    prompt = codec.prompt([ASK], [], 999)
    with pytest.raises(ApiError, match=r"opens thoughts in the prompt \(<think>\).*enable_thinking: false"):
        codec.call_grammar(prompt, [], many=True, schema=TRIP)
    closed = TemplateChatCodec(tokenizer, end_ids=frozenset([EOS]), template_kwargs={"enable_thinking": False})
    assert accepts(closed.call_grammar(closed.prompt([ASK], [], 999), [], many=True, schema=TRIP), TOLD)
