"""Tools that agents may call: user functions and environments, with their schemas.

The learner shows the schemas to the model in every prompt; the generator runs the functions. Both load them here, so
that the model sees exactly the tools that can be called.

An environment comes in one of two forms. `step`: a class with `reset` and `step(action)`, to which everything the model
says is an action. `tools`: TRL's form, a class (or another callable that makes instances). Its public methods are
tools, apart from `reset`, `get_reward`, and a `close` without a docstring. A class is of the second form where it has
no method `step`, or one that is declared to return `str`, as tools do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.user_code import load_callable

if TYPE_CHECKING:
    from rollmesh.mesh.config.rollout import AgentSection

# Errors of hints that only a type checker can resolve.
_UNRESOLVED = (NameError, AttributeError, TypeError, SyntaxError)
_RESERVED = frozenset({"reset", "get_reward"})
EnvironmentForm = Literal["step", "tools"]
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: under which it is called.
        function: plain or async.
        schema: JSON schema, as chat templates take it.
    """

    name: str
    function: Callable[..., Any]
    schema: Schema


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """The source of the environments of episodes.

    Attributes:
        path: as configured.
        make: makes a fresh one.
        form: see the module.
        tool_names: methods that are tools; empty for the form `step`.
        schemas: of these.
    """

    path: str
    make: Callable[[], Any]
    form: EnvironmentForm
    tool_names: tuple[str, ...]
    schemas: tuple[Schema, ...]

    def tools(self, environment: Any) -> list[Tool]:
        """The tools of one instance."""
        return [
            Tool(name, getattr(environment, name), schema)
            for name, schema in zip(self.tool_names, self.schemas, strict=True)
        ]


def load_tools(paths: Sequence[str]) -> list[Tool]:
    """The functions of `rollout.agent.tools`.

    Raises:
        ConfigError: no such function, one without type hints or docstring, or two of one name.
    """
    tools = []
    for path in paths:
        function = load_callable(path, "tool", ConfigError)
        schema = _schema(function, path)
        tools.append(Tool(schema["function"]["name"], function, schema))
    _refuse_repeated([tool.name for tool in tools])
    return tools


def load_environment(path: str) -> EnvironmentSource:
    """The environment of `rollout.agent.environment`.

    Raises:
        ConfigError: no such class, or it has neither form.
    """
    make = load_callable(path, "environment", ConfigError)
    # The methods of a class are known without an instance, which may be dear.
    kind = make if inspect.isclass(make) else _kind_of(make, path)
    if not callable(getattr(kind, "reset", None)):
        raise ConfigError(f"environment {path} has no method `reset`", hint="see docs/agents.md for the two forms")
    if _has_step(kind):
        return EnvironmentSource(path, make, "step", (), ())
    names = tuple(name for name in _public_methods(kind) if name not in _RESERVED)
    if not names:
        raise ConfigError(
            f"environment {path} has neither `step` nor a public method that could be a tool",
            hint="see docs/agents.md for the two forms",
        )
    schemas = tuple(_schema(getattr(kind, name), f"{path}.{name}") for name in names)
    return EnvironmentSource(path, make, "tools", names, schemas)


def agent_schemas(agent: AgentSection) -> list[Schema]:
    """Schemas of all tools of a configuration, in the order in which they are shown.

    Raises:
        ConfigError: see `load_tools` and `load_environment`; or tools together with an environment that takes actions.
    """
    schemas = [tool.schema for tool in load_tools(agent.tools)]
    if agent.environment is not None:
        source = load_environment(agent.environment)
        if source.form == "step" and schemas:
            raise ConfigError(
                f"environment {agent.environment} takes everything the model says as an action: it cannot have tools",
                hint="remove rollout.agent.tools, or write the environment with its actions as methods",
            )
        schemas.extend(source.schemas)
    _refuse_repeated([schema["function"]["name"] for schema in schemas])
    return schemas


def _kind_of(make: Callable[[], Any], path: str) -> type:
    """The class of the objects that a function makes; the one made for that is closed again, unless only a coroutine
    could."""
    try:
        made = make()
        close = getattr(made, "close", None)
        is_tool = not _has_step(type(made)) and "close" in _public_methods(type(made))
        if callable(close) and not is_tool and not inspect.iscoroutinefunction(close):
            close()
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"environment {path}: making one raised {type(error).__name__}: {error}") from error
    return type(made)


def _has_step(kind: type) -> bool:
    step = getattr(kind, "step", None)
    if not callable(step):
        return False
    try:
        return get_type_hints(step).get("return") is not str
    except _UNRESOLVED:
        return inspect.signature(step).return_annotation not in (str, "str")


def _public_methods(kind: type) -> list[str]:
    """Public methods by name, as TRL shows them; `close` only if it has a docstring, as a tool needs it."""
    return [
        name
        for name in sorted(dir(kind))
        if not name.startswith("_")
        and inspect.isfunction(inspect.getattr_static(kind, name))
        and (name != "close" or getattr(kind, name).__doc__)
    ]


def _schema(function: Callable[..., Any], path: str) -> Schema:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema: Schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, *_UNRESOLVED) as error:
        raise ConfigError(
            f"tool {path}: {error}",
            hint="a tool needs a type hint and, under `Args:` of its docstring, a description of every argument",
        ) from error
    private = [name for name in schema["function"]["parameters"]["properties"] if name.startswith("_")]
    if private:
        raise ConfigError(f"tool {path}: argument {private[0]!r} starts with an underscore", hint="rename it")
    return schema


def _refuse_repeated(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two tools have the name {name!r}", hint="rename one in rollout.agent")
