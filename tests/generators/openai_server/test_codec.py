"""Answers with calls, read by the codec: stop strings, and thoughts that the prompt has opened."""

from __future__ import annotations

import pytest

from rollmesh.generators.openai_server.incremental_text import whole_text
from rollmesh.generators.openai_server.template_codec import TemplateChatCodec
from tests.generators.openai_server.world import TOOL, chat_tokenizer

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
OPENED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
TOKENIZER = chat_tokenizer()


def answered(said: str, *stops: str) -> tuple[str, list[str]]:
    """The content and the names of the calls in an answer that its stop strings have cut."""
    codec = TemplateChatCodec(TOKENIZER, end_ids=frozenset({TOKENIZER.convert_tokens_to_ids("<eot>")}), parser="hermes")
    ids = TOKENIZER.encode(said)
    parsed = codec.answer(ids, whole_text(codec.decode(ids), stops), [TOOL])
    return parsed.content, [name for name, _ in parsed.calls]


@pytest.mark.parametrize(
    ("said", "stops", "content", "calls"),
    [
        (f"Now. {CALL} Observation:", ["Observation:"], "Now.", ["add"]),
        (f"Now. {CALL}\nObservation: 7", ["Observation:"], "Now.", ["add"]),
        (f"Now. {CALL}{CALL} so STOP here", ["never", "STOP", "so ST"], "Now.", ["add", "add"]),
        (f"{CALL} é STOP<user>", ["STOP"], "é", ["add"]),
        (f"Now. {CALL}", ["</tool_call>"], "Now.", ["add"]),
        (f"Now. {CALL}<eot>", ["never"], "Now.", ["add"]),
        (f"Now. {CALL} done", [], "Now.  done", ["add"]),
        ("Now. Observation:", ["Observation:"], "Now. ", []),
        ('<tool_call>{"name": "add", STOP', ["STOP"], '<tool_call>{"name": "add", ', []),
    ],
)
def test_no_stop_string_stands_beside_a_call(said: str, stops: list[str], content: str, calls: list[str]) -> None:
    assert answered(said, *stops) == (content, calls)


def test_a_call_within_thoughts_that_the_prompt_has_opened_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(f"perhaps {CALL} or not") == ("perhaps  or not", ["add"])
    assert answered(f"<think>perhaps {CALL} or not") == (f"<think>perhaps {CALL} or not", [])
    monkeypatch.setattr(TOKENIZER, "chat_template", OPENED)
    assert answered(f"perhaps {CALL} or not") == (f"perhaps {CALL} or not", [])
    assert answered(f"perhaps {CALL}</think>{CALL}") == (f"perhaps {CALL}</think>", ["add"])


def test_a_prompt_may_open_thoughts_where_others_do_not() -> None:
    codec = TemplateChatCodec(TOKENIZER, end_ids=frozenset(), parser="hermes")
    ids, opened = TOKENIZER.encode(CALL), OPENED.partition("<assistant>")[2].removesuffix("{% endif %}")
    for prompt, calls in (
        (f"<user>the fox<eot><assistant>{opened}", 0),
        ("<tool>7<eot><assistant>", 1),
        ("<user>say <think><eot><assistant>", 1),
        ("<user>a<eot><assistant><think>\n\n</think>\n", 1),
    ):
        assert len(codec.answer(ids, CALL, [TOOL], prompt=TOKENIZER.encode(prompt)).calls) == calls, prompt


def test_an_answer_in_json_that_names_no_tool_is_an_answer() -> None:
    codec = TemplateChatCodec(TOKENIZER, end_ids=frozenset(), parser="llama3_json")
    for name, calls in (("Alice", []), ("add", ["add"])):
        text = f'So: {{"name": "{name}", "arguments": {{"a": 3}}}}'
        parsed = codec.answer(TOKENIZER.encode(text), text, [TOOL])
        assert [called for called, _ in parsed.calls] == calls
        assert parsed.content == ("So:" if calls else text)
