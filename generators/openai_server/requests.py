"""Requests of OpenAI's API, checked field by field.

Invariants: a field that this endpoint does not know is refused, unless it is empty. Each known one is honoured, or has
no effect here (`_IgnoredFields`), or is refused where it asks for more than nothing (`NOTHING`). In training a client
does not decide how tokens are drawn: the fields that would are `FORCED`. They are never refused, but listed by
`forced`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BaseModel, BeforeValidator, Field

from rollmesh.generators.openai_server import server_fields
from rollmesh.generators.openai_server.answer_schema import answer_schema
from rollmesh.generators.openai_server.errors import ApiError

# Fields that decide the distribution that tokens are drawn from, or the draws.
FORCED = (
    "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "logit_bias",
    *server_fields.FORCED,
)  # fmt: skip
_MOST_CHOICES = 128
_MOST_STOPS = 64
_Item = TypeVar("_Item")
# The first item that is wrong is named, and no further one looked for.
_List = Annotated[list[_Item], Field(fail_fast=True)]
_Token = Annotated[int, Field(ge=0, lt=1 << 31)]
# One text stands for a list of it.
_Stops = Annotated[
    list[str], Field(max_length=_MOST_STOPS), BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)
]
# Characters of a wrong name that are repeated.
_SHOWN = 64
# OpenAI's own default for text completions.
_TEXT_TOKENS = 16
_EMPTY: tuple[Any, ...] = (None, {}, [])


class _IgnoredFields(BaseModel):
    """Fields that are accepted and have no effect: they concern OpenAI's accounts, caches and models."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Request(_IgnoredFields, server_fields.SamplingFields, ABC):
    """The fields of both forms.

    Attributes:
        NOTHING: fields that cannot be honoured, and the values with which each asks for nothing.
    """

    NOTHING: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        **server_fields.SAMPLING_NOTHING,
    }

    model: str
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    seed: int | None = None
    stop: _Stops | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Any = None
    return_token_ids: bool | None = None

    @property
    def choices(self) -> int:
        """Answers requested for each prompt."""
        return self.n or 1

    @property
    def answers(self) -> int:
        """Answers requested in all."""
        return self.choices

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return tuple(text for text in self.stop or () if text)

    @property
    def include_usage(self) -> bool:
        """True where a stream ends with the usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    @abstractmethod
    def token_limit(self) -> int | None:
        """Most tokens of an answer; None: up to the context."""

    @property
    @abstractmethod
    def wants_log_probs(self) -> bool:
        """True where the log-probs of sampled tokens are requested."""

    @property
    @abstractmethod
    def lists_alternatives(self) -> bool:
        """True where a list of the likeliest tokens is requested with them."""

    def forced(self) -> list[str]:
        """The given fields that training does not leave to the client, but for those that ask for nothing."""
        given = ((name, getattr(self, name)) for name in FORCED)
        return [name for name, value in given if value is not None and value not in self.NOTHING.get(name, ())]

    def check_supported(self, *, training: bool) -> None:
        """Refuses fields that would have to be ignored though they matter.

        Raises:
            ApiError: naming the field.
        """
        for name, nothing in self.NOTHING.items():
            value = getattr(self, name)
            if value is not None and value not in nothing and not (training and name in FORCED):
                raise _unsupported(name)
        if self.best_of not in (None, self.choices):
            raise _unsupported("best_of")


class ChatRequest(Request, server_fields.ChatFields):
    """`POST /v1/chat/completions`."""

    NOTHING = {
        **Request.NOTHING,
        **server_fields.CHAT_NOTHING,
        "modalities": (["text"],),
        "audio": ({},),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "web_search_options": (),
    }

    messages: Annotated[_List[dict[str, Any]], Field(min_length=1)]
    tools: _List[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def lists_alternatives(self) -> bool:
        return bool(self.top_logprobs)

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """Tools of which the model has to call one; empty: it need not call any."""
        if self.tool_choice == "required":
            return self.tools or []
        name = _named_function(self.tool_choice)
        return [tool for tool in self.tools or [] if tool["function"]["name"] == name] if name else []

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of an answer that calls no tool; None: it is any text."""
        return answer_schema(self.response_format)

    @property
    def is_constrained(self) -> bool:
        """Whether an answer has to be of a grammar: calls of tools, or JSON."""
        return bool(self.forced_tools) or self.answer_schema is not None

    @property
    def many_calls(self) -> bool:
        """Whether an answer may have several calls."""
        return self.parallel_tool_calls is not False and not _named_function(self.tool_choice)

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call; the others stand in its prompt alone."""
        return [] if self.tool_choice == "none" else self.tools or []

    def check_supported(self, *, training: bool) -> None:
        super().check_supported(training=training)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        for index, message in enumerate(self.messages):
            if not isinstance(message.get("role"), str):
                raise ApiError(400, "a message needs a role", param=f"messages[{index}].role")
        for index, tool in enumerate(self.tools or []):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ApiError(400, "a tool is a function with a name", param=f"tools[{index}]")
            if not isinstance(function.get("parameters") or {}, dict):
                said = "the parameters of a tool are a JSON schema, an object"
                raise ApiError(400, said, param=f"tools[{index}].function.parameters")
        self._check_tool_choice()
        answer_schema(self.response_format)

    def _check_tool_choice(self) -> None:
        if self.tool_choice in (None, "auto", "none"):
            return
        name = _named_function(self.tool_choice)
        if self.tool_choice != "required" and not name:
            raise ApiError(
                400,
                "tool_choice is `none`, `auto`, `required`, or a function by its name: "
                '{"type": "function", "function": {"name": ...}}',
                reason="invalid_value",
                param="tool_choice",
            )
        if not self.forced_tools:
            known = ", ".join(tool["function"]["name"] for tool in self.tools or []) or "none"
            wanted = f"the function {name[:_SHOWN]!r}" if name else "a call"
            raise ApiError(400, f"tool_choice asks for {wanted}; tools in this request: {known}", param="tool_choice")


class TextRequest(Request):
    """`POST /v1/completions`."""

    NOTHING = {**Request.NOTHING, "echo": (False,), "suffix": ("",), "add_special_tokens": (True,)}

    prompt: str | _List[str] | _List[_Token] | _List[_List[_Token]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or _TEXT_TOKENS

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def lists_alternatives(self) -> bool:
        return bool(self.logprobs)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt):
            return [[part for part in self.prompt if isinstance(part, int)]] if self.prompt else []
        return [part for part in self.prompt if not isinstance(part, int)]

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.choices

    def check_supported(self, *, training: bool) -> None:
        super().check_supported(training=training)
        if not self.prompts or not all(self.prompts):
            raise ApiError(400, "the prompt is empty", param="prompt")


def _named_function(choice: Any) -> str:
    """The function that a `tool_choice` names; empty where it names none."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


