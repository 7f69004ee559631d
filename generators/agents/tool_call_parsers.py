"""The formats in which models write tool calls: pure functions from a turn's text to its content and calls.

Invariants: no text makes a parser raise, nor take longer than its length allows for. Text that only looks like a call
becomes an error that names the mistake. Text without a call is content, unchanged but for white space around it. A
model's thoughts are content and never a call. Text comes with special tokens, without the one that ended the turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from rollmesh.generators.agents.bare_calls import (
    LLAMA_OPENING,
    PYTHONIC_OPENING,
    PYTHONIC_TAGS,
    Names,
    llama3_json,
    pythonic,
)
from rollmesh.generators.agents.marked_calls import DEEP_ALL, OPEN, TOOL_CALLS, deepseek, hermes, mistral
from rollmesh.generators.agents.tool_calls import ParsedTurn
from rollmesh.generators.agents.turn_scanner import Reader, scan
from rollmesh.generators.agents.xml_calls import qwen3_coder
from rollmesh.mesh.chat.facts import TemplateFacts
from rollmesh.mesh.chat.probing import PROBED_CALL
from rollmesh.mesh.chat.thoughts import THOUGHT_MARKS
from rollmesh.mesh.config.rollout import ParserName
from rollmesh.mesh.errors import ConfigError


class Parser(Protocol):
    """Finds the calls in a turn."""

    def __call__(self, text: str, *, opened: bool = False, names: Names = None) -> ParsedTurn:
        """The content and the calls of a turn.

        Args:
            text: of the turn.
            opened: the prompt ended within thoughts that it had opened (`TemplateFacts.opened_thoughts`).
            names: of the tools, without which a form that looks like other text may take an answer for a call; None:
                not known.
        """
        ...


def _between_marks(opening: str, reader: Callable[[str], Reader]) -> Parser:
    pattern = re.compile(re.escape(opening))

    def parse(text: str, *, opened: bool = False, names: Names = None) -> ParsedTurn:
        del names  # the marks alone say what is a call
        return scan(text, opened, pattern, reader(text))

    return parse


def _llama3_json(text: str, *, opened: bool = False, names: Names = None) -> ParsedTurn:
    return scan(text, opened, LLAMA_OPENING, llama3_json(text, names))


def _pythonic(text: str, *, opened: bool = False, names: Names = None) -> ParsedTurn:
    parsed = scan(text, opened, PYTHONIC_OPENING, pythonic(text, names))
    return replace(parsed, content=PYTHONIC_TAGS.sub("", parsed.content).strip())


PARSERS: dict[ParserName, Parser] = {
    "hermes": _between_marks(OPEN, hermes),
    "llama3_json": _llama3_json,
    "mistral": _between_marks(TOOL_CALLS, mistral),
    "qwen3_coder": _between_marks(OPEN, qwen3_coder),
    "deepseek": _between_marks(DEEP_ALL, deepseek),
    "pythonic": _pythonic,
}
# Marks in a template that tells the form of calls in words alone, without one to read back; the most specific first.
# None: no parser reads that form (GLM, Seed-OSS, MiniMax), which has marks of others in it.
_TRACES: tuple[tuple[str, ParserName | None], ...] = (
    ("<arg_key>", None),
    ("<seed:tool_call>", None),
    ("<minimax:tool_call>", None),
    ("<function=", "qwen3_coder"),
    (TOOL_CALLS, "mistral"),
    ("tool▁call▁begin", "deepseek"),
    (OPEN, "hermes"),
    ("[func_name1(", "pythonic"),
    ('"parameters"', "llama3_json"),
)
_OTHER = "use a model whose template writes calls in another form, or an environment without tools"


def choose_parser(name: ParserName, template: str, facts: TemplateFacts | None = None) -> Parser:
    """The parser of a name; `auto`: the one that reads a call as the chat template writes it.

    Args:
        name: of the configuration.
        template: the chat template; if it writes no calls, its words about them tell the form.
        facts: about it.

    Raises:
        ConfigError: no parser reads its calls, or it does not tell their form.
    """
    if name != "auto":
        return PARSERS[name]
    if facts is not None and facts.call:
        reading = next((parse for parse in PARSERS.values() if _reads(parse, facts)), None)
        if reading is None:
            raise ConfigError(
                f"the chat template writes tool calls in a form that no parser reads: {facts.call!r}",
                hint=_OTHER,
            )
        return reading
    trace, found = next(((trace, known) for trace, known in _TRACES if trace in template), ("", None))
    if found is not None:
        return PARSERS[found]
    if trace:
        raise ConfigError(f"the chat template shows tool calls in a form that no parser reads: {trace}", hint=_OTHER)
    raise ConfigError(
        "the chat template does not show how the model writes tool calls",
        hint=f"set rollout.agent.parser to one of: {', '.join(PARSERS)}",
    )


def _reads(parse: Parser, facts: TemplateFacts) -> bool:
    """Whether a parser reads the probed call, and nothing else but thoughts."""
    name, arguments = PROBED_CALL
    parsed = parse(facts.call, names={name})
    content = parsed.content
    for opening, closing in THOUGHT_MARKS:
        content = content.replace(opening, "").replace(closing, "")
    return [(call.name, call.arguments) for call in parsed.valid] == [(name, arguments)] and not content.strip()
