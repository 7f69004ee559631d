"""Templates that installed packages bring: each trains what it is meant to, or is refused by name.

They are read where they are: TRL's and vLLM's files, and those within modules of transformers, vLLM and SGLang.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.templates.survey import survey, tokenizer_of
from rollmesh.generators.agents.tool_call_parsers import choose_parser
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.prompts import PromptEncoder
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.chat.probing import facts_of
from rollmesh.mesh.chat.template import ChatTemplate
from rollmesh.mesh.errors import ConfigError, RollmeshError

REPOSITORY = Path(__file__).parents[3]
FILES = ("trl/chat_templates/**/*.jinja", "vllm/transformers_utils/chat_templates/**/*.jinja")
MODULES = (
    "transformers/models/*/processing_*.py",
    "vllm/transformers_utils/processors/*.py",
    "sglang/srt/tokenizer/*.py",
)
TOOL = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}}, "required": ["city"]}}  # fmt: skip
ARGUMENTS = {"city": 'Paris, "in" {France}'}


def installed() -> Iterator[tuple[str, str]]:
    """Names and sources, each source once."""
    known = set()
    for site in sorted(REPOSITORY.glob(".venv*/lib/python3*/site-packages")):
        for name, source in _within(site):
            if source not in known:
                known.add(source)
                yield name, source


def _within(site: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(path for pattern in FILES for path in site.glob(pattern)):
        yield f"{path.relative_to(site).parts[0]}:{path.stem}", path.read_text(encoding="utf-8")
    for path in sorted(path for pattern in MODULES for path in site.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        if "{%" not in text or "messages" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            source = node.value if isinstance(node, ast.Constant) else None
            if isinstance(source, str) and "{%" in source and "in messages" in source:
                yield f"{path.relative_to(site).parts[0]}:{path.stem}:{node.lineno}", source


TEMPLATES = dict(installed())
each = pytest.mark.parametrize(
    "name", TEMPLATES or [pytest.param("", marks=pytest.mark.skip("no installed package brings templates"))]
)


@each
def test_it_trains_what_is_meant_or_is_refused_by_name(name: str) -> None:
    found = survey(name, TEMPLATES[name])
    # One that writes no conversation says why once.
    outcomes = (found.sft,) if found.facts is None else (found.sft, found.dpo, found.run)
    for outcome in outcomes:
        assert outcome.removeprefix("the last turn: ").startswith(("trains", "refused: the chat template"))
    assert found.run == "trains" or found.facts is None


@each
def test_a_call_that_it_writes_is_read_back_by_the_parser_that_auto_takes(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name])
    tools, call = [{"type": "function", "function": TOOL}], {"name": "weather", "arguments": ARGUMENTS}
    question = {"role": "user", "content": "How is it there?"}
    made = {"id": "abcdef012", "type": "function", "function": call}
    turn = {"role": "assistant", "content": "", "tool_calls": [made], "reasoning_content": "Look."}
    encoder = ChatEncoder(tokenizer)
    try:
        tokens = encoder.encode([question, turn], [1], tools)
    except RollmeshError as error:
        assert error.hint
        return
    facts = facts_of(ChatTemplate.of(tokenizer, tools=True))
    try:
        parser = choose_parser("auto", TEMPLATES[name], facts)
    except ConfigError as error:
        assert "no parser reads" in error.message
        return
    said = tokenizer.decode(tokens.ids[tokens.trained])
    end = next(token for token in facts.end.tokens if said.rstrip().endswith(token))
    parsed = parser(said.rstrip().removesuffix(end), opened=bool(facts.opened_thoughts), names={"weather"})
    assert [(read.name, read.arguments) for read in parsed.valid] == [("weather", ARGUMENTS)]
    prompts = PromptEncoder(tokenizer, max_prompt_tokens=9999, template_kwargs={})
    shown = tokenizer.decode(prompts.ids(Row([question], "", None, {}, tools=tools)))
    assert shown.count("How is it there?") == 1
    assert "weather" in shown
