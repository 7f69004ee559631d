"""Grammars of calls: what they allow is what the model's parser reads, and what each tool's schema takes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollmesh.generators.agents.tool_call_parsers import PARSERS, choose_parser
from rollmesh.generators.agents.tool_calls import ParsedTurn, ToolCall
from rollmesh.generators.engines.token_grammar import TokenGrammars
from rollmesh.generators.openai_server.call_grammar import FORMS, CallForm, call_grammar, find_form, tools_fault
from rollmesh.generators.openai_server.endless_schemas import is_endless
from rollmesh.generators.openai_server.errors import ApiError
from rollmesh.generators.openai_server.template_codec import TemplateChatCodec
from rollmesh.mesh.config.rollout import ParserName
from rollmesh.mesh.errors import PayloadError
from tests.generators.engines.tiny import train_tokenizer
from tests.generators.openai_server.world import EOS, EOT, chat_tokenizer

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "enum": [1, 2]},
        "at": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "maxItems": 1, "uniqueItems": True},
    },
    "required": ["city", "days"],
    "$defs": {"Point": POINT},
}
THINK = ("<think>", "</think>")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATES = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call> <function=",
    "mistral": "[TOOL_CALLS]",
    "mistral named": "[TOOL_CALLS] [ARGS]",
    "deepseek": "tool▁call▁begin",
    "deepseek fenced": "tool▁call▁begin ```json",
    "llama3_json": '"parameters"',
}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer()


def form_of(template: str) -> CallForm | None:
    name = next((known for known in PARSERS if template.startswith(known)), "auto")
    parse = choose_parser(name, "")
    text = TEMPLATES.get(template, template)
    return find_form(parse, text)


def grammar_of(template: str, *, many: bool = True, **thoughts: Any) -> str:
    form = form_of(template)
    assert form is not None
    return call_grammar(form, TOOLS, lambda _text: None, many=many, **thoughts)


def accepts(grammar: str, text: str) -> bool:
    """Whether a text is of the grammar, token by token, up to an end token."""
    matcher = TokenGrammars(tokenizer(), len(tokenizer()) + 7, [EOS, EOT]).matcher(grammar, [])
    for token in tokenizer().encode(text, add_special_tokens=False):
        if not matcher.allowed()[token]:
            return False
        matcher.push(token)
    allowed = matcher.allowed()
    assert allowed[EOS] == allowed[EOT]
    return bool(allowed[EOS])


def written(template: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model writes them."""
    form = form_of(template)
    assert form is not None
    told = []
    for name, arguments in calls:
        body = json.dumps(arguments)
        if form.tagged:
            values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
            body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        told.append(f"{form.begin}{name}{form.middle}{body}{form.end}")
    return form.before + form.between.join(told) + form.after


PARIS = ("weather", {"city": "Paris", "days": 2, "at": [{"x": 1}]})
NOW: tuple[str, dict[str, Any]] = ("now", {})


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_that_the_schemas_take_are_allowed_and_no_others(template: str) -> None:
    grammar = grammar_of(template)
    assert accepts(grammar, written(template, [PARIS]))
    assert accepts(grammar, written(template, [NOW, PARIS]))
    assert not accepts(grammar_of(template, many=False), written(template, [NOW, PARIS]))
    for arguments in (
        {"city": "Oslo", "days": 2},
        {"city": "Paris"},
        {"city": "Paris", "days": 3},
        {"city": "Paris", "days": 1, "at": [{}]},
        {"city": "Paris", "days": 1, "more": 1},
        {},
    ):
        assert not accepts(grammar, written(template, [("weather", arguments)]))
    assert not accepts(grammar, written(template, [("tomorrow", {})]))
    assert not accepts(grammar, "It is sunny.")
    assert not accepts(grammar, "")
    assert not accepts(grammar, written(template, [PARIS])[:-3])


@pytest.mark.parametrize("template", TEMPLATES)
def test_whatever_is_drawn_under_a_grammar_is_read_by_the_parser(template: str) -> None:
    name: ParserName = template.partition(" ")[0]  # type: ignore[assignment]
    parse, draw = choose_parser(name, ""), random.Random(0)
    grammars = TokenGrammars(tokenizer(), len(tokenizer()), [EOS, EOT])
    for _ in range(20):
        matcher, ids = grammars.matcher(grammar_of(template, many=False), []), []
        while len(ids) < 400:
            ids.append(draw.choice(matcher.allowed().nonzero()[0].tolist()))
            if ids[-1] in (EOS, EOT):
                break
            matcher.push(ids[-1])
        else:
            continue
        parsed = parse(tokenizer().decode(ids[:-1], skip_special_tokens=False))
        assert (parsed.content, parsed.errors, len(parsed.valid)) == ("", (), 1)


def test_thoughts_may_come_before_calls_where_the_template_knows_them() -> None:
    call, may = written("hermes", [PARIS]), grammar_of("hermes", thoughts=THINK)
    assert accepts(may, call)
    assert accepts(may, f"<think>\nI call <tool_call> now.\n</think>\n\n{call}")
    assert not accepts(may, f"Well. {call}")
    assert not accepts(grammar_of("hermes"), f"<think>\nWell.\n</think>\n\n{call}")
    does = grammar_of("hermes", thoughts=THINK, opened=True)
    assert accepts(does, f"Well.\n</think>\n\n{call}")
    assert not accepts(does, call)


