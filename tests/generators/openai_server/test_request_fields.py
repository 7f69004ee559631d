"""Fields of a request: those that ask for nothing pass, the others are honoured, ignored in training, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.generators.openai_server.errors import ApiError
from rollmesh.generators.openai_server.requests import ChatRequest, Form, Request, TextRequest, parse

NOTHING: dict[str, Any] = {
    "min_p": 0.0, "typical_p": 1.0, "top_a": 0, "repetition_penalty": 1.0, "length_penalty": 1, "min_tokens": 0,
    "min_new_tokens": 0, "ignore_eos": False, "bad_words": [], "allowed_token_ids": [], "logits_processors": [],
    "stop_token_ids": [], "include_stop_str_in_output": False, "no_stop_trim": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": False, "best_of": 1, "use_beam_search": False, "early_stopping": False,
    "prompt_logprobs": 0, "return_tokens_as_token_ids": False,
    "return_hidden_states": False, "priority": 0, "guided_json": {}, "guided_choice": [],
    "structured_outputs": {}, "regex": "", "presence_penalty": 0, "logit_bias": {}, "echo": False,
}  # fmt: skip
CHAT_NOTHING: dict[str, Any] = {
    "chat_template_kwargs": {}, "chat_template": "", "add_generation_prompt": True, "continue_final_message": False,
    "add_special_tokens": False, "documents": [], "include_reasoning": True, "separate_reasoning": False,
    "thinking": {}, "reasoning": {}, "mm_processor_kwargs": {}, "functions": [], "function_call": "none", "audio": {},
    "top_logprobs": 0, "logprobs": False, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"},
    "modalities": ["text"],
}  # fmt: skip
# Each asks for something, and the hint of its refusal, or a part of it.
SOMETHING: dict[str, tuple[Any, str]] = {
    "min_p": (0.1, ""),
    "repetition_penalty": (1.1, ""),
    "min_tokens": (5, ""),
    "ignore_eos": (True, ""),
    "bad_words": (["a"], ""),
    "skip_special_tokens": (False, "return_token_ids"),
    "stop_token_ids": ([2], "use stop"),
    "include_stop_str_in_output": (True, "ends before its stop string"),
    "return_tokens_as_token_ids": (True, "return_token_ids"),
    "best_of": (3, "must equal n"),
    "use_beam_search": (True, ""),
    "prompt_logprobs": (1, ""),
    "truncate_prompt_tokens": (10, ""),
    "guided_json": ({"type": "object"}, ""),
    "guided_regex": ("a+", ""),
}
CHAT_SOMETHING: dict[str, tuple[Any, str]] = {
    "chat_template_kwargs": ({"enable_thinking": False}, "data.chat_template_kwargs"),
    "chat_template": ("{{ messages }}", "the model's"),
    "thinking": ({"type": "enabled"}, "data.chat_template_kwargs"),
    "reasoning": ({"enabled": True}, "data.chat_template_kwargs"),
    "continue_final_message": (True, ""),
    "add_generation_prompt": (False, ""),
    "separate_reasoning": (True, "part of the content"),
    "documents": ([{"text": "a"}], ""),
}
IGNORED = {
    "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "bad_words", "skip_special_tokens",
}  # fmt: skip


def read(form: Form, training: bool = False, **fields: Any) -> ChatRequest | TextRequest:
    said = {"messages": [{"role": "user", "content": "a"}]} if form == "chat" else {"prompt": "a"}
    return parse(form, {"model": "m", **said, **fields}, training=training)


@pytest.mark.parametrize("form", ["chat", "text"])
@pytest.mark.parametrize("training", [False, True])
def test_what_asks_for_nothing_passes(form: Form, training: bool) -> None:
    fields = {**NOTHING, **(CHAT_NOTHING if form == "chat" else {"add_special_tokens": True})}
    assert read(form, training, **fields).forced() == []
    for name, value in fields.items():
        read(form, training, **{name: value})
        read(form, training, **{name: None})


@pytest.mark.parametrize("form", ["chat", "text"])
@pytest.mark.parametrize("training", [False, True])
def test_what_asks_for_something_else_is_refused_by_name(form: Form, training: bool) -> None:
    for name, (value, hint) in {**SOMETHING, **(CHAT_SOMETHING if form == "chat" else {})}.items():
        if training and name in IGNORED:
            assert read(form, training, **{name: value}).forced() == [name]
            continue
        with pytest.raises(ApiError, match=hint or name) as refused:
            read(form, training, **{name: value})
        assert (refused.value.param, refused.value.reason) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_p": 2}, "min_p"),
        ({"min_p": "high"}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop": 7}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ["a", 7]}, "stop.1"),
        ({"chat_template_kwargs": "no"}, "chat_template_kwargs"),
    ],
)
def test_values_without_meaning_are_invalid(fields: dict[str, Any], param: str) -> None:
    for training in (False, True):
        with pytest.raises(ApiError) as refused:
            read("chat", training, **fields)
        assert (refused.value.param, refused.value.reason) == (param, "invalid_value")


@pytest.mark.parametrize("parameters", ["x", True, ["a"], 7])
def test_parameters_of_a_tool_that_are_no_schema_are_refused(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ApiError, match="are a JSON schema") as refused:
        read("chat", tools=[tool], tool_choice="required")
    assert refused.value.param == "tools[0].function.parameters"
    for nothing in (None, {}, []):
        read("chat", tools=[{**tool, "function": {"name": "f", "parameters": nothing}}], tool_choice="required")


def test_any_number_of_stop_strings_is_taken_up_to_a_bound() -> None:
    assert read("chat", stop="a").stops == ("a",)
    assert read("text", stop=["a", "", "b"]).stops == ("a", "b")
    assert read("chat", stop=[]).stops == read("chat", stop=None).stops == ()
    assert len(read("chat", stop=[str(index) for index in range(64)]).stops) == 64
    with pytest.raises(ApiError, match="at most 64 items"):
        read("chat", stop=["a"] * 65)


def test_an_unknown_name_is_refused_unless_it_is_empty() -> None:
    for empty in (None, {}, []):
        read("chat", nonsense=empty)
    for value in (0, False, "", [0]):
        with pytest.raises(ApiError) as refused:
            read("chat", nonsense=value)
        assert (refused.value.param, refused.value.reason) == ("nonsense", "unknown_parameter")


def test_best_of_may_be_as_many_as_are_asked_for() -> None:
    assert read("chat", best_of=3, n=3).choices == 3


def test_every_field_with_a_neutral_value_exists() -> None:
    for kind in (ChatRequest, TextRequest):
        assert issubclass(kind, Request)
        assert set(kind.NOTHING) <= set(kind.model_fields)
