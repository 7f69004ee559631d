"""Fields that vLLM, SGLang and others take in addition to OpenAI's, and the values with which each asks for nothing.

Libraries send many of them with every call, mostly with these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

_Count = Annotated[int, Field(ge=0, lt=1 << 31)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Factor = Annotated[float, Field(gt=0)]


class SamplingFields(BaseModel):
    """Fields about how tokens are drawn, where an answer ends, and how its text is written."""

    min_p: _Share | None = None
    typical_p: _Share | None = None
    top_a: _Share | None = None
    repetition_penalty: _Factor | None = None
    length_penalty: float | None = None
    min_tokens: _Count | None = None
    min_new_tokens: _Count | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: list[Any] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: Any = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    early_stopping: bool | None = None
    prompt_logprobs: _Count | None = None
    return_tokens_as_token_ids: bool | None = None
    return_hidden_states: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    lora_path: Any = None


class ChatFields(BaseModel):
    """Fields about how a conversation becomes a prompt, and an answer a message."""

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    documents: list[Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    thinking: Any = None
    reasoning: Any = None


# Those that decide how tokens are drawn, or how their text is written, which in training the client does not.
FORCED = (
    "min_p", "typical_p", "top_a", "repetition_penalty", "min_tokens", "min_new_tokens", "ignore_eos", "bad_words",
    "allowed_token_ids", "skip_special_tokens",
)  # fmt: skip
_EMPTY: tuple[Any, ...] = ([], {}, "")
SAMPLING_NOTHING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_p", "top_a", "min_tokens", "min_new_tokens", "prompt_logprobs", "priority"), (0,)),
    **dict.fromkeys(("typical_p", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors", "stop_token_ids"), ([],)),
    **dict.fromkeys(
        (
            "ignore_eos", "no_stop_trim", "include_stop_str_in_output", "use_beam_search", "early_stopping",
            "return_tokens_as_token_ids", "return_hidden_states",
        ),
        (False,),
    ),
    "skip_special_tokens": (True,),
    # Without special tokens there are no spaces between them.
    "spaces_between_special_tokens": (True, False),
    "truncate_prompt_tokens": (),
    **dict.fromkeys(
        (
            "stop_regex", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
            "json_schema", "regex", "ebnf", "lora_path",
        ),
        _EMPTY,
    ),
}  # fmt: skip
CHAT_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "chat_template": ("",),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    **dict.fromkeys(("continue_final_message", "add_special_tokens", "echo", "separate_reasoning"), (False,)),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    # Thoughts are part of the content, where an answer has any.
    **dict.fromkeys(("include_reasoning", "stream_reasoning"), (True,)),
    **dict.fromkeys(("thinking", "reasoning"), _EMPTY),
}
_OF_THE_RUN = "the template's arguments are those of the run: set data.chat_template_kwargs"
_AS_JSON = "use response_format, with a JSON schema"
# Explanations for the refusal of some fields.
WHY = {
    "best_of": "it must equal n",
    **dict.fromkeys(("guided_json", "guided_choice", "json_schema", "structured_outputs"), _AS_JSON),
    "chat_template": "the template is the model's",
    **dict.fromkeys(("chat_template_kwargs", "thinking", "reasoning"), _OF_THE_RUN),
    "stop_token_ids": "use stop, with the tokens' text",
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), "an answer's text ends before its stop string"),
    "skip_special_tokens": "texts come without special tokens: use return_token_ids",
    "return_tokens_as_token_ids": "use return_token_ids",
    "separate_reasoning": "thoughts are part of the content",
}
