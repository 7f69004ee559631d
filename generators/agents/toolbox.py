"""Calls of tools: arguments checked against type hints, results and failures as text.

Invariant: every call ends in an observation with its outcome.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NotRequired, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic takes no other below Python 3.12

from rollmesh.generators.agents.tool_calls import ToolCall, typed_arguments
from rollmesh.generators.agents.user_code_executor import OverdueError, UserCodeExecutor
from rollmesh.generators.agents.values import as_text, describe_error
from rollmesh.mesh.agent_tools import Tool
from rollmesh.mesh.errors import ConfigError

# Characters of an error that the model is shown.
_ERROR_LENGTH = 500


@dataclass(frozen=True, slots=True)
class Observation:
    """The outcome of one call.

    Attributes:
        text: as the model sees it, before it is cut to the limit of tokens.
        kind: `result`; `error`, also where the call could not be read; `timeout`.
        seconds: that the tool took.
    """

    text: str
    kind: str = "result"
    seconds: float = 0.0


class Toolbox:
    """The tools of one episode, or of all where they keep no state.

    Args:
        tools: by name, as shown.
        user_calls: runs them.
        timeout_s: of one call.

    Raises:
        ConfigError: a tool's type hints cannot be checked.
    """

    def __init__(self, tools: Sequence[Tool], user_calls: UserCodeExecutor, *, timeout_s: float) -> None:
        self._tools = {tool.name: (tool, _argument_validator(tool)) for tool in tools}
        self._user_calls = user_calls
        self._timeout_s = timeout_s

    @property
    def names(self) -> Collection[str]:
        """Names of the tools."""
        return self._tools.keys()

    async def run(self, call: ToolCall | str) -> Observation:
        """Runs one call; one that could not be read is answered with the reason."""
        if isinstance(call, str):
            return _error(f"the call cannot be read: {call}")
        if call.name not in self._tools:
            return _error(f"there is no tool {call.name!r}; there are: {', '.join(self._tools)}")
        tool, arguments = self._tools[call.name]
        try:
            values = arguments.validate_python(typed_arguments(call, tool.schema["function"]["parameters"]))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return _error(f"wrong arguments of {call.name!r}: {problems}")
        begin = time.perf_counter()
        try:
            result = await self._user_calls.call(partial(tool.function, **values), timeout_s=self._timeout_s)
        except OverdueError as error:
            return Observation(f"Error: {error}", "timeout", time.perf_counter() - begin)
        except Exception as error:  # noqa: BLE001 - the model sees any error of a tool as an observation
            return _error(describe_error(error), time.perf_counter() - begin)
        return Observation(as_text(result), seconds=time.perf_counter() - begin)


def _error(text: str, seconds: float = 0.0) -> Observation:
    return Observation(
        "Error: " + (text if len(text) <= _ERROR_LENGTH else text[:_ERROR_LENGTH] + " ..."), "error", seconds
    )


def _argument_validator(tool: Tool) -> TypeAdapter[dict[str, Any]]:
    """Checks a tool's arguments, and converts them to its type hints where that is clear (`"3"` for an int)."""
    hints, fields = get_type_hints(tool.function), {}
    for name, parameter in inspect.signature(tool.function).parameters.items():
        hint = hints.get(name, Any)
        fields[name] = hint if parameter.default is inspect.Parameter.empty else NotRequired[hint]
    kind = TypedDict("Arguments", fields)  # type: ignore[misc]  # its fields are known at run time alone
    strict: Any = with_config(ConfigDict(extra="forbid", arbitrary_types_allowed=True))(kind)
    try:
        return TypeAdapter(strict)
    except PydanticUserError as error:
        raise ConfigError(f"tool {tool.name}: its type hints cannot be checked: {error}") from error