def test_marks_that_are_special_tokens_stand_by_their_ids() -> None:
    form = form_of("hermes")
    assert form is not None
    ids = {"<tool_call>": 3, "</tool_call>": 4, "<think>": 5, "</think>": 6}
    grammar = call_grammar(form, TOOLS, ids.get, many=True, thoughts=THINK)
    assert all(f"<[{number}]>" in grammar for number in ids.values())
    assert not any(mark in grammar for mark in ids)


QWEN = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if think %}<think>\n{% endif %}{% endif %}{# </think> #}"
)


@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize("byte_level", [True, False])
def test_marks_are_the_tokens_that_the_model_knows(special: bool, byte_level: bool) -> None:
    """Whether the tokenizer calls them special or not, and whether llguidance can read it."""
    model = train_tokenizer()
    if not byte_level:
        model.backend_tokenizer.decoder = decoders.Fuse()
        model.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        model.add_tokens([chr(number) for number in range(32, 127)])
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    model.add_tokens([AddedToken(mark, special=special) for mark in marks])
    model.chat_template = QWEN
    for think in (False, True):
        codec = TemplateChatCodec(model, end_ids=frozenset([EOS]), parser="hermes", template_kwargs={"think": think})
        prompt = codec.prompt([{"role": "user", "content": "?"}], TOOLS, 999)
        grammar = codec.call_grammar(prompt, TOOLS, many=True)
        call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
        said = "Well.</think>" if think else "<think>Well.</think>"
        for text in (f"{said}{call}", f"{said}{call}{call}"):
            ids = model.encode(text, add_special_tokens=False)
            assert set(model.convert_tokens_to_ids(marks[:2])) < set(ids)
            matcher = TokenGrammars(model, len(model), [EOS]).matcher(grammar, [])
            for token in [*ids, EOS]:
                assert matcher.allowed()[token], (text, model.decode([token]))
                matcher.push(token)


def test_a_token_that_spells_a_whole_call_is_allowed() -> None:
    """Not only the token with which the tokenizer would begin a call."""
    model = train_tokenizer()
    call = written("hermes", [NOW])
    model.backend_tokenizer.decoder = decoders.Fuse()
    model.add_tokens([AddedToken(call, special=False)])
    matcher = TokenGrammars(model, len(model), [EOS]).matcher(grammar_of("hermes"), [])
    assert matcher.allowed()[model.convert_tokens_to_ids(call)]


def test_a_form_is_used_only_where_the_parser_reads_it() -> None:
    assert {form_of(name) for name in TEMPLATES} == set(FORMS)
    assert form_of("pythonic") is None
    assert find_form(lambda text: ParsedTurn(text, (ToolCall("f", {"a": text}),)), "<tool_call>") is None


def test_a_grammar_that_cannot_be_read_is_refused() -> None:
    grammars = TokenGrammars(tokenizer(), len(tokenizer()), [EOS])
    with pytest.raises(PayloadError, match=r"sampling\.grammar"):
        grammars.matcher("start: [", [])


def test_a_response_that_is_begun_continues_where_it_was() -> None:
    ids = tokenizer().encode(written("hermes", [PARIS]), add_special_tokens=False)
    grammars = TokenGrammars(tokenizer(), len(tokenizer()), [EOS])
    for cut in (1, len(ids) // 2, len(ids)):
        matcher = grammars.matcher(grammar_of("hermes"), ids[:cut])
        assert matcher.allowed()[[*ids, EOS][cut]]


SELF = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    ("definition", "endless"),
    [
        (SELF, True),
        ({"allOf": [SELF]}, True),
        ({"anyOf": [SELF, {"allOf": [SELF, {}]}]}, True),
        ({"type": "object", "properties": {"a": SELF}, "required": ["a"]}, True),
        ({"anyOf": [SELF, {"type": "null"}]}, False),
        ({"type": "object", "properties": {"a": SELF}}, False),
        ({"type": "object", "properties": {"a": {"type": "array", "items": SELF}}, "required": ["a"]}, False),
        ({"type": "integer"}, False),
    ],
)
def test_tools_whose_schemas_never_end_are_refused(definition: dict[str, Any], endless: bool) -> None:
    parameters = {"type": "object", "properties": {"a": SELF}, "required": ["a"], "$defs": {"A": definition}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    assert bool(tools_fault(tools)) is endless
    codec = TemplateChatCodec(chat_tokenizer(), end_ids=frozenset([EOS, EOT]))
    if endless:
        with pytest.raises(ApiError, match="refers to itself"):
            codec.call_grammar([], tools, many=False)
        with pytest.raises(ApiError, match=r"response_format: .* refers to itself"):
            codec.call_grammar([], [], many=False, schema=parameters)
    else:
        codec.call_grammar([], tools, many=False)


def test_schemas_that_refer_to_each_other_in_many_ways_are_followed_once() -> None:
    both = [{"anyOf": [{"$ref": f"#/$defs/A{n + 1}"}, {"$ref": f"#/$defs/A{n + 1}"}]} for n in range(60)]
    definitions = {f"A{n}": schema for n, schema in enumerate([*both, {"type": "null"}])}
    assert not is_endless({"$ref": "#/$defs/A0", "$defs": definitions})


@pytest.mark.parametrize("name", ['a"b', "a\nb", "</tool_call>", "", "\ud800", "a\\"])
def test_a_name_that_would_be_read_as_a_mark_is_refused(name: str) -> None:
    codec = TemplateChatCodec(chat_tokenizer(), end_ids=frozenset([EOS, EOT]))
    with pytest.raises(ApiError, match="is more than letters, digits and hyphens"):
        codec.call_grammar([], [{"function": {"name": name}}], many=False)
    codec.call_grammar([], [{"function": {"name": "mcp/files.read-all_2"}}], many=False)