Form = Literal["chat", "text"]
_FORMS: Mapping[Form, type[ChatRequest] | type[TextRequest]] = {"chat": ChatRequest, "text": TextRequest}


def parse(form: Form, body: Any, *, training: bool) -> ChatRequest | TextRequest:
    """Checks a request's body.

    Args:
        form: which of the two.
        body: as JSON gave it.
        training: fields that decide how tokens are drawn are ignored instead of refused.

    Raises:
        ApiError: 400, naming the first field that is wrong.
    """
    fields = _FORMS[form].model_fields
    given = body if isinstance(body, dict) else {}
    # An empty value asks for nothing, whatever its name.
    unknown = next((name for name, value in given.items() if name not in fields and value not in _EMPTY), None)
    if unknown is not None:
        unknown = unknown[:_SHOWN]
        message = f"unrecognized request argument supplied: {unknown}"
        raise ApiError(400, message, reason="unknown_parameter", param=unknown)
    try:
        request = _FORMS[form].model_validate(body)
    except pydantic.ValidationError as error:
        raise _as_api_error(error) from error
    request.check_supported(training=training)
    return request


def _as_api_error(error: pydantic.ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    # Alternatives of a union end the path with their type's name.
    path = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    param = ".".join(map(str, path))
    if first["type"] == "missing":
        message = f"missing required parameter: {param!r}"
        return ApiError(400, message, reason="missing_required_parameter", param=param)
    return ApiError(400, f"invalid {param or 'body'}: {first['msg']}", reason="invalid_value", param=param)


def _unsupported(name: str) -> ApiError:
    message = f"unsupported parameter: {name!r}: {server_fields.WHY.get(name, 'this endpoint has no such thing')}"
    return ApiError(400, message, reason="unsupported_parameter", param=name)
